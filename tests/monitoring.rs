//! Checks that alerts, runbooks, the dashboard and the list of metrics agree with each other.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

#[path = "common/repository.rs"]
mod repository;

use std::collections::{BTreeMap, BTreeSet};

use cadastre::metrics;
use cadastre_daemon::telemetry::catalog::Metric;
use repository::{path, text};
use serde_json::Value;

fn yaml(name: &str) -> Value {
    serde_saphyr::from_str(&text(name)).unwrap()
}

/// All alerts in the rules, by name.
fn alerts() -> BTreeMap<String, Value> {
    let rules = yaml("charts/cadastre/files/rules.yaml");
    let groups = rules["groups"].as_array().unwrap();
    let rules = groups.iter().flat_map(|it| it["rules"].as_array().unwrap());
    let named = rules.map(|it| (it["alert"].as_str().unwrap().to_owned(), it.clone()));
    let alerts: Vec<(String, Value)> = named.collect();
    let count = alerts.len();
    let alerts: BTreeMap<String, Value> = alerts.into_iter().collect();
    assert_eq!(alerts.len(), count, "an alert has a name of its own");
    alerts
}

/// Series that Cadastre does not define, because Prometheus adds them or because they describe the process.
const OF_OTHERS: [&str; 4] = [
    "up",
    "ALERTS",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
];

/// The names of all series that alerts and the dashboard may use.
fn series() -> BTreeSet<String> {
    let mut all = metrics::of_controller().unwrap();
    all.extend(metrics::of_agent().unwrap());
    let mut names: BTreeSet<String> = OF_OTHERS.map(ToOwned::to_owned).into();
    for Metric { name, kind, .. } in all {
        if kind == "histogram" {
            names.extend(["_bucket", "_sum", "_count"].map(|end| format!("{name}{end}")));
        } else {
            names.insert(name);
        }
    }
    names
}

/// The names of series in an expression, without functions, labels, values and durations.
fn used(expr: &str) -> BTreeSet<String> {
    const KEYWORDS: [&str; 14] = [
        "and",
        "or",
        "unless",
        "on",
        "by",
        "bool",
        "ignoring",
        "without",
        "group_left",
        "group_right",
        "offset",
        "le",
        "inf",
        "nan",
    ];
    let mut names = BTreeSet::new();
    let mut rest = expr;
    let mut in_list = false;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphabetic() || "{\"[(".contains(c)) {
        let from = &rest[at..];
        let skip_to = |end: char| from.find(end).map_or(from.len(), |at| at + 1);
        let skip = match &from[..1] {
            "{" => skip_to('}'),
            "[" => skip_to(']'),
            "\"" => from[1..].find('"').map_or(from.len(), |at| at + 2),
            // A list of labels, as after `by` or `on`, is skipped up to its closing parenthesis.
            "(" if in_list => skip_to(')'),
            "(" => 1,
            _ => {
                let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
                let word = &from[..from.find(|c| !is_word(c)).unwrap_or(from.len())];
                let after = from[word.len()..].trim_start();
                in_list = matches!(word, "by" | "on" | "without" | "ignoring" | "group_left");
                let aggregates = after.starts_with("by ") || after.starts_with("without ");
                let number = rest[..at].ends_with(|c: char| c.is_ascii_digit() || c == '.');
                if !(after.starts_with('(') || aggregates || KEYWORDS.contains(&word) || number) {
                    names.insert(word.to_owned());
                }
                rest = &from[word.len()..];
                continue;
            }
        };
        in_list = false;
        rest = &from[skip..];
    }
    names
}

