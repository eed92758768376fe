//! A control plane to play with until Ctrl-C; nothing is left of it afterwards.

use std::io::Write as _;

use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let start = async { anyhow::Ok(Some(ControlPlane::start(Options::default()).await?)) };
    let cluster = tokio::select! {
        cluster = start => cluster?,
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
    };
    let Some(cluster) = cluster else {
        return Ok(());
    };
    writeln!(
        std::io::stdout(),
        "export KUBECONFIG={}\nCtrl-C ends it.",
        cluster.kubeconfig(ADMIN)?.display()
    )?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
