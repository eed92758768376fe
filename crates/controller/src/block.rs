//! The loop of IPAMBlocks: it creates, restores, quarantines and deletes the objects of blocks.
//!
//! The entry of each block contains the next step for its object ([`crate::purpose::Step`]). This loop sends the
//! request for that step. At most one request per block is in flight, and after each answer the loop decides anew. The
//! block of a deleted node is deleted once its quarantine is over and no pod has an address in it. To prove that no pod
//! has an address in the block, the loop checks the cached pods, and a list of the pods bound to the node's name that is
//! newer than the end of the quarantine ([`pod_proof`](crate::allocations::pod_proof)).

use std::collections::BTreeSet;
use std::time::Duration;

use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, KEPT, Regarding};
use super::routes::is_routed;
use super::{Context, Purpose};
use crate::allocations::blocks::{AffectedLoops, BlockEntry, sound};
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Block, Text};
use crate::cluster::request::{
    ApiRequest, KnownObject, ObjectKind, ObjectSpec, Rejection, RequestOutcome,
};
use crate::purpose::Step;
use cadastre_api::block_name;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, HoldingId};

/// How long the loop waits for the watch to deliver an object before it reads the object.
const AWAIT: Duration = Duration::from_secs(10);

/// The queues of the block loop, and what the loop knows about quarantined blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockLoop {
    /// Blocks that a node waits for
    pub urgent: Queue<Cidr>,
    /// Blocks that no node waits for, for example quarantined blocks
    pub queue: Queue<Cidr>,
    /// UIDs of deleted nodes whose pods are being listed
    listing_pods: BTreeSet<ObjectUid>,
    /// Blocks that must stay in quarantine although their planned time in quarantine has passed. An event has already
    /// reported each of these blocks
    kept: BTreeSet<Cidr>,
}

impl Loop for BlockLoop {
    fn load(&self) -> Load {
        self.urgent.load() + self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, cidr: &Cidr, cx: &mut Context| it.look(*cidr, cx);
        work_off(self, |it| &mut it.queue, look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        match answer.purpose {
            Purpose::Block {
                cidr,
                holding,
                step,
            } => self.written_or_read((cidr, *holding), *step, answer.outcome, cx),
            Purpose::BlockPods { uid, as_of, .. } => {
                cx.allocations.pod_proof.listed(*as_of, answer.outcome);
                self.looked_at_pods(uid, *as_of, answer.outcome, cx);
                AffectedLoops::default()
            }
            _ => AffectedLoops::default(),
        }
    }
}

impl BlockLoop {
    /// Queues a block whose object may need a request.
    pub(crate) fn add(&mut self, entry: &BlockEntry) {
        let urgent = entry.step == Step::Create || entry.to_read;
        if urgent && !entry.owner.quarantined {
            self.urgent.add(entry.cidr);
        } else {
            self.queue.add(entry.cidr);
        }
    }

    /// Returns the next request that a node waits for. While the process is stopping, no object is created.
    pub(crate) fn next_urgent(
        &mut self,
        cx: &mut Context,
        stopping: bool,
    ) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, cidr: &Cidr, cx: &mut Context| {
            let creates = |e: &BlockEntry| e.step == Step::Create && !e.to_read;
            if stopping && cx.allocations.blocks.get(cidr).is_none_or(creates) {
                return KeyDecision::Done;
            }
            it.look(*cidr, cx)
        };
        work_off(self, |it| &mut it.urgent, look, cx)
    }

