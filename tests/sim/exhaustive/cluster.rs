//! A small cluster in one state, and the transitions that are possible in it.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use cadastre_api::IPPoolSpec;
use cadastre_controller::cluster::lease::LeaseAnswer;
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{MachineIdentity, Node, Object};
use cadastre_controller::cluster::request::{Rejection, RequestOutcome};
use cadastre_controller::{Now, OutgoingRequest};

use super::super::api::{Api, new_pool};
use super::super::checks::{Verdict, Violation, wrong};
use super::super::clock::{Clocks, SECOND, Time};
use super::super::object_log::Kind;
use super::super::pool_workload::service;
use super::super::process::{Feeds, Watched};
use super::super::run::RunId;
use super::agent::Agent;
use super::candidate::{Candidate, Input};
use super::invariants;
use super::reactions::{Reactions, Run};
use super::wire::{Answer, InTransit, Message, hash_of, hash_of_messages};

/// The maximum number of transitions from a state until the cluster is at rest, if nothing fails.
pub const PATIENCE: u32 = 3_000;

/// The watches that can deliver events in the scenarios.
const KINDS: [Watched; 8] = [
    Watched::Nodes,
    Watched::Pools,
    Watched::Subnets,
    Watched::Blocks,
    Watched::Services,
    Watched::Pods,
    Watched::Claims,
    Watched::Routes,
];

