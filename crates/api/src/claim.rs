//! IPClaim: addresses that stay with a workload, whichever node its pod runs on.
//!
//! The controller allocates to a claim one address of each family of a pool, or the addresses that the claim asks for.
//! The controller records the addresses in `status.addresses`. While the claim exists, these addresses are allocated to
//! nothing else, whether or not a pod uses them.
//!
//! A pod names a claim of its own namespace in the annotation `cadastre.dev/claim`. A pod of a StatefulSet with sticky
//! addresses ([`sticky`](super::sticky)) names the claim that has the pod's name. When the pod is bound to a node, the
//! controller allocates each address of the claim to that node as a block of one address. From then on, such a block is
//! treated like any other block: the NodeSubnet lists the block, the agent releases the block once no container uses
//! the address, and only after that can another node get the address. So the guarantees about blocks hold for claims,
//! too.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;

/// Desired state of the claim: the addresses that it is to have, and how long it stays.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "IPClaim",
    plural = "ipclaims",
    singular = "ipclaim",
    shortname = "ipc",
    category = "cadastre",
    namespaced,
    status = "IPClaimStatus",
    derive = "PartialEq",
    doc = "Addresses of a pool that stay with a workload. A pod of the same namespace uses them by the annotation cadastre.dev/claim with the claim's name."
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rules::claim_has_source(), validation = rules::claim_stays())]
pub struct IPClaimSpec {
    /// Name of the pool. The claim gets one address of each family of the pool, or none. Required unless addresses are
    /// given. Immutable.
    #[schemars(length(max = 63))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,

    /// The addresses that the claim is to have, at most one of each family, all of one pool. Immutable.
    #[schemars(schema_with = "rules::addresses")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,

    /// For how many seconds the claim stays after its last use, counted from `status.releasedAt`. After this time, the
    /// controller deletes the claim, unless a pod names the claim or a node has its addresses. A claim that no pod has
    /// used yet stays. Absent: the claim stays until somebody deletes it. Can be changed.
    #[schemars(range(min = 0, max = 2_147_483_647))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_use: Option<u32>,
}

/// Which addresses a claim has, and which pod uses them.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IPClaimStatus {
    /// The addresses that the claim has, IPv4 first. They never change while the claim exists.
    #[schemars(length(max = 2), inner(length(max = 39)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,

    /// Name of the pool to which the addresses belong.
    #[schemars(length(max = 63))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,

    /// Name of the node that has the addresses for the pod that uses the claim. Absent if no node has the addresses.
    #[schemars(length(max = 253))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,

    /// Name of the pod that uses the claim, on the node in status.node. Absent if the pod is gone; the node then
    /// releases the addresses.
    #[schemars(length(max = 253))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,

    /// The time at which the node in status.node got the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,

    /// When a node last released the addresses. Absent if no node has had them. The addresses of a deleted claim stay
    /// allocated for the pool's cooldown after this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_at: Option<Time>,

    /// The condition Ready, which says whether the claim has its addresses, and if not, why it waits.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}
