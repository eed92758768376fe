//! All machines: which Node is which of them, what comes to them, and the pods that they run.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadastre_controller::cluster::objects::{MachineIdentity, Node, Pod, Text};

use super::api::{Api, Commit};
use super::clock::{MS, SECOND, Time};
use super::host::Host;
use super::run::{Due, Sim};

/// What comes to a machine.
pub enum Act {
    /// It starts again.
    Start,
    /// Its kubelet hears that a pod is gone or finished.
    PodEnded(Text),
    /// Its kubelet starts a pod (again) that the server has brought back.
    PodStarts(Text),
}

/// All machines, and which runs what.
#[derive(Default)]
pub struct Machines {
    pub hosts: Vec<Host>,
    /// The machine behind each Node UID that ever was.
    pub of_node: BTreeMap<Text, usize>,
    /// The last machine behind each name.
    last: BTreeMap<Text, (MachineIdentity, usize)>,
    /// The machine and the Node UID that each pod was made for, by its UID.
    pub of_pod: BTreeMap<Text, (usize, Text)>,
    pub last_write: Time,
}

impl Machines {
    /// The machine that the Node with that UID is.
    pub fn of(&self, uid: &str) -> Option<&Host> {
        self.hosts.get(*self.of_node.get(uid)?)
    }

    /// It has got another id.
    pub fn identify(&mut self, node: &Node) {
        if let Some((machine, _)) = self.last.get_mut(&node.name) {
            machine.clone_from(&node.machine);
        }
    }

    /// The UID of the Node that the machine is, while that exists.
    pub fn live_node(&self, id: usize, api: &Api) -> Option<Text> {
        let uid = &api.nodes.get(&self.hosts[id].name)?.uid;
        (self.of_node.get(uid) == Some(&id)).then(|| uid.clone())
    }
}

impl Sim {
    /// A Node registers: on the machine that had the name before if it is the same, else on a new one.
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
            self.after(MS, Due::Machine(id, Act::Start));
        }
        // The machine that bore the name before has come to its end.
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

    /// Agents' watches get what concerns them.
    pub fn tell_agents(&mut self, commit: &Commit) {
        for id in 0..self.machines.hosts.len() {
            self.tell_host(id, commit);
        }
        // Whoever deletes a Node says that its machine is gone, with all that it ever had.
        if let Commit::Node(Some(gone), after) = commit
            && after.as_ref().is_none_or(|after| after.uid != gone.uid)
            && let Some(id) = self.machines.of_node.get(&gone.uid)
        {
            self.machines.hosts[*id].forgotten.clear();
        }
    }

    /// Something comes to a machine.
    pub fn act(&mut self, id: usize, act: &Act) {
        match act {
            Act::Start if self.was_restored() && !self.host(id).is_off => {}
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

    /// Whether the Node that the agent takes its machine for has been deleted, and it has not heard of that.
    pub fn is_outlived(&self, id: usize) -> bool {
        let host = self.host(id);
        let is_so = |uid: &Text| {
            let node = self.api.nodes.get(&host.name);
            node.is_none_or(|node| node.uid != *uid) && !host.forgotten.contains(uid)
        };
        host.node.as_ref().is_some_and(is_so)
    }

    /// Something befalls one of them.
    pub fn befall_some_host(&mut self) {
        let id = self.rng.index(self.machines.hosts.len().max(1));
        let what = self.rng.below(100);
        let is_spared = self.is_listened_to();
        let host = self.machines.hosts.get(id);
        if host.is_some_and(|host| !host.is_off && !is_spared) {
            self.befall_host(id, what);
        }
    }

    /// Makes a random machine lose its store.
    pub fn lose_some_store(&mut self) {
        let id = self.rng.index(self.machines.hosts.len().max(1));
        let host = self.machines.hosts.get(id);
        if host.is_some_and(|host| !host.is_off) {
            self.doom_store(id);
        }
    }

    /// Whatever still lasts ends; who is off for good stays so.
    pub fn calm_hosts(&mut self) {
        for id in 0..self.machines.hosts.len() {
            let now = self.now;
            let host = self.host_mut(id);
            (host.paused_until, host.held_until) = (now, now);
            host.clocks.set_pace(now, 1_000_000, now);
            self.calm_host(id);
        }
    }

    // Pods that get their addresses from an agent.

    /// A pod is bound to a node, and asks the agent there.
    pub fn bind_pod(&mut self, node: &Arc<Node>) {
        let Some(id) = self.machines.of_node.get(&node.uid).copied() else {
            return;
        };
        let uid = self.api.uid();
        let name: Text = format!("default/pod-{uid}").into();
        let pod = Pod {
            name: name.clone(),
            uid: uid.clone(),
            version: 0,
            finished: false,
            mirror_of: None,
            addresses: [].into(),
        };
        self.log(Some(&node.name), || format!("{name} is bound to it"));
        self.api.put_pod(pod, node.name.clone(), self.now);
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

    /// The kubelet tells the pod's addresses, if the machine is still that Node.
    pub fn pod_reports(&mut self, uid: &Text) {
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
        let pod = Pod {
            addresses: self.addresses_on_host(*id, uid),
            ..Pod::clone(&pod)
        };
        self.checks.ghosts.remove(uid);
        self.api.put_pod(pod, placed, self.now);
        self.publish();
    }

    /// Its work is done: it no longer uses its addresses, and stays for a while.
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
            addresses: [].into(),
            ..Pod::clone(&pod)
        };
        self.api.put_pod(pod, placed, self.now);
        self.publish();
        let stays = self.rng.stretch(SECOND, 30 * SECOND);
        self.after(stays, Due::PodGone(name.clone()));
    }

    /// The machine hears of it: mostly before the API does, as it is the kubelet that ends a pod.
    pub fn pod_ended(&mut self, uid: &Text) {
        if let Some((id, _)) = self.machines.of_pod.get(uid) {
            let id = *id;
            // It may be cut off from the API server, which forgets the pod.
            let is_forced = self.rough && self.rng.chance(1_500);
            let lag = if is_forced {
                self.rng.between(20, 150) * SECOND
            } else {
                self.rng.stretch(MS, 10 * SECOND)
            };
            self.after(lag, Due::Machine(id, Act::PodEnded(uid.clone())));
        }
    }
}
