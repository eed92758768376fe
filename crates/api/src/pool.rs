//! IPPool: disjoint ranges, and which nodes get a part of them.
//!
//! A pool of both families hands out both or neither; that is why dual stack is one object, which
//! cannot be applied half.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;
use super::terms::AddressTerms;

/// What a pool hands out, and to whom.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "IPPool",
    plural = "ippools",
    singular = "ippool",
    shortname = "ipp",
    category = "cadastre",
    status = "IPPoolStatus",
    derive = "PartialEq",
    doc = "Ranges of addresses, and which nodes get a part of them.",
    validation = rules::pool_name()
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = rules::some_family(),
    validation = rules::ipv4_block_fits(),
    validation = rules::ipv6_block_fits(),
    validation = rules::ipv4_stays(),
    validation = rules::ipv6_stays(),
    validation = rules::ipv4_gateway_inside(),
    validation = rules::ipv6_gateway_inside()
)]
pub struct IPPoolSpec {
    /// The IPv4 ranges. At least one of ipv4 and ipv6 is required; with both, a node gets a range
    /// of each or none. Cannot be removed once set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<IPv4Ranges>,

    /// The IPv6 ranges, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<IPv6Ranges>,

    /// What is handed out. Blocks: affinity blocks, as many as a node needs, listed in its
    /// NodeSubnet. NodeCIDR: one range per node and family, in node.spec.podCIDRs. Immutable.
    #[schemars(schema_with = "rules::allocate")]
    #[serde(default)]
    pub allocate: Allocate,

    /// The nodes that the pool serves, by label. Absent or empty: every node.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,

    /// The namespaces whose pods the pool serves, by label. Absent or empty: every one. Only for
    /// Blocks.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,

    /// The pods that the pool serves, by label. Absent or empty: every one. Only for Blocks.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<LabelSelector>,

    /// Automatic: serves whom its selectors name. Manual: only who asks for it by name. Only for
    /// Blocks.
    #[schemars(schema_with = "rules::assignment")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub assignment: Assignment,

    /// When a node that the pool selects gets its first block. Only for Blocks.
    #[schemars(schema_with = "rules::first_block")]
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_block: FirstBlock,

    /// How many blocks of one family a node may have of the pool. Absent: as many as it needs. Only
    /// for Blocks.
    #[schemars(range(min = 1, max = 4096))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_blocks_per_node: Option<u32>,

    /// How long a block that a node can do without stays empty before it is asked back, in seconds.
    /// The last one of a pool stays until pods of another node wait for it; where the pool gives nodes
    /// nothing before a pod asks, it goes as well. Only for Blocks.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(default = "default_idle_seconds")]
    pub idle_seconds: u32,

    /// From how much utilization on, in percent, the pool says that it is nearly exhausted.
    #[schemars(range(min = 1, max = 100))]
    #[serde(default = "default_nearly_exhausted_percent")]
    pub nearly_exhausted_percent: u32,

    /// Of several pools that select a node the one with the highest priority is asked first; then
    /// the one with the most specific selector.
    #[serde(default)]
    pub priority: i32,

    /// Hands out nothing new; what nodes hold stays theirs.
    #[serde(default)]
    pub disabled: bool,

    /// Never handed out: CIDRs (10.244.0.0/24), addresses (10.244.1.1) and ranges with both ends
    /// included (10.244.2.1-10.244.2.9), each in the pool's ranges at least in part. A node's podCIDR
    /// never touches one of them; a block may, and the node leaves them out.
    #[schemars(schema_with = "rules::reserved")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// Gives an address of reserved to a pod that asks for it by name, and to no other. Addresses of nodes and of
    /// service ranges are never given out. Only for Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reserved_on_request: bool,

    /// How long the ranges of a deleted node rest before another one may get them, in seconds. At
    /// least until no pod uses an address of them, in any case.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(default = "default_quarantine_seconds")]
    pub quarantine_seconds: u32,

    /// How nodes give its addresses to pods.
    #[serde(flatten)]
    pub terms: AddressTerms,
}

