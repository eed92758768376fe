//! Metrics of the controller. A metric that other Kubernetes controllers have, too, has the same name here, for example
//! `workqueue_depth`.
//!
//! The number of series is bounded, because labels name pools, families, loops, reasons and the like, but never nodes,
//! pods or addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::{
    Error, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use super::pool_metrics::PoolMetrics;
use crate::cluster::request::ObjectKind;
use crate::queue::Load;
use crate::view::ControllerView;
use cadastre_daemon::telemetry::catalog::register;

/// Metrics of the controller's loops, of its requests, and of pools, blocks and addresses.
#[derive(Clone)]
pub struct ControllerMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    ready: IntGaugeVec,
    added: IntCounterVec,
    later: IntGaugeVec,
    pools: PoolMetrics,
    waiting: IntGaugeVec,
    oldest_wait: Gauge,
    exhausted_nodes: IntGauge,
    foreign_allocations: IntCounter,
    overlapping: IntGauge,
    too_wide: IntGauge,
    indeterminate: IntGauge,
    dropped: IntCounter,
    blocks: IntGaugeVec,
    claims: IntGaugeVec,
    leaks: IntGaugeVec,
    oldest: GaugeVec,
    doubled: IntGauge,
    rejected_entries: IntGauge,
    rejected_writes: IntGaugeVec,
    /// The value of [`Load::added`] of each loop at the last update. Only the growth since then is added to the counter
    /// `added`
    counted: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

