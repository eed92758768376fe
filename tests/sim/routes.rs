//! Checks of NodeRoutes: that a block is not deleted while a route leads to its node, and that at the end the routes are
//! exactly the ranges of the nodes.

use std::collections::BTreeSet;

use cadastre_controller::cluster::names::NodeName;
use cadastre_controller::cluster::objects::{Block, Subnet};
use cadastre_core::Cidr;

use super::block_checks::listed;
use super::checks::{Verdict, wrong};
use super::run::Sim;

impl Sim {
    /// Notes which blocks the NodeSubnet does not list any more.
    pub fn note_unlisted(&mut self, before: Option<&Subnet>) {
        let Some(before) = before else { return };
        let now = self.api.subnets.get(&before.name).map(AsRef::as_ref);
        let version = self.api.subnets.version;
        let cidrs = |subnet| -> BTreeSet<Cidr> {
            let blocks = listed(subnet).into_iter();
            blocks.map(|(cidr, _)| cidr).collect()
        };
        for cidr in &cidrs(Some(before)) - &cidrs(now) {
            self.checks
                .unlisted
                .insert((before.name.clone(), cidr), version);
        }
    }

    /// Checks that no route leads to the node of a block that a controller has deleted. A route that the API server has
    /// stored after the NodeSubnet stopped listing the block comes from a late write, which a controller cannot
    /// prevent.
    pub fn check_unrouted(&mut self, block: &Block) -> Verdict {
        let Ok(spec) = &block.spec else { return Ok(()) };
        let Some(routes) = self.api.routes.get(&spec.owner.name) else {
            return Ok(());
        };
        let cidr = spec.cidr.to_string();
        let unlisted = self
            .checks
            .unlisted
            .get(&(spec.owner.name.clone(), spec.cidr));
        let is_late = unlisted.is_some_and(|at| routes.version > *at);
        if !routes.spec.destinations.contains(&cidr) || is_late {
            return Ok(());
        }
        let text = format!("block {cidr} is deleted, but {} is routed", routes.name);
        wrong("routes", text, [routes.name.clone()])
    }

    /// Returns the ranges that the NodeSubnet lists for the Node of this name.
    pub fn listed_ranges(&self, name: &NodeName) -> BTreeSet<&str> {
        let node = self.api.nodes.get(name);
        let subnet = self.api.subnets.get(name);
        let spec = subnet.and_then(|it| it.spec.as_ref().ok());
        let is_of = |uid: Option<&str>| node.is_some_and(|it| uid == Some(&*it.uid));
        let spec = spec.filter(|it| is_of(it.node_uid.as_deref()));
        spec.map_or_else(BTreeSet::new, |it| {
            let pod_cidrs = it.pod_cidrs.iter().filter(|it| !it.withheld);
            let blocks = it.blocks.iter().filter(|it| !it.standby);
            let pod_cidrs = pod_cidrs.map(|it| &*it.cidr);
            pod_cidrs.chain(blocks.map(|it| &*it.cidr)).collect()
        })
    }

    pub fn check_routes_end(&self) -> Verdict {
        if !self.plan.publishes_routes() {
            return Ok(());
        }
        let names = self.api.nodes.live.keys();
        let names: BTreeSet<_> = names.chain(self.api.routes.live.keys()).collect();
        for name in names {
            let wanted = self.listed_ranges(name);
            let routes = self.api.routes.get(name);
            let found = routes.map_or(&[][..], |it| &it.spec.destinations);
            let found: BTreeSet<&str> = found.iter().map(|it| &**it).collect();
            if wanted != found {
                let text = format!("{name} has {wanted:?}, but routes lead to {found:?}");
                return wrong("routes", text, [name.clone()]);
            }
        }
        Ok(())
    }
}
