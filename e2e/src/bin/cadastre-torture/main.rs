//! `make torture`: runs Cadastre and other programs that do the same job through the same joins, deaths and faults, and
//! counts duplicates, leaks and seconds. Prints tables in Markdown for docs/comparison.md.
//!
//! Usage: `cadastre-torture [podcidrs|addresses|all] [SEED]`

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use cadastre_e2e::ControlPlane;
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use serde_json::Value;

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

/// Installs CRDs, and waits until their kinds are served.
async fn install(cluster: &ControlPlane, crds: &[PathBuf]) -> Result<()> {
    for crd in crds {
        let crd = crd.display().to_string();
        cluster.kubectl(&["apply", "-f", &crd]).await?;
    }
    let wait = "wait --for=condition=Established --timeout=120s crd --all";
    cluster.kubectl_line(wait).await?;
    Ok(())
}

/// Creates an object, or those of a List. Their kinds may have been installed a moment ago.
async fn create(cluster: &ControlPlane, object: &Value) -> Result<()> {
    let object = object.to_string();
    // A kind may be established a moment before it can be discovered.
    until("the objects are there", LIMIT, async || {
        let apply = ["apply", "-f", "-"];
        cluster.kubectl_stdin(&apply, &object).await.map(Some)
    })
    .await?;
    Ok(())
}

/// Writes a line of a table to standard output.
fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Writes a line to standard error.
fn progress(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "{line}")?)
}
