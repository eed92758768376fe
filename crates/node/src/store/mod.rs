//! The file that contains the ledger of a node.
//!
//! Nothing of the ledger is kept in memory. So a process that opens the file continues where the last process stopped,
//! for whatever reason that process stopped. Only one process at a time has the file open. An operation is answered
//! only after its changes are durable. A transaction takes effect as a whole or not at all, even if the process is
//! killed or the power fails.
//!
//! After a disk error the store closes the file, rejects the current request, and opens the file again for the next
//! request. So the store works again as soon as the disk works, for example once there is free space.

mod checked;
mod disk;
mod error;
mod holdings;
mod tables;

use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, io};

use super::ledger::kv::{Kv, KvMut, KvTable};
use super::ledger::{AddressLedger, Holdings, RememberedAttachment, Snapshot};
use super::ops::{Now, Op, OpError, OpOutcome};
use super::storage_fault::StorageFault;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::NodeAllocation;
use checked::Checked;
use disk::LockedFile;
use tables::Tables;

pub use disk::Disk;
pub use error::StoreError;
pub use holdings::{HoldingsDisk, HoldingsDraft, HoldingsFile};

/// Version of the format of the tables.
const FORMAT: u32 = 1;
const FORMAT_KEY: &[u8] = b"format";
/// How long the store waits for the file when the store opens the file again after a disk error.
const REOPEN: Duration = Duration::from_secs(1);

/// The number of temporary files that this process has created. Each temporary file's name contains the number, so that
/// all names differ.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// The file that contains the ledger of a node. No other process can use the file while the store has it open.
pub struct Store {
    path: PathBuf,
    find: Find,
    /// The open database; `None` after a disk error, until the next request opens the file again
    open: Option<Checked>,
    /// The file that was opened; `None` if the store is not in a file
    file: Option<FileId>,
    /// The holdings file, to which changes of the node's ranges are written before they take effect. `None` if this
    /// process changes no ranges, as the CNI plugin, or if the ranges need not survive a reboot
    holdings: Option<HoldingsFile>,
}

/// When the ranges in a store are written to its holdings file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recording {
    /// Before the commit, even if they have not changed
    Always,
    /// Before the commit, if they have changed
    OfChanges,
    /// Some time after the commit, if they have changed
    Later,
}

/// Device and inode number of a file.
type FileId = (u64, u64);

/// A function that opens the disk. It returns `None` if another process keeps the disk open for longer than the given
/// time.
pub type Find = Box<dyn Fn(Duration) -> io::Result<Option<Box<dyn Disk>>> + Send>;

impl Store {
    /// Opens the file, or creates it if it does not exist. Waits at most `wait` for another process to close the
    /// file.
    pub fn open(path: &Path, wait: Duration) -> Result<Self, StoreError> {
        match Self::open_existing(path, wait) {
            Err(StoreError::Missing { .. }) => {}
            result => return result,
        }
        match Self::make(path, |_| Ok(())) {
            // Another process has created the file since `open_existing` failed, so this process opens that file.
            Ok(None) => Self::open_existing(path, wait),
            Ok(Some(((), store))) => Ok(store),
            Err(error) => Err(error),
        }
    }

    /// Opens a file, which must exist. Waits at most `wait` for another process to close the file.
    pub fn open_existing(path: &Path, wait: Duration) -> Result<Self, StoreError> {
        Self::on_disk(path, Self::file_finder(path), wait)
    }

    fn file_finder(path: &Path) -> Find {
        let path = path.to_owned();
        Box::new(move |wait| {
            let file = LockedFile::open(&path, wait)?;
            Ok(file.map(|file| Box::new(file) as Box<dyn Disk>))
        })
    }

