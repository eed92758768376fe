//! The addresses of a pool that a node has, wants and can spare, and how urgent its need is.
//!
//! Addresses are counted per family, as the agent reports them, or by the size of a block that it has not reported
//! yet. Pure functions of the ledger and the reports.

use std::time::Duration;

use super::Context;
use super::pools::{PoolState, Verdict};
use super::registry::Registry;
use crate::cluster::seen::{AgentReport, BlockWord, Node, Text};
use crate::cluster::world::report_of;
use crate::registry::blocks::Entry;
use cadastre_api::{MOST_BLOCKS, Recall};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Dual, Family};

/// How urgently a node needs more addresses of a pool; the most urgent first.
///
/// Blocks are recalled for a node only from nodes with a less urgent need. So no block moves back and forth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    /// The node has no block and demand. An agent without blocks has demand only while a pod waits.
    First,
    /// The node has blocks, and pods wait for more.
    Pods,
    /// The node has pods, and fewer free addresses than its reserve.
    Reserve,
    /// The node uses no address of the pool: a first block, or a reserve for future pods.
    Unused,
}

/// What a node has and wants of one pool.
pub(super) struct Account {
    /// Addresses per family that the node has or is getting
    capacity: Dual<u64>,
    /// Addresses per family that are in use or cooling
    in_use: Dual<u64>,
    /// Blocks per family that the node has or is getting
    count: Dual<usize>,
    wanted: u64,
    /// The part of `wanted` that the agent demands
    asked: u64,
}

impl Account {
    /// Returns how many addresses are missing, in the family that lacks most.
    pub(super) fn missing(&self, pool: &PoolState) -> u64 {
        let lacking = |family| self.wanted.saturating_sub(*self.capacity.get(family));
        pool.space.families().map(lacking).max().unwrap_or(0)
    }

    pub(super) fn is_at_limit(&self, pool: &PoolState) -> bool {
        let most = pool.terms.most.unwrap_or(MOST_BLOCKS);
        let full = |family| *self.count.get(family) >= most;
        pool.space.families().any(full)
    }

    pub(super) fn has_some(&self) -> bool {
        Family::ALL
            .into_iter()
            .any(|family| *self.count.get(family) > 0)
    }

    /// Returns how urgently the node needs the missing addresses.
    pub(super) fn need(&self, pool: &PoolState) -> Need {
        let in_use = self.in_use.iter().map(|(_, in_use)| *in_use);
        let in_use = in_use.max().unwrap_or(0);
        if self.asked > 0 && !self.has_some() {
            Need::First
        } else if self.asked > in_use.saturating_add(pool.reserve()) {
            Need::Pods
        } else if in_use > 0 {
            Need::Reserve
        } else {
            Need::Unused
        }
    }
}

/// Returns how many addresses of each family the agent wants from a pool.
pub(super) fn demand(report: Option<&AgentReport>, pool: &Text) -> u64 {
    let demands = report.into_iter().flat_map(|report| &report.demand);
    let mut of_pool = demands.filter(|(name, _)| name == pool);
    of_pool.next().map_or(0, |(_, demand)| *demand)
}

/// Returns how many addresses of a block the node can use: as its agent reports, else by the block's size.
pub(super) fn worth(entry: &Entry, report: Option<&AgentReport>, registry: &Registry) -> u64 {
    match entry.word(report) {
        Some(word) if word.released && !Mutation::ReleasedBlocksCounted.is_on() => 0,
        Some(word) => word.busy().saturating_add(word.free),
        None => {
            let usable = registry.usable(&entry.cidr, &entry.pool);
            let usable = u64::try_from(usable).unwrap_or(u64::MAX);
            let never = never_given(&entry.cidr, registry.pools.get(&entry.pool));
            usable.saturating_sub(never).max(usable.min(1))
        }
    }
}

/// Adds addresses, saturating: two IPv6 blocks may have more addresses than `u64` can count.
pub(super) fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// Returns how many addresses of a block its agent never assigns: network, gateway and broadcast address, unless the
/// pool names a gateway. If they were counted as usable, a demand would be met by small blocks in several rounds.
fn never_given(block: &Cidr, pool: Option<&PoolState>) -> u64 {
    let ranges = pool.and_then(|pool| match block.family() {
        Family::V4 => pool.told.ipv4.as_ref(),
        Family::V6 => pool.told.ipv6.as_ref(),
    });
    if ranges.is_none_or(|ranges| ranges.gateway.is_some()) {
        return 0;
    }
    match (block.size(), block.family()) {
        (1, _) => 0,
        (2, _) => 1,
        (_, Family::V4) => 3,
        (_, Family::V6) => 2,
    }
}

