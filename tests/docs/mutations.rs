//! The page of mutations is what `tests/sim/proofs.rs` says of them, and no shipped executable has any.

use cadastre_core::mutation::Mutation;

use crate::{path, text};

#[path = "../sim/proofs.rs"]
mod proofs;

const PAGE: &str = "docs/mutations.md";

/// What stands above the table.
const HEAD: &str = "| mutation | what goes wrong | what finds it |\n|---|---|---|\n";

#[test]
fn the_page_names_every_mutation_and_what_finds_it() {
    let page = text(PAGE);
    let (before, rest) = page.split_once(HEAD).unwrap();
    let end = rest.find("\n\n").map_or(rest.len(), |end| end + 1);
    let rows = Mutation::ALL.iter().map(|it| proofs::row(*it) + "\n");
    let wanted = format!("{before}{HEAD}{}{}", rows.collect::<String>(), &rest[end..]);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path(PAGE), &wanted).unwrap();
    } else {
        assert!(
            page == wanted,
            "{PAGE} is not what the tests do: UPDATE=1 cargo test --workspace --test docs mutations"
        );
    }
}

#[test]
fn what_is_shipped_has_no_mutations() {
    // They exist in builds with debug assertions, which no profile of a release switches on.
    assert!(!text("Cargo.toml").contains("debug-assertions"));
    let binaries = text("hack/binaries");
    let builds = binaries.lines().filter(|it| it.contains("cargo build"));
    let shipped = builds.filter(|it| !it.contains("--workspace"));
    let is_release = |it: &str| it.contains("--release") || it.contains("--profile plugin");
    let wrong: Vec<&str> = shipped.filter(|it| !is_release(it)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}
