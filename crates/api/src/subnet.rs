//! NodeSubnet: the ranges of one node, and the quarantined ranges of earlier nodes with the same name.
//!
//! A NodeSubnet has the name of its node. Only the controller writes `spec`, and only the node's agent writes `status`,
//! with one exception: in `status.conditions`, the agent writes [`SERVED_BY_OTHERS`], [`ADDRESS_CONFLICT`],
//! [`ROUTES_READY`] and [`RANGES_ANNOUNCED`], and the controller writes the other conditions as its answer to the
//! status. A NodeSubnet has no owner reference to the Node, because the NodeSubnet must outlive the Node: its field
//! `quarantined` is the durable record of podCIDRs in quarantine. So the NodeSubnet is deleted only when the last of
//! these podCIDRs may be allocated again.
//!
//! # What an agent must do
//! - Use `spec` only while `nodeUID` is the UID of its own Node.
//! - Assign addresses only from `spec.blocks` and `spec.podCIDRs`. Never assign reserved addresses or addresses of a
//!   podCIDR that is `withheld`. Assign no new address from a block whose `recall` is Drain.
//! - Assign the address of a block with a `claim` only to a pod of the claim's namespace that names the claim. If the
//!   block has a `vmiUID`, the VirtualMachineInstance with this UID must control the pod. If the block has no `vmiUID`,
//!   no VirtualMachineInstance may control the pod.
//! - Report a block as `released` only if none of its addresses is in use or cooling. From then on, do not use the
//!   block until it has disappeared from `spec.blocks` and has been listed again. If a block disappears although it was
//!   not released, keep the block while its addresses are in use, but assign no new addresses from it.
//! - If a block is listed under a UID that was released since the agent's start, do not use the block but release it
//!   again, because the API server was restored to an older state. If a block is listed under another UID, its object
//!   was lost and recreated, but the block is still the same. So its assignments stay valid.
//! - Assign no new address in the ranges of `withdraw`. Report a range as `withdrawn` only if none of its addresses is
//!   in use or cooling, and if the store has recorded the withdrawal. After the report, assign no address of the range
//!   before `returned` lists it, even if `withdraw` no longer lists it.
//! - Report every block with addresses in use, even if the block has disappeared from the spec. After the API server
//!   was restored to an older state, this report is the only record of the block.
//! - Keep assignments when the UID of the agent's Node changes, because pods outlive a Node object that is deleted and
//!   registered again. If the same block is listed for the new UID, continue with its assignments.
//! - Write `status` with the resourceVersion of the object from which the status was computed. Otherwise a delayed
//!   `released` could end a block that has been listed again meanwhile.
//! - State `demand` as the total number of addresses wanted. A total that is reported twice does no harm. A number of
//!   missing addresses would, because it would be added twice. Demand more than the addresses in use or cooling plus
//!   `warm.low` only while pods wait. If the node has no block of a pool, demand addresses of that pool only while pods
//!   wait for them. Otherwise the controller would recall empty blocks of other nodes for nothing.
//! - Assign an address of a pool with `conflictProbe: BeforeUse` only after a probe that began since the address was
//!   last in use, and not while another host answers for the address.
//! - Report an address that CNI requests for a pod in `requestedAddresses` only if the pod's annotations name neither
//!   this address nor a claim, and no range of the node has the address. The controller ignores requests for pods of
//!   other nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::block::ParentBlock;
use super::pool::{AllocationMode, AssignmentMode, FirstBlock};
use super::rules;
use super::terms::AddressTerms;

