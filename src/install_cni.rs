//! `cadastre install-cni`

use std::path::PathBuf;

use anyhow::Context;

use cadastre_agent::files::install::install;

/// Put the CNI plugin into the runtime's directory, at once and also while it runs
///
/// For an init container of the agent: the old plugin is there until the new one is.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The plugin; without it cadastre-ipam beside this executable
    #[arg(long, env = "CADASTRE_CNI_FROM")]
    from: Option<PathBuf>,

    /// The runtime's directory of plugins
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
