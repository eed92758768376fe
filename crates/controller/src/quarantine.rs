//! The quarantine loop: podCIDRs of a deleted node wait, then become free.
//!
//! A range becomes free only when all of these hold: the node's UID is gone; the pool's quarantine is over; no cached
//! pod reports an address in the range; a consistent list of the pods bound to the node's name shows none either; and
//! after a successful write of this controller the NodeSubnet no longer names the node's UID. The quarantine is
//! recorded in the NodeSubnet (`spec.quarantined`), so a restart of the controller does not shorten it.

use super::allocations::{AllocationState, QuarantineKey};
use super::context::IN_USE_PAUSE;
use super::failing_calls::ObjectCall;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::Pod;
use crate::cluster::request::{ApiRequest, RequestOutcome};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// State of the quarantine loop.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// Quarantines to process, each at the time when it may end
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

    /// Handles the list of the pods that are bound to the node's name. If none of them uses the ranges, the
    /// quarantine's record may be removed from the NodeSubnet. Else the loop checks again later.
    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let mut noted = AffectedLoops::default();
        let Purpose::Quarantine { name, uid } = answer.purpose else {
            return noted;
        };
        let key = (name.clone(), uid.clone());
        let Some(rest) = cx.allocations.quarantined.get_mut(&key) else {
            return noted;
        };
        match answer.outcome {
            RequestOutcome::Pods(pods)
                if in_use(name, &rest.ranges, cx.cache) || used_by(pods, &rest.ranges) =>
            {
                self.queue.add_at(key, cx.now.mono + IN_USE_PAUSE);
            }
            RequestOutcome::Pods(_) => {
                rest.released = true;
                noted.subnets.push(name.clone());
            }
            _ => self.queue.add(key),
        }
        noted
    }
}

impl Quarantine {
    /// Queues the quarantine for the time at which it may end.
    pub fn watch(&mut self, key: QuarantineKey, allocations: &AllocationState) {
        if let Some(rest) = allocations.quarantined.get(&key) {
            self.queue.add_at(key, rest.until);
        }
    }

    fn look((name, uid): &QuarantineKey, cx: &mut Context) -> KeyDecision {
        let rest = cx.allocations.quarantined.get(&(name.clone(), uid.clone()));
        let Some(rest) = rest.filter(|rest| !rest.released) else {
            return KeyDecision::Done;
        };
        if rest.until > cx.now.mono {
            return KeyDecision::Later(rest.until);
        }
        if in_use(name, &rest.ranges, cx.cache) {
            return KeyDecision::Later(cx.now.mono + IN_USE_PAUSE);
        }
        if let Some(at) = cx.paused(&ObjectCall::ListPods(name.clone())) {
            return KeyDecision::Later(at);
        }
        let (node, name, uid) = (name.clone(), name.clone(), uid.clone());
        KeyDecision::Send(
            ApiRequest::ListPodsOf { node },
            Purpose::Quarantine { name, uid },
        )
    }

