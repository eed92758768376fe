//! NodeRoutes: the ranges of a node, and the addresses at which the node receives packets for them.

use std::collections::BTreeSet;

use super::{RouteKind, Wanted, parsed};
use crate::Context;
use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{Node, Routes};
use crate::cluster::request::{ObjectKind, ObjectSpec};
use cadastre_api::NodeRoutesSpec;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, Family};

impl RouteKind for Routes {
    /// Whether nodes get NodeRoutes.
    type Settings = bool;
    const KIND: ObjectKind = ObjectKind::Routes;
    const NOT_WITHDRAWN: Mutation = Mutation::RoutesNotWithdrawn;
    const FREED: Mutation = Mutation::RoutedBlockFreed;

    fn cached(cache: &ClusterCache) -> &ObjectCache<Self> {
        &cache.routes
    }

    fn is_awaited(cache: &ClusterCache) -> bool {
        cache.awaits_routes
    }

    fn ranges(&self) -> BTreeSet<Cidr> {
        parsed(self.spec.destinations.iter().map(String::as_str))
    }

    fn ranges_of(spec: &ObjectSpec) -> BTreeSet<Cidr> {
        match spec {
            ObjectSpec::Routes(spec) => parsed(spec.destinations.iter().map(String::as_str)),
            _ => BTreeSet::new(),
        }
    }

    fn wanted(node: &Node, ranges: &[Cidr], publishes: &bool, cx: &Context) -> Wanted {
        let spec = publishes.then(|| NodeRoutesSpec {
            via: via(node, cx.allocations),
            destinations: ranges.iter().map(ToString::to_string).collect(),
        });
        Wanted {
            spec: spec.map(ObjectSpec::Routes),
            problem: None,
        }
    }

    fn is_as(&self, spec: &ObjectSpec) -> bool {
        matches!(spec, ObjectSpec::Routes(spec) if *spec == self.spec)
    }
}

/// Returns the first address of each family at which the node receives packets.
///
/// Addresses that lie in a pool are left out. Otherwise a kubelet could report an address in another node's block. No
/// agent would then add a route to that block, because agents add no route that covers the address of a node.
fn via(node: &Node, allocations: &AllocationState) -> Vec<String> {
    let is_of_pool = |addr: Addr| allocations.pools.is_any_over(&Cidr::host(addr));
    let all = node.addresses.iter().filter(|it| !is_of_pool(**it));
    let first = |family| all.clone().find(|it| it.family == family);
    let via = Family::ALL.into_iter().filter_map(first);
    via.map(ToString::to_string).collect()
}
