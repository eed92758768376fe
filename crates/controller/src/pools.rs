//! The state of all pools: what each pool may allocate now, and to which nodes.
//!
//! All pools, service ranges and node addresses are evaluated together, because pools depend on each other. Of two
//! overlapping pools, the newer pool allocates nothing until the older one is gone. Pools are ordered by creation time,
//! then by name, so every controller finds the same order.

mod assignments;
mod evaluate;
mod index;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use self::assignments::{Assignment, Assignments};
use self::evaluate::{Older, evaluate_pool};
use self::index::PoolRangeIndex;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{Node, Pool};
use cadastre_api::choice::{PoolCandidate, PoolStanding, Requester, Selector, choose, lacking};
use cadastre_api::{
    AllocationMode, AssignmentMode, BlockSizing, IPPoolSpec, MOST_POD_RANGES, NodePool, WarmMinimum,
};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Dual, Family, IpRange, RangeLedger};

/// How long a deleted node's range that lies in no pool stays in quarantine.
pub(crate) const DEFAULT_QUARANTINE: Duration = Duration::from_secs(60);

/// The prefix of a smaller block is at most this many bits longer than that of a full-size block.
const SMALLER: u8 = 6;

/// Prefix lengths of the widest podCIDRs that other allocators are known to give to nodes. The ranges of these podCIDRs
/// count as allocated even if no pool has blocks of that size, because a migration to Cadastre must not lose podCIDRs.
const WIDEST: [(Family, u8); 2] = [(Family::V4, 20), (Family::V6, 64)];

/// Name of the ServiceCIDR that the API server creates from its flags.
const KUBERNETES: &str = "kubernetes";

/// One pool as last evaluated: what it may allocate, and to which nodes.
#[derive(Clone, Debug)]
pub struct PoolState {
    /// `metadata.name` of the IPPool
    pub name: PoolName,
    /// `metadata.uid` of the IPPool
    pub uid: ObjectUid,
    /// Creation time of the object, in seconds since 1970
    pub created: i64,
    /// Whether the pool allocates podCIDRs or blocks
    pub allocation_mode: AllocationMode,
    /// The ranges from which the pool allocates. For each family, a cursor marks where the next search for a free range
    /// begins
    pub space: cadastre_core::Pool,
    /// The fixed ranges of certain nodes, which `space` keeps from other nodes
    pub assignments: Assignments,
    /// How the size of a node's IPv4 range is chosen. Always `Fixed` in mode Blocks
    pub sizing: BlockSizing,
    /// The conditions under which nodes get blocks. Unused in mode NodeCIDR
    pub terms: BlockTerms,
    /// The pool's entry in NodeSubnets
    pub node_view: NodePool,
    /// Addresses that are never assigned: reserved ones, service ranges and node addresses
    pub reserved: Vec<IpRange>,
    /// Reserved addresses that are assigned only to pods that request them
    pub on_request: Vec<IpRange>,
    /// Utilization in percent from which the pool is reported as nearly exhausted
    pub nearly_exhausted: u32,
    /// Selects the nodes that get ranges of the pool
    pub selector: Selector,
    /// Pools with higher values are tried first
    pub priority: i32,
    /// Whether a node gets a taint while it has no free address for another pod
    pub taints_nodes: bool,
    /// How long ranges of deleted nodes stay in quarantine
    pub quarantine: Duration,
    /// Whether the pool has Cadastre's finalizer
    pub guarded: bool,
    /// Whether the pool allocates now, and if not, why
    pub phase: PoolPhase,
    /// Texts for the status of the pool. They name the service ranges and node addresses that lie in the pool's ranges
    /// and that the pool therefore does not allocate
    pub left_out: Vec<String>,
    /// The monotonic time at which the pool's pause ends; `None` if the pool does not pause. A pool pauses because a
    /// foreign allocator writes podCIDRs in its range
    pub paused_until: Option<Duration>,
}

