//! Tests the ledger of a node against a model of its rules, on disks that fail, and in processes that are killed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

mod asking;
mod compare;
mod crash;
#[path = "../../../../tests/common/memory_disk.rs"]
mod disk;
mod file;
mod helpers;
mod holdings;
mod kills;
mod model;
mod property;
#[path = "../../../../tests/common/rng.rs"]
mod rng;
mod rot;
mod world;
