//! Checks of claims. They report addresses of a claim that another claim or a node has, too; statuses that contradict
//! the blocks; and deletions that take long.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::{Findings, Severity};
use crate::claims::ClaimFact;
use crate::inventory::{Cover, Inventory};
use crate::render::{age, some};
use cadastre_api::CLAIM_FINALIZER;
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_core::{Addr, Cidr};

/// If the status of a claim contradicts the blocks for at most this many seconds, that is no fault, because the
/// controller writes the status and the blocks one after the other.
const SLACK: i64 = 60;
/// A deletion that waits for a pod or a node is reported after this many seconds.
const LONG: i64 = 600;
/// The advice for faults that only a controller can repair.
const LEADER: &str =
    "check that a controller leads (kubectl get lease -A | grep cadastre), and see its log";

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    twice(inventory, findings);
    for claim in inventory.claims.values() {
        in_other_range(claim, inventory, findings);
        stale(claim, inventory, findings);
        if let Some(deleted_at) = claim.deleted_at {
            deleting(claim, deleted_at, inventory, findings);
        }
    }
}

fn seconds(since: Timestamp, inventory: &Inventory) -> i64 {
    inventory.now.duration_since(since).as_secs()
}

/// Reports addresses that the statuses of several claims record.
fn twice(inventory: &Inventory, findings: &mut Findings) {
    let mut names: BTreeMap<Addr, BTreeSet<&str>> = BTreeMap::new();
    for claim in inventory.claims.values() {
        for addr in &claim.addresses {
            names.entry(*addr).or_default().insert(&claim.name);
        }
    }
    for (addr, names) in names.iter().filter(|(_, names)| names.len() > 1) {
        let Some(has) = inventory.claim_of(*addr).map(|it| it.name.as_str()) else {
            continue;
        };
        let others = names.iter().filter(|it| **it != has);
        let others: Vec<&str> = others.copied().collect();
        findings.add(
            Severity::Warning,
            "ClaimedTwice",
            format!("address {addr}"),
            format!(
                "claim {has} has it, and the status of {} records it, too: the pods of {has} get it, and those of the others wait",
                some(&others, 4)
            ),
            format!(
                "release all of these claims but one (kubectl cadastre claim release {})",
                others.join(" ")
            ),
        );
    }
}

/// Reports addresses of a claim that lie in a larger range of a node, unless the node's agent reports them as withdrawn
/// from that range. The claim's own block, a block of one address, is not such a range.
fn in_other_range(claim: &ClaimFact, inventory: &Inventory, findings: &mut Findings) {
    for addr in &claim.addresses {
        let has = inventory.claim_of(*addr);
        if has.is_none_or(|it| it.name != claim.name) {
            continue;
        }
        let host = Cidr::host(*addr);
        let covers = inventory.covers(*addr);
        let others = covers.iter().filter_map(|it| match it {
            Cover::Block(entry) if entry.cidr == host => None,
            Cover::Block(entry) => Some((entry.cidr, "block", it)),
            Cover::PodCidr(cidr, _) | Cover::QuarantinedPodCidr(cidr, ..) => {
                Some((*cidr, "podCIDR", it))
            }
        });
        for (cidr, kind, cover) in others {
            let (node, gone) = (cover.node(), cover.is_quarantined());
            let is_block = kind == "block";
            if is_block && inventory.is_handed_over(*addr) {
                continue;
            }
            let (whose, advice) = match (gone, kind) {
                (true, _) => (
                    format!("which was node {node}'s and is in quarantine"),
                    "nothing to do: the claim's pods get it once the quarantine is over".to_owned(),
                ),
                (false, "block") => (
                    format!("which node {node} has and has not handed over yet"),
                    format!(
                        "wait: the node hands it over when no pod uses it and its agent runs (kubectl cadastre show ip {addr})"
                    ),
                ),
                (false, _) => (
                    format!("which node {node} has"),
                    format!(
                        "find out who writes podCIDRs, and drain, delete and register node {node} again"
                    ),
                ),
            };
            findings.add(
                if gone || is_block {
                    Severity::Info
                } else {
                    Severity::Warning
                },
                "ClaimInRangeOfNode",
                format!("claim {}", claim.name),
                format!("its address {addr} is a part of {kind} {cidr}, {whose}: no further node gets it for the claim"),
                format!("{advice}. If no pod has used the claim and it asks for no address, the controller gives it another one"),
            );
        }
    }
}

