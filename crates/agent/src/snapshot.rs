//! Values that the agent computes from a snapshot of the store.

use cadastre_core::node_allocation::{Block, NodeAllocation, PoolTerms, is_claim};
use cadastre_core::{Addr, Cidr, Family};
use cadastre_node::{AttachmentRecord, BlockCount, BlockState, Snapshot};

/// Whether a range is a podCIDR. The agent neither requests nor releases podCIDRs.
pub(crate) fn is_pod_cidr(snapshot: &Snapshot, block: &BlockCount) -> bool {
    snapshot.node_uid.as_deref() == Some(block.uid.as_str())
}

/// Whether new addresses may be assigned from the block.
pub(crate) fn assigns(block: &BlockCount) -> bool {
    block.state == BlockState::Active
}

/// Returns how many addresses of a block are in use, cooling or withdrawn. If there are any, the block must not be
/// released.
pub(crate) fn busy(block: &BlockCount) -> u64 {
    let counts = &block.counts;
    let in_use = counts.used.saturating_add(counts.cooling);
    in_use.saturating_add(counts.withdrawn)
}

/// Returns how many addresses of a block can be used for pods. Addresses that are in use, cooling or withdrawn count,
/// too.
pub(crate) fn capacity(block: &BlockCount) -> u64 {
    busy(block).saturating_add(block.counts.free)
}

/// Returns the settings of a pool; `None` if the store does not know the pool.
pub(crate) fn terms<'a>(snapshot: &'a Snapshot, pool: &str) -> Option<&'a PoolTerms> {
    let mut pools = snapshot.pools.iter().map(|it| &it.terms);
    pools.find(|terms| terms.name == pool)
}

pub(crate) fn addresses(record: &AttachmentRecord) -> impl Iterator<Item = Addr> {
    record.given.addresses.iter().map(|it| it.address)
}

/// Returns the UID of the attachment's pod; empty if the runtime reported none.
pub(crate) fn pod_uid(record: &AttachmentRecord) -> &str {
    record.pod.as_ref().map_or("", |pod| pod.uid.as_str())
}

/// Returns all ranges of the node's pools, including those in which the node has no block.
pub(crate) fn pool_cidrs(allocation: &NodeAllocation) -> impl Iterator<Item = Cidr> {
    let pools = allocation.pools.iter();
    let families = pools.flat_map(|pool| Family::ALL.map(|it| pool.family(it)));
    families.flatten().flat_map(|it| it.cidrs.iter().copied())
}

