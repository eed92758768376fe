//! On what terms the addresses of a pool are given to pods: said in the IPPool, and passed on to the
//! nodes in their NodeSubnets, as agents read nothing else.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;

/// How a node gives the addresses of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AddressTerms {
    /// How many free addresses a node keeps for pods to come. Only for Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub warm: Warm,

    /// How long an address that a pod had rests before another one gets it, in seconds.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(
        default = "default_cooldown_seconds",
        skip_serializing_if = "is_default_cooldown"
    )]
    pub cooldown_seconds: u32,

    /// Routes that pods get, beside those of the CNI configuration.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,

    /// DNS settings of the CNI result. Pods of Kubernetes have those of the kubelet instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<Box<Dns>>,

    /// The prefix length that addresses are given with. Block: that of the node's block, for bridges
    /// and ptp. Pool: that of the pool's CIDR, where all nodes share one link, as with macvlan. Host:
    /// 32 or 128.
    #[schemars(schema_with = "rules::address_prefix")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub address_prefix: AddressPrefix,

    /// Pods that the node's agent knows nothing of, as it or the API server is away: an annotation or label might give
    /// them another pool or address. Wait: they are refused and tried again. Serve: they get an address of this pool
    /// at once, if it is for any pod.
    #[schemars(schema_with = "rules::unknown_pods")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub unknown_pods: UnknownPods,
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
        }
    }
}

/// Free addresses that a node keeps.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[x_kube(validation = rules::warm_in_order())]
pub struct Warm {
    /// With fewer the node asks for another block.
    #[schemars(range(min = 0, max = 65536))]
    #[serde(default = "default_low")]
    pub low: u32,

    /// With more it gives back a block that is empty.
    #[schemars(range(min = 0, max = 65536))]
    #[serde(default = "default_high")]
    pub high: u32,
}

impl Default for Warm {
    fn default() -> Self {
        Warm {
            low: default_low(),
            high: default_high(),
        }
    }
}

/// The prefix length that addresses are given with.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressPrefix {
    /// That of the block
    #[default]
    Block,
    /// That of the pool's CIDR
    Pool,
    /// That of one address
    Host,
}

/// What becomes of pods of which nothing is known.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownPods {
    /// They are refused, and tried again
    #[default]
    Wait,
    /// They are served
    Serve,
}

/// A route of pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to, in canonical form (0.0.0.0/0, fd00::/8).
    #[schemars(schema_with = "rules::held_cidr")]
    pub dst: String,

    /// By way of. Absent: the gateway of the pod's address.
    #[schemars(schema_with = "rules::address")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
}

/// DNS settings of a CNI result.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Addresses of name servers.
    #[schemars(length(max = 16), inner(length(max = 39)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,

    /// The local domain.
    #[schemars(length(max = 253))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,

    /// Domains to search.
    #[schemars(length(max = 32), inner(length(max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,

    /// Options of the resolver.
    #[schemars(length(max = 32), inner(length(max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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
