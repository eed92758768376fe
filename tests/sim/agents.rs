//! Agents at work: what they hear and when, what they do about it, what befalls them, and the pods
//! whose addresses they give out.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadastre_controller::cluster::seen::{AgentReport, Machine, Node, Pod, Text};
use cadastre_core::Addr;

use super::agent::{Agent, Habits};
use super::api::{Api, Author, Commit};
use super::checks::Violation;
use super::clock::{MS, SECOND, Time};
use super::host::Host;
use super::run::{Due, Sim};

/// What comes to an agent.
pub enum Act {
    /// Its watch of its NodeSubnet delivers.
    Hear,
    /// Its watch of its Node delivers.
    HearNode,
    /// A pause is over, an address has cooled, an answer is overdue.
    Tick,
    /// What it published arrives.
    Land(Box<Publication>),
    /// It starts again.
    Start,
    /// It hears that a pod is gone or finished.
    PodEnded(Text),
    /// The kubelet starts a pod (again) that the server has brought back.
    PodStarts(Text),
}

/// A status on its way, with its guards.
pub struct Publication {
    uid: Text,
    version: u64,
    report: AgentReport,
}

/// All machines, and which runs what.
#[derive(Default)]
pub struct Machines {
    pub agents: Vec<Agent>,
    /// The machine behind each Node UID that ever was.
    pub of_node: BTreeMap<Text, usize>,
    /// The last machine behind each name.
    last: BTreeMap<Text, (Machine, usize)>,
    /// The machine and the Node UID that each pod was made for, by its UID.
    pub of_pod: BTreeMap<Text, (usize, Text)>,
    pub last_write: Time,
}

impl Machines {
    /// The agent that the Node with that UID has.
    pub fn of(&self, uid: &str) -> Option<&Agent> {
        self.agents.get(*self.of_node.get(uid)?)
    }

    /// It has got another id.
    pub fn identify(&mut self, node: &Node) {
        if let Some((machine, _)) = self.last.get_mut(&node.name) {
            machine.clone_from(&node.machine);
        }
    }

    /// The UID of the Node that the machine is, while that exists.
    pub fn live_node(&self, id: usize, api: &Api) -> Option<Text> {
        let uid = &api.nodes.get(&self.agents[id].name)?.uid;
        (self.of_node.get(uid) == Some(&id)).then(|| uid.clone())
    }
}

impl Sim {
    /// A Node registers: on the machine that had the name before if it is the same, else on a new one.
    pub fn settle_in(&mut self, node: &Node) {
        let same = self.machines.last.get(&node.name);
        let same = same.filter(|(machine, _)| machine.same(&node.machine));
        let id = same.map_or(self.machines.agents.len(), |(_, id)| *id);
        if id == self.machines.agents.len() {
            let habits = Habits {
                cooldown: self.rng.below(8) * SECOND,
                forgets: self.rng.chance(5_000),
            };
            let mut agent = Agent::new(node.name.clone(), habits);
            if self.plan.shipped {
                agent.host = Some(Box::new(Host::new(self.rng.next())));
            }
            self.machines.agents.push(agent);
            if self.plan.shipped {
                self.machines.of_node.insert(node.uid.clone(), id);
                self.start_host(id);
            }
        } else if self.machines.agents[id].is_off {
            self.after(MS, Due::Agent(id, Act::Start));
        }
        // The machine that bore the name before has come to its end.
        for (other, agent) in self.machines.agents.iter_mut().enumerate() {
            if other != id && agent.name == node.name {
                agent.forgotten.clear();
            }
        }
        self.end_earlier_hosts(id);
        let machine = (node.machine.clone(), id);
        self.machines.last.insert(node.name.clone(), machine);
        self.machines.of_node.insert(node.uid.clone(), id);
    }

