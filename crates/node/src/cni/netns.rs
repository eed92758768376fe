//! Checks that a network namespace is not the one in which the CNI plugin runs.

use std::os::unix::fs::MetadataExt as _;

use super::error::{CniError, INVALID_NETNS};
use super::request::Env;

/// Fails if the request names the network namespace of this process, unless the request sets `CNI_NETNS_OVERRIDE`. A
/// path that is missing or cannot be read is accepted, because a DEL can come after the namespace is gone.
pub(super) fn check(env: &Env) -> Result<(), CniError> {
    let identity = |path: &str| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let named = identity(&env.netns);
    if env.any_netns() || named.is_none() || named != identity("/proc/thread-self/ns/net") {
        return Ok(());
    }
    let msg = format!(
        "CNI_NETNS is {}, the plugin's own network namespace: name the container's, or set CNI_NETNS_OVERRIDE=1",
        env.netns
    );
    Err(CniError::new(INVALID_NETNS, msg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_same_namespace_is_the_same_one() {
        let env = |netns: &str, netns_override: &str| Env {
            netns: netns.to_owned(),
            netns_override: netns_override.to_owned(),
            ..Env::default()
        };
        assert_eq!(check(&env("/proc/self/ns/net", "")).unwrap_err().code, 8);
        assert!(check(&env("/proc/self/ns/net", "True")).is_ok());
        for other in ["", "/nowhere", "/proc/self/ns/uts", "/"] {
            assert!(check(&env(other, "")).is_ok(), "{other}");
        }
    }
}
