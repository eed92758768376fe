//! What an agent promises, without how it does it: it assigns addresses from the blocks that it has seen listed, until it
//! has reported a block as released.
//!
//! It is not the shipped agent, which `host` runs. It does at once what that one may do at any time: it adopts each
//! block that it sees, and releases each empty block that is recalled.

use std::collections::BTreeMap;

use cadastre_api::{AllocatedBlock, BlockStatus, NodeSubnetStatus, PoolDemand};
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::Subnet;
use cadastre_core::Cidr;

/// The pool of all scenarios.
const POOL: &str = "pool";

/// An agent, and the pods of its node.
#[derive(Clone, Debug)]
pub struct Agent {
    pub node: NodeName,
    pub uid: ObjectUid,
    /// How many addresses the node's pods need
    pub need: i64,
    /// The blocks that it may assign addresses from, by UID
    held: BTreeMap<String, Held>,
    /// The last version of the NodeSubnet that it has seen or written, with the need that it has reported
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

    /// The blocks from which it may assign addresses.
    pub fn held(&self) -> impl Iterator<Item = Cidr> + '_ {
        let held = self.held.values().filter(|it| !it.is_released);
        held.map(|it| it.cidr)
    }

    /// How many addresses its blocks have.
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

    /// Handles the NodeSubnet. Returns the status to write.
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

    /// Handles the success of its write.
    pub fn wrote(&mut self, version: u64, status: &NodeSubnetStatus) {
        let demand = status.pools.iter().map(|it| it.demand).sum();
        self.seen = Some((version, demand));
    }

    /// Gives the pods addresses from the blocks, as far as they suffice.
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

/// How many addresses of an IPv4 block pods may get.
fn size(block: &Cidr) -> i64 {
    1 << (32 - block.len())
}
