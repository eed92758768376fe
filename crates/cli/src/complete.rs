//! Completes command lines: subcommands, flags, and the names of objects.
//!
//! To complete the command line of the kubectl plugin NAME, kubectl runs the program `kubectl_complete-NAME`. That
//! program must print what programs made with cobra print: one line for each possible word with its description, then a
//! directive for the shell.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::builder::{PossibleValue, StyledStr};
use clap::{Arg, Command, CommandFactory as _};

use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::{Cli, ExitVerdict, Flags};

/// Cobra's directive that forbids the shell to offer names of files.
const NO_FILES: &str = ":4";
/// Cobra's directive that allows the shell to offer names of files.
const FILES: &str = ":0";
/// Time limit for each request to the API server. A user would not wait longer for a completion.
const PATIENCE_SECONDS: u16 = 5;

/// Complete a command line for kubectl
#[derive(Debug, clap::Args)]
pub(crate) struct CompleteArgs {
    /// The words after `kubectl cadastre`; the last one may be empty or incomplete
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// The possible next words of a command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// One of these words, each with its description
    Words(Vec<(String, String)>),
    /// The name of an object of this kind
    Names(NameKind),
    /// A file name or any other text, for which this module has no completions
    Anything,
}

/// A kind of object whose names can be completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameKind {
    Pool,
    Node,
    /// A pod, as `namespace/name`
    Pod,
    /// A block of a node, by its CIDR
    Block,
    /// A claim of one namespace, by its name alone
    Claim,
}

/// Returns the completions of the last of `words`, which may be incomplete.
pub(crate) fn next(words: &[String]) -> Completion {
    let root = Cli::command();
    let (typed, before) = words
        .split_last()
        .map_or(("", words), |(last, all)| (last.as_str(), all));
    let mut at = &root;
    let mut path = Vec::new();
    // `Some` if the previous word is a flag that takes a value, so that the present word is this value.
    let mut open: Option<&Arg> = None;
    for word in before {
        if open.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            let takes_value = |it: &&Arg| it.get_action().takes_values();
            open = flag(&root, at, word).filter(|it| !word.contains('=') && takes_value(it));
        } else if let Some(verb) = at.find_subcommand(word) {
            at = verb;
            path.push(verb.get_name());
        } else {
            path.push("");
        }
    }
    if let Some(arg) = open {
        return value(arg);
    }
    if typed.starts_with('-') {
        return Completion::Words(flags(&root, at));
    }
    if at.has_subcommands() {
        return Completion::Words(verbs(at));
    }
    positional(&path)
}

/// Finds a flag as it is written in `word`: a flag of the subcommand, or a global one.
fn flag<'a>(root: &'a Command, at: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.trim_start_matches('-').split('=').next()?;
    let is = |arg: &&Arg| {
        let short = arg.get_short().map(|it| it.to_string());
        arg.get_long() == Some(name) || short.as_deref() == Some(name)
    };
    at.get_arguments().chain(root.get_arguments()).find(is)
}

fn flags(root: &Command, at: &Command) -> Vec<(String, String)> {
    let all = at.get_arguments().chain(root.get_arguments());
    let all = all.filter_map(|arg| Some((format!("--{}", arg.get_long()?), help(arg.get_help()))));
    let mut seen = BTreeSet::new();
    all.filter(|(name, _)| seen.insert(name.clone())).collect()
}

fn verbs(at: &Command) -> Vec<(String, String)> {
    let shown = at.get_subcommands().filter(|it| !it.is_hide_set());
    shown
        .map(|it| (it.get_name().to_owned(), help(it.get_about())))
        .collect()
}

fn help(text: Option<&StyledStr>) -> String {
    text.map_or(String::new(), |it| {
        it.to_string().lines().next().unwrap_or_default().to_owned()
    })
}

/// Returns the completions for the value of a flag.
fn value(arg: &Arg) -> Completion {
    match arg.get_long() {
        Some("pool" | "delete-pool") => return Completion::Names(NameKind::Pool),
        Some("node") => return Completion::Names(NameKind::Node),
        _ => {}
    }
    let values = arg.get_possible_values();
    if values.is_empty() {
        return Completion::Anything;
    }
    let word = |it: &PossibleValue| (it.get_name().to_owned(), help(it.get_help()));
    Completion::Words(values.iter().map(word).collect())
}

/// Returns the completions for a positional argument. `path` has the subcommands, and an empty string for each argument
/// before this one. Only `drain`, `undrain` and `claim release` take more than one argument.
fn positional(path: &[&str]) -> Completion {
    Completion::Names(match path {
        ["show" | "explain", "pool"] | ["map"] => NameKind::Pool,
        ["show" | "explain", "node"] | ["pop" | "push"] => NameKind::Node,
        ["show" | "explain", "pod"] => NameKind::Pod,
        ["drain" | "undrain", ..] => NameKind::Block,
        ["claim", "release", ..] => NameKind::Claim,
        _ => return Completion::Anything,
    })
}

/// Returns the names of all objects of a kind that users can give as an argument. Pods without addresses and blocks in
/// quarantine are left out.
fn names(kind: NameKind, inventory: &Inventory) -> Vec<String> {
    let Inventory {
        registry,
        cache,
        pods,
        ..
    } = inventory;
    match kind {
        NameKind::Pool => registry
            .pools
            .iter()
            .map(|it| it.name.to_string())
            .collect(),
        NameKind::Node => cache.nodes.iter().map(|it| it.name.to_string()).collect(),
        NameKind::Pod => {
            let pods = pods.iter().filter(|it| it.uses_addresses());
            pods.map(|it| it.name.clone()).collect()
        }
        NameKind::Block => {
            let blocks = registry.blocks.iter().filter(|it| !it.owner.quarantined);
            blocks.map(|it| it.cidr.to_string()).collect()
        }
        // This value is never used, because `listed` requests the names of claims itself.
        NameKind::Claim => Vec::new(),
    }
}