/// The maximum number of blocks of a node. The list of blocks, together with the agent's report on each block, must fit
/// into one object of etcd (1.5 MiB).
pub const MOST_BLOCKS: usize = 4_096;
/// The maximum number of orphans (addresses without a pod) that an agent reports.
pub const MOST_ORPHANS: usize = 256;
/// The maximum number of addresses in conflict that an agent reports.
pub const MOST_CONFLICTS: usize = 64;
/// The maximum number of pools that a NodeSubnet lists.
pub const MOST_POOLS: usize = 1_024;
/// The maximum number of reserved ranges of a block that a NodeSubnet lists.
pub const MOST_RESERVED: usize = 1_024;
/// The maximum number of withdrawals that a NodeSubnet lists and that an agent records.
pub const MOST_WITHDRAWALS: usize = 1_024;
/// The maximum number of pods for which an agent reports requested addresses (`requestedAddresses`).
pub const MOST_ADDRESS_REQUESTS: usize = 64;
/// The highest count of free addresses that an agent reports. The number stands for any higher count, too, and is the
/// largest number that every JSON parser represents exactly. An IPv6 /64 has 2,048 times as many addresses, but nobody
/// needs the exact count.
pub const MOST_COUNT: i64 = 1 << 53;
/// The maximum number of entries of `podRanges`.
pub const MOST_POD_RANGES: usize = 1_024;

/// Type of the condition that says whether another CNI configuration provides the network of the node's new pods. The
/// agent writes this condition.
pub const SERVED_BY_OTHERS: &str = "ServedByOthers";
/// The type of the condition that says whether other hosts answer for addresses of the node.
pub const ADDRESS_CONFLICT: &str = "AddressConflict";
/// The type of the condition that says whether the node has routes to the pods of all other nodes.
pub const ROUTES_READY: &str = "RoutesReady";
/// The type of the condition that says whether the agent has passed the node's ranges to the node's routing daemon.
pub const RANGES_ANNOUNCED: &str = "RangesAnnounced";

/// The ranges of a node, and the quarantined ranges of earlier nodes with the same name. Written by the controller.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "NodeSubnet",
    plural = "nodesubnets",
    singular = "nodesubnet",
    shortname = "nsub",
    category = "cadastre",
    status = "NodeSubnetStatus",
    derive = "PartialEq",
    doc = "The ranges that are allocated to a node, and those of earlier nodes of its name that are in quarantine. The controller writes the spec, the node's agent the status; read-only for everybody else."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeSubnetSpec {
    /// UID of the Node to which the ranges are allocated. Absent while no Node with this name exists.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// spec.providerID of the Node. If the Node is deleted and registers again, this field shows whether the new Node
    /// is the same host.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// status.nodeInfo.machineID of the Node. If the Node has no providerID, the machineID is compared instead.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// Ranges in the Node's spec.podCIDRs, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<AllocatedRange>,

    /// The blocks from which the node assigns addresses.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<AllocatedBlock>,

    /// The pools that matter to the node: first the pools of which the node may ask for blocks, best first; then the
    /// pools of its podCIDRs; then retained pools, of which the node only keeps the ranges that it has.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<NodePool>,

    /// Minimum number of seconds between two writes of the status by the agent. Changes that somebody waits for are
    /// written at once. For the NodeAddresses, the minimum is ten times as long. The controller sets this field in
    /// large clusters, to limit the writes of all agents together. The agent's flags can set longer intervals.
    #[schemars(range(min = 0, max = 86_400))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub status_interval_seconds: u32,

    /// Ranges of all pools in the cluster, merged, including pools from which this node gets nothing. The agent does
    /// not masquerade traffic between these ranges.
    #[schemars(length(max = MOST_POD_RANGES), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_ranges: Vec<String>,

    /// Addresses that are in use although, according to the API, their pods no longer exist or have finished. The agent
    /// releases such an address if the node's container runtime confirms that the pod's sandbox is gone.
    #[schemars(length(max = 256))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leak_candidates: Vec<LeakCandidate>,

    /// Ranges that the controller withdraws from the node. Each is a part of one of the node's blocks, or a single
    /// address. The agent assigns no new address in such a range. The agent reports the range in status.withdrawn once
    /// no address of the range is in use or cooling.
    #[schemars(length(max = MOST_WITHDRAWALS), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withdraw: Vec<String>,

    /// Withdrawn addresses that belong to IPClaims. Another node may use such an address, or this node may use it for a
    /// pod of the claim.
    #[schemars(length(max = MOST_WITHDRAWALS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claimed: Vec<ClaimedAddress>,

    /// Withdrawn ranges that other nodes have borrowed. Each range is an IPAMBlock of the node that borrowed it.
    #[schemars(length(max = MOST_WITHDRAWALS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lent: Vec<LentRange>,

    /// Withdrawn ranges that the node may use again. A withdrawn range that is not listed here stays withdrawn, even if
    /// spec.withdraw no longer lists it.
    #[schemars(length(max = MOST_WITHDRAWALS), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returned: Vec<String>,

    /// Ranges of earlier nodes with this name that cannot be allocated to other nodes yet.
    #[schemars(length(max = 1024))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<QuarantinedNode>,
}

