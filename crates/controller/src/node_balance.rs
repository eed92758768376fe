//! Computes how many addresses of a pool a node has, wants and can spare, and how urgent its need is.
//!
//! Addresses are counted per family, as the agent reports them. A block that the agent has not reported yet counts by
//! its size. The results depend only on the ledger and the reports.

use std::time::Duration;

use super::Context;
use super::allocations::AllocationState;
use super::pools::{PoolPhase, PoolState};
use crate::allocations::blocks::BlockEntry;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, BlockReport, Node};
use cadastre_api::{MOST_BLOCKS, Recall};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Dual, Family};

/// How urgently a node needs more addresses of a pool. The variants are in order of urgency, the most urgent first.
///
/// A block is recalled for a node only from nodes whose need is less urgent, so no block moves back and forth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeNeed {
    /// The node has demand but no block. Without blocks, an agent reports demand only while a pod waits.
    First,
    /// The node has blocks, and its pods wait for more addresses.
    Pods,
    /// The node has pods, but fewer free addresses than the pool's reserve (`warm.low`).
    Reserve,
    /// The node uses no address of the pool, and wants a first block or a reserve for future pods.
    Unused,
}

/// The addresses and blocks that a node has of one pool, and the addresses that it wants.
pub(super) struct NodeBalance {
    /// Number of addresses per family in the node's blocks, including blocks that are still being created
    capacity: Dual<u64>,
    /// Number of addresses per family that are in use or cooling, as the agent reports them
    in_use: Dual<u64>,
    /// Number of blocks per family, including blocks that are still being created for the node
    count: Dual<usize>,
    wanted: u64,
    /// The part of `wanted` that the agent reports as demand
    demanded: u64,
    /// Number of addresses per family that the node keeps whether its pods use them or not
    minimum: u64,
}

impl NodeBalance {
    /// Returns how many addresses the node lacks in the family in which it lacks most.
    pub(super) fn missing(&self, pool: &PoolState) -> u64 {
        let families = pool.space.families();
        families.map(|it| self.lacking(it)).max().unwrap_or(0)
    }

    /// Returns how many addresses of a family the node lacks.
    pub(super) fn lacking(&self, family: Family) -> u64 {
        self.wanted.saturating_sub(*self.capacity.get(family))
    }

    /// Returns how many addresses of a family the node can spare beyond those for its pods and its reserve.
    pub(super) fn spare(&self, family: Family, pool: &PoolState) -> u64 {
        let kept = self.in_use.get(family).saturating_add(pool.reserve());
        self.capacity
            .get(family)
            .saturating_sub(kept.max(self.minimum).max(self.demanded))
    }

    /// Returns how many more blocks of a family the node may have.
    pub(super) fn blocks_left(&self, family: Family, pool: &PoolState) -> usize {
        let most = pool.terms.most.unwrap_or(MOST_BLOCKS);
        most.saturating_sub(*self.count.get(family))
    }

    pub(super) fn is_at_limit(&self, pool: &PoolState) -> bool {
        let is_full = |family| self.blocks_left(family, pool) == 0;
        pool.space.families().any(is_full)
    }

    pub(super) fn has_some(&self) -> bool {
        self.count.iter().any(|(_, count)| *count > 0)
    }

    /// Returns how urgently the node needs the missing addresses.
    pub(super) fn need(&self, pool: &PoolState) -> NodeNeed {
        let in_use = self.in_use.v4.max(self.in_use.v6);
        if self.demanded > 0 && !self.has_some() {
            NodeNeed::First
        } else if self.demanded > in_use.saturating_add(pool.reserve()).max(self.minimum) {
            NodeNeed::Pods
        } else if in_use > 0 {
            NodeNeed::Reserve
        } else {
            NodeNeed::Unused
        }
    }
}

/// Returns the demand for addresses of a pool that the agent reports, or 0 if the agent reports no demand. The demand
/// applies to each family of the pool.
pub(super) fn demand(report: Option<&AgentReport>, pool: &PoolName) -> u64 {
    let demands = report.into_iter().flat_map(|report| &report.demand);
    let mut of_pool = demands.filter(|(name, _)| name == pool);
    of_pool.next().map_or(0, |(_, demand)| *demand)
}

fn minimum(pool: &PoolName, node: &Node, allocations: &AllocationState) -> u64 {
    let pool = allocations.pools.get(pool);
    let pool = pool.filter(|_| !Mutation::MinimumCountsAsPods.is_on());
    pool.map_or(0, |pool| pool.minimum(node))
}

/// Returns how many addresses of a block the node can use. This is the number that the agent reports, or 0 if the agent
/// has released the block. If the agent has not reported the block, the number is computed from the block's size.
pub(super) fn usable_addresses(
    entry: &BlockEntry,
    report: Option<&AgentReport>,
    allocations: &AllocationState,
) -> u64 {
    match entry.report_for(report) {
        Some(it) if it.released && !Mutation::ReleasedBlocksCounted.is_on() => 0,
        Some(it) => it.busy().saturating_add(it.free),
        None => {
            let usable = allocations.usable(&entry.cidr, &entry.pool);
            let usable = u64::try_from(usable).unwrap_or(u64::MAX);
            let pool = allocations.pools.get(&entry.pool);
            let never = if entry.parent.is_none() {
                unassigned(&entry.cidr, pool)
            } else {
                0
            };
            usable.saturating_sub(never).max(usable.min(1))
        }
    }
}

