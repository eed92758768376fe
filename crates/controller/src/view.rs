//! A snapshot of the controller's state, from which metrics and readiness are computed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::names::PoolName;
use crate::cluster::request::ObjectKind;
use crate::figures::FamilyCounts;
use crate::queue::Load;
use crate::totals::Totals;
use cadastre_core::Family;

/// A snapshot of the controller's state. If this process does not lead, only the fields that do not depend on
/// leadership are filled.
#[derive(Clone, Debug, Default)]
pub struct ControllerView {
    /// Kinds of objects whose first list has not arrived
    pub missing: Vec<&'static str>,
    /// The steps that the fence still has to do. `None` if the fence is done or this process does not lead
    pub fencing: Option<String>,
    /// Whether this process leads and its loops run
    pub allocating: bool,
    /// Numbers of ranges by state, for each pool and family
    pub pools: Vec<(PoolName, Family, FamilyCounts)>,
    /// Numbers of addresses by state, for each pool and family that has blocks
    pub addresses: Vec<(PoolName, Family, Totals)>,
    /// Number of blocks by state. The states are `allocated`, `recalled`, `provisional` (not confirmed yet),
    /// `quarantined`, and `overdue` (in quarantine beyond its planned end)
    pub blocks: BTreeMap<&'static str, usize>,
    /// Three values: the number of addresses without a pod, the longest time for which one of these addresses has been
    /// without a pod, and the number of leak candidates that NodeSubnets list
    pub leaks: (usize, Duration, usize),
    /// Why the default pool could not be created. `None` if no reason is known or a pool exists
    pub trouble: Option<String>,
    /// Number of addresses that several pods report
    pub doubled: usize,
    /// Number of writes and reads that keep failing, by the kind of object
    pub rejected_writes: BTreeMap<ObjectKind, usize>,
    /// Number of invalid entries in the agents' statuses
    pub refused: u64,
    /// The longest time for which a block has stayed in quarantine beyond the planned end of the quarantine
    pub oldest_rest: Duration,
    /// Number of waiting nodes by reason, as in the label `reason`
    pub waiting: BTreeMap<&'static str, usize>,
    /// Number of nodes that have no free address for another pod and cannot get one
    pub exhausted_nodes: usize,
    /// Number of claims by state, as in the label `state`
    pub claims: BTreeMap<&'static str, usize>,
    /// For each pool, the number of nodes that wait for a range of it. Pools without waiting nodes are missing
    pub pool_waiting: BTreeMap<PoolName, i64>,
    /// The longest time that a node has been waiting for a podCIDR or a block
    pub oldest_wait: Duration,
    /// When each pool will be exhausted, according to the forecast in the pool's status
    pub exhausts: Vec<(PoolName, Family, jiff::Timestamp)>,
    /// Number of pairs of ranges of different nodes that overlap; at least one range of each pair is a podCIDR
    pub overlaps: usize,
    /// Number of podCIDRs that overlap pools but do not count, because they are wider than any range that a node could
    /// get
    pub too_wide: usize,
    /// Number of ranges that stay reserved because a write is indeterminate
    pub indeterminate: usize,
    /// Number of nodes whose podCIDRs a foreign allocator wrote while this process allocated podCIDRs
    pub foreign_allocations: u64,
    /// Load of each loop's queues, by the name of the loop
    pub loops: Vec<(&'static str, Load)>,
}
