//! The quarantine loop: podCIDRs of a deleted node wait, then become free.
//!
//! A range becomes free only when all of these hold: the node's UID is gone; the pool's quarantine is over; no cached
//! pod reports an address in it; a consistent list of the pods bound to the node's name shows none either; and no
//! NodeSubnet names the node's UID any more, after a successful write of this controller. The record is in the
//! NodeSubnet (`spec.quarantined`), so a restart changes nothing.

use super::context::IN_USE_PAUSE;
use super::queue::{Load, Queue};
use super::reconcile::{Answer, Look, Loop, work_off};
use super::refusals::Call;
use super::registry::{Registry, RestKey};
use super::{Context, Purpose};
use crate::cluster::request::{Outcome, Request};
use crate::cluster::seen::{Pod, Text};
use crate::cluster::world::World;
use crate::registry::blocks::Noted;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// State of the quarantine loop.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// Quarantined ranges to look at
    pub queue: Queue<RestKey>,
}

impl Loop for Quarantine {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(Request, Purpose)> {
        let look = |_: &mut Self, key: &RestKey, cx: &mut Context| Self::look(key, cx);
        work_off(self, |it| &mut it.queue, look, cx)
    }

    /// Takes in the last list of the node's pods: the record may leave the NodeSubnet, or not yet.
    fn answered(&mut self, answer: &Answer, cx: &mut Context) -> Noted {
        let mut noted = Noted::default();
        let Purpose::Quarantine { name, uid } = answer.purpose else {
            return noted;
        };
        let key = (name.clone(), uid.clone());
        let Some(rest) = cx.registry.rests.get_mut(&key) else {
            return noted;
        };
        match answer.outcome {
            Outcome::Pods(pods)
                if in_use(name, &rest.ranges, cx.world) || used_by(pods, &rest.ranges) =>
            {
                self.queue.add_at(key, cx.now.mono + IN_USE_PAUSE);
            }
            Outcome::Pods(_) => {
                rest.leaving = true;
                noted.subnets.push(name.clone());
            }
            _ => self.queue.add(key),
        }
        noted
    }
}

impl Quarantine {
    /// Schedules a look at the end of the quarantine.
    pub fn watch(&mut self, key: RestKey, registry: &Registry) {
        if let Some(rest) = registry.rests.get(&key) {
            self.queue.add_at(key, rest.until);
        }
    }

    fn look((name, uid): &RestKey, cx: &mut Context) -> Look {
        let rest = cx.registry.rests.get(&(name.clone(), uid.clone()));
        let Some(rest) = rest.filter(|rest| !rest.leaving) else {
            return Look::Done;
        };
        if rest.until > cx.now.mono {
            return Look::Later(rest.until);
        }
        if in_use(name, &rest.ranges, cx.world) {
            return Look::Later(cx.now.mono + IN_USE_PAUSE);
        }
        if let Some(at) = cx.paused(&Call::ListPods(name.clone())) {
            return Look::Later(at);
        }
        let (node, name, uid) = (name.clone(), name.clone(), uid.clone());
        Look::Send(
            Request::ListPodsOf { node },
            Purpose::Quarantine { name, uid },
        )
    }

    /// Frees ranges under that name whose quarantine has ended and that no NodeSubnet records any more. Returns
    /// whether a range became free.
    pub fn release(name: &Text, world: &World, registry: &mut Registry) -> bool {
        let mentioned = |uid: &Text| {
            world
                .subnets
                .get(name)
                .is_some_and(|subnet| mentions(subnet, uid))
        };
        let over: Vec<RestKey> = registry
            .rests_of(name)
            .filter(|((_, uid), rest)| {
                rest.leaving && (!mentioned(uid) || Mutation::FreedWhileNamed.is_on())
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in &over {
            registry.finish(key);
        }
        !over.is_empty()
    }
}

fn mentions(subnet: &crate::cluster::seen::Subnet, uid: &Text) -> bool {
    // An unreadable spec may name any node.
    subnet.spec.as_ref().map_or(true, |spec| {
        spec.node_uid.as_deref() == Some(&**uid)
            || spec.quarantined.iter().any(|p| p.node_uid == **uid)
    })
}

fn in_use(node: &str, ranges: &[Cidr], world: &World) -> bool {
    let unseen = Mutation::PodIndexNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    let mut used = ranges
        .iter()
        .map(|range| world.pods.any_in_range_of(node, range));
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
    use crate::cluster::seen::Node;
    use crate::demand::tests::{NOW, node, subnet};
    use cadastre_core::Addr;
    use cadastre_daemon::watch::Change;

    /// Long after every quarantine.
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

    /// Quarantines 10.0.0.0/28 of the deleted node `n`.
    fn resting() -> (Registry, Quarantine) {
        let gone = Node {
            pod_cidrs: [Cidr::parse_strict("10.0.0.0/28").unwrap()].into(),
            ..node("n")
        };
        let mut registry = Registry::default();
        registry.sync(&gone, None);
        registry.retire(&gone, NOW);
        let mut quarantine = Quarantine::default();
        quarantine.watch((gone.name, gone.uid), &registry);
        (registry, quarantine)
    }

    fn looks(world: &World) -> bool {
        let (mut registry, mut quarantine) = resting();
        let mut reports = Vec::new();
        let mut cx = Context::new(world, &mut registry, &mut reports, LATER);
        quarantine.next(&mut cx).is_some()
    }

    #[test]
    fn a_range_rests_while_any_pod_reports_an_address_of_it() {
        let mut world = World::default();
        assert!(looks(&world), "over, and nobody uses it");
        world.pods.change(Change::Applied(pod("10.0.0.7")));
        assert!(!looks(&world), "on whatever node it runs");
    }

    #[test]
    fn a_range_rests_while_a_consistent_look_shows_an_address_of_it() {
        let world = World::default();
        let (mut registry, mut quarantine) = resting();
        let mut reports = Vec::new();
        let mut cx = Context::new(&world, &mut registry, &mut reports, LATER);
        let (name, uid) = ("n".into(), "n".into());
        let purpose = Purpose::Quarantine { name, uid };
        for (pods, free) in [(vec![pod("10.0.0.7")], false), (Vec::new(), true)] {
            let outcome = Outcome::Pods(pods);
            let answer = Answer {
                wrote: false,
                ..Answer::to_write(&purpose, &outcome)
            };
            let noted = quarantine.answered(&answer, &mut cx);
            assert_eq!(noted.subnets.is_empty(), !free);
        }
    }

    #[test]
    fn a_range_rests_while_a_node_subnet_names_who_had_it() {
        let (mut registry, _) = resting();
        for rest in registry.rests.values_mut() {
            rest.leaving = true;
        }
        let mut world = World::default();
        let told = subnet("n", &[], 0);
        world.subnets.change(Change::Applied(told.clone()));
        assert!(!Quarantine::release(&"n".into(), &world, &mut registry));
        world.subnets.change(Change::Deleted(told));
        assert!(Quarantine::release(&"n".into(), &world, &mut registry));
        assert!(registry.rests.is_empty());
    }
}