    /// Agents' watches get what concerns them.
    pub fn tell_agents(&mut self, commit: &Commit) {
        for id in 0..self.machines.agents.len() {
            if self.machines.agents[id].host.is_some() {
                self.tell_host(id, commit);
            }
        }
        let (name, uid) = match commit {
            Commit::Subnet(before, after) => {
                let Some(subnet) = after.as_ref().or(before.as_ref()) else {
                    return;
                };
                (subnet.name.clone(), None)
            }
            Commit::Node(before, after) => {
                let same = matches!((before, after), (Some(b), Some(a)) if b.uid == a.uid);
                let Some(node) = after.as_ref().or(before.as_ref()).filter(|_| !same) else {
                    return;
                };
                // Whoever deletes a Node says that its machine is gone, with all that it ever had.
                let gone = before.as_ref().filter(|_| !same);
                if let Some(id) = gone.and_then(|gone| self.machines.of_node.get(&gone.uid)) {
                    self.machines.agents[*id].forgotten.clear();
                }
                let uid = after.as_ref().map(|after| after.uid.clone());
                (node.name.clone(), Some(uid))
            }
            _ => return,
        };
        for id in 0..self.machines.agents.len() {
            let agent = &mut self.machines.agents[id];
            if agent.name != name || agent.is_off || agent.host.is_some() {
                continue;
            }
            match (&uid, commit) {
                (Some(uid), _) => {
                    let mine = |uid: &&Text| self.machines.of_node.get(*uid) == Some(&id);
                    agent.nodes.push_back(uid.as_ref().filter(mine).cloned());
                    self.schedule_hearing(id, true);
                }
                (None, Commit::Subnet(_, after)) => {
                    agent.subnets.push_back(after.clone());
                    self.schedule_hearing(id, false);
                }
                _ => {}
            }
        }
    }

    fn schedule_hearing(&mut self, id: usize, of_node: bool) {
        let is_spared = self.is_listened_to();
        let agent = &mut self.machines.agents[id];
        let hearing = if of_node {
            &mut agent.hearing_node
        } else {
            &mut agent.hearing
        };
        if std::mem::replace(hearing, true) {
            return;
        }
        let held = agent.held_until.max(agent.paused_until);
        let is_lagging = self.rough && self.rng.chance(self.plan.network.lagging);
        let lag = if is_lagging && !is_spared {
            self.rng.stretch(SECOND, 120 * SECOND)
        } else {
            self.rng.stretch(MS, 50 * MS)
        };
        let act = if of_node { Act::HearNode } else { Act::Hear };
        self.after(held.saturating_sub(self.now) + lag, Due::Agent(id, act));
    }

    /// Its watches start over: what they bring is how things are now.
    pub fn list_anew(&mut self, id: usize) {
        if self.machines.agents[id].host.is_some() {
            return self.relist_host(id, false);
        }
        let agent = &mut self.machines.agents[id];
        let subnet = self.api.subnets.get(&agent.name).cloned();
        let node = self.api.nodes.get(&agent.name).map(|node| node.uid.clone());
        let mine = node.filter(|uid| self.machines.of_node.get(uid) == Some(&id));
        agent.subnets.clear();
        agent.subnets.push_back(subnet);
        agent.nodes.clear();
        agent.nodes.push_back(mine);
        self.schedule_hearing(id, false);
        self.schedule_hearing(id, true);
    }

    pub fn act(&mut self, id: usize, act: Act) -> Result<(), Violation> {
        if let Act::Land(publication) = act {
            return self.land(id, *publication);
        }
        if matches!(act, Act::Start) {
            if self.was_restored() && !self.machines.agents[id].is_off {
                return Ok(());
            }
            if self.machines.agents[id].host.is_some() {
                self.start_host(id);
                return Ok(());
            }
            self.machines.agents[id].restart();
            self.list_anew(id);
            let name = self.machines.agents[id].name.clone();
            self.log(Some(&name), || format!("agent {id} starts"));
            return Ok(());
        }
        if self.machines.agents[id].host.is_some() {
            self.act_of_host(id, &act);
            return Ok(());
        }
        let agent = &mut self.machines.agents[id];
        let rest = agent.paused_until.saturating_sub(self.now);
        if rest > 0 && !agent.is_off {
            self.after(rest, Due::Agent(id, act));
            return Ok(());
        }
        if let Act::PodStarts(uid) = &act
            && !self.api.pods.live.values().any(|it| it.uid == *uid)
        {
            return Ok(());
        }
        let rest = agent.held_until.saturating_sub(self.now);
        if rest > 0 && matches!(act, Act::Hear | Act::HearNode) {
            self.after(rest, Due::Agent(id, act));
            return Ok(());
        }
        let all = self.rng.chance(5_000);
        match act {
            Act::Hear => {
                agent.hearing = false;
                let skipped = if all { agent.subnets.len() } else { 1 };
                for subnet in agent.subnets.drain(..skipped.min(agent.subnets.len())) {
                    agent.seen = subnet;
                }
                if !agent.subnets.is_empty() {
                    self.schedule_hearing(id, false);
                }
            }
            Act::HearNode => {
                agent.hearing_node = false;
                let skipped = if all { agent.nodes.len() } else { 1 };
                for node in agent.nodes.drain(..skipped.min(agent.nodes.len())) {
                    agent.node = node;
                }
                if !agent.nodes.is_empty() {
                    self.schedule_hearing(id, true);
                }
            }
            Act::Tick => agent.tick_at = None,
            Act::PodEnded(pod) => agent.take_back(&pod, self.now),
            Act::PodStarts(pod) => {
                if !agent.given.values().any(|it| it.pod.as_ref() == Some(&pod)) {
                    agent.pending.insert(pod);
                }
            }
            Act::Land(_) | Act::Start => {}
        }
        if self.machines.agents[id].is_off {
            return Ok(());
        }
        self.work_of(id)
    }