#[test]
fn names_of_series_are_found_in_expressions() {
    let expr = r#"sum by (le, node) (rate(a_total{x=~"b|c", y!="{"}[5m])) / on (job) group_left () max(d) > 1e9 and e offset 5m"#;
    assert_eq!(used(expr), ["a_total", "d", "e"].map(Into::into).into());
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let alerts = alerts();
    let files = std::fs::read_dir(path("docs/runbooks")).unwrap();
    let files = files.map(|it| it.unwrap().file_name().into_string().unwrap());
    let pages: BTreeSet<String> = files.map(|it| it.replace(".md", "")).collect();
    let names: BTreeSet<String> = alerts.keys().cloned().collect();
    assert_eq!(pages, names);
    let list = text("docs/alerts.md");
    for (name, alert) in &alerts {
        let page = format!("docs/runbooks/{name}.md");
        assert_eq!(alert["annotations"]["runbook_url"], *page);
        let page = text(&page);
        assert!(page.starts_with(&format!("# {name}\n\n")), "{name}");
        for part in ["## Look", "## Do", "## Resolved when"] {
            assert!(page.contains(&format!("\n{part}\n")), "{name}: no {part}");
        }
        assert!(list.contains(&format!("runbooks/{name}.md")), "{name}");
    }
}

#[test]
fn every_alert_says_how_bad_it_is_and_what_is_wrong_with_what() {
    for (name, alert) in alerts() {
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(["warning", "critical"].contains(&severity), "{name}");
        let expr = alert["expr"].as_str().unwrap();
        for key in ["summary", "description"] {
            let sentence = alert["annotations"][key].as_str().unwrap();
            assert!(
                sentence.len() > 20 && !sentence.contains('\n'),
                "{name}: {sentence}"
            );
            for label in ["pool", "controller", "instance"] {
                let by = expr.contains(&format!("by ({label}"));
                let by = by && expr.contains("by (");
                let named = sentence.contains(&format!("$labels.{label}"));
                assert!(!by || named, "{name}: {key} does not name the {label}");
            }
        }
        assert!(name.starts_with("Cadastre"), "{name}");
    }
}

#[test]
fn every_alert_is_tested_to_fire_and_to_be_quiet() {
    let tests = yaml("charts/cadastre/files/rules.test.yaml");
    let tests = tests["tests"].as_array().unwrap();
    for name in alerts().keys() {
        let test = tests.iter().find(|it| it["name"] == **name);
        let looks = test.unwrap_or_else(|| panic!("no test of {name}"))["promql_expr_test"]
            .as_array()
            .unwrap();
        let (fires, quiet): (Vec<&Value>, Vec<&Value>) = looks
            .iter()
            .partition(|it| it["exp_samples"].to_string().contains(&**name));
        assert!(!fires.is_empty() && !quiet.is_empty(), "{name}");
    }
}

/// All queries of the dashboard, with the titles of their panels.
fn queries() -> Vec<(String, String)> {
    let dashboard: Value =
        serde_json::from_str(&text("charts/cadastre/files/dashboard.json")).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap().to_owned();
            queries.push((panel["title"].as_str().unwrap().to_owned(), expr));
        }
    }
    queries
}

#[test]
fn alerts_and_dashboard_use_only_series_that_exist() {
    let series = series();
    let alerts = alerts().into_iter();
    let exprs = alerts.map(|(name, it)| (name, it["expr"].as_str().unwrap().to_owned()));
    for (name, expr) in exprs.chain(queries()) {
        let used = used(&expr);
        assert!(!used.is_empty(), "{name}: {expr}");
        let unknown: Vec<&String> = used.difference(&series).collect();
        assert!(unknown.is_empty(), "{name} asks for {unknown:?}: {expr}");
    }
}

#[test]
fn panels_do_not_overlap_and_say_what_they_show() {
    let dashboard: Value =
        serde_json::from_str(&text("charts/cadastre/files/dashboard.json")).unwrap();
    assert_eq!(dashboard["uid"], "cadastre");
    let mut taken = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{title} is too wide");
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(taken.insert((x, y)), "{title} lies over another panel");
            }
        }
        let is_row = panel["type"] == "row";
        let said = panel["description"].as_str().unwrap_or_default();
        assert!(is_row || said.len() > 10, "{title}: no description");
    }
}

#[test]
fn the_list_of_metrics_is_what_the_code_says() {
    let page = metrics::page().unwrap();
    assert!(
        page == text("docs/metrics.md"),
        "docs/metrics.md is out of date: run `make metrics-doc`"
    );
    for all in [metrics::of_controller(), metrics::of_agent()] {
        for metric in all.unwrap() {
            assert!(metric.help.len() > 10, "{metric:?}");
            assert!(!metric.help.contains('|'), "{metric:?}");
        }
    }
}
