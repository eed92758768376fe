//! Measures how fast several contenders (Cadastre, kube-controller-manager, raw requests) allocate podCIDRs to many
//! nodes. One run measures all contenders, each in three rounds, and prints the medians.
//!
//! Every measurement has its own control plane, whose nodes are created before the contender starts. A measurement ends
//! when a watch delivers the last node's podCIDR, so nothing polls meanwhile. Prints a table in Markdown for
//! docs/performance.md.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::metrics;
use cadastre_e2e::process::{Process, Usage};
use cadastre_e2e::raw::Call;
use cadastre_e2e::{History, KcmOptions, crds, nodes};

use super::{LIMIT, ROUNDS, grown, lists, median, mib, progress, say, spent, until_subnets};

/// The number of nodes with which kube-controller-manager is measured with its default settings. With these settings,
/// kube-controller-manager allocates podCIDRs to only about 20 nodes a second.
const DEFAULT_NODES: u32 = 1000;
const RANGE: &str = "10.0.0.0/10";
const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: NodeCIDR, ipv4: {cidrs: [10.0.0.0/10], blockSize: 24}}
";

/// The measurements of one contender in one round.
struct Run {
    wall: Duration,
    /// Processor time of the control plane, this process and the contender together
    work: Duration,
    requests: String,
    usage: Option<Usage>,
}

pub async fn run(count: u32) -> Result<()> {
    let (mut raw, mut ours, mut tuned, mut default) = (vec![], vec![], vec![], vec![]);
    let mut restarts = Vec::new();
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}: raw PATCHes"))?;
        raw.push(raw_patches(count).await?);
        progress("cadastre")?;
        let (run, restart) = cadastre(count).await?;
        ours.push(run);
        restarts.push(restart);
        progress("kube-controller-manager, --kube-api-qps=5000")?;
        tuned.push(kcm(count, 5000).await?);
        progress("kube-controller-manager, defaults")?;
        default.push(kcm(DEFAULT_NODES.min(count), 20).await?);
    }
    let floor = (
        median(raw.iter().map(|run| run.wall)),
        median(raw.iter().map(|run| run.work)),
    );
    say(
        "| contender | nodes | wall, median (all) | nodes/s | x raw | CPU s of all | x raw | its own | peak MiB | API requests |",
    )?;
    say("|---|---|---|---|---|---|---|---|---|---|")?;
    row("raw parallel PATCH", count, &raw, floor)?;
    row("cadastre", count, &ours, floor)?;
    row("kube-controller-manager, qps 5000", count, &tuned, floor)?;
    row(
        "kube-controller-manager, defaults",
        DEFAULT_NODES.min(count),
        &default,
        floor,
    )?;
    say("")?;
    let of = |pick: fn(&Restart) -> Duration| median(restarts.iter().map(pick)).as_secs_f64();
    let (lists, ready) = (of(|r| r.lists), of(|r| r.ready));
    let rest = restarts.iter().map(|r| r.rss).max().unwrap_or_default();
    let peak = restarts.iter().map(|r| r.peak).max().unwrap_or_default();
    say(&format!(
        "Restart to ready with {count} nodes: {ready:.2} s; the raw LISTs it needs, side by side: {lists:.2} s; ratio {:.2}. \
         Memory after the restart: {:.1} MiB at rest, {:.1} MiB peak.",
        ready / lists,
        mib(rest),
        mib(peak),
    ))
}

fn row(name: &str, count: u32, runs: &[Run], floor: (Duration, Duration)) -> Result<()> {
    let wall = median(runs.iter().map(|run| run.wall)).as_secs_f64();
    let work = median(runs.iter().map(|run| run.work)).as_secs_f64();
    let all: Vec<String> = runs
        .iter()
        .map(|run| format!("{:.2}", run.wall.as_secs_f64()))
        .collect();
    let cpu = runs
        .iter()
        .filter_map(|run| run.usage)
        .map(|usage| usage.cpu);
    let peak = runs
        .iter()
        .filter_map(|run| run.usage)
        .map(|usage| usage.peak_rss)
        .max();
    let cpu = match runs.first().and_then(|run| run.usage) {
        Some(_) => format!("{:.2}", median(cpu).as_secs_f64()),
        None => "-".to_owned(),
    };
    let peak = peak.map_or_else(|| "-".to_owned(), |peak| format!("{:.1}", mib(peak)));
    let requests = runs
        .last()
        .map(|run| run.requests.as_str())
        .unwrap_or_default();
    say(&format!(
        "| {name} | {count} | {wall:.2} s ({}) | {:.0} | {:.2} | {work:.2} | {:.2} | {cpu} | {peak} | {requests} |",
        all.join(", "),
        f64::from(count) / wall,
        wall / floor.0.as_secs_f64(),
        work / floor.1.as_secs_f64(),
    ))
}

