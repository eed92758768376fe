//! Adds and deletes containers through agents, so that nodes get more blocks of a pool, and later release these blocks.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_api::{IPAMBlock, OwnerKind};
use cadastre_e2e::{Agents, ControlPlane, nodes};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

/// A pool of config/samples that every node may use.
const POOL: &str = "pods";
/// Number of nodes with an agent.
const NODES: usize = 8;
/// The minimum and the maximum number of pods on a node.
const PODS: (usize, usize) = (10, 160);
/// The time in which the number of pods of a node rises from the minimum to the maximum.
const TIDE: Duration = Duration::from_secs(25);
const LINE: Duration = Duration::from_secs(5);

/// The number of pods on each node, and the agents that assign the pods' addresses.
pub struct Life {
    agents: Agents,
    client: Client,
    /// The names of the nodes, with the number of pods on each.
    pods: Vec<(String, usize)>,
    begun: Instant,
    printed: Instant,
}

impl Life {
    /// Starts agents for the first [`NODES`] of the nodes without a kubelet. The nodes with a kubelet already have
    /// agents.
    pub async fn start(cluster: &ControlPlane, client: &Client) -> Result<Self> {
        let agents = Agents::new(cluster)?;
        let mut pods = Vec::new();
        let nodes = nodes::list(client).await?;
        let made = |node: &&Node| node.name_any().starts_with("node-");
        for node in nodes.iter().filter(made).take(NODES) {
            agents.join(node)?;
            pods.push((node.name_any(), 0));
        }
        Ok(Life {
            agents,
            client: client.clone(),
            pods,
            begun: Instant::now(),
            printed: Instant::now(),
        })
    }

    /// Adds or deletes the containers of pods. Returns a line to print if the time [`LINE`] has passed since the last
    /// line, else `None`.
    pub async fn step(&mut self) -> Result<Option<String>> {
        let (wanted, rising) = tide(self.begun.elapsed());
        let agents = &self.agents;
        let nodes = self.pods.iter_mut().map(async |(node, count)| {
            let more = (*count..wanted).map(|n| pod(node, n));
            agents.allocate_all(node, POOL, more).await?;
            let fewer = (wanted..*count).map(|n| pod(node, n));
            agents.free_all(node, fewer).await?;
            *count = wanted;
            anyhow::Ok(())
        });
        try_join_all(nodes).await?;
        if self.printed.elapsed() < LINE {
            return Ok(None);
        }
        self.printed = Instant::now();
        let blocks = Api::<IPAMBlock>::all(self.client.clone());
        let of_pool = ListParams::default().fields(&format!("spec.pool={POOL}"));
        let blocks = blocks.list(&of_pool).await?.items;
        let quarantined = blocks
            .iter()
            .filter(|it| it.spec.owner.kind == OwnerKind::Quarantine);
        let (all, quarantined) = (blocks.len(), quarantined.count());
        let pods: usize = self.pods.iter().map(|(_, count)| count).sum();
        Ok(Some(format!(
            "{:>4} s  {pods:>5} pods on {} nodes {}  {} blocks allocated, {quarantined} in quarantine",
            self.begun.elapsed().as_secs(),
            self.pods.len(),
            if rising {
                "(more to come)"
            } else {
                "(fewer now)   "
            },
            all - quarantined,
        )))
    }
}

fn pod(node: &str, n: usize) -> String {
    format!("{node}-pod-{n}")
}

/// Returns how many pods a node should have at the time `since` after the start, and whether the number is rising.
fn tide(since: Duration) -> (usize, bool) {
    let period = 2 * TIDE.as_millis();
    let at = since.as_millis() % period;
    let rising = at < TIDE.as_millis();
    let height = if rising { at } else { period - at };
    let more = (PODS.1 - PODS.0) as u128 * height / TIDE.as_millis();
    (PODS.0 + usize::try_from(more).unwrap_or(0), rising)
}
