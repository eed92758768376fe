//! Checks of ranges: overlaps, contradictions between blocks and NodeSubnets, podCIDRs of foreign allocators.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, Severity};
use crate::inventory::{Inventory, SubnetFact};
use crate::render::{age, some};
use cadastre_api::{AllocationMode, block_name};
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::allocations::foreign::{ADVICE, too_wide_text};
use cadastre_controller::cluster::agent_report::ACCEPTED;
use cadastre_controller::cluster::objects::Node;
use cadastre_core::{Cidr, Holding, HoldingId, HoldingState};

pub(super) fn check(inventory: &Inventory, findings: &mut Vec<Finding>) {
    overlaps(inventory, findings);
    listed_twice(inventory, findings);
    objects(inventory, findings);
    for entry in inventory.registry.blocks.iter() {
        block(entry, inventory, findings);
    }
    for node in inventory.cache.nodes.iter() {
        pod_cidrs(node, inventory, findings);
    }
    for subnet in inventory.subnets.values() {
        node_subnet(subnet, inventory, findings);
    }
}

/// Describes a range and its owner for users.
fn whose(id: HoldingId, claim: &Holding, inventory: &Inventory) -> String {
    let registry = &inventory.registry;
    let block = registry
        .blocks
        .get(&claim.cidr)
        .filter(|it| it.holding == id);
    let node = registry
        .node_of(claim.holder)
        .map_or("nobody", |(name, _)| name);
    match (block, claim.state) {
        (Some(_), HoldingState::Quarantined) => {
            format!("block {} (in quarantine, was {node}'s)", claim.cidr)
        }
        (Some(_), _) => format!("block {} of node {node}", claim.cidr),
        (None, HoldingState::Quarantined) => {
            format!("podCIDR {} (in quarantine, was {node}'s)", claim.cidr)
        }
        (None, _) => format!("podCIDR {} of node {node}", claim.cidr),
    }
}

fn overlaps(inventory: &Inventory, findings: &mut Vec<Finding>) {
    let registry = &inventory.registry;
    let mut cidrs: BTreeSet<Cidr> = registry.blocks.iter().map(|entry| entry.cidr).collect();
    for node in inventory.cache.nodes.iter() {
        cidrs.extend(node.pod_cidrs.iter().copied());
    }
    let mut told: BTreeSet<(HoldingId, HoldingId)> = BTreeSet::new();
    for cidr in cidrs {
        let all: Vec<(HoldingId, Holding)> = registry.ledger.overlapping(&cidr).collect();
        for (at, (id, claim)) in all.iter().enumerate() {
            for (other, theirs) in &all[at + 1..] {
                if claim.holder == theirs.holder || !claim.cidr.overlaps(&theirs.cidr) {
                    continue;
                }
                if !told.insert((*id.min(other), *id.max(other))) {
                    continue;
                }
                let rests = claim.state == HoldingState::Quarantined
                    || theirs.state == HoldingState::Quarantined;
                let severity = if rests {
                    Severity::Info
                } else {
                    Severity::Critical
                };
                let (a, b) = (
                    whose(*id, claim, inventory),
                    whose(*other, theirs, inventory),
                );
                let advice = if rests {
                    "nothing to do: it is free once the quarantine is over".to_owned()
                } else {
                    "replace one of the two nodes: cordon and drain it, delete the Node, let it register again; then find out who else writes podCIDRs".to_owned()
                };
                let smaller = if claim.cidr.len() > theirs.cidr.len() {
                    claim.cidr
                } else {
                    theirs.cidr
                };
                findings.push(Finding::new(
                    severity,
                    "OverlappingRanges",
                    format!("range {smaller}"),
                    format!("{a} overlaps {b}"),
                    advice,
                ));
            }
        }
    }
}

/// Reports blocks that the NodeSubnets of several live nodes list.
fn listed_twice(inventory: &Inventory, findings: &mut Vec<Finding>) {
    let mut lists: BTreeMap<Cidr, Vec<&str>> = BTreeMap::new();
    for subnet in inventory.subnets.values() {
        let Ok(spec) = &subnet.spec else { continue };
        let node = inventory.cache.nodes.get(&subnet.name);
        if node.is_none_or(|node| spec.node_uid.as_deref() != Some(&*node.uid)) {
            continue;
        }
        for held in &spec.blocks {
            if let Ok(cidr) = Cidr::parse_strict(&held.cidr) {
                lists.entry(cidr).or_default().push(&subnet.name);
            }
        }
    }
    for (cidr, nodes) in lists.iter().filter(|(_, nodes)| nodes.len() > 1) {
        findings.push(Finding::new(
            Severity::Critical,
            "BlockListedTwice",
            format!("block {cidr}"),
            format!("the NodeSubnets of {} list it", some(nodes, 4)),
            "stop whoever edits NodeSubnets (kubectl get nodesubnets.cadastre.dev -o yaml --show-managed-fields); drain all of these nodes but one".to_owned(),
        ));
    }
}

