//! The command line of `cadastre`, one file per subcommand. The kubectl plugin is the crate `cadastre_cli`.

mod agent;
mod controller;
mod crd;
mod daemon;
mod install_cni;
pub mod metrics;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use cadastre_core::inert;

/// Cluster-wide IP address management for Kubernetes
#[derive(Debug, Parser)]
#[command(
    name = "cadastre",
    version,
    propagate_version = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Controller(Box<controller::Args>),
    Agent(Box<agent::Args>),
    InstallCni(install_cni::Args),
    Crd(crd::Args),
    Metrics(metrics::Args),
    /// The kubectl plugin as a subcommand, for environments that have only this image
    Kubectl(Box<cadastre_cli::Cli>),
}

/// Runs the subcommand. If the subcommand fails, prints the error to standard error as `cadastre: …`.
pub fn main(cli: Cli) -> ExitCode {
    let done = match cli.verb {
        Verb::Controller(args) => controller::exec(*args),
        Verb::Agent(args) => agent::exec(*args),
        Verb::InstallCni(args) => install_cni::exec(&args),
        Verb::Crd(args) => crd::exec(&args),
        Verb::Metrics(args) => metrics::exec(&args),
        Verb::Kubectl(cli) => return cadastre_cli::end(*cli),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cadastre: {}", inert::lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
