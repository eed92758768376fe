//! Measures the cost of a change of one node's blocks for the other nodes, whose agents install direct routes. Prints
//! the bytes of watch events that each agent receives, the writes that the controller sends, and the delay from the
//! listing of a block in its NodeSubnet to the publication of its route.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{NodeRoutes, NodeSubnet};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::nodes;
use cadastre_e2e::raw::{Call, MERGE_PATCH};
use cadastre_e2e::wait::until;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use http::Method;
use kube::api::ListParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{LIMIT, median, progress, say};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, ipv4: {cidrs: [10.0.0.0/8], blockSize: 26}, idleSeconds: 86400}
";
/// How many nodes get a further block.
const CHANGES: u32 = 200;

/// A watch event: when it arrived, its length, the name of its object, and the number of ranges in the object's spec.
struct Line {
    at: Instant,
    bytes: usize,
    name: String,
    ranges: usize,
}

pub async fn run(count: u32) -> Result<()> {
    progress(&format!("routes: {count} nodes get their first blocks"))?;
    let (cluster, hand) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    let mut daemon = start_controller(&cluster, ADMIN, &["--publish-routes"])?;
    daemon.wait_ready(LIMIT).await?;
    nodes::create(&cluster, count, nodes::numbered).await?;
    let routes = Api::<NodeRoutes>::all(hand.client.clone());
    let wanted = usize::try_from(count)?;
    until("every node has routes", LIMIT, async || {
        let found = routes
            .list_metadata(&ListParams::default())
            .await?
            .items
            .len();
        ensure!(found >= wanted, "{found} of {count}");
        Ok(Some(()))
    })
    .await?;

    say("| nodes | what | bytes to each node a change | writes a change | published after |")?;
    say("|---|---|---|---|---|")?;
    for (what, pause) in [
        ("one change after the other", Duration::from_millis(50)),
        ("all changes at once", Duration::ZERO),
    ] {
        progress(what)?;
        let changes = changed(&cluster, &hand.client, pause).await?;
        say(&format!("| {count} | {what} | {changes} |"))?;
    }
    daemon.process().stop(Duration::from_secs(30)).await?;
    Ok(())
}

/// Makes [`CHANGES`] nodes demand one more block each. Returns the measured cells of a table row.
async fn changed(cluster: &ControlPlane, client: &Client, pause: Duration) -> Result<String> {
    let subnets = Api::<NodeSubnet>::all(client.clone());
    let some = subnets.list(&ListParams::default()).await?.items;
    let some = some.into_iter().take(usize::try_from(CHANGES)?);
    let before = writes(cluster).await?;
    let mut routes = follow(client, "noderoutes", "destinations").await?;
    let mut listed = follow(client, "nodesubnets", "blocks").await?;
    let endpoint = cluster.endpoint()?;
    let mut demands = Vec::new();
    for subnet in some {
        let name = subnet.metadata.name.context("a NodeSubnet has a name")?;
        let blocks = u64::try_from(subnet.spec.blocks.len())?;
        // A /26 has 61 addresses for pods.
        let pools = json!([{"pool": "bench", "demand": 60 * (blocks + 1)}]);
        let status = json!({"status": {"nodeUID": subnet.spec.node_uid, "pools": pools}});
        let path = format!("/apis/cadastre.dev/v1alpha1/nodesubnets/{name}/status");
        demands.push(Call::new(Method::PATCH, path, MERGE_PATCH, &status));
    }
    if pause.is_zero() {
        endpoint.send_all(nodes::CONNECTIONS, demands).await?;
    } else {
        for demand in demands {
            endpoint.send_all(1, vec![demand]).await?;
            tokio::time::sleep(pause).await;
        }
    }
    let mut bytes = 0;
    let mut published = BTreeMap::new();
    while published.len() < usize::try_from(CHANGES)? {
        let line = tokio::time::timeout(LIMIT, routes.recv()).await?;
        let line = line.context("the watch of NodeRoutes has ended")?;
        bytes += line.bytes;
        published.insert((line.name, line.ranges), line.at);
    }
    let mut delays = Vec::new();
    while delays.len() < published.len() {
        let line = tokio::time::timeout(LIMIT, listed.recv()).await?;
        let line = line.context("the watch of NodeSubnets has ended")?;
        if let Some(at) = published.remove(&(line.name, line.ranges)) {
            delays.push(at.saturating_duration_since(line.at));
        }
    }
    let after = writes(cluster).await?;
    let worst = delays.iter().max().copied().unwrap_or_default();
    let changes = f64::from(CHANGES);
    Ok(format!(
        "{} | {:.2} | {:.0} ms, {:.0} ms at most",
        bytes / usize::try_from(CHANGES)?,
        (after - before) / changes,
        median(delays.into_iter()).as_secs_f64() * 1_000.0,
        worst.as_secs_f64() * 1_000.0,
    ))
}

/// Returns the number of writes of NodeRoutes that the API server has answered.
async fn writes(cluster: &ControlPlane) -> Result<f64> {
    let samples = cluster.apiserver_metrics().await?;
    let of = |verb| {
        let labels = [("resource", "noderoutes"), ("verb", verb)];
        sum(&samples, "apiserver_request_total", &labels)
    };
    Ok(["POST", "PATCH", "DELETE"].into_iter().map(of).sum())
}

/// Watches all objects of a kind from now on. `ranges` is the name of the list in the spec whose entries are counted.
async fn follow(
    client: &Client,
    kind: &str,
    ranges: &'static str,
) -> Result<mpsc::UnboundedReceiver<Line>> {
    let path = format!("/apis/cadastre.dev/v1alpha1/{kind}");
    let get = |path: String| http::Request::get(path).body(Vec::new());
    let list: Value = client.request(get(format!("{path}?limit=1"))?).await?;
    let version = list["metadata"]["resourceVersion"].as_str();
    let version = version.context("a list has a version")?;
    let path = format!("{path}?watch=1&resourceVersion={version}");
    let mut lines = client.request_stream(get(path)?).await?.lines();
    let (out, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok(Some(text)) = lines.try_next().await {
            let at = Instant::now();
            let event: Value = serde_json::from_str(&text).unwrap_or_default();
            let object = &event["object"];
            let line = Line {
                at,
                bytes: text.len() + 1,
                name: object["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
                ranges: object["spec"][ranges].as_array().map_or(0, Vec::len),
            };
            if out.send(line).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}
