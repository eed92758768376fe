//! Checks of ranges. They report overlaps, contradictions between blocks and NodeSubnets, and podCIDRs of foreign
//! allocators.

use std::collections::{BTreeMap, BTreeSet};

use super::{Findings, Severity, delete_pod};
use crate::claims::ClaimFact;
use crate::inventory::{Inventory, SubnetFact};
use crate::render::{age, some};
use cadastre_api::{AllocatedBlock, AllocationMode, block_name};
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::allocations::foreign::{ADVICE, too_wide_text};
use cadastre_controller::cluster::agent_report::ACCEPTED;
use cadastre_controller::cluster::objects::Node;
use cadastre_controller::pools::PoolState;
use cadastre_core::{Cidr, Holding, HoldingId, HoldingState};

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    overlaps(inventory, findings);
    listed_twice(inventory, findings);
    objects(inventory, findings);
    for entry in inventory.registry.blocks.iter() {
        block(entry, inventory, findings);
        borrowed(entry, inventory, findings);
    }
    for node in inventory.cache.nodes.iter() {
        pod_cidrs(node, inventory, findings);
    }
    for subnet in inventory.subnets.values() {
        node_subnet(subnet, inventory, findings);
    }
}

/// Reports a borrowed block that the lender's NodeSubnet does not list in `withdraw`. In that case the lender may
/// assign addresses of the block, although the borrower assigns them, too.
fn borrowed(entry: &BlockEntry, inventory: &Inventory, findings: &mut Findings) {
    let parent = inventory.registry.parent_of(entry);
    let Some(parent) = parent.filter(|it| !it.owner.quarantined && entry.confirmed) else {
        return;
    };
    let lender = &parent.owner.name;
    let spec = inventory.subnets.get(lender);
    let spec = spec.and_then(|it| it.spec.as_ref().ok());
    let text = entry.cidr.to_string();
    if !spec.is_some_and(|spec| spec.withdraw.contains(&text)) {
        findings.add(
            Severity::Critical,
            "LentNotWithdrawn",
            format!("block {text}"),
            format!(
                "node {} has borrowed it from node {lender}, but the NodeSubnet of {lender} does not take it back: both nodes may assign its addresses",
                entry.owner.name
            ),
            "check that a controller leads (kubectl get lease -A | grep cadastre): it corrects this",
        );
    }
}

/// Describes a range and its owner for users.
fn whose(id: HoldingId, holding: &Holding, inventory: &Inventory) -> String {
    let registry = &inventory.registry;
    let block = registry
        .blocks
        .get(&holding.cidr)
        .filter(|it| it.holding == id);
    let kind = if block.is_some() { "block" } else { "podCIDR" };
    let node = registry.node_of(holding.holder);
    let node = node.map_or("nobody", |(name, _)| name);
    match holding.state {
        HoldingState::Quarantined => {
            format!("{kind} {} (in quarantine, was {node}'s)", holding.cidr)
        }
        _ => format!("{kind} {} of node {node}", holding.cidr),
    }
}

