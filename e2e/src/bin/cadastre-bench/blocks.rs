//! Measures the allocation of blocks and, for comparison, the bare API requests that the allocation needs. There are
//! four phases: first blocks for all nodes, more blocks on demand, a pool edit, and the deletion of dead nodes' blocks.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_api::{AllocatedBlock, NodePool, NodePoolRanges, NodeSubnet, NodeSubnetSpec};
use cadastre_core::Cidr;
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::metrics::Sample;
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use cadastre_e2e::{Daemon, Fixtures, nodes};
use http::Method;
use k8s_openapi::jiff::Timestamp;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::seen::{Seen, Watching};
use super::{
    LIMIT, ROUNDS, beside_raw, beside_raw_header, grown, median, mib, progress, say, spent,
    until_writable,
};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, ipv4: {cidrs: [10.0.0.0/8], blockSize: 26}, quarantineSeconds: 60, idleSeconds: 86400}
";
/// The CIDR of [`POOL`].
const RANGE: &str = "10.0.0.0/8";
const BLOCKS: &str = "/apis/cadastre.dev/v1alpha1/ipamblocks";
const SUBNETS: &str = "/apis/cadastre.dev/v1alpha1/nodesubnets";

/// How long a phase took, and the processor time that it cost.
#[derive(Clone, Copy)]
struct Phase {
    wall: Duration,
    /// The processor time of the control plane and of this process
    others: Duration,
    /// The processor time of the controller; zero for raw requests
    own: Duration,
}

/// The phases of one round.
struct Phases {
    first: Phase,
    more: Phase,
    collected: Phase,
}

type Pick = fn(&Phases) -> Phase;

/// Further results of the controller's last round, for the report that is printed.
struct Details {
    requests: [String; 3],
    cpu: Duration,
    peak: u64,
    edit: String,
}

pub async fn run(count: u32) -> Result<()> {
    let (mut raws, mut ours, mut details) = (vec![], vec![], None);
    for round in 1..=ROUNDS {
        progress(&format!("blocks, round {round} of {ROUNDS}: raw requests"))?;
        raws.push(raw(count).await?);
        progress("cadastre")?;
        let (phases, words) = cadastre(count).await?;
        ours.push(phases);
        details = Some(words);
    }
    let Some(details) = details else {
        return Ok(());
    };
    beside_raw_header(&format!("{count} nodes"))?;
    let phases: [(&str, Pick); 3] = [
        ("first block (/26) each, from process start", |p| p.first),
        ("two more blocks each", |p| p.more),
        ("3 blocks of each dead node deleted, quarantine over", |p| {
            p.collected
        }),
    ];
    let mut work = Vec::new();
    for ((name, pick), requests) in phases.into_iter().zip(&details.requests) {
        let [raws, ours] = [&raws, &ours].map(|it| it.iter().map(pick).collect::<Vec<_>>());
        let [raw_walls, walls] = [&raws, &ours].map(|it| it.iter().map(|it| it.wall));
        beside_raw(
            name,
            &raw_walls.collect::<Vec<_>>(),
            &walls.collect::<Vec<_>>(),
            requests,
        )?;
        let seconds =
            |all: &[Phase], of: fn(&Phase) -> Duration| median(all.iter().map(of)).as_secs_f64();
        work.push(format!(
            "{:.1} s with raw requests, and {:.1} s with the controller, which itself used {:.1} s",
            seconds(&raws, |it| it.others),
            seconds(&ours, |it| it.others + it.own),
            seconds(&ours, |it| it.own),
        ));
    }
    say("")?;
    say(&format!("CPU of all programs: {}.", work.join("; ")))?;
    say(&format!(
        "Controller: {:.2} s CPU for all of it, {:.1} MiB peak. {}",
        details.cpu.as_secs_f64(),
        mib(details.peak),
        details.edit,
    ))
}

fn name(i: u32) -> String {
    format!("node-{i:05}")
}

fn block(i: u32) -> Result<Cidr> {
    let text = format!("{}/26", std::net::Ipv4Addr::from(0x0A00_0000 + (i << 6)));
    Ok(Cidr::parse_strict(&text)?)
}

fn create_block(i: u32, node: u32) -> Result<Call> {
    let cidr = block(i)?;
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
        "metadata": {"name": cadastre_api::block_name(&cidr)},
        "spec": {
            "cidr": cidr.to_string(), "pool": "bench", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": "Node", "name": name(node), "uid": format!("{node:036}")},
        },
    });
    Ok(Call::new(Method::POST, BLOCKS.to_owned(), JSON, &body))
}

/// What the controller and the others have spent before a phase of the controller.
struct Before {
    metrics: Vec<Sample>,
    others: Duration,
    own: Duration,
}

