//! The leader's state: the allocations and the loops. The leader applies events and answers, and gets requests from the
//! loops.
//!
//! A [`Leader`] exists only while this process leads. It is dropped at the end of its term. If this process leads
//! again, a new [`Leader`] is built from the cache.

use std::collections::BTreeMap;
use std::time::Duration;

use super::allocations::AllocationState;
use super::deleted_nodes::DeletedNodes;
use super::demand::Demand;
use super::intents::IntentBook;
use super::podcidr::PodCidrs;
use super::reconcile::Loop as _;
use super::report::EventRecord;
use super::{Context, Now, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::lease::{LeadershipTerm, LeaseContent, Takeover};
use crate::cluster::names::PoolName;
use crate::cluster::request::ApiRequest;
use crate::settings::ControllerSettings;
use cadastre_core::{Cidr, HoldingState};

mod answers;
mod changes;
mod loops;
mod refused;
mod view;

use cadastre_core::mutation::Mutation;
pub(super) use changes::SubnetDiff;
use changes::{report_overlaps, report_unreadable};
use loops::Loops;
pub(crate) use loops::RouteLoopOf;

/// Which kinds of requests may be sent now, given how many are in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendBudget {
    /// Whether critical requests may be sent: requests about podCIDRs and blocks, and requests that must precede these
    pub critical: bool,
    /// Whether requests that are not critical may be sent
    pub background: bool,
}

/// The state that exists only while this process leads.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Debug)]
pub(super) struct Leader {
    pub(super) term: LeadershipTerm,
    pub(super) loops: Loops,
    /// Whether the ledger has been rebuilt from the cache, so that the loops run
    pub(super) allocating: bool,
    allocations: AllocationState,
    /// Whether a range has become free since blocks were last adopted. If so, the leader tries again to adopt blocks,
    /// because an agent may already use that range
    freed: bool,
    /// Whether the pools must be evaluated again. An evaluation computes which ranges each pool may allocate, and to
    /// which nodes
    needs_evaluation: bool,
    /// Whether a pool was created or deleted, or anything but the status of a pool has changed. If so, every NodeSubnet
    /// has to be checked, because NodeSubnets list the ranges of pools
    reattribute: bool,
    /// For how long a pool allocates nothing after a foreign allocator has written a podCIDR in its ranges
    foreign_pause: Duration,
}

impl Leader {
    pub(super) fn new(term: LeadershipTerm, settings: &ControllerSettings, now: Now) -> Self {
        Leader {
            loops: Loops::new(&term, settings, now.mono),
            term,
            allocating: false,
            allocations: AllocationState::default(),
            freed: false,
            needs_evaluation: false,
            reattribute: false,
            foreign_pause: settings.foreign_allocator_pause,
        }
    }

    pub(super) fn begin_allocating(
        &mut self,
        cache: &ClusterCache,
        departed: &DeletedNodes,
        settings: &ControllerSettings,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        let (allocations, overlapping) =
            AllocationState::rebuild(cache, &settings.service_cidrs, now);
        self.allocations = allocations;
        self.allocations.intents = IntentBook::of_leader(self.loops.fence.is_done());
        self.allocations.in_agent_grace = !self.loops.listening.is_over();
        self.allocations.after_gap = self.term.follows_a_gap();
        self.allocations.quarantine_deleted(departed, cache, now);
        if self.allocations.after_gap {
            self.allocations.quarantine_reported(cache, now);
        }
        self.allocating = true;
        self.loops.listening.begin(now.mono);
        self.inherit(cache);
        self.loops.default_pool.queue.add(());
        self.loops.pools.restore(cache.pools.iter());
        self.loops.pools.mark();
        for (name, synced) in overlapping {
            if let Some(node) = cache.nodes.get(&name) {
                report_overlaps(node, &synced, reports);
            }
        }
        self.allocations.report_too_wide(reports);
        for node in cache.nodes.iter() {
            if node.is_empty() {
                self.loops.podcidrs.queue.add(node.name.clone());
            }
            report_unreadable(node, reports);
        }
        for claim in cache.claims.iter() {
            self.loops.claims.queue.add(claim.name.clone());
            if claim.ipam_claim.is_some() {
                self.loops.ipam_claims.queue.add(claim.name.clone());
            }
        }
        for name in cache.pods.claims() {
            self.loops.pod_claims.queue.add(name.clone());
            self.loops.ipam_claims.queue.add(name.clone());
        }
        self.loops.requeue_routes(cache);
        self.loops.subnets.begin(cache);
        for subnet in cache.subnets.iter() {
            self.loops.subnets.queue.add(subnet.name.clone());
        }
        for node in cache.nodes.iter() {
            self.adopt(&node.name, cache, reports, now);
            self.loops.demand.add(node, &self.allocations);
            // The node needs a NodeSubnet, in which its agent reports use and demand.
            self.loops.subnets.queue.add(node.name.clone());
        }
        if !self.allocations.in_agent_grace {
            // An earlier leader may have heard all agents, and stopped before it deleted these blocks.
            self.allocations.yield_to_unadopted();
        }
        self.loops.exhaustion.requeue_all(cache);
        self.loops.requeue_routes(cache);
        self.return_blocks(cache, now);
        for entry in self.allocations.blocks.iter() {
            self.loops.blocks.add(entry);
            self.loops.subnets.queue.add(entry.owner.name.clone());
        }
        for key in self.allocations.quarantined.keys() {
            self.loops.subnets.queue.add(key.0.clone());
            self.loops.quarantine.watch(key.clone(), &self.allocations);
        }
    }

