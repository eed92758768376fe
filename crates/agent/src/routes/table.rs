//! Decides which routes the kernel should have, and which changes lead there.
//!
//! # Guarantees
//! - No route covers the address of a node, so no route cuts off a node.
//! - The changes first add and replace routes, and then delete routes. So an address that had a route and keeps one is
//!   reached at every moment.

use std::collections::{BTreeMap, BTreeSet};

use super::known::NodeRoutesSeen;
use cadastre_core::{Addr, Cidr, Family};

/// The metric of routes to other nodes. Other programs use other metrics by default, so the kernel can have their route
/// to a range beside the agent's.
pub(super) const METRIC: u32 = 202;
/// The metric of routes which refuse packets. It is so high that the kernel prefers any other route of the same prefix,
/// such as the route to the bridge of the node's pods.
pub(super) const REFUSE_METRIC: u32 = 4_278_198_272;

/// The agent adds no route that overlaps these unspecified, loopback, link-local, multicast and broadcast addresses.
const NEVER: [&str; 8] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255/32",
    "::/127",
    "fe80::/10",
    "ff00::/8",
];

/// What the kernel does with packets to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteTarget {
    /// Sends the packets to this address, which must be on a link of this node
    Via(Addr),
    /// Refuses packets to addresses that no pod has. The node's pods have routes of their own, which take precedence.
    /// Without this route, the default gateway or another node would send packets to unused addresses back
    Unreachable,
}

impl RouteTarget {
    /// Returns the metric of the route.
    pub(super) fn metric(self) -> u32 {
        match self {
            Self::Via(_) => METRIC,
            Self::Unreachable => REFUSE_METRIC,
        }
    }
}

/// The routes that the kernel should have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WantedRoutes {
    pub routes: BTreeMap<Cidr, RouteTarget>,
    /// The names of the nodes, by each of their addresses
    pub nodes: BTreeMap<Addr, String>,
    /// The names of nodes that have ranges of a family, but no address of that family
    pub without_address: BTreeSet<String>,
}

impl WantedRoutes {
    /// Returns the routes to the pods of all nodes except `own`, and those that refuse packets to the ranges of `own`.
    pub(super) fn new(objects: &BTreeMap<String, NodeRoutesSeen>, own: &str) -> Self {
        let never: Vec<Cidr> = NEVER
            .iter()
            .filter_map(|it| Cidr::parse_strict(it).ok())
            .collect();
        let nodes = objects
            .iter()
            .flat_map(|(name, it)| it.via.iter().map(move |via| (*via, name)));
        let nodes: BTreeMap<Addr, String> = nodes.map(|(via, name)| (via, name.clone())).collect();
        let own_via: BTreeSet<Addr> = objects
            .get(own)
            .map_or(BTreeSet::new(), |it| it.via.iter().copied().collect());

        let mut owners: BTreeMap<Cidr, (&String, &NodeRoutesSeen)> = BTreeMap::new();
        for (name, object) in objects {
            for cidr in &object.destinations {
                let before = owners.entry(*cidr).or_insert((name, object));
                if before.1.version < object.version {
                    *before = (name, object);
                }
            }
        }
        let mut without_address = BTreeSet::new();
        let mut target = |name: &String, object: &NodeRoutesSeen, family: Family| {
            if name == own {
                return Some(RouteTarget::Unreachable);
            }
            let mut via = object.via.iter();
            let Some(via) = via.find(|it| it.family == family) else {
                without_address.insert(name.clone());
                return None;
            };
            (!own_via.contains(via)).then_some(RouteTarget::Via(*via))
        };
        let is_allowed = |cidr: &Cidr| {
            let covers_node = nodes.range(cidr.first()..=cidr.last()).next().is_some();
            !covers_node && !never.iter().any(|it| it.overlaps(cidr))
        };
        let routes = owners.into_iter().filter(|(cidr, _)| is_allowed(cidr));
        let routes = routes.filter_map(|(cidr, (name, object))| {
            Some((cidr, target(name, object, cidr.family())?))
        });
        let routes = without_nested(routes);
        Self {
            routes,
            nodes,
            without_address,
        }
    }
}

/// Leaves out ranges of this node in a larger range of this node, whose route refuses the same packets. If the pods'
/// bridge has a route only to the larger range, a route to the smaller range would cut off pods.
fn without_nested(
    routes: impl Iterator<Item = (Cidr, RouteTarget)>,
) -> BTreeMap<Cidr, RouteTarget> {
    let mut kept = BTreeMap::new();
    // The ranges that contain the current one, the smallest last. A range comes directly before those inside it.
    let mut around: Vec<(Cidr, RouteTarget)> = Vec::new();
    for (cidr, target) in routes {
        while around.pop_if(|(outer, _)| !outer.contains(&cidr)).is_some() {}
        let is_refused = around.last().map(|(_, target)| *target) == Some(RouteTarget::Unreachable);
        if target != RouteTarget::Unreachable || !is_refused {
            kept.insert(cidr, target);
            around.push((cidr, target));
        }
    }
    kept
}

/// The agent's routes that the kernel has, by range and metric. The target is `None` for a kind of route that this
/// version of the agent does not add.
pub(super) type PresentRoutes = BTreeMap<(Cidr, u32), Option<RouteTarget>>;

/// A change of one route of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteChange {
    /// Add a route where the agent has none
    Add(Cidr, RouteTarget),
    /// Replace the agent's route of the same range and metric
    Replace(Cidr, RouteTarget),
    /// Delete the agent's route of this range and metric
    Delete(Cidr, u32),
}

/// Returns the changes that lead from the present to the wanted routes, in order.
pub(super) fn changes(
    wanted: &BTreeMap<Cidr, RouteTarget>,
    present: &PresentRoutes,
) -> Vec<RouteChange> {
    let mut all = Vec::new();
    for (cidr, target) in wanted {
        match present.get(&(*cidr, target.metric())) {
            None => all.push(RouteChange::Add(*cidr, *target)),
            Some(is) if *is == Some(*target) => {}
            Some(_) => all.push(RouteChange::Replace(*cidr, *target)),
        }
    }
    for (cidr, metric) in present.keys() {
        if wanted.get(cidr).map(|it| it.metric()) != Some(*metric) {
            all.push(RouteChange::Delete(*cidr, *metric));
        }
    }
    all
}

#[cfg(test)]
mod tests;
