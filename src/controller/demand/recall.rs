//! Which blocks are asked back, and which to be emptied.
//!
//! # Guarantees
//! - A block is asked back only where the agent's own word decides whether it goes: from a node that
//!   the pool no longer serves, one that has been empty for the pool's idle time, or an empty one of a
//!   rich node while others wait. The last block of a pool stays with a node that it serves.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::Demand;
use crate::api::Recall;
use crate::cluster::seen::{AgentReport, Node, Text};
use crate::controller::Context;
use crate::controller::account::{demand, donor, must_leave, worth};
use crate::controller::blocks::{Entry, Noted};
use crate::ipam::{Cidr, Family};

impl Demand {
    /// Which blocks of a node are asked back. Returns whether its list changes by it.
    pub(super) fn settle_up(
        &mut self,
        node: &Node,
        report: Option<&AgentReport>,
        cx: &mut Context,
    ) -> bool {
        let now = cx.now.mono;
        let none = BTreeSet::new();
        let entries: Vec<Entry> = cx
            .registry
            .blocks
            .of(&node.uid)
            .filter(|entry| entry.confirmed && !entry.is_leaving())
            .cloned()
            .collect();
        let subnet = cx.world.subnets.get(&node.name);
        let drained = subnet.map_or(&none, |subnet| &subnet.requests.drain);
        let mut changed = false;
        let mut spared: BTreeMap<(Text, Family), (u64, usize)> = BTreeMap::new();
        for entry in &entries {
            if entry.recall.is_none() {
                let key = (entry.pool.clone(), entry.cidr.family());
                let sum = spared.entry(key).or_default();
                sum.0 += worth(entry, report, cx.registry);
                sum.1 += 1;
            }
        }
        for entry in &entries {
            let pool = cx.registry.pools.get(&entry.pool);
            let word = entry.word(report);
            let is_empty = word.is_some_and(|word| word.used + word.cooling == 0);
            let in_use = word.is_some_and(|word| word.used + word.cooling > 0);
            let mut recall = entry.recall;
            let mut idle_since = entry.idle_since;
            if must_leave(entry, node, pool) || drained.contains(&entry.cidr) {
                recall = Some(Recall::Drain);
            } else if entry.recall == Some(Recall::Drain) || in_use {
                recall = None;
            }
            if recall.is_none() && is_empty {
                let since = *idle_since.get_or_insert(now);
                let idle = pool.map_or(Duration::ZERO, |pool| pool.terms.idle);
                let key = (entry.pool.clone(), entry.cidr.family());
                let sum = spared.entry(key).or_default();
                let own = worth(entry, report, cx.registry);
                let wanted = demand(report, &entry.pool);
                if sum.1 > 1 && sum.0.saturating_sub(own) >= wanted {
                    if since + idle <= now {
                        recall = Some(Recall::IfEmpty);
                        sum.0 -= own;
                        sum.1 -= 1;
                    } else {
                        self.more.add_at(node.name.clone(), since + idle);
                    }
                }
            } else if !is_empty {
                idle_since = None;
            }
            if let Some(known) = cx.registry.blocks.get_mut(&entry.cidr) {
                changed |= known.recall != recall;
                known.recall = recall;
                known.idle_since = idle_since;
            }
        }
        changed
    }

    /// Asks empty blocks back from the richest nodes, as many as those that wait need.
    pub(super) fn recall_for_waiting(&mut self, cx: &mut Context, noted: &mut Noted) {
        let pools: Vec<Text> = self
            .waiting
            .iter()
            .filter(|(_, waits)| !waits.is_empty())
            .map(|(pool, _)| pool.clone())
            .collect();
        for pool in pools {
            let Some(waits) = self.waiting.get(&pool) else {
                continue;
            };
            // Who has none at all comes before who wants more, also at the cost of those.
            let without = waits.values().filter(|wait| !wait.has_some).count();
            let for_first = without > 0;
            let gives = |entry: &&Entry| {
                let waits = waits.get(&entry.owner.name);
                entry.pool == pool
                    && entry.confirmed
                    && !entry.owner.resting
                    && waits.is_none_or(|wait| for_first && wait.has_some)
            };
            let owners: BTreeSet<(Text, Text)> = cx
                .registry
                .blocks
                .iter()
                .filter(gives)
                .map(|entry| (entry.owner.name.clone(), entry.owner.uid.clone()))
                .collect();
            let asked = |entry: &&Entry| {
                entry.pool == pool && entry.recall == Some(Recall::IfEmpty) && !entry.owner.resting
            };
            let asked = cx.registry.blocks.iter().filter(asked).count();
            let wanted = if for_first { without } else { waits.len() };
            let mut donors: BinaryHeap<(u64, Cidr, Text, Text)> = owners
                .iter()
                .filter_map(|(name, uid)| donor(&pool, name, uid, for_first, cx))
                .collect();
            for _ in asked..wanted {
                let Some((_, cidr, name, uid)) = donors.pop() else {
                    break;
                };
                if let Some(entry) = cx.registry.blocks.get_mut(&cidr) {
                    entry.recall = Some(Recall::IfEmpty);
                    noted.nodes.push(name.clone());
                }
                donors.extend(donor(&pool, &name, &uid, for_first, cx));
            }
        }
    }
}
