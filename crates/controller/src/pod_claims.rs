//! The loop of pods' claims: it creates the IPClaims that pods need and that no user creates.
//!
//! | a pod gets a claim when it is bound to a node, if | the claim |
//! |---|---|
//! | its StatefulSet has sticky addresses | has the name of the pod, and the next pod of this name uses it, too |
//! | it requests addresses (`cadastre.dev/addresses`) that its node's ranges do not contain | is for this pod only |
//!
//! Controller and agent agree on the name of the claim ([`claim_of`](cadastre_api::pod_claim::claim_of)). Everything
//! else is done for every claim, by the loop of claims.
//!
//! # Guarantees
//! - A claim that exists is left as it is, even if the controller did not create it. So users can create the claims of
//!   certain pods in advance.
//! - The pod or its StatefulSet owns the claim. So the garbage collector deletes the claim after its owner.
//! - If the claim of a pod cannot be created, an event reports this to the pod, and no other pod is delayed.
//! - Whether the node's ranges contain the addresses of a pod decides only whether a claim is needed. If the decision
//!   is wrong, because the ranges change meanwhile, the pod waits, and the decision is made again.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, NO_POOL_FOR_CLAIM, REPORT_PAUSE, Regarding};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{ClaimName, ObjectUid, PoolName};
use crate::cluster::objects::{AskedAddresses, ClaimSource, Node, PodClaim, Sticky};
use crate::cluster::request::{
    ApiRequest, ClaimOwner, ClaimOwnerKind, NewClaim, ObjectKind, ObjectSpec,
};
use crate::pools::{PoolPhase, PoolState};
use crate::withdrawals::is_taken_out;
use cadastre_api::{AllocationMode, AssignmentMode, IPClaimSpec, Recall};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// If no pool can serve a claim, the loop looks for a pool again at this interval. Most changes that help, such as a
/// new pool, queue the claim sooner.
const NO_POOL_PAUSE: Duration = Duration::from_secs(30);

/// The state of the loop that creates claims for pods.
#[derive(Clone, Debug, Default)]
pub struct PodClaimLoop {
    /// Claims that a pod has named, and claims that are gone
    pub queue: Queue<ClaimName>,
    requests: InFlight<ClaimName>,
    /// Claims of sticky pods for which there is no pool
    without_pool: BTreeMap<ClaimName, PodReport>,
}

/// The last event that reported to a pod why its claim is not created.
#[derive(Clone, Debug)]
pub(crate) struct PodReport {
    /// UID of the pod. For a later pod of the same name, an event is emitted at once
    pub pod: ObjectUid,
    at: Duration,
}

impl PodReport {
    /// Emits an event about the pod with the text `note`, but not if the last event (`before`) is about the same pod
    /// and younger than [`REPORT_PAUSE`]. Returns the last event.
    pub(crate) fn emit(
        before: Option<&Self>,
        pod: &PodClaim,
        note: impl FnOnce() -> String,
        cx: &mut Context,
    ) -> Self {
        let now = cx.now.mono;
        let recent = before.filter(|it| it.pod == pod.uid && now < it.at + REPORT_PAUSE);
        if recent.is_none() {
            let event = EventRecord::warning(regarding(pod), NO_POOL_FOR_CLAIM, note());
            cx.reports.push(event);
        }
        PodReport {
            pod: pod.uid.clone(),
            at: recent.map_or(now, |it| it.at),
        }
    }
}

impl Loop for PodClaimLoop {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::PodClaim { name } = answer.purpose {
            self.requests.answered(name, answer);
            self.queue.add(name.clone());
        }
        AffectedLoops::default()
    }
}

impl PodClaimLoop {
    /// Queues the claims for which there was no pool. The caller calls this when pools have changed.
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
        let (Some(pod), None) = (pod, cx.cache.claims.get(name)) else {
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
                // The watch has not delivered the Node yet, or the Node is gone and its pod will be deleted, too.
                return KeyDecision::Later(cx.now.next_check());
            };
            let claim = match &pod.source {
                ClaimSource::User | ClaimSource::IpamClaim => return KeyDecision::Done,
                ClaimSource::Addresses(asked) if has_addresses(node, asked, cx) => {
                    // The node may lose the addresses before the pod gets them, so the loop checks again later.
                    return KeyDecision::Later(cx.now.next_check());
                }
                ClaimSource::Addresses(asked) => claim_of_addresses(pod, asked),
                ClaimSource::Sticky(sticky) => match pool_of(node, sticky, cx) {
                    Some(pool) => claim_of_ordinal(&pool, sticky),
                    None => {
                        return KeyDecision::Later(self.without_pool(name, pod, sticky, cx));
                    }
                },
            };
            let claim = ObjectSpec::Claim(Box::new(claim));
            ApiRequest::Create(name.clone().into(), claim)
        };
        self.without_pool.remove(name);
        self.requests.send(name.clone());
        KeyDecision::Send(request, Purpose::PodClaim { name: name.clone() })
    }

    /// Emits an event that no pool serves the pod's claim, at most once per pod and [`REPORT_PAUSE`]. Returns the
    /// monotonic time of the next check.
    fn without_pool(
        &mut self,
        name: &ClaimName,
        pod: &PodClaim,
        sticky: &Sticky,
        cx: &mut Context,
    ) -> Duration {
        let note = || why_no_pool(name, pod, sticky);
        let report = PodReport::emit(self.without_pool.get(name), pod, note, cx);
        self.without_pool.insert(name.clone(), report);
        cx.now.mono + NO_POOL_PAUSE
    }
}

