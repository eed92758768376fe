//! IPPool: disjoint address ranges, and which nodes get parts of them.
//!
//! A pool with both families allocates to a node either a range of each family or none. Therefore a dual-stack pool is
//! one object. If each family were an object of its own, one of the two objects could exist without the other.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;
use super::terms::AddressTerms;

/// Desired state of the pool: its addresses, and the nodes and pods that may have them.
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
    doc = "Ranges of addresses, and the nodes that parts of them are allocated to.",
    validation = rules::pool_name()
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = rules::some_family(),
    validation = rules::block_fits("ipv4", (26, 24)),
    validation = rules::block_fits("ipv6", (122, 64)),
    validation = rules::sizing_for_node_cidr(),
    validation = rules::assignments_for_node_cidr(),
    validation = rules::stays("ipv4"),
    validation = rules::stays("ipv6"),
    validation = rules::gateway_inside("ipv4", ""),
    validation = rules::gateway_inside("ipv6", "ip(self.ipv6.gateway).isLinkLocalUnicast() || ")
)]
pub struct IPPoolSpec {
    /// IPv4 ranges. At least one of ipv4 and ipv6 is required. If both are set, a node gets a range of each family or
    /// none. This field cannot be removed once set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<IPv4Ranges>,

    /// IPv6 ranges. At least one of ipv4 and ipv6 is required. If both are set, a node gets a range of each family or
    /// none. This field cannot be removed once set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<IPv6Ranges>,

    /// How ranges are allocated to nodes. Blocks: each node gets as many small ranges (blocks) as it needs, and its
    /// NodeSubnet lists them. NodeCIDR: each node gets one range per family, in node.spec.podCIDRs. Immutable.
    #[x_kube(validation = rules::allocation_mode_stays())]
    #[serde(default)]
    pub allocation_mode: AllocationMode,

    /// Selects by label the nodes that may get ranges of the pool. Absent or empty: every node.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,

    /// Selects by label the namespaces whose pods may get addresses of the pool. The selector also applies to pods that
    /// ask for the pool, or for one of its addresses, by annotation. Absent or empty: every namespace. Only for Blocks.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,

    /// Selects by label the pods that get addresses of the pool. A pod that asks for the pool by name need not match.
    /// Absent or empty: every pod. Only for Blocks.
    #[schemars(schema_with = "rules::pool_selector")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<LabelSelector>,

    /// Which pods get addresses of the pool. Automatic: every pod that the selectors match. Manual: only pods that ask
    /// for the pool by name, with the annotation cadastre.dev/pools. Only for Blocks.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub assignment: AssignmentMode,

    /// When a node that the pool selects gets its first block. Immediate: at once, so that the node's first pod need
    /// not wait. OnDemand: when a pod on the node needs an address of the pool. Only for Blocks.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub first_block: FirstBlock,

    /// A node gets at most this many blocks of each family from this pool. Absent: 4096. Only for Blocks.
    #[schemars(range(min = 1, max = 4096))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_blocks_per_node: Option<u32>,

    /// What the controller does when nodes need addresses and the pool has no free range left. Never: the nodes wait.
    /// WhenExhausted: the nodes borrow free parts of other nodes' blocks. With WhenExhausted, whatever routes the
    /// pool's addresses has to follow IPAMBlocks or NodeSubnets. Only for Blocks.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub borrowing: Borrowing,

    /// Whether a node gets a taint while neither the node nor its pools have a free address for another pod. None: the
    /// node only gets the condition AddressesExhausted. NoSchedule: the node also gets the taint
    /// cadastre.dev/addresses-exhausted with the effect NoSchedule, so that the scheduler binds no further pods to the
    /// node. The taint also keeps pods with hostNetwork from the node, unless they tolerate it.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub exhausted_node_taint: ExhaustedNodeTaint,

    /// Names of networks, as in their CNI configurations. IPAMClaims (k8s.cni.cncf.io) of these networks get addresses
    /// of this pool. KubeVirt uses IPAMClaims so that virtual machines keep their addresses. Only for Blocks.
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,

    /// The controller recalls a block (asks the node to release it) once the block has been empty for this many seconds
    /// and the node does not need it. A node's last block of the pool stays until pods of another node wait for a
    /// block. But if the pool allocates blocks only on request by a pod, the last block is recalled, too. Only for
    /// Blocks.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(default = "default_idle_seconds")]
    pub idle_seconds: u32,

    /// The pool is reported as nearly exhausted once this percentage of a family's blocks is not free.
    #[schemars(range(min = 1, max = 100))]
    #[serde(default = "default_nearly_exhausted_percent")]
    pub nearly_exhausted_percent: u32,

