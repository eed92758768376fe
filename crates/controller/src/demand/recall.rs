//! Recall of blocks: decides which blocks a node should release if they are empty, and which blocks it should drain.
//!
//! # Guarantees
//! - A recalled block belongs to the node until the node's agent releases the block.
//! - In three cases a block is recalled even with addresses in use: its pool no longer selects the node, its pool no
//!   longer covers the block, or a user asks to drain the block. An empty block is recalled after the pool's idle time,
//!   or if other nodes need it more urgently.
//! - A node keeps its last blocks of a pool even if it uses none of them, until pods of another node wait. If the pool
//!   allocates only on request, the node keeps them only for the idle time. The last blocks of both families are
//!   recalled together, because one family of a dual-stack pool alone is useless.
//! - No block moves back and forth: a block is recalled for another node only if that node's need is more urgent
//!   ([`NodeNeed`]).
//! - A borrowed block is drained in two cases: the node's own blocks have sufficed for the idle time, or the pool has
//!   had free blocks for that long. Empty borrowed blocks are recalled before other blocks.
//! - An agent that does not answer causes only a short delay. After that, a block of another node is recalled.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::Demand;
use crate::Context;
use crate::allocations::blocks::{AffectedLoops, BlockEntry};
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, BlockReport, Node};
use crate::node_balance::{
    NodeNeed, add, demand, must_leave, recall_candidate, unused_since, usable_addresses,
};
use cadastre_api::Recall;
use cadastre_core::{Cidr, Family};

/// How long a node must have used no address of a pool before its last blocks are recalled for waiting pods. Before
/// that, the pod for which the blocks were allocated may not exist yet.
const UNUSED: Duration = Duration::from_secs(5);
/// A borrowed block is returned to its lender when the borrower has not needed it for this long, or for the pool's idle
/// time if that is longer.
const SUFFICED: Duration = Duration::from_secs(10);
/// How long an agent has to release a block before a block of another node is recalled, too.
const PATIENCE: Duration = Duration::from_secs(10);

impl Demand {
    /// Decides which blocks of a node are recalled. Returns whether the node's NodeSubnet must change.
    pub(super) fn recall_surplus(
        &mut self,
        node: &Node,
        report: Option<&AgentReport>,
        cx: &mut Context,
    ) -> bool {
        let now = cx.now.mono;
        let none = BTreeSet::new();
        let own = cx.allocations.plain_blocks(&node.uid);
        let own = own.filter(|entry| entry.confirmed && !entry.is_leaving());
        let mut entries: Vec<BlockEntry> = own.cloned().collect();
        // Borrowed blocks come first in the list, so they are recalled before others.
        entries.sort_by_key(|entry| entry.parent.is_none());
        let has_borrowed = entries.first().is_some_and(|entry| entry.parent.is_some());
        if has_borrowed {
            // No event about this node announces that it no longer needs to borrow, so the node is handled again later.
            self.more.add_at(node.name.clone(), cx.now.next_check());
        }
        let subnet = cx.cache.subnets.get(&node.name);
        let drained = subnet.map_or(&none, |subnet| &subnet.requests.drain);
        let mut changed = false;
        // Number of addresses in the node's own blocks, by pool and family. It is computed only if the node has
        // borrowed blocks.
        let mut own_addresses: BTreeMap<(PoolName, Family), u64> = BTreeMap::new();
        // Number of addresses and number of blocks, by pool and family. Only blocks that are not recalled count.
        let mut kept: BTreeMap<(PoolName, Family), (u64, usize)> = BTreeMap::new();
        for entry in &entries {
            if entry.recall.is_none() {
                let key = (entry.pool.clone(), entry.cidr.family());
                let addresses = usable_addresses(entry, report, cx.allocations);
                if has_borrowed && entry.parent.is_none() {
                    add(own_addresses.entry(key.clone()).or_default(), addresses);
                }
                let sum = kept.entry(key).or_default();
                add(&mut sum.0, addresses);
                sum.1 += 1;
            }
        }
        for entry in &entries {
            let pool = cx.allocations.pools.get(&entry.pool);
            let busy = entry.report_for(report).map(BlockReport::busy);
            let is_empty = busy == Some(0);
            let in_use = busy.is_some_and(|busy| busy > 0);
            let mut recall = entry.recall;
            let mut idle_since = entry.idle_since;
            let mut unneeded_since = entry.unneeded_since;
            let is_borrowed = entry.parent.is_some();
            if must_leave(entry, node, pool)
                || drained.contains(&entry.cidr)
                || is_parent_leaving(entry, cx)
            {
                recall = Some(Recall::Drain);
            } else if entry.recall == Some(Recall::Drain) {
                // A borrowed block that the node has to give back stays recalled, unless the node now waits for
                // addresses of the pool.
                let waits = self.waiting.get(&entry.pool);
                let is_waiting = waits.is_some_and(|waits| waits.contains_key(&node.name));
                recall = recall.filter(|_| is_borrowed && !is_waiting);
            } else if in_use {
                recall = None;
            }
            let key = (entry.pool.clone(), entry.cidr.family());
            let idle = pool.map_or(Duration::ZERO, |pool| pool.terms.idle);
            let own = own_addresses.get(&key).copied().unwrap_or(0);
            let is_unneeded = recall.is_none()
                && is_borrowed
                && (own >= demand(report, &entry.pool) || self.has_room(&entry.pool, cx));
            unneeded_since = is_unneeded.then(|| unneeded_since.unwrap_or(now));
            if unneeded_since.is_some_and(|since| since + idle.max(SUFFICED) <= now) {
                recall = Some(Recall::Drain);
                let sum = kept.entry(key.clone()).or_default();
                let own = usable_addresses(entry, report, cx.allocations);
                sum.0 = sum.0.saturating_sub(own);
                sum.1 = sum.1.saturating_sub(1);
            }
            if recall.is_none() && is_empty {
                let since = *idle_since.get_or_insert(now);
                let sum = kept.entry(key).or_default();
                let own = usable_addresses(entry, report, cx.allocations);
                let wanted = demand(report, &entry.pool);
                if sum.1 > 1 && sum.0.saturating_sub(own) >= wanted {
                    if since + idle <= now {
                        recall = Some(Recall::IfEmpty);
                        sum.0 = sum.0.saturating_sub(own);
                        sum.1 -= 1;
                    } else {
                        self.more.add_at(node.name.clone(), since + idle);
                    }
                }
            } else if !is_empty {
                idle_since = None;
            }
            if let Some(entry) = cx.allocations.blocks.get_mut(&entry.cidr) {
                changed |= entry.recall != recall;
                entry.recall = recall;
                entry.recalled_at = entry.recalled_at.filter(|_| recall.is_some());
                entry.idle_since = idle_since;
                entry.unneeded_since = unneeded_since;
            }
        }
        changed | self.end_unused(node, report, &entries, cx)
    }

