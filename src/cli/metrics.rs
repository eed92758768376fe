//! `cadastre metrics`

use std::io::Write;

use anyhow::Context;

/// Print the list of all metrics as Markdown
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn exec(_: &Args) -> anyhow::Result<()> {
    let text = crate::telemetry::catalog::page().context("the list cannot be made")?;
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("standard output is closed")
}
