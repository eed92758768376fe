//! The agent's watches: what they deliver, and when.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use cadastre_agent::machine::AgentEvent;
use cadastre_agent::pods::Pod;
use cadastre_agent::seen::{AddressesSeen, SubnetSeen};
use cadastre_api::{AllocatedBlock, Recall};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::{Pod as ApiPod, Subnet};
use cadastre_core::Cidr;
use cadastre_daemon::watch::{ObjectEvent, WatchStep};

use super::process::ProcessAct;
use crate::api::{Api, Commit};
use crate::checks::Verdict;
use crate::clock::{MS, SECOND, Time};
use crate::host::key;
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

/// Events that the agent's watches have not delivered yet, and what the agent knows from those delivered.
#[derive(Default)]
pub struct Feeds {
    node: VecDeque<WatchStep<String>>,
    subnet: VecDeque<WatchStep<SubnetSeen>>,
    addresses: VecDeque<WatchStep<AddressesSeen>>,
    pods: VecDeque<WatchStep<Pod>>,
    scheduled: [bool; 4],
    /// Whether the Node was in the list that is being delivered or was delivered last.
    node_listed: bool,
    /// According to the NodeSubnet that the agent received: the ranges from which addresses may be assigned
    /// (`givable`), and since when ranges may not be used any more (`ended`).
    givable: BTreeSet<Cidr>,
    pub ended: BTreeMap<Cidr, Time>,
}

impl Feeds {
    fn is_empty(&self, line: Line) -> bool {
        match line {
            Line::Node => self.node.is_empty(),
            Line::Subnet => self.subnet.is_empty(),
            Line::Addresses => self.addresses.is_empty(),
            Line::Pods => self.pods.is_empty(),
        }
    }

