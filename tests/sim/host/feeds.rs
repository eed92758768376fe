//! The agent's watches: what they deliver, and when.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cadastre_agent::machine::AgentEvent;
use cadastre_agent::pods::Pod;
use cadastre_agent::seen::{AddressesSeen, SubnetSeen};
use cadastre_api::InterfaceClaim;
use cadastre_api::{
    ADDRESSES_ANNOTATION, AllocatedBlock, CLAIM_ANNOTATION, NodeAddressesSpec, Recall,
    STICKY_ANNOTATION,
};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::{ClaimSource, Node, Pod as ApiPod, PodClaim, Subnet};
use cadastre_core::{Addr, Cidr};
use cadastre_daemon::watch::{ObjectEvent, WatchStep};

use super::process::ProcessAct;
use crate::api::{Api, Commit};
use crate::checks::Verdict;
use crate::clock::{MS, SECOND, Time};
use crate::host::key;
use crate::ipam_claims::{INTERFACE, used_claim};
use crate::run::{Due, Sim};

/// One of the agent's watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    Node,
    Subnet,
    Addresses,
    Pods,
}

impl Line {
    const ALL: [Self; 4] = [Self::Node, Self::Subnet, Self::Addresses, Self::Pods];
}

/// Events that the agent's watches have not delivered yet, and what the agent knows from the events that were
/// delivered.
#[derive(Default)]
pub struct Feeds {
    /// The events of each watch, in the order of [`Line::ALL`].
    queues: [VecDeque<AgentEvent>; 4],
    scheduled: [bool; 4],
    /// Whether the Node was in the list that is being delivered or was delivered last.
    node_listed: bool,
    /// The ranges from which the agent may assign addresses, according to the NodeSubnet that the agent received.
    givable: BTreeSet<Cidr>,
    /// The ranges from which the agent may assign no address any more, and since when the agent knows that.
    pub ended: BTreeMap<Cidr, Time>,
}

impl Feeds {
    /// Updates the fields `givable` and `ended` for a NodeSubnet that the agent received. `node` is the UID of the
    /// agent's Node.
    fn subnet_shown(&mut self, subnet: &SubnetSeen, node: Option<&ObjectUid>, now: Time) {
        let spec = subnet.spec_of(node.map(|uid| &**uid));
        // If the node has podCIDRs, its agent applies a new NodeSubnet only once it knows which addresses of the
        // podCIDRs are in use. The simulation does not know when that is, so it checks nothing for this node.
        let Some(spec) = spec.filter(|spec| spec.pod_cidrs.is_empty()) else {
            self.givable.clear();
            self.ended.clear();
            return;
        };
        let gives = |block: &&AllocatedBlock| block.recall != Some(Recall::Drain);
        let givable = spec.blocks.iter().filter(gives);
        let givable: BTreeSet<Cidr> = givable.map(|it| key(it).0).collect();
        for cidr in self.givable.difference(&givable) {
            self.ended.insert(*cidr, now);
        }
        self.ended.retain(|cidr, _| !givable.contains(cidr));
        self.givable = givable;
    }

    /// Updates the UID of the agent's Node after an event of the Node's watch.
    fn node_shown(&mut self, change: &ObjectEvent<String>, node: &mut Option<ObjectUid>) {
        match change {
            ObjectEvent::Restarted { .. } => self.node_listed = false,
            ObjectEvent::Applied(uid) => {
                self.node_listed = true;
                *node = Some(uid.as_str().into());
            }
            ObjectEvent::Listed if !self.node_listed => *node = None,
            ObjectEvent::Deleted(_) => *node = None,
            ObjectEvent::Listed | ObjectEvent::Reached(_) => {}
        }
    }
}

/// A NodeSubnet as the agent parses it.
fn seen_subnet(subnet: &Subnet, api: &Api) -> SubnetSeen {
    SubnetSeen::new(
        subnet.uid.to_string(),
        subnet.version.to_string(),
        subnet.spec.clone(),
        api.statuses.get(&subnet.uid).cloned().unwrap_or_default(),
        subnet.requests.clone(),
    )
}

fn claim_annotation(claim: &PodClaim) -> (String, String) {
    let (name, value) = match &claim.source {
        ClaimSource::User => {
            let (_, name) = claim.claim.split_once('/').unwrap();
            (CLAIM_ANNOTATION, name.to_owned())
        }
        ClaimSource::Sticky(_) => (STICKY_ANNOTATION, "true".to_owned()),
        ClaimSource::Addresses(asked) => {
            let texts: Vec<String> = asked.addresses.iter().map(Addr::to_string).collect();
            (ADDRESSES_ANNOTATION, texts.join(","))
        }
        ClaimSource::IpamClaim => unreachable!("a pod has no such claim of its own"),
    };
    (name.to_owned(), value)
}

