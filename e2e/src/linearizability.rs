//! Histories of CNI calls on one node, and the check that a history is linearizable.
//!
//! A history is linearizable if its calls can be ordered so that each call takes effect at one moment between its start
//! and its end, and each answer is that of a correct ledger. The order is searched by porcupine, in the program
//! [`Program::HistoryChecker`]; `e2e/porcupine/main.go` defines the correct ledger: an address has at most one
//! container, and a container at most one address.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;

use crate::assets::{self, Program};

/// A call of the CNI plugin.
#[derive(Serialize, Clone, Debug)]
pub struct Call {
    /// What was requested
    pub verb: Verb,
    /// The container's id
    pub container: String,
    /// The address that an ADD returned, or that a CHECK was asked about; otherwise empty
    pub address: String,
    /// What is known of the call's effect
    pub outcome: Outcome,
    /// When the call began, in nanoseconds on one clock
    pub start: u64,
    /// When the call ended, in nanoseconds on the same clock; without meaning if the outcome is unknown
    pub end: u64,
    /// The number of the caller; no two calls of one caller overlap
    pub caller: usize,
}

/// The request of a [`Call`].
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// Assign an address
    Add,
    /// Compare the assigned address with the given one
    Check,
    /// Release the address
    Del,
}

/// What is known of the effect of a [`Call`].
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The call took effect
    Ok,
    /// The call changed nothing, and its answer says so
    Refused,
    /// The call may have taken effect, or may do so later
    Unknown,
}

/// Checks a history and returns the checker's summary. If the history is not linearizable, the history and a drawing of
/// its first wrong part are written to `evidence`, and the error contains the calls of this part.
pub fn check(calls: &[Call], evidence: &Path) -> Result<String> {
    let (lines, drawing) = (
        evidence.join("history.jsonl"),
        evidence.join("history.html"),
    );
    let mut text = Vec::new();
    for call in calls {
        serde_json::to_writer(&mut text, call)?;
        text.push(b'\n');
    }
    let mut child = Command::new(assets::find(Program::HistoryChecker)?)
        .arg(&drawing)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("the input is a pipe")?;
    stdin.write_all(&text)?;
    drop(stdin);
    let output = child.wait_with_output()?;
    let said = String::from_utf8(output.stdout)?;
    if !output.status.success() {
        std::fs::write(&lines, &text)?;
        bail!("{said}\nsee {} and {}", lines.display(), drawing.display());
    }
    ensure!(!said.is_empty(), "the checker said nothing");
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assets::HISTORY_CHECKERS;

    /// Returns a call without an overlap: call `n` of a history.
    fn call(n: u64, verb: Verb, container: &str, address: &str, outcome: Outcome) -> Call {
        Call {
            verb,
            container: container.to_owned(),
            address: address.to_owned(),
            outcome,
            start: 2 * n,
            end: 2 * n + 1,
            caller: 0,
        }
    }

    fn verdict(calls: &[Call]) -> Result<String> {
        assets::ensure(&HISTORY_CHECKERS)?;
        let folder = tempfile::tempdir()?;
        let verdict = check(calls, folder.path());
        let drawn = folder.path().join("history.html").is_file();
        assert_eq!(drawn, verdict.is_err());
        verdict
    }

    #[test]
    fn only_histories_with_an_order_pass() {
        use Outcome::{Ok, Refused, Unknown};
        use Verb::{Add, Check, Del};
        let first = call(0, Add, "a", "10.0.0.1", Ok);
        let second = call(2, Add, "b", "10.0.0.1", Ok);
        let good: [&[Call]; 6] = [
            &[call(1, Del, "a", "", Ok)],
            // A DEL whose outcome is unknown may have released the address.
            &[call(1, Del, "a", "", Unknown)],
            // An ADD that was refused assigned nothing.
            &[call(1, Del, "a", "", Ok), call(3, Add, "c", "", Refused)],
            // A repeated ADD returns the same address.
            &[
                call(1, Del, "a", "", Ok),
                call(3, Add, "b", "10.0.0.1", Ok),
                call(4, Check, "b", "10.0.0.1", Ok),
                call(5, Check, "a", "10.0.0.1", Refused),
            ],
            // A call that lasted longer may have taken effect before or after the others.
            &[Call {
                end: 9,
                ..call(1, Del, "a", "", Ok)
            }],
            // An ADD whose answer got lost assigned an address that the repeated ADD returns.
            &[
                call(1, Del, "a", "", Ok),
                call(3, Add, "c", "", Unknown),
                call(4, Add, "c", "10.0.0.2", Ok),
            ],
        ];
        for more in good {
            let calls = [&[first.clone(), second.clone()], more].concat();
            verdict(&calls).unwrap();
        }
        let bad: [&[Call]; 6] = [
            // Two containers have the address.
            &[],
            // The DEL of another container released the address.
            &[call(1, Del, "c", "", Ok)],
            // The DEL came later.
            &[call(3, Del, "a", "", Ok)],
            // The container has a second address.
            &[call(1, Del, "a", "", Ok), call(3, Add, "b", "10.0.0.2", Ok)],
            // The address of a container that was told so is lost.
            &[
                call(1, Del, "a", "", Ok),
                call(3, Check, "b", "10.0.0.1", Refused),
            ],
            // A container that was deleted still has its address.
            &[
                call(1, Del, "a", "", Ok),
                call(3, Check, "a", "10.0.0.1", Ok),
            ],
        ];
        for more in bad {
            let calls = [&[first.clone(), second.clone()], more].concat();
            let said = verdict(&calls).unwrap_err().to_string();
            assert!(said.contains("cannot be ordered"), "{said}");
        }
    }
}
