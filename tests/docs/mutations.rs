//! Checks that docs/mutations.md agrees with `tests/sim/proofs.rs`, and that no shipped executable contains mutations.

use cadastre_core::mutation::Mutation;

use crate::{path, text};

#[path = "../sim/proofs.rs"]
mod proofs;

const PAGE: &str = "docs/mutations.md";

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
    // Mutations exist in builds with debug assertions. Only the profile for searches enables these by name.
    let manifest = text("Cargo.toml");
    let sections = manifest.split("\n[");
    let enabling = sections.filter(|it| it.contains("debug-assertions"));
    let names: Vec<&str> = enabling.filter_map(|it| it.split(']').next()).collect();
    assert_eq!(names, ["profile.search"]);
    let binaries = text("hack/binaries");
    let builds = binaries.lines().filter(|it| it.contains("cargo build"));
    let is_release = |it: &str| it.contains("--release") || it.contains("--profile plugin");
    let (shipped, wrong): (Vec<&str>, Vec<&str>) = builds.partition(|it| is_release(it));
    assert!(shipped.len() == 2 && wrong.is_empty(), "{wrong:?}");
}
