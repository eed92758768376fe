//! `cadastre install-cni`: copies the CNI plugin to the host.

use std::path::PathBuf;

use anyhow::Context;

use cadastre_agent::files::install::install;

/// Copy the CNI plugin into the runtime's plugin directory; safe while the runtime uses it
///
/// Meant for an init container of the agent. The replacement is atomic: the old plugin stays until the new one is
/// complete.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// File of the CNI plugin; by default cadastre-ipam in the directory of this executable
    #[arg(long, env = "CADASTRE_CNI_FROM")]
    from: Option<PathBuf>,

    /// The runtime's directory of CNI plugins
    #[arg(long, env = "CADASTRE_CNI_BIN", default_value = "/opt/cni/bin")]
    to: PathBuf,
}

pub(super) fn exec(args: &Args) -> anyhow::Result<()> {
    let from = match &args.from {
        Some(from) => from.clone(),
        None => std::env::current_exe()
            .context("no way to find cadastre-ipam: give --from")?
            .with_file_name("cadastre-ipam"),
    };
    let (path, new) = install(&from, &args.to).context(
        "the plugin is not installed (--to, or agent.cni.binDir of the chart, is the runtime's directory of plugins)",
    )?;
    let what = if new { "installed" } else { "there already" };
    eprintln!("cadastre: {} {what}", path.display());
    Ok(())
}
