//! The cached objects, with the few fields that decisions need.
//!
//! Full Kubernetes objects are dropped as soon as these fields are extracted. So a cached node takes a few hundred
//! bytes, and a cached pod a few dozen. All types are plain data, so the loops run the same in production and in the
//! simulation.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::names::{ClaimName, NodeName, ObjectUid, PoolName, TermId};
use cadastre_api::{
    CLAIM_FINALIZER, EXHAUSTED_TAINT, IPClaimStatus, IPPoolSpec, IPPoolStatus, NodeRoutesSpec,
    NodeSubnetSpec, ParentBlock, Requests,
};
use cadastre_core::{Addr, Cidr};

/// A shared, immutable string for values without a type of their own: labels, conditions, names of blocks and pods.
pub type Text = Arc<str>;

/// An object that a [`super::object_cache::ObjectCache`] can contain.
pub trait Object {
    /// The type of the name, such as [`NodeName`]. For objects in namespaces, the name is `namespace/name`.
    type Name: Clone + Ord + Into<Text>;
    /// Returns the name, which is the key in the cache.
    fn name(&self) -> &Self::Name;
    /// Returns the UID. Objects with the same name but different UIDs are different objects.
    fn uid(&self) -> &ObjectUid;
    /// Returns `metadata.resourceVersion` as a number. Only versions of objects of the same kind can be compared.
    fn version(&self) -> u64;
    /// Replaces texts by equal texts of `known`, an earlier version of this object, so that memory contains them once.
    fn share_texts(&mut self, known: &Self);
}

macro_rules! object {
    ($($kind:ty: $name:ty $(, shares $($part:ident).+)*;)*) => {$(
        impl Object for $kind {
            type Name = $name;
            fn name(&self) -> &$name { &self.name }
            fn uid(&self) -> &ObjectUid { &self.uid }
            fn version(&self) -> u64 { self.version }
            fn share_texts(&mut self, known: &Self) {
                share(&mut self.name, &known.name);
                share(&mut self.uid, &known.uid);
                $(share(&mut self.$($part).+, &known.$($part).+);)*
            }
        }
    )*};
}

object! {
    Node: NodeName, shares machine;
    Subnet: NodeName;
    Routes: NodeName;
    FrrConfiguration: NodeName;
    Pool: PoolName;
    Block: Text, shares spec;
    Claim: ClaimName, shares spec, shares status.pool, shares status.node;
    ServiceRange: Text;
    Pod: Text;
}

/// Replaces a value by a clone of `known` if both are equal. Clones share texts, equal values need not.
fn share<T: PartialEq + Clone>(value: &mut T, known: &T) {
    if value == known {
        value.clone_from(known);
    }
}

/// A NodeRoutes: the ranges that are reached through a node, and the addresses of that node.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// `metadata.name`: the node's name
    pub name: NodeName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// `spec`; empty if it is invalid
    pub spec: NodeRoutesSpec,
}

/// An FRRConfiguration of frr-k8s, which says what a node announces by BGP.
#[derive(Clone, Debug, PartialEq)]
pub struct FrrConfiguration {
    /// The name of the node, which follows the prefix in `metadata.name`
    pub name: NodeName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// Whether the object has the label, and the prefix in its name, of the objects that the controller writes
    pub is_ours: bool,
    /// `spec`, as it is stored
    pub spec: Value,
}

/// The fields of a Node that decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// `metadata.name`
    pub name: NodeName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// `metadata.labels`, sorted by key
    pub labels: Box<[(Text, Text)]>,
    /// The annotation `cadastre.dev/term`. The leader's JSON Patches test this annotation, so that the API server
    /// rejects writes of earlier leaders
    pub term: Option<TermId>,
    /// The annotation `cadastre.dev/asn`: the AS number of the node, as text
    pub asn: Option<Text>,
    /// Whether the node has any annotation. If it has none, a JSON Patch cannot test the annotation `cadastre.dev/term`
    pub annotated: bool,
    /// Whether `metadata.deletionTimestamp` is set
    pub deleting: bool,
    /// The valid entries of `spec.podCIDRs`, or of `spec.podCIDR` if `spec.podCIDRs` is empty
    pub pod_cidrs: Box<[Cidr]>,
    /// Entries of `spec.podCIDRs` that are not CIDRs
    pub unreadable: Box<[Text]>,
    /// InternalIP entries of `status.addresses`, then the ExternalIP entries
    pub addresses: Box<[Addr]>,
    /// Identity of the machine, which stays the same if the Node object is deleted and created again
    pub machine: MachineIdentity,
    /// `spec.taints`, including those of other programs
    pub taints: Box<[NodeTaint]>,
    /// The message of the condition `AddressesExhausted`, if this condition is true
    pub exhausted: Option<Text>,
    /// How many pods the node may run (`status.capacity.pods`); 0 if unknown
    pub max_pods: u16,
}

