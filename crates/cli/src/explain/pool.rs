//! Explains whether a pool allocates, what fills it, and which of its blocks can become free.

use super::{ANEW, Explanation};
use crate::inventory::Inventory;
use crate::plan::whatif;
use crate::render::{count, over, some};
use crate::{drain, show};
use cadastre_api::AllocationMode;
use cadastre_controller::cluster::names::NodeName;
use cadastre_controller::cluster::objects::Node;
use cadastre_controller::figures::figures;
use cadastre_controller::pools::PoolState;
use cadastre_core::{Cidr, Family};

/// Explains a pool. Fails if there is no pool of this name.
pub(crate) fn pool(name: &str, inventory: &Inventory) -> anyhow::Result<Explanation> {
    let state = inventory.pool(name)?;
    let report = show::pool(name, inventory)?;
    let mut explanation = Explanation::about(format!("pool {name}"));
    let mut room = Vec::new();
    let mut full: Vec<Family> = Vec::new();
    for family in state.space.families() {
        let counts = figures(state, family, &inventory.registry);
        let size = state.space.block_len(family).unwrap_or_default();
        room.push(format!(
            "{family}: {} blocks of /{size}: {} allocated, {} in quarantine, {} free",
            counts.capacity, counts.held, counts.quarantined, counts.free
        ));
        if counts.free == 0 {
            full.push(family);
        }
    }
    explanation.answer = if !state.is_serving() {
        format!("it allocates nothing: {}", state.phase)
    } else if state.selects_none(&inventory.cache) {
        "it serves no node: its nodeSelector matches none (kubectl get nodes --show-labels)"
            .to_owned()
    } else if full.is_empty() {
        "it serves, and has free blocks".to_owned()
    } else {
        let full: Vec<String> = full.iter().map(ToString::to_string).collect();
        format!(
            "it serves, but has no free {} block",
            full.join(" and no free ")
        )
    };
    explanation.add("Room", room);
    let claims = inventory.claims.values();
    let claims = claims.filter(|it| it.status.pool.as_deref() == Some(name));
    let claims = claims.filter(|it| !it.addresses.is_empty()).count();
    if claims > 0 {
        let line = format!(
            "{} of it (kubectl cadastre claim list -A)",
            if claims == 1 {
                "1 claim has addresses".to_owned()
            } else {
                format!("{claims} claims have addresses")
            }
        );
        explanation.add("Claims", vec![line]);
    }
    let left_out = state.left_out.iter().take(10).cloned();
    explanation.add("Leaves out", left_out.collect());
    let reserved = state.reserved.len().saturating_sub(state.left_out.len());
    let on_request = state.on_request.len();
    let kinds = [
        (reserved, "never assigned"),
        (on_request, "for pods that ask for an address of them"),
    ];
    let kinds = kinds.into_iter().filter(|(number, _)| *number > 0);
    let lines =
        kinds.map(|(number, what)| format!("{} in its spec: {what}", count(number, "range")));
    explanation.add("Reserved", lines.collect());
    let nodes = report.holders.iter().filter(|it| !it.quarantined);
    let lines = nodes.take(8).map(|it| {
        let ranges = count(it.ranges, "range");
        format!("{}: {ranges}, {} addresses in use", it.node, it.used)
    });
    explanation.add("Nodes with most of it", lines.collect());
    explanation.add("Assignments", assignments(state));
    explanation.add(
        "Nodes whose podCIDRs lack a family",
        lacking(state, inventory),
    );
    let outcome = whatif::simulate_now(inventory);
    let spare = drain::surplus_of_pool(&state.name, inventory, &outcome.wanted_by_pods);
    let unused = drain::surplus_of_pool(&state.name, inventory, &[state.name.clone()].into());
    let free_soon = comes_free(state, &spare, &unused, inventory);
    explanation.add("Blocks that come free", free_soon);
    if let Some(waiting) = outcome.waiting.get(&state.name) {
        let (number, waiting) = (count(waiting.len(), "node"), Vec::from_iter(waiting));
        let line = format!("{number}: {}", some(&waiting, 8));
        explanation.add("Nodes that wait", vec![line]);
    }
    if !full.is_empty() {
        let mut advice = Vec::new();
        if !unused.is_empty() {
            advice.push(format!(
                "nothing yet: {} without an address in use, which nodes whose pods wait get within seconds; if they do not, check that the agents of the nodes that have them run (kubectl cadastre show blocks)",
                count(unused.len(), "block")
            ));
        }
        advice.extend(full.iter().map(|family| {
            let field = family.to_string().to_lowercase();
            let when = if unused.is_empty() { "" } else { "for more room, " };
            format!("{when}add a CIDR to spec.{field}.cidrs; running pods keep their addresses, and nodes that wait are served at once")
        }));
        explanation.add("What to do", advice);
    }
    Ok(explanation)
}

