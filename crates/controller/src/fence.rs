//! The fence: what a new leader does before it allocates podCIDRs, frees ranges, or permits the deletion of a pool.
//!
//! An earlier leader that crashed, was suspended or was cut off may have allocations of podCIDRs in flight, which can
//! take effect at any time. The Lease that the new leader took over names all of these allocations. The earlier leader
//! can send no further ones. It would first have to name them in the Lease, and that write now fails. So the new leader
//! lists the objects and reserves the named ranges for the named nodes (`Leader::inherit`). This procedure relies on no
//! clock and writes no Node.
//!
//! The Lease does not name these allocations if its holder ran an earlier version of Cadastre, or if the Lease was
//! deleted. In these cases the new leader *touches* every node without podCIDRs: it sets the node's annotation to its
//! own term. After the touch, the API server rejects every allocation that was decided before the touch. The answer to
//! the touch shows which allocations took effect before. Each touch tests the term that it replaces, so a late touch by
//! an earlier leader cannot undo a newer touch. Until all nodes are touched, no podCIDR is allocated and no pool may be
//! deleted. Everything else continues.
//!
//! | how the term began | lists | touches |
//! |---|---|---|
//! | first start: no Lease, no NodeSubnet | no | no |
//! | clean hand-over | yes | no |
//! | the Lease names the writes in flight | only kinds whose watch is behind | no |
//! | anything else | yes | yes |
//!
//! A kind needs no list if the list of its watch was requested after this process won the Lease. A kind also needs no
//! list if its watch has reached the versions that the Lease records, because writes in flight were decided on these or
//! earlier versions. But these versions do not count if the API server may have been restored since the watch began.
//! This is so if the API server was unreachable meanwhile, or if no controller led for over a minute.

use std::collections::BTreeSet;
use std::time::Duration;

