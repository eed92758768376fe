//! The podCIDR loop: every node that a pool in mode NodeCIDR selects gets one range per family of the pool.
//!
//! The loop writes podCIDRs by one JSON Patch. The API server rejects the patch if the node has another UID, has
//! podCIDRs already, or was touched by a later leader. The patch is sent only after the Lease names it.
//!
//! # Guarantees
//! - A range is allocated to one node only: the ledger records the holding before the Lease names the range, and the
//!   Lease names the range before the patch is sent.
//! - After an indeterminate write the holding stays. Only the same write is repeated, until a read shows which podCIDRs
//!   the node has.
//! - An event reports why a node waits, once per reason.
//! - With `FitMaxPods`, the size of a node's range is chosen once, when the range is allocated. Until the kubelet has
//!   reported how many pods the node may run, the node waits.

mod assigned;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::pools::{PoolPhase, PoolState, PoolStates};
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, POD_CIDR_ALLOCATED, Regarding, WAITING};
use super::{Context, Purpose};
use crate::allocations::adopt::UnadoptedBlocks;
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::Node;
use crate::cluster::request::{
    ApiRequest, ObjectKind, PodCidrAllocation, Rejection, RequestOutcome,
};
use cadastre_api::{AllocationMode, BlockSizing};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, Family, HoldingState};

pub use assigned::AssignmentObstacle;

/// The queue of the podCIDR loop, its requests in flight, and the nodes that wait.
#[derive(Clone, Debug, Default)]
pub struct PodCidrs {
    /// Names of nodes that may need podCIDRs
    pub queue: Queue<NodeName>,
    /// Requests in flight, by the UID of the node
    requests: InFlight<ObjectUid>,
    /// The nodes that wait for podCIDRs, by name
    waiting: BTreeMap<NodeName, Waiting>,
    /// Exhausted pools with a note for events. The key contains the prefix length of the IPv4 range that nodes lack,
    /// because a pool without room for a wide range may have room for a narrow one. An entry stays until a range may
    /// have become free. A search in an exhausted pool takes time in proportion to the pool's size, and thousands of
    /// nodes may wait for one pool. So the search is not repeated for each node.
    full: BTreeMap<(PoolName, Option<u8>), String>,
    /// Whether `waiting` has changed since the last call of [`PodCidrs::take_recount`]
    recount: bool,
}

#[derive(Clone, Debug)]
struct Waiting {
    uid: ObjectUid,
    reason: WaitReason,
    /// Monotonic time since which the node waits. Time in which no pool selected the node does not count
    since: Duration,
    /// Whether an event has reported that the node waits
    reported: bool,
}

/// Why a node gets no podCIDR for now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum WaitReason {
    /// No pool selects the node. This is not an error.
    Unmanaged,
    /// These pools select the node but do not allocate now, so the node gets nothing. Either no other pool selects the
    /// node, or these pools are about to allocate and take precedence over the others.
    Barred { pools: Vec<PoolName> },
    /// All pools that select the node and may allocate are exhausted. `pools` are the names of these pools.
    Full { pools: Vec<PoolName> },
    /// One pool, the only one in `pools`, assigns fixed ranges to the node. `obstacle` prevents their allocation now.
    Assigned {
        pools: Vec<PoolName>,
        obstacle: AssignmentObstacle,
    },
    /// The size of the range depends on how many pods the node may run, and the kubelet has not reported this yet.
    /// `pools` are the pools that may allocate to the node.
    MaxPodsUnknown { pools: Vec<PoolName> },
}

impl WaitReason {
    /// Returns the value of the label `reason` in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            WaitReason::Unmanaged => "no_pool",
            WaitReason::Barred { .. } => "pool_not_ready",
            WaitReason::Full { .. } => "pool_full",
            WaitReason::Assigned { .. } => "assignment",
            WaitReason::MaxPodsUnknown { .. } => "max_pods_unknown",
        }
    }

    /// Returns the names of the pools for which the node waits.
    pub fn pools(&self) -> &[PoolName] {
        match self {
            WaitReason::Unmanaged => &[],
            WaitReason::Barred { pools }
            | WaitReason::Full { pools }
            | WaitReason::Assigned { pools, .. }
            | WaitReason::MaxPodsUnknown { pools } => pools,
        }
    }
}

