//! The ledger: every claim on an address range, by interval, by holder and by id.
//!
//! The ledger records what exists, even where claims overlap: a cluster may already contain duplicates, and a
//! bad object must not hide a good one. An address is free only if no claim covers it, whatever the state of
//! the claim. Only [`ClaimLedger::carve`](super::ClaimLedger::carve) allocates, and never a range that overlaps a claim.
//!
//! Two CIDRs are disjoint, or one contains the other. So the space of a family only stores the outermost claims,
//! which are disjoint. Claims inside or equal to an outermost claim are *nested*. They are kept in a separate sorted
//! set, which is empty and costs nothing as long as no claims overlap.
//!
//! The ledger does not interpret the states of claims: what the outcome of a write means for a claim is decided by the
//! caller. The ledger is not persistent either: it is rebuilt from the API objects.

use std::collections::BTreeSet;
use std::iter;

use super::cidr::{Addr, Cidr};
use super::claims::{Claim, ClaimId, ClaimState, Claims, Holder};
use super::dual::Dual;
use super::space::Space;

/// All claims of both families. The comment of the module describes the guarantees.
#[derive(Debug, Default)]
pub struct ClaimLedger {
    pub(super) claims: Claims,
    pub(super) spaces: Dual<Space>,
    /// The claims inside or equal to an outermost one, with their numbers.
    nested: BTreeSet<(Cidr, u32)>,
}

impl ClaimLedger {
    /// Records a claim, even if it overlaps others or lies in no pool. Recording the same claim twice makes two
    /// claims.
    pub fn record(&mut self, holder: Holder, cidr: Cidr, state: ClaimState) -> ClaimId {
        let id = self.claims.insert(Claim {
            holder,
            cidr,
            state,
        });
        let mut outer = self.outermost(cidr).peekable();
        if outer
            .peek()
            .is_some_and(|(_, claim)| claim.cidr.contains(&cidr))
        {
            drop(outer);
            self.nested.insert((cidr, id.number()));
            return id;
        }
        // The remaining outermost claims lie inside the new claim, so they become nested.
        let inside: Vec<_> = outer
            .map(|(inside, claim)| (claim.cidr, inside.number()))
            .collect();
        for (cidr, number) in inside {
            self.uncover(cidr);
            self.nested.insert((cidr, number));
        }
        self.cover(cidr, id);
        id
    }

    /// Changes the state of a claim; `false` if the claim no longer exists.
    pub fn set_state(&mut self, id: ClaimId, state: ClaimState) -> bool {
        self.claims.set_state(id, state)
    }

    /// Moves a claim to another holder; `false` if the claim no longer exists.
    pub fn set_holder(&mut self, id: ClaimId, holder: Holder) -> bool {
        self.claims.set_holder(id, holder)
    }

    /// Removes a claim and returns it; `None` if it no longer exists. Addresses that another claim also covers do
    /// not become free.
    pub fn release(&mut self, id: ClaimId) -> Option<Claim> {
        let claim = self.claims.remove(id)?;
        let was_nested = !self.nested.is_empty() && self.nested.remove(&(claim.cidr, id.number()));
        if !was_nested {
            self.uncover(claim.cidr);
            self.surface(claim.cidr);
        }
        Some(claim)
    }

    /// Looks a claim up; `None` once it has been released.
    pub fn get(&self, id: ClaimId) -> Option<Claim> {
        self.claims.get(id)
    }

