//! What is told in NodeSubnet.status: a pure function of what is given and held.
//!
//! # Guarantees
//! - Equal state gives equal text: lists are sorted, nothing in it is a time of writing.
//! - It fits: no list and no text is longer than the API takes. What is cut off is what nobody
//!   decides by (the controller has the blocks' counts for that).

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::demand::Want;
use super::snapshot::{addresses, is_pod_cidr};
use super::superseded::superseded;
use crate::api::{
    AgentInfo, Allocation, BlockReport, MOST_ALLOCATIONS, MOST_BLOCKS, MOST_POOLS,
    NodeSubnetStatus, PoolDemand,
};
use crate::ipam::Addr;
use crate::node::{Attachment, BlockCount, BlockState, PodRef, Snapshot, Tenant};

/// What all JSON readers count exactly, and more than any node has.
const MOST_COUNT: u64 = 1 << 53;
/// A demand above this is taken for a mistake.
const MOST_DEMAND: u64 = 1_000_000;

/// The status of the node, told in the boot of that id; conditions are not the agent's.
pub fn status(snapshot: &Snapshot, wants: &BTreeMap<String, Want>, boot: &str) -> NodeSubnetStatus {
    let pools = wants.iter().map(|(pool, want)| PoolDemand {
        pool: pool.clone(),
        demand: count(want.demand.min(MOST_DEMAND)),
    });
    NodeSubnetStatus {
        node_uid: snapshot.node_uid.clone(),
        pools: pools.take(MOST_POOLS).collect(),
        blocks: blocks(snapshot),
        agent: Some(AgentInfo {
            version: cut(crate::VERSION, 64),
            boot_id: cut(boot, 64),
        }),
        allocations: allocations(&snapshot.tenants, boot),
        ..NodeSubnetStatus::default()
    }
}

/// Blocks that the controller lists or that are in use; podCIDRs are not blocks.
fn blocks(snapshot: &Snapshot) -> Vec<BlockReport> {
    let blocks = snapshot
        .blocks
        .iter()
        .filter(|it| !is_pod_cidr(snapshot, it));
    let mut blocks: Vec<_> = blocks.collect();
    blocks.sort_by_key(|it| it.cidr);
    let report = |it: &BlockCount| {
        let released = it.state == BlockState::Released;
        BlockReport {
            cidr: it.cidr.to_string(),
            uid: cut(&it.uid, 128),
            used: count(it.counts.used),
            cooling: count(it.counts.cooling),
            free: count(if released { 0 } else { it.counts.free }),
            released,
        }
    };
    blocks.into_iter().map(report).take(MOST_BLOCKS).collect()
}

fn allocations(tenants: &[Tenant], boot: &str) -> Vec<Allocation> {
    let superseded = superseded(tenants, boot);
    let each = |tenant| addresses(tenant).map(move |addr| (addr, tenant));
    let mut all: Vec<(Addr, &Tenant)> = tenants.iter().flat_map(each).collect();
    all.sort_by_key(|(addr, _)| *addr);
    let tell = |(addr, tenant): (Addr, &Tenant)| {
        let pod = tenant.pod.as_ref();
        Allocation {
            address: addr.to_string(),
            handle: cut(&handle(&tenant.attachment), 512),
            pod: pod.map_or_else(String::new, |it| cut(&pod_name(it), 317)),
            pod_uid: pod.map_or_else(String::new, |it| cut(&it.uid, 128)),
            interface: cut(&tenant.attachment.ifname, 15),
            since: since(tenant.since_ms),
            superseded: superseded.contains(&tenant.attachment),
        }
    };
    all.into_iter().map(tell).take(MOST_ALLOCATIONS).collect()
}

/// Under what an address is released: `network/containerID`. A network's name has no slash.
pub fn handle(attachment: &Attachment) -> String {
    format!("{}/{}", attachment.network, attachment.container_id)
}

