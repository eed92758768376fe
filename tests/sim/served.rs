//! While a pool has free addresses for a node, the node waits no longer than a minute. This is checked throughout the
//! run, not only at the end.
//!
//! Every few seconds, the check looks in the API server's state for nodes that wait although the same addresses were
//! free for them all the time. One free address suffices, because pools also allocate blocks of one address. A range
//! counts as free only if that is certain: its quarantine is over, and every indeterminate write of it has been read.
//!
//! # When it is guaranteed
//! One leader must be up, must allocate, and must have received answers and watch events during the whole minute. This
//! is the case after the faults, and throughout in runs without faults. After a gap (a time without a leader), nodes
//! may wait longer, because the new leader lets agents publish first. Nothing is guaranteed in runs with a restore,
//! with a foreign allocator, which pauses pools, or with users who undo writes.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_api::AllocationMode;
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::{ObjectUid, PoolName};
use cadastre_controller::cluster::objects::Node;
use cadastre_core::Cidr;

use super::checks::{Verdict, wrong};
use super::clock::{SECOND, Time};
use super::pool_model::PoolModel;
use super::record_checks::records;
use super::run::{Due, Sim};

/// The interval between two checks, in virtual time.
pub const LOOK: Time = 5 * SECOND;

/// The maximum time that a node may wait while something is free for it.
const PATIENCE: Time = 60 * SECOND;

/// The additional time that a node may wait under a leader that lets agents publish first.
const LISTENING: Time = 50 * SECOND;

/// After a node's deletion, its ranges do not count as free for this long. This covers the longest quarantine, and time
/// for the node's last pods to end.
const DOUBT: Time = 180 * SECOND;

/// For each waiting node (UID) and pool: since when the node waits, and what has been free since then in each family.
#[derive(Default)]
pub struct Served {
    waits: BTreeMap<(ObjectUid, PoolName), Wait>,
}

struct Wait {
    since: Time,
    free: Vec<BTreeSet<Cidr>>,
}

impl Sim {
    /// Checks that no node waits too long.
    pub fn look_who_waits(&mut self) -> Verdict {
        self.after(LOOK, Due::CheckServed);
        let Some(patience) = self.patience() else {
            self.served = Served::default();
            return Ok(());
        };
        let mut before = std::mem::take(&mut self.served.waits);
        let doubted = self.doubted();
        for (node, pool, free) in self.who_could_be_served(&doubted) {
            let key = (node.uid.clone(), pool.clone());
            let still = before.remove(&key).map(|wait| Wait {
                since: wait.since,
                free: wait.free.iter().zip(&free).map(|(a, b)| a & b).collect(),
            });
            let still = still.filter(|it| it.free.iter().all(|free| !free.is_empty()));
            let since = self.now;
            let wait = still.unwrap_or(Wait { since, free });
            if self.now >= wait.since + patience {
                let free = wait.free.iter().filter_map(|free| free.first());
                let free: Vec<String> = free.map(ToString::to_string).collect();
                let text = format!(
                    "{} ({}) waits for pool {pool} for {} s, and {} is free all the time",
                    node.name,
                    node.uid,
                    (self.now - wait.since) / SECOND,
                    free.join(" and ")
                );
                return wrong("served in time", text, [&*node.name, &*pool]);
            }
            self.served.waits.insert(key, wait);
        }
        Ok(())
    }

    /// Returns how long a node may wait while something is free for it, or `None` if nothing is guaranteed now.
    fn patience(&self) -> Option<Time> {
        let plan = &self.plan;
        let undone = plan.tampering || plan.tampering_blocks || plan.foreign_allocator;
        let is_mild = plan.is_mild() && plan.persistent_fault.is_none();
        if undone || plan.restore.is_some() || (self.has_faults && !is_mild) {
            return None;
        }
        let mut leaders = self.processes.iter().filter_map(|process| {
            let run = process.run.as_ref()?;
            let Some(Leadership::Leading(term)) = &run.observed else {
                return None;
            };
            let is_able = run.controller.is_allocating() && run.stopping.is_none();
            is_able.then_some((process, run, term))
        });
        let (process, run, term) = leaders.next()?;
        let is_awake = process.paused_until.max(process.cut_until) <= self.now;
        if leaders.next().is_some() || !is_awake || !run.all_watches_deliver(self.now) {
            return None;
        }
        let listening = if term.follows_a_gap() { LISTENING } else { 0 };
        Some(PATIENCE + listening)
    }

