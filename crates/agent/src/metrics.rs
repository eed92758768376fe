//! Metrics of the agent.
//!
//! The number of label values is bounded. Labels are verbs, results, reasons, families, states, sockets, urgencies, and
//! the pools of which the node has blocks. Pods, addresses and blocks are no labels. The node is no label either,
//! because the scraper's label `instance` already names it.

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
use cadastre_core::node_allocation::is_claim;
use cadastre_daemon::telemetry::catalog::register;
use cadastre_node::{ProbeRound, Snapshot};

/// The agent's metrics. Clones update the same metrics.
#[derive(Clone)]
pub struct AgentMetrics {
    requests: IntCounterVec,
    seconds: HistogramVec,
    writes: IntCounterVec,
    freed: IntCounterVec,
    addresses: GaugeVec,
    conflicts: IntGaugeVec,
    probes: IntCounterVec,
    blocks: IntGaugeVec,
    attachments: IntGauge,
    connections: IntGaugeVec,
    /// ADDs that wait for a block
    pub(crate) waiting: IntGauge,
    pub(crate) publish_lag: Gauge,
    pub(crate) leak_candidates: IntGauge,
    /// Damaged stores that were found
    pub(crate) damaged: IntCounter,
    pub(crate) events_dropped: IntCounter,
    /// Routes that the agent has added to the kernel
    pub(crate) routes: IntGauge,
    /// Routes that could not be added, and nodes without an address of the family of their pods
    pub(crate) route_errors: IntGauge,
    /// 1 if the last attempt to pass the node's ranges to the routing daemon failed, else 0
    pub(crate) announce_errors: IntGauge,
    /// 1 if the last write of the holdings file failed, else 0
    pub(crate) unrecorded: IntGauge,
    /// Pools for which time series exist
    pools: Arc<Mutex<BTreeSet<String>>>,
}

