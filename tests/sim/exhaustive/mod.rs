//! Tries every order of events in small clusters. In all other runs of the simulation, the order is random.
//!
//! A cluster has two shipped controllers with their electors, the API server of `api`, and the messages between them.
//! The exploration takes every possible transition of every state, and checks each state. From every state, it also
//! follows what happens if nothing else fails, until the cluster is at rest. So it also finds states from which the
//! cluster never comes to rest. It recognises visited states by a hash.
//!
//! | file | subject |
//! |---|---|
//! | `cluster` | a state, and its transitions |
//! | `wire` | the messages on their way |
//! | `candidate` | one run of a controller process |
//! | `reactions` | what each process does when it receives something |
//! | `agent` | a model of an agent |
//! | `invariants` | the conditions of every state, and of a state at rest |
//! | `search` | visits all states |
//!
//! `docs/exhaustive.md` lists the bounds.

mod agent;
mod candidate;
mod cluster;
mod invariants;
mod reactions;
mod search;
mod wire;

use std::time::Duration;

use cadastre_api::{AllocationMode, IPPoolSpec};

use super::pool_workload::small_pool;
use super::process::Watched;
use super::search::number;
use super::seeds::variable;
use cluster::{Change, Scenario};
use search::{Limits, Report, explore};

pub use cluster::new_node;

/// A pool with exactly two ranges.
fn two_pod_cidrs() -> IPPoolSpec {
    small_pool(AllocationMode::NodeCIDR, "10.244.0.0/23", 24)
}

/// A pool with exactly two blocks, of 16 addresses each.
fn two_blocks() -> IPPoolSpec {
    small_pool(AllocationMode::Blocks, "10.245.0.0/27", 28)
}

static SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "podCIDRs: a second node",
        pool: two_pod_cidrs,
        before: &[Change::CreateNode("a")],
        changes: &[Change::CreateNode("b")],
        relisted: &[],
    },
    Scenario {
        name: "podCIDRs: a node is replaced",
        pool: two_pod_cidrs,
        before: &[Change::CreateNode("a")],
        changes: &[
            Change::CreateNode("b"),
            Change::DeleteNode("a"),
            Change::CreateNode("a"),
        ],
        relisted: &[Watched::Nodes],
    },
    Scenario {
        name: "blocks: from one node to another",
        pool: two_blocks,
        before: &[
            Change::CreateNode("a"),
            Change::CreateNode("b"),
            Change::Need("a", 32),
        ],
        changes: &[Change::Need("a", 8), Change::Need("b", 8)],
        relisted: &[Watched::Subnets],
    },
];

fn print(scenario: &Scenario, faults: u8, report: &Report) {
    let complete = if report.is_complete { "all" } else { "not all" };
    println!(
        "{}, at most {faults} faults: {} states visited ({complete}), {} transitions, {:.0} s",
        scenario.name,
        report.states,
        report.transitions,
        report.elapsed.as_secs_f64()
    );
}

/// The variables `FAULTS`, `MINUTES` and `STATES` limit each exploration. `ONLY` is a part of a scenario's name.
#[test]
#[ignore = "takes minutes"]
fn every_order() {
    let only = variable("ONLY").unwrap_or_default();
    let most = u8::try_from(number("FAULTS").unwrap_or(2)).unwrap();
    let minutes = number("MINUTES").unwrap_or(10);
    let states = number("STATES").unwrap_or(u64::MAX);
    let time = Duration::from_secs(60 * minutes);
    for scenario in SCENARIOS.iter().filter(|it| it.name.contains(&only)) {
        for faults in 0..=most {
            let limits = Limits {
                faults,
                states,
                time,
            };
            let report = explore(scenario, None, limits);
            print(scenario, faults, &report);
            if let Some(failure) = report.failure {
                panic!("{}: {failure}", scenario.name);
            }
        }
    }
}

#[test]
fn guarantees_hold_in_every_order_without_faults() {
    for scenario in [&SCENARIOS[0], &SCENARIOS[2]] {
        let limits = Limits {
            faults: 0,
            states: 20_000,
            time: Duration::MAX,
        };
        let report = explore(scenario, None, limits);
        print(scenario, 0, &report);
        assert!(
            report.is_complete,
            "{}: {:?}",
            scenario.name, report.failure
        );
        assert!(report.states > 40, "{}: {}", scenario.name, report.states);
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_waiter_that_nobody_wakes_is_found() {
    use cadastre_core::mutation::Mutation::{BlockWaitersNotWoken, PodCidrWaitersNotWoken};

    for (mutation, scenario) in [
        (PodCidrWaitersNotWoken, &SCENARIOS[1]),
        (BlockWaitersNotWoken, &SCENARIOS[2]),
    ] {
        let limits = Limits {
            faults: 0,
            states: 100_000,
            time: Duration::MAX,
        };
        let failure = explore(scenario, Some(mutation), limits).failure;
        let failure = failure.unwrap_or_else(|| panic!("{mutation:?} is not found"));
        assert!(failure.contains("rule \"progress\""), "{failure}");
    }
}

/// Tries bugs in the shipped controller, one after the other, and prints which of them the exploration finds within
/// `STATES` states of each scenario.
#[cfg(debug_assertions)]
#[test]
#[ignore = "takes minutes"]
fn mutations() {
    let states = number("STATES").unwrap_or(20_000);
    for mutation in super::mutations::chosen() {
        let attempts = (0..=2).flat_map(|faults| SCENARIOS.iter().map(move |it| (faults, it)));
        let found = attempts.into_iter().find_map(|(faults, scenario)| {
            let time = Duration::from_secs(60);
            let limits = Limits {
                faults,
                states,
                time,
            };
            let report = explore(scenario, Some(mutation), limits);
            let failure = report.failure?;
            let rule = failure.lines().next().unwrap_or_default().to_owned();
            let name = scenario.name;
            Some(format!(
                "{faults} faults, {name}, {} states: {rule}",
                report.states
            ))
        });
        println!("{mutation:?}: {}", found.as_deref().unwrap_or("not found"));
    }
}
