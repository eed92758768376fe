//! The caches of all kinds in one place.
//!
//! A standby keeps them up to date; a leader decides by them. This module makes no decisions.

use super::addresses::Addresses;
use super::intents::Versions;
use super::pods::PodIndex;
use super::request::{Kind, Known};
use super::seen::{AgentReport, Block, Node, Object, Pool, ServiceRange, Subnet, Text};
use super::table::{Delta, Sent, Table};

/// All cached objects.
#[derive(Debug, Default)]
pub struct World {
    /// Nodes
    pub nodes: Table<Node>,
    /// IPPools
    pub pools: Table<Pool>,
    /// NodeSubnets
    pub subnets: Table<Subnet>,
    /// IPAMBlocks
    pub blocks: Table<Block>,
    /// ServiceCIDRs
    pub services: Table<ServiceRange>,
    /// Pods and their addresses
    pub pods: PodIndex,
    /// Addresses of nodes
    pub node_addresses: Addresses,
}

impl World {
    /// Returns the kinds whose first list is not complete; before all are, nothing is allocated.
    pub fn missing(&self) -> Vec<&'static str> {
        [
            ("nodes", self.nodes.is_listed()),
            ("ippools", self.pools.is_listed()),
            ("nodesubnets", self.subnets.is_listed()),
            ("ipamblocks", self.blocks.is_listed()),
            ("servicecidrs", self.services.is_listed()),
            ("pods", self.pods.is_listed()),
        ]
        .into_iter()
        .filter(|(_, listed)| !listed)
        .map(|(kind, _)| kind)
        .collect()
    }

    /// Returns the versions that were seen of the kinds by which ranges are allocated.
    pub fn versions(&self) -> Versions {
        Versions {
            nodes: self.nodes.newest(),
            subnets: self.subnets.newest(),
            blocks: self.blocks.newest(),
        }
    }

    /// Returns what is known of the subject of a request: a kind, and the object if it is about one.
    pub(crate) fn about(&self, (kind, name): (Kind, Option<&Text>)) -> (Sent, Option<Known>) {
        match kind {
            Kind::Node => about(&self.nodes, name),
            Kind::Subnet => about(&self.subnets, name),
            Kind::Block => about(&self.blocks, name),
            Kind::Pool => about(&self.pools, name),
        }
    }

    /// Updates what is derived from nodes after a change of one.
    pub(crate) fn note_node(&mut self, delta: &Delta<Node>) {
        if let Some(before) = &delta.before {
            self.node_addresses.remove(&before.addresses);
        }
        if let Some(after) = &delta.after {
            self.node_addresses.add(&after.addresses);
        }
    }
}

fn about<T: Object>(table: &Table<T>, name: Option<&Text>) -> (Sent, Option<Known>) {
    let object = name.and_then(|name| table.get(name));
    (table.sent(), object.map(|it| Known::of(&**it)))
}

/// Returns the report of a node's agent, if it is for that UID.
pub(crate) fn report_of<'a>(node: &Node, world: &'a World) -> Option<&'a AgentReport> {
    let report = world.subnets.get(&node.name)?.report.as_deref()?;
    (report.node_uid == node.uid).then_some(report)
}
