//! Decides which of two nodes owns the addresses of a virtual machine that migrates, and which node is a standby.
//!
//! | the pods of the VirtualMachineInstance | the owner |
//! |---|---|
//! | one pod | the node of this pod |
//! | several pods, and KubeVirt has marked target pods as ready | the node of the newest such target pod |
//! | several pods, and no target pod is marked as ready | the node that was the owner before |
//!
//! A pod that has failed or finished does not count, so an aborted migration makes the node of the remaining pod the
//! owner. A node without a pod releases the addresses like every node that has a block.
//!
//! A node becomes the owner of all addresses of a claim at the same time. If a standby's agent has released one of the
//! addresses, the standby also releases the others before it gets all of them again.

use super::place::{first_on, not_selected};
use super::{ClaimProblem, joined};
use crate::Context;
use crate::allocations::blocks::{AffectedLoops, BlockEntry};
use crate::allocations::claims::ClaimEntry;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::names::ObjectUid;
use crate::cluster::objects::{Node, Owner, PodClaim};
use cadastre_api::Recall;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// Returns the UID of the VirtualMachineInstance to which all these blocks belong, and the blocks. Returns `None` if
/// they do not all belong to the same one.
fn of_machine<'a>(held: &[Cidr], cx: &'a Context) -> Option<(&'a ObjectUid, Vec<&'a BlockEntry>)> {
    let blocks = held.iter().map(|cidr| cx.allocations.blocks.get(cidr));
    let blocks: Vec<&BlockEntry> = blocks.collect::<Option<_>>()?;
    let vmi = blocks.first()?.vmi.as_ref()?;
    let is_same = blocks.iter().all(|it| it.vmi.as_ref() == Some(vmi));
    is_same.then_some((vmi, blocks))
}

/// Makes the node on which the virtual machine runs the owner of the blocks.
pub(super) fn choose_owner(
    held: &[Cidr],
    pods: &[&PodClaim],
    cx: &mut Context,
    affected: &mut AffectedLoops,
) {
    let Some(next) = next_owner(held, pods, cx) else {
        return;
    };
    for cidr in held {
        let entry = cx.allocations.blocks.get(cidr);
        let Some(before) = entry.map(|it| it.owner.clone()) else {
            continue;
        };
        if before.uid != next.uid {
            affected.nodes.extend([before.name, next.name.clone()]);
            affected.blocks.push(*cidr);
            cx.allocations.make_owner(cidr, &next.uid);
        }
    }
}

/// Returns the node that is to own all blocks of a virtual machine. Returns `None` if no node with a pod of the machine
/// can own all of these blocks.
fn next_owner(held: &[Cidr], pods: &[&PodClaim], cx: &Context) -> Option<Owner> {
    let (vmi, blocks) = of_machine(held, cx)?;
    let can_own = |node: &Node| {
        let mut blocks = blocks.iter();
        blocks.all(|block| {
            let standby = block.standby_of(&node.uid);
            block.owner.uid == node.uid || standby.is_some_and(|it| it.is_stored)
        })
    };
    let here = pods.iter().filter_map(|pod| {
        let node: &Node = cx.cache.nodes.get(pod.node.as_ref()?)?;
        (pod.vmi() == Some(vmi) && can_own(node)).then_some((*pod, node))
    });
    let here: Vec<(&PodClaim, &Node)> = here.collect();
    let is_target = |pod: &PodClaim| pod.machine.as_ref().is_some_and(|it| it.is_migrated_to);
    let mut newest_first = here.iter().rev();
    let target = newest_first.find(|(pod, _)| is_target(pod));
    let present = here
        .iter()
        .find(|(_, node)| node.uid == blocks[0].owner.uid);
    let (_, node) = target.or(present).or(here.first())?;
    Some(Owner::node(&node.name, &node.uid))
}