/// Sums up a node's blocks of a pool.
pub(super) fn account(
    pool: &Text,
    wanted: u64,
    node: &Node,
    report: Option<&AgentReport>,
    registry: &Registry,
) -> Account {
    let mut account = Account {
        capacity: Dual::default(),
        in_use: Dual::default(),
        count: Dual::default(),
        wanted,
        asked: demand(report, pool),
    };
    let unseen = |entry: &Entry| !entry.confirmed && Mutation::ProvisionalBlocksNotCounted.is_on();
    let counts = |entry: &&Entry| {
        !unseen(entry)
            && entry.pool == *pool
            && !entry.is_leaving()
            && entry.recall != Some(Recall::Drain)
    };
    for entry in registry.blocks.of(&node.uid).filter(counts) {
        let family = entry.cidr.family();
        add(
            account.capacity.get_mut(family),
            worth(entry, report, registry),
        );
        if let Some(word) = entry.word(report).filter(|word| !word.released) {
            add(account.in_use.get_mut(family), word.busy());
        }
        *account.count.get_mut(family) += usize::from(!entry.is_released(report));
    }
    account
}

/// Returns whether a block must be recalled because its pool no longer serves that node or that range.
pub fn must_leave(entry: &Entry, node: &Node, pool: Option<&PoolState>) -> bool {
    let Some(pool) = pool else { return true };
    match pool.verdict {
        // An invalid pool decides nothing: its blocks stay as they are.
        Verdict::Invalid(_) => false,
        Verdict::Terminating => true,
        _ => !pool.selects(node) || !pool.space.covers(&entry.cidr),
    }
}

/// Returns since when a node has blocks of a pool without using any, as its agent reports. Returns `None` also if the
/// demand exceeds the reserve: pods are about to use the blocks.
pub(super) fn unused_since(
    pool: &PoolState,
    uid: &Text,
    report: Option<&AgentReport>,
    registry: &Registry,
) -> Option<Duration> {
    if demand(report, &pool.name) > pool.reserve() {
        return None;
    }
    let counts = |entry: &&Entry| {
        entry.pool == pool.name && !entry.is_leaving() && !entry.is_released(report)
    };
    let mut since = None;
    for entry in registry.blocks.of(uid).filter(counts) {
        since = since.max(Some(entry.idle_since?));
    }
    since
}

/// Returns the empty block that a node can best spare for another node with that need, after the node's number of
/// free addresses, by which donors are compared, and with its name and UID. A node keeps at least one block per
/// family.
pub(super) fn donor(
    pool: &PoolState,
    name: &Text,
    uid: &Text,
    need: Need,
    cx: &Context,
) -> Option<(u64, Cidr, Text, Text)> {
    let node = cx.world.nodes.get(name).filter(|node| node.uid == *uid)?;
    let report = report_of(node, cx.world)?;
    let report = Some(report);
    let spare = |entry: &&Entry| {
        entry.pool == pool.name && entry.confirmed && !entry.is_leaving() && entry.recall.is_none()
    };
    let entries = || cx.registry.blocks.of(uid).filter(spare);
    let in_use = |entry: &Entry| entry.word(report).map(BlockWord::busy);
    // Per family: addresses, addresses in use, blocks.
    let mut sums: Dual<(u64, u64, usize)> = Dual::default();
    for entry in entries() {
        let sum = sums.get_mut(entry.cidr.family());
        add(&mut sum.0, worth(entry, report, cx.registry));
        add(&mut sum.1, in_use(entry).unwrap_or(0));
        sum.2 += 1;
    }
    let most_used = Family::ALL.into_iter().map(|family| sums.get(family).1);
    let most_used = most_used.max().unwrap_or(0);
    let asked = demand(report, &pool.name);
    let wanted = match need {
        Need::First => 0,
        Need::Pods if asked <= most_used.saturating_add(pool.reserve()) => 0,
        _ => asked,
    };
    let empty = entries().filter(|it| in_use(it) == Some(0) && !it.is_released(report));
    let best = empty.filter_map(|entry| {
        let (capacity, used, count) = *sums.get(entry.cidr.family());
        let left = capacity.saturating_sub(worth(entry, report, cx.registry));
        let last = count == 1 && !Mutation::LastBlockAskedBack.is_on();
        let gives = !last && left >= wanted.max(used);
        gives.then(|| (capacity.saturating_sub(used), entry.cidr))
    });
    best.max()
        .map(|(free, cidr)| (free, cidr, name.clone(), uid.clone()))
}
