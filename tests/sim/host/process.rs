//! The agent's process: the shipped state machine, and the code that carries out its effects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use cadastre_agent::addresses::ListOutcome;
use cadastre_agent::leaks::{LeakedAttachment, NodeEvidence};
use cadastre_agent::machine::{
    AgentEffect, AgentEvent, AgentMachine, FilesReported, STARTING, ServiceView, StoreAnswer,
    StoreQuestion,
};
use cadastre_agent::namespaces::Namespace;
use cadastre_agent::pods::Pods;
use cadastre_agent::publish::WriteOutcome;
use cadastre_agent::service::adding::{AskedAdd, ForBlock, ForPod, Probing};
use cadastre_agent::shared::{ServiceState, WatchState};
use cadastre_api::{AddressConflict, BlockStatus, NodeAddressesSpec, NodeSubnetStatus};
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_core::{Addr, Cidr};
use cadastre_node::{HoldingsFile, OpError, ProbeRound, ProbeTargets, store_thread};

use super::feeds::Line;
use super::settings;
use crate::api::Author;
use crate::checks::Verdict;
use crate::clock::{MS, SECOND, Time};
use crate::run::{Due, Sim};

/// The maximum time that the agent waits for the API server.
const API_LIMIT: Time = 10 * SECOND;

/// Something that happens to an agent's process.
pub enum ProcessAct {
    /// A watch of the agent delivers its next event.
    Deliver(Line),
    /// The agent's loop runs once.
    Turn,
    /// The agent receives the answer to one of its effects.
    Tell(Box<AgentEvent>),
    /// Opens, closes or creates the store, or asks the runtime for its sandboxes.
    Do(Box<StoreQuestion>),
    /// Executes the requests that wait for the store.
    Serve,
    /// Closes the store's file, unless the store thread has worked since this act was scheduled. The number says how
    /// often the store thread had worked when the act was scheduled.
    Idle(u64),
    Request(u64),
    /// Continues an ADD whose waiting time is over.
    Woken(u64),
    /// Probes are over. The number is that of the ADD that needs the probes; `None` if the agent itself needs them
    Probed(Option<u64>, ProbeRound),
    /// The routing daemon answers. If the flag is set, it fails; otherwise it now announces these ranges.
    Announce(BTreeSet<Cidr>, bool),
    /// Asks the runtime and the kernel about leak candidates. The last value is the list of pods, if it could be read.
    Prove(Vec<LeakedAttachment>, String, Option<Pods>),
}

/// An answer of the store thread, to the agent or to a CNI plugin.
pub enum Out {
    Answer(StoreAnswer),
    Plugin(u64, Result<cadastre_node::OpOutcome, OpError>),
    /// The addresses that must be probed for an ADD, or an error of the store
    ToProbe(u64, Result<ProbeTargets, String>),
    /// The answers to probes are recorded, for an ADD or for the agent itself (`None`). The result has the addresses
    /// that other hosts use, or an error of the store
    Probed(Option<u64>, Result<Vec<Addr>, String>),
}

/// What a pending ADD waits for.
pub enum Waiting {
    Store(AskedAdd),
    Pod(ForPod),
    Block(ForBlock),
    Probe(Probing),
}

pub struct Process {
    pub machine: AgentMachine,
    pub shown: Arc<WatchState>,
    pub desk: ServiceState,
    /// The holdings file, as this process knows it.
    pub holdings: HoldingsFile,
    /// The earliest time at which changed notes on pods may be written to the holdings file again.
    pub notes_at: Time,
    /// The store while it is open; otherwise the reason why it is not.
    pub worker: Result<store_thread::StoreWorker, String>,
    /// The last error of the store's file.
    pub trouble: Option<String>,
    pub queue: Vec<store_thread::StoreRequest>,
    /// How often the store thread has worked.
    pub worked: u64,
    /// Whether a [`ProcessAct::Idle`] is scheduled.
    pub closing: bool,
    pub out: Arc<Mutex<Vec<Out>>>,
    pub adds: BTreeMap<u64, Waiting>,
    wake_at: Option<Time>,
    /// When the process was started, in virtual time.
    pub started: Time,
}

