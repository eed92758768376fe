//! The terms on which addresses of a pool are assigned to pods. Users set the terms in the IPPool. The controller
//! copies the terms to NodeSubnets, because agents do not read IPPools.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;

/// The terms on which a node assigns addresses of the pool to pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AddressTerms {
    /// How many free addresses a node keeps ready for future pods. Only for Blocks.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub warm: Warm,

    /// A released address waits this many seconds before it can be assigned to another pod.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(
        default = "default_cooldown_seconds",
        skip_serializing_if = "is_default_cooldown"
    )]
    pub cooldown_seconds: u32,

    /// Routes for pods, in addition to the routes in the CNI configuration.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,

    /// DNS settings in the CNI result. Kubernetes ignores these settings, because the kubelet configures DNS for pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<Box<Dns>>,

    /// Prefix length that pods' interfaces get. Block: the prefix length of the node's block, for the CNI plugins
    /// bridge and ptp. Pool: the prefix length of the pool's CIDR, for networks in which all nodes share one link, such
    /// as macvlan. Host: 32 for IPv4, 128 for IPv6.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub address_prefix: AddressPrefix,

    /// What to do with a pod about which the node's agent knows nothing, because the agent or the API server is
    /// unavailable. The pod's labels or annotations might entitle it to another pool or address. Wait: the CNI call is
    /// rejected, and the kubelet tries again. Serve: the pod gets an address of this pool at once, if this pool serves
    /// pods whatever their labels are.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub unknown_pods: UnknownPods,

    /// Whether pods and claims can ask for certain addresses of the pool: by the annotation cadastre.dev/addresses, by
    /// spec.addresses of an IPClaim, or by the CNI configuration or the runtime. Deny affects neither addresses that
    /// pods and claims have already, nor claims that name only the pool.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub explicit_addresses: ExplicitAddresses,

    /// Whether the node checks that no other host uses a free address, before it assigns the address. BeforeUse: the
    /// node's agent sends an ARP request or a neighbour solicitation, on the interface that the main CNI plugin names
    /// as its master, or else on the interface of the node's default route. If a host answers within 200 ms, the
    /// address is not assigned until a later probe gets no answer. While the agent cannot probe, addresses that were
    /// not probed are not assigned.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub conflict_probe: ConflictProbe,
}

impl Default for AddressTerms {
    fn default() -> Self {
        AddressTerms {
            warm: Warm::default(),
            cooldown_seconds: default_cooldown_seconds(),
            routes: Vec::new(),
            dns: None,
            address_prefix: AddressPrefix::default(),
            unknown_pods: UnknownPods::default(),
            explicit_addresses: ExplicitAddresses::default(),
            conflict_probe: ConflictProbe::default(),
        }
    }
}

/// Minimum and maximum number of free addresses that a node keeps.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[x_kube(validation = rules::warm_in_order())]
pub struct Warm {
    /// If the node has fewer free addresses than this number, it asks for another block.
    #[schemars(range(min = 0, max = 65536))]
    #[serde(default = "default_low")]
    pub low: u32,

    /// If the node has more free addresses than this number, it releases an empty block.
    #[schemars(range(min = 0, max = 65536))]
    #[serde(default = "default_high")]
    pub high: u32,

    /// How many addresses a node keeps in all, in use or free. None: as many as low and high say. MaxPods: also at
    /// least one for each pod that the node may run (status.capacity.pods of the Node), so that pods get addresses
    /// while the API server cannot be reached. A node without a block of the pool keeps none.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub minimum: WarmMinimum,
}

/// How many addresses of a pool a node keeps in all, whether pods use them or not.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WarmMinimum {
    /// No fixed number
    #[default]
    None,
    /// One for each pod that the node may run
    MaxPods,
}

impl Default for Warm {
    fn default() -> Self {
        Warm {
            low: default_low(),
            high: default_high(),
            minimum: WarmMinimum::None,
        }
    }
}

/// The prefix length that pods' interfaces get.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressPrefix {
    /// The prefix length of the node's block
    #[default]
    Block,
    /// The prefix length of the pool's CIDR
    Pool,
    /// The prefix length of a single address: 32 for IPv4, 128 for IPv6
    Host,
}

/// What to do with a pod about which the agent knows nothing.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownPods {
    /// Reject the CNI call; the kubelet will try again
    #[default]
    Wait,
    /// Assign an address at once, without knowing the pod's labels and annotations
    Serve,
}

/// Whether pods and claims can ask for certain addresses of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExplicitAddresses {
    /// Whoever may create pods or claims can ask for any free address
    #[default]
    Allow,
    /// Nobody can ask for a certain address; pods and claims get any free address
    Deny,
}

/// Whether addresses are probed before they are assigned.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConflictProbe {
    /// Addresses are assigned without a probe
    #[default]
    Never,
    /// A free address is assigned only after a probe that no other host has answered
    BeforeUse,
}

/// A route in the network namespace of pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination CIDR in canonical form, such as 0.0.0.0/0 or fd00::/8.
    #[schemars(schema_with = "rules::allocated_cidr")]
    pub dst: String,

    /// Address of the next hop. Absent: the gateway that belongs to the pod's address.
    #[schemars(schema_with = "rules::address")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
}

/// DNS settings in the CNI result.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Addresses of name servers.
    #[schemars(length(max = 16), inner(length(max = 39)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,

    /// Local domain name.
    #[schemars(length(max = 253))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,

    /// Search domains.
    #[schemars(length(max = 32), inner(length(max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,

    /// Options of the resolver, such as ndots:5.
    #[schemars(length(max = 32), inner(length(max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

fn default_low() -> u32 {
    3
}

fn default_high() -> u32 {
    50
}

fn default_cooldown_seconds() -> u32 {
    30
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_default_cooldown(seconds: &u32) -> bool {
    *seconds == default_cooldown_seconds()
}