/// The loop's decision about a node that may need podCIDRs.
enum PodCidrDecision {
    /// Do nothing until the node changes or an answer arrives.
    Leave,
    /// Read the node to learn the outcome of a write.
    Read,
    /// Write these ranges. The same write may have been sent before.
    Write(Vec<Cidr>),
    /// Wait until a pool can allocate. An event reports the text if it is not empty.
    Wait(WaitReason, String),
}

impl Loop for PodCidrs {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let outcome = answer.outcome;
        if let Purpose::Assign { name, uid } = answer.purpose
            && !self.is_over(name, uid, cx)
        {
            self.requests.answered(uid, answer);
            if answer.wrote {
                written(uid, outcome, cx.allocations);
            }
            let has_some = matches!(outcome, RequestOutcome::Node(node) if node.uid == *uid && !node.is_empty());
            if !has_some {
                self.queue.add(name.clone());
            }
        }
        AffectedLoops::default()
    }
}

impl PodCidrs {
    /// Returns the next request for a node that waits for podCIDRs. If `stopping`, returns only reads and repetitions
    /// of indeterminate writes.
    pub fn next_urgent(
        &mut self,
        cx: &mut Context,
        stopping: bool,
    ) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, name: &NodeName, cx: &mut Context| it.look(name, stopping, cx);
        work_off(self, |it| &mut it.queue, look, cx)
    }

    fn look(&mut self, name: &NodeName, stopping: bool, cx: &mut Context) -> KeyDecision {
        let Some(node) = cx.cache.nodes.get(name).cloned() else {
            self.forget_waiting(name);
            return KeyDecision::Done;
        };
        let uid = node.uid.clone();
        let to_read = self.requests.is_to_read(&uid);
        // A read cannot exclude that an indeterminate write takes effect later. Only repeating the write settles its
        // outcome.
        let is_indeterminate = || {
            let mut holdings = cx.allocations.holdings_of(&uid).into_iter();
            holdings.any(|(_, _, state)| state == HoldingState::Indeterminate)
        };
        if stopping && !to_read && !is_indeterminate() {
            return KeyDecision::Done;
        }
        let call = if to_read {
            ObjectCall::ReadNode(uid.clone())
        } else {
            ObjectCall::AssignPodCidrs(uid.clone())
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        let name = name.clone();
        match self.decide(&node, cx) {
            PodCidrDecision::Leave if node.deleting => self.forget_waiting(&name),
            PodCidrDecision::Leave => {}
            PodCidrDecision::Wait(reason, note) => self.wait(&node, reason, note, cx),
            PodCidrDecision::Read => {
                self.requests.send(uid.clone());
                let request = ApiRequest::Read(ObjectKind::Node, name.clone().into());
                return KeyDecision::Send(request, Purpose::Assign { name, uid });
            }
            // The Lease does not name this write yet, so the write is not sent now. The node is queued again as soon as
            // the Lease names the write.
            PodCidrDecision::Write(cidrs) if !cx.allocations.intents.may_assign(&node, &cidrs) => {}
            PodCidrDecision::Write(cidrs) => {
                self.requests.send(uid.clone());
                let request = ApiRequest::AssignPodCidrs(assignment(&node, cidrs));
                return KeyDecision::Send(request, Purpose::Assign { name, uid });
            }
        }
        KeyDecision::Done
    }

    fn decide(&mut self, node: &Node, cx: &mut Context) -> PodCidrDecision {
        if node.deleting || !node.is_empty() || self.requests.is_sent(&node.uid) {
            return PodCidrDecision::Leave;
        }
        if self.requests.is_to_read(&node.uid) {
            return PodCidrDecision::Read;
        }
        let begun = cx.allocations.holdings_of(&node.uid);
        if !begun.is_empty() {
            let cidrs = begun.into_iter().map(|(_, cidr, _)| cidr);
            return write(cidrs, cx.allocations, cx.cache);
        }
        if let Some(cidrs) = returned_ranges(node, cx.allocations) {
            return write(cidrs.into_iter(), cx.allocations, cx.cache);
        }
        let assigned = self.allocate_assigned(node, cx);
        assigned.unwrap_or_else(|| self.allocate(node, cx))
    }

    /// Allocates new ranges from the best pool that has room, or decides that the node waits.
    fn allocate(&mut self, node: &Node, cx: &mut Context) -> PodCidrDecision {
        let (cache, allocations) = (cx.cache, &mut *cx.allocations);
        let mode = AllocationMode::NodeCIDR;
        let is_full = |state: &PoolState| {
            let lens = state.lens_for(node);
            lens.is_some_and(|lens| self.full.contains_key(&(state.name.clone(), lens.v4)))
        };
        let choices = allocations
            .pools
            .choices(mode, node, &allocations.ledger, is_full);
        // A Node cannot request a pool by name. So pools that allocate only by name are left out.
        let choices = choices.into_iter().filter(|(_, by_name)| !by_name);
        let choices: Vec<PoolName> = choices.map(|(name, _)| name).collect();
        let wait_for = |pools: &PoolStates, best: Option<&PoolName>| {
            let soon = pools.starting_before(mode, node, best);
            let pools: Vec<PoolName> = soon.map(|state| state.name.clone()).collect();
            let some = !pools.is_empty() && !Mutation::BetterPoolNotAwaited.is_on();
            some.then(|| PodCidrDecision::Wait(WaitReason::Barred { pools }, String::new()))
        };
        if let Some(wait) = wait_for(&allocations.pools, choices.first()) {
            return wait;
        }
        if choices.is_empty() {
            return unserved(node, allocations);
        }
        let holder = allocations.holder(&node.name, &node.uid);
        let in_use = address_in_use(cache, &allocations.unadopted);
        let mut notes = Vec::new();
        for name in &choices {
            let lens = allocations.pools.get(name).and_then(|it| it.lens_for(node));
            let key = lens.map(|lens| (name.clone(), lens.v4));
            if let Some(note) = key.as_ref().and_then(|key| self.full.get(key)) {
                notes.push(note.clone());
                continue;
            }
            // All better choices are exhausted. But a pool that is about to allocate may have precedence over this
            // pool.
            if let Some(wait) = wait_for(&allocations.pools, Some(name)) {
                return wait;
            }
            let Some(pool) = allocations.pools.get_mut(name) else {
                continue;
            };
            let (Some(lens), Some(key)) = (lens, key) else {
                return max_pods_unknown(name, choices.clone());
            };
            let ledger = &mut allocations.ledger;
            let full = match ledger.carve_sized(&mut pool.space, lens, holder, &in_use) {
                Ok(holdings) => {
                    let ids = holdings.iter().filter_map(|(_, id)| *id);
                    let holdings = ids.filter_map(|id| allocations.ledger.get(id));
                    let cidrs = holdings.map(|holding| holding.cidr);
                    return write(cidrs, allocations, cache);
                }
                Err(full) => full,
            };
            let why = match pool.sizing {
                BlockSizing::Fixed => "",
                BlockSizing::FitMaxPods => {
                    "; the IPv4 size follows from the number of pods that the node may run (spec.ipv4.blockSizing)"
                }
            };
            let note = format!("pool \"{name}\": {full}{why}");
            if full.avoided > 0 {
                // The last free ranges contain addresses that are still in use. No watch event announces that these
                // addresses are no longer used, so the node is queued for a later check.
                let at = cx.now.next_check();
                self.queue.add_at(node.name.clone(), at);
            } else {
                self.full.insert(key, note.clone());
            }
            notes.push(note);
        }
        PodCidrDecision::Wait(WaitReason::Full { pools: choices }, notes.join("; "))
    }

    /// Records that a node waits. An event reports the reason with the text `note` if `note` is not empty.
    fn wait(&mut self, node: &Node, reason: WaitReason, note: String, cx: &mut Context) {
        let before = self.waiting.get(&node.name);
        let before = before.filter(|it| it.uid == node.uid);
        let is_same = before.is_some_and(|it| it.reason == reason);
        let lacking = before.filter(|it| it.reason != WaitReason::Unmanaged);
        let waiting = Waiting {
            uid: node.uid.clone(),
            reason,
            since: lacking.map_or(cx.now.mono, |it| it.since),
            reported: !note.is_empty() || before.is_some_and(|it| it.reported),
        };
        if !note.is_empty() && !is_same {
            let about = Regarding::node(node);
            cx.reports.push(EventRecord::warning(about, WAITING, note));
        }
        self.recount |= !is_same;
        self.waiting.insert(node.name.clone(), waiting);
    }

    fn forget_waiting(&mut self, name: &NodeName) {
        self.recount |= self.waiting.remove(name).is_some();
    }

    /// Returns whether a wait has begun, ended or got another reason since this function was last called.
    pub(crate) fn take_recount(&mut self) -> bool {
        std::mem::take(&mut self.recount)
    }

    /// Returns whether the Node with this UID is gone. If the Node is gone, forgets its requests: its holdings are in
    /// quarantine, and no write for that UID can succeed any more.
    fn is_over(&mut self, name: &NodeName, uid: &ObjectUid, cx: &Context) -> bool {
        let gone = cx.cache.nodes.get(name).is_none_or(|node| node.uid != *uid);
        if gone {
            self.requests.forget(uid);
        }
        gone
    }

    /// Ends the wait of a node that has podCIDRs now. If an event reported the wait, another event reports the end of
    /// the wait.
    pub fn served(&mut self, node: &Node, reports: &mut Vec<EventRecord>) {
        self.requests.forget_indeterminate(&node.uid);
        let Some(waiting) = self.waiting.remove(&node.name) else {
            return;
        };
        if waiting.uid == node.uid && waiting.reported {
            let ranges: Vec<String> = node.pod_cidrs.iter().map(ToString::to_string).collect();
            let note = format!("has podCIDRs {} after a wait", ranges.join(", "));
            let about = Regarding::node(node);
            reports.push(EventRecord::info(about, POD_CIDR_ALLOCATED, note));
        }
    }

    /// Removes all records of a Node whose UID is gone.
    pub fn gone(&mut self, node: &Node) {
        self.requests.forget(&node.uid);
        let waiting = self.waiting.get(&node.name);
        if waiting.is_some_and(|it| it.uid == node.uid) {
            self.waiting.remove(&node.name);
        }
    }

    /// Queues every waiting node again, because a range may have become free or a pool may have been created.
    pub fn requeue(&mut self) {
        if Mutation::PodCidrWaitersNotWoken.is_on() {
            return;
        }
        self.full.clear();
        let is_woken = |waiting: &Waiting| {
            let is_assigned = matches!(waiting.reason, WaitReason::Assigned { .. });
            !is_assigned || !Mutation::AssignedNodeNotWoken.is_on()
        };
        for (name, _) in self.waiting.iter().filter(|(_, it)| is_woken(it)) {
            self.queue.add(name.clone());
        }
    }

    /// Returns the names of the waiting nodes, each with the reason.
    pub fn waiting_nodes(&self) -> impl Iterator<Item = (&NodeName, &WaitReason)> {
        self.waiting.iter().map(|(node, wait)| (node, &wait.reason))
    }

    /// Returns for each waiting node why it waits.
    pub fn waiting(&self) -> impl Iterator<Item = &WaitReason> {
        self.waiting.values().map(|waiting| &waiting.reason)
    }

    /// Returns the monotonic time at which the longest wait for a pool began. Nodes that no pool selects do not count.
    pub(crate) fn waiting_since(&self) -> Option<Duration> {
        let waiting = self.waiting.values();
        let lacking = waiting.filter(|waiting| waiting.reason != WaitReason::Unmanaged);
        lacking.map(|waiting| waiting.since).min()
    }
}

