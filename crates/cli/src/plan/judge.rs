//! Compares the simulated cluster before and after the changes: which nodes wait, which ranges are affected, when pools
//! are exhausted.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use super::PlanArgs;
use super::change::is_new;
use super::whatif::{PlanOutcome, simulate_now};
use crate::inventory::Inventory;
use crate::render::{Columns, Style, VerbReport, count, left, more, some};
use cadastre_controller::allocations::AllocationState;
use cadastre_controller::figures::{FamilyCounts, figures};
use cadastre_controller::forecast::Trend;
use cadastre_controller::node_balance::must_leave;
use cadastre_controller::pools::{PoolPhase, PoolState};
use cadastre_core::Family;

/// The report of `plan`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlanReport {
    /// The changes, one line for each
    pub supposed: Vec<String>,
    /// Whether the changes fit. They fit if all of these conditions hold: no node would wait that does not wait now;
    /// each added node would get a range; each changed pool would allocate to some node; the API server would accept
    /// each changed pool
    pub fits: bool,
    /// The reasons why the API server would reject changed pools
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
    /// What would happen to the added nodes
    pub new_nodes: NewNodes,
    /// One row for each pool and family
    pub pools: Vec<PoolPlan>,
    /// Blocks and podCIDRs that the changes affect
    pub hits: Vec<AffectedObject>,
    /// Nodes that would wait after the changes and do not wait now
    pub will_wait: Vec<WaitingNode>,
    /// Nodes that wait now and would not wait after the changes
    pub relieved: Vec<String>,
    /// Changed pools that would allocate nothing to any node, each with the reason
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub for_nobody: Vec<String>,
}

/// How many of the added nodes get ranges.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewNodes {
    /// The number of nodes that the plan adds
    pub asked: usize,
    /// The number of added nodes that get everything they need
    pub served: usize,
    /// The number of added nodes that wait for a range
    pub waiting: usize,
    /// The number of added nodes that get nothing and do not wait, for example because no pool selects them. If this
    /// number is not 0, the plan does not fit
    pub unmanaged: usize,
}

/// A node that would wait after the changes.
#[derive(Debug, Serialize)]
pub(crate) struct WaitingNode {
    pub node: String,
    /// Why the node would wait, in the words of the controller's events
    pub why: String,
}

/// The counts of a pool for one family, before and after the changes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolPlan {
    pub pool: String,
    /// IPv4 or IPv6
    pub family: String,
    /// Prefix length of the pool's blocks after the changes
    pub block_size: u8,
    /// How many blocks the pool has room for, before and after the changes; the first value is `-` if the pool is new
    pub capacity: (String, String),
    /// Number of allocated blocks, before and after the changes
    pub allocated: (String, String),
    /// Number of free blocks, before and after the changes
    pub free: (String, String),
    /// When the pool would be exhausted after the changes, if its use keeps growing at the recent rate
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_at: Option<Timestamp>,
    /// The phase of the pool after the changes
    pub standing: String,
}

/// A block or podCIDR that the changes affect.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AffectedObject {
    pub node: String,
    pub range: String,
    /// How many addresses of the range are in use
    pub used: u64,
    /// The effect of the changes on the range
    pub what: String,
}

pub(super) fn judge(
    before: &Inventory,
    after: &Inventory,
    changes: &PlanArgs,
    supposed: Vec<String>,
) -> PlanReport {
    let (now, then) = (simulate_now(before), simulate_now(after));
    let (waits_now, waits_then) = (now.waits(), then.waits());
    let mut new_nodes = NewNodes {
        asked: changes.add_nodes,
        ..NewNodes::default()
    };
    for node in after.cache.nodes.iter().filter(|node| is_new(&node.name)) {
        if waits_then.contains(&node.name) {
            new_nodes.waiting += 1;
        } else if then.served.contains_key(&node.name) {
            new_nodes.served += 1;
        } else {
            new_nodes.unmanaged += 1;
        }
    }
    let will_wait = waits_then.difference(&waits_now).map(|node| WaitingNode {
        node: node.to_string(),
        why: then
            .notes
            .get(*node)
            .map_or(String::new(), |notes| notes.join("; ")),
    });
    let will_wait: Vec<WaitingNode> = will_wait.collect();
    let relieved = waits_now.difference(&waits_then).map(ToString::to_string);
    let for_nobody = for_nobody(after, changes, &then.registry);
    PlanReport {
        supposed,
        fits: will_wait.is_empty() && new_nodes.unmanaged == 0 && for_nobody.is_empty(),
        for_nobody,
        refused: Vec::new(),
        new_nodes,
        pools: pools(before, after, &then),
        hits: hits(before, after, changes),
        relieved: relieved.collect(),
        will_wait,
    }
}

