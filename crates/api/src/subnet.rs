//! NodeSubnet: what one node holds, and what earlier nodes of its name held.
//!
//! It bears the node's name. The controller alone writes `spec`, the agent of the node alone writes
//! `status` (of the conditions one alone, the others are the controller's answer to it). It has no owner
//! reference to the Node, because it must outlive it: `previous` is the durable record of podCIDRs
//! that rest, and the object goes only when the last of them may be handed out again.
//!
//! # What an agent must do
//! - Use `spec` only while `nodeUID` is the UID of its own Node.
//! - Give addresses only from `spec.blocks`, never reserved ones, and none from a block with `recall`
//!   set to Drain.
//! - Say `released` of a block only when no address of it is in use or cooling, and from then on not
//!   use it until it has vanished from `spec.blocks` and been listed anew. A block that vanishes
//!   without having been released is kept while addresses of it are in use, and gives no new ones.
//! - Release again, and do not use, what is listed under a UID that was released since the agent's start: the
//!   API was put back to an older state.
//!   A block that is listed under another UID instead is the same block, whose object was lost and
//!   made anew: what was given from it stays given.
//! - Tell of every block of which addresses are in use, also of one that has vanished: where the API was put
//!   back to an older state, its word is all that is left of it.
//! - Keep what was given across a change of its Node's UID, and go on with it where the same block is
//!   listed for the new UID: pods outlive a Node object that is deleted and registered again.
//! - Write `status` onto the resourceVersion that it was decided by: a `released` that comes late would
//!   end a block that has been listed anew meanwhile.
//! - State `demand` as the addresses wanted in all, not as what is lacking: a repeated answer to an
//!   old question must do no harm. Ask for more than what is in use and the reserve only while pods
//!   wait for it, and for a pool without a block only then: other nodes' empty blocks are asked back.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pool::{Allocate, Assignment, FirstBlock};
use super::rules;
use super::terms::AddressTerms;

/// The most blocks that a node may have. Their list and what the agent says of each fit into one object of
/// etcd (1.5 MiB).
pub const MOST_BLOCKS: usize = 4_096;
/// The most addresses without a pod that an agent may report.
pub const MOST_ORPHANS: usize = 256;
/// The most pools that a node may use.
pub const MOST_POOLS: usize = 1_024;
/// The most reserved ranges of a block that a NodeSubnet lists.
pub const MOST_RESERVED: usize = 1_024;
/// What all JSON readers count exactly. Who has more addresses of a block says this: a /64 of IPv6 has 2,048 times as
/// many, and nobody needs to know how many are left of it.
pub const MOST_COUNT: i64 = 1 << 53;
/// The most ranges that a node does not masquerade.
pub const MOST_POD_RANGES: usize = 1_024;

/// The agent's own condition: another's CNI configuration has the new pods of the node.
pub const SERVED_BY_OTHERS: &str = "ServedByOthers";

/// What the nodes of one name hold.
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
    doc = "What a node holds, and what earlier nodes of its name held. The spec is the controller's, the status the node agent's; read-only for everybody else."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeSubnetSpec {
    /// UID of the Node that holds podCIDRs; absent while no Node of that name exists.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// Its spec.providerID, by which the same machine is known when it comes back.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// Its status.nodeInfo.machineID, likewise.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// What it holds, as in its spec.podCIDRs, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<HeldRange>,

    /// The affinity blocks that the node gives addresses from.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<HeldBlock>,

    /// The pools that the node may ask for blocks, best first, then those that podCIDRs are of, then
    /// closed ones.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<NodePool>,

    /// The ranges of all pools, also of those that do not serve this node, merged. The agent masquerades nothing
    /// between them.
    #[schemars(length(max = MOST_POD_RANGES), inner(length(max = 43)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_ranges: Vec<String>,

    /// Addresses whose pods are gone or finished by the API's word: the agent frees them if the node
    /// says the same.
    #[schemars(length(max = 256))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suspects: Vec<Suspect>,

    /// What earlier nodes of that name held and nobody may get yet.
    #[schemars(length(max = 1024))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub previous: Vec<PreviousHolder>,
}

/// What a node needs to know of a pool.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// The pool.
    #[schemars(length(max = 63))]
    pub name: String,

    /// Blocks: the node may ask for them, unless it is closed. NodeCIDR: the pool of one of its podCIDRs.
    #[schemars(schema_with = "rules::some_allocate")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub allocate: Allocate,

    /// It gives this node no more blocks. It is listed because the node still has some of it, and
    /// addresses of those are given and rest as it says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,

    /// Manual: only for pods that ask for it by name.
    #[schemars(schema_with = "rules::assignment")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub assignment: Assignment,

    /// OnDemand: the node gets its first block only when a pod asks.
    #[schemars(schema_with = "rules::first_block")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_block: FirstBlock,

    /// How many blocks of one family the node may have of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_blocks_per_node: Option<u32>,

    /// The namespaces whose pods it serves.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<Box<LabelSelector>>,

    /// The pods that it serves.
    #[schemars(schema_with = "rules::selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<Box<LabelSelector>>,

    /// Its IPv4 side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<NodePoolRanges>,

    /// Its IPv6 side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<NodePoolRanges>,

    /// How its addresses are given.
    #[serde(flatten)]
    pub terms: AddressTerms,
}

