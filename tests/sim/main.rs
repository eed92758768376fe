//! Deterministic simulation: an in-memory API server, controller processes and the agents of nodes in virtual time.
//!
//! Controllers and agents are the shipped state machines: `controller::Controller`, `cluster::lease::Elector`, and the
//! agent in `host`. A seed decides everything around them: requests that are lost, delayed or rejected, watches that
//! are cut or lag, pauses, crashes and hand-overs of processes, wrong clocks, and changes of nodes, pools and pods.
//! After every step, the changes at the API server are checked against the guarantees. In the last part of a run there
//! are no faults and no changes, so at the end nothing may wait, be left over, or still be written.
//!
//! | file | subject |
//! |---|---|
//! | `search` | which seeds are run |
//! | `run` | the run of one seed: executes scheduled events in the order of virtual time |
//! | `plan` | the conditions of a run, drawn from the seed: size, faults, length |
//! | `api`, `object_log` | the API server: preconditions, versions, lists and watches |
//! | `host` | one host: the shipped agent, its store, its kubelet, and their faults |
//! | `machines` | all hosts, the Nodes that they register as, and their pods |
//! | `process`, `shell`, `lease_shell` | one controller process: clocks, watches, requests, the Lease |
//! | `workload`, `pool_workload` | changes of objects |
//! | `faults` | faults of controller processes |
//! | `restore` | the API server is restored to an older state |
//! | `persistent_fault` | requests that are always rejected or never answered, watches that deliver nothing |
//! | `checks`, `*_checks` | checks after each step: of podCIDRs, blocks, records of ranges, and the Lease |
//! | `received`, `pool_model` | what the checks know of a process, and of pools |
//! | `budget` | limits on how often a process may send requests |
//! | `served` | no node may wait for long while a pool has free addresses for it |
//! | `settle`, `settle_blocks`, `exhaustion` | checks at the end |
//! | `trace`, `describe` | readable traces |
//! | `mutations`, `proofs` | deliberate bugs, and which check or test finds each of them |
//! | `scripts` | short courses of changes, in which nothing else happens |
//! | `deviations` | runs of a script with every fault and delay at every point, one or two in a run |
//! | `exhaustive` | small clusters, in which every order of events is tried and not a random one |
//!
//! `make sim SEED=7` runs one seed. `make sim STEPS=10000000` runs consecutive seeds until that many steps are done.
//! `make soak MINUTES=60` runs seeds for 60 minutes. A failure prints its seed and the last relevant lines of the
//! trace.
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
mod claims;
mod clock;
mod describe;
mod deviations;
mod exhaustion;
mod exhaustive;
mod faults;
mod host;
mod ipam_claims;
mod lease_checks;
mod lease_shell;
mod machines;
#[path = "../common/memory_disk.rs"]
mod memory_disk;
mod migrations;
mod mutations;
mod object_log;
mod persistent_fault;
mod plan;
mod podcidr_checks;
mod pool_model;
mod pool_workload;
mod process;
mod proofs;
mod received;
mod record_checks;
mod restore;
#[path = "../common/rng.rs"]
mod rng;
mod routes;
mod run;
mod scripts;
mod search;
#[path = "../common/seeds.rs"]
mod seeds;
mod served;
mod settle;
mod settle_blocks;
mod shell;
mod trace;
mod withdrawn;
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
            let _ = sim.go(u64::MAX);
            (sim.trace.len(), sim.tally().trace)
        };
        let first = trace();
        assert!(first.0 > 500, "a trace of {} lines proves little", first.0);
        assert_eq!(first, trace(), "seed {seed}");
    }
}
