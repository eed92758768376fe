//! Requests to the API server, and their outcomes, as values.
//!
//! [`super::writer`] turns requests into HTTP. Every write contains guards: the state on which its decision was based.
//! The API server rejects the write if the state has changed, so a late or repeated write does no harm.

use std::time::Duration;

use serde_json::Value;

use super::names::{ClaimName, NodeName, ObjectUid, TermId};
use super::objects::{
    Block, BlockSpec, Claim, FrrConfiguration, IpamClaim, Node, NodeTaint, Object, Pod, Pool,
    Routes, Subnet, SubnetCondition, Text,
};
use cadastre_api::frr::FRR_KIND;
use cadastre_api::ipam_claim::{IPAM_CLAIM_API_VERSION, IPAM_CLAIM_KIND};
use cadastre_api::{
    IPAMClaimIps, IPClaimSpec, IPClaimStatus, IPPoolSpec, IPPoolStatus, NodeRoutesSpec,
    NodeSubnetSpec,
};
use cadastre_core::Cidr;
use cadastre_daemon::watch::FRR_CONFIGURATIONS;

/// Number of a request. A process uses each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A kind of objects that the controller reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "named for what they are")]
pub enum ObjectKind {
    Node,
    Subnet,
    Routes,
    FrrConfiguration,
    Block,
    Pool,
    Claim,
    Pod,
}

impl ObjectKind {
    /// All kinds of which the controller creates or changes objects. `Pod` is missing, because pods are only evicted.
    pub const ALL: [ObjectKind; 7] = [
        ObjectKind::Node,
        ObjectKind::Subnet,
        ObjectKind::Routes,
        ObjectKind::FrrConfiguration,
        ObjectKind::Block,
        ObjectKind::Pool,
        ObjectKind::Claim,
    ];

    /// Returns the plural in the API, such as `nodesubnets`. Watches, metrics and paths name the kind by its plural.
    pub const fn plural(self) -> &'static str {
        match self {
            ObjectKind::Node => "nodes",
            ObjectKind::Subnet => "nodesubnets",
            ObjectKind::Routes => "noderoutes",
            ObjectKind::FrrConfiguration => FRR_CONFIGURATIONS,
            ObjectKind::Block => "ipamblocks",
            ObjectKind::Pool => "ippools",
            ObjectKind::Claim => "ipclaims",
            ObjectKind::Pod => "pods",
        }
    }

    /// Returns the `kind` in the API, such as `NodeSubnet`.
    pub fn name(self) -> &'static str {
        match self {
            ObjectKind::Node => "Node",
            ObjectKind::Subnet => "NodeSubnet",
            ObjectKind::Routes => "NodeRoutes",
            ObjectKind::FrrConfiguration => FRR_KIND,
            ObjectKind::Block => "IPAMBlock",
            ObjectKind::Pool => "IPPool",
            ObjectKind::Claim => "IPClaim",
            ObjectKind::Pod => "Pod",
        }
    }
}

/// One call to the API server. Every write contains the state on which it was decided, as a guard.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum ApiRequest {
    /// Lists all objects of a kind. The API server reads the list from etcd, not from its cache.
    List(ObjectKind),
    /// Reads one object from etcd, not from the API server's cache.
    Read(ObjectKind, Text),
    /// Lists the pods that are bound to the node. This list is the last check before the node's ranges become free. The
    /// list is consistent, unless `not_older_than` is a revision of etcd. Then it may come from the API server's cache,
    /// as soon as the cache has reached this revision.
    ListPodsOf {
        node: NodeName,
        not_older_than: Option<u64>,
    },
    /// Reads kubeadm's ConfigMap, which may name ranges for the default pool.
    ReadKubeadm,
    /// Creates an object of that name. The API server rejects the creation if the name exists.
    Create(Text, ObjectSpec),
    /// Replaces the spec of an object if its version is still the one that was read.
    Replace(KnownObject, ObjectSpec),
    /// Deletes an object if its version is still the one that was read.
    Delete(ObjectKind, KnownObject),
    /// Writes a node's podCIDRs by a JSON Patch. The patch tests the UID, that there are no podCIDRs yet, and that the
    /// term annotation is the one that was read.
    AssignPodCidrs(PodCidrAllocation),
    /// Sets the term annotation of a node by a JSON Patch. The patch tests the UID and that the annotation is the one
    /// that was read. Afterwards every allocation or touch that was decided with the earlier annotation is rejected.
    TouchNode(NodeTouch),
    /// Replaces the taints of a node by a JSON Patch. The patch tests the UID, and that the taints are those that were
    /// read.
    SetTaints(TaintsChange),
    /// Sets or removes the condition `AddressesExhausted` of a node if the Node still has this UID.
    SetExhausted(ExhaustedChange),
    /// Evicts a pod without an address if its version is still the one that was read.
    Evict(KnownObject),
    /// Replaces the conditions of a NodeSubnet if its version is still the one that was read, because other programs
    /// write conditions, too.
    SetSubnetConditions(KnownObject, Vec<SubnetCondition>),
    /// Replaces the finalizers of an object if its version is still the one that was read.
    SetFinalizers(ObjectKind, KnownObject, Vec<String>),
    /// Replaces the status of a pool if its version is still the one that was read.
    SetPoolStatus(KnownObject, IPPoolStatus),
    /// Replaces the status of a claim if its version is still the one that was read.
    SetClaimStatus(KnownObject, IPClaimStatus),
    /// Reads an IPAMClaim of that name. The API server may not have this kind.
    ReadIpamClaim(ClaimName),
    /// Writes the addresses of an IPAMClaim to its status if the IPAMClaim still has this UID and version.
    FillIpamClaim(KnownObject, IPAMClaimIps),
}

