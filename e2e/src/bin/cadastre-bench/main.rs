//! `make bench-scale`: measures Cadastre at the size of large clusters, on real control planes. For comparison, also
//! measures the bare requests that the same work needs, and other controllers. Prints tables in Markdown for
//! docs/performance.md.
//!
//! Usage: `cadastre-bench [podcidrs|blocks|claims|claim-adds|pods|routes|takeover|status|stand-in|all] [NODES]`, or
//! `cadastre-bench node`, which `make bench-node` runs.

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use cadastre_api::NodeSubnet;
use cadastre_e2e::metrics::{self, Sample};
use cadastre_e2e::process::usage;
use cadastre_e2e::raw::{Call, Endpoint, JSON, PROTOBUF};
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, nodes};
use http::Method;
use kube::Api;
use kube::api::ListParams;

mod blocks;
mod claim_adds;
mod claims;
mod node;
mod podcidrs;
mod pods;
mod routes;
mod seen;
mod stand_in;
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
        // The argument of the claims bench is a number of claims, and there are two claims for each node.
        "claims" => {
            claims::run(2 * count).await?;
            say("")?;
            claim_adds::run().await
        }
        "claim-adds" => claim_adds::run().await,
        "pods" => pods::run(count).await,
        "routes" => routes::run(count).await,
        "takeover" => takeover::run(count).await,
        "status" => status::run(count).await,
        "stand-in" => stand_in::run(count).await,
        "node" => node::run().await,
        "all" => {
            podcidrs::run(count).await?;
            say("")?;
            blocks::run(count).await?;
            say("")?;
            claims::run(2 * count).await?;
            say("")?;
            claim_adds::run().await?;
            say("")?;
            pods::run(count).await?;
            say("")?;
            routes::run(count).await?;
            say("")?;
            takeover::run(count).await?;
            say("")?;
            status::run(count).await
        }
        other => {
            bail!(
                "{other}: what to measure is one of podcidrs, blocks, claims, claim-adds, pods, routes, takeover, status, stand-in, all, node"
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

/// Returns the processor time that the control plane and this process have used so far. This process sends the raw
/// requests and runs watches.
fn spent(cluster: &ControlPlane) -> Result<Duration> {
    let own = usage(std::process::id())?;
    let theirs = [cluster.apiserver()?.usage()?, cluster.etcd()?.usage()?];
    Ok(own.cpu + theirs[0].cpu + theirs[1].cpu)
}

/// Prints the header of a table that compares the controller with raw requests, phase by phase.
fn beside_raw_header(size: &str) -> Result<()> {
    say(&format!(
        "| {size} | raw, median | cadastre, median (all) | x raw | API requests |"
    ))?;
    say("|---|---|---|---|---|")
}

/// Prints the row of one phase: how long the raw requests and the controller took in each round.
fn beside_raw(phase: &str, raws: &[Duration], ours: &[Duration], requests: &str) -> Result<()> {
    let floor = median(raws.iter().copied()).as_secs_f64();
    let wall = median(ours.iter().copied()).as_secs_f64();
    let all = ours.iter().map(|it| format!("{:.2}", it.as_secs_f64()));
    let all: Vec<String> = all.collect();
    say(&format!(
        "| {phase} | {floor:.2} s | {wall:.2} s ({}) | {:.2} | {requests} |",
        all.join(", "),
        wall / floor,
    ))
}

#[allow(clippy::cast_precision_loss)] // for display only
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The paths of the LIST requests that a controller sends when it starts, and how the answers are encoded.
const LISTS: [(&str, &str); 8] = [
    ("/api/v1/nodes", PROTOBUF),
    ("/api/v1/pods", PROTOBUF),
    ("/apis/cadastre.dev/v1alpha1/nodesubnets", JSON),
    ("/apis/cadastre.dev/v1alpha1/noderoutes", JSON),
    ("/apis/cadastre.dev/v1alpha1/ippools", JSON),
    ("/apis/cadastre.dev/v1alpha1/ipamblocks", JSON),
    ("/apis/cadastre.dev/v1alpha1/ipclaims", JSON),
    ("/apis/networking.k8s.io/v1/servicecidrs", JSON),
];

/// Waits until the API server accepts creations of new kinds: it answers the first ones only some two seconds after it
/// has begun to serve the kinds. `creations` has one for each kind; they are dry runs, so they leave nothing.
async fn until_writable(endpoint: &Endpoint, creations: Vec<Call>) -> Result<()> {
    let dry = creations.into_iter().map(|call| Call {
        path: format!("{}?dryRun=All", call.path),
        ..call
    });
    endpoint.send_all(nodes::CONNECTIONS, dry.collect()).await?;
    Ok(())
}

/// Measures how long the controller's LIST requests take if they are sent concurrently and the answers are not decoded.
async fn lists(cluster: &ControlPlane) -> Result<Duration> {
    let list = |(path, accept): (&str, &'static str)| Call {
        accept,
        ..Call::without_body(Method::GET, path.to_owned())
    };
    let begun = Instant::now();
    let calls = LISTS.map(list).into();
    cluster.endpoint()?.send_all(LISTS.len(), calls).await?;
    Ok(begun.elapsed())
}

/// Waits until every node has a NodeSubnet, which the controller creates after the podCIDRs.
async fn until_subnets(cluster: &ControlPlane, count: u32) -> Result<()> {
    let subnets = Api::<NodeSubnet>::all(cluster.client().await?);
    let count = usize::try_from(count)?;
    until("every node has a NodeSubnet", LIMIT, async || {
        let found = subnets.list_metadata(&ListParams::default()).await?;
        let found = found.items.len();
        ensure!(found >= count, "{found} of {count} have one");
        Ok(Some(()))
    })
    .await
}

/// Formats how many requests for the controllers' resources the API server answered between two reads of its metrics.
fn grown(before: &[Sample], after: &[Sample]) -> String {
    let before = metrics::requests(before);
    let ours = [
        "nodes",
        "nodesubnets",
        "ippools",
        "ipamblocks",
        "ipclaims",
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
