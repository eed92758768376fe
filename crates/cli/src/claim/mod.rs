//! `kubectl cadastre claim`: lists, creates and releases IPClaims.
//!
//! These subcommands need only rights to claims in the namespace. They also read pods and pools if the user has the
//! rights.
//!
//! # Guarantees
//! - `release` deletes only the claim that it has read, never a later claim with the same name.
//! - `create` checks nothing itself: it prints the answers of the API server and the controller.

mod create;
mod list;
mod release;

#[cfg(test)]
pub(crate) use create::{CreateState, new_claim, outcome, rejection};
#[cfg(test)]
pub(crate) use list::ClaimsReport;
#[cfg(test)]
pub(crate) use release::{User, consequence};

use clap::Subcommand;

use super::reach::ApiReach;
use super::{ExitVerdict, Flags};

/// List, create and release claims: addresses that stay with a workload
///
/// A pod gets the addresses of a claim of its namespace by the annotation cadastre.dev/claim.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre claim list -A
  kubectl cadastre claim create db --pool default
  kubectl cadastre claim create dns --address 10.244.7.7 --dry-run
  kubectl cadastre claim release db --wait")]
pub(crate) struct ClaimArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    List(list::ListArgs),
    Create(create::CreateArgs),
    Release(release::ReleaseArgs),
}

pub(crate) async fn exec(
    args: &ClaimArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    match &args.what {
        What::List(args) => list::exec(args, flags, reach).await,
        What::Create(args) => create::exec(args, flags, reach).await,
        What::Release(args) => release::exec(args, flags, reach).await,
    }
}