    pub(super) fn next(
        &mut self,
        cache: &ClusterCache,
        settings: &ControllerSettings,
        reports: &mut Vec<EventRecord>,
        budget: SendBudget,
        stopping: bool,
        now: Now,
    ) -> Option<(ApiRequest, Purpose)> {
        let due = self.allocations.pools.next_at();
        if self.needs_evaluation || due.is_some_and(|at| at <= now.mono) {
            self.evaluate_pools(cache, settings, reports, now);
        }
        if !stopping {
            self.decide_blocks(cache, reports, now);
        }
        let mut cx = Context::new(cache, &mut self.allocations, reports, now);
        let loops = &mut self.loops;
        if budget.critical {
            let found = loops.next_awaited(settings, stopping, &mut cx);
            if found.is_some() {
                return found;
            }
        }
        if loops.podcidrs.take_recount() | loops.demand.take_recount() {
            loops.pools.mark();
        }
        let podcidrs_due =
            cx.allocations.intents.is_known() && loops.podcidrs.queue.has_ready(now.mono);
        if stopping || !budget.background || podcidrs_due {
            return None;
        }
        if loops.pools.is_due(now.mono) {
            loops.pools.waiting = waiting_by_pool(&loops.podcidrs, &loops.demand);
        }
        loops.all_mut().find_map(|(_, it)| it.next(&mut cx))
    }

