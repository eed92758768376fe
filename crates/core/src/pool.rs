//! Pools: which blocks may be allocated, and where the next search starts.
//!
//! Holdings are stored in the ledger and not in the pool. So a pool can be extended, shrunk and given another block
//! length at any time, and one ledger records the holdings of many pools.
//!
//! **The search goes downward (next fit).** The first search in a pool starts at its highest address. Each further
//! search starts just below the block that was allocated last, and wraps around at the bottom. So a freed block is
//! reused as late as possible. Other allocators (kube-controller-manager, host-local) start with the lowest addresses.
//! If another allocator runs at the same time by mistake, its ranges and those of Cadastre collide as late as possible.
//! Each family has its own cursor.
//!
//! **Blocked spans** are addresses that must not be allocated: reserved addresses, service ranges, addresses of nodes.
//! The pool stores the blocked spans, and the ledger does not. So blocked spans may overlap holdings and each other.
//! From the CIDRs and the blocked spans the pool computes its *openings*, the runs of consecutive blocks that may be
//! allocated.
//!
//! **Kept ranges** are ranges that only certain holders may get. A search leaves them out like blocked spans, and so do
//! the counts of blocks. [`RangeLedger::take`](super::RangeLedger::take) records a kept range for its holder.

use super::cidr::{Addr, Cidr, Family};
use super::dual::Dual;
use super::family_pool::{FamilyPool, FamilyRanges, ReservedEffect};
use super::ip_range::IpRange;

/// One pool: ranges of one or both families, with blocked spans excluded.
#[derive(Clone, Debug)]
pub struct Pool {
    parts: Dual<Option<FamilyPool>>,
    /// The blocked spans of each family, sorted and disjoint
    blocked: Dual<Vec<IpRange>>,
    /// The kept ranges of each family, sorted and disjoint
    kept: Dual<Vec<IpRange>>,
    closing: ReservedEffect,
}

impl Pool {
    /// Makes a pool of `ranges` without blocked spans. The first search starts at the highest address.
    pub fn new(ranges: Dual<Option<FamilyRanges>>) -> Self {
        let mut pool = Self {
            parts: Dual::default(),
            blocked: Dual::default(),
            kept: Dual::default(),
            closing: ReservedEffect::default(),
        };
        pool.set_ranges(ranges);
        pool
    }

    /// Sets whether a blocked span excludes every block that it overlaps, or only blocks that it covers entirely.
    pub fn set_reserved_effect(&mut self, closing: ReservedEffect) {
        if self.closing != closing {
            self.closing = closing;
            self.open();
        }
    }

    /// Returns a copy with other block lengths, for example to find smaller blocks when the space is fragmented. A
    /// family with `None` in `lens` keeps its block length.
    #[must_use]
    pub fn refitted(&self, lens: Dual<Option<u8>>) -> Self {
        let mut pool = self.clone();
        for family in Family::ALL {
            if let (Some(part), Some(len)) = (pool.parts.get_mut(family), lens.get(family)) {
                part.block_len = *len;
            }
        }
        pool.open();
        pool
    }

    /// Replaces the blocked spans. The spans may be unsorted, overlap each other, and lie outside the pool.
    pub fn set_blocked(&mut self, spans: Vec<IpRange>) {
        self.blocked = merged(spans);
        self.open();
    }

    /// Replaces the kept ranges. The ranges may be unsorted, overlap each other, and lie outside the pool.
    pub fn set_kept(&mut self, ranges: Vec<IpRange>) {
        self.kept = merged(ranges);
        self.open();
    }

    /// Replaces the ranges. The cursor of a family is kept if it still lies in the pool; otherwise it moves to the
    /// highest address. Holdings are neither checked nor changed.
    pub fn set_ranges(&mut self, mut ranges: Dual<Option<FamilyRanges>>) {
        for family in Family::ALL {
            let part = self.parts.get_mut(family);
            let cursor = part.as_ref().map(|part| part.cursor);
            let ranges = ranges.get_mut(family).take();
            *part = ranges.map(|ranges| FamilyPool::new(family, ranges, cursor));
        }
        self.open();
    }

