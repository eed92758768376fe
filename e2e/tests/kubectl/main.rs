//! `kubectl cadastre` as a process, with a real API server.
//!
//! | file | subject |
//! |---|---|
//! | `show` | show, map and explain in a healthy cluster; output is compared with snapshots |
//! | `faults` | `check` finds each fault that a test creates; what `release` does and rejects |
//! | `planning` | the predictions of `plan`, and what then happens |
//! | `requests` | `release` and `drain` with a controller that leads |
//! | `claims` | `claim`, and how claims are shown, with a controller that leads |
//! | `access` | no server, no CRDs, no permissions; as a plugin of kubectl; the support bundle |
//!
//! Snapshots are in `snapshots/`; `CADASTRE_SNAPSHOTS=write` overwrites them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // allowed in helpers as in tests

mod access;
mod claims;
mod faults;
mod planning;
mod requests;
mod show;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cadastre_core::VERSION;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::{ControlPlane, daemon};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// Asserts the exit status, and that the standard output contains this text.
    #[track_caller]
    pub(crate) fn assert_out(&self, code: i32, text: &str) {
        assert!(
            self.code == code && self.out.contains(text),
            "no {text:?}: {self:?}"
        );
    }

    /// Asserts the exit status, and that the standard error contains this text.
    #[track_caller]
    pub(crate) fn assert_err(&self, code: i32, text: &str) {
        assert!(
            self.code == code && self.err.contains(text),
            "no {text:?}: {self:?}"
        );
    }

    /// Returns the standard output, parsed as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Returns a command that runs the kubectl plugin with a kubeconfig and arguments, which are separated by spaces.
pub(crate) fn command(kubeconfig: &Path, args: &str) -> Command {
    let mut command = Command::new(daemon::kubectl_plugin().unwrap());
    command
        .args(args.split(' '))
        .env("KUBECONFIG", kubeconfig)
        .env_remove("COLUMNS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Starts the kubectl plugin with the administrator's kubeconfig.
pub(crate) fn start(cluster: &ControlPlane, args: &str) -> Child {
    command(&cluster.kubeconfig(ADMIN).unwrap(), args)
        .spawn()
        .unwrap()
}

pub(crate) async fn end(child: Child) -> Ran {
    let output = child.wait_with_output().await.unwrap();
    Ran {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs the kubectl plugin with the administrator's kubeconfig, and waits until it has ended.
pub(crate) async fn run(cluster: &ControlPlane, args: &str) -> Ran {
    end(start(cluster, args)).await
}

/// Runs the kubectl plugin, asserts that it succeeds, and returns its standard output.
pub(crate) async fn ok(cluster: &ControlPlane, args: &str) -> String {
    let ran = run(cluster, args).await;
    assert_eq!(ran.code, 0, "{args}: {ran:?}");
    ran.out
}

/// Compares a text with its snapshot. Ages, UIDs and aligning spaces are ignored, because they differ from run to run.
pub(crate) fn snapshot(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/kubectl/snapshots")
        .join(format!("{name}.txt"));
    let text = text.lines().map(plain).collect::<Vec<_>>().join("\n") + "\n";
    if std::env::var_os("CADASTRE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        text,
        known,
        "{} differs: if that is right, write it anew with CADASTRE_SNAPSHOTS=write",
        path.display()
    );
}

/// Replaces ages, UIDs and our version in a line by placeholders, and removes spaces that align columns. Returns the
/// new line.
fn plain(line: &str) -> String {
    let indent = line.len() - line.trim_start().len();
    let gaps = line
        .trim()
        .split("  ")
        .map(str::trim)
        .filter(|cell| !cell.is_empty());
    let cells: Vec<String> = gaps
        .map(|cell| cell.split(' ').map(word).collect::<Vec<_>>().join(" "))
        .collect();
    format!("{}{}", " ".repeat(indent.min(2)), cells.join("  "))
}

fn word(word: &str) -> String {
    let bare = word.trim_end_matches([',', '.', ')']);
    let tail = &word[bare.len()..];
    let is_age = bare.len() > 1
        && bare.ends_with(['s', 'm', 'h', 'd'])
        && bare[..bare.len() - 1].bytes().all(|it| it.is_ascii_digit());
    let parts: Vec<usize> = bare.split('-').map(str::len).collect();
    let is_uid = parts == [8, 4, 4, 4, 12];
    match (is_age, is_uid) {
        (true, _) => format!("AGE{tail}"),
        (_, true) => format!("UID{tail}"),
        _ if bare == VERSION => format!("VERSION{tail}"),
        _ => word.to_owned(),
    }
}

/// Returns a pool with the controller's finalizer, for tests in which no controller runs.
pub(crate) fn pool(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool",
        "metadata": {"name": name, "finalizers": ["cadastre.dev/ranges-allocated"]}, "spec": spec,
    })
}
