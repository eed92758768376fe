//! The quarantine loop: it keeps podCIDRs of deleted nodes in quarantine for a time, and then frees them.
//!
//! A range becomes free only when all of these conditions hold:
//! - The node's UID is gone.
//! - The pool's quarantine is over.
//! - No cached pod reports an address in the range.
//! - In a list of the pods bound to the node's name that is newer than the end of the quarantine, no pod reports an
//!   address in the range either ([`pod_proof`](crate::allocations::pod_proof)).
//! - This controller has written the NodeSubnet without the node's UID.
//!
//! The NodeSubnet records the quarantine (`spec.quarantined`), so a restart of the controller does not shorten it.

use super::allocations::{AllocationState, QuarantineKey};
use super::failing_calls::ObjectCall;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Pod, Subnet};
use crate::cluster::request::{ApiRequest, RequestOutcome};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// The queue of the quarantine loop. The quarantines themselves are in the ledger.
#[derive(Clone, Debug, Default)]
pub struct Quarantine {
    /// Quarantines to process. Each is processed at the earliest time at which it may end
    pub queue: Queue<QuarantineKey>,
}

impl Loop for Quarantine {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |_: &mut Self, key: &QuarantineKey, cx: &mut Context| Self::look(key, cx);
        work_off(self, |it| &mut it.queue, look, cx)
    }

    /// Handles the list of the pods that are bound to the node's name. If no pod uses the ranges, the NodeSubnet may
    /// stop recording the quarantine. Otherwise the loop checks again later.
    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        let Purpose::Quarantine { name, uid, as_of } = answer.purpose else {
            return affected;
        };
        cx.allocations.pod_proof.listed(*as_of, answer.outcome);
        let key = (name.clone(), uid.clone());
        let Some(quarantined) = cx.allocations.quarantined.get_mut(&key) else {
            return affected;
        };
        let ranges = &quarantined.ranges;
        match answer.outcome {
            RequestOutcome::Pods(pods, _) if quarantined.until <= *as_of => {
                if in_use(name, ranges, cx.cache) || used_by(pods, ranges) {
                    self.queue.add_at(key, cx.now.next_check());
                } else {
                    quarantined.released = true;
                    affected.subnets.push(name.clone());
                }
            }
            // The list failed, or the quarantine ended after the list was requested.
            _ => self.queue.add(key),
        }
        affected
    }
}

impl Quarantine {
    /// Queues the quarantine for the time at which it may end.
    pub fn watch(&mut self, key: QuarantineKey, allocations: &AllocationState) {
        if let Some(quarantined) = allocations.quarantined.get(&key) {
            self.queue.add_at(key, quarantined.until);
        }
    }

    fn look(key: &QuarantineKey, cx: &mut Context) -> KeyDecision {
        let quarantined = cx.allocations.quarantined.get(key);
        let Some(quarantined) = quarantined.filter(|it| !it.released) else {
            return KeyDecision::Done;
        };
        if quarantined.until > cx.now.mono {
            return KeyDecision::Later(quarantined.until);
        }
        let (name, uid) = key;
        if in_use(name, &quarantined.ranges, cx.cache) {
            return KeyDecision::Later(cx.now.next_check());
        }
        if let Some(at) = cx.paused(&ObjectCall::ListPods(name.clone())) {
            return KeyDecision::Later(at);
        }
        let until = quarantined.until;
        let (request, as_of) = cx.allocations.list_pods_of(name, until, cx.now);
        let (name, uid) = (name.clone(), uid.clone());
        KeyDecision::Send(request, Purpose::Quarantine { name, uid, as_of })
    }

    /// Frees the ranges of earlier nodes with this name whose quarantine is over and which the NodeSubnet no longer
    /// records. Returns whether a range became free.
    pub fn release(
        name: &NodeName,
        cache: &ClusterCache,
        allocations: &mut AllocationState,
    ) -> bool {
        let subnet = cache.subnets.get(name);
        let is_recorded = |uid: &ObjectUid| {
            let named = subnet.is_some_and(|subnet| names(subnet, uid));
            named && !Mutation::FreedWhileNamed.is_on()
        };
        let over = allocations.quarantined_of(name);
        let over = over.filter(|((_, uid), it)| it.released && !is_recorded(uid));
        let over: Vec<QuarantineKey> = over.map(|(key, _)| key.clone()).collect();
        for key in &over {
            allocations.release(key);
        }
        !over.is_empty()
    }
}

/// Returns whether the NodeSubnet contains the UID, either as the UID of its own node or as that of a deleted node. If
/// the spec is invalid, returns true, because the NodeSubnet may contain any UID.
fn names(subnet: &Subnet, uid: &ObjectUid) -> bool {
    subnet.spec.as_ref().map_or(true, |spec| {
        spec.node_uid.as_deref() == Some(&**uid)
            || spec.quarantined.iter().any(|p| p.node_uid == **uid)
    })
}

fn in_use(node: &NodeName, ranges: &[Cidr], cache: &ClusterCache) -> bool {
    let unseen = Mutation::PodIndexNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    let is_used = |range: &Cidr| cache.pods.any_in_range_of(node, range).is_some();
    !unseen && ranges.iter().any(is_used)
}

