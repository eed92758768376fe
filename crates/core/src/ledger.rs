//! The ledger stores all holdings, and finds holdings by interval, by holder and by id. A holding is a range that is
//! not free, with its holder.
//!
//! Holdings may overlap, because a cluster may already contain duplicate ranges, and an invalid object must not hide a
//! valid one. An address is free only if no holding covers it; the state of the holding does not matter. Only
//! [`RangeLedger::carve`](super::RangeLedger::carve) and [`RangeLedger::take`](super::RangeLedger::take) allocate, and
//! they never allocate a range that overlaps a holding.
//!
//! Two CIDRs are disjoint, or one contains the other. The *space* of a family (`space.rs`, a trie) stores only the
//! outermost holdings, which are disjoint. Holdings inside or equal to an outermost holding are *nested*. They are
//! stored in a separate sorted set, which is empty as long as no holdings overlap.
//!
//! The caller decides which state a holding has. The ledger is not persistent; the caller rebuilds it from the API
//! objects.

use std::collections::BTreeSet;
use std::iter;

use super::cidr::{Addr, Cidr};
use super::dual::Dual;
use super::holdings::{Holder, Holding, HoldingId, HoldingState, Holdings};
use super::space::Space;

/// All holdings of both families. The ledger exists only in memory, and the caller rebuilds it from the API objects.
#[derive(Clone, Debug, Default)]
pub struct RangeLedger {
    pub(super) holdings: Holdings,
    pub(super) spaces: Dual<Space>,
    /// The holdings inside or equal to an outermost one, each with its number.
    nested: BTreeSet<(Cidr, u32)>,
}

impl RangeLedger {
    /// Records a holding, even if it overlaps others or lies in no pool. If a holding is recorded twice, there are two
    /// equal holdings.
    pub fn record(&mut self, holder: Holder, cidr: Cidr, state: HoldingState) -> HoldingId {
        let id = self.holdings.insert(Holding {
            holder,
            cidr,
            state,
        });
        let mut outer = self.outermost(cidr).peekable();
        if outer
            .peek()
            .is_some_and(|(_, holding)| holding.cidr.contains(&cidr))
        {
            drop(outer);
            self.nested.insert((cidr, id.number()));
            return id;
        }
        // No outermost holding contains the new holding. So all outermost holdings that overlap the new holding lie
        // inside it, and become nested.
        let inside: Vec<_> = outer
            .map(|(inside, holding)| (holding.cidr, inside.number()))
            .collect();
        for (cidr, number) in inside {
            self.uncover(cidr);
            self.nested.insert((cidr, number));
        }
        self.cover(cidr, id);
        id
    }

    /// Changes the state of a holding; `false` if the holding no longer exists.
    pub fn set_state(&mut self, id: HoldingId, state: HoldingState) -> bool {
        self.holdings.set_state(id, state)
    }

    /// Moves a holding to another holder; `false` if the holding no longer exists.
    pub fn set_holder(&mut self, id: HoldingId, holder: Holder) -> bool {
        self.holdings.set_holder(id, holder)
    }

    /// Removes a holding and returns it; `None` if it no longer exists. Addresses that another holding covers, too, do
    /// not become free.
    pub fn release(&mut self, id: HoldingId) -> Option<Holding> {
        let holding = self.holdings.remove(id)?;
        let was_nested =
            !self.nested.is_empty() && self.nested.remove(&(holding.cidr, id.number()));
        if !was_nested {
            self.uncover(holding.cidr);
            self.surface(holding.cidr);
        }
        Some(holding)
    }

    /// Returns the holding with this id; `None` if it was released.
    pub fn get(&self, id: HoldingId) -> Option<Holding> {
        self.holdings.get(id)
    }