/// Updates the holdings of a node after the answer to a write.
fn written(uid: &ObjectUid, outcome: &RequestOutcome, allocations: &mut AllocationState) {
    match outcome {
        RequestOutcome::Node(node) if node.uid == *uid => {}
        RequestOutcome::Rejected(Rejection::Guard(_)) => {}
        RequestOutcome::Rejected(_) => {
            let mut holdings = allocations.holdings_of(uid).into_iter();
            if holdings.all(|(_, _, state)| state != HoldingState::Indeterminate) {
                // The write had no effect, so the Lease need not name it until it is sent again. In this way, a write
                // that is always rejected takes no room in the Lease from other writes.
                allocations.intents.settled(uid);
            }
        }
        _ => {
            for (id, _, state) in allocations.holdings_of(uid) {
                if Mutation::IndeterminateAllocationFreed.is_on() {
                    allocations.ledger.release(id);
                } else if state == HoldingState::InFlight {
                    let state = HoldingState::Indeterminate;
                    allocations.ledger.set_state(id, state);
                }
            }
            if Mutation::NameRemovedWhileIndeterminate.is_on() {
                allocations.intents.settled(uid);
            }
        }
    }
    let call = ObjectCall::AssignPodCidrs(uid.clone());
    if allocations.refusals.why(&call).is_some() {
        allocations.intents.set_aside(uid);
    }
}

