//! How long until N nodes have podCIDRs: `make bench-scale NODES=5000 ROUNDS=3`.
//!
//! The writers take turns for some rounds and the best of each counts: on a shared machine the least
//! disturbed run says most.
//!
//! Each row has a control plane of its own and the same watching [`History`], so they differ in the
//! writer alone. *raw* knows every range beforehand and only sends PATCHes: the API server's own
//! speed, which no controller can beat. Times run from the start of the writer (raw: from its first
//! request) until the last node was seen with podCIDRs.

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::{ControlPlane, Daemon, History, KcmOptions, Options, Process, crds, nodes};
use comfy_table::Table;

const LIMIT: Duration = Duration::from_secs(900);
const POOL: &str = r#"{
  "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "bench"},
  "spec": {
    "allocate": "NodeCIDR",
    "ipv4": {"cidrs": ["10.0.0.0/11"], "blockSize": 24},
    "ipv6": {"cidrs": ["fd00:244::/48"], "blockSize": 64}
  }
}"#;

/// Who gives the nodes their podCIDRs.
#[derive(Clone, Copy)]
enum Writer {
    Raw { connections: usize },
    Kcm { qps: u32 },
    Cadastre,
}

struct Outcome {
    elapsed: Duration,
    writer_peak: Option<u64>,
    apiserver_cpu: Duration,
}

#[tokio::main]
async fn main() -> Result<()> {
    let number = |place, otherwise| match std::env::args().nth(place) {
        Some(text) => text
            .parse()
            .context("usage: cadastre-bench [NODES [ROUNDS]]"),
        None => Ok(otherwise),
    };
    let (count, rounds) = (number(1, 5_000)?, number(2, 3)?);
    let writers = [
        Writer::Raw { connections: 16 },
        Writer::Raw { connections: 32 },
        Writer::Raw { connections: 64 },
        Writer::Raw { connections: 128 },
        Writer::Kcm { qps: 5_000 },
        Writer::Cadastre,
    ];
    let mut best: Vec<Option<Outcome>> = writers.iter().map(|_| None).collect();
    for round in 1..=rounds {
        for (writer, best) in writers.iter().zip(&mut best) {
            let name = writer.name();
            let outcome = measure(*writer, count)
                .await
                .with_context(|| format!("{name} failed"))?;
            eprintln!(
                "round {round} of {rounds}: {name}: {:.2} s",
                outcome.elapsed.as_secs_f64()
            );
            if best
                .as_ref()
                .is_none_or(|best| outcome.elapsed < best.elapsed)
            {
                *best = Some(outcome);
            }
        }
    }
    let rows: Vec<(Writer, Outcome)> = writers
        .into_iter()
        .zip(best)
        .filter_map(|(writer, best)| Some((writer, best?)))
        .collect();
    writeln!(std::io::stdout(), "{}", table(&rows, count))?;
    Ok(())
}

fn table(rows: &[(Writer, Outcome)], count: u32) -> Table {
    let raw = rows
        .iter()
        .filter(|(writer, _)| matches!(writer, Writer::Raw { .. }));
    let floor = raw
        .map(|(_, outcome)| outcome.elapsed.as_secs_f64())
        .fold(f64::INFINITY, f64::min);
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "writer",
        "s",
        "nodes/s",
        "x best raw",
        "peak MiB",
        "API server CPU s",
    ]);
    for (writer, outcome) in rows {
        let seconds = outcome.elapsed.as_secs_f64();
        table.add_row([
            writer.name(),
            format!("{seconds:.2}"),
            format!("{:.0}", f64::from(count) / seconds),
            format!("{:.2}", seconds / floor),
            outcome
                .writer_peak
                .map_or("-".to_owned(), |bytes| (bytes >> 20).to_string()),
            format!("{:.2}", outcome.apiserver_cpu.as_secs_f64()),
        ]);
    }
    table
}

impl Writer {
    fn name(self) -> String {
        match self {
            Self::Raw { connections } => format!("raw, {connections} connections"),
            Self::Kcm { qps } => format!("kube-controller-manager, QPS {qps}"),
            Self::Cadastre => "cadastre".to_owned(),
        }
    }
}

async fn measure(writer: Writer, count: u32) -> Result<Outcome> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let client = cluster.client().await?;
    crds::install(&client).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    nodes::create(&cluster, count, nodes::numbered).await?;
    let history = History::start(client).await?;
    let cpu = cluster.apiserver()?.usage()?.cpu;
    let (elapsed, writer_peak) = match writer {
        Writer::Raw { connections } => (raw(&cluster, &history, count, connections).await?, None),
        Writer::Kcm { qps } => {
            let options = KcmOptions {
                qps,
                burst: 2 * qps,
                ..KcmOptions::node_ipam(&["10.0.0.0/11", "fd00:244::/48"])
            };
            let start = Instant::now();
            let kcm = cluster.start_kcm(&options)?;
            finish(&history, count, start, &kcm).await?
        }
        Writer::Cadastre => {
            let options = DaemonOptions {
                name: "bench".to_owned(),
                args: vec!["controller".to_owned()],
                env: Vec::new(),
            };
            let start = Instant::now();
            let mut daemon =
                Daemon::start(cluster.folder(), &cluster.kubeconfig(ADMIN)?, &options)?;
            finish(&history, count, start, daemon.process()).await?
        }
    };
    history.assert_no_duplicates();
    Ok(Outcome {
        elapsed,
        writer_peak,
        apiserver_cpu: cluster.apiserver()?.usage()?.cpu.saturating_sub(cpu),
    })
}

async fn raw(
    cluster: &ControlPlane,
    history: &History,
    count: u32,
    connections: usize,
) -> Result<Duration> {
    let calls = (0..count).map(|i| {
        let v4 = std::net::Ipv4Addr::from(0x0A00_0000 + (i << 8));
        nodes::assign(
            &format!("node-{i:05}"),
            &[format!("{v4}/24"), format!("fd00:244:0:{i:x}::/64")],
        )
    });
    let calls = calls.collect::<Result<_>>()?;
    let endpoint = cluster.endpoint()?;
    let start = Instant::now();
    endpoint.send_all(connections, calls).await?;
    Ok(history
        .wait_until_all_assigned(count as usize, LIMIT)
        .await?
        - start)
}

async fn finish(
    history: &History,
    count: u32,
    start: Instant,
    writer: &Process,
) -> Result<(Duration, Option<u64>)> {
    let end = history
        .wait_until_all_assigned(count as usize, LIMIT)
        .await
        .with_context(|| writer.log_tail(20))?;
    Ok((end - start, Some(writer.usage()?.peak_rss)))
}
