//! `kubectl cadastre`: shows and checks the address space, with nothing but the user's rights in the API.
//!
//! No controller and no agent has to run: a subcommand such as `show` reads the objects of the API and evaluates them
//! with the controller's own code.
//!
//! | file | subject |
//! |---|---|
//! | [`lists`], `claims`, [`inventory`] | the objects as listed; claims; the objects, parsed and indexed |
//! | [`reach`] | all IO with the API server |
//! | [`render`] | tables, JSON, YAML, colours |
//! | [`status`], [`running`] | the health of Cadastre itself; its controllers, agents and leases |
//! | [`show`], [`address`] | who has which range and address |
//! | [`map`] | the space of a pool as a picture |
//! | [`explain`] | why a pool serves a pod, why a node waits, why a pool is exhausted |
//! | [`check`] | contradictions between objects |
//! | [`plan`] | the effect of changes before they are made |
//! | [`release`], [`drain`], `pop`, `update` | requests to release or withdraw addresses and blocks; their writes |
//! | `claim` | lists, creates and deletes claims |
//! | [`complete`] | command line completion |
//! | [`bundle`] | everything that a problem report needs, without secrets |
//!
//! # Guarantees
//! - The result of a subcommand depends only on the inventory, the arguments and the current time; that of `explain
//!   pod` also on the pod's events.
//! - Only [`release`], [`drain`], `pop` and `claim` write. The first three write an annotation of a NodeSubnet, and the
//!   write fails if the NodeSubnet has changed since it was read. `claim` creates and deletes IPClaims.
//! - Exit code 0: done, and nothing was found. 1: failed; standard error says why. 2: `check` or `status` found
//!   something, the changes of `plan` do not fit, or `release`, `drain`, `pop` or `claim` left something undone.

#![warn(unreachable_pub)]

mod address;
mod bundle;
mod check;
mod claim;
mod claims;
mod complete;
mod drain;
mod explain;
mod inventory;
mod lists;
mod map;
mod plan;
mod pop;
mod reach;
mod release;
mod render;
mod running;
mod show;
mod status;
#[cfg(test)]
mod tests;
mod update;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};

use cadastre_core::inert;

/// The result of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitVerdict {
    /// Nothing to report; exit code 0
    Clean,
    /// There is something that a user should look at; exit code 2
    Findings,
}

impl ExitVerdict {
    fn of(has_findings: bool) -> Self {
        if has_findings {
            ExitVerdict::Findings
        } else {
            ExitVerdict::Clean
        }
    }
}

/// Show, explain and check who uses which addresses of the cluster
///
/// Needs nothing but access to the API: no controller and no agent has to run. All commands only read, except
/// `release`, `drain`, `undrain`, `pop` and `push`, which write an annotation of a NodeSubnet, and `claim create` and
/// `claim release`.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-cadastre",
    bin_name = "kubectl cadastre",
    version,
    propagate_version = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    verb: Verb,
}

/// Flags that all subcommands have, spelled as in kubectl.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Flags {
    /// Path of the kubeconfig file
    #[arg(long, global = true, help_heading = "Cluster")]
    pub kubeconfig: Option<PathBuf>,

    /// Name of the kubeconfig context
    #[arg(long, global = true, help_heading = "Cluster")]
    pub context: Option<String>,

    /// Namespace of pods and claims that are given by name alone; by default the namespace of the context
    #[arg(short, long, global = true, help_heading = "Cluster")]
    pub namespace: Option<String>,

    /// Username to impersonate
    #[arg(
        long = "as",
        global = true,
        value_name = "USER",
        help_heading = "Cluster"
    )]
    pub impersonate: Option<String>,

    /// Timeout of one request to the API server, in seconds
    #[arg(long, global = true, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=3600), help_heading = "Cluster")]
    pub request_timeout: u16,

    /// List objects in chunks of this size; 0 lists all at once
    #[arg(long, global = true, default_value_t = 1000, help_heading = "Cluster")]
    pub chunk_size: u32,

    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t = render::Output::Table)]
    pub output: render::Output,
}

