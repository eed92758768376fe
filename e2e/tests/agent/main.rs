//! `cadastre agent` as a process, with a real API server and a real controller. The tests call the agent as the CNI
//! plugin and other programs do.
//! Most tests share one control plane and one controller. Each of these tests has its own group of nodes and its own
//! ranges. There is no kubelet and no runtime: pods are API objects only, and files take the place of network
//! namespaces.
//!
//! | file | subject |
//! |---|---|
//! | `assignment` | the first block, ADD, DEL, CHECK, lists, annotations |
//! | `namespaces` | pools of namespaces |
//! | `languages` | programs in other languages |
//! | `unknown_pods` | pods whose objects the agent has seen or not seen |
//! | `exhaustion` | nodes without a free address |
//! | `status_writes` | how often the status is written |
//! | `outages` | the agent killed, hung or started twice; the API server down |
//! | `linearizable` | concurrent calls under faults have an order that explains every answer |
//! | `stalls` | the agent stopped while CNI plugins are killed |
//! | `lost_blocks` | nodes that lose their blocks |
//! | `lost_store` | another Node object of the same name, a lost store |
//! | `leaks` | DELs that never come |
//! | `from_host_local` | pods with addresses from host-local |
//! | `whereabouts` | networks whose configuration has whereabouts' fields |
//! | `bad_clients` | garbage, too much data, silence and other users at the sockets |
//! | `files` | files for other programs |
//! | `other_networks` | nodes with another network |
//! | `host_paths` | host paths that are read-only or occupied |
//! | `versions` | CRDs, objects and clients of another version |
//! | `conflicts` | addresses that another host uses, on a real interface |
//! | `setup` | flags, permissions, metrics |

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout
)] // allowed in helpers as in tests

mod assignment;
mod bad_clients;
mod conflicts;
mod exhaustion;
mod files;
mod from_host_local;
mod host_paths;
mod languages;
mod leaks;
mod linearizable;
mod lost_blocks;
mod lost_store;
mod namespaces;
mod other_networks;
mod outages;
mod setup;
mod stalls;
mod status_writes;
mod unknown_pods;
mod versions;
mod whereabouts;

use std::fmt::Debug;
use std::io::Write as _;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;
use cadastre_agent::grpc::{client, v1};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::node_agent::{add, attachment, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{
    ControlPlane, Daemon, Fixtures, NodeAgent, Options, TestCluster, daemon, metrics,
};
use cadastre_node::{Add, Op, OpError};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// Flags of the controllers that these tests start.
const FLAGS: [&str; 2] = ["--leak-grace", "2"];

/// Returns the cluster that most tests share, and a new [`Fixtures`] for this test.
async fn shared() -> (&'static TestCluster, Fixtures) {
    static CLUSTER: OnceCell<TestCluster> = OnceCell::const_new();
    let start = || async { own_cluster().await.0 };
    let cluster = CLUSTER.get_or_init(start).await;
    (cluster, cluster.fixtures().await.unwrap())
}

/// Starts a cluster for a test that stops the control plane or the controller.
async fn own_cluster() -> (TestCluster, Fixtures) {
    let cluster = TestCluster::start(Options::default(), &FLAGS)
        .await
        .unwrap();
    let api = cluster.fixtures().await.unwrap();
    (cluster, api)
}

/// Creates a pool and a node of this pool in the shared cluster, and starts the node's agent. Returns when the agent is
/// ready.
async fn start(name: &str, range: &str, spec: Value, flags: &[&str]) -> (Fixtures, Machine) {
    let (cluster, api) = shared().await;
    pool(&api, name, range, spec).await;
    let machine = Machine::of_group(&cluster.control_plane, &api, name, flags).await;
    (api, machine)
}

/// Creates a pool that allocates blocks of 16 addresses to the nodes of a group. Pods can use 13 of these 16 addresses.
async fn pool(api: &Fixtures, name: &str, range: &str, more: Value) {
    let mut spec = json!({"ipv4": {"cidrs": [range], "blockSize": 28}});
    merge(&mut spec, more);
    api.block_pool(name, spec).await.unwrap();
}

fn merge(spec: &mut Value, more: Value) {
    if let (Value::Object(spec), Value::Object(more)) = (spec, more) {
        spec.extend(more);
    }
}

/// Changes an object by the merge patch `change`.
async fn patch<K>(objects: &Api<K>, name: &str, change: Value)
where
    K: DeserializeOwned + Clone + Debug,
{
    let patched = objects
        .patch(name, &PatchParams::default(), &Patch::Merge(change))
        .await;
    patched.unwrap();
}

async fn annotated_pod(
    api: &Fixtures,
    namespace: &str,
    name: &str,
    node: &str,
    annotations: Value,
) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    });
    let pod = serde_json::from_value(pod).unwrap();
    let pods: Api<Pod> = Api::namespaced(api.client.clone(), namespace);
    pods.create(&PostParams::default(), &pod).await.unwrap()
}

async fn uid(api: &Fixtures, node: &str) -> String {
    api.nodes.get(node).await.unwrap().uid().unwrap()
}

