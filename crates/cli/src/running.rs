//! What of Cadastre itself runs: who leads, and which of its pods are ready.
//!
//! Objects alone outlive those who wrote them. Agents need not be pods, and who asks may have no right to read
//! Leases or pods: then it is not known, and is said so.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;

use super::lists::{Lists, Readable};

/// Leaders renew every few seconds. This long, also by the clock of who asks, is no delay.
const STALE_SECONDS: i64 = 60;
/// A pod this young is on its way, and for this long another one may take the place of one that ends.
const YOUNG_SECONDS: i64 = 120;

/// What runs.
#[derive(Clone, Debug)]
pub struct Running {
    /// The Lease of the controllers
    pub lease: Result<Option<LeaseFact>, String>,
    /// Pods, or why they could not be read
    pub parts: Readable<Part>,
}

/// The Lease of the controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseFact {
    /// `namespace/name`
    pub name: String,
    /// Who leads; empty: nobody
    pub holder: String,
    /// When it was renewed
    pub renewed: Option<Timestamp>,
}

/// A pod of Cadastre.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Whether it is an agent, else a controller
    pub agent: bool,
    /// The node; empty: none yet
    pub node: String,
    /// Whether it is ready, and stays
    pub ready: bool,
    /// When it was made
    pub created: Option<Timestamp>,
    /// When it will have ended at the latest, if it was told to
    pub ends: Option<Timestamp>,
    /// Whether it is to write the runtime's CNI configuration, so that the node's pods are Cadastre's
    pub configures: bool,
}

/// How it is with the agent of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentPod {
    /// It runs.
    Ready,
    /// It is there, and young, or about to be replaced.
    Starting,
    /// It is there, and not ready.
    NotReady,
    /// There is none.
    None,
}

impl Running {
    /// Reads what was listed.
    pub fn read(lists: &Lists) -> Self {
        let leases = lists.leases.as_ref().map_err(Clone::clone);
        let parts = lists.parts.as_ref().map_err(Clone::clone);
        Running {
            lease: leases.map(|all| all.iter().map(LeaseFact::read).max_by_key(|it| it.renewed)),
            parts: parts.map(|all| all.iter().filter_map(Part::read).collect()),
        }
    }

    /// The pods of agents or of controllers that are known.
    pub fn pods(&self, agents: bool) -> impl Iterator<Item = &Part> {
        let all = self.parts.iter().flatten();
        all.filter(move |it| it.agent == agents)
    }

    /// The agent of a node, where pods could be read.
    pub fn agent(&self, node: &str, now: Timestamp) -> Option<AgentPod> {
        self.parts.as_ref().ok()?;
        let pods = self.pods(true).filter(|it| it.node == node);
        let states = pods.map(|pod| match pod.is_young(now) {
            _ if pod.ready => AgentPod::Ready,
            true => AgentPod::Starting,
            false => AgentPod::NotReady,
        });
        Some(states.min_by_key(|it| *it as u8).unwrap_or(AgentPod::None))
    }

    /// Nodes whose agent is to write the runtime's CNI configuration, as far as pods can be read.
    pub(crate) fn configured(&self) -> BTreeSet<&str> {
        let agents = self.pods(true).filter(|it| it.configures);
        agents.map(|it| it.node.as_str()).collect()
    }

    /// Nodes with their agents' pods.
    pub fn agents(&self, now: Timestamp) -> BTreeMap<&str, AgentPod> {
        let nodes = self.pods(true).map(|it| it.node.as_str());
        let states = nodes.filter_map(|node| Some((node, self.agent(node, now)?)));
        states.collect()
    }
}

impl LeaseFact {
    fn read(lease: &Lease) -> Self {
        let meta = &lease.metadata;
        let spec = lease.spec.clone().unwrap_or_default();
        LeaseFact {
            name: format!(
                "{}/{}",
                meta.namespace.as_deref().unwrap_or_default(),
                meta.name.as_deref().unwrap_or_default()
            ),
            holder: spec.holder_identity.unwrap_or_default(),
            renewed: spec.renew_time.map(|it| it.0),
        }
    }

    /// Whether who holds it has let it go stale.
    pub(crate) fn is_stale(&self, now: Timestamp) -> bool {
        let age = |at| now.duration_since(at).as_secs();
        self.renewed.is_none_or(|at| age(at) > STALE_SECONDS)
    }
}

impl Part {
    fn read(pod: &Pod) -> Option<Self> {
        let labels = pod.metadata.labels.as_ref()?;
        let component = labels.get("app.kubernetes.io/component")?;
        let status = pod.status.as_ref();
        let conditions = status.and_then(|it| it.conditions.as_ref());
        let mut conditions = conditions.into_iter().flatten();
        let ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
        let node = pod.spec.as_ref().and_then(|it| it.node_name.clone());
        Some(Part {
            agent: match component.as_str() {
                "agent" => true,
                "controller" => false,
                _ => return None,
            },
            node: node.unwrap_or_default(),
            ready: ready && pod.metadata.deletion_timestamp.is_none(),
            created: pod.metadata.creation_timestamp.as_ref().map(|it| it.0),
            ends: pod.metadata.deletion_timestamp.as_ref().map(|it| it.0),
            configures: configures(pod),
        })
    }

    /// Whether it may still be starting, or another one in its place.
    pub(crate) fn is_young(&self, now: Timestamp) -> bool {
        let age = |at| now.duration_since(at).as_secs();
        let since = self.ends.or(self.created);
        since.is_some_and(|at| age(at) < YOUNG_SECONDS)
    }
}

/// By the flag or its variable.
fn configures(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|it| &it.containers);
    containers.into_iter().any(|it| {
        let words = it.command.iter().chain(&it.args).flatten();
        let mut flags = words.map(|it| it.split_once('=').map_or(it.as_str(), |(flag, _)| flag));
        let mut variables = it.env.iter().flatten();
        flags.any(|it| it == "--cni-conf") || variables.any(|it| it.name == "CADASTRE_CNI_CONF")
    })
}
