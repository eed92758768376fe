//! Runs helm, and renders the chart of this repository.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};

use crate::assets::{self, Program};
use crate::control_plane::{ADMIN, ControlPlane};

/// Returns the folder of this repository's chart.
pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/cadastre")
}

/// Renders the chart with helm, and builds helm first if it is missing. If rendering fails, helm's error message is the
/// error.
pub async fn template(flags: &[&str]) -> Result<String> {
    tokio::task::spawn_blocking(|| assets::ensure(&assets::TOOLS)).await??;
    let folder = tempfile::tempdir()?;
    let chart = chart().display().to_string();
    let mut args = vec!["template", "cadastre", &chart, "--namespace", "kube-system"];
    args.extend(flags);
    Helm::offline(folder.path()).run(&args).await
}

/// Runs helm commands against one cluster or without a cluster.
#[derive(Debug)]
pub struct Helm {
    program: Program,
    folder: PathBuf,
    kubeconfig: PathBuf,
}

impl Helm {
    /// Runs helm without a cluster. helm has its caches in `folder`.
    pub fn offline(folder: &Path) -> Self {
        Self {
            program: Program::Helm,
            folder: folder.to_owned(),
            kubeconfig: folder.join("none"),
        }
    }

    /// Runs helm as the administrator of `cluster`.
    pub fn of(cluster: &ControlPlane) -> Result<Self> {
        Ok(Self {
            program: Program::Helm,
            folder: cluster.folder().join("helm"),
            kubeconfig: cluster.kubeconfig(ADMIN)?,
        })
    }

    /// Uses helm 3 instead of the current release.
    #[must_use]
    pub fn three(self) -> Self {
        Self {
            program: Program::Helm3,
            ..self
        }
    }

    /// Runs helm and returns its standard output. If helm fails, its standard error is the error.
    pub async fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<String> {
        let output = tokio::process::Command::new(assets::find(self.program)?)
            .args(args)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &self.folder)
            .env("HELM_CACHE_HOME", self.folder.join("cache"))
            .env("HELM_CONFIG_HOME", self.folder.join("config"))
            .env("HELM_DATA_HOME", self.folder.join("data"))
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run helm")?;
        if !output.status.success() {
            bail!(
                "helm failed ({}): {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}
