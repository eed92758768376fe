//! The Kubernetes API of Cadastre: group `cadastre.dev`, version `v1alpha1`. All kinds but IPClaim are cluster-scoped.
//!
//! | file | content |
//! |---|---|
//! | [`names`] | group, finalizer, annotations, field managers, lease |
//! | [`pool`] | IPPool: address ranges, and which nodes get parts of them |
//! | [`block`] | IPAMBlock: a block of a pool, allocated to one node |
//! | [`claim`] | IPClaim: addresses that stay with a workload |
//! | [`pod_claim`], [`sticky`] | which IPClaim a pod uses; sticky addresses of StatefulSets |
//! | [`subnet`] | NodeSubnet: the ranges of one node, its agent's report, ranges in quarantine |
//! | [`addresses`] | NodeAddresses: which addresses of a node are in use, and by which pods |
//! | [`routes`] | NodeRoutes: which addresses are reached through a node |
//! | [`frr`] | FRRConfigurations of frr-k8s, which announce the ranges of a node by BGP |
//! | [`requests`] | annotations by which users request the release of addresses and blocks |
//! | [`terms`] | settings for the assignment of a pool's addresses to pods |
//! | [`choice`] | which pools serve a node or pod, and why |
//! | [`node_allocation`] | conversion of a NodeSubnet to the form that a node's store keeps |
//! | `rules` | CEL rules by which the API server itself rejects invalid objects |
//! | [`crd`] | the CustomResourceDefinitions of all kinds, as objects and as YAML |
//! | `columns` | the columns of `kubectl get` |
//! | [`watched`] | types for watched objects, with only the fields that Cadastre reads |
//!
//! # Guarantees
//! - The API server checks everything that can be checked without a second object, whoever writes the object. Rules are
//!   not applied retroactively. So an object that is older than a rule may violate the rule.
//! - No field is ever `null`. An absent field and an empty object in the field mean the same.

pub mod addresses;
pub mod block;
pub mod choice;
pub mod claim;
mod columns;
pub mod crd;
pub mod frr;
pub mod ipam_claim;
pub mod names;
pub mod node_allocation;
pub mod pod_claim;
pub mod pool;
pub mod requests;
pub mod routes;
mod rules;
pub mod sticky;
pub mod subnet;
pub mod terms;
pub mod watched;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Returns whether an owner reference has the API group `group`, in any version, and the kind `kind`.
fn is_of_kind(owner: &OwnerReference, group: &str, kind: &str) -> bool {
    let own = owner.api_version.split_once('/').map(|it| it.0);
    own == Some(group) && owner.kind == kind
}

/// Returns whether `value` is the default of its type. Fields with their default are not serialized.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use addresses::{AddressEntry, NodeAddresses, NodeAddressesSpec};
pub use block::{
    BlockOwner, IPAMBlock, IPAMBlockSpec, MOST_STANDBY, OwnerKind, ParentBlock, block_name,
    listed_uid, object_uid,
};
pub use claim::{IPClaim, IPClaimSpec, IPClaimStatus};
pub use frr::{FRRConfiguration, FRRConfigurationSpec, FrrNeighbor, FrrRouter};
pub use ipam_claim::{IPAMClaimIps, IPAMClaimLite, InterfaceClaim};
pub use names::{
    ADDRESSES_ANNOTATION, AGENT_MANAGER, ASN_ANNOTATION, CLAIM_ANNOTATION, CLAIM_FINALIZER,
    DRAIN_ANNOTATION, EXHAUSTED_CONDITION, EXHAUSTED_TAINT, FIELD_MANAGER, FINALIZER,
    GAP_ANNOTATION, GROUP, INTENTS_ANNOTATION, LEASE_NAME, MIGRATION_READY_ANNOTATION,
    POOLS_ANNOTATION, RELEASE_ANNOTATION, STICKY_ANNOTATION, STICKY_TTL_ANNOTATION,
    TERM_ANNOTATION, UNSETTLED_ANNOTATION, VERSION, WITHDRAW_ANNOTATION,
};
pub use pool::{
    AddressStatus, AllocationMode, AssignmentMode, BlockSizing, Borrowing, ExhaustedNodeTaint,
    FamilyStatus, FirstBlock, IPPool, IPPoolSpec, IPPoolStatus, IPv4Ranges, IPv6Ranges,
    NodeAssignment, TrendStatus,
};
pub use requests::Requests;
pub use routes::{NodeRoutes, NodeRoutesSpec};
pub use subnet::{
    ADDRESS_CONFLICT, AddressConflict, AddressRequest, AgentInfo, AllocatedBlock, AllocatedRange,
    BlockStatus, ClaimedAddress, LeakCandidate, LentRange, MOST_ADDRESS_REQUESTS, MOST_BLOCKS,
    MOST_CONFLICTS, MOST_COUNT, MOST_ORPHANS, MOST_POD_RANGES, MOST_POOLS, MOST_RESERVED,
    MOST_WITHDRAWALS, NodePool, NodePoolRanges, NodeSubnet, NodeSubnetSpec, NodeSubnetStatus,
    PoolDemand, QuarantinedNode, RANGES_ANNOUNCED, ROUTES_READY, Recall, SERVED_BY_OTHERS,
};
pub use terms::{
    AddressPrefix, AddressTerms, ConflictProbe, Dns, ExplicitAddresses, Route, UnknownPods, Warm,
    WarmMinimum,
};
pub use watched::{
    FRRConfigurationLite, IPAMBlockLite, IPClaimLite, IPPoolLite, MIRROR_ANNOTATION,
    NodeAddressLite, NodeAddressesLite, NodeCapacityLite, NodeConditionLite, NodeInfoLite,
    NodeLite, NodeLiteSpec, NodeLiteStatus, NodeRoutesLite, NodeSubnetLite, PodIpLite, PodLite,
    PodLiteSpec, PodLiteStatus, TaintLite, TolerationLite,
};
