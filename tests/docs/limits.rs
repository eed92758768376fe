//! Checks that docs/pools.md has the same limits of lists and maps as the CRD.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::text;

/// Collects the maximum numbers of entries of all lists and maps below a schema, by path.
fn limits(schema: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    let most = ["maxItems", "maxProperties"].iter();
    for most in most.filter_map(|it| schema[*it].as_u64()) {
        found.insert(path.to_owned(), most);
    }
    limits_of_items(&schema["items"], path, found);
    let fields = schema["properties"].as_object();
    for (name, field) in fields.into_iter().flatten() {
        // The limits of the three selectors are equal, so the page names them once.
        let name = if name.ends_with("Selector") {
            "nodeSelector"
        } else {
            name
        };
        let path = if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        };
        let is_list = field["type"] == "array" || field["additionalProperties"].is_object();
        let is_bounded = field["maxItems"].is_u64() || field["maxProperties"].is_u64();
        assert!(is_bounded || !is_list, "{path} has no limit");
        limits(field, &path, found);
    }
}

fn limits_of_items(items: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    if items["properties"].is_object() {
        limits(items, path, found);
    }
}

#[test]
fn the_page_on_pools_has_the_limits_of_the_crd() {
    let crds = text("charts/cadastre/crds/cadastre.dev.yaml");
    let mut crds = crds.split("---\n");
    let pools = crds.find(|it| it.contains("\n    kind: IPPool\n")).unwrap();
    let pools: Value = serde_saphyr::from_str(pools).unwrap();
    let schema = &pools["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut found = BTreeMap::new();
    limits(&schema["properties"]["spec"], "", &mut found);
    let page = text("docs/pools.md");
    let (_, table) = page.split_once("\n## Limits\n").unwrap();
    let table = table.split("\n## ").next().unwrap();
    let row = |line: &str| -> Option<(String, u64)> {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let most = cells.get(2)?.replace(',', "").parse().ok()?;
        Some((cells[1].trim_matches('`').to_owned(), most))
    };
    let listed: BTreeMap<String, u64> = table.lines().filter_map(row).collect();
    assert_eq!(listed, found);
    assert_eq!(found["reserved"], 128, "they are found");
}
