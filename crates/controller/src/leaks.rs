//! The leak loop: it finds addresses in use on live nodes whose pods are gone or have finished.
//!
//! An agent reports addresses whose pods it has not seen for a while (`orphans` in the status). An address is released
//! only after two proofs. The controller gives the first proof. It has three parts: in the cache of all pods, the pod's
//! UID has been unknown or finished for longer than a grace period; no pod reports the address; and a consistent list
//! of the pods bound to the node confirms both. Then the controller lists the address in the node's NodeSubnet
//! (`leakCandidates`). The agent gives the second proof by asking the container runtime, or it keeps the address.
//!
//! A user may name addresses in an annotation of the NodeSubnet (`cadastre.dev/release`). The grace period does not
//! apply to these, but both proofs are still needed. Addresses of deleted nodes are freed together with their blocks.
//!
//! There are no leak candidates while the list of pods is incomplete. An address without a pod's UID never becomes one.

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
use crate::cluster::objects::{AgentReport, Node, PodUid, Subnet};
use crate::cluster::request::{ApiRequest, ObjectKind, RequestOutcome};
use cadastre_api::LeakCandidate;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Shortest and longest interval between two comparisons of agents' reports with the pods.
const SCAN_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Shortest interval between two lists of one node's pods. A list right after another would prove nothing more.
const LOOK_PAUSE: Duration = Duration::from_secs(3);
/// A NodeSubnet lists at most this many leak candidates at once.
const AT_ONCE: usize = 256;

/// State of the leak loop.
#[derive(Debug, Default)]
pub struct Leaks {
    /// How long an address must be without a pod before it can become a leak candidate
    grace: Duration,
    /// Nodes whose pods are to be listed, because addresses of theirs may have become leak candidates
    pub queue: Queue<NodeName>,
    /// Addresses without a pod, by node, with the monotonic time since when that is known
    since: BTreeMap<NodeName, BTreeMap<(Addr, PodUid), Duration>>,
    scan_at: Duration,
    /// Monotonic time of the last list of a node's pods
    looked_at: BTreeMap<NodeName, Duration>,
    /// Addresses that several pods reported at the last scan. The value is true if the scan before found the same, so
    /// that it is reported already
    doubled: BTreeMap<Addr, bool>,
}

impl Loop for Leaks {
    fn load(&self) -> Load {
        self.queue.load().or_at(Some(self.scan_at))
    }

    /// Returns the next request for a list of a node's pods. Compares agents' reports with the pods first, if that is
    /// due.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        if self.scan_at <= cx.now.mono && cx.cache.pods.is_complete() {
            self.scan_at = cx.now.mono + (self.grace / 4).clamp(SCAN_PAUSE.0, SCAN_PAUSE.1);
            self.scan(cx);
        }
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    /// Handles a list of a node's pods: decides which addresses become leak candidates.
    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let mut noted = AffectedLoops::default();
        let Purpose::LeakPods { name, uid } = answer.purpose else {
            return noted;
        };
        let RequestOutcome::Pods(pods) = answer.outcome else {
            self.queue.add(name.clone());
            return noted;
        };
        if cx.cache.nodes.get(name).is_none_or(|node| node.uid != *uid) {
            return noted;
        }
        let bound: BTreeSet<PodUid> = pods
            .iter()
            .filter(|pod| !pod.finished)
            .map(|pod| PodUid::read(&pod.uid))
            .collect();
        let reported: BTreeSet<Addr> = pods
            .iter()
            .flat_map(|pod| pod.addresses.iter().copied())
            .collect();
        let named = cx.cache.subnets.get(name).map(|subnet| named(subnet));
        let named = named.unwrap_or_default();
        let orphans = self.since.get(name).into_iter().flatten();
        let proven: Vec<(Addr, PodUid)> = orphans
            .filter(|(held, since)| **since + self.grace <= cx.now.mono || named.contains(held))
            .map(|(held, _)| *held)
            .filter(|held| is_orphan(*held, name, cx))
            .filter(|(addr, pod)| !bound.contains(pod) && !reported.contains(addr))
            .collect();
        let asked = cx
            .allocations
            .leak_candidates
            .entry(uid.clone())
            .or_default();
        let before = asked.len();
        asked.extend(proven);
        if asked.len() > before {
            noted.subnets.push(name.clone());
        }
        noted
    }
}

