//! What the leader knows of itself, for metrics and readiness.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use super::{Leader, waiting_by_pool};
use crate::cluster::seen::Text;
use crate::cluster::world::World;
use crate::controller::Now;
use crate::controller::figures::figures;
use crate::controller::machine::View;
use crate::controller::totals::totals;
use crate::ipam::Family;

impl Leader {
    /// What it knows of itself.
    pub(in crate::controller) fn describe(&mut self, view: &mut View, world: &World, now: Now) {
        view.dealing = self.dealing;
        if !self.dealing {
            view.fencing = Some(self.fence.progress(world));
            return;
        }
        if !self.fence.is_done() {
            view.fencing = Some(self.fence.progress(world));
            *view.waiting.entry("fence").or_default() += self.fence.left();
        }
        view.overlaps = self.registry.overlaps();
        view.unclear = self.registry.unclear();
        for state in self.registry.pools.iter() {
            for family in state.space.families() {
                view.pools.push((
                    state.name.clone(),
                    family,
                    figures(state, family, &self.registry),
                ));
            }
        }
        for reason in self.podcidrs.waiting() {
            *view.waiting.entry(reason.label()).or_default() += 1;
        }
        for (_, nodes) in self.demand.waiting() {
            *view.waiting.entry("pool_full").or_default() += nodes;
        }
        view.pool_waiting = waiting_by_pool(&self.podcidrs, &self.demand);
        let since = [self.podcidrs.waiting_since(), self.demand.waiting_since()];
        let since = since.into_iter().flatten().min();
        view.oldest_wait = since.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        view.exhausts = exhausts(world);
        self.describe_blocks(view, world, now);
        view.trouble = self.default_pool.trouble().cloned();
        view.queues = vec![
            (
                "podcidr",
                self.podcidrs.queue.depth(),
                self.podcidrs.queue.retries(),
            ),
            ("demand", self.demand.depth().0, self.demand.depth().1),
            (
                "block",
                self.blocks.urgent.depth() + self.blocks.queue.depth(),
                self.blocks.urgent.retries() + self.blocks.queue.retries(),
            ),
            (
                "subnet",
                self.subnets.urgent.depth() + self.subnets.queue.depth(),
                self.subnets.urgent.retries() + self.subnets.queue.retries(),
            ),
            (
                "quarantine",
                self.quarantine.queue.depth(),
                self.quarantine.queue.retries(),
            ),
            ("pool", self.pools.queue.depth(), self.pools.queue.retries()),
        ];
    }

    fn describe_blocks(&self, view: &mut View, world: &World, now: Now) {
        let all = totals(world, &self.registry);
        let addresses = all.into_iter().map(|((pool, family), t)| (pool, family, t));
        view.addresses = addresses.collect();
        for entry in self.registry.blocks.iter() {
            let overdue = entry.rests_until.filter(|until| *until < now.mono);
            view.oldest_rest = view
                .oldest_rest
                .max(overdue.map_or(Duration::ZERO, |until| now.mono.saturating_sub(until)));
            let state = match (entry.owner.resting, entry.confirmed, entry.recall) {
                (true, ..) if overdue.is_some() => "overdue",
                (true, ..) => "quarantined",
                (_, false, _) => "provisional",
                (_, _, Some(_)) => "recalled",
                _ => "held",
            };
            *view.blocks.entry(state).or_default() += 1;
        }
        let (candidates, oldest) = self.leaks.candidates();
        let age = oldest.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        let asked = self.registry.suspects.values().map(BTreeSet::len).sum();
        view.leaks = (candidates, age, asked);
        let reports = world.subnets.iter().filter_map(|it| it.report.as_ref());
        view.refused = reports.map(|report| report.refusals).sum();
    }
}

/// What the statuses of pools say of their end.
fn exhausts(world: &World) -> Vec<(Text, Family, Timestamp)> {
    let mut all = Vec::new();
    for pool in world.pools.iter() {
        let Some(status) = &pool.status else { continue };
        for (family, side) in [(Family::V4, &status.ipv4), (Family::V6, &status.ipv6)] {
            let at = side.as_ref().and_then(|side| side.exhausts_at.as_ref());
            all.extend(at.map(|at| (pool.name.clone(), family, at.0)));
        }
    }
    all
}
