//! Measures, by etcd's own metrics, how many bytes agents' writes add to etcd: one status of a NodeSubnet, one
//! NodeAddresses, and all writes of the agents of a whole cluster between two compactions.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_api::{AddressEntry, NodeAddresses, NodeAddressesSpec};
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::control_plane::{ControlPlane, Options};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::nodes;
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use http::Method;
use kube::Client;
use serde_json::{Value, json};

use super::{progress, say};

const SUBNETS: &str = "/apis/cadastre.dev/v1alpha1/nodesubnets";
const LISTS: &str = "/apis/cadastre.dev/v1alpha1/nodeaddresses";
/// Number of nodes whose objects are written to measure one write. The cost of one write does not depend on this number.
const NODES: u32 = 100;
/// How many times each node's object is written. The result is the average over all writes.
const WRITES: u32 = 10;
/// The numbers of pods per node for which the writes are measured.
const PODS: [u32; 3] = [30, 110, 250];
/// The number of pods per node of the whole cluster.
const MOST_PODS: u32 = 110;
/// The number of pods that start or end per second in the whole cluster.
const POD_EVENTS: f64 = 200.0;
/// The maximum number of statuses per second of all agents: the default of `--agent-writes-per-minute`.
const STATUSES: f64 = 100.0;
/// Seconds between two compactions of etcd, as kube-apiserver requests them by default.
const COMPACTION: u32 = 300;

/// Runs the bench and prints two tables. The second one is for a cluster with `count` nodes.
pub async fn run(count: u32) -> Result<()> {
    say("| pods a node | what | bytes of the object | of etcd's database a write | of its log |")?;
    say("|---|---|---|---|---|")?;
    for pods in PODS {
        progress(&format!("{NODES} nodes with {pods} pods"))?;
        let (cluster, client) = filled(NODES, pods).await?;
        // [`filled`] has written each object once already, so these writes have the numbers from `NODES` on.
        let writes = || NODES..NODES * (WRITES + 1);
        let of_status = cost(&cluster, calls(write_status, NODES, pods, writes())).await?;
        let of_list = cost(&cluster, calls(write_list, NODES, pods, writes())).await?;
        for (what, path, (db, log)) in [
            ("NodeSubnet.status", SUBNETS, of_status),
            ("NodeAddresses", LISTS, of_list),
        ] {
            let size = size(&client, path).await?;
            say(&format!(
                "| {pods} | {what} | {size} | {db:.0} | {log:.0} |"
            ))?;
        }
    }
    window(count).await
}

/// Sends the writes of all agents of a cluster between two compactions of etcd, and prints by how much etcd grows.
async fn window(count: u32) -> Result<()> {
    let Rates { status, list } = Rates::of(count);
    progress(&format!("{count} nodes with {MOST_PODS} pods"))?;
    let (cluster, _) = filled(count, MOST_PODS).await?;
    let before = sizes(&cluster).await?;
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    for second in 0..COMPACTION {
        ticks.tick().await;
        // [`filled`] has sent the writes 0 to `count` - 1, so these writes have the numbers from `count` on.
        let due = |rate| {
            count + whole(rate * f64::from(second))..count + whole(rate * f64::from(second + 1))
        };
        let mut due_calls = calls(write_status, count, MOST_PODS, due(status));
        due_calls.extend(calls(write_list, count, MOST_PODS, due(list)));
        cluster.endpoint()?.send_all(4, due_calls).await?;
    }
    let after = sizes(&cluster).await?;
    say("")?;
    say(
        "| nodes | pods a node | statuses a second | lists a second | growth of etcd's file in 300 s | of the part in use | of its log |",
    )?;
    say("|---|---|---|---|---|---|---|")?;
    let growth = |of: fn(&Sizes) -> f64| (of(&after) - of(&before)) / 1e6;
    let (file, in_use, log) = (
        growth(|it| it.file),
        growth(|it| it.in_use),
        growth(|it| it.log),
    );
    say(&format!(
        "| {count} | {MOST_PODS} | {status:.1} | {list:.1} | {file:.1} MB | {in_use:.1} MB | {log:.1} MB |"
    ))
}