fn pod_name(pod: &PodRef) -> String {
    match (pod.namespace.as_str(), pod.name.as_str()) {
        ("", "") => String::new(),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}

/// To the second: nobody decides by it.
fn since(ms: i64) -> Option<Time> {
    Timestamp::from_second(ms.div_euclid(1000)).ok().map(Time)
}

fn count(count: u64) -> i64 {
    i64::try_from(count.min(MOST_COUNT)).unwrap_or(i64::MAX)
}

fn cut(text: &str, longest: usize) -> String {
    text.chars().take(longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::demand::{Wishes, wanted};
    use crate::agent::snapshot::testing::{block, pool, snapshot, tenant};

    fn told(snapshot: &Snapshot) -> NodeSubnetStatus {
        status(snapshot, &wanted(snapshot, &Wishes::new()), "boot")
    }

    #[test]
    fn equal_state_gives_equal_text_in_whatever_order_it_is_kept() {
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
        it.tenants = vec![
            tenant("c1", "u1", &["10.0.0.9", "fd00::9"]),
            tenant("c2", "", &["10.0.0.5", "fd00::5"]),
        ];
        let text = serde_json::to_string(&told(&it)).unwrap();
        it.tenants.reverse();
        it.blocks.reverse();
        it.pools.reverse();
        assert_eq!(serde_json::to_string(&told(&it)).unwrap(), text);
        let status = told(&it);
        let addresses: Vec<&str> = status
            .allocations
            .iter()
            .map(|it| it.address.as_str())
            .collect();
        assert_eq!(addresses, ["10.0.0.5", "10.0.0.9", "fd00::5", "fd00::9"]);
        let first = &status.allocations[1];
        assert_eq!(
            (
                first.handle.as_str(),
                first.pod.as_str(),
                first.pod_uid.as_str(),
                first.interface.as_str()
            ),
            ("net/c1", "default/pod-u1", "u1", "eth0")
        );
        assert_eq!(status.allocations[0].pod, "");
        assert_eq!(status.pools.len(), 2);
        assert_eq!((status.pools[0].demand, status.pools[1].demand), (6, 1));
    }

    #[test]
    fn what_a_newer_sandbox_of_its_pod_supersedes_is_told_so() {
        let mut it = snapshot(&[], &[]);
        it.tenants = vec![
            tenant("c1", "u1", &["10.0.0.1", "fd00::1"]),
            tenant("c2", "u1", &["10.0.0.2", "fd00::2"]),
        ];
        it.tenants[1].order = 2;
        let told = told(&it).allocations;
        let told: Vec<bool> = told.iter().map(|it| it.superseded).collect();
        assert_eq!(told, [true, false, true, false]);
    }

    #[test]
    fn it_fits_whatever_is_held() {
        let long = "x".repeat(10_000);
        let mut it = snapshot(&[], &[block("fd00::/64", "a", 0, 0, u64::MAX)]);
        it.blocks[0].uid.clone_from(&long);
        for n in 1..3_000u32 {
            let v4 = format!("10.1.{}.{}", n >> 8, n & 255);
            let v6 = format!("fd00::1:{n:x}");
            it.tenants.push(tenant(&long, &long, &[&v4, &v6]));
        }
        let status = told(&it);
        assert_eq!(status.allocations.len(), MOST_ALLOCATIONS);
        assert_eq!(status.blocks[0].free, 1 << 53);
        assert_eq!(status.blocks[0].uid.len(), 128);
        let one = &status.allocations[0];
        assert_eq!(
            (one.handle.len(), one.pod.len(), one.pod_uid.len()),
            (512, 317, 128)
        );
    }

    #[test]
    fn a_released_block_has_nothing_free_and_a_pod_cidr_is_no_block() {
        let mut gone = block("10.0.0.0/26", "a", 0, 0, 61);
        gone.state = BlockState::Released;
        let mut range = block("10.1.0.0/24", "b", 5, 0, 10);
        range.uid = "node".to_owned();
        let status = told(&snapshot(&[], &[gone, range]));
        assert_eq!(status.blocks.len(), 1);
        assert!(status.blocks[0].released && status.blocks[0].free == 0);
    }
}
