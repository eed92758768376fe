//! Computes the counts of a pool from the ledger. No count is stored, so the counts always agree with the ledger.

use std::collections::BTreeMap;

use super::allocations::AllocationState;
use super::pools::PoolState;
use cadastre_api::{AddressStatus, FamilyStatus};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Family, Holder, Holding, HoldingState};

/// Counts of one pool and family. `capacity` and `free` count blocks of the pool's block size. `held` and `quarantined`
/// count ranges of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyCounts {
    /// Number of blocks that fit into the pool, without reserved and service ranges
    pub capacity: u128,
    /// Number of ranges of live nodes, including ranges that are still being allocated
    pub held: u128,
    /// Number of quarantined ranges of deleted nodes
    pub quarantined: u128,
    /// Number of blocks that can be allocated now
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

    /// Converts the counts for the status of the pool. `block_len` is the prefix length of a block. `addresses` is
    /// `None` for a pool in mode NodeCIDR.
    pub fn status(self, block_len: Option<u8>, addresses: Option<AddressStatus>) -> FamilyStatus {
        let percent = (self.utilization() * 100.0).floor();
        // Rounding must not result in 100 % while a range is free.
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

/// Returns the holdings that overlap the pool's ranges of one family.
fn holdings<'a>(
    state: &'a PoolState,
    family: Family,
    allocations: &'a AllocationState,
) -> impl Iterator<Item = Holding> {
    let cidrs = state.space.cidrs(family).iter();
    let holdings = cidrs.flat_map(|cidr| allocations.ledger.overlapping(cidr));
    holdings.map(|(_, holding)| holding)
}

/// Returns the counts of one family of a pool. Addresses of claims count neither as held nor as quarantined.
pub fn figures(pool: &PoolState, family: Family, allocations: &AllocationState) -> FamilyCounts {
    let room = allocations.ledger.block_counts(&pool.space, family);
    let mut figures = FamilyCounts {
        capacity: room.capacity,
        held: 0,
        quarantined: 0,
        free: room.free,
    };
    // A borrowed block is not counted separately, because it counts as a part of its parent.
    let is_lent = |it: &Holding| {
        let entry = allocations.blocks.get(&it.cidr);
        entry.is_some_and(|entry| allocations.parent_of(entry).is_some())
    };
    let plain = |it: &Holding| allocations.claims.of(&it.cidr).is_none() && !is_lent(it);
    for holding in holdings(pool, family, allocations).filter(plain) {
        if holding.state == HoldingState::Quarantined {
            figures.quarantined += 1;
        } else {
            figures.held += 1;
        }
    }
    figures
}

/// Returns whether the finalizer of a pool that is being deleted may be removed. This needs two conditions: no block
/// exists that was allocated from the pool, even outside its present ranges, and another pool guards each allocated
/// range in the pool ([`crate::pools::PoolStates::guarding_pool`]). A pool for which `may_lose_it` returns true guards
/// nothing, because its own finalizer may be removed at any time.
pub fn may_go(
    state: &PoolState,
    allocations: &AllocationState,
    may_lose_it: impl Fn(&PoolState) -> bool,
) -> bool {
    let mut blocks = allocations.blocks.iter();
    if blocks.any(|entry| entry.pool == state.name) {
        return false;
    }
    let is_guarded = |range: &Cidr| {
        let pool = allocations.pools.guarding_pool(range);
        pool.is_some_and(|pool| pool.name != state.name && !may_lose_it(pool))
    };
    let goes = Mutation::FinalizerRemovedDuringQuarantine.is_on();
    let families = Family::ALL.into_iter();
    let mut holdings = families.flat_map(|family| holdings(state, family, allocations));
    holdings.all(|it| is_guarded(&it.cidr) || goes && it.state == HoldingState::Quarantined)
}

/// Returns the nodes that have ranges in the pool. A range that lies in several pools counts only for the oldest of
/// them. The value is true if at least one of the node's ranges is not in quarantine.
pub fn holders(state: &PoolState, allocations: &AllocationState) -> BTreeMap<Holder, bool> {
    let mut holders = BTreeMap::new();
    let families = Family::ALL.into_iter();
    for holding in families.flat_map(|family| holdings(state, family, allocations)) {
        let pool = allocations.pools.of(&holding.cidr);
        let is_node = !allocations.is_of_claims(holding.holder);
        if is_node && pool.is_none_or(|pool| pool.name == state.name) {
            let is_live = holding.state != HoldingState::Quarantined;
            *holders.entry(holding.holder).or_default() |= is_live;
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{cidr, cluster, node_with, pool, pool_of_v6, rebuilt};

    #[test]
    fn pools_of_any_size_are_counted_and_none_that_has_room_is_said_to_be_full() {
        // Returns capacity, free blocks and utilization of an IPv6 pool from which the range `held` is allocated.
        let counts = |range, block_size, held| {
            let pools = vec![pool_of_v6("p", range, block_size)];
            let mut allocations = rebuilt(&cluster(pools, Vec::new()));
            allocations
                .ledger
                .record(Holder(1), cidr(held), HoldingState::Allocated);
            let pool = allocations.pools.get("p").unwrap();
            let status = figures(pool, Family::V6, &allocations).status(None, None);
            assert_eq!(status.allocated, "1");
            (status.capacity, status.free, status.utilization)
        };
        let exactly = |capacity: u128, free: u128, percent: &str| {
            (capacity.to_string(), free.to_string(), percent.to_owned())
        };
        for (range, block_size, held, expected) in [
            ("fd00::/40", 48, "fd00::/48", exactly(256, 255, "0%")),
            ("fd00::/40", 40, "fd00::/48", exactly(1, 0, "100%")),
            (
                "fd00::/8",
                128,
                "fd00::/48",
                exactly(1 << 120, (1 << 120) - (1 << 80), "0%"),
            ),
            (
                "fc00::/7",
                128,
                "fc00::/8",
                exactly(1 << 121, 1 << 120, "50%"),
            ),
            ("::/0", 64, "::/0", exactly(1 << 64, 0, "100%")),
        ] {
            assert_eq!(counts(range, block_size, held), expected);
        }
        // The IPv6 space has one address more than a u128 can count, so the count of its /128 blocks is one too low.
        let (capacity, _, utilization) = counts("::/0", 128, "fd00::/48");
        assert_eq!((capacity, &*utilization), (u128::MAX.to_string(), "0%"));
    }

    #[test]
    fn holders_of_all_pools_are_found_without_a_visit_to_every_pool_for_every_range() {
        const POOLS: usize = 200;
        let pools = (0..POOLS).map(|n| pool(&format!("p{n}"), &format!("10.0.{n}.0/24")));
        let nodes = (0..POOLS).map(|n| node_with(&format!("n{n}"), &[&format!("10.0.{n}.16/28")]));
        let allocations = rebuilt(&cluster(pools.collect(), nodes.collect()));
        let before = allocations.pools.looks();
        for state in allocations.pools.iter() {
            let holders: Vec<bool> = holders(state, &allocations).into_values().collect();
            assert_eq!(holders, [true], "{}", state.name);
        }
        let looks = allocations.pools.looks() - before;
        assert!(looks <= 2 * POOLS, "{looks} looks for {POOLS} ranges");
    }
}