    /// Frees the ranges of earlier nodes of that name whose quarantine is over and is not recorded in the NodeSubnet
    /// any more. Returns whether a range became free.
    pub fn release(
        name: &NodeName,
        cache: &ClusterCache,
        allocations: &mut AllocationState,
    ) -> bool {
        let mentioned = |uid: &ObjectUid| {
            cache
                .subnets
                .get(name)
                .is_some_and(|subnet| mentions(subnet, uid))
        };
        let over: Vec<QuarantineKey> = allocations
            .quarantined_of(name)
            .filter(|((_, uid), rest)| {
                rest.released && (!mentioned(uid) || Mutation::FreedWhileNamed.is_on())
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in &over {
            allocations.release(key);
        }
        !over.is_empty()
    }
}

fn mentions(subnet: &crate::cluster::objects::Subnet, uid: &ObjectUid) -> bool {
    // If the spec cannot be read, it may name this UID.
    subnet.spec.as_ref().map_or(true, |spec| {
        spec.node_uid.as_deref() == Some(&**uid)
            || spec.quarantined.iter().any(|p| p.node_uid == **uid)
    })
}

fn in_use(node: &NodeName, ranges: &[Cidr], cache: &ClusterCache) -> bool {
    let unseen = Mutation::PodIndexNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    let mut used = ranges
        .iter()
        .map(|range| cache.pods.any_in_range_of(node, range));
    !unseen && used.any(|addr| addr.is_some())
}

fn used_by(pods: &[Pod], ranges: &[Cidr]) -> bool {
    let unseen = Mutation::BoundPodsNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    pods.iter()
        .filter(|_| !unseen)
        .flat_map(|pod| pod.addresses.iter())
        .any(|addr| ranges.iter().any(|range| range.contains_addr(*addr)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Now;
    use crate::cluster::objects::Node;
    use crate::demand::tests::{NOW, node, subnet};
    use cadastre_core::Addr;
    use cadastre_daemon::watch::ObjectEvent;

    /// A time at which every quarantine is over.
    const LATER: Now = Now {
        mono: Duration::from_secs(600),
        ..NOW
    };

    fn pod(address: &str) -> Pod {
        let address = Addr::from(address.parse::<std::net::IpAddr>().unwrap());
        Pod {
            name: "default/p".into(),
            uid: "p".into(),
            version: 1,
            finished: false,
            mirror_of: None,
            addresses: [address].into(),
        }
    }

    /// Returns the allocations and the loop after the deletion of node `n`, which had 10.0.0.0/28.
    fn resting() -> (AllocationState, Quarantine) {
        let gone = Node {
            pod_cidrs: [Cidr::parse_strict("10.0.0.0/28").unwrap()].into(),
            ..node("n")
        };
        let mut allocations = AllocationState::default();
        allocations.sync(&gone, None);
        allocations.quarantine(&gone, NOW);
        let mut quarantine = Quarantine::default();
        quarantine.watch((gone.name, gone.uid), &allocations);
        (allocations, quarantine)
    }

    fn looks(cache: &ClusterCache) -> bool {
        let (mut allocations, mut quarantine) = resting();
        let mut reports = Vec::new();
        let mut cx = Context::new(cache, &mut allocations, &mut reports, LATER);
        quarantine.next(&mut cx).is_some()
    }

    #[test]
    fn a_range_rests_while_any_pod_reports_an_address_of_it() {
        let mut cache = ClusterCache::default();
        assert!(looks(&cache), "over, and nobody uses it");
        cache.pods.change(ObjectEvent::Applied(pod("10.0.0.7")));
        assert!(!looks(&cache), "on whatever node it runs");
    }

    #[test]
    fn a_range_rests_while_a_consistent_look_shows_an_address_of_it() {
        let cache = ClusterCache::default();
        let (mut allocations, mut quarantine) = resting();
        let mut reports = Vec::new();
        let mut cx = Context::new(&cache, &mut allocations, &mut reports, LATER);
        let (name, uid) = ("n".into(), "n".into());
        let purpose = Purpose::Quarantine { name, uid };
        for (pods, free) in [(vec![pod("10.0.0.7")], false), (Vec::new(), true)] {
            let outcome = RequestOutcome::Pods(pods);
            let answer = RequestAnswer {
                wrote: false,
                ..RequestAnswer::to_write(&purpose, &outcome)
            };
            let noted = quarantine.answered(&answer, &mut cx);
            assert_eq!(noted.subnets.is_empty(), !free);
        }
    }

    #[test]
    fn a_range_rests_while_a_node_subnet_names_who_had_it() {
        let (mut allocations, _) = resting();
        for rest in allocations.quarantined.values_mut() {
            rest.released = true;
        }
        let mut cache = ClusterCache::default();
        let told = subnet("n", &[], 0);
        cache.subnets.change(ObjectEvent::Applied(told.clone()));
        assert!(!Quarantine::release(&"n".into(), &cache, &mut allocations));
        cache.subnets.change(ObjectEvent::Deleted(told));
        assert!(Quarantine::release(&"n".into(), &cache, &mut allocations));
        assert!(allocations.quarantined.is_empty());
    }
}