/// The spec of an object to create or replace. A request always writes all fields of the spec.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "named for what they are")]
pub enum ObjectSpec {
    Subnet(NodeSubnetSpec),
    Routes(NodeRoutesSpec),
    /// The spec of an FRRConfiguration as JSON, because a part of it comes from the settings
    FrrConfiguration(Value),
    Block(BlockSpec),
    Pool(Box<IPPoolSpec>),
    Claim(Box<NewClaim>),
}

/// An IPClaim to create for a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct NewClaim {
    /// The spec of the claim: its pool, and how long the claim stays after its last use
    pub spec: IPClaimSpec,
    /// The object that owns the claim: a pod, a StatefulSet or an IPAMClaim; `None` if nothing owns it
    pub owner: Option<ClaimOwner>,
}

/// The object that owns a claim. The garbage collector deletes the claim after this object is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct ClaimOwner {
    pub kind: ClaimOwnerKind,
    pub name: Text,
    pub uid: ObjectUid,
}

/// The kind of the object that owns a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named for what they are")]
pub enum ClaimOwnerKind {
    Pod,
    StatefulSet,
    IpamClaim,
}

impl ClaimOwnerKind {
    pub(crate) fn api_version(self) -> &'static str {
        match self {
            ClaimOwnerKind::Pod => "v1",
            ClaimOwnerKind::StatefulSet => "apps/v1",
            ClaimOwnerKind::IpamClaim => IPAM_CLAIM_API_VERSION,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            ClaimOwnerKind::Pod => "Pod",
            ClaimOwnerKind::StatefulSet => "StatefulSet",
            ClaimOwnerKind::IpamClaim => IPAM_CLAIM_KIND,
        }
    }
}

impl ObjectSpec {
    /// Returns the kind of object that has this spec.
    pub fn kind(&self) -> ObjectKind {
        match self {
            ObjectSpec::Subnet(_) => ObjectKind::Subnet,
            ObjectSpec::Routes(_) => ObjectKind::Routes,
            ObjectSpec::FrrConfiguration(_) => ObjectKind::FrrConfiguration,
            ObjectSpec::Block(_) => ObjectKind::Block,
            ObjectSpec::Pool(_) => ObjectKind::Pool,
            ObjectSpec::Claim(_) => ObjectKind::Claim,
        }
    }
}

/// Identity and version of an object as it was read.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct KnownObject {
    pub name: Text,
    pub uid: ObjectUid,
    pub version: u64,
}

impl KnownObject {
    /// Returns identity and version of a cached object, for the guards of a write.
    pub fn of(object: &impl Object) -> Self {
        KnownObject {
            name: object.name().clone().into(),
            uid: object.uid().clone(),
            version: object.version(),
        }
    }
}

/// The podCIDRs to write to a node, with the guards.
#[derive(Clone, Debug, PartialEq)]
pub struct PodCidrAllocation {
    /// Name of the node that gets the podCIDRs
    pub name: NodeName,
    /// UID of the node; a Node that was created again under this name has another UID
    pub uid: ObjectUid,
    /// The term in the node's annotation when the node was read. The JSON Patch tests that this term is unchanged
    pub term: Option<TermId>,
    /// Whether the node had any annotation when it was read
    pub annotated: bool,
    /// The podCIDRs, at most one per family. The first one is also written as `spec.podCIDR`
    pub cidrs: Vec<Cidr>,
}

