//! Checks each address that an agent or a pod reports. Reports addresses that are used twice, that are leaked, or that
//! are in a range of another node. Also reports users' requests that no longer apply.

use std::collections::BTreeSet;

use super::{Finding, Findings, LEAKED, Leak, Severity, delete_pod};
use crate::inventory::{AddressInUse, Cover, Inventory, PodFact};
use crate::render::some;
use cadastre_api::AddressEntry;
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::{Addr, Cidr};

/// A pod that is younger than this many seconds may be missing in the NodeAddresses of its node. By default, agents
/// write their NodeAddresses every few minutes, and they can be configured to write them less often.
const LIST_DELAY: i64 = 900;

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    let in_use = inventory.addresses_in_use().map(|(addr, _)| addr);
    let all: BTreeSet<Addr> = in_use.chain(inventory.reported_addresses()).collect();
    for addr in all {
        address(addr, inventory, findings);
    }
    requests(inventory, findings);
}

fn address(addr: Addr, inventory: &Inventory, findings: &mut Findings) {
    let host = Cidr::host(addr);
    let is_in_pool = inventory.registry.pools.of(&host).is_some();
    let covers = inventory.covers(addr);
    let pods: Vec<&PodFact> = inventory.pods_at(addr).collect();
    if !is_in_pool && covers.is_empty() && pods.len() < 2 {
        // Cadastre does not manage this address: it belongs to a pod of another network. So there is nothing to check.
        return;
    }
    let object = format!("address {addr}");
    let (foreign, pods): (Vec<&PodFact>, Vec<&PodFact>) = pods
        .into_iter()
        .partition(|pod| is_mirror_elsewhere(pod, &covers));
    for pod in foreign {
        let on = pod.node.as_deref().unwrap_or("no node");
        findings.add(
            Severity::Warning,
            "ForeignAddress",
            &object,
            format!("mirror pod {} reports it, but it is in a range that {on} never had: this is ignored, as only the kubelet of {on} reports it", pod.name),
            format!("check that kubelet and the static pods of {on}"),
        );
    }
    let in_use = inventory.in_use_at(addr).iter();
    let in_use: Vec<&AddressInUse> = in_use.filter(|it| it.current).collect();
    if let Some(message) = duplicate(&pods, &in_use, inventory) {
        let advice = "delete all of them but one; they get other addresses";
        return findings.add(
            Severity::Critical,
            "DuplicateAddress",
            object,
            message,
            advice,
        );
    }
    let mut of_nodes = inventory.cache.node_addresses.within(&host);
    if let (Some(pod), Some(_)) = (pods.first(), of_nodes.next()) {
        return findings.add(
            Severity::Critical,
            "AddressOfNode",
            object,
            format!("pod {} has an address that is a node's own", pod.name),
            format!(
                "delete the pod ({}), and choose pool ranges apart from the nodes'",
                delete_pod(pod)
            ),
        );
    }
    for entry in &in_use {
        if pods.is_empty() {
            leak(addr, entry, inventory, findings);
        }
    }
    if in_use.is_empty() {
        for pod in pods {
            unrecorded(addr, pod, &covers, inventory, findings);
        }
    }
}

/// Whether a mirror pod reports an address that is in ranges of other nodes, and in no range of the pod's own node.
fn is_mirror_elsewhere(pod: &PodFact, covers: &[Cover]) -> bool {
    let is_own = |it: &Cover| Some(&**it.node()) == pod.node.as_deref();
    pod.is_mirror() && !covers.is_empty() && !covers.iter().any(is_own)
}

/// Whether all users of the address are pods of one virtual machine. Such a virtual machine migrates between nodes.
fn is_migration(pods: &[&PodFact], in_use: &[&AddressInUse], inventory: &Inventory) -> bool {
    let by_agent = in_use.iter().map(|it| {
        let pod = inventory.pod_by_uid(&it.allocation.pod_uid);
        pod.and_then(|it| it.vmi.as_deref())
    });
    let by_pod = pods.iter().map(|it| it.vmi.as_deref());
    let machines: BTreeSet<Option<&str>> = by_agent.chain(by_pod).collect();
    machines.len() == 1 && machines.first() != Some(&None)
}

