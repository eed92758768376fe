//! Checks that versions and requirements are the same everywhere.
//!
//! All versions must equal the version in Cargo.toml. The chart's tests check Chart.yaml, and the files that are
//! generated from Chart.yaml. This file checks all other places.

use crate::repository::packages;
use crate::{assert_none, pages, text};

/// The rest of the line after the first occurrence of `start`.
fn after<'a>(text: &'a str, start: &str) -> &'a str {
    let rest = text
        .split_once(start)
        .unwrap_or_else(|| panic!("nothing begins with {start:?}"))
        .1;
    rest.lines().next().unwrap_or_default()
}

#[test]
fn the_version_is_said_alike() {
    let version = cadastre_core::VERSION;
    assert_eq!(after(&text("Dockerfile"), "ARG VERSION="), version);
    assert_eq!(
        after(&text("Cargo.toml"), "\nversion = "),
        format!("{version:?}")
    );
    for package in packages() {
        let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("version.workspace = true"),
            "{}: the version has one place",
            package.display()
        );
    }
    let mut wrong = Vec::new();
    for page in pages::all() {
        for block in &page.blocks {
            for start in ["cadastre:", "newTag: "] {
                for part in block.text.split(start).skip(1) {
                    let is_part = |c: char| c.is_ascii_digit() || c == '.';
                    let said = &part[..part.find(|c| !is_part(c)).unwrap_or(part.len())];
                    if said.split('.').count() == 3 && said != version {
                        wrong.push(format!("{}: {start}{said}, not {version}", page.name));
                    }
                }
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn the_changelog_tells_of_this_version() {
    let changelog = text("CHANGELOG.md");
    let first = after(&changelog, "\n## ");
    let version = cadastre_core::VERSION;
    let released = first.split_once(" - ").is_some_and(|(name, date)| {
        let is_date = date.len() == 10 && date.parse::<jiff::civil::Date>().is_ok();
        name == version && is_date
    });
    assert!(
        first == "Unreleased" || released,
        "CHANGELOG.md begins with {first:?}: it has to be \"Unreleased\" or \"{version} - YYYY-MM-DD\""
    );
}

#[test]
fn rust_is_needed_in_one_version() {
    let minimum = env!("CARGO_PKG_RUST_VERSION");
    for (file, said) in [
        ("README.md", format!("Rust ({minimum} or later)")),
        ("Dockerfile", format!("rust:{minimum}-bookworm")),
        ("hack/setup", format!("\"${{version%%-*}}\" {minimum}.0 ||")),
        ("hack/setup", format!("Rust {minimum} or newer")),
    ] {
        assert!(text(file).contains(&said), "{file} does not say {said:?}");
    }
}

#[test]
fn kubernetes_is_needed_in_one_version() {
    let chart = text("charts/cadastre/Chart.yaml");
    let range = after(&chart, "\nkubeVersion: ").trim_matches('"');
    let minimum = range
        .strip_prefix(">=")
        .unwrap()
        .strip_suffix(".0-0")
        .unwrap();
    for file in ["docs/install.md", "docs/versioning.md"] {
        let said = format!("Kubernetes {minimum} or newer");
        assert!(text(file).contains(&said), "{file} does not say {said:?}");
    }
    let tested = text("e2e/control-plane/go.mod");
    let tested = after(&tested, "k8s.io/kubernetes v1.")
        .split('.')
        .next()
        .unwrap();
    let said = format!("1.{tested}");
    assert!(
        text("docs/versioning.md").contains(&said),
        "docs/versioning.md does not name {said}"
    );
}
