//! Deletes claims in two cases: some time after the last use of the claim (`spec.ttlSecondsAfterUse`), or with the pod
//! for which the controller created the claim. The garbage collector deletes a claim of the second kind, too, but only
//! when its pod is gone.
//!
//! # Guarantees
//! - A claim is deleted only while no pod names it, no node has its addresses, and the cache has a complete list of
//!   pods. The deletion fails if the claim's object has changed since that decision.
//! - `ttlSecondsAfterUse` counts from `status.releasedAt`, by the wall clock. So the time keeps running when another
//!   controller becomes leader. If the clocks of two leaders differ, the deletion is delayed by at most
//!   `ttlSecondsAfterUse`.
//! - A claim that a pod has just stopped naming stays for at least [`SETTLE`] or `ttlSecondsAfterUse`, whichever is
//!   shorter, even if its last release is old. So if a pod never got the addresses, another pod can still replace it
//!   and use the claim.

#[cfg(test)]
mod tests;

use std::time::Duration;

use jiff::Timestamp;

use super::{ClaimLoop, left_after};
use crate::Context;
use crate::cluster::objects::{Claim, ClaimSource, PodClaim};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind};
use crate::pod_claims::is_in_ranges;
use cadastre_core::mutation::Mutation;

/// The minimum time for which a claim without pods is kept, unless its `ttlSecondsAfterUse` is shorter.
const SETTLE: Duration = Duration::from_secs(60);

/// The time at which an unused claim is to be deleted.
#[derive(Clone, Debug)]
pub(super) struct Expiry {
    /// `status.releasedAt` and `ttlSecondsAfterUse`, from which `at` was computed
    of: (Timestamp, u32),
    /// The monotonic time at which to delete the claim
    at: Duration,
}

impl ClaimLoop {
    /// Returns the request that deletes a claim that the controller has created for the addresses of a pod. The claim
    /// is deleted if the pod is gone, has finished, or has the addresses without the claim.
    pub(super) fn end_with_pod(&mut self, claim: &Claim, cx: &Context) -> Option<ApiRequest> {
        let pods = cx.cache.pods.of_claim(&claim.name);
        let is_needless = claim.status.node.is_none()
            && !cx.allocations.has_block_of(&claim.name)
            && pods.iter().all(|pod| has_addresses_without_claim(pod, cx));
        if claim.deleting || !is_needless || Mutation::ClaimOfGonePodKept.is_on() {
            return None;
        }
        if !cx.cache.pods.is_complete() || cx.allocations.in_agent_grace {
            self.writes.add_at(claim.name.clone(), cx.now.next_check());
            return None;
        }
        Some(ApiRequest::Delete(
            ObjectKind::Claim,
            KnownObject::of(claim),
        ))
    }

    /// If the time `ttlSecondsAfterUse` of the claim has passed, returns the request that deletes the claim. Otherwise
    /// schedules the next check of an unused claim for the end of that time.
    pub(super) fn expire(&mut self, claim: &Claim, cx: &Context) -> Option<ApiRequest> {
        let ttl = claim.spec.as_ref().ok().and_then(|spec| spec.ttl);
        let released_at = claim.status.released_at;
        let since = ttl.zip(released_at).filter(|_| !claim.deleting);
        let Some((ttl, released_at)) = since.filter(|_| is_unused(claim, cx)) else {
            self.expiring.remove(&claim.name);
            return None;
        };
        let now = cx.now.mono;
        let of = (released_at, ttl);
        let known = self.expiring.get(&claim.name).filter(|it| it.of == of);
        let at = known.map_or_else(|| now + time_left(released_at, ttl, cx), |it| it.at);
        self.expiring.insert(claim.name.clone(), Expiry { of, at });
        // While the list of pods is incomplete, a pod that the cache lacks may name the claim.
        let again = if cx.cache.pods.is_complete() {
            at
        } else {
            at.max(cx.now.next_check())
        };
        if again > now {
            self.writes.add_at(claim.name.clone(), again);
            return None;
        }
        Some(ApiRequest::Delete(
            ObjectKind::Claim,
            KnownObject::of(claim),
        ))
    }
}

/// Returns whether the pod needs no claim for the addresses that it asks for. This is so if the pod has addresses, and
/// the ranges of its node contain all addresses that it asks for.
fn has_addresses_without_claim(pod: &PodClaim, cx: &Context) -> bool {
    let node = pod.node.as_ref().and_then(|it| cx.cache.nodes.get(it));
    let (ClaimSource::Addresses(asked), Some(node)) = (&pod.source, node) else {
        return false;
    };
    asked.is_served && is_in_ranges(node, asked, cx)
}

/// Returns whether no pod names the claim and no node has an address of the claim.
fn is_unused(claim: &Claim, cx: &Context) -> bool {
    if Mutation::ClaimExpiresInUse.is_on() {
        return true;
    }
    claim.status.node.is_none()
        && !cx.allocations.has_block_of(&claim.name)
        && cx.cache.pods.of_claim(&claim.name).is_empty()
}

/// Returns for how long a claim is still kept if it becomes unused now.
fn time_left(released_at: Timestamp, ttl: u32, cx: &Context) -> Duration {
    let least = SETTLE.min(Duration::from_secs(ttl.into()));
    left_after(released_at, ttl, cx).max(least)
}
