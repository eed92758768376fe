//! Checks of pools. They report pools that cannot allocate, pools that are or will soon be exhausted, and pools in
//! which foreign allocators allocate.

use std::sync::Arc;

use super::{Findings, Severity};
use crate::inventory::Inventory;
use crate::render::{count, left, some};
use cadastre_api::AllocationMode;
use cadastre_controller::cluster::objects::Node;
use cadastre_controller::figures::figures;
use cadastre_controller::pools::{PoolPhase, PoolState};

/// A pool is reported if it will be exhausted within this time, which is a week.
const SOON_HOURS: i64 = 7 * 24;

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    for state in inventory.registry.pools.iter() {
        standing(state, inventory, findings);
        room(state, inventory, findings);
    }
    if inventory.registry.pools.iter().next().is_none() {
        findings.add(
            Severity::Warning,
            "NoPool",
            "cluster",
            "there is no IPPool: no pod gets an address",
            "create one, or start the controller with --default-pool",
        );
    }
}

fn standing(state: &PoolState, inventory: &Inventory, findings: &mut Findings) {
    let object = format!("pool {}", state.name);
    let mut add = |severity, code: &str, message: String, advice: &str| {
        findings.add(severity, code, &object, message, advice);
    };
    match &state.phase {
        PoolPhase::Invalid(why) => add(
            Severity::Warning,
            "PoolInvalid",
            format!("its spec cannot be used: {why}"),
            "correct it; nodes keep its ranges meanwhile",
        ),
        PoolPhase::Overlaps { .. } => add(
            Severity::Warning,
            "PoolOverlaps",
            format!("it allocates nothing: {}", state.phase),
            "until that is resolved it serves no node",
        ),
        PoolPhase::Starting => add(
            Severity::Warning,
            "PoolNotStarted",
            "it has no finalizer yet, so nothing is allocated from it".to_owned(),
            "check that a controller leads (kubectl get lease -A | grep cadastre): it adds the finalizer within a second",
        ),
        PoolPhase::Serving if state.selects_none(&inventory.cache) => add(
            Severity::Info,
            "PoolForNobody",
            "its nodeSelector matches no node".to_owned(),
            "compare it with the labels of your nodes (kubectl get nodes --show-labels)",
        ),
        _ => {}
    }
    let status = inventory.pool_status(&state.name);
    let conditions = status.into_iter().flat_map(|status| &status.conditions);
    for condition in conditions.filter(|it| it.type_ == "ForeignAllocator" && it.status == "True") {
        add(
            Severity::Critical,
            "ForeignAllocator",
            condition.message.clone(),
            "two allocators allocate from the same address space: turn off the other one before anything else",
        );
    }
}

fn room(state: &PoolState, inventory: &Inventory, findings: &mut Findings) {
    if matches!(state.phase, PoolPhase::Invalid(_) | PoolPhase::Terminating) {
        return;
    }
    let object = format!("pool {}", state.name);
    for family in state.space.families() {
        let counts = figures(state, family, &inventory.registry);
        let field = family.to_string().to_lowercase();
        let in_time = format!("add a CIDR to spec.{field}.cidrs in time");
        let status = inventory.family_status(&state.name, family);
        let exhausted_at = status.and_then(|it| Some(it.exhausts_at.as_ref()?.0));
        let limit = f64::from(state.nearly_exhausted) / 100.0;
        if counts.free == 0 {
            let waiting = waiting(state, inventory);
            let (severity, wait) = match &*waiting {
                [] => (Severity::Warning, "no node waits for it now".to_owned()),
                [node] => (Severity::Critical, format!("node {node} waits for it")),
                all => (
                    Severity::Critical,
                    format!("{} wait for it: {}", count(all.len(), "node"), some(all, 4)),
                ),
            };
            findings.add(
                severity,
                "PoolFull",
                &object,
                format!("no free {family} block ({} of {} allocated, {} in quarantine); {wait}", counts.held, counts.capacity, counts.quarantined),
                format!("add a CIDR to spec.{field}.cidrs, or see which blocks could be released: kubectl cadastre explain pool {}", state.name),
            );
        } else if counts.capacity > 0 && counts.utilization() >= limit {
            let message = format!(
                "{} of {} {family} blocks are free, and spec.nearlyExhaustedPercent is {}",
                counts.free, counts.capacity, state.nearly_exhausted
            );
            findings.add(
                Severity::Warning,
                "PoolNearlyFull",
                &object,
                message,
                in_time,
            );
        } else if let Some(at) = exhausted_at
            && at.duration_since(inventory.now).as_hours() < SOON_HOURS
        {
            let message = format!(
                "its {family} blocks will be exhausted {} if growth continues",
                left(Some(at), inventory.now)
            );
            findings.add(Severity::Info, "PoolFullSoon", &object, message, in_time);
        }
    }
}

/// Returns the nodes that have no range, although the pool selects them and should have allocated a first range to
/// them. If there are no such nodes, but the pool's status says that nodes wait, returns one text with their number.
fn waiting(state: &PoolState, inventory: &Inventory) -> Vec<String> {
    let lacks_range = |node: &&Arc<Node>| match state.allocation_mode {
        _ if !state.selects(node) => false,
        AllocationMode::NodeCIDR => node.is_empty(),
        AllocationMode::Blocks => {
            let has_block = inventory.plain_blocks(&node.uid).next().is_some();
            state.terms.first_immediate && !has_block
        }
    };
    let nodes = inventory.cache.nodes.iter().filter(lacks_range);
    let names: Vec<String> = nodes.map(|node| node.name.to_string()).collect();
    // Nodes that have a range may wait for more. The pool's status says only how many nodes wait, not which nodes wait.
    match inventory.waiting(&state.name) {
        Some(more) if names.is_empty() => vec![format!("({more} according to its status)")],
        _ => names,
    }
}
