//! Checks that everything that the documentation links to, calls, sets and names exists in this repository.
//!
//! Commands are taken from `sh` blocks and from code in sentences. The programs' own parsers check them. What the
//! commands do is tested by the end-to-end tests.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

mod attacks;
mod blocks;
mod commands;
mod groups;
mod limits;
mod links;
mod mutations;
mod names;
mod pages;
mod pins;
mod reliability;
#[path = "../common/repository.rs"]
mod repository;
mod shell;
mod versions;

use repository::{path, text};

/// Panics if `wrong` has messages, and shows each of them on a line of its own.
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