/// Returns a function that finds an address in use in a range: of a pod, of a node, or in a block in `unadopted`.
fn address_in_use<'a>(
    cache: &'a ClusterCache,
    unadopted: &'a UnadoptedBlocks,
) -> impl Fn(&Cidr) -> Option<Addr> + 'a {
    |range| {
        let of_pod = cache.pods.any_in_free(range);
        let of_node = || cache.node_addresses.within(range).next();
        let used = of_pod.or_else(of_node).or_else(|| unadopted.any_in(range));
        used.filter(|_| !Mutation::UsedAddressesNotAvoided.is_on())
    }
}

fn assignment(node: &Node, cidrs: Vec<Cidr>) -> PodCidrAllocation {
    PodCidrAllocation {
        name: node.name.clone(),
        uid: node.uid.clone(),
        term: node.term.clone(),
        annotated: node.annotated,
        cidrs,
    }
}

/// Returns the decision to write these ranges. The range of the cluster's primary family comes first.
fn write(
    cidrs: impl Iterator<Item = Cidr>,
    allocations: &AllocationState,
    cache: &ClusterCache,
) -> PodCidrDecision {
    let mut cidrs: Vec<Cidr> = cidrs.collect();
    // Without services, the primary family is searched among all nodes. So it is not searched for a single range.
    if cidrs.len() > 1 {
        let first = first_family(allocations, cache);
        cidrs.sort_by_key(|cidr| (cidr.family() != first, *cidr));
    }
    PodCidrDecision::Write(cidrs)
}

