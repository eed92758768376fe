//! Output of reports: as a table for users, as JSON or YAML for programs.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};

pub(crate) use cadastre_core::inert::some;
use comfy_table::{ContentArrangement, Table, presets};
use jiff::Timestamp;
use serde::Serialize;

use cadastre_core::inert;

/// The output format, which the flag `-o` sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// A table with the most important columns
    #[default]
    Table,
    /// A table with all columns and rows
    Wide,
    /// The whole report as JSON
    Json,
    /// The whole report as YAML
    Yaml,
}

/// How text for users is formatted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    /// Whether to show all columns and rows
    pub wide: bool,
    pub colour: bool,
    /// The width of the terminal in characters
    pub width: usize,
    /// The time relative to which ages are shown
    pub now: Timestamp,
}

/// The result of a subcommand, which can be printed in every output format.
pub(crate) trait VerbReport: Serialize {
    /// Whether the text has colours if the style allows colours. A text with colours is printed unchanged. So `text`
    /// itself must escape control characters in strings from objects, because they could send commands to the terminal.
    const COLOURED: bool = false;

    /// Formats the report for users. Each line must end with a line feed.
    fn text(&self, style: &Style) -> String;
}

/// The width in characters if standard output is no terminal and COLUMNS is not set.
const PLAIN_WIDTH: usize = 100;

impl Style {
    /// Returns the style that standard output and the environment variables `COLUMNS` and `NO_COLOR` allow.
    pub(crate) fn of_stdout(output: Output, now: Timestamp) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let columns = std::env::var("COLUMNS").ok();
        let asked = columns.and_then(|text| text.parse().ok());
        let width = asked.or_else(|| {
            let (width, _) = terminal_size::terminal_size().filter(|_| terminal)?;
            Some(usize::from(width.0))
        });
        Style {
            wide: output == Output::Wide,
            colour: terminal && !plain,
            width: width.unwrap_or(PLAIN_WIDTH).max(20),
            now,
        }
    }
}

/// Formats a report. Control characters in strings from objects are escaped, so that they cannot send commands to the
/// terminal. In a report with colours, [`VerbReport::text`] must escape them.
fn shown<R: VerbReport>(report: &R, output: Output, style: &Style) -> anyhow::Result<String> {
    let text = match output {
        Output::Table | Output::Wide if R::COLOURED && style.colour => {
            return Ok(report.text(style));
        }
        Output::Table | Output::Wide => report.text(style),
        Output::Json => serde_json::to_string_pretty(report)? + "\n",
        Output::Yaml => {
            let yaml = serde_saphyr::to_string(report)?;
            if inert::lines(&yaml) == yaml {
                return Ok(yaml);
            }
            // If control characters were escaped in YAML, the meaning of the text would change. JSON is valid YAML and
            // has escapes for control characters, so the report is written as JSON.
            serde_json::to_string_pretty(report)? + "\n"
        }
    };
    Ok(inert::lines(&text).into_owned())
}

/// Formats a report and writes it to standard output. Fails if standard output is closed.
pub(crate) fn print(
    report: &impl VerbReport,
    output: Output,
    now: Timestamp,
) -> anyhow::Result<()> {
    let text = shown(report, output, &Style::of_stdout(output, now))?;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// A table, some of whose columns are shown only with `-o wide`.
pub(crate) struct Columns {
    heads: Vec<(&'static str, bool)>,
    rows: Vec<Vec<String>>,
}

impl Columns {
    /// Starts a table with these columns. A column whose name begins with `+` is shown only with `-o wide`. The `+`
    /// itself is not shown.
    pub(crate) fn new(heads: &[&'static str]) -> Self {
        let heads = heads.iter().map(|head| {
            let name = head.trim_start_matches('+');
            (name, name != *head)
        });
        Self {
            heads: heads.collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; an empty cell is shown as `-`.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let or_dash = |cell: String| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                cell
            }
        };
        self.rows.push(cells.into_iter().map(or_dash).collect());
    }

    /// Formats the table, or returns `nothing` if it has no rows.
    pub(crate) fn text(self, style: &Style, nothing: &str) -> String {
        if self.rows.is_empty() {
            return format!("{nothing}\n");
        }
        let keep = |row: Vec<String>| -> Vec<String> {
            let cells = row.into_iter().zip(&self.heads);
            let cells = cells.filter(|(_, (_, is_wide))| style.wide || !is_wide);
            cells.map(|(cell, _)| cell).collect()
        };
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled);
        let heads = self.heads.iter().map(|(head, _)| (*head).to_owned());
        table.add_row(keep(heads.collect()));
        for row in self.rows {
            table.add_row(keep(row));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 3));
        }
        lines(&table.to_string())
    }
}

