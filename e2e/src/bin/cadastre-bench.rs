//! How long until N nodes have podCIDRs: `make bench-scale NODES=5000`.
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
    let count = match std::env::args().nth(1) {
        Some(text) => text.parse().context("usage: cadastre-bench [NODES]")?,
        None => 5_000,
    };
    let writers = [
        Writer::Raw { connections: 16 },
        Writer::Raw { connections: 32 },
        Writer::Raw { connections: 64 },
        Writer::Raw { connections: 128 },
        Writer::Kcm { qps: 5_000 },
        Writer::Cadastre,
    ];
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
    let mut best = f64::INFINITY;
    for writer in writers {
        let name = writer.name();
        eprintln!("{name}: {count} nodes …");
        let outcome = measure(writer, count)
            .await
            .with_context(|| format!("{name} failed"))?;
        let seconds = outcome.elapsed.as_secs_f64();
        if matches!(writer, Writer::Raw { .. }) {
            best = best.min(seconds);
        }
        table.add_row([
            name,
            format!("{seconds:.2}"),
            format!("{:.0}", f64::from(count) / seconds),
            format!("{:.2}", seconds / best),
            outcome
                .writer_peak
                .map_or("-".to_owned(), |bytes| (bytes >> 20).to_string()),
            format!("{:.2}", outcome.apiserver_cpu.as_secs_f64()),
        ]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(())
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
