//! Tries every small change of an ordinary run: each fault and each delay at each point, and all pairs of them.
//!
//! A *script* says which objects change. In the ordinary run of a script, nothing fails and everything is quick: each
//! draw of the simulation has its first outcome. A *deviation* is one draw with another outcome. For example, a request
//! is lost or takes effect much later, a process ends or stands still before its next event, a watch starts again with a
//! list, the store fails in the middle of a transaction, or an object changes before everybody knows of the last change.
//!
//! `make exhaustive` tries all runs with one deviation and, as far as time permits, all runs with two. Controllers and
//! agents are the shipped ones, and the checks are those of all other runs.
//!
//! | environment | meaning |
//! |---|---|
//! | `ONLY` | a part of a script's name |
//! | `FAULTS` | the maximum number of deviations of a run |
//! | `MINUTES` | the maximum time for each script |
//! | `DEVIATIONS` | [`replay`]: the deviations of one run, as a failure prints them |

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cadastre_api::{AllocationMode, BlockSizing, FirstBlock, IPPoolSpec, IPv4Ranges};
use cadastre_controller::cluster::objects::{MachineIdentity, Pod, Text};

use super::checks::Violation;
use super::clock::{MS, SECOND};
use super::exhaustive::new_node;
use super::plan::{Faults, Network, Plan};
use super::pool_workload::service;
use super::rng::Rng;
use super::run::{Due, Sim};
use super::search::number;
use super::seeds::{seed_of_commit, variable};
use super::settle::QUIET;
use super::trace::Trace;
use super::workload::addr;

/// How long the cluster usually has after a change, until the next change. It is enough for everything to settle.
const CALM: u64 = 8 * SECOND;
/// How long a pod runs on that was deleted by force: longer than the agent waits before it looks for a leak.
const FORCED: u64 = 40 * SECOND;
/// Long enough for a released address to be free again, and for its block to go to another node.
const COOLDOWN: u64 = 40 * SECOND;
/// How long a process stands still that pauses as a deviation.
const PAUSE: u64 = 25 * SECOND;

/// A run's deviations: the numbers of the draws, each with its outcome.
type Deviations = Vec<(usize, u8)>;

