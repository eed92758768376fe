//! Checks names in the pages that come from the code: metrics, values of the chart, environment variables.

use std::collections::BTreeSet;

use cadastre::metrics;
use clap::{Command, CommandFactory as _};

use crate::commands::CommandCheck;
use crate::repository::files;
use crate::{assert_none, pages};

/// Prefixes of the names of metrics.
const METRICS: [&str; 5] = [
    "cadastre_",
    "controller_runtime_",
    "leader_election_",
    "rest_client_",
    "workqueue_",
];

/// File extensions. Names of files such as `agent.sock` look like values of the chart, but are not values of the chart.
const FILES: [&str; 7] = ["json", "lock", "log", "proto", "rs", "sock", "yaml"];

/// Returns the identifiers in a piece of code. An identifier can contain dots, as the names of the chart's values do.
fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_ascii_alphanumeric() || "_.".contains(c)))
        .map(|it| it.trim_matches('.'))
}

/// All code of all pages, in sentences and in blocks, with the page's name.
fn all_code() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for page in pages::all() {
        let blocks = page.blocks.iter().map(|it| it.text.clone());
        let code = page.code().into_iter().chain(blocks);
        all.extend(code.map(|it| (page.name.clone(), it)));
    }
    all
}

#[test]
fn metrics_in_pages_are_served() {
    let mut served: BTreeSet<String> = BTreeSet::new();
    for metric in [metrics::of_controller(), metrics::of_agent()]
        .into_iter()
        .flat_map(Result::unwrap)
    {
        if metric.kind == "histogram" {
            served.extend(["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", metric.name)));
        }
        served.insert(metric.name);
    }
    let mut wrong = Vec::new();
    let mut count = 0;
    for (page, code) in all_code() {
        let names =
            identifiers(&code).filter(|it| METRICS.iter().any(|start| it.starts_with(start)));
        for name in names {
            count += 1;
            if !served.contains(name) {
                wrong.push(format!("{page}: there is no metric {name}"));
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 50, "only {count} names were found");
}

#[test]
fn values_in_sentences_are_of_the_chart() {
    let check = CommandCheck::new();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages::all() {
        for code in page.code() {
            let (group, rest) = code.split_once('.').unwrap_or_default();
            let end = rest.rsplit('.').next().unwrap_or_default();
            let is_name = rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '.');
            if !check.is_group(group) || !is_name || rest.is_empty() || FILES.contains(&end) {
                continue;
            }
            count += 1;
            if !check.has_value(&code) {
                wrong.push(format!("{}: the chart has no value {code}", page.name));
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 50, "only {count} values were found");
}

/// All environment variables that a program may read: those of clap's flags, and all names with the prefix `CADASTRE_`
/// in `e2e/src`, `hack` and `src`.
fn variables() -> BTreeSet<String> {
    fn of(command: &Command, all: &mut BTreeSet<String>) {
        let names = command.get_arguments().filter_map(|it| it.get_env());
        all.extend(names.map(|it| it.to_str().unwrap().to_owned()));
        command.get_subcommands().for_each(|it| of(it, all));
    }
    let mut all = BTreeSet::new();
    of(&cadastre::Cli::command(), &mut all);
    for file in ["e2e/src", "hack", "src"].into_iter().flat_map(files) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let names = identifiers(&text).filter(|it| it.starts_with("CADASTRE_"));
        all.extend(names.map(str::to_owned));
    }
    all
}

#[test]
fn variables_in_pages_are_read() {
    let read = variables();
    assert!(
        read.contains("CADASTRE_METRICS_AUTH") && read.len() > 30,
        "{read:?}"
    );
    let mut wrong = Vec::new();
    for (page, code) in all_code() {
        for name in identifiers(&code).filter(|it| it.starts_with("CADASTRE_")) {
            if !read.contains(name) {
                wrong.push(format!("{page}: nothing reads {name}"));
            }
        }
    }
    assert_none(&wrong);
}