    /// Returns ranges that do not count as free, because perhaps the controller does not know yet that they are free.
    fn doubted(&self) -> Vec<Cidr> {
        let mut doubted = Vec::new();
        for dead in &self.checks.dead_nodes {
            if dead.died + DOUBT > self.now {
                doubted.extend(&dead.ranges);
            }
        }
        for subnet in self.api.subnets.live.values() {
            // Nobody gets a range that an agent uses, even if the controller cannot adopt it.
            let used = subnet.report.iter().flat_map(|report| &report.blocks);
            doubted.extend(used.filter(|it| it.busy() > 0).map(|it| it.cidr));
            let Ok(spec) = &subnet.spec else { continue };
            doubted.extend(records(spec).into_iter().map(|record| record.range));
        }
        for process in &self.processes {
            let Some(run) = &process.run else { continue };
            for (uid, ranges) in run.received.decided.keys() {
                let died = self.checks.blocks.died.get(uid);
                if died.is_some_and(|died| died + DOUBT > self.now) {
                    doubted.extend(ranges);
                }
            }
        }
        doubted
    }

    /// Nodes that lack a range of a pool, each with the pool, and with the free ranges in each of the pool's families.
    fn who_could_be_served(&self, doubted: &[Cidr]) -> Vec<(Node, PoolName, Vec<BTreeSet<Cidr>>)> {
        let mut found = Vec::new();
        let serving = self.serving();
        // What is free in pools of blocks does not depend on the node, and takes long to find.
        let mut free: BTreeMap<PoolName, Vec<BTreeSet<Cidr>>> = BTreeMap::new();
        for node in self.api.nodes.live.values().filter(|node| !node.deleting) {
            for model in serving.iter().filter(|it| it.matches(&node.labels)) {
                let lacks = match model.allocation_mode {
                    AllocationMode::NodeCIDR => {
                        node.is_empty() && self.may_allocate(model, node, &serving)
                    }
                    AllocationMode::Blocks => self.lacks_of(node, model),
                };
                if !lacks {
                    continue;
                }
                let of_node = || self.free_of(model, node, doubted);
                let free = match model.allocation_mode {
                    AllocationMode::NodeCIDR => of_node(),
                    AllocationMode::Blocks => free
                        .entry(model.name.clone())
                        .or_insert_with(of_node)
                        .clone(),
                };
                if free.iter().all(|free| !free.is_empty()) {
                    found.push((Node::clone(node), model.name.clone(), free));
                }
            }
        }
        found
    }

    /// What a pool could allocate to the node in each family: whole podCIDRs, or single addresses if it is a pool of
    /// blocks.
    pub fn free_of(&self, model: &PoolModel, node: &Node, doubted: &[Cidr]) -> Vec<BTreeSet<Cidr>> {
        let mut held = self.held();
        held.extend(doubted);
        let families = model.each_family().map(|family| {
            let pieces = match model.allocation_mode {
                AllocationMode::NodeCIDR => model.pieces(family, node),
                AllocationMode::Blocks => model.blocks_of_length(family, family.bits()),
            };
            let free = |piece: &Cidr| self.is_free(model, piece, &held);
            pieces.into_iter().filter(free).collect()
        });
        families.collect()
    }

    /// Whether the node's blocks of a pool have fewer addresses than the node's agent demands, and `maxBlocksPerNode`
    /// allows another block.
    fn lacks_of(&self, node: &Node, model: &PoolModel) -> bool {
        let subnet = self.api.subnets.get(&node.name);
        let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
        let is_current = spec.is_some_and(|it| it.node_uid.as_deref() == Some(&*node.uid));
        let report = self.report_of(node).filter(|_| is_current);
        report.is_some_and(|report| {
            // The status may lack a block that was just listed, so such a block counts as large enough.
            let unreported = u64::MAX / 64;
            let own = self.pool_use(node, model, report, unreported);
            own.lacks_block(model)
        })
    }
}
