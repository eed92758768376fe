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

/// The absolute paths of all files in a folder and the folders below it. If `name` is a file, the result is only its
/// path.
pub fn files(name: &str) -> Vec<PathBuf> {
    let (mut files, mut left) = (Vec::new(), vec![path(name)]);
    while let Some(next) = left.pop() {
        if next.is_dir() {
            left.extend(
                std::fs::read_dir(&next)
                    .unwrap()
                    .map(|it| it.unwrap().path()),
            );
        } else {
            files.push(next);
        }
    }
    files
}

pub fn has_extension(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|it| it == extension)
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
