//! Adds the leader's state to the [`ControllerView`], from which metrics and readiness are computed.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use super::{Leader, waiting_by_pool};
use crate::Now;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::PoolName;
use crate::cluster::request::ObjectKind;
use crate::failing_calls::ObjectCall;
use crate::figures::figures;
use crate::purpose::Step;
use crate::totals::totals;
use crate::view::ControllerView;
use cadastre_core::Family;

impl Leader {
    pub(crate) fn describe(&mut self, view: &mut ControllerView, cache: &ClusterCache, now: Now) {
        view.allocating = self.allocating;
        if !self.allocating {
            view.fencing = Some(self.loops.fence.progress(cache));
            return;
        }
        if !self.loops.fence.is_done() {
            view.fencing = Some(self.loops.fence.progress(cache));
            *view.waiting.entry("fence").or_default() += self.loops.fence.left().0;
        }
        view.overlaps = self.allocations.overlaps();
        view.too_wide = self.allocations.too_wide().count();
        view.indeterminate = self.allocations.indeterminate();
        for state in self.allocations.pools.iter() {
            for family in state.space.families() {
                view.pools.push((
                    state.name.clone(),
                    family,
                    figures(state, family, &self.allocations),
                ));
            }
        }
        for reason in self.loops.podcidrs.waiting() {
            *view.waiting.entry(reason.label()).or_default() += 1;
        }
        for (_, nodes) in self.loops.demand.waiting() {
            *view.waiting.entry("pool_full").or_default() += nodes;
        }
        self.describe_refusals(view, now);
        view.exhausted_nodes = self.loops.exhaustion.count();
        view.pool_waiting = waiting_by_pool(&self.loops.podcidrs, &self.loops.demand);
        let since = [
            self.loops.podcidrs.waiting_since(),
            self.loops.demand.waiting_since(),
        ];
        let since = since.into_iter().flatten().min();
        let wait = since.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        view.oldest_wait = view.oldest_wait.max(wait);
        view.exhausts = exhausts(cache);
        for claim in cache.claims.iter() {
            *view.claims.entry(claim.state()).or_default() += 1;
        }
        self.describe_blocks(view, cache, now);
        view.trouble = self.loops.default_pool.trouble().cloned();
        let loops = self.loops.all();
        view.loops = loops.map(|(name, it)| (name, it.load())).collect();
    }

    /// Counts the requests that keep failing. Nodes whose podCIDRs or new blocks cannot be written are also counted as
    /// waiting.
    fn describe_refusals(&mut self, view: &mut ControllerView, now: Now) {
        view.rejected_writes = self.allocations.refusals.count(now.mono);
        *view.rejected_writes.entry(ObjectKind::Node).or_default() += self.loops.fence.left().1;
        let mut nodes = BTreeSet::new();
        for (call, _, since) in self.allocations.refusals.persistent() {
            let node = match call {
                ObjectCall::AssignPodCidrs(uid) => Some(uid),
                ObjectCall::WriteBlock(cidr) => {
                    let entry = self.allocations.blocks.get(cidr);
                    let created =
                        entry.filter(|it| it.step == Step::Create && !it.owner.quarantined);
                    created.map(|it| &it.owner.uid)
                }
                _ => None,
            };
            let Some(uid) = node else { continue };
            nodes.insert(uid);
            view.oldest_wait = view.oldest_wait.max(now.mono.saturating_sub(since));
        }
        view.waiting.insert("write_rejected", nodes.len());
    }

    fn describe_blocks(&self, view: &mut ControllerView, cache: &ClusterCache, now: Now) {
        let all = totals(cache, &self.allocations);
        let addresses = all.into_iter().map(|((pool, family), t)| (pool, family, t));
        view.addresses = addresses.collect();
        for entry in self.allocations.blocks.iter() {
            let overdue = entry.quarantined_until.filter(|until| *until < now.mono);
            view.oldest_rest = view
                .oldest_rest
                .max(overdue.map_or(Duration::ZERO, |until| now.mono.saturating_sub(until)));
            let state = match (entry.owner.quarantined, entry.confirmed, entry.recall) {
                (true, ..) if overdue.is_some() => "overdue",
                (true, ..) => "quarantined",
                (_, false, _) => "provisional",
                (_, _, Some(_)) => "recalled",
                _ => "allocated",
            };
            *view.blocks.entry(state).or_default() += 1;
        }
        let (candidates, oldest) = self.loops.leaks.candidates();
        let age = oldest.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        let asked = self
            .allocations
            .leak_candidates
            .values()
            .map(BTreeSet::len)
            .sum();
        view.leaks = (candidates, age, asked);
        let reports = cache.subnets.iter().filter_map(|it| it.report.as_ref());
        view.refused = reports.map(|report| report.refusals).sum();
    }
}

/// Returns the forecasts that the statuses of pools contain.
fn exhausts(cache: &ClusterCache) -> Vec<(PoolName, Family, Timestamp)> {
    let mut all = Vec::new();
    for pool in cache.pools.iter() {
        let Some(status) = &pool.status else { continue };
        for (family, side) in [(Family::V4, &status.ipv4), (Family::V6, &status.ipv6)] {
            let at = side.as_ref().and_then(|side| side.exhausts_at.as_ref());
            all.extend(at.map(|at| (pool.name.clone(), family, at.0)));
        }
    }
    all
}
