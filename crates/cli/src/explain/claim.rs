//! Explains why a pod that names a claim has no address yet, and what ends the wait.

use std::fmt::Write as _;

use crate::claims::ClaimFact;
use crate::inventory::{Inventory, PodFact};
use crate::render::{age, joined, over, some};
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::objects::{PodClaim, PodUid};
use cadastre_core::{Addr, Cidr};

pub(super) struct Wait {
    /// Why the pod has no address
    pub why: String,
    /// What ends the wait
    pub end: String,
}

impl Wait {
    pub(super) fn new(why: impl Into<String>, end: impl Into<String>) -> Self {
        Wait {
            why: why.into(),
            end: end.into(),
        }
    }
}

/// The advice if only the controller can end the wait.
const CONTROLLER: &str = "the controller, within seconds: if it does not, check that one leads (kubectl get lease -A | grep cadastre)";

/// Returns why an interface of the pod has no address. `name` is the IPAMClaim that the pod names for this interface,
/// as `namespace/name`.
pub(super) fn wait_of_interface(pod: &PodFact, name: &str, inventory: &Inventory) -> Wait {
    if inventory.claims.contains_key(name) {
        return wait(pod, name, inventory);
    }
    let (namespace, short) = name.split_once('/').unwrap_or_default();
    Wait::new(
        format!("IPClaim {name} does not exist"),
        format!(
            "the controller, which creates it from the IPAMClaim of this name if a pool serves its network (spec.networks): kubectl describe pod shows why if it does not (kubectl get ipamclaims.k8s.cni.cncf.io {short} -n {namespace})"
        ),
    )
}

/// Returns why the pod has no address. `name` is the claim that the pod names, as `namespace/name`.
pub(super) fn wait(pod: &PodFact, name: &str, inventory: &Inventory) -> Wait {
    let (namespace, short) = name.split_once('/').unwrap_or_default();
    let Some(claim) = inventory.claims.get(name) else {
        return Wait::new(
            format!("it names claim {name}, which does not exist"),
            format!(
                "the claim: create it (kubectl cadastre claim create {short} -n {namespace} --pool POOL), or correct the pod's annotation"
            ),
        );
    };
    let node = pod.node.as_deref().unwrap_or_default();
    let taken = claim.asked.iter().filter(|_| claim.addresses.is_empty());
    let mut others = taken.filter_map(|addr| Some((*addr, inventory.claim_of(*addr)?)));
    if let Some((addr, other)) = others.find(|(_, other)| other.name != claim.name) {
        return of_other_claim(addr, other, inventory);
    }
    match &*inventory.blocks_of_claim(claim) {
        [] if claim.addresses.is_empty() => Wait::new(
            format!("claim {name} has no addresses ({})", claim.words()),
            end_of(claim, pod, inventory),
        ),
        [] if ["", "Available", "Pending"].contains(&claim.reason()) => Wait::new(
            format!("no node has the addresses of claim {name} yet"),
            CONTROLLER,
        ),
        [] => Wait::new(
            format!(
                "no node gets the addresses of claim {name} now ({})",
                claim.words()
            ),
            end_of(claim, pod, inventory),
        ),
        [first, ..] if first.owner.quarantined => in_quarantine(first, claim, inventory),
        [first, ..] if *first.owner.name != *node => elsewhere(first, claim, inventory),
        blocks => here(blocks, pod, claim, inventory),
    }
}

