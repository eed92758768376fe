//! Types for watched objects, with only the fields that Cadastre reads.
//!
//! A complete Pod takes about 36 KB of memory once parsed, and a cluster has very many pods. So parsing skips the
//! fields that these types do not have. The API resource is that of the complete type: `Api<NodeLite>` lists, watches
//! and patches Nodes.
//!
//! # Caveats
//! - Never write a whole object of these types: a replace would remove every skipped field. Only patch.
//! - `metadata` has only the fields that Cadastre reads. For example, it lacks `generateName`, and `managedFields` is
//!   empty even if the object has any.

pub mod protobuf;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    ManagedFieldsEntry, ObjectMeta, OwnerReference, Time,
};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::addresses::NodeAddresses;
use super::block::IPAMBlock;
use super::claim::IPClaim;
use super::frr::FRRConfiguration;
use super::pool::IPPool;
use super::routes::NodeRoutes;
use super::subnet::NodeSubnet;

/// A Node with the fields that matter for allocating ranges.
#[derive(kube::Resource, Deserialize, Clone, Debug)]
#[resource(inherit = Node)]
pub struct NodeLite {
    /// The metadata without the fields that Cadastre does not read, such as `managedFields`
    #[serde(with = "SlimMeta")]
    pub metadata: ObjectMeta,
    /// The spec of the Node: podCIDRs, provider ID and taints
    pub spec: Option<NodeLiteSpec>,
    /// The status of the Node: addresses, machine ID, conditions and capacity
    pub status: Option<NodeLiteStatus>,
}

/// The part of a Node's spec that is read.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeLiteSpec {
    /// The first entry of `podCIDRs`
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<String>,
    /// The node's podCIDRs, at most one per family
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Option<Vec<String>>,
    /// The cloud provider's ID for the host
    #[serde(rename = "providerID")]
    pub provider_id: Option<String>,
    /// All taints of the node, because a patch that changes one of them has to contain them all
    pub taints: Option<Vec<TaintLite>>,
}

/// A taint of a Node, as the API server returns it.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase")]
pub struct TaintLite {
    /// The key, such as `node.kubernetes.io/not-ready`
    pub key: String,
    /// The value, which most taints lack
    pub value: Option<String>,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`
    pub effect: String,
    /// When the taint was added, as unparsed text
    pub time_added: Option<String>,
}

/// The part of a Node's status that is read.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodeLiteStatus {
    /// IP addresses and host names of the node
    pub addresses: Option<Vec<NodeAddressLite>>,
    /// The kubelet's description of the host
    pub node_info: Option<NodeInfoLite>,
    /// The node's conditions, of which Cadastre reads only its own
    pub conditions: Option<Vec<NodeConditionLite>>,
    /// The node's resources, of which Cadastre reads only the number of pods
    pub capacity: Option<NodeCapacityLite>,
}

/// The part of `status.capacity` that is read.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeCapacityLite {
    /// How many pods the node may run, as a quantity such as `110`
    pub pods: Option<String>,
}

/// A condition in a Node's status, without its reason and times.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeConditionLite {
    /// The type, such as `Ready`
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`
    pub status: String,
    /// The text for users
    pub message: Option<String>,
}

/// An IP address or host name of a Node.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeAddressLite {
    /// `InternalIP`, `ExternalIP`, `Hostname` and others
    #[serde(rename = "type")]
    pub type_: String,
    /// An IP address or a name, depending on the type
    pub address: String,
}

/// The part of `status.nodeInfo` that is read.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeInfoLite {
    /// Content of the host's `/etc/machine-id`; empty if the host has no such file
    #[serde(rename = "machineID", default)]
    pub machine_id: String,
}

