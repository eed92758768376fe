//! All hosts: the Nodes that they register as, their pods, and events on them. *Machine* in a name means a simulated
//! host.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{ClaimSource, MachineIdentity, Node, Pod, Text};
use cadastre_core::Addr;

use super::api::{Api, Commit};
use super::clock::{MS, SECOND, Time};
use super::host::Host;
use super::run::{Due, Sim};

/// A scheduled event on a host. The UIDs are those of pods.
pub enum Act {
    /// The host boots.
    Start,
    /// The kubelet learns that a pod is deleted or has finished.
    PodEnded(ObjectUid),
    /// The kubelet starts a pod that a restore of the API server has brought back.
    PodStarts(ObjectUid),
}

/// All hosts, with the Nodes and pods that belong to each.
#[derive(Default)]
pub struct Machines {
    pub hosts: Vec<Host>,
    /// For each Node (UID) that ever existed, the index of its host.
    pub of_node: BTreeMap<ObjectUid, usize>,
    /// The machine identity and the index of the last host of each Node name.
    last: BTreeMap<NodeName, (MachineIdentity, usize)>,
    /// For each pod (UID), the index of its host, and the UID of the Node to which it was bound.
    pub of_pod: BTreeMap<ObjectUid, (usize, ObjectUid)>,
    pub last_write: Time,
    /// When a kubelet last ended a pod or a sandbox.
    pub last_end: Time,
    /// When an agent last reported a change of its addresses in conflict. They change if a probe finds a conflict, or
    /// if the time of a conflict is over.
    pub conflicts_changed: Time,
}

impl Machines {
    /// Returns the host of the Node with this UID.
    pub fn of(&self, uid: &ObjectUid) -> Option<&Host> {
        self.hosts.get(*self.of_node.get(uid)?)
    }

    /// Records that the machine id or provider id of a Node has changed.
    pub fn identify(&mut self, node: &Node) {
        if let Some((machine, _)) = self.last.get_mut(&node.name) {
            machine.clone_from(&node.machine);
        }
    }

    /// Returns the UID of the Node that the host is registered as, if that Node exists.
    pub fn live_node(&self, id: usize, api: &Api) -> Option<ObjectUid> {
        let uid = &api.nodes.get(&self.hosts[id].name)?.uid;
        (self.of_node.get(uid) == Some(&id)).then(|| uid.clone())
    }
}

/// Returns a copy of the pod whose status contains these addresses.
fn reporting(pod: &Pod, addresses: Box<[Addr]>) -> Pod {
    let mut pod = Pod::clone(pod);
    if let Some(claim) = &mut pod.claim
        && let ClaimSource::Addresses(asked) = &mut claim.source
    {
        asked.is_served = !addresses.is_empty();
    }
    pod.addresses = addresses;
    pod
}

impl Sim {
    /// Decides which host a new Node is on: the last host with the Node's name if its machine identity is the same,
    /// otherwise a new host.
    pub fn settle_in(&mut self, node: &Node) {
        let same = self.machines.last.get(&node.name);
        let same = same.filter(|(machine, _)| machine.same(&node.machine));
        let id = same.map_or(self.machines.hosts.len(), |(_, id)| *id);
        if id == self.machines.hosts.len() {
            let host = Host::new(node.name.clone(), self.rng.next());
            self.machines.hosts.push(host);
            self.machines.of_node.insert(node.uid.clone(), id);
            self.start_host(id);
        } else if self.machines.hosts[id].is_off {
            self.machines.hosts[id].is_gone = false;
            self.after(MS, Due::Machine(id, Act::Start));
        }
        // Other hosts with the name of this Node are gone, so their addresses are no longer in use.
        for (other, host) in self.machines.hosts.iter_mut().enumerate() {
            if other != id && host.name == node.name {
                host.forgotten.clear();
            }
        }
        self.end_earlier_hosts(id);
        let machine = (node.machine.clone(), id);
        self.machines.last.insert(node.name.clone(), machine);
        self.machines.of_node.insert(node.uid.clone(), id);
    }

    /// Queues a change for the watches of all agents that it concerns.
    pub fn tell_agents(&mut self, commit: &Commit) {
        for id in 0..self.machines.hosts.len() {
            self.tell_host(id, commit);
        }
        // If a Node is deleted, its host is gone. So no range that the host ever had is in use any more.
        if let Commit::Node(Some(gone), after) = commit
            && after.as_ref().is_none_or(|after| after.uid != gone.uid)
            && let Some(id) = self.machines.of_node.get(&gone.uid)
        {
            self.machines.hosts[*id].forgotten.clear();
        }
    }

    /// Carries out a scheduled event on a host.
    pub fn act(&mut self, id: usize, act: &Act) {
        match act {
            Act::Start if self.was_restored() && !self.host(id).is_off => {}
            // Another machine has taken the host's name after this boot was scheduled.
            Act::Start if self.host(id).is_gone => {}
            Act::Start => self.start_host(id),
            Act::PodEnded(uid) => self.host_ends(id, uid),
            Act::PodStarts(uid) => {
                let mut pods = self.api.pods.live.values();
                if let Some(pod) = pods.find(|it| it.uid == *uid).cloned() {
                    self.host_runs(id, uid, &pod.name);
                }
            }
        }
    }

    /// Whether nothing is guaranteed for what the host assigns, because it has no Node or works for a deleted one. While
    /// no agent runs on a machine, nobody tells the machine that its Node is deleted.
    pub fn is_without_node(&self, id: usize) -> bool {
        self.machines.live_node(id, &self.api).is_none() || self.is_outlived(id)
    }

