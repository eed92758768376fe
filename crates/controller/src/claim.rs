//! The loop of IPClaims: allocates their addresses, hands them to the nodes of their pods, and writes their statuses.
//!
//! # How a claim's address gets to a pod
//! 1. The address is recorded in the ledger and in the claim's status. From then on it is allocated to nothing else.
//! 2. A pod that names the claim is bound to a node. The address becomes a block of that node, with an IPAMBlock.
//! 3. The node's NodeSubnet lists the block with the claim, and the agent assigns its address to the pod.
//! 4. No pod of the claim is bound to the node any more: the block is recalled, the agent releases it, and its
//!    IPAMBlock is deleted. If the node is deleted instead, the block is quarantined like any block. Then step 2 can
//!    follow for another node.
//!
//! This loop does steps 1 and 2 and the recall. All else is done for every block, so an address has two holders only
//! if a block can have two owners.
//!
//! # Guarantees
//! - No address becomes a block before the API server has stored it in the claim's status.
//! - While a node has a block of the claim, no other node gets one, and the claim keeps its finalizer. It keeps it for
//!   the cooldown afterwards, so that no other pod gets an address earlier.
//! - The addresses of a claim never change, with one exception: a late write of an earlier leader may record an address
//!   that this leader has allocated to a node meanwhile. Then the claim gets another one, before any pod uses it.
//! - A claim gets an address of each family of its pool or none. A pod does, too.

mod addresses;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use self::status::status;
use super::allocations::AllocationState;
use super::context::IN_USE_PAUSE;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::{AffectedLoops, BlockEntry};
use crate::allocations::claims::ClaimEntry;
use crate::allocations::holders::HolderUse;
use crate::cluster::names::{ClaimName, PoolName};
use crate::cluster::objects::{Claim, Node, Owner, PodClaim};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind};
use crate::pools::PoolPhase;
use crate::purpose::Step;
use cadastre_api::{CLAIM_FINALIZER, Recall};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState};

/// Reason of a claim whose pool has no free address.
const EXHAUSTED: &str = "Exhausted";
/// Reason of a claim whose address somebody else uses.
const IN_USE: &str = "AddressInUse";

/// The cooldown in seconds of a pool that is gone.
const DEFAULT_COOLDOWN: u32 = 30;

/// At most this many claims are decided about before the next request is sent.
const AT_ONCE: usize = 256;

/// Why a claim has no addresses, or why the pod that names it has to wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClaimProblem {
    /// The reason of the condition, in CamelCase
    pub reason: &'static str,
    /// Says what is wrong, and what would end it
    pub text: String,
}

impl ClaimProblem {
    fn new(reason: &'static str, text: String) -> Self {
        ClaimProblem { reason, text }
    }
}

/// State of the claim loop.
#[derive(Debug, Default)]
pub struct ClaimLoop {
    /// Claims to decide about
    pub queue: Queue<ClaimName>,
    /// Claims whose object may need a write
    writes: Queue<ClaimName>,
    requests: InFlight<ClaimName>,
    /// Claims that wait for something to change in the ledger
    problems: BTreeMap<ClaimName, ClaimProblem>,
    /// Pools that had no free address for a claim, with the reason. An entry stays until a range becomes free
    full: BTreeMap<PoolName, ClaimProblem>,
}

impl Loop for ClaimLoop {
    fn load(&self) -> Load {
        self.queue.load() + self.writes.load()
    }

    /// Returns the next request for a claim's finalizers or status.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.writes, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::Claim { name } = answer.purpose {
            self.requests.answered(name, answer);
            self.queue.add(name.clone());
        }
        AffectedLoops::default()
    }
}

impl ClaimLoop {
    /// Queues claims that wait, because a range became free or a pool has changed. Of the claims of exhausted pools, only
    /// the first few are queued: if one of them gets addresses, more are.
    pub(crate) fn requeue(&mut self) {
        self.full.clear();
        let mut exhausted = 0;
        for (name, problem) in &self.problems {
            exhausted += usize::from(problem.reason == EXHAUSTED);
            if problem.reason != EXHAUSTED || exhausted <= AT_ONCE {
                self.queue.add(name.clone());
            }
        }
    }