    /// Opens the store on the disk that `find` returns. `path` is used in messages, and to notice if the file at this
    /// path is replaced.
    pub fn on_disk(path: &Path, find: Find, wait: Duration) -> Result<Self, StoreError> {
        let mut store = Self {
            path: path.to_owned(),
            open: Some(open(path, &find, wait)?),
            find,
            file: disk::id(path),
            holdings: None,
        };
        let fault = |fault| StoreError::fault(path, "opened", fault);
        let format = store.transact_tables(|tables| tables.get(KvTable::Meta, FORMAT_KEY))?;
        let format = format.and_then(|it| Some(u32::from_be_bytes(it.try_into().ok()?)));
        match format {
            Some(FORMAT) => Ok(store),
            Some(format) => Err(StoreError::Format {
                path: path.to_owned(),
                format,
            }),
            None => Err(fault(StorageFault::Damaged(
                "it has no format number".to_owned(),
            ))),
        }
    }

    /// Creates an empty ledger on the disk that `find` returns. The disk must be empty.
    pub fn create_on_disk(path: &Path, find: Find) -> Result<Self, StoreError> {
        let disk = find(Duration::ZERO).map_err(|error| StoreError::io(path, "made", error))?;
        let disk = disk.ok_or_else(|| StoreError::Locked {
            path: path.to_owned(),
            waited: Duration::ZERO,
        })?;
        Self::create(path, find, disk)
    }

    fn create(path: &Path, find: Find, disk: Box<dyn Disk>) -> Result<Self, StoreError> {
        let checked = Checked::create(disk);
        let checked = checked.map_err(|fault| StoreError::fault(path, "made", fault))?;
        let mut store = Self {
            path: path.to_owned(),
            find,
            open: Some(checked),
            file: None,
            holdings: None,
        };
        store.transact_tables(|tables| {
            tables.put(KvTable::Meta, FORMAT_KEY, &FORMAT.to_be_bytes())
        })?;
        Ok(store)
    }

    /// Creates a new file in place of a file that was set aside. The new file contains the node's ranges and the
    /// assignments that other components know. If several attachments claim an address, the first one in `remembered`
    /// gets the address; the others are returned, each with its lost addresses. `has_addresses_outside` says whether
    /// pods use addresses outside of the ranges (see [`Snapshot::has_addresses_outside`]). `before` is the content of the
    /// file `holdings`, if it is known: blocks that were released according to it stay released.
    pub fn rebuild(
        path: &Path,
        holdings: HoldingsFile,
        allocation: &NodeAllocation,
        remembered: &[RememberedAttachment],
        has_addresses_outside: bool,
        before: Option<&Holdings>,
        now: &Now,
    ) -> Result<(Self, Vec<RememberedAttachment>), StoreError> {
        let made = Self::make(path, |store| {
            store.holdings = Some(holdings);
            store.transact(now, |ledger| {
                ledger.rebuild(allocation, remembered, has_addresses_outside, before)
            })
        })?;
        match made {
            Some((lost, store)) => Ok((store, lost)),
            None => Err(StoreError::Exists {
                path: path.to_owned(),
            }),
        }
    }

    /// Creates the store's file from `holdings`, which an earlier boot has written. See [`AddressLedger::restore`].
    pub fn after_reboot(
        path: &Path,
        file: &HoldingsFile,
        holdings: &Holdings,
        now: &Now,
    ) -> Result<Self, StoreError> {
        let made = Self::make(path, |store| {
            store.holdings = Some(file.clone());
            store.transact(now, |ledger| ledger.restore(holdings))
        })?;
        made.map(|((), store)| store)
            .ok_or_else(|| StoreError::Exists {
                path: path.to_owned(),
            })
    }

    /// Makes the store write changes of the node's ranges to `file` before they take effect.
    #[must_use]
    pub fn recording(self, file: HoldingsFile) -> Self {
        Self {
            holdings: Some(file),
            ..self
        }
    }

    /// Writes the ranges to the holdings file if they differ from its content. An agent calls this before it uses a
    /// store, because the last process may have been killed between the writes to the two files.
    pub fn record_ranges(&mut self, now: &Now) -> Result<(), StoreError> {
        let Some(file) = self.holdings.clone() else {
            return Ok(());
        };
        let holdings = self.transact_ops(now, |ledger| ledger.holdings())?;
        let recorded = file.read().ok().flatten();
        let done = if recorded.is_some_and(|it| it.has_ranges_of(&holdings)) {
            file.sync()
        } else {
            file.draft(holdings).and_then(|draft| file.write(&draft))
        };
        done.map_err(|fault| StoreError::fault(&self.path, "written", fault))?;
        self.transact_ops(now, |ledger| {
            ledger.record_boot()?;
            Ok(())
        })
    }