/// A pod as the agent parses it.
fn seen_pod(pod: &ApiPod) -> Pod {
    let (namespace, name) = pod.name.split_once('/').unwrap();
    Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: pod.uid.to_string(),
        mirrors: pod.mirror_of.as_ref().map(ToString::to_string),
        finished: pod.finished,
        addresses: pod.addresses.to_vec(),
        annotations: pod
            .claim
            .as_deref()
            .map(claim_annotation)
            .into_iter()
            .collect(),
        is_of_stateful_set: pod
            .claim
            .as_ref()
            .is_some_and(|it| matches!(it.source, ClaimSource::Sticky(_))),
        vmi: {
            let claim = used_claim(pod);
            claim.and_then(|it| it.vmi()).map(ToString::to_string)
        },
        interface_claims: {
            let claims = pod.interface_claims.iter();
            let claims = claims.map(|it| InterfaceClaim {
                interface: INTERFACE.to_owned(),
                claim: it.claim.split_once('/').unwrap().1.to_owned(),
            });
            claims.collect()
        },
        ..Pod::default()
    }
}

/// Returns the events of a watch that starts again with a list. If `is_cut` is set, the watch reports an error first.
fn listing<T>(
    asked: Duration,
    is_cut: bool,
    all: impl IntoIterator<Item = T>,
    event: fn(WatchStep<T>) -> AgentEvent,
) -> VecDeque<AgentEvent> {
    let error = is_cut.then_some(WatchStep::Trouble).into_iter();
    let begin = [ObjectEvent::Restarted { asked }].into_iter();
    let all = all.into_iter().map(ObjectEvent::Applied);
    let list = begin.chain(all).chain([ObjectEvent::Listed]);
    error
        .chain(list.map(WatchStep::Change))
        .map(event)
        .collect()
}

fn step<T>(is_there: bool, object: T) -> WatchStep<T> {
    WatchStep::Change(if is_there {
        ObjectEvent::Applied(object)
    } else {
        ObjectEvent::Deleted(object)
    })
}

impl Sim {
    /// Whether the Node with this UID is on this host. A host ignores a Node of its name that belongs to another host.
    fn is_host_of(&self, id: usize, uid: &ObjectUid) -> bool {
        self.machines.of_node.get(uid) == Some(&id)
    }

    /// The UID of the host's Node, whether or not its agent knows this Node. `None` if the Node was deleted.
    pub fn live_node_of(&self, id: usize) -> Option<&ObjectUid> {
        let node = self.api.nodes.get(&self.machines.hosts[id].name)?;
        Some(&node.uid).filter(|uid| self.is_host_of(id, uid))
    }

    /// Queues a change for the watches of the host's agent.
    pub fn tell_host(&mut self, id: usize, commit: &Commit) {
        let name = &self.machines.hosts[id].name;
        let (line, event) = match commit {
            Commit::Node(before, after) => {
                let own = |node: &Option<Arc<Node>>| {
                    let uid = node.as_ref().map(|node| node.uid.clone());
                    uid.filter(|uid| self.is_host_of(id, uid))
                };
                let (before, after) = (own(before), own(after));
                let Some(uid) = after.as_ref().or(before.as_ref()) else {
                    return;
                };
                if before == after {
                    return;
                }
                let node = uid.to_string();
                (Line::Node, AgentEvent::Node(step(after.is_some(), node)))
            }
            Commit::Subnet(before, after) => {
                let subnet = after.as_ref().or(before.as_ref());
                let Some(subnet) = subnet.filter(|it| it.name == *name) else {
                    return;
                };
                let subnet = step(after.is_some(), seen_subnet(subnet, &self.api));
                (Line::Subnet, AgentEvent::Subnet(subnet))
            }
            Commit::Pod(before, after) => {
                let pod = after.as_ref().or(before.as_ref());
                let placed = |pod: &&Arc<ApiPod>| self.api.placed.get(&pod.uid) == Some(name);
                let Some(pod) = pod.filter(placed) else {
                    return;
                };
                let pod = step(after.is_some(), seen_pod(pod));
                (Line::Pods, AgentEvent::Pod(pod))
            }
            Commit::Addresses(of, after) if of == name => {
                let addresses = after.clone().unwrap_or_else(|| AddressesSeen {
                    owner: String::new(),
                    list: NodeAddressesSpec::default(),
                });
                let addresses = step(after.is_some(), addresses);
                (Line::Addresses, AgentEvent::Addresses(addresses))
            }
            _ => return,
        };
        self.host_mut(id).feeds.queues[line as usize].push_back(event);
        self.schedule_line(id, line);
    }