fn overlaps(inventory: &Inventory, findings: &mut Findings) {
    let registry = &inventory.registry;
    let mut cidrs: BTreeSet<Cidr> = registry.blocks.iter().map(|entry| entry.cidr).collect();
    for node in inventory.cache.nodes.iter() {
        cidrs.extend(node.pod_cidrs.iter().copied());
    }
    let mut reported: BTreeSet<(HoldingId, HoldingId)> = BTreeSet::new();
    for cidr in cidrs {
        // The holder of a claim's address is the claim and not a node. The check of claims compares such addresses with
        // the ranges of nodes.
        let is_of_node = |it: &(HoldingId, Holding)| registry.node_of(it.1.holder).is_some();
        let all = registry.ledger.overlapping(&cidr).filter(is_of_node);
        let all: Vec<(HoldingId, Holding)> = all.collect();
        for (at, (id, holding)) in all.iter().enumerate() {
            for (other_id, other) in &all[at + 1..] {
                if holding.holder == other.holder
                    || !holding.cidr.overlaps(&other.cidr)
                    || !reported.insert((*id.min(other_id), *id.max(other_id)))
                {
                    continue;
                }
                let (smaller, wider) = if holding.cidr.len() > other.cidr.len() {
                    (holding.cidr, other.cidr)
                } else {
                    (other.cidr, holding.cidr)
                };
                let is_lent = registry.is_part_of(&smaller, &wider);
                if is_lent || smaller.size() == 1 && inventory.is_handed_over(smaller.first()) {
                    continue;
                }
                let (severity, advice) = if [holding.state, other.state]
                    .contains(&HoldingState::Quarantined)
                {
                    (
                        Severity::Info,
                        "nothing to do: it is free once the quarantine is over",
                    )
                } else {
                    (
                        Severity::Critical,
                        "replace one of the two nodes: cordon and drain it, delete the Node, let it register again; then find out who else writes podCIDRs",
                    )
                };
                let (a, b) = (
                    whose(*id, holding, inventory),
                    whose(*other_id, other, inventory),
                );
                findings.add(
                    severity,
                    "OverlappingRanges",
                    format!("range {smaller}"),
                    format!("{a} overlaps {b}"),
                    advice,
                );
            }
        }
    }
}

/// Reports blocks that the NodeSubnets of several live nodes list.
fn listed_twice(inventory: &Inventory, findings: &mut Findings) {
    let mut lists: BTreeMap<Cidr, Vec<&str>> = BTreeMap::new();
    for subnet in inventory.subnets.values() {
        let Ok(spec) = &subnet.spec else { continue };
        let node = inventory.cache.nodes.get(&subnet.name);
        if node.is_none_or(|node| spec.node_uid.as_deref() != Some(&*node.uid)) {
            continue;
        }
        // While a virtual machine migrates, its old node and its new node may both list its address.
        let is_sole = |it: &&AllocatedBlock| it.vmi_uid.is_none() || !it.standby;
        for block in spec.blocks.iter().filter(is_sole) {
            if let Ok(cidr) = Cidr::parse_strict(&block.cidr) {
                lists.entry(cidr).or_default().push(&subnet.name);
            }
        }
    }
    for (cidr, nodes) in lists.iter().filter(|(_, nodes)| nodes.len() > 1) {
        findings.add(
            Severity::Critical,
            "BlockListedTwice",
            format!("block {cidr}"),
            format!("the NodeSubnets of {} list it", some(nodes, 4)),
            "stop whoever edits NodeSubnets (kubectl get nodesubnets.cadastre.dev -o yaml --show-managed-fields); drain all of these nodes but one",
        );
    }
}

/// Reports IPAMBlocks and NodeSubnets that cannot be parsed, and IPAMBlocks whose name or owner is wrong.
fn objects(inventory: &Inventory, findings: &mut Findings) {
    for block in inventory.cache.blocks.iter() {
        let why = match &block.spec {
            Err(why) => Some(format!("its spec cannot be read ({why})")),
            Ok(spec) if *block.name != *block_name(&spec.cidr) => Some(format!(
                "its name does not match its CIDR {}, so it does not lock that range",
                spec.cidr
            )),
            Ok(_) => None,
        };
        if let Some(why) = why {
            findings.add(
                Severity::Warning,
                "UnreadableObject",
                format!("block object {}", block.name),
                why,
                format!("find out who wrote it, then delete it (kubectl delete ipamblocks.cadastre.dev {}): the controller creates the blocks that it needs again", block.name),
            );
        }
        if let Ok(spec) = &block.spec
            && !spec.owner.quarantined
        {
            let node = inventory.cache.nodes.get(&spec.owner.name);
            if node.is_none_or(|node| node.uid != spec.owner.uid) {
                findings.add(
                    Severity::Warning,
                    "OwnerlessBlock",
                    format!("block {}", spec.cidr),
                    format!("it belongs to node {} with UID {}, which is gone, but it is not in quarantine", spec.owner.name, spec.owner.uid),
                    "check that a controller leads (kubectl get lease -A | grep cadastre): it puts such blocks into quarantine",
                );
            }
        }
    }
    for subnet in inventory.subnets.values() {
        if let Err(why) = &subnet.spec {
            findings.add(
                Severity::Warning,
                "UnreadableObject",
                format!("nodesubnet {}", subnet.name),
                format!("its spec cannot be read ({why})"),
                "check that the CustomResourceDefinitions are of the controller's version (cadastre crd | kubectl apply --server-side -f -)",
            );
        }
    }
}