fn used_by(pods: &[Pod], ranges: &[Cidr]) -> bool {
    let unseen = Mutation::BoundPodsNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    let mut reported = pods.iter().flat_map(|pod| &pod.addresses);
    let is_inside = |addr: &Addr| ranges.iter().any(|range| range.contains_addr(*addr));
    !unseen && reported.any(is_inside)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::Now;
    use crate::fixtures::{NOW, at, in_step, node_with, pod, subnet};
    use cadastre_api::{NodeSubnetSpec, QuarantinedNode};
    use cadastre_daemon::watch::ObjectEvent;

    /// Returns a time at which the quarantine of every test is over.
    fn later() -> Now {
        at(600)
    }

    /// Returns the allocations and the loop after the deletion of node `n`, which had 10.0.0.0/28.
    fn quarantined() -> (AllocationState, Quarantine) {
        let gone = node_with("n", &["10.0.0.0/28"]);
        let mut allocations = AllocationState::default();
        allocations.sync(&gone, None);
        allocations.quarantine(&gone, NOW);
        let mut quarantine = Quarantine::default();
        quarantine.watch((gone.name, gone.uid), &allocations);
        (allocations, quarantine)
    }

    #[test]
    fn a_range_stays_quarantined_while_any_pod_reports_an_address_of_it() {
        let mut cache = ClusterCache::default();
        let lists_pods = |cache: &ClusterCache| {
            let (mut allocations, mut quarantine) = quarantined();
            let next = |cx: &mut Context| quarantine.next(cx).is_some();
            in_step(cache, &mut allocations, later(), next)
        };
        assert!(lists_pods(&cache), "over, and nobody uses it");
        let pod = pod(1, &["10.0.0.7"]);
        cache.pods.change(ObjectEvent::Applied(pod));
        assert!(!lists_pods(&cache), "on whatever node it runs");
    }

    #[test]
    fn a_range_becomes_free_if_a_list_after_its_quarantine_shows_no_pod_with_an_address_of_it() {
        let cache = ClusterCache::default();
        let (mut allocations, mut quarantine) = quarantined();
        let over = quarantine.load().next_at.unwrap();
        let before = over.saturating_sub(Duration::from_nanos(1));
        for (pods, as_of, is_free) in [
            (vec![pod(1, &["10.0.0.7"])], over, false),
            (Vec::new(), before, false),
            (Vec::new(), over, true),
        ] {
            let (name, uid) = ("n".into(), "n".into());
            let purpose = Purpose::Quarantine { name, uid, as_of };
            let outcome = RequestOutcome::Pods(pods, None);
            let answer = RequestAnswer::to_read(&purpose, &outcome);
            let answered = |cx: &mut Context| quarantine.answered(&answer, cx);
            let affected = in_step(&cache, &mut allocations, later(), answered);
            assert_eq!(affected.subnets.is_empty(), !is_free);
        }
    }

    #[test]
    fn the_pods_of_a_deleted_node_are_listed_once_the_time_of_its_quarantine_is_over() {
        let cache = ClusterCache::default();
        let (mut allocations, mut quarantine) = quarantined();
        let over = quarantine.load().next_at.unwrap();
        assert!(over > Duration::ZERO);
        // An event may queue the quarantine before its time is over.
        quarantine.queue.add(("n".into(), "n".into()));
        for (mono, lists) in [(Duration::ZERO, false), (over, true)] {
            let now = Now { mono, ..NOW };
            let next = |cx: &mut Context| quarantine.next(cx).is_some();
            let does = in_step(&cache, &mut allocations, now, next);
            assert_eq!(does, lists, "{mono:?}");
        }
    }

    #[test]
    fn a_range_stays_quarantined_while_a_node_subnet_names_the_deleted_node() {
        // The UID of the NodeSubnet's own node, the UID of the deleted node that it records, and whether one of them
        // is that of node `n`. The spec of the last NodeSubnet is invalid.
        for (spec, names_it) in [
            (Some(("n", None)), true),
            (Some(("new", Some("n"))), true),
            (Some(("new", Some("other"))), false),
            (None, true),
        ] {
            let (mut allocations, _) = quarantined();
            for it in allocations.quarantined.values_mut() {
                it.released = true;
            }
            let mut naming = subnet("n", &[], 0);
            naming.spec = match (spec, naming.spec) {
                (Some((own, recorded)), Ok(valid)) => Ok(NodeSubnetSpec {
                    node_uid: Some(own.to_owned()),
                    quarantined: recorded.map(recorded_in_subnet).into_iter().collect(),
                    ..valid
                }),
                _ => Err("invalid".to_owned()),
            };
            let mut cache = ClusterCache::default();
            cache.subnets.change(ObjectEvent::Applied(naming.clone()));
            let is_free = Quarantine::release(&"n".into(), &cache, &mut allocations);
            assert_eq!(is_free, !names_it, "{spec:?}");
            cache.subnets.change(ObjectEvent::Deleted(naming));
            let is_free_now = Quarantine::release(&"n".into(), &cache, &mut allocations);
            assert_eq!(is_free_now, names_it, "{spec:?}");
            assert!(allocations.quarantined.is_empty());
        }
    }

    /// Returns the entry of a NodeSubnet for a deleted node with this UID.
    fn recorded_in_subnet(uid: &str) -> QuarantinedNode {
        let json = json!({"nodeUID": uid, "until": "1970-01-01T00:10:00Z"});
        serde_json::from_value(json).unwrap()
    }
}
