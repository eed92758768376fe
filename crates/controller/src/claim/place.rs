//! Decides which node gets the addresses of a claim, and which node has to release them.

use super::migrate::{choose_owner, choose_standbys};
use super::{ClaimProblem, IN_USE, WITHDRAWING, joined};
use crate::Context;
use crate::allocations::blocks::{AffectedLoops, BlockEntry};
use crate::allocations::claims::ClaimEntry;
use crate::allocations::holders::HolderUse;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{Claim, Node, Owner, PodClaim};
use crate::handover::is_handed_over;
use crate::pools::{PoolPhase, PoolState};
use crate::purpose::Step;
use cadastre_api::Recall;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState};

/// Allocates a claim's addresses, as blocks, to the node of the pod that names the claim. Recalls the blocks from a
/// node without such a pod, and from a node that cannot get all of them. If the pod has to wait, returns the reason.
pub(super) fn place(
    claim: &Claim,
    cx: &mut Context,
    affected: &mut AffectedLoops,
) -> Result<(), ClaimProblem> {
    let pods = cx.cache.pods.of_claim(&claim.name);
    let Some(entry) = cx.allocations.claims.get(&claim.name).cloned() else {
        return Ok(());
    };
    let (held, missing): (Vec<Cidr>, Vec<Cidr>) = entry
        .cidrs()
        .partition(|cidr| cx.allocations.blocks.get(cidr).is_some());
    let is_of_machine = |cidr: &Cidr| cx.allocations.blocks.get(cidr)?.vmi.as_ref();
    let is_of_machine = held.iter().any(|cidr| is_of_machine(cidr).is_some());
    if is_of_machine {
        choose_owner(&held, &pods, cx, affected);
    }
    let decided = handed_over(&entry, &missing, cx)
        .and_then(|()| node_to_place_on(claim, &entry, &missing, &pods, cx))
        .map(|found| found.map(|(node, vmi)| (node.clone(), vmi)));
    // A NodeSubnet lists all blocks of a claim or none, except for draining blocks. So a draining block drains until the
    // others are there: otherwise it would no longer be listed, although its agent has not released it.
    let blocks = &cx.allocations.blocks;
    let mut cidrs = entry.cidrs();
    let is_whole = cidrs.all(|it| blocks.get(&it).is_some_and(BlockEntry::is_held));
    let is_kept = |it: &BlockEntry| {
        let is_needed = first_on(&it.owner.name, it.vmi.as_ref(), &pods).is_some();
        decided.is_ok() && is_needed && (is_whole || it.recall.is_none() || !it.is_held())
    };
    for cidr in &held {
        if let Some(entry) = cx.allocations.blocks.get_mut(cidr) {
            let recall = (!is_kept(entry)).then_some(Recall::Drain);
            set_recall(entry, recall, affected);
        }
    }
    if let Some((node, vmi)) = decided? {
        begin_blocks(claim, &missing, &node, vmi.as_ref(), cx);
        affected.blocks.extend(missing);
    }
    if is_of_machine {
        choose_standbys(&entry, &held, &pods, cx, affected)?;
    }
    Ok(())
}

/// Returns an error if one of the `missing` addresses lies in the block of a node that has not handed the address over.
fn handed_over(entry: &ClaimEntry, missing: &[Cidr], cx: &Context) -> Result<(), ClaimProblem> {
    for cidr in missing {
        let Some(block) = cx.allocations.block_around(cidr) else {
            continue;
        };
        let node = cx.cache.nodes.get(&block.owner.name);
        let is_done = node.is_some_and(|node| is_handed_over(node, cidr, &entry.uid, cx.cache));
        if !is_done {
            let (addr, node) = (cidr.first(), &block.owner.name);
            let text = format!(
                "{addr} is in block {} of node {node}, which is asked for it: the claim gets the address when the node's agent answers that no pod has it and its cooldown is over (kubectl cadastre show ip {addr})",
                block.cidr
            );
            return Err(ClaimProblem::new(WITHDRAWING, text));
        }
    }
    Ok(())
}

