//! Checks of NodeRoutes and FRRConfigurations. A block may be deleted only when neither of them lists it for its node.
//! At the end, they must list exactly the ranges of their nodes.

use std::collections::BTreeSet;

use cadastre_api::frr;
use cadastre_controller::cluster::names::NodeName;
use cadastre_controller::cluster::objects::{Block, Subnet};
use cadastre_core::Cidr;

use super::block_checks::listed;
use super::checks::{Verdict, wrong};
use super::run::Sim;

impl Sim {
    /// Records the blocks that the NodeSubnet listed before a change and does not list now.
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
        let (name, cidr) = (&spec.owner.name, spec.cidr.to_string());
        let unlisted = self.checks.unlisted.get(&(name.clone(), spec.cidr));
        for (rule, ranges, version) in self.routes_of(name) {
            let is_late = unlisted.is_some_and(|at| version > *at);
            if ranges.contains(&*cidr) && !is_late {
                let text = format!("block {cidr} is deleted, but {name} is routed");
                return wrong(rule, text, [name.clone()]);
            }
        }
        Ok(())
    }

    /// Returns two entries, for the NodeRoutes and for the FRRConfiguration of a node: the name of the rule about the
    /// kind, the ranges that the object lists, and the object's version.
    fn routes_of(&self, name: &NodeName) -> [(&'static str, BTreeSet<&str>, u64); 2] {
        let routes = self.api.routes.get(name);
        let destinations = routes.iter().flat_map(|it| &it.spec.destinations);
        let destinations = destinations.map(String::as_str).collect();
        let frr = self.api.frr_configurations.get(name);
        let prefixes = frr.iter().flat_map(|it| frr::prefixes(&it.spec)).collect();
        let version = |it: Option<u64>| it.unwrap_or_default();
        [
            ("routes", destinations, version(routes.map(|it| it.version))),
            ("frr", prefixes, version(frr.map(|it| it.version))),
        ]
    }

    /// Returns the ranges that the NodeSubnet lists for the existing Node, without withheld and standby ranges.
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
        let api = &self.api;
        let names = api.nodes.live.keys().chain(api.routes.live.keys());
        let names = names.chain(api.frr_configurations.live.keys());
        let (routes, frr) = (
            self.plan.publishes_routes(),
            self.plan.writes_frr_configurations(),
        );
        for name in names.collect::<BTreeSet<_>>() {
            let wanted = self.listed_ranges(name);
            for (is_written, (rule, found, _)) in
                [routes, frr].into_iter().zip(self.routes_of(name))
            {
                if is_written && wanted != found {
                    let text = format!("{name} has {wanted:?}, but {rule} lead to {found:?}");
                    return wrong(rule, text, [name.clone()]);
                }
            }
        }
        Ok(())
    }
}
