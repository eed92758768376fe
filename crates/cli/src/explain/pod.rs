//! Explains why a pod has or lacks addresses, and from which pools it may get them.

use super::{Explanation, asked, choice, claim};
use crate::inventory::{Inventory, PodFact};
use crate::render::{joined, some};
use crate::show;
use cadastre_api::choice::{PodLabels, Requester};
use cadastre_api::{ADDRESSES_ANNOTATION, AllocationMode, CLAIM_ANNOTATION, POOLS_ANNOTATION};
use cadastre_controller::cluster::objects::Node;

/// Explains a pod. Fails if there is no pod of this name and no agent reports an address of it.
pub(crate) fn pod(name: &str, inventory: &Inventory) -> anyhow::Result<Explanation> {
    let report = show::pod(name, inventory)?;
    let mut explanation = Explanation::about(format!("pod {name}"));
    let has = report.allocations.iter().map(|row| {
        let pool = row.pool.iter().map(|it| format!(" of pool {it}"));
        let range = row.range.iter().map(|it| format!(" from {it}"));
        row.address.to_string() + &pool.chain(range).collect::<String>()
    });
    let has: Vec<String> = has.collect();
    let Some(pod) = inventory.pod(name) else {
        "it is gone, but a node still has addresses assigned to it: see kubectl cadastre check"
            .clone_into(&mut explanation.answer);
        explanation.add("Holds", has);
        return Ok(explanation);
    };
    let node = pod.node.as_deref();
    let node = node.and_then(|node| inventory.cache.nodes.get(node));
    let choice = node.map(|node| choose(pod, node, inventory));
    let choice = choice.unwrap_or_default();
    let claim = pod.claim.as_deref();
    // If the node's ranges contain the addresses that the pod asks for, the controller creates no claim for the pod.
    let claim = claim.filter(|name| pod.asked.is_empty() || inventory.claims.contains_key(*name));
    let wait = claim.map(|name| claim::wait(pod, name, inventory));
    let is_asked = claim.is_none() && !pod.asked.is_empty();
    let asked = node.filter(|_| is_asked);
    let asked = asked.map(|node| asked::wait(pod, node, inventory));
    let may_wait = !pod.finished && has.is_empty() && pod.addresses.is_empty();
    explanation.answer = if pod.host_network {
        "it uses the network of its node, and needs no address of its own".to_owned()
    } else if pod.finished {
        format!(
            "it has ended ({}), and no longer uses its addresses",
            pod.phase
        )
    } else if !has.is_empty() {
        let has_others = claim.is_some_and(|name| {
            let claim = inventory.claims.get(name);
            let mut rows = report.allocations.iter();
            claim.is_some_and(|it| rows.all(|row| !it.addresses.contains(&row.address)))
        });
        let but = if has_others {
            ", and not the addresses of its claim: a running pod keeps what it has"
        } else {
            ""
        };
        format!("it has {}{but}", has.join(" and "))
    } else if !pod.addresses.is_empty() {
        format!(
            "it reports {}, but its node's list of addresses, which is published every few minutes, does not contain them",
            some(&pod.addresses, 4)
        )
    } else if let (Some(wait), Some(_)) = (&wait, node) {
        format!("it has no address yet: {}", wait.why)
    } else if let (Some(wait), Some(_)) = (&asked, node) {
        format!("it has no address yet: {}", wait.why)
    } else if let Some(node) = node {
        lacks(node, &choice.pools, inventory)
    } else {
        "it is not scheduled yet (kubectl describe pod shows why): addresses are assigned on a node"
            .to_owned()
    };
    if let (Some(name), Some(wait)) = (claim, wait) {
        explanation.add("It asks for", choice.annotations);
        explanation.add(&format!("Claim {name}"), claim::lines(name, inventory));
        if node.is_some() && may_wait {
            explanation.add("What ends the wait", vec![wait.end]);
        }
    } else if let (Some(node), false) = (node, pod.host_network) {
        serving(node, choice, inventory, &mut explanation);
        if let Some(wait) = asked.filter(|_| may_wait) {
            explanation.add("What ends the wait", vec![wait.end]);
        }
    }
    for name in &pod.interface_claims {
        let mut lines = claim::lines(name, inventory);
        let known = inventory.claims.get(name);
        let mut rows = report.allocations.iter();
        let has = known.is_some_and(|it| rows.any(|row| it.addresses.contains(&row.address)));
        if !has && !pod.finished && node.is_some() {
            let wait = claim::wait_of_interface(pod, name, inventory);
            lines.push(format!("the interface waits: {}", wait.why));
            lines.push(format!("what ends the wait: {}", wait.end));
        }
        explanation.add(&format!("IPAMClaim {name} of an interface"), lines);
    }
    Ok(explanation)
}