    /// If several pools select a node or pod, the pool with the highest priority is tried first. Among pools of equal
    /// priority, the pool with more requirements in its selectors is tried first.
    #[serde(default)]
    pub priority: i32,

    /// If true, no further ranges are allocated from the pool. Existing allocations stay.
    #[serde(default)]
    pub disabled: bool,

    /// Fixed ranges of certain nodes. A node that is named here, and that the pool selects, gets exactly these ranges
    /// as podCIDRs, or waits until they are free. No other node gets an address of these ranges, even while the named
    /// node does not exist. Existing podCIDRs do not change. Only for NodeCIDR.
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["node"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assignments: Vec<NodeAssignment>,

    /// Addresses that are never assigned. An entry is a CIDR (10.244.0.0/24), an address (10.244.1.1) or a range that
    /// includes both ends (10.244.2.1-10.244.2.9). Each entry must overlap the pool's ranges. A podCIDR never contains
    /// a reserved address. A block can contain reserved addresses, but its node does not assign them.
    #[schemars(schema_with = "rules::reserved")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<String>,

    /// If true, a pod can get a reserved address by asking for exactly this address, with the annotation
    /// cadastre.dev/addresses. Addresses of nodes and of service ranges are never assigned, even with this field. Only
    /// for Blocks.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub reserved_on_request: bool,

    /// For at least this many seconds after a node was deleted, its ranges cannot be allocated again. After this time,
    /// a range is still not allocated while a pod uses an address in it.
    #[schemars(range(min = 0, max = 86400))]
    #[serde(default = "default_quarantine_seconds")]
    pub quarantine_seconds: u32,

    /// How nodes assign the pool's addresses to pods.
    #[serde(flatten)]
    pub terms: AddressTerms,
}

impl IPPoolSpec {
    /// Returns a spec with these ranges, in which every other field has its documented default. A family is absent if
    /// its list of ranges is empty.
    pub fn new(allocate: AllocationMode, ipv4: Vec<String>, ipv6: Vec<String>) -> Self {
        IPPoolSpec {
            ipv4: Some(IPv4Ranges {
                cidrs: ipv4,
                block_size: None,
                block_sizing: BlockSizing::default(),
                gateway: None,
            })
            .filter(|ranges| !ranges.cidrs.is_empty()),
            ipv6: Some(IPv6Ranges {
                cidrs: ipv6,
                block_size: None,
                gateway: None,
            })
            .filter(|ranges| !ranges.cidrs.is_empty()),
            allocation_mode: allocate,
            node_selector: None,
            namespace_selector: None,
            pod_selector: None,
            assignment: AssignmentMode::default(),
            first_block: FirstBlock::default(),
            max_blocks_per_node: None,
            borrowing: Borrowing::default(),
            exhausted_node_taint: ExhaustedNodeTaint::default(),
            networks: Vec::new(),
            idle_seconds: default_idle_seconds(),
            nearly_exhausted_percent: default_nearly_exhausted_percent(),
            priority: 0,
            disabled: false,
            assignments: Vec::new(),
            reserved: Vec::new(),
            reserved_on_request: false,
            quarantine_seconds: default_quarantine_seconds(),
            terms: AddressTerms::default(),
        }
    }
}

/// Whether a node without a free address for another pod gets a taint.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExhaustedNodeTaint {
    /// The node gets no taint
    #[default]
    None,
    /// The node gets a taint with the effect NoSchedule
    NoSchedule,
}

/// How ranges are allocated to nodes.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllocationMode {
    /// Each node gets blocks as it needs them. The node's NodeSubnet lists the blocks.
    #[default]
    Blocks,
    /// Each node gets one range per family, in `node.spec.podCIDRs`.
    NodeCIDR,
}

/// Which pods get addresses of a pool.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AssignmentMode {
    /// Every pod that the selectors match
    #[default]
    Automatic,
    /// Only pods that ask for the pool by name
    Manual,
}

/// When a node gets its first block.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstBlock {
    /// As soon as the pool selects the node, so that the node's first pod need not wait
    #[default]
    Immediate,
    /// When the node's agent asks for a block because a pod needs an address
    OnDemand,
}

/// Whether nodes borrow parts of other nodes' blocks.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Borrowing {
    /// Nodes wait until a range is free
    #[default]
    Never,
    /// When the pool is exhausted, nodes borrow free parts of other nodes' blocks
    WhenExhausted,
}

/// The fixed ranges of one node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAssignment {
    /// Name of the Node. The Node need not exist.
    #[schemars(schema_with = "rules::node_name")]
    pub node: String,

    /// One CIDR of each family of the pool, inside of the pool's cidrs. The CIDR can be narrower or wider than
    /// blockSize. It must not overlap other assignments or reserved addresses.
    #[schemars(schema_with = "rules::assigned_cidrs")]
    pub cidrs: Vec<String>,
}

