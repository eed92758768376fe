//! Checks of pools: pools that cannot allocate, that are exhausted or soon will be, or in which others allocate.

use super::{Finding, Severity};
use crate::inventory::Inventory;
use crate::render::{count, left, some};
use cadastre_api::AllocationMode;
use cadastre_controller::figures::figures;
use cadastre_controller::pools::{PoolPhase, PoolState};
use cadastre_core::Family;

/// A pool is reported if it will be exhausted within this time, a week.
const SOON_HOURS: i64 = 7 * 24;

pub(super) fn check(inventory: &Inventory, findings: &mut Vec<Finding>) {
    for state in inventory.registry.pools.iter() {
        standing(state, inventory, findings);
        room(state, inventory, findings);
    }
    if inventory.registry.pools.iter().next().is_none() {
        findings.push(Finding::new(
            Severity::Warning,
            "NoPool",
            "cluster".to_owned(),
            "there is no IPPool: no pod gets an address".to_owned(),
            "create one, or start the controller with --default-pool".to_owned(),
        ));
    }
}

fn standing(state: &PoolState, inventory: &Inventory, findings: &mut Vec<Finding>) {
    let object = format!("pool {}", state.name);
    let mut tell = |severity, code: &str, message: String, advice: &str| {
        let finding = Finding::new(severity, code, object.clone(), message, advice.to_owned());
        findings.push(finding);
    };
    match &state.phase {
        PoolPhase::Invalid(why) => tell(
            Severity::Warning,
            "PoolInvalid",
            format!("its spec cannot be used: {why}"),
            "correct it; nodes keep its ranges meanwhile",
        ),
        PoolPhase::Overlaps { .. } => tell(
            Severity::Warning,
            "PoolOverlaps",
            format!("it allocates nothing: {}", state.phase),
            "until that is resolved it serves no node",
        ),
        PoolPhase::Starting => tell(
            Severity::Warning,
            "PoolNotStarted",
            "it has no finalizer yet, so nothing is allocated from it".to_owned(),
            "check that a controller leads (kubectl get lease -A | grep cadastre): it adds the finalizer within a second",
        ),
        PoolPhase::Serving if state.selects_none(&inventory.cache) => tell(
            Severity::Info,
            "PoolForNobody",
            "its nodeSelector matches no node".to_owned(),
            "compare it with the labels of your nodes (kubectl get nodes --show-labels)",
        ),
        _ => {}
    }
    let object_status = inventory.cache.pools.get(&state.name);
    let status = object_status.and_then(|pool| pool.status.as_ref());
    let conditions = status.into_iter().flat_map(|status| &status.conditions);
    for condition in conditions.filter(|it| it.type_ == "ForeignAllocator" && it.status == "True") {
        tell(
            Severity::Critical,
            "ForeignAllocator",
            condition.message.clone(),
            "two allocators allocate from the same address space: turn off the other one before anything else",
        );
    }
}

fn room(state: &PoolState, inventory: &Inventory, findings: &mut Vec<Finding>) {
    if matches!(state.phase, PoolPhase::Invalid(_) | PoolPhase::Terminating) {
        return;
    }
    let object = format!("pool {}", state.name);
    let pool = inventory.cache.pools.get(&state.name);
    let status = pool.and_then(|pool| pool.status.as_ref());
    for family in state.space.families() {
        let counted = figures(state, family, &inventory.registry);
        let field = match family {
            Family::V4 => "ipv4",
            Family::V6 => "ipv6",
        };
        let told = status.and_then(|status| match family {
            Family::V4 => status.ipv4.as_ref(),
            Family::V6 => status.ipv6.as_ref(),
        });
        let at = told
            .and_then(|told| told.exhausts_at.as_ref())
            .map(|at| at.0);
        let limit = f64::from(state.nearly_exhausted) / 100.0;
        if counted.free == 0 {
            let waiting = waiting(state, inventory);
            let severity = if waiting.is_empty() {
                Severity::Warning
            } else {
                Severity::Critical
            };
            let wait = match waiting.len() {
                0 => "no node waits for it now".to_owned(),
                1 => format!("node {} waits for it", waiting[0]),
                many => format!("{} wait for it: {}", count(many, "node"), some(&waiting, 4)),
            };
            findings.push(Finding::new(
                severity,
                "PoolFull",
                object.clone(),
                format!("no free {family} block ({} of {} allocated, {} in quarantine); {wait}", counted.held, counted.capacity, counted.quarantined),
                format!("add a CIDR to spec.{field}.cidrs, or see which blocks could be released: kubectl cadastre explain pool {}", state.name),
            ));
        } else if counted.capacity > 0 && counted.utilization() >= limit {
            findings.push(Finding::new(
                Severity::Warning,
                "PoolNearlyFull",
                object.clone(),
                format!(
                    "{} of {} {family} blocks are free, and spec.nearlyExhaustedPercent is {}",
                    counted.free, counted.capacity, state.nearly_exhausted
                ),
                format!("add a CIDR to spec.{field}.cidrs in time"),
            ));
        } else if let Some(at) = at
            && at.duration_since(inventory.now).as_hours() < SOON_HOURS
        {
            findings.push(Finding::new(
                Severity::Info,
                "PoolFullSoon",
                object.clone(),
                format!(
                    "its {family} blocks will be exhausted {} if growth continues",
                    left(Some(at), inventory.now)
                ),
                format!("add a CIDR to spec.{field}.cidrs in time"),
            ));
        }
    }
}

/// Returns the nodes that the pool selects and that have no range at all. If there are none, but nodes wait according
/// to the pool's status, returns one text with the number of these nodes.
fn waiting(state: &PoolState, inventory: &Inventory) -> Vec<String> {
    let nodes = inventory.cache.nodes.iter();
    let lacks = nodes.filter(|node| {
        state.selects(node)
            && match state.allocation_mode {
                AllocationMode::NodeCIDR => node.is_empty(),
                AllocationMode::Blocks => {
                    state.terms.first_immediate && !inventory.registry.blocks.has(&node.uid)
                }
            }
    });
    let mut names: Vec<String> = lacks.map(|node| node.name.to_string()).collect();
    // Nodes that have a range may wait for more. Only their number is known, from the pool's status.
    let more = inventory.cache.pools.get(&state.name);
    let more = more
        .and_then(|pool| pool.status.as_ref()?.waiting)
        .unwrap_or(0);
    if names.is_empty() && more > 0 {
        names.push(format!("({more} according to its status)"));
    }
    names
}
