//! NodeSubnets: what a node holds and what an earlier node of its name held, for the node's side to
//! read and for the next leader to remember.
//!
//! Level-triggered: the spec that should be is computed from the Node and the rests, and written
//! when what is there differs, whoever made it so. Never on the way of a podCIDR.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::queue::Queue;
use super::registry::Registry;
use super::{Context, Purpose};
use crate::api::{NodeSubnetSpec, PreviousHolder};
use crate::cluster::request::{Outcome, Refusal, Request};
use crate::cluster::seen::{Subnet, Text};
use crate::cluster::world::World;

/// The loop's own state.
#[derive(Debug, Default)]
pub struct Subnets {
    /// Names to look at
    pub queue: Queue<Text>,
    /// Names with a request in flight
    in_flight: BTreeSet<Text>,
    /// Names to read before the next write: what is there is not known
    to_read: BTreeSet<Text>,
}

impl Subnets {
    /// The next request, if a NodeSubnet is not as it should be.
    pub fn next(&mut self, cx: &mut Context) -> Option<(Request, Purpose)> {
        while let Some(name) = self.queue.pop(cx.now.mono) {
            if self.in_flight.contains(&name) {
                continue;
            }
            if self.to_read.remove(&name) {
                self.in_flight.insert(name.clone());
                return Some((
                    Request::ReadSubnet { name: name.clone() },
                    Purpose::SubnetRead { name },
                ));
            }
            let wanted = wanted(&name, cx.world, cx.registry);
            if let Some(request) = difference(
                &name,
                wanted,
                cx.world.subnets.get(&name).map(AsRef::as_ref),
            ) {
                self.in_flight.insert(name.clone());
                return Some((request, Purpose::Subnet { name }));
            }
        }
        None
    }

    /// Whether a write for the name may still be on its way.
    pub fn is_open(&self, name: &Text) -> bool {
        self.in_flight.contains(name) || self.to_read.contains(name)
    }

    /// Takes in an answer; the object it shows is in the world already.
    pub fn answered(&mut self, name: &Text, outcome: &Outcome, cx: &mut Context) {
        self.in_flight.remove(name);
        match outcome {
            Outcome::Subnet(_) | Outcome::Gone | Outcome::Refused(Refusal::Missing) => {
                self.queue.succeeded(name);
                // Once more: the node may have changed meanwhile.
                self.queue.add(name.clone());
            }
            Outcome::Refused(Refusal::Busy(_) | Refusal::NotSent | Refusal::Rejected(_)) => {
                self.queue.add_failed(name.clone(), cx.now.mono);
            }
            _ => {
                self.to_read.insert(name.clone());
                self.queue.add_failed(name.clone(), cx.now.mono);
            }
        }
    }
}

/// The spec that should be, or nothing when there is nothing to tell.
fn wanted(name: &Text, world: &World, registry: &Registry) -> Option<NodeSubnetSpec> {
    let node = world.nodes.get(name);
    let previous: Vec<PreviousHolder> = registry
        .rests_of(name)
        .filter(|(_, rest)| !rest.leaving)
        .map(|((_, uid), rest)| PreviousHolder {
            node_uid: uid.to_string(),
            provider_id: rest.machine.provider_id.as_deref().map(str::to_owned),
            machine_id: rest.machine.machine_id.as_deref().map(str::to_owned),
            pod_cidrs: registry.held_ranges(&rest.ranges),
            until: Time(rest.until_wall),
        })
        .collect();
    let pod_cidrs = node
        .map(|node| registry.held_ranges(&node.pod_cidrs))
        .unwrap_or_default();
    if pod_cidrs.is_empty() && previous.is_empty() {
        return None;
    }
    let text = |text: &Text| text.to_string();
    Some(NodeSubnetSpec {
        node_uid: node.map(|node| node.uid.to_string()),
        provider_id: node.and_then(|node| node.machine.provider_id.as_ref().map(text)),
        machine_id: node.and_then(|node| node.machine.machine_id.as_ref().map(text)),
        pod_cidrs,
        previous,
    })
}

fn difference(name: &Text, wanted: Option<NodeSubnetSpec>, is: Option<&Subnet>) -> Option<Request> {
    match (wanted, is) {
        (None, None) => None,
        (Some(spec), None) => Some(Request::CreateSubnet {
            name: name.clone(),
            spec,
        }),
        (Some(spec), Some(is)) if is.spec.as_ref().is_ok_and(|there| *there == spec) => None,
        (Some(spec), Some(is)) => Some(Request::ReplaceSubnet {
            name: name.clone(),
            uid: is.uid.clone(),
            version: is.version,
            spec,
        }),
        (None, Some(is)) => Some(Request::DeleteSubnet {
            name: name.clone(),
            uid: is.uid.clone(),
            version: is.version,
        }),
    }
}