/// A taint of a Node, with all fields that the API has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named as in the API")]
pub struct NodeTaint {
    pub key: Text,
    pub value: Option<Text>,
    pub effect: Text,
    pub time_added: Option<Text>,
}

impl NodeTaint {
    /// Returns the taint of a node that has no free address for another pod.
    pub fn exhausted() -> Self {
        NodeTaint {
            key: EXHAUSTED_TAINT.into(),
            value: None,
            effect: "NoSchedule".into(),
            time_added: None,
        }
    }

    /// Returns whether the controller adds and removes this taint. Taints of the same key with other effects belong to
    /// users.
    pub fn is_of_exhaustion(&self) -> bool {
        &*self.key == EXHAUSTED_TAINT && &*self.effect == "NoSchedule"
    }

    /// Returns whether one of the taints marks an exhausted node.
    pub(crate) fn is_any_of_exhaustion(taints: &[NodeTaint]) -> bool {
        taints.iter().any(NodeTaint::is_of_exhaustion)
    }
}

impl Node {
    /// Returns whether the node has no podCIDR yet, valid or not.
    pub fn is_empty(&self) -> bool {
        self.pod_cidrs.is_empty() && self.unreadable.is_empty()
    }
}

/// Identifies the machine behind a Node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineIdentity {
    /// `spec.providerID` of the Node; `None` if it is empty or too long
    pub provider_id: Option<Text>,
    /// `status.nodeInfo.machineID` of the Node; `None` if it is empty or too long
    pub machine_id: Option<Text>,
}

impl MachineIdentity {
    /// Returns whether both identities certainly mean the same machine. The provider IDs are compared if both have one,
    /// else the machine IDs. Returns false if neither ID can be compared.
    pub fn same(&self, other: &MachineIdentity) -> bool {
        match (&self.provider_id, &other.provider_id) {
            (Some(a), Some(b)) => a == b,
            _ => matches!((&self.machine_id, &other.machine_id), (Some(a), Some(b)) if a == b),
        }
    }
}

/// The fields of an IPPool that decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// `metadata.name`
    pub name: PoolName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// `metadata.generation`, which grows with each change of the spec
    pub generation: i64,
    /// `metadata.creationTimestamp`, seconds since 1970
    pub created: i64,
    /// Whether `metadata.deletionTimestamp` is set
    pub deleting: bool,
    /// `metadata.finalizers`, including those of other programs
    pub finalizers: Vec<String>,
    /// The spec, or why it is invalid
    pub spec: Result<IPPoolSpec, String>,
    /// The status as last written; `None` if it is invalid
    pub status: Option<IPPoolStatus>,
}

/// The fields of a NodeSubnet that decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Subnet {
    /// `metadata.name`: the node's name
    pub name: NodeName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// The spec, or why it is invalid
    pub spec: Result<NodeSubnetSpec, String>,
    /// Whether the spec had invalid parts, which are left out
    pub is_partial: bool,
    /// Whether `metadata.managedFields` is set. The next write of the spec removes it, because nothing needs it
    pub has_managed_fields: bool,
    /// Users' requests about the node, from annotations of the NodeSubnet
    pub requests: Requests,
    /// The valid parts of the status that the agent wrote; `None` if the status is not a JSON object
    pub report: Option<Box<AgentReport>>,
}

