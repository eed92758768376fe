//! Checks licences and sources of all dependencies. `make deny` checks advisories, where cargo-deny is installed.

use std::process::Command;

use serde_json::Value;

/// The only allowed source of crates, as Cargo.lock names it.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The licences that a dependency may have. Code under each of them may be part of a program under Apache-2.0.
const ALLOWED: [&str; 8] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    // This is the licence of the list of Mozilla's root certificates.
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Whether the allowed licences satisfy an SPDX expression. Parentheses are ignored, and each part of an AND needs an
/// allowed alternative. This check is never less strict than the expression.
fn is_allowed(expression: &str) -> bool {
    // Before SPDX expressions, crates wrote "MIT/Apache-2.0" for an OR.
    let plain = expression.replace(['(', ')'], "").replace('/', " OR ");
    let one = |part: &str| part.split(" OR ").any(|it| ALLOWED.contains(&it.trim()));
    plain.split(" AND ").all(one)
}

#[test]
fn expressions_are_understood() {
    for (expression, allowed) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("GPL-3.0-only/MIT", true),
        ("MIT AND GPL-3.0-only", false),
        ("MIT AND (GPL-3.0-only OR ISC)", true),
        ("(MIT OR ISC) AND GPL-3.0-only", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("MIT WITH x", false),
    ] {
        assert_eq!(is_allowed(expression), allowed, "{expression}");
    }
}

#[test]
fn every_package_has_an_allowed_licence_and_source() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let done = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{error}");
    let metadata: Value = serde_json::from_slice(&done.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{}", packages.len());
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let source = package["source"].as_str();
        let own = source.is_none() && name.starts_with("cadastre");
        assert!(
            own || source == Some(SOURCE),
            "{name} comes from {source:?}"
        );
        let licence = package["license"].as_str().unwrap_or("nothing");
        assert!(is_allowed(licence), "{name} has the licence {licence}");
    }
}
