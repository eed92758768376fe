//! NodeSubnet: what one node holds, and what earlier nodes of its name held.
//!
//! It bears the node's name and is written by the controller alone. It has no owner reference to
//! the Node, because it must outlive it: `previous` is the durable record of ranges that rest, and
//! the object goes only when the last of them may be handed out again.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;

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
    derive = "PartialEq",
    doc = "What a node holds, and what earlier nodes of its name held. Written by the controller; read-only for everybody else."
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

    /// What earlier nodes of that name held and nobody may get yet.
    #[schemars(length(max = 1024))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub previous: Vec<PreviousHolder>,
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