/// A touch: a write of the leader's term to a Node's annotation, with the guards.
///
/// A touch needs the same guards as an allocation. Without guards, a late touch by an earlier leader could restore the
/// earlier term, and then late allocations by that leader would succeed.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeTouch {
    /// Name of the node that gets the term
    pub name: NodeName,
    /// UID of the node; a Node that was created again under this name has another UID
    pub uid: ObjectUid,
    /// The term in the node's annotation when the node was read. The JSON Patch tests that this term is unchanged
    pub from: Option<TermId>,
    /// Whether the node had any annotation when it was read
    pub annotated: bool,
    /// The term of this leader, which replaces the earlier term in the node's annotation
    pub term: TermId,
}

/// The taints to write to a node, with the guards.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct TaintsChange {
    pub name: NodeName,
    pub uid: ObjectUid,
    /// All taints of the node when it was read. The JSON Patch tests that they are unchanged
    pub before: Box<[NodeTaint]>,
    /// All taints that the node gets
    pub after: Box<[NodeTaint]>,
}

/// A change of the condition `AddressesExhausted` of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct ExhaustedChange {
    /// Name of the node whose condition changes
    pub name: NodeName,
    /// UID of the node; a Node that was created again under this name has another UID
    pub uid: ObjectUid,
    /// The message of the condition; `None` removes the condition
    pub message: Option<Text>,
    /// Whether the node had the condition, with another message, when it was read. Then the condition keeps its
    /// transition time
    pub was_true: bool,
}

impl ApiRequest {
    /// Returns whether the request is a write. Only the leader may send writes.
    pub fn is_write(&self) -> bool {
        !matches!(
            self,
            ApiRequest::List(_)
                | ApiRequest::Read(..)
                | ApiRequest::ListPodsOf { .. }
                | ApiRequest::ReadKubeadm
                | ApiRequest::ReadIpamClaim(_)
        )
    }

    /// Returns the kind of object that the request is about, with the name if the request is about a single object.
    pub fn about(&self) -> Option<(ObjectKind, Option<&str>)> {
        let (kind, name): (_, &str) = match self {
            ApiRequest::List(kind) => return Some((*kind, None)),
            ApiRequest::ListPodsOf { .. }
            | ApiRequest::ReadKubeadm
            | ApiRequest::ReadIpamClaim(_)
            | ApiRequest::FillIpamClaim(..) => return None,
            ApiRequest::Read(kind, name) => (*kind, name),
            ApiRequest::Delete(kind, known) | ApiRequest::SetFinalizers(kind, known, _) => {
                (*kind, &known.name)
            }
            ApiRequest::Create(name, spec) => (spec.kind(), name),
            ApiRequest::Replace(known, spec) => (spec.kind(), &known.name),
            ApiRequest::AssignPodCidrs(assignment) => (ObjectKind::Node, &assignment.name),
            ApiRequest::TouchNode(touch) => (ObjectKind::Node, &touch.name),
            ApiRequest::Evict(pod) => (ObjectKind::Pod, &pod.name),
            ApiRequest::SetTaints(change) => (ObjectKind::Node, &change.name),
            ApiRequest::SetExhausted(change) => (ObjectKind::Node, &change.name),
            ApiRequest::SetSubnetConditions(known, _) => (ObjectKind::Subnet, &known.name),
            ApiRequest::SetPoolStatus(known, _) => (ObjectKind::Pool, &known.name),
            ApiRequest::SetClaimStatus(known, _) => (ObjectKind::Claim, &known.name),
        };
        Some((kind, Some(name)))
    }

    /// Returns whether the request must wait until a write of the Lease has succeeded. Most writes must wait, because a
    /// process that has lost leadership could do harm by them. These writes need not wait:
    /// - allocations of podCIDRs, because they wait until the Lease names them
    /// - touches of Nodes, because touches are a part of the fence
    /// - writes of a pool's status or a NodeSubnet's conditions, because no decision is based on these
    /// - taints and conditions of Nodes, because no decision about addresses is based on these
    /// - writes of addresses to an IPAMClaim's status, because no decision is based on these
    pub fn is_numbered(&self) -> bool {
        self.is_write()
            && !matches!(
                self,
                ApiRequest::AssignPodCidrs(_)
                    | ApiRequest::TouchNode(_)
                    | ApiRequest::SetTaints(_)
                    | ApiRequest::SetExhausted(_)
                    | ApiRequest::SetPoolStatus(..)
                    | ApiRequest::SetSubnetConditions(..)
                    | ApiRequest::FillIpamClaim(..)
            )
    }
}

