//! What the agent's decisions read from a snapshot of the store.

use cadastre_core::Addr;
use cadastre_core::holding::{Block, Holding, PoolTerms};
use cadastre_node::{BlockCount, BlockState, Snapshot, Tenant};

/// Whether a range is a podCIDR: not asked for by the agent, never let go.
pub fn is_pod_cidr(snapshot: &Snapshot, block: &BlockCount) -> bool {
    snapshot.node_uid.as_deref() == Some(block.uid.as_str())
}

/// Whether addresses are given from it.
pub fn gives(block: &BlockCount) -> bool {
    block.state == BlockState::Held
}

/// Addresses of a block that are not free.
pub fn busy(block: &BlockCount) -> u64 {
    block.counts.used.saturating_add(block.counts.cooling)
}

/// Addresses of a block that it can give, and those that it has given.
pub fn capacity(block: &BlockCount) -> u64 {
    busy(block).saturating_add(block.counts.free)
}

/// The terms of a pool, if any are known.
pub fn terms<'a>(snapshot: &'a Snapshot, pool: &str) -> Option<&'a PoolTerms> {
    let mut pools = snapshot.pools.iter().map(|it| &it.terms);
    pools.find(|terms| terms.name == pool)
}

/// The addresses of an attachment.
pub fn addresses(tenant: &Tenant) -> impl Iterator<Item = Addr> {
    tenant.given.addresses.iter().map(|it| it.address)
}

/// The UID of its pod; empty if the runtime did not tell one.
pub fn pod_uid(tenant: &Tenant) -> &str {
    tenant.pod.as_ref().map_or("", |pod| pod.uid.as_str())
}

/// What is held, as far as the store knows: enough for files and watchers, also without the API.
/// What is reserved is not in it.
pub fn as_holding(snapshot: &Snapshot) -> Holding {
    let listed = |it: &&BlockCount| it.state.is_listed();
    let block = |it: &BlockCount| Block {
        cidr: it.cidr,
        uid: it.uid.clone(),
        pool: it.pool.clone(),
        draining: it.state == BlockState::Draining,
        reserved: Vec::new(),
        on_request: Vec::new(),
    };
    Holding {
        node_uid: snapshot.node_uid.clone().unwrap_or_default(),
        blocks: snapshot.blocks.iter().filter(listed).map(block).collect(),
        pools: snapshot.pools.iter().map(|it| it.terms.clone()).collect(),
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use cadastre_core::Cidr;
    use cadastre_core::holding::FamilyTerms;
    use cadastre_node::{Attachment, Counts, Given, GivenAddress, PodRef, PoolCount};

    /// A pool of these families.
    pub fn pool(name: &str, warm: (u32, u32), ipv4: bool, ipv6: bool) -> PoolTerms {
        PoolTerms {
            warm,
            ipv4: ipv4.then(FamilyTerms::default),
            ipv6: ipv6.then(FamilyTerms::default),
            ..PoolTerms::named(name)
        }
    }

    /// A block with addresses in use, cooling and free.
    pub fn block(cidr: &str, pool: &str, used: u64, cooling: u64, free: u64) -> BlockCount {
        BlockCount {
            cidr: Cidr::parse_strict(cidr).unwrap(),
            uid: format!("uid-of-{cidr}"),
            pool: pool.to_owned(),
            state: BlockState::Held,
            counts: Counts {
                used,
                cooling,
                free,
            },
            room: used + cooling + free,
        }
    }

    /// What the node with the UID `node` holds.
    pub fn snapshot(pools: &[PoolTerms], blocks: &[BlockCount]) -> Snapshot {
        let pool = |terms: &PoolTerms| PoolCount {
            terms: terms.clone(),
            counts: cadastre_core::Dual::default(),
        };
        Snapshot {
            node_uid: Some("node".to_owned()),
            blocks: blocks.to_vec(),
            pools: pools.iter().map(pool).collect(),
            tenants: Vec::new(),
        }
    }

    /// An attachment `net`/`container`/`eth0` of a pod in the boot `boot`.
    pub fn tenant(container: &str, pod_uid: &str, addresses: &[&str]) -> Tenant {
        let given = |text: &&str| {
            let address = Addr::parse_strict(text).unwrap();
            GivenAddress {
                address,
                prefix: 32,
                gateway: None,
                pool: "a".to_owned(),
                block: Cidr::host(address),
            }
        };
        Tenant {
            attachment: Attachment {
                network: "net".to_owned(),
                container_id: container.to_owned(),
                ifname: "eth0".to_owned(),
            },
            given: Given {
                addresses: addresses.iter().map(given).collect(),
                ..Given::default()
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
}
