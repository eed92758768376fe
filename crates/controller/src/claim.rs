//! The claim loop: it allocates addresses to IPClaims, allocates these addresses as blocks to the nodes of the claims'
//! pods, and writes the claims' statuses.
//!
//! # How a claim's address gets to a pod
//! 1. The address is recorded in the ledger and in the claim's status. From then on it is allocated to nothing else.
//! 2. A pod that names the claim is bound to a node. The address becomes a block of that node, with an IPAMBlock.
//! 3. The node's NodeSubnet lists the block with the claim, and the agent assigns its address to the pod.
//! 4. When no pod of the claim is bound to the node any more, the block is recalled, the agent releases it, and its
//!    IPAMBlock is deleted. If the node is deleted instead, the block is quarantined like any block. After that, step 2
//!    can follow for another node.
//!
//! This loop does steps 1 and 2 and the recall. Other loops do the rest in the same way as for every block. So the
//! rules that keep a block from having two owners also protect the addresses of claims. This loop also deletes claims
//! some time after their last use (`retention`).
//!
//! # Guarantees
//! - No address becomes a block before the API server has stored it in the claim's status.
//! - No address becomes a block before the claim has its finalizer. While a node has a block of the claim, no other
//!   node gets a block of the claim, and the claim keeps its finalizer. The claim also keeps its finalizer during the
//!   cooldown after that, so that no other pod gets its addresses before the cooldown is over.
//! - The addresses of a claim change only if a node or another claim has got one of them. There are three possible
//!   causes: a foreign allocator gave a node a podCIDR with the address, a late write of an earlier leader gave the
//!   address to the claim, or the block of a deleted node was adopted again because an agent still uses it. In these
//!   cases the claim gets other addresses if its pool has some, unless a node has ever had the claim's addresses or the
//!   claim asks for that address. If a node has got the address, the old addresses are allocated to nothing else before
//!   the claim's status has the new ones.
//! - A deleted claim that no node has gets no node any more. So nothing uses the addresses of a claim whose finalizer is
//!   being removed.
//! - A claim gets an address of each family of its pool or none. A pod gets all addresses of its claim or none.

mod addresses;
mod migrate;
mod place;
mod retention;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use self::place::place;
use self::retention::Expiry;
use self::status::status;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::allocations::claims::ClaimEntry;
use crate::cluster::names::{ClaimName, PoolName};
use crate::cluster::objects::{Claim, ClaimSource};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind};
use crate::pod_claims::regarding;
use crate::report::{ADDRESS_UNAVAILABLE, EventRecord};
use cadastre_api::{ADDRESSES_ANNOTATION, CLAIM_FINALIZER};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;

/// Condition reason of a claim whose pool has no free address.
const EXHAUSTED: &str = "Exhausted";
/// Condition reason of a claim whose address is in use by another claim, a node or a pod.
const IN_USE: &str = "AddressInUse";
/// Condition reason of a claim whose address lies in the block of a node that has not handed it over yet.
const WITHDRAWING: &str = "Withdrawing";

/// The cooldown in seconds that applies when the claim's pool is gone.
const DEFAULT_COOLDOWN: u32 = 30;

/// The loop decides about at most this many claims before it returns the next request.
const AT_ONCE: usize = 256;

/// Why a claim has no addresses, or why the pod that names the claim has to wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClaimProblem {
    /// The reason of the condition, in CamelCase
    pub reason: &'static str,
    /// What is wrong, and what would end the wait
    pub text: String,
}

impl ClaimProblem {
    fn new(reason: &'static str, text: String) -> Self {
        ClaimProblem { reason, text }
    }
}

