//! Simulates what the controller would do, by running the controller's own code on a copy of its state.
//!
//! podCIDRs and blocks are allocated as by a controller that has just become leader and whose writes all succeed at
//! once. Nothing is written.

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::Inventory;
use cadastre_controller::allocations::AllocationState;
use cadastre_controller::cluster::names::{NodeName, PoolName};
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind};
use cadastre_controller::demand::Demand;
use cadastre_controller::podcidr::{PodCidrs, WaitReason};
use cadastre_controller::{Context, EventRecord};
use cadastre_core::Cidr;

/// The result of a simulation.
pub(crate) struct PlanOutcome {
    /// The ranges that the simulation allocates, by node
    pub served: BTreeMap<NodeName, Vec<Cidr>>,
    /// Nodes that would wait, by the pool for which they wait
    pub waiting: BTreeMap<PoolName, BTreeSet<NodeName>>,
    /// Pools for which pods would wait, on any node
    pub wanted_by_pods: BTreeSet<PoolName>,
    /// The text of the controller's warning events, by the node that they are about
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
    let mut reports = Vec::new();
    let mut outcome = PlanOutcome {
        served: BTreeMap::new(),
        waiting: BTreeMap::new(),
        wanted_by_pods: BTreeSet::new(),
        notes: BTreeMap::new(),
        registry: AllocationState::default(),
    };
    let mut podcidrs = PodCidrs::default();
    let mut demand = Demand::default();
    for node in cache.nodes.iter() {
        podcidrs.queue.add(node.name.clone());
        demand.add(node, &registry);
    }
    let mut cx = Context {
        cache,
        allocations: &mut registry,
        reports: &mut reports,
        now,
    };
    while let Some((request, _)) = podcidrs.next_urgent(&mut cx, false) {
        if let ApiRequest::AssignPodCidrs(assignment) = request {
            outcome.served.insert(assignment.name, assignment.cidrs);
        }
    }
    loop {
        let carved = demand.work(&mut cx).blocks;
        if carved.is_empty() {
            break;
        }
        for cidr in carved {
            if let Some(entry) = cx.allocations.blocks.get(&cidr) {
                let served = outcome.served.entry(entry.owner.name.clone());
                served.or_default().push(cidr);
            }
        }
    }
    for (node, reason) in podcidrs.waiting_nodes() {
        let pools: &[PoolName] = match reason {
            WaitReason::Unmanaged => &[],
            WaitReason::Barred { pools } | WaitReason::Full { pools } => pools,
        };
        for pool in pools {
            outcome.waits_for(pool, node);
        }
    }
    for (pool, node) in demand.waiting_nodes() {
        outcome.waits_for(pool, node);
    }
    outcome.wanted_by_pods = demand.wanted_by_pods().cloned().collect();
    let of_node = |it: &EventRecord| it.warning && it.about.kind == ObjectKind::Node;
    for report in reports.into_iter().filter(of_node) {
        let notes = outcome.notes.entry((*report.about.name).into());
        notes.or_default().push(report.note);
    }
    outcome.registry = registry;
    outcome
}

impl PlanOutcome {
    fn waits_for(&mut self, pool: &PoolName, node: &NodeName) {
        let nodes = self.waiting.entry(pool.clone()).or_default();
        nodes.insert(node.clone());
    }
}
