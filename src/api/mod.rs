//! stub until the real one lands
#![allow(missing_docs)]
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, ObjectMeta, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub const GROUP: &str = "cadastre.dev";
pub const FINALIZER: &str = "cadastre.dev/ranges-held";
pub const TERM_ANNOTATION: &str = "cadastre.dev/term";
pub const FIELD_MANAGER: &str = "cadastre-controller";
pub const LEASE_NAME: &str = "cadastre-controller";
pub const UNSETTLED_ANNOTATION: &str = "cadastre.dev/unsettled";
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(group = "cadastre.dev", version = "v1alpha1", kind = "IPPool", plural = "ippools", status = "IPPoolStatus")]
#[serde(rename_all = "camelCase")]
pub struct IPPoolSpec {
    pub ipv4: Option<IPv4Ranges>,
    pub ipv6: Option<IPv6Ranges>,
    pub allocate: Allocate,
    pub node_selector: Option<LabelSelector>,
    #[serde(default)]
    pub priority: i32,
    #[serde(default)]
    pub disabled: bool,
    #[serde(default)]
    pub reserved: Vec<String>,
    #[serde(default)]
    pub quarantine_seconds: u32,
}
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
pub enum Allocate { NodeCIDR }
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IPv4Ranges { pub cidrs: Vec<String>, pub block_size: u32 }
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IPv6Ranges { pub cidrs: Vec<String>, pub block_size: u32 }
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct IPPoolStatus {
    pub observed_generation: Option<i64>,
    pub ipv4: Option<FamilyStatus>,
    pub ipv6: Option<FamilyStatus>,
    pub nodes: Option<i64>,
    pub waiting: Option<i64>,
    #[serde(default)]
    pub conditions: Vec<Condition>,
}
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Default)]
pub struct FamilyStatus { pub capacity: String, pub held: String, pub quarantined: String, pub free: String, pub utilization: String }
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(group = "cadastre.dev", version = "v1alpha1", kind = "NodeSubnet", plural = "nodesubnets")]
pub struct NodeSubnetSpec {
    #[serde(rename = "nodeUID")]
    pub node_uid: Option<String>,
    pub provider_id: Option<String>,
    pub machine_id: Option<String>,
    #[serde(default)]
    pub pod_cidrs: Vec<HeldRange>,
    #[serde(default)]
    pub previous: Vec<PreviousHolder>,
}
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct HeldRange { pub cidr: String, pub pool: Option<String> }
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct PreviousHolder { pub node_uid: String, pub provider_id: Option<String>, pub machine_id: Option<String>, pub pod_cidrs: Vec<HeldRange>, pub until: Time }

#[derive(kube::Resource, Deserialize, Clone, Debug)]
#[resource(inherit = k8s_openapi::api::core::v1::Node)]
pub struct NodeLite { pub metadata: ObjectMeta, pub spec: Option<NodeLiteSpec>, pub status: Option<NodeLiteStatus> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeLiteSpec { pub pod_cidr: Option<String>, pub pod_cidrs: Option<Vec<String>>, pub provider_id: Option<String> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeLiteStatus { pub addresses: Option<Vec<NodeAddressLite>>, pub node_info: Option<NodeInfoLite> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeAddressLite { pub type_: String, pub address: String }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct NodeInfoLite { pub machine_id: String }
#[derive(kube::Resource, Deserialize, Clone, Debug)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct PodLite { pub metadata: ObjectMeta, pub spec: Option<PodLiteSpec>, pub status: Option<PodLiteStatus> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct PodLiteSpec { pub node_name: Option<String>, pub host_network: Option<bool> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct PodLiteStatus { pub phase: Option<String>, pub pod_ips: Option<Vec<PodIpLite>>, pub pod_ip: Option<String> }
#[derive(Deserialize, Clone, Debug, Default)]
pub struct PodIpLite { pub ip: String }
pub mod crd { pub fn yaml() -> Result<String, std::fmt::Error> { Ok(String::new()) } }