    /// Returns whether a pool has a free block of each family and no node waits for the pool.
    fn has_room(&self, pool: &PoolName, cx: &Context) -> bool {
        let is_awaited = self.waiting.get(pool).is_some_and(|it| !it.is_empty());
        let Some(pool) = cx.allocations.pools.get(pool).filter(|_| !is_awaited) else {
            return false;
        };
        let ledger = &cx.allocations.ledger;
        let is_free = |family| ledger.block_counts(&pool.space, family).free > 0;
        pool.is_serving() && pool.space.families().all(is_free)
    }

    /// Handles pools that allocate only on request. If the node has used no address of such a pool for the idle time,
    /// recalls the node's last blocks of the pool. Returns whether any block was recalled.
    fn end_unused(
        &mut self,
        node: &Node,
        report: Option<&AgentReport>,
        entries: &[BlockEntry],
        cx: &mut Context,
    ) -> bool {
        let mut changed = false;
        let pools: BTreeSet<&PoolName> = entries.iter().map(|entry| &entry.pool).collect();
        for name in pools {
            let pool = cx.allocations.pools.get(name);
            let Some(pool) = pool.filter(|it| it.is_serving() && !it.terms.first_immediate) else {
                continue;
            };
            let Some(since) = unused_since(pool, node, report, cx.allocations) else {
                continue;
            };
            let until = since + pool.terms.idle;
            if until <= cx.now.mono {
                changed |= recall_all(name, &node.uid, cx) > 0;
            } else {
                self.more.add_at(node.name.clone(), until);
            }
        }
        changed
    }

