//! Checks that kubectl commands name Cadastre's kinds with their API group, as in `ippools.cadastre.dev`. Without the
//! group, kubectl might choose the `ippools` of another API.

use std::collections::BTreeSet;

use cadastre_api::crd;

use crate::assert_none;
use crate::repository::{files, has_extension};

/// The files that users read: pages, the chart, and the strings of the programs.
const READ: [&str; 9] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "charts",
    "config",
    "docs",
    "e2e/src",
    "src",
];

/// The characters that end a command of kubectl, in a shell or in a sentence.
const ENDS: [char; 7] = ['\n', '`', '|', ';', ')', '(', '#'];

/// All names that kubectl accepts for Cadastre's kinds.
fn names() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for crd in crd::all() {
        let names = crd.spec.names;
        all.extend([names.plural, names.kind.to_lowercase()]);
        all.extend(names.singular);
        all.extend(names.short_names.unwrap_or_default());
    }
    all
}

/// The names of Cadastre's kinds that the commands of a text use without a group.
fn bare(text: &str, names: &BTreeSet<String>) -> Vec<String> {
    let text = text.replace("\\\n", " ");
    let mut bare = Vec::new();
    for command in text.split("kubectl ").skip(1) {
        let command = command.split(ENDS).next().unwrap_or_default();
        let mut words = command.split_whitespace().filter(|it| !it.starts_with('-'));
        // `kubectl cadastre` knows only Cadastre's kinds, so its commands need no group.
        let Some(verb) = words.next().filter(|it| *it != "cadastre") else {
            continue;
        };
        let named = words.take(2).flat_map(|it| it.split(','));
        let plain = named.map(|it| it.split('/').next().unwrap_or(it));
        let plain = plain.map(|it| it.trim_end_matches(['.', ':', '"', '\'']));
        let found = plain.filter(|it| names.contains(*it));
        bare.extend(found.map(|it| format!("kubectl {verb} {it}")));
    }
    bare
}

#[test]
fn commands_name_the_group() {
    let names = names();
    let mut wrong = Vec::new();
    let mut grouped = 0;
    let files = READ.into_iter().flat_map(files);
    for file in files.filter(|it| !has_extension(it, "png")) {
        let text = std::fs::read_to_string(&file).unwrap();
        grouped += text.matches(".cadastre.dev").count();
        let bare = bare(&text, &names).into_iter();
        wrong.extend(bare.map(|it| format!("{}: {it}: whose?", file.display())));
    }
    assert_none(&wrong);
    assert!(
        grouped > 50,
        "only {grouped} names with their group were found"
    );
}

#[test]
fn a_kind_without_its_group_is_found() {
    let bare = |text: &str| bare(text, &names());
    for good in [
        "kubectl get ippools.cadastre.dev,nodesubnets.cadastre.dev -o yaml",
        "kubectl cadastre explain pool ippools",
        "kubectl get pods: its ippools",
        "see kubectl get nodes (ippools)",
        "kubectl delete pod ippool-0",
    ] {
        assert_eq!(bare(good), [""; 0], "{good}");
    }
    for (bad, found) in [
        ("`kubectl delete ippools --all`", "kubectl delete ippools"),
        ("see kubectl get ippools.", "kubectl get ippools"),
        ("kubectl -n x get pods,ipp", "kubectl x ipp"),
        ("kubectl get \\\n  nodesubnet/n1", "kubectl get nodesubnet"),
    ] {
        assert_eq!(bare(bad), [found], "{bad}");
    }
}
