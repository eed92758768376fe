//! Explains from which pools a node gets ranges, why the node waits for a range, and why it keeps each of its blocks.

use super::{ANEW, Explanation, choice};
use crate::inventory::Inventory;
use crate::plan::whatif;
use crate::render::{count, some};
use cadastre_api::choice::Requester;
use cadastre_api::{AllocationMode, Recall};
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::objects::Node;
use cadastre_controller::pools::PoolPhase;
use cadastre_core::Cidr;

/// Explains a node by simulating what the controller would do now. Fails if there is no node of this name.
pub(crate) fn node(name: &str, inventory: &Inventory) -> anyhow::Result<Explanation> {
    let node = inventory.node(name)?;
    let requester = Requester {
        node: &node.labels,
        pod: None,
        by_name: &[],
    };
    let mut explanation = Explanation::about(format!("node {name}"));
    let kinds = [
        (AllocationMode::NodeCIDR, "podCIDRs"),
        (AllocationMode::Blocks, "blocks"),
    ];
    for (mode, title) in kinds {
        let mut pools = inventory.registry.pools.iter();
        if pools.any(|pool| pool.allocation_mode == mode) {
            let (_, lines) = choice(mode, &requester, inventory);
            explanation.add(&format!("Pools for its {title}"), lines);
        }
    }
    explanation.add("Assigned ranges", assigned(node, inventory));
    let outcome = whatif::simulate_now(inventory);
    let waits = outcome.notes.get(&node.name).cloned().unwrap_or_default();
    let blocks: Vec<&BlockEntry> = inventory.registry.blocks.of(&node.uid).collect();
    explanation.answer = match (node.pod_cidrs.len(), blocks.len()) {
        _ if node.deleting => "it is being deleted: it keeps what it has until it is gone".to_owned(),
        (0, 0) if waits.is_empty() && outcome.served.contains_key(&node.name) => {
            "it has no range yet, and will get one: check that a controller leads (kubectl get lease -A)".to_owned()
        }
        (0, 0) if waits.is_empty() => "it has no range, and no pool serves it, which is not an error".to_owned(),
        (0, 0) => "it has no range, and waits for one".to_owned(),
        (cidrs, blocks) if waits.is_empty() => format!("it has {} and {}", count(cidrs, "podCIDR"), count(blocks, "block")),
        (cidrs, blocks) => format!("it has {} and {}, and waits for more", count(cidrs, "podCIDR"), count(blocks, "block")),
    };
    if !waits.is_empty() {
        explanation.add("Whether it can borrow", borrowing(node, inventory));
    }
    explanation.add("Why it waits", waits);
    let kept = blocks
        .iter()
        .map(|entry| kept(entry, &blocks, node, inventory));
    explanation.add("Why it keeps each block", kept.collect());
    Ok(explanation)
}

/// Returns a line about the ranges that `spec.assignments` of a pool gives the node; none if there is no such entry.
fn assigned(node: &Node, inventory: &Inventory) -> Vec<String> {
    let pool = inventory.registry.pools.assigning(node);
    let assignment = pool.and_then(|pool| Some((pool, pool.assignments.of(&node.name)?)));
    let Some((pool, assigned)) = assignment else {
        return Vec::new();
    };
    let text = |cidrs: &[Cidr]| some(&cidrs.iter().collect::<Vec<_>>(), 2);
    let has_all = assigned.cidrs.iter().all(|it| node.pod_cidrs.contains(it));
    let others = if node.pod_cidrs.is_empty() || has_all {
        String::new()
    } else {
        format!(
            ". It has {}, which it keeps, as podCIDRs never change. To give it the assigned ranges, {ANEW}",
            text(&node.pod_cidrs)
        )
    };
    let ranges = text(&assigned.cidrs);
    vec![format!("pool \"{}\": {ranges}{others}", pool.name)]
}

/// Says for each exhausted pool of a node whether the node can borrow parts of other nodes' blocks.
fn borrowing(node: &Node, inventory: &Inventory) -> Vec<String> {
    let pools = inventory.registry.pools.iter();
    let pools = pools.filter(|pool| {
        pool.allocation_mode == AllocationMode::Blocks && pool.is_serving() && pool.selects(node)
    });
    let words = pools.map(|pool| {
        let name = &pool.name;
        if pool.terms.borrows {
            format!("pool \"{name}\": yes. If it gets nothing, no node with an agent that answers has a free aligned range of two or more addresses beside those that it uses and keeps ready (spec.warm.low), or the node has as many blocks as it may (spec.maxBlocksPerNode)")
        } else {
            format!("pool \"{name}\": no, spec.borrowing is Never")
        }
    });
    words.collect()
}

