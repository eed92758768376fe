//! Which seeds are run: fixed seeds, seeds computed from the commit, and with `make soak` as many as time permits.
//!
//! | environment | meaning |
//! |---|---|
//! | `SEED`, `STEPS` | [`replay`]: the first seed, and the minimum number of steps |
//! | `SCENARIO` | the [`Scenario`](super::proofs::Scenario) of all runs; without it, each seed decides |
//! | `COMMIT` | the text from which the first seed of a commit is computed; without it, the clock is used |
//! | `FRESH` | the number of steps from there on; without it, [`FRESH`] |
//! | `MINUTES` | how long [`soak`] searches, from `SEED` or from a seed computed from the clock |

use std::time::{Duration, Instant};

use cadastre_core::mutation::Mutation;

use super::mutations::Trial;
use super::proofs::{Proof, proof};
use super::run::{Failure, Sim, Tally};
use super::seeds::{seed_of_clock, seed_of_commit, variable};

/// Whenever all tests run, seeds computed from the commit are run until this many steps are done. CI runs five times as
/// many.
const FRESH: u64 = 300_000;

/// The interval in seconds at which the totals so far are printed.
const INTERVAL: u64 = 30;

/// Runs consecutive seeds from `first` on, until `is_over` returns true. Returns the totals.
fn run_seeds(
    first: u64,
    mut is_over: impl FnMut(&Tally) -> bool,
    mut handle: impl FnMut(Failure),
) -> Tally {
    let (begun, mut total, mut printed) = (Instant::now(), Tally::default(), 0);
    let mut seed = first;
    while !is_over(&total) {
        match Sim::run(seed, scenario()) {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                total.steps += failure.step;
                handle(failure);
            }
        }
        seed += 1;
        let intervals = begun.elapsed().as_secs() / INTERVAL;
        if intervals > std::mem::replace(&mut printed, intervals) {
            println!("{} seeds, {total}", seed - first);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{} seeds, {total}, {seconds:.1} s", seed - first);
    total
}

/// Runs seeds until `steps` are done. Panics at the first failure.
fn run_steps(first: u64, steps: u64) -> Tally {
    let is_over = |total: &Tally| total.steps >= steps;
    run_seeds(first, is_over, |failure| panic!("{failure}"))
}

/// The conditions that `SCENARIO` names, if it is set. Panics if no mutation is to be found under these conditions.
fn scenario() -> Option<Trial> {
    let name = variable("SCENARIO")?;
    let mut all = Mutation::ALL.iter().filter_map(|it| match proof(*it) {
        Proof::Simulation(scenario, ..) => Some(scenario),
        Proof::Test(_) => None,
    });
    let scenario = all.find(|it| format!("{it:?}") == name);
    Some(Trial {
        scenario: scenario.unwrap_or_else(|| panic!("SCENARIO: no mutation is found by {name}")),
        rule: None,
    })
}

pub fn number(name: &str) -> Option<u64> {
    let text = variable(name)?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text}: give a whole number")))
}

#[test]
fn guarantees_hold_over_fixed_seeds() {
    let total = run_steps(0, 500_000);
    // Each minimum is at most about half of the total that these seeds reached when the minimum was chosen. Only fixed
    // seeds have a minimum, because other seeds differ too much from each other.
    for (count, least) in [
        (total.assigned, 18),
        (total.freed, 100),
        (total.takeovers, 20),
        (total.shown, 1_000),
        (total.restores, 0),
        (total.given, 300),
        (total.listed, 40),
        (total.ended, 20),
        (total.standbys, 0),
    ] {
        assert!(count > least, "the runs do too little: {total}");
    }
}

/// Each commit runs seeds of its own, which can find failures that fixed seeds never find.
#[test]
fn guarantees_hold_over_new_seeds() {
    let (seed, of) = seed_of_commit();
    let steps = number("FRESH").unwrap_or(FRESH);
    println!("seeds of {of}: {steps} steps from seed {seed} on");
    run_steps(seed, steps);
}

/// Called by `make sim` with `SEED` or `STEPS`.
#[test]
fn replay() {
    let (seed, steps) = (number("SEED"), number("STEPS"));
    run_steps(seed.unwrap_or(0), steps.unwrap_or(1));
}

/// Called by `make soak`: continues after failures, and lists all failures at the end.
#[test]
#[ignore = "takes as long as you like: make soak MINUTES=60"]
fn soak() {
    let minutes = number("MINUTES").unwrap_or(10);
    let first = number("SEED").unwrap_or_else(seed_of_clock);
    println!("searching for {minutes} minutes from seed {first} on");
    let (begun, mut failed) = (Instant::now(), Vec::new());
    let is_over = |_: &Tally| begun.elapsed() >= Duration::from_secs(60 * minutes);
    run_seeds(first, is_over, |failure| {
        println!("{failure}");
        let rule = failure.violation.rule;
        failed.push(format!("make sim SEED={}: {rule}", failure.seed));
    });
    assert!(failed.is_empty(), "again:\n{}", failed.join("\n"));
}
