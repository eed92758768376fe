//! What an operator may set.

use std::time::Duration;

use cadastre_api::Allocate;
use cadastre_core::Cidr;

/// What an operator may set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Service ranges where the cluster does not tell them
    pub service_cidrs: Vec<Cidr>,
    /// How many critical requests may be in flight
    pub critical_in_flight: usize,
    /// How many others
    pub background_in_flight: usize,
    /// How long a pool carves nothing after somebody else wrote a podCIDR in its range
    pub second_writer_hold: Duration,
    /// Whether to make a default pool where there is none, and how it allocates
    pub default_pool: Option<Allocate>,
    /// Its ranges; none: see [`crate::bootstrap`]
    pub default_pool_cidrs: Vec<Cidr>,
    /// How long an address may be without a pod before its node is asked about it
    pub leak_grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            service_cidrs: Vec::new(),
            critical_in_flight: 64,
            background_in_flight: 48,
            second_writer_hold: Duration::from_secs(60),
            default_pool: None,
            default_pool_cidrs: Vec::new(),
            leak_grace: Duration::from_secs(300),
        }
    }
}
