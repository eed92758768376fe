//! Errors of the store's file, each with advice for administrators.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::ops::{OpError, OpErrorKind};
use super::super::storage_fault::{StorageFault, advice};

/// The advice for errors of a file system for which there is no specific advice.
const USUAL: &str = "See that its file system works, and the kernel's log.";

/// Why a store cannot be used. After an error nothing has changed, with one exception: if the disk fails while a commit
/// is made durable, the file can contain the commit when it is opened again.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file does not exist.
    #[error(
        "{path} is missing: no agent has run on this node yet, or it is rebuilding the file. See that `cadastre agent` runs on it."
    )]
    Missing {
        /// Path of the missing file
        path: PathBuf,
    },
    /// Another process has locked the file.
    #[error(
        "{path} was in use by another process for {waited:?}: this node's agent or another call is at work, or hangs. Try again; if this stays so, restart the agent."
    )]
    Locked {
        /// Path of the locked file
        path: PathBuf,
        /// How long this process waited for the file
        waited: Duration,
    },
    /// The store thread did not process the request.
    #[error("this node's store is not free: {what}. Try again.")]
    Busy {
        /// The reason, as a clause of the message
        what: &'static str,
    },
    /// The file that is to be created anew still exists.
    #[error("{path} cannot be rebuilt, because it is there: set it aside first.")]
    Exists {
        /// Path of the file that still exists
        path: PathBuf,
    },
    /// The file was written by another version, in an unknown format.
    #[error(
        "{path} has format {format}, which this version does not know: run the version that wrote it, or a newer one."
    )]
    Format {
        /// Path of the file with the unknown format
        path: PathBuf,
        /// Number of the file's format
        format: u32,
    },
    /// The content of the file is damaged.
    #[error(
        "{path} is damaged: {what}. Restart this node's agent, which sets the file aside and makes a new one of what the cluster and the container runtime know."
    )]
    Damaged {
        /// Path of the damaged file
        path: PathBuf,
        /// What is wrong with the file, as a clause of the message
        what: String,
    },
    /// A change of the node's ranges cannot be written to the holdings file. ADD and DEL still work.
    #[error("what this node holds cannot be recorded in {path}: {error}. {advice}")]
    Unrecorded {
        /// Path of the holdings file
        path: PathBuf,
        /// What an administrator can do about the error
        advice: &'static str,
        /// The error of the operating system
        error: io::Error,
    },
    /// The file system reports an error.
    #[error("{path} cannot be {done}: {error}. {advice}")]
    Io {
        /// Path of the store's file, even if the error is about its directory
        path: PathBuf,
        /// The word in the message that says what could not be done: opened, written, made
        done: &'static str,
        /// What an administrator can do about the error
        advice: &'static str,
        /// The error of the operating system
        error: io::Error,
    },
}

impl StoreError {
    pub(super) fn io(path: &Path, done: &'static str, error: io::Error) -> Self {
        let path = path.to_owned();
        if error.kind() == io::ErrorKind::NotFound {
            return Self::Missing { path };
        }
        let advice = advice(&error).unwrap_or(USUAL);
        Self::Io {
            path,
            done,
            advice,
            error,
        }
    }

    pub(super) fn fault(path: &Path, done: &'static str, fault: StorageFault) -> Self {
        match fault {
            StorageFault::Io(error) => Self::io(path, done, error),
            StorageFault::Unrecorded { path, error } => Self::Unrecorded {
                path,
                advice: advice(&error).unwrap_or(USUAL),
                error,
            },
            StorageFault::Damaged(what) => Self::Damaged {
                path: path.to_owned(),
                what,
            },
        }
    }

    /// Returns whether the file has to be created anew because it is damaged or missing.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Missing { .. })
    }

    /// Converts the error to the error that an operation such as ADD returns. The text stays the same.
    pub fn refusal(&self) -> OpError {
        let why = match self {
            Self::Missing { .. }
            | Self::Locked { .. }
            | Self::Busy { .. }
            | Self::Unrecorded { .. } => OpErrorKind::Busy,
            Self::Exists { .. } | Self::Format { .. } | Self::Damaged { .. } | Self::Io { .. } => {
                OpErrorKind::Store
            }
        };
        OpError {
            why,
            text: self.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_errors_come_with_advice() {
        let text = |errno| {
            let error = io::Error::from_raw_os_error(errno);
            let error = StoreError::io(Path::new("/var/lib/node.redb"), "written", error);
            let refusal = error.refusal();
            assert_eq!(refusal.why, OpErrorKind::Store);
            refusal.text
        };
        assert_eq!(
            text(28),
            "/var/lib/node.redb cannot be written: No space left on device (os error 28). Free space on its file system; nothing else has to be done then."
        );
        assert!(text(30).contains("so that it can be written"), "read-only");
        assert!(text(122).contains("Free space"), "quota");
        assert!(text(13).contains("Run as root"), "permission");
        assert!(text(20).contains("is a file"), "not a directory");
        assert!(text(5).contains("the kernel's log"), "I/O");
        let missing = StoreError::io(Path::new("x"), "opened", io::ErrorKind::NotFound.into());
        assert_eq!(missing.refusal().why, OpErrorKind::Busy);
    }
}