/// Returns the node to which the missing addresses are to be allocated as blocks now. Also returns the UID of the pod's
/// virtual machine, if the pod has one. Returns `None` if there is nothing to do.
fn node_to_place_on<'a>(
    claim: &Claim,
    entry: &ClaimEntry,
    missing: &[Cidr],
    pods: &[&PodClaim],
    cx: &'a Context,
) -> Result<Option<(&'a Node, Option<ObjectUid>)>, ClaimProblem> {
    let blocks = entry.cidrs();
    let blocks = blocks.filter_map(|cidr| cx.allocations.blocks.get(&cidr));
    let blocks: Vec<&BlockEntry> = blocks.collect();
    let block = blocks.first();
    let owner = block.map(|it| &it.owner);
    let Some(first) = pods.iter().find(|pod| pod.node.is_some()) else {
        return Ok(None);
    };
    // The write that removes the claim's finalizer may be under way, even that of an earlier leader. So as soon as no
    // node has the addresses of a deleted claim, no node gets them any more.
    if claim.deleting && blocks.is_empty() && !Mutation::DeletedClaimPlaced.is_on() {
        let text = format!(
            "the claim is being deleted: pod {} waits until it is gone, and then for another claim of this name",
            first.pod
        );
        return Err(ClaimProblem::new("BeingDeleted", text));
    }
    let pod = block.map_or(Some(*first), |it| {
        first_on(&it.owner.name, it.vmi.as_ref(), pods)
    });
    // For a short time, the addresses of one virtual machine can have different owners.
    let is_of_machine = block.is_some_and(|it| it.vmi.is_some() && !it.owner.quarantined);
    if missing.is_empty() && is_of_machine && pod.is_some() {
        return Ok(None);
    }
    let node = pod.and_then(|pod| cx.cache.nodes.get(pod.node.as_ref()?));
    let is_owner = |node: &&Node| blocks.iter().all(|it| it.owner.uid == node.uid);
    let node = node.map(AsRef::as_ref).filter(is_owner);
    let (pod, node) = match (owner, pod.zip(node)) {
        (_, Some(found)) => found,
        (Some(owner), None) => return Err(leaving(owner, pod.unwrap_or(first), entry)),
        // The watch has not delivered the Node yet, or the Node is gone. An event of the Node or of the pod will
        // follow.
        (None, None) => {
            let text = format!("pod {} is bound to a node that does not exist", first.pod);
            return Err(ClaimProblem::new("WaitingForNode", text));
        }
    };
    // The status with the addresses, or the finalizer, may not be stored yet. The answer to the missing write queues
    // the claim again.
    let is_stored = entry.is_stored || Mutation::ClaimPlacedBeforeStored.is_on();
    let has_finalizer = claim.has_finalizer() || Mutation::ClaimPlacedBeforeFinalizer.is_on();
    if missing.is_empty() || !is_stored || !has_finalizer {
        return Ok(None);
    }
    for cidr in missing {
        may_place(cidr, entry, pod, node, cx)?;
    }
    Ok(Some((node, pod.vmi().cloned())))
}

/// Returns the oldest pod that is bound to the node and belongs to the virtual machine `vmi`. If `vmi` is `None`, only
/// pods without a virtual machine count.
pub(super) fn first_on<'a>(
    node: &str,
    vmi: Option<&ObjectUid>,
    pods: &[&'a PodClaim],
) -> Option<&'a PodClaim> {
    let mut pods = pods.iter().filter(|pod| pod.vmi() == vmi);
    pods.find(|pod| pod.node.as_deref() == Some(node)).copied()
}

fn set_recall(entry: &mut BlockEntry, recall: Option<Recall>, affected: &mut AffectedLoops) {
    if recall.is_some() && Mutation::ClaimMovedOnOneProof.is_on() {
        entry.step = Step::Delete;
        affected.blocks.push(entry.cidr);
    }
    if !entry.owner.quarantined && !entry.is_leaving() && entry.recall != recall {
        entry.recall = recall;
        affected.nodes.push(entry.owner.name.clone());
    }
}