    fn look(&mut self, cidr: Cidr, cx: &mut Context) -> KeyDecision {
        let now = cx.now.mono;
        let open_routes = &cx.allocations.open_routes;
        let Some(entry) = cx.allocations.blocks.get_mut(&cidr) else {
            self.kept.remove(&cidr);
            return KeyDecision::Done;
        };
        if entry.in_flight {
            return KeyDecision::Done;
        }
        let call = if entry.to_read {
            ObjectCall::ReadBlock(cidr)
        } else {
            ObjectCall::WriteBlock(cidr)
        };
        let paused = cx.allocations.refusals.paused(&call, now);
        if let Some(at) = paused.filter(|_| entry.to_read || entry.step.is_write()) {
            return KeyDecision::Later(at);
        }
        let name: Text = block_name(&cidr).into();
        let holding = entry.holding;
        let purpose = |step| Purpose::Block {
            cidr,
            holding,
            step,
        };
        if entry.to_read {
            entry.in_flight = true;
            return KeyDecision::Send(ApiRequest::Read(ObjectKind::Block, name), purpose(None));
        }
        let object = cx.cache.blocks.get(&name);
        let object = object.filter(|object| entry.uid.as_ref() == Some(&object.uid));
        let step = entry.step;
        let request = match (step, object) {
            (Step::Settled, _) => return self.look_at_quarantine(cidr, cx),
            // The object was created or read recently. The loop waits for the watch to deliver it.
            (Step::Await | Step::Replace | Step::Delete, None) if entry.await_until > now => {
                self.queue.add_at(cidr, entry.await_until);
                return KeyDecision::Done;
            }
            // The watch has delivered the object, so [`AllocationState::judge_blocks`] will confirm the block or mark
            // it for deletion.
            (Step::Await, Some(_)) => return KeyDecision::Done,
            (Step::Create, _) => ApiRequest::Create(name, ObjectSpec::Block(entry.spec())),
            (Step::Replace, Some(object)) => {
                ApiRequest::Replace(KnownObject::of(&**object), ObjectSpec::Block(entry.spec()))
            }
            // The event of the NodeRoutes queues the block again.
            (Step::Delete, Some(_))
                if is_routed(&entry.owner.name, &cidr, open_routes, cx.cache) =>
            {
                return KeyDecision::Later(cx.now.next_check());
            }
            (Step::Delete, Some(object)) => {
                ApiRequest::Delete(ObjectKind::Block, KnownObject::of(&**object))
            }
            (Step::Await | Step::Replace | Step::Delete, None) => {
                entry.to_read = true;
                entry.in_flight = true;
                return KeyDecision::Send(ApiRequest::Read(ObjectKind::Block, name), purpose(None));
            }
        };
        entry.in_flight = true;
        KeyDecision::Send(request, purpose(Some(step)))
    }

    /// Handles a block whose object needs no request. If the quarantine of the block is over, checks whether the block
    /// may be deleted.
    fn look_at_quarantine(&mut self, cidr: Cidr, cx: &mut Context) -> KeyDecision {
        let entry = cx.allocations.blocks.get(&cidr);
        let entry = entry.filter(|entry| entry.owner.quarantined);
        let Some((entry, until)) = entry.and_then(|entry| Some((entry, entry.quarantined_until?)))
        else {
            return KeyDecision::Done;
        };
        if until > cx.now.mono {
            self.queue.add_at(cidr, until);
            return KeyDecision::Done;
        }
        let (name, uid) = (entry.owner.name.clone(), entry.owner.uid.clone());
        let by_pod = used_by_pod(&name, &cidr, cx);
        if let Some(why) = still_used(&cidr, by_pod, cx.allocations) {
            self.keep(cidr, &why, cx);
            return KeyDecision::Done;
        }
        if let Some(at) = cx.paused(&ObjectCall::ListPods(name.clone())) {
            self.queue.add_at(cidr, at);
            return KeyDecision::Done;
        }
        if !self.listing_pods.insert(uid.clone()) {
            return KeyDecision::Done;
        }
        let (request, as_of) = cx.allocations.list_pods_of(&name, until, cx.now);
        KeyDecision::Send(request, Purpose::BlockPods { name, uid, as_of })
    }

    /// Keeps a block in quarantine: schedules the next check, and reports the reason once.
    fn keep(&mut self, cidr: Cidr, why: &str, cx: &mut Context) {
        self.queue.add_at(cidr, cx.now.next_check());
        let Some(uid) = cx.allocations.blocks.get(&cidr).and_then(|e| e.uid.clone()) else {
            return;
        };
        if self.kept.insert(cidr) {
            let about = Regarding::new(ObjectKind::Block, block_name(&cidr), &uid);
            let note = format!("its node is gone and its quarantine is over, but {why}");
            cx.reports.push(EventRecord::info(about, KEPT, note));
        }
    }

