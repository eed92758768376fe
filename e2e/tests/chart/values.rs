//! Generates docs/values.md from the chart's values.yaml.

use std::fmt::Write as _;

use cadastre_e2e::helm::chart;

use crate::generated::assert_generated;

const HEAD: &str = "\
# Values of the chart

Generated from `charts/cadastre/values.yaml`: change that and run `make config`.

| value | default | what it is |
|---|---|---|
";

#[derive(Debug)]
struct Entry {
    path: String,
    default: String,
    about: String,
}

/// Parses values.yaml. Each value that users can set has a comment above it. A key without a comment only groups other
/// keys.
fn read(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut groups: Vec<(usize, String)> = Vec::new();
    let mut about = String::new();
    let mut inside: Option<usize> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some(outer) = inside {
            if indent > outer && !trimmed.is_empty() {
                let default = &mut entries.last_mut().unwrap().default;
                default.push_str(if default.is_empty() { "" } else { " " });
                default.push_str(trimmed);
                continue;
            }
            inside = None;
        }
        if trimmed.is_empty() {
            about.clear();
        } else if let Some(comment) = trimmed.strip_prefix('#') {
            about.push_str(if about.is_empty() { "" } else { " " });
            about.push_str(comment.trim());
        } else {
            let (key, default) = trimmed.split_once(':').unwrap();
            groups.retain(|(at, _)| *at < indent);
            groups.push((indent, key.to_owned()));
            if about.is_empty() {
                assert!(default.is_empty(), "no comment above {line:?}");
                continue;
            }
            let path: Vec<&str> = groups.iter().map(|(_, key)| key.as_str()).collect();
            entries.push(Entry {
                path: path.join("."),
                default: default.trim().to_owned(),
                about: std::mem::take(&mut about),
            });
            inside = Some(indent);
        }
    }
    entries
}

#[test]
fn the_table_is_made_of_the_values() {
    let text = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let entries = read(&text);
    assert!(entries.len() > 40, "{entries:?}");
    let mut page = HEAD.to_owned();
    for Entry {
        path,
        default,
        about,
    } in &entries
    {
        let about = about.replace('|', "\\|");
        writeln!(page, "| `{path}` | `{default}` | {about} |").unwrap();
    }
    assert_generated("docs/values.md", &page);
}

#[test]
fn the_schema_knows_every_value() {
    let text = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let schema = std::fs::read_to_string(chart().join("values.schema.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    for Entry { path, .. } in read(&text) {
        let pointer = format!("/properties/{}", path.replace('.', "/properties/"));
        assert!(
            schema.pointer(&pointer).is_some(),
            "{path} is not in the schema"
        );
    }
}