/// Returns the cluster's primary family, which is the family of the service range. If no service range is known,
/// returns the family of the first podCIDR that a dual-stack node got from another allocator. If there is no such node,
/// returns IPv4.
fn first_family(allocations: &AllocationState, cache: &ClusterCache) -> Family {
    let of_both = |node: &Node| match &*node.pod_cidrs {
        [one, other] if one.family() != other.family() => Some(one.family()),
        _ => None,
    };
    let of_services = allocations.pools.service_family();
    let of_nodes = || cache.nodes.iter().find_map(|node| of_both(node));
    of_services.or_else(of_nodes).unwrap_or(Family::V4)
}

/// Allocates the quarantined ranges of a machine to its new Node, and returns these ranges. Returns `None` in these
/// cases: the machine has no quarantined ranges; no pool allocates all of them to the node any more; one of their
/// addresses is reserved, or allocated to another node; a pool assigns the ranges to another node, or other ranges to
/// this node.
fn returned_ranges(node: &Node, allocations: &mut AllocationState) -> Option<Vec<Cidr>> {
    let ranges = allocations.quarantined_for(node)?.ranges.clone();
    let pool = allocations.pools.of(ranges.first()?)?;
    let is_available = |range: &Cidr| pool.space.covers(range) && !pool.space.is_blocked(range);
    let mut pairs = ranges.windows(2);
    let fits = pool.allocation_mode == AllocationMode::NodeCIDR
        && pool.is_serving()
        && pool.selects(node)
        && pool.space.families().count() == ranges.len()
        && ranges.iter().all(is_available)
        && pairs.all(|pair| pair[0].family() != pair[1].family());
    // Other holdings may overlap these ranges, because a foreign allocator may have given the same addresses to another
    // node. The node gets the ranges only if each overlapping holding is a quarantine of a Node with the same name and
    // the same machine.
    let is_own = |holder| {
        let key = allocations.node_of(holder);
        let key = key.filter(|(name, _)| *name == node.name);
        let quarantined = key.and_then(|key| allocations.quarantined.get(key));
        quarantined.is_some_and(|it| it.machine.same(&node.machine))
    };
    let is_alone = |range: &Cidr| {
        let mut holdings = allocations.ledger.overlapping(range);
        holdings.all(|(_, it)| is_own(it.holder)) || Mutation::ReturnedRangesShared.is_on()
    };
    let is_permitted = match allocations.pools.assigning(node) {
        Some(assigning) => assigning.name == pool.name && assigning.assigns(node, &ranges),
        None => !ranges.iter().any(|range| pool.space.is_kept(range)),
    };
    let is_permitted = is_permitted || Mutation::AssignedRangesReturned.is_on();
    if !fits || !is_permitted || !ranges.iter().all(is_alone) {
        return None;
    }
    let holder = allocations.holder(&node.name, &node.uid);
    for range in &ranges {
        let state = HoldingState::InFlight;
        allocations.ledger.record(holder, *range, state);
    }
    Some(ranges)
}

