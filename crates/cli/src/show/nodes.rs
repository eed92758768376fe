//! `show nodes` and `show node`: the ranges of nodes, and the addresses in use.

use serde::Serialize;

use super::addresses::{self, SpanRow};
use super::blocks::{BlockRow, LentPart, table};
use super::pods::{AllocationRow, allocations};
use crate::address::{AddressState, ConflictFact};
use crate::inventory::Inventory;
use crate::render::{Columns, FactLines, Style, VerbReport, joined, over, some};
use cadastre_controller::cluster::objects::Node;
use cadastre_core::Cidr;

/// The report of `show nodes`.
#[derive(Debug, Serialize)]
pub(crate) struct NodesReport {
    pub nodes: Vec<NodeRow>,
}

/// A node, its ranges, and how many of its addresses are in use.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeRow {
    pub node: String,
    /// The podCIDRs of the node (`node.spec.podCIDRs`)
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<Cidr>,
    pub blocks: usize,
    /// The pools to which the node's ranges belong
    pub pools: Vec<String>,
    /// The number of addresses in use in the node's blocks and podCIDRs
    pub used: u64,
    /// The number of addresses in cooldown in the node's blocks, as the agent reports
    pub cooling: u64,
    /// The number of addresses in the node's blocks that can be assigned now, as the agent reports
    pub free: u64,
    /// The version of the node's agent; `unknown` if the agent does not report its version; empty if no agent has
    /// reported
    pub agent: String,
    /// The state of the agent's pod: `Ready`, `Starting`, `NotReady` or `None`; absent if pods cannot be read
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_pod: Option<String>,
    pub uid: String,
}

pub(crate) fn nodes(inventory: &Inventory) -> NodesReport {
    let nodes = inventory.cache.nodes.iter();
    NodesReport {
        nodes: nodes.map(|node| NodeRow::of(node, inventory)).collect(),
    }
}

impl NodeRow {
    fn of(node: &Node, inventory: &Inventory) -> Self {
        let registry = &inventory.registry;
        let agent_pod = inventory.running.agent(&node.name, inventory.now);
        let mut row = NodeRow {
            node: node.name.to_string(),
            pod_cidrs: node.pod_cidrs.to_vec(),
            blocks: 0,
            pools: Vec::new(),
            used: 0,
            cooling: 0,
            free: 0,
            agent: inventory.subnet_of(node).map_or(String::new(), |subnet| {
                let version = subnet.agent.as_ref().map(|agent| agent.version.clone());
                version.unwrap_or_else(|| "unknown".to_owned())
            }),
            agent_pod: agent_pod.map(|it| format!("{it:?}")),
            uid: node.uid.to_string(),
        };
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        for entry in registry.blocks.of(&node.uid) {
            row.blocks += 1;
            row.pools.push(entry.pool.to_string());
            row.used = row.used.saturating_add(inventory.used_in(entry));
            if let Some(status) = inventory.block_status(entry) {
                row.cooling = row.cooling.saturating_add(count(status.cooling));
                row.free = row.free.saturating_add(count(status.free));
            }
        }
        for cidr in &node.pod_cidrs {
            let pool = registry.pools.of(cidr);
            row.pools.extend(pool.map(|pool| pool.name.to_string()));
            let used = used_in_pod_cidr(cidr, node, inventory);
            row.used = row.used.saturating_add(used);
        }
        row.pools.sort();
        row.pools.dedup();
        row
    }

    /// Formats the version of the agent, with a remark if the agent's pod is not ready.
    fn agent_words(&self) -> String {
        let wrong = match self.agent_pod.as_deref() {
            Some("NotReady") => " (not ready)",
            Some("Starting") => " (starting)",
            Some("None") if !self.agent.is_empty() => " (no pod)",
            _ => "",
        };
        format!("{}{wrong}", self.agent).trim_start().to_owned()
    }
}

/// Returns how many addresses of a podCIDR are in use. This is the number in the agent's list or the number that pods
/// report, whichever is higher.
fn used_in_pod_cidr(cidr: &Cidr, node: &Node, inventory: &Inventory) -> u64 {
    let in_use = inventory.in_use_within(cidr);
    let in_use = in_use.filter(|(_, it)| it.node == node.name && it.current);
    let reported = inventory.pods_in(cidr).count();
    in_use.count().max(reported) as u64
}

impl VerbReport for NodesReport {
    fn text(&self, style: &Style) -> String {
        let heads = [
            "NODE", "PODCIDRS", "BLOCKS", "POOLS", "IN USE", "COOLING", "FREE", "AGENT", "+UID",
        ];
        let mut table = Columns::new(&heads);
        for row in &self.nodes {
            table.row([
                row.node.clone(),
                some(&row.pod_cidrs, 2),
                row.blocks.to_string(),
                some(&row.pools, if style.wide { 64 } else { 3 }),
                row.used.to_string(),
                row.cooling.to_string(),
                row.free.to_string(),
                row.agent_words(),
                row.uid.clone(),
            ]);
        }
        table.text(style, "There is no node.")
    }
}