    /// Returns the monotonic time at which [`Leader::next`] has to be called again even if no event arrives.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        if !self.allocating {
            return self.loops.fence.load().next_at;
        }
        let loops = self.loops.all().map(|(_, it)| it.load().next_at);
        loops
            .chain([self.allocations.pools.next_at()])
            .flatten()
            .min()
    }

    /// Returns whether this leader could hand over without open work: the ledger is rebuilt, the fence is complete, and
    /// no write is indeterminate.
    pub(super) fn is_settled(&self) -> bool {
        self.allocating
            && self.loops.fence.is_done()
            && (!self.allocations.has_indeterminate()
                || Mutation::HandOverWhileIndeterminate.is_on())
    }

    /// Returns whether any write is indeterminate, that is, its outcome is not known yet.
    pub(super) fn has_unclear(&self) -> bool {
        self.allocations.has_indeterminate()
    }

    /// Handles a successful write of the Lease. Queues the nodes whose allocations the Lease names now, because these
    /// allocations may be sent.
    pub(super) fn renewed(&mut self, term: LeadershipTerm) {
        for name in self.allocations.intents.confirmed(term.named) {
            self.loops.podcidrs.queue.add(name);
        }
        self.term = term;
    }

    /// Returns the number for a write that is decided now. The write must wait for the Lease write with this number.
    pub(super) fn number(&mut self) -> u64 {
        self.allocations.intents.number()
    }

    /// Returns the content that the Lease should get, or `None` if no Lease write is needed.
    pub(super) fn take_wanted(&mut self, cache: &ClusterCache) -> Option<LeaseContent> {
        if !self.allocating {
            return None;
        }
        for name in self.allocations.intents.room() {
            self.loops.podcidrs.queue.add(name);
        }
        let wanted = self
            .allocations
            .intents
            .take(&self.term.id, cache.versions())?;
        Some(LeaseContent {
            agents_heard: self.loops.listening.is_over(),
            ..wanted
        })
    }

    /// Reserves the podCIDRs that the Lease names for nodes, because an earlier leader may have the writes of these
    /// podCIDRs in flight. The podCIDR loop repeats each of these writes until the node has podCIDRs or is gone.
    fn inherit(&mut self, cache: &ClusterCache) {
        if self.term.takeover == Takeover::First || Mutation::TakeOverCountsAsClean.is_on() {
            return;
        }
        let inherited = self.term.inherited.iter();
        let ignored = usize::from(Mutation::OneNamedNodeIgnored.is_on());
        for intent in inherited.flat_map(|all| &all.assignments).skip(ignored) {
            let node = cache.nodes.get(&intent.name);
            let node = node.filter(|node| node.uid == intent.uid && node.is_empty());
            let Some(node) = node else { continue };
            let holder = self.allocations.holder(&node.name, &node.uid);
            for cidr in &intent.cidrs {
                self.allocations
                    .ledger
                    .record(holder, *cidr, HoldingState::Indeterminate);
            }
            self.allocations.intents.inherit(node, &intent.cidrs);
        }
    }

    fn look_at_blocks(&mut self, cidrs: Vec<Cidr>) {
        for cidr in cidrs {
            if let Some(entry) = self.allocations.blocks.get(&cidr) {
                self.loops.blocks.add(entry);
            }
            self.look_at_claim(&cidr);
            self.loops.pools.mark();
        }
    }

    /// If the range is the address of a claim, queues this claim, because the block of the address has changed.
    fn look_at_claim(&mut self, range: &Cidr) {
        if let Some(claim) = self.allocations.claims.of(range) {
            self.loops.claims.queue.add(claim.clone());
        }
    }

    /// Adopts, confirms, allocates and recalls blocks. The leader does this before it chooses the next request.
    fn decide_blocks(&mut self, cache: &ClusterCache, reports: &mut Vec<EventRecord>, now: Now) {
        if std::mem::take(&mut self.freed) {
            self.take_up_all(cache, reports, now);
        }
        // Until agents have reported, it is unknown which node has a block that no NodeSubnet lists. So nothing is
        // decided about blocks.
        if !self.loops.listening.is_over() {
            return;
        }
        let mut noted = self.allocations.judge_blocks(cache);
        for name in &noted.nodes {
            noted
                .blocks
                .extend(self.allocations.released_blocks(name, cache, now));
        }
        self.follow_up(noted, cache);
        let mut cx = Context::new(cache, &mut self.allocations, reports, now);
        let claimed = self.loops.claims.work(&mut cx);
        let noted = self.loops.demand.work(&mut cx);
        for name in noted.nodes {
            self.loops.subnets.queue.add(name);
        }
        self.look_at_blocks(noted.blocks);
        self.follow_up(claimed, cache);
    }

    /// Tries again to adopt blocks that agents use, because a range became free or all agents have reported.
    fn take_up_all(&mut self, cache: &ClusterCache, reports: &mut Vec<EventRecord>, now: Now) {
        for name in self.allocations.unadopted.nodes() {
            self.adopt(&name, cache, reports, now);
        }
    }

    /// If a machine with quarantined blocks has registered again, allocates these blocks to the machine's new Node.
    /// Does nothing before the agent grace is over.
    fn return_blocks(&mut self, cache: &ClusterCache, now: Now) {
        if self.allocations.in_agent_grace {
            return;
        }
        for node in cache.nodes.iter() {
            for cidr in self.allocations.return_blocks(node, now) {
                self.loops.blocks.queue.add(cidr);
                self.look_at_claim(&cidr);
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
    }

    fn follow_up(&mut self, noted: AffectedLoops, cache: &ClusterCache) {
        self.look_at_blocks(noted.blocks);
        for name in noted.subnets {
            self.loops.subnets.queue.add(name.clone());
            self.release(&name, cache);
        }
        for name in noted.nodes {
            self.loops.subnets.urgent.add(name.clone());
            self.loops.demand.add_name(&name, cache, &self.allocations);
        }
        if noted.freed {
            self.requeue_waiting();
        }
    }

    /// Queues all nodes and claims that wait for ranges, and marks the pools for a new count. Callers use this when a
    /// range may have become free.
    fn requeue_waiting(&mut self) {
        self.freed = true;
        self.loops.podcidrs.requeue();
        self.loops.demand.requeue();
        self.loops.claims.requeue();
        self.loops.subnets.requeue();
        self.loops.exhaustion.requeue();
        self.loops.pools.mark();
    }

    fn evaluate_pools(
        &mut self,
        cache: &ClusterCache,
        settings: &ControllerSettings,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        self.needs_evaluation = false;
        self.allocations
            .pools
            .evaluate(cache, &settings.service_cidrs, now.mono);
        for name in self.allocations.recount_pod_cidrs(cache) {
            self.loops.subnets.queue.add(name);
        }
        self.requeue_waiting();
        self.loops.pod_claims.requeue();
        self.loops.ipam_claims.requeue();
        self.loops.exhaustion.requeue_all(cache);
        self.allocations.report_too_wide(reports);
        for node in cache.nodes.iter() {
            self.loops.demand.add(node, &self.allocations);
            // Without a NodeSubnet, an agent cannot report its demand.
            if cache.subnets.get(&node.name).is_none() {
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
        if std::mem::take(&mut self.reattribute) {
            for subnet in cache.subnets.iter() {
                self.loops.subnets.queue.add(subnet.name.clone());
            }
        }
    }
}

/// Counts the nodes that wait for each pool. The count takes time, so it is made for statuses and metrics, but not for
/// every request.
fn waiting_by_pool(podcidrs: &PodCidrs, demand: &Demand) -> BTreeMap<PoolName, i64> {
    let mut waiting: BTreeMap<PoolName, i64> = BTreeMap::new();
    for reason in podcidrs.waiting() {
        for pool in reason.pools() {
            *waiting.entry(pool.clone()).or_default() += 1;
        }
    }
    for (pool, nodes) in demand.waiting() {
        *waiting.entry(pool.clone()).or_default() += i64::try_from(nodes).unwrap_or(i64::MAX);
    }
    waiting
}
