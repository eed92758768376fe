//! The loop of exhausted nodes: it tells the scheduler and users which nodes have no free address for another pod.
//!
//! Such a node gets the condition `AddressesExhausted`. If one of its pools says `exhaustedNodeTaint: NoSchedule`, the
//! node also gets the taint `cadastre.dev/addresses-exhausted`, so that the scheduler binds no further pods to it.
//!
//! A node is exhausted if both of the following are true. Only pools count from which every pod gets addresses:
//! - The node has no free address that is not needed for a pod that is bound to the node already.
//! - No pool can allocate a further range to the node.
//!
//! The scheduler decides about many new pods at once, before it sees the taint. If the administrator wants it, the loop
//! evicts the pods for which the node has no address, one after the other. Their controllers create other pods, which
//! the scheduler does not bind to the node any more.
//!
//! The loop is level-triggered: it computes both from the ledger, the agent's report and the cached pods. A pod counts
//! from the moment when it is bound, so the taint does not wait for the report of the agent.
//!
//! # Guarantees
//! - A node is marked as soon as it is exhausted. The marks are removed only after it has not been exhausted for
//!   [`RECOVERY`], so that the scheduler does not bind many pods for a single free address again and again.
//! - No pod with an address is evicted, and no pod that tolerates the taint or that no controller would replace.
//! - Nothing is written while a node stays as it is. Other taints and conditions of the node stay.
//! - No decision about addresses depends on the marks. So a late write of an earlier leader does no harm, and the next
//!   watch event corrects it.

mod outlook;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use self::outlook::{Outlook, outlook};
use super::context::IN_USE_PAUSE;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Evictable, Node, NodeTaint, Text};
use crate::cluster::request::{
    ApiRequest, ExhaustedChange, KnownObject, RequestOutcome, TaintsChange,
};
use cadastre_core::mutation::Mutation;

/// How long a node must not have been exhausted before its marks are removed.
const RECOVERY: Duration = Duration::from_secs(10);

/// A pod is evicted only if it was created at least this long ago. So if its replacement comes to an exhausted node,
/// too, it is not replaced again at once.
const EVICTION_AGE: Duration = Duration::from_secs(10);

/// A node without a free address and without a pod that waits for one is checked again at this interval. If a pod is
/// bound to it, it is checked at once.
const UNUSED_PAUSE: Duration = Duration::from_secs(60);

/// The queue of the loop, its requests in flight, and the nodes that may lose their marks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exhaustion {
    /// Names of nodes whose marks may have to change
    pub(crate) queue: Queue<NodeName>,
    requests: InFlight<NodeName>,
    /// Whether pods for which a node has no address are evicted
    evicts: bool,
    /// For each node, the pod that was evicted last. The watch may not have delivered its deletion yet
    evicted: BTreeMap<NodeName, ObjectUid>,
    /// The marked nodes, each with the monotonic time since which it is not exhausted any more, if so
    marked: BTreeMap<NodeName, Option<Duration>>,
}

/// The marks that a node should have.
#[derive(Clone, Debug)]
struct Marks {
    /// The message of the condition; `None` if the node should not have the condition
    message: Option<Text>,
    is_tainted: bool,
}

impl Loop for Exhaustion {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::Taints { name }
        | Purpose::Exhausted { name }
        | Purpose::Evict { name, .. } = answer.purpose
        {
            let is_eviction = matches!(answer.purpose, Purpose::Evict { .. });
            if is_eviction && !matches!(answer.outcome, RequestOutcome::Gone) {
                self.evicted.remove(name);
            }
            // The watch delivers the Node whatever the answer was, and the next write tests what the cache has.
            self.requests.forget(name);
            self.queue.add(name.clone());
        }
        AffectedLoops::default()
    }
}

impl Exhaustion {
    pub(crate) fn new(evicts: bool) -> Self {
        Exhaustion {
            evicts,
            ..Exhaustion::default()
        }
    }

    /// Queues all marked nodes, because ranges may have become free.
    pub(crate) fn requeue(&mut self) {
        for name in self.marked.keys() {
            self.queue.add(name.clone());
        }
    }

    /// Queues all nodes, because pools have changed.
    pub(crate) fn requeue_all(&mut self, cache: &ClusterCache) {
        for node in cache.nodes.iter() {
            self.queue.add(node.name.clone());
        }
    }

    /// Returns the number of nodes that are exhausted.
    pub(crate) fn count(&self) -> usize {
        self.marked.values().filter(|since| since.is_none()).count()
    }

    fn look(&mut self, name: &NodeName, cx: &mut Context) -> KeyDecision {
        let Some(node) = cx.cache.nodes.get(name).filter(|node| !node.deleting) else {
            self.marked.remove(name);
            self.evicted.remove(name);
            return KeyDecision::Done;
        };
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        // Until all pods and the reports of all agents are known, the marks stay as they are.
        if !cx.cache.pods.is_complete() || cx.allocations.in_agent_grace {
            return KeyDecision::Later(cx.now.mono + IN_USE_PAUSE);
        }
        let outlook = outlook(node, cx.cache, cx.allocations);
        let surplus = match &outlook {
            Outlook::Exhausted { surplus, .. } if self.evicts => *surplus,
            _ => 0,
        };
        // The pool may lose its last free range to another node without any event about this node.
        let again = match outlook {
            Outlook::CanGrow { has_waiting: true } => Some(cx.now.mono + IN_USE_PAUSE),
            Outlook::CanGrow { has_waiting: false } => Some(cx.now.mono + UNUSED_PAUSE),
            Outlook::Free | Outlook::Exhausted { .. } => None,
        };
        let marks = match self.marks(node, outlook, cx) {
            Ok(marks) => marks,
            Err(at) => return KeyDecision::Later(at),
        };
        let (found, paused) = next_write(node, &marks, cx);
        let mut at = again.into_iter().chain(paused).min();
        let found = found.or_else(|| {
            let found = (surplus > 0 && has_taint(node)).then(|| self.evict(node, cx))?;
            found
                .map_err(|later| at = at.into_iter().chain(later).min())
                .ok()
        });
        let Some((request, purpose)) = found else {
            return at.map_or(KeyDecision::Done, KeyDecision::Later);
        };
        self.requests.send(name.clone(), ());
        KeyDecision::Send(request, purpose)
    }

