//! cadastre-ipam in the place of host-local, compared with the published host-local: results, error codes and files
//! must be equal.
//!
//! Some 20,000 calls are made from fixed seeds. A failure prints its seed. `SEED=n` repeats the case with the seed `n`,
//! and `STEPS=n` makes `n` calls from new seeds. Deliberate differences have tests of their own (`better`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod better;
mod call;
mod configs;
mod crowd;
mod plugins;
#[path = "../../../tests/common/rng.rs"]
mod rng;
mod side_by_side;

use std::sync::atomic::{AtomicU64, Ordering};

use cadastre_e2e::scratch::Scratch;
use plugins::Plugins;
use side_by_side::Who;

/// The number of calls for each of the two values of [`Who`].
const STEPS: u64 = 10_500;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn fresh_seed() -> u64 {
    use std::hash::BuildHasher as _;
    std::hash::RandomState::new().hash_one(0)
}

fn steps(who: Who) {
    let scratch = Scratch::new().unwrap();
    let plugins = Plugins::new(scratch.path());
    if let Some(seed) = number("SEED") {
        side_by_side::case(&plugins, scratch.path(), who, seed);
        return;
    }
    let (first, wanted) = match number("STEPS") {
        Some(steps) => (fresh_seed() >> 16, steps),
        None => (1, STEPS),
    };
    println!("{who:?}: seeds from {first}");
    // Two threads run the cases, because the smallest hosts on which the tests run have two processors.
    let (next, calls) = (AtomicU64::new(first), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while calls.load(Ordering::Relaxed) < wanted {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let made = side_by_side::case(&plugins, scratch.path(), who, seed);
                    calls.fetch_add(made, Ordering::Relaxed);
                }
            });
        }
    });
    println!(
        "{who:?}: {calls:?} calls in {} cases",
        next.into_inner() - first
    );
}

#[test]
fn ours_answers_and_writes_as_host_local_does() {
    steps(Who::Ours);
}

#[test]
fn a_switch_back_and_forth_goes_unnoticed() {
    steps(Who::Both);
}

#[test]
fn many_at_once_never_share_an_address() {
    let scratch = Scratch::new().unwrap();
    let plugins = Plugins::new(scratch.path());
    let first = number("SEED").unwrap_or(1);
    for seed in first..first + 3 {
        crowd::round(&plugins, scratch.path(), seed);
    }
}