/// Explains why a pod has no address. Counts only blocks of `pools`, the pools that the pod may use.
fn lacks(node: &Node, pools: &[String], inventory: &Inventory) -> String {
    let name = &node.name;
    let blocks = inventory.plain_blocks(&node.uid);
    let blocks = blocks.filter(|entry| pools.iter().any(|pool| *entry.pool == **pool));
    let statuses = blocks.filter_map(|entry| inventory.block_status(entry));
    let free = statuses.fold(0, |sum: i64, it| sum.saturating_add(it.free));
    if inventory.subnet_of(node).is_none() {
        return format!(
            "it has no address yet, and the agent of {name} has not reported: check that it runs"
        );
    }
    let has_pod_cidr = inventory.registry.pod_cidrs(node).next().is_some();
    if pools.is_empty() && !has_pod_cidr {
        return format!("it has no address yet, and no pool serves it on node {name}");
    }
    let of = match pools {
        [] => String::new(),
        pools => format!(" of the pools that serve it ({})", some(pools, 4)),
    };
    if free == 0 && !has_pod_cidr {
        return format!(
            "it has no address yet, and node {name} has none free{of}: see kubectl cadastre explain node {name}"
        );
    }
    let free = if pools.is_empty() {
        "podCIDRs".to_owned()
    } else {
        format!("{free} free{of}")
    };
    format!("it has no address yet, and node {name} has {free}: see kubectl describe pod")
}

/// The pools that a pod may use, with the reasons.
#[derive(Default)]
struct Choice {
    /// One line for each annotation of the pod or its namespace that asks for pools or addresses, and one line if the
    /// CNI configuration or the runtime asks for addresses
    annotations: Vec<String>,
    /// The names of the pools that the pod may use, best first
    pools: Vec<String>,
    /// Why the pod may use these pools and no others, with one line for each pool
    lines: Vec<String>,
}

fn choose(pod: &PodFact, node: &Node, inventory: &Inventory) -> Choice {
    let namespace = pod.name.split('/').next().unwrap_or_default();
    let namespace = inventory.namespaces.get(namespace);
    let by_namespace = namespace.and_then(|it| it.annotations.get(POOLS_ANNOTATION));
    let own = pod.meta.annotations.get(POOLS_ANNOTATION);
    let by_name = own.or(by_namespace).into_iter();
    let by_name = by_name.flat_map(|text| text.split(',').map(str::trim));
    let by_name: Vec<&str> = by_name.collect();
    let requester = Requester {
        node: &node.labels,
        pod: Some(PodLabels {
            namespace: namespace.map_or(&[], |it| &it.labels),
            pod: &pod.meta.labels,
        }),
        by_name: &by_name,
    };
    let mut annotations = Vec::new();
    for name in [CLAIM_ANNOTATION, POOLS_ANNOTATION, ADDRESSES_ANNOTATION] {
        if let Some(value) = pod.meta.annotations.get(name) {
            let effect = match (name == CLAIM_ANNOTATION, pod.claim.is_some()) {
                (true, false) => {
                    " (no effect: mirror pods and pods on the host's network cannot use claims)"
                }
                (false, true) if pod.asked.is_empty() => " (no effect: the pod names a claim)",
                _ => "",
            };
            annotations.push(format!("{name}: {value}{effect}"));
        }
    }
    if let (None, Some(value), None) = (own, by_namespace, &pod.claim) {
        annotations.push(format!("{POOLS_ANNOTATION} of its namespace: {value}"));
    }
    if pod.is_by_cni() {
        let addresses = joined(&pod.asked);
        annotations.push(format!("the CNI configuration or the runtime: {addresses}"));
    }
    let (pools, lines) = choice(AllocationMode::Blocks, &requester, inventory);
    Choice {
        annotations,
        pools,
        lines,
    }
}

fn serving(node: &Node, choice: Choice, inventory: &Inventory, explanation: &mut Explanation) {
    explanation.add("It asks for", choice.annotations);
    explanation.add("Pools", choice.lines);
    let mut ranges = Vec::new();
    for pool in choice.pools {
        let blocks = inventory.plain_blocks(&node.uid);
        for entry in blocks.filter(|entry| *entry.pool == *pool) {
            let status = inventory.block_status(entry);
            let counts = status.map_or("its agent has not reported it".to_owned(), |it| {
                format!(
                    "{} in use, {} cooling, {} free",
                    it.used, it.cooling, it.free
                )
            });
            ranges.push(format!(
                "block {} of pool \"{}\": {counts}",
                entry.cidr, entry.pool
            ));
        }
    }
    let pod_cidrs = inventory.registry.pod_cidrs(node);
    ranges.extend(pod_cidrs.map(|cidr| format!("podCIDR {cidr}")));
    explanation.add(&format!("Ranges of node {}", node.name), ranges);
}