/// Annotation that a kubelet sets on the mirror pods of its static pods. The value identifies the static pod.
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// A Pod with the fields that show which addresses the pod uses.
#[derive(kube::Resource, Deserialize, Clone, Debug)]
#[resource(inherit = Pod)]
pub struct PodLite {
    /// The metadata without the fields that Cadastre does not read, such as `managedFields`
    #[serde(with = "SlimMeta")]
    pub metadata: ObjectMeta,
    /// The spec of the Pod: the name of the pod's node, whether the pod uses the node's network, and tolerations
    pub spec: Option<PodLiteSpec>,
    /// The status of the Pod: its phase and its IP addresses
    pub status: Option<PodLiteStatus>,
}

/// The part of a Pod's spec that is read.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase")]
pub struct PodLiteSpec {
    /// Name of the node to which the pod is bound; `None` if the pod is not scheduled yet
    pub node_name: Option<String>,
    /// Whether the pod uses the network, and so the addresses, of its node
    pub host_network: Option<bool>,
    /// The taints that the pod tolerates
    pub tolerations: Option<Vec<TolerationLite>>,
}

/// A toleration of a Pod, without its operator and value.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct TolerationLite {
    /// The key of the tolerated taints; empty for taints of all keys
    #[serde(default)]
    pub key: String,
    /// The effect of the tolerated taints; empty for all effects
    #[serde(default)]
    pub effect: String,
}

/// The part of a Pod's status that is read.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct PodLiteStatus {
    /// The pod's phase. `Succeeded` and `Failed` pods no longer use their addresses.
    pub phase: Option<String>,
    /// All addresses of the pod, one per family
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIpLite>>,
    /// The first entry of `pod_ips`
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
}

/// An entry of `status.podIPs`.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct PodIpLite {
    /// The address as text, as the kubelet reported it
    pub ip: String,
}