/// Reports IPAMBlocks and NodeSubnets that cannot be parsed, and IPAMBlocks whose name or owner is wrong.
fn objects(inventory: &Inventory, findings: &mut Vec<Finding>) {
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
            findings.push(Finding::new(
                Severity::Warning,
                "UnreadableObject",
                format!("block object {}", block.name),
                why,
                format!("find out who wrote it, then delete it (kubectl delete ipamblocks.cadastre.dev {}): the controller creates the blocks that it needs again", block.name),
            ));
        }
        if let Ok(spec) = &block.spec
            && !spec.owner.quarantined
        {
            let node = inventory.cache.nodes.get(&spec.owner.name);
            if node.is_none_or(|node| node.uid != spec.owner.uid) {
                findings.push(Finding::new(
                    Severity::Warning,
                    "OwnerlessBlock",
                    format!("block {}", spec.cidr),
                    format!("it belongs to node {} with UID {}, which is gone, but it is not in quarantine", spec.owner.name, spec.owner.uid),
                    "check that a controller leads (kubectl get lease -A | grep cadastre): it puts such blocks into quarantine".to_owned(),
                ));
            }
        }
    }
    for subnet in inventory.subnets.values() {
        if let Err(why) = &subnet.spec {
            findings.push(Finding::new(
                Severity::Warning,
                "UnreadableObject",
                format!("nodesubnet {}", subnet.name),
                format!("its spec cannot be read ({why})"),
                "check that the CustomResourceDefinitions are of the controller's version (cadastre crd | kubectl apply --server-side -f -)".to_owned(),
            ));
        }
    }
}

fn block(entry: &BlockEntry, inventory: &Inventory, findings: &mut Vec<Finding>) {
    let object = format!("block {}", entry.cidr);
    let name = block_name(&entry.cidr);
    if inventory.registry.pools.get(&entry.pool).is_none() {
        findings.push(Finding::new(
            Severity::Warning,
            "BlockOfNoPool",
            object.clone(),
            format!("its pool \"{}\" is gone", entry.pool),
            "no new address is assigned from it, and it is released when it is empty; to keep it, create the pool again".to_owned(),
        ));
    }
    if inventory.cache.blocks.get(&*name).is_none() {
        findings.push(Finding::new(
            Severity::Warning,
            "ListedWithoutObject",
            object,
            format!(
                "the NodeSubnet of {} lists it, but there is no IPAMBlock {name}",
                entry.owner.name
            ),
            "check that a controller leads: it creates the object again, which somebody must have deleted"
                .to_owned(),
        ));
        return;
    }
    if entry.owner.quarantined {
        overdue(entry, inventory, findings);
        return;
    }
    let subnet = inventory.subnets.get(&entry.owner.name);
    let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
    let cidr = entry.cidr.to_string();
    let listed = spec.and_then(|spec| spec.blocks.iter().find(|held| held.cidr == cidr));
    let live = inventory.cache.nodes.get(&entry.owner.name);
    if live.is_none_or(|node| node.uid != entry.owner.uid) {
        return;
    }
    match listed {
        None => findings.push(Finding::new(
            Severity::Warning,
            "BlockNotListed",
            object,
            format!(
                "it belongs to node {}, but the node's NodeSubnet does not list it, so it is not used",
                entry.owner.name
            ),
            "check that a controller leads: it lists such blocks, or frees them".to_owned(),
        )),
        Some(_) if inventory.block_status(entry).is_none() => findings.push(Finding::new(
            Severity::Info,
            "AgentSilent",
            object,
            format!(
                "it belongs to node {}, but the node's agent has not reported it",
                entry.owner.name
            ),
            format!(
                "check that the agent runs on {} (kubectl get pods -A -o wide | grep {})",
                entry.owner.name, entry.owner.name
            ),
        )),
        Some(_) => {}
    }
}

/// Reports a block that still exists although its quarantine is over.
fn overdue(entry: &BlockEntry, inventory: &Inventory, findings: &mut Vec<Finding>) {
    /// For this many seconds, a block that outlives its quarantine is no fault: the controller frees blocks only every
    /// few seconds.
    const SLACK: i64 = 60;
    let Some(until) = entry.until else { return };
    if inventory.now.duration_since(until).as_secs() < SLACK {
        return;
    }
    let over = age(Some(until), inventory.now);
    let kept = inventory.pods_in(&entry.cidr).next();
    let (severity, message, advice) = match kept {
        Some((addr, pod)) => (
            Severity::Info,
            format!(
                "its quarantine has been over for {over}, but pod {} still reports {addr}",
                pod.name
            ),
            format!(
                "it is free once that pod is gone (kubectl delete pod -n {})",
                pod.name.replace('/', " ")
            ),
        ),
        None => (
            Severity::Warning,
            format!("its quarantine has been over for {over}, but it is still there"),
            "check that a controller leads (kubectl get lease -A | grep cadastre), and see its log"
                .to_owned(),
        ),
    };
    findings.push(Finding::new(
        severity,
        "QuarantineOver",
        format!("block {}", entry.cidr),
        message,
        advice,
    ));
}

