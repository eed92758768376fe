//! What the controller asks of the API server, and what comes back.
//!
//! A request is a value; [`super::writer`] turns it into HTTP. Every write carries the guard its
//! decision rested on, so that a late or repeated write cannot do harm: it is refused.

use std::time::Duration;

use super::seen::{Block, BlockSpec, Node, Pod, Pool, Subnet, SubnetCondition, Text};
use cadastre_api::{IPPoolSpec, IPPoolStatus, NodeSubnetSpec};
use cadastre_core::Cidr;

/// Names one request in flight; never used twice by one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One call of the API server.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Request {
    /// All nodes, consistently (not from a cache that may be behind).
    ListNodes,
    /// All NodeSubnets, consistently.
    ListSubnets,
    /// One node, consistently.
    ReadNode { name: Text },
    /// One NodeSubnet, consistently.
    ReadSubnet { name: Text },
    /// One IPPool, consistently.
    ReadPool { name: Text },
    /// The pods bound to a node, consistently; the last look before its ranges are freed.
    ListPodsOf { node: Text },
    /// Gives a node its podCIDRs. JSON Patch that tests the UID, that there are none yet, and that
    /// the term annotation is what was read.
    AssignPodCidrs(Assignment),
    /// Sets the term annotation of a node. JSON Patch that tests the UID and that the annotation is
    /// what was read. Afterwards no assignment and no touch that was decided before can succeed.
    TouchNode(Touch),
    /// Creates the NodeSubnet of that name; refused when it exists.
    CreateSubnet { name: Text, spec: NodeSubnetSpec },
    /// Replaces its spec if it is still the version that was read.
    ReplaceSubnet {
        name: Text,
        uid: Text,
        version: u64,
        spec: NodeSubnetSpec,
    },
    /// Deletes it if it is still the version that was read.
    DeleteSubnet { name: Text, uid: Text, version: u64 },
    /// What kubeadm was told of the cluster: its ConfigMap.
    ReadKubeadm,
    /// Creates a pool; refused when it exists.
    CreatePool { name: Text, spec: Box<IPPoolSpec> },
    /// All IPAMBlocks, consistently.
    ListBlocks,
    /// One IPAMBlock, consistently.
    ReadBlock { name: Text },
    /// Creates a block under the name of its CIDR; refused when it exists.
    CreateBlock { name: Text, spec: BlockSpec },
    /// Replaces its spec if it is still the version that was read.
    ReplaceBlock {
        name: Text,
        uid: Text,
        version: u64,
        spec: BlockSpec,
    },
    /// Deletes it if it is still the version that was read.
    DeleteBlock { name: Text, uid: Text, version: u64 },
    /// Replaces the conditions of a NodeSubnet if it is still the version that was read: others write there, too.
    SetSubnetConditions {
        name: Text,
        uid: Text,
        version: u64,
        conditions: Vec<SubnetCondition>,
    },
    /// Replaces the finalizers of a pool if it is still the version that was read.
    SetPoolFinalizers {
        name: Text,
        uid: Text,
        version: u64,
        finalizers: Vec<String>,
    },
    /// Replaces the status of a pool if it is still the version that was read.
    SetPoolStatus {
        name: Text,
        uid: Text,
        version: u64,
        status: IPPoolStatus,
    },
}

/// podCIDRs for one node, with the guards.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The node's name
    pub name: Text,
    /// Its UID: a node re-created under the name is not meant
    pub uid: Text,
    /// The term annotation as read
    pub term: Option<Text>,
    /// Whether it had any annotation when read
    pub annotated: bool,
    /// At most one a family; the first one is also `spec.podCIDR`
    pub cidrs: Vec<Cidr>,
}

/// A new term for one node, with the guards.
///
/// A touch is guarded like an assignment: an old leader's touch that lands late must not set its
/// term back, and so open the fence for its own late assignments.
#[derive(Clone, Debug, PartialEq)]
pub struct Touch {
    /// The node's name
    pub name: Text,
    /// The node's UID: a node re-created under the name is not meant
    pub uid: Text,
    /// The term annotation as read
    pub from: Option<Text>,
    /// Whether it had any annotation when read
    pub annotated: bool,
    /// The term to set
    pub term: Text,
}

impl Request {
    /// Whether the request changes anything: only the leader may send it.
    pub fn is_write(&self) -> bool {
        !matches!(
            self,
            Request::ListNodes
                | Request::ListSubnets
                | Request::ReadNode { .. }
                | Request::ReadSubnet { .. }
                | Request::ReadPool { .. }
                | Request::ListPodsOf { .. }
                | Request::ListBlocks
                | Request::ReadKubeadm
                | Request::ReadBlock { .. }
        )
    }

    /// Whether it is a write that might do harm if it were decided by somebody who leads no more. An
    /// assignment waits for being named by the Lease already; a touch fences off, a status decides
    /// nothing.
    pub fn is_numbered(&self) -> bool {
        self.is_write()
            && !matches!(
                self,
                Request::AssignPodCidrs(_)
                    | Request::TouchNode(_)
                    | Request::SetPoolStatus { .. }
                    | Request::SetSubnetConditions { .. }
            )
    }
}

/// What became of a request.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
pub enum Outcome {
    /// The node as it is after the request.
    Node(Node),
    /// The NodeSubnet as it is after the request.
    Subnet(Subnet),
    /// The pool as it is after the request.
    Pool(Pool),
    /// All of them.
    Nodes(Vec<Node>),
    /// All of them.
    Subnets(Vec<Subnet>),
    /// The block as it is after the request.
    Block(Block),
    /// All of them.
    Blocks(Vec<Block>),
    /// The text that kubeadm has left, if there is any.
    Kubeadm(Option<String>),
    /// The node's pods.
    Pods(Vec<Pod>),
    /// Deleted, or already gone.
    Gone,
    /// The request surely took no effect and never will.
    Refused(Refusal),
    /// Nobody knows: a lost answer, a time-out, a server error. It may have happened, and it may
    /// still happen. The text says what was seen.
    Unclear(String),
}

/// Why a request took no effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// A guard failed: resourceVersion, UID, a JSON Patch test, an existing name (409, 422).
    Guard(String),
    /// No such object (404).
    Missing,
    /// Not allowed or not understood (400, 401, 403, 405, 413, ..., and 422 where a policy, a webhook
    /// or the schema says no): somebody must act.
    Rejected(String),
    /// The server is busy; again after that time (429, 503 before execution).
    Busy(Option<Duration>),
    /// Never sent: no longer the leader, or shutting down.
    NotSent,
}
/// A request to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Comes back with the answer.
    pub id: RequestId,
    /// What to ask
    pub request: Request,
    /// For writes, the tenure it was decided under: sent only while that tenure is valid.
    pub term: Option<Text>,
    /// The loop it belongs to
    pub loop_name: &'static str,
    /// For writes, the number of [`super::lease::Wanted`] for which the Lease must have been written first
    pub number: u64,
}
