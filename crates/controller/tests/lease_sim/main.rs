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
#[path = "../../../../tests/common/seeds.rs"]
mod seeds;
mod server;
mod world;

use world::{Counts, World};

/// Number of fixed seeds, which always give the same runs.
const SEEDS: u64 = 600;

/// Number of seeds that no earlier run has tried.
const NEW_SEEDS: u64 = 3000;

#[test]
fn two_never_lead_at_once_and_one_leads_when_faults_stop() {
    let one = seeds::variable("LEASE_SEED");
    let first_new = seeds::seed_of_commit().0;
    let (fixed, new) = match &one {
        Some(seed) => (seed.parse().map(|seed: u64| seed..seed + 1).unwrap(), 0..0),
        None => (0..SEEDS, first_new..first_new + NEW_SEEDS),
    };
    // Only fixed seeds count for the minimums, because other seeds differ.
    let mut sum = Counts::default();
    let mut failed = Vec::new();
    for seed in fixed.clone().chain(new) {
        // The failed seed has already printed the message of its panic. The other seeds still run.
        match std::panic::catch_unwind(|| World::new(seed).run()) {
            Ok(counts) if fixed.contains(&seed) => sum.add_all(&counts),
            Ok(_) => {}
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

#[test]
fn a_seed_always_gives_the_same_run() {
    let run = || format!("{:?}", World::new(11).run());
    assert_eq!(run(), run());
}
