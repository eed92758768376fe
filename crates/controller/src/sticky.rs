//! The loop of sticky addresses: creates the IPClaims of the pods of StatefulSets.
//!
//! A pod of a StatefulSet with sticky addresses names the claim that has the pod's own name
//! ([`named_claim`](cadastre_api::sticky::named_claim)). If there is no such claim when the pod is bound to a node,
//! this loop creates it. The loop of claims does the rest, as for every claim.
//!
//! # Guarantees
//! - A claim that exists is left as it is, whoever created it. So users can create the claims of certain pods in
//!   advance.
//! - A claim is created only for a pod that a StatefulSet controls, and this StatefulSet owns the claim. So the garbage
//!   collector deletes the claim after the StatefulSet.
//! - If the claim of a pod cannot be created, an event of the pod says so. No other pod has to wait because of that.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use super::context::IN_USE_PAUSE;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, NO_POOL_FOR_CLAIM, REPORT_PAUSE, Regarding};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{ClaimName, ObjectUid, PoolName};
use crate::cluster::objects::{Node, PodClaim, Sticky};
use crate::cluster::request::{ApiRequest, ClaimOwner, NewClaim, ObjectKind, ObjectSpec};
use crate::pools::{PoolPhase, PoolState};
use cadastre_api::{AllocationMode, AssignmentMode, IPClaimSpec};
use cadastre_core::mutation::Mutation;

/// Interval at which the loop looks again for a pool. Most changes that help, such as a new pool, queue the claim
/// sooner.
const NO_POOL_PAUSE: Duration = Duration::from_secs(30);

/// The queue of the loop of sticky addresses, and the claims for which it found no pool.
#[derive(Debug, Default)]
pub struct StickyLoop {
    /// Claims that a pod has named, or that are gone
    pub queue: Queue<ClaimName>,
    requests: InFlight<ClaimName>,
    /// Claims for which there is no pool
    without_pool: BTreeMap<ClaimName, Report>,
}

/// When a pod was last told that no pool can serve its claim.
#[derive(Debug)]
struct Report {
    /// The pod. A later pod of the same name is told at once
    pod: ObjectUid,
    at: Duration,
}

impl Loop for StickyLoop {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::Sticky { name } = answer.purpose {
            self.requests.answered(name, answer);
            self.queue.add(name.clone());
        }
        AffectedLoops::default()
    }
}

impl StickyLoop {
    /// Queues the claims for which there was no pool, because pools have changed.
    pub(crate) fn requeue(&mut self) {
        for name in self.without_pool.keys() {
            self.queue.add(name.clone());
        }
    }

    fn look(&mut self, name: &ClaimName, cx: &mut Context) -> KeyDecision {
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        let pod = pod_of(name, cx.cache);
        let (Some((pod, sticky)), None) = (pod, cx.cache.claims.get(name)) else {
            self.requests.forget(name);
            self.without_pool.remove(name);
            return KeyDecision::Done;
        };
        let is_read = self.requests.is_to_read(name);
        let call = if is_read {
            ObjectCall::ReadClaim(name.clone())
        } else {
            ObjectCall::CreateClaim(name.clone())
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        let request = if is_read {
            ApiRequest::Read(ObjectKind::Claim, name.clone().into())
        } else {
            let node = pod.node.as_ref().and_then(|it| cx.cache.nodes.get(it));
            let Some(node) = node else {
                // The watch has not shown the Node yet, or the Node is gone and the pod will follow.
                return KeyDecision::Later(cx.now.mono + IN_USE_PAUSE);
            };
            let Some(pool) = pool_of(node, sticky, cx) else {
                let again = self.without_pool(name, pod, sticky, cx);
                return KeyDecision::Later(again);
            };
            let claim = ObjectSpec::Claim(Box::new(new_claim(&pool, sticky)));
            ApiRequest::Create(name.clone().into(), claim)
        };
        self.without_pool.remove(name);
        self.requests.send(name.clone(), ());
        KeyDecision::Send(request, Purpose::Sticky { name: name.clone() })
    }

    /// Tells the pod that there is no pool for its claim, unless it was told a short time ago. Returns when to look
    /// again.
    fn without_pool(
        &mut self,
        name: &ClaimName,
        pod: &PodClaim,
        sticky: &Sticky,
        cx: &mut Context,
    ) -> Duration {
        let now = cx.now.mono;
        let report = Report {
            pod: sticky.pod_uid.clone(),
            at: now,
        };
        let is_due = match self.without_pool.entry(name.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(report);
                true
            }
            Entry::Occupied(mut entry) => {
                let before = entry.get();
                let is_due = before.pod != report.pod || before.at + REPORT_PAUSE <= now;
                if is_due {
                    entry.insert(report);
                }
                is_due
            }
        };
        if is_due {
            let about = regarding(name, pod, sticky);
            let note = why_no_pool(name, pod, sticky);
            cx.reports
                .push(EventRecord::warning(about, NO_POOL_FOR_CLAIM, note));
        }
        now + NO_POOL_PAUSE
    }
}