impl Sim {
    pub fn start_process(&mut self, id: usize) {
        let now = self.host_now(id);
        let started = self.now;
        let (has_agent, announces) = (self.plan.agents, self.plan.announces());
        let host = self.host_mut(id);
        if !has_agent || host.process.is_some() {
            return;
        }
        let settings = settings(&host.name, announces);
        host.incarnation += 1;
        host.process = Some(Process {
            machine: AgentMachine::new(settings, host.seed, &now),
            shown: Arc::default(),
            desk: ServiceState::default(),
            holdings: host.file.holdings(),
            notes_at: 0,
            worker: Err(STARTING.to_owned()),
            trouble: None,
            queue: Vec::new(),
            worked: 0,
            closing: false,
            out: Arc::default(),
            adds: BTreeMap::new(),
            wake_at: None,
            started,
        });
        host.node = None;
        self.log_host(id, || format!("agent {id} starts"));
        self.reset_lines(id);
        self.relist_host(id, false);
        self.turn_later(id, MS);
    }

    /// Schedules a turn of the agent after `delay`, unless an earlier turn is scheduled already.
    pub fn turn_later(&mut self, id: usize, delay: Time) {
        let at = self.now + delay;
        let process = self.process(id);
        if let Some(process) = process.filter(|it| it.wake_at.is_none_or(|due| due > at)) {
            process.wake_at = Some(at);
            self.process_due(id, delay, ProcessAct::Turn);
        }
    }

    pub fn kill_process(&mut self, id: usize) {
        if self.host_mut(id).process.take().is_none() {
            return;
        }
        self.log_host(id, || format!("agent {id} is killed"));
        self.hang_up_plugins(id);
    }

    pub(super) fn process_due(&mut self, id: usize, delay: Time, act: ProcessAct) {
        let incarnation = self.host(id).incarnation;
        self.after(delay, Due::Process(id, incarnation, Box::new(act)));
    }

    pub(super) fn process(&mut self, id: usize) -> Option<&mut Process> {
        self.host_mut(id).process.as_mut()
    }

    /// Handles an act of the given run of the agent's process; acts of earlier runs are dropped.
    pub fn process_acts(&mut self, id: usize, incarnation: u32, act: Box<ProcessAct>) -> Verdict {
        let rest = self.machines.hosts[id]
            .paused_until
            .saturating_sub(self.now);
        let host = self.host(id);
        if host.incarnation != incarnation || host.process.is_none() {
            return Ok(());
        }
        if rest > 0 {
            let at = self.now + rest;
            if let (ProcessAct::Turn, Some(process)) = (&*act, self.process(id)) {
                process.wake_at = Some(at);
            }
            self.after(rest, Due::Process(id, incarnation, act));
            return Ok(());
        }
        let now = self.host_now(id);
        match *act {
            ProcessAct::Deliver(line) => return self.deliver_line(id, line),
            ProcessAct::Turn => {
                let at = Some(self.now);
                let process = self.process(id);
                // Another act has scheduled the agent's next turn for a different time, so this turn is dropped.
                let Some(process) = process.filter(|it| it.wake_at == at) else {
                    return Ok(());
                };
                process.wake_at = None;
            }
            ProcessAct::Tell(event) => {
                if let Some(process) = self.process(id) {
                    process.machine.on(*event, &now);
                }
            }
            ProcessAct::Do(question) => self.do_question(id, *question)?,
            ProcessAct::Serve => self.serve_store(id)?,
            ProcessAct::Idle(worked) => {
                let Some(process) = self.process(id) else {
                    return Ok(());
                };
                process.closing = false;
                if process.worked == worked {
                    self.record_notes(id, &now);
                    if let Some(Ok(worker)) = self.process(id).map(|it| &mut it.worker) {
                        worker.close();
                    }
                } else {
                    self.close_when_idle(id);
                }
                return Ok(());
            }
            ProcessAct::Request(call) => self.plugin_asks(id, call),
            ProcessAct::Woken(call) => self.wake_add(id, call, false),
            ProcessAct::Probed(number, round) => self.record_probes(id, number, round),
            ProcessAct::Announce(ranges, fails) => {
                let event = self.daemon_answers(id, ranges, fails);
                if let Some(process) = self.process(id) {
                    process.machine.on(event, &now);
                }
            }
            ProcessAct::Prove(candidates, boot, pods) => {
                self.prove_host(id, candidates, boot, pods.as_ref());
            }
        }
        self.turn_host(id)
    }

