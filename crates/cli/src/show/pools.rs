//! `show pools` and `show pool`: ranges of pools, what is free, and the nodes with most ranges.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use crate::inventory::Inventory;
use crate::render::{Columns, FactLines, Style, VerbReport, count, left};
use cadastre_api::{AllocationMode, FamilyStatus};
use cadastre_controller::cluster::names::PoolName;
use cadastre_controller::figures::{figures, holders};
use cadastre_controller::pools::PoolState;
use cadastre_controller::totals::{Totals, totals};
use cadastre_core::{Cidr, Family};

/// The report of `show pools`.
#[derive(Debug, Serialize)]
pub struct PoolsReport {
    /// One row for each pool and family
    pub pools: Vec<PoolRow>,
}

/// One family of a pool, counted from the blocks and nodes as they are.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolRow {
    /// The name of the pool
    pub pool: String,
    /// Blocks or NodeCIDR
    pub allocation_mode: AllocationMode,
    /// IPv4 or IPv6
    pub family: String,
    /// The ranges of this family
    pub cidrs: Vec<Cidr>,
    /// The numbers of blocks and of addresses in use
    pub counts: FamilyStatus,
    /// The number of live nodes with a range of the pool
    pub nodes: usize,
    /// When this family will be exhausted if growth continues, from the pool's status
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exhausts_at: Option<Timestamp>,
    /// Whether the pool allocates, or why not
    pub standing: String,
}

/// Returns the report about all pools.
pub fn pools(inventory: &Inventory) -> PoolsReport {
    let totals = totals(&inventory.cache, &inventory.registry);
    let states = inventory.registry.pools.iter();
    PoolsReport {
        pools: states
            .flat_map(|state| rows(state, &totals, inventory))
            .collect(),
    }
}

/// Returns one row for each family of a pool. A pool whose spec cannot be parsed has one row without a family.
pub(super) fn rows(
    state: &PoolState,
    totals: &BTreeMap<(PoolName, Family), Totals>,
    inventory: &Inventory,
) -> Vec<PoolRow> {
    let registry = &inventory.registry;
    let live = holders(state, registry)
        .values()
        .filter(|live| **live)
        .count();
    let status = inventory.cache.pools.get(&state.name);
    let status = status.and_then(|pool| pool.status.as_ref());
    let of = |family| {
        let totals = totals.get(&(state.name.clone(), family));
        let totals = totals.copied().unwrap_or_default();
        let addresses = (state.allocation_mode == AllocationMode::Blocks).then(|| totals.status());
        let told = status.and_then(|status| match family {
            Family::V4 => status.ipv4.as_ref(),
            Family::V6 => status.ipv6.as_ref(),
        });
        let at = told.and_then(|told| told.exhausts_at.as_ref());
        PoolRow {
            pool: state.name.to_string(),
            allocation_mode: state.allocation_mode,
            family: family.to_string(),
            cidrs: state.space.cidrs(family).to_vec(),
            counts: figures(state, family, registry)
                .status(state.space.block_len(family), addresses),
            nodes: live,
            exhausts_at: at.map(|at| at.0),
            standing: state.phase.to_string(),
        }
    };
    let families: Vec<Family> = state.space.families().collect();
    if families.is_empty() {
        return vec![PoolRow {
            pool: state.name.to_string(),
            allocation_mode: state.allocation_mode,
            family: String::new(),
            cidrs: Vec::new(),
            counts: FamilyStatus::default(),
            nodes: live,
            exhausts_at: None,
            standing: state.phase.to_string(),
        }];
    }
    families.into_iter().map(of).collect()
}

impl VerbReport for PoolsReport {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&[
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
        ]);
        for row in &self.pools {
            table.row(row.cells(style));
        }
        table.text(style, "There is no pool: create an IPPool.")
    }
}

