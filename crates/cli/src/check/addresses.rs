//! Checks of each address that an agent or a pod reports: used twice, leaked, or of another node. Also of users'
//! requests that no longer apply.

use std::collections::BTreeSet;

use super::{Finding, LEAKED, Leak, Severity};
use crate::inventory::is_assigned_under;
use crate::inventory::{AddressInUse, Cover, Inventory, PodFact};
use crate::render::some;
use cadastre_api::AddressEntry;
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::{Addr, Cidr};

/// A pod that was created fewer seconds ago than this may be missing in the list of its node's agent. The margin is
/// wide, because agents can be configured to write the list less often.
const LIST_DELAY: i64 = 900;

pub(super) fn check(inventory: &Inventory, findings: &mut Vec<Finding>) {
    let held = inventory.addresses_in_use().map(|(addr, _)| addr);
    let reported = inventory.reported().map(|(addr, _)| addr);
    let all: BTreeSet<Addr> = held.chain(reported).collect();
    for addr in all {
        one(addr, inventory, findings);
    }
    requests(inventory, findings);
}

fn one(addr: Addr, inventory: &Inventory, findings: &mut Vec<Finding>) {
    let managed = inventory.registry.pools.of(&Cidr::host(addr)).is_some();
    let covers = inventory.covers(addr);
    let pods: Vec<&PodFact> = inventory.pods_at(addr).collect();
    if !managed && covers.is_empty() && pods.len() < 2 {
        // The address belongs to a pod of another network, so there is nothing to check.
        return;
    }
    let object = format!("address {addr}");
    let (lying, pods): (Vec<&PodFact>, _) = pods
        .into_iter()
        .partition(|pod| is_outside_cover(pod, &covers));
    for pod in lying {
        findings.push(outside_cover(addr, pod));
    }
    let held: Vec<&AddressInUse> = inventory
        .in_use_at(addr)
        .iter()
        .filter(|it| it.current)
        .collect();
    if let Some(finding) = duplicate(addr, &pods, &held, inventory) {
        findings.push(finding);
        return;
    }
    if inventory
        .cache
        .node_addresses
        .within(&Cidr::host(addr))
        .next()
        .is_some()
        && !pods.is_empty()
    {
        let pod = &pods[0].name;
        findings.push(Finding::new(
            Severity::Critical,
            "AddressOfNode",
            object,
            format!("pod {pod} has an address that is a node's own"),
            format!("delete the pod (kubectl delete pod -n {}), and choose pool ranges apart from the nodes'", pod.replace('/', " ")),
        ));
        return;
    }
    for holder in &held {
        leak(addr, holder, &pods, inventory, findings);
    }
    if held.is_empty() {
        for pod in pods {
            unrecorded(addr, pod, &covers, inventory, findings);
        }
    }
}

/// Whether a mirror pod reports an address that is in ranges of other nodes, and in none of its own node.
fn is_outside_cover(pod: &PodFact, covers: &[Cover]) -> bool {
    let owner = |cover: &Cover| match cover {
        Cover::Block(entry) => entry.owner.name.clone(),
        Cover::PodCidr(_, node) | Cover::Rest(_, node, _) => node.clone(),
    };
    let on = pod.node.as_deref();
    pod.is_mirror() && !covers.is_empty() && !covers.iter().any(|it| Some(&*owner(it)) == on)
}

fn outside_cover(addr: Addr, pod: &PodFact) -> Finding {
    let on = pod.node.as_deref().unwrap_or("no node");
    Finding::new(
        Severity::Warning,
        "ForeignAddress",
        format!("address {addr}"),
        format!(
            "mirror pod {} reports it, but it is in a range that {on} never had: this is ignored, as only the kubelet of {on} reports it",
            pod.name
        ),
        format!("check that kubelet and the static pods of {on}"),
    )
}

