//! Measures the controller with far more nodes and pods than a real API server can have here, against a stand-in
//! ([`cadastre_e2e::stand_in`]).

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::control_plane::Options;
use cadastre_e2e::daemon::{Daemon, DaemonOptions};
use cadastre_e2e::raw::{Call, JSON};
use cadastre_e2e::scratch::Scratch;
use cadastre_e2e::stand_in::{Recorded, Size, StandIn, node_name, pod_cidr};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, nodes};
use http::Method;
use kube::ResourceExt as _;
use serde_json::json;

use super::{LIMIT, ROUNDS, median, mib, pods, progress, say, takeover};

const PODS_A_NODE: u32 = 20;
/// The number of nodes that join at once
const JOINS: u32 = 5_000;
const REST: Duration = Duration::from_secs(20);
const POOLS: &str = "/apis/cadastre.dev/v1alpha1/ippools";
const SUBNETS: &str = "/apis/cadastre.dev/v1alpha1/nodesubnets";

pub async fn run(count: u32) -> Result<()> {
    progress("a Node and a Pod of a real API server")?;
    let recorded = recorded().await?;
    let size = Size {
        nodes: count,
        pods_a_node: PODS_A_NODE,
    };
    // The raw requests go to another stand-in, whose nodes no controller watches.
    let small = Size {
        nodes: 0,
        pods_a_node: 1,
    };
    let bare = StandIn::start(recorded.clone(), small).await?;
    let stand_in = StandIn::start(recorded, size).await?;
    let pool = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "bench"},
        "spec": {"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.0.0.0/8"], "blockSize": 26}},
    });
    stand_in.put(POOLS, pool);
    let scratch = Scratch::new()?;
    let start = |name: &str| {
        let options = DaemonOptions {
            name: name.to_owned(),
            args: vec!["controller".to_owned()],
            env: Vec::new(),
        };
        Daemon::start(
            scratch.path(),
            &stand_in.kubeconfig(scratch.path())?,
            &options,
        )
    };

    progress("a NodeSubnet for each node")?;
    let mut daemon = start("first")?;
    let all = usize::try_from(count)?;
    until("every node has a NodeSubnet", LIMIT, async || {
        let found = stand_in.count(SUBNETS);
        ensure!(found >= all, "{found} of {all} have one");
        Ok(Some(()))
    })
    .await?;
    daemon.process().stop(Duration::from_secs(30)).await?;
    stand_in.take_requests();

    progress("restart")?;
    let begun = Instant::now();
    let mut daemon = start("second")?;
    daemon.wait_ready(LIMIT).await?;
    let ready = begun.elapsed();
    tokio::time::sleep(REST).await;
    let rest = daemon.process().usage()?;
    let requests = stand_in.take_requests();
    say(&format!(
        "{count} nodes of 15 KB, {} pods: restart to ready {:.2} s, {:.1} MiB at rest ({:.1} peak), {:.2} s of \
         processor time. Requests: {requests}.",
        count * PODS_A_NODE,
        ready.as_secs_f64(),
        mib(rest.rss),
        mib(rest.peak_rss),
        rest.cpu.as_secs_f64(),
    ))?;

    let (mut raws, mut ours) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        progress(&format!("{JOINS} nodes join, round {}", round + 1))?;
        raws.push(raw(&bare).await?);
        let before = stand_in.assigned();
        let begun = Instant::now();
        stand_in.join(JOINS);
        until("every node has a podCIDR", LIMIT, async || {
            let missing = before + usize::try_from(JOINS)? - stand_in.assigned();
            ensure!(missing == 0, "{missing} lack one");
            Ok(Some(()))
        })
        .await?;
        ours.push(begun.elapsed());
        tokio::time::sleep(REST).await;
    }
    let (raw, our) = (median(raws.into_iter()), median(ours.into_iter()));
    let after = daemon.process().usage()?;
    say(&format!(
        "{JOINS} nodes that join have podCIDRs after {:.2} s, raw {:.2} s: ratio {:.2}. {:.1} MiB afterwards ({:.1} peak).",
        our.as_secs_f64(),
        raw.as_secs_f64(),
        our.as_secs_f64() / raw.as_secs_f64(),
        mib(after.rss),
        mib(after.peak_rss),
    ))
}

/// Reads a Node of 15 KB and a Pod from a real API server.
async fn recorded() -> Result<Recorded> {
    let (cluster, hand) = with_crds(Options::default()).await?;
    nodes::create(&cluster, 1, takeover::node).await?;
    let name = nodes::numbered(0).name_any();
    let Fixtures { client, .. } = hand;
    let endpoint = cluster.endpoint()?;
    endpoint.send_all(1, vec![pods::create(0)]).await?;
    Recorded::read(&client, &name, &pods::pod_name(0)).await
}

/// Lets nodes join `bare`, and sends the requests that assign their podCIDRs. Returns how long the requests took.
async fn raw(bare: &StandIn) -> Result<Duration> {
    let first = u32::try_from(bare.assigned())?;
    bare.join(JOINS);
    let assign = |i: u32| {
        let cidr = pod_cidr(i);
        let patch = json!([
            {"op": "test", "path": "/metadata/uid", "value": "00000000-0000-4000-0001-000000000000"},
            {"op": "test", "path": "/spec/podCIDRs", "value": null},
            {"op": "test", "path": "/metadata/annotations", "value": null},
            {"op": "add", "path": "/spec/podCIDR", "value": cidr},
            {"op": "add", "path": "/spec/podCIDRs", "value": [cidr]},
        ]);
        let path = format!("/api/v1/nodes/{}", node_name(i));
        Call::new(Method::PATCH, path, JSON, &patch)
    };
    let calls = (first..first + JOINS).map(assign).collect();
    let report = bare.endpoint().send_all(nodes::CONNECTIONS, calls).await?;
    Ok(report.elapsed)
}