impl PoolRow {
    fn cells(&self, style: &Style) -> Vec<String> {
        let cidrs: Vec<String> = self.cidrs.iter().map(ToString::to_string).collect();
        let counts = &self.counts;
        let size = counts.block_size.map(|len| format!("/{len}"));
        let addresses = counts.addresses.as_ref();
        vec![
            self.pool.clone(),
            format!("{:?}", self.allocation_mode),
            super::super::render::some(&cidrs, if style.wide { 256 } else { 2 }),
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
pub struct PoolReport {
    /// The name of the pool
    pub pool: String,
    /// Whether the pool allocates, or why not
    pub standing: String,
    /// One row for each family
    pub families: Vec<PoolRow>,
    /// The conditions in the pool's status that report a fault
    pub conditions: Vec<String>,
    /// The nodes with ranges of the pool; nodes with most ranges come first
    pub holders: Vec<PoolHolder>,
}

/// The ranges of a pool that one node has, or had before the quarantine.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolHolder {
    /// The name of the node
    pub node: String,
    /// Whether the node was deleted, so that its ranges are in quarantine
    pub quarantined: bool,
    /// The number of the node's ranges in the pool
    pub ranges: usize,
    /// The number of addresses in use in these ranges
    pub used: u64,
}

/// Returns the report about a pool. Fails if there is no such pool.
pub fn pool(name: &str, inventory: &Inventory) -> anyhow::Result<PoolReport> {
    let state = inventory.pool(name)?;
    let totals = totals(&inventory.cache, &inventory.registry);
    let object = inventory.cache.pools.get(name);
    let conditions = object.and_then(|pool| pool.status.as_ref());
    let conditions = conditions.into_iter().flat_map(|status| &status.conditions);
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

/// Returns the nodes with ranges of a pool; nodes with most ranges come first.
pub(crate) fn pool_holders(state: &PoolState, inventory: &Inventory) -> Vec<PoolHolder> {
    let registry = &inventory.registry;
    let mut all: BTreeMap<(String, bool), PoolHolder> = BTreeMap::new();
    let mut add = |node: &str, resting: bool, used: u64| {
        let holder = all.entry((node.to_owned(), resting)).or_insert(PoolHolder {
            node: node.to_owned(),
            quarantined: resting,
            ranges: 0,
            used: 0,
        });
        holder.ranges += 1;
        holder.used = holder.used.saturating_add(used);
    };
    if state.allocation_mode == AllocationMode::Blocks {
        for entry in registry.blocks.iter().filter(|it| it.pool == state.name) {
            add(
                &entry.owner.name,
                entry.owner.quarantined,
                inventory.used_in(entry),
            );
        }
    } else {
        for node in inventory.cache.nodes.iter() {
            for cidr in registry.pod_cidrs(node) {
                if registry
                    .pools
                    .of(cidr)
                    .is_some_and(|it| it.name == state.name)
                {
                    add(&node.name, false, inventory.pods_in(cidr).count() as u64);
                }
            }
        }
        for ((name, _), rest) in &registry.quarantined {
            for cidr in rest.ranges.iter().filter(|_| !rest.released) {
                if registry
                    .pools
                    .of(cidr)
                    .is_some_and(|it| it.name == state.name)
                {
                    add(name, true, inventory.pods_in(cidr).count() as u64);
                }
            }
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
            let cidrs: Vec<String> = row.cidrs.iter().map(ToString::to_string).collect();
            let size = counts.block_size.unwrap_or_default();
            let mut text = format!(
                "{} in blocks of /{size}\n{} blocks: {} allocated, {} in quarantine, {} free ({} used)",
                cidrs.join(", "),
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
                let _ = write!(
                    text,
                    "\nexhausted {} if growth continues",
                    left(row.exhausts_at, style.now)
                );
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
            let state = if holder.quarantined {
                "gone, in quarantine"
            } else {
                ""
            };
            table.row([
                holder.node.clone(),
                holder.ranges.to_string(),
                holder.used.to_string(),
                state.to_owned(),
            ]);
        }
        text += "\n";
        text += &table.text(style, "No node has a range of it.");
        if self.holders.len() > most {
            let _ = writeln!(
                text,
                "and {} more (-o wide)",
                count(self.holders.len() - most, "node")
            );
        }
        text
    }
}
