//! `make torture`: runs Cadastre and other programs that do the same job through the same joins, deaths and faults, and
//! counts duplicates, leaks and seconds. Prints tables in Markdown for docs/comparison.md.
//!
//! Usage: `cadastre-torture [podcidrs|addresses|all] [SEED]`

use std::io::Write as _;

use anyhow::{Context as _, Result, bail};
use cadastre_e2e::assets::{self, Program};

mod addresses;
mod pod_cidrs;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_else(|| "all".to_owned());
    let seed = match arguments.next() {
        Some(text) => text
            .parse()
            .with_context(|| format!("{text} is no number"))?,
        None => fastrand::u64(..1_000_000),
    };
    progress(&format!("seed {seed}"))?;
    match what.as_str() {
        "podcidrs" => pod_cidrs::run(seed).await,
        "addresses" => addresses::run(seed).await,
        "all" => {
            pod_cidrs::run(seed).await?;
            say("")?;
            addresses::run(seed).await
        }
        other => bail!("{other}: what to torture is one of podcidrs, addresses, all"),
    }
}

/// Builds a program if it is missing, and returns whether it is there. If it cannot be built, for example because its
/// source cannot be downloaded, the others are run without it.
async fn is_available(program: Program) -> Result<bool> {
    let built = tokio::task::spawn_blocking(move || assets::ensure(&[program])).await?;
    if let Err(error) = &built {
        progress(&format!("{} is left out: {error:#}", program.name()))?;
    }
    Ok(built.is_ok())
}

/// Writes a line of a table to standard output.
fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Writes a line to standard error.
fn progress(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "{line}")?)
}
