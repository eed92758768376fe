//! A model of an agent that has only what an agent guarantees: it assigns addresses from blocks that it has received as
//! listed, until it has reported a block as released.
//!
//! The shipped agent, which `host` runs, may delay each step. The model does not wait: it adopts each block at once,
//! and releases each empty block that is recalled.

use std::collections::BTreeMap;

use cadastre_api::{AllocatedBlock, BlockStatus, NodeSubnetStatus, PoolDemand};
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::Subnet;
use cadastre_core::Cidr;

/// The name of the pool in all scenarios.
const POOL: &str = "pool";

/// The model of one node's agent, with the pods of the node.
#[derive(Clone, Debug)]
pub struct Agent {
    pub node: NodeName,
    pub uid: ObjectUid,
    /// How many addresses the node's pods need
    pub need: i64,
    /// The adopted blocks, by UID. A released block is removed once the NodeSubnet no longer lists it
    held: BTreeMap<String, Held>,
    /// The version of the NodeSubnet that the agent received or wrote last, and the need that it reported then
    seen: Option<(u64, i64)>,
}

#[derive(Clone, Debug)]
struct Held {
    cidr: Cidr,
    used: i64,
    is_released: bool,
}

impl Agent {
    pub fn new(node: NodeName, uid: ObjectUid) -> Self {
        Agent {
            node,
            uid,
            need: 0,
            held: BTreeMap::new(),
            seen: None,
        }
    }

    /// The blocks from which the agent may assign addresses.
    pub fn held(&self) -> impl Iterator<Item = Cidr> + '_ {
        let held = self.held.values().filter(|it| !it.is_released);
        held.map(|it| it.cidr)
    }

    /// The number of addresses in all blocks from which the agent may assign.
    pub fn capacity(&self) -> i64 {
        self.held().map(|it| size(&it)).sum()
    }

    pub fn need(&mut self, need: i64) {
        self.need = need;
        self.assign();
    }

    pub fn has_news(&self, subnet: &Subnet) -> bool {
        let is_own = |subnet: &Subnet| {
            let spec = subnet.spec.as_ref();
            spec.is_ok_and(|it| it.node_uid.as_deref() == Some(&*self.uid))
        };
        is_own(subnet) && self.seen != Some((subnet.version, self.need))
    }

    /// Handles a received NodeSubnet. Returns the status to write, or `None` if the spec cannot be parsed.
    pub fn sees(&mut self, subnet: &Subnet) -> Option<NodeSubnetStatus> {
        let spec = subnet.spec.as_ref().ok()?;
        self.held
            .retain(|uid, it| !it.is_released || spec.blocks.iter().any(|block| block.uid == *uid));
        for block in &spec.blocks {
            let held = self.held.entry(block.uid.clone()).or_insert_with(|| Held {
                cidr: Cidr::parse_strict(&block.cidr).unwrap(),
                used: 0,
                is_released: false,
            });
            held.is_released |= block.recall.is_some() && held.used == 0;
        }
        self.assign();
        self.seen = Some((subnet.version, self.need));
        Some(self.status(&spec.blocks))
    }

    /// Handles the success of the agent's write of its status.
    pub fn wrote(&mut self, version: u64, status: &NodeSubnetStatus) {
        let demand = status.pools.iter().map(|it| it.demand).sum();
        self.seen = Some((version, demand));
    }

    /// Assigns addresses of the blocks to the pods, as many as the blocks have.
    fn assign(&mut self) {
        let mut left = self.need;
        for block in self.held.values_mut().filter(|it| !it.is_released) {
            block.used = left.min(size(&block.cidr));
            left -= block.used;
        }
    }

    fn status(&self, listed: &[AllocatedBlock]) -> NodeSubnetStatus {
        let held = listed
            .iter()
            .filter_map(|it| self.held.get_key_value(&it.uid));
        let blocks = held.map(|(uid, it)| BlockStatus {
            cidr: it.cidr.to_string(),
            uid: uid.clone(),
            used: it.used,
            cooling: 0,
            free: size(&it.cidr) - it.used,
            withdrawn: 0,
            released: it.is_released,
        });
        NodeSubnetStatus {
            node_uid: Some(self.uid.to_string()),
            pools: vec![PoolDemand {
                pool: POOL.to_owned(),
                demand: self.need,
            }],
            blocks: blocks.collect(),
            ..NodeSubnetStatus::default()
        }
    }
}

/// The number of addresses of an IPv4 block. In this model, pods can use all of them.
fn size(block: &Cidr) -> i64 {
    1 << (32 - block.len())
}
