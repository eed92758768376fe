//! Lending: nodes that wait for addresses of an exhausted pool borrow parts of other nodes' blocks.
//!
//! ```text
//! a node waits, and no range is free ──► a richer node is asked for a part ──► it has withdrawn the part
//!                                             │ refused, or no answer                 │
//!                                             ▼                                       ▼
//!                                        another part                  a block of the node that waited
//! ```
//!
//! If a node has withdrawn a part that the waiting node no longer needs, the part is returned to its node, like every
//! withdrawn range that nobody needs.
//!
//! # Guarantees
//! - Nodes borrow only if the pool has `borrowing: WhenExhausted`, and only if no range is free.
//! - No part becomes a block of the borrower before the lender has withdrawn the part. The borrower's block is not
//!   confirmed before the lender's NodeSubnet lists the part as lent to this block (see [`crate::withdrawals`]).
//! - A node that does not answer delays others by at most [`SLOW`], and is not asked again for [`REST`].
//! - Parts of borrowed blocks are not lent.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Demand, WaitingNode};
use crate::Context;
use crate::allocations::blocks::{AffectedLoops, BlockEntry};
use crate::allocations::holders::HolderUse;
use crate::allocations::lending::Ask;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, Node, Parent};
use crate::handover::is_ready_to_lend;
use crate::lending::{Lender, LenderBlock, Part, choose};
use crate::node_balance::{NodeNeed, demand, node_balance};
use crate::pools::PoolState;
use crate::report::{BLOCK_BORROWED, BLOCK_LENT, EventRecord, Regarding};
use cadastre_api::Recall;
use cadastre_api::node_allocation::never_assigned;
use cadastre_core::{Cidr, Family, HoldingState, IpRange};

/// The controller asks for at most this many parts of a pool at once.
const MOST_ASKS: usize = 32;
/// A node with more than this many withdrawn ranges lends nothing more.
const MOST_LENT: usize = 256;
/// If a node has not answered for this long, the controller also asks another node.
const SLOW: Duration = Duration::from_secs(1);
/// If a node has not answered for this long, the controller no longer waits for the answer, and does not ask the node
/// again for [`REST`].
const PATIENCE: Duration = Duration::from_secs(5);
/// The controller does not ask a node again for this long after the node has not answered. It does not ask for a part
/// again for this long after the part was refused, or was returned to its node.
const REST: Duration = Duration::from_secs(30);
/// If an empty block was recalled less than this long ago, no node borrows, because the recalled block may soon become
/// free.
const RECALLING: Duration = Duration::from_secs(2);

/// The waiting nodes of each pool, by node name.
type Waits = BTreeMap<PoolName, BTreeMap<NodeName, WaitingNode>>;
/// Name and UID of a node.
type NodeKey = (NodeName, ObjectUid);

/// What the loop remembers about earlier requests for parts of blocks: parts that the controller does not ask for, and
/// nodes that it does not ask, for a while.
#[derive(Clone, Debug, Default)]
pub(super) struct Lending {
    /// Whether a NodeSubnet has changed since [`Demand::look_at_asks`] last ran
    changed: bool,
    /// Parts of blocks, each with the monotonic time until which the controller does not ask for the part again
    resting: BTreeMap<Cidr, Duration>,
    /// Nodes (by UID) that have not answered, each with the monotonic time until which the controller does not ask the
    /// node again
    silent: BTreeMap<ObjectUid, Duration>,
}

/// The state of a part that the controller has asked a node to lend.
enum Fate {
    /// The node has not answered yet
    Open,
    /// The node has withdrawn the part
    Withdrawn,
    /// Nobody needs the part any more, or the node cannot lend the part any more
    Over,
    /// The node cannot withdraw the part, because some addresses of the part are in use or cooling
    Refused,
    /// The node has not answered for [`PATIENCE`]
    Silent,
}

impl Demand {
    /// Records that a NodeSubnet has changed. Its agent may have withdrawn a part for which the controller asked.
    pub(crate) fn subnet_changed(&mut self) {
        self.lending.changed = true;
    }