/// Names the users of the address if several pods use it or several agents report it. Otherwise returns `None`. Also
/// returns `None` if all users are pods of one virtual machine, because such pods may use an address together.
fn duplicate(pods: &[&PodFact], in_use: &[&AddressInUse], inventory: &Inventory) -> Option<String> {
    if is_migration(pods, in_use, inventory) {
        return None;
    }
    let mut users: Vec<String> = pods.iter().map(|pod| format!("pod {}", pod.name)).collect();
    for entry in in_use {
        let AddressEntry { pod, pod_uid, .. } = &entry.allocation;
        let uid = PodUid::read(pod_uid);
        // A single entry counts as a user only if the entry's pod lives. If agents report the address more than once,
        // each entry counts.
        let lives = inventory.pod_by_uid(pod_uid).is_some_and(|it| !it.finished);
        let counts = in_use.len() > 1 || (lives && !pod_uid.is_empty());
        if counts && !pods.iter().any(|it| PodUid::read(&it.uid) == uid) {
            users.push(format!("pod {pod} by the agent of node {}", entry.node));
        }
    }
    let agents: BTreeSet<&str> = in_use.iter().map(|it| &*it.node).collect();
    let agents: Vec<&str> = agents.into_iter().collect();
    match (users.len(), agents.len()) {
        (..2, ..2) => None,
        (_, ..2) => Some(format!("{} use it", some(&users, 4))),
        (_, count) => Some(format!(
            "{} use it; agents of {count} nodes report it in use: {}",
            some(&users, 4),
            some(&agents, 4)
        )),
    }
}

/// Reports an address that no pod reports, but that an agent still lists. The agent's entry is for a pod that is gone
/// or has ended, or for an earlier sandbox of a pod.
fn leak(addr: Addr, in_use: &AddressInUse, inventory: &Inventory, findings: &mut Findings) {
    let AddressInUse {
        node, allocation, ..
    } = in_use;
    let AddressEntry {
        pod: name, pod_uid, ..
    } = allocation;
    let object = format!("address {addr}");
    let pod = inventory.pod_by_uid(pod_uid);
    if pod.is_some_and(|pod| !pod.finished) {
        if allocation.superseded && is_list_current(addr, inventory) {
            findings.add(
                Severity::Warning,
                "SupersededAddress",
                object,
                format!("node {node} still has it assigned to an earlier sandbox of pod {name}, which has a newer one"),
                format!(
                    "it is released once that sandbox ({}) is gone. If this happens often, a plugin of the CNI chain fails: kubectl describe pod -n {} shows which",
                    allocation.handle,
                    name.replace('/', " ")
                ),
            );
        }
        return;
    }
    // The agent may have written the list before the CNI DEL of the pod. So the address counts as leaked only if the
    // agent's status reports it as an orphan, too.
    let orphan = (addr, PodUid::read(pod_uid));
    let subnet = inventory.subnets.get(node);
    if !subnet.is_some_and(|it| it.orphans.contains(&orphan)) {
        return;
    }
    let how = match pod {
        Some(pod) => format!("has ended ({})", pod.phase),
        None => "is gone".to_owned(),
    };
    findings.0.push(Finding {
        severity: Severity::Warning,
        code: LEAKED.to_owned(),
        object,
        message: format!("node {node} still has it assigned to pod {name}, which {how}"),
        advice: format!("it is released once the controller's grace period is over and the node confirms that the sandbox is gone; to release it now: kubectl cadastre release {addr}"),
        leak: Some(Leak {
            address: addr.to_string(),
            node: node.to_string(),
            pod: name.clone(),
            pod_uid: pod_uid.clone(),
        }),
    });
}

/// Whether the agent's list of addresses in use is up to date. The list is up to date if it has, for each block that
/// contains the address, as many addresses as the agent's status counts.
fn is_list_current(addr: Addr, inventory: &Inventory) -> bool {
    inventory.covers(addr).iter().all(|cover| match cover {
        Cover::Block(entry) => inventory.is_list_current(entry),
        _ => true,
    })
}

