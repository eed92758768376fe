//! Which runs without or with one deviation find deliberate bugs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use cadastre_core::mutation::{self, Mutation};

use super::{
    Deviations, EVERY_ONE, Limits, Report, explore, fail, more, parse, run, show, threads,
};
use crate::mutations::{chosen, simulated};
use crate::proofs::entries;
use crate::scripts::{SCRIPTS, Script};
use crate::search::number;
use crate::seeds::variable;

/// The file of which [`entries`] reads the lines
const FOUND: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/sim/found_by_deviations.txt"
);

/// For each run, the bugs whose switches it reads
type Reads = BTreeMap<Deviations, BTreeSet<Mutation>>;

type Found = BTreeMap<String, (&'static Script, Deviations)>;

fn found() -> Found {
    let entry = |[mutation, script, deviations]: [&str; 3]| {
        let script = SCRIPTS.iter().find(|it| it.short_name() == script);
        (mutation.to_owned(), (script.unwrap(), parse(deviations)))
    };
    let text = std::fs::read_to_string(FOUND).unwrap();
    entries(&text).map(entry).collect()
}

fn write(found: &Found) {
    let mut text = String::new();
    for mutation in Mutation::ALL {
        let name = format!("{mutation:?}");
        if let Some((script, deviations)) = found.get(&name) {
            writeln!(text, "{name} {} {}", script.short_name(), show(deviations)).unwrap();
        }
    }
    std::fs::write(FOUND, text).unwrap();
}

/// Whether the run fails with the bug. Without the bug it has to hold.
fn finds(mutation: Mutation, script: &'static Script, deviations: &Deviations) -> bool {
    if let Some(violation) = run(script, deviations).violation {
        fail(script, deviations, &violation);
    }
    mutation::set(Some(mutation));
    let finished = run(script, deviations);
    mutation::set(None);
    finished.violation.is_some()
}

/// Tries the bug in all runs of the script within the limits.
fn search(
    mutation: Mutation,
    script: &'static Script,
    limits: Limits,
    matters: impl Fn(&Deviations) -> bool,
) -> Report {
    let report = explore(script, limits, || mutation::set(Some(mutation)), matters);
    mutation::set(None);
    report
}

/// Each bug in the file is found, by the run of the file or by another run of the same script.
#[test]
fn one_deviation_finds_mutations() {
    let found = found();
    let mut missed = Vec::new();
    for mutation in chosen() {
        let Some((script, deviations)) = found.get(&format!("{mutation:?}")) else {
            continue;
        };
        let is_found = finds(mutation, script, deviations)
            || search(mutation, script, EVERY_ONE, |_| true)
                .failure
                .is_some();
        if !is_found {
            missed.push(mutation);
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// Tries all runs with at most one deviation. Returns the bugs whose switches each run reads. No other bug changes the
/// run.
fn reads(script: &'static Script) -> Reads {
    let ordinary = run(script, &Vec::new());
    let one = more(&[], &ordinary.counts);
    let all: Vec<Deviations> = std::iter::once(Vec::new()).chain(one).collect();
    let of_run = |deviations: &Deviations| {
        mutation::take_read();
        if let Some(violation) = run(script, deviations).violation {
            fail(script, deviations, &violation);
        }
        (
            deviations.clone(),
            mutation::take_read().into_iter().collect(),
        )
    };
    std::thread::scope(|scope| {
        let parts = all.chunks(all.len().div_ceil(threads()));
        let parts = parts.map(|part| scope.spawn(|| part.iter().map(of_run).collect::<Vec<_>>()));
        let parts: Vec<_> = parts.collect();
        parts
            .into_iter()
            .flat_map(|it| it.join().unwrap())
            .collect()
    })
}

/// Tries the bugs that only the simulation finds, and prints which of them a run without or with one deviation
/// finds. Begins with the runs of the file. `MINUTES` limits the time for each bug. `UPDATE` writes the file.
#[test]
#[ignore = "takes hours"]
fn mutations() {
    let mut found = found();
    let is_known = |it: &Mutation| {
        let known = found.get(&format!("{it:?}"));
        known.is_some_and(|(script, deviations)| finds(*it, script, deviations))
    };
    let open = chosen().filter(|it| simulated(*it).is_some());
    let open: Vec<Mutation> = open.filter(|it| !is_known(it)).collect();
    let only = variable("ONLY").unwrap_or_default();
    let scripts = SCRIPTS.iter().filter(|it| it.name.contains(&only));
    // For a few bugs, it takes longer to find out which runs they change than to try all runs.
    let is_quick = open.len() < 10;
    let scripts: Vec<_> = scripts
        .map(|it| (it, (!is_quick).then(|| reads(it))))
        .collect();
    for mutation in open {
        let changes = |reads: &Option<Reads>, run: &Deviations| {
            let reads = reads.as_ref().and_then(|it| it.get(run));
            reads.is_none_or(|it| it.contains(&mutation))
        };
        let is_changed = |reads: &Option<Reads>| {
            let mut runs = reads.iter().flat_map(BTreeMap::keys);
            reads.is_none() || runs.any(|it| changes(reads, it))
        };
        let scripts = scripts.iter();
        let scripts: Vec<_> = scripts.filter(|(_, reads)| is_changed(reads)).collect();
        let limits = Limits {
            time: number("MINUTES").map_or(Duration::MAX, |it| {
                Duration::from_secs(60 * it) / u32::try_from(scripts.len().max(1)).unwrap()
            }),
            ..EVERY_ONE
        };
        let mut tried = 0;
        let first = scripts.into_iter().find_map(|(script, reads)| {
            let report = search(mutation, script, limits, |it| changes(reads, it));
            tried += report.runs;
            let (deviations, violation) = report.failure?;
            Some((*script, deviations, violation))
        });
        let Some((script, deviations, violation)) = first else {
            println!("{mutation:?}: not found in {tried} runs");
            continue;
        };
        assert!(finds(mutation, script, &deviations));
        println!(
            "{mutation:?}: {} {}, {tried} runs: rule {:?}: {}",
            script.short_name(),
            show(&deviations),
            violation.rule,
            violation.text
        );
        found.insert(format!("{mutation:?}"), (script, deviations));
        if variable("UPDATE").is_some() {
            write(&found);
        }
    }
}