    /// Returns the families in which the pool has ranges, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Family> + use<> {
        let present = self.parts.as_ref().map(Option::is_some);
        Family::ALL
            .into_iter()
            .filter(move |&family| *present.get(family))
    }

    /// Returns the prefix length of the blocks that are allocated now; `None` if the pool has no ranges of the family.
    pub fn block_len(&self, family: Family) -> Option<u8> {
        Some(self.part(family)?.block_len)
    }

    /// Returns the pool's CIDRs of a family, sorted and disjoint.
    pub fn cidrs(&self, family: Family) -> &[Cidr] {
        self.part(family).map_or(&[], |part| &part.cidrs)
    }

    /// Whether `cidr` lies entirely inside one of the pool's CIDRs.
    pub fn covers(&self, cidr: &Cidr) -> bool {
        self.below(cidr.first())
            .is_some_and(|own| own.contains(cidr))
    }

    /// Whether `cidr` overlaps one of the pool's CIDRs.
    pub fn touches(&self, cidr: &Cidr) -> bool {
        self.below(cidr.last())
            .is_some_and(|own| own.overlaps(cidr))
    }

    /// Whether `cidr` overlaps a blocked span.
    pub fn is_blocked(&self, cidr: &Cidr) -> bool {
        overlaps_any(self.blocked.get(cidr.family()), cidr)
    }

    /// Whether `cidr` overlaps a kept range.
    pub fn is_kept(&self, cidr: &Cidr) -> bool {
        overlaps_any(self.kept.get(cidr.family()), cidr)
    }

    pub(super) fn part(&self, family: Family) -> Option<&FamilyPool> {
        self.parts.get(family).as_ref()
    }

    /// Moves the cursor to the highest address below `block`, which has been allocated.
    pub(super) fn pass(&mut self, block: &Cidr) {
        if let Some(part) = self.parts.get_mut(block.family()) {
            part.pass(block);
        }
    }

    /// Returns the highest CIDR of the pool that begins at or below the address.
    fn below(&self, addr: Addr) -> Option<&Cidr> {
        self.part(addr.family)?.below(addr.value)
    }

    fn open(&mut self) {
        for family in Family::ALL {
            if let Some(part) = self.parts.get_mut(family) {
                let (blocked, kept) = (self.blocked.get(family), self.kept.get(family));
                if kept.is_empty() {
                    part.open(blocked, self.closing);
                } else {
                    let all = IpRange::merged([blocked.as_slice(), kept].concat());
                    part.open(&all, self.closing);
                }
            }
        }
    }
}

/// Returns the spans of each family, sorted and disjoint.
fn merged(spans: Vec<IpRange>) -> Dual<Vec<IpRange>> {
    let mut by_family = Dual::<Vec<IpRange>>::default();
    for span in spans {
        by_family.get_mut(span.family()).push(span);
    }
    by_family.map(IpRange::merged)
}

