//! The leak loop: it finds addresses in use on live nodes whose pods are gone or have finished.
//!
//! An agent reports addresses whose pods it has not seen for a while (`orphans` in the status). An address is released
//! only after two proofs. The controller provides the first proof, which has three parts:
//! - In the cache of all pods, the pod's UID has been unknown or finished for longer than a grace period.
//! - No cached pod reports the address.
//! - A consistent list of the pods bound to the node confirms the first two parts.
//!
//! After that, the controller lists the address in the node's NodeSubnet (`leakCandidates`). The agent provides the
//! second proof by querying the container runtime: the sandbox is gone. Without the second proof the agent keeps the
//! address.
//!
//! A user may name addresses in an annotation of the NodeSubnet (`cadastre.dev/release`). For these addresses there is
//! no grace period, but both proofs are still needed. Addresses of deleted nodes are freed together with their blocks.
//!
//! The controller finds no leak candidates while the list of pods is incomplete. An address without a known pod UID
//! never becomes a leak candidate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{DUPLICATE_ADDRESS, EventRecord, Regarding};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{AgentReport, PodUid, Subnet};
use crate::cluster::request::{ApiRequest, ObjectKind, RequestOutcome};
use cadastre_api::LeakCandidate;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Shortest and longest interval between two comparisons of agents' reports with the pods.
const SCAN_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Shortest interval between two lists of one node's pods. An earlier list would hardly contain anything new.
const LIST_PAUSE: Duration = Duration::from_secs(3);
/// A NodeSubnet lists at most this many leak candidates at once.
const AT_ONCE: usize = 256;

/// An address in use, and the UID of the pod for which it was assigned.
type Orphan = (Addr, PodUid);

/// The queue of the leak loop, and the addresses without a pod that the loop has found.
#[derive(Clone, Debug, Default)]
pub struct Leaks {
    /// How long an address must be without a pod before it can become a leak candidate
    grace: Duration,
    /// Nodes whose pods must be listed, because some of their addresses may have become leak candidates
    pub queue: Queue<NodeName>,
    /// Addresses without a pod, by node. The value is the monotonic time at which the controller first found the
    /// address without a pod
    since: BTreeMap<NodeName, BTreeMap<Orphan, Duration>>,
    /// Monotonic time of the next comparison of agents' reports with the pods
    scan_at: Duration,
    /// Monotonic time of the last list of each node's pods
    listed_at: BTreeMap<NodeName, Duration>,
    /// Addresses that several pods reported at the last comparison. The value is true if several pods also reported the
    /// address at the comparison before the last one
    duplicates: BTreeMap<Addr, bool>,
}

impl Loop for Leaks {
    fn load(&self) -> Load {
        self.queue.load().or_at(Some(self.scan_at))
    }

    /// Returns the next request for a list of a node's pods. If a comparison of agents' reports with the pods is due,
    /// makes the comparison first.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        if self.scan_at <= cx.now.mono && cx.cache.pods.is_complete() {
            self.scan_at = cx.now.mono + (self.grace / 4).clamp(SCAN_PAUSE.0, SCAN_PAUSE.1);
            self.scan(cx);
        }
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    /// Handles a list of a node's pods: decides which addresses become leak candidates.
    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        let Purpose::LeakPods { name, uid } = answer.purpose else {
            return affected;
        };
        let RequestOutcome::Pods(pods, _) = answer.outcome else {
            self.queue.add(name.clone());
            return affected;
        };
        if cx.cache.nodes.get(name).is_none_or(|node| node.uid != *uid) {
            return affected;
        }
        let running = pods.iter().filter(|pod| !pod.finished);
        let running: BTreeSet<PodUid> = running.map(|pod| PodUid::read(&pod.uid)).collect();
        let reported: BTreeSet<Addr> = pods.iter().flat_map(|pod| pod.addresses.clone()).collect();
        let named = cx.cache.subnets.get(name).map(|subnet| named(subnet));
        let named = named.unwrap_or_default();
        let orphans = self.since.get(name).into_iter().flatten();
        let due = orphans.filter(|(orphan, since)| {
            **since + self.grace <= cx.now.mono || named.contains(orphan)
        });
        let due = due.map(|(orphan, _)| *orphan);
        let proven: Vec<Orphan> = due
            .filter(|orphan| is_orphan(*orphan, name, cx))
            .filter(|(addr, pod)| !running.contains(pod) && !reported.contains(addr))
            .collect();
        let all = &mut cx.allocations.leak_candidates;
        let candidates = all.entry(uid.clone()).or_default();
        let before = candidates.len();
        candidates.extend(proven);
        if candidates.len() > before {
            affected.subnets.push(name.clone());
        }
        affected
    }
}