    /// Makes all watches of the host start again with a list. If `is_cut` is set, they report an error first.
    pub fn relist_host(&mut self, id: usize, is_cut: bool) {
        let asked = self.host_now(id).since_boot;
        let (api, name) = (&self.api, &self.machines.hosts[id].name);
        let node = self.live_node_of(id).map(ToString::to_string);
        let subnet = api.subnets.get(name).map(|it| seen_subnet(it, api));
        let addresses = api.addresses.get(name).cloned();
        let pods: Vec<Pod> = api.pods_on(name).map(|pod| seen_pod(pod)).collect();
        self.host_mut(id).feeds.queues = [
            listing(asked, is_cut, node, AgentEvent::Node),
            listing(asked, is_cut, subnet, AgentEvent::Subnet),
            listing(asked, is_cut, addresses, AgentEvent::Addresses),
            listing(asked, is_cut, pods, AgentEvent::Pod),
        ];
        for line in Line::ALL {
            self.schedule_line(id, line);
        }
    }

    fn schedule_line(&mut self, id: usize, line: Line) {
        let is_spared = self.agents_are_publishing();
        let host = &mut self.machines.hosts[id];
        let held = host.held_until.max(host.paused_until);
        let held = held.max(self.down_until).saturating_sub(self.now);
        if host.process.is_none() {
            return;
        }
        let incarnation = host.incarnation;
        let scheduled = &mut host.feeds.scheduled[line as usize];
        if std::mem::replace(scheduled, true) {
            return;
        }
        let is_lagging = self.has_faults && self.rng.chance(self.plan.network.lagging);
        let lag = if is_lagging && !is_spared {
            self.rng.stretch(SECOND, 120 * SECOND)
        } else {
            self.rng.stretch(MS, 50 * MS)
        };
        let due = Due::Process(id, incarnation, Box::new(ProcessAct::Deliver(line)));
        self.after(held + lag, due);
    }

    /// Forgets scheduled deliveries, because they are for an earlier process of the agent.
    pub fn reset_lines(&mut self, id: usize) {
        self.host_mut(id).feeds.scheduled = [false; 4];
    }

    /// Delivers the next event of a watch, or all of its events that are not delivered yet.
    pub(super) fn deliver_line(&mut self, id: usize, line: Line) -> Verdict {
        let all = self.rng.chance(5_000);
        let held = self.machines.hosts[id].held_until.max(self.down_until);
        let held = held.saturating_sub(self.now);
        let mut node = self.machines.hosts[id].node.clone();
        let now = self.host_now(id);
        let host = self.host_mut(id);
        host.feeds.scheduled[line as usize] = false;
        if held > 0 {
            self.schedule_line(id, line);
            return Ok(());
        }
        let mut shown: Option<SubnetSeen> = None;
        while let Some(event) = host.feeds.queues[line as usize].pop_front() {
            if let AgentEvent::Node(WatchStep::Change(change)) = &event {
                host.feeds.node_shown(change, &mut node);
            }
            if let AgentEvent::Subnet(WatchStep::Change(ObjectEvent::Applied(subnet))) = &event {
                shown = Some(subnet.clone());
            }
            let Some(process) = &mut host.process else {
                break;
            };
            process.machine.on(event, &now);
            if !all {
                break;
            }
        }
        let has_more = !host.feeds.queues[line as usize].is_empty();
        let virtual_now = self.now;
        self.machines.hosts[id].node.clone_from(&node);
        if let Some(subnet) = shown {
            self.host_mut(id)
                .feeds
                .subnet_shown(&subnet, node.as_ref(), virtual_now);
        }
        if has_more {
            self.schedule_line(id, line);
        }
        self.turn_host(id)
    }

    /// Returns all pods of the host's Node, as in a consistent list.
    pub(super) fn list_pods_of_host(&self, id: usize) -> cadastre_agent::pods::Pods {
        let name = &self.machines.hosts[id].name;
        let mut pods = cadastre_agent::pods::Pods::default();
        for pod in self.api.pods_on(name) {
            pods.change(ObjectEvent::Applied(seen_pod(pod)));
        }
        pods.change(ObjectEvent::Listed);
        pods
    }
}
