//! Metrics of pools. The series of a pool are removed when the pool is gone.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{Error, GaugeVec, IntGaugeVec, Opts, Registry};

use crate::cluster::names::PoolName;
use crate::figures::FamilyCounts;
use crate::view::ControllerView;
use cadastre_core::Family;
use cadastre_daemon::telemetry::catalog::register;

/// Name and help of each gauge that is computed from the pool's [`FamilyCounts`].
const COUNTS: [(&str, &str); 5] = [
    (
        "cadastre_pool_blocks_capacity",
        "Blocks of the pool's block size that fit into the pool, without reserved and service ranges",
    ),
    (
        "cadastre_pool_blocks_allocated",
        "Ranges of the pool that are allocated to live nodes",
    ),
    (
        "cadastre_pool_blocks_free",
        "Blocks of the pool's block size that could be allocated now",
    ),
    (
        "cadastre_pool_blocks_quarantined",
        "Ranges of the pool that are quarantined because their node is gone",
    ),
    (
        "cadastre_pool_utilization_ratio",
        "Share of the pool's capacity that is not free, from 0 to 1",
    ),
];

/// Returns the values of the gauges in [`COUNTS`], in the order of [`COUNTS`].
#[expect(clippy::cast_precision_loss, reason = "Prometheus knows only floats")]
fn counts(figures: &FamilyCounts) -> [f64; 5] {
    [
        figures.capacity as f64,
        figures.held as f64,
        figures.free as f64,
        figures.quarantined as f64,
        figures.utilization(),
    ]
}

/// The gauges of all pools. Each gauge has the label `pool`, and most gauges also have the label `family`.
#[derive(Clone)]
pub(super) struct PoolMetrics {
    /// The gauges in [`COUNTS`]
    counts: Vec<GaugeVec>,
    waiting: IntGaugeVec,
    exhausts: GaugeVec,
    addresses: GaugeVec,
    /// The pools and families that have series. [`PoolMetrics::set`] uses it to remove the series of pools that are
    /// gone
    known: Arc<Mutex<BTreeSet<(String, String)>>>,
}

impl PoolMetrics {
    pub(super) fn register(registry: &Registry) -> Result<Self, Error> {
        let gauges = |name, help, labels: &[&str]| {
            register(registry, GaugeVec::new(Opts::new(name, help), labels)?)
        };
        let counts = COUNTS.map(|(name, help)| gauges(name, help, &["pool", "family"]));
        Ok(Self {
            counts: counts.into_iter().collect::<Result<_, _>>()?,
            waiting: register(
                registry,
                IntGaugeVec::new(
                    Opts::new(
                        "cadastre_pool_nodes_waiting",
                        "Nodes that wait for a podCIDR or a block of the pool",
                    ),
                    &["pool"],
                )?,
            )?,
            exhausts: gauges(
                "cadastre_pool_exhausts_timestamp_seconds",
                "Time at which the pool will be exhausted if it keeps growing; absent while there is no forecast",
                &["pool", "family"],
            )?,
            addresses: gauges(
                "cadastre_pool_addresses",
                "Addresses in allocated blocks of the pool, by state: allocated counts all of them, used those in use by pods, cooling those in cooldown, borrowed those that a node has borrowed from another one",
                &["pool", "family", "state"],
            )?,
            known: Arc::default(),
        })
    }

