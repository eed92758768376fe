//! `show pools` and `show pool`: ranges of pools, what is free, and the nodes with most ranges.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use crate::inventory::Inventory;
use crate::render::{Columns, FactLines, Style, VerbReport, joined, left, more, some};
use cadastre_api::{AllocationMode, FamilyStatus};
use cadastre_controller::cluster::names::PoolName;
use cadastre_controller::figures::{figures, holders};
use cadastre_controller::pools::PoolState;
use cadastre_controller::totals::{Totals, totals};
use cadastre_core::{Cidr, Family};

/// The report of `show pools`.
#[derive(Debug, Serialize)]
pub(crate) struct PoolsReport {
    /// One row for each pool and family
    pub pools: Vec<PoolRow>,
}

/// One family of a pool. The counts are computed from the blocks and nodes, not taken from the pool's status.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolRow {
    pub pool: String,
    /// The form in which nodes get ranges of the pool: Blocks or NodeCIDR
    pub allocation_mode: AllocationMode,
    /// The address family of this row: IPv4 or IPv6
    pub family: String,
    /// The ranges of this family
    pub cidrs: Vec<Cidr>,
    /// The counts of blocks and addresses, in the form in which the pool's status has them
    pub counts: FamilyStatus,
    /// The number of live nodes with a range of the pool
    pub nodes: usize,
    /// The time at which this family will be exhausted if growth continues. The pool's status predicts this time
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exhausts_at: Option<Timestamp>,
    /// The state of the pool: whether it allocates ranges, or why it does not
    pub standing: String,
}

pub(crate) fn pools(inventory: &Inventory) -> PoolsReport {
    let totals = totals(&inventory.cache, &inventory.registry);
    let states = inventory.registry.pools.iter();
    PoolsReport {
        pools: states
            .flat_map(|state| rows(state, &totals, inventory))
            .collect(),
    }
}

/// Returns one row for each family of a pool. If the pool's spec cannot be parsed, returns one row without a family.
pub(super) fn rows(
    state: &PoolState,
    totals: &BTreeMap<(PoolName, Family), Totals>,
    inventory: &Inventory,
) -> Vec<PoolRow> {
    let registry = &inventory.registry;
    let holders = holders(state, registry);
    let without_family = PoolRow {
        pool: state.name.to_string(),
        allocation_mode: state.allocation_mode,
        family: String::new(),
        cidrs: Vec::new(),
        counts: FamilyStatus::default(),
        nodes: holders.values().filter(|is_live| **is_live).count(),
        exhausts_at: None,
        standing: state.phase.to_string(),
    };
    let row = |family| {
        let totals = totals.get(&(state.name.clone(), family));
        let totals = totals.copied().unwrap_or_default();
        let addresses = (state.allocation_mode == AllocationMode::Blocks).then(|| totals.status());
        let counts = figures(state, family, registry);
        let status = inventory.family_status(&state.name, family);
        PoolRow {
            family: family.to_string(),
            cidrs: state.space.cidrs(family).to_vec(),
            counts: counts.status(state.space.block_len(family), addresses),
            exhausts_at: status.and_then(|it| Some(it.exhausts_at.as_ref()?.0)),
            ..without_family.clone()
        }
    };
    let rows: Vec<PoolRow> = state.space.families().map(row).collect();
    if rows.is_empty() {
        return vec![without_family];
    }
    rows
}

impl VerbReport for PoolsReport {
    fn text(&self, style: &Style) -> String {
        let heads = [
            "POOL",
            "ALLOCATE",
            "RANGES",
            "BLOCK",
            "BLOCKS",
            "ALLOCATED",
            "QUARANTINED",
            "FREE",
            "USED",
            "NODES",
            "ADDRESSES",
            "+COOLING",
            "+EXHAUSTED",
            "STANDING",
        ];
        let mut table = Columns::new(&heads);
        for row in &self.pools {
            table.row(row.cells(style));
        }
        table.text(style, "There is no pool: create an IPPool.")
    }
}

impl PoolRow {
    fn cells(&self, style: &Style) -> Vec<String> {
        let counts = &self.counts;
        let size = counts.block_size.map(|len| format!("/{len}"));
        let addresses = counts.addresses.as_ref();
        vec![
            self.pool.clone(),
            format!("{:?}", self.allocation_mode),
            some(&self.cidrs, if style.wide { 256 } else { 2 }),
            size.unwrap_or_default(),
            counts.capacity.clone(),
            counts.allocated.clone(),
            counts.quarantined.clone(),
            counts.free.clone(),
            counts.utilization.clone(),
            self.nodes.to_string(),
            addresses.map_or(String::new(), |it| {
                format!("{} of {}", it.used, it.allocated)
            }),
            addresses.map_or(String::new(), |it| it.cooling.clone()),
            left(self.exhausts_at, style.now),
            self.standing.clone(),
        ]
    }
}

/// The report of `show pool`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolReport {
    pub pool: String,
    /// The state of the pool: whether it allocates ranges, or why it does not
    pub standing: String,
    pub families: Vec<PoolRow>,
    /// The conditions in the pool's status that report a fault
    pub conditions: Vec<String>,
    /// The nodes with ranges of the pool. Those with most ranges come first
    pub holders: Vec<PoolHolder>,
}

