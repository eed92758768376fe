//! `show blocks`: blocks, and the nodes to which they are allocated.

use jiff::Timestamp;
use serde::Serialize;

use crate::inventory::Inventory;
use crate::render::{Columns, Style, VerbReport, age, over};
use cadastre_api::Recall;
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_core::Cidr;

/// The report of `show blocks`, sorted by address.
#[derive(Debug, Serialize)]
pub(crate) struct BlocksReport {
    pub blocks: Vec<BlockRow>,
}

/// A block, and how many of its addresses are in use.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BlockRow {
    pub cidr: Cidr,
    pub pool: String,
    /// The node that has the block, or that had it before the quarantine
    pub node: String,
    pub state: BlockState,
    /// The time at which the block was allocated to this node, or at which its quarantine began
    pub since: Timestamp,
    /// The earliest time at which the quarantine can end; `None` if the block is not in quarantine
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// The number of addresses in use that the agent reports. If the agent has not reported the block, this is the
    /// number of addresses that pods report
    pub used: u64,
    /// The number of addresses in cooldown, as the agent reports
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cooling: Option<i64>,
    /// The number of addresses that can be assigned now, as the agent reports
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<i64>,
    /// The claim that has the block's address, as `namespace/name`; `None` if the block is not the address of a claim
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The node from which the block is borrowed
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrowed_from: Option<String>,
    /// The parts of the block that other nodes have borrowed
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lent: Vec<LentPart>,
    /// The UID of the block's IPAMBlock
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// A part of a block that another node has borrowed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LentPart {
    pub cidr: Cidr,
    /// The node that has borrowed the part
    pub to: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum BlockState {
    /// The node that has the block assigns addresses from it.
    Active,
    /// The NodeSubnet lists the block, but the node's agent has not reported the block yet.
    Unconfirmed,
    /// The node's NodeSubnet does not list the block yet.
    Provisional,
    /// The block is recalled. The node releases the block if it is empty, and keeps it otherwise.
    AskedBack,
    /// The node assigns no new address from the block, and releases it once it is empty.
    Draining,
    /// The agent has released the block.
    Released,
    /// The node is gone, and the block waits for the end of the quarantine.
    Quarantine,
}

/// Returns all blocks, or only the blocks of `pool`, of `node`, or of both. Fails if there is no such pool.
pub(crate) fn blocks(
    pool: Option<&str>,
    node: Option<&str>,
    inventory: &Inventory,
) -> anyhow::Result<BlocksReport> {
    if let Some(pool) = pool {
        inventory.pool(pool)?;
    }
    let blocks = inventory.registry.blocks.iter();
    let blocks = blocks
        .filter(|entry| pool.is_none_or(|pool| *entry.pool == *pool))
        .filter(|entry| node.is_none_or(|node| *entry.owner.name == *node));
    Ok(BlocksReport {
        blocks: blocks.map(|entry| BlockRow::of(entry, inventory)).collect(),
    })
}

impl BlockRow {
    pub(crate) fn of(entry: &BlockEntry, inventory: &Inventory) -> Self {
        let status = inventory.block_status(entry);
        let subnet = inventory.subnets.get(&entry.owner.name);
        let drain = subnet.is_some_and(|it| it.requests.drain.contains(&entry.cidr));
        let is_listed = subnet.is_some_and(|it| it.lists(&entry.cidr));
        let state = if entry.owner.quarantined {
            BlockState::Quarantine
        } else if status.is_some_and(|it| it.released) {
            BlockState::Released
        } else if entry.recall == Some(Recall::Drain) || drain {
            BlockState::Draining
        } else if entry.recall == Some(Recall::IfEmpty) {
            BlockState::AskedBack
        } else if !is_listed {
            BlockState::Provisional
        } else if status.is_none() {
            BlockState::Unconfirmed
        } else {
            BlockState::Active
        };
        BlockRow {
            cidr: entry.cidr,
            pool: entry.pool.to_string(),
            node: entry.owner.name.to_string(),
            state,
            since: entry.since,
            until: entry.until.filter(|_| entry.owner.quarantined),
            used: inventory.used_in(entry),
            cooling: status.map(|it| it.cooling),
            free: status.map(|it| it.free),
            claim: inventory.claim_of_block(entry),
            borrowed_from: entry.parent.as_ref().map(|it| it.node.to_string()),
            lent: lent(entry, inventory),
            uid: entry.uid.as_ref().map(ToString::to_string),
        }
    }

    fn cells(&self, style: &Style) -> Vec<String> {
        let number = |number: Option<i64>| number.map_or(String::new(), |it| it.to_string());
        let state = match self.until {
            Some(until) => format!("{:?}, {}", self.state, over(Some(until), style.now)),
            None => format!("{:?}", self.state),
        };
        let claim = self.claim.iter().map(|it| format!(", of claim {it}"));
        let state = state + &claim.collect::<String>();
        let from = self.borrowed_from.iter();
        let from = from.map(|it| format!(", borrowed from {it}"));
        let state = state + &from.collect::<String>();
        vec![
            self.cidr.to_string(),
            self.pool.clone(),
            self.node.clone(),
            self.used.to_string(),
            number(self.cooling),
            number(self.free),
            age(Some(self.since), style.now),
            state,
            self.uid.clone().unwrap_or_default(),
        ]
    }
}

fn lent(entry: &BlockEntry, inventory: &Inventory) -> Vec<LentPart> {
    let parts = inventory.registry.borrowed_from(&entry.cidr);
    let part = |part: &BlockEntry| LentPart {
        cidr: part.cidr,
        to: part.owner.name.to_string(),
    };
    parts.map(part).collect()
}

/// Formats blocks as a table, or returns `nothing` if there are none.
pub(super) fn table(blocks: &[BlockRow], style: &Style, nothing: &str) -> String {
    let heads = [
        "BLOCK", "POOL", "NODE", "IN USE", "COOLING", "FREE", "SINCE", "STATE", "+UID",
    ];
    let mut table = Columns::new(&heads);
    for row in blocks {
        table.row(row.cells(style));
    }
    table.text(style, nothing)
}

impl VerbReport for BlocksReport {
    fn text(&self, style: &Style) -> String {
        table(&self.blocks, style, "There is no such block.")
    }
}
