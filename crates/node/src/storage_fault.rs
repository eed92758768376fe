//! Errors of the storage below the ledger, with advice for administrators.

use std::io;
use std::path::PathBuf;

/// Why the storage could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StorageFault {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The holdings file cannot be written. The store itself may be usable.
    #[error("what this node holds cannot be recorded in {}: {error}", path.display())]
    Unrecorded {
        /// Path of the holdings file
        path: PathBuf,
        /// The error of the operating system
        error: io::Error,
    },
    /// The content of the file is inconsistent; the text says what is wrong.
    #[error("{0}")]
    Damaged(String),
}

/// Returns what an administrator can do about an error of a file system; `None` if this kind of error suggests nothing.
pub fn advice(error: &io::Error) -> Option<&'static str> {
    Some(match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "Free space on its file system; nothing else has to be done then."
        }
        io::ErrorKind::ReadOnlyFilesystem => "Mount its file system so that it can be written.",
        io::ErrorKind::PermissionDenied => "Run as root, or as the owner of the file.",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "There is a file where a directory has to be: take it away, or choose another path."
        }
        _ => return None,
    })
}

impl From<redb::Error> for StorageFault {
    fn from(error: redb::Error) -> Self {
        match error {
            redb::Error::Io(error) => Self::Io(error),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed => {
                Self::Io(io::Error::other(error.to_string()))
            }
            error => Self::Damaged(error.to_string()),
        }
    }
}

macro_rules! through_redb {
    ($($error:ident)*) => {$(
        impl From<redb::$error> for StorageFault {
            fn from(error: redb::$error) -> Self {
                Self::from(redb::Error::from(error))
            }
        }
    )*};
}

through_redb!(CommitError DatabaseError StorageError TableError TransactionError);
