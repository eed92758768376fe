//! Runs kube-scheduler, for tests whose pods name no node.

use anyhow::Result;

use crate::assets::{self, Program};
use crate::control_plane::ControlPlane;
use crate::ports;
use crate::process::{self, Process};

/// The user as which kube-scheduler authenticates.
pub const USER: &str = "system:kube-scheduler";

/// Starts kube-scheduler, which is killed when the returned value is dropped.
pub fn start(cluster: &ControlPlane) -> Result<Process> {
    let folder = cluster.folder();
    let mut command = process::command(&assets::find(Program::KubeScheduler)?);
    command
        .current_dir(folder)
        .arg(format!(
            "--kubeconfig={}",
            cluster.kubeconfig(USER)?.display()
        ))
        .args(["--leader-elect=false", "--bind-address=127.0.0.1"])
        .arg(format!("--secure-port={}", ports::free()?))
        .arg(format!("--cert-dir={}", folder.join("scheduler").display()));
    Process::spawn(
        "kube-scheduler",
        command,
        &folder.join("kube-scheduler.log"),
    )
}
