//! The loop of exhausted nodes: it marks nodes that have no free address for another pod.
//!
//! The node gets the condition `AddressesExhausted`. If one of its pools says `exhaustedNodeTaint: NoSchedule`, the
//! node also gets the taint `cadastre.dev/addresses-exhausted`, so that the scheduler binds no more pods to it.
//!
//! A node is exhausted if both of the following are true. Pools that serve only some pods do not count:
//! - The pods that are already bound to the node need all of its free addresses.
//! - No pool can allocate a further range to the node.
//!
//! The scheduler may bind many new pods before it sees the taint. If the administrator has enabled it, the loop evicts
//! the pods for which the node has no address, one after the other. The controllers of these pods create replacements,
//! which the scheduler does not bind to the tainted node.
//!
//! The loop is level-triggered: it computes condition and taint from the ledger, the agent's report and the cached
//! pods. A pod counts from the moment when it is bound, so the taint does not wait for the report of the agent.
//!
//! # Guarantees
//! - An exhausted node is marked at once. The loop removes the marks (condition and taint) when the node has not been
//!   exhausted for [`RECOVERY`]. Otherwise each address that becomes free could attract many pods.
//! - The loop evicts no pod that has an address, that tolerates the taint, or that no controller would replace.
//! - The loop writes a Node only if a mark has to change. It keeps other taints and conditions.
//! - No decision about addresses depends on the marks. So a late write of an earlier leader does no harm, and the next
//!   watch event corrects it.

mod outlook;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use self::outlook::{Outlook, outlook};
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

/// Minimum age of a pod that is evicted. Without it, a replacement that comes to an exhausted node would itself be
/// evicted at once.
const EVICTION_AGE: Duration = Duration::from_secs(10);

/// Interval between checks of a node that has no free address but can get a further range, while no pod waits. When a
/// pod is bound to the node, the loop checks the node at once.
const UNUSED_PAUSE: Duration = Duration::from_secs(60);

/// The queue of the loop, its requests in flight, and the nodes that may lose their marks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exhaustion {
    /// Names of nodes whose marks may have to change
    pub(crate) queue: Queue<NodeName>,
    requests: InFlight<NodeName>,
    /// Whether pods for which a node has no address are evicted
    evicts: bool,
    /// For each node, the UID of the pod that was evicted last. The watch may not have delivered the deletion yet
    evicted: BTreeMap<NodeName, ObjectUid>,
    /// Marked nodes, each with the monotonic time at which it stopped being exhausted; `None` while it is exhausted
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
            // The watch delivers the Node in any case. A patch of taints fails if the cached taints are outdated.
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
            return KeyDecision::Later(cx.now.next_check());
        }
        let outlook = outlook(node, cx.cache, cx.allocations);
        let surplus = match &outlook {
            Outlook::Exhausted { surplus, .. } if self.evicts => *surplus,
            _ => 0,
        };
        // The pool may lose its last free range to another node without any event about this node.
        let again = match outlook {
            Outlook::CanGrow { has_waiting: true } => Some(cx.now.next_check()),
            Outlook::CanGrow { has_waiting: false } => Some(cx.now.check_within(UNUSED_PAUSE)),
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
        self.requests.send(name.clone());
        KeyDecision::Send(request, purpose)
    }

    /// Returns the eviction of a pod for which the node has no address. If no pod may be evicted now, the error is the
    /// monotonic time of the next attempt, if any. A refused eviction does not delay the evictions of other pods.
    fn evict(
        &mut self,
        node: &Node,
        cx: &Context,
    ) -> Result<(ApiRequest, Purpose), Option<Duration>> {
        let pods = cx.cache.pods.evictable(&node.name);
        // Until the watch delivers the last deletion, too many pods seem to wait.
        let last = self.evicted.get(&node.name);
        if pods.iter().any(|pod| Some(&pod.uid) == last) {
            return Err(Some(cx.now.next_check()));
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

    /// Returns the marks that the node should have now. If the node stopped being exhausted less than [`RECOVERY`] ago,
    /// the error is the monotonic time until which it keeps its present marks.
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

/// Returns the next write that corrects a mark. The taint comes before the condition, because only the taint keeps new
/// pods off the node. Also returns the end of the back-off if a needed write has failed.
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
    NodeTaint::is_any_of_exhaustion(&node.taints)
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
