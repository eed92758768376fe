//! Which seeds are run: fixed seeds, seeds computed from the commit, and with `make soak` as many as there is time
//! for.
//!
//! | environment | meaning |
//! |---|---|
//! | `SEED`, `STEPS` | [`replay`]: the first seed, and the minimum number of steps |
//! | `COMMIT` | the text from which the first seed of a commit is computed; `make sim` sets it; without it the clock is used |
//! | `MINUTES` | how long [`soak`] searches, from `SEED` or from a seed computed from the clock |

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant, SystemTime};

use super::mutations::Trial;
use super::run::{Sim, Tally};

/// The number of steps that the seeds of a commit run whenever all tests run.
const FRESH: u64 = 1_500_000;

/// Runs consecutive seeds beginning with `first`, until `steps` are done.
fn run_seeds(first: u64, steps: u64, trial: Option<Trial>) -> Tally {
    let (begun, mut sum, mut shown) = (Instant::now(), Tally::default(), 0);
    let mut seed = first;
    while sum.steps < steps {
        let tally = Sim::run(seed, trial).unwrap_or_else(|failure| panic!("{failure}"));
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
        "{} steps, {seeds} seeds, {} ranges assigned, {} records ended, {} blocks listed, {} ended, {} addresses given, {} tenures, {} of them without a list, {} Leases shown to standbys, {} + {} duplicates averted by UID and term, {} restores, {} blocks taken up, {:.1} s",
        sum.steps,
        sum.assigned,
        sum.freed,
        sum.listed,
        sum.ended,
        sum.given,
        sum.takeovers,
        sum.unlisted,
        sum.shown,
        sum.averted.0,
        sum.averted.1,
        sum.restores,
        sum.adopted,
        seconds
    )
}

/// The value of an environment variable, unless it is empty.
pub fn said(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

pub fn number(name: &str) -> Option<u64> {
    let text = said(name)?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text}: give a whole number")))
}

/// Computes a seed from a text. Its last nine digits are zeros, so that a user can recognise such seeds.
fn seed_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish() % 1_000_000_000 * 1_000_000_000
}

fn seed_of_clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    seed_of(&now.unwrap_or_default().as_nanos().to_string())
}

#[test]
fn everything_promised_holds_over_many_seeds() {
    run_seeds(0, 500_000, None);
}

/// Each commit runs seeds of its own: they can find failures that fixed seeds never show.
#[test]
fn everything_promised_holds_over_seeds_that_nobody_has_run() {
    let (seed, of) = match said("COMMIT") {
        Some(commit) => (seed_of(&commit), format!("commit {commit}")),
        None => (
            seed_of_clock(),
            "the clock, as no COMMIT is given".to_owned(),
        ),
    };
    println!("seeds of {of}: {FRESH} steps from seed {seed} on");
    let sum = run_seeds(seed, FRESH, None);
    // A third or less of what such runs usually do.
    assert!(
        sum.assigned > 100
            && sum.freed > 100
            && sum.takeovers > 40
            && sum.shown > 1_000
            && sum.restores > 1
            && sum.given > 500
            && sum.listed > 50
            && sum.ended > 20,
        "the runs do too little: {sum:?}"
    );
}

/// Called by `make sim` with `SEED` or `STEPS`.
#[test]
fn replay() {
    let (seed, steps) = (number("SEED"), number("STEPS"));
    run_seeds(seed.unwrap_or(0), steps.unwrap_or(1), None);
}

/// Called by `make soak`: continues after failures, and lists all failures at the end.
#[test]
#[ignore = "takes as long as you like: make soak MINUTES=60"]
fn soak() {
    let minutes = number("MINUTES").unwrap_or(10);
    let first = number("SEED").unwrap_or_else(seed_of_clock);
    println!("searching for {minutes} minutes from seed {first} on");
    let (begun, mut sum, mut shown) = (Instant::now(), Tally::default(), 0);
    let (mut seed, mut failed) = (first, Vec::new());
    while begun.elapsed() < Duration::from_secs(60 * minutes) {
        match Sim::run(seed, None) {
            Ok(tally) => sum.add(&tally),
            Err(failure) => {
                println!("{failure}");
                sum.steps += failure.step;
                failed.push(format!("make sim SEED={seed}: {}", failure.violation.rule));
            }
        }
        seed += 1;
        if begun.elapsed().as_secs() / 30 > shown {
            shown = begun.elapsed().as_secs() / 30;
            let text = summary(&sum, seed - first, begun);
            println!("{text}, {} failures", failed.len());
        }
    }
    println!("{}", summary(&sum, seed - first, begun));
    assert!(failed.is_empty(), "again:\n{}", failed.join("\n"));
}
