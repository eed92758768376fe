//! The documentation is of this repository: what it links to, calls, sets and names is there.
//!
//! Commands are taken from its `sh` blocks and from code in its sentences, and go through the same parsers
//! that read them when somebody types them. What they do is for the end-to-end tests.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

mod blocks;
mod commands;
mod links;
mod names;
mod pages;
mod shell;
mod versions;

use std::path::{Path, PathBuf};

/// A path of the repository.
fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A file of the repository.
fn text(name: &str) -> String {
    let path = path(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Fails with all of what is wrong, a line each.
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