    /// Queues the claims whose addresses somebody else used, because a pod no longer reports an address.
    pub(crate) fn requeue_in_use(&mut self) {
        let in_use = self.problems.iter().filter(|(_, it)| it.reason == IN_USE);
        for (name, _) in in_use {
            self.queue.add(name.clone());
        }
    }

    /// Returns the number of claims that wait.
    pub fn waiting(&self) -> usize {
        self.problems.len()
    }

    /// Removes all records of a claim whose object is gone.
    pub(crate) fn gone(&mut self, name: &ClaimName) {
        self.problems.remove(name);
        self.requests.forget(name);
    }

    /// Decides about queued claims: allocates addresses, and hands them to nodes or recalls them. Returns what other
    /// loops must check.
    pub(crate) fn work(&mut self, cx: &mut Context) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        let mut has_room = false;
        for _ in 0..AT_ONCE {
            let Some(name) = self.queue.pop(cx.now.mono) else {
                break;
            };
            let Some(claim) = cx.cache.claims.get(&name).cloned() else {
                continue;
            };
            let decided = self.decide(&claim, cx, &mut affected);
            self.writes.add(name.clone());
            match decided {
                Ok(()) => {
                    let before = self.problems.remove(&name);
                    has_room |= before.is_some_and(|it| it.reason == EXHAUSTED);
                }
                Err(problem) => {
                    // Not every event that ends a wait is seen, such as the end of a pause of the pool.
                    self.queue.add_at(name.clone(), cx.now.mono + IN_USE_PAUSE);
                    self.problems.insert(name, problem);
                }
            }
        }
        if has_room {
            self.requeue();
        }
        affected
    }

    fn decide(
        &mut self,
        claim: &Claim,
        cx: &mut Context,
        affected: &mut AffectedLoops,
    ) -> Result<(), ClaimProblem> {
        if cx.allocations.claims.get(&claim.name).is_none() {
            if claim.deleting || !claim.has_finalizer() {
                return Ok(());
            }
            return self.allocate(claim, cx);
        }
        if is_to_choose_again(claim, cx) {
            cx.allocations.drop_claim(&claim.name);
            return self.allocate(claim, cx);
        }
        place(claim, cx, affected)
    }

    fn look(&mut self, name: &ClaimName, cx: &mut Context) -> KeyDecision {
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        let is_read = self.requests.is_to_read(name);
        let call = if is_read {
            ObjectCall::ReadClaim(name.clone())
        } else {
            ObjectCall::WriteClaim(name.clone())
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        let request = if is_read {
            Some(ApiRequest::Read(ObjectKind::Claim, name.clone().into()))
        } else {
            self.difference(name, cx)
        };
        let Some(request) = request else {
            return KeyDecision::Done;
        };
        self.requests.send(name.clone(), ());
        KeyDecision::Send(request, Purpose::Claim { name: name.clone() })
    }

    /// Returns the write that the claim's object needs next, or `None` if it is as it should be.
    fn difference(&mut self, name: &ClaimName, cx: &Context) -> Option<ApiRequest> {
        let claim = cx.cache.claims.get(name)?;
        let entry = cx.allocations.claims.get(name);
        let is_held = || {
            let mut cidrs = entry.into_iter().flat_map(ClaimEntry::cidrs);
            cidrs.any(|cidr| cx.allocations.blocks.get(&cidr).is_some())
        };
        let set = |finalizers| {
            let known = KnownObject::of(&**claim);
            Some(ApiRequest::SetFinalizers(
                ObjectKind::Claim,
                known,
                finalizers,
            ))
        };
        if !claim.deleting && !claim.has_finalizer() {
            let mut finalizers = claim.finalizers.clone();
            finalizers.push(CLAIM_FINALIZER.to_owned());
            return set(finalizers);
        }
        // The status records first when the addresses were released.
        let is_recorded = claim.status.node.is_none();
        let is_held = (is_held() || !is_recorded) && !Mutation::ClaimDeletedInUse.is_on();
        if claim.deleting && claim.has_finalizer() && !is_held {
            let left = cooldown_left(claim, cx);
            if !left.is_zero() {
                self.writes.add_at(name.clone(), cx.now.mono + left);
                return None;
            }
            let others = claim.finalizers.iter().filter(|it| *it != CLAIM_FINALIZER);
            return set(others.cloned().collect());
        }
        let status = status(claim, self.problems.get(name), cx);
        (claim.status != status)
            .then(|| ApiRequest::SetClaimStatus(KnownObject::of(&**claim), status))
    }
}

