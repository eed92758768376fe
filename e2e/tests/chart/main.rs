//! Tests of the chart, which the real helm renders. They check the rendered objects, the values that the chart rejects,
//! whether an API server accepts the rendered objects, and the files that are generated from the chart.
//!
//! config/rbac and config/{default,pod-cidrs,secondary} are the chart's output in its three modes. docs/values.md is
//! generated from the chart's values.yaml. `make config` writes these files, and the tests check that they are up to
//! date.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

#[path = "../install/docs.rs"]
mod docs;
mod generated;
mod nodes;
mod refusals;
mod removal;
mod rendered;
mod server;
mod values;

use cadastre_e2e::assets;
use cadastre_e2e::helm::{Helm, chart, template};

/// Builds helm if it is missing.
async fn tools() {
    let ensured = tokio::task::spawn_blocking(|| assets::ensure(&assets::TOOLS)).await;
    ensured.unwrap().unwrap();
}

#[tokio::test]
async fn lint_finds_nothing() {
    tools().await;
    let folder = tempfile::tempdir().unwrap();
    let chart = chart().display().to_string();
    let helm = Helm::offline(folder.path());
    for mode in ["blocks", "podCIDRs", "secondary"] {
        let set = format!("mode={mode}");
        let said = helm.run(&["lint", "--strict", "--set", &set, &chart]).await;
        let said = said.unwrap();
        assert!(said.contains("0 chart(s) failed"), "{said}");
        assert!(!said.contains("icon is recommended"), "{said}");
    }
    let three = Helm::offline(folder.path()).three();
    let lint = ["lint", "--strict", "--kube-version=1.34.0", &chart];
    let said = three.run(&lint).await.unwrap();
    assert!(said.contains("0 chart(s) failed"), "{said}");
}

#[test]
fn the_versions_are_that_of_the_code() {
    let text = std::fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        let line = format!("\n{key}: {}\n", cadastre_core::VERSION);
        assert!(text.contains(&line), "Chart.yaml lacks {line:?}");
    }
}

/// `hack/chart` and `hack/krew` write the sources, the image and the checksums into a release's files. These values are
/// known only when a release is made.
#[tokio::test]
async fn a_release_names_its_sources_and_its_image() {
    tools().await;
    let folder = tempfile::tempdir().unwrap();
    let hack = chart().join("../../hack");
    let run = |script: &str| {
        let mut command = std::process::Command::new(hack.join(script));
        command
            .arg(folder.path())
            .env("SOURCE", "https://example.com/cadastre")
            .env("IMAGE", "registry.example.com/cadastre")
            .env("DOWNLOADS", "https://example.com/downloads");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run("chart");
    let version = cadastre_core::VERSION;
    let packed = folder.path().join(format!("cadastre-{version}.tgz"));
    let packed = packed.display().to_string();
    let helm = Helm::offline(folder.path());
    let said = helm.run(&["show", "chart", &packed]).await.unwrap();
    assert!(
        said.contains("sources:\n- https://example.com/cadastre\n"),
        "{said}"
    );
    let values = helm.run(&["show", "values", &packed]).await.unwrap();
    assert!(
        values.contains("repository: registry.example.com/cadastre\n"),
        "{values}"
    );
    let readme = helm.run(&["show", "readme", &packed]).await.unwrap();
    assert!(readme.contains("helm test cadastre"), "{readme}");

    for kind in ["linux-x86_64", "linux-aarch64"] {
        let archive = format!("kubectl-cadastre-{version}-{kind}.tar.gz");
        std::fs::write(folder.path().join(archive), kind).unwrap();
    }
    let manifest = run("krew");
    for part in [
        "kind: Plugin\n",
        "{os: linux, arch: amd64}\n",
        "{os: linux, arch: arm64}\n",
        &format!(
            "uri: https://example.com/downloads/kubectl-cadastre-{version}-linux-x86_64.tar.gz\n"
        ),
        // The SHA-256 of the linux-x86_64 archive that this test has written.
        "sha256: 300d051341afc8275b156035dc0452a085941feaaa476b400a30f3d227f60728\n",
    ] {
        assert_eq!(manifest.matches(part).count(), 1, "{part}: {manifest}");
    }
}