impl ControllerMetrics {
    /// Registers all metrics. Returns an error only if a name is registered already.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let counters = |name, help, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let gauges = |name, help, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
        };
        let counter = |name, help| register(registry, IntCounter::new(name, help)?);
        let gauge = |name, help| register(registry, IntGauge::new(name, help)?);
        Ok(ControllerMetrics {
            requests: counters(
                "cadastre_loop_requests_total",
                "Requests of each loop to the API server, by result: success, refused (a precondition failed, the object is gone, or the server is busy), error (rejected, or indeterminate)",
                &["loop", "result"],
            )?,
            seconds: register(
                registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "cadastre_loop_request_duration_seconds",
                        "Time from sending a request of a loop to its answer, including the wait for the Lease",
                    )
                    .buckets(vec![
                        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
                        10.0,
                    ]),
                    &["loop"],
                )?,
            )?,
            ready: gauges(
                "workqueue_depth",
                "Keys that are ready to be processed in each loop's queues",
                &["name"],
            )?,
            added: counters(
                "workqueue_adds_total",
                "Keys that have become ready to be processed in each loop's queues",
                &["name"],
            )?,
            later: gauges(
                "cadastre_loop_keys_later",
                "Keys that each loop will process at a later time",
                &["loop"],
            )?,
            pools: PoolMetrics::register(registry)?,
            waiting: gauges(
                "cadastre_nodes_waiting",
                "Nodes that wait for a podCIDR or a block, by reason: no_pool if no pool selects the node, pool_full if the pools that select it are exhausted, pool_not_ready if they allocate nothing now, assignment if a pool assigns ranges to the node that it cannot give to it now, max_pods_unknown if the size of its range depends on status.capacity.pods of the Node and this is missing, write_rejected if the API server rejects the write, fence if a new leader has not touched the node yet (then all podCIDRs wait)",
                &["reason"],
            )?,
            oldest_wait: register(
                registry,
                Gauge::new(
                    "cadastre_oldest_wait_seconds",
                    "Longest time that a node has been waiting for a podCIDR or a block; 0 if none waits",
                )?,
            )?,
            exhausted_nodes: gauge(
                "cadastre_exhausted_nodes",
                "Nodes that have no free address for another pod and cannot get one",
            )?,
            foreign_allocations: counter(
                "cadastre_foreign_allocations_total",
                "Nodes whose podCIDRs were written by a foreign allocator while Cadastre allocated podCIDRs",
            )?,
            overlapping: gauge(
                "cadastre_overlapping_ranges",
                "Pairs of ranges of different nodes that overlap",
            )?,
            too_wide: gauge(
                "cadastre_podcidrs_too_wide",
                "podCIDRs over pools that no node could have been allocated; they are ignored",
            )?,
            indeterminate: gauge(
                "cadastre_indeterminate_writes",
                "Ranges that stay reserved because a write is indeterminate",
            )?,
            dropped: counter(
                "cadastre_dropped_events_total",
                "Kubernetes events that could not be written",
            )?,
            blocks: gauges(
                "cadastre_blocks",
                "Blocks by state: allocated to a node, recalled, provisional (not confirmed yet), quarantined, or overdue because a pod still has an address in it",
                &["state"],
            )?,
            claims: gauges(
                "cadastre_claims",
                "IPClaims by state: in_use if a node has the addresses, available if no node has them, waiting if the claim has no addresses yet",
                &["state"],
            )?,
            leaks: gauges(
                "cadastre_leaked_addresses",
                "Addresses whose pods are gone: candidate until the grace period is over, asked once the node was asked to free them",
                &["state"],
            )?,
            oldest: register(
                registry,
                GaugeVec::new(
                    Opts::new(
                        "cadastre_oldest_garbage_seconds",
                        "Longest time that an address has had no pod, and that a block has been kept after its quarantine",
                    ),
                    &["kind"],
                )?,
            )?,
            doubled: gauge(
                "cadastre_duplicate_pod_addresses",
                "Addresses that more than one pod reports",
            )?,
            rejected_entries: gauge(
                "cadastre_rejected_status_entries",
                "Entries in NodeSubnet.status that make no sense and are ignored",
            )?,
            rejected_writes: gauges(
                "cadastre_rejected_writes",
                "Requests about one object that the API server has rejected or not answered several times in a row, by the kind of object",
                &["kind"],
            )?,
            counted: Arc::default(),
        })
    }

    /// Counts an answered request of a loop, and observes the time `took` from the request to the answer. `result` is
    /// `success`, `refused` or `error`.
    pub(crate) fn answered(&self, of_loop: &str, result: &str, took: Duration) {
        self.requests.with_label_values(&[of_loop, result]).inc();
        self.seconds
            .with_label_values(&[of_loop])
            .observe(took.as_secs_f64());
    }

    /// Counts a Kubernetes event that could not be emitted and was dropped.
    pub fn event_dropped(&self) {
        self.dropped.inc();
    }

    /// Updates the metrics of the loops' queues. While this process does not lead, there are no loops, so the gauges of
    /// loops have no series. In each term, [`Load::added`] starts at zero. The counter continues nevertheless, because
    /// only the growth of [`Load::added`] is added to the counter.
    fn set_loops(&self, loops: &[(&'static str, Load)]) {
        self.ready.reset();
        self.later.reset();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, load) in loops {
            count(&self.ready, name, load.ready);
            count(&self.later, name, load.later);
            let before = counted.insert(name, load.added).unwrap_or(0);
            let new = load.added.checked_sub(before).unwrap_or(load.added);
            self.added.with_label_values(&[name]).inc_by(new);
        }
    }

    /// Updates all metrics from a snapshot of the controller's state.
    pub fn set(&self, view: &ControllerView) {
        self.set_loops(&view.loops);
        let known = [
            "fence",
            "no_pool",
            "pool_not_ready",
            "pool_full",
            "assignment",
            "max_pods_unknown",
            "write_rejected",
        ];
        for reason in known {
            let waiting = view.waiting.get(reason).copied().unwrap_or(0);
            count(&self.waiting, reason, waiting);
        }
        self.oldest_wait.set(view.oldest_wait.as_secs_f64());
        self.exhausted_nodes.set(number(view.exhausted_nodes));
        self.overlapping.set(number(view.overlaps));
        self.too_wide.set(number(view.too_wide));
        self.indeterminate.set(number(view.indeterminate));
        for state in [
            "allocated",
            "recalled",
            "provisional",
            "quarantined",
            "overdue",
        ] {
            let blocks = view.blocks.get(state).copied().unwrap_or(0);
            count(&self.blocks, state, blocks);
        }
        for state in ["available", "in_use", "waiting"] {
            let claims = view.claims.get(state).copied().unwrap_or(0);
            count(&self.claims, state, claims);
        }
        let (candidates, age, asked) = view.leaks;
        count(&self.leaks, "candidate", candidates);
        count(&self.leaks, "asked", asked);
        for (kind, age) in [("address", age), ("block", view.oldest_rest)] {
            self.oldest
                .with_label_values(&[kind])
                .set(age.as_secs_f64());
        }
        self.doubled.set(number(view.doubled));
        self.rejected_entries.set(number(view.refused));
        for kind in ObjectKind::ALL {
            let refused = view.rejected_writes.get(&kind).copied().unwrap_or(0);
            count(&self.rejected_writes, kind.name(), refused);
        }
        self.foreign_allocations.inc_by(
            view.foreign_allocations
                .saturating_sub(self.foreign_allocations.get()),
        );
        self.pools.set(view);
    }
}