impl Before {
    async fn of(cluster: &ControlPlane, daemon: Option<&mut Daemon>) -> Result<Self> {
        let own = daemon.map(|it| it.process().usage()).transpose()?;
        Ok(Self {
            metrics: cluster.apiserver_metrics().await?,
            others: spent(cluster)?,
            own: own.map(|it| it.cpu).unwrap_or_default(),
        })
    }

    /// Returns what a phase that took `wall` cost, and its API requests.
    async fn phase(
        self,
        cluster: &ControlPlane,
        daemon: &mut Daemon,
        wall: Duration,
    ) -> Result<(Phase, String)> {
        let phase = Phase {
            wall,
            others: spent(cluster)?.saturating_sub(self.others),
            own: daemon.process().usage()?.cpu.saturating_sub(self.own),
        };
        Ok((
            phase,
            grown(&self.metrics, &cluster.apiserver_metrics().await?),
        ))
    }
}

/// Returns a NodeSubnet with the fields that the controller writes.
fn listing(node: u32, blocks: &[u32]) -> Result<Value> {
    let held = |i: &u32| {
        Ok(AllocatedBlock {
            cidr: block(*i)?.to_string(),
            uid: format!("{i:036}"),
            pool: "bench".to_owned(),
            claim: None,
            vmi_uid: None,
            standby: false,
            parent: None,
            recall: None,
            reserved: Vec::new(),
            on_request: Vec::new(),
        })
    };
    let pool = NodePool {
        name: "bench".to_owned(),
        ipv4: Some(NodePoolRanges {
            cidrs: vec![RANGE.to_owned()],
            gateway: None,
        }),
        ..NodePool::default()
    };
    let spec = NodeSubnetSpec {
        node_uid: Some(format!("{node:036}")),
        pools: vec![pool],
        blocks: blocks.iter().map(held).collect::<Result<_>>()?,
        ..NodeSubnetSpec::default()
    };
    Ok(serde_json::to_value(NodeSubnet::new(&name(node), spec))?)
}

async fn raw(count: u32) -> Result<Phases> {
    let nodes_count = usize::try_from(count)?;
    let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await?;
    // The API server has as many objects as in the other measurement.
    nodes::create(&cluster, count, nodes::numbered).await?;
    let endpoint = cluster.endpoint()?;
    let create_subnet = |node: u32, blocks: &[u32]| {
        let body = listing(node, blocks)?;
        anyhow::Ok(Call::new(Method::POST, SUBNETS.to_owned(), JSON, &body))
    };
    let creations = vec![create_block(0, 0)?, create_subnet(0, &[0])?];
    until_writable(&endpoint, creations).await?;
    // The same watches as in the other measurement, because the API server encodes each event for them.
    let mut watching = Watching::start(&client);
    let mut send = async |calls: Vec<Call>, done: &dyn Fn(&Seen) -> bool| -> Result<Phase> {
        let before = spent(&cluster)?;
        let begun = Instant::now();
        endpoint.send_all(nodes::CONNECTIONS, calls).await?;
        let wall = watching.until("raw requests", LIMIT, done).await?.at - begun;
        Ok(Phase {
            wall,
            others: spent(&cluster)?.saturating_sub(before),
            own: Duration::ZERO,
        })
    };
    let mut calls = Vec::new();
    for node in 0..count {
        calls.push(create_block(node, node)?);
        calls.push(create_subnet(node, &[node])?);
    }
    let first = send(calls, &|seen| seen.listed >= nodes_count).await?;
    let mut calls = Vec::new();
    for node in 0..count {
        let more = [count + 2 * node, count + 2 * node + 1];
        for i in more {
            calls.push(create_block(i, node)?);
        }
        let path = format!("{SUBNETS}/{}", name(node));
        let body = listing(node, &[node, more[0], more[1]])?;
        calls.push(Call::new(
            Method::PATCH,
            path,
            MERGE_PATCH,
            &json!({"spec": body["spec"]}),
        ));
    }
    let more = send(calls, &|seen| seen.listed >= 3 * nodes_count).await?;
    let calls = (0..3 * count)
        .map(|i| {
            let path = format!("{BLOCKS}/{}", cadastre_api::block_name(&block(i)?));
            Ok(Call::new(Method::DELETE, path, JSON, &json!({})))
        })
        .collect::<Result<Vec<Call>>>()?;
    let collected = send(calls, &|seen| seen.allocated == 0).await?;
    Ok(Phases {
        first,
        more,
        collected,
    })
}

