//! Checks that tests find mutations. A mutation is a deliberate bug that an environment variable switches on
//! (docs/mutations.md). For some mutations, `proofs` names a unit test, which must fail with the mutation and pass
//! without it. Every crate with such tests includes this file.
#![cfg(debug_assertions)]

use std::process::Command;

use cadastre_core::mutation::{Mutation, VARIABLE};

// Several tests include this file, so its items are `pub`.
#[allow(unreachable_pub)]
#[path = "../sim/proofs.rs"]
mod proofs;

use proofs::{Proof, proof, row};

/// Runs the test with this name, with the given mutation if there is one. Returns whether the test passes. Panics if
/// there is not exactly one such test.
fn passes(name: &str, mutation: Option<Mutation>) -> bool {
    let mut test = Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", name]).env_remove(VARIABLE);
    if let Some(mutation) = mutation {
        test.env(VARIABLE, format!("{mutation:?}"));
    }
    let done = test.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(text.contains("running 1 test"), "there is no test {name}");
    done.status.success()
}

#[test]
fn unit_tests_find_what_is_said_of_them() {
    let (own, _) = module_path!().split_once("::").unwrap();
    let own = own.trim_start_matches("cadastre_");
    let mut wrong = Vec::new();
    for mutation in Mutation::ALL {
        let Proof::Test(name) = proof(*mutation) else {
            continue;
        };
        let Some((_, name)) = name.split_once("::").filter(|it| it.0 == own) else {
            continue;
        };
        println!("{}", row(*mutation));
        if !passes(name, None) || passes(name, Some(*mutation)) {
            wrong.push(format!("{mutation:?}: {name}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
