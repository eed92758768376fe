//! Files of this repository, by their paths from its root.

#![allow(dead_code, reason = "no test needs all of it")]

use std::path::{Path, PathBuf};

/// The absolute path of a file or folder, given its path from the root of the repository.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

pub fn crates() -> Vec<PathBuf> {
    let all = std::fs::read_dir(path("crates")).unwrap();
    all.map(|it| it.unwrap().path()).collect()
}

/// The folders of all packages: the crates, the root package and e2e.
pub fn packages() -> Vec<PathBuf> {
    let mut all = crates();
    all.extend([path("."), path("e2e")]);
    all
}

/// The text of a file of the repository; panics if it cannot be read.
pub fn text(name: &str) -> String {
    let path = path(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