impl Subnet {
    /// Returns the conditions in the status, whoever wrote them.
    pub(crate) fn conditions(&self) -> &[SubnetCondition] {
        let report = self.report.as_ref();
        report.map_or(&[], |it| &it.conditions)
    }
}

/// What an agent reports about its node: the status of a NodeSubnet.
///
/// Invalid entries are left out and described in `refused`. The code that uses the report checks whether the valid
/// entries are about ranges of the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentReport {
    /// UID of the Node that the agent runs on. The controller ignores the report if the Node has another UID
    pub node_uid: ObjectUid,
    /// For each pool, how many addresses per family the node wants in all, including those that it has
    pub demand: Box<[(PoolName, u64)]>,
    /// Reports about single blocks, sorted by CIDR
    pub blocks: Box<[BlockReport]>,
    /// Addresses in use whose pods the agent no longer sees, with the UIDs of the pods; sorted, without repetition
    pub orphans: Box<[(Addr, PodUid)]>,
    /// Ranges that the agent has withdrawn, sorted, without repetition
    pub withdrawn: Box<[Cidr]>,
    /// Ranges that the agent cannot withdraw yet, because some of their addresses are in use or cooling; sorted,
    /// without repetition
    pub withdrawing: Box<[Cidr]>,
    /// The addresses that CNI requests for pods, sorted by the UIDs of the pods. A faulty agent may report pods of
    /// other nodes
    pub requests: Box<[AddressRequest]>,
    /// Descriptions of the first few invalid entries
    pub refused: Vec<String>,
    /// Number of all invalid entries, including those that `refused` does not describe
    pub refusals: u64,
    /// The conditions in the status, whoever wrote them
    pub conditions: Box<[SubnetCondition]>,
}

impl AgentReport {
    /// Returns the condition of that type, whoever wrote it.
    pub fn condition(&self, kind: &str) -> Option<&SubnetCondition> {
        self.conditions.iter().find(|it| &*it.kind == kind)
    }

    /// Returns what the agent reports about the block with that CIDR and UID.
    pub fn of_block(&self, cidr: &Cidr, uid: &ObjectUid) -> Option<&BlockReport> {
        let first = self.blocks.partition_point(|block| block.cidr < *cidr);
        let mut same = self.blocks[first..]
            .iter()
            .take_while(|block| block.cidr == *cidr);
        same.find(|block| block.uid == *uid)
    }
}

/// A condition of a NodeSubnet, as last written by anybody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetCondition {
    /// `type`, such as `Accepted`
    pub kind: Text,
    /// `status`: `True`, `False` or `Unknown`
    pub status: Text,
    /// `reason`, in CamelCase
    pub reason: Text,
    /// `message`, a text for users
    pub message: String,
    /// `lastTransitionTime` as text; empty if the condition is new
    pub since: Text,
    /// `observedGeneration`, if it is set
    pub generation: Option<i64>,
}

impl SubnetCondition {
    /// Returns whether type, status, reason and message of both conditions are equal.
    pub fn is_same_as(&self, other: &Self) -> bool {
        (&self.kind, &self.status) == (&other.kind, &other.status)
            && (&self.reason, &self.message) == (&other.reason, &other.message)
    }

    /// Returns whether the status is `True`.
    pub fn is_true(&self) -> bool {
        &*self.status == "True"
    }
}

/// What an agent reports about one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockReport {
    /// Range of the block. The block may belong to another node, because agents can report any range
    pub cidr: Cidr,
    /// The UID under which the NodeSubnet lists the block: the UID of the IPAMBlock. If the node was once a standby of
    /// the block, its standby number follows ([`cadastre_api::listed_uid`])
    pub uid: ObjectUid,
    /// Number of addresses that are assigned to attachments
    pub used: u64,
    /// Number of released addresses that wait before they are assigned again
    pub cooling: u64,
    /// Number of addresses that can be assigned now
    pub free: u64,
    /// Number of addresses in ranges that the agent has withdrawn
    pub withdrawn: u64,
    /// Whether the agent has released the block for good
    pub released: bool,
}

