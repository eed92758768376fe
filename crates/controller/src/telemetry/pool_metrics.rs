//! Metrics of pools. The series of a pool are removed when the pool is gone.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{Error, GaugeVec, IntGaugeVec, Opts, Registry};

use crate::view::ControllerView;
use cadastre_daemon::telemetry::catalog::register;

/// Gauges with the label `pool`; most of them also have the label `family`.
#[derive(Clone)]
pub(super) struct PoolMetrics {
    capacity: GaugeVec,
    allocated: GaugeVec,
    free: GaugeVec,
    quarantined: GaugeVec,
    utilization: GaugeVec,
    waiting: IntGaugeVec,
    exhausts: GaugeVec,
    addresses: GaugeVec,
    /// Pools and families for which there are series, so that they can be removed later
    known: Arc<Mutex<BTreeSet<(String, String)>>>,
}

impl PoolMetrics {
    pub(super) fn register(registry: &Registry) -> Result<Self, Error> {
        let pool = |name, help| {
            register(
                registry,
                GaugeVec::new(Opts::new(name, help), &["pool", "family"])?,
            )
        };
        Ok(Self {
            capacity: pool(
                "cadastre_pool_blocks_capacity",
                "Blocks of the pool's block size that fit into the pool, without reserved and service ranges",
            )?,
            allocated: pool(
                "cadastre_pool_blocks_allocated",
                "Ranges of the pool that are allocated to live nodes",
            )?,
            free: pool(
                "cadastre_pool_blocks_free",
                "Blocks of the pool's block size that could be allocated now",
            )?,
            quarantined: pool(
                "cadastre_pool_blocks_quarantined",
                "Ranges of the pool that are quarantined because their node is gone",
            )?,
            utilization: pool(
                "cadastre_pool_utilization_ratio",
                "Share of the pool's capacity that is not free, from 0 to 1",
            )?,
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
            exhausts: pool(
                "cadastre_pool_exhausts_timestamp_seconds",
                "Time at which the pool will be exhausted if it keeps growing; absent while there is no forecast",
            )?,
            addresses: register(
                registry,
                GaugeVec::new(
                    Opts::new(
                        "cadastre_pool_addresses",
                        "Addresses in allocated blocks of the pool, by state: allocated counts all of them, used those in use by pods, cooling those in cooldown",
                    ),
                    &["pool", "family", "state"],
                )?,
            )?,
            known: Arc::default(),
        })
    }

    /// Updates all series, and removes those of pools that are gone.
    #[expect(clippy::cast_precision_loss, reason = "Prometheus knows only floats")]
    pub(super) fn set(&self, view: &ControllerView) {
        let mut seen = BTreeSet::new();
        for (pool, family, figures) in &view.pools {
            let family = family.to_string().to_lowercase();
            let labels = [&**pool, family.as_str()];
            self.capacity
                .with_label_values(&labels)
                .set(figures.capacity as f64);
            self.allocated
                .with_label_values(&labels)
                .set(figures.held as f64);
            self.free
                .with_label_values(&labels)
                .set(figures.free as f64);
            self.quarantined
                .with_label_values(&labels)
                .set(figures.quarantined as f64);
            self.utilization
                .with_label_values(&labels)
                .set(figures.utilization());
            self.waiting
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
                ("allocated", totals.held),
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
            for gauge in self.counts() {
                // An error means that there is no such series, so nothing has to be removed.
                let _ = gauge.remove_label_values(&[pool, family]);
            }
            for state in ["allocated", "used", "cooling"] {
                let _ = self.addresses.remove_label_values(&[pool, family, state]);
            }
            if !seen.iter().any(|(name, _)| name == pool) {
                let _ = self.waiting.remove_label_values(&[pool]);
            }
        }
        *known = seen;
    }

    /// Returns the gauges that count a pool's blocks.
    fn counts(&self) -> [&GaugeVec; 5] {
        [
            &self.capacity,
            &self.allocated,
            &self.free,
            &self.quarantined,
            &self.utilization,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::FamilyCounts;
    use cadastre_core::Family;

    #[test]
    fn counts_of_any_size_are_told() {
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
        let encoder = prometheus::TextEncoder::new();
        let text = encoder.encode_to_string(&registry.gather()).unwrap();
        let told = |series: &str| {
            let line = text.lines().find_map(|it| it.strip_prefix(series));
            line.unwrap().trim().parse::<f64>().unwrap().to_bits()
        };
        let labels = "{family=\"ipv6\",pool=\"a\"}";
        assert_eq!(
            told(&format!("cadastre_pool_blocks_capacity{labels}")),
            2_f64.powi(120).to_bits()
        );
        assert_eq!(
            told(&format!("cadastre_pool_utilization_ratio{labels}")),
            0.25_f64.to_bits()
        );
        let addresses = "cadastre_pool_addresses{family=\"ipv6\",pool=\"a\",state=\"allocated\"}";
        assert_eq!(told(addresses), 2_f64.powi(128).to_bits());
    }

    #[test]
    fn the_series_of_a_pool_go_with_the_pool() {
        let text = |registry: &Registry| {
            let encoder = prometheus::TextEncoder::new();
            encoder.encode_to_string(&registry.gather()).unwrap()
        };
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