    /// For each pool, finds the most urgent need, and recalls one empty block for each node that waits with this need.
    /// Recalls blocks first from the nodes with the most free addresses. After that, recalls the last blocks of nodes
    /// that have used no address of the pool for a while.
    pub(super) fn recall_for_waiting(&mut self, cx: &mut Context, affected: &mut AffectedLoops) {
        let now = cx.now.mono;
        for (name, waits) in &self.waiting {
            // Only the most urgent need counts, even at the expense of nodes that wait with a less urgent need.
            let Some(need) = waits.values().map(|wait| wait.need).min() else {
                continue;
            };
            let Some(pool) = cx.allocations.pools.get(name) else {
                continue;
            };
            let wanted = waits.values().filter(|wait| wait.need == need).count();
            let idle = pool.terms.idle;
            let is_allocated = |entry: &&BlockEntry| {
                let is_plain = cx.allocations.claims.of(&entry.cidr).is_none();
                entry.pool == *name && entry.confirmed && !entry.owner.quarantined && is_plain
            };
            let allocated = || cx.allocations.blocks.iter().filter(is_allocated);
            let is_recent = |at: Duration| now < at + PATIENCE;
            let is_pending = |entry: &&BlockEntry| {
                entry.recall == Some(Recall::IfEmpty) && entry.recalled_at.is_none_or(is_recent)
            };
            let mut recalled = allocated().filter(is_pending).count();
            let needs_less = |entry: &&BlockEntry| {
                let wait = waits.get(&entry.owner.name);
                wait.is_none_or(|wait| wait.need > need)
            };
            // If pods on a node wait, and the node has lent parts of its blocks, these parts are recalled first.
            let is_of_waiting = |entry: &&BlockEntry| {
                let lender = entry.parent.as_ref().map(|it| &it.node);
                let wait = lender.and_then(|it| waits.get(it));
                wait.is_some_and(|wait| wait.need <= NodeNeed::Pods && wait.need == need)
            };
            let lent = allocated().filter(is_of_waiting).filter(needs_less);
            let lent = lent.filter(|entry| {
                let node = cx.cache.nodes.get(&entry.owner.name);
                let report = node.and_then(|node| report_of(node, cx.cache));
                entry.report_for(report).is_some_and(|it| it.busy() == 0)
            });
            let lent: Vec<(Cidr, NodeName)> = lent
                .map(|entry| (entry.cidr, entry.owner.name.clone()))
                .collect();
            let owners: BTreeSet<(NodeName, ObjectUid)> = allocated()
                .filter(needs_less)
                .map(|entry| (entry.owner.name.clone(), entry.owner.uid.clone()))
                .collect();
            let mut donors: BinaryHeap<(u64, Cidr, NodeName, ObjectUid)> = owners
                .iter()
                .filter_map(|(node, uid)| recall_candidate(pool, node, uid, need, cx))
                .collect();
            for (cidr, node) in lent {
                recalled += usize::from(recalled < wanted && recall_block(&cidr, cx));
                affected.nodes.push(node);
            }
            while recalled < wanted {
                let Some((_, cidr, node, uid)) = donors.pop() else {
                    break;
                };
                recalled += usize::from(recall_block(&cidr, cx));
                affected.nodes.push(node.clone());
                if let Some(pool) = cx.allocations.pools.get(name) {
                    donors.extend(recall_candidate(pool, &node, &uid, need, cx));
                }
            }
            let after = match need {
                NodeNeed::First | NodeNeed::Pods => idle.min(UNUSED),
                NodeNeed::Reserve => idle,
                // The need for a first block without demand is the least urgent one, so no node has to give up its last
                // blocks for it.
                NodeNeed::Unused => continue,
            };
            for (_, node, uid) in unused(name, &owners, after, cx) {
                if recalled >= wanted {
                    break;
                }
                recalled += recall_all(name, &uid, cx);
                affected.nodes.push(node);
            }
        }
    }
}

/// Returns whether a borrowed block has to be returned because its parent is being drained. The parent cannot be
/// released before the borrowed block is returned.
fn is_parent_leaving(entry: &BlockEntry, cx: &Context) -> bool {
    let parent = cx.allocations.parent_of(entry);
    parent.is_some_and(|it| !it.owner.quarantined && it.recall == Some(Recall::Drain))
}

/// Returns the nodes that have used no address of a pool for at least `after`. The node that has used none for the
/// longest time comes first.
fn unused(
    pool: &PoolName,
    owners: &BTreeSet<(NodeName, ObjectUid)>,
    after: Duration,
    cx: &Context,
) -> Vec<(Duration, NodeName, ObjectUid)> {
    let Some(pool) = cx.allocations.pools.get(pool) else {
        return Vec::new();
    };
    let is_unused = |(name, uid): &(NodeName, ObjectUid)| {
        let node = cx.cache.nodes.get(name).filter(|node| node.uid == *uid)?;
        let since = unused_since(pool, node, report_of(node, cx.cache), cx.allocations)?;
        (since + after <= cx.now.mono).then(|| (since, name.clone(), uid.clone()))
    };
    let mut unused: Vec<_> = owners.iter().filter_map(is_unused).collect();
    unused.sort_unstable();
    unused
}

/// Asks the agent of the block's node to release the block if it is empty. Returns false if the block was recalled
/// already.
fn recall_block(cidr: &Cidr, cx: &mut Context) -> bool {
    let now = cx.now.mono;
    let Some(entry) = cx.allocations.blocks.get_mut(cidr) else {
        return false;
    };
    let is_new = entry.recall.is_none();
    if is_new {
        entry.recall = Some(Recall::IfEmpty);
        entry.recalled_at = Some(now);
    }
    is_new
}

/// Recalls all blocks of a pool that a node has. The node's agent releases each of these blocks that is empty. Returns
/// how many of them were not recalled already.
fn recall_all(pool: &PoolName, uid: &ObjectUid, cx: &mut Context) -> usize {
    let own = cx.allocations.plain_blocks(uid);
    let own = own.filter(|it| it.pool == *pool && it.confirmed && !it.is_leaving());
    let cidrs: Vec<Cidr> = own.map(|entry| entry.cidr).collect();
    cidrs.iter().filter(|cidr| recall_block(cidr, cx)).count()
}