impl BlockReport {
    /// Returns the number of addresses in use, cooling or withdrawn. The sum saturates, because an agent may report any
    /// number.
    pub fn busy(&self) -> u64 {
        let in_use = self.used.saturating_add(self.cooling);
        in_use.saturating_add(self.withdrawn)
    }

    /// Returns whether the agent has the block and uses it: it has not released the block, and addresses of the block
    /// are in use, cooling or withdrawn.
    pub fn is_in_use(&self) -> bool {
        !self.released && self.busy() > 0
    }
}

/// A pod's UID in 16 bytes, to save memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(pub u128);

impl PodUid {
    /// Parses a UUID. Any other text is hashed to a number that is almost certainly unique.
    pub fn read(text: &str) -> Self {
        let digits = text.replace('-', "");
        let uuid = u128::from_str_radix(&digits, 16).ok();
        PodUid(
            uuid.filter(|_| digits.len() == 32)
                .unwrap_or_else(|| fnv(text)),
        )
    }
}

impl std::fmt::Display for PodUid {
    /// Formats the UID as a UUID. [`PodUid::read`] parses this text back to the same value.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = format!("{:032x}", self.0);
        let ends = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
        f.write_str(&ends.map(|(from, to)| &hex[from..to]).join("-"))
    }
}

/// Returns the 128-bit FNV-1a hash of a text.
fn fnv(text: &str) -> u128 {
    text.bytes()
        .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        })
}

/// The fields of an IPAMBlock that decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// `metadata.name`: the CIDR with hyphens
    pub name: Text,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// Whether the spec was changed after the creation. Before any change, `version` is that of the creation
    pub touched: bool,
    /// The spec, or why it is invalid
    pub spec: Result<BlockSpec, String>,
}

/// The parsed spec of an IPAMBlock.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// Range of the block; immutable, and the name of the object is derived from it
    pub cidr: Cidr,
    /// The pool from which the block was allocated; this pool may be gone
    pub pool: PoolName,
    /// The node that has the block; in quarantine, the deleted node that had the block
    pub owner: Owner,
    /// The wider block of which this block is a part; `None` if this block is not borrowed
    pub parent: Option<Parent>,
    /// When the block was allocated to the owner; in quarantine, when the quarantine began
    pub since: Timestamp,
    /// Earliest end of the quarantine; `None` if the block is not in quarantine
    pub until: Option<Timestamp>,
    /// UID of the VirtualMachineInstance for which a claim's address was allocated; `None` if the block is not for a
    /// virtual machine
    pub vmi: Option<ObjectUid>,
    /// The number that the owner got when it was added to `standby`; 0 if the owner was never a standby of this block
    pub number: u32,
    /// The standbys: nodes besides the owner that may have the address. Each has the number that it got when it was
    /// added
    pub standby: Vec<(Owner, u32)>,
    /// The highest number that a standby of this block has had. The next standby gets a higher number
    pub last_number: u32,
}

/// A block of which a node has lent a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Range of the wider block, which contains the lent part
    pub cidr: Cidr,
    /// Name of the node that has the block and has lent the part
    pub node: NodeName,
}

impl Parent {
    /// Parses the field `parent` of an IPAMBlock or of an entry in a NodeSubnet. The error says what is invalid.
    pub fn read(parent: &ParentBlock) -> Result<Self, String> {
        Ok(Parent {
            cidr: Cidr::parse_strict(&parent.cidr).map_err(|error| format!("parent: {error}"))?,
            node: parent.node.as_str().into(),
        })
    }

    /// Returns the value for the field `parent` of an IPAMBlock or of an entry in a NodeSubnet.
    pub fn text(&self) -> ParentBlock {
        ParentBlock {
            cidr: self.cidr.to_string(),
            node: self.node.to_string(),
        }
    }
}

/// The owner of a block: a node by name and UID, live or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Whether the node is deleted and the block in quarantine
    pub quarantined: bool,
    /// Name of the node, live or deleted
    pub name: NodeName,
    /// UID of the node; a later Node of the same name has another UID
    pub uid: ObjectUid,
    /// In quarantine, the machine that had the block; else empty
    pub machine: MachineIdentity,
}

