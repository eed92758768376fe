//! The pool loop: it maintains the finalizer, the conditions and the counts of every IPPool.
//!
//! A pool allocates only once it has its finalizer. The finalizer is removed only if the pool has no blocks any more,
//! and another pool that keeps its finalizer covers each range of the pool that is not free (see [`may_go`]). Counts
//! are computed from the ledger each time. A changed status is written, but at most once in [`STATUS_PAUSE`] per pool.
//! A changed condition causes an event. A restart of the controller causes no event.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::conditions::{PoolCounts, problem_types, status};
use super::failing_calls::ObjectCall;
use super::figures::may_go;
use super::in_flight::InFlight;
use super::pools::{PoolPhase, PoolState};
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, Regarding};
use super::totals::{Totals, totals};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::Pool;
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind, RequestOutcome};
use cadastre_api::{FINALIZER, IPPoolStatus};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Dual, Family};

/// Shortest interval between two status writes of a pool.
pub(crate) const STATUS_PAUSE: Duration = Duration::from_secs(5);

/// Shortest interval between two checks of the counts of all pools.
const COUNT_PAUSE: Duration = Duration::from_secs(1);

/// The queue of the pool loop, and the times at which counts were last computed and statuses last written.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolLoop {
    /// Names of pools whose finalizers or status may need a write
    pub queue: Queue<PoolName>,
    requests: InFlight<PoolName>,
    /// How many nodes wait for each pool
    pub waiting: BTreeMap<PoolName, i64>,
    /// Whether any fact that pool statuses report has changed since the loop last queued all pools
    dirty: bool,
    counted_at: Option<Duration>,
    written_at: BTreeMap<PoolName, Duration>,
    /// Numbers of addresses by pool and family, as last counted
    totals: BTreeMap<(PoolName, Family), Totals>,
    totals_at: Option<Duration>,
    /// Whether any fact that pool statuses report has changed since `totals` was counted
    outdated: bool,
    /// The last status and reason of each condition, by pool UID and type of the condition. An event reports each
    /// change
    reported: BTreeMap<(ObjectUid, &'static str), (String, String)>,
}

impl Loop for PoolLoop {
    fn load(&self) -> Load {
        let counted_at = self.counted_at.map(|at| at + COUNT_PAUSE);
        let count = self.dirty.then(|| counted_at.unwrap_or_default());
        let totals = self.outdated.then(|| self.totals_due());
        self.queue.load().or_at(count).or_at(totals)
    }

    /// Returns the next request for a pool: a read, the removal of a finalizer, or a write of the status.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        self.count(cx);
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        if let Purpose::PoolFinalizers { name } | Purpose::PoolStatus { name } = answer.purpose {
            self.requests.answered(name, answer);
            self.queue.add(name.clone());
            // The status was not written, so the next write need not wait for the pause between two status writes.
            if !matches!(answer.outcome, RequestOutcome::Pool(_)) {
                self.written_at.remove(name);
            }
        }
        AffectedLoops::default()
    }
}

impl PoolLoop {
    /// Records that a fact that pool statuses report has changed. The loop then checks all pools.
    pub(crate) fn mark(&mut self) {
        self.dirty = true;
    }