impl IPPoolSpec {
    /// These ranges with the documented defaults for everything else; a family without ranges is
    /// left out.
    pub fn new(allocate: Allocate, ipv4: Vec<String>, ipv6: Vec<String>) -> Self {
        IPPoolSpec {
            ipv4: Some(IPv4Ranges {
                cidrs: ipv4,
                block_size: None,
                gateway: None,
            })
            .filter(|ranges| !ranges.cidrs.is_empty()),
            ipv6: Some(IPv6Ranges {
                cidrs: ipv6,
                block_size: None,
                gateway: None,
            })
            .filter(|ranges| !ranges.cidrs.is_empty()),
            allocate,
            node_selector: None,
            namespace_selector: None,
            pod_selector: None,
            assignment: Assignment::default(),
            first_block: FirstBlock::default(),
            max_blocks_per_node: None,
            idle_seconds: default_idle_seconds(),
            nearly_exhausted_percent: default_nearly_exhausted_percent(),
            priority: 0,
            disabled: false,
            reserved: Vec::new(),
            reserved_on_request: false,
            quarantine_seconds: default_quarantine_seconds(),
            terms: AddressTerms::default(),
        }
    }
}

/// What a pool hands out.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allocate {
    /// Affinity blocks on demand, listed in the node's NodeSubnet.
    #[default]
    Blocks,
    /// One range per node and family, in `node.spec.podCIDRs`.
    NodeCIDR,
}

/// Whom a pool serves.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Assignment {
    /// Whom its selectors name
    #[default]
    Automatic,
    /// Only who asks for it by name
    Manual,
}

/// When a node gets its first block.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstBlock {
    /// As soon as the pool selects it: the first pod waits for nothing
    #[default]
    OnSight,
    /// When it asks
    OnDemand,
}

/// IPv4 ranges of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct IPv4Ranges {
    /// The ranges, disjoint, in canonical form (10.244.0.0/16). May be extended at any time.
    #[schemars(schema_with = "rules::ipv4_cidrs")]
    pub cidrs: Vec<String>,

    /// Prefix length of what a node gets. May change at any time: what nodes hold keeps its size.
    /// Absent: 26 for Blocks, 24 for NodeCIDR.
    #[schemars(range(min = 8, max = 32))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,

    /// The gateway of pods. Absent: the first usable address of each block, which no pod gets then.
    /// An address: that one, in one of the ranges unless addressPrefix is Host. None: no gateway, and every
    /// address of a block is for pods.
    #[schemars(schema_with = "rules::ipv4_gateway")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// IPv6 ranges of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct IPv6Ranges {
    /// The ranges, disjoint, in canonical form (fd00:10:244::/48). May be extended at any time.
    #[schemars(schema_with = "rules::ipv6_cidrs")]
    pub cidrs: Vec<String>,

    /// Prefix length of what a node gets. May change at any time: what nodes hold keeps its size.
    /// Absent: 122 for Blocks, 64 for NodeCIDR.
    #[schemars(range(min = 8, max = 128))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,

    /// The gateway of pods. Absent: the first usable address of each block, which no pod gets then.
    /// An address: that one, in one of the ranges or link-local unless addressPrefix is Host. None: no gateway,
    /// and every address of a block is for pods.
    #[schemars(schema_with = "rules::ipv6_gateway")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// What the controller knows of a pool. Derived: it is never read to decide anything.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IPPoolStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The IPv4 side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<FamilyStatus>,

    /// The IPv6 side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<FamilyStatus>,

    /// How many nodes hold a range of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<i64>,

    /// How many nodes wait for a range of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<i64>,

    /// Ready, and what is wrong where something is.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Counts of one family, in blocks of the current block size. Decimal text, because an IPv6 pool
/// can have more blocks than JSON numbers count exactly.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FamilyStatus {
    /// Prefix length of new blocks, given or by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// All blocks.
    pub capacity: String,
    /// Blocks that nodes hold.
    pub held: String,
    /// Blocks that rest before reuse.
    pub quarantined: String,
    /// Blocks that can be handed out.
    pub free: String,
    /// The part that cannot be handed out, such as 37%.
    pub utilization: String,
    /// Addresses by state, of a pool that allocates blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<AddressStatus>,
    /// How the number of blocks that are not free grows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trend: Option<TrendStatus>,
    /// When the last block will be gone if that goes on; absent when it does not grow, or for longer
    /// than a year.
    #[serde(
        default,
        rename = "exhaustsAt",
        skip_serializing_if = "Option::is_none"
    )]
    pub exhausts_at: Option<Time>,
}