impl Owner {
    /// Returns an owner that is a live node. Its block is not in quarantine.
    pub fn node(name: &NodeName, uid: &ObjectUid) -> Self {
        Owner {
            quarantined: false,
            name: name.clone(),
            uid: uid.clone(),
            machine: MachineIdentity::default(),
        }
    }
}

/// The fields of an IPClaim that decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// `namespace/name`
    pub name: ClaimName,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// `metadata.generation`, which grows with each change of the spec
    pub generation: i64,
    /// `metadata.creationTimestamp`, seconds since 1970
    pub created: i64,
    /// Whether `metadata.deletionTimestamp` is set
    pub deleting: bool,
    /// `metadata.finalizers`, including those of other programs
    pub finalizers: ClaimFinalizers,
    /// The spec, or why it is invalid
    pub spec: Result<ClaimSpec, String>,
    /// The status as last written
    pub status: ClaimStatus,
    /// The pod for whose requested addresses the controller has created the claim; `None` for any other claim. The
    /// claim is deleted when this pod is gone
    pub only_pod: Option<Box<OnlyPod>>,
    /// UID of the IPAMClaim that owns the claim, if one does. IPAMClaim and claim have the same name
    pub ipam_claim: Option<ObjectUid>,
}

/// The only pod that can use a claim, because the claim was created for the addresses that this pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnlyPod {
    /// Name of the pod, without its namespace
    pub name: Text,
    /// UID of the pod
    pub uid: ObjectUid,
}

/// The finalizers of an IPClaim. Nearly all claims in use have just the controller's, which takes no memory here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimFinalizers {
    has_own: bool,
    foreign: Box<[String]>,
}

impl From<Vec<String>> for ClaimFinalizers {
    fn from(mut all: Vec<String>) -> Self {
        let count = all.len();
        all.retain(|it| it != CLAIM_FINALIZER);
        ClaimFinalizers {
            has_own: all.len() < count,
            foreign: all.into(),
        }
    }
}

impl ClaimFinalizers {
    /// Returns the finalizers of other programs, then the controller's, if the claim has it.
    pub fn all(&self) -> Vec<String> {
        let own = self.has_own.then(|| CLAIM_FINALIZER.to_owned());
        self.foreign.iter().cloned().chain(own).collect()
    }

    /// Returns the finalizers of other programs.
    pub(crate) fn foreign(&self) -> Vec<String> {
        self.foreign.to_vec()
    }
}

impl Claim {
    /// Returns whether the claim has the controller's finalizer.
    pub fn has_finalizer(&self) -> bool {
        self.finalizers.has_own
    }

    /// Returns the state that the status shows, as in the label `state` of the metric `cadastre_claims`: `in_use` if a
    /// node has the addresses, `available` if no node has them, or `waiting` if the claim has no addresses.
    pub fn state(&self) -> &'static str {
        match (&self.status.node, &*self.status.addresses) {
            (Some(_), _) => "in_use",
            (None, [_, ..]) => "available",
            (None, []) => "waiting",
        }
    }

    /// Returns the addresses that the claim asks for, as a request for its only pod. Returns `None` if the claim has no
    /// [`Claim::only_pod`], or the spec is invalid.
    pub(crate) fn request(&self) -> Option<AddressRequest> {
        let pod = self.only_pod.as_ref()?;
        let (namespace, _) = self.name.split_once('/')?;
        Some(AddressRequest {
            pod: format!("{namespace}/{}", pod.name).into(),
            uid: pod.uid.clone(),
            addresses: self.spec.as_ref().ok()?.addresses.as_slice().into(),
        })
    }

    /// Returns whether no node has ever had the addresses, according to the status.
    pub fn is_unused(&self) -> bool {
        self.status.node.is_none() && self.status.released_at.is_none()
    }

    /// Returns the addresses that the status records.
    pub fn addresses(&self) -> impl Iterator<Item = Addr> + '_ {
        self.status.addresses.iter().copied()
    }
}

