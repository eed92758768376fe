//! Errors as the protocol wants them: an object on standard output and exit status 1.

use super::json::Value;
use crate::{Refusal, Why};

/// The config's version is not one of ours, or does not know the command.
pub(super) const INCOMPATIBLE_VERSION: u32 = 1;
/// A variable of the environment is missing or wrong.
pub(super) const INVALID_ENVIRONMENT: u32 = 4;
/// Reading or writing failed.
pub(super) const IO_FAILURE: u32 = 5;
/// The config is no JSON.
pub(super) const DECODING_FAILURE: u32 = 6;
/// The config says something that cannot be.
pub(super) const INVALID_CONFIG: u32 = 7;
/// The network namespace is the plugin's own.
pub(super) const INVALID_NETNS: u32 = 8;
/// Not now.
pub(super) const TRY_AGAIN_LATER: u32 = 11;
/// No ADD can be served; from STATUS alone.
pub(super) const NOT_AVAILABLE: u32 = 50;
/// What the Go library answers where a plugin names no code: host-local, for nearly everything.
pub(super) const INTERNAL: u32 = 999;

/// An error for the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniError {
    /// The code
    pub code: u32,
    /// What is wrong, with what, and what to do
    pub msg: String,
    /// More, or nothing
    pub details: String,
}

impl CniError {
    pub(super) fn new(code: u32, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    pub(super) fn with(code: u32, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self {
            details: details.into(),
            ..Self::new(code, msg)
        }
    }

    /// What the node's addresses refused, for `status` or another command.
    pub(super) fn refused(refusal: Refusal, status: bool) -> Self {
        Self::new(code(refusal.why, status), refusal.text)
    }

    /// The object; with the version that it is written by, where that is known.
    pub(super) fn render(&self, version: Option<&str>) -> String {
        let mut members = Vec::new();
        if let Some(version) = version {
            members.push(("cniVersion", Value::String(version.to_owned())));
        }
        members.push(("code", Value::Int(self.code.into())));
        members.push(("msg", Value::String(self.msg.clone())));
        if !self.details.is_empty() {
            members.push(("details", Value::String(self.details.clone())));
        }
        Value::object(members).pretty()
    }
}

/// The code of a refusal. STATUS has codes of its own: an ADD could not be served.
fn code(why: Why, status: bool) -> u32 {
    match why {
        Why::NothingHeld | Why::Store if status => NOT_AVAILABLE,
        Why::Store => IO_FAILURE,
        Why::Busy | Why::PodUnknown => TRY_AGAIN_LATER,
        Why::Exhausted => 100,
        Why::NothingHeld => 101,
        Why::UnknownPool => 102,
        Why::NotHeld => 103,
        Why::Taken => 104,
        Why::NotUsable => 105,
        Why::Mismatch => 106,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_and_version_are_left_out_where_there_are_none() {
        assert_eq!(
            CniError::new(7, "no <name>").render(None),
            "{\n    \"code\": 7,\n    \"msg\": \"no \\u003cname\\u003e\"\n}"
        );
        assert_eq!(
            CniError::with(1, "a", "b").render(Some("1.0.0")),
            "{\n    \"cniVersion\": \"1.0.0\",\n    \"code\": 1,\n    \"msg\": \"a\",\n    \"details\": \"b\"\n}"
        );
    }

    #[test]
    fn status_alone_says_not_available() {
        assert_eq!(code(Why::NothingHeld, true), 50);
        assert_eq!(code(Why::NothingHeld, false), 101);
        assert_eq!(code(Why::Store, true), 50);
        assert_eq!(code(Why::Store, false), 5);
        assert_eq!((code(Why::Busy, true), code(Why::Busy, false)), (11, 11));
    }
}