/// Counts of addresses of one family, in decimal text.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressStatus {
    /// In blocks that nodes have, without reserved ones.
    pub held: String,
    /// In use by pods: as the nodes' agents report, or else as pods do.
    pub used: String,
    /// Released lately and not given again yet.
    pub cooling: String,
}

impl IPPoolSpec {
    /// The prefix length of IPv4 blocks, given or by default.
    pub fn ipv4_block_size(&self) -> Option<u32> {
        let by_default = match self.allocate {
            Allocate::Blocks => 26,
            Allocate::NodeCIDR => 24,
        };
        Some(self.ipv4.as_ref()?.block_size.unwrap_or(by_default))
    }

    /// The prefix length of IPv6 blocks, given or by default.
    pub fn ipv6_block_size(&self) -> Option<u32> {
        let by_default = match self.allocate {
            Allocate::Blocks => 122,
            Allocate::NodeCIDR => 64,
        };
        Some(self.ipv6.as_ref()?.block_size.unwrap_or(by_default))
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn default_idle_seconds() -> u32 {
    300
}

fn default_nearly_exhausted_percent() -> u32 {
    90
}

/// How the use of one family grows. Decimal text, as counts are; rates have six digits that count.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TrendStatus {
    /// When use was last looked at, to the minute.
    pub at: Time,
    /// Blocks that were not free then.
    pub used: String,
    /// How many more an hour, smoothed over about six hours; negative when use shrinks.
    pub per_hour: String,
    /// Root mean square of the change an hour, smoothed likewise. Growth that is small beside it
    /// says little about the future: use jumps or jitters.
    pub swing_per_hour: String,
}

fn default_quarantine_seconds() -> u32 {
    60
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_spec_without_its_optional_fields_has_the_documented_defaults() {
        let spec: IPPoolSpec = serde_json::from_value(json!({
            "allocate": "NodeCIDR",
            "ipv4": {"cidrs": ["10.244.0.0/16"]},
            "ipv6": {"cidrs": ["fd00:10:244::/48"]},
        }))
        .unwrap();
        assert_eq!(
            (spec.ipv4_block_size(), spec.ipv6_block_size()),
            (Some(24), Some(64))
        );
        let blocks = IPPoolSpec {
            allocate: Allocate::default(),
            ..spec.clone()
        };
        assert_eq!(
            (blocks.ipv4_block_size(), blocks.ipv6_block_size()),
            (Some(26), Some(122))
        );
        assert_eq!(
            (spec.idle_seconds, spec.nearly_exhausted_percent),
            (300, 90)
        );
        assert_eq!((spec.priority, spec.disabled), (0, false));
        assert_eq!(spec.quarantine_seconds, 60);
        assert!(spec.reserved.is_empty() && spec.node_selector.is_none());
    }

    #[test]
    fn a_spec_made_here_is_what_reading_its_ranges_gives() {
        let texts = |text: &str| vec![text.to_owned()];
        for (spec, written) in [
            (
                IPPoolSpec::new(Allocate::NodeCIDR, texts("10.244.0.0/16"), Vec::new()),
                json!({"allocate": "NodeCIDR", "ipv4": {"cidrs": ["10.244.0.0/16"]}}),
            ),
            (
                IPPoolSpec::new(Allocate::NodeCIDR, Vec::new(), texts("fd00::/48")),
                json!({"allocate": "NodeCIDR", "ipv6": {"cidrs": ["fd00::/48"]}}),
            ),
        ] {
            assert_eq!(spec, serde_json::from_value(written).unwrap());
        }
    }

    #[test]
    fn absent_fields_are_written_as_nothing_rather_than_null() {
        let status = serde_json::to_value(IPPoolStatus::default()).unwrap();
        assert_eq!(status, json!({}));
    }
}