fn block(entry: &BlockEntry, inventory: &Inventory, findings: &mut Findings) {
    let object = format!("block {}", entry.cidr);
    let node = &entry.owner.name;
    let name = block_name(&entry.cidr);
    if inventory.registry.pools.get(&entry.pool).is_none() {
        findings.add(
            Severity::Warning,
            "BlockOfNoPool",
            &object,
            format!("its pool \"{}\" is gone", entry.pool),
            "no new address is assigned from it, and it is released when it is empty; to keep it, create the pool again",
        );
    }
    if inventory.cache.blocks.get(&*name).is_none() {
        return findings.add(
            Severity::Warning,
            "ListedWithoutObject",
            object,
            format!("the NodeSubnet of {node} lists it, but there is no IPAMBlock {name}"),
            "check that a controller leads: it creates the object again, which somebody must have deleted",
        );
    }
    if entry.owner.quarantined {
        return overdue(entry, inventory, findings);
    }
    let live = inventory.cache.nodes.get(node);
    if live.is_none_or(|node| node.uid != entry.owner.uid) {
        return;
    }
    let subnet = inventory.subnets.get(node);
    if let Some(claim) = inventory.claim_of_block(entry)
        && !subnet.is_some_and(|it| it.lists(&entry.cidr))
    {
        // The NodeSubnet lists the addresses of a claim only when the node has all addresses of the claim.
        let claim = inventory.claims.get(&*claim);
        let state = claim.map_or("the claim is gone".to_owned(), ClaimFact::words);
        findings.add(
            Severity::Warning,
            "BlockNotListed",
            object,
            format!("node {node} has it for a claim, but the node's NodeSubnet does not list it, so the claim's pod waits ({state})"),
            "check that a controller leads: it lists such blocks when the node has all addresses of the claim, or frees them",
        );
    } else if !subnet.is_some_and(|it| it.lists(&entry.cidr)) {
        findings.add(
            Severity::Warning,
            "BlockNotListed",
            object,
            format!("it belongs to node {node}, but the node's NodeSubnet does not list it, so it is not used"),
            "check that a controller leads: it lists such blocks, or frees them",
        );
    } else if inventory.block_status(entry).is_none() {
        findings.add(
            Severity::Info,
            "AgentSilent",
            object,
            format!("it belongs to node {node}, but the node's agent has not reported it"),
            format!(
                "check that the agent runs on {node} (kubectl get pods -A -o wide | grep {node})"
            ),
        );
    }
}

/// Reports a block that still exists although its quarantine is over.
fn overdue(entry: &BlockEntry, inventory: &Inventory, findings: &mut Findings) {
    /// A block is reported only if it still exists this many seconds after the end of its quarantine, because the
    /// controller frees blocks only every few seconds.
    const SLACK: i64 = 60;
    let Some(until) = entry.until else { return };
    if inventory.now.duration_since(until).as_secs() < SLACK {
        return;
    }
    let over = age(Some(until), inventory.now);
    let (severity, but, advice) = match inventory.pods_in(&entry.cidr).next() {
        Some((addr, pod)) => (
            Severity::Info,
            format!("pod {} still reports {addr}", pod.name),
            format!("it is free once that pod is gone ({})", delete_pod(pod)),
        ),
        None => (
            Severity::Warning,
            "it is still there".to_owned(),
            "check that a controller leads (kubectl get lease -A | grep cadastre), and see its log"
                .to_owned(),
        ),
    };
    let message = format!("its quarantine has been over for {over}, but {but}");
    let object = format!("block {}", entry.cidr);
    findings.add(severity, "QuarantineOver", object, message, advice);
}

