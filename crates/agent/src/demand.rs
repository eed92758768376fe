//! Computes how many addresses the node wants of each pool, and which empty blocks the node can release.
//!
//! Demand is the sum of the addresses that are in use, cooling or withdrawn, the pool's low mark (`warm.low`), and one
//! address for each waiting ADD. With `warm.minimum: MaxPods`, the demand is at least one address for each pod that the
//! node may run, and one for each waiting ADD. Because waiting ADDs count, the controller learns from the demand
//! whether pods wait.
//!
//! Addresses that a block never assigns (gateway, network and broadcast address) are not part of the demand. The
//! controller computes the capacity of a block from the counts that the agent reports (in use, cooling, withdrawn,
//! free). These counts do not contain such addresses either. If the agent has not reported a block yet, the controller
//! takes the block's size, and subtracts as many addresses as if the pool had no configured gateway.
//!
//! # Guarantees
//! - A node without a block of a pool requests one only while an ADD wants an address of the pool. So the node requests
//!   nothing from a pool with `assignment: Manual` or `firstBlock: OnDemand` until a pod needs the pool.
//! - After a surplus block was released, the node does not request it again. The reason is that a release leaves at
//!   least as many addresses free as the high mark (`warm.high`), and the high mark is never below the low mark. A
//!   release also leaves the addresses that `warm.minimum` requires.
//! - The node keeps the last block of each pool and family. It releases a recalled last block if no ADD waits for the
//!   pool.
//! - The node never requests addresses of claims, because the controller allocates them when it observes the pod.

use std::collections::{BTreeMap, BTreeSet};

use super::snapshot::{assigns, busy, capacity, is_pod_cidr, terms};
use cadastre_core::node_allocation::{PoolTerms, is_claim};
use cadastre_core::{Cidr, Dual, Family};
use cadastre_node::{BlockCount, Snapshot};

/// For each pool, the number of ADDs that wait for an address of the pool, or that waited for one recently.
pub(crate) type PendingAdds = BTreeMap<String, u64>;

/// Demand and capacity of one pool on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolWant {
    /// How many addresses of each family the node wants, including addresses that are in use, cooling or withdrawn
    pub demand: u64,
    /// How many addresses of the node's blocks can be used for pods. If the pool has both families, the count of the
    /// family with fewer addresses
    pub capacity: u64,
}

impl PoolWant {
    /// Whether the node needs more blocks.
    pub(crate) fn is_lacking(&self) -> bool {
        self.demand > self.capacity
    }
}

#[derive(Default)]
struct Sums {
    busy: Dual<u64>,
    capacity: Dual<u64>,
    count: Dual<usize>,
}

/// Returns the demand and capacity of each pool from which blocks can be requested. Pools without demand are left out.
pub(crate) fn wanted(snapshot: &Snapshot, pending: &PendingAdds) -> BTreeMap<String, PoolWant> {
    let sums = sums(snapshot);
    let fixed = of_pod_cidrs(snapshot);
    let with_blocks = sums.keys().copied();
    let with_adds = pending.keys().map(String::as_str);
    let known = |pool: &&str| terms(snapshot, pool).is_some();
    let pools: BTreeSet<&str> = with_blocks.chain(with_adds.filter(known)).collect();
    let want = |pool: &str| {
        let adds = pending.get(pool).copied().unwrap_or(0);
        let nothing = Sums::default();
        let sums = sums.get(pool).unwrap_or(&nothing);
        let families = families(snapshot, pool, sums);
        let of = |sums: &Dual<u64>| families.iter().map(|it| *sums.get(*it)).collect::<Vec<_>>();
        let busy = of(&sums.busy).into_iter().max().unwrap_or(0);
        let (low, minimum) =
            terms(snapshot, pool).map_or((0, 0), |it| (it.warm.0, it.min_addresses));
        // A node without a block asks for one only when a pod needs it.
        let minimum = if sums.count == Dual::default() {
            0
        } else {
            minimum
        };
        let kept = busy.saturating_add(low.into()).max(minimum.into());
        PoolWant {
            demand: kept.saturating_add(adds),
            capacity: of(&sums.capacity).into_iter().min().unwrap_or(0),
        }
    };
    pools
        .into_iter()
        .filter(|pool| !pool.is_empty() && !fixed.contains(pool) && !is_claim(pool))
        .map(|pool| (pool.to_owned(), want(pool)))
        .filter(|(_, want)| want.demand > 0)
        .collect()
}