/// Returns a message for each changed pool that would allocate nothing to any node. Pools whose spec has `disabled` are
/// left out.
fn for_nobody(after: &Inventory, changes: &PlanArgs, then: &AllocationState) -> Vec<String> {
    let names = changes.pools.iter();
    let names = names.filter_map(|it| it["metadata"]["name"].as_str());
    let states = names.filter_map(|name| then.pools.get(name));
    let why = |state: &PoolState| match &state.phase {
        PoolPhase::Serving | PoolPhase::Starting if state.selects_none(&after.cache) => {
            Some(format!(
                "its nodeSelector matches none of {}",
                count(after.cache.nodes.len(), "node")
            ))
        }
        PoolPhase::Serving | PoolPhase::Starting | PoolPhase::Disabled => None,
        phase => Some(phase.to_string()),
    };
    let line = |it: &PoolState| {
        Some(format!(
            "Pool \"{}\" would serve nobody: {}",
            it.name,
            why(it)?
        ))
    };
    states.filter_map(line).collect()
}

/// Returns the counts of each pool and family, now and after the changes. The counts after the changes include the
/// ranges that the simulated controller allocates.
fn pools(before: &Inventory, after: &Inventory, then: &PlanOutcome) -> Vec<PoolPlan> {
    let mut rows = Vec::new();
    for state in then.registry.pools.iter() {
        let earlier = before.registry.pools.get(&state.name);
        for family in state.space.families() {
            let earlier = earlier.filter(|it| it.space.families().any(|it| it == family));
            let was = earlier.map(|it| figures(it, family, &before.registry));
            let will = figures(state, family, &then.registry);
            let pair = |pick: fn(&FamilyCounts) -> u128| {
                let was = was.as_ref().map(|it| pick(it).to_string());
                (was.unwrap_or("-".to_owned()), pick(&will).to_string())
            };
            rows.push(PoolPlan {
                pool: state.name.to_string(),
                family: family.to_string(),
                block_size: state.space.block_len(family).unwrap_or_default(),
                capacity: pair(|it| it.capacity),
                allocated: pair(|it| it.held),
                free: pair(|it| it.free),
                full_at: earlier.and_then(|_| full_at(&state.name, family, will.free, after)),
                standing: state.phase.to_string(),
            });
        }
    }
    rows
}

/// Returns when the pool would be exhausted if `free` blocks are free and use grows by the trend in the pool's status.
/// Returns `None` if the status has no trend.
fn full_at(pool: &str, family: Family, free: u128, inventory: &Inventory) -> Option<Timestamp> {
    let status = inventory.family_status(pool, family)?;
    let trend = Trend::read(status.trend.as_ref()?)?;
    trend.exhausts_at(free, inventory.now, None)
}

