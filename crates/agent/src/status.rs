//! The content of NodeSubnet.status, which is a pure function of the snapshot and the demand.
//!
//! # Guarantees
//! - Equal state gives equal text: lists are sorted, and the text does not contain the time of writing.
//! - If a list or text is longer than the API accepts, its end is cut off. No decision of the controller depends on the
//!   part that is cut off.

use std::collections::BTreeMap;

use super::conflicts;
use super::demand::PoolWant;
use super::snapshot::{busy, is_pod_cidr};
use cadastre_api::{
    AgentInfo, BlockStatus, LeakCandidate, MOST_BLOCKS, MOST_COUNT, MOST_ORPHANS, MOST_POOLS,
    NodeSubnetStatus, PoolDemand,
};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};
use cadastre_node::{BlockCount, BlockState, Snapshot};

/// The maximum demand that is reported. A higher demand must be a mistake.
const MOST_DEMAND: u64 = 1_000_000;

/// Returns the status of the node's NodeSubnet without its conditions and requested addresses, which the caller adds.
/// `boot` is the id of the running boot. `orphans` are addresses whose pods are gone or finished, each with the pod's
/// UID, sorted. `is_announced` returns whether the routing daemon may still announce a range.
pub(crate) fn status(
    snapshot: &Snapshot,
    wants: &BTreeMap<String, PoolWant>,
    orphans: &[(Addr, String)],
    is_announced: impl Fn(&Cidr) -> bool,
    boot: &str,
) -> NodeSubnetStatus {
    let orphan = |(addr, pod): &(Addr, String)| LeakCandidate {
        address: addr.to_string(),
        pod_uid: cut(pod, 128),
    };
    let pools = wants.iter().map(|(pool, want)| PoolDemand {
        pool: pool.clone(),
        demand: count(want.demand.min(MOST_DEMAND)),
    });
    NodeSubnetStatus {
        node_uid: snapshot.node_uid.clone(),
        pools: pools.take(MOST_POOLS).collect(),
        blocks: blocks(snapshot, is_announced),
        agent: Some(AgentInfo {
            version: cut(cadastre_core::VERSION, 64),
            boot_id: cut(boot, 64),
        }),
        withdrawn: withdrawn(snapshot),
        withdrawing: pending(snapshot, false),
        conflicts: conflicts::listed(snapshot),
        orphans: orphans.iter().take(MOST_ORPHANS).map(orphan).collect(),
        ..NodeSubnetStatus::default()
    }
}

/// Returns the ranges that the store has recorded as withdrawn.
fn withdrawn(snapshot: &Snapshot) -> Vec<String> {
    let ranges = snapshot.withdrawn.iter().map(ToString::to_string);
    let mut ranges: Vec<String> = ranges.collect();
    if Mutation::WithdrawalReportedBeforeStored.is_on() {
        ranges.extend(pending(snapshot, true));
    }
    ranges
}

/// Returns the ranges whose withdrawal is pending. If `is_empty` is true, returns the ranges without an address in use
/// or cooling, otherwise the ranges with such an address.
fn pending(snapshot: &Snapshot, is_empty: bool) -> Vec<String> {
    let pending = snapshot.pending_withdrawals.iter();
    let pending = pending.filter(|it| it.is_empty == is_empty);
    pending.map(|it| it.range.to_string()).collect()
}

/// Returns the blocks that the controller lists, and other blocks with addresses in use or in cooldown. podCIDRs are
/// left out. A block that is still announced is not reported as released.
fn blocks(snapshot: &Snapshot, is_announced: impl Fn(&Cidr) -> bool) -> Vec<BlockStatus> {
    let blocks = snapshot
        .blocks
        .iter()
        .filter(|it| !is_pod_cidr(snapshot, it));
    let mut blocks: Vec<_> = blocks.collect();
    blocks.sort_by_key(|it| it.cidr);
    let report = |it: &BlockCount| {
        let is_unused = busy(it) == 0;
        let early = is_unused && Mutation::ReleaseReportedBeforeStored.is_on();
        let released = it.state == BlockState::Released || early;
        BlockStatus {
            cidr: it.cidr.to_string(),
            uid: cut(&it.uid, 128),
            used: count(it.counts.used),
            cooling: count(it.counts.cooling),
            free: count(if released { 0 } else { it.counts.free }),
            withdrawn: count(it.counts.withdrawn),
            released: released && !is_announced(&it.cidr),
        }
    };
    blocks.into_iter().map(report).take(MOST_BLOCKS).collect()
}

fn count(count: u64) -> i64 {
    i64::try_from(count).map_or(MOST_COUNT, |count| count.min(MOST_COUNT))
}

