//! Deterministic simulation: an in-memory API server and some controllers on virtual time.
//!
//! The controllers are the shipped state machines, `controller::Controller` and
//! `cluster::lease::Elector`; everything around them is drawn from a seed: lost, late and refused
//! requests, cut and late watches, pauses of any length, crashes, hand-overs, clocks that lie, and a
//! world of nodes, pools and pods that changes meanwhile. After every step the API's history is held
//! against what is promised; in the end everything has to come to rest.
//!
//! | file | subject |
//! |---|---|
//! | `run` | the run of one seed: what is due, step after step |
//! | `plan` | what a seed draws first: size, roughness, length |
//! | `api`, `kind` | the API server: guards, versions, lists and watches |
//! | `agent`, `agents` | agents of nodes, their faults, and the pods they serve |
//! | `process`, `shell` | one process: clocks, watches, gate, requests, Lease |
//! | `workload`, `faults` | what changes in the world, what befalls processes |
//! | `restore` | the API server is put back to an older state |
//! | `lasting` | what is refused, unanswered or silent for long |
//! | `checks`, `known`, `shape` | what must hold after each step |
//! | `parcels` | the same of affinity blocks |
//! | `budget` | how often a process may ask |
//! | `settle`, `settle_blocks` | what must hold in the end |
//! | `trace`, `words` | what happened, for people |
//! | `mutations`, `proofs` | that the checks can fail: bugs made on purpose, and what finds them |
//!
//! `make sim SEED=7` runs one seed and shows it; `make sim STEPS=10000000` runs seeds one after the
//! other until so many steps are done. A failure names its seed and shows the last lines that matter.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::struct_excessive_bools,
    clippy::type_complexity,
    clippy::unused_self,
    missing_docs
)]

mod agent;
mod agents;
mod api;
mod budget;
mod checks;
mod clock;
mod faults;
mod kind;
mod known;
mod lasting;
mod mutations;
mod parcels;
mod plan;
mod process;
mod proofs;
mod restore;
#[path = "../common/rng.rs"]
mod rng;
mod run;
mod settle;
mod settle_blocks;
mod shape;
mod shell;
mod trace;
mod words;
mod workload;

use std::time::Instant;

use cadastre::mutation::Mutation;
use run::{Failure, Sim, Tally};
use trace::Trace;

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "seed {}, step {}: rule \"{}\" is broken",
            self.seed, self.step, self.violation.rule
        )?;
        writeln!(f, "  {}", self.violation.text)?;
        writeln!(f, "again: make sim SEED={}", self.seed)?;
        write!(f, "{}", self.trace)
    }
}

/// Runs seeds from `first` on until `steps` are done.
fn run_seeds(first: u64, steps: u64) -> Tally {
    let (begun, mut sum, mut shown) = (Instant::now(), Tally::default(), 0);
    let mut seed = first;
    while sum.steps < steps {
        let tally = Sim::run(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
        sum.add(&tally);
        seed += 1;
        if sum.steps / 1_000_000 > shown {
            shown = sum.steps / 1_000_000;
            println!("{}", summary(&sum, seed - first, begun));
        }
    }
    println!("{}", summary(&sum, seed - first, begun));
    sum
}

fn summary(sum: &Tally, seeds: u64, begun: Instant) -> String {
    let seconds = begun.elapsed().as_secs_f64();
    format!(
        "{} steps, {seeds} seeds, {} ranges assigned, {} records ended, {} blocks listed, {} ended, {} addresses given, {} tenures, {} + {} duplicates averted by UID and term, {} restores, {} blocks taken up, {:.1} s",
        sum.steps,
        sum.assigned,
        sum.freed,
        sum.listed,
        sum.ended,
        sum.given,
        sum.takeovers,
        sum.averted.0,
        sum.averted.1,
        sum.restores,
        sum.taken_up,
        seconds
    )
}

#[test]
fn everything_promised_holds_over_many_seeds() {
    let sum = run_seeds(0, 2_000_000);
    assert!(
        sum.assigned > 500
            && sum.freed > 100
            && sum.takeovers > 50
            && sum.restores > 5
            && sum.taken_up > 3,
        "the runs do too little: {sum:?}"
    );
}

#[test]
fn one_seed_is_one_run() {
    for seed in 0..3 {
        let trace = || {
            let mut sim = Sim::new(seed, None, Trace::on());
            let _ = sim.go();
            (sim.trace.len(), sim.tally().trace)
        };
        let first = trace();
        assert!(first.0 > 500, "a trace of {} lines proves little", first.0);
        assert_eq!(first, trace(), "seed {seed}");
    }
}

/// What `make sim` calls: `SEED` is the first seed, `STEPS` how many steps at least.
#[test]
fn replay() {
    let number = |name: &str| {
        let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
        Some(
            text.parse::<u64>()
                .unwrap_or_else(|_| panic!("{name}={text}: give a whole number")),
        )
    };
    let (seed, steps) = (number("SEED"), number("STEPS"));
    run_seeds(seed.unwrap_or(0), steps.unwrap_or(1));
}
