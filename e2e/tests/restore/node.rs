//! A node with a real agent, and the addresses that are in use on it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use cadastre_core::Addr;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures};
use cadastre_node::{Add, Attachment, Op, OpError, OpOutcome, client};
use tempfile::TempDir;

use crate::{GROUP, LIMIT};

/// The maximum time for a request to the agent.
const PATIENCE: Duration = Duration::from_secs(10);

/// A node, its agent, and the addresses that the test has requested there and not released.
pub struct Node {
    pub name: String,
    /// Addresses in use, by container
    pub held: BTreeMap<String, Addr>,
    folder: TempDir,
    _agent: Daemon,
}

impl Node {
    /// Creates the Node and starts its agent; does not wait until the agent is ready.
    pub async fn join(cluster: &ControlPlane, hand: &Fixtures, name: &str) -> Self {
        register(hand, name).await;
        let folder = tempfile::tempdir().unwrap();
        let at = |file: &str| folder.path().join(file).display().to_string();
        let args = [
            "agent".to_owned(),
            format!("--node-name={name}"),
            format!("--cni-socket={}", at("cni.sock")),
            format!("--socket={}", at("agent.sock")),
            format!("--store={}", at("node.redb")),
            "--publish-interval=1".to_owned(),
        ];
        let options = DaemonOptions {
            name: format!("agent-{name}"),
            args: args.into(),
            env: Vec::new(),
        };
        let kubeconfig = cluster.kubeconfig(ADMIN).unwrap();
        let agent = Daemon::start(cluster.folder(), &kubeconfig, &options).unwrap();
        Self {
            name: name.to_owned(),
            held: BTreeMap::new(),
            folder,
            _agent: agent,
        }
    }

    /// Assigns `count` more addresses; each may take at most [`LIMIT`].
    pub async fn add_many(&mut self, count: usize) {
        for _ in 0..count {
            let what = format!("{} gives an address", self.name);
            let given = until(&what, LIMIT, async || Ok(Some(self.try_add().await?)));
            let (container, addr) = given.await.unwrap();
            self.held.insert(container, addr);
        }
    }

    /// Requests one address, and returns the container and the address. The caller records them in [`Self::held`].
    pub async fn try_add(&self) -> Result<(String, Addr), OpError> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let container = format!("c{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let add = Op::Add(Add {
            attachment: attachment(&container),
            netns: String::new(),
            pod: None,
            pools: Vec::new(),
            addresses: Vec::new(),
            decided: false,
            bound: Vec::new(),
        });
        match self.ask(add).await? {
            OpOutcome::Given(given) => Ok((container, given.addresses[0].address)),
            OpOutcome::Done => panic!("an ADD gives something"),
        }
    }

    pub async fn delete_all(&mut self) {
        for container in std::mem::take(&mut self.held).into_keys() {
            self.ask(Op::Del(attachment(&container))).await.unwrap();
        }
    }

    async fn ask(&self, op: Op) -> Result<OpOutcome, OpError> {
        let at = |file: &str| -> PathBuf { self.folder.path().join(file) };
        let (socket, store) = (at("cni.sock"), at("node.redb"));
        let asked = move || client::ask(&socket, &store, &op, PATIENCE);
        tokio::task::spawn_blocking(asked).await.unwrap()
    }
}

/// Creates the Node, which is otherwise the kubelet's task.
pub async fn register(hand: &Fixtures, name: &str) {
    hand.node(GROUP, name).await.unwrap();
}

fn attachment(container: &str) -> Attachment {
    Attachment {
        network: "net".to_owned(),
        container_id: container.to_owned(),
        ifname: "eth0".to_owned(),
    }
}
