//! The demand loop: it allocates blocks to nodes that need them, and recalls blocks that nodes do not need.
//!
//! The loop is level-triggered: it checks a node whenever the Node, its NodeSubnet, a pool or its blocks have changed.
//! Each decision depends only on the blocks that the node has and on the demand that its agent reports. The demand is
//! the total number of addresses that the node wants. So if the loop handles the same report twice, it does not
//! allocate twice.
//!
//! # Guarantees
//! - From a dual-stack pool, a node gets a block of each family or no block.
//! - If several nodes want blocks, nodes without any block come first, and each node gets only a few blocks at a time.
//!   A node without demand gets its first block of a pool only if no node with demand waits for that pool.
//!
//! The module `recall` decides which blocks a node does not need. The module `lend` decides which parts of its blocks a
//! node lends to other nodes.

mod lend;
mod recall;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::lend::Lending;
use super::Context;
use super::allocations::AllocationState;
use super::carve::{carve, drained};
use super::node_balance::{NodeNeed, demand, node_balance};
use super::queue::{Load, Queue};
use super::reconcile::Loop;
use super::report::{
    BLOCK_ALLOCATED, BLOCK_LIMIT, EventRecord, RecentReports, Regarding, WAITING_FOR_BLOCK,
};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, Node};
use cadastre_api::{AllocationMode, MOST_BLOCKS, Recall};
use cadastre_core::mutation::Mutation;

/// At most this many blocks of one pool are allocated to a node before other nodes are handled.
const AT_ONCE_PER_NODE: usize = 16;
/// Once this many blocks are allocated, the loop handles no further node until the requests for these blocks are sent.
const AT_ONCE: usize = 64;
/// Minimum interval between two rounds in which empty blocks are recalled for waiting nodes.
const RECALL_PAUSE: Duration = Duration::from_secs(1);

/// The wait of a node for blocks of a pool that had no free block for the node.
#[derive(Clone, Debug)]
pub struct WaitingNode {
    uid: ObjectUid,
    /// Start of the wait, by the monotonic clock
    since: Duration,
    /// How many addresses of the pool the node lacks, in the family in which it lacks most
    missing: u64,
    /// How urgently the node needs the addresses
    need: NodeNeed,
    /// Whether the node has a block of the pool
    has_some: bool,
    /// How many blocks of the pool the node had when the wait began
    blocks: usize,
}

/// The queues of the demand loop, and the nodes that wait for blocks.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Nodes without a block; they are handled before the nodes in `more`
    first: Queue<NodeName>,
    /// Nodes that have blocks; they are handled after the nodes in `first`
    more: Queue<NodeName>,
    /// The nodes that wait for blocks, by pool and node
    waiting: BTreeMap<PoolName, BTreeMap<NodeName, WaitingNode>>,
    /// Exhausted pools, each with the message for events. The map is emptied when ranges may have become free
    full: BTreeMap<PoolName, String>,
    /// Pairs of a node (by UID) and a pool. For these pairs, an event has reported that the node wants more blocks than
    /// it may have
    limited: BTreeSet<(ObjectUid, PoolName)>,
    /// When events about waits and limits of nodes were last emitted. Such an event is not repeated soon, because the
    /// demand comes and goes every few seconds while pods fail and are created again
    recent: RecentReports,
    /// What the loop remembers about its requests to nodes for parts of blocks, such as nodes that did not answer
    lending: Lending,
    /// Monotonic time of the next round of recalls and lending for waiting nodes
    recall_at: Option<Duration>,
    /// Whether the controller waits for answers of nodes that it has asked for parts of their blocks
    has_asks: bool,
    /// Whether ranges may have become free, so that all waiting nodes must be handled
    woken: bool,
    /// Whether `waiting` has changed since [`Demand::take_recount`] was last called
    recount: bool,
}

/// What a node still lacks from a pool that has no free block.
#[derive(Clone, Debug)]
struct Lacking {
    /// How many addresses of the pool the node lacks, in the family in which it lacks most
    missing: u64,
    /// How urgently the node needs the addresses
    need: NodeNeed,
    /// Whether the node has a block of the pool
    has_some: bool,
    /// Text for events that says why the pool has no free block
    note: String,
}

impl Loop for Demand {
    fn load(&self) -> Load {
        let is_due = self.is_anyone_waiting() || self.has_asks;
        let recall = self.recall_at.filter(|_| is_due);
        (self.first.load() + self.more.load()).or_at(recall)
    }
}

impl Demand {
    /// Queues a node, because its demand or its blocks may have changed.
    pub fn add(&mut self, node: &Node, allocations: &AllocationState) {
        if allocations.blocks.has(&node.uid) {
            self.more.add(node.name.clone());
        } else {
            self.first.add(node.name.clone());
        }
    }