    /// Returns a draft for the holdings file if pod notes have changed or the last write failed; otherwise `None`.
    pub fn stale_holdings(&mut self, now: &Now) -> Result<Option<HoldingsDraft>, StoreError> {
        let Some(file) = self.holdings.clone().filter(HoldingsFile::is_stale) else {
            return Ok(None);
        };
        self.transact(now, |ledger| Ok(Some(file.draft(ledger.holdings()?)?)))
    }

    /// Creates a file under a temporary name and fills it. The file gets its final name only when it is complete, so
    /// that no process ever finds an incomplete file. Returns `None` if a file with the final name exists already.
    fn make<T>(
        path: &Path,
        fill: impl FnOnce(&mut Self) -> Result<T, StoreError>,
    ) -> Result<Option<(T, Self)>, StoreError> {
        let io = |error| StoreError::io(path, "made", error);
        disk::make_parent(path).map_err(io)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let new = sibling(path, &format!("new-{}-{count}", process::id()));
        _ = fs::remove_file(&new);
        let made = LockedFile::create(&new).map_err(io).and_then(|file| {
            let mut store = Self::create(path, Self::file_finder(path), Box::new(file))?;
            Ok((fill(&mut store)?, store))
        });
        let linked = made.and_then(|made| match fs::hard_link(&new, path) {
            Ok(()) => Ok(Some(made)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(io(error)),
        });
        _ = fs::remove_file(&new);
        if matches!(linked, Ok(Some(_))) {
            disk::sync_parent(path).map_err(io)?;
        }
        linked
    }

    /// Runs `work` on the ledger in one transaction. After an error nothing has changed, with one exception (see
    /// [`StoreError`]). If `work` changes the node's ranges, the ranges are written to the holdings file before the
    /// commit.
    pub fn transact<T>(
        &mut self,
        now: &Now,
        work: impl FnOnce(&mut AddressLedger<'_>) -> Result<T, StorageFault>,
    ) -> Result<T, StoreError> {
        let is_ahead = self.holdings.as_ref().is_some_and(HoldingsFile::is_ahead);
        let recording = if is_ahead {
            Recording::Always
        } else {
            Recording::OfChanges
        };
        self.transact_recorded(now, recording, work)
    }

    /// Like [`Self::transact`], for work that does not report the node's ranges, and changes them at most by
    /// [`AddressLedger::restrict`]. Does not wait for the holdings file, even if that file is ahead of the store.
    pub fn transact_ops<T>(
        &mut self,
        now: &Now,
        work: impl FnOnce(&mut AddressLedger<'_>) -> Result<T, StorageFault>,
    ) -> Result<T, StoreError> {
        self.transact_recorded(now, Recording::Later, work)
    }

    fn transact_recorded<T>(
        &mut self,
        now: &Now,
        recording: Recording,
        work: impl FnOnce(&mut AddressLedger<'_>) -> Result<T, StorageFault>,
    ) -> Result<T, StoreError> {
        let file = self.holdings.clone();
        let mut is_recorded = false;
        let result = self.transact_tables(|tables| {
            let result = work(&mut AddressLedger::new(tables, now))?;
            let Some(file) = &file else {
                return Ok(result);
            };
            if tables.has_new_notes {
                file.set_stale();
            }
            if recording == Recording::Always || tables.has_new_ranges {
                if recording == Recording::Later || Mutation::RangesRecordedLate.is_on() {
                    file.set_stale();
                    return Ok(result);
                }
                let draft = file.draft(AddressLedger::new(tables, now).holdings()?)?;
                file.write_ranges(&draft)?;
                is_recorded = true;
            }
            Ok(result)
        })?;
        if let Some(file) = file.filter(|_| is_recorded) {
            file.set_ahead(false);
        }
        Ok(result)
    }

    /// Performs operations in one transaction. Each operation takes effect as a whole or not at all.
    pub fn run(&mut self, ops: &[Op], now: &Now) -> Vec<Result<OpOutcome, OpError>> {
        let all = self.transact(now, |ledger| ops.iter().map(|op| ledger.run(op)).collect());
        all.unwrap_or_else(|error| ops.iter().map(|_| Err(error.refusal())).collect())
    }

    /// Records the ranges of the node. See [`AddressLedger::set_allocation`].
    pub fn set_allocation(
        &mut self,
        allocation: &NodeAllocation,
        now: &Now,
    ) -> Result<(), StoreError> {
        self.transact(now, |ledger| ledger.set_allocation(allocation))
    }

    /// Releases an empty block. See [`AddressLedger::release`].
    pub fn release(&mut self, cidr: Cidr, uid: &str, now: &Now) -> Result<bool, StoreError> {
        self.transact(now, |ledger| ledger.release(cidr, uid))
    }

    /// Reads the whole ledger.
    pub fn snapshot(&mut self, now: &Now) -> Result<Snapshot, StoreError> {
        self.transact(now, |ledger| ledger.snapshot())
    }

    fn transact_tables<T>(
        &mut self,
        work: impl FnOnce(&mut Tables<'_>) -> Result<T, StorageFault>,
    ) -> Result<T, StoreError> {
        let checked = if let Some(checked) = self.open.take().filter(|_| self.is_in_place()) {
            checked
        } else {
            let checked = open(&self.path, &self.find, REOPEN)?;
            self.file = disk::id(&self.path);
            checked
        };
        // After an error the database is dropped, because the copy of the disk's content that redb has in memory may be
        // wrong.
        let result = transact(&checked.database, work)
            .map_err(|fault| StoreError::fault(&self.path, "written", fault))?;
        if !self.is_in_place() {
            return Err(StoreError::Missing {
                path: self.path.clone(),
            });
        }
        self.open = Some(checked);
        Ok(result)
    }

    /// Returns whether the store's path still leads to the file that was opened. If not, the opened file was removed or
    /// replaced, and everything that is written to it is lost.
    fn is_in_place(&self) -> bool {
        self.file.is_none() || disk::id(&self.path) == self.file
    }
}

fn open(path: &Path, find: &Find, wait: Duration) -> Result<Checked, StoreError> {
    let disk = find(wait).map_err(|error| StoreError::io(path, "opened", error))?;
    let disk = disk.ok_or_else(|| StoreError::Locked {
        path: path.to_owned(),
        waited: wait,
    })?;
    Checked::open(disk).map_err(|fault| StoreError::fault(path, "opened", fault))
}

fn transact<T>(
    database: &redb::Database,
    work: impl FnOnce(&mut Tables<'_>) -> Result<T, StorageFault>,
) -> Result<T, StorageFault> {
    let transaction = database.begin_write()?;
    let mut tables = Tables::open(&transaction)?;
    let result = work(&mut tables)?;
    let is_changed = tables.is_changed;
    drop(tables);
    if is_changed {
        transaction.commit()?;
    } else {
        transaction.abort()?;
    }
    Ok(result)
}

/// Renames a damaged file to `<name>.damaged-<number>` in the same directory, and returns the new path.
pub fn set_aside(path: &Path) -> Result<PathBuf, StoreError> {
    let io = |error| StoreError::io(path, "set aside", error);
    let mut number = 1;
    loop {
        let aside = sibling(path, &format!("damaged-{number}"));
        // A hard link is used because, unlike a rename, it does not replace an existing file.
        match fs::hard_link(path, &aside) {
            Ok(()) => {
                fs::remove_file(path).map_err(io)?;
                disk::sync_parent(path).map_err(io)?;
                return Ok(aside);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(io(error)),
        }
    }
}

fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(suffix);
    path.with_file_name(name)
}
