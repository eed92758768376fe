//! The lists of objects that a subcommand reads from the API server, unparsed, and which kinds to list.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::PartialObjectMeta;

use cadastre_api::{
    IPAMBlockLite, IPClaimLite, IPPoolLite, NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite,
};

/// The listed objects, of the whole cluster. A kind that the subcommand does not need has an empty list.
#[derive(Clone, Debug)]
pub(crate) struct ClusterLists {
    pub nodes: Vec<NodeLite>,
    pub pools: Vec<IPPoolLite>,
    pub subnets: Vec<NodeSubnetLite>,
    pub addresses: Vec<NodeAddressesLite>,
    pub blocks: Vec<IPAMBlockLite>,
    /// All IPClaims; empty if the cluster does not have this kind
    pub claims: Vec<IPClaimLite>,
    /// All ServiceCIDRs; empty if the cluster does not have this kind
    pub services: Vec<ServiceCIDR>,
    /// Pods of all namespaces
    pub pods: Vec<PodLite>,
    /// Namespaces, without spec and status
    pub namespaces: Vec<PartialObjectMeta<Namespace>>,
    /// Leases with the name of the controller's Lease, or why they cannot be read
    pub leases: Readable<Lease>,
    /// The pods of the controllers and agents of Cadastre, or why they cannot be read
    pub parts: Readable<Pod>,
}

/// Objects that a subcommand does not strictly need. `Err` has the reason why the objects cannot be read. The
/// subcommand reports this reason.
pub(crate) type Readable<T> = Result<Vec<T>, String>;

/// Which of the optional kinds to list. NodeSubnets, NodeAddresses, IPPools, IPAMBlocks, IPClaims, Nodes and
/// ServiceCIDRs are always listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WantedKinds {
    /// Neither pods nor Namespaces
    NoPods,
    /// Pods of all namespaces
    Pods,
    /// Pods of all namespaces, and Namespaces without spec and status
    PodsAndNamespaces,
}

/// Returns `namespace/name` of an object.
pub(crate) fn full_name(meta: &ObjectMeta) -> String {
    let [namespace, name] =
        [&meta.namespace, &meta.name].map(|it| it.as_deref().unwrap_or_default());
    format!("{namespace}/{name}")
}