    /// Queues the node of that name, if the Node exists.
    pub(crate) fn add_name(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        allocations: &AllocationState,
    ) {
        if let Some(node) = cache.nodes.get(name) {
            self.add(node, allocations);
        }
    }

    /// Removes all waits of a node whose UID is gone.
    pub fn gone(&mut self, node: &Node) {
        self.limited.retain(|(uid, _)| *uid != node.uid);
        self.recent.forget(&node.uid);
        let pools: Vec<PoolName> = self.waiting.keys().cloned().collect();
        for pool in pools {
            let wait = self.waiting.get(&pool).and_then(|it| it.get(&node.name));
            if wait.is_some_and(|wait| wait.uid == node.uid) {
                self.end_wait(&pool, &node.name);
            }
        }
    }

    /// Returns whether another node waits for the pool with a need that is more urgent than [`NodeNeed::Unused`].
    fn is_needed_elsewhere(&self, pool: &PoolName, node: &Node) -> bool {
        let mut waits = self.waiting.get(pool).into_iter().flatten();
        waits.any(|(name, wait)| *name != node.name && wait.need < NodeNeed::Unused)
    }

    /// Ends a node's wait, and returns the ended wait. If all nodes that still wait have only the need
    /// [`NodeNeed::Unused`], queues these nodes, because perhaps only this node kept them waiting.
    fn end_wait(&mut self, pool: &PoolName, node: &NodeName) -> Option<WaitingNode> {
        let waits = self.waiting.get_mut(pool)?;
        let ended = waits.remove(node)?;
        self.recount = true;
        if waits.values().all(|wait| wait.need == NodeNeed::Unused) {
            for name in waits.keys() {
                self.first.add(name.clone());
            }
        }
        Some(ended)
    }

    /// Makes the next [`Demand::work`] handle all waiting nodes, because ranges may have become free or a pool was
    /// added.
    pub fn requeue(&mut self) {
        self.woken = !Mutation::BlockWaitersNotWoken.is_on();
    }

    /// Queues all waiting nodes: the most urgent need first, then the longest wait. The waiting nodes go before the
    /// nodes that were queued already, because one of the queued nodes may have just released the block that became
    /// free.
    fn requeue_all(&mut self) {
        self.full.clear();
        let (first, more) = (self.first.take_ready(), self.more.take_ready());
        let waits = self.waiting.values().flatten();
        let mut names: Vec<(NodeNeed, Duration, &NodeName, bool)> = waits
            .map(|(name, wait)| (wait.need, wait.since, name, wait.has_some))
            .collect();
        names.sort_unstable();
        for (_, _, name, has_some) in names {
            let queue = if has_some {
                &mut self.more
            } else {
                &mut self.first
            };
            queue.add(name.clone());
        }
        for name in first {
            self.first.add(name);
        }
        for name in more {
            self.more.add(name);
        }
    }

    /// Returns all waiting nodes as pairs of pool and node.
    pub fn waiting_nodes(&self) -> impl Iterator<Item = (&PoolName, &NodeName)> {
        let by_pool = self.waiting.iter();
        by_pool.flat_map(|(pool, waits)| waits.keys().map(move |node| (pool, node)))
    }

    /// Returns the pools for whose addresses pods wait.
    pub fn wanted_by_pods(&self) -> impl Iterator<Item = &PoolName> {
        let pods_wait = |wait: &WaitingNode| matches!(wait.need, NodeNeed::First | NodeNeed::Pods);
        let pools = self.waiting.iter();
        let pools = pools.filter(move |(_, waits)| waits.values().any(pods_wait));
        pools.map(|(pool, _)| pool)
    }

    /// Returns the number of waiting nodes per pool.
    pub fn waiting(&self) -> impl Iterator<Item = (&PoolName, usize)> {
        self.waiting.iter().map(|(pool, waits)| (pool, waits.len()))
    }

    /// Returns when the longest wait began, by the monotonic clock. Returns `None` if no node waits.
    pub(crate) fn waiting_since(&self) -> Option<Duration> {
        let waits = self.waiting.values().flat_map(BTreeMap::values);
        waits.map(|wait| wait.since).min()
    }

    /// Returns whether a wait has begun, changed or ended since this function was last called.
    pub(crate) fn take_recount(&mut self) -> bool {
        std::mem::take(&mut self.recount)
    }

    fn is_anyone_waiting(&self) -> bool {
        self.waiting.values().any(|waits| !waits.is_empty())
    }

