//! Checks that objects and configurations in the pages are valid.

use cadastre_api::IPPool;
use serde_json::Value;

use crate::{assert_none, pages, text};

#[test]
fn yaml_and_json_in_pages_can_be_read() {
    let mut wrong = Vec::new();
    let mut pools = 0;
    for page in pages::all() {
        for block in &page.blocks {
            let read: Vec<Result<Value, String>> = match block.language.as_str() {
                "yaml" => {
                    let all = format!("\n{}", block.text);
                    let all: Vec<&str> = all.split("\n---\n").collect();
                    let read = all.iter().map(|it| serde_saphyr::from_str(it));
                    read.map(|it| it.map_err(|error| error.to_string()))
                        .collect()
                }
                "json" => {
                    vec![serde_json::from_str(&block.text).map_err(|error| error.to_string())]
                }
                _ => continue,
            };
            for object in read {
                let object = object.and_then(|it| {
                    if it["kind"] != "IPPool" {
                        return Ok(());
                    }
                    pools += 1;
                    as_written(&it)
                });
                if let Err(why) = object {
                    wrong.push(format!("{}: {why}: {}", page.name, block.text));
                }
            }
        }
    }
    assert_none(&wrong);
    assert!(pools > 0);
}

/// Checks that the code can parse an IPPool, and that the CRD has all fields of the IPPool.
fn as_written(pool: &Value) -> Result<(), String> {
    serde_json::from_value::<IPPool>(pool.clone()).map_err(|error| error.to_string())?;
    let crds = text("charts/cadastre/crds/cadastre.dev.yaml");
    let crds = crds
        .split("---\n")
        .filter(|it| it.contains("\n    kind: IPPool\n"));
    let crds: Vec<Value> = crds.map(|it| serde_saphyr::from_str(it).unwrap()).collect();
    let schema = &crds[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    match unknown(&pool["spec"], &schema["properties"]["spec"]) {
        Some(field) => Err(format!("an IPPool has no field spec{field}")),
        None => Ok(()),
    }
}

/// Returns the path of the first field that the schema does not have.
fn unknown(value: &Value, schema: &Value) -> Option<String> {
    if let Some(items) = value.as_array() {
        return items.iter().find_map(|it| unknown(it, &schema["items"]));
    }
    let mut fields = value.as_object()?.iter();
    fields.find_map(|(name, value)| match schema["properties"].get(name) {
        Some(inner) => unknown(value, inner).map(|it| format!(".{name}{it}")),
        None if schema.get("additionalProperties").is_some() => None,
        None => Some(format!(".{name}")),
    })
}

#[test]
fn a_field_that_no_pool_has_is_found() {
    let pool = |spec: Value| {
        let pool = serde_json::json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool",
            "metadata": {"name": "a"}, "spec": spec,
        });
        as_written(&pool)
    };
    let ranges = serde_json::json!({"cidrs": ["10.0.0.0/16"], "blockSize": 26});
    let selector = serde_json::json!({"matchLabels": {"a": "b"}});
    let good = serde_json::json!({"ipv4": ranges, "warm": {"low": 3}, "nodeSelector": selector});
    assert_eq!(pool(good), Ok(()));
    let bad = serde_json::json!({"ipv4": {"cidrs": ["10.0.0.0/16"], "blocksize": 26}});
    let error = "an IPPool has no field spec.ipv4.blocksize".to_owned();
    assert_eq!(pool(bad), Err(error));
}