/// A change of an object.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// A machine registers as a Node with this name.
    Node(&'static str),
    /// The Node with this name is deleted.
    NodeGone(&'static str),
    /// A pod with this name is bound to this Node.
    Pod(&'static str, &'static str),
    /// The pod with this name is deleted.
    PodGone(&'static str),
    /// The pod with this name is deleted by force: it runs on for [`FORCED`].
    PodForced(&'static str),
    /// Nothing happens for [`COOLDOWN`].
    Cooldown,
}

/// The objects of a run and their changes, in this order.
pub struct Script {
    name: &'static str,
    pool: fn() -> IPPoolSpec,
    /// After a reboot, an agent's watches deliver nothing for this long.
    silence_after_reboot: u64,
    acts: &'static [Act],
}

/// What most scripts have: a pool with one block of two addresses.
const USUAL: Script = Script {
    name: "",
    pool: || pool(AllocationMode::Blocks, "10.245.0.0/31", 31),
    silence_after_reboot: 0,
    acts: &[],
};

static SCRIPTS: [Script; 5] = [
    Script {
        name: "podCIDRs: a node is replaced",
        pool: || pool(AllocationMode::NodeCIDR, "10.244.0.0/23", 24),
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "addresses: pods follow each other",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "blocks: from one node to another",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "forced: a pod is deleted that runs on",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodForced("w"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "return: a node that gave its block away wants one again",
        silence_after_reboot: 20 * SECOND,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::Pod("a", "x"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
];

fn pool(mode: AllocationMode, cidr: &str, block_size: u32) -> IPPoolSpec {
    IPPoolSpec {
        ipv4: Some(IPv4Ranges {
            cidrs: vec![cidr.to_owned()],
            block_size: Some(block_size),
            block_sizing: BlockSizing::Fixed,
            gateway: Some("None".to_owned()),
        }),
        first_block: FirstBlock::OnDemand,
        quarantine_seconds: 1,
        ..IPPoolSpec::new(mode, Vec::new(), Vec::new())
    }
}

/// The conditions of a script. Every fault is possible, and none is ordinary.
fn plan(script: &Script) -> Plan {
    let acts = u64::try_from(script.acts.len()).unwrap();
    let waits = script.acts.iter().map(|act| match act {
        Act::PodForced(_) => FORCED,
        Act::Cooldown => COOLDOWN,
        _ => 0,
    });
    Plan {
        processes: 2,
        names: 3,
        pools: 1,
        blocks: 10_000,
        slice: 23,
        crowded: false,
        limit: 4,
        faults_for: (acts + 1) * CALM + waits.sum::<u64>(),
        settle_for: 200 * SECOND,
        work_every: CALM,
        fault_every: 600 * SECOND,
        network: Network {
            lost_before: 1,
            lost_after: 1,
            late: 1,
            slow: 1,
            last_words: 0,
            refused: 1,
            busy: 1,
            rejected: 1,
            lagging: 1,
            gap: 1,
            lease_lost: 1,
        },
        faults: Faults::default(),
        skew: 0,
        foreign_allocator: false,
        tampering: false,
        tampering_blocks: false,
        claims: 0,
        agents: true,
        ..Plan::draw(&mut Rng::new(0))
    }
}

impl Sim {
    fn scripted(script: &'static Script, deviations: Deviations, trace: Trace) -> Self {
        let mut sim = Sim::under(plan(script), Rng::chosen(deviations), None, trace);
        sim.script = Some(script);
        sim.api.put(service("kubernetes", "10.96.0.0/16"));
        let uid = sim.api.uid();
        let pool = super::api::new_pool("pool".into(), uid, (script.pool)(), 0);
        sim.api.put(pool);
        sim.api.commits.clear();
        sim.checks.begin(&sim.api);
        sim.begin();
        sim.after(CALM, Due::Script(0));
        sim
    }

    /// Carries out the next change of the script.
    pub fn follow_script(&mut self, nth: usize) {
        let Some(act) = self.script.and_then(|it| it.acts.get(nth)) else {
            return;
        };
        match *act {
            Act::Node(name) => self.register_in_script(name, nth),
            Act::NodeGone(name) => self.delete_node_named(&name.into()),
            Act::Pod(node, name) => self.run_in_script(node, name),
            Act::PodGone(name) => {
                let name = format!("default/{name}");
                self.pod_gone(&name.as_str().into());
            }
            Act::PodForced(name) => {
                let name: Text = format!("default/{name}").as_str().into();
                if let Some(pod) = self.api.pods.get(&name).cloned() {
                    self.api.remove::<Pod>(&name);
                    self.pod_ends_after(&pod.uid, FORCED);
                }
            }
            Act::Cooldown => return self.after(COOLDOWN, Due::Script(nth + 1)),
        }
        self.publish();
        let pause = *self.rng.pick(&[CALM, 20 * MS, SECOND]);
        self.after(pause, Due::Script(nth + 1));
    }

    fn register_in_script(&mut self, name: &str, nth: usize) {
        let mut node = new_node(name.into(), self.api.uid());
        node.addresses = [addr(&format!("192.168.0.{}", nth + 1))].into();
        node.machine = MachineIdentity {
            provider_id: Some(format!("cloud://{nth}").into()),
            machine_id: Some(format!("m{nth}").into()),
        };
        self.log(Some(name), || format!("node {} is created", node.uid));
        self.settle_in(&node);
        self.api.put(node);
    }

    fn run_in_script(&mut self, node: &str, name: &str) {
        let Some(node) = self.api.nodes.get(node).cloned() else {
            return;
        };
        let uid = self.api.uid();
        let (uid, name) = self.put_pod(&node, uid, name, [].into(), None, None);
        if let Some(id) = self.machines.of_node.get(&node.uid).copied() {
            let on = (id, node.uid.clone());
            self.machines.of_pod.insert(uid.clone(), on);
            self.host_runs(id, &uid, &name);
        }
    }

    /// For how long an agent's watches deliver nothing after a reboot.
    pub fn silence_after_reboot(&self) -> u64 {
        self.script.map_or(0, |it| it.silence_after_reboot)
    }

    /// Whether a run that follows a script is over, although its time is not: nothing was requested for [`QUIET`] since
    /// the end of the faults, so nothing may happen any more.
    pub fn is_over(&self) -> bool {
        let (write, request) = (self.checks.last_write.0, self.checks.last_request.0);
        let last = write.max(request).max(self.machines.last_write);
        self.script.is_some() && self.now > last.max(self.plan.faults_for) + QUIET
    }

    /// Before an event of a process, lets the process end or stand still, if that is the deviation.
    pub fn deviate(&mut self, due: &Due) {
        if self.script.is_none() || !self.has_faults {
            return;
        }
        let until = self.now + PAUSE;
        if let Some(run_id) = due.handler() {
            if !self.is_alive(run_id) || self.is_paused(run_id) {
                return;
            }
            let kind = match due {
                Due::Deliver(_, kind) => Some(*kind),
                _ => None,
            };
            match (self.rng.index(3 + usize::from(kind.is_some())), kind) {
                (1, _) => self.end(run_id, "crashes"),
                (2, _) => {
                    self.log(None, || format!("{run_id} pauses"));
                    self.processes[run_id.process].paused_until = until;
                }
                (3, Some(kind)) => {
                    let run = self.processes[run_id.process].run();
                    run.feeds.of_mut(kind).relist();
                }
                _ => {}
            }
        } else if let Due::Process(id, ..) = due
            && self.host(*id).has_agent()
        {
            // The numbers of `inject_fault`: the agent is killed, the machine reboots, the agent hangs, its watches
            // start again, a pod gets a new sandbox, the store is lost.
            let faults = [
                None,
                Some(0),
                Some(20),
                Some(35),
                Some(55),
                Some(75),
                Some(85),
            ];
            if let Some(what) = *self.rng.pick(&faults) {
                self.inject_fault(*id, what);
            }
        } else if let Due::AgentWrite(id, _) = due
            && !self.host(*id).is_off
            && self.rng.index(2) == 1
        {
            // The machine loses its power while its agent's write is on its way.
            self.inject_fault(*id, 20);
        }
    }
}

/// A finished run: for each draw, how many outcomes it has; the number of steps; and a violation, if there is one.
struct Finished {
    counts: Vec<u8>,
    steps: u64,
    violation: Option<Violation>,
}

fn run(script: &'static Script, deviations: &Deviations) -> Finished {
    let mut sim = Sim::scripted(script, deviations.clone(), Trace::default());
    let violation = sim.go(u64::MAX).err();
    let outcomes = sim.rng.outcomes();
    Finished {
        counts: outcomes
            .map(|it| std::mem::take(&mut it.counts))
            .unwrap_or_default(),
        steps: sim.step,
        violation,
    }
}

/// Returns every way to add one deviation after the last one of a run.
fn more(deviations: &[(usize, u8)], counts: &[u8]) -> impl Iterator<Item = Deviations> {
    let first = deviations.last().map_or(0, |it| it.0 + 1);
    let draws = counts.iter().enumerate().skip(first);
    let all = draws.flat_map(|(at, count)| (1..*count).map(move |outcome| (at, outcome)));
    all.map(move |it| [deviations, &[it]].concat())
}

/// The extent of a search, and the first failure: the deviations and the violation.
#[derive(Default)]
struct Report {
    runs: u64,
    steps: u64,
    /// How many runs have one deviation, and for how many of them all further deviations were tried
    first: (usize, usize),
    failure: Option<(Deviations, Violation)>,
    elapsed: Duration,
}

/// The extent of a search.
#[derive(Clone, Copy)]
struct Limits {
    /// The maximum number of deviations of a run, at most two
    most: u64,
    time: Duration,
    /// Only every n-th first deviation is tried, from the one with the number `from` on
    every: usize,
    from: usize,
}

/// All runs with one deviation.
const EVERY_ONE: Limits = Limits {
    most: 1,
    time: Duration::MAX,
    every: 1,
    from: 0,
};

/// Tries all runs within the limits, with one thread for each processor, until the time is over or a run fails.
/// Each thread calls `prepare` first.
fn explore(script: &'static Script, limits: Limits, prepare: impl Fn() + Sync) -> Report {
    let Limits { most, time, .. } = limits;
    let begun = Instant::now();
    prepare();
    let ordinary = run(script, &Vec::new());
    let fails = ordinary.violation.map(|it| (Vec::new(), it));
    let first = more(&[], &ordinary.counts).skip(limits.from);
    let first: Vec<Deviations> = first.step_by(limits.every).collect();
    let (runs, steps) = (AtomicU64::new(1), AtomicU64::new(ordinary.steps));
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let is_over = AtomicBool::new(fails.is_some() || most == 0);
    let failure = Mutex::new(fails);
    let attempt = |deviations: &Deviations| {
        let finished = run(script, deviations);
        runs.fetch_add(1, Ordering::Relaxed);
        steps.fetch_add(finished.steps, Ordering::Relaxed);
        if let Some(violation) = finished.violation {
            let mut failure = failure.lock().unwrap();
            failure.get_or_insert((deviations.clone(), violation));
            is_over.store(true, Ordering::Relaxed);
        }
        if begun.elapsed() > time {
            is_over.store(true, Ordering::Relaxed);
        }
        finished.counts
    };
    let work = || {
        prepare();
        while !is_over.load(Ordering::Relaxed) {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            // A stride that is a prime spreads the runs over the script, in case the time does not suffice for all.
            let Some(one) = (nth < first.len()).then(|| &first[nth * 7_919 % first.len()]) else {
                break;
            };
            let counts = attempt(one);
            let second = more(one, &counts).take_while(|_| most > 1);
            for two in second {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                attempt(&two);
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    Report {
        runs: runs.into_inner(),
        steps: steps.into_inner(),
        first: (first.len(), done.into_inner()),
        failure: failure.into_inner().unwrap(),
        elapsed: begun.elapsed(),
    }
}

fn print(script: &Script, most: u64, report: &Report) {
    let (of, done) = report.first;
    println!(
        "{}, at most {most} deviations: {} runs, {} steps; complete for {done} of {of} first deviations; {:.0} s",
        script.name,
        report.runs,
        report.steps,
        report.elapsed.as_secs_f64()
    );
}

/// Panics with the trace of a run that fails.
fn fail(script: &'static Script, deviations: &Deviations, violation: &Violation) -> ! {
    let mut again = Sim::scripted(script, deviations.clone(), Trace::on());
    let _ = again.go(u64::MAX);
    let texts = deviations
        .iter()
        .map(|(at, outcome)| format!("{at}:{outcome}"));
    panic!(
        "{}: rule \"{}\" is broken: {}\nagain: DEVIATIONS={}\n{}",
        script.name,
        violation.rule,
        violation.text,
        texts.collect::<Vec<_>>().join(","),
        again.trace.tail(&violation.names)
    );
}

fn explore_all(limits: Limits) {
    let only = variable("ONLY").unwrap_or_default();
    for script in SCRIPTS.iter().filter(|it| it.name.contains(&only)) {
        let report = explore(script, limits, || {});
        print(script, limits.most, &report);
        if let Some((deviations, violation)) = &report.failure {
            fail(script, deviations, violation);
        }
    }
}

/// A run of all tests tries one of this many parts of all deviations. Which part depends on the commit. The number is a
/// prime, because all seeds of commits are multiples of ten.
const PARTS: usize = 23;

#[test]
fn some_deviations_hold() {
    explore_all(Limits {
        every: PARTS,
        from: usize::try_from(seed_of_commit().0 % PARTS as u64).unwrap(),
        ..EVERY_ONE
    });
}

/// Bugs that only a certain fault at a certain point reveals: each of them is found by one deviation of its script.
#[cfg(debug_assertions)]
#[test]
fn one_deviation_finds_mutations() {
    use cadastre_core::mutation::{self, Mutation};
    for (mutation, name) in [
        (Mutation::OneProofIsEnough, "forced"),
        (Mutation::SandboxesIgnored, "forced"),
        (Mutation::RangesRecordedLate, "return"),
        (Mutation::PodCidrWaitersNotWoken, "podCIDRs"),
        (Mutation::LeaksNotFreed, "addresses"),
    ] {
        let script = SCRIPTS.iter().find(|it| it.name.starts_with(name)).unwrap();
        let report = explore(script, EVERY_ONE, || mutation::set(Some(mutation)));
        let (deviations, violation) = report.failure.unwrap_or_else(|| panic!("{mutation:?}"));
        println!(
            "{mutation:?}: {} runs, {deviations:?}: {}",
            report.runs, violation.text
        );
    }
}

/// Tries bugs in the shipped programs, one after the other, and prints which of them a run without or with one deviation
/// finds.
#[cfg(debug_assertions)]
#[test]
#[ignore = "takes hours"]
fn mutations() {
    use cadastre_core::mutation;
    let script = variable("ONLY").unwrap_or_default();
    for mutation in super::mutations::chosen() {
        let scripts = SCRIPTS.iter().filter(|it| it.name.contains(&script));
        let found = scripts.into_iter().find_map(|script| {
            let report = explore(script, EVERY_ONE, || mutation::set(Some(mutation)));
            let (deviations, violation) = report.failure?;
            Some(format!(
                "{}, {deviations:?}, {} runs: rule {:?}: {}",
                script.name, report.runs, violation.rule, violation.text
            ))
        });
        println!("{mutation:?}: {}", found.as_deref().unwrap_or("not found"));
    }
}

#[test]
#[ignore = "takes minutes"]
fn every_deviation() {
    let minutes = number("MINUTES").unwrap_or(10);
    let most = number("FAULTS").unwrap_or(2);
    for most in 1..=most.min(2) {
        explore_all(Limits {
            most,
            time: Duration::from_secs(60 * minutes),
            ..EVERY_ONE
        });
    }
}

/// Runs one script (`ONLY`) with the deviations in `DEVIATIONS`, as in `12:1,40:2`, and prints its last `LINES` lines.
#[test]
#[ignore = "for one run"]
fn replay() {
    let text = variable("DEVIATIONS").unwrap_or_default();
    let deviation = |it: &str| {
        let (at, outcome) = it.split_once(':').unwrap();
        (at.parse().unwrap(), outcome.parse().unwrap())
    };
    let deviations: Deviations = text.split_terminator(',').map(deviation).collect();
    let only = variable("ONLY").unwrap_or_default();
    let script = SCRIPTS.iter().find(|it| it.name.contains(&only)).unwrap();
    let mut sim = Sim::scripted(script, deviations.clone(), Trace::on());
    if let Err(violation) = sim.go(u64::MAX) {
        fail(script, &deviations, &violation);
    }
    println!("{}", sim.trace.tail(&BTreeSet::new()));
}