/// Starts a control plane with `count` nodes, and returns when the recording has observed all nodes.
async fn cluster(count: u32) -> Result<(ControlPlane, History)> {
    let cluster = ControlPlane::start(Options::default()).await?;
    nodes::create(&cluster, count, nodes::numbered).await?;
    let history = History::start(cluster.client().await?).await?;
    history
        .wait_until_live(usize::try_from(count)?, LIMIT)
        .await?;
    Ok((cluster, history))
}

/// The values of counters immediately before a contender starts.
struct Before {
    metrics: Vec<metrics::Sample>,
    spent: Duration,
    begun: Instant,
}

impl Before {
    async fn of(cluster: &ControlPlane) -> Result<Self> {
        Ok(Self {
            metrics: cluster.apiserver_metrics().await?,
            spent: spent(cluster)?,
            begun: Instant::now(),
        })
    }
}

/// Waits until the last node has its podCIDRs, and returns the measurements. `process` is the contender, or `None` if
/// this process itself has sent the raw requests.
async fn measure(
    cluster: &ControlPlane,
    history: &History,
    count: u32,
    before: Before,
    process: Option<&Process>,
) -> Result<Run> {
    let last = history
        .wait_until_all_assigned(usize::try_from(count)?, LIMIT)
        .await?;
    history.assert_no_duplicates();
    let usage = process.map(Process::usage).transpose()?;
    let work = spent(cluster)?.saturating_sub(before.spent);
    let after = cluster.apiserver_metrics().await?;
    Ok(Run {
        wall: last.duration_since(before.begun),
        work: work + usage.map(|it| it.cpu).unwrap_or_default(),
        requests: grown(&before.metrics, &after),
        usage,
    })
}

async fn raw_patches(count: u32) -> Result<Run> {
    let (cluster, history) = cluster(count).await?;
    let calls = (0..count)
        .map(|i| {
            let range = format!("{}/24", std::net::Ipv4Addr::from(0x0A00_0000 + (i << 8)));
            nodes::assign(&format!("node-{i:05}"), &[range])
        })
        .collect::<Result<Vec<Call>>>()?;
    let before = Before::of(&cluster).await?;
    cluster
        .endpoint()?
        .send_all(nodes::CONNECTIONS, calls)
        .await?;
    measure(&cluster, &history, count, before, None).await
}

async fn kcm(count: u32, qps: u32) -> Result<Run> {
    let (cluster, history) = cluster(count).await?;
    let burst = if qps > 20 { qps } else { 30 };
    let options = KcmOptions {
        qps,
        burst,
        ..KcmOptions::node_ipam(&[RANGE])
    };
    let before = Before::of(&cluster).await?;
    let process = cluster.start_kcm(&options)?;
    measure(&cluster, &history, count, before, Some(&process)).await
}

/// Measurements of a controller that is restarted while all nodes have podCIDRs.
struct Restart {
    lists: Duration,
    ready: Duration,
    rss: u64,
    peak: u64,
}

async fn cadastre(count: u32) -> Result<(Run, Restart)> {
    let (cluster, history) = cluster(count).await?;
    crds::install(&cluster.client().await?).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    let before = Before::of(&cluster).await?;
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    let run = measure(&cluster, &history, count, before, Some(daemon.process())).await?;
    until_subnets(&cluster, count).await?;
    daemon.process().stop(Duration::from_secs(30)).await?;

    let lists = lists(&cluster).await?;
    let begun = Instant::now();
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(LIMIT).await?;
    let ready = begun.elapsed();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let rest = daemon.process().usage()?;
    let restart = Restart {
        lists,
        ready,
        rss: rest.rss,
        peak: rest.peak_rss,
    };
    Ok((run, restart))
}
