//! Measures the bytes that agents' writes add to etcd. The bench reads etcd's metrics to find out by how many bytes one
//! status, or one list of addresses, makes etcd's database and log grow. From the growth, the bench computes the bytes
//! per second of a whole cluster.

use anyhow::{Context as _, Result};
use cadastre_api::{AddressEntry, NodeAddresses, NodeAddressesSpec};
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::control_plane::{ControlPlane, Options};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::nodes;
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use http::Method;
use serde_json::{Value, json};

use super::{progress, say};

const SUBNETS: &str = "/apis/cadastre.dev/v1alpha1/nodesubnets";
const LISTS: &str = "/apis/cadastre.dev/v1alpha1/nodeaddresses";
/// Number of nodes whose objects are written. The cost of one write does not depend on this number.
const NODES: u32 = 100;
/// How many times each node's object is written. The result is the average over all writes.
const WRITES: u32 = 10;
/// The numbers of pods per node for which the writes are measured.
const PODS: [u32; 3] = [30, 110, 250];
/// The agent's `--addresses-interval` in seconds, which is also the interval between two compactions of etcd.
const INTERVAL: f64 = 300.0;
/// Status writes per second of a cluster in which 200 pods per second start and end, see docs/performance.md.
const STATUSES: f64 = 91.0;

/// Runs the bench and prints a table. The printed rates are those of a cluster with `count` nodes.
pub async fn run(count: u32) -> Result<()> {
    say(
        "| pods a node | what | bytes of etcd's database a write | of its log | writes a second at most | bytes a second in all |",
    )?;
    say("|---|---|---|---|---|---|")?;
    for pods in PODS {
        progress(&format!("{NODES} nodes with {pods} pods"))?;
        let (cluster, _) = with_crds(Options::default()).await?;
        send(&cluster, (0..NODES).map(subnet).collect()).await?;
        send(&cluster, (0..NODES).map(|n| new_list(n, pods)).collect()).await?;
        let statuses = |write| (0..NODES).map(move |n| status(n, pods, write));
        let lists = |write| (0..NODES).map(move |n| list(n, pods, write));
        let of_status = cost(&cluster, (0..WRITES).flat_map(statuses).collect()).await?;
        let of_list = cost(&cluster, (0..WRITES).flat_map(lists).collect()).await?;
        row(pods, "NodeSubnet.status", of_status, STATUSES)?;
        row(pods, "NodeAddresses", of_list, f64::from(count) / INTERVAL)?;
    }
    Ok(())
}

fn row(pods: u32, what: &str, (db, log): (f64, f64), rate: f64) -> Result<()> {
    say(&format!(
        "| {pods} | {what} | {db:.0} | {log:.0} | {rate:.1} | {:.0} KB |",
        (db * rate) / 1_000.0
    ))
}

/// Returns the bytes that one write adds to etcd's database and to its log.
async fn cost(cluster: &ControlPlane, calls: Vec<Call>) -> Result<(f64, f64)> {
    let writes = f64::from(u32::try_from(calls.len())?);
    let before = sizes(cluster).await?;
    send(cluster, calls).await?;
    let after = sizes(cluster).await?;
    Ok(((after.0 - before.0) / writes, (after.1 - before.1) / writes))
}

async fn sizes(cluster: &ControlPlane) -> Result<(f64, f64)> {
    let samples = cluster.etcd_metrics().await?;
    let of = |name| sum(&samples, name, &[]);
    Ok((
        of("etcd_mvcc_db_total_size_in_use_in_bytes"),
        of("etcd_disk_wal_write_bytes_total"),
    ))
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

fn status(n: u32, pods: u32, write: u32) -> Call {
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

fn list(n: u32, pods: u32, write: u32) -> Call {
    let path = format!("{LISTS}/{}", name(n));
    let change = json!({"spec": addresses(n, pods, write + 1)});
    Call::new(Method::PATCH, path, MERGE_PATCH, &change)
}