/// A withdrawn address that an IPClaim has.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimedAddress {
    /// The address.
    #[schemars(length(max = 39))]
    pub address: String,
    /// Namespace and name of the IPClaim, with a slash between them.
    #[schemars(length(max = 317))]
    pub claim: String,
    /// UID of the IPClaim.
    #[serde(rename = "claimUID")]
    #[schemars(length(max = 63))]
    pub claim_uid: String,
}

/// A withdrawn range that another node has borrowed.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LentRange {
    /// The range, as a CIDR in canonical form.
    #[schemars(length(max = 43))]
    pub cidr: String,
    /// Name of the node that has borrowed the range.
    #[schemars(length(max = 253))]
    pub node: String,
    /// UID of the IPAMBlock that was created for the range. The node that borrows the range gets this block only if
    /// spec.lent of the lending node names the UID.
    #[serde(rename = "blockUID")]
    #[schemars(length(max = 63))]
    pub block_uid: String,
}

/// The part of a pool's settings that a node needs.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// Name of the pool.
    #[schemars(length(max = 63))]
    pub name: String,

    /// Blocks: the node may ask for blocks of this pool, unless retained is true. NodeCIDR: one of the node's
    /// podCIDRs lies in this pool.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub allocation_mode: AllocationMode,

    /// If true, the pool allocates no more blocks to this node. The pool is listed because the node still has ranges of
    /// it. The addresses of these ranges are assigned and cool down according to the pool's settings.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub retained: bool,

    /// Which pods get addresses of the pool. Automatic: every pod that the selectors match. Manual: only pods that ask
    /// for the pool by name.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub assignment: AssignmentMode,

    /// When the node gets its first block. Immediate: at once. OnDemand: when a pod needs an address of the pool.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub first_block: FirstBlock,

    /// The node gets at most this many blocks of each family from this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_blocks_per_node: Option<u32>,

    /// With warm.minimum MaxPods: the number of pods that the node may run. A node with a block of the pool keeps at
    /// least this many addresses of the pool.
    #[schemars(range(min = 0, max = 65536))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub min_addresses: u32,

    /// Selects by label the namespaces whose pods may get addresses of the pool. Absent or empty: every namespace.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<Box<LabelSelector>>,

    /// Selects by label the pods that get addresses of the pool. Absent or empty: every pod.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<Box<LabelSelector>>,

    /// IPv4 ranges of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<NodePoolRanges>,

    /// IPv6 ranges of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<NodePoolRanges>,

    /// Addresses that the IPPool reserves. The node uses them to check that the pool assigns no address outside of the
    /// range that a network's CNI configuration allows. Reserved addresses of a block are also listed in the block.
    #[schemars(length(max = 128), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// How the node assigns the pool's addresses to pods.
    #[serde(flatten)]
    pub terms: AddressTerms,
}

impl NodePool {
    /// Returns whether the node may ask for blocks of this pool.
    pub fn is_askable(&self) -> bool {
        self.allocation_mode == AllocationMode::Blocks && !self.retained
    }
}

/// The ranges of one family of a pool, with the settings that a node needs.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePoolRanges {
    /// All CIDRs of the pool in this family.
    #[schemars(length(max = 256), inner(length(max = 43)))]
    pub cidrs: Vec<String>,

    /// Gateway of the pods, with the same meaning as in the IPPool.
    #[schemars(length(max = 39))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// A podCIDR of a node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedRange {
    /// The range as a CIDR in canonical form.
    #[schemars(schema_with = "rules::allocated_cidr")]
    pub cidr: String,

    /// Name of the pool that contains the range. Absent if no pool contains the range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,

    /// If true, another node uses addresses of this range, and the agent must not assign any address of the range.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub withheld: bool,
}

