//! A readable trace of a run, recorded only in runs whose trace is printed or compared.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};

use cadastre_controller::cluster::objects::Text;

use super::clock::{SECOND, Time};

/// How many lines a failure prints. These are the last lines about the objects that the failure names. If the
/// environment variable `LINES` is set to a number, the last lines of all objects are printed instead, as many as this
/// number.
const SHOWN: usize = 60;

/// The lines of one run. Recording is off by default. A failing seed is run again with recording on.
#[derive(Default)]
pub struct Trace {
    lines: Option<Vec<Line>>,
}

struct Line {
    step: u64,
    at: Time,
    /// The name of the object that the line is about. A line without a name is printed for all objects.
    about: Option<Text>,
    text: String,
}

impl Trace {
    pub fn on() -> Self {
        Trace {
            lines: Some(Vec::new()),
        }
    }

    pub fn is_on(&self) -> bool {
        self.lines.is_some()
    }

    pub fn push(
        &mut self,
        (step, at): (u64, Time),
        about: Option<&str>,
        text: impl FnOnce() -> String,
    ) {
        if let Some(lines) = &mut self.lines {
            lines.push(Line {
                step,
                at,
                about: about.map(Text::from),
                text: text(),
            });
        }
    }

    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for line in self.lines.iter().flatten() {
            (line.step, line.at, &line.about, &line.text).hash(&mut hasher);
        }
        hasher.finish()
    }

    pub fn len(&self) -> usize {
        self.lines.as_ref().map_or(0, Vec::len)
    }

    /// Returns the last lines about the objects in `names`, and the lines that are about no object.
    pub fn tail(&self, names: &BTreeSet<Text>) -> String {
        let all_of_it = std::env::var_os("LINES").is_some();
        let all = || self.lines.iter().flatten();
        let concerned = |line: &&Line| {
            line.about
                .as_ref()
                .is_none_or(|name| all_of_it || names.is_empty() || names.contains(name))
        };
        let shown = std::env::var("LINES")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(SHOWN);
        let skipped = all().filter(concerned).count().saturating_sub(shown);
        let mut out = String::new();
        for line in all().filter(concerned).skip(skipped) {
            let about = line.about.as_deref().unwrap_or("-");
            let (whole, rest) = (line.at / SECOND, line.at % SECOND / 1000);
            let _ = writeln!(
                out,
                "  {:>7}  {whole:>5}.{rest:03}s  {about:<5} {}",
                line.step, line.text
            );
        }
        out
    }
}