fn count(gauges: &IntGaugeVec, label: &str, count: usize) {
    gauges.with_label_values(&[label]).set(number(count));
}

fn number(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use prometheus::proto::MetricType;

    use super::*;
    use crate::cluster::leader_metrics::LeaderMetrics;
    use crate::figures::FamilyCounts;
    use cadastre_core::Family;

    fn text(registry: &Registry) -> String {
        prometheus::TextEncoder::new()
            .encode_to_string(&registry.gather())
            .unwrap()
    }

    /// Returns a view with one loop.
    fn loops(ready: usize, added: u64) -> ControllerView {
        let load = Load {
            ready,
            added,
            ..Load::default()
        };
        ControllerView {
            loops: vec![("podcidr", load)],
            ..ControllerView::default()
        }
    }

    #[test]
    fn counters_continue_over_terms() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        for added in [2, 5, 0, 1] {
            metrics.set(&loops(0, added));
        }
        assert!(text(&registry).contains("workqueue_adds_total{name=\"podcidr\"} 6"));
    }

    #[test]
    fn queues_have_no_series_while_this_process_does_not_lead() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        metrics.set(&loops(7, 7));
        assert!(text(&registry).contains("workqueue_depth{name=\"podcidr\"} 7"));
        metrics.set(&ControllerView::default());
        assert!(!text(&registry).contains("workqueue_depth{"));
    }

    #[test]
    fn names_follow_the_conventions() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        let figures = FamilyCounts {
            capacity: 1,
            held: 1,
            quarantined: 0,
            free: 0,
        };
        metrics.set(&ControllerView {
            pools: vec![("a".into(), Family::V4, figures)],
            ..loops(0, 0)
        });
        metrics.answered("podcidr", "error", Duration::ZERO);
        LeaderMetrics::register(&registry, "lease").unwrap();
        cadastre_daemon::telemetry::build_info(&registry).unwrap();
        let families = registry.gather();
        assert!(families.len() >= 19, "{} families", families.len());
        for family in families {
            let (name, kind) = (family.name(), family.get_field_type());
            let counter = kind == MetricType::COUNTER;
            assert_eq!(name.ends_with("_total"), counter, "{name} is a {kind:?}");
            if kind == MetricType::HISTOGRAM {
                assert!(name.ends_with("_seconds"), "{name}");
            }
            let own = name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            assert!(own && !family.help().is_empty(), "{name}");
        }
    }

    #[test]
    fn nodes_that_wait_for_the_fence_are_counted() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        for (count, expected) in [(2, 2), (0, 0)] {
            metrics.set(&ControllerView {
                waiting: [("fence", count)].into(),
                ..ControllerView::default()
            });
            let line = format!("cadastre_nodes_waiting{{reason=\"fence\"}} {expected}");
            assert!(text(&registry).contains(&line));
        }
    }

    #[test]
    fn a_counter_never_goes_back() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        metrics.set(&ControllerView {
            foreign_allocations: 3,
            ..ControllerView::default()
        });
        metrics.set(&ControllerView {
            foreign_allocations: 1,
            ..ControllerView::default()
        });
        assert!(text(&registry).contains("cadastre_foreign_allocations_total 3"));
    }
}
