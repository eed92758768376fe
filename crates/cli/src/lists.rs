//! The objects as the API server lists them.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::PartialObjectMeta;

use cadastre_api::{
    IPAMBlockLite, IPPoolLite, NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite,
};

/// The listed objects. Kinds that a verb does not need are empty.
#[derive(Clone, Debug)]
pub struct ClusterLists {
    /// All Nodes
    pub nodes: Vec<NodeLite>,
    /// All IPPools
    pub pools: Vec<IPPoolLite>,
    /// All NodeSubnets
    pub subnets: Vec<NodeSubnetLite>,
    /// All NodeAddresses
    pub addresses: Vec<NodeAddressesLite>,
    /// All IPAMBlocks
    pub blocks: Vec<IPAMBlockLite>,
    /// All ServiceCIDRs
    pub services: Vec<ServiceCIDR>,
    /// Pods of all namespaces
    pub pods: Vec<PodLite>,
    /// Namespaces, metadata only
    pub namespaces: Vec<PartialObjectMeta<Namespace>>,
    /// Leases with the controller's name, or why they cannot be read
    pub leases: Readable<Lease>,
    /// Pods of Cadastre itself, or why they cannot be read
    pub parts: Readable<Pod>,
}

/// Objects that a verb can do without: if they cannot be read, it reports why.
pub(crate) type Readable<T> = Result<Vec<T>, String>;

impl Default for ClusterLists {
    fn default() -> Self {
        ClusterLists {
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

/// Which optional kinds to list; NodeSubnets, NodeAddresses, IPPools, IPAMBlocks, Nodes and ServiceCIDRs always are.
#[derive(Clone, Copy, Debug, Default)]
pub struct WantedKinds {
    /// Pods of all namespaces
    pub pods: bool,
    /// The metadata of namespaces
    pub namespaces: bool,
}

impl WantedKinds {
    /// Lists pods, too.
    pub const PODS: Self = Self {
        pods: true,
        namespaces: false,
    };
    /// Lists all kinds.
    pub const ALL: Self = Self {
        pods: true,
        namespaces: true,
    };
}
