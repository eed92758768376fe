//! The controller's settings, which the flags of `cadastre controller` fill.

use std::time::Duration;

use cadastre_api::AllocationMode;
use cadastre_core::Cidr;

/// Settings of the controller, all fixed at start.
#[derive(Clone, Debug)]
pub struct ControllerSettings {
    /// Service ranges, for clusters whose API server has no ServiceCIDR objects
    pub service_cidrs: Vec<Cidr>,
    /// Limit of critical requests in flight (see [`crate::machine`])
    pub critical_in_flight: usize,
    /// Limit of all other requests in flight
    pub background_in_flight: usize,
    /// How long a pool is paused after somebody else wrote a podCIDR in its range
    pub foreign_allocator_pause: Duration,
    /// Whether to create a default pool when the cluster has none, and how it allocates
    pub default_pool: Option<AllocationMode>,
    /// Ranges of the default pool; if empty, [`crate::bootstrap`] chooses
    pub default_pool_cidrs: Vec<Cidr>,
    /// How long an address may be without a pod before its node is asked about it
    pub leak_grace: Duration,
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
        }
    }
}
