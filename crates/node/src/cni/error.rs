//! Errors as the CNI protocol requires them: an object on standard output, and exit status 1.

use serde::Serialize;

use crate::{OpError, OpErrorKind};

/// The config's version is not supported, or the command does not exist in that version.
pub(super) const INCOMPATIBLE_VERSION: u32 = 1;
/// An environment variable is missing or has a wrong value.
pub(super) const INVALID_ENVIRONMENT: u32 = 4;
/// The config on standard input, or the store, cannot be read or written.
pub(super) const IO_FAILURE: u32 = 5;
/// The config is not JSON, is too long, or has a `cniVersion` that is not text.
pub(super) const DECODING_FAILURE: u32 = 6;
/// The config is JSON, but one of its values is invalid, for example the network's name or a path.
pub(super) const INVALID_CONFIG: u32 = 7;
/// The network namespace in the request is the one in which the CNI plugin itself runs.
pub(super) const INVALID_NETNS: u32 = 8;
/// The same call can succeed if it is repeated later.
pub(super) const TRY_AGAIN_LATER: u32 = 11;
/// No ADD can be served. Only STATUS returns this code.
pub(super) const NOT_AVAILABLE: u32 = 50;
/// The code that host-local uses for nearly every error.
pub(super) const INTERNAL: u32 = 999;

/// An error in the form that the CNI specification defines.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct CniError {
    /// `cniVersion` of the config; `None` in host-local mode, and if the version is not known or not supported
    #[serde(rename = "cniVersion", skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The CNI error code: below 100, a code of the CNI specification; from 100 on, a code of Cadastre or host-local
    pub code: u32,
    /// Says what is wrong, which object is concerned, and what to do
    pub msg: String,
}

impl CniError {
    pub(super) fn new(code: u32, msg: impl Into<String>) -> Self {
        Self {
            version: None,
            code,
            msg: msg.into(),
        }
    }

    /// Converts the rejection of an operation to a CNI error. `status` says whether the command was STATUS.
    pub(super) fn refused(refusal: OpError, status: bool) -> Self {
        Self::new(code(refusal.why, status), refusal.text)
    }
}

/// Returns the CNI error code of a rejection. If the rejection means that no ADD can be served, the code for STATUS is
/// [`NOT_AVAILABLE`].
fn code(why: OpErrorKind, status: bool) -> u32 {
    match why {
        OpErrorKind::NoBlock | OpErrorKind::Store if status => NOT_AVAILABLE,
        OpErrorKind::Store => IO_FAILURE,
        OpErrorKind::Busy | OpErrorKind::PodUnknown | OpErrorKind::Unprobed => TRY_AGAIN_LATER,
        OpErrorKind::Exhausted => 100,
        OpErrorKind::NoBlock => 101,
        OpErrorKind::UnknownPool => 102,
        OpErrorKind::NotInBlocks => 103,
        OpErrorKind::NotFree => 104,
        OpErrorKind::NotUsable => 105,
        OpErrorKind::Mismatch => 106,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_alone_says_not_available() {
        assert_eq!(code(OpErrorKind::NoBlock, true), 50);
        assert_eq!(code(OpErrorKind::NoBlock, false), 101);
        assert_eq!(code(OpErrorKind::Store, true), 50);
        assert_eq!(code(OpErrorKind::Store, false), 5);
        assert_eq!(
            (
                code(OpErrorKind::Busy, true),
                code(OpErrorKind::Busy, false)
            ),
            (11, 11)
        );
    }
}
