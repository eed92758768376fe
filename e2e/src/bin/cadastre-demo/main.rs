//! `make run`: runs a control plane, the controller, the sample pools and `NODES` nodes of two kinds, with pods that
//! come and go, until Ctrl-C. Nothing is left behind. If this host can run real nodes, two of them join with the node
//! agent, and pods in real sandboxes get their addresses.

mod ground;
mod hints;
mod life;

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{AllocationMode, IPPool, NodeSubnet};
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{History, crds, nodes};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use ground::Ground;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use tokio::signal::unix::{SignalKind, signal};

/// A table shows at most this many nodes. Further nodes are only counted.
const ROWS: usize = 24;

/// The maximum of `NODES`. The sample pools have ranges for slightly more nodes.
const MOST: u32 = 1000;

/// The maximum time of each step. Building programs, which happens once, is not limited.
const LIMIT: Duration = Duration::from_secs(120);

#[tokio::main]
async fn main() -> Result<()> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    tokio::select! {
        done = demo() => done,
        _ = interrupt.recv() => say("\nended; nothing is left of it"),
        _ = terminate.recv() => say("\nended; nothing is left of it"),
    }
}

fn say(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

/// Runs the demo. Once everything runs, this function returns only if there is an error.
async fn demo() -> Result<()> {
    let count = match std::env::var("NODES") {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|count| (1..=MOST).contains(count))
            .with_context(|| {
                format!("NODES={text} is no number from 1 to {MOST}, which the sample pools hold")
            })?,
        Err(_) => 20,
    };
    say("starting etcd and kube-apiserver ...")?;
    let ground = Ground::start().await?;
    let cluster = ground.cluster();
    let client = cluster.client().await?;
    let history = History::start(client.clone()).await?;

    say("applying the CRDs and config/samples, starting cadastre controller ...")?;
    crds::install(&client).await?;
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/samples");
    cluster
        .kubectl(&[Path::new("apply"), Path::new("-f"), &samples])
        .await?;
    let mut daemon = start_controller(cluster, ADMIN, &[])?;
    daemon.wait_ready(LIMIT).await?;

    say(&format!("creating {count} nodes of two kinds ..."))?;
    let begun = Instant::now();
    nodes::create(cluster, count, make).await?;
    let last = history
        .wait_until_all_assigned(usize::try_from(count)?, LIMIT)
        .await?;
    let took = last.duration_since(begun);
    settled(&client, count).await?;

    say(&format!("\n{}\n", node_table(&client).await?))?;
    say(&format!("{}\n", pool_table(&client).await?))?;
    say(&format!(
        "{count} nodes had their podCIDRs {:.2} s after the first one was created.\n",
        took.as_secs_f64()
    ))?;
    let tools = hints::tools(&cluster.folder().join("bin"))?;
    let kubeconfig = cluster.kubeconfig(ADMIN)?;
    let admin = format!("http://{}", daemon.admin_address());
    say(&hints::text(&kubeconfig, &tools, &admin))?;
    let _machines = match &ground {
        Ground::Plain(_, reason) => {
            say(&format!("Real nodes cannot run here: {reason}.\n"))?;
            Vec::new()
        }
        Ground::Site(site) => {
            say(
                "starting two real nodes with cadastre agent and cadastre-ipam, and pods on them ...",
            )?;
            let (machines, table) = ground::machines(site).await?;
            say(&format!("\n{table}\n"))?;
            machines
        }
    };
    // `idleSeconds` and `cooldownSeconds` are short, so that blocks return to the pool within seconds.
    let soon = r#"patch ippools.cadastre.dev pods --type=merge -p {"spec":{"idleSeconds":5,"cooldownSeconds":1}}"#;
    cluster.kubectl_line(soon).await?;
    let mut life = life::Life::start(cluster, &client).await?;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        daemon.process().check_running()?;
        if let Some(line) = life.step().await? {
            say(&line)?;
        }
    }
}

/// Returns node `i`. Nodes with an even number are at the edge and get small IPv4 ranges. Nodes with an odd number are
/// dual-stack gateways.
fn make(i: u32) -> Node {
    let mut node = nodes::numbered(i);
    let (key, value) = if i.is_multiple_of(2) {
        ("example.com/site", "edge")
    } else {
        ("example.com/role", "ingress")
    };
    node.labels_mut().insert(key.to_owned(), value.to_owned());
    node
}

/// Waits until NodeSubnets and the pools' statuses, which are written after the podCIDRs, cover all nodes.
async fn settled(client: &Client, count: u32) -> Result<()> {
    let subnets = Api::<NodeSubnet>::all(client.clone());
    let pools = Api::<IPPool>::all(client.clone());
    let all = ListParams::default();
    until("all nodes are counted", LIMIT, async || {
        let recorded = subnets.list(&all).await?.items.len();
        let counted: i64 = pools
            .list(&all)
            .await?
            .iter()
            .filter(|pool| pool.spec.allocation_mode == AllocationMode::NodeCIDR)
            .filter_map(|pool| pool.status.as_ref()?.nodes)
            .sum();
        ensure!(
            recorded == usize::try_from(count)? && counted == i64::from(count),
            "{recorded} NodeSubnets and {counted} counted nodes of {count}"
        );
        Ok(Some(()))
    })
    .await
}

async fn node_table(client: &Client) -> Result<Table> {
    let subnets = Api::<NodeSubnet>::all(client.clone());
    let subnets = subnets.list(&ListParams::default()).await?.items;
    let mut table = Table::new();
    table
        .load_preset(NOTHING)
        .set_header(["NODE", "PODCIDRS", "POOL"]);
    for subnet in subnets.iter().take(ROWS) {
        let held = &subnet.spec.pod_cidrs;
        let cidrs: Vec<&str> = held.iter().map(|range| range.cidr.as_str()).collect();
        let pool = held.first().and_then(|range| range.pool.as_deref());
        table.add_row([&subnet.name_any(), &cidrs.join(", "), pool.unwrap_or("-")]);
    }
    if let Some(more) = subnets.len().checked_sub(ROWS).filter(|more| *more > 0) {
        table.add_row([format!("... and {more} more")]);
    }
    Ok(table)
}

async fn pool_table(client: &Client) -> Result<Table> {
    let pools = Api::<IPPool>::all(client.clone());
    let mut table = Table::new();
    let head = [
        "POOL", "FAMILY", "CIDRS", "BLOCK", "CAPACITY", "HELD", "FREE", "USED",
    ];
    table.load_preset(NOTHING).set_header(head);
    for pool in pools.list(&ListParams::default()).await? {
        let status = pool.status.clone().unwrap_or_default();
        let spec = &pool.spec;
        let v4 = spec.ipv4.as_ref().zip(spec.ipv4_block_size());
        let v4 = v4.map(|(r, size)| ("IPv4", &r.cidrs, size, status.ipv4));
        let v6 = spec.ipv6.as_ref().zip(spec.ipv6_block_size());
        let v6 = v6.map(|(r, size)| ("IPv6", &r.cidrs, size, status.ipv6));
        for (family, cidrs, size, figures) in v4.into_iter().chain(v6) {
            let figures = figures.unwrap_or_default();
            table.add_row([
                pool.name_any(),
                family.to_owned(),
                cidrs.join(", "),
                format!("/{size}"),
                figures.capacity,
                figures.allocated,
                figures.free,
                figures.utilization,
            ]);
        }
    }
    Ok(table)
}