/// The conditions under which nodes get blocks of a pool and lose them again.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockTerms {
    /// Whether a node gets its first block without demand. This is false if pods must request the pool by name, or if
    /// the pool is only for some namespaces or pods
    pub first_immediate: bool,
    /// Selects the namespaces whose pods get addresses of the pool
    pub namespaces: Selector,
    /// Selects the pods that get addresses of the pool
    pub pods: Selector,
    /// A node gets at most this many blocks of each family. If `None`, it gets at most `MOST_BLOCKS`
    pub most: Option<usize>,
    /// Whether nodes borrow parts of other nodes' blocks when the pool is exhausted
    pub borrows: bool,
    /// Names of the networks whose IPAMClaims get addresses of the pool
    pub networks: Vec<String>,
    /// How long a block must be empty before it is recalled from a node that can spare it
    pub idle: Duration,
}

/// Whether a pool allocates now, and if not, the reason.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum PoolPhase {
    /// The pool allocates.
    Serving,
    /// The spec is invalid; the text says why.
    Invalid(String),
    /// The pool is being deleted.
    Terminating,
    /// The spec has `disabled: true`.
    Disabled,
    /// The finalizer is not set yet.
    Starting,
    /// An older pool contains some addresses of this pool. `range` is a range of this pool, and overlaps `theirs`, a
    /// range of the pool `older`.
    Overlaps {
        older: PoolName,
        range: Cidr,
        theirs: Cidr,
    },
    /// A foreign allocator writes podCIDRs in the pool's range.
    ForeignAllocator,
}

impl fmt::Display for PoolPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolPhase::Serving => write!(f, "serving"),
            PoolPhase::Invalid(why) => write!(f, "its spec cannot be used: {why}"),
            PoolPhase::Terminating => write!(f, "it is being deleted"),
            PoolPhase::Disabled => write!(f, "it is disabled: set spec.disabled to false"),
            PoolPhase::Starting => write!(f, "its finalizer is not set yet"),
            PoolPhase::Overlaps {
                older,
                range,
                theirs,
            } => write!(
                f,
                "{range} overlaps {theirs} of the older pool \"{older}\": take the range out of one of them, or delete the older pool"
            ),
            PoolPhase::ForeignAllocator => write!(
                f,
                "somebody else writes podCIDRs in its range: turn off the other allocator (kube-controller-manager: --allocate-node-cidrs=false)"
            ),
        }
    }
}

impl PoolState {
    /// Returns whether the pool's node selector matches the node, even if the pool allocates nothing now.
    pub fn selects(&self, node: &Node) -> bool {
        self.selector.matches(&node.labels)
    }

    /// Returns whether nodes exist but the pool selects none of them.
    pub fn selects_none(&self, cache: &ClusterCache) -> bool {
        let mut nodes = cache.nodes.iter();
        !cache.nodes.is_empty() && !nodes.any(|node| self.selects(node))
    }

    /// Returns how many free addresses a node should have beyond those that its pods use or wait for (`warm.low`).
    pub fn reserve(&self) -> u64 {
        self.node_view.terms.warm.low.into()
    }

    /// Returns how many addresses the node should have in all, whether its pods use them or not (`warm.minimum`).
    pub fn minimum(&self, node: &Node) -> u64 {
        min_addresses(&self.node_view, node).into()
    }

    /// Returns whether the pool allocates now. If not, [`PoolState::phase`] says why.
    pub fn is_serving(&self) -> bool {
        self.phase == PoolPhase::Serving
    }
}

/// The states of all pools, by name, with indexes by age, rank and range.
#[derive(Clone, Debug, Default)]
pub struct PoolStates {
    states: BTreeMap<PoolName, PoolState>,
    /// Names of all pools, oldest first. NodeCIDR pools that are being deleted come last.
    by_age: Vec<PoolName>,
    /// Finds the pools that share addresses with a range, as positions in `by_age`
    index: PoolRangeIndex,
    /// Names of the pools that allocate, best first. Pools of equal rank are ordered by name, not by their number of
    /// free blocks.
    by_rank: Vec<PoolName>,
    /// The ranges of all pools, merged, as NodeSubnets list them.
    pod_ranges: Vec<String>,
    /// The family of the first service range, which is the cluster's primary family. `None` if no service range is
    /// known.
    service_family: Option<Family>,
    /// How many pools the lookups have visited. Tests check the cost of lookups by this count.
    #[cfg(test)]
    looks: std::sync::Arc<AtomicUsize>,
}