/// Returns what ends the wait for a claim that has no addresses, or whose addresses no node gets.
fn end_of(claim: &ClaimFact, pod: &PodFact, inventory: &Inventory) -> String {
    let pool = claim.pool.as_deref().unwrap_or("POOL");
    let other = if pod.asked.is_empty() {
        "a claim of another address"
    } else {
        "a pod that asks for another address"
    };
    match claim.reason() {
        "Invalid" => "another claim: this one cannot be used".to_owned(),
        "PoolNotFound" => "a pool of this name, or a claim of another pool".to_owned(),
        "PoolNotSuitable" => {
            "a claim of a pool with allocationMode Blocks and without namespaceSelector".to_owned()
        }
        "PoolNotReady" => {
            format!("the pool, when it allocates again (kubectl cadastre explain pool {pool})")
        }
        "Exhausted" => format!(
            "more ranges in pool \"{pool}\", or the release of another claim of it (kubectl cadastre claim list -A)"
        ),
        "OutsidePool" => format!("a range of the pool that has the address, or {other}"),
        "AddressReserved" => other.to_owned(),
        "ExplicitAddressesDenied" => {
            format!(
                "the pool, if whoever may change it sets explicitAddresses: Allow; or {other} of another pool"
            )
        }
        "AddressInUse" => match claim.addresses.first().or(claim.asked.first()) {
            Some(addr) => format!(
                "{} has {addr}, when it is released (kubectl cadastre show ip {addr}); or {other}",
                whoever(*addr, pod, inventory)
            ),
            None => "whoever has the address, when it is released".to_owned(),
        },
        "NodeNotSelected" => {
            "another node for the pod: one that the pool's nodeSelector selects".to_owned()
        }
        _ => CONTROLLER.to_owned(),
    }
}

/// Explains why a pod has no address if `other`, and not the claim of the pod, has the address `addr`.
fn of_other_claim(addr: Addr, other: &ClaimFact, inventory: &Inventory) -> Wait {
    let blocks = inventory.blocks_of_claim(other);
    let block = blocks.iter().find(|it| it.cidr == Cidr::host(addr));
    let name = &other.name;
    let Some(block) = block else {
        let end = if other.deleted_at.is_some() {
            "the end of that claim, when the cooldown of its pool is over".to_owned()
        } else {
            format!("the end of that claim (kubectl cadastre claim release {name})")
        };
        return Wait::new(
            format!("claim {name} has {addr}, which no node has now"),
            end,
        );
    };
    if block.owner.quarantined {
        return in_quarantine(block, other, inventory);
    }
    let owner = &block.owner.name;
    let (namespace, _) = other.split();
    let pods = inventory.pods_of_claim(name);
    let is_there = |it: &&PodClaim| it.node.as_deref() == Some(&**owner);
    match pods.into_iter().find(is_there) {
        Some(user) => Wait::new(
            format!(
                "claim {name} has {addr}, and pod {} on node {owner} uses it",
                user.pod
            ),
            format!(
                "the end of that pod (kubectl delete pod -n {namespace} {}) and of that claim",
                user.pod
            ),
        ),
        None => elsewhere(block, other, inventory),
    }
}

/// Returns the subject of the sentence "… has the address": a pod other than `pod` that reports the address, or the
/// word "whoever" if there is no such pod.
fn whoever(addr: Addr, pod: &PodFact, inventory: &Inventory) -> String {
    let range = Cidr::host(addr);
    let mut pods = inventory.pods_in(&range).map(|(_, it)| it);
    let user = pods.find(|it| it.uid != pod.uid && it.uses_addresses());
    user.map_or("whoever".to_owned(), |it| format!("pod {}, which", it.name))
}

fn in_quarantine(block: &BlockEntry, claim: &ClaimFact, inventory: &Inventory) -> Wait {
    let owner = &block.owner.name;
    let until = match over(block.until, inventory.now) {
        over if over.is_empty() => "the end of its quarantine".to_owned(),
        over => format!("the end of its quarantine, which is {over}"),
    };
    let pods = inventory.pods_in(&block.cidr);
    let pods: Vec<&str> = pods.map(|(_, pod)| pod.name.as_str()).collect();
    let report = if pods.is_empty() {
        String::new()
    } else {
        format!(", once {} no longer reports it", some(&pods, 4))
    };
    Wait::new(
        format!(
            "node {owner}, which had {} for claim {}, is deleted, and the address stays in quarantine",
            block.cidr.first(),
            claim.name
        ),
        until + &report,
    )
}