/// The queues of the claim loop, and the claims that wait, cool or expire.
#[derive(Clone, Debug, Default)]
pub struct ClaimLoop {
    /// Claims to decide about: which addresses they get, and which node gets these addresses
    pub queue: Queue<ClaimName>,
    /// Claims whose object may need a write
    writes: Queue<ClaimName>,
    requests: InFlight<ClaimName>,
    /// Deleted claims whose addresses are released. The value is the end of their cooldown, by the monotonic clock
    cooling: BTreeMap<ClaimName, Duration>,
    /// Unused claims that are to be deleted some time after their last use
    expiring: BTreeMap<ClaimName, Expiry>,
    /// Claims that wait for a change in the ledger, each with the reason
    problems: BTreeMap<ClaimName, ClaimProblem>,
    /// Pools that had no free address for a claim, with the reason. An entry stays until a range becomes free
    full: BTreeMap<PoolName, ClaimProblem>,
}

impl Loop for ClaimLoop {
    fn load(&self) -> Load {
        self.queue.load() + self.writes.load()
    }

    /// Returns the next request that writes a claim's finalizers or status, or that deletes a claim.
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
    /// Queues waiting claims. The caller does this after a range has become free or a pool has changed. Of the claims
    /// that wait for an exhausted pool, only the first few are queued. If one of them gets addresses, more are queued.
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

    /// Queues the claims that wait because something else uses their addresses. The caller does this after a pod has
    /// stopped reporting an address.
    pub(crate) fn requeue_in_use(&mut self) {
        let in_use = self.problems.iter().filter(|(_, it)| it.reason == IN_USE);
        for (name, _) in in_use {
            self.queue.add(name.clone());
        }
    }

    /// Returns the number of claims that wait for addresses or for a node.
    pub fn waiting(&self) -> usize {
        self.problems.len()
    }

    /// Removes all records of a claim whose object is gone.
    pub(crate) fn gone(&mut self, name: &ClaimName) {
        self.problems.remove(name);
        self.cooling.remove(name);
        self.expiring.remove(name);
        self.requests.forget(name);
    }

    /// Handles queued claims: allocates addresses to the claims, and allocates the addresses as blocks to nodes or
    /// recalls these blocks. Returns what other loops must check.
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
                    // Some changes that end a wait cause no event, such as the end of a pool's pause. So the claim is
                    // checked again later.
                    self.queue.add_at(name.clone(), cx.now.next_check());
                    if self.problems.get(&name) != Some(&problem) {
                        tell_pod(&claim, &problem, cx);
                    }
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
        let has_none = cx.allocations.claims.get(&claim.name).is_none();
        if has_none && claim.deleting {
            return Ok(());
        }
        if has_none || is_to_choose_again(claim, cx) {
            match self.choose(claim, cx) {
                Ok(chosen) => {
                    cx.allocations
                        .replace_claim(claim, &chosen.pool, chosen.addresses);
                }
                // The claim keeps the addresses that it has, because its status records them.
                Err(_) if !has_none => {}
                Err(problem) => return Err(problem),
            }
        }
        // If an address lies in the block of a node, this node's NodeSubnet has to withdraw the address.
        affected
            .nodes
            .extend(cx.allocations.nodes_around(&claim.name));
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
        self.requests.send(name.clone());
        KeyDecision::Send(request, Purpose::Claim { name: name.clone() })
    }

    /// Returns the write that the claim's object needs next, or `None` if the object needs no write.
    fn difference(&mut self, name: &ClaimName, cx: &Context) -> Option<ApiRequest> {
        let claim = cx.cache.claims.get(name)?;
        let has_block = cx.allocations.has_block_of(name);
        let set = |finalizers| {
            let known = KnownObject::of(&**claim);
            Some(ApiRequest::SetFinalizers(
                ObjectKind::Claim,
                known,
                finalizers,
            ))
        };
        // A claim without pods can be deleted at once, so the finalizer is set only for the first pod.
        let pods = cx.cache.pods.of_claim(name);
        let is_used = has_block || pods.iter().any(|pod| pod.node.is_some());
        if is_used && !claim.deleting && !claim.has_finalizer() {
            let mut finalizers = claim.finalizers.foreign();
            finalizers.push(CLAIM_FINALIZER.to_owned());
            return set(finalizers);
        }
        // The finalizer stays until the status records when the addresses were released.
        let is_recorded = claim.status.node.is_none();
        let is_held = (has_block || !is_recorded) && !Mutation::ClaimDeletedInUse.is_on();
        if is_held {
            self.cooling.remove(name);
        } else if claim.deleting && claim.has_finalizer() {
            let now = cx.now.mono;
            let until = || now + cooldown_left(claim, cx);
            let until = *self.cooling.entry(name.clone()).or_insert_with(until);
            if until <= now {
                return set(claim.finalizers.foreign());
            }
            self.writes.add_at(name.clone(), until);
        }
        let status = status(claim, self.problems.get(name), cx);
        if !claim.status.is(&status) {
            return Some(ApiRequest::SetClaimStatus(
                KnownObject::of(&**claim),
                status,
            ));
        }
        if claim.only_pod.is_some() {
            return self.end_with_pod(claim, cx);
        }
        self.expire(claim, cx)
    }
}

