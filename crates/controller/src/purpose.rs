//! What each request is for: the key by which its answer finds the loop that sent it.

use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::request::ObjectKind;
use cadastre_core::{Cidr, ClaimId};

/// The next request that a block's object needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the object is as it should be.
    Settled,
    /// Wait until the watch shows the created object.
    Await,
    /// Create the object.
    Create,
    /// Write the object with the spec that the ledger wants.
    Replace,
    /// Delete the object.
    Delete,
}

impl Step {
    /// Returns whether this step writes the object.
    pub fn is_write(self) -> bool {
        matches!(self, Step::Create | Step::Replace | Step::Delete)
    }
}

/// What a request in flight is for. It comes back with the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Purpose {
    /// A consistent list for the fence
    Relist(ObjectKind),
    /// The consistent list of NodeSubnets that ends the time in which agents are listened to
    Listening,
    /// The fence's touch of a node, or the read after a touch of indeterminate outcome
    Touch { name: NodeName, uid: ObjectUid },
    /// The write of a node's podCIDRs, or the read after a write of indeterminate outcome
    Assign { name: NodeName, uid: ObjectUid },
    /// A write of a NodeSubnet, or the read after one; `urgent` if its node waits for it
    Subnet { name: NodeName, urgent: bool },
    /// The last list of a deleted node's pods before its podCIDRs become free
    Quarantine { name: NodeName, uid: ObjectUid },
    /// A write of a block's object (`step`) or a read (no step). `claim` tells blocks of the same CIDR apart: an
    /// answer for an earlier block must not reach the next one
    Block {
        cidr: Cidr,
        claim: ClaimId,
        step: Option<Step>,
    },
    /// The last list of a deleted node's pods before its blocks become free
    BlockPods { name: NodeName, uid: ObjectUid },
    /// The list of a node's pods before its agent is asked about leak candidates
    LeakPods { name: NodeName, uid: ObjectUid },
    /// The read of kubeadm's configuration, or the creation of the default pool
    DefaultPool,
    /// A write of the status conditions that answer an agent's report
    Answer { name: NodeName },
    /// A write of a pool's finalizers
    PoolFinalizers { name: PoolName },
    /// A write of a pool's status, or the read after a write of indeterminate outcome
    PoolStatus { name: PoolName },
}

impl Purpose {
    /// Returns the name of the loop that sent the request, which is the `name` label of its metrics.
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