    /// Returns whether the loop has work now, for example a status write.
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        let load = self.load();
        load.ready > 0 || load.next_at.is_some_and(|at| at <= now)
    }

    fn totals_due(&self) -> Duration {
        self.totals_at
            .map_or(Duration::ZERO, |at| at + STATUS_PAUSE)
    }

    /// Returns the write that adds the finalizer to a pool. The pool allocates only once it has the finalizer.
    pub(crate) fn next_finalizer(&mut self, cx: &Context) -> Option<(ApiRequest, Purpose)> {
        let may_set = |name: &PoolName| {
            let call = ObjectCall::SetPoolFinalizers(name.clone());
            !self.requests.is_open(name) && cx.paused(&call).is_none()
        };
        let starting =
            |state: &&PoolState| state.phase == PoolPhase::Starting && may_set(&state.name);
        let state = cx.allocations.pools.iter().find(starting)?;
        let pool = cx.cache.pools.get(&state.name)?;
        let mut finalizers = pool.finalizers.clone();
        finalizers.push(FINALIZER.to_owned());
        Some(self.set_finalizers(pool, finalizers))
    }

    /// Queues all pools if something has changed, but at most once in [`COUNT_PAUSE`]. Before that, counts the
    /// addresses of all pools, but at most once in [`STATUS_PAUSE`].
    fn count(&mut self, cx: &Context) {
        let now = cx.now.mono;
        let to_count = self.dirty && self.counted_at.is_none_or(|at| at + COUNT_PAUSE <= now);
        self.outdated |= to_count;
        let totals_due = self.outdated && self.totals_due() <= now;
        if !to_count && !totals_due {
            return;
        }
        self.dirty = false;
        self.counted_at = Some(now);
        if totals_due {
            self.outdated = false;
            self.totals_at = Some(now);
            self.totals = totals(cx.cache, cx.allocations);
        }
        for pool in cx.cache.pools.iter() {
            self.queue.add(pool.name.clone());
        }
        self.forget_gone(cx);
    }

    fn look(&mut self, name: &PoolName, cx: &mut Context) -> KeyDecision {
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        let (now, name) = (cx.now.mono, name.clone());
        if self.requests.is_to_read(&name) {
            if let Some(at) = cx.paused(&ObjectCall::ReadPool(name.clone())) {
                return KeyDecision::Later(at);
            }
            self.requests.send(name.clone());
            let request = ApiRequest::Read(ObjectKind::Pool, name.clone().into());
            return KeyDecision::Send(request, Purpose::PoolStatus { name });
        }
        let (Some(pool), Some(state)) =
            (cx.cache.pools.get(&name), cx.allocations.pools.get(&name))
        else {
            return KeyDecision::Done;
        };
        let ours = pool.finalizers.iter().any(|f| f == FINALIZER);
        let is_open = |other: &PoolState| {
            self.requests.is_open(&other.name) && !Mutation::PoolThatGoesKeepsRanges.is_on()
        };
        let may_go = || may_go(state, cx.allocations, is_open) && cx.allocations.intents.is_known();
        if let Some(at) = cx.paused(&ObjectCall::SetPoolFinalizers(name.clone())) {
            self.queue.add_at(name.clone(), at);
        } else if pool.deleting && ours && may_go() {
            let others = pool.finalizers.iter().filter(|f| *f != FINALIZER);
            let (request, purpose) = self.set_finalizers(pool, others.cloned().collect());
            return KeyDecision::Send(request, purpose);
        } else if pool.deleting && ours && self.requests.is_any_sent() {
            // Perhaps the removal has to wait only for a request in flight for another pool. The outcome of that
            // request decides whether the other pool keeps guarding the ranges. So this pool is checked again later.
            self.queue.add_at(name.clone(), now + COUNT_PAUSE);
        }
        let written = self.written_at.get(&name).map(|at| *at + STATUS_PAUSE);
        let may_write = cx.paused(&ObjectCall::SetPoolStatus(name.clone()));
        if let Some(at) = written.max(may_write).filter(|at| *at > now) {
            return KeyDecision::Later(at);
        }
        let of = |family| self.totals.get(&(name.clone(), family)).copied();
        let counts = PoolCounts {
            waiting: self.waiting.get(&name).copied().unwrap_or(0),
            selects_none: state.selects_none(cx.cache),
            totals: Dual::from_fn(|family| of(family).unwrap_or_default()),
        };
        let status = status(pool, state, counts, cx.allocations, cx.now);
        if pool.status.as_ref() == Some(&status) {
            return KeyDecision::Done;
        }
        self.report_changes(pool, &status, cx.reports);
        self.written_at.insert(name.clone(), now);
        self.requests.send(name.clone());
        let request = ApiRequest::SetPoolStatus(KnownObject::of(&**pool), status);
        KeyDecision::Send(request, Purpose::PoolStatus { name })
    }

    /// Records the conditions that an earlier leader wrote, so that they are not reported again.
    pub(crate) fn restore(&mut self, pools: impl Iterator<Item = impl AsRef<Pool>>) {
        for pool in pools {
            let pool = pool.as_ref();
            for condition in pool.status.iter().flat_map(|status| &status.conditions) {
                if let Some(kind) = problem_types().find(|it| it.name == condition.type_) {
                    let state = (condition.status.clone(), condition.reason.clone());
                    self.reported.insert((pool.uid.clone(), kind.name), state);
                }
            }
        }
    }

    fn set_finalizers(&mut self, pool: &Pool, finalizers: Vec<String>) -> (ApiRequest, Purpose) {
        let name = pool.name.clone();
        self.requests.send(name.clone());
        let request =
            ApiRequest::SetFinalizers(ObjectKind::Pool, KnownObject::of(pool), finalizers);
        (request, Purpose::PoolFinalizers { name })
    }

    fn forget_gone(&mut self, cx: &Context) {
        let pools = &cx.cache.pools;
        self.written_at.retain(|name, _| pools.get(name).is_some());
        let uids: BTreeSet<&ObjectUid> = pools.iter().map(|pool| &pool.uid).collect();
        self.reported.retain(|(uid, _), _| uids.contains(uid));
    }

    fn report_changes(
        &mut self,
        pool: &Pool,
        status: &IPPoolStatus,
        reports: &mut Vec<EventRecord>,
    ) {
        for kind in problem_types() {
            let mut conditions = status.conditions.iter();
            let Some(condition) = conditions.find(|it| it.type_ == kind.name) else {
                continue;
            };
            let state = (condition.status.clone(), condition.reason.clone());
            let key = (pool.uid.clone(), kind.name);
            let before = self.reported.insert(key, state.clone());
            let is_true = condition.status == "True";
            let was_true = before.as_ref().is_some_and(|(status, _)| status == "True");
            if before.as_ref() == Some(&state) || !(is_true || was_true) {
                continue;
            }
            reports.push(EventRecord {
                about: Regarding::new(ObjectKind::Pool, pool.name.clone(), &pool.uid),
                warning: is_true,
                reason: kind.events[usize::from(!is_true)],
                note: condition.message.clone(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::cache::ClusterCache;
    use crate::cluster::objects::Node;
    use crate::fixtures::{
        NOW, at, cluster, cluster_of, in_step, node, node_with, pool, pool_with, rebuilt, subnet,
    };
    use cadastre_api::AllocationMode;
    use cadastre_daemon::watch::ObjectEvent;

    #[test]
    fn of_two_pools_over_a_range_in_use_only_one_loses_its_finalizer_at_a_time() {
        let pool = |name: &str, created: i64, deleting: bool| Pool {
            created,
            deleting,
            version: 1 + u64::from(deleting),
            ..pool_with(name, "10.0.0.0/24", |spec| {
                spec.allocation_mode = AllocationMode::NodeCIDR;
            })
        };
        let all = vec![pool("p", 0, true), pool("q", 1, false)];
        let mut cache = cluster(all, vec![node_with("n", &["10.0.0.0/28"])]);
        let mut allocations = rebuilt(&cache);
        allocations.intents = crate::intents::IntentBook::of_leader(true);
        let mut pools = PoolLoop::default();
        let mut released = |pools: &mut PoolLoop, cache: &ClusterCache, second| -> Vec<PoolName> {
            pools.mark();
            let now = at(second);
            allocations.pools.evaluate(cache, &[], now.mono);
            let mut names = Vec::new();
            in_step(cache, &mut allocations, now, |cx| {
                while let Some((request, _)) = pools.next(cx) {
                    match request {
                        ApiRequest::SetFinalizers(_, pool, _) => names.push((*pool.name).into()),
                        ApiRequest::SetPoolStatus(pool, _) => {
                            let name: PoolName = (*pool.name).into();
                            pools.requests.forget(&name);
                            pools.written_at.insert(name, now.mono);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            });
            names
        };
        assert_eq!(released(&mut pools, &cache, 0), ["p".into()], "q keeps it");
        let change = ObjectEvent::Applied(pool("q", 1, true));
        cache.pools.change(change);
        let none: [PoolName; 0] = [];
        let unknown = "the outcome for p is unknown";
        assert_eq!(released(&mut pools, &cache, 10), none, "{unknown}");
        let gone = RequestAnswer::to_write(&Purpose::DefaultPool, &RequestOutcome::Gone);
        pools.requests.answered(&"p".into(), &gone);
        let deletion = ObjectEvent::Deleted(pool("p", 0, true));
        cache.pools.change(deletion);
        assert_eq!(released(&mut pools, &cache, 20), none, "q keeps it now");
    }

    #[test]
    fn a_pool_that_selects_no_node_is_ready_and_says_so() {
        let ready = |label: &str, nodes: Vec<Node>| {
            let selector = serde_json::json!({"matchLabels": {"class": label}});
            let pool = pool_with("p", "10.0.0.0/24", |spec| {
                spec.node_selector = serde_json::from_value(selector).unwrap();
            });
            let cache = cluster(vec![pool], nodes);
            let mut pools = PoolLoop::default();
            pools.mark();
            let next = |cx: &mut Context| pools.next(cx).unwrap();
            let (request, _) = in_step(&cache, &mut rebuilt(&cache), NOW, next);
            let ApiRequest::SetPoolStatus(_, status) = request else {
                panic!("{request:?}");
            };
            let ready = status.conditions.into_iter().find(|it| it.type_ == "Ready");
            ready.map(|it| (it.status, it.reason)).unwrap()
        };
        let is_true = |reason: &str| ("True".to_owned(), reason.to_owned());
        let of_class = || Node {
            labels: [("class".into(), "a".into())].into(),
            ..node("n")
        };
        assert_eq!(ready("a", vec![of_class()]), is_true("Serving"));
        assert_eq!(ready("b", vec![of_class()]), is_true("SelectsNoNode"));
        assert_eq!(ready("b", Vec::new()), is_true("Serving"));
    }

    #[test]
    fn a_change_right_after_a_count_is_counted_later() {
        let mut changed = subnet("n", &["10.0.0.16/28"], 0);
        let pools = vec![pool("p", "10.0.0.0/24")];
        let mut cache = cluster_of(pools, vec![changed.clone()]);
        let mut allocations = rebuilt(&cache);
        let mut pools = PoolLoop::default();
        let mut used = |pools: &mut PoolLoop, cache: &mut ClusterCache, second: u64| {
            let next = |cx: &mut Context| pools.next(cx);
            let (request, purpose) = in_step(cache, &mut allocations, at(second), next)?;
            let ApiRequest::SetPoolStatus(_, status) = request else {
                panic!("{request:?} for {purpose:?}");
            };
            let used = status.ipv4.as_ref()?.addresses.as_ref()?.used.clone();
            let mut pool = Pool::clone(cache.pools.get("p")?);
            (pool.version, pool.status) = (pool.version + 1, Some(status));
            let outcome = RequestOutcome::Pool(pool.clone());
            cache.pools.change(ObjectEvent::Applied(pool));
            let answer = RequestAnswer::to_write(&purpose, &outcome);
            let answered = |cx: &mut Context| pools.answered(&answer, cx);
            in_step(cache, &mut allocations, at(second), answered);
            Some(used)
        };
        pools.mark();
        assert_eq!(used(&mut pools, &mut cache, 0).as_deref(), Some("0"));
        changed.version += 1;
        changed.report.as_mut().unwrap().blocks[0].used = 5;
        cache.subnets.change(ObjectEvent::Applied(changed));
        pools.mark();
        assert_eq!(used(&mut pools, &mut cache, 2), None);
        let due = pools.load().next_at.unwrap();
        assert_eq!(due, Duration::from_secs(5));
        assert_eq!(used(&mut pools, &mut cache, 5).as_deref(), Some("5"));
        assert_eq!(used(&mut pools, &mut cache, 9), None);
    }
}