use super::queue::{Load, Queue};
use super::reconcile::{Loop, RequestAnswer};
use super::report::{EventRecord, Regarding, WRITE_REJECTED};
use super::{Context, Now, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::intents::SeenVersions;
use crate::cluster::lease::{LeadershipTerm, Takeover};
use crate::cluster::names::{NodeName, ObjectUid, TermId};
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{Node, Object};
use crate::cluster::request::{ApiRequest, NodeTouch, ObjectKind, Rejection, RequestOutcome};
use cadastre_core::mutation::Mutation;

/// After this many failures in a row, the touch of a node counts as one that keeps failing.
const PERSISTENT: u32 = 3;

/// The state of one takeover: which lists and touches the new leader still needs.
#[derive(Clone, Debug)]
pub(crate) struct Fence {
    takeover: Takeover,
    term: TermId,
    /// Whether the Lease names the writes that earlier leaders have in flight
    names_writes: bool,
    /// A list is not needed if the watch has reached these versions, and the watch's own list was requested at this
    /// monotonic time or later. `None` if each kind must be listed after the Lease was won
    sufficient: Option<(SeenVersions, Duration)>,
    /// When this process learned that it leads, by the monotonic clock
    won: Duration,
    step: Step,
    lists: Lists,
    /// Nodes (name, UID) that no answer of the API server has shown to be touched yet
    left: BTreeSet<(NodeName, ObjectUid)>,
    queue: Queue<(NodeName, ObjectUid)>,
    /// Nodes that must be read before they are touched again, because the precondition of their last touch failed or
    /// that touch is indeterminate
    to_read: BTreeSet<(NodeName, ObjectUid)>,
    /// Nodes for which an event has reported that the API server rejects the touch
    reported: BTreeSet<(NodeName, ObjectUid)>,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Syncing,
    Listing,
    Touching,
    Done,
}

#[derive(Clone, Debug, Default)]
struct Lists {
    queue: Queue<ObjectKind>,
    /// Kinds whose list has not arrived yet
    left: BTreeSet<ObjectKind>,
}

impl Loop for Fence {
    fn load(&self) -> Load {
        self.lists.queue.load() + self.queue.load()
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        match answer.purpose {
            Purpose::Relist(kind) => self.listed(*kind, answer.applied, cx),
            Purpose::Touch { name, uid } => {
                self.touched(name, uid, answer.outcome, cx);
                if self.is_done() {
                    cx.allocations.intents.mark_written();
                }
            }
            _ => {}
        }
        AffectedLoops::default()
    }
}

impl Fence {
    /// Creates the fence of a term. `won` is the monotonic time at which this process learned that it leads.
    pub(crate) fn new(term: &LeadershipTerm, won: Duration) -> Self {
        Fence {
            takeover: term.takeover,
            term: term.id.clone(),
            names_writes: term.takeover == Takeover::Clean || term.inherited.is_some(),
            sufficient: sufficient_versions(term),
            won,
            step: Step::Syncing,
            lists: Lists::default(),
            left: BTreeSet::new(),
            queue: Queue::default(),
            to_read: BTreeSet::new(),
            reported: BTreeSet::new(),
        }
    }

    /// Returns whether this leader knows every write of earlier leaders that can still take effect.
    pub(crate) fn is_done(&self) -> bool {
        self.step == Step::Done
    }

    /// Returns whether all needed lists are in the cache, so that the ledger can be built.
    pub(crate) fn is_listed(&self) -> bool {
        matches!(self.step, Step::Touching | Step::Done)
    }

    /// Returns how many nodes are still to be touched, and for how many of these nodes the touch keeps failing.
    pub(crate) fn left(&self) -> (usize, usize) {
        let failing = |key: &&(NodeName, ObjectUid)| self.queue.failures(key) >= PERSISTENT;
        (self.left.len(), self.left.iter().filter(failing).count())
    }

    /// Describes the steps that the fence still has to do, for the log and for `/readyz`.
    pub(crate) fn progress(&self, cache: &ClusterCache) -> String {
        match self.step {
            Step::Syncing => format!(
                "waiting for the first lists of {}",
                cache.missing().join(", ")
            ),
            Step::Listing => "listing nodes, subnets and blocks after the take-over".to_owned(),
            Step::Touching => {
                let first = self.left.first().map_or("", |(name, _)| name);
                format!(
                    "podCIDRs wait until node {first} and {} more are annotated: the Lease does not tell what the last leader has in flight",
                    self.left.len().saturating_sub(1)
                )
            }
            Step::Done => "done".to_owned(),
        }
    }

    /// Returns the next list request or touch that is due.
    pub(crate) fn next_urgent(
        &mut self,
        cache: &ClusterCache,
        now: Now,
    ) -> Option<(ApiRequest, Purpose)> {
        if self.step == Step::Syncing && cache.missing().is_empty() {
            self.begin(cache);
        }
        match self.step {
            Step::Syncing | Step::Done => None,
            Step::Listing => {
                let kind = self.lists.queue.pop(now.mono)?;
                Some((ApiRequest::List(kind), Purpose::Relist(kind)))
            }
            Step::Touching => self.next_touch(cache, now),
        }
    }

    fn begin(&mut self, cache: &ClusterCache) {
        let needs_no_lists = match self.takeover {
            Takeover::First => cache.subnets.is_empty() && cache.blocks.is_empty(),
            Takeover::Clean if Mutation::HandOverNotListed.is_on() => true,
            _ => false,
        };
        if needs_no_lists {
            self.step = Step::Done;
            return;
        }
        let listed = [
            (
                ObjectKind::Node,
                self.needs_no_list(&cache.nodes, |it| it.nodes),
            ),
            (
                ObjectKind::Subnet,
                self.needs_no_list(&cache.subnets, |it| it.subnets),
            ),
            (
                ObjectKind::Block,
                self.needs_no_list(&cache.blocks, |it| it.blocks),
            ),
            (
                ObjectKind::Claim,
                self.needs_no_list(&cache.claims, |it| it.claims),
            ),
        ];
        self.step = Step::Listing;
        for (kind, _) in listed.into_iter().filter(|(_, listed)| !listed) {
            self.lists.left.insert(kind);
            self.lists.queue.add(kind);
        }
        self.touch_if_listed(cache);
    }

    /// Returns whether the objects of this kind need not be listed. This is so if the list of the kind's watch was
    /// requested after the Lease was won, or if the watch has reached the versions that earlier leaders had seen.
    fn needs_no_list<T: Object>(
        &self,
        table: &ObjectCache<T>,
        of: fn(&SeenVersions) -> u64,
    ) -> bool {
        let behind = Mutation::CacheBehindTrusted.is_on();
        let has_reached = |(known, since): &(SeenVersions, Duration)| {
            table.has_reached(if behind { 0 } else { of(known) }, *since)
        };
        table.is_listed_since(self.won) || self.sufficient.as_ref().is_some_and(has_reached)
    }

    fn next_touch(&mut self, cache: &ClusterCache, now: Now) -> Option<(ApiRequest, Purpose)> {
        loop {
            let key = self.queue.pop(now.mono)?;
            if !self.left.contains(&key) {
                continue;
            }
            let (name, uid) = key.clone();
            let known = cache.nodes.get(&name).filter(|node| node.uid == uid);
            let (false, Some(node)) = (self.to_read.remove(&key), known) else {
                return Some((
                    ApiRequest::Read(ObjectKind::Node, name.clone().into()),
                    Purpose::Touch { name, uid },
                ));
            };
            let request = ApiRequest::TouchNode(NodeTouch {
                name: name.clone(),
                uid: uid.clone(),
                from: node.term.clone(),
                annotated: node.annotated,
                term: self.term.clone(),
            });
            return Some((request, Purpose::Touch { name, uid }));
        }
    }

    /// Handles the answer to a list request. If the list is not in the cache (`applied` is false), requests the list
    /// again.
    fn listed(&mut self, kind: ObjectKind, applied: bool, cx: &Context) {
        if !applied {
            self.lists.queue.add_failed(kind, cx.now.mono);
            return;
        }
        self.lists.left.remove(&kind);
        self.touch_if_listed(cx.cache);
    }

    fn touch_if_listed(&mut self, cache: &ClusterCache) {
        if !self.lists.left.is_empty() {
            return;
        }
        self.step = Step::Touching;
        if !self.names_writes && !Mutation::TakeOverCountsAsClean.is_on() {
            let left_out = |node: &Node| node.deleting && Mutation::DeletingNodesNotTouched.is_on();
            let nodes = cache.nodes.iter();
            for node in nodes.filter(|node| node.is_empty() && !left_out(node)) {
                self.left.insert((node.name.clone(), node.uid.clone()));
            }
        }
        for key in &self.left {
            self.queue.add(key.clone());
        }
        self.finish_if_through();
    }

    /// Handles the answer to a touch, or to the read that follows a touch.
    fn touched(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        outcome: &RequestOutcome,
        cx: &mut Context,
    ) {
        let key = (name.clone(), uid.clone());
        let through = match outcome {
            RequestOutcome::Node(node) if node.uid != *uid => true,
            // The node is touched or has podCIDRs, so no write that was decided earlier can take effect any more.
            RequestOutcome::Node(node) => {
                node.term.as_ref() == Some(&self.term) || !node.is_empty()
            }
            // The Node with this UID is gone. Every write tests the UID, so no write can take effect any more.
            RequestOutcome::Rejected(Rejection::Missing) => true,
            RequestOutcome::Rejected(_) if Mutation::RejectedTouchCounts.is_on() => true,
            _ => false,
        };
        if through {
            self.left.remove(&key);
            self.finish_if_through();
            return;
        }
        if matches!(
            outcome,
            RequestOutcome::Rejected(Rejection::Guard(_)) | RequestOutcome::Indeterminate(_)
        ) {
            self.to_read.insert(key.clone());
        }
        self.queue.add_failed(key.clone(), cx.now.mono);
        if let RequestOutcome::Rejected(Rejection::Rejected(why)) = outcome
            && self.reported.insert(key)
        {
            let about = Regarding::new(ObjectKind::Node, name.clone(), uid);
            let note = format!(
                "the API server refuses to annotate this node after a change of leaders: no node gets podCIDRs until it can be annotated or is deleted: {why}"
            );
            cx.reports
                .push(EventRecord::warning(about, WRITE_REJECTED, note));
        }
    }

    fn finish_if_through(&mut self) {
        if self.left.is_empty() {
            self.step = Step::Done;
        }
    }
}

/// Returns the versions and the monotonic time that make a list unnecessary: the watch has reached the versions, and
/// its own list was requested at that time or later. Returns `None` if the Lease records no versions. Also returns
/// `None` if the term follows a gap, because the API server may have been restored during the gap.
pub(crate) fn sufficient_versions(term: &LeadershipTerm) -> Option<(SeenVersions, Duration)> {
    let known = term.inherited.as_ref()?.known?;
    let since = term.answered_since;
    let is_ignored = Mutation::UnansweredTimeForgotten.is_on();
    let since = if is_ignored { Duration::ZERO } else { since };
    (!term.follows_a_gap() || is_ignored).then_some((known, since))
}

#[cfg(test)]
mod tests;