/// Explains why a pod has no address if a node other than the pod's node has `block`, an address of `claim`.
fn elsewhere(block: &BlockEntry, claim: &ClaimFact, inventory: &Inventory) -> Wait {
    let (owner, addr) = (&block.owner.name, block.cidr.first());
    let (namespace, _) = claim.split();
    let is_there = |it: &&PodClaim| it.node.as_deref() == Some(&**owner);
    let pods = inventory.pods_of_claim(&claim.name);
    match pods.into_iter().find(is_there) {
        Some(user) => Wait::new(
            format!(
                "node {owner} has {addr} for pod {}, which also names claim {}",
                user.pod, claim.name
            ),
            format!(
                "the end of that pod (kubectl delete pod -n {namespace} {}); then node {owner} releases the address",
                user.pod
            ),
        ),
        None => Wait::new(
            format!("node {owner} still has {addr} of claim {}", claim.name),
            format!(
                "the agent of {owner}, once it has seen that no container uses the address. If that node is dead, make sure that the machine is off, and delete its Node (kubectl delete node {owner})"
            ),
        ),
    }
}

/// Explains why a pod has no address although the pod's own node has addresses of the pod's claim.
fn here(blocks: &[&BlockEntry], pod: &PodFact, claim: &ClaimFact, inventory: &Inventory) -> Wait {
    let node = pod.node.as_deref().unwrap_or_default();
    let (namespace, _) = claim.split();
    let used = blocks
        .iter()
        .flat_map(|it| inventory.in_use_within(&it.cidr));
    let mut other =
        used.filter(|(_, it)| PodUid::read(&it.allocation.pod_uid) != PodUid::read(&pod.uid));
    if let Some((addr, entry)) = other.next() {
        let user = &entry.allocation.pod;
        let lives = inventory.pod_by_uid(&entry.allocation.pod_uid);
        let end = match lives.filter(|it| !it.finished) {
            Some(_) => format!(
                "the end of that pod (kubectl delete pod -n {namespace} {})",
                user.rsplit('/').next().unwrap_or_default()
            ),
            None => format!("the agent of {node}, once it has seen that the container is gone"),
        };
        return Wait::new(
            format!(
                "pod {user} on the same node has {addr} of claim {}",
                claim.name
            ),
            end,
        );
    }
    let subnet = inventory.subnets.get(node);
    let is_listed = |it: &&BlockEntry| subnet.is_some_and(|subnet| subnet.lists(&it.cidr));
    if blocks.len() < claim.addresses.len() || !blocks.iter().all(is_listed) {
        return Wait::new(
            format!(
                "node {node} does not have all addresses of claim {} yet",
                claim.name
            ),
            CONTROLLER,
        );
    }
    let addresses = joined(&claim.addresses);
    Wait::new(
        format!(
            "node {node} has {addresses} of claim {} for it, and nothing uses them",
            claim.name
        ),
        format!(
            "the next try of the kubelet: if it fails, kubectl describe pod shows why, and check that the agent of {node} runs"
        ),
    )
}

/// Describes the claim that a pod names, with one fact per line.
pub(super) fn lines(name: &str, inventory: &Inventory) -> Vec<String> {
    let Some(claim) = inventory.claims.get(name) else {
        return vec!["there is no such claim".to_owned()];
    };
    let mut lines = Vec::new();
    let pool = claim.pool.as_deref().unwrap_or("unknown");
    lines.push(match &*claim.addresses {
        [] if claim.asked.is_empty() => format!("it wants addresses of pool \"{pool}\""),
        [] => format!("it asks for {}", joined(&claim.asked)),
        all => format!("its addresses: {} of pool \"{pool}\"", joined(all)),
    });
    lines.push(claim.words());
    for block in inventory.blocks_of_claim(claim) {
        let mut line = format!("{} is on node {}", block.cidr.first(), block.owner.name);
        if block.owner.quarantined {
            line += ", which is deleted: it is in quarantine";
        } else {
            let _ = write!(line, ", for {}", age(Some(block.since), inventory.now));
        }
        lines.push(line);
    }
    let pods = inventory.pods_of_claim(name).into_iter();
    let pods = pods.map(|it| format!("{} on {}", it.pod, it.node.as_deref().unwrap_or("no node")));
    let pods: Vec<String> = pods.collect();
    lines.push(format!("pods that name it: {}", some(&pods, 4)));
    if claim.deleted_at.is_some() {
        lines.push("it is being deleted, and goes when no node has its addresses".to_owned());
    }
    lines
}
