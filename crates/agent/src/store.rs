//! Checks the store's file before it is opened, and creates a new file in place of one that was lost.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{RememberedAttachment, Store, StoreError, clock, set_aside};

/// How long to wait while another process has the file open.
const WAIT: Duration = Duration::from_secs(3);

/// The state of the store's file.
#[derive(Debug)]
pub(crate) enum Found {
    /// The file can be used
    Whole,
    /// There is no file
    Nothing,
    /// The file was damaged, and has been renamed
    Damaged {
        /// The new path of the damaged file
        aside: PathBuf,
        /// What is wrong with the file, as a text for users
        what: String,
    },
}

/// Checks the store's file, and renames a damaged one. The text of an error says what to do. After an error for which
/// [`is_final`] is true, a retry is of no use.
pub(crate) async fn find(path: &Path) -> Result<Found, StoreError> {
    let path = path.to_owned();
    blocking(move || match Store::open_existing(&path, WAIT) {
        Ok(_) => Ok(Found::Whole),
        Err(StoreError::Missing { .. }) => Ok(Found::Nothing),
        Err(error @ StoreError::Damaged { .. }) => {
            let aside = set_aside(&path)?;
            Ok(Found::Damaged {
                aside,
                what: error.to_string(),
            })
        }
        Err(error) => Err(error),
    })
    .await
}

/// Whether only an administrator can resolve the error.
pub(crate) fn is_final(error: &StoreError) -> bool {
    matches!(error, StoreError::Format { .. })
}

/// Creates a new file with the node's ranges and the addresses that other sources show as in use. Returns how many
/// attachments lost an address because another attachment has it as well.
pub(crate) async fn make(
    path: &Path,
    holding: NodeAllocation,
    known: Vec<RememberedAttachment>,
) -> Result<usize, StoreError> {
    let path = path.to_owned();
    blocking(move || {
        let (_, lost) = Store::rebuild(&path, &holding, &known, &clock::now())?;
        Ok(lost.len())
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or(Err(StoreError::Busy {
        what: "the work on it was cut off",
    }))
}