/// Recalls the blocks from standbys without a pod of the virtual machine. If a pod of the machine is on a further node,
/// and no migration is under way, that node becomes a standby. If such a pod has to wait, returns the reason.
pub(super) fn choose_standbys(
    entry: &ClaimEntry,
    held: &[Cidr],
    pods: &[&PodClaim],
    cx: &mut Context,
    affected: &mut AffectedLoops,
) -> Result<(), ClaimProblem> {
    recall_standbys(held, pods, cx, affected);
    let Some((vmi, blocks)) = of_machine(held, cx) else {
        return Ok(());
    };
    let is_whole = held.len() == entry.addresses.len() && blocks.iter().all(|it| it.is_held());
    if !is_whole {
        return Ok(());
    }
    let any = Mutation::StandbyForEveryVmi.is_on();
    let of_vmi = pods.iter().filter(|it| any || it.vmi() == Some(vmi));
    let mut lacking = of_vmi.filter_map(|pod| {
        let node = cx.cache.nodes.get(pod.node.as_ref()?)?;
        let lacks = |it: &&&BlockEntry| !it.is_at(&node.uid);
        let lacking: Vec<Cidr> = blocks.iter().filter(lacks).map(|it| it.cidr).collect();
        let is_owner = blocks.iter().any(|it| it.owner.uid == node.uid);
        let is_open = lacking.len() == blocks.len() || is_owner;
        (is_open && !lacking.is_empty()).then_some((*pod, node, lacking))
    });
    let Some((pod, node, lacking)) = lacking.next() else {
        return Ok(());
    };
    let with_room = blocks.iter().filter(|it| lacking.contains(&it.cidr));
    let other = with_room.flat_map(|it| it.live_standbys()).next();
    if let Some(other) = other {
        let text = format!(
            "pod {} on node {} waits: node {} has {}, too, until its agent has seen that no container uses it. A claim is on two nodes at most",
            pod.pod,
            node.name,
            other.owner.name,
            joined(entry.cidrs().map(|it| it.first()))
        );
        return Err(ClaimProblem::new("WaitingForNode", text));
    }
    let pool = cx.allocations.pools.get(&entry.pool);
    if pool.is_some_and(|it| !it.selects(node)) {
        return Err(not_selected(pod, node, &entry.pool));
    }
    let node = node.clone();
    for cidr in lacking {
        cx.allocations.add_standby(&cidr, &node);
        affected.blocks.push(cidr);
    }
    Ok(())
}

fn recall_standbys(
    held: &[Cidr],
    pods: &[&PodClaim],
    cx: &mut Context,
    affected: &mut AffectedLoops,
) {
    let blocks = held
        .iter()
        .filter_map(|cidr| cx.allocations.blocks.get(cidr));
    let blocks: Vec<&BlockEntry> = blocks.collect();
    let standbys = blocks.iter().flat_map(|block| {
        let all = block.live_standbys().map(|it| &it.owner);
        all.map(|owner| (block.cidr, block.vmi.as_ref(), owner))
    });
    let recalls = standbys.map(|(cidr, vmi, owner)| {
        let has_all = blocks.iter().all(|it| keeps(it, owner, cx.cache));
        let is_needed = has_all && first_on(&owner.name, vmi, pods).is_some();
        (cidr, owner.clone(), (!is_needed).then_some(Recall::Drain))
    });
    let recalls: Vec<(Cidr, Owner, Option<Recall>)> = recalls.collect();
    for (cidr, owner, recall) in recalls {
        let Some(entry) = cx.allocations.blocks.get_mut(&cidr) else {
            continue;
        };
        let mut standbys = entry.standby.iter_mut();
        if let Some(standby) = standbys.find(|it| it.owner.uid == owner.uid)
            && standby.recall != recall
        {
            standby.recall = recall;
            affected.nodes.push(owner.name);
        }
    }
}

/// Returns whether the node is owner or standby of the block, and the node's agent has not released the block.
fn keeps(block: &BlockEntry, owner: &Owner, cache: &ClusterCache) -> bool {
    let node = cache
        .nodes
        .get(&owner.name)
        .filter(|it| it.uid == owner.uid);
    let report = node.and_then(|node| report_of(node, cache));
    block.is_at(&owner.uid) && !block.is_released_at(&owner.uid, report)
}