/// Explains why a node still has a block, and when the block will return to the pool.
fn kept(entry: &BlockEntry, all: &[&BlockEntry], node: &Node, inventory: &Inventory) -> String {
    let pool = inventory.registry.pools.get(&entry.pool);
    if let Some(claim) = inventory.claim_of_block(entry) {
        return kept_for_claim(entry, &claim, inventory);
    }
    let lender = entry.parent.as_ref();
    let lender = lender.map_or_else(String::new, |it| format!(", borrowed from {}", it.node));
    let line = format!("{} (pool \"{}\"{lender}): ", entry.cidr, entry.pool);
    let requests = inventory.subnets.get(&node.name).map(|it| &it.requests);
    let is_requested = requests.is_some_and(|it| it.drain.contains(&entry.cidr));
    let leaves = match pool {
        None => Some("its pool is gone".to_owned()),
        Some(pool) if pool.phase == PoolPhase::Terminating => {
            Some("its pool is being deleted".to_owned())
        }
        Some(pool) if !pool.selects(node) => Some("its pool no longer selects the node".to_owned()),
        Some(pool) if !pool.space.covers(&entry.cidr) => {
            Some("its pool no longer has that range".to_owned())
        }
        Some(_) if is_requested => {
            Some("somebody requested it (kubectl cadastre drain)".to_owned())
        }
        Some(_) if entry.recall == Some(Recall::Drain) => Some("it is recalled".to_owned()),
        Some(_) => None,
    };
    let Some(status) = inventory.block_status(entry) else {
        return line + "the agent has not reported it yet, and only the agent can release it";
    };
    let (used, cooling) = (status.used, status.cooling);
    let users = users(entry, inventory);
    let family = entry.cidr.family();
    let same = |it: &&&BlockEntry| {
        let is_plain = inventory.claim_of_block(it).is_none();
        is_plain && it.pool == entry.pool && it.cidr.family() == family
    };
    let idle = pool.map_or(0, |pool| pool.terms.idle.as_secs());
    let lent: Vec<String> = inventory
        .registry
        .borrowed_from(&entry.cidr)
        .map(|it| format!("{} to {}", it.cidr, it.owner.name))
        .collect();
    let words = match leaves {
        _ if !lent.is_empty() => format!(
            "{used} in use, {cooling} cooling{users}; it stays while it has lent {}",
            some(&lent, 4)
        ),
        Some(why) if used + cooling == 0 => {
            format!("it is drained, as {why}; it is empty and returns to the pool at once")
        }
        Some(why) => {
            format!("it is drained, as {why}; it still has {used} addresses in use and {cooling} in cooldown{users}")
        }
        None if used + cooling > 0 => format!("{used} in use, {cooling} cooling{users}"),
        None if all.iter().filter(same).count() > 1 => format!(
            "it is empty, and returns to the pool once it has been empty for {idle} s (spec.idleSeconds), unless the node needs it"
        ),
        None if pool.is_some_and(|pool| pool.is_serving() && !pool.terms.first_immediate) => format!(
            "it is empty, and the node's last block of this pool and family: it returns to the pool once the node has used nothing of the pool for {idle} s (spec.idleSeconds), or when pods on another node wait"
        ),
        None => "it is empty, and the node's last block of this pool and family: it stays, so that the next pod need not wait, until pods on another node wait and the pool has no other block".to_owned(),
    };
    line + &words
}

/// Explains why a node still has the address of a claim.
fn kept_for_claim(entry: &BlockEntry, claim: &str, inventory: &Inventory) -> String {
    let node = &entry.owner.name;
    let pods = inventory.pods_of_claim(claim).into_iter();
    let mut here = pods.filter(|it| it.node.as_ref() == Some(node));
    let why = match here.next() {
        Some(pod) => format!("pod {} on this node names the claim", pod.pod),
        None => {
            "no pod on this node names the claim: the agent releases it once no container uses it"
                .to_owned()
        }
    };
    format!(
        "{} (claim {claim}): {why}{}",
        entry.cidr,
        users(entry, inventory)
    )
}

fn users(entry: &BlockEntry, inventory: &Inventory) -> String {
    let owner = &entry.owner.name;
    let in_use = inventory.in_use_within(&entry.cidr).map(|(_, it)| it);
    let in_use = in_use.filter(|it| it.node == *owner && !it.allocation.pod.is_empty());
    let pods: Vec<&str> = in_use.map(|it| it.allocation.pod.as_str()).collect();
    if pods.is_empty() {
        String::new()
    } else {
        format!(": {}", some(&pods, 4))
    }
}