fn duplicate(
    addr: Addr,
    pods: &[&PodFact],
    held: &[&AddressInUse],
    inventory: &Inventory,
) -> Option<Finding> {
    let uid = |held: &&AddressInUse| held.allocation.pod_uid.clone();
    let known = |uid: &String| {
        pods.iter()
            .any(|pod| PodUid::read(&pod.uid) == PodUid::read(uid))
    };
    let mut users: Vec<String> = pods.iter().map(|pod| format!("pod {}", pod.name)).collect();
    for holder in held {
        let own = uid(holder);
        // The pod to which the agent assigned the address counts as a user if it lives. If agents report the address
        // more than once, each report counts.
        let lives = inventory.pod_by_uid(&own).is_some_and(|pod| !pod.finished);
        let counts = held.len() > 1 || (lives && !own.is_empty());
        if counts && !known(&own) {
            let pod = &holder.allocation.pod;
            users.push(format!("pod {pod} by the agent of node {}", holder.node));
        }
    }
    let agents: BTreeSet<&str> = held.iter().map(|it| &*it.node).collect();
    if users.len() < 2 && agents.len() < 2 {
        return None;
    }
    let nodes = if agents.len() > 1 {
        let agents: Vec<&str> = agents.into_iter().collect();
        format!(
            "; agents of {} nodes report it in use: {}",
            agents.len(),
            some(&agents, 4)
        )
    } else {
        String::new()
    };
    Some(Finding::new(
        Severity::Critical,
        "DuplicateAddress",
        format!("address {addr}"),
        format!("{} use it{nodes}", some(&users, 4)),
        "delete all of them but one; they get other addresses".to_owned(),
    ))
}

fn leak(
    addr: Addr,
    held: &AddressInUse,
    pods: &[&PodFact],
    inventory: &Inventory,
    findings: &mut Vec<Finding>,
) {
    let allocation = &held.allocation;
    let pod = inventory.pod_by_uid(&allocation.pod_uid);
    if allocation.superseded && pod.is_some_and(|pod| !pod.finished) && pods.is_empty() {
        if is_list_current(addr, inventory) {
            findings.push(superseded(addr, held));
        }
        return;
    }
    // The agent's list may be older than the pod's DEL, so the agent's status must also report the orphan.
    let subnet = inventory.subnets.get(&held.node);
    let key = (addr, PodUid::read(&allocation.pod_uid));
    let is_told = subnet.is_some_and(|it| it.orphans.contains(&key));
    if !is_told || pod.is_some_and(|pod| !pod.finished) || !pods.is_empty() {
        return;
    }
    let how = match pod {
        Some(pod) => format!("has ended ({})", pod.phase),
        None => "is gone".to_owned(),
    };
    findings.push(Finding {
        leak: Some(Leak {
            address: addr.to_string(),
            node: held.node.to_string(),
            pod: allocation.pod.clone(),
            pod_uid: allocation.pod_uid.clone(),
        }),
        ..Finding::new(
            Severity::Warning,
            LEAKED,
            format!("address {addr}"),
            format!("node {} still has it assigned to pod {}, which {how}", held.node, allocation.pod),
            format!("it is released once the controller's grace period is over and the node confirms that the sandbox is gone; to release it now: kubectl cadastre release {addr}"),
        )
    });
}

/// Whether the agent's list is as recent as its counts of the blocks that contain the address.
fn is_list_current(addr: Addr, inventory: &Inventory) -> bool {
    let covers = inventory.covers(addr);
    covers.iter().all(|cover| match cover {
        Cover::Block(entry) => inventory.is_list_current(entry),
        _ => true,
    })
}

/// Returns the finding about an address that is still assigned to an earlier sandbox of a living pod.
fn superseded(addr: Addr, held: &AddressInUse) -> Finding {
    let AddressEntry { pod, handle, .. } = &held.allocation;
    Finding::new(
        Severity::Warning,
        "SupersededAddress",
        format!("address {addr}"),
        format!(
            "node {} still has it assigned to an earlier sandbox of pod {pod}, which has a newer one",
            held.node
        ),
        format!(
            "it is released once that sandbox ({handle}) is gone. If this happens often, a plugin of the CNI chain fails: kubectl describe pod -n {} shows which",
            pod.replace('/', " ")
        ),
    )
}

