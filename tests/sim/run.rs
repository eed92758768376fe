//! Runs one seed: executes scheduled events one after the other, in the order of virtual time.
//!
//! Nothing waits in real time, and the seed is the only source of randomness. So a failing seed fails again in the same
//! way.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_api::Requests;
use cadastre_controller::OutgoingRequest;
use cadastre_controller::cluster::lease::{LeaseAnswer, LeaseCall, LeaseRecord};
use cadastre_controller::cluster::names::{ClaimName, NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{Node, Text};
use cadastre_controller::cluster::request::{RequestId, RequestOutcome};
use jiff::Timestamp;

use super::api::{Api, Author, Commit};
use super::budget::Budget;
use super::checks::{Checks, Verdict, Violation};
use super::claims::ClaimRecords;
use super::clock::{Clocks, MS, SECOND, Time};
use super::host::{AgentWrite, KubeletAct, ProcessAct};
use super::machines::{Act, Machines};
use super::migrations::MigrationRecords;
use super::mutations::Trial;
use super::persistent_fault::PersistentFault;
use super::plan::Plan;
use super::process::{Process, Run, Watched};
use super::proofs::Scenario;
use super::restore::Backup;
use super::rng::Rng;
use super::scripts::Script;
use super::served::{LOOK, Served};
use super::trace::Trace;
use super::withdrawn::Withdrawn;
use super::workload::World;

/// How many of ten thousand seeds restore the API server to an older state.
const RESTORES: u32 = 1_500;

/// How many of ten thousand seeds have unreliable monotonic clocks.
const CLOCKS: u32 = 3_000;

/// In how many of ten thousand seeds the Lease loses intents (allocations that may be in flight), as if a leader of an
/// earlier version had written it.
const UNNAMED: u32 = 1_000;

/// An event that is scheduled for a virtual time.
pub enum Due {
    /// Objects change, as users, kubelets and other programs change them.
    Work,
    /// The change with this number happens in a run that follows a script.
    Script(usize),
    /// The faults and changes end. From then on, everything has to settle until the end of the run.
    EndFaults,
    Fault,
    Start(usize),
    /// The node of a late write changes before the write takes effect.
    Disturb(NodeName),
    /// Many nodes are created at once.
    CreateNodes,
    /// A process ends without releasing the Lease.
    Crash(RunId),
    /// A process asks its controller for requests.
    CallController(RunId),
    /// A process asks its elector for the next request about the Lease.
    CallElector(RunId),
    /// A changed leadership is passed to a controller.
    PassLeadership(RunId),
    Deliver(RunId, Watched),
    /// A request is sent if the check of the lease permits it.
    Send(RunId, RequestId),
    /// A request takes effect at the API server.
    Arrive(RunId, Box<OutgoingRequest>, Reply),
    Answer(RunId, RequestId, Box<RequestOutcome>),
    /// A request about the Lease takes effect. The time is the renewal time that the request writes.
    LeaseArrive(RunId, Box<(LeaseCall, Timestamp)>, Reply),
    LeaseAnswer(RunId, Box<LeaseAnswer>),
    /// A candidate's watch delivers the Lease.
    LeaseWatched(RunId, Box<LeaseRecord>),
    /// A graceful stop runs out of time.
    StopTimeout(RunId),
    /// The check for waiting nodes runs.
    CheckServed,
    Machine(usize, Act),
    /// An event of one run of an agent's process. The second number says which run.
    Process(usize, u32, Box<ProcessAct>),
    /// An event of an agent's kubelet. If the host has booted again, the event is dropped.
    Kubelet(usize, u32, Box<KubeletAct>),
    /// A restart of the agent. If the host has booted again, the restart is dropped.
    StartAgent(usize, u32),
    /// A write of an agent arrives at the API server.
    AgentWrite(usize, Box<AgentWrite>),
    /// The kubelet reports the addresses of the pod with this UID.
    PodReports(ObjectUid),
    /// The pod with this name finishes.
    PodFinishes(Text),
    /// A virtual machine that migrates runs in the pod.
    Migrated(Text),
    /// KubeVirt creates an IPAMClaim (name).
    IpamClaim(ClaimName),
    /// A user removes the finalizer of a node (name, UID).
    RemoveFinalizer(NodeName, ObjectUid),
    PodGone(Text),
    /// A user sets the requests in a NodeSubnet's annotations back to these earlier requests.
    AskAgain(NodeName, Box<Requests>),
    /// A backup of the API server is made.
    Backup,
    /// The API server is restored from the backup.
    Restore,
    /// A host whose Node the server has lost registers again.
    Register(Box<Node>),
    /// A user deletes a Node whose host is gone (name, UID).
    DeleteNode(NodeName, ObjectUid),
    /// The kubelet of a Node (name, UID) reports how many pods the Node may run.
    MaxPods(NodeName, ObjectUid, u16),
}

impl Due {
    /// The run of a controller process that handles the event. If the process is paused, it handles the event later. If
    /// the run has ended, the event is dropped.
    pub fn handler(&self) -> Option<RunId> {
        match self {
            Due::CallController(run_id)
            | Due::CallElector(run_id)
            | Due::PassLeadership(run_id)
            | Due::Deliver(run_id, _)
            | Due::Send(run_id, _)
            | Due::Answer(run_id, ..)
            | Due::LeaseAnswer(run_id, _)
            | Due::LeaseWatched(run_id, _)
            | Due::StopTimeout(run_id) => Some(*run_id),
            _ => None,
        }
    }

    /// Whether the event needs the API server. If so, the event is delayed while the server is down.
    fn waits(&self) -> bool {
        matches!(
            self,
            Due::Work
                | Due::Script(_)
                | Due::Disturb(_)
                | Due::CreateNodes
                | Due::RemoveFinalizer(..)
                | Due::PodGone(_)
                | Due::AskAgain(..)
                | Due::PodReports(_)
                | Due::PodFinishes(_)
                | Due::Migrated(_)
                | Due::IpamClaim(_)
                | Due::Register(_)
                | Due::DeleteNode(..)
                | Due::MaxPods(..)
        )
    }
}

/// One run of one controller process; `incarnation` counts the runs of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunId {
    pub process: usize,
    pub incarnation: u32,
}

