//! Allocation of blocks: choosing the next free block of each family of a pool, and recording each chosen block as a
//! holding.
//!
//! The search alternates between two sorted structures. The space (`space.rs`) finds the next block that no holding
//! covers. The pool says whether that block may be allocated and, if not, at which address the search continues. The
//! duration of a search does not depend on how full the pool is. The search takes one step for each free block that is
//! excluded by the argument `avoid` or by a blocked span of the pool.

use super::cidr::{Addr, Cidr, Family};
use super::dual::Dual;
use super::family_pool::FamilyPool;
use super::holdings::{Holder, Holding, HoldingId, HoldingState};
use super::ledger::RangeLedger;
use super::pool::Pool;
use crate::mutation::Mutation;

/// The pool has no free block. `capacity`, `covered` and `avoided` are counts of blocks of the pool's current block
/// length. These counts leave out the blocks that a blocked span excludes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no free {family} block of /{block_len}: of {capacity} in the pool {covered} are taken and {avoided} contain addresses in use ({quarantined} ranges are in quarantine); add a CIDR to the pool, choose a longer blockSize, or release what is not needed"
)]
pub struct PoolExhausted {
    /// The first family without a free block. In the other family no block was allocated either.
    pub family: Family,
    /// The prefix length of the block that the search did not find.
    pub block_len: u8,
    /// The number of blocks that the pool would have if there were no holdings.
    pub capacity: u128,
    /// The number of blocks that a holding covers, partly or entirely.
    pub covered: u128,
    /// The number of free blocks that were skipped because `avoid` returned an address in them.
    pub avoided: u128,
    /// The number of quarantined ranges, of any length, that overlap the pool.
    pub quarantined: usize,
}

/// What prevents [`RangeLedger::take`] from allocating the given ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// This holding overlaps one of the ranges.
    Held(Holding),
    /// This address lies in one of the ranges and is in use.
    InUse(Addr),
}

/// The size of a pool and its free part, in blocks of its current block length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// The number of blocks that the pool would have if there were no holdings. Blocks that a blocked span excludes are
    /// not counted. Saturates at `u128::MAX`, which is one less than the number of /128 blocks in `::/0`.
    pub capacity: u128,
    /// The number of blocks that no holding covers, including blocks that the `avoid` function of `carve` would skip.
    pub free: u128,
}

impl RangeLedger {
    /// Allocates the next free block of each of the pool's families, and records each block as a holding of `holder` in
    /// state [`HoldingState::InFlight`]. If one family has no free block, nothing is allocated in the other family
    /// either. A pool without families yields neither a block nor an error.
    ///
    /// `avoid` is called for each free block. If it returns an address, for example of a node or a pod, `carve` skips
    /// the block, because the address is already in use.
    pub fn carve(
        &mut self,
        pool: &mut Pool,
        holder: Holder,
        avoid: impl Fn(&Cidr) -> Option<Addr>,
    ) -> Result<Dual<Option<HoldingId>>, PoolExhausted> {
        // All blocks are found before the first one is recorded. So if the second family is exhausted, nothing has to
        // be undone.
        let mut blocks = Dual::default();
        for family in pool.families() {
            let found = self.find(pool, family, &avoid);
            if Mutation::FirstFamilyStaysHeld.is_on()
                && let (Err(_), Some(cidr)) = (&found, blocks.v4)
            {
                self.record(holder, cidr, HoldingState::InFlight);
            }
            *blocks.get_mut(family) = Some(found?);
        }
        Ok(blocks.map(|block: Option<Cidr>| {
            let cidr = block?;
            pool.pass(&cidr);
            let id = self.holdings.insert(Holding {
                holder,
                cidr,
                state: HoldingState::InFlight,
            });
            self.cover(cidr, id);
            Some(id)
        }))
    }

    /// Like [`Self::carve`], but allocates blocks with the prefix lengths `lens`. A family with `None` in `lens` keeps
    /// the block length of the pool.
    pub fn carve_sized(
        &mut self,
        pool: &mut Pool,
        lens: Dual<Option<u8>>,
        holder: Holder,
        avoid: impl Fn(&Cidr) -> Option<Addr>,
    ) -> Result<Dual<Option<HoldingId>>, PoolExhausted> {
        let is_own = |(family, len): (Family, &Option<u8>)| {
            len.is_none_or(|len| pool.block_len(family) == Some(len))
        };
        if lens.iter().all(is_own) {
            return self.carve(pool, holder, avoid);
        }
        let mut sized = pool.refitted(lens);
        let carved = self.carve(&mut sized, holder, avoid)?;
        for (_, id) in &carved {
            if let Some(holding) = id.and_then(|id| self.get(id)) {
                pool.pass(&holding.cidr);
            }
        }
        Ok(carved)
    }

