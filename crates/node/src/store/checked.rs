//! A redb file that is verified each time it is opened, and that records which of its commits are durable.
//!
//! redb verifies checksums only after a crash, and trusts a file that says that it was closed cleanly. If redb cannot
//! read the last commit, it falls back to the commit before. After a crash this fallback is right, because the
//! operations of the last commit were never answered. But if the disk has corrupted the last commit, the fallback is
//! wrong, because an address in use would be free again. Moreover, redb has to wait for the disk three times to close a
//! file cleanly. Therefore this module is a layer between redb and the disk, with these rules:
//!
//! - A file is always opened as if after a crash: before the content is used, redb reads every page, starting at the
//!   roots, and compares checksums. For a file of the size of a node's ledger this is faster than one wait for the
//!   disk.
//! - Once a commit has reached the disk, this module writes a mark into the header, and does not wait for that write.
//!   The mark, which redb itself uses for two-phase commits, says that the newest commit is durable. redb clears the
//!   mark with its next write. If the newest commit of a marked file cannot be read, the file is damaged and is left
//!   unchanged.
//! - Opening changes only the header, and only in memory. The next commit writes the header.
//! - Closing writes nothing.
//! - The file never shrinks, so its disk space cannot be used for other files.
//!
//! The layout of the header is that of file format 3 of redb. Files of other formats are rejected.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{Database, StorageBackend};

use super::super::storage_fault::StorageFault;
use super::disk::Disk;

const PAGE: u64 = 4096;
const HEADER: usize = 320;
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
const FLAGS: usize = 9;
const SECOND_SLOT_IS_NEWEST: u8 = 1;
const NOT_CLOSED: u8 = 2;
const DURABLE: u8 = 4;
const PAGE_SIZE: usize = 12;
const REGION_HEADER: usize = 16;
const REGION_PAGES: usize = 20;
const FULL_REGIONS: usize = 24;
const LAST_REGION: usize = 28;
/// Number of pages in a region, redb's unit of file growth. The whole file fits into one region.
const MOST_PAGES: u32 = 1 << 20;
/// Maximum size of a ledger's file. If the header says that the file is longer, the file is rejected as damaged.
const MOST_BYTES: u64 = 1 << 30;
/// Size of redb's page cache in bytes. A ledger of 4,096 addresses needs less.
const CACHE: usize = 8 << 20;

/// An open database, with the layer between redb and the disk.
pub(super) struct Checked {
    pub(super) database: Database,
    shared: Arc<Shared>,
}

impl Checked {
    /// Creates a database on a disk. Fails if the disk is not empty.
    pub(super) fn create(disk: Box<dyn Disk>) -> Result<Self, StorageFault> {
        if disk.size()? > 0 {
            return Err(StorageFault::Damaged(
                "the new file is not empty".to_owned(),
            ));
        }
        let shared = Shared::new(disk, &[0; HEADER], Phase::Open);
        Self::of(shared)
    }

    /// Opens the database on a disk. Opening reads the whole disk.
    pub(super) fn open(disk: Box<dyn Disk>) -> Result<Self, StorageFault> {
        let mut header = [0; HEADER];
        let len = disk.size()?;
        if len < 2 * PAGE {
            return Err(StorageFault::Damaged(format!("it has {len} bytes only")));
        }
        disk.read(0, &mut header)?;
        let is_durable = header[FLAGS] & DURABLE != 0;
        let claimed = claimed_len(&header)?;
        if len < claimed {
            if is_durable {
                return Err(StorageFault::Damaged(format!(
                    "it has lost its end: {len} of {claimed} bytes are there"
                )));
            }
            disk.grow(claimed)?;
        }
        if !is_durable {
            // The last process may have been killed before it could sync its writes. From now on decisions rely on
            // these writes, so they must be durable.
            disk.sync()?;
        }
        let before = newest(&header);
        header[FLAGS] = (header[FLAGS] & SECOND_SLOT_IS_NEWEST) | NOT_CLOSED;
        let pages = u32::try_from(disk.size()? / PAGE - 1).unwrap_or(u32::MAX);
        header[LAST_REGION..LAST_REGION + 4].copy_from_slice(&pages.to_le_bytes());
        let checked = Self::of(Shared::new(disk, &header, Phase::Opening))?;
        // redb has just committed the recovered state again, to the slot that did not contain it. So the newest slot
        // has changed if redb could read the newest commit. If the newest slot is still the one in `before`, redb fell
        // back to the commit before the newest one.
        let after = newest(&checked.shared.state().header);
        if is_durable && after == before {
            return Err(StorageFault::Damaged(
                "its newest state cannot be read".to_owned(),
            ));
        }
        checked.shared.state().phase = Phase::Open;
        Ok(checked)
    }