/// Returns whether a claim needs other addresses: a late write of an earlier leader recorded addresses that nodes have by
/// now, and no pod has used the claim.
fn is_to_choose_again(claim: &Claim, cx: &Context) -> bool {
    let is_any = claim.spec.as_ref().is_ok_and(|it| it.addresses.is_empty());
    let is_unused = claim.status.node.is_none() && claim.status.released_at.is_none();
    let entry = cx.allocations.claims.get(&claim.name);
    let mut cidrs = entry.into_iter().flat_map(ClaimEntry::cidrs);
    is_any && is_unused && cidrs.any(|cidr| cx.allocations.conflict_with_claim(&cidr).is_some())
}

/// Returns how long the addresses of a deleted claim have to wait, so that no other pod gets them before the cooldown of
/// their pool is over.
fn cooldown_left(claim: &Claim, cx: &Context) -> Duration {
    let Some(released_at) = &claim.status.released_at else {
        return Duration::ZERO;
    };
    let pool = claim.status.pool.as_deref();
    let pool = pool.and_then(|name| cx.allocations.pools.get(name));
    let seconds = pool.map_or(DEFAULT_COOLDOWN, |it| it.node_view.terms.cooldown_seconds);
    let until = released_at.0.as_second() + i64::from(seconds);
    let left = until.saturating_sub(cx.now.wall.as_second());
    // The clock may have been set back since.
    let left = left.clamp(0, i64::from(seconds));
    Duration::from_secs(left.unsigned_abs())
}

/// Hands the addresses of a claim to the node of the pod that names it, or recalls them from a node without such a pod.
/// Returns why the pod has to wait, if it has to.
fn place(
    claim: &Claim,
    cx: &mut Context,
    affected: &mut AffectedLoops,
) -> Result<(), ClaimProblem> {
    let Some(entry) = cx.allocations.claims.get(&claim.name) else {
        return Ok(());
    };
    let (pool, is_stored) = (entry.pool.clone(), entry.is_stored);
    let cidrs: Vec<Cidr> = entry.cidrs().collect();
    let pods = cx.cache.pods.of_claim(&claim.name);
    let is_wanted_on = |node: &str| pods.iter().any(|pod| pod.node.as_deref() == Some(node));
    let held: Vec<&BlockEntry> = cidrs
        .iter()
        .filter_map(|cidr| cx.allocations.blocks.get(cidr))
        .collect();
    let owner = held.first().map(|entry| entry.owner.clone());
    let is_one_owner = held
        .iter()
        .all(|it| Some(&it.owner.uid) == owner.as_ref().map(|it| &it.uid));
    let held: Vec<Cidr> = held.iter().map(|entry| entry.cidr).collect();
    for cidr in &held {
        let Some(entry) = cx.allocations.blocks.get_mut(cidr) else {
            continue;
        };
        let recall = (!is_wanted_on(&entry.owner.name)).then_some(Recall::Drain);
        if recall.is_some() && Mutation::ClaimMovedOnOneProof.is_on() {
            entry.step = Step::Delete;
            affected.blocks.push(*cidr);
        }
        if !entry.owner.quarantined && !entry.is_leaving() && entry.recall != recall {
            entry.recall = recall;
            affected.nodes.push(entry.owner.name.clone());
        }
    }
    let target = match &owner {
        Some(owner) => pods
            .iter()
            .find(|pod| pod.node.as_ref() == Some(&owner.name)),
        None => pods.iter().find(|pod| pod.node.is_some()),
    };
    let Some(pod) = target else {
        // The node still has the addresses, but no pod there wants them any more.
        let waiting = pods.iter().find(|pod| pod.node.is_some());
        return match (&owner, waiting) {
            (Some(owner), Some(pod)) => Err(leaving(owner, pod, &cidrs)),
            _ => Ok(()),
        };
    };
    let is_live =
        |node: &&Node| owner.as_ref().is_none_or(|owner| owner.uid == node.uid) && is_one_owner;
    let node = pod.node.as_ref().and_then(|name| cx.cache.nodes.get(name));
    let Some(node) = node.map(AsRef::as_ref).filter(is_live) else {
        return match &owner {
            Some(owner) => Err(leaving(owner, pod, &cidrs)),
            // The watch has not shown the Node yet, or the Node is gone: an event of it, or of the pod, follows.
            None => Err(ClaimProblem::new(
                "WaitingForNode",
                format!("pod {} is bound to a node that does not exist", pod.pod),
            )),
        };
    };
    let missing: Vec<Cidr> = cidrs
        .iter()
        .filter(|cidr| !held.contains(cidr))
        .copied()
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !is_stored && !Mutation::ClaimPlacedBeforeStored.is_on() {
        // The answer to the write of the status queues the claim again.
        return Ok(());
    }
    let node = node.clone();
    may_place(&missing, &pool, pod, &node, cx)?;
    let holder = cx
        .allocations
        .holders
        .intern(HolderUse::Blocks, &node.name, &node.uid);
    for cidr in missing {
        let holding = cx
            .allocations
            .ledger
            .record(holder, cidr, HoldingState::InFlight);
        cx.allocations
            .begin_block(holding, cidr, &pool, &node, cx.now);
        affected.blocks.push(cidr);
    }
    Ok(())
}

