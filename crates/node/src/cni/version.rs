//! Versions of the protocol.

use super::error::{CniError, DECODING_FAILURE, INCOMPATIBLE_VERSION};
use super::golang;
use super::json::Value;

/// All that host-local speaks.
pub(super) const ALL: &[&str] = &[
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// What the plugin speaks with addresses of the node's: from the version on whose results can hold
/// several of a family.
pub(super) const OWN: &[&str] = &["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The answer to VERSION.
pub(super) fn answer(supported: &[&str]) -> String {
    let supported = Value::strings(supported.iter().copied());
    let answer = Value::object([
        ("cniVersion", Value::String("1.1.0".to_owned())),
        ("supportedVersions", supported),
    ]);
    answer.line() + "\n"
}

/// Whether a version is at least another; the error is Go's text about the part that is no number.
pub(super) fn at_least(version: &str, least: (i64, i64, i64)) -> Result<bool, String> {
    Ok(parse(version)? >= least)
}

fn parse(version: &str) -> Result<(i64, i64, i64), String> {
    if version.is_empty() {
        return Ok((0, 1, 0));
    }
    let parts: Vec<&str> = version.split('.').collect();
    if parts.len() > 3 {
        let quoted = golang::quote(version.as_bytes());
        return Err(format!("invalid version {quoted}: too many parts"));
    }
    let part = |at: usize, what: &str| match parts.get(at) {
        None => Ok(0),
        Some(text) => golang::atoi(text).map_err(|error| {
            let quoted = golang::quote(text.as_bytes());
            format!("failed to convert {what} version part {quoted}: {error}")
        }),
    };
    Ok((part(0, "major")?, part(1, "minor")?, part(2, "micro")?))
}

/// Refuses a config of a version that does not know the command.
pub(super) fn knows(
    version: &str,
    command: &str,
    since: (i64, i64, i64),
    supported: &[&str],
) -> Result<(), CniError> {
    let old = |reader: &str| {
        let msg = format!("{reader} version does not allow {command}");
        CniError::new(INCOMPATIBLE_VERSION, msg)
    };
    let undecodable = |text| CniError::new(DECODING_FAILURE, text);
    let version = parse(version).map_err(undecodable)?;
    if version < since {
        return Err(old("config"));
    }
    let newest = supported.last().copied().unwrap_or_default();
    match parse(newest) {
        Ok(newest) if newest >= version => Ok(()),
        _ => Err(old("plugin")),
    }
}

/// Refuses a config of a version that is not supported.
pub(super) fn check(version: &str, supported: &[&str]) -> Result<(), CniError> {
    if supported.contains(&version) {
        return Ok(());
    }
    let details = format!(
        "config is {}, plugin supports {}",
        golang::quote(version.as_bytes()),
        golang::quote_all(supported.iter().map(|it| it.as_bytes()))
    );
    let msg = "incompatible CNI versions";
    Err(CniError::with(INCOMPATIBLE_VERSION, msg, details))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_one_line() {
        assert_eq!(
            answer(OWN),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn versions_are_numbers_by_part() {
        assert_eq!(parse("1.10"), Ok((1, 10, 0)));
        assert_eq!(parse(""), Ok((0, 1, 0)));
        assert!(at_least("0.3.0", (0, 3, 0)).unwrap() && !at_least("", (0, 3, 0)).unwrap());
        assert_eq!(
            parse("1.x"),
            Err(r#"failed to convert minor version part "x": strconv.Atoi: parsing "x": invalid syntax"#.to_owned())
        );
        assert_eq!(
            parse("1.2.3.4"),
            Err(r#"invalid version "1.2.3.4": too many parts"#.to_owned())
        );
    }

    #[test]
    fn a_command_needs_its_version() {
        let gc = |version| knows(version, "GC", (1, 1, 0), ALL).map_err(|error| error.msg);
        assert_eq!(
            gc("1.0.0"),
            Err("config version does not allow GC".to_owned())
        );
        assert_eq!(
            gc("1.2.0"),
            Err("plugin version does not allow GC".to_owned())
        );
        assert_eq!(gc("1.1.0"), Ok(()));
        assert_eq!(
            check("1.0.1", OWN).unwrap_err().details,
            r#"config is "1.0.1", plugin supports ["0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#
        );
    }
}
