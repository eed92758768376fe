//! Checks licences and sources of all dependencies against deny.toml.
//!
//! `cargo deny` checks the same file, and advisories in addition; this test needs neither that program nor a network.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

#[path = "common/repository.rs"]
mod repository;

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// The only allowed source of crates, as Cargo.lock names it.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The licences that deny.toml allows.
fn allowed() -> BTreeSet<String> {
    let text = repository::text("deny.toml");
    let (_, list) = text.split_once("\nallow = [\n").unwrap();
    let (list, _) = list.split_once("\n]").unwrap();
    let names = list
        .lines()
        .map(|it| it.split('#').next().unwrap_or_default());
    names
        .map(|it| it.trim().trim_matches([',', '"']).to_owned())
        .collect()
}

/// All packages in Cargo.lock.
fn packages() -> Vec<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let done = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let metadata: Value = serde_json::from_slice(&done.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Whether the allowed licences satisfy an SPDX expression.
fn is_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // Before SPDX expressions, crates wrote "MIT/Apache-2.0".
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let met = either(&mut rest, allowed);
    assert!(rest.is_empty(), "not understood: {expression}");
    met
}

fn either(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut met = both(words, allowed);
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        met |= both(words, allowed);
    }
    met
}

fn both(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let met = either(words, allowed);
            let [")", rest @ ..] = *words else {
                panic!("a parenthesis is not closed before {words:?}");
            };
            *words = rest;
            met
        }
        [name, "WITH", exception, rest @ ..] => {
            *words = rest;
            allowed.contains(&format!("{name} WITH {exception}"))
        }
        [name, rest @ ..] => {
            *words = rest;
            allowed.contains(*name)
        }
        [] => panic!("a licence is missing"),
    }
}

#[test]
fn expressions_are_understood() {
    let allowed: BTreeSet<String> = ["MIT", "ISC", "A WITH x"].map(ToOwned::to_owned).into();
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("GPL-3.0-only/MIT", true),
        ("MIT AND GPL-3.0-only", false),
        ("MIT AND GPL-3.0-only OR ISC", true),
        ("MIT AND (GPL-3.0-only OR ISC)", true),
        ("(MIT OR ISC) AND GPL-3.0-only", false),
        ("A WITH x", true),
        ("MIT WITH x", false),
    ] {
        assert_eq!(is_met(expression, &allowed), met, "{expression}");
    }
}

#[test]
fn everything_that_is_built_may_be() {
    let allowed = allowed();
    assert!(
        allowed.contains("Apache-2.0") && allowed.len() < 20,
        "{allowed:?}"
    );
    let packages = packages();
    assert!(packages.len() > 100, "{}", packages.len());
    let mut wrong = Vec::new();
    for package in &packages {
        let name = format!("{} {}", package["name"], package["version"]);
        match package["source"].as_str() {
            None if package["name"].as_str().unwrap().starts_with("cadastre") => {}
            Some(SOURCE) => {}
            other => wrong.push(format!("{name} comes from {other:?}")),
        }
        match package["license"].as_str() {
            Some(licence) if is_met(licence, &allowed) => {}
            other => wrong.push(format!("{name} has the licence {other:?}: see deny.toml")),
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// A licence that can be removed from the list without effect is not needed.
#[test]
fn every_licence_on_the_list_is_needed() {
    let allowed = allowed();
    let packages = packages();
    let all_met = |allowed: &BTreeSet<String>| {
        let mut licences = packages.iter().filter_map(|it| it["license"].as_str());
        licences.all(|it| is_met(it, allowed))
    };
    for licence in &allowed {
        let mut without = allowed.clone();
        without.remove(licence);
        assert!(
            !all_met(&without),
            "nothing needs {licence}: take it off deny.toml"
        );
    }
}
