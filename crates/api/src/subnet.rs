//! NodeSubnet: the ranges of one node, and those of earlier nodes of its name.
//!
//! It has the name of the node. Only the controller writes `spec`, and only the node's agent writes `status`;
//! among the conditions the agent writes one, and the others are the controller's answer to the status. It has
//! no owner reference to the Node because it must outlive it: `quarantined` is the durable record of podCIDRs in
//! quarantine, and the object is deleted only when the last of them may be allocated again.
//!
//! # What an agent must do
//! - Use `spec` only while `nodeUID` is the UID of its own Node.
//! - Assign addresses only from `spec.blocks`, never reserved ones, and none from a block whose `recall` is Drain.
//! - Report a block as `released` only when none of its addresses is in use or cooling, and from then on not
//!   use it until it has disappeared from `spec.blocks` and been listed again. A block that disappears without
//!   having been released is kept, without new assignments, while addresses of it are in use.
//! - Release again, and not use, a block listed under a UID that was released since the agent's start: the API
//!   was restored to an older state. A block that is listed under another UID instead is the same block, whose
//!   object was lost and recreated: its assignments stay valid.
//! - Report every block with addresses in use, even if it has disappeared from the spec: after the API was
//!   restored to an older state, this report is the only record of the block.
//! - Keep assignments when the UID of its Node changes, and continue with them where the same block is listed
//!   for the new UID: pods outlive a Node object that is deleted and registered again.
//! - Write `status` with the resourceVersion that it was derived from: a `released` that arrives late would end
//!   a block that has been listed again meanwhile.
//! - State `demand` as the total number of addresses wanted, not as what is missing, so that repeating an old
//!   report does no harm. Ask for more than the addresses in use plus the reserve only while pods wait, and for
//!   a pool without a block only then, because empty blocks of other nodes are recalled for it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pool::{AllocationMode, AssignmentMode, FirstBlock};
use super::rules;
use super::terms::AddressTerms;

/// The most blocks that a node may have: their list and the agent's report of each must fit into one object of
/// etcd (1.5 MiB).
pub const MOST_BLOCKS: usize = 4_096;
/// The most addresses without a pod that an agent may report.
pub const MOST_ORPHANS: usize = 256;
/// The most pools that a NodeSubnet lists.
pub const MOST_POOLS: usize = 1_024;
/// The most reserved ranges of a block that a NodeSubnet lists.
pub const MOST_RESERVED: usize = 1_024;
/// The largest count of free addresses that is reported: every JSON parser represents it exactly. It stands for larger
/// counts, too: an IPv6 /64 has 2,048 times as many addresses, and nobody needs to know how many of those are left.
pub const MOST_COUNT: i64 = 1 << 53;
/// The most entries of `podRanges`.
pub const MOST_POD_RANGES: usize = 1_024;

/// The condition that the agent writes: another CNI configuration serves the new pods of the node.
pub const SERVED_BY_OTHERS: &str = "ServedByOthers";

/// Ranges of a node and of earlier nodes of its name, written by the controller.
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
    /// UID of the Node that the ranges are allocated to. Absent while no Node of that name exists.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// spec.providerID of the Node. It identifies the machine if the Node is deleted and registers again.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// status.nodeInfo.machineID of the Node. It identifies the machine if there is no providerID.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// Ranges in the Node's spec.podCIDRs, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<AllocatedRange>,

    /// Affinity blocks that the node assigns addresses from.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<AllocatedBlock>,

    /// Pools that the node may ask for blocks, best first, then the pools of its podCIDRs, then retained pools.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<NodePool>,

    /// Ranges of all pools of the cluster, merged, even of those that do not serve this node. The agent does
    /// not masquerade traffic between them.
    #[schemars(length(max = MOST_POD_RANGES), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_ranges: Vec<String>,

    /// Addresses whose pods no longer exist or have finished according to the API. The agent releases them if
    /// the node's container runtime confirms it.
    #[schemars(length(max = 256))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leak_candidates: Vec<LeakCandidate>,

    /// Ranges of earlier nodes of that name which may not be allocated to others yet.
    #[schemars(length(max = 1024))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<QuarantinedNode>,
}

/// The part of a pool's settings that a node needs.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// Name of the pool.
    #[schemars(length(max = 63))]
    pub name: String,

    /// Blocks: the node may ask for blocks of this pool, unless it is retained. NodeCIDR: one of the node's
    /// podCIDRs lies in this pool.
    #[schemars(schema_with = "rules::some_allocation_mode")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub allocation_mode: AllocationMode,

    /// If true, the pool allocates no more blocks to this node. It is listed because the node still has ranges of it,
    /// whose addresses are assigned and cool down by its settings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub retained: bool,

    /// Manual: only for pods that ask for the pool by name.
    #[schemars(schema_with = "rules::assignment")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub assignment: AssignmentMode,

    /// OnDemand: the node gets its first block only when a pod asks.
    #[schemars(schema_with = "rules::first_block")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_block: FirstBlock,

    /// Maximum number of blocks of each family that the node may have of this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_blocks_per_node: Option<u32>,

    /// Labels of the namespaces whose pods the pool serves. Absent or empty: every namespace.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<Box<LabelSelector>>,

    /// Labels of the pods that the pool serves. Absent or empty: every pod.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<Box<LabelSelector>>,

    /// IPv4 ranges of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<NodePoolRanges>,

    /// IPv6 ranges of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<NodePoolRanges>,

    /// How addresses of the pool are assigned to pods.
    #[serde(flatten)]
    pub terms: AddressTerms,
}