    /// Updates `givable` and `ended` for a NodeSubnet that the agent received; `node` is the UID of its Node.
    fn subnet_shown(&mut self, subnet: &SubnetSeen, node: Option<&ObjectUid>, now: Time) {
        let spec = subnet.spec_of(node.map(|uid| &**uid));
        // If the node has podCIDRs, the agent assigns nothing until it knows all existing addresses in them, so
        // nothing is checked.
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

    fn next(&mut self, line: Line) -> Option<AgentEvent> {
        match line {
            Line::Node => self.node.pop_front().map(AgentEvent::Node),
            Line::Subnet => self.subnet.pop_front().map(AgentEvent::Subnet),
            Line::Addresses => self.addresses.pop_front().map(AgentEvent::Addresses),
            Line::Pods => self.pods.pop_front().map(AgentEvent::Pod),
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
        ..Pod::default()
    }
}

fn listing<T>(asked: Duration, all: impl IntoIterator<Item = T>) -> VecDeque<WatchStep<T>> {
    let mut steps = VecDeque::from([ObjectEvent::Restarted { asked }]);
    steps.extend(all.into_iter().map(ObjectEvent::Applied));
    steps.push_back(ObjectEvent::Listed);
    steps.into_iter().map(WatchStep::Change).collect()
}

impl Sim {
    /// Whether the Node is this host's. A host sees no Node of its name that is another host's.
    fn is_host_of(&self, id: usize, uid: &ObjectUid) -> bool {
        self.machines.of_node.get(uid) == Some(&id)
    }

    /// Queues a change for the watches of the host's agent.
    pub fn tell_host(&mut self, id: usize, commit: &Commit) {
        let name = &self.machines.hosts[id].name;
        let line = match commit {
            Commit::Node(before, after) => {
                let node = after.as_ref().or(before.as_ref());
                let Some(node) = node.filter(|it| it.name == *name).cloned() else {
                    return;
                };
                let was_mine = before
                    .as_ref()
                    .is_some_and(|it| self.is_host_of(id, &it.uid));
                let is_mine = after
                    .as_ref()
                    .is_some_and(|it| self.is_host_of(id, &it.uid));
                let same = matches!((before, after), (Some(b), Some(a)) if b.uid == a.uid);
                if !(was_mine || is_mine) || same {
                    return;
                }
                let change = if is_mine {
                    ObjectEvent::Applied(node.uid.to_string())
                } else {
                    ObjectEvent::Deleted(node.uid.to_string())
                };
                let host = self.host_mut(id);
                host.feeds.node.push_back(WatchStep::Change(change));
                Line::Node
            }
            Commit::Subnet(before, after) => {
                let subnet = after.as_ref().or(before.as_ref());
                let Some(subnet) = subnet.filter(|it| it.name == *name) else {
                    return;
                };
                let seen = seen_subnet(subnet, &self.api);
                let change = if after.is_some() {
                    ObjectEvent::Applied(seen)
                } else {
                    ObjectEvent::Deleted(seen)
                };
                let host = self.host_mut(id);
                host.feeds.subnet.push_back(WatchStep::Change(change));
                Line::Subnet
            }
            Commit::Pod(node, pod, is_there) => {
                if node != name {
                    return;
                }
                let seen = seen_pod(pod);
                let change = if *is_there {
                    ObjectEvent::Applied(seen)
                } else {
                    ObjectEvent::Deleted(seen)
                };
                let host = self.host_mut(id);
                host.feeds.pods.push_back(WatchStep::Change(change));
                Line::Pods
            }
            Commit::Addresses(of, after) => {
                if of != name {
                    return;
                }
                let change = match after {
                    Some(after) => ObjectEvent::Applied(after.clone()),
                    None => ObjectEvent::Deleted(AddressesSeen {
                        owner: String::new(),
                        list: cadastre_api::NodeAddressesSpec::default(),
                    }),
                };
                let host = self.host_mut(id);
                host.feeds.addresses.push_back(WatchStep::Change(change));
                Line::Addresses
            }
            _ => return,
        };
        self.schedule_line(id, line);
    }

    /// Restarts all watches of the host with a list. With `is_cut`, they report an error before.
    pub fn relist_host(&mut self, id: usize, is_cut: bool) {
        let asked = self.host_now(id).since_boot;
        let name = self.machines.hosts[id].name.clone();
        let node = self.api.nodes.get(&name).cloned();
        let node = node.filter(|node| self.is_host_of(id, &node.uid));
        let subnet = self.api.subnets.get(&name).cloned();
        let subnet = subnet.map(|it| seen_subnet(&it, &self.api));
        let addresses = self.api.addresses.get(&name).cloned();
        let pods: Vec<Pod> = self.api.pods_on(&name).map(|pod| seen_pod(pod)).collect();
        let host = self.host_mut(id);
        let feeds = &mut host.feeds;
        feeds.node = listing(asked, node.map(|node| node.uid.to_string()));
        feeds.subnet = listing(asked, subnet);
        feeds.addresses = listing(asked, addresses);
        feeds.pods = listing(asked, pods);
        if is_cut {
            feeds.node.push_front(WatchStep::Trouble);
            feeds.subnet.push_front(WatchStep::Trouble);
            feeds.addresses.push_front(WatchStep::Trouble);
            feeds.pods.push_front(WatchStep::Trouble);
        }
        for line in Line::ALL {
            self.schedule_line(id, line);
        }
    }

    fn schedule_line(&mut self, id: usize, line: Line) {
        let is_spared = self.is_listened_to();
        let held = {
            let agent = &self.machines.hosts[id];
            agent
                .held_until
                .max(agent.paused_until)
                .max(self.down_until)
        };
        let host = self.host_mut(id);
        if host.process.is_none() {
            return;
        }
        let incarnation = host.incarnation;
        let scheduled = &mut host.feeds.scheduled[line as usize];
        if std::mem::replace(scheduled, true) {
            return;
        }
        let is_lagging = self.rough && self.rng.chance(self.plan.network.lagging);
        let lag = if is_lagging && !is_spared {
            self.rng.stretch(SECOND, 120 * SECOND)
        } else {
            self.rng.stretch(MS, 50 * MS)
        };
        let due = Due::Process(id, incarnation, Box::new(ProcessAct::Deliver(line)));
        self.after(held.saturating_sub(self.now) + lag, due);
    }

    /// Forgets scheduled deliveries, because they were for an earlier process of the agent.
    pub fn reset_lines(&mut self, id: usize) {
        self.host_mut(id).feeds.scheduled = [false; 4];
    }

    /// Delivers the next event of a watch, or all events that have not been delivered.
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
        while let Some(event) = host.feeds.next(line) {
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
        let has_more = !host.feeds.is_empty(line);
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
