//! What a node has, wants and can spare of a pool, and how much it needs what it wants.
//!
//! Counted in addresses of each family, by the agent's word where there is one and by the size of the
//! block where there is none yet. Pure functions of what is held and reported.

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

/// How much a node needs what it lacks of a pool; the most pressing first.
///
/// Blocks go from those who need them less to those who need them more, never between equals: so none
/// goes to and fro.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    /// It has none, and asks: an agent does that only while a pod waits.
    First,
    /// It has some, and pods wait for more.
    Pods,
    /// It has pods, and fewer addresses in reserve than it should have.
    Reserve,
    /// It uses nothing of the pool: a block on sight, or a reserve for pods that may come.
    Unused,
}

/// What a node has and wants of one pool.
pub(super) struct Account {
    /// Addresses of each family that it has or is getting
    capacity: Dual<u64>,
    /// Of them in use or cooling
    in_use: Dual<u64>,
    /// Blocks of each family, likewise
    count: Dual<usize>,
    wanted: u64,
    /// What of that its agent asks for
    asked: u64,
}

impl Account {
    /// Addresses that are lacking, of the family that lacks most.
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

    /// How much it needs what is missing.
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

/// How many addresses of each family the node wants of a pool, by its agent's word.
pub(super) fn demand(report: Option<&AgentReport>, pool: &Text) -> u64 {
    let demands = report.into_iter().flat_map(|report| &report.demand);
    let mut of_pool = demands.filter(|(name, _)| name == pool);
    of_pool.next().map_or(0, |(_, demand)| *demand)
}

/// Addresses that the node can use of a block, by its agent's word where there is one.
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

/// Adds addresses: two blocks of IPv6 may have more than can be counted, and that many are enough for anybody.
pub(super) fn add(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more);
}

/// How many addresses of a block its agent will not give: the network, gateway and broadcast address, where the
/// pool names no gateway of its own. Who counts them gives small blocks one round after the other.
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

/// What the node has of a pool.
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

/// Whether a block has to go because its pool no longer gives it to that node.
pub fn must_leave(entry: &Entry, node: &Node, pool: Option<&PoolState>) -> bool {
    let Some(pool) = pool else { return true };
    match pool.verdict {
        // What it says cannot be used, so what there is stays as it is.
        Verdict::Invalid(_) => false,
        Verdict::Terminating => true,
        _ => !pool.selects(node) || !pool.space.covers(&entry.cidr),
    }
}

/// Since when a node has blocks of a pool and uses none of them, by its agent's word. `None` also where
/// it wants more than a reserve: its pods are about to use them.
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

/// The block that a node can best do without for one with that need, while it keeps others; with how
/// many free addresses the node has, and whose it is.
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
    // Addresses in all and in use, and blocks, of each family.
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