/// The fields of an IPClaim's status that decisions need, and a hash of the whole status. A cluster may have many
/// claims, so the texts in their statuses are not kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimStatus {
    /// The valid entries of `status.addresses`
    pub addresses: Box<[Addr]>,
    /// `status.pool`: the pool of the addresses
    pub pool: Option<PoolName>,
    /// `status.node`: the node that has the addresses; `None` if no node has them
    pub node: Option<NodeName>,
    /// `status.since`: when `status.node` was set to this node
    pub since: Option<Timestamp>,
    /// `status.releasedAt`: when a node last released the addresses
    pub released_at: Option<Timestamp>,
    /// The condition `Ready`, without its message
    pub ready: Option<ReadyCondition>,
    /// Hash of the whole status, including the texts that are not kept
    digest: u64,
}

/// The condition `Ready` of an IPClaim.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadyCondition {
    /// Whether the condition is `True`
    pub is_true: bool,
    /// `reason`, in CamelCase
    pub reason: Box<str>,
    /// `lastTransitionTime`: when `is_true` last changed
    pub since: Timestamp,
}

impl ClaimStatus {
    /// Returns whether `status` equals the status that was read, including its texts.
    pub(crate) fn is(&self, status: &IPClaimStatus) -> bool {
        self.digest == digest(status)
    }
}

impl From<&IPClaimStatus> for ClaimStatus {
    fn from(status: &IPClaimStatus) -> Self {
        let addresses = status.addresses.iter();
        let ready = status.conditions.iter().find(|it| it.type_ == "Ready");
        ClaimStatus {
            addresses: addresses
                .filter_map(|text| Addr::parse_strict(text))
                .collect(),
            pool: status.pool.as_deref().map(Into::into),
            node: status.node.as_deref().map(Into::into),
            since: status.since.as_ref().map(|it| it.0),
            released_at: status.released_at.as_ref().map(|it| it.0),
            ready: ready.map(|it| ReadyCondition {
                is_true: it.status == "True",
                reason: it.reason.as_str().into(),
                since: it.last_transition_time.0,
            }),
            digest: digest(status),
        }
    }
}

fn digest(status: &IPClaimStatus) -> u64 {
    let mut hasher = DefaultHasher::new();
    // Serialising this type cannot fail.
    serde_json::to_vec(status).ok().hash(&mut hasher);
    hasher.finish()
}

/// The parsed spec of an IPClaim.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimSpec {
    /// The pool from which the claim gets addresses; `None` if the pool follows from `addresses`
    pub pool: Option<PoolName>,
    /// The addresses that the claim asks for, at most one per family; if empty, any addresses of the pool will do
    pub addresses: Vec<Addr>,
    /// For how many seconds the claim stays after its last use; `None` if it stays until somebody deletes it
    pub ttl: Option<u32>,
}

/// The ranges of a ServiceCIDR, whose addresses pods must not get.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceRange {
    /// `metadata.name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// The valid entries of `spec.cidrs`
    pub cidrs: Vec<Cidr>,
}

/// The fields of a Pod that concern addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// `namespace/name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion` as a number; 0 if it is invalid
    pub version: u64,
    /// Whether the phase is Succeeded or Failed, so that the pod no longer uses its addresses
    pub finished: bool,
    /// The addresses in `status.podIPs` and `status.podIP` that the pod may still use. There are none for finished
    /// pods. There are also none for hostNetwork pods, because their addresses belong to the node
    pub addresses: Box<[Addr]>,
    /// The name of the node if the pod is a mirror pod; else `None`
    pub mirror_of: Option<NodeName>,
    /// The node to which the pod is bound, if the pod can use a claim. Mirror pods and hostNetwork pods cannot use a
    /// claim
    pub node: Option<NodeName>,
    /// Whether the pod needs addresses of the pools that serve by default, unless a claim gives it addresses. This is
    /// false if an annotation names other pools, or if the pod is being deleted
    pub needs_default: bool,
    /// `metadata.creationTimestamp`, in seconds since 1970, if a controller would create another pod elsewhere after an
    /// eviction; else `None`
    pub replaceable: Option<i64>,
    /// The claim that the pod uses because of its annotations; `None` if there is no such claim
    pub claim: Option<Box<PodClaim>>,
    /// The claims of the IPAMClaims that the pod names for its interfaces
    pub interface_claims: Box<[PodClaim]>,
}

