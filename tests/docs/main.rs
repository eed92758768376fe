//! The documentation is of this repository: what it links to, calls, sets and names is there.
//!
//! Commands are taken from its `sh` blocks and from code in its sentences, and go through the same parsers
//! that read them when somebody types them. What they do is for the end-to-end tests.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

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
#[path = "../common/repository.rs"]
mod repository;
mod shell;
mod versions;

use repository::{path, text};

/// Fails with all of what is wrong, a line each.
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