    fn work_of(&mut self, id: usize) -> Result<(), Violation> {
        let agent = &mut self.machines.agents[id];
        let name = agent.name.clone();
        for key in agent.take_over() {
            self.log(Some(&name), || {
                format!("agent {id} takes over {} {}", key.0, key.1)
            });
            self.judge(self.check_taken(id, &key))?;
        }
        for key in self.machines.agents[id].let_go(self.now) {
            self.log(Some(&name), || {
                format!("agent {id} releases {} {}", key.0, key.1)
            });
        }
        let pending = self.machines.agents[id].pending.clone();
        for pod in pending {
            let rng = &mut self.rng;
            let given = self.machines.agents[id].give(&pod, |count| rng.index(count));
            if given.is_empty() {
                continue;
            }
            self.checks.tally.given += 1;
            if self.is_outlived(id) {
                self.checks.given_too_late.insert(pod.clone());
            }
            self.log(Some(&name), || {
                let addresses: Vec<Addr> = given.iter().map(|(addr, _)| *addr).collect();
                format!("agent {id} gives {addresses:?} to pod {pod}")
            });
            for (addr, block) in &given {
                self.judge(self.check_given(id, &pod, *addr, block))?;
            }
            let lag = self.rng.stretch(20 * MS, 20 * SECOND);
            self.after(lag, Due::PodReports(pod));
        }
        self.publish_of(id);
        let agent = &self.machines.agents[id];
        let unsaid = agent.unsaid().is_some().then_some(agent.publishing_until);
        let next = agent.next_cooled().into_iter().chain(unsaid).min();
        if let Some(at) = next.map(|at| at.max(self.now + MS)) {
            let agent = &mut self.machines.agents[id];
            if agent.tick_at.is_none_or(|due| due > at) {
                agent.tick_at = Some(at);
                self.after(at - self.now, Due::Agent(id, Act::Tick));
            }
        }
        Ok(())
    }

    /// Whether the Node that the agent takes its machine for has been deleted, and it has not heard of that.
    pub fn is_outlived(&self, id: usize) -> bool {
        let agent = &self.machines.agents[id];
        let is_so = |uid: &Text| {
            let node = self.api.nodes.get(&agent.name);
            node.is_none_or(|node| node.uid != *uid) && !agent.forgotten.contains(uid)
        };
        agent.node.as_ref().is_some_and(is_so)
    }

    fn publish_of(&mut self, id: usize) {
        let agent = &self.machines.agents[id];
        let Some(report) = agent
            .unsaid()
            .filter(|_| agent.publishing_until <= self.now)
        else {
            return;
        };
        let Some(seen) = &agent.seen else { return };
        let (uid, version) = (seen.uid.clone(), seen.version);
        let publication = Publication {
            uid,
            version,
            report,
        };
        let there = self.rng.stretch(MS, 20 * MS);
        let (lost, late) = (
            self.rough && self.rng.chance(self.plan.network.lost_before),
            self.rough && self.rng.chance(self.plan.network.late),
        );
        let there = if late {
            self.rng.stretch(SECOND, 120 * SECOND)
        } else {
            there
        };
        if !lost && !self.is_down() {
            self.after(there, Due::Agent(id, Act::Land(Box::new(publication))));
        }
        let patience = self.rng.stretch(500 * MS, 4 * SECOND);
        self.machines.agents[id].publishing_until = self.now + patience;
    }

