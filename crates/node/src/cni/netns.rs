//! Whether a network namespace is the plugin's own.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;

/// The Go library's text about it.
pub(super) const OWN: &str = "plugin's netns and netns from CNI_NETNS should not be the same";

/// Whether `path` is the namespace that this process is in. One that cannot be looked at is not:
/// DEL comes with none when it is gone.
pub(super) fn is_own(path: &[u8]) -> bool {
    let identity = |path: &OsStr| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let given = identity(OsStr::from_bytes(path));
    given.is_some() && given == identity(OsStr::new("/proc/thread-self/ns/net"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_same_namespace_is_the_same_one() {
        assert!(is_own(b"/proc/self/ns/net"));
        for other in ["", "/nowhere", "/proc/self/ns/uts", "/"] {
            assert!(!is_own(other.as_bytes()), "{other}");
        }
    }
}