/// A pod without an address that can be evicted, because its controller then creates another pod, and the scheduler
/// binds that pod to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evictable {
    /// `namespace/name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion`. The eviction fails if the pod has another version, perhaps because it has an address
    /// by now
    pub version: u64,
    /// `metadata.creationTimestamp`, seconds since 1970
    pub created: i64,
}

/// The fields of an IPAMClaim that decisions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IpamClaim {
    /// `metadata.uid`
    pub uid: ObjectUid,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// `spec.network`
    pub network: String,
    /// `status.ips`: addresses with prefix lengths. The entries are not checked
    pub ips: Vec<String>,
}

/// The claim that a pod uses, and the node to which the pod is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodClaim {
    /// The claim, as `namespace/name`; the namespace is that of the pod
    pub claim: ClaimName,
    /// Name of the pod, without its namespace
    pub pod: Text,
    /// UID of the pod
    pub uid: ObjectUid,
    /// The node to which the pod is bound; `None` if the pod is not scheduled yet
    pub node: Option<NodeName>,
    /// `metadata.creationTimestamp`, seconds since 1970; 0 if CNI requests the addresses
    pub created: i64,
    /// Whether a user or the controller creates the claim, and why
    pub source: ClaimSource,
    /// The virtual machine that runs in the pod. `None` if there is none, or if no annotation of the pod names the
    /// claim
    pub machine: Option<Box<VirtualMachine>>,
}

/// The virtual machine that runs in a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualMachine {
    /// UID of the VirtualMachineInstance that controls the pod
    pub vmi: ObjectUid,
    /// Whether the pod is the target of a live migration, and the virtual machine runs in this pod by now
    pub is_migrated_to: bool,
}

impl PodClaim {
    /// Returns the UID of the VirtualMachineInstance that controls the pod. Returns `None` if [`PodClaim::machine`] is
    /// `None`.
    pub fn vmi(&self) -> Option<&ObjectUid> {
        self.machine.as_ref().map(|it| &it.vmi)
    }

    /// Returns whether the pod asks for certain addresses, and has addresses already. Such a pod needs no claim any
    /// more, because a running pod keeps its addresses.
    pub fn is_served(&self) -> bool {
        matches!(&self.source, ClaimSource::Addresses(asked) if asked.is_served)
    }

    /// Returns whether the pod uses the claim because CNI requests addresses for the pod.
    pub fn is_by_cni(&self) -> bool {
        matches!(&self.source, ClaimSource::Addresses(asked) if asked.is_by_cni)
    }
}

/// Who creates the claim of a pod, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimSource {
    /// A user creates the claim
    User,
    /// The controller creates the claim, because the pod's StatefulSet has sticky addresses
    Sticky(Box<Sticky>),
    /// The controller creates the claim, because the pod asks for certain addresses
    Addresses(Box<AskedAddresses>),
    /// The controller creates the claim, because the pod names an IPAMClaim for one of its interfaces. IPAMClaim and
    /// claim have the same name
    IpamClaim,
}

/// The addresses that a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedAddresses {
    /// The addresses, at most one of each family
    pub addresses: Box<[Addr]>,
    /// Whether the status of the pod shows any addresses, even if they are not the requested ones
    pub is_served: bool,
    /// Whether the CNI configuration or the runtime requests the addresses, and not an annotation of the pod
    pub is_by_cni: bool,
}

/// The addresses that the CNI configuration or the runtime requests for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRequest {
    /// The pod, as `namespace/name`
    pub pod: Text,
    /// UID of the pod
    pub uid: ObjectUid,
    /// The addresses, at most one of each family
    pub addresses: Box<[Addr]>,
}

/// What the controller needs to create the claim of a pod of a StatefulSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sticky {
    /// Name of the StatefulSet
    pub owner: Text,
    /// UID of the StatefulSet, which is to own the claim
    pub owner_uid: ObjectUid,
    /// The pools that the pod names, best first. If empty, the claim uses a pool that serves every pod
    pub pools: Box<[PoolName]>,
    /// `spec.ttlSecondsAfterUse` of the claim
    pub ttl: Option<u32>,
}
