//! Metrics of the leader election: whether this process leads, how often that changed, and failed calls.

use prometheus::{Error, IntCounter, IntGauge, IntGaugeVec, Opts, Registry};

use cadastre_daemon::telemetry::catalog::register;

/// The registered metrics of this process in the election for one Lease.
#[derive(Clone)]
pub struct LeaderMetrics {
    /// Gauge: 1 while this process leads
    pub leading: IntGauge,
    /// Counter: how often this process won or lost leadership
    pub transitions: IntCounter,
    /// Counter: failed calls for the Lease
    pub errors: IntCounter,
}

impl LeaderMetrics {
    /// Registers the metrics. `name` is the name of the Lease, which becomes the label `name`. Fails if a metric is
    /// registered already.
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
                "Times that this process started or stopped leading",
            )?,
            errors: counter(
                "cadastre_lease_errors_total",
                "Requests for the Lease that failed or were not answered",
            )?,
        })
    }
}
