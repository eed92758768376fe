//! The holdings file: a copy of the node's ranges and pod notes ([`Holdings`]) on a disk, which survives reboots.
//!
//! A change of the node's ranges is written to this file before the store commits the change. So nobody sees a change
//! that a loss of power could undo. If the commit then fails, the file is ahead of the store
//! ([`HoldingsFile::is_ahead`]), and the next `Store::transact` writes the file again. Two changes are written later, so
//! that nothing waits for the disk: changed pod notes, and that blocks stop assigning addresses
//! (`AddressLedger::restrict`).

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::ledger::Holdings;
use super::super::ops::Now;
use super::super::storage_fault::StorageFault;
use cadastre_core::mutation::Mutation;

/// Durable storage of one small file, which is replaced as a whole. Tests implement this trait with disks that fail.
pub trait HoldingsDisk: Debug + Send + Sync + 'static {
    /// Returns the content of the file; `None` if the file does not exist
    fn read(&self) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the content. After success, the new content survives a loss of power. After an error, or a loss of
    /// power during the call, the file has either the old or the new content
    fn replace(&self, content: &[u8]) -> io::Result<()>;
    /// Waits until the current content is durable, so that it survives a loss of power
    fn sync(&self) -> io::Result<()>;
}

/// The file that keeps the node's ranges and pod notes across reboots. All clones share the same state.
#[derive(Clone, Debug)]
pub struct HoldingsFile(Arc<State>);

#[derive(Debug)]
struct State {
    path: PathBuf,
    node_name: String,
    disk: Box<dyn HoldingsDisk>,
    written: Mutex<Written>,
    drafts: AtomicU64,
    is_stale: AtomicBool,
    is_ahead: AtomicBool,
}

#[derive(Debug, Default)]
struct Written {
    /// The number of the newest draft that was written
    number: u64,
    /// The error of the last write or sync; `None` if it succeeded
    problem: Option<String>,
}

/// New content for the holdings file. Drafts are numbered, so that an older draft never replaces a newer one.
#[derive(Debug)]
pub struct HoldingsDraft {
    number: u64,
    content: Vec<u8>,
}

impl HoldingsFile {
    /// Creates a handle for the file of a node on `disk`. `path` is used only in messages.
    pub fn new(path: &Path, node_name: &str, disk: impl HoldingsDisk) -> Self {
        Self(Arc::new(State {
            path: path.to_owned(),
            node_name: node_name.to_owned(),
            disk: Box::new(disk),
            written: Mutex::default(),
            drafts: AtomicU64::new(1),
            is_stale: AtomicBool::new(false),
            is_ahead: AtomicBool::new(false),
        }))
    }

    /// Reads the file. Returns `None` if it does not exist. Returns an error, as a text for users, if it cannot be read,
    /// if its content is damaged, or if the agent of another node wrote it: the disk may be a copy of a disk of that
    /// node, which still uses its ranges.
    pub fn read(&self) -> Result<Option<Holdings>, String> {
        let text = |what: String| format!("{}: {what}", self.0.path.display());
        let content = self
            .0
            .disk
            .read()
            .map_err(|error| text(error.to_string()))?;
        let holdings = content.map(|content| Holdings::parse(&content));
        let holdings = holdings.transpose().map_err(text)?;
        let other = holdings.as_ref().and_then(Holdings::node_name);
        match other.filter(|it| *it != self.0.node_name) {
            Some(other) => Err(text(format!(
                "the agent of node {other} wrote it, and this is node {}: its ranges are not used",
                self.0.node_name
            ))),
            None => Ok(holdings),
        }
    }

    /// Returns the holdings if an earlier boot wrote the file, otherwise `None`. After a reboot no container runs, so a
    /// missing store can be created from the holdings. Within one boot, a missing store was lost.
    pub fn before_reboot(&self, now: &Now) -> Result<Option<Holdings>, String> {
        let holdings = self.read()?;
        let is_earlier = |it: &Holdings| it.boot() != now.boot;
        Ok(holdings.filter(|it| is_earlier(it) || Mutation::LostStoreTakenForReboot.is_on()))
    }

    /// Writes changed ranges, and marks the file as ahead of the store until [`Self::set_ahead`] is called with
    /// `false`. If the write fails without effect, the mark does not change.
    pub(super) fn write_ranges(&self, draft: &HoldingsDraft) -> Result<(), StorageFault> {
        let was_ahead = self.is_ahead();
        self.set_ahead(true);
        let written = self.write(draft);
        let is_changed = || match self.0.disk.read() {
            Ok(Some(content)) => content == draft.content,
            Ok(None) => false,
            Err(_) => true,
        };
        if written.is_err() && !is_changed() {
            self.set_ahead(was_ahead);
        }
        written
    }

    /// Writes `draft`, or does nothing if a newer draft was written. If the write fails, the file is marked as stale.
    pub fn write(&self, draft: &HoldingsDraft) -> Result<(), StorageFault> {
        let mut written = self.written();
        if draft.number < written.number {
            return Ok(());
        }
        self.checked(&mut written, self.0.disk.replace(&draft.content))?;
        written.number = draft.number;
        Ok(())
    }

    /// Waits until the content is durable. The process that wrote the file may have been killed before its own sync.
    pub(super) fn sync(&self) -> Result<(), StorageFault> {
        self.checked(&mut self.written(), self.0.disk.sync())
    }

    fn checked(&self, written: &mut Written, done: io::Result<()>) -> Result<(), StorageFault> {
        written.problem = done.as_ref().err().map(ToString::to_string);
        if done.is_err() {
            self.set_stale();
        }
        done.map_err(|error| StorageFault::Unrecorded {
            path: self.0.path.clone(),
            error,
        })
    }

    /// Returns the path and the error of the last write or sync; `None` if it succeeded.
    pub fn problem(&self) -> Option<String> {
        let problem = self.written().problem.clone()?;
        Some(format!("{}: {problem}", self.0.path.display()))
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        let written = self.0.written.lock();
        written.unwrap_or_else(PoisonError::into_inner)
    }

    /// Encodes `holdings` as the newest draft, and clears the stale mark.
    pub(super) fn draft(&self, holdings: Holdings) -> Result<HoldingsDraft, StorageFault> {
        let content = holdings.into_bytes(&self.0.node_name)?;
        self.0.is_stale.store(false, Ordering::Relaxed);
        Ok(HoldingsDraft {
            number: self.0.drafts.fetch_add(1, Ordering::Relaxed),
            content,
        })
    }

    /// Returns whether another draft has to be written: pod notes have changed since the last draft, or a write failed.
    pub(super) fn is_stale(&self) -> bool {
        self.0.is_stale.load(Ordering::Relaxed)
    }

    /// Records that another draft has to be written.
    pub(crate) fn set_stale(&self) {
        self.0.is_stale.store(true, Ordering::Relaxed);
    }

    /// Returns whether the file may contain a change of ranges that the store does not contain.
    pub(super) fn is_ahead(&self) -> bool {
        self.0.is_ahead.load(Ordering::Relaxed)
    }

    pub(super) fn set_ahead(&self, is_ahead: bool) {
        self.0.is_ahead.store(is_ahead, Ordering::Relaxed);
    }
}
