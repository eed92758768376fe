//! Agents of nodes without a machine: `cadastre agent` as a process with a folder of its own. Tests call the agent over
//! its socket, as the CNI plugin does.
//!
//! There is no kubelet and no runtime, so a container is only a name that the caller chooses.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_core::Addr;
use cadastre_node::client::ask;
use cadastre_node::{Add, Attachment, Op, OpError, OpErrorKind, OpOutcome, PodRef};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::control_plane::{ADMIN, ControlPlane};
use crate::daemon::{Daemon, DaemonOptions};
use crate::fixtures::{Fixtures, LIMIT};
use crate::small_disk::SmallDisk;
use crate::wait::until;

/// How long a call waits for the agent's answer, which is as long as the CNI plugin waits.
const PATIENCE: Duration = Duration::from_secs(10);
/// Flags of [`Agents`]. Agents publish everything within about a second, and an ADD that gets no address ends after a
/// second.
const QUICK: [&str; 6] = [
    "--publish-interval",
    "1",
    "--addresses-interval",
    "1",
    "--add-wait",
    "1",
];

/// Creates a folder in memory, as `/run` is on a machine.
pub fn in_memory() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    Ok(if memory.is_dir() {
        tempfile::tempdir_in(memory)?
    } else {
        tempfile::tempdir()?
    })
}

/// The agent of one node, with the folder that its machine would keep.
pub struct NodeAgent {
    node: String,
    folder: TempDir,
    logs: PathBuf,
    kubeconfig: PathBuf,
    /// The flags with which [`Self::start`] starts the agent, without those for the node's name and the paths
    pub flags: Vec<String>,
    /// Additional environment variables
    pub env: Vec<(String, String)>,
    /// The running agent; `None` before [`Self::start`]
    pub daemon: Option<Daemon>,
    /// Another file system that takes the place of the folder
    pub disk: Option<SmallDisk>,
}

impl NodeAgent {
    /// Creates the folder of an agent that authenticates as `user`. Does not start the agent.
    pub fn new(cluster: &ControlPlane, user: &str, node: &str, flags: &[&str]) -> Result<Self> {
        Self::with(cluster.folder(), &cluster.kubeconfig(user)?, node, flags)
    }

    fn with(logs: &Path, kubeconfig: &Path, node: &str, flags: &[&str]) -> Result<Self> {
        Ok(Self {
            node: node.to_owned(),
            folder: in_memory()?,
            logs: logs.to_owned(),
            kubeconfig: kubeconfig.to_owned(),
            flags: flags.iter().map(ToString::to_string).collect(),
            env: Vec::new(),
            daemon: None,
            disk: None,
        })
    }

    /// Starts the agent. Does not wait until it is ready.
    pub fn start(&mut self) -> Result<()> {
        self.daemon = Some(self.spawn("agent")?);
        Ok(())
    }

    /// Returns the running agent, or an error if the agent was not started.
    pub fn running(&mut self) -> Result<&mut Daemon> {
        let none = || format!("the agent of {} does not run: start it first", self.node);
        self.daemon.as_mut().with_context(none)
    }

    /// Starts another agent process with the same folder. The name of its log file contains `name` and the node's name.
    pub fn spawn(&self, name: &str) -> Result<Daemon> {
        let mut args: Vec<String> = ["agent", "--node-name", &self.node]
            .map(str::to_owned)
            .into();
        for (flag, path) in [
            ("--cni-socket", self.plugin_socket()),
            ("--socket", self.socket()),
            ("--store", self.store()),
            ("--holdings", self.holdings()),
        ] {
            args.extend([flag.to_owned(), path.display().to_string()]);
        }
        args.extend(self.flags.iter().cloned());
        let options = DaemonOptions {
            name: format!("{name}-{}", self.node),
            args,
            env: self.env.clone(),
        };
        Daemon::start(&self.logs, &self.kubeconfig, &options)
    }

    /// The folder with the agent's sockets and store. The caller can keep further files in this folder.
    pub fn folder(&self) -> &Path {
        let disk = self.disk.as_ref();
        disk.map_or(self.folder.path(), SmallDisk::path)
    }

    /// The socket on which the agent listens for the CNI plugin.
    pub fn plugin_socket(&self) -> PathBuf {
        self.folder().join("run/cni.sock")
    }

    /// The path of the socket on which the agent serves its gRPC API.
    pub fn socket(&self) -> PathBuf {
        self.folder().join("run/agent.sock")
    }

    /// The path of the store, the file `node.redb`.
    pub fn store(&self) -> PathBuf {
        self.folder().join("run/node.redb")
    }