impl AgentMetrics {
    /// Registers all metrics. Fails only if a name is registered already.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let counter = |name, help| register(registry, IntCounter::new(name, help)?);
        let counters = |name, help, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let gauge = |name, help| register(registry, IntGauge::new(name, help)?);
        let gauges = |name, help, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
        };
        let seconds = HistogramOpts::new(
            "cadastre_agent_request_duration_seconds",
            "Time from reading a request to its answer, including waits for a block",
        )
        .buckets(vec![
            0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
        ]);
        let addresses = Opts::new(
            "cadastre_agent_addresses",
            "Addresses of the node by pool, family and state",
        );
        let publish_lag = Gauge::new(
            "cadastre_agent_publish_lag_seconds",
            "Seconds since NodeSubnet.status became out of date or NodeAddresses became overdue; 0 if neither is",
        );
        let new = Self {
            requests: counters(
                "cadastre_agent_requests_total",
                "Requests from the CNI plugin and from gRPC clients, by verb and result",
                &["verb", "result"],
            )?,
            seconds: register(registry, HistogramVec::new(seconds, &["verb"])?)?,
            writes: counters(
                "cadastre_agent_status_writes_total",
                "Writes of NodeSubnet.status, by urgency (now or batched) and result",
                &["urgency", "result"],
            )?,
            freed: counters(
                "cadastre_agent_leaks_freed_total",
                "Attachments that were freed without a DEL, by the reason why they became leak candidates",
                &["reason"],
            )?,
            addresses: register(
                registry,
                GaugeVec::new(addresses, &["pool", "family", "state"])?,
            )?,
            conflicts: gauges(
                "cadastre_agent_address_conflicts",
                "Addresses of the node that are set aside because another host answers for them, by pool",
                &["pool"],
            )?,
            probes: counters(
                "cadastre_agent_probes_total",
                "Addresses that were probed before their use, by result (clean, conflict or failed)",
                &["result"],
            )?,
            blocks: gauges(
                "cadastre_agent_blocks",
                "Ranges of the node, by pool and family",
                &["pool", "family"],
            )?,
            attachments: gauge(
                "cadastre_agent_attachments",
                "Attachments: interfaces of containers that have addresses",
            )?,
            connections: gauges(
                "cadastre_agent_connections",
                "Open connections by socket",
                &["socket"],
            )?,
            waiting: gauge("cadastre_agent_adds_waiting", "ADDs that wait for a block")?,
            publish_lag: register(registry, publish_lag?)?,
            leak_candidates: gauge(
                "cadastre_agent_leak_candidates",
                "Attachments that are leak candidates",
            )?,
            damaged: counter(
                "cadastre_agent_store_damaged_total",
                "Times that the store was found damaged and was set aside",
            )?,
            events_dropped: counter(
                "cadastre_agent_events_dropped_total",
                "Kubernetes events that could not be written",
            )?,
            routes: gauge(
                "cadastre_agent_routes",
                "Routes to pods of other nodes, and routes that refuse packets to unused addresses of this node; 0 without --routes=direct",
            )?,
            announce_errors: gauge(
                "cadastre_agent_announce_errors",
                "1 while the routing daemon of the node has not been given all ranges of the node, else 0",
            )?,
            unrecorded: gauge(
                "cadastre_agent_ranges_unrecorded",
                "1 while changes of the node's ranges cannot be recorded on its disk, else 0",
            )?,
            route_errors: gauge(
                "cadastre_agent_route_errors",
                "Routes that could not be added, because their nodes are not on this node's link or for another reason, and nodes without an address of the family of their pods",
            )?,
            pools: Arc::default(),
        };
        for reason in LeakReason::ALL {
            new.freed.with_label_values(&[reason.as_str()]);
        }
        for result in PROBED {
            new.probes.with_label_values(&[result]);
        }
        Ok(new)
    }

    /// Counts an answered request and its duration. `verb` and `result` are the values of the labels.
    pub(crate) fn answered(&self, verb: &str, result: &str, took: Duration) {
        self.requests.with_label_values(&[verb, result]).inc();
        self.seconds
            .with_label_values(&[verb])
            .observe(took.as_secs_f64());
    }

    /// Returns the gauge of open connections with this value of the label `socket`.
    pub fn connections(&self, socket: &str) -> IntGauge {
        self.connections.with_label_values(&[socket])
    }

    /// Counts an attempt to write the status. `result` is the value of the label.
    pub(crate) fn status_written(&self, urgent: bool, result: &str) {
        let urgency = if urgent { "now" } else { "batched" };
        self.writes.with_label_values(&[urgency, result]).inc();
    }

    /// Counts the answers to probes of `count` addresses.
    pub(crate) fn probed(&self, count: usize, result: &Result<ProbeRound, String>) {
        let mut counts = [0; 3];
        match result {
            Ok(round) => {
                for (_, by) in &round.answers {
                    counts[usize::from(by.is_some())] += 1;
                }
            }
            Err(_) => counts[2] = u64::try_from(count).unwrap_or(u64::MAX),
        }
        for (result, count) in PROBED.into_iter().zip(counts) {
            self.probes.with_label_values(&[result]).inc_by(count);
        }
    }

    pub(crate) fn leak_freed(&self, reason: LeakReason) {
        self.freed.with_label_values(&[reason.as_str()]).inc();
    }

    /// Sets the gauges of addresses, blocks, conflicts and attachments. The series of pools without blocks are removed.
    #[expect(clippy::cast_precision_loss, reason = "gauges are floats")]
    pub(crate) fn set(&self, snapshot: &Snapshot) {
        self.attachments.set(figure(snapshot.attachments.len()));
        let mut before = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let pools = snapshot.blocks.iter().map(|it| &it.pool);
        // Claims have no series, because their number is not bounded.
        let pools: BTreeSet<String> = pools.filter(|it| !is_claim(it)).cloned().collect();
        for pool in before.difference(&pools) {
            let _ = self.conflicts.remove_label_values(&[pool]);
            for family in Family::ALL.map(label) {
                let _ = self.blocks.remove_label_values(&[pool, family]);
                for state in STATES {
                    let _ = self.addresses.remove_label_values(&[pool, family, state]);
                }
            }
        }
        for pool in &pools {
            let conflicts = snapshot.conflicts.iter().filter(|it| it.pool == *pool);
            let series = self.conflicts.with_label_values(&[pool]);
            series.set(figure(conflicts.count()));
        }
        for (pool, family) in pools.iter().flat_map(|it| Family::ALL.map(|of| (it, of))) {
            let (mut blocks, mut sums) = (0, [0u64; 3]);
            let all = snapshot.blocks.iter();
            for block in all.filter(|it| it.pool == *pool && it.cidr.family() == family) {
                let counts = block.counts;
                let counts = [counts.used, counts.cooling, counts.free];
                for (sum, count) in sums.iter_mut().zip(counts) {
                    *sum = sum.saturating_add(count);
                }
                blocks += i64::from(assigns(block));
            }
            let family = label(family);
            self.blocks.with_label_values(&[pool, family]).set(blocks);
            for (state, sum) in STATES.into_iter().zip(sums) {
                let series = self.addresses.with_label_values(&[pool, family, state]);
                series.set(sum as f64);
            }
        }
        *before = pools;
    }
}

/// The values of the label `result` of the counter of probes.
const PROBED: [&str; 3] = ["clean", "conflict", "failed"];

/// The values of the label `state` of address gauges.
const STATES: [&str; 3] = ["used", "cooling", "free"];

/// Converts a count to the value of a gauge.
pub(crate) fn figure(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Adds one to a gauge until this value is dropped.
#[derive(Debug)]
pub(crate) struct Counted(IntGauge);

impl Counted {
    pub(crate) fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
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
    fn the_series_of_a_pool_end_with_its_last_block() {
        let registry = Registry::new();
        let metrics = AgentMetrics::register(&registry).unwrap();
        let text = || {
            prometheus::TextEncoder::new()
                .encode_to_string(&registry.gather())
                .unwrap()
        };
        let claimed = block("10.0.0.64/32", "shop/db", 1, 0, 0);
        metrics.set(&snapshot(
            &[],
            &[block("10.0.0.0/26", "a", 5, 2, 54), claimed],
        ));
        let before = text();
        assert!(
            before
                .contains(r#"cadastre_agent_addresses{family="ipv4",pool="a",state="cooling"} 2"#),
            "{before}"
        );
        assert!(!before.contains("shop/db"), "a claim: {before}");
        assert!(before.contains(r#"cadastre_agent_leaks_freed_total{reason="reboot"} 0"#));
        metrics.set(&snapshot(&[], &[]));
        assert!(!text().contains("pool=\"a\""));
    }
}
