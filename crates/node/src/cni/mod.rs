//! The CNI protocol and the IPAM plugin `cadastre-ipam`.
//!
//! ```text
//!  env, stdin ──► request ──► version ─┬► plugin ─────► node    (the agent, or its store)
//!                 args, json           └► host_local ─► files   (the config has ranges of its own)
//!                              error, result ──► stdout, exit status
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `request` | environment and standard input, in the order in which they are checked |
//! | `version`, `error`, `result` | versions, errors and results as the specification has them |
//! | `routes` | routes of the config |
//! | `args`, `attachments`, `netns` | `CNI_ARGS`; previous result and valid attachments; own namespace |
//! | `plugin` | addresses of the node |
//! | `host_local` | addresses of the config's own ranges, as host-local gives them |
//! | `json`, `golang` | what callers see of Go: in JSON, and in texts |
//!
//! A call reads, does one thing and answers: no threads, nothing in the background. Nothing is changed
//! before the whole request has been found good.

mod args;
mod attachments;
mod error;
mod golang;
mod host_local;
mod json;
mod netns;
mod plugin;
mod request;
mod result;
mod routes;
mod version;

use std::io::{Read, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

pub use error::CniError;
pub use request::Env;

use crate::{Answer, Op, Refusal, client};
use error::INVALID_ENVIRONMENT;
use json::Value;
use request::Config;

/// What a call answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// For the runtime
    pub stdout: String,
    /// For people
    pub stderr: String,
    /// Exit status 1, and an error object on standard output
    pub failed: bool,
}

/// Does something with the node's addresses: by the agent at a socket, or on its store, within a time.
/// [`client::ask`], or a test's.
pub type Ask<'a> = &'a dyn Fn(&Path, &Path, &Op, Duration) -> Result<Answer, Refusal>;

/// Runs the plugin on the process's environment and standard streams.
pub fn main() -> ExitCode {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default();
    let strict = program == "host-local";
    let output = run(
        &Env::of_process(),
        strict,
        std::io::stdin().lock(),
        &client::ask,
    );
    let _ = std::io::stderr().write_all(output.stderr.as_bytes());
    let mut stdout = std::io::stdout().lock();
    let written = stdout
        .write_all(output.stdout.as_bytes())
        .and_then(|()| stdout.flush());
    // A runtime that did not hear the answer takes the call for failed, and deletes.
    if output.failed || written.is_err() {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Answers one call. Started as `host-local` it is that and nothing else.
pub fn run(env: &Env, as_host_local: bool, stdin: impl Read, ask: Ask<'_>) -> Output {
    if env.command.is_empty() {
        return about(as_host_local);
    }
    let mut told = None;
    match answer(env, as_host_local, stdin, ask, &mut told) {
        Ok(stdout) => Output {
            stdout,
            ..Output::default()
        },
        Err(error) => Output {
            stdout: error.render(told.as_deref()),
            failed: true,
            ..Output::default()
        },
    }
}

/// What someone sees who starts it by hand.
fn about(as_host_local: bool) -> Output {
    let version = cadastre_core::VERSION;
    let (name, supported) = if as_host_local {
        ("host-local", version::ALL)
    } else {
        ("cadastre-ipam", version::OWN)
    };
    let supported = supported.join(", ");
    Output {
        stderr: format!(
            "CNI {name} plugin of cadastre {version}\n\
             CNI protocol versions supported: {supported}\n\
             It is started by container runtimes: put it into their plugin folder (/opt/cni/bin) and name it \
             in the `ipam` section of a network config, {{\"type\": \"{name}\"}}.\n"
        ),
        ..Output::default()
    }
}

/// What goes to standard output. `told` becomes the version that errors are written by.
fn answer(
    env: &Env,
    as_host_local: bool,
    stdin: impl Read,
    ask: Ask<'_>,
    told: &mut Option<String>,
) -> Result<String, CniError> {
    env.check(as_host_local)?;
    let command = golang::text(&env.command);
    if command == "VERSION" {
        let supported = if as_host_local {
            version::ALL
        } else {
            version::OWN
        };
        return Ok(version::answer(supported));
    }
    let text = request::read(stdin)?;
    let root = Value::parse(&text).map_err(|fault| {
        request::undecodable(&format!("{fault}: correct the network config there"))
    })?;
    let config = Config::new(&root)?;
    let since = match command.as_str() {
        "ADD" | "DEL" => None,
        "CHECK" => Some((0, 4, 0)),
        "GC" | "STATUS" => Some((1, 1, 0)),
        _ => {
            let msg = format!("unknown CNI_COMMAND: {command}");
            return Err(CniError::new(INVALID_ENVIRONMENT, msg));
        }
    };
    let written = config.version()?;
    let version = match written.as_str() {
        "" => "0.1.0",
        other => other,
    };
    let host_local = as_host_local || host_local::is_meant(config.root);
    let supported = if host_local {
        version::ALL
    } else {
        version::OWN
    };
    if !host_local && supported.contains(&version) {
        *told = Some(version.to_owned());
    }
    if let Some(since) = since {
        version::knows(version, &command, since, supported)?;
    }
    version::check(version, supported)?;
    if !host_local {
        return plugin::run(&command, env, &config, version, ask);
    }
    if !as_host_local {
        plugin::check_alone(config.root)?;
    }
    let nothing = |()| String::new();
    match command.as_str() {
        "ADD" => host_local::add(env, &config, &written),
        "DEL" => host_local::del(env, &config).map(nothing),
        "CHECK" => host_local::check(env, &config).map(nothing),
        "GC" => host_local::gc(&config).map(nothing),
        _ => host_local::status(&config).map(nothing),
    }
}