impl Leaks {
    /// Creates the loop with this grace period.
    pub(crate) fn after(grace: Duration) -> Self {
        Leaks {
            grace,
            ..Leaks::default()
        }
    }

    /// Returns the number of addresses without a pod, and the monotonic time since when the oldest has been without
    /// one.
    pub fn candidates(&self) -> (usize, Option<Duration>) {
        let count = self.since.values().map(BTreeMap::len).sum();
        let oldest = self.since.values().flat_map(BTreeMap::values).min();
        (count, oldest.copied())
    }

    /// Makes the next scan due at once, because a user waits for its result.
    pub(crate) fn look_soon(&mut self) {
        self.scan_at = Duration::ZERO;
    }

    fn look(&mut self, name: &NodeName, cx: &mut Context) -> KeyDecision {
        let Some(node) = cx.cache.nodes.get(name) else {
            return KeyDecision::Done;
        };
        if let Some(at) = cx.paused(&ObjectCall::ListPods(name.clone())) {
            return KeyDecision::Later(at);
        }
        self.looked_at.insert(name.clone(), cx.now.mono);
        let (node, name, uid) = (name.clone(), name.clone(), node.uid.clone());
        KeyDecision::Send(
            ApiRequest::ListPodsOf { node },
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
            let orphans: BTreeMap<(Addr, PodUid), Duration> = report
                .orphans
                .iter()
                .filter(|held| {
                    is_orphan(**held, &node.name, cx) && is_own(held.0, node, cx.allocations)
                })
                .map(|held| (*held, known.get(held).copied().unwrap_or(now)))
                .collect();
            if let Some(asked) = cx.allocations.leak_candidates.get_mut(&node.uid) {
                asked.retain(|held| report.orphans.binary_search(held).is_ok());
            }
            let named = named(subnet);
            let asked = cx.allocations.leak_candidates.get(&node.uid);
            let is_new = |held: &(Addr, PodUid)| !asked.is_some_and(|asked| asked.contains(held));
            let due = |(held, since): (&(Addr, PodUid), &Duration)| {
                (*since + grace <= now || named.contains(held)) && is_new(held)
            };
            if orphans.iter().any(due) {
                let looked_at = self.looked_at.get(&node.name);
                let at = looked_at.map_or(now, |at| *at + LOOK_PAUSE);
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
        self.looked_at.retain(|name, _| since.contains_key(name));
        self.report_duplicates(cx);
    }

    /// Reports addresses that several pods reported in two scans in a row.
    fn report_duplicates(&mut self, cx: &mut Context) {
        let before = std::mem::take(&mut self.doubled);
        for addr in cx.cache.pods.doubled() {
            let told = before.get(addr).copied();
            if told == Some(false) {
                let range = Cidr::host(*addr);
                if let Some(pool) = cx.allocations.pools.of(&range) {
                    let about = Regarding::new(ObjectKind::Pool, pool.name.clone(), &pool.uid);
                    let note = format!(
                        "several pods report {addr}: find them (kubectl get pods -A -o wide | grep -w {addr}) and delete all but one"
                    );
                    cx.reports
                        .push(EventRecord::warning(about, DUPLICATE_ADDRESS, note));
                }
            }
            self.doubled.insert(*addr, told.is_some());
        }
    }
}

/// Returns the addresses that users asked to release without the grace period.
fn named(subnet: &Subnet) -> BTreeSet<(Addr, PodUid)> {
    let named = subnet.requests.release.iter();
    named
        .map(|(addr, pod)| (*addr, PodUid::read(pod)))
        .collect()
}

/// Returns whether the address is an orphan: the UID is known, the pod with that UID is gone or has finished, and no
/// pod reports the address.
fn is_orphan((addr, uid): (Addr, PodUid), node: &NodeName, cx: &Context) -> bool {
    let reported = cx.cache.pods.reports(node, addr) && !Mutation::ReportedAddressSuspected.is_on();
    uid != PodUid::default() && !cx.cache.pods.is_live(uid) && !reported
}

/// Returns whether the address lies in a range of the node.
fn is_own(addr: Addr, node: &Node, allocations: &AllocationState) -> bool {
    let mut blocks = allocations.blocks.of(&node.uid);
    blocks.any(|entry| entry.cidr.contains_addr(addr))
        || allocations
            .pod_cidrs(node)
            .any(|cidr| cidr.contains_addr(addr))
}

impl AllocationState {
    /// Returns the leak candidates of the node with this UID that its agent still reports, at most [`AT_ONCE`].
    pub(crate) fn leak_candidates_of(
        &self,
        uid: &ObjectUid,
        report: Option<&AgentReport>,
    ) -> Vec<LeakCandidate> {
        let Some(report) = report else {
            return Vec::new();
        };
        let asked = self.leak_candidates.get(uid).into_iter().flatten();
        let still = |held: &&(Addr, PodUid)| report.orphans.binary_search(held).is_ok();
        asked
            .filter(still)
            .take(AT_ONCE)
            .map(|(addr, uid)| LeakCandidate {
                address: addr.to_string(),
                pod_uid: uid.to_string(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Now;
    use crate::cluster::cache::ClusterCache;
    use crate::cluster::objects::Pod;
    use crate::demand::tests::{NOW, list, node, objects, pool, subnet};
    use cadastre_daemon::watch::ObjectEvent;

    /// Returns node `n`, whose agent reports an address of a pod that is gone.
    fn with_an_orphan() -> (Addr, ClusterCache) {
        let addr = Cidr::parse_strict("10.0.0.17/32").unwrap().first();
        let mut told = subnet("n", &["10.0.0.16/28"], 0);
        told.report.as_mut().unwrap().orphans = [(addr, PodUid::read("gone"))].into();
        let mut cache = ClusterCache::default();
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.blocks, objects(&told));
        list(&mut cache.subnets, vec![told]);
        let asked = Duration::ZERO;
        cache.pods.change(ObjectEvent::Restarted { asked });
        cache.pods.change(ObjectEvent::Listed);
        (addr, cache)
    }

    #[test]
    fn an_address_that_any_pod_reports_is_not_suspected() {
        let (addr, mut cache) = with_an_orphan();
        for reported in [false, true] {
            if reported {
                cache.pods.change(ObjectEvent::Applied(Pod {
                    name: "default/other".into(),
                    uid: "other".into(),
                    version: 1,
                    finished: false,
                    mirror_of: None,
                    addresses: [addr].into(),
                }));
            }
            let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
            let mut reports = Vec::new();
            let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
            let looks = Leaks::default().next(&mut cx).is_some();
            assert_eq!(looks, !reported);
        }
    }

    #[test]
    fn what_a_look_did_not_prove_is_not_looked_at_again_at_once() {
        let (_, cache) = with_an_orphan();
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let mut leaks = Leaks::default();
        let mut looks = |after: Duration| {
            let mut reports = Vec::new();
            let mut cx = Context::new(
                &cache,
                &mut allocations,
                &mut reports,
                Now {
                    mono: NOW.mono + after,
                    ..NOW
                },
            );
            // A user asks for the scan each time, so only the pause between two lists can prevent the next list.
            leaks.look_soon();
            leaks.next(&mut cx).is_some()
        };
        assert!(looks(Duration::ZERO));
        assert!(!looks(Duration::from_millis(100)));
        assert!(!looks(LOOK_PAUSE / 2));
        assert!(looks(LOOK_PAUSE));
    }

    #[test]
    fn what_a_live_node_no_longer_reports_is_forgotten() {
        let held = |n: u8| {
            let uid = format!("00000000-0000-0000-0000-0000000000{n:02x}");
            (
                Addr::from(std::net::IpAddr::from([10, 0, 0, n])),
                PodUid::read(&uid),
            )
        };
        let mut told = subnet("n", &["10.0.0.0/28"], 0);
        let mut cache = ClusterCache::default();
        list(&mut cache.pools, vec![pool("p", "10.0.0.0/24")]);
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.blocks, objects(&told));
        cache.pods.change(ObjectEvent::Listed);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let mut leaks = Leaks::after(Duration::from_secs(60));
        for n in 1..9 {
            told.version += 1;
            told.report.as_mut().unwrap().orphans = [held(n)].into();
            list(&mut cache.subnets, vec![told.clone()]);
            let asked = allocations.leak_candidates.entry("n".into()).or_default();
            asked.insert(held(n));
            let mut reports = Vec::new();
            let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
            leaks.scan(&mut cx);
            let asked: Vec<_> = allocations.leak_candidates["n"].iter().copied().collect();
            assert_eq!(asked, [held(n)]);
        }
    }
}