/// How the size of a node's IPv4 range is chosen.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSizing {
    /// Every range has the size blockSize
    #[default]
    Fixed,
    /// The smallest range that has two addresses for each pod that the node may run
    FitMaxPods,
}

/// IPv4 ranges of a pool, with block size and gateway.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct IPv4Ranges {
    /// Disjoint CIDRs in canonical form, such as 10.244.0.0/16. CIDRs can be added at any time.
    #[schemars(schema_with = "rules::ipv4_cidrs")]
    pub cidrs: Vec<String>,

    /// Prefix length of the ranges that are allocated to nodes. The blockSize can be changed at any time; existing
    /// ranges keep their size. Absent: 26 for Blocks, 24 for NodeCIDR.
    #[schemars(range(min = 8, max = 32))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,

    /// How the size of a node's range is chosen, once, when the range is allocated. Fixed: every range has the size
    /// blockSize. FitMaxPods: the smallest range that has two addresses for each pod that the node may run
    /// (status.capacity.pods of the Node), at least a /28 and at most a /21. blockSize is then only the size in which
    /// the status counts. FitMaxPods is only for NodeCIDR.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub block_sizing: BlockSizing,

    /// Gateway of the pods. Absent: the first usable address of each block, which is then not assigned to pods. An
    /// address: this address; it must lie in one of the cidrs, unless addressPrefix is Host. None: pods have no
    /// gateway, and every address of a block can be assigned.
    #[schemars(schema_with = "rules::ipv4_gateway")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// IPv6 ranges of a pool, with block size and gateway.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct IPv6Ranges {
    /// Disjoint CIDRs in canonical form, such as fd00:10:244::/48. CIDRs can be added at any time.
    #[schemars(schema_with = "rules::ipv6_cidrs")]
    pub cidrs: Vec<String>,

    /// Prefix length of the ranges that are allocated to nodes. The blockSize can be changed at any time; existing
    /// ranges keep their size. Absent: 122 for Blocks, 64 for NodeCIDR.
    #[schemars(range(min = 8, max = 128))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,

    /// Gateway of the pods. Absent: the first usable address of each block, which is then not assigned to pods. An
    /// address: this address; unless addressPrefix is Host, it must be link-local or lie in one of the cidrs. None:
    /// pods have no gateway, and every address of a block can be assigned.
    #[schemars(schema_with = "rules::ipv6_gateway")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// Observed state of the pool, written by the controller. The status is for users, and the controller bases no decision
/// on it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IPPoolStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Usage of the IPv4 ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<FamilyStatus>,

    /// Usage of the IPv6 ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<FamilyStatus>,

    /// Number of nodes to which at least one range of the pool is allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<i64>,

    /// Number of nodes that wait for a range of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<i64>,

    /// The condition Ready, and further conditions that report problems.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Numbers of blocks of one family, in blocks of the current block size. The numbers are decimal text, because an IPv6
/// pool can have more blocks than JSON numbers can represent exactly.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FamilyStatus {
    /// Prefix length of the counted blocks: blockSize of the spec, or the default for the allocation mode. With
    /// blockSizing FitMaxPods, new ranges can have other sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// Total number of blocks in the pool's ranges. Blocks that are never allocated, because of reserved addresses,
    /// service ranges or addresses of nodes, and blocks that overlap assignments are not counted.
    pub capacity: String,
    /// Number of blocks that are allocated to nodes.
    pub allocated: String,
    /// Number of blocks that belonged to deleted nodes and cannot be allocated again yet.
    pub quarantined: String,
    /// Number of blocks that can be allocated to nodes without an assignment.
    pub free: String,
    /// Percentage of blocks that are not free, such as 37%.
    pub utilization: String,
    /// Numbers of addresses by state. Only for pools that allocate Blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<AddressStatus>,
    /// How fast the usage (the number of blocks that are not free) grows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trend: Option<TrendStatus>,
    /// When the pool's last free block will be allocated if usage keeps growing at the current rate. Absent if usage
    /// does not grow, or if the free blocks will last for more than a year.
    #[serde(
        default,
        rename = "exhaustsAt",
        skip_serializing_if = "Option::is_none"
    )]
    pub exhausts_at: Option<Time>,
}

/// Numbers of addresses of one family, as decimal text.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressStatus {
    /// Number of addresses in blocks that are allocated to nodes. Reserved addresses are not counted.
    pub allocated: String,
    /// Number of addresses that pods use, as reported by the nodes' agents. If an agent has not reported, the addresses
    /// in the status of the node's pods are counted.
    pub used: String,
    /// Number of released addresses whose cooldown is not over, so that they cannot be assigned to other pods yet.
    pub cooling: String,
}

