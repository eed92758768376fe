//! `cadastre crd`: prints the CustomResourceDefinitions.

use std::io::Write;

use anyhow::Context;

/// Print the CustomResourceDefinitions (cadastre crd | kubectl apply --server-side -f -)
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn exec(_: &Args) -> anyhow::Result<()> {
    let text = cadastre_api::crd::yaml().context("the CRDs cannot be rendered")?;
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("standard output is closed")
}