    fn land(&mut self, id: usize, it: Publication) -> Result<(), Violation> {
        let name = self.machines.agents[id].name.clone();
        let text = self
            .trace
            .is_on()
            .then(|| super::words::of_agent(&it.report));
        let taken = self
            .api
            .publish_report(&name, (&it.uid, it.version), it.report, self.now);
        if let Some(text) = text {
            self.log(Some(&name), || {
                format!("agent {id} says {text}, taken: {taken}")
            });
        }
        if taken {
            self.machines.last_write = self.now;
        }
        self.settle_commits(&Author::Agent, self.now)
    }

    // What befalls them.

    pub fn befall_agent(&mut self) {
        let id = self.rng.index(self.machines.agents.len().max(1));
        let what = self.rng.below(10);
        let is_spared = self.is_listened_to();
        let is_shipped = |agent: &Agent| agent.host.is_some();
        if self.machines.agents.get(id).is_some_and(is_shipped) {
            if !is_spared && !self.machines.agents[id].is_off {
                let what = 10 * what + self.rng.below(10);
                self.befall_host(id, what);
            }
            return;
        }
        let Some(agent) = self.machines.agents.get_mut(id).filter(|_| !is_spared) else {
            return;
        };
        let name = agent.name.clone();
        let length = self.rng.stretch(100 * MS, 200 * SECOND);
        match what {
            0..3 => {
                agent.is_off = true;
                self.after(length, Due::Agent(id, Act::Start));
                self.log(Some(&name), || format!("agent {id} is off for a while"));
            }
            3..6 => {
                agent.paused_until = self.now + length;
                if self.plan.clocks_stop && self.rng.chance(7_000) {
                    let (rate, until) = (agent.clocks.rate(), agent.paused_until);
                    agent.clocks.set_pace(self.now, rate, until);
                }
                self.log(Some(&name), || format!("agent {id} pauses"));
            }
            6..9 => {
                agent.held_until = self.now + length;
                self.log(Some(&name), || format!("agent {id} loses its watches"));
                self.list_anew(id);
            }
            _ => {
                (agent.is_off, agent.is_gone) = (true, true);
                self.log(Some(&name), || format!("agent {id} is off for good"));
                if self.rng.chance(5_000) {
                    self.delete_node_named(&name);
                }
            }
        }
    }

    /// Whatever still lasts ends; who is off for good stays so.
    pub fn calm_agents(&mut self) {
        for id in 0..self.machines.agents.len() {
            let agent = &mut self.machines.agents[id];
            (agent.paused_until, agent.held_until) = (self.now, self.now);
            agent.clocks.set_pace(self.now, 1_000_000, self.now);
            if agent.host.is_some() {
                self.calm_host(id);
            } else if !agent.is_off {
                self.list_anew(id);
                self.after(0, Due::Agent(id, Act::Hear));
                self.after(0, Due::Agent(id, Act::HearNode));
            }
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
        if self.machines.agents[id].host.is_some() {
            self.host_runs(id, &uid, &name);
        } else {
            self.machines.agents[id].pending.insert(uid);
            self.after(MS, Due::Agent(id, Act::Tick));
        }
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
        let agent = &self.machines.agents[*id];
        let own = agent.given.iter();
        let own = own.filter(|(_, it)| it.pod.as_ref() == Some(uid));
        let addresses = match &agent.host {
            Some(_) => self.addresses_on_host(*id, uid),
            None => own.map(|(addr, _)| *addr).collect(),
        };
        let pod = Pod {
            addresses,
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
            let is_shipped = self.machines.agents[id].host.is_some();
            // It may be cut off from the API server, which forgets the pod.
            let is_forced = is_shipped && self.rough && self.rng.chance(1_500);
            let lag = if is_forced {
                self.rng.between(20, 150) * SECOND
            } else {
                self.rng.stretch(MS, 10 * SECOND)
            };
            self.after(lag, Due::Agent(id, Act::PodEnded(uid.clone())));
        }
    }
}