/// Returns whether `cidr` overlaps one of the spans, which must be sorted and disjoint.
fn overlaps_any(spans: &[IpRange], cidr: &Cidr) -> bool {
    let at = spans.partition_point(|span| span.last() < cidr.first());
    spans.get(at).is_some_and(|span| span.overlaps(cidr))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{cidr, ranges, spans};
    use super::*;

    fn openings(pool: &Pool) -> Vec<String> {
        let addr = |value| Addr {
            family: Family::V4,
            value,
        };
        let openings = pool.part(Family::V4).unwrap().openings.iter();
        openings
            .map(|(first, last)| format!("{}..{}", addr(*first), addr(*last)))
            .collect()
    }

    #[test]
    fn a_blocked_address_closes_its_whole_block() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 24));
        pool.set_blocked(spans(&["10.0.1.7", "fd00::/8", "10.9.0.0/16"]));
        for (range, is) in [
            ("10.0.0.0/23", true),
            ("10.0.1.6/32", false),
            ("10.0.1.7/32", true),
            ("10.9.9.0/24", true),
        ] {
            assert_eq!(pool.is_blocked(&cidr(range)), is, "{range}");
        }
        assert_eq!(
            openings(&pool),
            ["10.0.0.0..10.0.0.0", "10.0.2.0..10.0.3.0"]
        );
        assert_eq!(pool.part(Family::V4).unwrap().capacity(8), 3);
    }

    #[test]
    fn blocked_spans_may_overlap_and_lie_across_the_ends() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 25));
        pool.set_blocked(spans(&[
            "10.0.1.0-10.0.1.200",
            "9.0.0.0-10.0.0.3",
            "10.0.1.4-10.0.2.0",
            "10.0.3.255-11.0.0.0",
        ]));
        assert_eq!(
            openings(&pool),
            ["10.0.0.128..10.0.0.128", "10.0.2.128..10.0.3.0"]
        );
        pool.set_blocked(spans(&["0.0.0.0-255.255.255.255"]));
        assert!(openings(&pool).is_empty());
        pool.set_blocked(Vec::new());
        assert_eq!(openings(&pool), ["10.0.0.0..10.0.3.128"]);
    }

    #[test]
    fn kept_ranges_are_closed_like_blocked_spans_but_are_not_blocked() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 24));
        pool.set_blocked(spans(&["10.0.0.1"]));
        pool.set_kept(spans(&["10.0.2.0/25", "10.0.2.64/26", "10.9.0.0/16"]));
        assert_eq!(
            openings(&pool),
            ["10.0.1.0..10.0.1.0", "10.0.3.0..10.0.3.0"]
        );
        for (range, is_blocked, is_kept) in [
            ("10.0.0.0/24", true, false),
            ("10.0.2.0/24", false, true),
            ("10.0.2.128/25", false, false),
        ] {
            let range = cidr(range);
            let is = (pool.is_blocked(&range), pool.is_kept(&range));
            assert_eq!(is, (is_blocked, is_kept), "{range}");
        }
        pool.set_kept(Vec::new());
        assert_eq!(openings(&pool), ["10.0.1.0..10.0.3.0"]);
    }

    #[test]
    fn a_pool_without_room_for_a_block_has_no_openings() {
        let of_other_family = Dual {
            v4: ranges(&["fd00::/64"], 24).v6,
            v6: None,
        };
        let too_small = ranges(&["10.0.0.0/26"], 24);
        let no_such_length = ranges(&["10.0.0.0/26"], 33);
        for ranges in [too_small, no_such_length, of_other_family] {
            assert!(openings(&Pool::new(ranges)).is_empty());
        }
        assert_eq!(
            openings(&Pool::new(ranges(&["10.0.0.0/24", "10.0.0.0/23"], 24))),
            ["10.0.0.0..10.0.1.0"]
        );
    }

    #[test]
    fn a_block_that_is_blocked_in_part_can_still_be_carved() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 24));
        pool.set_reserved_effect(ReservedEffect::Covered);
        pool.set_blocked(spans(&["10.0.0.0-10.0.0.254", "10.0.1.255-10.0.3.0"]));
        assert_eq!(
            openings(&pool),
            ["10.0.0.0..10.0.1.0", "10.0.3.0..10.0.3.0"]
        );
        let halves = Dual {
            v4: Some(25),
            v6: None,
        };
        assert_eq!(
            openings(&pool.refitted(halves)),
            ["10.0.0.128..10.0.1.128", "10.0.3.0..10.0.3.128"]
        );
        pool.set_reserved_effect(ReservedEffect::Touched);
        assert!(openings(&pool).is_empty());
        let mut all = Pool::new(ranges(&["255.255.255.0/24"], 26));
        all.set_reserved_effect(ReservedEffect::Covered);
        all.set_blocked(spans(&["255.255.255.63-255.255.255.255"]));
        assert_eq!(openings(&all), ["255.255.255.0..255.255.255.0"]);
    }

    #[test]
    fn a_cursor_stays_while_it_is_in_the_pool() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 24));
        let start = |pool: &Pool| pool.part(Family::V4).unwrap().start(8).unwrap() >> 8 & 0xff;
        assert_eq!(start(&pool), 3);
        pool.pass(&cidr("10.0.3.0/24"));
        assert_eq!(start(&pool), 2);
        pool.set_ranges(ranges(&["10.0.0.0/20"], 24));
        assert_eq!(start(&pool), 2, "grown");
        pool.set_ranges(ranges(&["10.0.0.0/23"], 24));
        assert_eq!(start(&pool), 1, "shrunk below the cursor");
        pool.pass(&cidr("10.0.0.0/24"));
        assert_eq!(start(&pool), 1, "wrapped");
    }

    #[test]
    fn covers_and_touches_compare_intervals() {
        let pool = Pool::new(ranges(&["10.0.0.0/24", "10.0.4.0/22"], 26));
        let both = |text| {
            let cidr = cidr(text);
            (pool.covers(&cidr), pool.touches(&cidr))
        };
        assert_eq!(both("10.0.0.64/26"), (true, true));
        assert_eq!(both("10.0.4.0/22"), (true, true));
        assert_eq!(both("10.0.0.0/16"), (false, true));
        assert_eq!(both("0.0.0.0/0"), (false, true));
        assert_eq!(both("10.0.1.0/24"), (false, false));
        assert_eq!(both("fd00::/64"), (false, false));
        assert_eq!(pool.families().collect::<Vec<_>>(), [Family::V4]);
        let cidrs = [cidr("10.0.0.0/24"), cidr("10.0.4.0/22")];
        assert_eq!(pool.cidrs(Family::V4), cidrs);
        assert!(pool.cidrs(Family::V6).is_empty());
    }
}
