//! `cadastre metrics`: prints the source of docs/metrics.md.

use std::io::Write;

use anyhow::Context;
use cadastre_agent::metrics::AgentMetrics;
use cadastre_controller::cluster::leader_metrics::LeaderMetrics;
use cadastre_controller::telemetry::ControllerMetrics;
use cadastre_daemon::telemetry::catalog::{self, Metric, noted, of_daemon};
use prometheus::Error;

/// Print the list of all metrics as Markdown
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn exec(_: &Args) -> anyhow::Result<()> {
    let text = page().context("the list cannot be made")?;
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("standard output is closed")
}

/// Lists the controller's metrics, without those of its process.
pub fn of_controller() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        of_daemon(registry)?;
        LeaderMetrics::register(registry, "cadastre-controller")?;
        ControllerMetrics::register(registry)?;
        Ok(())
    })
}

/// Lists the agent's metrics, without those of its process.
pub fn of_agent() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        of_daemon(registry)?;
        AgentMetrics::register(registry)?;
        Ok(())
    })
}

/// Returns the Markdown page with the metrics of both daemons.
pub fn page() -> Result<String, Error> {
    Ok(catalog::page(vec![
        ("Controller", of_controller()?),
        ("Agent", of_agent()?),
    ]))
}
