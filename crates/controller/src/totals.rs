//! Counts the addresses of each pool by state, from agents' reports. If no agent reports a block, the addresses of the
//! block that pods report are counted instead. Each count visits all blocks once.

use std::collections::BTreeMap;

use super::allocations::AllocationState;
use super::allocations::blocks::BlockEntry;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::names::PoolName;
use cadastre_api::AddressStatus;
use cadastre_core::Family;

/// Counts of addresses and blocks of one pool and family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Addresses in confirmed blocks of live nodes, not counting reserved addresses
    pub held: u128,
    /// Addresses of the blocks that nodes have borrowed. They also count in `held`, as addresses of the lender's blocks
    pub borrowed: u128,
    /// Addresses in use, as agents report them. In blocks that no agent reports, the addresses that pods report are
    /// counted
    pub used: u128,
    /// Addresses in cooldown, as agents report them
    pub cooling: u128,
    /// Blocks outside the ranges that the pool's spec has now
    pub outside: usize,
}

impl Totals {
    /// Converts the counts to the texts in the pool's status.
    pub fn status(self) -> AddressStatus {
        AddressStatus {
            allocated: self.held.to_string(),
            used: self.used.to_string(),
            cooling: self.cooling.to_string(),
        }
    }
}

/// Counts the addresses in blocks of all pools. Pools without blocks are missing in the result.
pub fn totals(
    cache: &ClusterCache,
    allocations: &AllocationState,
) -> BTreeMap<(PoolName, Family), Totals> {
    let mut all: BTreeMap<(PoolName, Family), Totals> = BTreeMap::new();
    let is_counted = |entry: &BlockEntry| entry.confirmed && !entry.owner.quarantined;
    for entry in allocations.blocks.iter() {
        let key = (entry.pool.clone(), entry.cidr.family());
        let totals = all.entry(key).or_default();
        let pool = allocations.pools.get(&entry.pool);
        totals.outside += usize::from(pool.is_some_and(|pool| !pool.space.covers(&entry.cidr)));
        if !is_counted(entry) {
            continue;
        }
        let usable = allocations.usable(&entry.cidr, &entry.pool);
        if allocations.parent_of(entry).is_some_and(is_counted) {
            totals.borrowed = totals.borrowed.saturating_add(usable);
        } else {
            totals.held = totals.held.saturating_add(usable);
        }
        let node = cache.nodes.get(&entry.owner.name);
        let report = node.and_then(|node| report_of(node, cache));
        if let Some(reported) = entry.report_for(report) {
            totals.used += u128::from(reported.used);
            totals.cooling += u128::from(reported.cooling);
        } else {
            totals.used += cache.pods.count_in(&entry.cidr) as u128;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{cluster_of, pool_of_v6, rebuilt, subnet};

    #[test]
    fn addresses_of_wide_blocks_are_counted_exactly() {
        let mut wide = pool_of_v6("p", "fd00::/40", 48);
        wide.spec.as_mut().unwrap().reserved = vec!["fd00::/56".to_owned()];
        let mut own = subnet("a", &["fd00::/48", "fd00:0:1::/48"], 0);
        for block in &mut own.report.as_mut().unwrap().blocks {
            (block.used, block.cooling) = (u64::MAX / 2, u64::MAX / 2);
        }
        let cache = cluster_of(vec![wide], vec![own]);
        let totals = totals(&cache, &rebuilt(&cache))[&("p".into(), Family::V6)];
        assert_eq!(totals.held, (2 << 80) - (1 << 72));
        let most = u128::from(u64::MAX - 1);
        assert_eq!((totals.used, totals.cooling), (most, most));
    }
}