/// A change of nodes or pods, made by neither a controller nor an agent.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    CreateNode(&'static str),
    DeleteNode(&'static str),
    /// From now on, the pods of this node need this number of addresses.
    Need(&'static str, i64),
}

/// A cluster, and the changes whose possible orders are explored.
pub struct Scenario {
    pub name: &'static str,
    pub pool: fn() -> IPPoolSpec,
    /// Changes before the exploration starts; the controllers settle after each
    pub before: &'static [Change],
    /// Changes during the exploration, in this order; each can happen at any time
    pub changes: &'static [Change],
    /// The kinds whose watches may restart with a list
    pub relisted: &'static [Watched],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The message at this index of `wire` arrives.
    Arrive(usize),
    /// A watch delivers all its pending events to this process.
    Deliver(usize, Watched),
    /// This agent receives its present NodeSubnet.
    ShowSubnet(usize),
    /// This process receives the present Lease from its watch.
    ShowLease(usize),
    Start(usize),
    Resume(usize),
    /// The next change of the scenario happens.
    Change,
    /// Time passes until the next process has to be called.
    Tick,
    /// A fault. The sender of the message at this index of `wire` counts the outcome as unknown.
    GiveUp(usize),
    /// A fault. The API server rejects the request at this index of `wire`.
    Refuse(usize),
    /// A fault. The process ends.
    Crash(usize),
    /// A fault. The process stands still until it is resumed.
    Pause(usize),
    /// A fault. This watch of the process restarts with a list.
    Relist(usize, Watched),
    /// A fault. Time passes, although messages are on their way.
    SlowTick,
}

#[derive(Clone)]
struct Process {
    incarnation: u32,
    run: Option<Run>,
    is_paused: bool,
    feeds: Feeds,
    /// The version of the Lease that the process's watch delivered last
    lease_shown: String,
    /// The hash of the events that `feeds` have yet to deliver; `None` if `feeds` or the API server may have changed
    feeds_hash: Option<u64>,
}

impl Process {
    /// The process with the number `id`, at the start of a run.
    fn new(id: usize, incarnation: u32) -> Self {
        Process {
            incarnation,
            run: Some(Run::new(Candidate::new(id, incarnation))),
            is_paused: false,
            feeds: Feeds::default(),
            lease_shown: String::new(),
            feeds_hash: None,
        }
    }
}

/// The transitions that led to a state, as a list: the last one, and the path before it.
pub struct Path {
    at: Time,
    transition: Transition,
    /// The message that the transition is about
    message: Option<InTransit>,
    change: Option<Change>,
    pub before: Option<Arc<Path>>,
}

impl Path {
    /// Describes the last transition.
    pub fn text(&self) -> String {
        let seconds = self.at / SECOND;
        let message = self.message.as_ref().map(|it| {
            let late = if it.is_given_up { " (given up)" } else { "" };
            format!("{}{late}", it.message.text())
        });
        let message = message.unwrap_or_default();
        match (self.transition, self.change) {
            (Transition::Arrive(_), _) => format!("{seconds} s: arrives: {message}"),
            (Transition::GiveUp(_), _) => format!("{seconds} s: is given up: {message}"),
            (Transition::Refuse(_), _) => format!("{seconds} s: is refused: {message}"),
            (Transition::Change, Some(change)) => format!("{seconds} s: {change:?}"),
            (other, _) => format!("{seconds} s: {other:?}"),
        }
    }
}

#[derive(Clone)]
pub struct Cluster {
    scenario: &'static Scenario,
    /// States share it while it does not differ
    api: Arc<Api>,
    /// The hash of the objects in `api`; `None` if one of them may have changed
    api_hash: Option<u64>,
    now: Time,
    processes: [Process; 2],
    /// All states share it
    reactions: Arc<Reactions>,
    /// The agents of the nodes that exist
    agents: Vec<Agent>,
    wire: Vec<InTransit>,
    faults_left: u8,
    changes_done: usize,
    pub path: Option<Arc<Path>>,
}

impl Cluster {
    /// A cluster with the scenario's pool, after the changes in `before`. The controllers have settled.
    pub fn new(scenario: &'static Scenario, faults: u8) -> Result<Self, Violation> {
        let mut api = Api::default();
        api.put(service("kubernetes", "10.96.0.0/16"));
        let uid = api.uid();
        api.put(new_pool("pool".into(), uid, (scenario.pool)(), 0));
        api.commits.clear();
        let mut cluster = Cluster {
            scenario,
            api: Arc::new(api),
            api_hash: None,
            now: SECOND,
            processes: [Process::new(0, 1), Process::new(1, 1)],
            reactions: Arc::default(),
            agents: Vec::new(),
            wire: Vec::new(),
            faults_left: 0,
            changes_done: 0,
            path: None,
        };
        cluster.receive(0, Input::Time)?;
        cluster.receive(1, Input::Time)?;
        cluster.settle()?;
        for change in scenario.before {
            cluster.change(*change)?;
            cluster.settle()?;
        }
        cluster.faults_left = faults;
        cluster.path = None;
        Ok(cluster)
    }

    /// Takes the transitions that [`Self::fair`] returns, until the cluster is at rest.
    fn settle(&mut self) -> Verdict {
        for _ in 0..PATIENCE {
            let Some(next) = self.fair()? else {
                return Ok(());
            };
            self.take(next)?;
        }
        never_at_rest()
    }

    fn id(&self, process: usize) -> RunId {
        RunId {
            process,
            incarnation: self.processes[process].incarnation,
        }
    }

    fn clock(&self) -> Now {
        let clocks = Clocks::new(1_000_000);
        Now {
            mono: clocks.mono(self.now),
            wall: clocks.wall(self.now),
        }
    }

    /// The present run of a process, or `None` if the process is down or paused.
    fn active(&self, process: usize) -> Option<&Candidate> {
        let process = &self.processes[process];
        let run = process.run.as_ref().filter(|_| !process.is_paused);
        run.map(|it| &*it.candidate)
    }

    fn can_arrive(&self, it: &InTransit) -> bool {
        it.message.recipient().is_none_or(|to| {
            // A message for a run that has ended arrives and has no effect.
            !self.processes[to.process].is_paused
        })
    }

    /// Whether an earlier message, which may not be overtaken, has to arrive first (see [`InTransit::line`]).
    fn is_behind(&self, at: usize) -> bool {
        let line = self.wire[at].line();
        let mut earlier = self.wire[..at].iter();
        line.is_some() && earlier.any(|it| it.line() == line)
    }

    fn has_next(&self, process: usize, kind: Watched) -> bool {
        let watches = self.active(process).is_some_and(|it| it.has_read_lease);
        watches && self.processes[process].feeds.of(kind).has_next(&self.api)
    }

    fn deliveries(&self) -> impl Iterator<Item = Transition> + '_ {
        let all = (0..2).flat_map(|it| KINDS.map(|kind| (it, kind)));
        let due = all.filter(|(it, kind)| self.has_next(*it, *kind));
        due.map(|(it, kind)| Transition::Deliver(it, kind))
    }

    /// Returns a `ShowSubnet` for each agent that has a new NodeSubnet or a new need, and no write on its way.
    fn subnet_news(&self) -> impl Iterator<Item = Transition> + '_ {
        let has_agents = invariants::has_blocks(&self.api);
        let writes = |agent: &Agent| {
            let mut all = self.wire.iter();
            all.any(|it| matches!(&*it.message, Message::Status(name, ..) if *name == agent.node))
        };
        let is_due = move |(_, agent): &(usize, &Agent)| {
            let subnet = self.api.subnets.get(&agent.node);
            has_agents && subnet.is_some_and(|it| agent.has_news(it)) && !writes(agent)
        };
        let agents = self.agents.iter().enumerate().filter(is_due);
        agents.map(|(at, _)| Transition::ShowSubnet(at))
    }

    fn is_lease_news(&self, process: usize) -> bool {
        let is_new = self
            .api
            .lease
            .as_ref()
            .is_some_and(|lease| lease.resource_version != self.processes[process].lease_shown);
        let waits = |run: &Candidate| run.has_read_lease && !run.leads();
        is_new && self.active(process).is_some_and(waits)
    }

    /// The first time at which one of the processes that are not paused has to be called.
    fn next_time(&self) -> Option<Time> {
        let runs = (0..2).filter_map(|it| self.active(it));
        let mono = self.clock().mono;
        let wakes: Option<Duration> = runs.filter_map(|run| run.wakes_at(mono)).min();
        wakes.map(|at| Clocks::new(1_000_000).when(at).max(self.now + 1))
    }

    /// Returns the transition that happens if everything works and nothing is late. Returns `None` at rest.
    pub fn fair(&self) -> Result<Option<Transition>, Violation> {
        let mut messages = self.wire.iter().enumerate();
        let message = messages.find(|(_, it)| !it.is_given_up && self.can_arrive(it));
        let message = message.map(|(at, _)| Transition::Arrive(at));
        let news = || (0..2).find(|it| self.is_lease_news(*it));
        let agent = || self.subnet_news().next();
        let down = || (0..2).find(|it| self.processes[*it].run.is_none());
        let soon = message
            .or_else(|| self.deliveries().next())
            .or_else(agent)
            .or_else(|| news().map(Transition::ShowLease))
            .or_else(|| down().map(Transition::Start));
        if soon.is_some() {
            return Ok(soon);
        }
        let paused = (0..2).find(|it| self.processes[*it].is_paused);
        let is_settled = (0..2).any(|it| self.active(it).is_some_and(Candidate::is_settled));
        if is_settled && invariants::served(&self.api, &self.agents) {
            return Ok(paused.map(Transition::Resume));
        }
        let time = self.next_time().map(|_| Transition::Tick);
        let next = time.or(paused.map(Transition::Resume));
        if next.is_none() {
            let text = "nothing is on its way, nothing is scheduled, and yet not all is done";
            return wrong("progress", text.to_owned(), None::<&str>).map(|()| None);
        }
        Ok(next)
    }

    /// Returns the transitions that may happen instead of `fair`. These include faults, as long as faults are left.
    pub fn others(&self, fair: Option<Transition>) -> Vec<Transition> {
        let messages = self.wire.iter().enumerate();
        let arrivals = messages.filter(|(at, it)| self.can_arrive(it) && !self.is_behind(*at));
        let arrivals = arrivals.map(|(at, _)| Transition::Arrive(at));
        let mut all: Vec<Transition> = arrivals.chain(self.deliveries()).collect();
        all.extend(self.subnet_news());
        if self.changes_done < self.scenario.changes.len() {
            all.push(Transition::Change);
        }
        let paused = (0..2).filter(|it| self.processes[*it].is_paused);
        all.extend(paused.map(Transition::Resume));
        if self.faults_left > 0 {
            self.add_faults(fair, &mut all);
        }
        all.retain(|it| Some(*it) != fair);
        all
    }

    fn add_faults(&self, fair: Option<Transition>, all: &mut Vec<Transition>) {
        for (at, it) in self
            .wire
            .iter()
            .enumerate()
            .filter(|(_, it)| !it.is_given_up)
        {
            match &*it.message {
                Message::Request(from, _) if self.hears(*from) => {
                    all.extend([Transition::GiveUp(at), Transition::Refuse(at)]);
                }
                Message::LeaseCall(from, _) if self.hears(*from) => {
                    all.push(Transition::GiveUp(at));
                }
                _ => {}
            }
        }
        for it in (0..2).filter(|it| self.active(*it).is_some()) {
            all.extend([Transition::Crash(it), Transition::Pause(it)]);
            let watches = |run: &&Candidate| run.has_read_lease;
            if self.active(it).as_ref().is_some_and(watches) {
                let kinds = self.scenario.relisted.iter();
                all.extend(kinds.map(|kind| Transition::Relist(it, *kind)));
            }
        }
        if self.next_time().is_some() && fair != Some(Transition::Tick) {
            all.push(Transition::SlowTick);
        }
    }

    /// Whether this run is in progress and not paused, so that it receives answers.
    fn hears(&self, id: RunId) -> bool {
        self.processes[id.process].incarnation == id.incarnation
            && self.active(id.process).is_some()
    }

    pub fn take(&mut self, transition: Transition) -> Verdict {
        let message = match transition {
            Transition::Arrive(at) | Transition::GiveUp(at) | Transition::Refuse(at) => {
                Some(self.wire[at].clone())
            }
            _ => None,
        };
        self.path = Some(Arc::new(Path {
            at: self.now,
            transition,
            message,
            change: self.scenario.changes.get(self.changes_done).copied(),
            before: self.path.take(),
        }));
        match transition {
            Transition::Arrive(at) => {
                let it = self.wire.remove(at);
                self.arrive(&it)?;
            }
            Transition::Deliver(process, kind) => {
                self.deliver(process, kind)?;
            }
            Transition::ShowSubnet(at) => {
                let agent = &mut self.agents[at];
                let subnet = self.api.subnets.get(&agent.node).unwrap();
                if let Some(status) = agent.sees(subnet) {
                    let message = Message::Status(agent.node.clone(), subnet.version, status);
                    self.send(message);
                }
                self.check()?;
            }
            Transition::ShowLease(process) => {
                let lease = self.api.lease.clone().unwrap();
                let it = &mut self.processes[process];
                it.lease_shown.clone_from(&lease.resource_version);
                self.receive(process, Input::Lease(Box::new(lease)))?;
            }
            Transition::Start(process) => {
                let it = &mut self.processes[process];
                *it = Process::new(process, it.incarnation + 1);
                self.receive(process, Input::Time)?;
            }
            Transition::Resume(process) => {
                self.processes[process].is_paused = false;
                self.receive(process, Input::Time)?;
            }
            Transition::Change => {
                let change = self.scenario.changes[self.changes_done];
                self.changes_done += 1;
                self.change(change)?;
            }
            Transition::Tick => self.tick()?,
            fault => {
                self.faults_left -= 1;
                self.fail(fault)?;
            }
        }
        Ok(())
    }

    fn fail(&mut self, fault: Transition) -> Verdict {
        match fault {
            Transition::GiveUp(at) => {
                self.wire[at].is_given_up = true;
                match &*Arc::clone(&self.wire[at].message) {
                    Message::Request(from, it) => {
                        let outcome = RequestOutcome::Indeterminate("no answer".to_owned());
                        self.receive(from.process, Input::Answer(it.id, Box::new(outcome)))
                    }
                    Message::LeaseCall(from, _) => {
                        self.receive(from.process, Input::LeaseAnswer(LeaseAnswer::Unclear))
                    }
                    _ => Ok(()),
                }
            }
            Transition::Refuse(at) => {
                let it = self.wire.remove(at);
                if let Message::Request(from, it) = &*it.message {
                    let outcome = RequestOutcome::Rejected(Rejection::Rejected("no".to_owned()));
                    let is_read = !it.request.is_write();
                    self.send(Message::Answer(*from, it.id, Answer { outcome, is_read }));
                }
                Ok(())
            }
            Transition::Crash(process) => {
                self.processes[process].run = None;
                self.processes[process].feeds = Feeds::default();
                self.processes[process].feeds_hash = None;
                let ended = self.id(process);
                // Messages that the process has sent may still arrive. Messages to the process are dropped.
                self.wire.retain(|it| it.message.recipient() != Some(ended));
                for it in &mut self.wire {
                    it.is_given_up |= match &*it.message {
                        Message::Request(from, _) | Message::LeaseCall(from, _) => *from == ended,
                        _ => false,
                    };
                }
                Ok(())
            }
            Transition::Pause(process) => {
                self.processes[process].is_paused = true;
                Ok(())
            }
            Transition::Relist(process, kind) => {
                self.processes[process].feeds.of_mut(kind).relist();
                self.processes[process].feeds_hash = None;
                Ok(())
            }
            Transition::SlowTick => self.tick(),
            _ => unreachable!("not a fault"),
        }
    }

    fn tick(&mut self) -> Verdict {
        self.now = self.next_time().unwrap();
        for process in 0..2 {
            if self.active(process).is_some() {
                self.receive(process, Input::Time)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, message: Message) {
        self.wire.push(InTransit::new(message));
    }

    /// Passes the input to a process, unless the process is down, and sends the requests of the process.
    fn receive(&mut self, process: usize, input: Input) -> Verdict {
        let (id, now) = (self.id(process), self.clock());
        let Some(run) = &mut self.processes[process].run else {
            return Ok(());
        };
        let reaction = self.reactions.of(id, run, input, now)?;
        run.clone_from(&reaction.run);
        self.wire.extend_from_slice(&reaction.sent);
        let mut statuses = reaction.statuses.iter();
        statuses.try_for_each(|it| self.write_status(process, it))
    }

    /// Executes a write of a status at once, and delivers the changed pools to all processes at once.
    fn write_status(&mut self, process: usize, request: &OutgoingRequest) -> Verdict {
        let at = self.now;
        let api = self.api_mut();
        let outcome = api.execute(&request.request, at);
        api.commits.clear();
        self.receive(process, Input::Answer(request.id, Box::new(outcome)))?;
        (0..2).try_for_each(|process| self.show_pools(process))
    }

    /// Delivers all pending changes of pools to a process, unless the process is paused.
    fn show_pools(&mut self, process: usize) -> Verdict {
        if !self.has_next(process, Watched::Pools) {
            return Ok(());
        }
        self.deliver(process, Watched::Pools)
    }

    /// Delivers all pending events of a watch to a process.
    fn deliver(&mut self, process: usize, kind: Watched) -> Verdict {
        let now = self.clock();
        let it = &mut self.processes[process];
        it.feeds_hash = None;
        let mut events = Vec::new();
        while it.feeds.of(kind).has_next(&self.api) {
            events.extend(it.feeds.next(kind, &self.api, now.mono));
        }
        self.receive(process, Input::Events(events))
    }

    fn arrive(&mut self, it: &InTransit) -> Verdict {
        let now = self.clock();
        match &*it.message {
            Message::Request(from, outgoing) => {
                let at = self.now;
                let is_read = !outgoing.request.is_write();
                let outcome = self.api_mut().execute(&outgoing.request, at);
                self.check()?;
                if !it.is_given_up {
                    let answer = Answer { outcome, is_read };
                    self.send(Message::Answer(*from, outgoing.id, answer));
                }
            }
            Message::LeaseCall(from, call) => {
                let answer = self.api_mut().lease(call.clone(), now.wall);
                if !it.is_given_up {
                    self.send(Message::LeaseAnswer(*from, answer));
                }
            }
            Message::Status(node, version, status) => {
                let api = self.api_mut();
                let written = api.publish_status(node, *version, status.clone());
                let agent = self.agents.iter_mut().find(|it| it.node == *node);
                if let (Some(agent), Some((version, status))) = (agent, written) {
                    agent.wrote(version, &status);
                }
                self.check()?;
            }
            Message::Answer(to, id, answer) if *to == self.id(to.process) => {
                self.receive(
                    to.process,
                    Input::Answer(*id, Box::new(answer.outcome.clone())),
                )?;
            }
            Message::LeaseAnswer(to, answer) if *to == self.id(to.process) => {
                self.receive(to.process, Input::LeaseAnswer(answer.clone()))?;
            }
            Message::Answer(..) | Message::LeaseAnswer(..) => {}
        }
        Ok(())
    }

    fn change(&mut self, change: Change) -> Verdict {
        let api = self.api_mut();
        match change {
            Change::CreateNode(name) => {
                let uid = api.uid();
                api.put(new_node(name.into(), uid.clone()));
                self.agents.push(Agent::new(name.into(), uid));
            }
            Change::DeleteNode(name) => {
                api.delete_node(&name.into());
                self.agents.retain(|it| *it.node != *name);
            }
            Change::Need(name, need) => {
                let agent = self.agents.iter_mut().find(|it| *it.node == *name);
                if let Some(agent) = agent {
                    agent.need(need);
                }
            }
        }
        self.check()
    }

    /// Checks the present state of the API server and the agents against the invariants.
    fn check(&mut self) -> Verdict {
        if !self.api.commits.is_empty() {
            self.api_mut().commits.clear();
        }
        invariants::check(&self.api, &self.agents)
    }

    /// Returns the API server, to change it.
    fn api_mut(&mut self) -> &mut Api {
        self.api_hash = None;
        for process in &mut self.processes {
            process.feeds_hash = None;
        }
        Arc::make_mut(&mut self.api)
    }

    /// Returns a hash of the state. Only the parts that may have changed since the last call are hashed again.
    pub fn fingerprint(&mut self) -> u64 {
        let api = *self
            .api_hash
            .get_or_insert_with(|| hash_of(|text| describe(&self.api, text)));
        let (now, faults, changes) = (self.now, self.faults_left, self.changes_done);
        let agents = &self.agents;
        let mut all = hash_of(|text| write!(text, "{now} {faults} {changes} {api} {agents:?}"));
        for process in &mut self.processes {
            let feeds = *process.feeds_hash.get_or_insert_with(|| {
                hash_of(|text| {
                    let mut feeds = KINDS.iter().map(|kind| process.feeds.of(*kind));
                    feeds.try_for_each(|it| it.describe(&self.api, text))
                })
            });
            let run = process.run.as_ref().map(|it| it.hash);
            let (incarnation, shown) = (process.incarnation, &process.lease_shown);
            let of_process = (incarnation, run, process.is_paused, shown, feeds);
            all = all.rotate_left(7) ^ hash_of(|text| write!(text, "{of_process:?}"));
        }
        all.wrapping_add(hash_of_messages(&self.wire))
    }
}

/// Returns the violation of a cluster that never comes to rest.
pub fn never_at_rest() -> Verdict {
    let text = "all faults are over, and still not all is done";
    wrong("progress", text.to_owned(), None::<&str>)
}

/// Writes the state of the API server to `text`, for a hash. Kinds that no scenario changes are left out.
fn describe(api: &Api, text: &mut String) -> fmt::Result {
    fn all<T: Object + fmt::Debug>(kind: &Kind<T>, text: &mut String) -> fmt::Result {
        write!(text, "{} ", kind.version)?;
        kind.live.values().try_for_each(|it| write!(text, "{it:?}"))
    }
    write!(text, "{:?} {:?}", api.counters(), api.lease)?;
    all(&api.nodes, text)?;
    all(&api.subnets, text)?;
    all(&api.blocks, text)?;
    all(&api.pools, text)?;
    all(&api.routes, text)
}

pub fn new_node(name: NodeName, uid: ObjectUid) -> Node {
    Node {
        name,
        uid,
        version: 0,
        labels: Box::new([]),
        term: None,
        annotated: false,
        deleting: false,
        pod_cidrs: Box::new([]),
        unreadable: Box::new([]),
        addresses: Box::new([]),
        machine: MachineIdentity::default(),
        taints: Box::new([]),
        exhausted: None,
        max_pods: 110,
        asn: None,
    }
}