/// The number of writes per second of all agents together.
struct Rates {
    status: f64,
    list: f64,
}

impl Rates {
    /// Returns the rates for a cluster with this many nodes, in which pods start and end at random. After a write, an
    /// agent waits for its interval plus up to a fifth of it. Then it writes again: at once if a pod has started or
    /// ended meanwhile, otherwise when the next pod starts or ends.
    fn of(nodes: u32) -> Self {
        let nodes = f64::from(nodes);
        let between_events = nodes / POD_EVENTS;
        let rate = |interval: f64| {
            let pause = 1.1 * interval;
            nodes / (pause + between_events * (-pause / between_events).exp())
        };
        // The controller rounds this interval up, so real agents write less often.
        let asked = nodes / STATUSES;
        Self {
            status: rate(asked.max(30.0)),
            list: rate((10.0 * asked).max(300.0)),
        }
    }
}

/// Starts a control plane with a NodeSubnet and a NodeAddresses for each node, written as by agents.
async fn filled(nodes: u32, pods: u32) -> Result<(ControlPlane, Client)> {
    let options = Options {
        // A compaction would hide a part of the growth.
        apiserver_args: vec!["--etcd-compaction-interval=0".to_owned()],
        ..Options::default()
    };
    let (cluster, fixtures) = with_crds(options).await?;
    send(&cluster, (0..nodes).map(subnet).collect()).await?;
    send(&cluster, (0..nodes).map(|n| new_list(n, pods)).collect()).await?;
    send(&cluster, calls(write_status, nodes, pods, 0..nodes)).await?;
    send(&cluster, (0..nodes).map(strip).collect()).await?;
    send(&cluster, calls(write_list, nodes, pods, 0..nodes)).await?;
    Ok((cluster, fixtures.client))
}

/// Returns the writes with the numbers in `writes`. Write number `n` changes the object of node `n % nodes`.
fn calls(write: Write, nodes: u32, pods: u32, writes: Range<u32>) -> Vec<Call> {
    let write = |n| write(n % nodes, pods, n / nodes);
    writes.map(write).collect()
}

/// A function that returns the `write`-th write of node `n`, which has `pods` pods. Each write changes the object.
type Write = fn(n: u32, pods: u32, write: u32) -> Call;

/// Rounds a small positive number down.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(number: f64) -> u32 {
    number as u32
}

/// Returns the bytes that one write adds to etcd's database and to its log.
async fn cost(cluster: &ControlPlane, calls: Vec<Call>) -> Result<(f64, f64)> {
    let writes = f64::from(u32::try_from(calls.len())?);
    let before = sizes(cluster).await?;
    send(cluster, calls).await?;
    let after = sizes(cluster).await?;
    let growth = |of: fn(&Sizes) -> f64| (of(&after) - of(&before)) / writes;
    Ok((growth(|it| it.in_use), growth(|it| it.log)))
}

/// The size of etcd's database, and the bytes written to its write-ahead log, in bytes.
struct Sizes {
    /// The size of the database file
    file: f64,
    /// The part of the file that is in use
    in_use: f64,
    log: f64,
}

async fn sizes(cluster: &ControlPlane) -> Result<Sizes> {
    let samples = cluster.etcd_metrics().await?;
    let of = |name| sum(&samples, name, &[]);
    Ok(Sizes {
        file: of("etcd_mvcc_db_total_size_in_bytes"),
        in_use: of("etcd_mvcc_db_total_size_in_use_in_bytes"),
        log: of("etcd_disk_wal_write_bytes_total"),
    })
}

/// Returns the length in bytes of the JSON of node 0's object. `path` is the path of the kind.
async fn size(client: &Client, path: &str) -> Result<usize> {
    let request = http::Request::get(format!("{path}/{}", name(0))).body(Vec::new())?;
    Ok(client.request_text(request).await?.len())
}

async fn send(cluster: &ControlPlane, calls: Vec<Call>) -> Result<()> {
    let endpoint = cluster.endpoint()?;
    let sent = endpoint.send_all(nodes::CONNECTIONS, calls).await;
    sent.context("a write was refused").map(|_| ())
}