/// Adds addresses to a sum, which stays at `u64::MAX` if it would overflow. Two IPv6 blocks may have more addresses
/// than `u64` can count.
pub(super) fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// Returns how many addresses of a block the node's agent never assigns: the network, gateway and broadcast addresses.
/// If they were counted as usable, a node with small blocks would at first get too few blocks. If the pool names a
/// gateway, no such addresses are subtracted.
fn unassigned(block: &Cidr, pool: Option<&PoolState>) -> u64 {
    let ranges = pool.and_then(|pool| match block.family() {
        Family::V4 => pool.node_view.ipv4.as_ref(),
        Family::V6 => pool.node_view.ipv6.as_ref(),
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

/// Computes the balance of a node and a pool. `wanted` is how many addresses per family the node should have.
pub(super) fn node_balance(
    pool: &PoolName,
    wanted: u64,
    node: &Node,
    report: Option<&AgentReport>,
    allocations: &AllocationState,
) -> NodeBalance {
    let mut balance = NodeBalance {
        capacity: Dual::default(),
        in_use: Dual::default(),
        count: Dual::default(),
        wanted,
        demanded: demand(report, pool),
        minimum: minimum(pool, node, allocations),
    };
    let is_ignored =
        |entry: &BlockEntry| !entry.confirmed && Mutation::ProvisionalBlocksNotCounted.is_on();
    let counts = |entry: &&BlockEntry| {
        !is_ignored(entry)
            && entry.pool == *pool
            && !entry.is_leaving()
            && entry.recall != Some(Recall::Drain)
    };
    for entry in allocations.plain_blocks(&node.uid).filter(counts) {
        let family = entry.cidr.family();
        let addresses = usable_addresses(entry, report, allocations);
        add(balance.capacity.get_mut(family), addresses);
        if let Some(reported) = entry.report_for(report).filter(|it| !it.released) {
            add(balance.in_use.get_mut(family), reported.busy());
        }
        *balance.count.get_mut(family) += usize::from(!entry.is_released(report));
    }
    balance
}

/// Returns whether a block must be recalled because the pool no longer selects the node, no longer covers the block, or
/// is gone or being deleted.
pub fn must_leave(entry: &BlockEntry, node: &Node, pool: Option<&PoolState>) -> bool {
    let Some(pool) = pool else { return true };
    match pool.phase {
        // It is unknown which nodes and ranges an invalid pool is for, so the blocks of the pool stay.
        PoolPhase::Invalid(_) => false,
        PoolPhase::Terminating => true,
        _ => !pool.selects(node) || !pool.space.covers(&entry.cidr),
    }
}

/// Returns the monotonic time since which a node has used none of its blocks of a pool, as its agent reports. Returns
/// `None` if the node uses one of these blocks or has none. Also returns `None` if the demand exceeds the pool's
/// reserve, because in that case pods are about to use the blocks.
pub(super) fn unused_since(
    pool: &PoolState,
    node: &Node,
    report: Option<&AgentReport>,
    allocations: &AllocationState,
) -> Option<Duration> {
    if demand(report, &pool.name) > pool.reserve().max(pool.minimum(node)) {
        return None;
    }
    let counts = |entry: &&BlockEntry| {
        entry.pool == pool.name && !entry.is_leaving() && !entry.is_released(report)
    };
    let mut since = None;
    for entry in allocations.plain_blocks(&node.uid).filter(counts) {
        since = since.max(Some(entry.idle_since?));
    }
    since
}

/// Returns the empty block that a node can best spare for another node, whose need is `need`. Returns `None` if the
/// node can spare none, or its agent has not reported. The node keeps at least one block per family.
///
/// The tuple has the node's free addresses in the family of the block, the block, and the node's name and UID. The
/// caller chooses the greatest tuple, and so a block of the node with the most free addresses.
pub(super) fn recall_candidate(
    pool: &PoolState,
    name: &NodeName,
    uid: &ObjectUid,
    need: NodeNeed,
    cx: &Context,
) -> Option<(u64, Cidr, NodeName, ObjectUid)> {
    let node = cx.cache.nodes.get(name).filter(|node| node.uid == *uid)?;
    let report = Some(report_of(node, cx.cache)?);
    let spare = |entry: &&BlockEntry| {
        entry.pool == pool.name && entry.confirmed && !entry.is_leaving() && entry.recall.is_none()
    };
    let entries = || cx.allocations.plain_blocks(uid).filter(spare);
    let in_use = |entry: &BlockEntry| entry.report_for(report).map(BlockReport::busy);
    // Per family: addresses that the node can use, addresses in use, number of blocks.
    let mut sums: Dual<(u64, u64, usize)> = Dual::default();
    for entry in entries() {
        let sum = sums.get_mut(entry.cidr.family());
        add(&mut sum.0, usable_addresses(entry, report, cx.allocations));
        add(&mut sum.1, in_use(entry).unwrap_or(0));
        sum.2 += 1;
    }
    let most_used = sums.v4.1.max(sums.v6.1);
    let demanded = demand(report, &pool.name);
    let kept = most_used
        .saturating_add(pool.reserve())
        .max(pool.minimum(node));
    let wanted = match need {
        NodeNeed::First => 0,
        NodeNeed::Pods if demanded <= kept => 0,
        _ => demanded,
    };
    let empty = entries().filter(|it| in_use(it) == Some(0) && !it.is_released(report));
    let best = empty.filter_map(|entry| {
        let (capacity, used, count) = *sums.get(entry.cidr.family());
        let left = capacity.saturating_sub(usable_addresses(entry, report, cx.allocations));
        let last = count == 1 && !Mutation::LastBlockRecalled.is_on();
        let is_spare = !last && left >= wanted.max(used);
        is_spare.then(|| (capacity.saturating_sub(used), entry.cidr))
    });
    best.max()
        .map(|(free, cidr)| (free, cidr, name.clone(), uid.clone()))
}
