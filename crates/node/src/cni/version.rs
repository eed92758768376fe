//! The versions of the CNI protocol that are supported, and which commands each version has.

use super::error::{CniError, INCOMPATIBLE_VERSION};

/// The versions that are supported in host-local mode and in configs of whereabouts, oldest first.
pub(super) const ALL: &[&str] = &[
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// The versions that are supported in all other configs: those whose results can contain several addresses of a
/// family.
pub(super) const OWN: &[&str] = &["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Fails if the config's version is not supported, or if the command does not exist in that version.
pub(super) fn check(version: &str, command: &str, supported: &[&str]) -> Result<(), CniError> {
    let wrong = |msg| Err(CniError::new(INCOMPATIBLE_VERSION, msg));
    if !supported.contains(&version) {
        let supported = supported.join(", ");
        return wrong(format!(
            "cniVersion of the network config is {version:?}: write one of {supported}"
        ));
    }
    let since = match command {
        "CHECK" => "0.4.0",
        "GC" | "STATUS" => "1.1.0",
        _ => "0.1.0",
    };
    if !is_since(version, since) {
        return wrong(format!(
            "cniVersion of the network config is {version}: {command} needs {since} or later"
        ));
    }
    Ok(())
}

/// Returns whether a supported version is `least` or later.
pub(super) fn is_since(version: &str, least: &str) -> bool {
    let order = |version| ALL.iter().position(|it| *it == version);
    order(version) >= order(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_needs_its_version() {
        assert_eq!(check("1.1.0", "GC", ALL), Ok(()));
        assert_eq!(check("0.1.0", "ADD", ALL), Ok(()));
        for (version, command) in [
            ("1.0.0", "GC"),
            ("0.3.1", "CHECK"),
            ("1.2.0", "ADD"),
            ("0.2.0", "ADD"),
            ("x", "ADD"),
        ] {
            let error = check(version, command, OWN).unwrap_err();
            assert_eq!(error.code, 1, "{version} {command}");
        }
    }
}