    /// Handles the parts that nodes were asked to lend. A part that its node has withdrawn becomes a block of the
    /// borrower. If a part is refused, unanswered or no longer needed, the controller stops asking for it.
    pub(super) fn look_at_asks(
        &mut self,
        is_due: bool,
        cx: &mut Context,
        affected: &mut AffectedLoops,
    ) {
        let now = cx.now.mono;
        for (part, lender) in std::mem::take(&mut cx.allocations.lending.given_back) {
            self.lending.resting.insert(part, now + REST);
            affected.nodes.push(lender);
        }
        if !std::mem::take(&mut self.lending.changed) && !is_due {
            return;
        }
        self.lending.resting.retain(|_, until| *until > now);
        self.lending.silent.retain(|_, until| *until > now);
        let parts: Vec<Cidr> = cx.allocations.lending.asks.keys().copied().collect();
        for part in parts {
            let Some(ask) = cx.allocations.lending.asks.get(&part).cloned() else {
                continue;
            };
            match fate(&part, &ask, &self.waiting, cx) {
                Fate::Open => continue,
                Fate::Withdrawn => self.borrow(&part, &ask, cx, affected),
                Fate::Over => {}
                Fate::Refused => _ = self.lending.resting.insert(part, now + REST),
                Fate::Silent => _ = self.lending.silent.insert(ask.lender, now + REST),
            }
            cx.allocations.lending.asks.remove(&part);
            affected.nodes.push(ask.parent.node);
        }
    }

    /// Allocates a part as a block to the node that borrows it.
    fn borrow(&mut self, part: &Cidr, ask: &Ask, cx: &mut Context, affected: &mut AffectedLoops) {
        let (name, uid) = &ask.borrower;
        let Some(node) = cx.cache.nodes.get(name).filter(|node| node.uid == *uid) else {
            return;
        };
        let holder = cx.allocations.holders.intern(HolderUse::Blocks, name, uid);
        let holding = cx
            .allocations
            .ledger
            .record(holder, *part, HoldingState::InFlight);
        cx.allocations
            .begin_block(holding, *part, &ask.pool, node, cx.now);
        if let Some(entry) = cx.allocations.blocks.get_mut(part) {
            entry.parent = Some(ask.parent.clone());
        }
        affected.blocks.push(*part);
        affected.nodes.push(name.clone());
        let lender = &ask.parent.node;
        if self.recent.is_due(node, &ask.pool, BLOCK_BORROWED, cx.now) {
            let note = format!(
                "pool \"{}\" is exhausted: the node borrows parts of other nodes' blocks, first {part} of node {lender} (kubectl cadastre show node {name})",
                ask.pool
            );
            let about = Regarding::node(node);
            cx.reports
                .push(EventRecord::info(about, BLOCK_BORROWED, note));
        }
        if let Some(lender) = cx.cache.nodes.get(lender)
            && self.recent.is_due(lender, &ask.pool, BLOCK_LENT, cx.now)
        {
            let note = format!(
                "pool \"{}\" is exhausted: the node lends free parts of its blocks, first {part} of {} to node {name} (kubectl cadastre show node {})",
                ask.pool, ask.parent.cidr, lender.name
            );
            let about = Regarding::node(lender);
            cx.reports.push(EventRecord::info(about, BLOCK_LENT, note));
        }
    }

    /// Asks nodes for parts of their blocks, on behalf of waiting nodes.
    pub(super) fn ask_for_parts(&mut self, cx: &mut Context, affected: &mut AffectedLoops) {
        for (name, waits) in &self.waiting {
            let pool = cx.allocations.pools.get(name);
            let pool = pool.filter(|pool| pool.is_serving() && pool.terms.borrows);
            let Some(pool) = pool.filter(|_| !is_recalling(name, cx)) else {
                continue;
            };
            let mut waits: Vec<_> = waits
                .iter()
                .filter(|(_, wait)| wait.need <= NodeNeed::Reserve)
                .collect();
            waits.sort_by_key(|(_, wait)| (wait.need, wait.since));
            if waits.is_empty() {
                continue;
            }
            let families: Vec<Family> = pool.space.families().collect();
            let lenders = |family: &Family| (*family, self.lenders(pool, *family, cx));
            let mut lenders: BTreeMap<Family, _> = families.iter().map(lenders).collect();
            let mut asks = Vec::new();
            for (node, wait) in waits {
                let node = cx.cache.nodes.get(node).filter(|it| it.uid == wait.uid);
                let node = node.filter(|node| !node.deleting && pool.selects(node));
                if let Some(node) = node {
                    let parts = self.parts_for(node, pool, &asks, &mut lenders, cx);
                    asks.extend(parts.into_iter().map(|part| (node, part)));
                }
            }
            let asks = asks.into_iter().map(|(node, part)| {
                let ((lender, uid), borrower) = (part.node, (node.name.clone(), node.uid.clone()));
                let ask = Ask {
                    pool: name.clone(),
                    parent: Parent {
                        cidr: part.parent,
                        node: lender,
                    },
                    lender: uid,
                    borrower,
                    addresses: part.addresses,
                    since: cx.now.mono,
                };
                (part.cidr, ask)
            });
            for (part, ask) in asks.collect::<Vec<_>>() {
                affected.nodes.push(ask.parent.node.clone());
                cx.allocations.lending.asks.insert(part, ask);
            }
        }
    }