    /// Handles queued nodes until enough blocks are allocated for this round, then recalls blocks for waiting nodes.
    /// Returns which blocks and nodes other loops must check.
    pub fn work(&mut self, cx: &mut Context) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        if std::mem::take(&mut self.woken) {
            self.requeue_all();
        }
        while affected.blocks.len() < AT_ONCE {
            let now = cx.now.mono;
            let Some(name) = self.first.pop(now).or_else(|| self.more.pop(now)) else {
                break;
            };
            if let Some(node) = cx.cache.nodes.get(&name).cloned() {
                self.look(&node, cx, &mut affected);
            }
        }
        let is_due = self.recall_at.is_none_or(|at| at <= cx.now.mono);
        let is_due = is_due && (self.is_anyone_waiting() || self.has_asks);
        self.look_at_asks(is_due, cx, &mut affected);
        if is_due {
            self.recall_at = Some(cx.now.mono + RECALL_PAUSE);
            self.recall_for_waiting(cx, &mut affected);
            self.ask_for_parts(cx, &mut affected);
        }
        self.has_asks = !cx.allocations.lending.asks.is_empty();
        affected
    }

    fn look(&mut self, node: &Node, cx: &mut Context, affected: &mut AffectedLoops) {
        let report = report_of(node, cx.cache);
        if self.recall_surplus(node, report, cx) {
            affected.nodes.push(node.name.clone());
        }
        if !node.deleting {
            self.provide(node, report, cx, affected);
        }
    }

    /// Allocates to a node the blocks that it lacks, from all pools that it may use.
    fn provide(
        &mut self,
        node: &Node,
        report: Option<&AgentReport>,
        cx: &mut Context,
        affected: &mut AffectedLoops,
    ) {
        let allocations = &mut *cx.allocations;
        let mode = AllocationMode::Blocks;
        let choices = allocations
            .pools
            .choices(mode, node, &allocations.ledger, |state| {
                self.full.contains_key(&state.name)
            });
        let has_any = |cx: &Context| {
            let mut own = cx.allocations.plain_blocks(&node.uid);
            own.any(|entry| !entry.is_leaving() && entry.recall != Some(Recall::Drain))
        };
        // A node without any block gets a block even without demand, from the first suitable pool that has a free
        // block.
        let mut lacks_first = !has_any(cx);
        let mut first_full = None;
        let mut done: BTreeSet<PoolName> = BTreeSet::new();
        for (pool, by_name) in choices {
            let state = cx.allocations.pools.get(&pool);
            let pools = &cx.allocations.pools;
            let soon = pools.starting_before(mode, node, Some(&pool)).next();
            let is_immediate = state.is_some_and(|it| it.terms.first_immediate);
            let gets_first = lacks_first && is_immediate && !by_name && soon.is_none();
            let demanded = demand(report, &pool);
            let wanted = demanded.max(u64::from(gets_first));
            let lacking = if demanded == 0 && gets_first && self.is_needed_elsewhere(&pool, node) {
                Some(Lacking {
                    missing: 1,
                    need: NodeNeed::Unused,
                    has_some: false,
                    note: format!("pool \"{pool}\": pods of other nodes wait for what comes free"),
                })
            } else {
                self.provide_from(&pool, wanted, node, report, cx, affected)
            };
            lacks_first &= !has_any(cx);
            if demanded == 0 && !lacks_first {
                self.no_longer_waits(&pool, node, cx);
            } else if demanded > 0 {
                done.insert(pool.clone());
                if let Some(lacking) = lacking {
                    self.waits(&pool, node, lacking, cx);
                }
            } else if let Some(lacking) = lacking {
                first_full.get_or_insert((pool, lacking));
            }
        }
        if let Some((pool, lacking)) = first_full.filter(|_| lacks_first) {
            self.waits(&pool, node, lacking, cx);
            done.insert(pool);
        }
        let others = self.waiting.keys().filter(|pool| !done.contains(*pool));
        for pool in others.cloned().collect::<Vec<_>>() {
            self.end_wait(&pool, &node.name);
        }
    }

    /// Allocates the blocks that a node lacks from one pool. If the pool has no free block, returns what the node still
    /// lacks.
    fn provide_from(
        &mut self,
        pool: &PoolName,
        wanted: u64,
        node: &Node,
        report: Option<&AgentReport>,
        cx: &mut Context,
        affected: &mut AffectedLoops,
    ) -> Option<Lacking> {
        let mut carved = 0;
        loop {
            let balance = node_balance(pool, wanted, node, report, cx.allocations);
            let state = cx.allocations.pools.get(pool)?;
            let missing = balance.missing(state);
            let limited = balance.is_at_limit(state);
            if missing == 0 || limited {
                self.report_limit(pool, node, missing > 0 && limited, cx);
                self.no_longer_waits(pool, node, cx);
                return None;
            }
            // While nodes without blocks wait for their first one, a node gets one block at a time.
            let others_come_first = carved > 0 && self.first.has_ready(cx.now.mono);
            if carved >= AT_ONCE_PER_NODE || others_come_first {
                self.more.add(node.name.clone());
                return None;
            }
            let (need, has_some) = (balance.need(state), balance.has_some());
            let note = match self.full.get(pool) {
                Some(note) => note.clone(),
                None => match carve(pool, node, cx) {
                    Ok(cidrs) => {
                        affected.blocks.extend(cidrs);
                        carved += 1;
                        continue;
                    }
                    Err(full) => {
                        let mut note = format!("pool \"{pool}\": {full}");
                        if full.avoided > 0 {
                            // No watch event announces that the addresses are no longer in use, so the node is handled
                            // again later.
                            let at = cx.now.next_check();
                            self.more.add_at(node.name.clone(), at);
                            note.push_str(&asked_to_drain(node, cx.cache));
                        } else {
                            self.full.insert(pool.clone(), note.clone());
                        }
                        note
                    }
                },
            };
            return Some(Lacking {
                missing,
                need,
                has_some,
                note,
            });
        }
    }

    /// Emits an event if a node wants more addresses than its maximum number of blocks provides. The event is emitted
    /// once, not for each report of the agent.
    fn report_limit(&mut self, pool: &PoolName, node: &Node, limited: bool, cx: &mut Context) {
        let key = (node.uid.clone(), pool.clone());
        if !limited {
            self.limited.remove(&key);
        } else if self.limited.insert(key) && self.recent.is_due(node, pool, BLOCK_LIMIT, cx.now) {
            let note = format!(
                "wants more addresses of pool \"{pool}\" than its blocks hold, but has as many blocks as it may: raise spec.maxBlocksPerNode (at most {MOST_BLOCKS}), or use larger blocks"
            );
            let about = Regarding::node(node);
            cx.reports
                .push(EventRecord::warning(about, BLOCK_LIMIT, note));
        }
    }

    fn waits(&mut self, pool: &PoolName, node: &Node, lacking: Lacking, cx: &mut Context) {
        let waits = self.waiting.entry(pool.clone()).or_default();
        let before = waits.get(&node.name).filter(|it| it.uid == node.uid);
        let wait = WaitingNode {
            uid: node.uid.clone(),
            since: before.map_or(cx.now.mono, |it| it.since),
            missing: lacking.missing,
            need: lacking.need,
            has_some: lacking.has_some,
            blocks: before.map_or_else(|| blocks_of(pool, node, cx), |it| it.blocks),
        };
        if before.is_none() && self.recent.is_due(node, pool, WAITING_FOR_BLOCK, cx.now) {
            let (missing, why) = (lacking.missing, lacking.note);
            let (pools, ledger) = (&cx.allocations.pools, &cx.allocations.ledger);
            let pools = pools.explain(AllocationMode::Blocks, node, ledger);
            let note = format!(
                "waits for a block, {missing} addresses are lacking: {why}. Pools: {pools}"
            );
            let about = Regarding::node(node);
            cx.reports
                .push(EventRecord::warning(about, WAITING_FOR_BLOCK, note));
        }
        self.recount |= before.is_none_or(|it| it.missing != wait.missing);
        waits.insert(node.name.clone(), wait);
    }

    /// Ends a node's wait. An event reports this if the node has got a block, but not if the node merely demands fewer
    /// addresses now.
    fn no_longer_waits(&mut self, pool: &PoolName, node: &Node, cx: &mut Context) {
        let Some(wait) = self.end_wait(pool, &node.name) else {
            return;
        };
        if wait.uid != node.uid || blocks_of(pool, node, cx) <= wait.blocks {
            return;
        }
        if self.recent.end(node, pool, WAITING_FOR_BLOCK) {
            let note = format!("has blocks of pool \"{pool}\" after a wait");
            let about = Regarding::node(node);
            cx.reports
                .push(EventRecord::info(about, BLOCK_ALLOCATED, note));
        }
    }
}

/// Returns the end of the text that says why a node waits, if the node is asked to drain ranges.
fn asked_to_drain(node: &Node, cache: &ClusterCache) -> String {
    let Some(all) = drained(node, cache) else {
        return String::new();
    };
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    let all = all.join(", ");
    format!(
        "; the node gets no part of what it is asked to drain: {all} (kubectl cadastre undrain)"
    )
}

/// Returns how many blocks of a pool a node has, including blocks that are still being created.
fn blocks_of(pool: &PoolName, node: &Node, cx: &Context) -> usize {
    let own = cx.allocations.plain_blocks(&node.uid);
    own.filter(|entry| entry.pool == *pool && !entry.is_leaving())
        .count()
}

#[cfg(test)]
pub(super) mod tests;
