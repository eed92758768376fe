//! Index of pools by range: finds the pools that share addresses with a range without visiting every pool.
//!
//! Two CIDRs are disjoint, or one contains the other. Each range that covers a given range is a prefix of the given
//! range, so one lookup per prefix length in use finds all of them. The ranges inside the given range follow directly
//! after it in the order of CIDRs.

use std::collections::BTreeMap;

use cadastre_core::{Cidr, Dual};

/// Pools by range. Each pool is represented by its position in the list of pools by age.
#[derive(Clone, Debug, Default)]
pub(super) struct PoolRangeIndex {
    /// Positions of the pools that have exactly this range, oldest first
    by_range: BTreeMap<Cidr, Vec<usize>>,
    /// Prefix lengths of all ranges, in ascending order, per family
    lens: Dual<Vec<u8>>,
}

impl PoolRangeIndex {
    /// Builds the index from all ranges, each with its pool's position.
    pub(crate) fn new(ranges: impl IntoIterator<Item = (usize, Cidr)>) -> Self {
        let mut index = PoolRangeIndex::default();
        for (place, range) in ranges {
            let places = index.by_range.entry(range).or_default();
            places.insert(places.partition_point(|it| *it < place), place);
            let lens = index.lens.get_mut(range.family());
            if let Err(at) = lens.binary_search(&range.len()) {
                lens.insert(at, range.len());
            }
        }
        index
    }

    /// Returns the oldest pool with a range that covers `range`. Pools for which the function `is` returns false are
    /// left out.
    pub(crate) fn oldest_over(
        &self,
        range: &Cidr,
        mut is: impl FnMut(usize) -> bool,
    ) -> Option<usize> {
        let oldest = |places: &[usize]| places.iter().copied().find(|place| is(*place));
        self.over(range).filter_map(oldest).min()
    }

    /// Returns the pools that share an address with the range. A pool may occur several times.
    pub(crate) fn touching(&self, range: &Cidr) -> impl Iterator<Item = usize> + use<'_> {
        let range = *range;
        let from = self.by_range.range(range..);
        let within = from.take_while(move |(inside, _)| range.contains(inside));
        // `over` also returns the pools of exactly this range, so they are left out here.
        let within = within.filter(move |(inside, _)| **inside != range);
        let within = within.flat_map(|(_, places)| places);
        self.over(&range).flatten().chain(within).copied()
    }

    /// For each indexed range that covers the given range or equals it, returns the positions of the pools with that
    /// indexed range.
    fn over(&self, range: &Cidr) -> impl Iterator<Item = &[usize]> + use<'_> {
        let range = *range;
        let lens = self.lens.get(range.family()).iter();
        let wider = lens.take_while(move |len| **len <= range.len());
        wider.filter_map(move |len| {
            let places = self.by_range.get(&Cidr::new(range.first(), *len)?)?;
            Some(places.as_slice())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use cadastre_core::{Addr, Family};

    /// Generates ranges among few addresses, so that many ranges are equal or contain each other.
    fn range() -> impl Strategy<Value = Cidr> {
        let family = prop_oneof![Just(Family::V4), Just(Family::V6)];
        (family, 0..32u128, 0..=5u8).prop_map(|(family, value, order)| {
            let addr = Addr { family, value };
            Cidr::new(addr, family.bits() - order).unwrap()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_index_finds_the_same_as_a_visit_to_each_pool(
            ranges in prop::collection::vec((0..6usize, range()), 0..12),
            wanted in range(),
            left_out in 0..6usize,
        ) {
            let index = PoolRangeIndex::new(ranges.iter().copied());
            let over = ranges.iter().filter(|(_, range)| range.contains(&wanted));
            let over = over.map(|(place, _)| *place).filter(|place| *place != left_out);
            prop_assert_eq!(index.oldest_over(&wanted, |it| it != left_out), over.min());
            let touching = ranges.iter().filter(|(_, range)| range.overlaps(&wanted));
            let touching: BTreeSet<usize> = touching.map(|(place, _)| *place).collect();
            prop_assert_eq!(index.touching(&wanted).collect::<BTreeSet<_>>(), touching);
        }
    }
}