/// Reports an address that a pod has in its status, but that no agent lists.
fn unrecorded(
    addr: Addr,
    pod: &PodFact,
    covers: &[Cover],
    inventory: &Inventory,
    findings: &mut Vec<Finding>,
) {
    let object = format!("address {addr}");
    let on = pod.node.as_deref().unwrap_or("no node");
    let holder = covers.iter().rev().find_map(|cover| match cover {
        Cover::Block(entry) if !entry.owner.quarantined => {
            Some((entry.owner.name.clone(), Some(*entry)))
        }
        Cover::PodCidr(_, node) => Some((node.clone(), None)),
        _ => None,
    });
    let Some((node, block)) = holder else {
        let rests = !covers.is_empty();
        let (severity, code) = if rests {
            (Severity::Info, "UsedInQuarantine")
        } else {
            (Severity::Warning, "OutsideOfRanges")
        };
        let message = if rests {
            format!(
                "pod {} on {on} uses it, but the node that had its range is gone: the range stays in quarantine until the pod is gone",
                pod.name
            )
        } else {
            format!(
                "pod {} on {on} uses it, but no node has a range that contains it",
                pod.name
            )
        };
        findings.push(Finding::new(
            severity,
            code,
            object,
            message,
            format!(
                "delete the pod so that it gets another one (kubectl delete pod -n {})",
                pod.name.replace('/', " ")
            ),
        ));
        return;
    };
    if *node != *on {
        findings.push(Finding::new(
            Severity::Warning,
            "ForeignAddress",
            object,
            format!("pod {} on {on} uses it, and it is in a range of node {node}", pod.name),
            format!("delete the pod (kubectl delete pod -n {}), and make sure that nothing else assigns addresses on {on}", pod.name.replace('/', " ")),
        ));
    } else if !pod.deleting
        && !is_young(pod, &node, inventory)
        && block.is_some_and(|entry| inventory.is_list_current(entry))
    {
        findings.push(Finding::new(
            Severity::Warning,
            "NotRecorded",
            object,
            format!("pod {} uses it, but the agent of {node} does not list it", pod.name),
            format!("see the agent's log on {node}; if this lasts, delete the pod (kubectl delete pod -n {})", pod.name.replace('/', " ")),
        ));
    }
}

/// Whether the pod may be too young to be in the list of its node's agent. The list is written every few minutes, and
/// agents can be configured to write it less often.
fn is_young(pod: &PodFact, node: &str, inventory: &Inventory) -> bool {
    let listed = inventory.subnets.get(node).and_then(|it| it.listed_at);
    let age = |created| inventory.now.duration_since(created).as_secs();
    pod.created
        .is_some_and(|created| age(created) < LIST_DELAY || Some(created) > listed)
}

/// Reports requests of users to release or drain that no longer apply.
fn requests(inventory: &Inventory, findings: &mut Vec<Finding>) {
    for subnet in inventory.subnets.values() {
        let gone = subnet.requests.release.iter().filter(|(addr, uid)| {
            let held = inventory.in_use_at(*addr).iter();
            let mut own = held.filter(|held| held.node == subnet.name);
            !own.any(|held| PodUid::read(&held.allocation.pod_uid) == PodUid::read(uid))
        });
        let confirmed = subnet.requests.container_gone.iter();
        let confirmed = confirmed.filter(|entry| !is_assigned_under(subnet, entry));
        let gone: Vec<&Addr> = gone.chain(confirmed).map(|(addr, _)| addr).collect();
        if !gone.is_empty() {
            findings.push(Finding::new(
                Severity::Info,
                "OldRequest",
                format!("node {}", subnet.name),
                format!(
                    "its NodeSubnet still requests the release of {}, which it does not have in use",
                    some(&gone, 4)
                ),
                "nothing to do: the next kubectl cadastre release removes the request".to_owned(),
            ));
        }
        let blocks = inventory.registry.blocks.iter();
        let own: BTreeSet<&Cidr> = blocks
            .filter(|entry| entry.owner.name == subnet.name)
            .map(|entry| &entry.cidr)
            .collect();
        let gone = subnet
            .requests
            .drain
            .iter()
            .filter(|cidr| !own.contains(cidr));
        let gone: Vec<&Cidr> = gone.collect();
        if !gone.is_empty() {
            findings.push(Finding::new(
                Severity::Info,
                "OldRequest",
                format!("node {}", subnet.name),
                format!(
                    "its NodeSubnet still requests to drain {}, which it does not have",
                    some(&gone, 4)
                ),
                "nothing to do: the next kubectl cadastre drain or undrain removes the request"
                    .to_owned(),
            ));
        }
    }
}
