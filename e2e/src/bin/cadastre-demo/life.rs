//! Pods that come and go, so that blocks grow and return: the agents are simulated, the rest is real.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_api::{IPAMBlock, OwnerKind};
use cadastre_e2e::agent::Agents;
use cadastre_e2e::nodes;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

/// The pool of config/samples that every node may use.
const POOL: &str = "pods";
/// So many nodes have an agent.
const NODES: usize = 8;
/// Pods on a node at ebb and at flood.
const PODS: (usize, usize) = (10, 160);
/// From ebb to flood.
const TIDE: Duration = Duration::from_secs(25);
const LINE: Duration = Duration::from_secs(5);

/// Pods and the agents that give them addresses.
pub struct Life {
    agents: Agents,
    client: Client,
    /// Pods by node; the last one came last.
    pods: Vec<(String, usize)>,
    begun: Instant,
    told: Instant,
}

impl Life {
    /// The first of the made nodes get agents; real ones have their own.
    pub async fn start(client: &Client) -> Result<Self> {
        let agents = Agents::start(client.clone());
        let mut pods = Vec::new();
        let nodes = nodes::list(client).await?;
        let made = |node: &&Node| node.name_any().starts_with("node-");
        for node in nodes.iter().filter(made).take(NODES) {
            agents.join(node);
            pods.push((node.name_any(), 0));
        }
        Ok(Life {
            agents,
            client: client.clone(),
            pods,
            begun: Instant::now(),
            told: Instant::now(),
        })
    }

    /// A step of about a second. Returns a line to print now and then.
    pub async fn step(&mut self) -> Result<Option<String>> {
        let (wanted, rising) = tide(self.begun.elapsed());
        for (node, count) in &mut self.pods {
            while *count < wanted
                && self
                    .agents
                    .try_allocate(node, POOL, &pod(node, *count))?
                    .is_some()
            {
                *count += 1;
            }
            while *count > wanted {
                *count -= 1;
                self.agents.free(node, &pod(node, *count))?;
            }
            if !rising {
                self.agents.warm_up(node)?;
                self.agents.ask(node, POOL, 3)?;
            }
        }
        if self.told.elapsed() < LINE {
            return Ok(None);
        }
        self.told = Instant::now();
        let blocks = Api::<IPAMBlock>::all(self.client.clone());
        let of_pool = ListParams::default().fields(&format!("spec.pool={POOL}"));
        let blocks = blocks.list(&of_pool).await?.items;
        let resting = blocks
            .iter()
            .filter(|it| it.spec.owner.kind == OwnerKind::Quarantine);
        let (all, resting) = (blocks.len(), resting.count());
        let pods: usize = self.pods.iter().map(|(_, count)| count).sum();
        Ok(Some(format!(
            "{:>4} s  {pods:>5} pods on {} nodes {}  {} blocks held, {resting} in quarantine",
            self.begun.elapsed().as_secs(),
            self.pods.len(),
            if rising {
                "(more to come)"
            } else {
                "(fewer now)   "
            },
            all - resting,
        )))
    }
}

fn pod(node: &str, n: usize) -> String {
    format!("{node}-pod-{n}")
}

/// How many pods a node should have, and whether it will be more.
fn tide(since: Duration) -> (usize, bool) {
    let period = 2 * TIDE.as_millis();
    let at = since.as_millis() % period;
    let rising = at < TIDE.as_millis();
    let height = if rising { at } else { period - at };
    let more = (PODS.1 - PODS.0) as u128 * height / TIDE.as_millis();
    (PODS.0 + usize::try_from(more).unwrap_or(0), rising)
}