/// The outcome of a request, as far as the answer proves it.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
pub enum RequestOutcome {
    /// The Node that the API server returned to a read or a write.
    Node(Node),
    /// The NodeSubnet that the API server returned to a read or a write.
    Subnet(Subnet),
    /// The NodeRoutes that the API server returned to a read or a write.
    Routes(Routes),
    /// The FRRConfiguration that the API server returned to a read or a write.
    FrrConfiguration(FrrConfiguration),
    /// The IPPool that the API server returned to a read or a write.
    Pool(Pool),
    /// All nodes, as the answer to a list.
    Nodes(Vec<Node>),
    /// All NodeSubnets, as the answer to a list.
    Subnets(Vec<Subnet>),
    /// The IPClaim that the API server returned to a read or a write.
    Claim(Claim),
    /// All NodeRoutes, as the answer to a list.
    RoutesList(Vec<Routes>),
    /// All FRRConfigurations of the controller, as the answer to a list.
    FrrConfigurations(Vec<FrrConfiguration>),
    /// All claims, as the answer to a list.
    Claims(Vec<Claim>),
    /// The IPAMBlock that the API server returned to a read or a write.
    Block(Block),
    /// All blocks, as the answer to a list.
    Blocks(Vec<Block>),
    /// All pools, as the answer to a list.
    Pools(Vec<Pool>),
    /// An IPAMClaim, as the answer to a read or a write of its status.
    IpamClaim(IpamClaim),
    /// The text of kubeadm's `ClusterConfiguration`; `None` if the ConfigMap lacks this key.
    Kubeadm(Option<String>),
    /// The pods that are bound to the node that the request names. If the list is consistent, also contains the revision
    /// of etcd that it shows.
    Pods(Vec<Pod>, Option<u64>),
    /// The object does not exist any more; perhaps it was deleted before the request.
    Gone,
    /// The request had no effect, and will never have one.
    Rejected(Rejection),
    /// Indeterminate: the answer was lost or late, or was a server error. The request may have taken effect, or may
    /// still do so. The text describes the failure.
    Indeterminate(String),
}

impl RequestOutcome {
    /// Returns the kind and the version of the object that the API server has, if the watch of its kind has to deliver
    /// it.
    pub fn stored(&self) -> Option<(ObjectKind, u64)> {
        Some(match self {
            Self::Node(it) => (ObjectKind::Node, it.version),
            Self::Subnet(it) => (ObjectKind::Subnet, it.version),
            Self::Routes(it) => (ObjectKind::Routes, it.version),
            Self::Pool(it) => (ObjectKind::Pool, it.version),
            Self::Claim(it) => (ObjectKind::Claim, it.version),
            Self::Block(it) => (ObjectKind::Block, it.version),
            _ => return None,
        })
    }
}

/// Why a request had no effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Rejection {
    /// A guard failed: the resourceVersion, the UID or a JSON Patch test did not match, or the name exists (409, 422).
    Guard(String),
    /// The object does not exist (404).
    Missing,
    /// The request is forbidden or invalid (400, 401, 403, 405, 413, ..., and 422 from a policy, a webhook or the
    /// schema). An administrator must act.
    Rejected(String),
    /// The server is busy (429, or 503 to a read), or a finalizer still keeps the object to delete. Contains the delay
    /// that the server asks for.
    Busy(Option<Duration>),
    /// The request was never sent, because this process no longer leads or is shutting down.
    NotSent,
}
/// A request that the state machine wants to send, with the term and number that the writer checks before it sends a
/// write.
#[derive(Clone, Debug)]
pub struct OutgoingRequest {
    /// Number by which the answer is matched to the request
    pub id: RequestId,
    /// What to read, list or write
    pub request: ApiRequest,
    /// For writes, the term in which the write was decided. The write is sent only while that term is valid
    pub term: Option<TermId>,
    /// Name of the loop to which the request belongs, for metrics and logs
    pub loop_name: &'static str,
    /// For writes, the number that a write of the Lease must reach first (see [`super::lease::LeaseContent`])
    pub number: u64,
}