/// The report of `show node`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeReport {
    /// The node's row of `show nodes`; `None` if the node is gone and only ranges in quarantine are left
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeRow>,
    /// Blocks of the node, and quarantined blocks of earlier nodes with the same name
    pub blocks: Vec<BlockRow>,
    /// Quarantined podCIDRs of earlier nodes with the same name
    pub quarantined: Vec<QuarantinedRange>,
    /// Ranges that were taken out of the node
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub withdrawn: Vec<Cidr>,
    /// Ranges that cannot be taken out of the node yet, because they have addresses in use or cooling
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub withdrawing: Vec<Cidr>,
    /// Addresses that the node has set aside because other hosts answer for them
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<ConflictFact>,
    /// All addresses of the node with their states, if they were asked for
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addresses: Option<Vec<SpanRow>>,
    /// The addresses in use that the node's agent reports
    pub allocations: Vec<AllocationRow>,
    /// The time at which the agent made the list of the addresses in `allocations`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_of: Option<jiff::Timestamp>,
}

/// A podCIDR in quarantine.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct QuarantinedRange {
    pub cidr: Cidr,
    /// The earliest time at which the quarantine can end
    pub until: jiff::Timestamp,
}

/// Returns the report about a node, with the state of every address if `with_addresses`. If the node is deleted, the
/// report is about its ranges in quarantine. Fails if there is neither a node nor such a range.
pub(crate) fn node(
    name: &str,
    with_addresses: bool,
    inventory: &Inventory,
) -> anyhow::Result<NodeReport> {
    let registry = &inventory.registry;
    let blocks = registry.blocks.iter().filter(|it| *it.owner.name == *name);
    let blocks: Vec<BlockRow> = blocks.map(|it| BlockRow::of(it, inventory)).collect();
    let text = name.into();
    let quarantined = registry.quarantined_of(&text).map(|(_, it)| it);
    let quarantined = quarantined.filter(|it| !it.released).flat_map(|it| {
        let ranges = it.ranges.iter();
        ranges.map(|cidr| QuarantinedRange {
            cidr: *cidr,
            until: it.until_wall,
        })
    });
    let quarantined: Vec<QuarantinedRange> = quarantined.collect();
    let live = inventory.cache.nodes.get(name);
    if live.is_none() && blocks.is_empty() && quarantined.is_empty() {
        inventory.node(name)?;
    }
    let subnet = inventory.subnets.get(name);
    Ok(NodeReport {
        node: live.map(|node| NodeRow::of(node, inventory)),
        blocks,
        quarantined,
        withdrawn: subnet.map_or_else(Vec::new, |it| it.withdrawn.clone()),
        withdrawing: subnet.map_or_else(Vec::new, |it| it.withdrawing.clone()),
        conflicts: subnet.map_or_else(Vec::new, |it| {
            it.conflicts.iter().map(ConflictFact::of).collect()
        }),
        as_of: subnet.and_then(|it| it.listed_at),
        addresses: with_addresses.then(|| addresses::spans(name, inventory)),
        allocations: allocations(|it| *it.node == *name, inventory),
    })
}

impl VerbReport for NodeReport {
    fn text(&self, style: &Style) -> String {
        let mut facts = FactLines::default();
        match &self.node {
            Some(row) => {
                facts.add("Node", row.node.as_str());
                facts.add("UID", row.uid.as_str());
                facts.add("podCIDRs", joined(&row.pod_cidrs));
                facts.add("Pools", row.pools.join(", "));
                match row.agent_words().as_str() {
                    "" => facts.add("Agent", "none has reported"),
                    words => facts.add("Agent", words),
                }
                let NodeRow {
                    used,
                    cooling,
                    free,
                    ..
                } = row;
                let addresses = format!("{used} in use, {cooling} cooling, {free} free");
                facts.add("Addresses", addresses);
            }
            None => facts.add("Node", "gone: its ranges are in quarantine"),
        }
        for range in &self.quarantined {
            let over = over(Some(range.until), style.now);
            facts.add("In quarantine", format!("{}, {over}", range.cidr));
        }
        let lent: Vec<&LentPart> = self.blocks.iter().flat_map(|it| &it.lent).collect();
        for part in &lent {
            facts.add("Lent", format!("{} to {}", part.cidr, part.to));
        }
        for block in &self.blocks {
            if let Some(lender) = &block.borrowed_from {
                facts.add("Borrowed", format!("{} from {lender}", block.cidr));
            }
        }
        let is_lent = |it: &&Cidr| lent.iter().any(|part| part.cidr == **it);
        let taken_out: Vec<&Cidr> = self.withdrawn.iter().filter(|it| !is_lent(it)).collect();
        if !taken_out.is_empty() {
            facts.add("Taken out", joined(&taken_out));
        }
        if !self.withdrawing.is_empty() {
            let ranges = joined(&self.withdrawing);
            facts.add("To take out", format!("{ranges} (in use or cooling)"));
        }
        for conflict in &self.conflicts {
            let words = format!("{} ({})", conflict.address, conflict.words(style));
            facts.add("In conflict", words);
        }
        facts.add("Listed", super::pods::as_of(self.as_of, style));
        let blocks = table(&self.blocks, style, "It has no block.");
        let mut text = format!("{}\n{blocks}", facts.text());
        if let Some(all) = &self.addresses {
            text += "\n";
            text += &addresses::table(all, style, "It has no address.");
            let cooling = self.node.as_ref().map_or(0, |it| it.cooling);
            if cooling > 0 && all.iter().any(|it| it.state == AddressState::Free) {
                text += "\nA free address may be in cooldown: only the node's agent knows which.\n";
            }
        } else if !self.allocations.is_empty() {
            text += "\n";
            text += &super::pods::table(&self.allocations, style, "");
        }
        text
    }
}
