//! Deterministic simulation: an in-memory API server, some controllers and the agents of nodes in virtual time.
//!
//! The controllers are the shipped state machines, `controller::Controller` and `cluster::lease::Elector`, and so
//! are the agents (`host`); everything around them is drawn from a seed: lost, late and rejected requests, cut and
//! late watches, pauses of any length, crashes, hand-overs, wrong clocks, and nodes, pools and pods that change
//! meanwhile. After every step the API's history is checked against the guarantees; at the end everything has to
//! come to rest.
//!
//! | file | subject |
//! |---|---|
//! | `search` | which seeds are run |
//! | `run` | the run of one seed: what is due, step after step |
//! | `plan` | what a seed draws first: size, roughness, length |
//! | `api`, `object_log` | the API server: guards, versions, lists and watches |
//! | `host` | one machine: the shipped agent, its store, its kubelet, and their faults |
//! | `machines` | all machines, which Nodes they are, and the pods they run |
//! | `process`, `shell` | one process: clocks, watches, gate, requests, Lease |
//! | `workload`, `faults` | changes of objects, faults of processes |
//! | `restore` | the API server is restored to an older state |
//! | `lasting` | requests that are rejected or unanswered for long, silent watches |
//! | `checks`, `known`, `shape` | what must hold after each step |
//! | `block_checks` | what must hold of affinity blocks after each step |
//! | `budget` | how often a process may send requests |
//! | `served` | nodes that wait although they could be served |
//! | `settle`, `settle_blocks` | what must hold at the end |
//! | `trace`, `describe` | readable traces |
//! | `mutations`, `proofs` | that the checks can fail: deliberate bugs, and what finds them |
//!
//! `make sim SEED=7` runs one seed and shows it; `make sim STEPS=10000000` runs consecutive seeds until that many
//! steps are done; `make soak MINUTES=60` runs for that long. A failure prints its seed and the last relevant
//! lines of the trace.
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

mod api;
mod block_checks;
mod budget;
mod checks;
mod clock;
mod describe;
mod faults;
mod host;
mod known;
mod lasting;
mod machines;
#[path = "../common/memory_disk.rs"]
mod memory_disk;
mod mutations;
mod object_log;
mod plan;
mod process;
mod proofs;
mod restore;
#[path = "../common/rng.rs"]
mod rng;
mod run;
mod search;
mod served;
mod settle;
mod settle_blocks;
mod shape;
mod shell;
mod trace;
mod workload;

use cadastre_core::mutation::Mutation;
use run::{Failure, Sim};
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
