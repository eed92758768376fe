//! Logs: one line a change of state, as text or JSON.

use std::io::IsTerminal;

use thiserror::Error;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

/// The form of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// For machines: one object a line
    Json,
}

/// Changes the level of a running process.
#[derive(Clone)]
pub struct Level(reload::Handle<EnvFilter, Registry>);

/// A level that cannot be set.
#[derive(Debug, Error)]
pub enum LevelError {
    /// Not a directive.
    #[error(
        "\"{0}\" is no log level: give error, warn, info, debug or trace, or module=level pairs such as info,cadastre::controller=debug"
    )]
    Unreadable(String),
    /// The subscriber is gone.
    #[error("the level cannot be changed: {0}")]
    Gone(String),
}

/// The client tells of each request that fails, as an error; we say once what is wrong, and what it means.
/// Whoever names it hears it.
const QUIET: &str = "kube_client=off";

fn parse(directives: &str) -> Result<EnvFilter, LevelError> {
    let unreadable = || LevelError::Unreadable(directives.to_owned());
    // The filter takes any word for a module; only levels and module=level pairs are meant here.
    let known = |word: &str| {
        let level = word.rsplit('=').next().unwrap_or(word).trim();
        matches!(
            level.to_ascii_lowercase().as_str(),
            "off" | "error" | "warn" | "info" | "debug" | "trace"
        )
    };
    if !directives.split(',').all(known) {
        return Err(unreadable());
    }
    EnvFilter::try_new(format!("{QUIET},{directives}")).map_err(|_| unreadable())
}

/// Starts logging to standard error. Call it once, first in `main`.
pub fn start(format: Format, directives: &str) -> Result<Level, LevelError> {
    let (filter, handle) = reload::Layer::new(parse(directives)?);
    let lines = match format {
        Format::Text => fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .boxed(),
        Format::Json => fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(std::io::stderr)
            .boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init();
    started.map_err(|error| LevelError::Gone(error.to_string()))?;
    Ok(Level(handle))
}

impl Level {
    /// A level of no process, for tests; it can be set while the other value is kept.
    #[cfg(test)]
    pub(super) fn detached() -> (Self, impl Sized) {
        let (filter, handle) = reload::Layer::new(EnvFilter::new("info"));
        (Level(handle), filter)
    }

    /// Sets the level from now on.
    pub fn set(&self, directives: &str) -> Result<(), LevelError> {
        let filter = parse(directives.trim())?;
        self.0
            .reload(filter)
            .map_err(|error| LevelError::Gone(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_quiet_unless_it_is_named() {
        let filter = |text| parse(text).unwrap().to_string();
        let quiet = filter("debug");
        assert!(
            quiet.contains("kube_client=off") && quiet.contains("debug"),
            "{quiet}"
        );
        let named = filter("info,kube_client=debug");
        assert!(named.contains("kube_client=debug"), "{named}");
        assert!(!named.contains("off"), "{named}");
    }

    #[test]
    fn a_level_is_a_level_and_nothing_else_is() {
        for good in [
            "info",
            "DEBUG",
            "info,cadastre::controller=debug",
            "cadastre=trace",
        ] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in ["", "loud", "cadastre=loud", "info,"] {
            let text = parse(bad).unwrap_err().to_string();
            assert!(text.contains("module=level"), "{text}");
        }
    }
}