    /// Handles the list of a deleted node's pods. Of the node's blocks whose quarantine was over at the time `as_of`,
    /// deletes those that no pod uses.
    fn looked_at_pods(
        &mut self,
        uid: &ObjectUid,
        as_of: Duration,
        outcome: &RequestOutcome,
        cx: &mut Context,
    ) {
        self.listing_pods.remove(uid);
        let settled = |entry: &&BlockEntry| entry.owner.quarantined && entry.step == Step::Settled;
        let settled = cx.allocations.blocks.of(uid).filter(settled);
        let due = settled.filter_map(|entry| {
            let until = entry.quarantined_until.filter(|it| *it <= cx.now.mono)?;
            Some((entry.cidr, entry.owner.name.clone(), until))
        });
        let due: Vec<(Cidr, NodeName, Duration)> = due.collect();
        for (cidr, name, until) in due {
            let pods = match outcome {
                RequestOutcome::Pods(pods, _) if until <= as_of => pods,
                // The list failed, or the quarantine ended after the list was requested.
                _ => {
                    self.queue.add(cidr);
                    continue;
                }
            };
            let mut reported = pods.iter().flat_map(|pod| pod.addresses.iter().copied());
            let by_pod = reported.find(|addr| is_of_block(*addr, &cidr, cx));
            let by_pod = by_pod.or_else(|| used_by_pod(&name, &cidr, cx));
            if let Some(why) = still_used(&cidr, by_pod, cx.allocations) {
                self.keep(cidr, &why, cx);
                continue;
            }
            self.kept.remove(&cidr);
            cx.allocations.owner_left(&cidr, cx.now);
            self.queue.add(cidr);
        }
    }

    /// Handles the answer to a request for a block's object. The cache already contains the object, except after a
    /// creation: a new object counts only once the watch delivers it.
    fn written_or_read(
        &mut self,
        (cidr, holding): (&Cidr, HoldingId),
        step: Option<Step>,
        outcome: &RequestOutcome,
        cx: &mut Context,
    ) -> AffectedLoops {
        let now = cx.now.mono;
        let mut affected = AffectedLoops::default();
        let entry = cx.allocations.blocks.get_mut(cidr);
        let any = Mutation::AnswerToEarlierBlockCounts.is_on();
        let Some(entry) = entry.filter(|entry| entry.holding == holding || any) else {
            return affected;
        };
        entry.in_flight = false;
        let (owner, quarantined) = (entry.owner.clone(), entry.owner.quarantined);
        let queue = if quarantined {
            &mut self.queue
        } else {
            &mut self.urgent
        };
        match (step, outcome) {
            (Some(Step::Create), RequestOutcome::Block(block)) => {
                created(entry, block, now);
                if entry.confirmed {
                    // A restored object has a new UID, which the NodeSubnet must list.
                    affected.nodes.push(owner.name);
                }
                self.queue.add(*cidr);
            }
            (None, RequestOutcome::Block(block)) if sound(block).is_none() => {
                entry.to_read = false;
                entry.await_until = now + AWAIT;
                queue.add(*cidr);
                cx.allocations.block_spoiled(block, cx.now, &mut affected);
            }
            (None, RequestOutcome::Block(block)) => {
                entry.to_read = false;
                entry.found(block, now);
                affected.nodes.push(owner.name);
                self.queue.add(*cidr);
            }
            (None, RequestOutcome::Rejected(Rejection::Missing)) => {
                entry.to_read = false;
                if entry.is_leaving() || quarantined && !entry.confirmed {
                    cx.allocations.drop_block(cidr);
                    affected.blocks.push(*cidr);
                    affected.freed = true;
                } else {
                    entry.step = Step::Create;
                    self.urgent.add(*cidr);
                }
                affected.nodes.push(owner.name);
            }
            (Some(Step::Replace), RequestOutcome::Block(block)) => {
                // A write that changes nothing in the object causes no watch event, so the block is settled here.
                if entry.step == Step::Replace && entry.is_kept_in(block) {
                    entry.step = Step::Settled;
                }
                self.queue.add(*cidr);
            }
            (_, RequestOutcome::Block(_) | RequestOutcome::Gone) => self.queue.add(*cidr),
            // The creation was rejected, and the node is deleted by now. No node ever had the block, so the block is
            // dropped.
            (Some(Step::Create), RequestOutcome::Rejected(refusal))
                if quarantined
                    && !entry.confirmed
                    && entry.step == Step::Create
                    && !matches!(refusal, Rejection::Guard(_)) =>
            {
                cx.allocations.drop_block(cidr);
                affected.blocks.push(*cidr);
                affected.freed = true;
            }
            (
                _,
                RequestOutcome::Rejected(
                    Rejection::Busy(_) | Rejection::NotSent | Rejection::Rejected(_),
                ),
            ) => {
                queue.add(*cidr);
            }
            _ => {
                entry.to_read = true;
                queue.add(*cidr);
            }
        }
        affected
    }
}