fn pod_cidrs(node: &Node, inventory: &Inventory, findings: &mut Vec<Finding>) {
    let pools = &inventory.registry.pools;
    let object = format!("node {}", node.name);
    if !node.unreadable.is_empty() {
        findings.push(Finding::new(
            Severity::Warning,
            "UnreadablePodCIDR",
            object.clone(),
            format!(
                "its podCIDRs name {}, which is no CIDR",
                some(&node.unreadable, 2)
            ),
            "podCIDRs cannot be changed: delete the Node and let it register again".to_owned(),
        ));
    }
    let registry = &inventory.registry;
    for cidr in &node.pod_cidrs {
        let counts = registry.pod_cidrs(node).any(|it| it == cidr);
        if !counts && pools.is_any_over(cidr) {
            findings.push(Finding::new(
                Severity::Critical,
                "PodCIDRTooWide",
                object.clone(),
                too_wide_text(cidr),
                ADVICE.to_owned(),
            ));
        }
    }
    let managed = pools
        .iter()
        .any(|pool| pool.allocation_mode == AllocationMode::NodeCIDR && pool.selects(node));
    for cidr in registry
        .pod_cidrs(node)
        .filter(|cidr| pools.of(cidr).is_none())
    {
        if managed {
            findings.push(Finding::new(
                Severity::Warning,
                "ForeignPodCIDR",
                object.clone(),
                format!("its podCIDR {cidr} is in no pool, though a pool selects the node: a foreign allocator wrote it, or its pool is gone"),
                "turn off other allocators (kube-controller-manager: --allocate-node-cidrs=false); add the range to a pool, or delete the Node and let it register again".to_owned(),
            ));
        }
    }
}

fn node_subnet(subnet: &SubnetFact, inventory: &Inventory, findings: &mut Vec<Finding>) {
    let Ok(spec) = &subnet.spec else { return };
    let object = format!("nodesubnet {}", subnet.name);
    let node = inventory.cache.nodes.get(&subnet.name);
    if let Some(uid) = &spec.node_uid
        && node.is_none_or(|node| *node.uid != **uid)
    {
        let instead = node.map_or("there is no such node".to_owned(), |node| {
            format!("the node of that name is {}", node.uid)
        });
        findings.push(Finding::new(
            Severity::Warning,
            "StaleNodeSubnet",
            object.clone(),
            format!("it is for the node with UID {uid}, but {instead}"),
            "check that a controller leads (kubectl get lease -A | grep cadastre): it corrects this".to_owned(),
        ));
    } else if spec.node_uid.is_none()
        && spec.quarantined.is_empty()
        && spec.blocks.is_empty()
        && node.is_none()
    {
        findings.push(Finding::new(
            Severity::Warning,
            "StaleNodeSubnet",
            object.clone(),
            "it is for no node, and nothing in it is needed".to_owned(),
            format!(
                "check that a controller leads; the object may be deleted (kubectl delete nodesubnets.cadastre.dev {})",
                subnet.name
            ),
        ));
    }
    if let Some(node) = node.filter(|node| spec.node_uid.as_deref() == Some(&*node.uid)) {
        let said: BTreeSet<String> = spec.pod_cidrs.iter().map(|it| it.cidr.clone()).collect();
        let is = inventory.registry.listed_pod_cidrs(node, None);
        let is: BTreeSet<String> = is.into_iter().map(|it| it.cidr).collect();
        if said != is {
            let (said, is): (Vec<_>, Vec<_>) = (said.iter().collect(), is.iter().collect());
            findings.push(Finding::new(
                Severity::Warning,
                "StaleNodeSubnet",
                object.clone(),
                format!("it lists podCIDRs [{}], but the node has [{}]", some(&said, 4), some(&is, 4)),
                "check that a controller leads (kubectl get lease -A | grep cadastre): it corrects this".to_owned(),
            ));
        }
    }
    let report = inventory
        .cache
        .subnets
        .get(&subnet.name)
        .and_then(|it| it.report.as_ref());
    let accepted = report.and_then(|report| report.condition(ACCEPTED));
    if let Some(accepted) = accepted.filter(|it| !it.is_true()) {
        let why = &accepted.message;
        findings.push(Finding::new(
            Severity::Warning,
            "StatusRejected",
            object,
            format!("the controller rejects a part of what the agent reports: {why}"),
            format!("see the agent's version and log on {}", subnet.name),
        ));
    }
}
