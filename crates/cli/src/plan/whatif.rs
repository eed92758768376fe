//! Simulates what the controller would do, by running the controller's own code on a copy of its state.
//!
//! The simulated controller has just become leader, and all its writes of podCIDRs and blocks succeed at once. Nothing
//! is written to the API server.

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::Inventory;
use cadastre_controller::allocations::AllocationState;
use cadastre_controller::cluster::names::{NodeName, PoolName};
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind};
use cadastre_controller::demand::Demand;
use cadastre_controller::podcidr::PodCidrs;
use cadastre_controller::{Context, EventRecord};
use cadastre_core::Cidr;

/// What the simulated controller has done, and which nodes it could not serve.
pub(crate) struct PlanOutcome {
    /// The ranges that the simulation allocates. The key is the node that gets them
    pub served: BTreeMap<NodeName, Vec<Cidr>>,
    /// Nodes that would wait. The key is the pool for which they wait
    pub waiting: BTreeMap<PoolName, BTreeSet<NodeName>>,
    /// Pools for which pods would wait, on at least one node
    pub wanted_by_pods: BTreeSet<PoolName>,
    /// The texts of the controller's warning events. The key is the node that the events are about
    pub notes: BTreeMap<NodeName, Vec<String>>,
    /// The owners of all ranges after the simulation
    pub registry: AllocationState,
}

impl PlanOutcome {
    /// Returns the nodes that would wait for at least one pool.
    pub(crate) fn waits(&self) -> BTreeSet<&NodeName> {
        self.waiting.values().flatten().collect()
    }
}

/// Simulates the controller for all nodes of the inventory, until nothing more can be allocated.
pub(crate) fn simulate_now(inventory: &Inventory) -> PlanOutcome {
    let (cache, now) = (&inventory.cache, inventory.moment());
    let (mut registry, _) = AllocationState::rebuild(cache, &[], now);
    registry.judge_blocks(cache);
    let mut podcidrs = PodCidrs::default();
    let mut demand = Demand::default();
    for node in cache.nodes.iter() {
        podcidrs.queue.add(node.name.clone());
        demand.add(node, &registry);
    }
    let mut reports = Vec::new();
    let mut cx = Context {
        cache,
        allocations: &mut registry,
        reports: &mut reports,
        now,
    };
    let mut served: BTreeMap<NodeName, Vec<Cidr>> = BTreeMap::new();
    while let Some((request, _)) = podcidrs.next_urgent(&mut cx, false) {
        if let ApiRequest::AssignPodCidrs(assignment) = request {
            served.insert(assignment.name, assignment.cidrs);
        }
    }
    loop {
        let allocated = demand.work(&mut cx).blocks;
        if allocated.is_empty() {
            break;
        }
        for cidr in allocated {
            if let Some(entry) = cx.allocations.blocks.get(&cidr) {
                let of_node = served.entry(entry.owner.name.clone()).or_default();
                of_node.push(cidr);
            }
        }
    }
    let mut waiting: BTreeMap<PoolName, BTreeSet<NodeName>> = BTreeMap::new();
    let mut wait = |pool: &PoolName, node: &NodeName| {
        let nodes = waiting.entry(pool.clone()).or_default();
        nodes.insert(node.clone());
    };
    for (node, reason) in podcidrs.waiting_nodes() {
        for pool in reason.pools() {
            wait(pool, node);
        }
    }
    for (pool, node) in demand.waiting_nodes() {
        wait(pool, node);
    }
    let of_node = |it: &EventRecord| it.warning && it.about.kind == ObjectKind::Node;
    let mut notes: BTreeMap<NodeName, Vec<String>> = BTreeMap::new();
    for report in reports.into_iter().filter(of_node) {
        let of_node = notes.entry((*report.about.name).into()).or_default();
        of_node.push(report.note);
    }
    PlanOutcome {
        served,
        waiting,
        wanted_by_pods: demand.wanted_by_pods().cloned().collect(),
        notes,
        registry,
    }
}