    /// Chooses parts for one waiting node. If the pool is dual-stack, the node borrows in all families in which it
    /// lacks addresses, or in none.
    fn parts_for(
        &self,
        node: &Node,
        pool: &PoolState,
        chosen: &[(&std::sync::Arc<Node>, Part<NodeKey>)],
        lenders: &mut BTreeMap<Family, Vec<Lender<NodeKey>>>,
        cx: &Context,
    ) -> Vec<Part<NodeKey>> {
        let report = report_of(node, cx.cache);
        let wanted = demand(report, &pool.name);
        let balance = node_balance(&pool.name, wanted, node, report, cx.allocations);
        let asks = cx.allocations.lending.asks.iter();
        let asks = asks.filter(|(_, ask)| ask.pool == pool.name);
        let room = MOST_ASKS.saturating_sub(asks.clone().count() + chosen.len());
        let mut parts = Vec::new();
        for (family, lenders) in lenders {
            let own = asks
                .clone()
                .filter(|(part, ask)| ask.borrower.1 == node.uid && part.family() == *family);
            let is_slow = |ask: &Ask| ask.since + SLOW <= cx.now.mono;
            let coming = own.clone().filter(|(_, ask)| !is_slow(ask));
            let coming: u64 = coming
                .map(|(_, ask)| ask.addresses)
                .fold(0, u64::saturating_add);
            let lacking = balance.lacking(*family);
            let blocks = balance.blocks_left(*family, pool);
            let most = blocks.saturating_sub(own.clone().count()).min(room);
            let is_resting = |part: &Cidr| {
                let mut resting = self.lending.resting.range(*part..);
                resting.next().is_some_and(|(it, _)| part.contains(it))
            };
            let more = choose(lenders, lacking.saturating_sub(coming), most, is_resting);
            if lacking > 0 && more.is_empty() && own.count() == 0 {
                return Vec::new();
            }
            parts.extend(more);
        }
        parts
    }

    /// Returns the nodes that can lend parts of their blocks of one family of a pool.
    fn lenders(&self, pool: &PoolState, family: Family, cx: &Context) -> Vec<Lender<NodeKey>> {
        let mut blocks: BTreeMap<NodeKey, Vec<&BlockEntry>> = BTreeMap::new();
        let all = cx.allocations.blocks.iter();
        for entry in all.filter(|it| it.pool == pool.name && it.cidr.family() == family) {
            if may_lend(entry, cx) {
                let owner = (entry.owner.name.clone(), entry.owner.uid.clone());
                blocks.entry(owner).or_default().push(entry);
            }
        }
        let waits = self.waiting.get(&pool.name);
        let lenders = blocks.into_iter().filter_map(|(owner, blocks)| {
            let is_waiting = waits.is_some_and(|waits| waits.contains_key(&owner.0));
            let is_silent = self.lending.silent.contains_key(&owner.1);
            let node = cx
                .cache
                .nodes
                .get(&owner.0)
                .filter(|it| it.uid == owner.1)?;
            let node = node.as_ref();
            let can = !is_waiting && !is_silent && !node.deleting;
            can.then(|| lender(owner, node, &blocks, pool, family, cx))?
        });
        lenders.collect()
    }
}

/// Returns whether parts of a block may be lent. This excludes blocks of claims, borrowed blocks, recalled blocks, and
/// blocks that the node does not hold.
fn may_lend(entry: &BlockEntry, cx: &Context) -> bool {
    let is_plain = cx.allocations.claims.of(&entry.cidr).is_none() && entry.parent.is_none();
    is_plain && entry.is_held() && entry.recall.is_none()
}