    /// The path of the holdings file, `holdings.json`, which survives a reboot of the machine.
    pub fn holdings(&self) -> PathBuf {
        self.folder().join("lib/holdings.json")
    }

    /// Sends a request as the CNI plugin does. If no agent answers, uses the store directly.
    pub async fn ask(&self, op: Op) -> Result<OpOutcome, OpError> {
        let (socket, store) = (self.plugin_socket(), self.store());
        let asked = tokio::task::spawn_blocking(move || ask(&socket, &store, &op, PATIENCE));
        let joined = asked.await;
        joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    /// Adds a container and returns its addresses, IPv4 first.
    pub async fn add(&self, add: Add) -> Result<Vec<Addr>, OpError> {
        let addresses = match self.ask(Op::Add(add)).await? {
            OpOutcome::Assigned(assigned) => assigned.addresses,
            OpOutcome::Done => Vec::new(),
        };
        Ok(addresses.into_iter().map(|it| it.address).collect())
    }
}

/// Returns the attachment of a container's `eth0` to the network `net`.
pub fn attachment(container: &str) -> Attachment {
    Attachment {
        network: "net".to_owned(),
        container_id: container.to_owned(),
        ifname: "eth0".to_owned(),
    }
}

/// Returns an ADD for a container that belongs to no pod.
pub fn add(container: &str) -> Add {
    Add {
        attachment: attachment(container),
        netns: String::new(),
        pod: None,
        pools: Vec::new(),
        addresses: Vec::new(),
        decided: false,
        ..Add::default()
    }
}

/// The agents of several nodes. They are killed when this value is dropped.
pub struct Agents {
    logs: PathBuf,
    /// Returns the kubeconfig and the additional environment variables of the agent of a node
    connect: Box<Connect>,
    by_node: Mutex<BTreeMap<String, Arc<Machine>>>,
}

type Connect = dyn Fn(&str) -> Result<(PathBuf, Vec<(String, String)>)> + Send + Sync;

struct Machine {
    agent: NodeAgent,
    daemon: Mutex<Daemon>,
}

impl Agents {
    /// Returns an empty set, to which [`Self::join`] adds the agents of a cluster's nodes.
    pub fn new(cluster: &ControlPlane) -> Result<Self> {
        let kubeconfig = cluster.kubeconfig(ADMIN)?;
        let connect = move |_: &str| Ok((kubeconfig.clone(), Vec::new()));
        Ok(Self::connecting(cluster.folder(), connect))
    }

    /// Returns an empty set with logs in the folder `logs`. For each node, `connect` returns the agent's kubeconfig and
    /// additional environment variables.
    pub fn connecting(
        logs: &Path,
        connect: impl Fn(&str) -> Result<(PathBuf, Vec<(String, String)>)> + Send + Sync + 'static,
    ) -> Self {
        Self {
            logs: logs.to_owned(),
            connect: Box::new(connect),
            by_node: Mutex::default(),
        }
    }

    /// Starts the agent of a node, on an empty folder. Does not wait until the agent is ready, because the agent is
    /// ready only once it has a block. [`Agents::allocate`] waits for the block.
    pub fn join(&self, node: &Node) -> Result<()> {
        let name = node.name_any();
        let (kubeconfig, env) = (self.connect)(&name)?;
        let mut agent = NodeAgent::with(&self.logs, &kubeconfig, &name, &QUICK)?;
        agent.env = env;
        let daemon = Mutex::new(agent.spawn("agent")?);
        let machine = Arc::new(Machine { agent, daemon });
        lock(&self.by_node).insert(name, machine);
        Ok(())
    }

    /// Kills the agent of a node and deletes its folder, as if the machine were gone.
    pub fn leave(&self, node: &str) {
        lock(&self.by_node).remove(node);
    }

    /// Kills the agent of a node, and starts it again with the same folder.
    pub fn restart(&self, node: &str) -> Result<()> {
        let machine = self.machine(node)?;
        let mut daemon = lock(&machine.daemon);
        daemon.process().kill()?;
        *daemon = machine.agent.spawn("agent")?;
        Ok(())
    }

    /// Returns an error if the agent of a node has ended by itself.
    pub fn check_running(&self, node: &str) -> Result<()> {
        let machine = self.machine(node)?;
        lock(&machine.daemon).process().check_running()
    }

    /// Returns the address of the admin server of a node's agent.
    pub fn admin_address(&self, node: &str) -> Result<String> {
        let machine = self.machine(node)?;
        let address = lock(&machine.daemon).admin_address().to_owned();
        Ok(address)
    }

    /// Sends a signal to the agent of a node. Fails if [`Agents::join`] has not started the agent.
    pub fn signal(&self, node: &str, signal: Signal) -> Result<()> {
        let machine = self.machine(node)?;
        lock(&machine.daemon).signal(signal)
    }

