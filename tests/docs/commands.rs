//! Checks that commands in the pages and in the workflows are valid.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser as _;
use clap::error::ErrorKind;
use serde_json::Value;

use crate::repository::packages;
use crate::shell::commands;
use crate::{assert_none, pages, path, text};

/// The repository's folders. If a word of a command is a path in one of them, a file of that path must exist.
const FOLDERS: [&str; 10] = [
    ".ci", "charts", "config", "crates", "docs", "e2e", "hack", "proto", "src", "tests",
];

/// Cargo's flags that name a target, each with the folder that contains such targets.
const TARGETS: [(&str, &str); 3] = [
    ("--bin", "src/bin"),
    ("--test", "tests"),
    ("--bench", "benches"),
];

/// Checks commands against the Makefile and the chart.
pub struct CommandCheck {
    /// Targets of the Makefile
    targets: BTreeSet<String>,
    /// The content of the chart's values.yaml
    values: Value,
}

impl CommandCheck {
    pub fn new() -> Self {
        let makefile = text("Makefile");
        let rules = makefile.lines().filter_map(|it| it.split_once(':'));
        let is_name = |it: &str| {
            let legal = |c: char| c == '-' || c.is_ascii_lowercase() || c.is_ascii_digit();
            !it.is_empty() && it.chars().all(legal)
        };
        let targets = rules.map(|it| it.0.to_owned()).filter(|it| is_name(it));
        Self {
            targets: targets.collect(),
            values: serde_saphyr::from_str(&text("charts/cadastre/values.yaml")).unwrap(),
        }
    }

    /// Returns an error that says what is wrong with a command. If the command is only `mentioned` in a sentence,
    /// required arguments may be missing.
    fn judge(&self, words: &[String], mentioned: bool) -> Result<(), String> {
        let name = words[0].rsplit('/').next().unwrap();
        let rest = &words[1..];
        match name {
            "cadastre" => of_clap(cadastre::Cli::try_parse_from(words).err(), mentioned)?,
            "kubectl-cadastre" => {
                of_clap(cadastre_cli::Cli::try_parse_from(words).err(), mentioned)?;
            }
            "kubectl" if rest.first().is_some_and(|it| it == "cadastre") => {
                let parsed = cadastre_cli::Cli::try_parse_from(with_examples(rest));
                of_clap(parsed.err(), mentioned)?;
            }
            "make" => {
                let targets = rest.iter();
                let mut targets = targets.filter(|it| !it.contains('=') && !it.starts_with('-'));
                if let Some(target) = targets.find(|it| !self.targets.contains(*it)) {
                    return Err(format!("the Makefile has no {target}"));
                }
            }
            "helm" | "--set" => self.values(words)?,
            "cargo" => of_cargo(rest)?,
            _ => {}
        }
        let files = words.iter().map(|it| it.trim_start_matches("./"));
        let mut files = files.map(|it| it.trim_end_matches('/'));
        let of_us = |it: &&str| it.split_once('/').is_some_and(|it| FOLDERS.contains(&it.0));
        match files.find(|it| of_us(it) && is_plain(it) && !path(it).exists()) {
            Some(file) => Err(format!("there is no {file}")),
            None => Ok(()),
        }
    }

    /// Checks that the chart has the values that `--set` names.
    fn values(&self, words: &[String]) -> Result<(), String> {
        let flags = words.iter().zip(words.iter().skip(1));
        let set = flags.filter(|it| it.0.starts_with("--set") && !it.0.contains('='));
        for (_, set) in set {
            let name = set.split('=').next().unwrap();
            if !self.has_value(name) {
                return Err(format!("charts/cadastre/values.yaml has no {name}"));
            }
        }
        Ok(())
    }

    /// Whether the chart has a value of that name, or a list or free-form map that can contain an entry of that name.
    pub fn has_value(&self, name: &str) -> bool {
        let mut at = &self.values;
        for part in name.split('.') {
            let part = part.split('[').next().unwrap();
            let free = at.as_object().is_some_and(serde_json::Map::is_empty) || at.is_array();
            if free {
                return true;
            }
            match at.get(part) {
                Some(next) => at = next,
                None => return false,
            }
        }
        true
    }

    /// Whether the chart's values have a top-level map of that name.
    pub fn is_group(&self, word: &str) -> bool {
        self.values.get(word).is_some_and(Value::is_object)
    }
}

/// Whether a file name contains no characters that a shell expands, and no placeholders.
fn is_plain(file: &str) -> bool {
    file.chars()
        .all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
}