fn pod_cidrs(node: &Node, inventory: &Inventory, findings: &mut Findings) {
    let registry = &inventory.registry;
    let pools = &registry.pools;
    let object = format!("node {}", node.name);
    if !node.unreadable.is_empty() {
        findings.add(
            Severity::Warning,
            "UnreadablePodCIDR",
            &object,
            format!(
                "its podCIDRs name {}, which is no CIDR",
                some(&node.unreadable, 2)
            ),
            "podCIDRs cannot be changed: delete the Node and let it register again",
        );
    }
    for cidr in &node.pod_cidrs {
        let counts = registry.pod_cidrs(node).any(|it| it == cidr);
        if !counts && pools.is_any_over(cidr) {
            let message = too_wide_text(cidr);
            findings.add(
                Severity::Critical,
                "PodCIDRTooWide",
                &object,
                message,
                ADVICE,
            );
        }
    }
    let gets_pod_cidr =
        |pool: &PoolState| pool.allocation_mode == AllocationMode::NodeCIDR && pool.selects(node);
    if !pools.iter().any(gets_pod_cidr) {
        return;
    }
    for cidr in registry.pod_cidrs(node).filter(|it| pools.of(it).is_none()) {
        findings.add(
            Severity::Warning,
            "ForeignPodCIDR",
            &object,
            format!("its podCIDR {cidr} is in no pool, though a pool selects the node: a foreign allocator wrote it, or its pool is gone"),
            "turn off other allocators (kube-controller-manager: --allocate-node-cidrs=false); add the range to a pool, or delete the Node and let it register again",
        );
    }
}

fn node_subnet(subnet: &SubnetFact, inventory: &Inventory, findings: &mut Findings) {
    let Ok(spec) = &subnet.spec else { return };
    let object = format!("nodesubnet {}", subnet.name);
    let node = inventory.cache.nodes.get(&subnet.name);
    let mut stale = |message: String| {
        let advice = "check that a controller leads (kubectl get lease -A | grep cadastre): it corrects this";
        findings.add(
            Severity::Warning,
            "StaleNodeSubnet",
            &object,
            message,
            advice,
        );
    };
    match (&spec.node_uid, node) {
        (Some(uid), None) => stale(format!("it is for the node with UID {uid}, but there is no such node")),
        (Some(uid), Some(node)) if *node.uid != **uid => stale(format!(
            "it is for the node with UID {uid}, but the node of that name is {}",
            node.uid
        )),
        (Some(_), Some(node)) => {
            let listed: BTreeSet<&str> = spec.pod_cidrs.iter().map(|it| &*it.cidr).collect();
            let own = inventory.registry.listed_pod_cidrs(node, None);
            let own: BTreeSet<&str> = own.iter().map(|it| &*it.cidr).collect();
            if listed != own {
                let text = |all: BTreeSet<&str>| some(&Vec::from_iter(all), 4);
                stale(format!("it lists podCIDRs [{}], but the node has [{}]", text(listed), text(own)));
            }
        }
        (None, None) if spec.quarantined.is_empty() && spec.blocks.is_empty() => findings.add(
            Severity::Warning,
            "StaleNodeSubnet",
            &object,
            "it is for no node, and nothing in it is needed",
            format!("check that a controller leads; the object may be deleted (kubectl delete nodesubnets.cadastre.dev {})", subnet.name),
        ),
        (None, _) => {}
    }
    let name = &subnet.name;
    let subnet = inventory.cache.subnets.get(name);
    let report = subnet.and_then(|it| it.report.as_ref());
    let accepted = report.and_then(|report| report.condition(ACCEPTED));
    if let Some(accepted) = accepted.filter(|it| !it.is_true()) {
        let why = &accepted.message;
        findings.add(
            Severity::Warning,
            "StatusRejected",
            &object,
            format!("the controller rejects a part of what the agent reports: {why}"),
            format!("see the agent's version and log on {name}"),
        );
    }
}
