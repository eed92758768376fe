//! Why a pool serves or not, what fills it, what comes free.

use super::Explanation;
use crate::cli::kubectl::inventory::Inventory;
use crate::cli::kubectl::plan::whatif;
use crate::cli::kubectl::render::{count, left, some};
use crate::cli::kubectl::{drain, show};
use crate::controller::figures::figures;
use crate::controller::pools::PoolState;
use crate::ipam::Family;

/// Why a pool serves or not, and what fills it.
pub fn pool(name: &str, inventory: &Inventory) -> anyhow::Result<Explanation> {
    let state = inventory.pool(name)?;
    let report = show::pool(name, inventory)?;
    let mut explanation = Explanation::about(format!("pool {name}"));
    let mut room = Vec::new();
    let mut full: Vec<Family> = Vec::new();
    for family in state.space.families() {
        let counted = figures(state, family, &inventory.registry);
        let size = state.space.block_len(family).unwrap_or_default();
        room.push(format!(
            "{family}: {} blocks of /{size}: {} held, {} in quarantine, {} free",
            counted.capacity, counted.held, counted.quarantined, counted.free
        ));
        if counted.free == 0 {
            full.push(family);
        }
    }
    explanation.answer = if !state.is_serving() {
        format!("it carves nothing: {}", state.verdict)
    } else if full.is_empty() {
        "it serves, and has room".to_owned()
    } else {
        let full: Vec<String> = full.iter().map(ToString::to_string).collect();
        format!(
            "it serves, but has no free {} block",
            full.join(" and no free ")
        )
    };
    explanation.add("Room", room);
    explanation.add(
        "Leaves out",
        state.left_out.iter().take(10).cloned().collect(),
    );
    let reserved = state.reserved.len().saturating_sub(state.left_out.len());
    if reserved > 0 {
        explanation.add(
            "Reserved",
            vec![format!("{} by its spec", count(reserved, "range"))],
        );
    }
    let most = report
        .holders
        .iter()
        .filter(|it| !it.resting)
        .take(8)
        .map(|it| {
            format!(
                "{}: {}, {} addresses in use",
                it.node,
                count(it.ranges, "range"),
                it.used
            )
        });
    explanation.add("Who holds most", most.collect());
    explanation.add("What comes free", comes_free(state, inventory));
    let outcome = whatif::simulate_now(inventory);
    let waiting = outcome
        .waiting
        .iter()
        .filter(|(pool, _)| **pool == state.name);
    let waiting: Vec<String> = waiting
        .flat_map(|(_, nodes)| nodes.iter().map(ToString::to_string))
        .collect();
    if !waiting.is_empty() {
        explanation.add(
            "Who waits",
            vec![format!(
                "{}: {}",
                count(waiting.len(), "node"),
                some(&waiting, 8)
            )],
        );
    }
    if !full.is_empty() {
        let fields = full.iter().map(|family| match family {
            Family::V4 => "add a CIDR to spec.ipv4.cidrs; running pods keep their addresses, and nodes that wait are served at once".to_owned(),
            Family::V6 => "add a CIDR to spec.ipv6.cidrs; running pods keep their addresses, and nodes that wait are served at once".to_owned(),
        });
        explanation.add("What to do", fields.collect());
    }
    Ok(explanation)
}

/// What is in quarantine, and what nodes could do without.
fn comes_free(state: &PoolState, inventory: &Inventory) -> Vec<String> {
    let mut lines = Vec::new();
    let blocks = inventory.registry.blocks.iter();
    let resting = blocks.filter(|it| it.pool == state.name && it.owner.resting);
    for entry in resting.take(8) {
        let kept = inventory.pods_in(&entry.cidr).next();
        let kept = kept.map_or(String::new(), |(addr, pod)| {
            format!(", but pod {} still uses {addr}", pod.name)
        });
        let over = left(entry.until, inventory.now);
        lines.push(format!(
            "{} was node {}'s: its quarantine is over {over}{kept}",
            entry.cidr, entry.owner.name
        ));
    }
    let surplus = drain::surplus_of_pool(&state.name, inventory);
    if !surplus.is_empty() {
        lines.push(format!(
            "{} are empty and not the last of their node: they return after spec.idleSeconds, or at once by kubectl cadastre drain --node: {}",
            count(surplus.len(), "block"),
            some(&surplus, 8)
        ));
    }
    lines
}