/// Lists at most 8 assignments of the pool that cannot be used, each with the reason.
fn assignments(state: &PoolState) -> Vec<String> {
    let problems = state.assignments.problems().take(8);
    let lines = problems.map(|(node, why)| format!("of node {node}: {why}"));
    lines.collect()
}

/// Lists for each family of the pool the nodes that have a podCIDR of the pool, but no podCIDR of the family. These
/// nodes registered before the pool had the family.
fn lacking(state: &PoolState, inventory: &Inventory) -> Vec<String> {
    let is_of_pool = |node: &Node| {
        let mut cidrs = node.pod_cidrs.iter();
        state.allocation_mode == AllocationMode::NodeCIDR
            && cidrs.any(|cidr| state.space.covers(cidr))
    };
    let mut lines: Vec<String> = Vec::new();
    for family in state.space.families() {
        let lacks = |node: &Node| node.pod_cidrs.iter().all(|cidr| cidr.family() != family);
        let nodes = inventory.cache.nodes.iter().map(AsRef::as_ref);
        let nodes = nodes.filter(|node: &&Node| is_of_pool(node) && lacks(node));
        let names: Vec<&NodeName> = nodes.map(|node| &node.name).collect();
        if !names.is_empty() {
            lines.push(format!(
                "{family}: {}: {}",
                count(names.len(), "node"),
                some(&names, 8)
            ));
        }
    }
    if !lines.is_empty() {
        lines.push(format!(
            "podCIDRs never change. To give these nodes both families, do this for one node after the other: {ANEW}"
        ));
    }
    lines
}

/// Lists the blocks of a pool that can become free: blocks in quarantine, blocks that nodes do not need (`spare`), and
/// blocks that nodes would release if pods on other nodes waited (`unused`).
fn comes_free(
    state: &PoolState,
    spare: &[Cidr],
    unused: &[Cidr],
    inventory: &Inventory,
) -> Vec<String> {
    let mut lines = Vec::new();
    let blocks = inventory.registry.blocks.iter();
    let quarantined = blocks.filter(|it| it.pool == state.name && it.owner.quarantined);
    for entry in quarantined.take(8) {
        let kept = inventory.pods_in(&entry.cidr).next();
        let kept = kept.map_or(String::new(), |(addr, pod)| {
            format!(", but pod {} still uses {addr}", pod.name)
        });
        let over = over(entry.until, inventory.now);
        lines.push(format!(
            "{} was node {}'s: its quarantine is {over}{kept}",
            entry.cidr, entry.owner.name
        ));
    }
    if !spare.is_empty() {
        lines.push(format!(
            "{} empty and not needed: back in the pool after spec.idleSeconds, or at once with kubectl cadastre drain --node: {}",
            count(spare.len(), "block"),
            some(spare, 8)
        ));
    }
    let last: Vec<&Cidr> = unused.iter().filter(|it| !spare.contains(it)).collect();
    if !last.is_empty() {
        lines.push(format!(
            "{}, empty but kept as the last on a node until pods on another node wait: {}",
            count(last.len(), "block"),
            some(&last, 8)
        ));
    }
    lines
}