/// Returns the oldest pod for which the claim is to be created: the pod names the claim by the pod's own name, and is
/// bound to a node.
pub(crate) fn pod_of<'a>(
    name: &ClaimName,
    cache: &'a ClusterCache,
) -> Option<(&'a PodClaim, &'a Sticky)> {
    let pods = cache.pods.of_claim(name).into_iter();
    let mut bound = pods.filter(|pod| pod.node.is_some());
    bound.find_map(|pod| Some((pod, pod.sticky.as_deref()?)))
}

/// Returns the pod as the object of an event.
pub(crate) fn regarding(name: &ClaimName, pod: &PodClaim, sticky: &Sticky) -> Regarding {
    let namespace = name.split_once('/').map_or("", |(namespace, _)| namespace);
    let pod = format!("{namespace}/{}", pod.pod);
    Regarding::new(ObjectKind::Pod, pod, &sticky.pod_uid)
}

/// Returns the pool from which the claim gets its addresses: the first pool that the pod names and that can serve
/// claims. If the pod names none: the best pool that allocates blocks to the pod's node and serves every pod.
fn pool_of(node: &Node, sticky: &Sticky, cx: &Context) -> Option<PoolName> {
    let pools = &cx.allocations.pools;
    if !sticky.pools.is_empty() {
        let mut named = sticky.pools.iter();
        let fits = |name: &&PoolName| pools.get(*name).is_some_and(serves_claims);
        return named.find(fits).cloned();
    }
    let ledger = &cx.allocations.ledger;
    let none_full: BTreeMap<PoolName, bool> = BTreeMap::new();
    let ranked = pools.choices(AllocationMode::Blocks, node, ledger, &none_full);
    let open = ranked.into_iter().filter(|(_, only_by_name)| !only_by_name);
    let mut names = open.map(|(name, _)| name);
    names.find(|name| {
        let serves_every_pod = |it: &PoolState| {
            it.terms.pods.specificity() == 0 && it.node_view.assignment == AssignmentMode::Automatic
        };
        let pool = pools.get(name);
        pool.is_some_and(|it| serves_claims(it) && serves_every_pod(it))
    })
}

/// Returns whether the pool can serve claims, even if it allocates nothing just now.
fn serves_claims(pool: &PoolState) -> bool {
    pool.allocation_mode == AllocationMode::Blocks
        && pool.terms.namespaces.specificity() == 0
        && pool.phase != PoolPhase::Terminating
}

fn new_claim(pool: &PoolName, sticky: &Sticky) -> NewClaim {
    let owner = ClaimOwner {
        name: sticky.owner.clone(),
        uid: sticky.owner_uid.clone(),
    };
    NewClaim {
        spec: IPClaimSpec {
            pool: Some(pool.to_string()),
            addresses: Vec::new(),
            ttl_seconds_after_use: sticky.ttl,
        },
        owner: (!Mutation::StickyClaimNotOwned.is_on()).then_some(owner),
    }
}

fn why_no_pool(name: &ClaimName, pod: &PodClaim, sticky: &Sticky) -> String {
    let wanted = "with allocationMode Blocks and without namespaceSelector";
    if sticky.pools.is_empty() {
        let node = pod.node.as_deref().unwrap_or_default();
        return format!(
            "IPClaim {name} is not created, so the pod gets no address: no pool {wanted} or podSelector serves all pods of node {node}. Create such a pool, or name a pool in the annotation cadastre.dev/pools of the StatefulSet's pod template"
        );
    }
    let named = sticky.pools.join(", ");
    format!(
        "IPClaim {name} is not created, so the pod gets no address: the annotation cadastre.dev/pools ({named}) names no pool {wanted}. Name such a pool in the StatefulSet's pod template"
    )
}