/// The ranges of a pool that one node has, or had before the quarantine.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolHolder {
    pub node: String,
    /// Whether the node was deleted, so that its ranges are in quarantine
    pub quarantined: bool,
    /// The number of the node's ranges in the pool
    pub ranges: usize,
    /// The number of addresses in use in these ranges
    pub used: u64,
}

/// Returns the report about a pool. Fails if there is no such pool.
pub(crate) fn pool(name: &str, inventory: &Inventory) -> anyhow::Result<PoolReport> {
    let state = inventory.pool(name)?;
    let totals = totals(&inventory.cache, &inventory.registry);
    let status = inventory.pool_status(name);
    let conditions = status.into_iter().flat_map(|status| &status.conditions);
    let bad = conditions.filter(|it| (it.type_ == "Ready") == (it.status == "False"));
    Ok(PoolReport {
        pool: name.to_owned(),
        standing: state.phase.to_string(),
        families: rows(state, &totals, inventory),
        conditions: bad
            .map(|it| format!("{} ({}): {}", it.type_, it.reason, it.message))
            .collect(),
        holders: pool_holders(state, inventory),
    })
}

/// Returns the nodes with ranges of a pool. Those with most ranges come first.
pub(crate) fn pool_holders(state: &PoolState, inventory: &Inventory) -> Vec<PoolHolder> {
    let registry = &inventory.registry;
    let mut all: BTreeMap<(String, bool), PoolHolder> = BTreeMap::new();
    let mut add = |node: &str, quarantined: bool, used: u64| {
        let holder = all.entry((node.to_owned(), quarantined));
        let holder = holder.or_insert(PoolHolder {
            node: node.to_owned(),
            quarantined,
            ranges: 0,
            used: 0,
        });
        holder.ranges += 1;
        holder.used = holder.used.saturating_add(used);
    };
    if state.allocation_mode == AllocationMode::Blocks {
        for entry in registry.blocks.iter().filter(|it| it.pool == state.name) {
            let used = inventory.used_in(entry);
            add(&entry.owner.name, entry.owner.quarantined, used);
        }
    } else {
        let is_own = |cidr: &&Cidr| {
            let pool = registry.pools.of(cidr);
            pool.is_some_and(|it| it.name == state.name)
        };
        let used = |cidr: &Cidr| inventory.pods_in(cidr).count() as u64;
        for node in inventory.cache.nodes.iter() {
            let cidrs = registry.pod_cidrs(node).filter(is_own);
            cidrs.for_each(|cidr| add(&node.name, false, used(cidr)));
        }
        let quarantined = registry.quarantined.iter();
        for ((name, _), it) in quarantined.filter(|(_, it)| !it.released) {
            let cidrs = it.ranges.iter().filter(is_own);
            cidrs.for_each(|cidr| add(name, true, used(cidr)));
        }
    }
    let mut holders: Vec<PoolHolder> = all.into_values().collect();
    holders.sort_by(|a, b| (b.ranges, &a.node).cmp(&(a.ranges, &b.node)));
    holders
}

impl VerbReport for PoolReport {
    fn text(&self, style: &Style) -> String {
        /// At most this many nodes are shown without `-o wide`.
        const SHOWN: usize = 20;
        let mut facts = FactLines::default();
        facts.add("Pool", self.pool.as_str());
        facts.add("Standing", self.standing.as_str());
        for row in &self.families {
            let counts = &row.counts;
            let size = counts.block_size.unwrap_or_default();
            let mut text = format!(
                "{} in blocks of /{size}\n{} blocks: {} allocated, {} in quarantine, {} free ({} used)",
                joined(&row.cidrs),
                counts.capacity,
                counts.allocated,
                counts.quarantined,
                counts.free,
                counts.utilization
            );
            if let Some(addresses) = &counts.addresses {
                let _ = write!(
                    text,
                    "\n{} addresses in blocks: {} in use, {} cooling",
                    addresses.allocated, addresses.used, addresses.cooling
                );
            }
            if row.exhausts_at.is_some() {
                let left = left(row.exhausts_at, style.now);
                let _ = write!(text, "\nexhausted {left} if growth continues");
            }
            facts.add(&row.family, text);
        }
        for condition in &self.conditions {
            facts.add("Trouble", condition.as_str());
        }
        let mut text = facts.text();
        let most = if style.wide { usize::MAX } else { SHOWN };
        let mut table = Columns::new(&["NODE", "RANGES", "IN USE", "STATE"]);
        for holder in self.holders.iter().take(most) {
            let state = Some("gone, in quarantine").filter(|_| holder.quarantined);
            table.row([
                holder.node.clone(),
                holder.ranges.to_string(),
                holder.used.to_string(),
                state.unwrap_or_default().to_owned(),
            ]);
        }
        text += "\n";
        text += &table.text(style, "No node has a range of it.");
        text + &more(self.holders.len(), most, "node")
    }
}
