//! Checks the store's file before it is opened, and creates a new file in place of one that was lost.

use std::path::Path;
use std::time::Duration;

use super::machine::StoreFound;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{RememberedAttachment, Store, StoreError, clock, set_aside};

/// How long to wait while another process has the file open.
const WAIT: Duration = Duration::from_secs(3);

/// Checks the store's file, and renames the file if it is damaged. Returns [`StoreFound::Open`] if the file can be
/// opened. Returns an error only if an administrator must resolve the problem; the text of the error says how.
pub(crate) async fn find(path: &Path) -> Result<StoreFound, StoreError> {
    let path = path.to_owned();
    let found = blocking(move || match Store::open_existing(&path, WAIT) {
        Ok(_) => Ok(StoreFound::Open),
        Err(StoreError::Missing { .. }) => Ok(StoreFound::Nothing),
        Err(error @ StoreError::Damaged { .. }) => Ok(StoreFound::Damaged {
            aside: set_aside(&path)?,
            what: error.to_string(),
        }),
        Err(error) => Err(error),
    });
    match found.await {
        Err(error @ StoreError::Format { .. }) => Err(error),
        Err(error) => Ok(StoreFound::Unclear(error.to_string())),
        found => found,
    }
}

/// Creates a new store file with the node's ranges and the addresses that are in use according to other sources.
/// Returns the number of attachments that lost an address because another attachment has the same address.
/// `has_addresses_outside` says whether pods use addresses outside of the ranges.
pub(crate) async fn make(
    path: &Path,
    holding: NodeAllocation,
    known: Vec<RememberedAttachment>,
    has_addresses_outside: bool,
) -> Result<usize, StoreError> {
    let path = path.to_owned();
    blocking(move || {
        let now = clock::now();
        let (_, lost) = Store::rebuild(&path, &holding, &known, has_addresses_outside, &now)?;
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