impl Leaks {
    /// Creates the loop. `grace` is how long an address must be without a pod before it can become a leak candidate.
    pub(crate) fn after(grace: Duration) -> Self {
        Leaks {
            grace,
            ..Leaks::default()
        }
    }

    /// Returns the number of addresses without a pod. Also returns the monotonic time since which the oldest of them
    /// has been without a pod.
    pub fn candidates(&self) -> (usize, Option<Duration>) {
        let count = self.since.values().map(BTreeMap::len).sum();
        let oldest = self.since.values().flat_map(BTreeMap::values).min();
        (count, oldest.copied())
    }

    /// Makes the next comparison of reports and pods due at once, because a user waits for its result.
    pub(crate) fn scan_soon(&mut self) {
        self.scan_at = Duration::ZERO;
    }

    fn look(&mut self, name: &NodeName, cx: &mut Context) -> KeyDecision {
        let Some(node) = cx.cache.nodes.get(name) else {
            return KeyDecision::Done;
        };
        if let Some(at) = cx.paused(&ObjectCall::ListPods(name.clone())) {
            return KeyDecision::Later(at);
        }
        self.listed_at.insert(name.clone(), cx.now.mono);
        let (node, name, uid) = (name.clone(), name.clone(), node.uid.clone());
        KeyDecision::Send(
            ApiRequest::ListPodsOf {
                node,
                not_older_than: None,
            },
            Purpose::LeakPods { name, uid },
        )
    }

    /// Compares agents' reports with the cached pods, and queues nodes whose pods have to be listed.
    fn scan(&mut self, cx: &mut Context) {
        let (now, grace) = (cx.now.mono, self.grace);
        let mut before = std::mem::take(&mut self.since);
        let mut live: BTreeSet<ObjectUid> = BTreeSet::new();
        for subnet in cx.cache.subnets.iter() {
            let Some(node) = cx.cache.nodes.get(&subnet.name) else {
                continue;
            };
            let Some(report) = report_of(node, cx.cache) else {
                continue;
            };
            live.insert(node.uid.clone());
            let known = before.remove(&node.name).unwrap_or_default();
            let orphans = report.orphans.iter().filter(|orphan| {
                is_orphan(**orphan, &node.name, cx) && cx.allocations.is_in_range_of(node, orphan.0)
            });
            let orphans: BTreeMap<Orphan, Duration> = orphans
                .map(|orphan| (*orphan, known.get(orphan).copied().unwrap_or(now)))
                .collect();
            if let Some(candidates) = cx.allocations.leak_candidates.get_mut(&node.uid) {
                candidates.retain(|orphan| report.orphans.binary_search(orphan).is_ok());
            }
            let named = named(subnet);
            let candidates = cx.allocations.leak_candidates.get(&node.uid);
            let is_due = |(orphan, since): (&Orphan, &Duration)| {
                let is_new = !candidates.is_some_and(|it| it.contains(orphan));
                (*since + grace <= now || named.contains(orphan)) && is_new
            };
            if orphans.iter().any(is_due) {
                let listed_at = self.listed_at.get(&node.name);
                let at = listed_at.map_or(now, |at| *at + LIST_PAUSE);
                self.queue.add_at(node.name.clone(), at);
            }
            if !orphans.is_empty() {
                self.since.insert(node.name.clone(), orphans);
            }
        }
        cx.allocations
            .leak_candidates
            .retain(|uid, _| live.contains(uid));
        let since = &self.since;
        self.listed_at.retain(|name, _| since.contains_key(name));
        self.report_duplicates(cx);
    }

    /// Reports each address that several pods report now and also reported at the previous comparison.
    fn report_duplicates(&mut self, cx: &mut Context) {
        let before = std::mem::take(&mut self.duplicates);
        for addr in cx.cache.pods.doubled() {
            let is_reported = before.get(addr).copied();
            if is_reported == Some(false)
                && let Some(pool) = cx.allocations.pools.of(&Cidr::host(*addr))
            {
                let about = Regarding::new(ObjectKind::Pool, pool.name.clone(), &pool.uid);
                let note = format!(
                    "several pods report {addr}: find them (kubectl get pods -A -o wide | grep -w {addr}) and delete all but one"
                );
                let report = EventRecord::warning(about, DUPLICATE_ADDRESS, note);
                cx.reports.push(report);
            }
            self.duplicates.insert(*addr, is_reported.is_some());
        }
    }
}

/// Returns the addresses that users asked to release. The grace period does not apply to these addresses.
fn named(subnet: &Subnet) -> BTreeSet<Orphan> {
    let named = subnet.requests.release.iter();
    let named = named.map(|(addr, pod)| (*addr, PodUid::read(pod)));
    named.collect()
}