    /// Lets the agent take turns, until it starts no effect that is answered at once.
    pub(super) fn turn_host(&mut self, id: usize) -> Verdict {
        loop {
            let now = self.host_now(id);
            let host = self.host_mut(id);
            let is_there = host.disk().is_some();
            let Some(process) = &mut host.process else {
                return Ok(());
            };
            if std::mem::take(&mut process.desk.is_changed) {
                process.machine.on(AgentEvent::Changed, &now);
            }
            process.desk.notices.clear();
            let desk = &mut process.desk;
            let (wishes, wishes_end) = desk.pending_adds.count(now.since_boot);
            let (address_requests, requests_end) = desk.address_requests.current(now.since_boot);
            let serving = ServiceView {
                pending_adds: wishes,
                address_requests,
                wishes_end: wishes_end.into_iter().chain(requests_end).min(),
                turned_away: process.desk.turned_away.clone(),
                trouble: process.trouble.clone(),
                unrecorded: process.holdings.problem(),
                is_missing: process.worker.is_ok() && !is_there,
            };
            let mut effects = Vec::new();
            let wake = process.machine.turn(serving, &now, &mut effects);
            let mut answered = false;
            for effect in effects {
                if let Some(event) = self.carry(id, effect)
                    && let Some(process) = self.process(id)
                {
                    process.machine.on(event, &now);
                    answered = true;
                }
            }
            if answered {
                continue;
            }
            let delay = self.host_until(id, wake).max(MS);
            self.turn_later(id, delay);
            return Ok(());
        }
    }

    /// Starts an effect. If the effect takes no time, returns its answer.
    fn carry(&mut self, id: usize, effect: AgentEffect) -> Option<AgentEvent> {
        let lag = self.rng.stretch(MS / 4, 20 * MS);
        match effect {
            AgentEffect::Ask(question) => self.ask_question(id, question, lag),
            AgentEffect::Prove(candidates, boot) => {
                let is_lost = self.is_down() || self.rng.chance(500);
                let of_pods = candidates.iter().any(|it| it.reason.is_of_pod());
                let pods = (of_pods && !is_lost).then(|| self.list_pods_of_host(id));
                self.process_due(id, lag, ProcessAct::Prove(candidates, boot, pods));
            }
            AgentEffect::Probe(targets) => self.probe_host(id, None, &targets),
            AgentEffect::WriteStatus {
                version, status, ..
            } => {
                let version = version.parse().unwrap();
                self.send_from_host(id, Writing::Status(version, status));
            }
            AgentEffect::WriteList {
                owner,
                is_new,
                list,
            } => {
                let owner: ObjectUid = owner.as_str().into();
                self.send_from_host(id, Writing::List(owner, is_new, list));
            }
            AgentEffect::WriteFiles { .. } => {
                return Some(AgentEvent::Files(FilesReported::default()));
            }
            AgentEffect::Announce(allocation) => self.announce(id, &allocation, lag),
            AgentEffect::Masquerade { .. } => return Some(AgentEvent::Masqueraded(None)),
            AgentEffect::AskNamespace(name) => {
                let is_lost = self.is_down() || self.has_faults && self.rng.chance(500);
                let known = (!is_lost).then(Namespace::default);
                let event = AgentEvent::Namespace(name, known);
                self.process_due(id, lag, ProcessAct::Tell(Box::new(event)));
            }
            AgentEffect::Offer { watched, is_news } => {
                self.process(id)?.shown = watched;
                if is_news {
                    self.wake_adds(id, |_, it| matches!(it, Waiting::Pod(_)));
                }
            }
            AgentEffect::Held => self.wake_adds(id, |_, it| matches!(it, Waiting::Block(_))),
            AgentEffect::TurnedAwayReported => self.process(id)?.desk.turned_away = None,
            AgentEffect::Emit(notice) => {
                self.log_host(id, || {
                    format!("agent {id} reports: {} {}", notice.reason, notice.note)
                });
            }
            AgentEffect::Ready(..)
            | AgentEffect::Holding(_)
            | AgentEffect::LeakCandidates(_)
            | AgentEffect::Count(_) => {}
        }
        None
    }

