//! The objects as the API server lists them.

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::PartialObjectMeta;

use crate::api::{IPAMBlockLite, IPPoolLite, NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite};

/// What was listed. A kind that a verb does not need is empty.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    /// Nodes
    pub nodes: Vec<NodeLite>,
    /// IPPools
    pub pools: Vec<IPPoolLite>,
    /// NodeSubnets
    pub subnets: Vec<NodeSubnetLite>,
    /// NodeAddresses
    pub addresses: Vec<NodeAddressesLite>,
    /// IPAMBlocks
    pub blocks: Vec<IPAMBlockLite>,
    /// ServiceCIDRs
    pub services: Vec<ServiceCIDR>,
    /// Pods of all namespaces
    pub pods: Vec<PodLite>,
    /// Namespaces, without specs
    pub namespaces: Vec<PartialObjectMeta<Namespace>>,
}

/// Which kinds to list; NodeSubnets, NodeAddresses, IPPools, IPAMBlocks, Nodes and ServiceCIDRs are always needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Pods of all namespaces
    pub pods: bool,
    /// Namespaces
    pub namespaces: bool,
}

impl Wanted {
    /// With pods.
    pub const PODS: Self = Self {
        pods: true,
        namespaces: false,
    };
    /// With everything.
    pub const ALL: Self = Self {
        pods: true,
        namespaces: true,
    };
}
