//! Compares the ledger and its pools with a simple model. The model keeps a list of holdings without any index, and its
//! search tries every block of a pool in order.
//!
//! Each case applies a sequence of random operations to the ledger and to the model. The addresses come from small
//! windows at both ends and in the middle of a family, so blocks collide all the time. Results are compared after
//! each operation; after every 64 operations the results of all queries are compared.
//!
//! A failure prints its seed and the shortest failing sequence that was found. To repeat the failure, run
//! `PROPTEST_RNG_SEED=<seed> cargo test -p cadastre-core --test ipam_model`. The variable `PROPTEST_CASES=<number>`
//! sets the number of cases.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod model;
mod ops;

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};

use cadastre_core::Dual;
use proptest::collection::vec;
use proptest::test_runner::{Config, RngAlgorithm, RngSeed, TestRunner};

use crate::model::Universe;
use crate::ops::{Pair, op};

/// The maximum number of operations in a case. The average number is half of the maximum.
const LONGEST: usize = 1000;
/// The minimum number of operations in one test. The five tests together apply a million.
const OPERATIONS: usize = 200_000;
/// The number of cases. On average, all cases together apply 15 % more operations than `OPERATIONS`.
const CASES: u32 = 460;

/// Runs random cases. `v4` and `v6` are the prefix lengths of a unit, the usual size of a block in a case.
fn compare(v4: u8, v6: u8) {
    let universe = Universe {
        unit: Dual { v4, v6 },
    };
    let mut config = Config {
        failure_persistence: None,
        max_shrink_iters: 20_000,
        // The default random generator would take half of the running time of a debug build.
        rng_algorithm: RngAlgorithm::XorShift,
        ..Config::default()
    };
    let by_default = std::env::var_os("PROPTEST_CASES").is_none();
    if by_default {
        config.cases = CASES;
    }
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(RandomState::new().hash_one(0));
    }
    let seed = config.rng_seed;
    let done = Cell::new(0);
    let result = TestRunner::new(config).run(&vec(op(), 1..=LONGEST), |ops| {
        let mut pair = Pair::new(universe);
        for (n, op) in ops.iter().enumerate() {
            pair.apply(op)?;
            if n % 64 == 63 || n + 1 == ops.len() {
                pair.compare_all()?;
            }
        }
        done.set(done.get() + ops.len());
        Ok(())
    });
    if let Err(error) = result {
        panic!("PROPTEST_RNG_SEED={seed}: {error}");
    }
    let done = done.get();
    assert!(!by_default || done >= OPERATIONS, "only {done} operations");
}

#[test]
fn single_addresses() {
    compare(32, 128);
}

#[test]
fn node_ranges() {
    compare(24, 64);
}

#[test]
fn affinity_blocks() {
    compare(26, 122);
}

#[test]
fn blocks_of_odd_length() {
    compare(27, 61);
}

#[test]
fn blocks_of_different_depth() {
    compare(31, 47);
}
