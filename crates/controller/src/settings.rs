//! The controller's settings. The flags of `cadastre controller` set them.

use std::time::Duration;

use cadastre_api::{AllocationMode, FrrNeighbor};
use cadastre_core::Cidr;

/// Settings of the controller. None of them changes while the process runs.
#[derive(Clone, Debug)]
pub struct ControllerSettings {
    /// Service ranges in addition to the ranges in ServiceCIDR objects. Older API servers have no ServiceCIDR objects
    pub service_cidrs: Vec<Cidr>,
    /// Maximum number of critical requests in flight (see [`crate::machine`])
    pub critical_in_flight: usize,
    /// Maximum number of requests in flight that are not critical
    pub background_in_flight: usize,
    /// How long a pool pauses after a foreign allocator has written a podCIDR in its range
    pub foreign_allocator_pause: Duration,
    /// How the default pool allocates ranges. If `None`, a cluster without pools gets no default pool
    pub default_pool: Option<AllocationMode>,
    /// Ranges of the default pool. If empty, [`crate::bootstrap`] chooses them
    pub default_pool_cidrs: Vec<Cidr>,
    /// How long an address must be without a pod before it can become a leak candidate
    pub leak_grace: Duration,
    /// Whether pods are evicted for which their node has no address
    pub evicts_unserved: bool,
    /// Whether the controller writes NodeRoutes
    pub publishes_routes: bool,
    /// What the controller writes to FRRConfigurations. If `None`, it does not touch them
    pub frr: Option<FrrSettings>,
    /// Maximum number of statuses per minute of all agents, not counting those that somebody waits for; 0 for no limit
    pub agent_writes_per_minute: u32,
}

/// What the controller writes to FRRConfigurations, besides the ranges.
#[derive(Clone, Debug, Default)]
pub struct FrrSettings {
    /// Namespace in which the controller writes the FRRConfigurations
    pub namespace: String,
    /// The AS number of nodes without the annotation `cadastre.dev/asn`. Without both, a node gets no FRRConfiguration
    pub asn: Option<u32>,
    /// The neighbors to which nodes announce their ranges
    pub neighbors: Vec<FrrNeighbor>,
}

impl Default for ControllerSettings {
    fn default() -> Self {
        ControllerSettings {
            service_cidrs: Vec::new(),
            critical_in_flight: 64,
            background_in_flight: 48,
            foreign_allocator_pause: Duration::from_secs(60),
            default_pool: None,
            default_pool_cidrs: Vec::new(),
            leak_grace: Duration::from_secs(300),
            evicts_unserved: false,
            publishes_routes: false,
            frr: None,
            agent_writes_per_minute: 6_000,
        }
    }
}
