//! `kubectl cadastre`: what people ask of the address space, by API rights alone.
//!
//! Nothing here needs a controller or an agent that runs: a verb reads the objects of the API and
//! judges by the same code as the controller does.
//!
//! | file | subject |
//! |---|---|
//! | [`lists`], [`inventory`] | the objects as listed; everything a verb looks up in them |
//! | [`reach`] | the only place with IO towards the API server |
//! | [`render`] | tables, JSON, YAML, colours |
//! | [`status`], [`running`] | whether Cadastre itself is well; what of it runs |
//! | [`show`], [`address`] | who holds what |
//! | [`map`] | the space of a pool as a picture |
//! | [`explain`] | why this pool, why this node waits, why this pool is full |
//! | [`check`] | what contradicts itself |
//! | [`plan`] | what would happen if |
//! | [`release`], [`drain`] | what can be asked of a node's holdings |
//! | [`complete`] | what may come next on the command line |
//! | [`bundle`] | what a report of a problem needs, without secrets |
//!
//! # Guarantees
//! - A verb's judgement is a pure function of (inventory, arguments, now); only [`release`] and
//!   [`drain`] write, and both write nothing but an annotation of a NodeSubnet, onto the version of it
//!   that was judged.
//! - Exit code 0: done, nothing found; 1: not done, standard error says why; 2: `check` or
//!   `status` found something, `plan` found what does not fit, or `release` and `drain` left something undone.

#![warn(unreachable_pub)]

pub mod address;
pub mod bundle;
pub mod check;
pub mod complete;
pub mod drain;
pub mod explain;
pub(crate) mod inventory;
pub mod lists;
pub mod map;
pub mod plan;
pub mod reach;
pub mod release;
pub mod render;
pub mod running;
pub mod show;
pub mod status;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};

use cadastre_core::inert;

/// How a verb ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing to complain of.
    Clean,
    /// Something somebody should look at.
    Findings,
}

/// Who holds which addresses of the cluster, why, and what is wrong
///
/// Works by API rights alone: no controller and no agent has to run. Reads only, but for `release`,
/// `drain` and `undrain`, which write an annotation of a NodeSubnet.
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

/// What all verbs take, as kubectl spells it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Flags {
    /// Kubeconfig file of the cluster
    #[arg(long, global = true, help_heading = "Cluster")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig
    #[arg(long, global = true, help_heading = "Cluster")]
    pub context: Option<String>,

    /// Namespace of pods that are named without one; by default the context's
    #[arg(short, long, global = true, help_heading = "Cluster")]
    pub namespace: Option<String>,

    /// User to act as
    #[arg(
        long = "as",
        global = true,
        value_name = "USER",
        help_heading = "Cluster"
    )]
    pub impersonate: Option<String>,

    /// Seconds that one call of the API server may take
    #[arg(long, global = true, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=3600), help_heading = "Cluster")]
    pub request_timeout: u16,

    /// Objects a page when listing; 0 asks for everything at once
    #[arg(long, global = true, default_value_t = 1000, help_heading = "Cluster")]
    pub chunk_size: u32,

    /// Form of the output
    #[arg(short, long, global = true, value_enum, default_value_t = render::Output::Table)]
    pub output: render::Output,
}

impl Flags {
    /// How long one call may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.request_timeout.into())
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    Status(status::Args),
    Show(show::Args),
    Map(map::Args),
    Explain(explain::Args),
    Check(check::Args),
    Plan(plan::Args),
    Release(release::Args),
    Drain(drain::DrainArgs),
    Undrain(drain::UndrainArgs),
    SupportBundle(bundle::Args),
    Completion(CompletionArgs),
    #[command(name = "__complete", hide = true)]
    Complete(complete::Args),
}

/// Print a completion script
///
/// `kubectl`: the program by which kubectl's own completion completes this plugin, names of objects
/// included. The others complete calls of `kubectl-cadastre`, without names.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre completion kubectl > /usr/local/bin/kubectl_complete-cadastre
  chmod +x /usr/local/bin/kubectl_complete-cadastre
  kubectl cadastre completion bash > /etc/bash_completion.d/kubectl-cadastre")]
struct CompletionArgs {
    /// kubectl, or a shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shell {
    Kubectl,
    Bash,
    Zsh,
    Fish,
}

/// Runs the command line.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Not clap's 2, which stands for findings.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    end(cli)
}

/// Runs a parsed command line.
pub fn end(cli: Cli) -> ExitCode {
    match run(cli) {
        Ok(Verdict::Clean) => ExitCode::SUCCESS,
        Ok(Verdict::Findings) => ExitCode::from(2),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", inert::lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<Verdict> {
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
        let reach = reach::Reach::new(&flags).await?;
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
            Verb::SupportBundle(args) => bundle::exec(&args, &flags, &reach).await,
            Verb::Completion(_) | Verb::Complete(_) => Ok(Verdict::Clean),
        }
    })
}

/// What kubectl calls with the words of a command line, by the name `kubectl_complete-cadastre`.
const FOR_KUBECTL: &str = "#!/bin/sh\nexec kubectl-cadastre __complete -- \"$@\"\n";

fn completion(shell: Shell) -> anyhow::Result<Verdict> {
    let shell = match shell {
        Shell::Kubectl => {
            std::io::stdout().write_all(FOR_KUBECTL.as_bytes())?;
            return Ok(Verdict::Clean);
        }
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    let mut command = Cli::command();
    clap_complete::generate(shell, &mut command, "kubectl-cadastre", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(Verdict::Clean)
}

/// Whoever reads our output has read enough, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