/// Names and values, one per line.
#[derive(Default)]
pub(crate) struct FactLines(Vec<(String, String)>);

impl FactLines {
    /// Adds a line with a name and a value. Adds nothing if the value is empty.
    pub(crate) fn add(&mut self, name: &str, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            self.0.push((name.to_owned(), value));
        }
    }

    pub(crate) fn rows(self) -> Vec<(String, String)> {
        self.0
    }

    /// Formats the lines with aligned values.
    pub(crate) fn text(self) -> String {
        let widths = self.0.iter().map(|(name, _)| name.len() + 1);
        let width = widths.max().unwrap_or(0);
        let mut text = String::new();
        for (name, value) in self.0 {
            // Further lines of a value are indented, so that all lines of the value are aligned.
            let value = value.replace('\n', &format!("\n{:width$}  ", ""));
            let name = format!("{name}:");
            let _ = writeln!(text, "{name:width$}  {value}");
        }
        text
    }
}

fn lines(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    for line in text.lines() {
        all.push_str(line.trim_end());
        all.push('\n');
    }
    all
}

/// Joins values with commas.
pub(crate) fn joined<T: ToString>(all: &[T]) -> String {
    let texts: Vec<String> = all.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// Formats how long ago a time is, as kubectl does: `47s`, `12m`, `5h`, `3d`.
pub(crate) fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    since.map_or(String::new(), |since| {
        span(now.duration_since(since).as_secs())
    })
}

/// Formats the time that is left until a moment, for example as `in 5h`. The result is `now` once the moment has come.
pub(crate) fn left(until: Option<Timestamp>, now: Timestamp) -> String {
    match until {
        None => String::new(),
        Some(until) if until.duration_since(now).as_secs() <= 0 => "now".to_owned(),
        Some(until) => format!("in {}", span(until.duration_since(now).as_secs())),
    }
}

/// Formats the end of a quarantine as `over in 5m`, or as `over` once the end has passed. Returns an empty text if
/// `until` is `None`.
pub(crate) fn over(until: Option<Timestamp>, now: Timestamp) -> String {
    match until {
        None => String::new(),
        Some(until) if until <= now => "over".to_owned(),
        until => format!("over {}", left(until, now)),
    }
}

fn span(seconds: i64) -> String {
    let seconds = seconds.max(0);
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7_199 => format!("{}m", seconds / 60),
        7_200..=172_799 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Formats a number with its noun: `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Returns the line that says how many entries of a table are left out without `-o wide`. Returns an empty text if no
/// entry is left out.
pub(crate) fn more(all: usize, shown: usize, noun: &str) -> String {
    if all > shown {
        format!("and {} more (-o wide)\n", count(all - shown, noun))
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Serialize)]
    struct Told {
        text: String,
    }

    impl VerbReport for Told {
        fn text(&self, style: &Style) -> String {
            let mut facts = FactLines::default();
            facts.add("Message", self.text.as_str());
            let mut columns = Columns::new(&["NAME", "MESSAGE"]);
            columns.row(["a".to_owned(), self.text.clone()]);
            facts.text() + &columns.text(style, "nothing")
        }
    }

    #[test]
    fn a_quarantine_is_over_in_a_while_and_then_over() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(over(Some(at(300)), at(0)), "over in 5m");
        assert_eq!(over(Some(at(300)), at(300)), "over");
        assert_eq!(over(None, at(0)), "");
        assert_eq!(left(Some(at(300)), at(301)), "now");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn text_of_others_commands_no_terminal(
            text in "([ -~]|\\PC|\n|\r|\x1b\\[2J|\u{9b}|\u{202e}|\u{2028}|\\p{Cc}){0,20}",
            colour in any::<bool>(),
        ) {
            let report = Told { text };
            let style = Style { wide: false, colour, width: 80, now: Timestamp::UNIX_EPOCH };
            for output in [Output::Table, Output::Wide, Output::Json, Output::Yaml] {
                let shown = shown(&report, output, &style).unwrap();
                prop_assert_eq!(inert::lines(&shown), shown.as_str());
            }
            let json = shown(&report, Output::Json, &style).unwrap();
            let read: serde_json::Value = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(read["text"].as_str(), Some(report.text.as_str()));
            let yaml = shown(&report, Output::Yaml, &style).unwrap();
            let read: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
            prop_assert_eq!(read["text"].as_str(), Some(report.text.as_str()));
        }
    }
}