    /// Allocates exactly these ranges, and records each as a holding of `holder` in state [`HoldingState::InFlight`].
    /// If one of the ranges has an obstacle ([`Self::obstacle`]), none of the ranges is allocated.
    pub fn take(
        &mut self,
        holder: Holder,
        ranges: &[Cidr],
        avoid: impl Fn(&Cidr) -> Option<Addr>,
    ) -> Result<(), Obstacle> {
        let obstacle = self.obstacle(ranges, avoid);
        if let Some(obstacle) = obstacle.filter(|_| !Mutation::TakenAlthoughHeld.is_on()) {
            return Err(obstacle);
        }
        for range in ranges {
            self.record(holder, *range, HoldingState::InFlight);
        }
        Ok(())
    }

    /// Returns what prevents the allocation of exactly these ranges: a holding that overlaps one of the ranges, or an
    /// address that `avoid` returns for one of the ranges. Returns `None` if the ranges can be allocated.
    pub fn obstacle(
        &self,
        ranges: &[Cidr],
        avoid: impl Fn(&Cidr) -> Option<Addr>,
    ) -> Option<Obstacle> {
        let held = |range| self.overlapping(range).next().map(|(_, it)| it);
        let held = ranges.iter().find_map(held).map(Obstacle::Held);
        held.or_else(|| ranges.iter().find_map(avoid).map(Obstacle::InUse))
    }

    /// Counts the blocks of one family of a pool. Both counts are zero if the pool has no ranges of that family.
    ///
    /// Each call computes the counts from the holdings. The computation takes longer if the free space is fragmented.
    pub fn block_counts(&self, pool: &Pool, family: Family) -> BlockCounts {
        let space = self.spaces.get(family);
        let Some((part, order)) = blocks_of(pool, family) else {
            return BlockCounts::default();
        };
        let openings = part.openings.iter();
        let free = openings.map(|&(first, last)| space.count_free(order, first, last));
        BlockCounts {
            capacity: part.capacity(order),
            free: free.fold(0, u128::saturating_add),
        }
    }

    fn find(
        &self,
        pool: &Pool,
        family: Family,
        avoid: &impl Fn(&Cidr) -> Option<Addr>,
    ) -> Result<Cidr, PoolExhausted> {
        let mut avoided = 0;
        let found = blocks_of(pool, family).and_then(|(part, order)| {
            let mut is_allowed = |first: &u128| {
                let is_avoided = avoid(&Cidr::of_order(family, *first, order)).is_some();
                avoided += u128::from(is_avoided);
                !is_avoided
            };
            let start = part.start(order);
            let mut below = self.free_blocks(part, family, start);
            // If no block below the cursor can be allocated, the search continues at the top of the pool.
            let above = self.free_blocks(part, family, Some(u128::MAX));
            let mut above = above.take_while(|&first| start.is_none_or(|start| first > start));
            let first = below
                .find(&mut is_allowed)
                .or_else(|| above.find(&mut is_allowed))?;
            Some(Cidr::of_order(family, first, order))
        });
        found.ok_or_else(|| self.exhausted(pool, family, avoided))
    }

    /// Returns the first addresses of free blocks that may be allocated, in descending order from `from`.
    fn free_blocks(
        &self,
        part: &FamilyPool,
        family: Family,
        mut from: Option<u128>,
    ) -> impl Iterator<Item = u128> {
        let space = self.spaces.get(family);
        let order = family.bits().saturating_sub(part.block_len);
        std::iter::from_fn(move || {
            loop {
                let open = part.open_below(order, from?)?;
                let free = space.last_free(order, open)?;
                if free == open {
                    from = free.checked_sub(1);
                    return Some(free);
                }
                from = Some(free);
            }
        })
    }

    fn exhausted(&self, pool: &Pool, family: Family, avoided: u128) -> PoolExhausted {
        let capacity = self.block_counts(pool, family).capacity;
        let quarantined = self.holdings.iter().filter(|(_, holding)| {
            holding.state == HoldingState::Quarantined
                && holding.cidr.family() == family
                && pool.touches(&holding.cidr)
        });
        PoolExhausted {
            family,
            block_len: pool.block_len(family).unwrap_or_default(),
            capacity,
            covered: capacity.saturating_sub(avoided),
            avoided,
            quarantined: quarantined.count(),
        }
    }
}

