//! Real agents connected to a real control plane, each with its own node.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_e2e::control_plane::{ADMIN, Options};
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Daemon, Fixtures, TestCluster, metrics};
use cadastre_node::{Add, Attachment, Op, OpOutcome, client};
use serde_json::json;

use crate::LIMIT;

const POOL: &str = "bench";
/// The timeout of requests to the agent; longer than the CNI plugin's own timeout.
const PATIENCE: Duration = Duration::from_secs(30);

/// A control plane, a controller, and a pool with a block of 1,022 addresses for each node.
pub struct Agents {
    stage: TestCluster,
    hand: Fixtures,
}

pub struct Agent {
    node: String,
    folder: PathBuf,
    flags: Vec<String>,
    daemon: Daemon,
}

impl Agents {
    /// Starts the control plane and the controller, and creates the pool.
    pub async fn start() -> Result<Self> {
        let stage = TestCluster::start(Options::default(), &[]).await?;
        let hand = stage.fixtures().await?;
        let spec = json!({
            "ipv4": {"cidrs": ["10.1.0.0/16"], "blockSize": 22}, "cooldownSeconds": 0,
        });
        hand.block_pool(POOL, spec).await?;
        Ok(Self { stage, hand })
    }

    /// Creates a node and starts its agent. Returns when the agent has a block to assign from.
    pub async fn agent(&self, name: &str, flags: &[&str]) -> Result<Agent> {
        let node = format!("{POOL}-{name}");
        self.hand.node(POOL, &node).await?;
        let folder = self.stage.control_plane.folder().join(&node);
        std::fs::create_dir(&folder)?;
        let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
        let daemon = self.spawn(&node, &folder, &flags)?;
        let mut agent = Agent {
            node,
            folder,
            flags,
            daemon,
        };
        agent.daemon.wait_ready(LIMIT).await?;
        let probe = attachment("probe");
        until("the agent has a block", LIMIT, async || {
            agent.ask(&add(&probe))?;
            Ok(Some(agent.ask(&Op::Del(probe.clone()))?))
        })
        .await?;
        Ok(agent)
    }

    fn spawn(&self, node: &str, folder: &Path, flags: &[String]) -> Result<Daemon> {
        let mut args = vec!["agent".to_owned(), format!("--node-name={node}")];
        for (flag, file) in [
            ("cni-socket", "cni.sock"),
            ("socket", "agent.sock"),
            ("store", "node.redb"),
        ] {
            args.push(format!("--{flag}={}", folder.join(file).display()));
        }
        args.extend(flags.iter().cloned());
        let options = DaemonOptions {
            name: node.to_owned(),
            args,
            env: Vec::new(),
        };
        let cluster = &self.stage.control_plane;
        Daemon::start(cluster.folder(), &cluster.kubeconfig(ADMIN)?, &options)
    }

    /// Kills an agent and starts it again; returns the time until it is ready.
    pub async fn restart(&self, agent: &mut Agent) -> Result<Duration> {
        agent.daemon.process().kill()?;
        let start = Instant::now();
        agent.daemon = self.spawn(&agent.node, &agent.folder, &agent.flags)?;
        agent.daemon.wait_ready(LIMIT).await?;
        Ok(start.elapsed())
    }

    pub async fn requests(&self) -> Result<Vec<metrics::Sample>> {
        self.stage.control_plane.apiserver_metrics().await
    }
}

impl Agent {
    /// The `ipam` section of a CNI configuration with which the CNI plugin asks this agent.
    pub fn ipam(&self) -> serde_json::Value {
        json!({
            "type": "cadastre-ipam",
            "socket": self.folder.join("cni.sock"), "store": self.folder.join("node.redb"),
        })
    }

    pub fn usage(&mut self) -> Result<cadastre_e2e::process::Usage> {
        self.daemon.process().usage()
    }

    /// Assigns addresses to `count` containers by asking the agent directly, without starting the CNI plugin.
    pub fn fill(&self, count: usize) -> Result<()> {
        for n in 0..count {
            self.ask(&add(&attachment(&format!("filled-{n}"))))?;
        }
        Ok(())
    }

    fn ask(&self, op: &Op) -> Result<OpOutcome> {
        let (socket, store) = (self.folder.join("cni.sock"), self.folder.join("node.redb"));
        let answer = client::ask(&socket, &store, op, PATIENCE);
        answer.with_context(|| format!("the agent of {} refuses", self.node))
    }
}

fn attachment(container: &str) -> Attachment {
    Attachment {
        network: "pods".to_owned(),
        container_id: container.to_owned(),
        ifname: "eth0".to_owned(),
    }
}

fn add(attachment: &Attachment) -> Op {
    Op::Add(Add {
        attachment: attachment.clone(),
        netns: String::new(),
        pod: None,
        pools: Vec::new(),
        addresses: Vec::new(),
        decided: false,
        bound: Vec::new(),
    })
}
