//! The purposes of requests. The purpose decides which loop gets the answer.

use std::time::Duration;

use crate::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use crate::cluster::request::ObjectKind;
use cadastre_core::{Cidr, HoldingId};

/// The next request that a block's object needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// No request is needed, because the object is as it should be.
    Settled,
    /// No request is sent, because the watch has to deliver the created object first.
    Await,
    /// Create the object.
    Create,
    /// Replace the object's spec by the spec that follows from the ledger.
    Replace,
    /// Delete the object.
    Delete,
}

impl Step {
    /// Returns whether the step needs a write: a creation, a replacement or a deletion.
    pub fn is_write(self) -> bool {
        matches!(self, Step::Create | Step::Replace | Step::Delete)
    }
}

/// What a request does for an IPAMClaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpamClaimStep {
    /// Read the IPAMClaim.
    Read,
    /// Create the IPClaim that the IPAMClaim owns.
    Create,
    /// Write the addresses to the status of the IPAMClaim.
    Fill,
}

/// The purpose of a request in flight. When the answer arrives, the state machine passes purpose and answer to the loop
/// that sent the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Purpose {
    /// A list of all objects of one kind, for the fence. The API server reads the list from etcd and not from its cache
    Relist(ObjectKind),
    /// The list of NodeSubnets at the end of the agent grace. It is read from etcd, so it contains the reports of all
    /// agents. No block is allocated before this list is in the cache
    Listening,
    /// The fence's touch of a node, or the read of the node after a touch that was rejected or is indeterminate
    Touch { name: NodeName, uid: ObjectUid },
    /// The write of a node's podCIDRs, or the read of the node after a write that conflicted or is indeterminate
    Assign { name: NodeName, uid: ObjectUid },
    /// A write of a NodeSubnet, or the read after a write that conflicted or is indeterminate. `urgent` is true if the
    /// node waits for the write
    Subnet { name: NodeName, urgent: bool },
    /// A list of all NodeRoutes or all FRRConfigurations. No block is deleted before the list is in the cache, because
    /// earlier leaders may have written objects that the watch has not delivered yet
    ListRoutes(ObjectKind),
    /// A write or a read of the object of this kind that lists the ranges of a node: its NodeRoutes or FRRConfiguration
    Routes { kind: ObjectKind, name: NodeName },
    /// The list of a deleted node's pods. It is the last check before the node's podCIDRs become free. The list contains
    /// all changes that were made before the monotonic time `as_of`
    Quarantine {
        name: NodeName,
        uid: ObjectUid,
        as_of: Duration,
    },
    /// A request about a block's object: the write of `step`, or a read if there is no step. Two blocks can have the
    /// same CIDR one after the other. `holding` distinguishes them, so that an answer about an earlier block does not
    /// reach the later one
    Block {
        cidr: Cidr,
        holding: HoldingId,
        step: Option<Step>,
    },
    /// The list of a deleted node's pods. It is the last check before the node's blocks become free. The list contains
    /// all changes that were made before the monotonic time `as_of`
    BlockPods {
        name: NodeName,
        uid: ObjectUid,
        as_of: Duration,
    },
    /// A list of a node's pods, from which the leak loop learns whether the pods of orphans are gone. If they are gone,
    /// the orphans become leak candidates
    LeakPods { name: NodeName, uid: ObjectUid },
    /// The read of kubeadm's configuration, from which the ranges of the default pool are taken, or the creation of
    /// that pool
    DefaultPool,
    /// A write of the controller's conditions in a NodeSubnet's status. For example, the condition `Accepted` reports
    /// invalid entries of the agent's status
    Answer { name: NodeName },
    /// A write of a node's taints
    Taints { name: NodeName },
    /// A write of a node's condition `AddressesExhausted`
    Exhausted { name: NodeName },
    /// The eviction of a pod of the node. The node has no address for the pod
    Evict { name: NodeName, pod_uid: ObjectUid },
    /// A write of a pool's finalizers
    PoolFinalizers { name: PoolName },
    /// A write of a pool's status. Also the read of the pool after a write of its status or finalizers that conflicted
    /// or is indeterminate
    PoolStatus { name: PoolName },
    /// A write of a claim's status or finalizers, or its deletion. Also the read of the claim after a write that
    /// conflicted or is indeterminate
    Claim { name: ClaimName },
    /// The creation of the claim of a pod. Also the read of the claim after a creation that conflicted or is
    /// indeterminate
    PodClaim { name: ClaimName },
    /// A request for an IPAMClaim, or the creation of its IPClaim
    IpamClaim {
        name: ClaimName,
        step: IpamClaimStep,
    },
}

impl Purpose {
    /// Returns the name of the loop that sent the request. Metrics have this name in the label `name` or `loop`.
    pub fn loop_name(&self) -> &'static str {
        match self {
            Purpose::Relist(_) | Purpose::Touch { .. } => "fence",
            Purpose::Assign { .. } => "podcidr",
            Purpose::Subnet { .. } | Purpose::Answer { .. } => "subnet",
            Purpose::Taints { .. } | Purpose::Exhausted { .. } | Purpose::Evict { .. } => {
                "exhaustion"
            }
            Purpose::ListRoutes(ObjectKind::FrrConfiguration)
            | Purpose::Routes {
                kind: ObjectKind::FrrConfiguration,
                ..
            } => "frr_configuration",
            Purpose::ListRoutes(_) | Purpose::Routes { .. } => "routes",
            Purpose::LeakPods { .. } => "leaks",
            Purpose::Block { .. } | Purpose::BlockPods { .. } => "block",
            Purpose::Quarantine { .. } => "quarantine",
            Purpose::PoolFinalizers { .. } | Purpose::PoolStatus { .. } => "pool",
            Purpose::Claim { .. } => "claim",
            Purpose::PodClaim { .. } => "pod_claim",
            Purpose::IpamClaim { .. } => "ipam_claim",
            Purpose::DefaultPool => "default_pool",
            Purpose::Listening => "listening",
        }
    }
}
