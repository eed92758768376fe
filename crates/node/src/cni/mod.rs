//! The CNI protocol and the IPAM plugin `cadastre-ipam`.
//!
//! ```text
//!  env, stdin ──► request ──► version ─┬► plugin ─────► node    (the agent, or its store)
//!                 config               └► host_local ─► files   (the config has ranges of its own)
//!                              error, result ──► stdout, exit status
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `request`, `args`, `netns` | the environment, its variable `CNI_ARGS`, and the network namespace |
//! | `config` | the network config on standard input |
//! | `version`, `error`, `result` | versions, errors and results, as the CNI specification defines them |
//! | `address` | parses and formats addresses in configs and results |
//! | `plugin` | addresses from the blocks of the node, also for configs of the CNI plugin whereabouts |
//! | `host_local` | addresses from ranges in the config, as a replacement of the CNI plugin host-local |
//!
//! Each call is a process of its own. The process reads the request, runs one command and answers. The process has no
//! threads and leaves nothing running in the background. Nothing is changed until all parts of the request that the
//! command needs are checked. There is one exception: a DEL of `host_local` checks the network namespace after it has
//! released the addresses.

mod address;
mod args;
mod config;
mod error;
mod host_local;
mod netns;
mod plugin;
mod request;
mod result;
mod version;

use std::io::{Read, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

pub use error::CniError;
pub use request::Env;

use crate::{Op, OpError, OpOutcome, client};
use config::Config;
use error::INVALID_ENVIRONMENT;
use result::json_text;

/// The answer to a call of the CNI plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Text for standard output, which the container runtime reads
    pub stdout: String,
    /// Text for standard error, which an administrator reads
    pub stderr: String,
    /// Whether the call failed. If so, the exit status is 1 and `stdout` is an error object
    pub failed: bool,
}

impl From<Result<String, CniError>> for Output {
    fn from(answer: Result<String, CniError>) -> Self {
        Self {
            failed: answer.is_err(),
            stdout: answer.unwrap_or_else(|error| json_text(&error)),
            ..Self::default()
        }
    }
}

/// A function that performs an operation on the node's addresses. Its arguments are the path of the agent's socket, the
/// path of the store, the operation and a timeout. The function is [`client::ask`], or a replacement in tests.
pub type AddressService<'a> = &'a dyn Fn(&Path, &Path, &Op, Duration) -> Result<OpOutcome, OpError>;

/// Runs the CNI plugin on the environment and the standard streams of this process. Returns its exit status.
pub fn main() -> ExitCode {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default();
    let strict = program == "host-local";
    let output = match Env::of_process() {
        Ok(env) => run(&env, strict, std::io::stdin().lock(), &client::ask),
        Err(error) => Err(error).into(),
    };
    let _ = std::io::stderr().write_all(output.stderr.as_bytes());
    let mut stdout = std::io::stdout().lock();
    let written = stdout
        .write_all(output.stdout.as_bytes())
        .and_then(|()| stdout.flush());
    // A container runtime that gets no answer regards the call as failed and calls DEL. So if the answer could not be
    // written, the exit status also reports a failure.
    if output.failed || written.is_err() {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Answers one call. If `as_host_local` is true, the call assigns addresses only from ranges in the config, as
/// host-local does.
pub fn run(env: &Env, as_host_local: bool, stdin: impl Read, ask: AddressService<'_>) -> Output {
    let (name, supported) = if as_host_local {
        ("host-local", version::ALL)
    } else {
        ("cadastre-ipam", version::OWN)
    };
    match env.command.as_str() {
        // A call without a command means that a user has started the program by hand. So the program prints a
        // description of itself.
        "" => Output {
            stderr: about(name, supported),
            ..Output::default()
        },
        "VERSION" => Ok(json_text(&serde_json::json!({
            "cniVersion": "1.1.0",
            "supportedVersions": supported,
        })) + "\n")
        .into(),
        "ADD" | "DEL" | "CHECK" | "GC" | "STATUS" => answer(env, as_host_local, stdin, ask).into(),
        other => {
            let msg = format!(
                "CNI_COMMAND is {other:?}: it has to be ADD, DEL, CHECK, GC, STATUS or VERSION"
            );
            Err(CniError::new(INVALID_ENVIRONMENT, msg)).into()
        }
    }
}

fn about(name: &str, supported: &[&str]) -> String {
    let version = cadastre_core::VERSION;
    let supported = supported.join(", ");
    format!(
        "CNI {name} plugin of cadastre {version}\n\
         CNI protocol versions supported: {supported}\n\
         It is started by container runtimes: put it into their plugin folder (/opt/cni/bin) and name it \
         in the `ipam` section of a network config, {{\"type\": \"{name}\"}}.\n"
    )
}

/// Runs one of the commands that need a config, and returns the text for standard output.
fn answer(
    env: &Env,
    as_host_local: bool,
    stdin: impl Read,
    ask: AddressService<'_>,
) -> Result<String, CniError> {
    env.check(as_host_local)?;
    let config = Config::read_from(stdin)?;
    let version = config.version()?;
    let command = env.command.as_str();
    if as_host_local || host_local::is_meant(&config) {
        version::check(&version, command, version::ALL)?;
        if !as_host_local {
            plugin::check_no_pools(&config)?;
        }
        return host_local::run(command, env, &config, &version);
    }
    let supported = plugin::versions(&config);
    let known = supported.contains(&version.as_str());
    let answer = version::check(&version, command, supported)
        .and_then(|()| plugin::run(command, env, &config, &version, ask));
    answer.map_err(|error| CniError {
        version: known.then_some(version),
        ..error
    })
}
