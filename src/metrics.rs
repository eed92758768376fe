//! `cadastre metrics`: prints the list of all metrics, from which docs/metrics.md is generated.

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

/// Returns the controller's metrics, without the general metrics of a process, such as CPU and memory.
pub fn of_controller() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        of_daemon(registry)?;
        LeaderMetrics::register(registry, "cadastre-controller")?;
        ControllerMetrics::register(registry)?;
        Ok(())
    })
}

/// Returns the agent's metrics, without the general metrics of a process, such as CPU and memory.
pub fn of_agent() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        of_daemon(registry)?;
        AgentMetrics::register(registry)?;
        Ok(())
    })
}

/// Returns the Markdown page that lists the metrics of the controller and the agent.
pub fn page() -> Result<String, Error> {
    Ok(catalog::page(vec![
        ("Controller", of_controller()?),
        ("Agent", of_agent()?),
    ]))
}
