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

#[cfg(debug_assertions)]
mod bugs;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::checks::Violation;
use super::clock::{SECOND, Time};
use super::run::{Due, RunId, Sim};
use super::scripts::{SCRIPTS, Script};
use super::search::number;
use super::seeds::{seed_of_commit, variable};
use super::trace::Trace;

/// How long a process stands still that pauses as a deviation.
const PAUSE: Time = 25 * SECOND;

/// A run's deviations: the numbers of the draws, each with its outcome.
pub type Deviations = Vec<(usize, u8)>;

fn show(deviations: &Deviations) -> String {
    let texts = deviations
        .iter()
        .map(|(at, outcome)| format!("{at}:{outcome}"));
    texts.collect::<Vec<_>>().join(",")
}

/// Reads deviations as [`show`] prints them.
fn parse(text: &str) -> Deviations {
    let deviation = |it: &str| {
        let (at, outcome) = it.split_once(':').unwrap();
        (at.parse().unwrap(), outcome.parse().unwrap())
    };
    text.split_terminator(',').map(deviation).collect()
}

impl Sim {
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

    /// Lets an allocation take effect late and its sender stand still for as long, if that is the deviation.
    pub fn last_words(&mut self, run_id: RunId) -> Option<Time> {
        if self.script.is_none() || !self.has_faults {
            return None;
        }
        let late = *self.rng.pick(&[None, Some(20 * SECOND), Some(60 * SECOND)]);
        if let Some(late) = late {
            self.log(None, || format!("{run_id} pauses"));
            self.processes[run_id.process].paused_until = self.now + late;
        }
        late
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

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Tries all runs within the limits, with one thread for each processor, until the time is over or a run fails.
/// Each thread calls `prepare` first. Runs are left out if `matters` returns false for their first deviation.
fn explore(
    script: &'static Script,
    limits: Limits,
    prepare: impl Fn() + Sync,
    matters: impl Fn(&Deviations) -> bool,
) -> Report {
    let Limits { most, time, .. } = limits;
    let begun = Instant::now();
    prepare();
    let ordinary = run(script, &Vec::new());
    let fails = ordinary.violation.map(|it| (Vec::new(), it));
    let first = more(&[], &ordinary.counts).skip(limits.from);
    let first = first.step_by(limits.every).filter(matters);
    let first: Vec<Deviations> = first.collect();
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
    std::thread::scope(|scope| {
        for _ in 0..threads() {
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
    panic!(
        "{}: rule \"{}\" is broken: {}\nagain: DEVIATIONS={}\n{}",
        script.name,
        violation.rule,
        violation.text,
        show(deviations),
        again.trace.tail(&violation.names)
    );
}

fn explore_all(limits: Limits) {
    let only = variable("ONLY").unwrap_or_default();
    for script in SCRIPTS.iter().filter(|it| it.name.contains(&only)) {
        let report = explore(script, limits, || {}, |_| true);
        print(script, limits.most, &report);
        if let Some((deviations, violation)) = &report.failure {
            fail(script, deviations, violation);
        }
    }
}

/// A run of all tests tries one of this many parts of all deviations. Which part depends on the commit. The number is a
/// prime, because all seeds of commits are multiples of ten.
const PARTS: usize = 179;

#[test]
fn some_deviations_hold() {
    explore_all(Limits {
        every: PARTS,
        from: usize::try_from(seed_of_commit().0 % PARTS as u64).unwrap(),
        ..EVERY_ONE
    });
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
    let deviations = parse(&variable("DEVIATIONS").unwrap_or_default());
    let only = variable("ONLY").unwrap_or_default();
    let script = SCRIPTS.iter().find(|it| it.name.contains(&only)).unwrap();
    let mut sim = Sim::scripted(script, deviations.clone(), Trace::on());
    if let Err(violation) = sim.go(u64::MAX) {
        fail(script, &deviations, &violation);
    }
    println!("{}", sim.trace.tail(&BTreeSet::new()));
}
