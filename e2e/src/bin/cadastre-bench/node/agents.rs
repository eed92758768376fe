//! Real agents connected to a real control plane, each with its own node.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::control_plane::{ADMIN, Options};
use cadastre_e2e::node_agent::{NodeAgent, add, attachment};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, TestCluster, metrics};
use cadastre_node::Op;
use serde_json::json;

use crate::LIMIT;

const POOL: &str = "bench";

/// A control plane, a controller, and a pool with a block of 1,022 addresses for each node.
pub struct Agents {
    stage: TestCluster,
    hand: Fixtures,
}

pub struct Agent(NodeAgent);

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

    /// Creates a node and starts its agent. Returns when the agent has a block from which it can assign.
    pub async fn agent(&self, name: &str, flags: &[&str]) -> Result<Agent> {
        let node = format!("{POOL}-{name}");
        self.hand.node(POOL, &node).await?;
        let mut agent = NodeAgent::new(&self.stage.control_plane, ADMIN, &node, flags)?;
        start(&mut agent).await?;
        until("the agent has a block", LIMIT, async || {
            agent.add(add("probe")).await?;
            agent.ask(Op::Del(attachment("probe"))).await?;
            Ok(Some(()))
        })
        .await?;
        Ok(Agent(agent))
    }

    pub async fn requests(&self) -> Result<Vec<metrics::Sample>> {
        self.stage.control_plane.apiserver_metrics().await
    }
}

async fn start(agent: &mut NodeAgent) -> Result<()> {
    agent.start()?;
    agent.running()?.wait_ready(LIMIT).await?;
    Ok(())
}

impl Agent {
    /// Kills the agent and starts it again. Returns the time until the agent is ready.
    pub async fn restart(&mut self) -> Result<Duration> {
        self.0.running()?.process().kill()?;
        let killed = Instant::now();
        start(&mut self.0).await?;
        Ok(killed.elapsed())
    }

    /// Returns the `ipam` section of a CNI configuration with which the CNI plugin sends its requests to this agent.
    pub fn ipam(&self) -> serde_json::Value {
        json!({
            "type": "cadastre-ipam",
            "socket": self.0.plugin_socket(), "store": self.0.store(),
        })
    }

    pub fn usage(&mut self) -> Result<cadastre_e2e::process::Usage> {
        self.0.running()?.process().usage()
    }

    /// Assigns addresses to `count` containers by requests to the agent's socket, without starting the CNI plugin.
    pub async fn fill(&self, count: usize) -> Result<()> {
        for n in 0..count {
            self.0.add(add(&format!("filled-{n}"))).await?;
        }
        Ok(())
    }
}