/// Returns the empty blocks to release, each with its UID. These are the blocks from which no new address is assigned
/// (such as draining blocks), recalled blocks, and surplus blocks.
pub(crate) fn to_release(
    snapshot: &Snapshot,
    pending: &PendingAdds,
    recalled: &BTreeSet<Cidr>,
) -> Vec<(Cidr, String)> {
    let mut sums = sums(snapshot);
    let mut going = Vec::new();
    let can_go =
        |it: &&BlockCount| it.state.is_listed() && busy(it) == 0 && !is_pod_cidr(snapshot, it);
    // Borrowed blocks are released first, so that they return to the nodes that lent them. Among the other blocks, the
    // highest is released first, because addresses are assigned from the lowest block.
    let mut blocks: Vec<&BlockCount> = snapshot.blocks.iter().rev().filter(can_go).collect();
    blocks.sort_by_key(|it| !it.borrowed);
    for block in blocks {
        let family = block.cidr.family();
        if !assigns(block) {
            going.push((block.cidr, block.uid.clone()));
            continue;
        }
        let Some(sum) = sums.get_mut(block.pool.as_str()) else {
            continue;
        };
        let busy = *sum.busy.get(family);
        let left = sum.capacity.get(family).saturating_sub(capacity(block));
        let adds = pending.get(&block.pool).copied().unwrap_or(0);
        let is_recalled = recalled.contains(&block.cidr);
        let keep = if is_recalled {
            busy
        } else {
            let minimum = terms(snapshot, &block.pool).map_or(0, |it| it.min_addresses);
            busy.saturating_add(high(snapshot, &block.pool))
                .max(minimum.into())
        };
        let may_go = is_recalled || *sum.count.get(family) > 1;
        if may_go && left >= keep.saturating_add(adds) {
            *sum.capacity.get_mut(family) = left;
            *sum.count.get_mut(family) -= 1;
            going.push((block.cidr, block.uid.clone()));
        }
    }
    going
}

/// Sums up, for each pool, the counts of the blocks from which addresses are assigned. podCIDRs are left out.
fn sums(snapshot: &Snapshot) -> BTreeMap<&str, Sums> {
    let mut sums: BTreeMap<&str, Sums> = BTreeMap::new();
    for block in snapshot.blocks.iter().filter(|it| assigns(it)) {
        if is_pod_cidr(snapshot, block) {
            continue;
        }
        let sum = sums.entry(&block.pool).or_default();
        let family = block.cidr.family();
        let add = |to: &mut u64, more| *to = to.saturating_add(more);
        add(sum.busy.get_mut(family), busy(block));
        add(sum.capacity.get_mut(family), capacity(block));
        *sum.count.get_mut(family) += 1;
    }
    sums
}

/// Returns the pools that the node's podCIDRs belong to. These pools allocate no blocks.
fn of_pod_cidrs(snapshot: &Snapshot) -> BTreeSet<&str> {
    let blocks = snapshot.blocks.iter();
    blocks
        .filter(|block| is_pod_cidr(snapshot, block))
        .map(|block| block.pool.as_str())
        .collect()
}

fn families(snapshot: &Snapshot, pool: &str, sums: &Sums) -> Vec<Family> {
    let terms = terms(snapshot, pool);
    let has = |family: &Family| {
        *sums.count.get(*family) > 0 || terms.is_some_and(|it| it.family(*family).is_some())
    };
    Family::ALL.into_iter().filter(has).collect()
}