impl BlockSizing {
    /// Returns the prefix length of the IPv4 range of a node that may run this many pods. `block_size` is the pool's
    /// `blockSize`. Returns `None` if the size depends on the number of pods and the number is unknown (0).
    pub fn prefix_len(self, block_size: u8, max_pods: u16) -> Option<u8> {
        match (self, max_pods) {
            (BlockSizing::Fixed, _) => Some(block_size),
            (BlockSizing::FitMaxPods, 0) => None,
            (BlockSizing::FitMaxPods, pods) => {
                let addresses = (u32::from(pods) * 2).next_power_of_two();
                let len = 32 - u8::try_from(addresses.ilog2()).unwrap_or(32);
                Some(len.clamp(WIDEST_FITTED, NARROWEST_FITTED))
            }
        }
    }
}

/// Prefix length of the widest range that [`BlockSizing::FitMaxPods`] chooses. It has two addresses for each of 1,024
/// pods.
const WIDEST_FITTED: u8 = 21;

/// Prefix length of the narrowest range that [`BlockSizing::FitMaxPods`] chooses.
const NARROWEST_FITTED: u8 = 28;

impl IPPoolSpec {
    /// Returns the prefix length of IPv4 blocks: `blockSize`, or else the default for the allocation mode. Returns
    /// `None` if the pool has no IPv4 ranges.
    pub fn ipv4_block_size(&self) -> Option<u32> {
        let by_default = match self.allocation_mode {
            AllocationMode::Blocks => 26,
            AllocationMode::NodeCIDR => 24,
        };
        Some(self.ipv4.as_ref()?.block_size.unwrap_or(by_default))
    }

    /// Returns the prefix length of IPv6 blocks: `blockSize`, or else the default for the allocation mode. Returns
    /// `None` if the pool has no IPv6 ranges.
    pub fn ipv6_block_size(&self) -> Option<u32> {
        let by_default = match self.allocation_mode {
            AllocationMode::Blocks => 122,
            AllocationMode::NodeCIDR => 64,
        };
        Some(self.ipv6.as_ref()?.block_size.unwrap_or(by_default))
    }
}

fn default_idle_seconds() -> u32 {
    300
}

fn default_nearly_exhausted_percent() -> u32 {
    90
}

/// How the usage of one family grows. Numbers are decimal text. Rates have six significant digits.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TrendStatus {
    /// When usage was last sampled, to the minute.
    pub at: Time,
    /// Number of blocks that were not free at the time in `at`.
    pub used: String,
    /// Growth of usage in blocks per hour, smoothed over about six hours. Negative if usage shrinks.
    pub per_hour: String,
    /// Root mean square of the hourly change in blocks, smoothed like perHour. If this value is large compared to
    /// perHour, usage fluctuates, and the forecast is unreliable.
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
            "allocationMode": "NodeCIDR",
            "ipv4": {"cidrs": ["10.244.0.0/16"]},
            "ipv6": {"cidrs": ["fd00:10:244::/48"]},
        }))
        .unwrap();
        assert_eq!(
            (spec.ipv4_block_size(), spec.ipv6_block_size()),
            (Some(24), Some(64))
        );
        let blocks = IPPoolSpec {
            allocation_mode: AllocationMode::default(),
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
    fn a_new_spec_has_the_documented_defaults() {
        let texts = |text: &str| vec![text.to_owned()];
        for (spec, written) in [
            (
                IPPoolSpec::new(AllocationMode::NodeCIDR, texts("10.244.0.0/16"), Vec::new()),
                json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.244.0.0/16"]}}),
            ),
            (
                IPPoolSpec::new(AllocationMode::NodeCIDR, Vec::new(), texts("fd00::/48")),
                json!({"allocationMode": "NodeCIDR", "ipv6": {"cidrs": ["fd00::/48"]}}),
            ),
        ] {
            assert_eq!(spec, serde_json::from_value(written).unwrap());
        }
    }

    #[test]
    fn a_fitted_range_is_the_smallest_with_two_addresses_per_pod() {
        for (pods, len) in [
            (0, None),
            (1, Some(28)),
            (8, Some(28)),
            (9, Some(27)),
            (16, Some(27)),
            (110, Some(24)),
            (128, Some(24)),
            (129, Some(23)),
            (250, Some(23)),
            (1_024, Some(21)),
            (u16::MAX, Some(21)),
        ] {
            assert_eq!(BlockSizing::FitMaxPods.prefix_len(26, pods), len, "{pods}");
            assert_eq!(BlockSizing::Fixed.prefix_len(26, pods), Some(26));
        }
    }

    #[test]
    fn absent_fields_are_not_written_as_null() {
        let status = serde_json::to_value(IPPoolStatus::default()).unwrap();
        assert_eq!(status, json!({}));
    }
}