fn uid(of: u32, n: u32) -> String {
    format!("{of:08x}-89ab-4cde-8f01-{n:012x}")
}

fn name(n: u32) -> String {
    format!("node-{n:05}.zone-1.example.internal")
}

fn blocks(n: u32) -> Value {
    let cidrs = [
        format!("10.{}.{}.0/24", n >> 8, n & 255),
        format!("fd00:10:{:x}::/120", n + 1),
    ];
    let block = |cidr| json!({"cidr": cidr, "uid": uid(1, n), "pool": "production"});
    cidrs.map(block).to_vec().into()
}

fn subnet(n: u32) -> Call {
    let object = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": name(n)},
        "spec": {
            "nodeUID": uid(2, n), "blocks": blocks(n),
            "pools": [{
                "name": "production", "cooldownSeconds": 30,
                "ipv4": {"cidrs": ["10.0.0.0/8"]}, "ipv6": {"cidrs": ["fd00:10::/48"]},
            }],
        },
    });
    Call::new(Method::POST, SUBNETS.to_owned(), JSON, &object)
}

/// The write by which the controller removes a NodeSubnet's managed fields.
fn strip(n: u32) -> Call {
    let path = format!("{SUBNETS}/{}", name(n));
    let change = json!({"metadata": {"managedFields": [{}]}});
    Call::new(Method::PATCH, path, MERGE_PATCH, &change)
}

fn write_status(n: u32, pods: u32, write: u32) -> Call {
    let Value::Array(blocks) = blocks(n) else {
        return subnet(n);
    };
    let word = |block: &Value| {
        json!({
            "cidr": block["cidr"], "uid": block["uid"], "used": pods - write % 2, "free": 253 - pods,
        })
    };
    let words: Vec<Value> = blocks.iter().map(word).collect();
    let status = json!({"status": {
        "nodeUID": uid(2, n), "pools": [{"pool": "production", "demand": pods + 3}], "blocks": words,
        "agent": {"version": "0.1.0", "bootID": uid(3, n)},
    }});
    let path = format!("{SUBNETS}/{}/status", name(n));
    Call::new(Method::PATCH, path, MERGE_PATCH, &status)
}

fn addresses(n: u32, pods: u32, write: u32) -> NodeAddressesSpec {
    let entry = |pod: u32| {
        let address = format!("10.{}.{}.{}", n >> 8, n & 255, pod + 2);
        let other = format!("fd00:10:{:x}::{:x}", n + 1, pod + 2);
        // Each write replaces one pod by another, so that the list changes.
        let of_pod = uid(n, if pod == 0 { 1_000 + write } else { pod });
        AddressEntry {
            addresses: [address, other]
                .iter()
                .filter_map(|it| cadastre_core::Addr::parse_strict(it))
                .collect(),
            handle: format!("cadastre/{n:032x}{pod:032x}"),
            interface: "eth0".to_owned(),
            pod_uid: of_pod,
            pod: format!(
                "namespace-{:02}/application-{pod:02}-5d4f8c7b9-x2x7k",
                n % 20
            ),
            since: "2026-01-01T00:00:00Z".parse().ok(),
            superseded: false,
        }
    };
    NodeAddressesSpec {
        node_uid: uid(2, n),
        boot_id: uid(3, n),
        as_of: None,
        addresses: (0..pods).map(|pod| entry(pod).to_string()).collect(),
    }
}

fn new_list(n: u32, pods: u32) -> Call {
    let list = NodeAddresses::new(&name(n), addresses(n, pods, 0));
    Call::new(Method::POST, LISTS.to_owned(), JSON, &json!(list))
}

fn write_list(n: u32, pods: u32, write: u32) -> Call {
    let path = format!("{LISTS}/{}", name(n));
    let change = json!({
        "metadata": {"managedFields": [{}]}, "spec": addresses(n, pods, write + 1),
    });
    Call::new(Method::PATCH, path, MERGE_PATCH, &change)
}