/// Returns the [`FamilyPool`] of a family, and the order of its blocks (a block has `2^order` addresses). Returns
/// `None` if the pool cannot have blocks of that family.
fn blocks_of(pool: &Pool, family: Family) -> Option<(&FamilyPool, u8)> {
    let part = pool.part(family)?;
    Some((part, family.bits().checked_sub(part.block_len)?))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{cidr, ranges, spans};
    use super::*;

    const HOLDER: Holder = Holder(1);

    /// Allocates a block from a pool that has one family.
    fn carve(ledger: &mut RangeLedger, pool: &mut Pool) -> Result<HoldingId, PoolExhausted> {
        let ids = ledger.carve(pool, HOLDER, |_| None)?;
        Ok(ids.v4.or(ids.v6).unwrap())
    }

    /// Allocates blocks until the pool is exhausted.
    fn carve_all(ledger: &mut RangeLedger, pool: &mut Pool) -> (Vec<String>, PoolExhausted) {
        let mut carved = Vec::new();
        loop {
            match carve(ledger, pool) {
                Ok(id) => carved.push(ledger.get(id).unwrap().cidr.to_string()),
                Err(full) => return (carved, full),
            }
        }
    }

    #[test]
    fn next_fit_goes_downward_over_all_cidrs_and_wraps() {
        let mut ledger = RangeLedger::default();
        let mut pool = Pool::new(ranges(&["10.0.0.0/25", "10.1.0.0/24"], 26));
        let mut next = || {
            let id = carve(&mut ledger, &mut pool).unwrap();
            ledger.release(id).unwrap().cidr.to_string()
        };
        let order: Vec<_> = (0..7).map(|_| next()).collect();
        assert_eq!(
            order,
            [
                "10.1.0.192/26",
                "10.1.0.128/26",
                "10.1.0.64/26",
                "10.1.0.0/26",
                "10.0.0.64/26",
                "10.0.0.0/26",
                "10.1.0.192/26"
            ],
            "a freed block comes last"
        );
    }

    #[test]
    fn a_block_that_overlaps_a_holding_is_never_carved() {
        let mut ledger = RangeLedger::default();
        ledger.record(HOLDER, cidr("10.0.0.0/29"), HoldingState::Allocated);
        ledger.record(HOLDER, cidr("10.0.0.96/27"), HoldingState::Quarantined);
        ledger.record(HOLDER, cidr("10.0.0.128/25"), HoldingState::Indeterminate);
        let mut pool = Pool::new(ranges(&["10.0.0.0/24"], 27));
        let (carved, full) = carve_all(&mut ledger, &mut pool);
        assert_eq!(carved, ["10.0.0.64/27", "10.0.0.32/27"]);
        assert_eq!(
            (full.capacity, full.covered, full.avoided, full.quarantined),
            (8, 8, 0, 1)
        );
    }

    #[test]
    fn blocks_with_blocked_addresses_are_skipped() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/24"], 26));
        pool.set_blocked(spans(&["10.0.0.200", "10.0.0.60-10.0.0.70"]));
        let mut ledger = RangeLedger::default();
        let counts = |capacity, free| BlockCounts { capacity, free };
        assert_eq!(ledger.block_counts(&pool, Family::V4), counts(1, 1));
        assert_eq!(carve_all(&mut ledger, &mut pool).0, ["10.0.0.128/26"]);
        assert_eq!(ledger.block_counts(&pool, Family::V4), counts(1, 0));
    }

    #[test]
    fn a_block_with_an_address_in_use_is_skipped() {
        let node = cidr("10.0.0.200/32").first();
        let avoid = |block: &Cidr| block.contains_addr(node).then_some(node);
        let mut pool = Pool::new(ranges(&["10.0.0.0/25", "10.0.0.128/25"], 25));
        let mut ledger = RangeLedger::default();
        let id = ledger.carve(&mut pool, HOLDER, avoid).unwrap().v4.unwrap();
        assert_eq!(ledger.get(id).unwrap().cidr, cidr("10.0.0.0/25"));
        let full = ledger.carve(&mut pool, HOLDER, avoid).unwrap_err();
        assert_eq!((full.capacity, full.covered, full.avoided), (2, 1, 1));
        assert_eq!(
            full.to_string(),
            "no free IPv4 block of /25: of 2 in the pool 1 are taken and 1 contain addresses in use (0 ranges are in quarantine); add a CIDR to the pool, choose a longer blockSize, or release what is not needed"
        );
    }

    #[test]
    fn both_families_are_carved_or_neither() {
        let mut pool = Pool::new(Dual {
            v4: ranges(&["10.0.0.0/24"], 24).v4,
            v6: ranges(&["fd00::/63"], 64).v6,
        });
        let mut ledger = RangeLedger::default();
        let ids = ledger.carve(&mut pool, HOLDER, |_| None).unwrap();
        let holdings = ids.map(|id| ledger.get(id.unwrap()).unwrap());
        let holding = |text| Holding {
            holder: HOLDER,
            cidr: cidr(text),
            state: HoldingState::InFlight,
        };
        assert_eq!(holdings.v4, holding("10.0.0.0/24"));
        assert_eq!(holdings.v6, holding("fd00:0:0:1::/64"));
        let full = ledger.carve(&mut pool, HOLDER, |_| None).unwrap_err();
        assert_eq!(full.family, Family::V4);
        assert_eq!(ledger.len(), 2);
        ledger.release(ids.v4.unwrap());
        let ids = ledger.carve(&mut pool, HOLDER, |_| None).unwrap();
        assert_eq!(
            ledger.get(ids.v6.unwrap()).unwrap().cidr,
            cidr("fd00::/64"),
            "the failure moved no cursor"
        );
    }

    #[test]
    fn blocks_of_many_lengths_come_from_one_pool_and_move_its_cursor() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/22"], 24));
        let mut ledger = RangeLedger::default();
        let carved = [26, 23, 25, 24, 24].map(|len| {
            let lens = Dual {
                v4: Some(len),
                v6: None,
            };
            let ids = ledger.carve_sized(&mut pool, lens, HOLDER, |_| None);
            let id = ids.map(|ids| ids.v4.unwrap());
            id.map(|id| ledger.get(id).unwrap().cidr.to_string())
        });
        let carved = carved.map(|it| it.map_err(|full| full.block_len));
        let expected = [
            Ok("10.0.3.192/26".to_owned()),
            Ok("10.0.0.0/23".to_owned()),
            Ok("10.0.3.0/25".to_owned()),
            Ok("10.0.2.0/24".to_owned()),
            Err(24),
        ];
        assert_eq!(carved, expected);
        assert_eq!(pool.block_len(Family::V4), Some(24));
    }

    #[test]
    fn ranges_are_taken_together_unless_something_is_in_the_way_of_one() {
        let mut ledger = RangeLedger::default();
        let held = cidr("fd00::/80");
        ledger.record(Holder(2), held, HoldingState::Quarantined);
        let both = [cidr("10.0.0.0/24"), cidr("fd00::/64")];
        let taken = ledger.take(HOLDER, &both, |_| None);
        let holding = Holding {
            holder: Holder(2),
            cidr: held,
            state: HoldingState::Quarantined,
        };
        assert_eq!(taken, Err(Obstacle::Held(holding)));
        assert_eq!((ledger.len(), ledger.is_empty()), (1, false));
        let four = [cidr("10.0.0.0/24")];
        let used = cidr("10.0.0.9/32").first();
        let taken = ledger.take(HOLDER, &four, |_| Some(used));
        assert_eq!(taken, Err(Obstacle::InUse(used)));
        assert_eq!(ledger.take(HOLDER, &four, |_| None), Ok(()));
        let states: Vec<_> = ledger.of(HOLDER).map(|(_, it)| it.state).collect();
        assert_eq!(states, [HoldingState::InFlight]);
    }

    #[test]
    fn blocks_of_a_new_length_are_carved_from_free_space() {
        let mut pool = Pool::new(ranges(&["10.0.0.0/24"], 26));
        let mut ledger = RangeLedger::default();
        let mut carve = |pool: &mut Pool| {
            let id = carve(&mut ledger, pool).unwrap();
            ledger.get(id).unwrap().cidr.to_string()
        };
        assert_eq!(carve(&mut pool), "10.0.0.192/26");
        pool.set_ranges(ranges(&["10.0.0.0/24"], 25));
        assert_eq!(carve(&mut pool), "10.0.0.0/25");
        pool.set_ranges(ranges(&["10.0.0.0/24"], 28));
        assert_eq!(carve(&mut pool), "10.0.0.176/28");
    }

    #[test]
    fn a_pool_can_be_a_whole_family() {
        let mut pool = Pool::new(ranges(&["::/0"], 128));
        let mut ledger = RangeLedger::default();
        let id = carve(&mut ledger, &mut pool).unwrap();
        let first = ledger.get(id).unwrap().cidr.first();
        assert_eq!(first.value, u128::MAX);
        let counts = ledger.block_counts(&pool, Family::V6);
        assert_eq!((counts.capacity, counts.free), (u128::MAX, u128::MAX - 1));
        pool.set_ranges(ranges(&["::/0"], 0));
        assert_eq!(carve(&mut ledger, &mut pool).unwrap_err().capacity, 1);
        ledger.release(id);
        assert!(carve(&mut ledger, &mut pool).is_ok());
    }

    #[test]
    fn a_pool_without_room_for_a_block_is_full() {
        let mut ledger = RangeLedger::default();
        for block_len in [8, 33, 255] {
            let mut pool = Pool::new(ranges(&["10.0.0.0/24"], block_len));
            assert_eq!(carve(&mut ledger, &mut pool).unwrap_err().capacity, 0);
        }
        assert_eq!(
            ledger.carve(&mut Pool::new(Dual::default()), HOLDER, |_| None),
            Ok(Dual::default())
        );
    }
}