fn of_clap(error: Option<clap::Error>, mentioned: bool) -> Result<(), String> {
    use ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand as Short, DisplayVersion,
        MissingRequiredArgument, MissingSubcommand,
    };
    let Some(error) = error else { return Ok(()) };
    match error.kind() {
        DisplayHelp | DisplayVersion => Ok(()),
        Short | MissingRequiredArgument | MissingSubcommand if mentioned => Ok(()),
        _ => Err(error.to_string().lines().take(1).collect()),
    }
}

/// Replaces the placeholders `ADDRESS` and `CIDR` with valid values.
fn with_examples(words: &[String]) -> Vec<String> {
    let own = words.iter().map(|word| match word.as_str() {
        "ADDRESS" => "192.0.2.1".to_owned(),
        "CIDR" => "192.0.2.0/26".to_owned(),
        _ => word.clone(),
    });
    own.collect()
}

fn of_cargo(words: &[String]) -> Result<(), String> {
    for (flag, name) in words.iter().zip(words.iter().skip(1)) {
        let Some((_, folder)) = TARGETS.iter().find(|it| it.0 == *flag) else {
            continue;
        };
        if !packages().iter().any(|it| has_target(it, folder, name)) {
            let kind = flag.trim_start_matches('-');
            return Err(format!("there is no {kind} {name}"));
        }
    }
    Ok(())
}

#[test]
fn what_is_not_there_is_found() {
    let check = CommandCheck::new();
    let judge = |line: &str, mentioned| check.judge(&commands(line)[0], mentioned);
    for good in [
        "make sim SEED=1",
        "kubectl cadastre show ip ADDRESS -o json",
        "target/release/cadastre controller --default-pool blocks",
        "helm upgrade cadastre charts/cadastre --set agent.seLinuxOptions.type=spc_t --set 'pools[0].name=x'",
        "cargo test --workspace --test sim",
    ] {
        assert_eq!(judge(good, false), Ok(()), "{good}");
    }
    assert_eq!(judge("kubectl cadastre release", true), Ok(()));
    for bad in [
        "make love",
        "kubectl cadastre show ipp ADDRESS",
        "kubectl cadastre release",
        "kubectl cadastre plan --add-node 3",
        "target/release/cadastre controller --default-pool block",
        "helm install cadastre charts/cadastre --set agent.cni.bindir=/opt",
        "helm install cadastre charts/other",
        "cargo test --workspace --test simulation",
    ] {
        assert!(judge(bad, false).is_err(), "{bad}");
    }
}

#[test]
fn commands_in_blocks_can_be_called() {
    let check = CommandCheck::new();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages::all() {
        for block in page.blocks.iter().filter(|it| it.language == "sh") {
            for words in commands(&block.text) {
                count += 1;
                if let Err(why) = check.judge(&words, false) {
                    wrong.push(format!("{}: {}: {why}", page.name, words.join(" ")));
                }
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 100, "only {count} commands were found");
}

#[test]
fn commands_in_sentences_can_be_called() {
    let check = CommandCheck::new();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages::all() {
        for code in page.code() {
            // If the code is not a command, only the files that the code names are checked.
            for words in commands(&code) {
                count += usize::from(words.len() > 1);
                if let Err(why) = check.judge(&words, true) {
                    wrong.push(format!("{}: `{code}`: {why}", page.name));
                }
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 50, "only {count} commands were found");
}

#[test]
fn workflows_call_what_there_is() {
    let check = CommandCheck::new();
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(path(".github/workflows")).unwrap() {
        let file = entry.unwrap().path();
        let flow: Value = serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        for (job, is) in flow["jobs"].as_object().unwrap() {
            let steps = is["steps"].as_array().unwrap();
            for run in steps.iter().filter_map(|it| it["run"].as_str()) {
                for words in commands(run) {
                    count += 1;
                    if let Err(why) = check.judge(&words, false) {
                        let (file, command) = (file.display(), words.join(" "));
                        wrong.push(format!("{file}: {job}: {command}: {why}"));
                    }
                }
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 5, "only {count} commands were found");
}

/// Whether a package has a target of that name, either in the folder of its kind or as the executable of `src/main.rs`.
fn has_target(package: &Path, folder: &str, name: &str) -> bool {
    let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap();
    let is_main = folder == "src/bin" && manifest.contains(&format!("default-run = \"{name}\""));
    let ends = [".rs", "/main.rs"];
    let mut files = ends.map(|end| format!("{folder}/{name}{end}")).into_iter();
    is_main || files.any(|it| package.join(it).exists())
}