    /// Whether the Node that the agent works for has been deleted. If no agent runs, the plugin works on the store
    /// itself, so the Node in the store counts instead. A Node that a restore has lost does not count as deleted.
    pub fn is_outlived(&self, id: usize) -> bool {
        let host = self.host(id);
        let is_so = |uid: &ObjectUid| {
            let node = self.api.nodes.get(&host.name);
            node.is_none_or(|node| node.uid != *uid) && !host.forgotten.contains(uid)
        };
        let mut stored = host.blocks.values().map(|held| &held.node);
        let stored = stored.next().filter(|_| !host.has_agent());
        stored.or(host.node.as_ref()).is_some_and(is_so)
    }

    /// Draws a random host. Returns `None` if that host is off.
    fn draw_host(&mut self) -> Option<usize> {
        let id = self.rng.index(self.machines.hosts.len().max(1));
        let host = self.machines.hosts.get(id)?;
        (!host.is_off).then_some(id)
    }

    /// Causes a random fault of a random host, unless agents are spared because of a recent restore.
    pub fn inject_host_fault(&mut self) {
        let host = self.draw_host();
        let what = self.rng.below(100);
        if let Some(id) = host.filter(|_| !self.agents_are_publishing()) {
            self.inject_fault(id, what);
        }
    }

    /// Makes a random host lose its power for a short time, unless that host is off.
    pub fn reboot_some_host(&mut self) {
        if let Some(id) = self.draw_host().filter(|_| self.has_faults) {
            let length = self.rng.stretch(SECOND / 2, 40 * SECOND);
            self.reboot_host(id, length);
        }
    }

    /// Makes a random host lose its store, unless that host is off.
    pub fn lose_some_store(&mut self) {
        if let Some(id) = self.draw_host() {
            self.lose_store_soon(id);
        }
    }

    /// Ends all pauses and wrong clock rates. Hosts that are off for good stay off.
    pub fn calm_hosts(&mut self) {
        for id in 0..self.machines.hosts.len() {
            let now = self.now;
            let host = self.host_mut(id);
            (host.paused_until, host.held_until) = (now, now);
            host.clocks.set_pace(now, 1_000_000, now);
            self.calm_host(id);
        }
    }

    /// Creates a pod, binds it to the Node, and makes the kubelet of the host start it.
    pub fn bind_pod(&mut self, node: &Arc<Node>) {
        let Some(id) = self.machines.of_node.get(&node.uid).copied() else {
            return;
        };
        let (uid, name) = if let Some(name) = self.draw_ordinal() {
            self.put_sticky_pod(node, &name)
        } else if let Some(put) = self.put_migrating_pod(node) {
            put
        } else if let Some(addr) = self.draw_asked() {
            self.put_asking_pod(node, addr)
        } else {
            let claim = self.draw_claim();
            self.put_new_pod(node, "pod", [].into(), claim)
        };
        self.machines
            .of_pod
            .insert(uid.clone(), (id, node.uid.clone()));
        self.host_runs(id, &uid, &name);
        let lives = self.rng.stretch(5 * SECOND, 200 * SECOND);
        let end = if self.rng.chance(3_000) {
            Due::PodFinishes(name)
        } else {
            Due::PodGone(name)
        };
        self.after(lives, end);
    }

    /// Makes the kubelet report the pod's addresses, if the Node that the pod was bound to still exists.
    pub fn pod_reports(&mut self, uid: &ObjectUid) {
        let Some((id, node)) = self.machines.of_pod.get(uid) else {
            return;
        };
        let pod = self.api.pods.live.values().find(|pod| pod.uid == *uid);
        let (Some(pod), Some(placed)) = (pod.cloned(), self.api.placed.get(uid).cloned()) else {
            return;
        };
        let lives = self.api.nodes.get(&placed).is_some_and(|n| n.uid == *node);
        if !lives || pod.finished {
            return;
        }
        let addresses = self.addresses_on_host(*id, uid);
        let pod = reporting(&pod, addresses);
        self.checks.ghosts.remove(uid);
        self.api.put_pod(pod, placed);
        self.publish();
    }

    /// Makes a pod finish. After that, the pod no longer uses its addresses, and is deleted some time later.
    pub fn pod_finishes(&mut self, name: &Text) {
        let Some(pod) = self.api.pods.get(name).cloned() else {
            return;
        };
        let Some(placed) = self.api.placed.get(&pod.uid).cloned() else {
            return;
        };
        self.pod_ended(&pod.uid);
        let pod = Pod {
            finished: true,
            mirror_of: None,
            ..reporting(&pod, [].into())
        };
        self.api.put_pod(pod, placed);
        self.publish();
        let stays = self.rng.stretch(SECOND, 30 * SECOND);
        self.after(stays, Due::PodGone(name.clone()));
    }

    /// Schedules the end of a pod on its host, usually within ten seconds.
    pub fn pod_ended(&mut self, uid: &ObjectUid) {
        if !self.machines.of_pod.contains_key(uid) {
            return;
        }
        // After a forced deletion, the pod still runs although the API server does not know it any more.
        let is_forced = self.has_faults && self.rng.chance(1_500);
        let lag = if is_forced {
            self.rng.between(20, 150) * SECOND
        } else {
            self.rng.stretch(MS, 10 * SECOND)
        };
        self.pod_ends_after(uid, lag);
    }

    /// Schedules the end of a pod on its host, if it has one.
    pub fn pod_ends_after(&mut self, uid: &ObjectUid, lag: Time) {
        if let Some((id, _)) = self.machines.of_pod.get(uid) {
            self.after(lag, Due::Machine(*id, Act::PodEnded(uid.clone())));
        }
    }
}
