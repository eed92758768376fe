//! Objects that the documentation shows, so that tests apply what readers apply.

use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

/// Returns the objects of all `yaml` code blocks in the section `heading` of a page in `docs`.
pub fn objects(page: &str, heading: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let text = std::fs::read_to_string(folder.join(page)).unwrap();
    let section = text.split_once(&format!("\n## {heading}\n"));
    let section = section.with_context(|| format!("docs/{page} has no section {heading:?}"));
    let section = section.unwrap().1.split("\n## ").next().unwrap_or_default();
    let blocks = section.split("```yaml\n").skip(1);
    let blocks = blocks.map(|it| it.split("```").next().unwrap_or_default());
    blocks.flat_map(parse).collect()
}

/// Parses the documents of a YAML text, apart from empty ones.
pub fn parse(text: &str) -> Vec<Value> {
    let documents = text.split("\n---\n");
    let parsed = documents.map(|it| serde_saphyr::from_str(it).unwrap());
    parsed.filter(|it: &Value| !it.is_null()).collect()
}
