//! Metrics of the agent.
//!
//! The number of label values is bounded. Labels are verbs, results, reasons, families, states, sockets, urgencies, and
//! pools of which the node has blocks. Pods, addresses and blocks are no labels. Nor is the node, because the scraper's
//! label `instance` names it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::{
    Error, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use crate::leaks::LeakReason;
use crate::snapshot::assigns;
use cadastre_core::Family;
use cadastre_daemon::telemetry::catalog::register;
use cadastre_node::Snapshot;

/// The agent's metrics. Clones update the same metrics.
#[derive(Clone)]
pub struct AgentMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    waiting: IntGauge,
    writes: IntCounterVec,
    behind: Gauge,
    freed: IntCounterVec,
    leak_candidates: IntGauge,
    damaged: IntCounter,
    dropped: IntCounter,
    addresses: GaugeVec,
    blocks: IntGaugeVec,
    attachments: IntGauge,
    connections: IntGaugeVec,
    /// Pools for which series exist
    known: Arc<Mutex<BTreeSet<String>>>,
}

impl AgentMetrics {
    /// Registers all metrics; fails only if a name is registered already.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let counters = |name, help, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let seconds = HistogramOpts::new(
            "cadastre_agent_request_duration_seconds",
            "Time from reading a request to its answer, including waits for a block",
        )
        .buckets(vec![
            0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
        ]);
        let new = Self {
            requests: counters(
                "cadastre_agent_requests_total",
                "Requests from the CNI plugin and from gRPC clients, by verb and result",
                &["verb", "result"],
            )?,
            seconds: register(registry, HistogramVec::new(seconds, &["verb"])?)?,
            waiting: register(
                registry,
                IntGauge::new("cadastre_agent_adds_waiting", "ADDs that wait for a block")?,
            )?,
            writes: counters(
                "cadastre_agent_status_writes_total",
                "Writes of NodeSubnet.status, by urgency (now or batched) and result",
                &["urgency", "result"],
            )?,
            behind: register(
                registry,
                Gauge::new(
                    "cadastre_agent_publish_lag_seconds",
                    "Seconds since NodeSubnet.status became out of date or NodeAddresses became overdue; 0 if neither is",
                )?,
            )?,
            freed: counters(
                "cadastre_agent_leaks_freed_total",
                "Attachments that were freed without a DEL, by the reason why they became leak candidates",
                &["reason"],
            )?,
            leak_candidates: register(
                registry,
                IntGauge::new(
                    "cadastre_agent_leak_candidates",
                    "Attachments that are leak candidates",
                )?,
            )?,
            damaged: register(
                registry,
                IntCounter::new(
                    "cadastre_agent_store_damaged_total",
                    "Times that the store was found damaged and was set aside",
                )?,
            )?,
            dropped: register(
                registry,
                IntCounter::new(
                    "cadastre_agent_events_dropped_total",
                    "Kubernetes events that could not be written",
                )?,
            )?,
            addresses: register(
                registry,
                GaugeVec::new(
                    Opts::new(
                        "cadastre_agent_addresses",
                        "Addresses of the node by pool, family and state",
                    ),
                    &["pool", "family", "state"],
                )?,
            )?,
            blocks: register(
                registry,
                IntGaugeVec::new(
                    Opts::new(
                        "cadastre_agent_blocks",
                        "Ranges of the node, by pool and family",
                    ),
                    &["pool", "family"],
                )?,
            )?,
            attachments: register(
                registry,
                IntGauge::new(
                    "cadastre_agent_attachments",
                    "Attachments: interfaces of containers that have addresses",
                )?,
            )?,
            connections: register(
                registry,
                IntGaugeVec::new(
                    Opts::new("cadastre_agent_connections", "Open connections by socket"),
                    &["socket"],
                )?,
            )?,
            known: Arc::default(),
        };
        for reason in LeakReason::ALL {
            new.freed.with_label_values(&[reason.as_str()]);
        }
        Ok(new)
    }

    /// Counts an answered request and its duration.
    pub fn answered(&self, verb: &str, result: &str, took: Duration) {
        self.requests.with_label_values(&[verb, result]).inc();
        self.seconds
            .with_label_values(&[verb])
            .observe(took.as_secs_f64());
    }

    /// Returns the gauge of ADDs that wait for a block.
    pub fn waiting(&self) -> &IntGauge {
        &self.waiting
    }

    /// Returns the gauge of open connections of a socket.
    pub fn connections(&self, socket: &str) -> IntGauge {
        self.connections.with_label_values(&[socket])
    }

    /// Counts an attempt to write the status, with its result.
    pub fn wrote(&self, urgent: bool, result: &str) {
        let urgency = if urgent { "now" } else { "batched" };
        self.writes.with_label_values(&[urgency, result]).inc();
    }

    /// Sets the longer of two times: how long the stored status has differed from the wanted one, and how long the list
    /// has been overdue.
    pub(crate) fn set_publish_lag(&self, lag: Duration) {
        self.behind.set(lag.as_secs_f64());
    }

    /// Counts a leaked attachment that was released.
    pub fn freed(&self, reason: LeakReason) {
        self.freed.with_label_values(&[reason.as_str()]).inc();
    }

    /// Sets the number of leak candidates.
    pub(crate) fn set_leak_candidates(&self, count: usize) {
        self.leak_candidates
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Counts a damaged store.
    pub fn damaged(&self) {
        self.damaged.inc();
    }

    /// Counts an event that could not be written.
    pub(crate) fn event_dropped(&self) {
        self.dropped.inc();
    }

    /// Sets the gauges of addresses, blocks and attachments; series of pools without blocks are removed.
    #[expect(clippy::cast_precision_loss, reason = "gauges are floats")]
    pub fn set(&self, snapshot: &Snapshot) {
        let tenants = snapshot.attachments.len();
        self.attachments
            .set(i64::try_from(tenants).unwrap_or(i64::MAX));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let pools: BTreeSet<String> = snapshot.blocks.iter().map(|it| it.pool.clone()).collect();
        for pool in known.difference(&pools) {
            for family in Family::ALL.map(label) {
                let _ = self.blocks.remove_label_values(&[pool, family]);
                for state in ["used", "cooling", "free"] {
                    let _ = self.addresses.remove_label_values(&[pool, family, state]);
                }
            }
        }
        for pool in &pools {
            for family in Family::ALL {
                let of = snapshot.blocks.iter();
                let of = of.filter(|it| it.pool == *pool && it.cidr.family() == family);
                let (mut blocks, mut sums) = (0, [0u64; 3]);
                for block in of {
                    let counts = block.counts;
                    let each = [counts.used, counts.cooling, counts.free];
                    for (sum, count) in sums.iter_mut().zip(each) {
                        *sum = sum.saturating_add(count);
                    }
                    blocks += i64::from(assigns(block));
                }
                self.blocks
                    .with_label_values(&[pool.as_str(), label(family)])
                    .set(blocks);
                for (state, sum) in ["used", "cooling", "free"].into_iter().zip(sums) {
                    self.addresses
                        .with_label_values(&[pool.as_str(), label(family), state])
                        .set(sum as f64);
                }
            }
        }
        *known = pools;
    }
}

fn label(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::{block, snapshot};

    #[test]
    fn a_pool_s_series_go_with_its_last_block() {
        let registry = Registry::new();
        let metrics = AgentMetrics::register(&registry).unwrap();
        let text = || {
            prometheus::TextEncoder::new()
                .encode_to_string(&registry.gather())
                .unwrap()
        };
        metrics.set(&snapshot(&[], &[block("10.0.0.0/26", "a", 5, 2, 54)]));
        let told = text();
        assert!(
            told.contains(r#"cadastre_agent_addresses{family="ipv4",pool="a",state="cooling"} 2"#),
            "{told}"
        );
        assert!(told.contains(r#"cadastre_agent_leaks_freed_total{reason="reboot"} 0"#));
        metrics.set(&snapshot(&[], &[]));
        assert!(!text().contains("pool=\"a\""));
    }
}
