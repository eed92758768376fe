//! The objects as the API server lists them.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::PartialObjectMeta;

use cadastre_api::{
    IPAMBlockLite, IPPoolLite, NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite,
};

/// What was listed. A kind that a verb does not need is empty.
#[derive(Clone, Debug)]
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
    /// Leases of the controller's name, or why they could not be read
    pub leases: Readable<Lease>,
    /// Pods of Cadastre itself, or why they could not be read
    pub parts: Readable<Pod>,
}

/// What a verb can do without: it says so where it may not be read.
pub(crate) type Readable<T> = Result<Vec<T>, String>;

impl Default for Lists {
    fn default() -> Self {
        Lists {
            nodes: Vec::new(),
            pools: Vec::new(),
            subnets: Vec::new(),
            addresses: Vec::new(),
            blocks: Vec::new(),
            services: Vec::new(),
            pods: Vec::new(),
            namespaces: Vec::new(),
            leases: Ok(Vec::new()),
            parts: Ok(Vec::new()),
        }
    }
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
