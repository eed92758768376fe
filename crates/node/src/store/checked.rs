//! A redb file that is verified whenever it is opened, and is told which of its commits last.
//!
//! redb verifies checksums only after a crash, takes a file that says it was closed cleanly at its word,
//! and where its last commit is unreadable goes back to the one before: right after a crash, when that
//! commit was never answered, and wrong when the disk has rotted, because an address that somebody has
//! would be free again. It also pays for a clean close with three waits for the disk. So this sits
//! between redb and the disk:
//!
//! - A file is always opened as after a crash: redb reads every page and compares checksums, from the
//!   roots down, before anything is made of its contents. At the size of a node's ledger that is quicker
//!   than one wait for the disk.
//! - Once a commit has reached the disk, the header is marked, without waiting for that. redb knows the
//!   mark as that of a two-phase commit, which promises the same, and clears it with its next write. If
//!   the newest commit of a marked file cannot be read, the file is damaged, and nothing is changed in it.
//! - What opening itself changes is the header alone, and stays in memory: the next commit writes it.
//! - Closing writes nothing.
//! - The file never shrinks, so that space that it has is not lost to others.
//!
//! The layout of the header is that of redb's file format 3. A file of another format is refused.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{Database, StorageBackend};

use super::super::fault::Fault;
use super::disk::Disk;

const PAGE: u64 = 4096;
const HEADER: usize = 320;
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
const FLAGS: usize = 9;
const SECOND_IS_NEWEST: u8 = 1;
const NOT_CLOSED: u8 = 2;
const LASTS: u8 = 4;
const PAGE_SIZE: usize = 12;
const REGION_HEADER: usize = 16;
const REGION_PAGES: usize = 20;
const FULL_REGIONS: usize = 24;
const LAST_REGION: usize = 28;
/// Pages of a region: all that this is for lies in one.
const MOST_PAGES: u32 = 1 << 20;
/// A file that claims to be larger than this is no ledger of a node.
const MOST_BYTES: u64 = 1 << 30;
/// Memory for pages. A ledger of 4,096 addresses takes less.
const CACHE: usize = 8 << 20;

/// A database and the disk that it is on.
pub(super) struct Checked {
    database: Option<Database>,
    shared: Arc<Shared>,
}

impl Checked {
    /// Makes a database on an empty disk.
    pub(super) fn create(disk: Box<dyn Disk>) -> Result<Self, Fault> {
        if disk.size()? > 0 {
            return Err(Fault::Damaged("the new file is not empty".to_owned()));
        }
        let shared = Shared::new(disk, &[0; HEADER], Phase::Open);
        Self::of(shared)
    }

    /// Opens the database on a disk. Reads all of it.
    pub(super) fn open(disk: Box<dyn Disk>) -> Result<Self, Fault> {
        let mut header = [0; HEADER];
        let len = disk.size()?;
        if len < 2 * PAGE {
            return Err(Fault::Damaged(format!("it has {len} bytes only")));
        }
        disk.read(0, &mut header)?;
        let lasts = header[FLAGS] & LASTS != 0;
        let claimed = claimed_len(&header)?;
        if len < claimed {
            if lasts {
                return Err(Fault::Damaged(format!(
                    "it has lost its end: {len} of {claimed} bytes are there"
                )));
            }
            disk.grow(claimed)?;
        }
        if !lasts {
            // What a process wrote that was killed before it could wait for the disk is answered from now on.
            disk.sync()?;
        }
        let before = newest(&header);
        header[FLAGS] = (header[FLAGS] & SECOND_IS_NEWEST) | NOT_CLOSED;
        let pages = u32::try_from(disk.size()? / PAGE - 1).unwrap_or(u32::MAX);
        header[LAST_REGION..LAST_REGION + 4].copy_from_slice(&pages.to_le_bytes());
        let checked = Self::of(Shared::new(disk, &header, Phase::Opening))?;
        // Opening commits the state that it found once more, into the other slot. If that is the one where
        // the newest commit was, redb has found it unreadable and gone back to the one before.
        let after = newest(&checked.shared.state().header);
        if lasts && after == before {
            return Err(Fault::Damaged("its newest state cannot be read".to_owned()));
        }
        checked.shared.state().phase = Phase::Open;
        Ok(checked)
    }

    fn of(shared: Shared) -> Result<Self, Fault> {
        let shared = Arc::new(shared);
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE);
        let database = builder.create_with_backend(Backend(Arc::clone(&shared)));
        let database = match database {
            Ok(database) => Some(database),
            Err(error) => return Err(opening(error)),
        };
        Ok(Self { database, shared })
    }

    /// The database.
    pub(super) fn database(&self) -> Option<&Database> {
        self.database.as_ref()
    }
}

impl Drop for Checked {
    /// Lets go of the disk; nothing is written.
    fn drop(&mut self) {
        self.shared.state().phase = Phase::Closed;
        drop(self.database.take());
    }
}

/// What redb says of a file that is none of its own is not to be told from trouble with the disk.
fn opening(error: redb::DatabaseError) -> Fault {
    match Fault::from(error) {
        Fault::Io(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ) =>
        {
            Fault::Damaged(error.to_string())
        }
        fault => fault,
    }
}

/// How long the file is by its header, if that is one of ours.
fn claimed_len(header: &[u8; HEADER]) -> Result<u64, Fault> {
    let damaged = |what: &str| Err(Fault::Damaged(what.to_owned()));
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

/// In which of the two slots the newest commit is.
fn newest(header: &[u8; HEADER]) -> u8 {
    header[FLAGS] & SECOND_IS_NEWEST
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
    /// As redb believes it to be on the disk
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
    /// In whole pages: what a crash left of a page at the end is none.
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
                    let flags = state.header[FLAGS] | LASTS;
                    // Where this fails, a later rot of the newest commit goes unnoticed: no reason to
                    // fail what is done.
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