/// Asks the API server for the names of the objects of a kind.
async fn listed(kind: NameKind, reach: &ApiReach) -> anyhow::Result<Vec<String>> {
    let wanted = match kind {
        NameKind::Claim => {
            // The user may have rights to claims only in this namespace.
            let claims = reach.claims(Some(&reach.namespace)).await?.into_iter();
            return Ok(claims.filter_map(|it| it.metadata.name).collect());
        }
        NameKind::Pod => WantedKinds::Pods,
        _ => WantedKinds::NoPods,
    };
    Ok(names(kind, &reach.inventory(wanted).await?))
}

/// Returns the flags of a command line that select the cluster and the user. The command line may be incomplete.
fn cluster(words: &[String]) -> Flags {
    let of = |names: &[&str]| {
        words.iter().enumerate().find_map(|(at, word)| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let is = names.contains(&name);
            let value = if word.contains('=') {
                Some(value.to_owned())
            } else {
                words.get(at + 1).cloned()
            };
            value.filter(|_| is)
        })
    };
    Flags {
        kubeconfig: of(&["--kubeconfig"]).map(PathBuf::from),
        context: of(&["--context"]),
        namespace: of(&["--namespace", "-n"]),
        impersonate: of(&["--as"]),
        request_timeout: PATIENCE_SECONDS,
        chunk_size: 0,
        ..Flags::default()
    }
}

/// Returns the output for kubectl: the words that begin with `typed`, then the directive that forbids the shell to
/// offer files.
fn lines(all: &[(String, String)], typed: &str) -> String {
    let fit = all.iter().filter(|it| it.0.starts_with(typed));
    let fit = fit.map(|(word, about)| match about.as_str() {
        "" => format!("{word}\n"),
        about => format!("{word}\t{about}\n"),
    });
    fit.collect::<String>() + NO_FILES + "\n"
}

/// Runs `__complete`: prints the possible words. If names of objects are possible, lists them from the API server
/// first.
pub(crate) async fn exec(args: &CompleteArgs) -> anyhow::Result<ExitVerdict> {
    let typed = args.words.last().map_or("", String::as_str);
    let text = match next(&args.words) {
        Completion::Anything => format!("{FILES}\n"),
        Completion::Words(all) => lines(&all, typed),
        Completion::Names(kind) => {
            let reach = ApiReach::new(&cluster(&args.words)).await?;
            let named = listed(kind, &reach).await?.into_iter();
            let named = named.map(|it| (it, String::new()));
            lines(&named.collect::<Vec<_>>(), typed)
        }
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .context("cannot write the completions")?;
    Ok(ExitVerdict::Clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Completion {
        next(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    fn words(line: &str) -> Vec<String> {
        match of(line) {
            Completion::Words(all) => all.into_iter().map(|it| it.0).collect(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn verbs_flags_and_values_are_completed() {
        let verbs = words("");
        assert!(verbs.contains(&"explain".to_owned()) && !verbs.contains(&"__complete".to_owned()));
        assert_eq!(words("explain "), ["pod", "node", "pool"]);
        assert!(words("check --").contains(&"--severity".to_owned()));
        assert!(words("check --").contains(&"--context".to_owned()));
        assert_eq!(
            words("-n shop check --severity "),
            ["info", "warning", "critical"]
        );
        assert!(words("show pools -o ").contains(&"json".to_owned()));
    }

    #[test]
    fn names_are_those_of_the_kind() {
        for (line, kind) in [
            ("show pool ", NameKind::Pool),
            ("map d", NameKind::Pool),
            ("--context x explain node w", NameKind::Node),
            ("explain pod -n shop ", NameKind::Pod),
            ("show blocks --pool ", NameKind::Pool),
            ("show blocks --node ", NameKind::Node),
            ("plan --delete-pool ", NameKind::Pool),
            ("drain ", NameKind::Block),
            ("drain 10.0.0.0/26 ", NameKind::Block),
            ("claim create db --pool ", NameKind::Pool),
            ("claim release ", NameKind::Claim),
            ("claim -n shop release db ", NameKind::Claim),
        ] {
            assert_eq!(of(line), Completion::Names(kind), "{line}");
        }
        assert_eq!(of("show ip "), Completion::Anything);
        assert_eq!(of("claim create "), Completion::Anything);
        assert_eq!(of("show pool one "), Completion::Anything);
    }

    #[test]
    fn the_cluster_is_that_of_the_line() {
        let line = "--context=a show -n b pool --kubeconfig c d";
        let flags = cluster(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(flags.context.as_deref(), Some("a"));
        assert_eq!(flags.namespace.as_deref(), Some("b"));
        assert_eq!(flags.kubeconfig, Some("c".into()));
    }

    #[test]
    fn lines_are_as_kubectl_reads_them() {
        let all = [
            ("pods".to_owned(), "of people".to_owned()),
            ("old".to_owned(), String::new()),
        ];
        assert_eq!(lines(&all, "p"), "pods\tof people\n:4\n");
        assert_eq!(lines(&all, ""), "pods\tof people\nold\n:4\n");
    }
}