    fn of(shared: Shared) -> Result<Self, StorageFault> {
        let shared = Arc::new(shared);
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE);
        let database = builder.create_with_backend(Backend(Arc::clone(&shared)));
        let database = database.map_err(opening)?;
        Ok(Self { database, shared })
    }
}

impl Drop for Checked {
    /// Marks the disk as closed before `database` is dropped, so that redb writes nothing.
    fn drop(&mut self) {
        self.shared.state().phase = Phase::Closed;
    }
}

/// Converts an error that redb returns when it opens a file. redb reports a file in another format as an I/O error.
/// This function reports such a file as damaged, unlike a file that the disk cannot read.
fn opening(error: redb::DatabaseError) -> StorageFault {
    match StorageFault::from(error) {
        StorageFault::Io(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ) =>
        {
            StorageFault::Damaged(error.to_string())
        }
        fault => fault,
    }
}

/// Returns the length of the file according to its header. Fails if the header was not written by this module.
fn claimed_len(header: &[u8; HEADER]) -> Result<u64, StorageFault> {
    let damaged = |what: &str| Err(StorageFault::Damaged(what.to_owned()));
    if !header.starts_with(MAGIC) {
        return damaged("it does not begin as a redb file does");
    }
    let layout = [
        (PAGE_SIZE, u32::try_from(PAGE).unwrap_or(0)),
        (REGION_HEADER, 0),
        (REGION_PAGES, MOST_PAGES),
        (FULL_REGIONS, 0),
    ];
    if layout
        .iter()
        .any(|(at, value)| number(header, *at) != *value)
    {
        return damaged("the layout in its header is not one that was written here");
    }
    let len = (u64::from(number(header, LAST_REGION)) + 1) * PAGE;
    if len > MOST_BYTES {
        return damaged("its header claims that it is larger than 1 GiB");
    }
    Ok(len)
}

fn number(header: &[u8; HEADER], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&header[at..at + 4]);
    u32::from_le_bytes(bytes)
}

/// Returns the flag in the header that says which of the two slots has the newest commit.
fn newest(header: &[u8; HEADER]) -> u8 {
    header[FLAGS] & SECOND_SLOT_IS_NEWEST
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    Open,
    Closed,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The header as redb last wrote it. While the file is being opened, this header differs from the one on the disk
    header: [u8; HEADER],
}

#[derive(Debug)]
struct Shared {
    disk: Box<dyn Disk>,
    state: Mutex<State>,
}

impl Shared {
    fn new(disk: Box<dyn Disk>, header: &[u8; HEADER], phase: Phase) -> Self {
        let header = *header;
        Self {
            disk,
            state: Mutex::new(State { phase, header }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Backend(Arc<Shared>);

fn closed() -> io::Error {
    io::Error::other("the file is closed")
}

impl StorageBackend for Backend {
    /// Returns the disk's length without a partial page at the end, which a crash can leave.
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.disk.size()? / PAGE * PAGE)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset < PAGE && self.0.disk.size()? > 0 {
            let header = self.0.state().header;
            let start = usize::try_from(offset).unwrap_or(HEADER);
            let part = header.get(start..start + out.len());
            let part = part.ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(part);
            return Ok(());
        }
        self.0.disk.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        match self.0.state().phase {
            Phase::Open if len > self.0.disk.size()? => self.0.disk.grow(len),
            Phase::Open => Ok(()),
            Phase::Opening | Phase::Closed => Err(closed()),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        let state = self.0.state();
        match state.phase {
            Phase::Opening => Ok(()),
            Phase::Open => {
                self.0.disk.sync()?;
                if state.header.starts_with(MAGIC) {
                    let flags = state.header[FLAGS] | DURABLE;
                    // If this write fails, the commit itself is not affected, so the error is ignored. But if the disk
                    // corrupts the commit later, this is not noticed.
                    _ = self.0.disk.write(FLAGS as u64, &[flags]);
                }
                Ok(())
            }
            Phase::Closed => Err(closed()),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.0.state();
        match (state.phase, offset) {
            (Phase::Closed, _) => Err(closed()),
            (Phase::Opening, 1..) => Err(io::Error::other("opening changed a page")),
            (phase, 0) => {
                let header = state.header.get_mut(..data.len());
                header
                    .ok_or(io::ErrorKind::InvalidInput)?
                    .copy_from_slice(data);
                if phase == Phase::Open {
                    self.0.disk.write(offset, data)?;
                }
                Ok(())
            }
            (Phase::Open, _) => self.0.disk.write(offset, data),
        }
    }
}