fn cut(text: &str, longest: usize) -> String {
    text.chars().take(longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::{PendingAdds, wanted};
    use crate::snapshot::testing::{block, pool, record, snapshot};
    use cadastre_core::Cidr;
    use cadastre_node::PendingWithdrawal;

    fn status_of(snapshot: &Snapshot) -> NodeSubnetStatus {
        let wants = wanted(snapshot, &PendingAdds::new());
        status(snapshot, &wants, &[], |_| false, "boot")
    }

    #[test]
    fn the_text_does_not_depend_on_the_order_in_the_store() {
        let mut it = snapshot(
            &[
                pool("a", (3, 50), true, true),
                pool("b", (1, 2), true, false),
            ],
            &[
                block("10.0.0.0/26", "a", 2, 1, 58),
                block("10.0.1.0/26", "b", 0, 0, 61),
                block("fd00::/122", "a", 2, 0, 60),
            ],
        );
        let text = serde_json::to_string(&status_of(&it)).unwrap();
        it.blocks.reverse();
        it.pools.reverse();
        assert_eq!(serde_json::to_string(&status_of(&it)).unwrap(), text);
        let status = status_of(&it);
        assert_eq!(status.pools.len(), 2);
        assert_eq!((status.pools[0].demand, status.pools[1].demand), (6, 1));
    }

    #[test]
    fn the_status_is_never_too_large() {
        let long = "x".repeat(10_000);
        let mut it = snapshot(&[], &[block("fd00::/64", "a", 0, 0, u64::MAX)]);
        it.blocks[0].uid.clone_from(&long);
        let addr = Addr::parse_strict("10.0.0.1").unwrap();
        let orphans = vec![(addr, long); 1_000];
        let status = status(&it, &BTreeMap::new(), &orphans, |_| false, "boot");
        assert_eq!(status.orphans.len(), MOST_ORPHANS);
        assert_eq!(status.orphans[0].pod_uid.len(), 128);
        assert_eq!(status.blocks[0].free, 1 << 53);
        assert_eq!(status.blocks[0].uid.len(), 128);
    }

    /// Each write of a status makes the API server write the complete object to etcd, and there are thousands of nodes.
    /// So the object must be small.
    #[test]
    fn the_status_of_a_node_with_two_blocks_and_110_pods_is_less_than_a_kilobyte() {
        let uid = "01234567-89ab-cdef-0123-456789abcdef";
        let mut blocks = [
            block("10.244.123.64/26", "production", 61, 0, 0),
            block("fd00:10:244:123::40/122", "production", 61, 0, 0),
        ];
        for it in &mut blocks {
            uid.clone_into(&mut it.uid);
        }
        let mut it = snapshot(&[pool("production", (3, 50), true, true)], &blocks);
        it.node_uid = Some(uid.to_owned());
        for n in 0..110 {
            let address = format!("10.244.123.{n}");
            it.attachments
                .push(record(&format!("c{n}"), &format!("u{n}"), &[&address]));
        }
        let status = status(&it, &wanted(&it, &PendingAdds::new()), &[], |_| false, uid);
        let size = serde_json::to_vec(&status).unwrap().len();
        assert!(size <= 1_024, "{size} bytes: {status:?}");
    }

    #[test]
    fn a_range_is_reported_as_withdrawn_once_it_is_stored() {
        let cidr = |text| Cidr::parse_strict(text).unwrap();
        let mut it = snapshot(&[], &[block("10.0.0.0/26", "a", 2, 0, 54)]);
        it.blocks[0].counts.withdrawn = 4;
        it.withdrawn = vec![cidr("10.0.0.16/30")];
        let pending = |range, is_empty| PendingWithdrawal {
            range: cidr(range),
            is_empty,
        };
        it.pending_withdrawals = vec![pending("10.0.0.0/30", false), pending("10.0.0.8/30", true)];
        let status = status_of(&it);
        assert_eq!(status.withdrawn, ["10.0.0.16/30"]);
        assert_eq!(status.withdrawing, ["10.0.0.0/30"]);
        assert_eq!(status.blocks[0].withdrawn, 4);
    }

    #[test]
    fn a_released_block_has_nothing_free_and_a_pod_cidr_is_no_block() {
        let mut gone = block("10.0.0.0/26", "a", 0, 0, 61);
        gone.state = BlockState::Released;
        let mut range = block("10.1.0.0/24", "b", 5, 0, 10);
        range.uid = "node".to_owned();
        let status = status_of(&snapshot(&[], &[gone, range]));
        assert_eq!(status.blocks.len(), 1);
        assert!(status.blocks[0].released && status.blocks[0].free == 0);
    }
}