impl NodePool {
    /// Whether the node may ask for blocks of it.
    pub fn is_askable(&self) -> bool {
        self.allocate == Allocate::Blocks && !self.closed
    }
}

/// One family of a pool, as a node needs it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePoolRanges {
    /// All ranges of the pool.
    #[schemars(length(max = 256), inner(length(max = 43)))]
    pub cidrs: Vec<String>,

    /// The gateway of pods, as in the pool.
    #[schemars(length(max = 39))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A range that a node holds.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeldRange {
    /// The range, in canonical form.
    #[schemars(schema_with = "rules::held_cidr")]
    pub cidr: String,

    /// The pool that it lies in; absent when it lies in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,

    /// Another node has addresses of it: the agent gives none from it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub withheld: bool,
}

/// A block that a node has.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeldBlock {
    /// The block, in canonical form.
    #[schemars(schema_with = "rules::held_cidr")]
    pub cidr: String,

    /// The UID of its IPAMBlock: the same CIDR given again is another block.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// The pool that it was carved from.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// Asked back. IfEmpty: release it if it is empty now. Drain: give no new address from it, and
    /// release it when it is empty.
    #[schemars(schema_with = "rules::recall")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Recall>,

    /// What of it is never given out: CIDRs, addresses and ranges, as in the pool.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// What of it is given only to who asks for that address, by reservedOnRequest of the pool. What is in reserved,
    /// too, is never given out.
    #[schemars(length(max = MOST_RESERVED), inner(length(max = 79)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<String>,
}

/// How a block is asked back.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recall {
    /// Release it if it is empty now; else keep it.
    IfEmpty,
    /// Give no new address from it, and release it when it is empty.
    Drain,
}

/// An address that may be leaked.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Suspect {
    /// The address.
    #[schemars(length(max = 39))]
    pub address: String,

    /// The UID of the pod that had it: the address may be another pod's by now.
    #[schemars(length(max = 128))]
    #[serde(rename = "podUID")]
    pub pod_uid: String,
}

/// What the agent of the node says.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeSubnetStatus {
    /// The UID of the Node that the agent runs on; a status of another node is not read.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,

    /// What the node wants of pools that it uses.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["pool"]))]
    #[schemars(length(max = MOST_POOLS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolDemand>,

    /// The blocks that the agent knows of.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr", "uid"]))]
    #[schemars(length(max = MOST_BLOCKS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockReport>,

    /// The agent that says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,

    /// Addresses in use whose pods the agent has not seen for a while, or that have finished: some at most.
    /// All addresses in use are in the NodeAddresses of the same name.
    #[schemars(length(max = MOST_ORPHANS))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<Suspect>,

    /// What the controller says of this status, and by ServedByOthers the agent of whom the node's new pods belong to.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// The agent of a node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInfo {
    /// Its version.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,

    /// The boot of the machine that it runs in.
    #[schemars(length(max = 64))]
    #[serde(default, rename = "bootID", skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
}

/// What a node wants of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolDemand {
    /// The pool.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// How many addresses of each family the node wants to hold in all: in use, cooling, in reserve
    /// (the pool's warm.low), and one for each pod that waits.
    #[schemars(range(min = 0))]
    pub demand: i64,
}

/// What the agent says of a block.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BlockReport {
    /// The block.
    #[schemars(length(max = 43))]
    pub cidr: String,

    /// The UID of its IPAMBlock.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// Addresses in use.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub used: i64,

    /// Addresses released lately and not given again yet.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cooling: i64,

    /// Addresses that can be given now; 9007199254740992 stands for that many or more.
    #[schemars(range(min = 0))]
    #[serde(default, skip_serializing_if = "is_zero")]
    pub free: i64,

    /// Whether the agent has let go of it and will never use it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub released: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(count: &i64) -> bool {
    *count == 0
}

/// A node that is gone, and what it held.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PreviousHolder {
    /// Its UID.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,

    /// Its spec.providerID: a node of the same machine gets the ranges back.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// Its status.nodeInfo.machineID, likewise.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// What it held, in canonical form.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["cidr"]))]
    #[schemars(length(max = 16))]
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<HeldRange>,

    /// When the quarantine is over at the earliest; not before no pod uses an address of them.
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
            "previous": [{
                "nodeUID": "u1", "providerID": "p", "machineID": "m",
                "podCIDRs": [{"cidr": "10.244.7.0/24"}],
                "until": "2026-11-21T10:00:00Z",
            }],
        });
        let spec: NodeSubnetSpec = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(spec.previous[0].pod_cidrs[0].pool, None);
        assert_eq!(serde_json::to_value(spec).unwrap(), written);
    }
}
