//! What requests are for.

use crate::cluster::request::Kind;
use crate::cluster::seen::Text;
use cadastre_core::{Cidr, ClaimId};

/// What has to be done about a block's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Settled,
    /// Wait until the watch shows it.
    Await,
    /// Create it.
    Create,
    /// Write it as it should be.
    Replace,
    /// Delete it.
    Delete,
}

impl Step {
    /// Whether it is a write of the object.
    pub fn is_write(self) -> bool {
        matches!(self, Step::Create | Step::Replace | Step::Delete)
    }
}

/// What a request in flight is for; comes back with the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Purpose {
    /// A consistent list of the fence
    Relist(Kind),
    /// The consistent list of NodeSubnets after agents were listened to
    Listening,
    /// The fence's touch of one node, or a read of what became of it
    Touch { name: Text, uid: Text },
    /// podCIDRs for a node, or a read of what became of them
    Assign { name: Text, uid: Text },
    /// A write of a NodeSubnet, or a read of what became of it, and whether a node waits for it
    Subnet { name: Text, urgent: bool },
    /// The last look at a dead node's pods
    Quarantine { name: Text, uid: Text },
    /// A write of a block's object, or a read of it, for whom has that claim: an answer to what an
    /// earlier block of the CIDR asked for is not for the next one
    Block {
        cidr: Cidr,
        claim: ClaimId,
        step: Option<Step>,
    },
    /// The last look at the pods of a dead node that had blocks
    BlockPods { name: Text, uid: Text },
    /// The last look at a node's pods before its agent is asked about addresses
    LeakPods { name: Text, uid: Text },
    /// What kubeadm has left, or the creation of the default pool
    DefaultPool,
    /// The answer to an agent's status
    Answer { name: Text },
    /// A write of a pool's finalizers
    PoolFinalizers { name: Text },
    /// A write of a pool's status, or a read of what became of a write
    PoolStatus { name: Text },
}

impl Purpose {
    /// The loop that asked: the label of its metrics.
    pub fn loop_name(&self) -> &'static str {
        match self {
            Purpose::Relist(_) | Purpose::Touch { .. } => "fence",
            Purpose::Assign { .. } => "podcidr",
            Purpose::Subnet { .. } | Purpose::Answer { .. } => "subnet",
            Purpose::LeakPods { .. } => "leaks",
            Purpose::Block { .. } | Purpose::BlockPods { .. } => "block",
            Purpose::Quarantine { .. } => "quarantine",
            Purpose::PoolFinalizers { .. } | Purpose::PoolStatus { .. } => "pool",
            Purpose::DefaultPool => "default_pool",
            Purpose::Listening => "listening",
        }
    }
}