fn high(snapshot: &Snapshot, pool: &str) -> u64 {
    let known = terms(snapshot, pool).map(|terms| terms.warm);
    let (low, high) = known.unwrap_or_else(|| PoolTerms::named(pool).warm);
    u64::from(high.max(low))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::{block, pool, snapshot};
    use cadastre_node::BlockState;

    fn adds(pool: &str, count: u64) -> PendingAdds {
        PendingAdds::from([(pool.to_owned(), count)])
    }

    fn released(snapshot: &Snapshot, recalled: &[&str]) -> Vec<String> {
        let recalled = recalled.iter().map(|it| Cidr::parse_strict(it).unwrap());
        let going = to_release(snapshot, &PendingAdds::new(), &recalled.collect());
        going.iter().map(|(cidr, _)| cidr.to_string()).collect()
    }

    #[test]
    fn busy_addresses_and_the_low_mark_are_the_demand() {
        let it = snapshot(
            &[pool("a", (3, 50), true, false)],
            &[
                block("10.0.0.0/26", "a", 40, 10, 11),
                block("10.0.0.64/26", "a", 0, 0, 61),
            ],
        );
        let want = wanted(&it, &PendingAdds::new())["a"];
        assert_eq!((want.demand, want.capacity), (53, 122));
        assert!(!want.is_lacking());
        let many = wanted(&it, &adds("a", 80))["a"];
        assert!(many.is_lacking() && many.demand == 133);
    }

    #[test]
    fn with_a_block_the_node_keeps_its_minimum() {
        let keeping = PoolTerms {
            min_addresses: 110,
            ..pool("a", (3, 50), true, false)
        };
        let pools = std::slice::from_ref(&keeping);
        let demand = |blocks: &[BlockCount], waiting: u64| {
            let mut waiting = adds("a", waiting);
            waiting.retain(|_, count| *count > 0);
            let wants = wanted(&snapshot(pools, blocks), &waiting);
            wants.get("a").map_or(0, |want| want.demand)
        };
        assert_eq!(demand(&[], 0), 0, "a node without a block wants none");
        assert_eq!(demand(&[], 1), 4);
        let first = block("10.0.0.0/26", "a", 20, 0, 41);
        assert_eq!(demand(std::slice::from_ref(&first), 2), 112);
        let full = block("10.0.0.0/25", "a", 125, 0, 0);
        assert_eq!(demand(&[full], 0), 128);
        // With 122 addresses left, the third block may go. With 61 left, the second one may not.
        let empty = |cidr| block(cidr, "a", 0, 0, 61);
        let blocks = [first, empty("10.0.0.64/26"), empty("10.0.0.128/26")];
        assert_eq!(released(&snapshot(pools, &blocks), &[]), ["10.0.0.128/26"]);
        assert_eq!(released(&snapshot(pools, &blocks[..2]), &[]), [""; 0]);
    }

    #[test]
    fn demand_is_that_of_the_fuller_family_and_capacity_that_of_the_smaller() {
        let both = pool("a", (3, 50), true, true);
        let it = snapshot(
            std::slice::from_ref(&both),
            &[
                block("10.0.0.0/26", "a", 61, 0, 0),
                block("fd00::/122", "a", 40, 0, 22),
            ],
        );
        let want = wanted(&it, &PendingAdds::new())["a"];
        assert_eq!((want.demand, want.capacity), (64, 61));
        let half = snapshot(&[both], &[block("10.0.0.0/26", "a", 1, 0, 60)]);
        assert_eq!(wanted(&half, &PendingAdds::new())["a"].capacity, 0);
    }

    #[test]
    fn blocks_with_more_addresses_than_can_be_counted_suffice() {
        let blocks = ["fd00::/48", "fd00:0:1::/48", "fd00:0:2::/48"];
        let blocks = blocks.map(|it| block(it, "a", 1, 1, u64::MAX - 2));
        let it = snapshot(&[pool("a", (3, 50), false, true)], &blocks);
        let want = wanted(&it, &adds("a", 9))["a"];
        assert_eq!((want.demand, want.capacity), (18, u64::MAX));
        assert!(!want.is_lacking() && released(&it, &["fd00::/48"]).is_empty());
    }

    #[test]
    fn a_pool_without_a_block_is_wanted_only_by_adds() {
        let it = snapshot(
            &[
                pool("a", (3, 50), true, false),
                pool("b", (0, 50), true, false),
            ],
            &[block("10.0.0.0/26", "a", 1, 0, 60)],
        );
        assert_eq!(wanted(&it, &PendingAdds::new()).len(), 1);
        assert_eq!(wanted(&it, &adds("b", 2))["b"].demand, 2);
        assert!(!wanted(&it, &adds("unknown", 2)).contains_key("unknown"));
    }

    #[test]
    fn a_block_that_assigns_no_new_address_does_not_count() {
        let mut draining = block("10.0.0.0/26", "a", 50, 0, 11);
        draining.state = BlockState::Draining;
        let mut withdrawn = block("10.0.0.64/26", "a", 20, 0, 0);
        withdrawn.state = BlockState::Unlisted;
        let it = snapshot(
            &[pool("a", (3, 50), true, false)],
            &[draining, withdrawn, block("10.0.0.128/26", "a", 1, 0, 60)],
        );
        assert_eq!(
            wanted(&it, &PendingAdds::new())["a"],
            PoolWant {
                demand: 4,
                capacity: 61
            }
        );
    }

    #[test]
    fn a_claim_is_not_requested_and_counts_in_no_pool_and_is_released_when_it_drains() {
        let pools = [pool("a", (3, 50), true, false), PoolTerms::named("shop/db")];
        let real = block("10.0.0.0/26", "a", 1, 0, 60);
        let alone = wanted(
            &snapshot(&pools, std::slice::from_ref(&real)),
            &PendingAdds::new(),
        );
        for used in [0, 1] {
            let claimed = block("10.0.0.65/32", "shop/db", used, 0, 1 - used);
            let mut it = snapshot(&pools, &[real.clone(), claimed]);
            assert_eq!(wanted(&it, &adds("shop/db", 1)), alone);
            assert!(released(&it, &[]).is_empty(), "the pod may still come");
            it.blocks[1].state = BlockState::Draining;
            let gone: &[&str] = if used == 0 { &["10.0.0.65/32"] } else { &[] };
            assert_eq!(released(&it, &[]), gone);
        }
    }

    #[test]
    fn a_pod_cidr_is_neither_requested_nor_released() {
        let mut range = block("10.0.0.0/24", "a", 0, 0, 253);
        range.uid = "node".to_owned();
        let mut other = range.clone();
        other.cidr = Cidr::parse_strict("10.0.1.0/24").unwrap();
        let it = snapshot(&[pool("a", (3, 50), true, false)], &[range, other]);
        assert!(wanted(&it, &adds("a", 9)).is_empty());
        assert!(released(&it, &["10.0.0.0/24"]).is_empty());
    }

    #[test]
    fn surplus_blocks_are_released_from_the_highest_while_the_high_mark_stays_free() {
        let blocks = |used| {
            [
                block("10.0.0.0/26", "a", used, 0, 61 - used),
                block("10.0.0.64/26", "a", 0, 0, 61),
                block("10.0.0.128/26", "a", 0, 0, 61),
            ]
        };
        let pools = [pool("a", (3, 50), true, false)];
        let it = snapshot(&pools, &blocks(5));
        assert_eq!(released(&it, &[]), ["10.0.0.128/26", "10.0.0.64/26"]);
        let fuller = snapshot(&pools, &blocks(40));
        assert_eq!(released(&fuller, &[]), ["10.0.0.128/26"]);
        // Whatever number of addresses is in use, a released block must not be requested again.
        for used in 0..=61 {
            let mut it = snapshot(&pools, &blocks(used));
            let going = to_release(&it, &PendingAdds::new(), &BTreeSet::new());
            it.blocks
                .retain(|block| !going.iter().any(|(cidr, _)| *cidr == block.cidr));
            assert!(
                !wanted(&it, &PendingAdds::new())["a"].is_lacking(),
                "{used}"
            );
        }
    }

    #[test]
    fn the_last_block_of_a_family_stays_unless_it_drains_or_is_recalled() {
        let pools = [pool("a", (0, 0), true, true)];
        let blocks = [
            block("10.0.0.0/26", "a", 0, 0, 61),
            block("fd00::/122", "a", 0, 0, 62),
        ];
        let mut it = snapshot(&pools, &blocks);
        assert!(released(&it, &[]).is_empty());
        let both = ["fd00::/122", "10.0.0.0/26"];
        assert_eq!(released(&it, &both), both);
        let recalled = both.map(|it| Cidr::parse_strict(it).unwrap()).into();
        assert!(to_release(&it, &adds("a", 1), &recalled).is_empty());
        it.blocks[0].state = BlockState::Draining;
        assert_eq!(released(&it, &[]), ["10.0.0.0/26"]);
        it.blocks[0].counts.cooling = 1;
        assert!(released(&it, &[]).is_empty(), "an address is in cooldown");
    }

    #[test]
    fn a_recalled_block_is_released_if_no_add_waits_for_it() {
        let it = snapshot(
            &[pool("a", (3, 50), true, false)],
            &[
                block("10.0.0.0/26", "a", 55, 0, 6),
                block("10.0.0.64/26", "a", 0, 0, 61),
            ],
        );
        assert!(released(&it, &[]).is_empty());
        assert_eq!(released(&it, &["10.0.0.64/26"]), ["10.0.0.64/26"]);
        let recalled = BTreeSet::from([Cidr::parse_strict("10.0.0.64/26").unwrap()]);
        assert!(to_release(&it, &adds("a", 7), &recalled).is_empty());
    }
}
