//! What the controller asks of the API server, and what comes back.
//!
//! A request is a value; [`super::writer`] turns it into HTTP. Every write carries the guard its
//! decision rested on, so that a late or repeated write cannot do harm: it is refused.

use std::time::Duration;

use super::seen::{Block, BlockSpec, Node, Object, Pod, Pool, Subnet, SubnetCondition, Text};
use cadastre_api::{IPPoolSpec, IPPoolStatus, NodeSubnetSpec};
use cadastre_core::Cidr;

/// Names one request in flight; never used twice by one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A kind of objects that the controller reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "named for what they are")]
pub enum Kind {
    Node,
    Subnet,
    Block,
    Pool,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Node, Kind::Subnet, Kind::Block, Kind::Pool];

    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Node => "Node",
            Kind::Subnet => "NodeSubnet",
            Kind::Block => "IPAMBlock",
            Kind::Pool => "IPPool",
        }
    }
}

/// One call of the API server: a verb, and what it is about.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Request {
    /// All objects of a kind, consistently (not from a cache that may be behind).
    List(Kind),
    /// One object, consistently.
    Read(Kind, Text),
    /// The pods bound to a node, consistently; the last look before its ranges are freed.
    ListPodsOf { node: Text },
    /// What kubeadm was told of the cluster: its ConfigMap.
    ReadKubeadm,
    /// Creates an object of that name; refused when it exists.
    Create(Text, Spec),
    /// Replaces the spec of an object if it is still the version that was read.
    Replace(Known, Spec),
    /// Deletes an object if it is still the version that was read.
    Delete(Kind, Known),
    /// Gives a node its podCIDRs. JSON Patch that tests the UID, that there are none yet, and that
    /// the term annotation is what was read.
    AssignPodCidrs(Assignment),
    /// Sets the term annotation of a node. JSON Patch that tests the UID and that the annotation is
    /// what was read. Afterwards no assignment and no touch that was decided before can succeed.
    TouchNode(Touch),
    /// Replaces the conditions of a NodeSubnet if it is still the version that was read: others write there, too.
    SetSubnetConditions(Known, Vec<SubnetCondition>),
    /// Replaces the finalizers of a pool if it is still the version that was read.
    SetPoolFinalizers(Known, Vec<String>),
    /// Replaces the status of a pool if it is still the version that was read.
    SetPoolStatus(Known, IPPoolStatus),
}

/// The spec of an object that is written whole.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "named for what they are")]
pub enum Spec {
    Subnet(NodeSubnetSpec),
    Block(BlockSpec),
    Pool(Box<IPPoolSpec>),
}

impl Spec {
    /// Of which kind it is.
    pub fn kind(&self) -> Kind {
        match self {
            Spec::Subnet(_) => Kind::Subnet,
            Spec::Block(_) => Kind::Block,
            Spec::Pool(_) => Kind::Pool,
        }
    }
}

/// An object as it was read.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct Known {
    pub name: Text,
    pub uid: Text,
    pub version: u64,
}

impl Known {
    /// That object.
    pub fn of(object: &impl Object) -> Self {
        Known {
            name: object.name().clone(),
            uid: object.uid().clone(),
            version: object.version(),
        }
    }
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
            Request::List(_)
                | Request::Read(..)
                | Request::ListPodsOf { .. }
                | Request::ReadKubeadm
        )
    }

    /// The kind that it is about, and the object where it is about one.
    pub fn about(&self) -> Option<(Kind, Option<&Text>)> {
        let (kind, name) = match self {
            Request::List(kind) => return Some((*kind, None)),
            Request::ListPodsOf { .. } | Request::ReadKubeadm => return None,
            Request::Read(kind, name) => (*kind, name),
            Request::Delete(kind, known) => (*kind, &known.name),
            Request::Create(name, spec) => (spec.kind(), name),
            Request::Replace(known, spec) => (spec.kind(), &known.name),
            Request::AssignPodCidrs(assignment) => (Kind::Node, &assignment.name),
            Request::TouchNode(touch) => (Kind::Node, &touch.name),
            Request::SetSubnetConditions(known, _) => (Kind::Subnet, &known.name),
            Request::SetPoolFinalizers(known, _) | Request::SetPoolStatus(known, _) => {
                (Kind::Pool, &known.name)
            }
        };
        Some((kind, Some(name)))
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
                    | Request::SetPoolStatus(..)
                    | Request::SetSubnetConditions(..)
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
    /// All of them.
    Pools(Vec<Pool>),
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
