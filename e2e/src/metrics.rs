//! Parses the parts of the Prometheus text format that tests and benches need.

use std::collections::BTreeMap;

/// One line of the Prometheus text format: a name, labels and a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name, with suffixes such as `_bucket`.
    pub name: String,
    /// The labels. Escapes in the values are decoded.
    pub labels: BTreeMap<String, String>,
    /// The value, which may be NaN or infinite.
    pub value: f64,
}

/// The labels by which kube-apiserver counts requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// The verb: `GET`, `LIST`, `WATCH`, `POST`, `PUT`, `PATCH`, `APPLY`, `DELETE`, …
    pub verb: String,
    /// The plural of the kind, for example `nodes` or `ippools`.
    pub resource: String,
    /// `status` or another subresource; empty for the object itself.
    pub subresource: String,
}

/// Returns all samples of a text in the Prometheus format. Comments and lines that cannot be parsed are ignored.
pub fn parse(text: &str) -> Vec<Sample> {
    text.lines().filter_map(sample).collect()
}

/// Returns the sum of the values of the metric `name`, over all series that have at least the labels in `labels`.
pub fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let fits = |sample: &&Sample| {
        sample.name == name
            && labels
                .iter()
                .all(|(key, value)| sample.labels.get(*key).is_some_and(|it| it == value))
    };
    samples.iter().filter(fits).map(|sample| sample.value).sum()
}

/// Sums `apiserver_request_total` by verb, resource and subresource over all response codes. kube-apiserver counts a
/// watch only when the watch ends.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // counters are small and not negative
pub fn requests(samples: &[Sample]) -> BTreeMap<Request, u64> {
    let mut counts = BTreeMap::new();
    for sample in samples
        .iter()
        .filter(|it| it.name == "apiserver_request_total")
    {
        let label = |key: &str| sample.labels.get(key).cloned().unwrap_or_default();
        let request = Request {
            verb: label("verb"),
            resource: label("resource"),
            subresource: label("subresource"),
        };
        *counts.entry(request).or_default() += sample.value as u64;
    }
    counts
}

fn sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(key.to_owned(), value);
            rest = after;
        }
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Splits a text at the first quote that is not escaped. Returns the part before the quote, with its escapes decoded,
/// and the part after the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match letters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# HELP apiserver_request_total Counter of requests.
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",resource="nodes",subresource="",verb="PATCH"} 40
apiserver_request_total{code="422",resource="nodes",subresource="",verb="PATCH"} 2
apiserver_request_total{code="200",resource="nodes",subresource="status",verb="PATCH"} 1e+01
process_cpu_seconds_total 12.5
odd{text="a \"b\", {c}\\"} 1 1700000000
"#;

    #[test]
    fn requests_are_summed_over_codes_and_kept_apart_by_subresource() {
        let counts = requests(&parse(TEXT));
        let of = |subresource: &str| Request {
            verb: "PATCH".to_owned(),
            resource: "nodes".to_owned(),
            subresource: subresource.to_owned(),
        };
        assert_eq!(counts, BTreeMap::from([(of(""), 42), (of("status"), 10)]));
    }

    #[test]
    fn labels_choose_the_series() {
        let samples = parse(TEXT);
        let name = "apiserver_request_total";
        assert!((sum(&samples, name, &[("code", "422")]) - 2.0).abs() < f64::EPSILON);
        assert!((sum(&samples, name, &[]) - 52.0).abs() < f64::EPSILON);
        assert!((sum(&samples, "process_cpu_seconds_total", &[]) - 12.5).abs() < f64::EPSILON);
    }

    #[test]
    fn quotes_and_braces_inside_a_label_are_its_text() {
        let samples = parse(TEXT);
        let odd = samples.iter().find(|it| it.name == "odd").unwrap();
        assert_eq!(odd.labels["text"], r#"a "b", {c}\"#);
    }
}
