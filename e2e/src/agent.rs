//! Test agents: the node side of NodeSubnets, without nodes.
//!
//! One task plays as many agents as it is given, over one watch, and keeps to what the API asks of
//! an agent (`cadastre_api::subnet`). Pods are names that the test gives and takes away; what an
//! agent decides by itself is in [`node`], without IO.
//!
//! # Caveats
//! - Nothing is kept on disk: a [`Agents`] that is dropped forgets who has which address.
//! - Leaked addresses are not looked for: there is no node that could say that a pod is gone.

pub mod node;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cadastre_api::NodeSubnet;
use futures::stream::{FuturesUnordered, StreamExt as _};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::node::Agent;
use crate::wait::until;

/// How long a pod waits for an address that should take a second.
const LIMIT: Duration = Duration::from_secs(30);
/// Statuses that are written at once.
const WRITES: usize = 32;

/// Many agents. They fall silent when this is dropped.
pub struct Agents {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    agents: BTreeMap<String, Agent>,
    /// The last that the watch has shown of each name, for agents that join later.
    subnets: BTreeMap<String, NodeSubnet>,
    /// Agents with something to publish
    dirty: BTreeSet<String>,
    in_flight: BTreeSet<String>,
}

impl Agents {
    /// None yet, and the watch that they share.
    pub fn start(client: Client) -> Self {
        let shared = Arc::new(Shared::default());
        let task = tokio::spawn(play(Api::all(client), Arc::clone(&shared)));
        Self { shared, task }
    }

    /// From now on that node has an agent. Each Node object has its own: one that is made anew under
    /// the name needs to join again.
    pub fn join(&self, node: &Node) {
        let name = node.name_any();
        let mut state = self.shared.lock();
        let mut agent = Agent::new(&node.uid().unwrap_or_default());
        if let Some(subnet) = state.subnets.get(&name) {
            agent.see(subnet);
        }
        state.agents.insert(name.clone(), agent);
        self.shared.mark(&mut state, &name);
    }

    /// The machine is gone: nobody speaks for the node any more.
    pub fn leave(&self, node: &str) {
        self.shared.lock().agents.remove(node);
    }

    /// What the node wants to hold of a pool, in addresses of each family, beside what is in use.
    pub fn ask(&self, node: &str, pool: &str, addresses: u64) -> Result<()> {
        self.change(node, |agent| agent.ask(pool, addresses))
    }

    /// Gives a pod an address of each family of the pool as soon as there is one, and returns them.
    pub async fn allocate(&self, node: &str, pool: &str, pod: &str) -> Result<Vec<String>> {
        until(
            &format!("{pod} on {node} has addresses"),
            LIMIT,
            async || {
                let given = self.try_allocate(node, pool, pod)?;
                ensure!(given.is_some(), "{node} has {:#?}", self.blocks(node)?);
                Ok(given)
            },
        )
        .await
    }

    /// The same where the node has some free; else it asks for more.
    pub fn try_allocate(&self, node: &str, pool: &str, pod: &str) -> Result<Option<Vec<String>>> {
        let given = self.change(node, |agent| agent.give(pool, pod))?;
        Ok(given.map(|addresses| addresses.iter().map(ToString::to_string).collect()))
    }

    /// A pod has ended. Its addresses cool until [`Agents::warm_up`].
    pub fn free(&self, node: &str, pod: &str) -> Result<()> {
        self.change(node, |agent| agent.free(pod))
    }

    /// All addresses that cool are free.
    pub fn warm_up(&self, node: &str) -> Result<()> {
        self.change(node, Agent::warm_up)
    }

    /// The addresses in use on a node, as an agent lists them; nobody writes that.
    pub fn addresses(&self, node: &str) -> Result<cadastre_api::NodeAddressesSpec> {
        let state = self.shared.lock();
        let agent = state.agents.get(node).with_context(|| unknown(node))?;
        Ok(agent.addresses())
    }

    /// The blocks that the agent of a node knows of, as it tells of them.
    pub fn blocks(&self, node: &str) -> Result<Vec<cadastre_api::BlockStatus>> {
        let state = self.shared.lock();
        let agent = state.agents.get(node).with_context(|| unknown(node))?;
        Ok(agent.status().blocks)
    }

    fn change<T>(&self, node: &str, change: impl FnOnce(&mut Agent) -> T) -> Result<T> {
        let mut state = self.shared.lock();
        let agent = state.agents.get_mut(node).with_context(|| unknown(node))?;
        let done = change(agent);
        self.shared.mark(&mut state, node);
        Ok(done)
    }
}

fn unknown(node: &str) -> String {
    format!("node {node} has no agent: join it first")
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, state: &mut State, node: &str) {
        if state.agents.contains_key(node) {
            state.dirty.insert(node.to_owned());
            self.changed.notify_one();
        }
    }
}

impl State {
    /// The next status to write: of an agent whose NodeSubnet is there and says something else.
    fn next_write(&mut self) -> Option<(String, Patch<serde_json::Value>)> {
        loop {
            let free = |name: &&String| !self.in_flight.contains(*name);
            let name = self.dirty.iter().find(free)?.clone();
            self.dirty.remove(&name);
            let (Some(agent), Some(subnet)) = (self.agents.get(&name), self.subnets.get(&name))
            else {
                continue;
            };
            let status = agent.status();
            let said = subnet.status.clone().unwrap_or_default();
            let same = cadastre_api::NodeSubnetStatus {
                conditions: said.conditions.clone(),
                ..status.clone()
            };
            if said == same {
                continue;
            }
            self.in_flight.insert(name.clone());
            let patch = json!({"status": {
                "nodeUID": status.node_uid, "pools": status.pools, "blocks": status.blocks,
            }});
            return Some((name, Patch::Merge(patch)));
        }
    }

    fn see(&mut self, subnet: NodeSubnet) {
        let name = subnet.name_any();
        if let Some(agent) = self.agents.get_mut(&name) {
            agent.see(&subnet);
            self.dirty.insert(name.clone());
        }
        self.subnets.insert(name, subnet);
    }
}

async fn play(api: Api<NodeSubnet>, shared: Arc<Shared>) {
    let mut watch = std::pin::pin!(watcher::watcher(api.clone(), watcher::Config::default()));
    let mut writes = FuturesUnordered::new();
    loop {
        while writes.len() < WRITES {
            let Some((name, patch)) = shared.lock().next_write() else {
                break;
            };
            let api = &api;
            writes.push(async move {
                let params = PatchParams::default();
                let answer = api.patch_status(&name, &params, &patch).await;
                (name, answer)
            });
        }
        tokio::select! {
            event = watch.next() => match event {
                Some(Ok(Event::Apply(subnet) | Event::InitApply(subnet))) => shared.lock().see(subnet),
                Some(Ok(Event::Delete(subnet))) => {
                    shared.lock().subnets.remove(&subnet.name_any());
                }
                Some(Ok(Event::Init | Event::InitDone)) => {}
                // The watcher goes on by itself; without a pause it would ask a dead server all the time.
                Some(Err(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
                None => return,
            },
            Some((name, answer)) = writes.next(), if !writes.is_empty() => {
                let mut state = shared.lock();
                state.in_flight.remove(&name);
                // What was refused is written again once the watch shows something new.
                if matches!(answer, Err(kube::Error::Api(ref status)) if status.code < 500) {
                    continue;
                }
                if answer.is_err() {
                    state.dirty.insert(name);
                }
            }
            () = shared.changed.notified() => {}
        }
    }
}