/// Waits until `look` returns a value; panics after [`LIMIT`].
async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> T {
    until(what, LIMIT, look).await.unwrap()
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
    /// Returns a machine, and does not start its agent. Once started, the agent publishes changes within half a second,
    /// unless `flags` have another interval.
    fn new(cluster: &ControlPlane, node: &str, flags: &[&str]) -> Self {
        Self::of_user(cluster, ADMIN, node, flags)
    }

    fn of_user(cluster: &ControlPlane, user: &str, node: &str, flags: &[&str]) -> Self {
        let publish = flags.iter().position(|it| *it == "--publish-interval");
        let interval = publish.map_or("0.5", |at| flags[at + 1]);
        let mut all = vec!["--addresses-interval", interval];
        if publish.is_none() {
            all.extend(["--publish-interval", interval]);
        }
        all.extend(flags);
        Self(NodeAgent::new(cluster, user, node, &all).unwrap())
    }

    /// Creates the node `GROUP-1` and starts its agent. Returns when the agent is ready.
    async fn of_group(cluster: &ControlPlane, api: &Fixtures, group: &str, flags: &[&str]) -> Self {
        let name = format!("{group}-1");
        api.node(group, &name).await.unwrap();
        let mut machine = Self::new(cluster, &name, flags);
        machine.start();
        machine.ready().await;
        machine
    }

    fn start(&mut self) {
        self.0.start().unwrap();
    }

    fn agent(&mut self) -> &mut Daemon {
        self.running().unwrap()
    }

    async fn ready(&mut self) {
        self.agent().wait_ready(LIMIT).await.unwrap();
    }

    /// Waits until the agent reports that it is ready although the API server does not answer.
    async fn serves_alone(&mut self) {
        eventually("it serves without the API server", async || {
            let body = self.agent().ready().await?;
            anyhow::ensure!(body.contains("API server does not answer"), body);
            Ok(Some(()))
        })
        .await;
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

    /// Returns the agent's list of addresses, requested over gRPC.
    async fn list(&self) -> v1::ListResponse {
        let mut client = client(&self.socket());
        client.list(v1::ListRequest {}).await.unwrap().into_inner()
    }

    /// Returns the ids and addresses of the containers that have addresses, sorted.
    async fn in_use(&self) -> Vec<(String, String)> {
        let all = self.list().await.allocations.into_iter();
        let mut held: Vec<(String, String)> = all
            .map(|it| (it.attachment.unwrap().container_id, it.addresses.join(",")))
            .collect();
        held.sort();
        held
    }

    /// Returns the sum of one of the agent's metrics over the series with these labels.
    async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples = self.daemon.as_ref().unwrap().metrics().await.unwrap();
        metrics::sum(&samples, name, labels)
    }

    fn log(&mut self) -> String {
        std::fs::read_to_string(self.agent().process().log()).unwrap()
    }

    async fn log_says(&mut self, text: &str) {
        eventually(&format!("the log says {text:?}"), async || {
            let log = self.log();
            anyhow::ensure!(log.contains(text), log);
            Ok(Some(()))
        })
        .await;
    }
}

/// Calls the CNI plugin as a runtime's main plugin does, and returns its output: the result, or the error.
fn call_plugin(
    verb: &str,
    id: &str,
    interface: &str,
    folder: &Path,
    config: &Value,
) -> Result<Value, Value> {
    let mut child = Command::new(daemon::plugin().unwrap())
        .env_clear()
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", id)
        .env("CNI_IFNAME", interface)
        .env("CNI_NETNS", folder.join(id))
        .env("CNI_PATH", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(config.to_string().as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let said = serde_json::from_slice(&output.stdout).unwrap_or_default();
    if output.status.success() {
        Ok(said)
    } else {
        Err(said)
    }
}

/// Returns an ADD for the sandbox `id` of the pod `pod`.
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
async fn published(api: &Fixtures, node: &str) -> Result<Vec<String>> {
    let list = api.addresses.get_opt(node).await?;
    let entries = list.iter().flat_map(|it| it.spec.entries());
    let mut all: Vec<String> = entries
        .flat_map(|it| it.addresses)
        .map(|it| it.to_string())
        .collect();
    all.sort();
    Ok(all)
}

/// Returns whether the `used` counts in the NodeSubnet's status agree with `addresses`.
async fn counts(api: &Fixtures, node: &str, addresses: &[String]) -> Result<bool> {
    let subnet = api.subnets.get_opt(node).await?;
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

/// Waits until the NodeAddresses object lists exactly these addresses, and the counts in the NodeSubnet's status agree
/// with this list.
async fn publishes(api: &Fixtures, node: &str, mut addresses: Vec<String>) {
    addresses.sort();
    eventually(
        &format!("NodeAddresses {node} lists {addresses:?}"),
        async || {
            let listed = published(api, node).await?;
            anyhow::ensure!(listed == addresses, "{listed:?}");
            let counted = counts(api, node, &addresses).await?;
            anyhow::ensure!(counted, "the NodeSubnet counts others");
            Ok(Some(()))
        },
    )
    .await;
}
