//! The chart by helm itself: what it renders, what it refuses, what an API server says to it, and the
//! files that are made of it.
//!
//! config/rbac and config/{default,pod-cidrs,secondary} are what the chart renders in its three modes,
//! docs/values.md is made of its values.yaml. `make config` writes them, these tests hold them.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

mod made;
mod refusals;
mod rendered;
mod server;
mod values;

use cadastre_e2e::assets;
use cadastre_e2e::helm::{Helm, chart, template};

#[tokio::test]
async fn lint_finds_nothing() {
    tokio::task::spawn_blocking(|| assets::ensure(&assets::TOOLS))
        .await
        .unwrap()
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let chart = chart().display().to_string();
    let helm = Helm::offline(folder.path());
    for mode in ["blocks", "podCIDRs", "secondary"] {
        let set = format!("mode={mode}");
        let said = helm.run(&["lint", "--strict", "--set", &set, &chart]).await;
        let said = said.unwrap();
        assert!(said.contains("0 chart(s) failed"), "{said}");
    }
}

#[test]
fn the_versions_are_that_of_the_code() {
    let text = std::fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        let line = format!("\n{key}: {}\n", cadastre::VERSION);
        assert!(text.contains(&line), "Chart.yaml lacks {line:?}");
    }
}