    /// Asks the runtime and the kernel about leak candidates, and passes the proven leaks to the agent. `pods` is what
    /// the API server has answered.
    fn prove_host(
        &mut self,
        id: usize,
        candidates: Vec<LeakedAttachment>,
        boot: String,
        pods: Option<&Pods>,
    ) {
        let now = self.host_now(id);
        let is_silent = self.has_faults && self.rng.chance(1_000);
        let host = self.host_mut(id);
        let paths = candidates.iter().map(LeakedAttachment::netns);
        let paths = paths.filter(|path| !path.is_empty());
        let (present, gone) = paths
            .map(str::to_owned)
            .partition(|it| host.kubelet.has_netns(it));
        let evidence = NodeEvidence {
            boot,
            sandboxes: (!is_silent).then(|| host.kubelet.containers()),
            gone,
            present,
        };
        let proven = candidates.into_iter();
        let proven = proven.filter(|it| it.is_proven(pods, &evidence));
        let proven = proven.map(|it| (it.record.attachment, it.reason)).collect();
        if let Some(process) = &mut host.process {
            process.machine.on(AgentEvent::Proven(proven), &now);
        }
    }

    /// Sends a write to the API server, which may lose or delay it.
    fn send_from_host(&mut self, id: usize, writing: Writing) {
        let mut there = self.rng.stretch(MS, 20 * MS);
        let is_lost = self.has_faults && self.rng.chance(self.plan.network.lost_before);
        if self.has_faults && self.rng.chance(self.plan.network.late) {
            there = self.rng.stretch(SECOND, 120 * SECOND);
        }
        let host = self.host(id);
        let incarnation = host.incarnation;
        if is_lost || self.is_down() {
            let lag = self.rng.stretch(20 * MS, API_LIMIT);
            self.process_due(id, lag, ProcessAct::Tell(Box::new(writing.failed())));
            return;
        }
        let is_heard = there <= API_LIMIT;
        if !is_heard {
            let failed = ProcessAct::Tell(Box::new(writing.failed()));
            self.process_due(id, API_LIMIT, failed);
        }
        let write = AgentWrite {
            incarnation,
            writing,
            is_heard,
        };
        self.after(there, Due::AgentWrite(id, Box::new(write)));
    }

    /// Executes a write of an agent that arrives at the API server.
    pub fn write_arrives(&mut self, id: usize, write: AgentWrite) -> Verdict {
        let AgentWrite {
            incarnation,
            writing,
            is_heard,
        } = write;
        let name = self.machines.hosts[id].name.clone();
        let is_traced = self.trace.is_on();
        let (mut has_withdrawn, mut has_released) = (false, false);
        let (text, event) = match writing {
            Writing::Status(version, status) => {
                let text = is_traced.then(|| serde_json::to_string(&status).unwrap());
                has_withdrawn = self.reports_more_withdrawn(&name, &status);
                has_released = self.reports_more_released(&name, &status);
                if self.reports_other_conflicts(&name, &status) {
                    self.machines.conflicts_changed = self.now;
                }
                let check = self.check_released(id, &status);
                let stored = self.api.publish_status(&name, version, *status);
                if stored.is_some() {
                    check?;
                }
                let event = match stored {
                    Some((version, status)) => WriteOutcome::Done {
                        version: version.to_string(),
                        status: Box::new(status),
                        cut: None,
                    },
                    None if self.api.subnets.get(&name).is_some() => WriteOutcome::Outdated,
                    None => WriteOutcome::Failed,
                };
                let taken = matches!(event, WriteOutcome::Done { .. });
                (
                    text.map(|text| format!("{text}, taken: {taken}")),
                    AgentEvent::Written(event),
                )
            }
            Writing::List(owner, is_new, list) => {
                let done = self.api.write_addresses(&name, &owner, is_new, *list);
                let listed = if done {
                    ListOutcome::Done(None)
                } else {
                    ListOutcome::Failed
                };
                let text = is_traced.then(|| format!("its list, taken: {done}"));
                (text, AgentEvent::Listed(listed))
            }
        };
        if let Some(text) = text {
            self.log_host(id, || format!("agent {id} says {text}"));
        }
        if matches!(&event, AgentEvent::Written(WriteOutcome::Done { .. })) {
            self.machines.hosts[id].has_old_report = false;
            self.machines.last_write = self.now;
        }
        if is_heard {
            let lost = self.has_faults && self.rng.chance(self.plan.network.lost_after);
            let lag = if lost {
                API_LIMIT
            } else {
                self.rng.stretch(MS, 20 * MS)
            };
            let event = match (lost, event) {
                (false, event) => event,
                (true, AgentEvent::Written(_)) => AgentEvent::Written(WriteOutcome::Failed),
                (true, _) => AgentEvent::Listed(ListOutcome::Failed),
            };
            let act = Box::new(ProcessAct::Tell(Box::new(event)));
            self.after(lag, Due::Process(id, incarnation, act));
        }
        if has_released && self.has_faults && self.plan.reboots > 0 && self.rng.chance(3_000) {
            let length = self.absence();
            self.reboot_host(id, length);
        }
        if has_withdrawn
            && self.has_faults
            && self.plan.fatal_reports > 0
            && self.rng.chance(self.plan.fatal_reports)
        {
            let length = self.absence();
            self.kill_process(id);
            // Some processes stay down until the API server is restored. The restore starts all agents.
            let is_long = self.is_backed_up() && !self.was_restored() && self.rng.chance(5_000);
            if !is_long {
                self.start_process_later(id, length);
            }
        }
        self.settle_commits(Author::Agent, self.now)
    }