impl NodePool {
    /// Whether the node may ask for blocks of this pool.
    pub fn is_askable(&self) -> bool {
        self.allocation_mode == AllocationMode::Blocks && !self.retained
    }
}

/// One family of a pool, as far as a node needs to know it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePoolRanges {
    /// All CIDRs of the pool.
    #[schemars(length(max = 256), inner(length(max = 43)))]
    pub cidrs: Vec<String>,

    /// Gateway of pods, as in the IPPool.
    #[schemars(length(max = 39))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A podCIDR of a node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedRange {
    /// The range as a CIDR in canonical form.
    #[schemars(schema_with = "rules::allocated_cidr")]
    pub cidr: String,

    /// Name of the pool that contains the range. Absent if no pool does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,

    /// If true, another node uses addresses of this range, so the agent must not assign any from it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub withheld: bool,
}

/// A block that is allocated to a node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedBlock {
    /// CIDR of the block, in canonical form.
    #[schemars(schema_with = "rules::allocated_cidr")]
    pub cidr: String,

    /// UID of its IPAMBlock. If the same CIDR is allocated again, the block has another UID.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// Name of the pool that the block was carved from.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// The controller recalls the block. IfEmpty: the agent releases it if it is empty now. Drain: the agent
    /// assigns no new address from it, and releases it as soon as it is empty.
    #[schemars(schema_with = "rules::recall")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Recall>,

    /// Addresses of the block that are never assigned: CIDRs, addresses and ranges, as in the IPPool.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// Addresses of the block that are assigned only to pods that ask for exactly this address
    /// (reservedOnRequest of the pool). Addresses that reserved contains as well are never assigned.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<String>,
}

/// How a block is recalled.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recall {
    /// Release it if it is empty now, else keep it.
    IfEmpty,
    /// Assign no new address from it, and release it as soon as it is empty.
    Drain,
}

/// An address that may be leaked, that is, in use by a pod that no longer exists.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct LeakCandidate {
    /// The address in canonical form.
    #[schemars(length(max = 39))]
    pub address: String,

    /// UID of the pod that used the address; by now another pod may use it.
    #[schemars(length(max = 128))]
    #[serde(rename = "podUID")]
    pub pod_uid: String,
}

/// The report of the node's agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeSubnetStatus {
    /// UID of the Node that the agent runs on. A status with another UID is ignored.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// Demand of the node for addresses, by pool.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["pool"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolDemand>,

    /// Usage of each block that the agent knows.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr", "uid"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockStatus>,

    /// The agent that wrote this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,

    /// Addresses in use whose pods have finished or have not been seen by the agent for a while. The list is
    /// limited; all addresses in use are in the NodeAddresses of the same name.
    #[schemars(length(max = MOST_ORPHANS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<LeakCandidate>,

    /// The controller's answer to this status; and ServedByOthers, in which the agent reports whether another
    /// network serves new pods.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// The agent process of a node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInfo {
    /// Version of the agent.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,

    /// Boot ID of the machine, which changes at each boot.
    #[schemars(length(max = 64))]
    #[serde(default, rename = "bootID", skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
}

/// Demand of a node for addresses of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolDemand {
    /// Name of the pool.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// Total number of addresses of each family that the node wants: in use, cooling, in reserve (warm.low of
    /// the pool), and one for each waiting pod.
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

    /// UID of its IPAMBlock.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// Number of addresses in use.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub used: i64,

    /// Number of released addresses that wait for their cooldown before they are assigned again.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cooling: i64,

    /// Number of addresses that can be assigned now. 9007199254740992 stands for that many or more.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub free: i64,

    /// If true, the agent has released the block and will not use it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub released: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(count: &i64) -> bool {
    *count == 0
}

/// A deleted node and its ranges in quarantine.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct QuarantinedNode {
    /// UID of the deleted Node.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,

    /// spec.providerID of the deleted Node. A new Node of the same machine gets the ranges back.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// status.nodeInfo.machineID of the deleted Node; identifies the machine if there is no providerID.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// Ranges of the deleted Node, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<AllocatedRange>,

    /// Earliest end of the quarantine. It also lasts until no pod uses an address in these ranges.
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