async fn cadastre(count: u32) -> Result<(Phases, Details)> {
    let nodes_count = usize::try_from(count)?;
    let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    nodes::create(&cluster, count, nodes::numbered).await?;
    let uids: Vec<(String, String)> = nodes::list(&client)
        .await?
        .into_iter()
        .filter_map(|node| Some((node.metadata.name?, node.metadata.uid?)))
        .collect();
    let mut watching = Watching::start(&client);

    let before = Before::of(&cluster, None).await?;
    let begun = Instant::now();
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    let done = |seen: &Seen| seen.listed >= nodes_count;
    let first = watching.until("first blocks", LIMIT, done).await?.at - begun;
    let (first, of_first) = before.phase(&cluster, &mut daemon, first).await?;

    // The controller is stopped while the agents' demand is written, so that it finds the demand of all agents when it
    // resumes.
    daemon.process().signal(Signal::STOP)?;
    let demand = |demand: u32| {
        uids.iter()
            .map(|(name, uid)| {
                let path = format!("{SUBNETS}/{name}/status");
                let status = json!({"status": {"nodeUID": uid, "pools": [{"pool": "bench", "demand": demand}]}});
                Call::new(Method::PATCH, path, MERGE_PATCH, &status)
            })
            .collect::<Vec<Call>>()
    };
    let endpoint = cluster.endpoint()?;
    // A /26 has 61 addresses for pods. So a node that demands 180 addresses gets three blocks and no fourth.
    endpoint
        .send_all(nodes::CONNECTIONS, demand(3 * 60))
        .await?;
    let before = Before::of(&cluster, Some(&mut daemon)).await?;
    let begun = Instant::now();
    daemon.process().signal(Signal::CONT)?;
    let done = |seen: &Seen| seen.listed >= 3 * nodes_count;
    let more = watching.until("more blocks", LIMIT, done).await?.at - begun;
    let (more, of_more) = before.phase(&cluster, &mut daemon, more).await?;

    let edit = pool_edit(&cluster, &mut daemon, count).await?;
    let usage = daemon.process().usage()?;
    daemon.process().stop(Duration::from_secs(30)).await?;

    // All nodes are deleted while no controller runs, so that the next controller finds all of them gone at its start.
    let names: Vec<String> = uids.into_iter().map(|(name, _)| name).collect();
    nodes::delete(&cluster, names).await?;
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    let quarantined = |seen: &Seen| seen.entered == 3 * nodes_count;
    let all_quarantined = watching
        .until("all blocks in quarantine", LIMIT, quarantined)
        .await?;
    anyhow::ensure!(
        all_quarantined.quarantined == 3 * nodes_count,
        "the quarantine was over before all blocks were in it: choose a longer one"
    );
    daemon.wait_ready(LIMIT).await?;
    let before = Before::of(&cluster, Some(&mut daemon)).await?;
    let over = all_quarantined.until.context("no block has a time")?;
    let begun = Instant::now() + Duration::try_from(over - Timestamp::now())?;
    let none = |seen: &Seen| seen.quarantined + seen.allocated == 0;
    let collected = watching
        .until("all blocks collected", LIMIT, none)
        .await?
        .at
        - begun;
    let (collected, of_collected) = before.phase(&cluster, &mut daemon, collected).await?;
    let peak = usage.peak_rss.max(daemon.process().usage()?.peak_rss);
    let details = Details {
        requests: [of_first, of_more, of_collected],
        cpu: usage.cpu + daemon.process().usage()?.cpu,
        peak,
        edit,
    };
    let phases = Phases {
        first,
        more,
        collected,
    };
    Ok((phases, details))
}

/// Measures the processor time and the API requests of a pool edit while all blocks exist. Returns a sentence for the
/// report.
async fn pool_edit(cluster: &ControlPlane, daemon: &mut Daemon, count: u32) -> Result<String> {
    let quiet = Duration::from_secs(8);
    tokio::time::sleep(quiet).await;
    let (before, cpu) = (
        cluster.apiserver_metrics().await?,
        daemon.process().usage()?.cpu,
    );
    tokio::time::sleep(quiet).await;
    let idle = daemon.process().usage()?.cpu.saturating_sub(cpu);
    let cpu = daemon.process().usage()?.cpu;
    let patch = r#"patch ippools.cadastre.dev bench --type=merge -p {"spec":{"priority":7}}"#;
    cluster.kubectl_line(patch).await?;
    tokio::time::sleep(quiet).await;
    let spent = daemon.process().usage()?.cpu.saturating_sub(cpu);
    let requests = grown(&before, &cluster.apiserver_metrics().await?);
    Ok(format!(
        "A pool edit with {} blocks: {:.2} s CPU in {} s ({:.2} s without), {requests}.",
        3 * count,
        spent.as_secs_f64(),
        quiet.as_secs(),
        idle.as_secs_f64(),
    ))
}