/// Returns an address that lies in a quarantined block and that a pod reports. `node` is the node that had the block.
fn used_by_pod(node: &NodeName, block: &Cidr, cx: &Context) -> Option<Addr> {
    let mut used = cx.cache.pods.all_in_range_of(node, block);
    used.find(|addr| is_of_block(*addr, block, cx))
}

/// Returns whether `addr` lies in `block`, but in no smaller block inside `block`. Such smaller blocks belong to
/// claims, or to nodes that have borrowed a part of `block`.
fn is_of_block(addr: Addr, block: &Cidr, cx: &Context) -> bool {
    block.contains_addr(addr) && !cx.allocations.is_in_nested_block(addr, block)
}

/// Returns the reason why a block must stay in quarantine: a pod reports an address of the block, or the agent of
/// another node reports that an address of the block is in use. Returns `None` if nothing uses the block.
fn still_used(block: &Cidr, by_pod: Option<Addr>, allocations: &AllocationState) -> Option<String> {
    if let Some(addr) = by_pod.filter(|_| !Mutation::PodsOfBlockNotLookedAt.is_on()) {
        return Some(format!(
            "a pod still reports {addr}: it goes with that pod (kubectl get pods -A -o wide | grep -w {addr})"
        ));
    }
    let addr = allocations.quarantined_in_use(block)?;
    Some(format!(
        "the agent of another node uses it, as the condition Accepted of its NodeSubnet says: drain that node (kubectl cadastre show ip {addr})"
    ))
}

/// Records that the object exists. When the watch delivers the object, the leader learns its owner, and whether an
/// older block overlaps the block.
fn created(entry: &mut BlockEntry, block: &Block, now: Duration) {
    if entry.step == Step::Create || entry.step == Step::Await {
        let spec = block.spec.as_ref();
        if spec.is_ok_and(|spec| spec.owner.uid == entry.owner.uid) {
            entry.uid = Some(block.uid.clone());
        }
        entry.step = Step::Await;
        entry.await_until = now + AWAIT;
    }
}

impl BlockEntry {
    /// Returns whether the block's object already has the spec that this entry requires.
    pub(crate) fn is_kept_in(&self, block: &Block) -> bool {
        block.spec.as_ref().is_ok_and(|spec| *spec == self.spec())
    }

    /// Handles the object that a read found under the block's name.
    fn found(&mut self, block: &Block, now: Duration) {
        if !self.confirmed {
            created(self, block, now);
        } else if self.step == Step::Create {
            self.uid = Some(block.uid.clone());
            self.step = if self.is_kept_in(block) {
                Step::Settled
            } else {
                Step::Replace
            };
        } else {
            // The object exists, but the watch may be behind. The next read waits, so that the watch has time to
            // deliver the object.
            self.await_until = now + AWAIT;
        }
    }
}

#[cfg(test)]
mod tests;