    /// Whether a status of the node reports other addresses in conflict than the node's previous status.
    fn reports_other_conflicts(&self, name: &NodeName, status: &NodeSubnetStatus) -> bool {
        let before = self.api.status_of(name);
        let before = before.map_or(&[][..], |it| &it.conflicts);
        let addresses = |all: &[AddressConflict]| -> Vec<String> {
            all.iter().map(|it| it.address.clone()).collect()
        };
        addresses(before) != addresses(&status.conflicts)
    }

    /// Whether a status of the node reports blocks as released that the node's previous status did not report so.
    fn reports_more_released(&self, name: &NodeName, status: &NodeSubnetStatus) -> bool {
        let before = self.api.status_of(name);
        let before = before.map_or(&[][..], |it| &it.blocks);
        let released = |all: &[BlockStatus]| -> BTreeSet<String> {
            let released = all.iter().filter(|it| it.released);
            released.map(|it| it.uid.clone()).collect()
        };
        !released(&status.blocks).is_subset(&released(before))
    }

    /// Whether a status of the node reports ranges as withdrawn that the node's previous status did not report.
    fn reports_more_withdrawn(&self, name: &NodeName, status: &NodeSubnetStatus) -> bool {
        let before = self.api.status_of(name);
        let before = before.map_or(&[][..], |it| &it.withdrawn);
        status.withdrawn.iter().any(|it| !before.contains(it))
    }
}

/// A write of an agent to the API server.
pub enum Writing {
    /// The version of the NodeSubnet that the status is based on, and the status.
    Status(u64, Box<NodeSubnetStatus>),
    /// The UID of the owning NodeSubnet, whether the object is new, and the list.
    List(ObjectUid, bool, Box<NodeAddressesSpec>),
}

impl Writing {
    fn failed(&self) -> AgentEvent {
        match self {
            Writing::Status(..) => AgentEvent::Written(WriteOutcome::Failed),
            Writing::List(..) => AgentEvent::Listed(ListOutcome::Failed),
        }
    }
}

/// A write of an agent on its way to the API server.
pub struct AgentWrite {
    incarnation: u32,
    writing: Writing,
    /// Whether the agent still waits for the answer.
    is_heard: bool,
}

impl AgentWrite {
    /// Returns the failure that the agent sees if the connection is lost, or `None` if the agent no longer waits.
    pub fn lost(&self) -> Option<(u32, ProcessAct)> {
        let failed = ProcessAct::Tell(Box::new(self.writing.failed()));
        self.is_heard.then_some((self.incarnation, failed))
    }
}