/// A block that is allocated to a node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedBlock {
    /// CIDR of the block, in canonical form.
    #[schemars(schema_with = "rules::allocated_cidr")]
    pub cidr: String,

    /// UID of the block's IPAMBlock. If the same CIDR is allocated again, the block has a new IPAMBlock with another
    /// UID. If the node was added to spec.standby of the IPAMBlock, a plus sign and the number of the node follow the
    /// UID.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// Name of the pool from which the block was allocated.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// The IPClaim that has the block's only address, as NAMESPACE/NAME. The address is assigned only to a pod that
    /// names this claim. Absent: the block belongs to no claim.
    #[schemars(length(max = 317))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,

    /// UID of the VirtualMachineInstance for which the claim's address was allocated. The address is assigned only to a
    /// pod that this VirtualMachineInstance controls. If absent, the address of a claim is assigned to no pod of a
    /// VirtualMachineInstance.
    #[schemars(length(max = 128))]
    #[serde(default, rename = "vmiUID", skip_serializing_if = "Option::is_none")]
    pub vmi_uid: Option<String>,

    /// If true, another node is the owner of the block, and traffic for the address goes to that node. This node, too,
    /// may assign the address to a pod of the virtual machine.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub standby: bool,

    /// The block of a different node that this block is a part of. Present only if this node has borrowed this block.
    /// The network address, gateway and broadcast address of a borrowed block are those of the pool's CIDR, not those
    /// of the part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentBlock>,

    /// If set, the controller recalls the block, that is, asks the agent to release it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Recall>,

    /// Addresses of the block that are never assigned. An entry is a CIDR, an address or a range, as in the IPPool.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// Addresses of the block that are assigned only to pods that ask for exactly this address (see reservedOnRequest
    /// of the pool). Addresses that are also listed in reserved are never assigned.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<String>,
}

/// How the controller recalls a block. IfEmpty: the agent releases the block if it is empty, and otherwise keeps it.
/// Drain: the agent assigns no new address from the block, and releases it once it is empty. Absent: the block is not
/// recalled.
#[derive(
    JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord,
)]
pub enum Recall {
    /// The agent releases the block if it is empty, and otherwise keeps it
    IfEmpty,
    /// The agent assigns no new address from the block, and releases it once it is empty
    Drain,
}

/// An address that may be leaked, that is, in use although its pod no longer exists.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct LeakCandidate {
    /// The address in canonical form.
    #[schemars(length(max = 39))]
    pub address: String,

    /// UID of the pod that used the address. Another pod may use the address now.
    #[schemars(length(max = 128))]
    #[serde(rename = "podUID")]
    pub pod_uid: String,
}

