//! The Kubernetes API of Cadastre: group `cadastre.dev`, version `v1alpha1`, all cluster-scoped.
//!
//! | file | what it holds |
//! |---|---|
//! | [`names`] | group, finalizer, annotations, field manager, lease |
//! | [`pool`] | IPPool: ranges, and which nodes get a part of them |
//! | [`block`] | IPAMBlock: a piece of a pool that one node gives addresses from |
//! | [`subnet`] | NodeSubnet: what one node holds, what its agent says of it, what earlier nodes held |
//! | [`addresses`] | NodeAddresses: which addresses of a node are in use, and by what |
//! | [`requests`] | what people ask of a node's holdings |
//! | [`terms`] | how nodes give a pool's addresses to pods |
//! | [`choice`] | which pool serves a node or a pod, and why |
//! | [`holding`] | a NodeSubnet as what a node gives addresses from |
//! | `rules` | what the API server itself refuses, in CEL |
//! | [`crd`] | the CustomResourceDefinitions of all kinds, as objects and as YAML |
//! | `columns` | what `kubectl get` shows |
//! | [`watched`] | the few fields of Nodes and Pods that are worth parsing |
//!
//! # Guarantees
//! - Whatever needs no second object to be judged is judged by the API server, for every writer.
//!   A reader may still meet objects that are older than a rule: rules do not look back.
//! - An absent field and an absent object read the same: no field is ever `null`.

pub mod addresses;
pub mod block;
pub mod choice;
mod columns;
pub mod crd;
pub mod holding;
pub mod names;
pub mod pool;
pub mod requests;
mod rules;
pub mod subnet;
pub mod terms;
pub mod watched;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use addresses::{AddressEntry, NodeAddresses, NodeAddressesSpec};
pub use block::{BlockOwner, IPAMBlock, IPAMBlockSpec, OwnerKind, block_name};
pub use names::{
    ADDRESSES_ANNOTATION, AGENT_MANAGER, DRAIN_ANNOTATION, FIELD_MANAGER, FINALIZER,
    GAP_ANNOTATION, GROUP, INTENTS_ANNOTATION, LEASE_NAME, POOLS_ANNOTATION, RELEASE_ANNOTATION,
    TERM_ANNOTATION, UNSETTLED_ANNOTATION, VERSION,
};
pub use pool::{
    AddressStatus, Allocate, Assignment, FamilyStatus, FirstBlock, IPPool, IPPoolSpec,
    IPPoolStatus, IPv4Ranges, IPv6Ranges, TrendStatus,
};
pub use requests::Requests;
pub use subnet::{
    AgentInfo, BlockReport, HeldBlock, HeldRange, MOST_BLOCKS, MOST_COUNT, MOST_ORPHANS,
    MOST_POD_RANGES, MOST_POOLS, MOST_RESERVED, NodePool, NodePoolRanges, NodeSubnet,
    NodeSubnetSpec, NodeSubnetStatus, PoolDemand, PreviousHolder, Recall, SERVED_BY_OTHERS,
    Suspect,
};
pub use terms::{AddressPrefix, AddressTerms, Dns, Route, UnknownPods, Warm};
pub use watched::{
    IPAMBlockLite, IPPoolLite, MIRROR_ANNOTATION, NodeAddressLite, NodeAddressesLite, NodeInfoLite,
    NodeLite, NodeLiteSpec, NodeLiteStatus, NodeSubnetLite, PodIpLite, PodLite, PodLiteSpec,
    PodLiteStatus,
};