    /// Returns all holdings of a holder, in no particular order.
    pub fn of(&self, holder: Holder) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        self.holdings.of(holder)
    }

    /// Returns the holdings that overlap `cidr`, sorted by CIDR. Each holding is returned only once.
    pub fn overlapping(&self, cidr: &Cidr) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        let cidr = *cidr;
        self.outermost(cidr).flat_map(move |outer| {
            let nested = (!self.nested.is_empty()).then(|| self.nested_in(outer.1.cidr, cidr));
            iter::once(outer).chain(nested.into_iter().flatten())
        })
    }

    /// Returns the holdings that cover `addr`, the widest first. Each holding is returned only once.
    pub fn at(&self, addr: Addr) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        self.overlapping(&Cidr::host(addr))
    }

    /// The number of holdings, nested ones included.
    pub fn len(&self) -> usize {
        self.holdings.len()
    }

    /// Whether [`Self::len`] is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of the allocated heap memory in bytes. For nested holdings the size is only estimated: their
    /// tree is assumed to be two thirds full.
    pub fn heap_bytes(&self) -> usize {
        let nested = self.nested.len() * size_of::<(Cidr, u32)>() * 3 / 2;
        let spaces: usize = self.spaces.iter().map(|(_, it)| it.heap_bytes()).sum();
        self.holdings.heap_bytes() + spaces + nested
    }

    pub(super) fn cover(&mut self, cidr: Cidr, id: HoldingId) {
        let space = self.spaces.get_mut(cidr.family());
        space.cover(cidr.first().value, cidr.order(), id.number());
    }

    fn uncover(&mut self, cidr: Cidr) {
        self.spaces
            .get_mut(cidr.family())
            .free(cidr.first().value, cidr.order());
    }

    /// Returns the outermost holdings that overlap `cidr`, in ascending order. Either all of them lie inside `cidr`, or
    /// there is exactly one, which contains `cidr`.
    fn outermost(&self, cidr: Cidr) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        let space = self.spaces.get(cidr.family());
        let mut from = Some(cidr.first().value);
        iter::from_fn(move || {
            let (id, holding) = self
                .holdings
                .numbered(space.next(from?, cidr.last().value)?);
            let last = holding.cidr.last();
            from = last.value.checked_add(1).filter(|_| last < cidr.last());
            holding.cidr.overlaps(&cidr).then_some((id, holding))
        })
    }

    /// Returns the holdings that are nested in the outermost holding `outer` and overlap `cidr`: first those that
    /// contain `cidr`, then those equal to `cidr` or inside it. The containing holdings are looked up by prefix length,
    /// because a walk through all nested holdings would be slow if somebody recorded a holding on a whole family by
    /// mistake.
    fn nested_in(
        &self,
        outer: Cidr,
        cidr: Cidr,
    ) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        let around = (outer.len()..cidr.len())
            .filter_map(move |len| Cidr::new(cidr.first(), len))
            .flat_map(|wide| self.nested.range((wide, 0)..=(wide, u32::MAX)));
        let top = if outer.contains(&cidr) { cidr } else { outer };
        let inside = self
            .nested
            .range((top, 0)..)
            .take_while(move |(inner, _)| top.contains(inner));
        around
            .chain(inside)
            .map(|&(_, number)| self.holdings.numbered(number))
    }

    /// Handles the release of the outermost holding `released`, by moving the nested holdings that are now outermost
    /// into the space.
    fn surface(&mut self, released: Cidr) {
        let mut from = (released, 0);
        while let Some(&(cidr, number)) = self.nested.range(from..).next() {
            if !released.contains(&cidr) {
                return;
            }
            self.nested.remove(&(cidr, number));
            let (id, _) = self.holdings.numbered(number);
            self.cover(cidr, id);
            // Holdings inside `cidr` stay nested. So the walk continues after the last address of `cidr`.
            let Some(after) = Cidr::new(cidr.last(), cidr.family().bits()) else {
                return;
            };
            from = (after, u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::cidr;
    use super::*;

    fn ledger(texts: &[&str]) -> (RangeLedger, Vec<HoldingId>) {
        let mut ledger = RangeLedger::default();
        let record = |(holder, text): (u32, &&str)| {
            ledger.record(Holder(holder), cidr(text), HoldingState::Allocated)
        };
        let ids = (0..).zip(texts).map(record).collect();
        (ledger, ids)
    }

    fn overlapping(ledger: &RangeLedger, text: &str) -> Vec<String> {
        ledger
            .overlapping(&cidr(text))
            .map(|(_, holding)| holding.cidr.to_string())
            .collect()
    }

    fn covered(ledger: &RangeLedger, address: &str) -> usize {
        ledger.at(Addr::parse_strict(address).unwrap()).count()
    }

    #[test]
    fn every_overlapping_holding_is_found_once_sorted_by_cidr() {
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
    fn addresses_of_another_holding_stay_covered_after_a_release() {
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
    fn a_holding_that_covers_others_is_recorded_beside_them() {
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
    fn a_holding_is_released_once() {
        let (mut ledger, ids) = ledger(&["fd00::/64"]);
        assert!(
            ledger.set_state(ids[0], HoldingState::Quarantined)
                && ledger.set_holder(ids[0], Holder(5))
        );
        let holding = Holding {
            holder: Holder(5),
            cidr: cidr("fd00::/64"),
            state: HoldingState::Quarantined,
        };
        assert_eq!(
            ledger.of(Holder(5)).collect::<Vec<_>>(),
            [(ids[0], holding)]
        );
        assert_eq!(
            (ledger.release(ids[0]), ledger.release(ids[0])),
            (Some(holding), None)
        );
        assert!(!ledger.set_state(ids[0], HoldingState::Allocated) && ledger.get(ids[0]).is_none());
    }

    #[test]
    fn a_holding_on_everything_nests_all_others() {
        let (mut ledger, ids) = ledger(&["0.0.0.0/0", "10.0.1.0/24", "0.0.0.0/0"]);
        assert_eq!(covered(&ledger, "10.0.1.1"), 3);
        assert!(ledger.release(ids[0]).is_some() && ledger.release(ids[2]).is_some());
        assert_eq!(
            (covered(&ledger, "10.0.1.1"), covered(&ledger, "10.0.2.1")),
            (1, 0)
        );
    }
}