/// Returns the node's ranges as recorded in the store, for the files and for gRPC clients. Because the ranges come from
/// the store, they are known even if the API server does not answer. Reserved addresses and the pools of claims are
/// left out.
pub(crate) fn allocation(snapshot: &Snapshot) -> NodeAllocation {
    let listed = snapshot.blocks.iter().filter(|it| it.state.is_listed());
    let block = |it: &BlockCount| Block {
        cidr: it.cidr,
        uid: it.uid.clone(),
        pool: it.pool.clone(),
        draining: it.state == BlockState::Draining,
        borrowed: it.borrowed,
        reserved: Vec::new(),
        on_request: Vec::new(),
    };
    let pools = snapshot.pools.iter().map(|it| &it.terms);
    NodeAllocation {
        node_uid: snapshot.node_uid.clone().unwrap_or_default(),
        blocks: listed.map(block).collect(),
        pools: pools.filter(|it| !is_claim(&it.name)).cloned().collect(),
        ..NodeAllocation::default()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{block, pool, snapshot};
    use super::*;

    #[test]
    fn the_pool_of_a_claim_is_none_for_other_programs() {
        let pools = [
            pool("a", (0, 0), true, false),
            pool("shop/db", (0, 0), true, false),
        ];
        let blocks = [
            block("10.0.0.0/26", "a", 0, 0, 60),
            block("10.0.0.65/32", "shop/db", 0, 0, 1),
        ];
        let it = allocation(&snapshot(&pools, &blocks));
        let names: Vec<&str> = it.pools.iter().map(|it| it.name.as_str()).collect();
        assert_eq!((names, it.blocks.len()), (vec!["a"], 2));
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use cadastre_core::node_allocation::FamilyTerms;
    use cadastre_node::{
        AddressAssignment, AddressCounts, AssignedAddress, Attachment, PodRef, PoolCount,
    };

    /// Returns a pool with these families. `warm` is the pair of the marks `low` and `high`.
    pub(crate) fn pool(name: &str, warm: (u32, u32), ipv4: bool, ipv6: bool) -> PoolTerms {
        PoolTerms {
            warm,
            ipv4: ipv4.then(FamilyTerms::default),
            ipv6: ipv6.then(FamilyTerms::default),
            ..PoolTerms::named(name)
        }
    }

    /// Returns a block with this many addresses in use, in cooldown and free.
    pub(crate) fn block(cidr: &str, pool: &str, used: u64, cooling: u64, free: u64) -> BlockCount {
        BlockCount {
            cidr: Cidr::parse_strict(cidr).unwrap(),
            uid: format!("uid-of-{cidr}"),
            pool: pool.to_owned(),
            borrowed: false,
            state: BlockState::Active,
            counts: AddressCounts {
                used,
                cooling,
                free,
                ..AddressCounts::default()
            },
            room: used + cooling + free,
        }
    }

    /// Returns the snapshot of a node with the UID `node`.
    pub(crate) fn snapshot(pools: &[PoolTerms], blocks: &[BlockCount]) -> Snapshot {
        let pool = |terms: &PoolTerms| PoolCount {
            terms: terms.clone(),
            counts: cadastre_core::Dual::default(),
        };
        Snapshot {
            node_uid: Some("node".to_owned()),
            blocks: blocks.to_vec(),
            pools: pools.iter().map(pool).collect(),
            ..Snapshot::default()
        }
    }

    /// Returns the attachment of the interface `eth0` of a container on the network `net`.
    pub(crate) fn attachment(container: &str) -> Attachment {
        Attachment {
            network: "net".to_owned(),
            container_id: container.to_owned(),
            ifname: "eth0".to_owned(),
        }
    }

    /// Returns the record of an attachment that was set up in the boot `boot`. If `pod_uid` is empty, the attachment
    /// has no pod.
    pub(crate) fn record(container: &str, pod_uid: &str, addresses: &[&str]) -> AttachmentRecord {
        let assigned = |text: &&str| {
            let address = addr(text);
            AssignedAddress {
                address,
                prefix: 32,
                gateway: None,
                pool: "a".to_owned(),
                block: Cidr::host(address),
            }
        };
        AttachmentRecord {
            attachment: attachment(container),
            given: AddressAssignment {
                addresses: addresses.iter().map(assigned).collect(),
                ..AddressAssignment::default()
            },
            pod: (!pod_uid.is_empty()).then(|| PodRef {
                namespace: "default".to_owned(),
                name: format!("pod-{pod_uid}"),
                uid: pod_uid.to_owned(),
            }),
            netns: format!("/var/run/netns/{container}"),
            since_ms: 1_800_000_000_000,
            boot: "boot".to_owned(),
            order: 1,
        }
    }

    pub(crate) fn addr(text: &str) -> Addr {
        Addr::parse_strict(text).unwrap()
    }

    /// Returns a range of the pool `p` as the API lists it. If `uid` is `node`, the range is a podCIDR of the Node
    /// `node`.
    pub(crate) fn range(cidr: &str, uid: &str) -> Block {
        Block {
            cidr: Cidr::parse_strict(cidr).unwrap(),
            uid: uid.to_owned(),
            pool: "p".to_owned(),
            draining: false,
            borrowed: false,
            reserved: Vec::new(),
            on_request: Vec::new(),
        }
    }

    /// Returns an allocation of these blocks to the Node `node`. They are blocks of the pool `p`, which has the range
    /// 10.0.0.0/16.
    pub(crate) fn allocation(cidrs: &[&str]) -> NodeAllocation {
        let ipv4 = FamilyTerms {
            cidrs: vec![Cidr::parse_strict("10.0.0.0/16").unwrap()],
            ..FamilyTerms::default()
        };
        NodeAllocation {
            node_uid: "node".to_owned(),
            blocks: cidrs.iter().map(|it| range(it, "block")).collect(),
            pools: vec![PoolTerms {
                ipv4: Some(ipv4),
                ..PoolTerms::named("p")
            }],
            ..NodeAllocation::default()
        }
    }
}