/// Reports an address that a pod has in its status, but that no agent lists.
fn unrecorded(
    addr: Addr,
    pod: &PodFact,
    covers: &[Cover],
    inventory: &Inventory,
    findings: &mut Findings,
) {
    let object = format!("address {addr}");
    let name = &pod.name;
    let on = pod.node.as_deref().unwrap_or("no node");
    let delete = delete_pod(pod);
    let Some(cover) = covers.iter().rev().find(|it| !it.is_quarantined()) else {
        let advice = format!("delete the pod so that it gets another one ({delete})");
        return if covers.is_empty() {
            let message =
                format!("pod {name} on {on} uses it, but no node has a range that contains it");
            findings.add(
                Severity::Warning,
                "OutsideOfRanges",
                object,
                message,
                advice,
            );
        } else {
            let message = format!(
                "pod {name} on {on} uses it, but the node that had its range is gone: the range stays in quarantine until the pod is gone"
            );
            findings.add(Severity::Info, "UsedInQuarantine", object, message, advice);
        };
    };
    let node = cover.node();
    let is_standby = |entry: &BlockEntry| entry.standby.iter().any(|it| *it.owner.name == *on);
    if matches!(cover, Cover::Block(entry) if is_standby(entry)) {
        return;
    }
    if **node != *on {
        return findings.add(
            Severity::Warning,
            "ForeignAddress",
            object,
            format!("pod {name} on {on} uses it, and it is in a range of node {node}"),
            format!("delete the pod ({delete}), and make sure that nothing else assigns addresses on {on}"),
        );
    }
    if !pod.deleting
        && !is_young(pod, node, inventory)
        && matches!(cover, Cover::Block(entry) if inventory.is_list_current(entry))
    {
        findings.add(
            Severity::Warning,
            "NotRecorded",
            object,
            format!("pod {name} uses it, but the agent of {node} does not list it"),
            format!("see the agent's log on {node}; if this lasts, delete the pod ({delete})"),
        );
    }
}

/// Whether the pod may be too young to be in the list that the agent of its node writes.
fn is_young(pod: &PodFact, node: &str, inventory: &Inventory) -> bool {
    let listed = inventory.subnets.get(node).and_then(|it| it.listed_at);
    let age = |created| inventory.now.duration_since(created).as_secs();
    pod.created
        .is_some_and(|created| age(created) < LIST_DELAY || Some(created) > listed)
}

/// Reports requests of users that no longer apply: requests to release addresses, and requests to drain blocks.
fn requests(inventory: &Inventory, findings: &mut Findings) {
    for subnet in inventory.subnets.values() {
        let object = format!("node {}", subnet.name);
        let release = subnet.requests.release.iter();
        let release = release.filter(|(addr, uid)| !subnet.has_pod(*addr, uid));
        let gone = subnet.requests.container_gone.iter();
        let gone = gone.filter(|(addr, handle)| !subnet.has_handle(*addr, handle));
        let old: Vec<&Addr> = release.chain(gone).map(|(addr, _)| addr).collect();
        if !old.is_empty() {
            findings.add(
                Severity::Info,
                "OldRequest",
                &object,
                format!("its NodeSubnet still requests the release of {}, which it does not have in use", some(&old, 4)),
                "nothing to do: the next kubectl cadastre release removes the request",
            );
        }
        let is_own = |cidr: &Cidr| {
            let entry = inventory.registry.blocks.get(cidr);
            entry.is_some_and(|it| it.owner.name == subnet.name)
        };
        let drain = subnet.requests.drain.iter();
        let old: Vec<&Cidr> = drain.filter(|cidr| !is_own(cidr)).collect();
        if !old.is_empty() {
            findings.add(
                Severity::Info,
                "OldRequest",
                &object,
                format!(
                    "its NodeSubnet still requests to drain {}, which it does not have",
                    some(&old, 4)
                ),
                "nothing to do: the next kubectl cadastre drain or undrain removes the request",
            );
        }
    }
}