impl PoolStates {
    /// Evaluates all pools from the cache again. Only the cursors of searches and the pauses are kept from the earlier
    /// states.
    pub(crate) fn evaluate(&mut self, cache: &ClusterCache, flag_services: &[Cidr], now: Duration) {
        let mut previous = std::mem::take(&mut self.states);
        let mut pools_by_age: Vec<&Pool> = cache.pools.iter().map(AsRef::as_ref).collect();
        // podCIDRs can outlive their pool. So a NodeCIDR pool that is being deleted must not keep a newer pool from
        // allocating.
        let is_last = |it: &Pool| {
            let is_node_cidr = |spec: &IPPoolSpec| spec.allocation_mode == AllocationMode::NodeCIDR;
            it.deleting && it.spec.as_ref().is_ok_and(is_node_cidr)
        };
        pools_by_age.sort_by_cached_key(|it| (is_last(it), it.created, it.name.clone()));
        let services = cache.services.iter().flat_map(|it| &it.cidrs);
        let services: Vec<Cidr> = services.chain(flag_services).copied().collect();
        let mut older = Older::default();
        for pool in &pools_by_age {
            let kept = previous.remove(&pool.name);
            let kept = kept.filter(|state| state.uid == pool.uid);
            let state = evaluate_pool(pool, kept, &services, cache, &mut older, now);
            self.states.insert(pool.name.clone(), state);
        }
        let kubernetes = cache.services.get(KUBERNETES);
        let first = kubernetes.and_then(|it| it.cidrs.first());
        let first = first.or(flag_services.first()).or(services.first());
        self.service_family = first.map(Cidr::family);
        self.by_age = pools_by_age.iter().map(|pool| pool.name.clone()).collect();
        let places = self.by_age.iter().enumerate();
        self.index = PoolRangeIndex::new(places.flat_map(|(place, name)| {
            let space = self.states.get(name).map(|state| &state.space);
            let ranges = space.into_iter().flat_map(|space| {
                let families = space.families();
                families.flat_map(|family| space.cidrs(family).iter().copied())
            });
            ranges.map(move |range| (place, range))
        }));
        let serving = self.states.values().filter(|state| state.is_serving());
        let mut rank: Vec<&PoolState> = serving.collect();
        rank.sort_by(|a, b| b.rank().cmp(&a.rank()).then_with(|| a.name.cmp(&b.name)));
        self.by_rank = rank.into_iter().map(|state| state.name.clone()).collect();
        let views = self.states.values().map(|state| &state.node_view);
        let ranges = views.flat_map(|view| view.ipv4.iter().chain(&view.ipv6));
        let ranges = ranges.flat_map(|ranges| &ranges.cidrs);
        let ranges = Cidr::merged(ranges.filter_map(|text| Cidr::parse_strict(text).ok()));
        let texts = ranges.iter().map(ToString::to_string);
        self.pod_ranges = texts.take(MOST_POD_RANGES).collect();
    }

    /// Returns the cluster's primary family, or `None` if no service range is known.
    pub(crate) fn service_family(&self) -> Option<Family> {
        self.service_family
    }

    /// Returns the ranges of all pools, merged. Agents do not masquerade traffic between them.
    pub fn pod_ranges(&self) -> &[String] {
        &self.pod_ranges
    }

    /// Returns the pool of that name, or `None` if there was no such pool when the pools were last evaluated.
    pub fn get<N: Ord + ?Sized>(&self, name: &N) -> Option<&PoolState>
    where
        PoolName: Borrow<N>,
    {
        self.states.get(name)
    }

    /// Returns the pool of that name, so that the caller can allocate from it. An allocation moves the pool's cursors.
    pub fn get_mut<N: Ord + ?Sized>(&mut self, name: &N) -> Option<&mut PoolState>
    where
        PoolName: Borrow<N>,
    {
        self.states.get_mut(name)
    }