/// Defines the type of a watched object of one of Cadastre's own kinds. The spec and status of the object are not
/// parsed yet.
macro_rules! unparsed {
    ($($(#[$doc:meta])* $lite:ident of $kind:ident;)*) => {$(
        $(#[$doc])*
        #[derive(kube::Resource, Deserialize, Clone, Debug)]
        #[resource(inherit = $kind)]
        pub struct $lite {
            /// The metadata without the fields that Cadastre does not read, such as `managedFields`
            #[serde(with = "SlimMeta")]
            pub metadata: ObjectMeta,
            /// The spec is not parsed here, so that one invalid object does not make parsing of the whole list fail
            #[serde(default)]
            pub spec: Value,
            /// The status is not parsed here, so that one invalid object does not make parsing of the whole list fail;
            /// `Null` if the kind has no status
            #[serde(default)]
            pub status: Value,
        }
    )*};
}

unparsed! {
    /// An IPPool whose spec and status are not parsed yet.
    IPPoolLite of IPPool;
    /// A NodeSubnet whose spec and status are not parsed yet.
    NodeSubnetLite of NodeSubnet;
    /// A NodeAddresses whose spec is not parsed yet.
    NodeAddressesLite of NodeAddresses;
    /// A NodeRoutes whose spec is not parsed yet.
    NodeRoutesLite of NodeRoutes;
    /// An FRRConfiguration of frr-k8s whose spec is not parsed yet.
    FRRConfigurationLite of FRRConfiguration;
    /// An IPAMBlock whose spec is not parsed yet.
    IPAMBlockLite of IPAMBlock;
    /// An IPClaim whose spec and status are not parsed yet.
    IPClaimLite of IPClaim;
}

/// Deserializes an `ObjectMeta` without the fields that Cadastre does not read.
#[derive(Deserialize)]
#[serde(remote = "ObjectMeta", rename_all = "camelCase")]
struct SlimMeta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    finalizers: Option<Vec<String>>,
    owner_references: Option<Vec<OwnerReference>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    #[serde(skip)]
    deletion_grace_period_seconds: Option<i64>,
    #[serde(skip)]
    generate_name: Option<String>,
    /// An empty list if the object has managed fields, and `None` if it has none
    #[serde(default, deserialize_with = "presence")]
    managed_fields: Option<Vec<ManagedFieldsEntry>>,
    #[serde(skip)]
    self_link: Option<String>,
}

/// Deserializes a list without its elements. Returns an empty list, or `None` if the list is null.
fn presence<'de, D: Deserializer<'de>, T>(from: D) -> Result<Option<Vec<T>>, D::Error> {
    let list = Option::<IgnoredAny>::deserialize(from)?;
    Ok(list.map(|IgnoredAny| Vec::new()))
}

#[cfg(test)]
mod tests {
    use kube::{Resource as _, ResourceExt as _};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_read_by_its_kubernetes_names() {
        let node: NodeLite = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1", "uid": "u1", "resourceVersion": "7", "generation": 2,
                "creationTimestamp": "2026-11-21T10:00:00Z", "deletionTimestamp": "2026-11-21T11:00:00Z",
                "labels": {"zone": "a"}, "annotations": {"cadastre.dev/term": "t"}, "finalizers": ["f"],
                "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
            },
            "spec": {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24", "fd00::/64"], "providerID": "p"},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
                "nodeInfo": {"machineID": "m", "bootID": "b"},
            },
        }))
        .unwrap();
        let (meta, spec, status) = (
            &node.metadata,
            node.spec.as_ref().unwrap(),
            node.status.as_ref().unwrap(),
        );
        assert_eq!(
            (node.name_any(), node.uid(), node.resource_version()),
            ("n1".into(), Some("u1".into()), Some("7".into()))
        );
        assert_eq!(
            (
                node.labels()["zone"].as_str(),
                node.annotations()["cadastre.dev/term"].as_str()
            ),
            ("a", "t")
        );
        assert_eq!(
            (node.finalizers(), meta.generation),
            (&["f".to_owned()][..], Some(2))
        );
        assert!(
            meta.creation_timestamp < meta.deletion_timestamp && meta.creation_timestamp.is_some()
        );
        assert_eq!(
            meta.managed_fields,
            Some(Vec::new()),
            "only that there are any"
        );
        assert_eq!(spec.pod_cidr.as_deref(), Some("10.0.0.0/24"));
        assert_eq!(spec.pod_cidrs.as_ref().unwrap()[1], "fd00::/64");
        assert_eq!(spec.provider_id.as_deref(), Some("p"));
        assert_eq!(status.addresses.as_ref().unwrap()[0].type_, "InternalIP");
        assert_eq!(status.addresses.as_ref().unwrap()[0].address, "192.0.2.1");
        assert_eq!(status.node_info.as_ref().unwrap().machine_id, "m");
        assert_eq!(
            (NodeLite::kind(&()), NodeLite::plural(&())),
            ("Node".into(), "nodes".into())
        );
    }

    #[test]
    fn a_pod_is_read_by_its_kubernetes_names() {
        let pod: PodLite = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"nodeName": "n1", "hostNetwork": true, "containers": []},
            "status": {"phase": "Running", "podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::2"}]},
        }))
        .unwrap();
        let (spec, status) = (pod.spec.as_ref().unwrap(), pod.status.as_ref().unwrap());
        assert_eq!(pod.namespace().as_deref(), Some("ns"));
        assert_eq!(
            (spec.node_name.as_deref(), spec.host_network),
            (Some("n1"), Some(true))
        );
        assert_eq!(
            (status.phase.as_deref(), status.pod_ip.as_deref()),
            (Some("Running"), Some("10.0.0.2"))
        );
        assert_eq!(status.pod_ips.as_ref().unwrap()[1].ip, "fd00::2");
    }

    #[test]
    fn a_node_that_has_only_a_name_is_read() {
        let node: NodeLite =
            serde_json::from_value(json!({"metadata": {"name": "n1"}, "spec": {}})).unwrap();
        assert!(node.spec.is_some_and(|spec| spec.pod_cidrs.is_none()) && node.status.is_none());
    }
}