/// What the node's agent reports: usage of its blocks, demand for addresses, requests and conflicts.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeSubnetStatus {
    /// UID of the Node on which the agent runs. The controller ignores the status if the current Node has a different
    /// UID.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// How many addresses the node wants, by pool.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["pool"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolDemand>,

    /// Usage of each block of the node, including blocks with addresses in use that the spec no longer lists.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr", "uid"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockStatus>,

    /// The agent that wrote this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,

    /// Ranges that the agent has withdrawn. The agent assigns no address of such a range until spec.returned lists the
    /// range.
    #[schemars(length(max = MOST_WITHDRAWALS), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withdrawn: Vec<String>,

    /// Ranges of spec.withdraw that are not withdrawn yet, because some of their addresses are in use or cooling.
    #[schemars(length(max = MOST_WITHDRAWALS), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withdrawing: Vec<String>,

    /// Addresses that the CNI configuration or the runtime requests for pods of this node, and that no range of the
    /// node has. The CNI calls for these pods wait. The controller creates an IPClaim for each of these pods.
    #[schemars(length(max = MOST_ADDRESS_REQUESTS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requested_addresses: Vec<AddressRequest>,

    /// Addresses that the node does not assign because another host answers for them. The list has at most 64 entries.
    #[schemars(length(max = MOST_CONFLICTS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<AddressConflict>,

    /// Addresses in use whose pods have finished, or have not been seen by the agent for a while. The list has at most
    /// 256 entries; the NodeAddresses with the same name lists all addresses in use.
    #[schemars(length(max = MOST_ORPHANS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<LeakCandidate>,

    /// Conditions of the node. The agent writes four of them. ServedByOthers: another network serves the node's new
    /// pods. AddressConflict: other hosts answer for addresses of the node. RoutesReady: the node has routes to the
    /// pods of all other nodes. RangesAnnounced: the routing daemon has the node's ranges. The controller writes the
    /// other conditions as its answer to this status.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// An address that the node does not assign because another host answers for it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AddressConflict {
    /// The address in canonical form.
    #[schemars(length(max = 39))]
    pub address: String,

    /// Name of the address's pool.
    #[schemars(length(max = 253))]
    pub pool: String,

    /// Link-layer address of the host that most recently answered for the address.
    #[schemars(length(max = 64))]
    pub by: String,

    /// When the host with the link-layer address in `by` answered for the first time, in milliseconds of Unix time.
    pub since_ms: i64,
}

/// The addresses that the CNI configuration or the runtime requests for a pod.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AddressRequest {
    /// Namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,

    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,

    /// UID of the pod.
    #[schemars(length(max = 128))]
    #[serde(rename = "podUID")]
    pub pod_uid: String,

    /// The addresses in canonical form, at most one of each family.
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub addresses: Vec<String>,
}

/// The agent process that wrote a status.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInfo {
    /// Version of the agent.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,

    /// Boot ID of the host, which changes at each boot.
    #[schemars(length(max = 64))]
    #[serde(default, rename = "bootID", skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
}

/// How many addresses of a pool a node wants.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolDemand {
    /// Name of the pool.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// Total number of addresses of each family that the node wants: the addresses in use, the cooling addresses, the
    /// reserve (warm.low of the pool), and one address for each waiting pod.
    #[schemars(range(min = 0))]
    pub demand: i64,
}

/// Usage of a block, as reported by the agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BlockStatus {
    /// CIDR of the block.
    #[schemars(length(max = 43))]
    pub cidr: String,

    /// UID of the block, as the spec lists it.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// Number of addresses in use.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub used: i64,

    /// Number of released addresses whose cooldown is not over.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub cooling: i64,

    /// Number of addresses that can be assigned now. The number 9007199254740992 stands for any higher number, too.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub free: i64,

    /// Number of withdrawn addresses.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub withdrawn: i64,

    /// If true, the agent has released the block and will not use it again.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub released: bool,
}

/// A deleted node and its ranges in quarantine.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinedNode {
    /// UID of the deleted Node.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,

    /// spec.providerID of the deleted Node. If a Node with the same name and the same providerID registers, that Node
    /// gets the quarantined ranges.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// status.nodeInfo.machineID of the deleted Node. If the Node had no providerID, the machineID is compared instead.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// Ranges of the deleted Node, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<AllocatedRange>,

    /// Earliest end of the quarantine. The quarantine continues after this time while a pod uses an address in these
    /// ranges.
    pub until: Time,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_spelled_as_kubernetes_spells_them() {
        let written = json!({
            "nodeUID": "u2", "providerID": "p", "machineID": "m",
            "podCIDRs": [{"cidr": "10.244.1.0/24", "pool": "default"}],
            "quarantined": [{
                "nodeUID": "u1", "providerID": "p", "machineID": "m",
                "podCIDRs": [{"cidr": "10.244.7.0/24"}],
                "until": "2026-11-21T10:00:00Z",
            }],
        });
        let spec: NodeSubnetSpec = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(spec.quarantined[0].pod_cidrs[0].pool, None);
        assert_eq!(serde_json::to_value(spec).unwrap(), written);
    }
}