/// Returns what a node can lend. Returns `None` if its agent reports nothing, or too many of its ranges are withdrawn
/// already.
fn lender(
    owner: NodeKey,
    node: &Node,
    blocks: &[&BlockEntry],
    pool: &PoolState,
    family: Family,
    cx: &Context,
) -> Option<Lender<NodeKey>> {
    let report = report_of(node, cx.cache)?;
    let wanted = demand(Some(report), &pool.name);
    let balance = node_balance(&pool.name, wanted, node, Some(report), cx.allocations);
    let spare = balance.spare(family, pool);
    let subnet = cx.cache.subnets.get(&node.name);
    let spec = subnet.and_then(|it| it.spec.as_ref().ok())?;
    let asks = cx.allocations.lending.asks.iter();
    let asks = asks.filter(|(_, ask)| ask.lender == node.uid);
    // The agent may not have answered requests for some of these parts yet. Until it does, its report counts the
    // addresses of these parts as free.
    let is_unseen =
        |part: &Cidr| !report.withdrawn.contains(part) && !report.withdrawing.contains(part);
    let unseen = asks.clone().filter(|(part, _)| is_unseen(part));
    let unseen = unseen.map(|(_, ask)| ask.addresses);
    let of_spec = spec.withdraw.iter().chain(&spec.returned);
    let of_spec = of_spec.filter_map(|text| Cidr::parse_strict(text).ok());
    let withdrawn = report.withdrawn.iter().copied().chain(of_spec);
    let withdrawn: Vec<Cidr> = withdrawn
        .chain(asks.clone().map(|(part, _)| *part))
        .collect();
    if withdrawn.len() > MOST_LENT {
        return None;
    }
    let with_free = blocks.iter().filter(|entry| {
        let reported = entry.report_for(Some(report));
        reported.is_some_and(|it| !it.released && it.free > 0)
    });
    let blocks = with_free.map(|entry| LenderBlock {
        cidr: entry.cidr,
        taken: taken(&entry.cidr, node, &withdrawn, cx),
        never: [
            never_assigned(entry.cidr, false, &pool.node_view),
            never_assigned(entry.cidr, true, &pool.node_view),
            pool.reserved.clone(),
            pool.on_request.clone(),
        ]
        .concat(),
    });
    Some(Lender {
        node: owner,
        spare: spare.saturating_sub(unseen.fold(0, u64::saturating_add)),
        asks: asks.count(),
        blocks: blocks.collect(),
    })
}

/// Returns the ranges in a block that the node cannot lend: addresses that pods report, other holdings inside the
/// block, and withdrawn ranges.
fn taken(block: &Cidr, node: &Node, withdrawn: &[Cidr], cx: &Context) -> Vec<IpRange> {
    let pods = cx.cache.pods.all_in_range_of(&node.name, block);
    let nested = cx.allocations.ledger.overlapping(block);
    let nested = nested.map(|(_, it)| it.cidr).filter(|it| it != block);
    let withdrawn = withdrawn.iter().copied();
    let withdrawn = withdrawn.filter(|it| block.contains(it));
    let ranges = nested.chain(withdrawn).map(IpRange::from);
    pods.map(IpRange::from).chain(ranges).collect()
}

/// Returns whether an empty block of the pool was recalled recently for a waiting node.
fn is_recalling(pool: &PoolName, cx: &Context) -> bool {
    let mut blocks = cx.allocations.blocks.iter();
    blocks.any(|entry| {
        let is_recent = |at: Duration| cx.now.mono < at + RECALLING;
        entry.pool == *pool
            && entry.recall == Some(Recall::IfEmpty)
            && entry.recalled_at.is_some_and(is_recent)
    })
}

fn fate(part: &Cidr, ask: &Ask, waiting: &Waits, cx: &Context) -> Fate {
    let waits = waiting
        .get(&ask.pool)
        .and_then(|it| it.get(&ask.borrower.0));
    // A node that has no pods of the pool does not borrow.
    let is_needed =
        waits.is_some_and(|it| it.uid == ask.borrower.1 && it.need <= NodeNeed::Reserve);
    let pool = cx.allocations.pools.get(&ask.pool);
    let is_lending = pool.is_some_and(|pool| pool.is_serving() && pool.terms.borrows);
    let parent = cx.allocations.blocks.get(&ask.parent.cidr);
    let has_parent = parent.is_some_and(|it| it.owner.uid == ask.lender && may_lend(it, cx));
    let mut holdings = cx.allocations.ledger.overlapping(part);
    let is_used = holdings.any(|(_, it)| it.cidr != ask.parent.cidr)
        || cx.allocations.unadopted.any_in(part).is_some()
        || cx.cache.pods.any_in_free(part).is_some();
    let node = cx.cache.nodes.get(&ask.parent.node);
    let Some(node) = node.filter(|it| it.uid == ask.lender) else {
        return Fate::Over;
    };
    if !is_needed || !is_lending || !has_parent || is_used {
        return Fate::Over;
    }
    if is_ready_to_lend(node, part, cx.cache) {
        return Fate::Withdrawn;
    }
    let age = cx.now.mono.saturating_sub(ask.since);
    let report: Option<&AgentReport> = report_of(node, cx.cache);
    match report {
        Some(report) if report.withdrawing.contains(part) => Fate::Refused,
        _ if age < PATIENCE => Fate::Open,
        _ => Fate::Silent,
    }
}

#[cfg(test)]
mod tests;
