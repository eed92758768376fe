//! Checks an exposition against the conventions of Prometheus, as `promtool check metrics` does: every family
//! has a description, is named after what it counts and uses base units.

use std::collections::{BTreeMap, BTreeSet};

/// Suffixes of units that are not base units, with the base unit to use instead.
const UNITS: [(&str, &str); 12] = [
    ("_milliseconds", "seconds"),
    ("_microseconds", "seconds"),
    ("_nanoseconds", "seconds"),
    ("_ms", "seconds"),
    ("_us", "seconds"),
    ("_minutes", "seconds"),
    ("_hours", "seconds"),
    ("_kilobytes", "bytes"),
    ("_megabytes", "bytes"),
    ("_mib", "bytes"),
    ("_percent", "ratio"),
    ("_percentage", "ratio"),
];

/// Returns one line for each violation.
pub fn lint(text: &str) -> Vec<String> {
    let mut help: BTreeMap<&str, &str> = BTreeMap::new();
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    let mut series = BTreeSet::new();
    let mut found = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, words) = rest.split_once(' ').unwrap_or((rest, ""));
            if help.insert(name, words).is_some() {
                found.push(format!("{name}: a second HELP"));
            }
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, ""));
            if types.insert(name, kind).is_some() {
                found.push(format!("{name}: a second TYPE"));
            }
        } else if !line.starts_with('#') {
            let (id, value) = line.rsplit_once(' ').unwrap_or((line, ""));
            if value.parse::<f64>().is_err() {
                found.push(format!("no number: {line}"));
            }
            if !series.insert(id) {
                found.push(format!("twice: {id}"));
            }
        }
    }
    for (name, kind) in &types {
        found.extend(
            family(name, kind)
                .into_iter()
                .map(|it| format!("{name}: {it}")),
        );
        if help.get(name).is_none_or(|words| words.trim().is_empty()) {
            found.push(format!("{name}: no HELP"));
        }
    }
    for id in series {
        let name = id.split_once('{').map_or(id, |(name, _)| name);
        if !types.contains_key(name) && !types.get(base(name)).is_some_and(|it| has_parts(it)) {
            found.push(format!("{name}: no TYPE"));
        }
    }
    found
}

fn family(name: &str, kind: &str) -> Vec<String> {
    let mut found = Vec::new();
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(word) {
        found.push("a name is made of a-z, 0-9 and _".to_owned());
    }
    if !matches!(kind, "counter" | "gauge" | "histogram" | "summary") {
        found.push(format!("unknown TYPE {kind:?}"));
    }
    if (kind == "counter") != name.ends_with("_total") {
        found.push(format!(
            "_total is the end of counters and of nothing else; it is a {kind}"
        ));
    }
    if !has_parts(kind) && base(name) != name {
        found.push(format!(
            "_bucket, _count and _sum are parts of histograms; it is a {kind}"
        ));
    }
    let plain = name.strip_suffix("_total").unwrap_or(name);
    for (unit, base) in UNITS.iter().filter(|(unit, _)| plain.ends_with(unit)) {
        found.push(format!("{unit} is no base unit: give {base}"));
    }
    found
}

fn has_parts(kind: &str) -> bool {
    matches!(kind, "histogram" | "summary")
}

fn base(name: &str) -> &str {
    let ends = ["_bucket", "_count", "_sum"];
    ends.iter()
        .find_map(|end| name.strip_suffix(end))
        .unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_metrics_pass() {
        let text = "# HELP a_total Things\n# TYPE a_total counter\na_total{x=\"a b\"} 1\n\
                    # HELP b_seconds Time\n# TYPE b_seconds histogram\nb_seconds_bucket{le=\"+Inf\"} 1\n\
                    b_seconds_sum 0.5\nb_seconds_count 1\n\
                    # HELP c Now\n# TYPE c gauge\nc NaN\n";
        assert!(lint(text).is_empty(), "{:?}", lint(text));
    }

    #[test]
    fn each_fault_is_named() {
        for (text, fault) in [
            ("a 1\n", "no TYPE"),
            ("# TYPE a gauge\na 1\n", "no HELP"),
            ("# HELP a x\n# TYPE a_total gauge\n", "_total is the end"),
            ("# HELP a x\n# TYPE a counter\n", "_total is the end"),
            ("# HELP a_ms x\n# TYPE a_ms gauge\n", "no base unit"),
            (
                "# HELP a_count x\n# TYPE a_count gauge\n",
                "parts of histograms",
            ),
            ("# HELP a_B x\n# TYPE a_B gauge\n", "made of a-z"),
            (
                "# HELP a x\n# TYPE a gauge\na{b=\"1\"} 1\na{b=\"1\"} 2\n",
                "twice",
            ),
            ("# HELP a x\n# TYPE a gauge\na one\n", "no number"),
        ] {
            let found = lint(text);
            assert!(
                found.iter().any(|it| it.contains(fault)),
                "{text}: {found:?}"
            );
        }
    }
}
