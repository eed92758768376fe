//! Figures, by the names operators know from other controllers where there are such names.
//!
//! Labels are bounded: pools (and families), loops, reasons. No node, pod or address is a label. A
//! pool's series go with the pool.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::{
    Error, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use super::catalog::register;
use crate::controller::machine::View;

/// Figures of the controller's loops and of what it manages.
#[derive(Clone)]
pub struct ControllerMetrics {
    reconciles: IntCounterVec,
    errors: IntCounterVec,
    seconds: HistogramVec,
    depth: IntGaugeVec,
    retries: IntCounterVec,
    pool: PoolGauges,
    waiting: IntGaugeVec,
    pool_waiting: IntGaugeVec,
    oldest_wait: Gauge,
    exhausts: GaugeVec,
    second_writer: IntCounter,
    overlapping: IntGauge,
    unclear: IntGauge,
    dropped: IntCounter,
    addresses: GaugeVec,
    blocks: IntGaugeVec,
    leaks: IntGaugeVec,
    oldest: GaugeVec,
    doubled: IntGauge,
    refused: IntGauge,
    /// Pools and families that have series
    known: Arc<Mutex<BTreeSet<(String, String)>>>,
    /// Retries of each queue as last counted
    counted: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

#[derive(Clone)]
struct PoolGauges {
    capacity: GaugeVec,
    held: GaugeVec,
    free: GaugeVec,
    quarantined: GaugeVec,
    utilization: GaugeVec,
}

impl PoolGauges {
    fn all(&self) -> [&GaugeVec; 5] {
        [
            &self.capacity,
            &self.held,
            &self.free,
            &self.quarantined,
            &self.utilization,
        ]
    }
}

impl ControllerMetrics {
    /// Registers all of them. Fails only where a name is taken.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let counters = |name, help, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let gauges = |name, help, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
        };
        let pool = |name, help| {
            register(
                registry,
                GaugeVec::new(Opts::new(name, help), &["pool", "family"])?,
            )
        };
        Ok(ControllerMetrics {
            reconciles: counters(
                "controller_runtime_reconcile_total",
                "Requests of each loop by what came of them",
                &["controller", "result"],
            )?,
            errors: counters(
                "controller_runtime_reconcile_errors_total",
                "Requests of each loop that failed or whose outcome is unclear",
                &["controller"],
            )?,
            seconds: register(
                registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "controller_runtime_reconcile_time_seconds",
                        "Time from sending a request of a loop to its answer",
                    )
                    .buckets(vec![
                        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
                        10.0,
                    ]),
                    &["controller"],
                )?,
            )?,
            depth: gauges(
                "workqueue_depth",
                "Keys that wait in each loop's queue",
                &["name"],
            )?,
            retries: counters(
                "workqueue_retries_total",
                "Keys put back into each loop's queue after a failure",
                &["name"],
            )?,
            pool: PoolGauges {
                capacity: pool(
                    "cadastre_pool_blocks_capacity",
                    "Blocks of the pool's block size that the pool can hold, reserved and service ranges left out",
                )?,
                held: pool(
                    "cadastre_pool_blocks_held",
                    "Ranges in the pool that live nodes hold",
                )?,
                free: pool(
                    "cadastre_pool_blocks_free",
                    "Blocks of the pool's block size that could be given now",
                )?,
                quarantined: pool(
                    "cadastre_pool_blocks_quarantined",
                    "Ranges of dead nodes in the pool that rest before reuse",
                )?,
                utilization: pool(
                    "cadastre_pool_utilization_ratio",
                    "Share of the pool's capacity that is not free, 0 to 1",
                )?,
            },
            waiting: gauges(
                "cadastre_nodes_waiting",
                "Nodes that lack a podCIDR or a block, by reason; no_pool are those that no pool selects",
                &["reason"],
            )?,
            pool_waiting: gauges(
                "cadastre_pool_nodes_waiting",
                "Nodes that wait for a podCIDR or a block of the pool",
                &["pool"],
            )?,
            oldest_wait: register(
                registry,
                Gauge::new(
                    "cadastre_oldest_wait_seconds",
                    "For how long the node waits that waits longest for a podCIDR or a block; 0 if none does",
                )?,
            )?,
            exhausts: pool(
                "cadastre_pool_exhausts_timestamp_seconds",
                "When the pool will have no free block left if it goes on growing; absent while that cannot be told",
            )?,
            second_writer: register(
                registry,
                IntCounter::new(
                    "cadastre_second_writer_total",
                    "Nodes whose podCIDRs were written by somebody else while Cadastre dealt",
                )?,
            )?,
            overlapping: register(
                registry,
                IntGauge::new(
                    "cadastre_overlapping_ranges",
                    "Pairs of nodes whose podCIDRs have addresses in common",
                )?,
            )?,
            unclear: register(
                registry,
                IntGauge::new(
                    "cadastre_unclear_writes",
                    "Ranges kept because the outcome of a write is not known",
                )?,
            )?,
            dropped: register(
                registry,
                IntCounter::new(
                    "cadastre_dropped_events_total",
                    "Kubernetes events that could not be written",
                )?,
            )?,
            addresses: register(
                registry,
                GaugeVec::new(
                    Opts::new(
                        "cadastre_pool_addresses",
                        "Addresses in blocks of the pool: held by nodes, used by pods, cooling after use",
                    ),
                    &["pool", "family", "state"],
                )?,
            )?,
            blocks: gauges(
                "cadastre_blocks",
                "Affinity blocks: held, recalled, provisional, quarantined, or overdue because a pod still has an address in it",
                &["state"],
            )?,
            leaks: gauges(
                "cadastre_leaked_addresses",
                "Addresses whose pods are gone: candidate until the grace period is over, asked once the node was told",
                &["state"],
            )?,
            oldest: register(
                registry,
                GaugeVec::new(
                    Opts::new(
                        "cadastre_oldest_garbage_seconds",
                        "Age of the oldest address without a pod, and of the block that is kept longest beyond its quarantine",
                    ),
                    &["kind"],
                )?,
            )?,
            doubled: register(
                registry,
                IntGauge::new(
                    "cadastre_duplicate_pod_addresses",
                    "Addresses that more than one pod reports",
                )?,
            )?,
            refused: register(
                registry,
                IntGauge::new(
                    "cadastre_refused_status_entries",
                    "Entries in the statuses of NodeSubnets that make no sense and are left out",
                )?,
            )?,
            known: Arc::default(),
            counted: Arc::default(),
        })
    }

    /// One request of a loop was answered; `result` is success, requeue or error.
    pub fn reconciled(&self, controller: &str, result: &str, took: Duration) {
        self.reconciles
            .with_label_values(&[controller, result])
            .inc();
        if result == "error" {
            self.errors.with_label_values(&[controller]).inc();
        }
        self.seconds
            .with_label_values(&[controller])
            .observe(took.as_secs_f64());
    }

    /// An event for people was lost.
    pub fn event_dropped(&self) {
        self.dropped.inc();
    }

    /// Each tenure counts from zero; the sum goes on.
    fn count_retries(&self, name: &'static str, retries: u64) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let before = counted.insert(name, retries).unwrap_or(0);
        let new = retries.checked_sub(before).unwrap_or(retries);
        self.retries.with_label_values(&[name]).inc_by(new);
    }

    /// Sets what the controller says of itself.
    pub fn set(&self, view: &View) {
        for (name, depth, retries) in &view.queues {
            self.depth
                .with_label_values(&[name])
                .set(i64::try_from(*depth).unwrap_or(i64::MAX));
            self.count_retries(name, *retries);
        }
        for reason in ["no_pool", "pool_not_ready", "pool_full"] {
            let waiting = view.waiting.get(reason).copied().unwrap_or(0);
            self.waiting
                .with_label_values(&[reason])
                .set(i64::try_from(waiting).unwrap_or(i64::MAX));
        }
        self.oldest_wait.set(view.oldest_wait.as_secs_f64());
        self.overlapping
            .set(i64::try_from(view.overlaps).unwrap_or(i64::MAX));
        self.unclear
            .set(i64::try_from(view.unclear).unwrap_or(i64::MAX));
        for state in ["held", "recalled", "provisional", "quarantined", "overdue"] {
            let count = view.blocks.get(state).copied().unwrap_or(0);
            self.blocks
                .with_label_values(&[state])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let (candidates, age, asked) = view.leaks;
        for (state, count) in [("candidate", candidates), ("asked", asked)] {
            self.leaks
                .with_label_values(&[state])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        for (kind, age) in [("address", age), ("block", view.oldest_rest)] {
            self.oldest
                .with_label_values(&[kind])
                .set(age.as_secs_f64());
        }
        self.doubled
            .set(i64::try_from(view.doubled).unwrap_or(i64::MAX));
        self.refused
            .set(i64::try_from(view.refused).unwrap_or(i64::MAX));
        self.second_writer
            .inc_by(view.second_writer.saturating_sub(self.second_writer.get()));
        self.set_pools(view);
    }

    #[expect(clippy::cast_precision_loss, reason = "Prometheus knows only floats")]
    fn set_pools(&self, view: &View) {
        let mut seen = BTreeSet::new();
        for (pool, family, figures) in &view.pools {
            let family = family.to_string().to_lowercase();
            let labels = [&**pool, family.as_str()];
            self.pool
                .capacity
                .with_label_values(&labels)
                .set(figures.capacity as f64);
            self.pool
                .held
                .with_label_values(&labels)
                .set(figures.held as f64);
            self.pool
                .free
                .with_label_values(&labels)
                .set(figures.free as f64);
            self.pool
                .quarantined
                .with_label_values(&labels)
                .set(figures.quarantined as f64);
            self.pool
                .utilization
                .with_label_values(&labels)
                .set(figures.utilization());
            self.pool_waiting
                .with_label_values(&[&**pool])
                .set(view.pool_waiting.get(pool).copied().unwrap_or(0));
            seen.insert((pool.to_string(), family));
        }
        let mut ending = BTreeSet::new();
        for (pool, family, at) in &view.exhausts {
            let family = family.to_string().to_lowercase();
            self.exhausts
                .with_label_values(&[&**pool, family.as_str()])
                .set(at.as_second() as f64);
            ending.insert((pool.to_string(), family));
        }
        for (pool, family, totals) in &view.addresses {
            let family = family.to_string().to_lowercase();
            let states = [
                ("held", totals.held),
                ("used", totals.used),
                ("cooling", totals.cooling),
            ];
            for (state, count) in states {
                self.addresses
                    .with_label_values(&[&**pool, family.as_str(), state])
                    .set(count as f64);
            }
            seen.insert((pool.to_string(), family));
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for (pool, family) in known.union(&seen).filter(|it| !ending.contains(it)) {
            let _ = self.exhausts.remove_label_values(&[pool, family]);
        }
        for (pool, family) in known.difference(&seen) {
            for gauge in self.pool.all() {
                // Absent is what is wanted.
                let _ = gauge.remove_label_values(&[pool, family]);
            }
            for state in ["held", "used", "cooling"] {
                let _ = self.addresses.remove_label_values(&[pool, family, state]);
            }
            if !seen.iter().any(|(name, _)| name == pool) {
                let _ = self.pool_waiting.remove_label_values(&[pool]);
            }
        }
        *known = seen;
    }
}

/// Figures of the election.
#[derive(Clone)]
pub struct LeaderMetrics {
    /// 1 while this process leads
    pub leading: IntGauge,
    /// How often leadership was won or lost here
    pub transitions: IntCounter,
    /// Calls for the Lease that failed
    pub errors: IntCounter,
}

impl LeaderMetrics {
    /// Registers all of them for the Lease of that name.
    pub fn register(registry: &Registry, name: &str) -> Result<Self, Error> {
        let leading = IntGaugeVec::new(
            Opts::new(
                "leader_election_master_status",
                "Whether this process leads: 1 yes, 0 no",
            ),
            &["name"],
        )?;
        let leading = register(registry, leading)?.with_label_values(&[name]);
        let counter = |name, help| register(registry, IntCounter::new(name, help)?);
        Ok(LeaderMetrics {
            leading,
            transitions: counter(
                "cadastre_leader_transitions_total",
                "Times this process began or ceased to lead",
            )?,
            errors: counter(
                "cadastre_lease_errors_total",
                "Calls for the Lease that failed or were left unanswered",
            )?,
        })
    }
}

/// Which build this is.
pub fn build_info(registry: &Registry) -> Result<(), Error> {
    let info = Opts::new(
        "cadastre_build_info",
        "Version and commit of this build; always 1",
    );
    let info = register(registry, IntGaugeVec::new(info, &["version", "commit"])?)?;
    info.with_label_values(&[crate::VERSION, crate::COMMIT])
        .set(1);
    Ok(())
}

#[cfg(test)]
mod tests {
    use prometheus::proto::MetricType;

    use super::*;
    use crate::controller::figures::Figures;
    use crate::ipam::Family;

    fn text(registry: &Registry) -> String {
        prometheus::TextEncoder::new()
            .encode_to_string(&registry.gather())
            .unwrap()
    }

    #[test]
    fn the_series_of_a_pool_go_with_the_pool() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        let figures = Figures {
            capacity: 256,
            held: 64,
            quarantined: 0,
            free: 192,
        };
        let mut view = View {
            pools: vec![("a".into(), Family::V4, figures)],
            pool_waiting: [("a".into(), 3)].into(),
            exhausts: vec![(
                "a".into(),
                Family::V4,
                "2026-01-02T00:00:00Z".parse().unwrap(),
            )],
            ..View::default()
        };
        metrics.set(&view);
        for line in [
            "cadastre_pool_utilization_ratio{family=\"ipv4\",pool=\"a\"} 0.25",
            "cadastre_pool_nodes_waiting{pool=\"a\"} 3",
            "cadastre_pool_exhausts_timestamp_seconds{family=\"ipv4\",pool=\"a\"} 1767312000",
        ] {
            assert!(text(&registry).contains(line), "{line}");
        }
        view.exhausts.clear();
        metrics.set(&view);
        assert!(!text(&registry).contains("cadastre_pool_exhausts_timestamp_seconds{"));
        metrics.set(&View::default());
        assert!(!text(&registry).contains("pool=\"a\""));
    }

    #[test]
    fn retries_of_one_tenure_are_added_to_those_of_the_last() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        for retries in [2, 5, 0, 1] {
            metrics.set(&View {
                queues: vec![("podcidr", 0, retries)],
                ..View::default()
            });
        }
        assert!(text(&registry).contains("workqueue_retries_total{name=\"podcidr\"} 6"));
    }

    #[test]
    fn names_follow_the_conventions() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        let figures = Figures {
            capacity: 1,
            held: 1,
            quarantined: 0,
            free: 0,
        };
        metrics.set(&View {
            pools: vec![("a".into(), Family::V4, figures)],
            queues: vec![("podcidr", 0, 0)],
            ..View::default()
        });
        metrics.reconciled("podcidr", "error", Duration::ZERO);
        LeaderMetrics::register(&registry, "lease").unwrap();
        build_info(&registry).unwrap();
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
    fn a_counter_never_goes_back() {
        let registry = Registry::new();
        let metrics = ControllerMetrics::register(&registry).unwrap();
        metrics.set(&View {
            second_writer: 3,
            ..View::default()
        });
        metrics.set(&View {
            second_writer: 1,
            ..View::default()
        });
        assert!(text(&registry).contains("cadastre_second_writer_total 3"));
    }
}