/// Returns the oldest pod for which the claim is to be created. This pod is bound to a node and has no addresses yet.
pub(crate) fn pod_of<'a>(name: &ClaimName, cache: &'a ClusterCache) -> Option<&'a PodClaim> {
    let mut pods = cache.pods.of_claim(name).into_iter();
    pods.find(|pod| {
        let is_its = matches!(
            pod.source,
            ClaimSource::Sticky(_) | ClaimSource::Addresses(_)
        );
        pod.node.is_some() && is_its && !pod.is_served()
    })
}

/// Returns the pod as the object of an event.
pub(crate) fn regarding(pod: &PodClaim) -> Regarding {
    let namespace = pod
        .claim
        .split_once('/')
        .map_or("", |(namespace, _)| namespace);
    let name = format!("{namespace}/{}", pod.pod);
    Regarding::new(ObjectKind::Pod, name, &pod.uid)
}

/// Returns whether the pod needs no claim. This is so if the ranges of the node contain the addresses, and the node's
/// agent either assigns the addresses without a claim or says why it cannot.
fn has_addresses(node: &Node, asked: &AskedAddresses, cx: &Context) -> bool {
    let is_open = |addr: &Addr| {
        let host = Cidr::host(*addr);
        let single = cx.allocations.blocks.get(&host);
        let block = single.or_else(|| cx.allocations.block_around(&host));
        let is_leaving = block.is_some_and(|it| it.recall == Some(Recall::Drain));
        let is_claimed = cx.allocations.claims.of(&host).is_some();
        !is_leaving && !is_claimed && !is_taken_out(&node.name, &host, cx)
    };
    is_in_ranges(node, asked, cx) && asked.addresses.iter().all(is_open)
}

/// Returns whether the podCIDRs and blocks of the node contain the addresses. Blocks of claims do not count.
pub(crate) fn is_in_ranges(node: &Node, asked: &AskedAddresses, cx: &Context) -> bool {
    let is_in_podcidr = |addr| node.pod_cidrs.iter().any(|it| it.contains_addr(addr));
    let is_in_block = |addr| {
        let host = Cidr::host(addr);
        let is_claimed = cx.allocations.claims.of(&host).is_some();
        let single = cx.allocations.blocks.get(&host).filter(|_| !is_claimed);
        let block = single.or_else(|| cx.allocations.block_around(&host));
        block.is_some_and(|it| it.owner.uid == node.uid)
    };
    let mut all = asked.addresses.iter();
    all.all(|addr| is_in_podcidr(*addr) || is_in_block(*addr))
}

/// Returns the pool from which the claim gets its addresses. If the pod names pools, this is the first of them that can
/// serve claims. Otherwise it is the best pool that allocates blocks to the pod's node and serves every pod.
fn pool_of(node: &Node, sticky: &Sticky, cx: &Context) -> Option<PoolName> {
    let pools = &cx.allocations.pools;
    if !sticky.pools.is_empty() {
        let mut named = sticky.pools.iter();
        let fits = |name: &&PoolName| pools.get(*name).is_some_and(serves_claims);
        return named.find(fits).cloned();
    }
    let ledger = &cx.allocations.ledger;
    let ranked = pools.choices(AllocationMode::Blocks, node, ledger, |_| false);
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

/// Returns whether claims may use the pool: it allocates blocks, serves all namespaces and is not being deleted.
pub(crate) fn serves_claims(pool: &PoolState) -> bool {
    pool.allocation_mode == AllocationMode::Blocks
        && pool.terms.namespaces.specificity() == 0
        && pool.phase != PoolPhase::Terminating
}

fn claim_of_ordinal(pool: &PoolName, sticky: &Sticky) -> NewClaim {
    let owner = ClaimOwner {
        kind: ClaimOwnerKind::StatefulSet,
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

fn claim_of_addresses(pod: &PodClaim, asked: &AskedAddresses) -> NewClaim {
    NewClaim {
        spec: IPClaimSpec {
            addresses: asked.addresses.iter().map(Addr::to_string).collect(),
            ..IPClaimSpec::default()
        },
        owner: Some(ClaimOwner {
            kind: ClaimOwnerKind::Pod,
            name: pod.pod.clone(),
            uid: pod.uid.clone(),
        }),
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