/// Returns whether the address has no pod, according to the cached pods. This is so if the UID of its pod is known,
/// this pod is gone or has finished, and no pod reports the address.
fn is_orphan((addr, uid): Orphan, node: &NodeName, cx: &Context) -> bool {
    let reported = cx.cache.pods.reports(node, addr) && !Mutation::ReportedAddressSuspected.is_on();
    uid != PodUid::default() && !cx.cache.pods.is_live(uid) && !reported
}

impl AllocationState {
    /// Returns the leak candidates of the node with this UID that the node's agent still reports, at most [`AT_ONCE`].
    pub(crate) fn leak_candidates_of(
        &self,
        uid: &ObjectUid,
        report: Option<&AgentReport>,
    ) -> Vec<LeakCandidate> {
        let Some(report) = report else {
            return Vec::new();
        };
        let all = self.leak_candidates.get(uid).into_iter().flatten();
        let reported = all.filter(|orphan| report.orphans.binary_search(orphan).is_ok());
        let candidates = reported.map(|(addr, uid)| LeakCandidate {
            address: addr.to_string(),
            pod_uid: uid.to_string(),
        });
        candidates.take(AT_ONCE).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Now;
    use crate::cluster::cache::ClusterCache;
    use crate::fixtures::{NOW, cluster_of, in_step, list, pod, pool, rebuilt, subnet};
    use cadastre_daemon::watch::ObjectEvent;

    /// Returns the address `10.0.0.n`, and the UID of a pod that is gone.
    fn orphan(n: u8) -> Orphan {
        let addr = Addr::from(std::net::IpAddr::from([10, 0, 0, n]));
        (addr, PodUid::read(&format!("gone {n}")))
    }

    /// Returns the NodeSubnet of node `n`, whose agent reports an orphan, and a cluster that contains this NodeSubnet.
    fn with_an_orphan() -> (Subnet, ClusterCache) {
        let mut subnet = subnet("n", &["10.0.0.16/28"], 0);
        subnet.report.as_mut().unwrap().orphans = [orphan(17)].into();
        let pools = vec![pool("p", "10.0.0.0/24")];
        let mut cache = cluster_of(pools, vec![subnet.clone()]);
        let asked = NOW.mono;
        cache.pods.change(ObjectEvent::Restarted { asked });
        cache.pods.change(ObjectEvent::Listed);
        (subnet, cache)
    }

    #[test]
    fn an_address_that_any_pod_reports_is_no_orphan() {
        let (_, mut cache) = with_an_orphan();
        for is_reported in [false, true] {
            if is_reported {
                let pod = pod(1, &["10.0.0.17"]);
                cache.pods.change(ObjectEvent::Applied(pod));
            }
            let next = |cx: &mut Context| Leaks::default().next(cx);
            let request = in_step(&cache, &mut rebuilt(&cache), NOW, next);
            assert_eq!(request.is_some(), !is_reported);
        }
    }

    #[test]
    fn pods_of_one_node_are_not_listed_again_at_once() {
        let (_, cache) = with_an_orphan();
        let mut allocations = rebuilt(&cache);
        let mut leaks = Leaks::default();
        let mut lists = |after: Duration| {
            let mono = NOW.mono + after;
            in_step(&cache, &mut allocations, Now { mono, ..NOW }, |cx| {
                // Here a user asks for the scan each time, so that only the pause between two lists can prevent the
                // next list.
                leaks.scan_soon();
                leaks.next(cx).is_some()
            })
        };
        assert!(lists(Duration::ZERO));
        assert!(!lists(Duration::from_millis(100)));
        assert!(!lists(LIST_PAUSE / 2));
        assert!(lists(LIST_PAUSE));
    }

    #[test]
    fn a_candidate_that_the_agent_no_longer_reports_is_forgotten() {
        let (mut subnet, mut cache) = with_an_orphan();
        let mut allocations = rebuilt(&cache);
        let mut leaks = Leaks::after(Duration::from_secs(60));
        for n in 17..25 {
            subnet.version += 1;
            subnet.report.as_mut().unwrap().orphans = [orphan(n)].into();
            list(&mut cache.subnets, vec![subnet.clone()]);
            let candidates = allocations.leak_candidates.entry("n".into());
            candidates.or_default().insert(orphan(n));
            in_step(&cache, &mut allocations, NOW, |cx| leaks.scan(cx));
            let candidates = &allocations.leak_candidates["n"];
            assert_eq!(candidates.iter().collect::<Vec<_>>(), [&orphan(n)]);
        }
    }
}
