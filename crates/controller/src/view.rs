//! The controller's state, for metrics and readiness.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::names::PoolName;
use crate::cluster::request::ObjectKind;
use crate::figures::FamilyCounts;
use crate::queue::Load;
use crate::totals::Totals;
use cadastre_core::Family;

/// A snapshot of the controller's state.
#[derive(Clone, Debug, Default)]
pub struct ControllerView {
    /// Kinds whose first list is missing
    pub missing: Vec<&'static str>,
    /// What the fence still has to do; `None` when it is done or this process does not lead
    pub fencing: Option<String>,
    /// Whether this process leads and allocates
    pub allocating: bool,
    /// Counts of every pool and family
    pub pools: Vec<(PoolName, Family, FamilyCounts)>,
    /// Addresses of every pool and family with blocks
    pub addresses: Vec<(PoolName, Family, Totals)>,
    /// Blocks by state: held, recalled, provisional, quarantined, overdue
    pub blocks: BTreeMap<&'static str, usize>,
    /// Addresses whose pods are gone, the age of the oldest, and the number of addresses that nodes are asked about
    pub leaks: (usize, Duration, usize),
    /// Why there is no default pool, if there should be one
    pub trouble: Option<String>,
    /// Addresses that several pods report
    pub doubled: usize,
    /// Number of calls that keep failing, by the kind of object
    pub rejected_writes: BTreeMap<ObjectKind, usize>,
    /// Invalid entries in agents' statuses
    pub refused: u64,
    /// How long the oldest block has been in quarantine beyond its time
    pub oldest_rest: Duration,
    /// Waiting nodes, by reason
    pub waiting: BTreeMap<&'static str, usize>,
    /// Number of nodes that wait for each pool, without zeros
    pub pool_waiting: BTreeMap<PoolName, i64>,
    /// The longest wait of a node for a pool
    pub oldest_wait: Duration,
    /// When pools will be exhausted, by their forecasts
    pub exhausts: Vec<(PoolName, Family, jiff::Timestamp)>,
    /// Pairs of nodes with some of the same addresses
    pub overlaps: usize,
    /// podCIDRs over pools that are too wide to count
    pub too_wide: usize,
    /// Ranges that stay allocated because a write is indeterminate
    pub indeterminate: usize,
    /// podCIDRs that a foreign allocator wrote while this process led
    pub foreign_allocations: u64,
    /// Load of each loop's queues
    pub loops: Vec<(&'static str, Load)>,
}