fn hits(before: &Inventory, after: &Inventory, changes: &PlanArgs) -> Vec<AffectedObject> {
    let mut hits = Vec::new();
    for node in before.cache.nodes.iter() {
        for entry in before.registry.blocks.of(&node.uid) {
            let was = before.registry.pools.get(&entry.pool);
            let will = after.registry.pools.get(&entry.pool);
            if must_leave(entry, node, was) || !must_leave(entry, node, will) {
                continue;
            }
            let used = before.used_in(entry);
            let what = match used {
                0 => "returns to its pool at once: it is empty".to_owned(),
                used => format!(
                    "gets no new pods, and returns to its pool when the {used} addresses in use are released"
                ),
            };
            hits.push(AffectedObject {
                node: node.name.to_string(),
                range: entry.cidr.to_string(),
                used,
                what,
            });
        }
        for cidr in &node.pod_cidrs {
            let drained = changes.drain_cidr.iter().any(|range| range.overlaps(cidr));
            let was = before.registry.pools.of(cidr);
            let will = after.registry.pools.of(cidr);
            let is_deleted =
                |pool: &PoolState| changes.delete_pool.iter().any(|it| **it == *pool.name);
            let what = if drained {
                "a podCIDR cannot be changed: drain the node, delete its Node, let it register again"
            } else if was.is_some_and(is_deleted) {
                "stays with the node; the pool is deleted with the last such node"
            } else if was.is_some() && will.is_none() {
                "stays with the node, but is in no pool from then on"
            } else {
                continue;
            };
            hits.push(AffectedObject {
                node: node.name.to_string(),
                range: cidr.to_string(),
                used: before.pods_in(cidr).count() as u64,
                what: what.to_owned(),
            });
        }
    }
    hits
}

impl VerbReport for PlanReport {
    fn text(&self, style: &Style) -> String {
        /// At most this many entries are shown without `-o wide`.
        const SHOWN: usize = 15;
        let most = if style.wide { usize::MAX } else { SHOWN };
        let mut text = String::new();
        for line in &self.supposed {
            let _ = writeln!(text, "Supposed: {line}.");
        }
        for line in &self.refused {
            let _ = writeln!(text, "The API server would reject it: {line}");
        }
        let fits = if self.fits { "fits" } else { "does NOT fit" };
        let _ = writeln!(text, "It {fits}.");
        for line in &self.for_nobody {
            let _ = writeln!(text, "{line}.");
        }
        let nodes = &self.new_nodes;
        if nodes.asked > 0 {
            let _ = writeln!(
                text,
                "Nodes added: {}. Served: {}. Waiting: {}. Served by no pool: {}.",
                nodes.asked, nodes.served, nodes.waiting, nodes.unmanaged
            );
        }
        text += "\n";
        let heads = [
            "POOL",
            "FAMILY",
            "BLOCK",
            "BLOCKS",
            "ALLOCATED",
            "FREE",
            "EXHAUSTED",
            "STANDING",
        ];
        let mut table = Columns::new(&heads);
        let arrow = |(was, will): &(String, String)| {
            if was == will {
                will.clone()
            } else {
                format!("{was} -> {will}")
            }
        };
        for row in &self.pools {
            table.row([
                row.pool.clone(),
                row.family.clone(),
                format!("/{}", row.block_size),
                arrow(&row.capacity),
                arrow(&row.allocated),
                arrow(&row.free),
                left(row.full_at, style.now),
                row.standing.clone(),
            ]);
        }
        text += &table.text(style, "There would be no pool.");
        if !self.hits.is_empty() {
            let mut table = Columns::new(&["NODE", "RANGE", "IN USE", "EFFECT"]);
            for hit in self.hits.iter().take(most) {
                table.row([
                    hit.node.clone(),
                    hit.range.clone(),
                    hit.used.to_string(),
                    hit.what.clone(),
                ]);
            }
            text += "\n";
            text += &table.text(style, "");
            text += &more(self.hits.len(), most, "range");
        }
        if !self.will_wait.is_empty() {
            text += "\nWould wait:\n";
            let mut table = Columns::new(&["NODE", "WHY"]);
            for waiting in self.will_wait.iter().take(most) {
                table.row([waiting.node.clone(), waiting.why.clone()]);
            }
            text += &table.text(style, "");
            text += &more(self.will_wait.len(), most, "node");
        }
        if !self.relieved.is_empty() {
            let _ = writeln!(
                text,
                "\nWould no longer wait: {}",
                some(&self.relieved, most)
            );
        }
        text
    }
}
