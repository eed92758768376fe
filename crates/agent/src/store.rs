//! Checks the store's file before it is opened, and creates a new file in place of one that was lost.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use tracing::{info, warn};

use super::files::{self, FileError};
use super::machine::StoreFound;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{
    HoldingsDisk, HoldingsFile, Now, RememberedAttachment, Store, StoreError, clock, set_aside,
};

/// How long to wait while another process has the file open.
const WAIT: Duration = Duration::from_secs(3);

/// The file with the node's ranges and the notes on pods. Each write replaces the file by a rename.
#[derive(Debug)]
struct PlainFile(PathBuf);

impl HoldingsDisk for PlainFile {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        match fs::read(&self.0) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        files::replace(&self.0, content, 0o600).map_err(FileError::into_error)
    }

    fn sync(&self) -> io::Result<()> {
        files::sync(&self.0)
    }
}

/// Returns the file at `path` with the ranges of the node `node_name` and the notes on pods, which survives a reboot.
pub(crate) fn holdings_file(path: &Path, node_name: &str) -> HoldingsFile {
    HoldingsFile::new(path, node_name, PlainFile(path.to_owned()))
}

/// Checks the store's file, and renames the file if it is damaged. After a reboot, creates the store from `holdings`.
/// Returns [`StoreFound::Open`] if the store can be used. Returns an error only if an administrator must resolve the
/// problem; the text of the error says how.
pub(crate) async fn find(path: &Path, holdings: HoldingsFile) -> Result<StoreFound, StoreError> {
    let path = path.to_owned();
    let found = blocking(move || match open(&path, &holdings, &clock::now()) {
        Ok(()) => Ok(StoreFound::Open),
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

fn open(path: &Path, holdings: &HoldingsFile, now: &Now) -> Result<(), StoreError> {
    let opened = Store::open_existing(path, WAIT);
    if let Err(StoreError::Missing { .. }) = &opened {
        match holdings.before_reboot(now) {
            Ok(Some(before)) => {
                Store::after_reboot(path, holdings, &before, now)?;
                info!("the node has rebooted: the store was made from what the node held before");
                return Ok(());
            }
            Ok(None) => {}
            Err(error) => warn!("what this node held before is unknown: {error}"),
        }
    }
    opened?.recording(holdings.clone()).record_ranges(now)
}

/// Creates a new store file with the node's ranges and the addresses that are in use according to other sources.
/// Returns the number of attachments that lost an address because another attachment has the same address.
/// `has_addresses_outside` says whether pods use addresses outside of the ranges.
pub(crate) async fn make(
    path: &Path,
    holdings: HoldingsFile,
    holding: NodeAllocation,
    known: Vec<RememberedAttachment>,
    has_addresses_outside: bool,
) -> Result<usize, StoreError> {
    let path = path.to_owned();
    blocking(move || {
        let now = clock::now();
        let before = holdings.read().unwrap_or_else(|error| {
            warn!("which blocks this node has just released is unknown: {error}");
            None
        });
        let (_, lost) = Store::rebuild(
            &path,
            holdings,
            &holding,
            &known,
            has_addresses_outside,
            before.as_ref(),
            &now,
        )?;
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