    /// Returns all pools in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &PoolState> {
        self.states.values()
    }

    /// Returns the pool to which a range belongs: the oldest pool that covers the range.
    pub fn of(&self, range: &Cidr) -> Option<&PoolState> {
        self.oldest_over(range, |_| true)
    }

    /// Returns the pool that keeps its finalizer while the range is allocated. This is the oldest pool that covers the
    /// range and has a finalizer. NodeCIDR pools that are being deleted count as the newest.
    pub fn guarding_pool(&self, range: &Cidr) -> Option<&PoolState> {
        self.oldest_over(range, |state| state.guarded)
    }

    fn oldest_over(&self, range: &Cidr, is: impl Fn(&PoolState) -> bool) -> Option<&PoolState> {
        let is = |place| self.at(place).is_some_and(&is);
        self.at(self.index.oldest_over(range, is)?)
    }

    /// Returns the pool at position `place` of `by_age`.
    fn at(&self, place: usize) -> Option<&PoolState> {
        #[cfg(test)]
        self.looks.fetch_add(1, Ordering::Relaxed);
        self.states.get(self.by_age.get(place)?)
    }

    /// Returns how many pools the lookups have visited, for tests of the cost of lookups.
    #[cfg(test)]
    pub(super) fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }

    /// Compares the pool `state` with the oldest pool that has the same selectors and priority. If that older pool has
    /// a family that `state` lacks, returns the older pool and the lacking family. Then only pods that request `state`
    /// by name get its addresses (see [`choose`]). Returns `None` if `state` lacks no family or does not allocate.
    pub(crate) fn older_of_other_family(&self, state: &PoolState) -> Option<(&PoolState, Family)> {
        let is_alike = |older: &&PoolState| {
            older.is_serving()
                && (older.allocation_mode, older.priority)
                    == (state.allocation_mode, state.priority)
                && older.selector == state.selector
                && older.terms.namespaces == state.terms.namespaces
                && older.terms.pods == state.terms.pods
        };
        let by_age = self.by_age.iter().filter_map(|name| self.states.get(name));
        let oldest = by_age.filter(|_| state.is_serving()).find(is_alike)?;
        let family = lacking(oldest.families(), state.families())?;
        Some((oldest, family))
    }

    /// Returns the pools that share an address with the range, in order of their names.
    pub fn touching(&self, range: &Cidr) -> impl Iterator<Item = &PoolState> + use<'_> {
        let states = self
            .index
            .touching(range)
            .filter_map(|place| self.at(place));
        let by_name: BTreeMap<&PoolName, &PoolState> = states.map(|it| (&it.name, it)).collect();
        by_name.into_values()
    }

    /// Returns whether any pool shares an address with the range.
    pub fn is_any_over(&self, range: &Cidr) -> bool {
        self.index.touching(range).next().is_some()
    }

    /// Returns the pools that allocate and select the node, in the order in which they are tried (see [`choose`]). The
    /// flag is true if the node gets ranges of the pool only for requests that name the pool. Pools for which `is_full`
    /// returns true are ordered as if they had no free range.
    pub fn choices(
        &self,
        allocate: AllocationMode,
        node: &Node,
        ledger: &RangeLedger,
        is_full: impl Fn(&PoolState) -> bool,
    ) -> Vec<(PoolName, bool)> {
        let room = |candidate: &PoolCandidate| match self.states.get(candidate.name) {
            Some(state) if !is_full(state) => state.room(ledger),
            _ => 0,
        };
        let ranked = self.ranked(allocate, node, room).into_iter();
        let named = ranked.map(|(state, by_name)| (state.name.clone(), by_name));
        named.collect()
    }

    /// Returns a text that names the pools that the node may use, and explains why it may not use the others.
    pub fn explain(&self, allocate: AllocationMode, node: &Node, ledger: &RangeLedger) -> String {
        let states = self.states.values();
        let of_kind = states.filter(|state| state.allocation_mode == allocate);
        let candidates: Vec<PoolCandidate> = of_kind.map(PoolState::candidate).collect();
        let room = |candidate: &PoolCandidate| {
            let state = self.states.get(candidate.name);
            state.map_or(0, |state| state.room(ledger))
        };
        let choice = choose(&candidates, &whole(node), room).to_string();
        choice.trim_end().replace('\n', "; ")
    }

    /// Returns the pools from which a node may demand blocks, in order of their rank, best first. Free ranges do not
    /// affect the order. The flag is true if only pods that ask for the pool by name get its addresses.
    pub(crate) fn block_pools<'a>(&'a self, node: &'a Node) -> Vec<(&'a PoolState, bool)> {
        self.ranked(AllocationMode::Blocks, node, |_| 0)
    }

    /// Returns the pools from which every pod on the node gets addresses without naming a pool.
    pub(crate) fn default_pools<'a>(&'a self, node: &'a Node) -> Vec<&'a PoolState> {
        let modes = [AllocationMode::Blocks, AllocationMode::NodeCIDR].into_iter();
        let pools = modes.flat_map(|mode| self.ranked(mode, node, |_| 0));
        let is_for_all = |it: &PoolState| {
            let selectors = it.terms.namespaces.specificity() + it.terms.pods.specificity();
            it.node_view.assignment == AssignmentMode::Automatic && selectors == 0
        };
        let pools = pools.filter(|(pool, by_name)| !by_name && is_for_all(pool));
        pools.map(|(pool, _)| pool).collect()
    }

    fn ranked<'a>(
        &'a self,
        allocate: AllocationMode,
        node: &'a Node,
        room: impl FnMut(&PoolCandidate<'a>) -> u128,
    ) -> Vec<(&'a PoolState, bool)> {
        let states = self.by_rank.iter().filter_map(|name| self.states.get(name));
        let states: Vec<&PoolState> = states.filter(|it| it.allocation_mode == allocate).collect();
        let candidates: Vec<PoolCandidate> = states.iter().map(|state| state.candidate()).collect();
        let choice = choose(&candidates, &whole(node), room);
        let chosen = choice.chosen.iter();
        chosen
            .map(|it| (states[it.at], it.lacks.is_some()))
            .collect()
    }

    /// Returns the pools that select the node, are about to allocate, and rank before the pool `best`. If `best` is
    /// `None`, returns such pools of every rank. The caller should wait for these pools, because a node keeps its
    /// podCIDRs even if a better pool allocates later.
    pub fn starting_before<'a>(
        &'a self,
        allocate: AllocationMode,
        node: &'a Node,
        best: Option<&'a PoolName>,
    ) -> impl Iterator<Item = &'a PoolState> {
        let best = best.and_then(|name| self.get(name)).map(PoolState::rank);
        self.states.values().filter(move |state| {
            state.phase == PoolPhase::Starting
                && state.allocation_mode == allocate
                && best.is_none_or(|best| state.rank() > best)
                && state.selects(node)
        })
    }

    /// Returns the pool that assigns fixed ranges to the node: of the pools that select the node and name it, the best
    /// by rank. The node gets ranges from no other pool. Pools that allocate nothing now count, too, but pools that are
    /// being deleted do not.
    pub fn assigning(&self, node: &Node) -> Option<&PoolState> {
        let states = self.states.values();
        let assigning = states.filter(|state| {
            state.assignments.of(&node.name).is_some()
                && state.phase != PoolPhase::Terminating
                && state.selects(node)
        });
        assigning.max_by(|a, b| a.rank().cmp(&b.rank()).then_with(|| b.name.cmp(&a.name)))
    }

    /// Returns the pools that select the node but do not allocate now. Invalid pools are left out, because their
    /// selectors may be unreadable.
    pub fn not_serving<'a>(
        &'a self,
        allocate: AllocationMode,
        node: &'a Node,
    ) -> impl Iterator<Item = &'a PoolState> {
        self.states.values().filter(move |state| {
            !state.is_serving()
                && state.allocation_mode == allocate
                && !matches!(state.phase, PoolPhase::Invalid(_))
                && state.selects(node)
        })
    }

    /// Pauses all pools that share an address with the range, until the monotonic time `until`.
    pub fn pause(&mut self, range: &Cidr, until: Duration) {
        for state in self.states.values_mut() {
            if state.space.touches(range) && !Mutation::ForeignAllocatorIgnored.is_on() {
                state.paused_until = Some(until);
            }
        }
    }

    /// Returns the monotonic time at which the first pause ends, or `None` if no pool pauses. The pools have to be
    /// evaluated at that time.
    pub fn next_at(&self) -> Option<Duration> {
        let pauses = self.states.values();
        pauses.filter_map(|state| state.paused_until).min()
    }
}