    /// Updates all series, and removes those of pools that are gone.
    #[expect(clippy::cast_precision_loss, reason = "Prometheus knows only floats")]
    pub(super) fn set(&self, view: &ControllerView) {
        let labels = |pool: &PoolName, family: &Family| {
            (pool.to_string(), family.to_string().to_lowercase())
        };
        let mut current = BTreeSet::new();
        for (pool, family, figures) in &view.pools {
            let (pool_name, family) = labels(pool, family);
            for (gauge, value) in self.counts.iter().zip(counts(figures)) {
                gauge.with_label_values(&[&pool_name, &family]).set(value);
            }
            self.waiting
                .with_label_values(&[&pool_name])
                .set(view.pool_waiting.get(pool).copied().unwrap_or(0));
            current.insert((pool_name, family));
        }
        let mut with_forecast = BTreeSet::new();
        for (pool, family, at) in &view.exhausts {
            let (pool, family) = labels(pool, family);
            self.exhausts
                .with_label_values(&[&pool, &family])
                .set(at.as_second() as f64);
            with_forecast.insert((pool, family));
        }
        for (pool, family, totals) in &view.addresses {
            let (pool, family) = labels(pool, family);
            let values = [totals.held, totals.used, totals.cooling, totals.borrowed];
            for (state, count) in ADDRESS_STATES.into_iter().zip(values) {
                self.addresses
                    .with_label_values(&[pool.as_str(), &family, state])
                    .set(count as f64);
            }
            current.insert((pool, family));
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // An error of `remove_label_values` means that there is no such series, so nothing has to be removed.
        for (pool, family) in known
            .union(&current)
            .filter(|it| !with_forecast.contains(it))
        {
            let _ = self.exhausts.remove_label_values(&[pool, family]);
        }
        for (pool, family) in known.difference(&current) {
            for gauge in &self.counts {
                let _ = gauge.remove_label_values(&[pool, family]);
            }
            for state in ADDRESS_STATES {
                let _ = self.addresses.remove_label_values(&[pool, family, state]);
            }
            if !current.iter().any(|(name, _)| name == pool) {
                let _ = self.waiting.remove_label_values(&[pool]);
            }
        }
        *known = current;
    }
}

/// Values of the label `state` of `cadastre_pool_addresses`.
const ADDRESS_STATES: [&str; 4] = ["allocated", "used", "cooling", "borrowed"];

#[cfg(test)]
mod tests {
    use super::*;

    fn text(registry: &Registry) -> String {
        let encoder = prometheus::TextEncoder::new();
        encoder.encode_to_string(&registry.gather()).unwrap()
    }

    #[test]
    fn counts_of_any_size_are_exported() {
        let registry = Registry::new();
        let metrics = PoolMetrics::register(&registry).unwrap();
        let figures = FamilyCounts {
            capacity: 1 << 120,
            held: 1 << 118,
            quarantined: 0,
            free: 3 << 118,
        };
        let totals = crate::totals::Totals {
            held: u128::MAX,
            ..Default::default()
        };
        metrics.set(&ControllerView {
            pools: vec![("a".into(), Family::V6, figures)],
            addresses: vec![("a".into(), Family::V6, totals)],
            ..ControllerView::default()
        });
        let text = text(&registry);
        let value = |series: &str| {
            let line = text.lines().find_map(|it| it.strip_prefix(series));
            line.unwrap().trim().parse::<f64>().unwrap().to_bits()
        };
        let labels = "{family=\"ipv6\",pool=\"a\"}";
        assert_eq!(
            value(&format!("cadastre_pool_blocks_capacity{labels}")),
            2_f64.powi(120).to_bits()
        );
        assert_eq!(
            value(&format!("cadastre_pool_utilization_ratio{labels}")),
            0.25_f64.to_bits()
        );
        let addresses = "cadastre_pool_addresses{family=\"ipv6\",pool=\"a\",state=\"allocated\"}";
        assert_eq!(value(addresses), 2_f64.powi(128).to_bits());
    }

    #[test]
    fn the_series_of_a_pool_go_with_the_pool() {
        let registry = Registry::new();
        let metrics = PoolMetrics::register(&registry).unwrap();
        let figures = FamilyCounts {
            capacity: 256,
            held: 64,
            quarantined: 0,
            free: 192,
        };
        let mut view = ControllerView {
            pools: vec![("a".into(), Family::V4, figures)],
            pool_waiting: [("a".into(), 3)].into(),
            exhausts: vec![(
                "a".into(),
                Family::V4,
                "2026-01-02T00:00:00Z".parse().unwrap(),
            )],
            ..ControllerView::default()
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
        metrics.set(&ControllerView::default());
        assert!(!text(&registry).contains("pool=\"a\""));
    }
}
