//! The state of Cadastre itself: which controller leads, and which pods of controllers and agents are ready.
//!
//! The objects of Cadastre do not show this state, because objects outlive the processes that wrote them. The state may
//! be unknown: agents need not run as pods, and the user may lack the right to read Leases or pods. An unknown state is
//! reported as unknown.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;

use super::lists::{ClusterLists, Readable, full_name};

/// A Lease is stale if it was last renewed more than this many seconds ago. Leaders renew the Lease every few seconds,
/// so this limit leaves a margin for clock skew.
const STALE_SECONDS: i64 = 60;
/// For this many seconds after the creation of a pod, it is no fault that the pod is not ready. If the pod is being
/// deleted, the time counts from the end of its grace period. Within this time, a healthy pod becomes ready, or another
/// pod replaces the deleted pod.
const YOUNG_SECONDS: i64 = 120;

/// The Lease of the controllers, and the pods of controllers and agents.
#[derive(Clone, Debug)]
pub(crate) struct RunningComponents {
    /// The Lease of the controllers, or `None` if no such Lease exists. If there are several, this is the Lease that
    /// was renewed last. `Err` has the reason why Leases cannot be read
    pub lease: Result<Option<LeaseFact>, String>,
    /// The pods of controllers and agents, or why they cannot be read
    pub parts: Readable<ComponentPod>,
}

/// The Lease by which the controllers elect their leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseFact {
    /// The Lease as `namespace/name`
    pub name: String,
    /// The identity of the leader; empty if no controller leads
    pub holder: String,
    /// The time at which the leader last renewed the Lease
    pub renewed: Option<Timestamp>,
}

/// A pod of a controller or an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ComponentPod {
    /// Whether the pod is an agent; otherwise it is a controller
    pub agent: bool,
    /// The name of the pod's node; empty until the pod is scheduled
    pub node: String,
    /// Whether the pod is ready and not being deleted
    pub ready: bool,
    pub created: Option<Timestamp>,
    /// The time at which the pod's grace period ends; `None` if the pod is not being deleted
    pub ends: Option<Timestamp>,
    /// Whether the agent writes the runtime's CNI configuration, so that the node's pods use Cadastre
    pub configures: bool,
}

/// The state of the agent of a node, as its pods show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentPod {
    /// A pod of the agent is ready.
    Ready,
    /// No pod of the agent is ready, but a pod was just created or is about to be replaced.
    Starting,
    /// The agent has pods, but none is ready or starting.
    NotReady,
    /// The agent has no pod on the node.
    None,
}

impl RunningComponents {
    /// Parses the Leases and the pods of Cadastre. Keeps only the Lease that was renewed last.
    pub(crate) fn read(lists: &ClusterLists) -> Self {
        let leases = lists.leases.as_ref().map_err(Clone::clone);
        let parts = lists.parts.as_ref().map_err(Clone::clone);
        RunningComponents {
            lease: leases.map(|all| all.iter().map(LeaseFact::read).max_by_key(|it| it.renewed)),
            parts: parts.map(|all| all.iter().filter_map(ComponentPod::read).collect()),
        }
    }

    /// Returns the pods of agents (`agents` is true) or of controllers. Returns no pod if pods cannot be read.
    pub(crate) fn pods(&self, agents: bool) -> impl Iterator<Item = &ComponentPod> {
        let all = self.parts.iter().flatten();
        all.filter(move |it| it.agent == agents)
    }

    /// Returns the state of a node's agent. If the agent has several pods, the best state counts. Returns `None` if
    /// pods cannot be read.
    pub(crate) fn agent(&self, node: &str, now: Timestamp) -> Option<AgentPod> {
        self.parts.as_ref().ok()?;
        let pods = self.pods(true).filter(|it| it.node == node);
        let states = pods.map(|pod| match pod.is_young(now) {
            _ if pod.ready => AgentPod::Ready,
            true => AgentPod::Starting,
            false => AgentPod::NotReady,
        });
        Some(states.min_by_key(|it| *it as u8).unwrap_or(AgentPod::None))
    }

    /// Returns the nodes whose agent writes the runtime's CNI configuration. Returns no node if pods cannot be read.
    pub(crate) fn configured(&self) -> BTreeSet<&str> {
        let agents = self.pods(true).filter(|it| it.configures);
        agents.map(|it| it.node.as_str()).collect()
    }

    /// Returns a map from the node's name to the state of its agent. Nodes without a pod of the agent are left out.
    pub(crate) fn agents(&self, now: Timestamp) -> BTreeMap<&str, AgentPod> {
        let nodes = self.pods(true).map(|it| it.node.as_str());
        let states = nodes.filter_map(|node| Some((node, self.agent(node, now)?)));
        states.collect()
    }
}

impl LeaseFact {
    fn read(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        LeaseFact {
            name: full_name(&lease.metadata),
            holder: spec.holder_identity.unwrap_or_default(),
            renewed: spec.renew_time.map(|it| it.0),
        }
    }

    /// Returns whether the leader has not renewed the Lease for more than a minute.
    pub(crate) fn is_stale(&self, now: Timestamp) -> bool {
        let age = |at| now.duration_since(at).as_secs();
        self.renewed.is_none_or(|at| age(at) > STALE_SECONDS)
    }
}

impl ComponentPod {
    fn read(pod: &Pod) -> Option<Self> {
        let labels = pod.metadata.labels.as_ref()?;
        let component = labels.get("app.kubernetes.io/component")?;
        let status = pod.status.as_ref();
        let conditions = status.and_then(|it| it.conditions.as_ref());
        let mut conditions = conditions.into_iter().flatten();
        let ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
        let node = pod.spec.as_ref().and_then(|it| it.node_name.clone());
        Some(ComponentPod {
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

    /// Returns whether the pod was just created, or is being deleted and about to be replaced.
    pub(crate) fn is_young(&self, now: Timestamp) -> bool {
        let age = |at| now.duration_since(at).as_secs();
        let since = self.ends.or(self.created);
        since.is_some_and(|at| age(at) < YOUNG_SECONDS)
    }
}

/// Returns whether the agent's pod has the flag or environment variable that makes the agent write the CNI
/// configuration.
fn configures(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|it| &it.containers);
    containers.into_iter().any(|it| {
        let words = it.command.iter().chain(&it.args).flatten();
        let mut flags = words.map(|it| it.split_once('=').map_or(it.as_str(), |(flag, _)| flag));
        let mut variables = it.env.iter().flatten();
        flags.any(|it| it == "--cni-conf") || variables.any(|it| it.name == "CADASTRE_CNI_CONF")
    })
}
