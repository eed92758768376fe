//! Measures a takeover after `kill -9` of the leader: the standby's memory at rest and at its peak, and the time until
//! the next block. Nodes and NodeSubnets have realistic sizes. `KILLS=100` kills as many leaders one after the other, and
//! measures the memory of the first standby.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_api::NodeSubnetLite;
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::raw::{Call, MERGE_PATCH};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Daemon, Fixtures, nodes};
use http::Method;
use k8s_openapi::api::core::v1::{ContainerImage, Node};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use super::seen::{Seen, Watching};
use super::{LIMIT, grown, mib, progress, say};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, ipv4: {cidrs: [10.0.0.0/8], blockSize: 25}, idleSeconds: 86400}
";
const SUBNETS: &str = "/apis/cadastre.dev/v1alpha1/nodesubnets";
/// The number of addresses in use on each node, whose block has 128 addresses.
const ADDRESSES: u32 = 110;
/// The number of images in a Node's status, so that the Node has about 15 KB.
const IMAGES: usize = 50;
/// A leak grace of one day. This bench reports addresses in use but creates no pods. With a shorter leak grace, the
/// controller would report all these addresses as leaks.
const FLAGS: [&str; 2] = ["--leak-grace", "86400"];
const REST: Duration = Duration::from_secs(20);

pub async fn run(count: u32) -> Result<()> {
    progress(&format!(
        "{count} nodes of 15 KB with {ADDRESSES} addresses each"
    ))?;
    let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    nodes::create(&cluster, count, node).await?;
    let mut leader = start_controller(&cluster, ADMIN, &FLAGS)?;
    let all = usize::try_from(count)?;
    {
        let mut watching = Watching::start(&client);
        let done = |seen: &Seen| seen.listed >= all;
        watching.until("first blocks", LIMIT, done).await?;
    }
    progress("statuses of agents")?;
    report(&cluster, &client, count).await?;

    progress("a standby at rest")?;
    let mut standby = start_controller(&cluster, ADMIN, &FLAGS)?;
    standby.wait_ready(LIMIT).await?;
    tokio::time::sleep(REST).await;
    let rest = standby.process().usage()?;
    // When the standby started, its watches fetched their lists one after another, which caused a peak of memory. Only
    // the peak during the takeover counts, so the kernel's record of the peak is reset here.
    let forget = format!("/proc/{}/clear_refs", standby.process().pid());
    std::fs::write(&forget, "5").with_context(|| format!("cannot write {forget}"))?;

    progress("kill -9")?;
    let before = cluster.apiserver_metrics().await?;
    let subnets: Api<NodeSubnetLite> = Api::all(client);
    let first = takeover(&cluster, &subnets, &mut leader, count).await?;
    let requests = grown(&before, &cluster.apiserver_metrics().await?);
    tokio::time::sleep(REST).await;
    let after = standby.process().usage()?;
    #[allow(clippy::cast_precision_loss)] // for display only
    let ratio = after.peak_rss as f64 / rest.rss as f64;
    say(&format!(
        "{count} nodes of 15 KB, {ADDRESSES} addresses published by each. Standby: {:.1} MiB at rest \
         ({:.1} peak of its start). Take-over after `kill -9`: {:.1} MiB peak, {ratio:.2} times the rest; \
         {:.1} MiB after it. First block after {:.2} s. API requests until then: {requests}.",
        mib(rest.rss),
        mib(rest.peak_rss),
        mib(after.peak_rss),
        mib(after.rss),
        first.as_secs_f64(),
    ))?;
    let (mut times, kills) = (vec![first], kills()?);
    leader = standby;
    for number in count + 1..count + kills {
        let mut standby = start_controller(&cluster, ADMIN, &FLAGS)?;
        standby.wait_ready(LIMIT).await?;
        times.push(takeover(&cluster, &subnets, &mut leader, number).await?);
        progress(&format!("take-over {} of {kills}", times.len()))?;
        leader = standby;
    }
    times.sort_unstable();
    let part = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1].as_secs_f64();
    say(&format!(
        "{} leaders killed: first block after {:.2} s (median), {:.2} s (p99), {:.2} s (longest).",
        times.len(),
        part(50),
        part(99),
        part(100),
    ))
}

/// Returns how many leaders are killed.
fn kills() -> Result<u32> {
    let kills = std::env::var("KILLS").unwrap_or_else(|_| "1".to_owned());
    kills.parse().context("KILLS is a number")
}

/// Kills the leader and creates the node `number`. Returns how long the node waits for its first block.
async fn takeover(
    cluster: &ControlPlane,
    subnets: &Api<NodeSubnetLite>,
    leader: &mut Daemon,
    number: u32,
) -> Result<Duration> {
    leader.process().kill()?;
    let begun = Instant::now();
    nodes::create(cluster, 1, |_| node(number)).await?;
    let name = nodes::numbered(number).name_any();
    until("the next block", LIMIT, async || {
        let subnet = subnets.get_opt(&name).await?;
        let held = subnet.and_then(|it| Some(it.spec["blocks"].as_array()?.len()));
        Ok(held.filter(|held| *held > 0))
    })
    .await?;
    Ok(begun.elapsed())
}

/// Returns a Node as large as the Nodes that kubelets report.
pub(super) fn node(i: u32) -> Node {
    let mut node = nodes::numbered(i);
    let image = |n: usize| ContainerImage {
        names: Some(vec![
            format!("registry.example.com/team-{n:02}/application-{n:02}@sha256:{n:064x}"),
            format!(
                "registry.example.com/team-{n:02}/application-{n:02}:v1.{n}.0-release.{n:040x}"
            ),
        ]),
        size_bytes: Some(123_456_789),
    };
    if let Some(status) = &mut node.status {
        status.images = Some((0..IMAGES).map(image).collect());
    }
    node
}

/// Writes the statuses of all NodeSubnets, as agents do.
async fn report(cluster: &ControlPlane, client: &Client, count: u32) -> Result<()> {
    let subnets: Api<NodeSubnetLite> = Api::all(client.clone());
    let mut params = ListParams::default().limit(500);
    let mut calls = Vec::new();
    loop {
        let page = subnets.list(&params).await?;
        for subnet in page.items {
            calls.push(status(&subnet)?);
        }
        params.continue_token = page.metadata.continue_.filter(|next| !next.is_empty());
        if params.continue_token.is_none() {
            break;
        }
    }
    anyhow::ensure!(calls.len() == usize::try_from(count)?, "a node has none");
    let endpoint = cluster.endpoint()?;
    endpoint.send_all(nodes::CONNECTIONS, calls).await?;
    Ok(())
}

fn status(subnet: &NodeSubnetLite) -> Result<Call> {
    let name = subnet.name_any();
    let block = &subnet.spec["blocks"][0];
    let cidr = block["cidr"]
        .as_str()
        .context("a NodeSubnet has no block")?;
    let body = json!({"status": {
        "nodeUID": subnet.spec["nodeUID"],
        "pools": [{"pool": "bench", "demand": 127}],
        "blocks": [{"cidr": cidr, "uid": block["uid"], "used": ADDRESSES, "free": 127 - ADDRESSES}],
    }});
    let path = format!("{SUBNETS}/{name}/status");
    Ok(Call::new(Method::PATCH, path, MERGE_PATCH, &body))
}