    /// Adds a container and returns its addresses. Waits until the node has a free address of the pool.
    pub async fn allocate(&self, node: &str, pool: &str, container: &str) -> Result<Vec<String>> {
        let what = format!("{container} on {node} has addresses of pool {pool}");
        until(&what, LIMIT, async || {
            let answer = self.add(node, of_pool(pool, container)).await?;
            Ok(Some(answer?))
        })
        .await
    }

    /// Runs [`Agents::allocate`] for many containers concurrently.
    pub async fn allocate_all(
        &self,
        node: &str,
        pool: &str,
        containers: impl IntoIterator<Item = String>,
    ) -> Result<Vec<Vec<String>>> {
        let adds = containers
            .into_iter()
            .map(async |it| self.allocate(node, pool, &it).await);
        try_join_all(adds).await
    }

    /// Adds a container if an address of the pool is free or becomes free within a second.
    pub async fn try_allocate(
        &self,
        node: &str,
        pool: &str,
        container: &str,
    ) -> Result<Option<Vec<String>>> {
        let what = format!("the agent of {node} answers");
        until(&what, LIMIT, async || {
            match self.add(node, of_pool(pool, container)).await? {
                Ok(addresses) => Ok(Some(Some(addresses))),
                Err(OpError {
                    why: OpErrorKind::Exhausted | OpErrorKind::NoBlock,
                    ..
                }) => Ok(Some(None)),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Creates a pod on a node and adds a container of the same name. Writes the container's addresses to the pod's
    /// status, and returns them.
    pub async fn run_pod(&self, fixtures: &Fixtures, node: &str, pod: &str) -> Result<Vec<String>> {
        let created = fixtures.pod(pod, node, &[]).await?;
        self.run(fixtures, node, &created).await
    }

    /// Adds a container for the pod `created`, with the pod's name. Writes the container's addresses to the pod's
    /// status, and returns them.
    pub async fn run(&self, fixtures: &Fixtures, node: &str, created: &Pod) -> Result<Vec<String>> {
        let pod = &created.name_any();
        let add = Add {
            pod: Some(pod_ref(created)),
            ..add(pod)
        };
        let what = format!("pod {pod} on {node} has addresses");
        let addresses = until(&what, LIMIT, async || {
            Ok(Some(self.add(node, add.clone()).await??))
        })
        .await?;
        let texts: Vec<&str> = addresses.iter().map(String::as_str).collect();
        fixtures.report_addresses(pod, &texts).await?;
        Ok(addresses)
    }

    /// Returns the `ipam` section of a network config with which the CNI plugin sends its requests to a node's agent.
    pub fn ipam(&self, node: &str) -> Result<Value> {
        let machine = self.machine(node)?;
        let (socket, store) = (machine.agent.plugin_socket(), machine.agent.store());
        Ok(json!({"type": "cadastre-ipam", "socket": socket, "store": store}))
    }

    /// Sends an ADD to a node's agent once. The inner error is the agent's answer.
    pub async fn add(&self, node: &str, add: Add) -> Result<Result<Vec<String>, OpError>> {
        let answer = self.machine(node)?.agent.add(add).await;
        Ok(answer.map(|all| all.iter().map(ToString::to_string).collect()))
    }

    /// Deletes a container. Its addresses cool for the pool's `cooldownSeconds`.
    pub async fn free(&self, node: &str, container: &str) -> Result<()> {
        self.delete(node, attachment(container)).await
    }

    /// Deletes an interface of a container.
    pub async fn delete(&self, node: &str, interface: Attachment) -> Result<()> {
        self.machine(node)?.agent.ask(Op::Del(interface)).await?;
        Ok(())
    }

    /// Runs [`Agents::free`] for many containers concurrently.
    pub async fn free_all(
        &self,
        node: &str,
        containers: impl IntoIterator<Item = String>,
    ) -> Result<()> {
        let dels = containers
            .into_iter()
            .map(async |it| self.free(node, &it).await);
        try_join_all(dels).await?;
        Ok(())
    }

    fn machine(&self, node: &str) -> Result<Arc<Machine>> {
        let machine = lock(&self.by_node).get(node).map(Arc::clone);
        machine.with_context(|| format!("node {node} has no agent: join it first"))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of_pool(pool: &str, container: &str) -> Add {
    Add {
        pools: vec![pool.to_owned()],
        ..add(container)
    }
}

/// Returns the reference to `pod` with which an ADD names its pod.
pub fn pod_ref(pod: &Pod) -> PodRef {
    PodRef {
        namespace: pod.namespace().unwrap_or_default(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
    }
}
