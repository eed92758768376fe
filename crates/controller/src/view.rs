//! What the controller can be asked about itself.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::request::Kind;
use crate::cluster::seen::Text;
use crate::figures::Figures;
use crate::queue::Load;
use crate::totals::Totals;
use cadastre_core::Family;

/// All of it, for metrics and readiness.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Kinds not listed yet
    pub missing: Vec<&'static str>,
    /// Of a leader: what the fence still does, or nothing once it deals
    pub fencing: Option<String>,
    /// Whether it leads and deals
    pub dealing: bool,
    /// Every pool and family
    pub pools: Vec<(Text, Family, Figures)>,
    /// Addresses of every pool and family that allocates blocks
    pub addresses: Vec<(Text, Family, Totals)>,
    /// Blocks by state: held, recalled, provisional, quarantined, overdue
    pub blocks: BTreeMap<&'static str, usize>,
    /// Addresses whose pods are gone, the age of the oldest, and how many nodes are asked about
    pub leaks: (usize, Duration, usize),
    /// Why there is no default pool though there should be one
    pub trouble: Option<String>,
    /// Addresses that several pods report
    pub doubled: usize,
    /// Calls that the API server keeps refusing or leaving unanswered, by the kind of object
    pub refused_writes: BTreeMap<Kind, usize>,
    /// Entries of agents' statuses that make no sense
    pub refused: u64,
    /// Since when the oldest range rests that should be over
    pub oldest_rest: Duration,
    /// Nodes that wait, by reason
    pub waiting: BTreeMap<&'static str, usize>,
    /// Nodes that wait for each pool; none for those that nobody waits for
    pub pool_waiting: BTreeMap<Text, i64>,
    /// For how long the node waits that waits longest for a pool
    pub oldest_wait: Duration,
    /// When pools will have nothing left, where that can be told
    pub exhausts: Vec<(Text, Family, jiff::Timestamp)>,
    /// Pairs of nodes with common addresses
    pub overlaps: usize,
    /// podCIDRs over pools that no node could have been given
    pub too_wide: usize,
    /// Ranges kept because a write's outcome is unclear
    pub unclear: usize,
    /// podCIDRs that somebody else wrote while this leader dealt
    pub second_writer: u64,
    /// How much waits in the queues of each loop
    pub loops: Vec<(&'static str, Load)>,
}