    /// Returns the eviction of one of the pods for which the node has no address. The error is the monotonic time at
    /// which there may be one to evict. A pod whose eviction is refused does not delay the evictions of other pods.
    fn evict(
        &mut self,
        node: &Node,
        cx: &Context,
    ) -> Result<(ApiRequest, Purpose), Option<Duration>> {
        let pods = cx.cache.pods.evictable(&node.name);
        // Until the watch delivers the last deletion, too many pods seem to wait.
        let last = self.evicted.get(&node.name);
        if pods.iter().any(|pod| Some(&pod.uid) == last) {
            return Err(Some(cx.now.mono + IN_USE_PAUSE));
        }
        let due_at = |pod: &Evictable| {
            let age = cx.now.wall.as_second().saturating_sub(pod.created);
            let age = Duration::from_secs(age.max(0).unsigned_abs());
            match EVICTION_AGE.saturating_sub(age) {
                Duration::ZERO => cx.paused(&ObjectCall::EvictPod(pod.uid.clone())),
                left => Some(cx.now.mono + left),
            }
        };
        let Some(pod) = pods.iter().find(|pod| due_at(pod).is_none()) else {
            return Err(pods.iter().filter_map(|pod| due_at(pod)).min());
        };
        let (name, pod_uid) = (node.name.clone(), pod.uid.clone());
        self.evicted.insert(name.clone(), pod_uid.clone());
        let request = ApiRequest::Evict(KnownObject {
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            version: pod.version,
        });
        Ok((request, Purpose::Evict { name, pod_uid }))
    }

    /// Returns the marks that the node should have now. The error is the monotonic time until which the node keeps the
    /// marks that it has, because it was exhausted a moment ago.
    fn marks(&mut self, node: &Node, outlook: Outlook, cx: &Context) -> Result<Marks, Duration> {
        if let Outlook::Exhausted { pools, .. } = outlook {
            self.marked.insert(node.name.clone(), None);
            let names: Vec<String> = pools.iter().map(|it| format!("\"{}\"", it.name)).collect();
            let message = format!(
                "the node has no free address for another pod, and cannot get more addresses: kubectl get ippools.cadastre.dev (pools: {}). Add ranges to a pool, or delete pods",
                names.join(", ")
            );
            return Ok(Marks {
                message: Some(message.into()),
                is_tainted: pools.iter().any(|it| it.taints_nodes),
            });
        }
        let is_marked = node.exhausted.is_some() || has_taint(node);
        if is_marked && Mutation::ExhaustionNotLifted.is_on() {
            return Ok(Marks {
                message: node.exhausted.clone(),
                is_tainted: has_taint(node),
            });
        }
        if is_marked {
            let since = self.marked.entry(node.name.clone()).or_default();
            let until = *since.get_or_insert(cx.now.mono) + RECOVERY;
            if until > cx.now.mono {
                return Err(until);
            }
        } else {
            self.marked.remove(&node.name);
        }
        Ok(Marks {
            message: None,
            is_tainted: false,
        })
    }
}

/// Returns the write after which the node has one more of the marks that it should have. Also returns when a write may
/// be repeated that has failed. The taint comes first, because the scheduler waits for it.
fn next_write(
    node: &Node,
    marks: &Marks,
    cx: &Context,
) -> (Option<(ApiRequest, Purpose)>, Option<Duration>) {
    let mut paused = None;
    if has_taint(node) != marks.is_tainted {
        paused = cx.paused(&ObjectCall::SetTaints(node.name.clone()));
        if paused.is_none() {
            let name = node.name.clone();
            let request = ApiRequest::SetTaints(changed_taints(node, marks.is_tainted));
            return (Some((request, Purpose::Taints { name })), None);
        }
    }
    if node.exhausted != marks.message {
        let until = cx.paused(&ObjectCall::SetExhausted(node.name.clone()));
        if until.is_none() {
            let name = node.name.clone();
            let request = ApiRequest::SetExhausted(ExhaustedChange {
                name: name.clone(),
                uid: node.uid.clone(),
                message: marks.message.clone(),
                was_true: node.exhausted.is_some(),
            });
            return (Some((request, Purpose::Exhausted { name })), None);
        }
        paused = paused.into_iter().chain(until).min();
    }
    (None, paused)
}

fn has_taint(node: &Node) -> bool {
    node.taints.iter().any(NodeTaint::is_of_exhaustion)
}

fn changed_taints(node: &Node, is_tainted: bool) -> TaintsChange {
    let others = node.taints.iter().filter(|it| !it.is_of_exhaustion());
    let others = others.filter(|_| !Mutation::OthersTaintsDropped.is_on());
    let own = is_tainted.then(NodeTaint::exhausted);
    TaintsChange {
        name: node.name.clone(),
        uid: node.uid.clone(),
        before: node.taints.clone(),
        after: others.cloned().chain(own).collect(),
    }
}