/// The time at which the sender of an executed request gets the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    After(Time),
    /// The answer never arrives. The sender learns separately that the outcome is indeterminate.
    Never,
}

macro_rules! tally {
    ($($(#[$doc:meta])* $field:ident: $what:literal,)*) => {
        /// Totals of a run that succeeded.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Tally {
            /// The hash of the trace, if a trace is recorded.
            pub trace: u64,
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Tally {
            pub fn add(&mut self, other: &Tally) {
                $(self.$field += other.$field;)*
            }
        }

        impl std::fmt::Display for Tally {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let counts = [$((self.$field, $what)),*];
                let counts = counts.map(|(count, what)| format!("{count} {what}"));
                f.write_str(&counts.join(", "))
            }
        }
    };
}

tally! {
    steps: "steps",
    assigned: "podCIDRs assigned",
    freed: "records of podCIDRs ended",
    listed: "blocks listed",
    ended: "blocks ended",
    given: "addresses given",
    takeovers: "terms",
    /// Takeovers that needed no list although there was no clean hand-over.
    unlisted: "of them without a list",
    /// How often a watch delivered a write of the Lease to a standby.
    shown: "Leases shown to standbys",
    averted_by_uid: "duplicates averted only by the test of the node's UID",
    averted_by_term: "only by the test of the term",
    restores: "restores",
    /// Blocks that a restored API server had lost and that were adopted.
    adopted: "blocks adopted",
    withdrawn: "ranges withdrawn",
    claims: "claims that got addresses",
    claimed: "addresses of claims given",
    sticky: "of them to pods of a StatefulSet",
    asked: "addresses given to pods that ask for them",
    asked_by_claim: "of them by a claim",
    asked_by_cni: "of these for the runtime",
    handed_over: "addresses handed over to claims",
    expired: "claims deleted after their use",
    standbys: "nodes that became standbys for a migration",
    migrated: "blocks whose standby became the owner",
    lent: "parts of blocks lent",
    given_back: "of them given back",
}

/// A run that failed.
#[derive(Debug)]
pub struct Failure {
    pub seed: u64,
    pub step: u64,
    pub violation: Violation,
    pub trace: String,
}

pub struct Sim {
    pub now: Time,
    pub step: u64,
    pub rng: Rng,
    pub plan: Plan,
    /// Whether objects still change and faults still happen.
    pub has_faults: bool,
    pub api: Api,
    pub processes: Vec<Process>,
    pub checks: Checks,
    pub budget: Budget,
    pub trace: Trace,
    pub trial: Option<Trial>,
    /// Writes that were sent and are not executed yet, each with the time at which the sender decided on it. The key is
    /// the sender and the id of the request.
    pub on_wire: BTreeMap<(RunId, RequestId), (OutgoingRequest, Time)>,
    pub world: World,
    pub machines: Machines,
    pub served: Served,
    pub withdrawn: Withdrawn,
    pub claims: ClaimRecords,
    pub migrations: MigrationRecords,
    pub backup: Option<Backup>,
    /// The script that decides which objects change. Without a script, the seed decides.
    pub script: Option<&'static Script>,
    /// The time until which the API server does not answer.
    pub down_until: Time,
    /// Names of the Nodes that a restore has lost and that will register again.
    pub registering: BTreeSet<NodeName>,
    /// The scheduled events, by time. Events of the same time are in the order in which they were scheduled.
    schedule: BTreeMap<(Time, u64), Due>,
    /// How many events were scheduled so far, which orders events of the same time.
    scheduled: u64,
}

impl Sim {
    pub fn new(seed: u64, trial: Option<Trial>, trace: Trace) -> Self {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng);
        let scenario = trial.map_or(Scenario::AsDrawn, |trial| trial.scenario);
        let plan = plan.under(scenario);
        // A separate generator draws restores, wrong clocks and other special conditions, so that the other draws of
        // the seed stay the same.
        let mut chance = Rng::new(!seed);
        let draw = |chance: &mut Rng, only_in: Scenario, share| match scenario {
            Scenario::AsDrawn => chance.chance(share),
            _ => scenario == only_in,
        };
        let restored = draw(&mut chance, Scenario::Restored, RESTORES);
        let restored = restored || scenario == Scenario::Withdrawals;
        let has_clocks = draw(&mut chance, Scenario::BadClocks, CLOCKS);
        let plan = if restored {
            plan.with_restore(&mut chance)
        } else if has_clocks {
            // In half of the runs with bad clocks, clocks only lose time. So the checks still demand that nothing
            // happens too early.
            plan.with_bad_clocks(chance.chance(5_000))
        } else {
            plan
        };
        // A trial of a mutation has no persistent fault, because it has conditions of its own. A run with a restore has
        // none either, because the agent of a Node that the restore has removed must be able to write its NodeSubnet.
        let persistent_fault = match trial {
            None if plan.restore.is_none() => {
                let mut rng = Rng::new(seed.rotate_left(32) ^ !0);
                PersistentFault::draw(&mut rng, plan.processes)
            }
            _ => None,
        };
        // A trial of a mutation has no sticky pods, because no mutation needs them.
        let sticky = match trial {
            None if plan.claims > 0 => {
                *Rng::new(seed.rotate_left(16) ^ !0).pick(&[0, 1_500, 4_000])
            }
            _ => 0,
        };
        let asking = match trial {
            None if plan.claims > 0 => {
                *Rng::new(seed.rotate_left(48) ^ !0).pick(&[0, 1_000, 4_000])
            }
            _ => plan.asking,
        };
        let migrating = match trial {
            None if plan.claims > 0 => *Rng::new(seed.rotate_left(40) ^ !0).pick(&[0, 0, 3_000]),
            _ => plan.migrating,
        };
        let plan = Plan {
            migrating,
            sticky,
            asking,
            persistent_fault,
            ..plan
        };
        // A separate generator decides whether nodes borrow, so that the other draws stay the same.
        let plan = match trial {
            None if plan.blocks > 0 => {
                let mut rng = Rng::new(seed.rotate_left(48) ^ !0);
                match rng.below(6) {
                    0 if plan.restore.is_none() => plan.under(Scenario::Lending),
                    1..3 => Plan {
                        borrowing: 5_000,
                        ..plan
                    },
                    _ => plan,
                }
            }
            _ => plan,
        };
        // A separate generator decides whether pools require probes, so that the other draws stay the same.
        let plan = match trial {
            None if plan.blocks > 0 => Plan {
                probing: *Rng::new(seed.rotate_left(24) ^ !0).pick(&[0, 0, 0, 5_000]),
                ..plan
            },
            _ => plan,
        };
        let forgets_intents = draw(&mut chance, Scenario::NoIntents, UNNAMED);
        let mut sim = Sim::under(plan, rng, trial, trace);
        sim.api.forgets_intents = forgets_intents;
        sim.trace
            .push((0, 0), None, || format!("seed {seed}: {:?}", sim.plan));
        sim.populate();
        sim.begin();
        sim.after(MS, Due::Work);
        sim.after(sim.plan.fault_every, Due::Fault);
        if let Some((backup, restore)) = sim.plan.restore {
            sim.after(backup, Due::Backup);
            sim.after(restore, Due::Restore);
        }
        sim
    }

    /// Returns a run under these conditions, with an empty API server and no process.
    pub fn under(plan: Plan, rng: Rng, trial: Option<Trial>, trace: Trace) -> Self {
        Sim {
            now: 0,
            step: 0,
            has_faults: true,
            api: Api::default(),
            processes: Vec::new(),
            checks: Checks::new(plan.clocks_lie(), plan.skew),
            budget: Budget::of_pace(if plan.clocks_hurry() { 10 } else { 1 }),
            trace,
            trial,
            on_wire: BTreeMap::new(),
            world: World::default(),
            machines: Machines::default(),
            served: Served::default(),
            withdrawn: Withdrawn::default(),
            claims: ClaimRecords::default(),
            migrations: MigrationRecords::default(),
            backup: None,
            script: None,
            down_until: 0,
            registering: BTreeSet::new(),
            schedule: BTreeMap::new(),
            scheduled: 0,
            plan,
            rng,
        }
    }

    /// Schedules the start of the controller processes, the checks, and the end of the faults.
    pub fn begin(&mut self) {
        for process in 0..self.plan.processes {
            let rate = 1_000_000 - self.plan.skew + self.rng.below(2 * self.plan.skew + 1);
            let clocks = Clocks::new(rate);
            self.processes.push(Process {
                clocks,
                incarnation: 0,
                paused_until: 0,
                cut_until: 0,
                run: None,
            });
            let at = self.rng.below(5 * SECOND);
            self.after(at, Due::Start(process));
        }
        self.after(LOOK, Due::CheckServed);
        self.after(self.plan.faults_for, Due::EndFaults);
    }

    /// Runs a seed to its end. If the seed fails, runs it again with a trace.
    pub fn run(seed: u64, trial: Option<Trial>) -> Result<Tally, Failure> {
        let mut sim = Sim::new(seed, trial, Trace::default());
        if let Err(violation) = sim.go(u64::MAX) {
            let mut again = Sim::new(seed, trial, Trace::on());
            let _ = again.go(u64::MAX);
            let trace = again.trace.tail(&violation.names);
            return Err(Failure {
                seed,
                step: sim.step,
                violation,
                trace,
            });
        }
        Ok(sim.tally())
    }

    /// Runs to the end of the plan, or until more than `most` steps are done.
    pub fn go(&mut self, most: u64) -> Verdict {
        let end = self.plan.faults_for + self.plan.settling();
        while !self.is_over() {
            let next = self.schedule.pop_first().filter(|it| it.0.0 <= end);
            let Some(((at, _), due)) = next else {
                self.now = end;
                break;
            };
            self.now = at;
            self.take(due)?;
            if self.step > most {
                return Ok(());
            }
        }
        let verdict = self.check_end();
        self.judge(verdict)
    }

    /// Returns the verdict. A mutation may break several rules, so a trial of a mutation ignores violations of all
    /// rules except the rule of the trial.
    pub fn judge(&self, verdict: Verdict) -> Verdict {
        verdict.or_else(|violation| match self.trial {
            Some(Trial {
                rule: Some(rule), ..
            }) if violation.rule != rule => Ok(()),
            _ => Err(violation),
        })
    }

    pub fn tally(&self) -> Tally {
        Tally {
            steps: self.step,
            trace: self.trace.hash(),
            averted_by_uid: self.api.averted.0,
            averted_by_term: self.api.averted.1,
            ..self.checks.tally
        }
    }

    fn take(&mut self, due: Due) -> Verdict {
        self.step += 1;
        if self.is_down() && due.waits() {
            let lag = self.rng.stretch(MS, SECOND);
            self.after(self.down_until - self.now + lag, due);
            return Ok(());
        }
        self.deviate(&due);
        if let Some(run_id) = due.handler() {
            if self.is_paused(run_id) {
                let until = self.processes[run_id.process].paused_until;
                self.after(until - self.now, due);
                return Ok(());
            }
            if !self.is_alive(run_id) {
                return Ok(());
            }
        }
        match due {
            Due::Work => self.work(),
            Due::Script(nth) => self.follow_script(nth),
            Due::EndFaults => self.end_faults(),
            Due::Fault => self.fault(),
            Due::Start(process) => self.start(process),
            Due::Disturb(name) => self.disturb(&name),
            Due::CreateNodes => self.rush(),
            Due::Crash(run_id) if self.is_alive(run_id) => self.end(run_id, "crashes"),
            Due::Crash(_) => {}
            Due::CallController(run_id) => return self.look(run_id),
            Due::CallElector(run_id) => self.poll_lease(run_id),
            Due::PassLeadership(run_id) => return self.tell(run_id),
            Due::Deliver(run_id, kind) => return self.deliver(run_id, kind),
            Due::Send(run_id, id) => return self.send(run_id, id),
            Due::Arrive(run_id, outgoing, reply) => return self.arrive(run_id, &outgoing, reply),
            Due::Answer(run_id, id, outcome) => return self.answer(run_id, id, *outcome),
            Due::LeaseArrive(run_id, call, reply) => {
                return self.arrive_lease(run_id, *call, reply);
            }
            Due::LeaseAnswer(run_id, answer) => self.answer_lease(run_id, *answer),
            Due::LeaseWatched(run_id, record) => self.show_lease(run_id, &record),
            Due::StopTimeout(run_id) => return self.wind_down(run_id),
            Due::RemoveFinalizer(name, uid) => self.remove_finalizer(&name, &uid),
            Due::PodGone(name) => self.pod_gone(&name),
            Due::AskAgain(name, requests) => self.ask_again(&name, *requests),
            Due::CheckServed => {
                let verdict = self.look_who_waits();
                return self.judge(verdict);
            }
            Due::Backup => self.back_up(),
            Due::Restore => self.restore(),
            Due::Register(node) => self.register_anew(*node),
            Due::DeleteNode(name, uid) => self.delete_orphaned_node(&name, &uid),
            Due::MaxPods(name, uid, max_pods) => self.report_max_pods(&name, &uid, max_pods),
            Due::Machine(id, act) => self.act(id, &act),
            Due::Process(id, run, act) => return self.process_acts(id, run, act),
            Due::Kubelet(id, boot, act) => return self.kubelet_acts(id, boot, *act),
            Due::StartAgent(id, boot) => self.revive_process(id, boot),
            Due::AgentWrite(id, write) => return self.write_arrives(id, *write),
            Due::PodReports(uid) => self.pod_reports(&uid),
            Due::PodFinishes(name) => self.pod_finishes(&name),
            Due::Migrated(name) => self.pod_is_migrated_to(&name),
            Due::IpamClaim(name) => self.put_ipam_claim(&name),
        }
        Ok(())
    }

    /// Schedules an event `delay` from now.
    pub fn after(&mut self, delay: Time, due: Due) {
        self.scheduled += 1;
        self.schedule
            .insert((self.now + delay, self.scheduled), due);
    }

    /// Makes postponed events due now. They were postponed because their process was paused or cut off.
    pub fn resume(&mut self) {
        let now = self.now;
        let schedule = std::mem::take(&mut self.schedule).into_iter();
        let moved = schedule.map(|((at, order), due)| match due {
            Due::PassLeadership(_) | Due::Send(..) | Due::Answer(..) | Due::LeaseAnswer(..) => {
                ((at.min(now), order), due)
            }
            due => ((at, order), due),
        });
        self.schedule = moved.collect();
        for process in 0..self.processes.len() {
            let run_id = self.run_id(process);
            self.after(0, Due::CallElector(run_id));
            self.after(0, Due::CallController(run_id));
        }
    }

    /// Returns the id of a process's present run, or of its last run if the process is down.
    pub fn run_id(&self, process: usize) -> RunId {
        RunId {
            process,
            incarnation: self.processes[process].incarnation,
        }
    }

    pub fn is_down(&self) -> bool {
        self.now < self.down_until
    }

    /// Ends every connection to the API server. Requests that the server has not executed yet are lost, and their
    /// outcome is indeterminate.
    pub fn hang_up(&mut self) {
        self.on_wire.clear();
        let lose = |due| match due {
            Due::Arrive(_, _, Reply::Never) | Due::LeaseArrive(_, _, Reply::Never) => None,
            Due::Arrive(run_id, outgoing, Reply::After(_)) => {
                let outcome = RequestOutcome::Indeterminate("the connection was lost".to_owned());
                Some(Due::Answer(run_id, outgoing.id, Box::new(outcome)))
            }
            Due::AgentWrite(id, write) => {
                let (run, act) = write.lost()?;
                Some(Due::Process(id, run, Box::new(act)))
            }
            Due::LeaseArrive(run_id, _, Reply::After(_)) => {
                Some(Due::LeaseAnswer(run_id, Box::new(LeaseAnswer::Unclear)))
            }
            due => Some(due),
        };
        let schedule = std::mem::take(&mut self.schedule).into_iter();
        let kept = schedule.filter_map(|(key, due)| Some((key, lose(due)?)));
        self.schedule = kept.collect();
    }

    /// The run with this id, or `None` if that run has ended.
    pub fn run_of(&self, run_id: RunId) -> Option<&Run> {
        let process = &self.processes[run_id.process];
        let run = process.run.as_ref();
        run.filter(|_| process.incarnation == run_id.incarnation)
    }

    pub fn is_alive(&self, run_id: RunId) -> bool {
        self.run_of(run_id).is_some()
    }

    pub fn is_paused(&self, run_id: RunId) -> bool {
        self.is_alive(run_id) && self.processes[run_id.process].paused_until > self.now
    }

    pub fn log(&mut self, about: Option<&str>, text: impl FnOnce() -> String) {
        self.trace.push((self.step, self.now), about, text);
    }

    /// Passes all changes since the last call of this function to the watches, the agents and the checks.
    pub fn settle_commits(&mut self, author: Author, decided: Time) -> Verdict {
        let commits = std::mem::take(&mut self.api.commits);
        let mut kinds = Vec::new();
        for commit in &commits {
            let kind = match commit {
                Commit::Node(..) => Watched::Nodes,
                Commit::Pool(..) => Watched::Pools,
                Commit::Subnet(..) => Watched::Subnets,
                Commit::Block(..) => Watched::Blocks,
                Commit::ServiceRange(..) => Watched::Services,
                Commit::Pod(..) => Watched::Pods,
                Commit::Claim(..) => Watched::Claims,
                Commit::Routes(..) => Watched::Routes,
                Commit::FrrConfiguration(..) => Watched::FrrConfigurations,
                Commit::Addresses(..) => continue,
            };
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        for kind in kinds {
            for process in 0..self.processes.len() {
                self.schedule_delivery(self.run_id(process), kind);
            }
        }
        for commit in &commits {
            self.tell_agents(commit);
            if let Commit::Node(None, Some(born)) = commit {
                self.budget.born(&born.name);
            }
        }
        for commit in commits {
            if let Commit::Subnet(before, after) = &commit {
                let verdict = self.check_withdrawn(before.as_deref(), after.as_deref());
                self.judge(verdict)?;
            }
            if let Commit::Block(before, after) = &commit {
                let verdict = self.check_holders(author, before.as_deref(), after.as_deref());
                self.judge(verdict)?;
            }
            if let Commit::Subnet(before, _) = &commit {
                self.note_unlisted(before.as_deref());
            }
            if let (Commit::Block(Some(block), None), Author::Controller(_)) = (&commit, author) {
                let verdict = self.check_unrouted(block);
                self.judge(verdict)?;
            }
            if let Commit::Claim(before, after) = &commit {
                let writer = (author, decided);
                let verdict = self.check_claim(writer, before.as_deref(), after.as_deref());
                self.judge(verdict)?;
            }
            let received = match author {
                Author::Controller(run_id) => {
                    if let Commit::Subnet(before, after) = &commit {
                        let verdict = self.check_listed(before.as_deref(), after.as_deref());
                        self.judge(verdict)?;
                    }
                    let process = &self.processes[run_id.process];
                    let run = process.run.as_ref();
                    let run = run.filter(|_| process.incarnation == run_id.incarnation);
                    run.map(|run| &run.received)
                }
                Author::World | Author::Agent => None,
            };
            let times = (self.now, decided);
            let verdict = self
                .checks
                .committed(&commit, author, received, &self.api, times);
            self.judge(verdict)?;
        }
        Ok(())
    }

    /// Schedules the next delivery of a watch, after a random time.
    pub fn schedule_delivery(&mut self, run_id: RunId, kind: Watched) {
        if self.is_silent(run_id, kind) {
            return;
        }
        let process = &mut self.processes[run_id.process];
        let Some(run) = process.run.as_mut().filter(|run| run.has_read_lease) else {
            return;
        };
        let has_next = run.feeds.of(kind).has_next(&self.api);
        let deliveries = run.deliveries(kind);
        if deliveries.scheduled || !has_next {
            return;
        }
        deliveries.scheduled = true;
        let until = deliveries.held_until.max(process.cut_until);
        let held = until.max(self.down_until).saturating_sub(self.now);
        let lag = if self.has_faults && self.rng.chance(self.plan.network.lagging) {
            self.rng.stretch(SECOND, 300 * SECOND)
        } else {
            self.rng.stretch(MS, 30 * MS)
        };
        self.after(held + lag, Due::Deliver(run_id, kind));
    }

    pub fn boot(&mut self, process: usize) -> RunId {
        let machine = &mut self.processes[process];
        machine.incarnation += 1;
        let incarnation = machine.incarnation;
        // Sometimes the monotonic clock restarts, as after a reboot.
        if self.rng.chance(3_000) {
            machine.clocks.boot(self.now);
        }
        machine.run = Some(Run::new(process, incarnation, &self.plan));
        self.run_id(process)
    }
}