/// Emits an event about the pod for which the controller created a claim of certain addresses. The event says why the
/// pod does not get these addresses.
fn tell_pod(claim: &Claim, problem: &ClaimProblem, cx: &mut Context) {
    let has_addresses = cx.allocations.claims.get(&claim.name).is_some();
    let pods = cx.cache.pods.of_claim(&claim.name);
    let Some(pod) = pods
        .first()
        .filter(|_| claim.only_pod.is_some() && !has_addresses)
    else {
        return;
    };
    let asked = match &pod.source {
        ClaimSource::Addresses(asked) => asked,
        ClaimSource::User | ClaimSource::Sticky(_) | ClaimSource::IpamClaim => return,
    };
    if !asked.is_served {
        let how = if asked.is_by_cni {
            "in the CNI request"
        } else {
            ADDRESSES_ANNOTATION
        };
        let text = format!(
            "the pod gets no address, because it asks for certain addresses ({how}): {}",
            problem.text
        );
        let about = regarding(pod);
        cx.reports
            .push(EventRecord::warning(about, ADDRESS_UNAVAILABLE, text));
    }
}

fn joined(addresses: impl Iterator<Item = Addr>) -> String {
    let addresses: Vec<String> = addresses.map(|it| it.to_string()).collect();
    addresses.join(" and ")
}

/// Returns whether new addresses must be chosen for a claim. This is so if a node has a range that contains an address
/// of the claim. But a claim that a pod has used, or that asked for certain addresses, always keeps its addresses.
fn is_to_choose_again(claim: &Claim, cx: &Context) -> bool {
    let is_any = claim.spec.as_ref().is_ok_and(|it| it.addresses.is_empty());
    let is_unused = claim.is_unused() && !cx.allocations.has_block_of(&claim.name);
    let entry = cx.allocations.claims.get(&claim.name);
    let mut cidrs = entry.into_iter().flat_map(ClaimEntry::cidrs);
    is_any && is_unused && cidrs.any(|cidr| cx.allocations.conflict_with_claim(&cidr).is_some())
}

/// Returns how much is left of the pool's cooldown for the addresses of a deleted claim. No other pod gets the
/// addresses before the cooldown is over.
fn cooldown_left(claim: &Claim, cx: &Context) -> Duration {
    let Some(released_at) = claim.status.released_at else {
        return Duration::ZERO;
    };
    let pool = claim.status.pool.as_deref();
    let pool = pool.and_then(|name| cx.allocations.pools.get(name));
    let seconds = pool.map_or(DEFAULT_COOLDOWN, |it| it.node_view.terms.cooldown_seconds);
    left_after(released_at, seconds, cx)
}

/// Returns how much is left of the `seconds` that began at `released_at`.
fn left_after(released_at: Timestamp, seconds: u32, cx: &Context) -> Duration {
    let until = released_at.as_second().saturating_add(i64::from(seconds));
    let left = until.saturating_sub(cx.now.wall.as_second());
    // The remaining time is at most `seconds`, because the clock may have been set back after the release. Or the clock
    // of the leader that wrote `released_at` may have been ahead.
    let left = left.clamp(0, i64::from(seconds));
    Duration::from_secs(left.unsigned_abs())
}
