//! Simulation of electors with one Lease. The simulation knows the true time, which no elector can read.
//!
//! A seed decides everything in a run:
//! - two to four processes, whose clock rates differ from the true rate by up to a tenth
//! - requests that arrive late or never, and answers that are lost before or after the request takes effect
//! - watches that are late, silent or forbidden
//! - an API server that answers slowly for a time, or from some time on
//! - pauses, crashes and graceful stops
//! - edits of the Lease by others, and one deletion
//!
//! `LEASE_SEED=7 cargo test --test lease_sim` runs one seed alone.
#![allow(clippy::unwrap_used, clippy::panic)] // test helpers may unwrap and panic like tests

mod check;
#[path = "../../../../tests/common/rng.rs"]
mod rng;
mod server;
mod world;

use std::hash::{Hash as _, Hasher as _};

use world::{Counts, World};

/// Number of fixed seeds, which always give the same runs.
const SEEDS: u64 = 600;

/// Number of seeds that no earlier run has tried.
const NEW_SEEDS: u64 = 3000;

#[test]
fn two_never_lead_at_once_and_one_leads_when_faults_stop() {
    let one = std::env::var("LEASE_SEED").ok();
    let (seeds, new) = match &one {
        Some(seed) => (seed.parse().map(|seed: u64| seed..seed + 1).unwrap(), 0..0),
        None => (0..SEEDS, new_seeds()),
    };
    let mut sum = Counts::default();
    let mut failed = Vec::new();
    for seed in seeds.chain(new) {
        // The failed seed has already printed the message of its panic. The other seeds still run.
        match std::panic::catch_unwind(|| World::new(seed).run()) {
            Ok(counts) => sum.add_all(&counts),
            Err(_) => failed.push(seed),
        }
    }
    assert!(
        failed.is_empty(),
        "{} seeds failed: {failed:?}",
        failed.len()
    );
    println!("{sum:?}");
    if one.is_none() {
        sum.assert_every_rule_was_tried();
    }
}

/// Returns seeds that no earlier run has tried, computed from the commit if it is known, or else from the clock.
fn new_seeds() -> std::ops::Range<u64> {
    let clock = || format!("{:?}", std::time::SystemTime::now());
    let text = std::env::var("COMMIT").unwrap_or_else(|_| clock());
    let mut hasher = std::hash::DefaultHasher::new();
    text.hash(&mut hasher);
    let first = hasher.finish() >> 8;
    first..first + NEW_SEEDS
}

#[test]
fn a_seed_always_gives_the_same_run() {
    let run = || format!("{:?}", World::new(11).run());
    assert_eq!(run(), run());
}
