//! `cadastre agent` as a process, with a real API server and a real controller. The tests call the agent as the CNI
//! plugin and other programs do.
//!
//! Most tests share one control plane and one controller; each of these tests has its own group of nodes and its own
//! ranges. There is no kubelet and no runtime: pods are API objects only, and files stand for network namespaces.
//!
//! | file | subject |
//! |---|---|
//! | `giving` | the first block, ADD, DEL, CHECK, lists, annotations |
//! | `choosing` | pools of namespaces |
//! | `clients` | programs in other languages |
//! | `knowing` | pods whose objects the agent has seen or not seen |
//! | `dry` | nodes without a free address |
//! | `telling` | how often the status is written |
//! | `outages` | the agent killed, hung or started twice; the API server down |
//! | `stalls` | the agent stopped while CNI plugins are killed |
//! | `withdrawn` | nodes that lose their blocks |
//! | `renewal` | another Node object of the same name, a lost store |
//! | `leaks` | DELs that never come |
//! | `moving` | pods with addresses from host-local |
//! | `bounds` | garbage, too much data, silence and other users at the sockets |
//! | `files` | files for other programs |
//! | `beside` | nodes with another network |
//! | `places` | host paths that are read-only or occupied |
//! | `versions` | CRDs, objects and clients of another version |
//! | `setup` | flags, permissions, metrics |

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout
)] // allowed in helpers as in tests

mod beside;
mod bounds;
mod choosing;
mod clients;
mod dry;
mod files;
mod giving;
mod knowing;
mod leaks;
mod moving;
mod outages;
mod places;
mod renewal;
mod setup;
mod stalls;
mod telling;
mod versions;
mod withdrawn;

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use anyhow::Result;
use cadastre_agent::grpc::{client, v1};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::node_agent::{add, attachment, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures, NodeAgent, Options, TestCluster, metrics};
use cadastre_node::{Add, Op, OpError};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// Flags of the controller that [`shared`] starts.
const FLAGS: [&str; 2] = ["--leak-grace", "2"];

/// The cluster that most tests share, and a new [`Fixtures`] for this one.
async fn shared() -> (&'static TestCluster, Fixtures) {
    static CLUSTER: OnceCell<TestCluster> = OnceCell::const_new();
    let start = || async {
        TestCluster::start(Options::default(), &FLAGS)
            .await
            .unwrap()
    };
    let cluster = CLUSTER.get_or_init(start).await;
    let fixtures = cluster.fixtures().await.unwrap();
    (cluster, fixtures)
}

/// Creates a pool that allocates blocks of 16 addresses to the nodes of a group. Pods can use 13 addresses of each
/// block.
async fn pool(fixtures: &Fixtures, name: &str, range: &str, more: Value) {
    let mut spec = json!({"ipv4": {"cidrs": [range], "blockSize": 28}});
    merge(&mut spec, more);
    fixtures.block_pool(name, spec).await.unwrap();
}

fn merge(spec: &mut Value, more: Value) {
    if let (Value::Object(spec), Value::Object(more)) = (spec, more) {
        spec.extend(more);
    }
}

/// The machine of a node: a folder and the agent that runs on it.
struct Machine(NodeAgent);

impl Deref for Machine {
    type Target = NodeAgent;

    fn deref(&self) -> &NodeAgent {
        &self.0
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut NodeAgent {
        &mut self.0
    }
}

impl Machine {
    /// Returns a machine whose agent is not started yet.
    fn new(node: &str, flags: &[&str]) -> Self {
        // Unless the test sets it, the interval of the address list is that of the status.
        let interval = |name: &str| flags.iter().position(|it| *it == name);
        let mut all = flags.to_vec();
        if let (Some(at), None) = (
            interval("--publish-interval"),
            interval("--addresses-interval"),
        ) {
            all.extend(["--addresses-interval", flags[at + 1]]);
        }
        Self(NodeAgent::new(node, &all).unwrap())
    }

    /// Creates a node in a group and starts its agent; returns when the agent is ready.
    async fn of_group(
        cluster: &ControlPlane,
        fixtures: &Fixtures,
        group: &str,
        flags: &[&str],
    ) -> (Self, Node) {
        let name = format!("{group}-1");
        let node = fixtures.node(group, &name).await.unwrap();
        let mut machine = Self::new(&name, flags);
        machine.start(cluster);
        machine.ready().await;
        (machine, node)
    }

    fn start(&mut self, cluster: &ControlPlane) {
        self.start_as(cluster, ADMIN);
    }

    fn start_as(&mut self, cluster: &ControlPlane, user: &str) {
        self.0.start(cluster, user).unwrap();
    }