fn begin_blocks(
    claim: &Claim,
    missing: &[Cidr],
    node: &Node,
    vmi: Option<&ObjectUid>,
    cx: &mut Context,
) {
    let entry = cx.allocations.claims.get(&claim.name);
    let pool = entry.map(|it| it.pool.clone()).unwrap_or_default();
    let holders = &mut cx.allocations.holders;
    let holder = holders.intern(HolderUse::Blocks, &node.name, &node.uid);
    for cidr in missing {
        let ledger = &mut cx.allocations.ledger;
        let holding = ledger.record(holder, *cidr, HoldingState::InFlight);
        cx.allocations
            .begin_block(holding, *cidr, &pool, node, cx.now);
        if let Some(entry) = cx.allocations.blocks.get_mut(cidr) {
            entry.vmi = vmi.cloned();
        }
    }
}

/// Returns an error if an address of a claim cannot become a block of this node now. The error says why.
fn may_place(
    cidr: &Cidr,
    entry: &ClaimEntry,
    pod: &PodClaim,
    node: &Node,
    cx: &Context,
) -> Result<(), ClaimProblem> {
    let (addr, pool) = (cidr.first(), &entry.pool);
    // If the address lies in a node's block, that node has handed the address over, so the node's block is no conflict.
    let conflict = cx.allocations.conflict_with_claim(cidr);
    if let Some(range) = conflict.filter(|_| cx.allocations.block_around(cidr).is_none()) {
        let text = format!(
            "{addr} is also a part of {range}, which a node has: see kubectl cadastre show ip {addr}"
        );
        return Err(ClaimProblem::new(IN_USE, text));
    }
    if cx.allocations.unadopted.conflict_with(cidr, &node.name) {
        let text = format!(
            "the agent of a node uses {addr}, as the condition Accepted of its NodeSubnet says: drain that node (kubectl cadastre show ip {addr})"
        );
        return Err(ClaimProblem::new(IN_USE, text));
    }
    if let Some(addr) = cx.cache.pods.any_in_free(cidr) {
        let text = format!(
            "a pod reports {addr}: the claim waits until that pod is gone (kubectl get pods -A -o wide | grep -w {addr})"
        );
        return Err(ClaimProblem::new(IN_USE, text));
    }
    let has_range =
        |it: &&PoolState| it.space.covers(cidr) && !matches!(it.phase, PoolPhase::Terminating);
    let Some(state) = cx.allocations.pools.get(pool).filter(has_range) else {
        let text = format!(
            "{addr} is in no range of pool \"{pool}\" any more, or the pool is being deleted: no node gets it. Add the range to the pool again, or delete the claim"
        );
        return Err(ClaimProblem::new("OutsidePool", text));
    };
    if !state.selects(node) {
        return Err(not_selected(pod, node, pool));
    }
    Ok(())
}

/// Returns the problem of a claim whose pod is bound to a node that the pool does not select.
pub(super) fn not_selected(pod: &PodClaim, node: &Node, pool: &PoolName) -> ClaimProblem {
    let text = format!(
        "pod {} is on node {}, which the nodeSelector of pool \"{pool}\" does not select: schedule the pod to another node",
        pod.pod, node.name
    );
    ClaimProblem::new("NodeNotSelected", text)
}

/// Returns the problem of a claim whose pod waits until another node has released the addresses.
fn leaving(owner: &Owner, pod: &PodClaim, entry: &ClaimEntry) -> ClaimProblem {
    let addresses = joined(entry.cidrs().map(|it| it.first()));
    let target = pod.node.as_deref().unwrap_or_default();
    let text = if owner.quarantined {
        format!(
            "pod {} on node {target} waits: node {} is deleted, and {addresses} stays with it until its quarantine is over and no pod reports it",
            pod.pod, owner.name
        )
    } else {
        format!(
            "pod {} on node {target} waits: node {} has {addresses} until its agent has seen that no container uses it. If that node is dead, delete its Node",
            pod.pod, owner.name
        )
    };
    ClaimProblem::new("WaitingForNode", text)
}
