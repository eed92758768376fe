//! Checks that the evidence in docs/reliability.md exists, and that the page names every rule of the simulation.

use std::collections::BTreeSet;

use cadastre_core::mutation::Mutation;

use crate::attacks::tests_in;
use crate::repository::{files, has_extension, path};
use crate::{assert_none, text};

const PAGE: &str = "docs/reliability.md";

/// The first cell of each row in the table of each section, in the page's order.
const ROWS: [&str; 6] = [
    "design",
    "code",
    "tests",
    "simulation",
    "mutations",
    "real processes",
];

fn code_in(folders: &[&str]) -> Vec<String> {
    let files = folders.iter().flat_map(|it| files(it));
    let files = files.filter(|it| has_extension(it, "rs"));
    files
        .map(|it| std::fs::read_to_string(it).unwrap())
        .collect()
}

/// The names of the tests in these folders. Tests of `nodes` and `install` are functions that a list names.
fn tests(folders: &[&str]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for code in code_in(folders) {
        names.extend(tests_in(&code));
        for before in ["pub(crate) async fn ", "\nasync fn "] {
            let functions = code.split(before).skip(1);
            names.extend(functions.filter_map(|it| Some(it.split_once('(')?.0.to_owned())));
        }
    }
    names
}

/// The rules that the simulation checks: the first arguments of calls of `wrong`.
fn rules() -> BTreeSet<String> {
    let mut rules = BTreeSet::new();
    for code in code_in(&["tests/sim"]) {
        for call in code.split("wrong(").skip(1) {
            let argument = call.trim_start().strip_prefix('"');
            let rule = argument.and_then(|it| it.split_once("\","));
            rules.extend(rule.map(|(rule, _)| rule.to_owned()));
        }
    }
    rules
}

#[test]
fn every_promise_has_evidence_that_exists() {
    let (unit, real) = (tests(&["crates", "src", "tests"]), tests(&["e2e"]));
    let rules = rules();
    let mutations: BTreeSet<String> = Mutation::ALL.iter().map(|it| format!("{it:?}")).collect();
    let page = text(PAGE);
    let (mut wrong, mut named_rules, mut count) = (Vec::new(), BTreeSet::new(), 0);
    for section in page.split("\n## ").skip(1) {
        let title = section.lines().next().unwrap();
        let rows = section.lines().filter(|it| it.starts_with("| ")).skip(1);
        let rows: Vec<(&str, &str)> = rows
            .filter_map(|it| it.trim_matches(['|', ' ']).split_once(" | "))
            .collect();
        if rows.is_empty() {
            continue;
        }
        count += 1;
        let names: Vec<&str> = rows.iter().map(|it| it.0).collect();
        if names != ROWS {
            wrong.push(format!("{title}: the rows are {names:?}, not {ROWS:?}"));
        }
        for (row, evidence) in rows {
            let quoted: Vec<&str> = evidence.split('`').skip(1).step_by(2).collect();
            let exists = |it: &&str| match row {
                "code" => path(it).is_file(),
                "tests" => unit.contains(*it),
                "mutations" => mutations.contains(*it),
                "real processes" => real.contains(*it),
                _ => true,
            };
            let missing = quoted.iter().filter(|it| !exists(it));
            wrong.extend(missing.map(|it| format!("{title}: there is no {it} ({row})")));
            if row == "simulation" {
                for rule in evidence.split(", ") {
                    if !rules.contains(rule) {
                        wrong.push(format!("{title}: the simulation has no rule {rule}"));
                    }
                    named_rules.insert(rule.to_owned());
                }
            } else if quoted.is_empty() && !evidence.contains("](") {
                wrong.push(format!("{title}: no {row}"));
            }
        }
    }
    let unnamed = rules.difference(&named_rules);
    wrong.extend(unnamed.map(|it| format!("no section names the rule {it} of the simulation")));
    assert_none(&wrong);
    assert!(count > 8, "only {count} sections were found");
}
