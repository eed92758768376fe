//! Logs: one line per change of state, as text or JSON. Names and messages in a log cannot forge further lines.

use std::io::IsTerminal;

use thiserror::Error;
use tracing::Subscriber;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::fmt::{FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use cadastre_core::inert;

/// The format of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Text, for users
    Text,
    /// One JSON object per line, for programs
    Json,
}

/// Changes the log level of the running process.
#[derive(Clone)]
pub struct Level(reload::Handle<EnvFilter, Registry>);

/// Why the log level cannot be set.
#[derive(Debug, Error)]
pub enum LevelError {
    /// The text is not a list of filter directives.
    #[error(
        "\"{0}\" is no log level: give error, warn, info, debug or trace, or module=level pairs such as info,cadastre_controller=debug"
    )]
    Unreadable(String),
    /// The logging subscriber no longer exists.
    #[error("the level cannot be changed: {0}")]
    Gone(String),
}

/// Turns off the log of the Kubernetes client, which logs each failed request as an error. Cadastre itself logs once
/// what is wrong and what this means. A directive that names `kube_client` overrides this default.
const QUIET: &str = "kube_client=off";

fn parse(directives: &str) -> Result<EnvFilter, LevelError> {
    let unreadable = || LevelError::Unreadable(directives.to_owned());
    // The filter would accept any word as the name of a module. So only levels and module=level pairs are accepted
    // here.
    let is_valid = |word: &str| {
        let level = word.rsplit('=').next().unwrap_or(word).trim();
        let levels = ["off", "error", "warn", "info", "debug", "trace"];
        levels.iter().any(|it| it.eq_ignore_ascii_case(level))
    };
    if !directives.split(',').all(is_valid) {
        return Err(unreadable());
    }
    EnvFilter::try_new(format!("{QUIET},{directives}")).map_err(|_| unreadable())
}

/// Starts logging to standard error. Must be called once, at the beginning of `main`.
pub fn start(format: Format, directives: &str) -> Result<Level, LevelError> {
    let (filter, handle) = reload::Layer::new(parse(directives)?);
    let lines = match format {
        Format::Text => text(std::io::stderr, std::io::stderr().is_terminal()).boxed(),
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

fn text<S, W>(writer: W, colours: bool) -> impl Layer<S> + Send + Sync
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    fmt::layer()
        .with_writer(writer)
        .with_ansi(colours)
        .with_target(false)
        .fmt_fields(OneLine)
}

/// Formats messages and fields so that they cannot end the line or send commands to a terminal.
struct OneLine;

impl<'w> FormatFields<'w> for OneLine {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'w>,
        fields: R,
    ) -> std::fmt::Result {
        let mut plain = String::new();
        DefaultFields::new().format_fields(Writer::new(&mut plain), fields)?;
        writer.write_str(&inert::line(&plain))
    }
}

impl Level {
    /// Returns a level for tests, which does not affect the logging of the process. The level can be set as long as the
    /// second value exists.
    #[cfg(test)]
    pub(super) fn detached() -> (Self, impl Sized) {
        let (filter, handle) = reload::Layer::new(EnvFilter::new("info"));
        (Level(handle), filter)
    }

    /// Sets the level, with immediate effect. If the text is invalid, the level stays as it is.
    pub fn set(&self, directives: &str) -> Result<(), LevelError> {
        let filter = parse(directives.trim())?;
        self.0
            .reload(filter)
            .map_err(|error| LevelError::Gone(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;

    use super::*;

    /// Returns what is logged while `what` runs.
    fn logged(colours: bool, what: impl FnOnce()) -> String {
        #[derive(Clone, Default)]
        struct Page(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Page {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let page = Page::default();
        let writer = page.clone();
        let lines = text(move || writer.clone(), colours);
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, what);
        let bytes = page.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    /// Logs a text as a field, as an error, as a part of the message and in a span.
    fn log(text: &str) {
        let error: &(dyn std::error::Error + 'static) = &io::Error::other(text.to_owned());
        let span = tracing::info_span!("span", text);
        let _inside = span.enter();
        tracing::warn!(text, shown = %text, debugged = ?text, error, "of {text}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_message_takes_one_line_and_commands_no_terminal(
            text in "([ -~]|\\PC|\n|\r|\x1b\\[2J|\u{9b}|\u{202e}|\u{2028}|\\p{Cc}){0,20}",
        ) {
            let plain = logged(false, || log(&text));
            let line = plain.strip_suffix('\n').unwrap();
            prop_assert_eq!(inert::line(line), line);
            let escapes = |it: &str| it.matches('\x1b').count();
            let coloured = logged(true, || log(&text));
            prop_assert_eq!(coloured.matches('\n').count(), 1);
            prop_assert_eq!(escapes(&coloured), escapes(&logged(true, || log("calm"))));
        }
    }

    #[test]
    fn the_client_is_quiet_unless_it_is_named() {
        let filter = |text| parse(text).unwrap().to_string();
        let quiet = filter("debug");
        assert!(quiet.contains("kube_client=off"), "{quiet}");
        assert!(quiet.contains("debug"), "{quiet}");
        let named = filter("info,kube_client=debug");
        assert!(named.contains("kube_client=debug"), "{named}");
        assert!(!named.contains("off"), "{named}");
    }

    #[test]
    fn only_levels_and_pairs_of_module_and_level_are_accepted() {
        let pairs = "info,cadastre_controller=debug";
        for good in ["info", "DEBUG", pairs, "cadastre=trace"] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in ["", "loud", "cadastre=loud", "info,"] {
            let text = parse(bad).unwrap_err().to_string();
            assert!(text.contains("module=level"), "{text}");
        }
    }
}
