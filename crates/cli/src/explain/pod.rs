//! Explains why a pod has or lacks addresses, and from which pools it may get them.

use super::{Explanation, choice};
use crate::inventory::{Inventory, PodFact};
use crate::render::some;
use crate::show;
use cadastre_api::choice::{Label, PodLabels, Requester};
use cadastre_api::{ADDRESSES_ANNOTATION, AllocationMode, POOLS_ANNOTATION};
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::objects::Node;

/// Explains a pod. Fails if there is no pod of this name and no agent reports an address of it.
pub fn pod(name: &str, inventory: &Inventory) -> anyhow::Result<Explanation> {
    let report = show::pod(name, inventory)?;
    let mut explanation = Explanation::about(format!("pod {name}"));
    let has: Vec<String> = report
        .allocations
        .iter()
        .map(|row| {
            let of = |what: &str, name: &Option<String>| {
                name.as_ref()
                    .map_or(String::new(), |name| format!(" {what} {name}"))
            };
            format!(
                "{}{}{}",
                row.address,
                of("of pool", &row.pool),
                of("from", &row.range)
            )
        })
        .collect();
    let Some(pod) = inventory.pod(name) else {
        "it is gone, but a node still has addresses assigned to it: see kubectl cadastre check"
            .clone_into(&mut explanation.answer);
        explanation.add("Holds", has);
        return Ok(explanation);
    };
    let node = pod
        .node
        .as_deref()
        .and_then(|node| inventory.cache.nodes.get(node));
    let chosen = match node.filter(|_| !pod.host_network) {
        Some(node) => choose(pod, node, inventory),
        None => Choice::default(),
    };
    explanation.answer = if pod.host_network {
        "it uses the network of its node, and needs no address of its own".to_owned()
    } else if pod.finished {
        format!(
            "it has ended ({}), and no longer uses its addresses",
            pod.phase
        )
    } else if !has.is_empty() {
        format!("it has {}", has.join(" and "))
    } else if !pod.addresses.is_empty() {
        format!(
            "it reports {}, but its node's list of addresses, which is published every few minutes, does not contain them",
            some(&pod.addresses, 4)
        )
    } else if let Some(node) = node {
        lacks(node, &chosen.pools, inventory)
    } else {
        "it is not scheduled yet (kubectl describe pod shows why): addresses are assigned on a node"
            .to_owned()
    };
    if let (Some(node), false) = (node, pod.host_network) {
        serving(node, chosen, inventory, &mut explanation);
    }
    Ok(explanation)
}

/// Explains why a pod has no address. Only blocks of `pools`, which the pod may use, are counted: it gets no address
/// from other blocks.
fn lacks(node: &Node, pools: &[String], inventory: &Inventory) -> String {
    let name = &node.name;
    let blocks = inventory.registry.blocks.of(&node.uid);
    let blocks = blocks.filter(|entry| pools.iter().any(|pool| *entry.pool == **pool));
    let words = blocks.filter_map(|entry| inventory.block_status(entry));
    let free = words.fold(0, |sum: i64, word| sum.saturating_add(word.free));
    if show::agent_of(node, inventory).is_none() {
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
    /// What the annotations of the pod and its namespace ask for, one line each
    asks: Vec<String>,
    /// The names of the pools that the pod may use, best first
    pools: Vec<String>,
    /// Why the pod may use these pools and no others, one line each
    lines: Vec<String>,
}

fn choose(pod: &PodFact, node: &Node, inventory: &Inventory) -> Choice {
    let namespace = pod.name.split('/').next().unwrap_or_default();
    let namespace = inventory.namespaces.get(namespace);
    let by_namespace = namespace.and_then(|it| it.annotations.get(POOLS_ANNOTATION));
    let own = pod.meta.annotations.get(POOLS_ANNOTATION);
    let asked = own.or(by_namespace);
    let asked = asked.map(|text| text.split(',').map(str::trim).collect::<Vec<_>>());
    let by_name: Vec<&str> = asked.unwrap_or_default();
    let labels: &[Label] = namespace.map_or(&[], |it| &it.labels);
    let asker = Requester {
        node: &node.labels,
        pod: Some(PodLabels {
            namespace: labels,
            pod: &pod.meta.labels,
        }),
        by_name: &by_name,
    };
    let mut asks = Vec::new();
    for name in [POOLS_ANNOTATION, ADDRESSES_ANNOTATION] {
        if let Some(value) = pod.meta.annotations.get(name) {
            asks.push(format!("{name}: {value}"));
        }
    }
    if let (None, Some(value)) = (own, by_namespace) {
        asks.push(format!("{POOLS_ANNOTATION} of its namespace: {value}"));
    }
    let (pools, lines) = choice(AllocationMode::Blocks, &asker, inventory);
    Choice { asks, pools, lines }
}

fn serving(node: &Node, chosen: Choice, inventory: &Inventory, explanation: &mut Explanation) {
    explanation.add("It asks for", chosen.asks);
    explanation.add("Pools", chosen.lines);
    let mut has = Vec::new();
    for pool in chosen.pools {
        let blocks = inventory.registry.blocks.of(&node.uid);
        for entry in blocks.filter(|entry| *entry.pool == *pool) {
            has.push(block_line(entry, inventory));
        }
    }
    for cidr in inventory.registry.pod_cidrs(node) {
        has.push(format!("podCIDR {cidr}"));
    }
    explanation.add(&format!("Ranges of node {}", node.name), has);
}

fn block_line(entry: &BlockEntry, inventory: &Inventory) -> String {
    let cidr = entry.cidr;
    let word = inventory.block_status(entry);
    let counts = word.map_or("its agent has not reported it".to_owned(), |word| {
        format!(
            "{} in use, {} cooling, {} free",
            word.used, word.cooling, word.free
        )
    });
    format!("block {cidr} of pool \"{}\": {counts}", entry.pool)
}