    fn agent(&mut self) -> &mut Daemon {
        self.running().unwrap()
    }

    async fn ready(&mut self) {
        self.agent().wait_ready(LIMIT).await.unwrap();
    }

    /// Waits until the agent reports that it is ready although the API server does not answer.
    async fn serves_alone(&mut self) {
        let alone = until("it serves without the API server", LIMIT, async || {
            let body = self.agent().ready().await?;
            anyhow::ensure!(body.contains("API server does not answer"), body);
            Ok(Some(()))
        });
        alone.await.unwrap();
    }

    fn kill(&mut self) {
        self.agent().process().kill().unwrap();
        self.daemon = None;
    }

    async fn stop(&mut self) {
        let status = self.agent().process().stop(LIMIT).await.unwrap();
        assert!(status.success(), "{}", self.agent().process().log_tail(30));
        self.daemon = None;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    async fn add(&self, id: &str) -> Result<String, OpError> {
        self.add_with(add(id)).await
    }

    /// Sends an ADD and returns the container's first address.
    async fn add_with(&self, add: Add) -> Result<String, OpError> {
        Ok(self.0.add(add).await?[0].to_string())
    }

    async fn del(&self, id: &str) {
        self.ask(Op::Del(attachment(id))).await.unwrap();
    }

    /// Returns the agent's list of addresses, asked for over gRPC.
    async fn list(&self) -> v1::ListResponse {
        let mut client = client(&self.socket());
        client.list(v1::ListRequest {}).await.unwrap().into_inner()
    }

    /// Returns container ids with their addresses, sorted.
    async fn held(&self) -> Vec<(String, String)> {
        let all = self.list().await.allocations.into_iter();
        let mut held: Vec<(String, String)> = all
            .map(|it| (it.attachment.unwrap().container_id, it.addresses.join(",")))
            .collect();
        held.sort();
        held
    }

    /// Returns the sum of one of the agent's metrics over the series with these labels.
    async fn figure(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples = self.daemon.as_ref().unwrap().metrics().await.unwrap();
        metrics::sum(&samples, name, labels)
    }

    fn log(&mut self) -> String {
        std::fs::read_to_string(self.agent().process().log()).unwrap()
    }

    async fn log_says(&mut self, text: &str) {
        until(&format!("the log says {text:?}"), LIMIT, async || {
            let log = self.log();
            anyhow::ensure!(log.contains(text), log);
            Ok(Some(()))
        })
        .await
        .unwrap();
    }
}

/// An ADD for a sandbox of `pod`.
fn add_of(pod: &Pod, id: &str) -> Add {
    Add {
        pod: Some(pod_ref(pod)),
        ..add(id)
    }
}

fn addr(text: &str) -> Addr {
    Addr::parse_strict(text).unwrap()
}

/// Returns the addresses in use according to a NodeAddresses object, sorted as text.
async fn published(fixtures: &Fixtures, node: &str) -> Result<Vec<String>> {
    let list = fixtures.addresses.get_opt(node).await?;
    let entries = list.iter().flat_map(|it| it.spec.entries());
    let mut all: Vec<String> = entries
        .flat_map(|it| it.addresses)
        .map(|it| it.to_string())
        .collect();
    all.sort();
    Ok(all)
}

/// Returns whether the `used` counts in the NodeSubnet's status agree with `addresses`.
async fn counts(fixtures: &Fixtures, node: &str, addresses: &[String]) -> Result<bool> {
    let subnet = fixtures.subnets.get_opt(node).await?;
    let blocks = subnet.and_then(|it| it.status).unwrap_or_default().blocks;
    Ok(blocks.iter().all(|block| {
        let cidr = Cidr::parse_strict(&block.cidr).unwrap();
        let inside = addresses
            .iter()
            .filter(|it| cidr.contains_addr(addr(it)))
            .count();
        usize::try_from(block.used).is_ok_and(|used| used == inside)
    }))
}

/// Waits until the NodeAddresses object lists exactly these addresses and the counts in the NodeSubnet's status agree.
async fn publishes(fixtures: &Fixtures, node: &str, mut addresses: Vec<String>) {
    addresses.sort();
    until(
        &format!("NodeAddresses {node} lists {addresses:?}"),
        LIMIT,
        async || {
            let listed = published(fixtures, node).await?;
            anyhow::ensure!(listed == addresses, "{listed:?}");
            let counted = counts(fixtures, node, &addresses).await?;
            anyhow::ensure!(counted, "the NodeSubnet counts others");
            Ok(Some(()))
        },
    )
    .await
    .unwrap();
}
