//! Files of the repository that are generated from the chart.

use std::collections::BTreeSet;
use std::path::Path;

use crate::template;

/// The first line of each generated file.
const HEAD: &str = "# Generated from charts/cadastre: change that and run `make config`.\n";

/// Asserts that the file at `path` has this content. If `UPDATE` is set in the environment, writes the file first.
pub fn assert_generated(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let is = std::fs::read_to_string(&path).unwrap_or_default();
    let line = text.lines().zip(is.lines()).find(|(new, old)| new != old);
    assert!(
        is == text,
        "{} is not what the chart gives: run `make config`; the first line that differs: {line:?}",
        path.display()
    );
}

/// One document of helm's output.
struct Document {
    /// The path of the document's template, such as `rbac/agent.yaml`
    source: String,
    text: String,
}

/// Splits helm's output into documents. Leaves out the labels that depend on the release of helm.
fn documents(rendered: &str) -> Vec<Document> {
    let all = rendered.split("---\n").filter(|it| !it.trim().is_empty());
    all.map(|document| {
        let (source, text) = document.split_once('\n').unwrap();
        let source = source.strip_prefix("# Source: cadastre/templates/");
        let mine = |line: &&str| !line.contains("helm.sh/chart:") && !line.contains("managed-by:");
        let lines: Vec<&str> = text.trim_end().lines().filter(mine).collect();
        Document {
            source: source.unwrap_or_else(|| panic!("{document}")).to_owned(),
            text: lines.join("\n") + "\n",
        }
    })
    .collect()
}

fn joined<'a>(documents: impl Iterator<Item = &'a Document>) -> String {
    let texts: Vec<&str> = documents.map(|it| it.text.as_str()).collect();
    format!("{HEAD}---\n{}", texts.join("---\n"))
}

#[tokio::test]
async fn config_is_what_the_chart_renders() {
    for (folder, flags) in [
        ("default", &[][..]),
        ("pod-cidrs", &["--set", "mode=podCIDRs"]),
        ("secondary", &["--set", "mode=secondary"]),
    ] {
        let mut all = documents(&template(flags).await.unwrap());
        // The templates in tests/ are only for `helm test`. So they are not in files for `kubectl apply`.
        all.retain(|it| !it.source.starts_with("tests/"));
        assert!(all.iter().all(|it| !it.text.contains("elm")), "{folder}");
        assert_generated(
            &format!("config/{folder}/cadastre.yaml"),
            &joined(all.iter()),
        );
        if folder != "default" {
            continue;
        }
        for part in ["agent", "controller", "default-pool"] {
            let source = format!("rbac/{part}.yaml");
            let of_part = all.iter().filter(|it| it.source == source);
            assert_generated(&format!("config/{source}"), &joined(of_part));
        }
    }
}

#[tokio::test]
async fn config_has_the_role_for_frr_configurations() {
    let flags = ["--set", "frr.namespace=frr-k8s-system"];
    let all = documents(&template(&flags).await.unwrap());
    let of_frr = all.iter().filter(|it| it.source == "rbac/frr.yaml");
    assert_generated("config/rbac/frr.yaml", &joined(of_frr));
}

#[tokio::test]
async fn kustomize_gives_the_same_and_no_crds() {
    use cadastre_e2e::assets::{Program, find};
    for folder in ["default", "pod-cidrs", "secondary"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../config/{folder}"));
        let done = tokio::process::Command::new(find(Program::Kubectl).unwrap())
            .arg("kustomize")
            .arg(&path)
            .output()
            .await
            .unwrap();
        let complaint = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{complaint}");
        let built = String::from_utf8(done.stdout).unwrap();
        let text = std::fs::read_to_string(path.join("cadastre.yaml")).unwrap();
        assert_eq!(named(&built), named(&text), "{folder}");
        // The folder must not contain the CRDs. Otherwise, `kubectl delete -k` would delete all pools, blocks and
        // NodeSubnets.
        assert!(
            !built.contains("kind: CustomResourceDefinition"),
            "{folder}"
        );
    }
}

/// Returns kind and name of every object in the text.
fn named(text: &str) -> BTreeSet<(String, String)> {
    let of = |document: &str, start: &str| {
        let line = document.lines().find_map(|it| it.strip_prefix(start));
        line.map(str::to_owned)
    };
    let all = text.split("---\n");
    let all = all.filter_map(|it| Some((of(it, "kind: ")?, of(it, "  name: ")?)));
    all.collect()
}