/// Reports a claim whose status names a node, although that node has no block with an address of the claim.
fn stale(claim: &ClaimFact, inventory: &Inventory, findings: &mut Findings) {
    let status = &claim.status;
    let Some(node) = &status.node else { return };
    let is_new = |at: Timestamp| seconds(at, inventory) < SLACK;
    if status.since.as_ref().is_none_or(|it| is_new(it.0)) {
        return;
    }
    let since = age(status.since.as_ref().map(|it| it.0), inventory.now);
    let blocks = inventory.blocks_of_claim(claim);
    let mut own = blocks.iter().filter(|it| *it.owner.name == **node);
    if own.next().is_none() {
        findings.add(
            Severity::Warning,
            "StaleClaim",
            format!("claim {}", claim.name),
            format!("its status says that node {node} has had its addresses for {since}, but the node has no block of them"),
            LEADER,
        );
    }
}

/// Reports a claim whose deletion was requested long ago, and says what the deletion waits for.
fn deleting(
    claim: &ClaimFact,
    deleted_at: Timestamp,
    inventory: &Inventory,
    findings: &mut Findings,
) {
    let object = format!("claim {}", claim.name);
    let since = age(Some(deleted_at), inventory.now);
    let foreign = claim.finalizers.iter().filter(|it| **it != CLAIM_FINALIZER);
    let foreign: Vec<&String> = foreign.collect();
    let blocks = inventory.blocks_of_claim(claim);
    let mut add = |severity, message: String, advice: String| {
        findings.add(severity, "ClaimStaysDeleted", &object, message, advice);
    };
    if let [block, ..] = &*blocks {
        if seconds(deleted_at, inventory) < LONG {
            return;
        }
        let (severity, what, advice) = held(block, claim, inventory);
        let message = format!("it has been being deleted for {since}, and {what}");
        return add(severity, message, advice);
    }
    let pool = claim.pool.as_deref();
    let pool = pool.and_then(|it| inventory.registry.pools.get(it));
    let cooldown = pool.map_or(0, |it| it.node_view.terms.cooldown_seconds);
    let released_at = claim.status.released_at.as_ref();
    let from = released_at.map_or(deleted_at, |it| it.0.max(deleted_at));
    if seconds(from, inventory) < i64::from(cooldown) + SLACK {
        return;
    }
    if foreign.is_empty() {
        let message =
            format!("it has been being deleted for {since}, although no node has its addresses");
        add(Severity::Warning, message, LEADER.to_owned());
    } else {
        let message = format!(
            "it has been being deleted for {since}, and the finalizer {} of somebody else keeps it",
            some(&foreign, 2)
        );
        let advice = "see to it that whoever set the finalizer removes it".to_owned();
        add(Severity::Info, message, advice);
    }
}

/// Explains why a node has an address of a claim that is being deleted.
fn held(
    block: &BlockEntry,
    claim: &ClaimFact,
    inventory: &Inventory,
) -> (Severity, String, String) {
    let (node, addr) = (&block.owner.name, block.cidr.first());
    let (namespace, _) = claim.split();
    let pods = inventory.pods_of_claim(&claim.name).into_iter();
    let mut here = pods.filter(|it| it.node.as_ref() == Some(node));
    match here.next() {
        _ if block.owner.quarantined => (
            Severity::Info,
            format!("{addr} is in quarantine, because node {node} is deleted"),
            "nothing to do: it goes when the quarantine is over and no pod reports the address"
                .to_owned(),
        ),
        Some(pod) => (
            Severity::Info,
            format!("pod {} on node {node} still names it", pod.pod),
            format!(
                "nothing, if the pod is to keep the address; else delete the pod (kubectl delete pod -n {namespace} {})",
                pod.pod
            ),
        ),
        None => (
            Severity::Warning,
            format!("node {node} does not release {addr}, although no pod there names the claim"),
            format!(
                "check that the agent of {node} runs; if that node is dead, make sure that the machine is off, and delete its Node (kubectl delete node {node})"
            ),
        ),
    }
}