/// Returns why the addresses of a claim cannot become blocks of this node now.
fn may_place(
    cidrs: &[Cidr],
    pool: &PoolName,
    pod: &PodClaim,
    node: &Node,
    cx: &Context,
) -> Result<(), ClaimProblem> {
    let allocations: &AllocationState = cx.allocations;
    for cidr in cidrs {
        let addr = cidr.first();
        let state = allocations.pools.get(pool);
        let conflict = allocations.conflict_with_claim(cidr);
        let unadopted = allocations.unadopted.conflict_with(cidr, &node.name);
        if let Some(range) = conflict {
            return Err(ClaimProblem::new(
                IN_USE,
                format!(
                    "{addr} is also a part of {range}, which a node has: see kubectl cadastre show ip {addr}"
                ),
            ));
        }
        if unadopted {
            return Err(ClaimProblem::new(
                IN_USE,
                format!(
                    "the agent of a node uses {addr}, as the condition Accepted of its NodeSubnet says: drain that node (kubectl cadastre show ip {addr})"
                ),
            ));
        }
        if let Some(addr) = cx.cache.pods.any_in_free(cidr) {
            return Err(ClaimProblem::new(
                IN_USE,
                format!(
                    "a pod reports {addr}: the claim waits until that pod is gone (kubectl get pods -A -o wide | grep -w {addr})"
                ),
            ));
        }
        let is_out = state.is_none_or(|state| {
            !state.space.covers(cidr) || matches!(state.phase, PoolPhase::Terminating)
        });
        if is_out {
            return Err(ClaimProblem::new(
                "OutsidePool",
                format!(
                    "{addr} is in no range of pool \"{pool}\" any more, or the pool is being deleted: no node gets it. Add the range to the pool again, or delete the claim"
                ),
            ));
        }
        if let Some(state) = state.filter(|state| !state.selects(node)) {
            return Err(ClaimProblem::new(
                "NodeNotSelected",
                format!(
                    "pod {} is on node {}, which the nodeSelector of pool \"{}\" does not select: schedule the pod to another node",
                    pod.pod, node.name, state.name
                ),
            ));
        }
    }
    Ok(())
}

/// Returns the problem of a pod that waits until another node has released the addresses.
fn leaving(owner: &Owner, pod: &PodClaim, cidrs: &[Cidr]) -> ClaimProblem {
    let addresses: Vec<String> = cidrs.iter().map(|it| it.first().to_string()).collect();
    let addresses = addresses.join(" and ");
    let target = pod.node.as_deref().unwrap_or_default();
    let text = if owner.quarantined {
        format!(
            "pod {} on node {target} waits: node {} is deleted, and {addresses} stays with it until its quarantine is over and no pod reports it",
            pod.pod, owner.name
        )
    } else {
        format!(
            "pod {} on node {target} waits: node {} has {addresses} until its agent has seen that no container uses it. If that node is dead, delete its Node",
            pod.pod, owner.name
        )
    };
    ClaimProblem::new("WaitingForNode", text)
}