impl PoolState {
    fn rank(&self) -> (i32, usize) {
        let pods = self.terms.namespaces.specificity() + self.terms.pods.specificity();
        (self.priority, self.selector.specificity() + pods)
    }

    /// Returns for each family whether the pool has ranges of it.
    pub fn families(&self) -> Dual<bool> {
        Dual::from_fn(|family| self.space.block_len(family).is_some())
    }

    /// Converts the pool to a candidate for the choice of a node's pools. A pool with `assignment: Manual` counts as
    /// automatic here, because the agent may demand blocks of it when a pod names it.
    fn candidate(&self) -> PoolCandidate<'_> {
        PoolCandidate {
            name: &self.name,
            node: &self.selector,
            namespace: &self.terms.namespaces,
            pod: &self.terms.pods,
            priority: self.priority,
            families: self.families(),
            created: self.created,
            manual: false,
            standing: match self.phase {
                PoolPhase::Serving => PoolStanding::Serving,
                _ => PoolStanding::Barred(&self.phase),
            },
        }
    }

    /// Returns whether the node can get a range of each family of the pool. In mode Blocks, smaller blocks count, too.
    pub(crate) fn has_room(&self, node: &Node, ledger: &RangeLedger) -> bool {
        if let Some(assigned) = self.assignments.of(&node.name) {
            let is_usable = assigned.problem.is_none();
            return is_usable && ledger.obstacle(&assigned.cidrs, |_| None).is_none();
        }
        let lens = match self.allocation_mode {
            AllocationMode::NodeCIDR => self.lens_for(node),
            AllocationMode::Blocks => Some(Dual::from_fn(|family| {
                let len = self.space.block_len(family)?;
                Some(smallest_len(len, family))
            })),
        };
        let mut families = self.space.families();
        lens.is_some_and(|lens| {
            let smallest = self.space.refitted(lens);
            families.all(|family| ledger.block_counts(&smallest, family).free > 0)
        })
    }

    /// Returns whether the pool assigns exactly these ranges to the node, and the assignment is usable.
    pub(crate) fn assigns(&self, node: &Node, ranges: &[Cidr]) -> bool {
        let assigned = self.assignments.of(&node.name);
        assigned.is_some_and(|it| {
            it.problem.is_none()
                && it.cidrs.len() == ranges.len()
                && it.cidrs.iter().all(|cidr| ranges.contains(cidr))
        })
    }

    /// Returns the prefix length of the podCIDR of each family that the node gets. Returns `None` if the length depends
    /// on how many pods the node may run, and the kubelet has not reported this number yet.
    pub(crate) fn lens_for(&self, node: &Node) -> Option<Dual<Option<u8>>> {
        let mut lens = Dual::from_fn(|family| self.space.block_len(family));
        let sizing = if Mutation::MaxPodsIgnored.is_on() {
            BlockSizing::Fixed
        } else {
            self.sizing
        };
        let max_pods = if Mutation::MaxPodsNotAwaited.is_on() {
            node.max_pods.max(1)
        } else {
            node.max_pods
        };
        if let Some(len) = &mut lens.v4 {
            *len = sizing.prefix_len(*len, max_pods)?;
        }
        Some(lens)
    }

    /// Returns the number of free blocks. If the pool has both families, the smaller number counts.
    fn room(&self, ledger: &RangeLedger) -> u128 {
        let families = self.space.families();
        let free = families.map(|family| ledger.block_counts(&self.space, family).free);
        free.min().unwrap_or(0)
    }
}

