//! `make bench-scale`: measures Cadastre at the size of large clusters, on real control planes. Compares it with the
//! raw requests that the same work needs, and with other controllers. Prints tables in Markdown for
//! docs/performance.md.
//!
//! `cadastre-bench [podcidrs|blocks|pods|takeover|status|all] [NODES]`; `cadastre-bench node` is `make bench-node`.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use cadastre_e2e::ControlPlane;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::{Daemon, DaemonOptions};
use cadastre_e2e::metrics::{self, Sample};

mod blocks;
mod node;
mod podcidrs;
mod pods;
mod seen;
mod status;
mod takeover;

const ROUNDS: usize = 3;
const LIMIT: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_else(|| "all".to_owned());
    let count: u32 = match arguments.next() {
        Some(text) => text
            .parse()
            .with_context(|| format!("{text} is no number of nodes"))?,
        None => 5000,
    };
    match what.as_str() {
        "podcidrs" => podcidrs::run(count).await,
        "blocks" => blocks::run(count).await,
        "pods" => pods::run(count).await,
        "takeover" => takeover::run(count).await,
        "status" => status::run(count).await,
        "node" => node::run().await,
        "all" => {
            podcidrs::run(count).await?;
            say("")?;
            blocks::run(count).await?;
            say("")?;
            pods::run(count).await?;
            say("")?;
            takeover::run(count).await?;
            say("")?;
            status::run(count).await
        }
        other => {
            bail!(
                "{other}: what to measure is one of podcidrs, blocks, pods, takeover, status, all, node"
            )
        }
    }
}

fn say(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn progress(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "{text} ...")?)
}

fn median(values: impl Iterator<Item = Duration>) -> Duration {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[allow(clippy::cast_precision_loss)] // for display only
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn start(cluster: &ControlPlane, name: &str) -> Result<Daemon> {
    let options = DaemonOptions {
        name: name.to_owned(),
        args: vec!["controller".to_owned()],
        env: Vec::new(),
    };
    Daemon::start(cluster.folder(), &cluster.kubeconfig(ADMIN)?, &options)
}

/// Formats how many requests for the controllers' resources the API server answered between two scrapes.
fn grown(before: &[Sample], after: &[Sample]) -> String {
    let before = metrics::requests(before);
    let ours = [
        "nodes",
        "nodesubnets",
        "ippools",
        "ipamblocks",
        "pods",
        "servicecidrs",
    ];
    let mut counted: Vec<String> = Vec::new();
    for (request, n) in metrics::requests(after) {
        let n = n - before.get(&request).copied().unwrap_or(0);
        if n > 0 && ours.contains(&request.resource.as_str()) {
            counted.push(format!("{n} {} {}", request.verb, request.resource));
        }
    }
    counted.join(", ")
}