impl Flags {
    /// Returns the time limit of one request to the API server.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.request_timeout.into())
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    Status(status::StatusArgs),
    Show(show::ShowArgs),
    Map(map::MapArgs),
    Explain(explain::ExplainArgs),
    Check(check::CheckArgs),
    Plan(plan::PlanArgs),
    Release(release::ReleaseArgs),
    Drain(drain::DrainArgs),
    Undrain(drain::UndrainArgs),
    Pop(pop::PopArgs),
    Push(pop::PushArgs),
    Claim(claim::ClaimArgs),
    SupportBundle(bundle::BundleArgs),
    Completion(CompletionArgs),
    #[command(name = "__complete", hide = true)]
    Complete(complete::CompleteArgs),
}

/// Print a completion script
///
/// For `kubectl`, prints the script that kubectl runs to complete this plugin, including names of objects. For a shell,
/// prints the script by which the shell completes `kubectl-cadastre` itself, without names of objects.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre completion kubectl > /usr/local/bin/kubectl_complete-cadastre
  chmod +x /usr/local/bin/kubectl_complete-cadastre
  kubectl cadastre completion bash > /etc/bash_completion.d/kubectl-cadastre")]
struct CompletionArgs {
    /// What the script is for: kubectl, or a shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shell {
    Kubectl,
    Bash,
    Zsh,
    Fish,
    #[value(name = "powershell")]
    Pwsh,
}

/// Parses and runs a command line. Prints errors, and returns the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // clap's own exit code for errors is 2. Here, 2 means findings, so 1 is returned.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    end(cli)
}

/// Runs a parsed command line. Prints its error, if any, and returns the exit code.
pub fn end(cli: Cli) -> ExitCode {
    match run(cli) {
        Ok(ExitVerdict::Clean) => ExitCode::SUCCESS,
        Ok(ExitVerdict::Findings) => ExitCode::from(2),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", inert::lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitVerdict> {
    let Cli { flags, verb } = cli;
    if let Verb::Completion(args) = verb {
        return completion(args.shell);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the async runtime cannot be started")?;
    runtime.block_on(async {
        if let Verb::Complete(args) = verb {
            return complete::exec(&args).await;
        }
        let reach = reach::ApiReach::new(&flags).await?;
        match verb {
            Verb::Status(args) => status::exec(&args, &flags, &reach).await,
            Verb::Show(args) => show::exec(&args, &flags, &reach).await,
            Verb::Map(args) => map::exec(&args, &flags, &reach).await,
            Verb::Explain(args) => explain::exec(&args, &flags, &reach).await,
            Verb::Check(args) => check::exec(&args, &flags, &reach).await,
            Verb::Plan(args) => plan::exec(&args, &flags, &reach).await,
            Verb::Release(args) => release::exec(&args, &flags, &reach).await,
            Verb::Drain(args) => drain::exec_drain(&args, &flags, &reach).await,
            Verb::Undrain(args) => drain::exec_undrain(&args, &flags, &reach).await,
            Verb::Pop(args) => pop::exec_pop(&args, &flags, &reach).await,
            Verb::Push(args) => pop::exec_push(&args, &flags, &reach).await,
            Verb::Claim(args) => claim::exec(&args, &flags, &reach).await,
            Verb::SupportBundle(args) => bundle::exec(&args, &flags, &reach).await,
            Verb::Completion(_) | Verb::Complete(_) => Ok(ExitVerdict::Clean),
        }
    })
}

/// The content of `kubectl_complete-cadastre`, a script that kubectl runs with the words of a command line.
const FOR_KUBECTL: &str = "#!/bin/sh\nexec kubectl-cadastre __complete -- \"$@\"\n";

fn completion(shell: Shell) -> anyhow::Result<ExitVerdict> {
    let shell = match shell {
        Shell::Kubectl => {
            std::io::stdout().write_all(FOR_KUBECTL.as_bytes())?;
            return Ok(ExitVerdict::Clean);
        }
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
        Shell::Pwsh => clap_complete::Shell::PowerShell,
    };
    let mut script = Vec::new();
    let mut command = Cli::command();
    clap_complete::generate(shell, &mut command, "kubectl-cadastre", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitVerdict::Clean)
}

/// Whether an error says that the reader of the output has closed the pipe, as `head` does. This is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
