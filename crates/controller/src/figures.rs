//! Counts of a pool. They are computed from the ledger each time, so they cannot differ from the ledger.

use std::collections::BTreeMap;

use super::allocations::AllocationState;
use super::pools::PoolState;
use cadastre_api::{AddressStatus, FamilyStatus};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Family, Holder, HoldingState};

/// Counts of one pool and family. `capacity` and `free` count blocks of the pool's block size, `held` and `quarantined`
/// count ranges of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyCounts {
    /// Blocks that fit into the pool, not counting reserved and service ranges
    pub capacity: u128,
    /// Ranges of live nodes, including those still being allocated
    pub held: u128,
    /// Quarantined ranges of deleted nodes
    pub quarantined: u128,
    /// Blocks that can be allocated now
    pub free: u128,
}

impl FamilyCounts {
    /// Returns the share of the capacity that is not free, from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn utilization(&self) -> f64 {
        if self.capacity == 0 {
            1.0
        } else {
            1.0 - (self.free as f64 / self.capacity as f64)
        }
    }

    /// Converts the counts for the status of the pool. `block_len` is the prefix length of a block.
    pub fn status(self, block_len: Option<u8>, addresses: Option<AddressStatus>) -> FamilyStatus {
        let percent = (self.utilization() * 100.0).floor();
        // 100 % must mean that nothing is free, so it is not reached by rounding.
        let percent = if self.free > 0 {
            percent.min(99.0)
        } else {
            percent
        };
        FamilyStatus {
            block_size: block_len.map(u32::from),
            capacity: self.capacity.to_string(),
            allocated: self.held.to_string(),
            quarantined: self.quarantined.to_string(),
            free: self.free.to_string(),
            utilization: format!("{percent}%"),
            addresses,
            trend: None,
            exhausts_at: None,
        }
    }
}

/// Returns the counts of one family of a pool.
pub fn figures(pool: &PoolState, family: Family, allocations: &AllocationState) -> FamilyCounts {
    let room = allocations.ledger.block_counts(&pool.space, family);
    let mut figures = FamilyCounts {
        capacity: room.capacity,
        held: 0,
        quarantined: 0,
        free: room.free,
    };
    for cidr in pool.space.cidrs(family) {
        for (_, holding) in allocations.ledger.overlapping(cidr) {
            if holding.state == HoldingState::Quarantined {
                figures.quarantined += 1;
            } else {
                figures.held += 1;
            }
        }
    }
    figures
}

/// Returns whether a pool that is being deleted may lose its finalizer. No block may be left that was allocated from
/// the pool, even outside its present ranges. Every allocated range in the pool must be guarded by another pool, the
/// one of [`crate::pools::PoolStates::guarding_pool`]. A pool that may lose its own finalizer at any time
/// (`may_lose_it`) guards nothing.
pub fn may_go(
    state: &PoolState,
    allocations: &AllocationState,
    may_lose_it: impl Fn(&PoolState) -> bool,
) -> bool {
    if allocations
        .blocks
        .iter()
        .any(|entry| entry.pool == state.name)
    {
        return false;
    }
    let kept = |range: &Cidr| {
        let keeper = allocations.pools.guarding_pool(range);
        keeper.is_some_and(|pool| pool.name != state.name && !may_lose_it(pool))
    };
    state
        .space
        .families()
        .flat_map(|family| state.space.cidrs(family))
        .all(|cidr| {
            let mut holdings = allocations.ledger.overlapping(cidr);
            let goes = Mutation::FinalizerRemovedDuringQuarantine.is_on();
            holdings.all(|(_, holding)| {
                kept(&holding.cidr) || goes && holding.state == HoldingState::Quarantined
            })
        })
}

/// Returns the holders of ranges that count against the pool. The value is true if a live node has at least one of
/// them.
pub fn holders(state: &PoolState, allocations: &AllocationState) -> BTreeMap<Holder, bool> {
    let mut holders = BTreeMap::new();
    for cidr in state
        .space
        .families()
        .flat_map(|family| state.space.cidrs(family))
    {
        for (_, holding) in allocations.ledger.overlapping(cidr) {
            if allocations
                .pools
                .of(&holding.cidr)
                .is_none_or(|pool| pool.name == state.name)
            {
                *holders.entry(holding.holder).or_default() |=
                    holding.state != HoldingState::Quarantined;
            }
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::cache::ClusterCache;
    use crate::cluster::objects::Node;
    use crate::demand::tests::{NOW, list, node, pool, pool_of_v6};

    /// Returns the status of an IPv6 pool from which the range `held` is allocated.
    fn told(range: &str, block_size: u32, held: &str) -> FamilyStatus {
        let mut cache = ClusterCache::default();
        list(&mut cache.pools, vec![pool_of_v6("p", range, block_size)]);
        let mut allocations = AllocationState::rebuild(&cache, &[], NOW).0;
        let held = Cidr::parse_strict(held).unwrap();
        allocations
            .ledger
            .record(Holder(1), held, HoldingState::Allocated);
        let pool = allocations.pools.get("p").unwrap();
        figures(pool, Family::V6, &allocations).status(None, None)
    }

    #[test]
    fn pools_of_any_size_are_counted_and_none_that_has_room_is_said_to_be_full() {
        let counts = |range, block_size, held| {
            let told = told(range, block_size, held);
            assert_eq!(told.allocated, "1");
            (told.capacity, told.free, told.utilization)
        };
        let exactly = |capacity: u128, free: u128, percent: &str| {
            (capacity.to_string(), free.to_string(), percent.to_owned())
        };
        assert_eq!(
            counts("fd00::/40", 48, "fd00::/48"),
            exactly(256, 255, "0%")
        );
        assert_eq!(counts("fd00::/40", 40, "fd00::/48"), exactly(1, 0, "100%"));
        assert_eq!(
            counts("fd00::/8", 128, "fd00::/48"),
            exactly(1 << 120, (1 << 120) - (1 << 80), "0%")
        );
        assert_eq!(
            counts("fc00::/7", 128, "fc00::/8"),
            exactly(1 << 121, 1 << 120, "50%")
        );
        // The IPv6 space has one address more than a u128 can count, so the count saturates.
        let all = counts("::/0", 128, "fd00::/48");
        assert_eq!(all.0, u128::MAX.to_string());
        assert_eq!(all.2, "0%");
        assert_eq!(counts("::/0", 64, "::/0"), exactly(1 << 64, 0, "100%"));
    }

    #[test]
    fn holders_of_all_pools_are_found_without_asking_every_pool_about_every_range() {
        const POOLS: usize = 200;
        let names = |n| (format!("p{n}"), format!("n{n}"));
        let mut cache = ClusterCache::default();
        let pools = (0..POOLS).map(|n| pool(&names(n).0, &format!("10.0.{n}.0/24")));
        list(&mut cache.pools, pools.collect());
        let nodes = (0..POOLS).map(|n| Node {
            pod_cidrs: [Cidr::parse_strict(&format!("10.0.{n}.16/28")).unwrap()].into(),
            ..node(&names(n).1)
        });
        list(&mut cache.nodes, nodes.collect());
        let allocations = AllocationState::rebuild(&cache, &[], NOW).0;
        let before = allocations.pools.looks();
        for state in allocations.pools.iter() {
            let holders: Vec<bool> = holders(state, &allocations).into_values().collect();
            assert_eq!(holders, [true], "{}", state.name);
        }
        let looks = allocations.pools.looks() - before;
        assert!(looks <= 2 * POOLS, "{looks} looks for {POOLS} ranges");
    }
}