    /// All claims of a holder, in no particular order.
    pub fn of(&self, holder: Holder) -> impl Iterator<Item = (ClaimId, Claim)> + use<'_> {
        self.claims.of(holder)
    }

    /// Returns every claim that overlaps `cidr` exactly once, sorted by CIDR.
    pub fn overlapping(&self, cidr: &Cidr) -> impl Iterator<Item = (ClaimId, Claim)> + use<'_> {
        let cidr = *cidr;
        self.outermost(cidr).flat_map(move |outer| {
            let nested = (!self.nested.is_empty()).then(|| self.nested_in(outer.1.cidr, cidr));
            iter::once(outer).chain(nested.into_iter().flatten())
        })
    }

    /// Returns every claim that covers an address exactly once, the widest first.
    pub fn at(&self, addr: Addr) -> impl Iterator<Item = (ClaimId, Claim)> + use<'_> {
        self.overlapping(&Cidr::host(addr))
    }

    /// The number of claims, nested ones included.
    pub fn len(&self) -> usize {
        self.claims.len()
    }

    /// Whether there are no claims.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The heap memory in bytes, by capacity. The part for nested claims is an estimate: a tree two thirds full.
    pub fn heap_bytes(&self) -> usize {
        let nested = self.nested.len() * size_of::<(Cidr, u32)>() * 3 / 2;
        let spaces: usize = self
            .spaces
            .iter()
            .map(|(_, space)| space.heap_bytes())
            .sum();
        self.claims.heap_bytes() + spaces + nested
    }

    pub(super) fn cover(&mut self, cidr: Cidr, id: ClaimId) {
        let space = self.spaces.get_mut(cidr.family());
        space.cover(cidr.first().value, cidr.order(), id.number());
    }

    fn uncover(&mut self, cidr: Cidr) {
        self.spaces
            .get_mut(cidr.family())
            .free(cidr.first().value, cidr.order());
    }

    /// The outermost claims that overlap `cidr`, in ascending order. Either all of them lie inside `cidr`, or there
    /// is exactly one, and that one contains `cidr`.
    fn outermost(&self, cidr: Cidr) -> impl Iterator<Item = (ClaimId, Claim)> + use<'_> {
        let space = self.spaces.get(cidr.family());
        let mut from = Some(cidr.first().value);
        iter::from_fn(move || {
            let (id, claim) = self.claims.numbered(space.next(from?, cidr.last().value)?);
            let last = claim.cidr.last();
            from = last.value.checked_add(1).filter(|_| last < cidr.last());
            claim.cidr.overlaps(&cidr).then_some((id, claim))
        })
    }

    /// The claims nested in the outermost claim `outer` that overlap `cidr`: first those that contain `cidr`,
    /// then those equal to `cidr` or inside it. The containing claims are looked up by prefix length instead of
    /// being walked: otherwise one mistaken claim on a whole family would make every lookup walk the whole ledger.
    fn nested_in(
        &self,
        outer: Cidr,
        cidr: Cidr,
    ) -> impl Iterator<Item = (ClaimId, Claim)> + use<'_> {
        let around = (outer.len()..cidr.len()).flat_map(move |len| {
            let wide = cidr.widened(len);
            self.nested.range((wide, 0)..=(wide, u32::MAX))
        });
        let top = if outer.contains(&cidr) { cidr } else { outer };
        let inside = self
            .nested
            .range((top, 0)..)
            .take_while(move |(inner, _)| top.contains(inner));
        around
            .chain(inside)
            .map(|&(_, number)| self.claims.numbered(number))
    }

    /// Handles the release of the outermost claim `ended`: moves the claims that are outermost now from the nested
    /// set into the space.
    fn surface(&mut self, ended: Cidr) {
        let mut from = (ended, 0);
        while let Some(&(cidr, number)) = self.nested.range(from..).next() {
            if !ended.contains(&cidr) {
                return;
            }
            self.nested.remove(&(cidr, number));
            let (id, _) = self.claims.numbered(number);
            self.cover(cidr, id);
            // Claims inside this one stay nested, so the walk continues behind its last address.
            let Some(after) = Cidr::new(cidr.last(), cidr.family().bits()) else {
                return;
            };
            from = (after, u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    fn ledger(texts: &[&str]) -> (ClaimLedger, Vec<ClaimId>) {
        let mut ledger = ClaimLedger::default();
        let record = |(holder, text): (u32, &&str)| {
            ledger.record(Holder(holder), cidr(text), ClaimState::Allocated)
        };
        let ids = (0..).zip(texts).map(record).collect();
        (ledger, ids)
    }

    fn overlapping(ledger: &ClaimLedger, text: &str) -> Vec<String> {
        ledger
            .overlapping(&cidr(text))
            .map(|(_, claim)| claim.cidr.to_string())
            .collect()
    }

    fn covered(ledger: &ClaimLedger, address: &str) -> usize {
        ledger.at(Addr::parse_strict(address).unwrap()).count()
    }

    #[test]
    fn every_overlapping_claim_is_found_once_sorted_by_cidr() {
        let (ledger, _) = ledger(&[
            "10.0.1.0/24",
            "10.0.0.0/16",
            "10.0.1.0/24",
            "10.0.1.128/25",
            "10.0.9.0/24",
            "11.0.0.0/8",
        ]);
        assert_eq!(
            overlapping(&ledger, "10.0.1.128/26"),
            ["10.0.0.0/16", "10.0.1.0/24", "10.0.1.0/24", "10.0.1.128/25"]
        );
        assert_eq!(
            overlapping(&ledger, "10.0.9.0/24"),
            ["10.0.0.0/16", "10.0.9.0/24"]
        );
        assert_eq!(overlapping(&ledger, "0.0.0.0/0").len(), 6);
        assert_eq!(overlapping(&ledger, "10.1.0.0/16"), [""; 0]);
        assert_eq!(overlapping(&ledger, "::/0"), [""; 0]);
        assert_eq!(
            (
                covered(&ledger, "10.0.1.1"),
                covered(&ledger, "10.0.1.200"),
                covered(&ledger, "10.1.0.0")
            ),
            (3, 4, 0)
        );
    }

    #[test]
    fn what_another_claim_covers_stays_taken_after_a_release() {
        let (mut ledger, ids) = ledger(&[
            "10.0.0.0/16",
            "10.0.1.0/24",
            "10.0.1.0/24",
            "10.0.1.0/28",
            "10.0.2.0/25",
        ]);
        assert!(ledger.release(ids[0]).is_some());
        assert_eq!(
            (
                covered(&ledger, "10.0.1.1"),
                covered(&ledger, "10.0.2.1"),
                covered(&ledger, "10.0.3.1")
            ),
            (3, 1, 0)
        );
        assert!(ledger.release(ids[1]).is_some());
        assert_eq!(covered(&ledger, "10.0.1.1"), 2);
        assert!(ledger.release(ids[2]).is_some());
        assert_eq!(
            (covered(&ledger, "10.0.1.1"), covered(&ledger, "10.0.1.16")),
            (1, 0)
        );
        assert!(ledger.release(ids[3]).is_some() && ledger.release(ids[4]).is_some());
        assert!(ledger.is_empty() && ledger.nested.is_empty());
    }

    #[test]
    fn a_claim_over_others_keeps_them() {
        let (mut ledger, ids) = ledger(&["10.0.1.0/24", "10.0.7.0/27", "10.0.0.0/20"]);
        assert_eq!(
            overlapping(&ledger, "10.0.0.0/8"),
            ["10.0.0.0/20", "10.0.1.0/24", "10.0.7.0/27"]
        );
        assert_eq!(ledger.release(ids[0]).unwrap().holder, Holder(0));
        assert_eq!(
            overlapping(&ledger, "10.0.0.0/8"),
            ["10.0.0.0/20", "10.0.7.0/27"]
        );
    }

    #[test]
    fn a_claim_ends_once() {
        let (mut ledger, ids) = ledger(&["fd00::/64"]);
        assert!(
            ledger.set_state(ids[0], ClaimState::Quarantined)
                && ledger.set_holder(ids[0], Holder(5))
        );
        let claim = Claim {
            holder: Holder(5),
            cidr: cidr("fd00::/64"),
            state: ClaimState::Quarantined,
        };
        assert_eq!(ledger.of(Holder(5)).collect::<Vec<_>>(), [(ids[0], claim)]);
        assert_eq!(
            (ledger.release(ids[0]), ledger.release(ids[0])),
            (Some(claim), None)
        );
        assert!(!ledger.set_state(ids[0], ClaimState::Allocated) && ledger.get(ids[0]).is_none());
    }

    #[test]
    fn a_claim_on_everything_nests_all_others() {
        let (mut ledger, ids) = ledger(&["0.0.0.0/0", "10.0.1.0/24", "0.0.0.0/0"]);
        assert_eq!(covered(&ledger, "10.0.1.1"), 3);
        assert!(ledger.release(ids[0]).is_some() && ledger.release(ids[2]).is_some());
        assert_eq!(
            (covered(&ledger, "10.0.1.1"), covered(&ledger, "10.0.2.1")),
            (1, 0)
        );
    }
}
