//! The loop of routes. It writes to the NodeRoutes of each node which ranges are reached through the node, so that the
//! other nodes, or other routers, can route packets there.
//!
//! The loop is level-triggered: it computes the routes from the NodeSubnet of the node, and from the addresses of the
//! Node. A route exists before the node's agent can assign an address of the range, or very soon after. If the
//! controller does not publish routes, the loop deletes the NodeRoutes that exist.
//!
//! # Guarantees
//! - While the NodeRoutes of a node lists a block, the IPAMBlock is not deleted ([`is_routed`]). So the range is not
//!   allocated to another node, unless a write whose answer was lost lists the block again.
//! - Nothing is written while the routes of a node stay the same.
//! - If the API server keeps rejecting the NodeRoutes of a node, only the blocks that it lists are affected: they
//!   cannot be released. The event `WriteRejected` of the Node reports this.

#[cfg(test)]
mod tests;

use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::AllocationState;
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::{ClusterCache, spec_for};
use crate::cluster::names::NodeName;
use crate::cluster::objects::{Node, Text};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind, ObjectSpec};
use cadastre_api::{NodeRoutesSpec, NodeSubnetSpec};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, Family};

/// The queue of the loop, and its requests in flight.
#[derive(Debug, Default)]
pub(crate) struct RouteLoop {
    /// Names of nodes whose NodeRoutes may have to change
    pub(crate) queue: Queue<NodeName>,
    requests: InFlight<NodeName>,
    /// Whether nodes get NodeRoutes. If not, existing ones are deleted
    publishes: bool,
}

impl Loop for RouteLoop {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::Routes { name } = answer.purpose {
            self.requests.answered(name, answer);
            self.queue.add(name.clone());
        }
        AffectedLoops::default()
    }
}

impl RouteLoop {
    pub(crate) fn new(publishes: bool) -> Self {
        RouteLoop {
            publishes,
            ..RouteLoop::default()
        }
    }

    /// Queues all nodes, because a term has begun or all NodeRoutes have been listed.
    pub(crate) fn requeue_all(&mut self, cache: &ClusterCache) {
        let nodes = cache.nodes.iter().map(|it| &it.name);
        for name in nodes.chain(cache.routes.iter().map(|it| &it.name)) {
            self.queue.add(name.clone());
        }
    }

    fn look(&mut self, name: &NodeName, cx: &mut Context) -> KeyDecision {
        // The API server may not have the kind yet, because an administrator must update the CRDs.
        if self.requests.is_sent(name) || !cx.cache.routes.is_listed() {
            return KeyDecision::Done;
        }
        let is_to_read = self.requests.is_to_read(name);
        let text = || Text::from(name.clone());
        let (call, request) = if is_to_read {
            let request = ApiRequest::Read(ObjectKind::Routes, text());
            (ObjectCall::ReadRoutes(name.clone()), request)
        } else {
            let node = cx.cache.nodes.get(name).filter(|_| self.publishes);
            let wanted = node.and_then(|node| {
                let spec = spec_for(cx.cache, name, &node.uid)?;
                Some(routes(node, spec, cx.allocations))
            });
            let wanted = wanted.filter(|it| !it.destinations.is_empty());
            let request = match (cx.cache.routes.get(name), wanted) {
                (None, None) => return KeyDecision::Done,
                (Some(found), Some(wanted)) if found.spec == wanted => return KeyDecision::Done,
                (Some(_), _) if Mutation::RoutesNotWithdrawn.is_on() => return KeyDecision::Done,
                (None, Some(wanted)) => ApiRequest::Create(text(), ObjectSpec::Routes(wanted)),
                (Some(found), Some(wanted)) => {
                    ApiRequest::Replace(KnownObject::of(&**found), ObjectSpec::Routes(wanted))
                }
                (Some(found), None) => {
                    ApiRequest::Delete(ObjectKind::Routes, KnownObject::of(&**found))
                }
            };
            (ObjectCall::WriteRoutes(name.clone()), request)
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        self.requests.send(name.clone(), ());
        KeyDecision::Send(request, Purpose::Routes { name: name.clone() })
    }
}

/// Returns the routes that a node should have. Its ranges come from its NodeSubnet.
///
/// Agents add no route that covers the address of a node. So an address in a pool is left out: otherwise a kubelet could
/// report an address in the block of another node, and nobody would have a route to that block.
fn routes(node: &Node, spec: &NodeSubnetSpec, allocations: &AllocationState) -> NodeRoutesSpec {
    let is_of_pool = |addr: Addr| allocations.pools.is_any_over(&Cidr::host(addr));
    let all = node.addresses.iter().filter(|it| !is_of_pool(**it));
    let first = |family| all.clone().find(|it| it.family == family);
    let via = Family::ALL.into_iter().filter_map(first);
    let pod_cidrs = spec.pod_cidrs.iter().filter(|it| !it.withheld);
    let pod_cidrs = pod_cidrs.map(|it| &it.cidr);
    // A standby of a migrating virtual machine does not get its packets.
    let blocks = spec.blocks.iter().filter(|it| !it.standby);
    let blocks = blocks.map(|it| &it.cidr);
    let destinations = pod_cidrs.chain(blocks);
    let mut destinations: Vec<Cidr> = destinations
        .filter_map(|it| Cidr::parse_strict(it).ok())
        .collect();
    destinations.sort_unstable();
    destinations.dedup();
    NodeRoutesSpec {
        via: via.map(ToString::to_string).collect(),
        destinations: destinations.iter().map(ToString::to_string).collect(),
    }
}

/// Returns whether the NodeRoutes of the node lists the range. As long as it does, the range must not become free.
pub(crate) fn is_routed(node: &NodeName, range: &Cidr, cache: &ClusterCache) -> bool {
    let found = cache.routes.get(node);
    found.is_some_and(|it| {
        let mut listed = it.spec.destinations.iter();
        listed.any(|it| Cidr::parse_strict(it).is_ok_and(|it| it == *range))
    }) && !Mutation::RoutedBlockFreed.is_on()
}