fn unserved(node: &Node, allocations: &AllocationState) -> PodCidrDecision {
    let mode = AllocationMode::NodeCIDR;
    let states: Vec<_> = allocations.pools.not_serving(mode, node).collect();
    if states.is_empty() {
        return PodCidrDecision::Wait(WaitReason::Unmanaged, String::new());
    }
    barred(&states)
}

/// Decides that a node waits until one of these pools allocates.
fn barred(pools: &[&PoolState]) -> PodCidrDecision {
    // A pool that is about to allocate is no cause for concern, so no event mentions it.
    let others = pools.iter();
    let others = others.filter(|state| state.phase != PoolPhase::Starting);
    let notes: Vec<String> = others
        .map(|state| format!("pool \"{}\" does not serve: {}", state.name, state.phase))
        .collect();
    let pools = pools.iter().map(|state| state.name.clone()).collect();
    PodCidrDecision::Wait(WaitReason::Barred { pools }, notes.join("; "))
}

/// Decides that a node waits until its kubelet reports how many pods it may run. `pools` are all pools that may
/// allocate to the node; `pool` is the one that the loop tries now.
fn max_pods_unknown(pool: &PoolName, pools: Vec<PoolName>) -> PodCidrDecision {
    let note = format!(
        "pool \"{pool}\": the size of its range depends on how many pods the node may run, and status.capacity.pods of the Node is missing: check that its kubelet runs; the node gets its range once the kubelet has reported it"
    );
    PodCidrDecision::Wait(WaitReason::MaxPodsUnknown { pools }, note)
}