/// Returns how many addresses a node should have of a pool in all, whether its pods use them or not (`warm.minimum`).
pub(crate) fn min_addresses(pool: &NodePool, node: &Node) -> u32 {
    match pool.terms.warm.minimum {
        WarmMinimum::None => 0,
        WarmMinimum::MaxPods => node.max_pods.into(),
    }
}

/// Returns whether the range is wider than any podCIDR that other allocators are known to give to nodes.
pub(crate) fn is_wide(range: &Cidr) -> bool {
    let mut widest = WIDEST.iter();
    widest.any(|(family, len)| *family == range.family() && range.len() < *len)
}

/// Returns the longest prefix that a block may have in a pool whose full-size blocks have the prefix length `whole`.
pub(crate) fn smallest_len(whole: u8, family: Family) -> u8 {
    (whole + SMALLER).min(family.bits())
}

fn whole(node: &Node) -> Requester<'_> {
    Requester {
        node: &node.labels,
        pod: None,
        by_name: &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{cidr, cluster, node, pool, pool_with};

    /// Returns the states of these pools in a cluster without nodes.
    fn evaluated(pools: Vec<Pool>) -> PoolStates {
        let mut states = PoolStates::default();
        states.evaluate(&cluster(pools, Vec::new()), &[], Duration::ZERO);
        states
    }

    fn serves(pools: &PoolStates, name: &str) -> bool {
        pools.get(name).unwrap().is_serving()
    }

    #[test]
    fn a_pool_pauses_for_a_while_if_a_foreign_allocator_writes_in_its_range() {
        let cache = cluster(vec![pool("p", "10.0.0.0/24")], Vec::new());
        let mut pools = PoolStates::default();
        let seconds = Duration::from_secs;
        pools.evaluate(&cache, &[], seconds(0));
        pools.pause(&cidr("10.0.0.16/28"), seconds(60));
        for (now, is_serving) in [(1, false), (61, true)] {
            pools.evaluate(&cache, &[], seconds(now));
            assert_eq!(serves(&pools, "p"), is_serving, "at {now} s");
        }
    }

    #[test]
    fn of_two_pools_with_common_addresses_the_older_one_serves() {
        for (older, newer) in [
            ("10.0.0.0/24", "10.0.0.64/26"),
            ("10.0.0.64/26", "10.0.0.0/24"),
            ("10.0.0.0/24", "10.0.0.0/24"),
        ] {
            let newer_pool = Pool {
                created: 1,
                ..pool("a", newer)
            };
            let pools = evaluated(vec![newer_pool, pool("z", older)]);
            let (older_serves, newer_serves) = (serves(&pools, "z"), serves(&pools, "a"));
            assert!(older_serves && !newer_serves, "{older} and {newer}");
        }
    }

    #[test]
    fn a_node_cidr_pool_that_is_being_deleted_keeps_no_newer_pool_from_serving() {
        for (mode, newer_serves) in [
            (AllocationMode::NodeCIDR, true),
            (AllocationMode::Blocks, false),
        ] {
            let pool = |name: &str, created: i64, deleting: bool| Pool {
                created,
                deleting,
                ..pool_with(name, "10.0.0.0/24", |spec| spec.allocation_mode = mode)
            };
            let pools = evaluated(vec![pool("a", 1, false), pool("z", 0, true)]);
            assert_eq!(serves(&pools, "a"), newer_serves, "{mode:?}");
            let guarding = pools.guarding_pool(&cidr("10.0.0.0/28")).unwrap();
            assert_eq!(&*guarding.name == "a", newer_serves, "{mode:?}");
        }
    }

    #[test]
    fn a_pool_beside_an_older_one_of_another_family_is_used_by_name_only() {
        for (priority, is_beside) in [(0, true), (1, false)] {
            let six = Pool {
                created: 1,
                ..pool_with("six", "10.1.0.0/24", |spec| {
                    spec.ipv4 = None;
                    spec.ipv6 = Some(crate::fixtures::ipv6_ranges("fd00::/64", 122));
                    spec.priority = priority;
                })
            };
            let pools = evaluated(vec![six, pool("four", "10.0.0.0/24")]);
            let node = node("n");
            let by_name: Vec<bool> = pools.block_pools(&node).iter().map(|it| it.1).collect();
            assert_eq!(by_name, [false, is_beside]);
            let older = pools.older_of_other_family(pools.get("six").unwrap());
            let older = older.map(|(older, family)| (&*older.name, family));
            assert_eq!(older, is_beside.then_some(("four", Family::V4)));
        }
    }
}
