//! Quarantine: the ranges of a dead node rest, then become free.
//!
//! Free only when all of it holds: the node's UID is gone; the pool's quarantine is over; no pod
//! reports an address in the range, by the index of all pods and by a consistent look at the pods
//! bound to the node's name; and no NodeSubnet names the holder any more, by a write of ours that
//! came through. The record is in the NodeSubnet (`spec.previous`), so a restart changes nothing.

use super::queue::Queue;
use super::registry::{Registry, RestKey};
use super::{Context, IN_USE_PAUSE, Purpose};
use crate::cluster::request::{Outcome, Request};
use crate::cluster::seen::{Pod, Text};
use crate::cluster::world::World;
use crate::ipam::Cidr;
use crate::mutation::Mutation;

/// The loop's own state.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// Rests to look at
    pub queue: Queue<RestKey>,
}

impl Quarantine {
    /// Looks at the rest when its time is over.
    pub fn watch(&mut self, key: RestKey, registry: &Registry) {
        if let Some(rest) = registry.rests.get(&key) {
            self.queue.add_at(key, rest.until);
        }
    }

    /// The next request, if a rest is over.
    pub fn next(&mut self, cx: &mut Context) -> Option<(Request, Purpose)> {
        while let Some(key) = self.queue.pop(cx.now.mono) {
            let Some(rest) = cx.registry.rests.get(&key) else {
                continue;
            };
            if rest.leaving {
                continue;
            }
            if rest.until > cx.now.mono {
                self.queue.add_at(key, rest.until);
            } else if in_use(&rest.ranges, cx.world) {
                self.queue.add_at(key, cx.now.mono + IN_USE_PAUSE);
            } else {
                let purpose = Purpose::Quarantine {
                    name: key.0.clone(),
                    uid: key.1.clone(),
                };
                return Some((Request::ListPodsOf { node: key.0 }, purpose));
            }
        }
        None
    }

    /// Takes in the last look at the node's pods. Returns whether the rest may leave its NodeSubnet.
    pub fn answered(
        &mut self,
        name: &Text,
        uid: &Text,
        outcome: &Outcome,
        cx: &mut Context,
    ) -> bool {
        let key = (name.clone(), uid.clone());
        let Some(rest) = cx.registry.rests.get_mut(&key) else {
            return false;
        };
        match outcome {
            Outcome::Pods(pods)
                if in_use(&rest.ranges, cx.world) || used_by(pods, &rest.ranges) =>
            {
                self.queue.add_at(key, cx.now.mono + IN_USE_PAUSE);
                false
            }
            Outcome::Pods(_) => {
                self.queue.succeeded(&key);
                rest.leaving = true;
                true
            }
            _ => {
                self.queue.add_failed(key, cx.now.mono);
                false
            }
        }
    }

    /// Frees what leaves under that name and is in no NodeSubnet any more. Returns whether a range
    /// became free.
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
    // What cannot be read may name anybody.
    subnet.spec.as_ref().map_or(true, |spec| {
        spec.node_uid.as_deref() == Some(&**uid)
            || spec.previous.iter().any(|p| p.node_uid == **uid)
    })
}

fn in_use(ranges: &[Cidr], world: &World) -> bool {
    let unseen = Mutation::PodIndexNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    let mut used = ranges.iter().map(|range| world.pods.any_in(range));
    !unseen && used.any(|addr| addr.is_some())
}

fn used_by(pods: &[Pod], ranges: &[Cidr]) -> bool {
    let unseen = Mutation::BoundPodsNotLookedAt.is_on() || Mutation::PodsNotLookedAt.is_on();
    pods.iter()
        .filter(|_| !unseen)
        .flat_map(|pod| pod.addresses.iter())
        .any(|addr| ranges.iter().any(|range| range.contains_addr(*addr)))
}
