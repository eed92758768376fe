//! Paths of network namespaces, and which of them are gone according to the file system.
//!
//! A missing path proves that its network namespace is gone only if other paths were seen in the same directory.
//! Otherwise the agent might just have no access to the host's directory.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Returns those of `paths` whose network namespaces are gone. `roots` are the directories in which network namespaces
/// were seen.
pub(crate) fn gone<'a>(
    paths: impl Iterator<Item = &'a str>,
    roots: &BTreeSet<PathBuf>,
) -> BTreeSet<String> {
    let is_gone = |path: &&str| {
        let root = root(Path::new(path));
        root.is_some_and(|it| roots.contains(it) && it.is_dir()) && is_missing(path)
    };
    paths.filter(is_gone).map(str::to_owned).collect()
}

/// Returns those of `paths` that exist, or whose absence is not certain.
pub(crate) fn present<'a>(paths: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let is_present = |path: &&str| !path.is_empty() && !is_missing(path);
    paths.filter(is_present).map(str::to_owned).collect()
}

fn is_missing(path: &str) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Adds to `roots` the directories of those `paths` that exist now.
pub(crate) fn note_roots<'a>(paths: impl Iterator<Item = &'a str>, roots: &mut BTreeSet<PathBuf>) {
    for path in paths.map(Path::new) {
        if let Some(root) = root(path)
            && !roots.contains(root)
            && path.exists()
        {
            roots.insert(root.to_owned());
        }
    }
}

/// Returns the directory in which network namespaces like that of `path` appear: its parent directory, or `/proc` for
/// all paths below `/proc`. Returns `None` for a relative path.
fn root(path: &Path) -> Option<&Path> {
    if path.starts_with("/proc") {
        return Some(Path::new("/proc"));
    }
    path.parent().filter(|_| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_path_proves_something_only_in_a_directory_where_paths_were_seen() {
        let folder = crate::files::temp_folder();
        let (there, absent) = (folder.join("there"), folder.join("absent"));
        std::fs::write(&there, "").unwrap();
        let paths = [there.to_str().unwrap(), absent.to_str().unwrap(), "", "x"];
        let mut roots = BTreeSet::new();
        note_roots(paths[1..].iter().copied(), &mut roots);
        assert!(roots.is_empty(), "no path was seen");
        note_roots(paths.into_iter(), &mut roots);
        assert_eq!(roots, BTreeSet::from([folder.clone()]));
        let missing = BTreeSet::from([paths[1].to_owned()]);
        assert_eq!(gone(paths.into_iter(), &roots), missing);
        assert!(gone(paths.into_iter(), &BTreeSet::new()).is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
        let without_directory = gone(paths.into_iter(), &roots);
        assert!(without_directory.is_empty(), "{without_directory:?}");
    }

    #[test]
    fn paths_of_processes_have_one_root() {
        let root = |path| root(Path::new(path)).map(Path::to_owned);
        assert_eq!(root("/proc/1/ns/net"), Some(PathBuf::from("/proc")));
        assert_eq!(root("/run/netns/cni-1"), Some(PathBuf::from("/run/netns")));
        assert_eq!(root("netns/cni-1"), None);
    }
}
