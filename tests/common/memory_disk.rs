//! Disks in memory that can fail, fill up, or lose power.

#![allow(dead_code, reason = "no test needs all of it")]

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadastre_node::{Disk, Find, HoldingsDisk, HoldingsFile, Store, StoreError};

use crate::rng::Rng;

/// The number of bytes that a disk writes either completely or not at all.
const SECTOR: usize = 512;

/// A fault that happens at a certain access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Lasts,
    /// The process is killed at the n-th change or sync. Neither this access nor any later change or sync happens
    Dies(u64),
    /// The process is killed in the n-th write. Only the first half of this write happens, and no later write does
    Tears(u64),
    /// From the n-th access on, writes fail because the disk is full
    Full(u64),
    /// From the n-th write or sync on, writes and syncs fail with an I/O error
    Fails(u64),
}

/// A fault of a [`MemoryFile`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileFate {
    #[default]
    Lasts,
    /// Writes fail and change nothing
    Fails,
    /// Writes fail after the content was replaced, and before it survives a loss of power
    FailsUnsynced,
}

#[derive(Debug, Default)]
struct FileState {
    seen: Option<Vec<u8>>,
    /// The content that survives any loss of power
    synced: Option<Vec<u8>>,
    fate: FileFate,
}

/// A small file in memory, which is replaced as a whole. Its clones share the content.
#[derive(Clone, Debug, Default)]
pub struct MemoryFile(Arc<Mutex<FileState>>);

impl MemoryFile {
    pub fn holdings(&self) -> HoldingsFile {
        self.holdings_of("node")
    }

    pub fn holdings_of(&self, node_name: &str) -> HoldingsFile {
        HoldingsFile::new(Path::new("in memory"), node_name, self.clone())
    }

    pub fn set_fate(&self, fate: FileFate) {
        self.0.lock().unwrap().fate = fate;
    }

    /// Replaces the content, which then survives any loss of power.
    pub fn put(&self, content: &[u8]) {
        let mut state = self.0.lock().unwrap();
        (state.seen, state.synced) = (Some(content.to_vec()), Some(content.to_vec()));
    }

    /// Returns another file with the same content.
    pub fn copy(&self) -> Self {
        let copy = Self::default();
        if let Some(content) = &self.0.lock().unwrap().seen {
            copy.put(content);
        }
        copy
    }

    pub fn text(&self) -> String {
        let content = self.0.lock().unwrap().seen.clone();
        String::from_utf8(content.unwrap_or_default()).unwrap()
    }

    /// Loses power. A content that was not synced may be lost.
    pub fn lose_power(&self, rng: &mut Rng) {
        let state = &mut *self.0.lock().unwrap();
        if rng.one_in(2) {
            state.seen.clone_from(&state.synced);
        } else {
            state.synced.clone_from(&state.seen);
        }
        state.fate = FileFate::Lasts;
    }
}

impl HoldingsDisk for MemoryFile {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().seen.clone())
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        let state = &mut *self.0.lock().unwrap();
        if state.fate == FileFate::Fails {
            return Err(io::Error::from_raw_os_error(28)); // ENOSPC
        }
        state.seen = Some(content.to_vec());
        if state.fate == FileFate::FailsUnsynced {
            return Err(io::Error::from_raw_os_error(5)); // EIO
        }
        state.synced.clone_from(&state.seen);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let state = &mut *self.0.lock().unwrap();
        if state.fate != FileFate::Lasts {
            return Err(io::Error::from_raw_os_error(5)); // EIO
        }
        state.synced.clone_from(&state.seen);
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Grow(u64),
}

#[derive(Debug, Default)]
struct State {
    /// The content that processes read
    seen: Vec<u8>,
    /// The content that survives any loss of power
    synced: Vec<u8>,
    unsynced: Vec<Change>,
    fate: Option<Fate>,
    /// Number of changes and syncs since the fault `fate` was set
    count: u64,
    syncs: u64,
}

/// A disk in memory. Its clones share the content, so the content outlives the stores that use the disk.
#[derive(Clone, Debug, Default)]
pub struct MemoryDisk(Arc<Mutex<State>>);

impl MemoryDisk {
    pub fn find(&self) -> Find {
        let disk = self.clone();
        Box::new(move |_| Ok(Some(Box::new(disk.clone()) as Box<dyn Disk>)))
    }

    pub fn open(&self) -> Result<Store, StoreError> {
        Store::on_disk(Path::new("in memory"), self.find(), Duration::ZERO)
    }

    pub fn create(&self) -> Result<Store, StoreError> {
        Store::create_on_disk(Path::new("in memory"), self.find())
    }

    pub fn set_fate(&self, fate: Fate) {
        let mut state = self.0.lock().unwrap();
        state.count = 0;
        state.fate = Some(fate);
    }

    pub fn size(&self) -> usize {
        self.0.lock().unwrap().seen.len()
    }

    /// Number of changes and syncs since the last call of `set_fate`.
    pub fn count(&self) -> u64 {
        self.0.lock().unwrap().count
    }

    pub fn syncs(&self) -> u64 {
        self.0.lock().unwrap().syncs
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().seen.clone()
    }

    /// Returns a disk that contains these bytes, all of them synced.
    pub fn of(bytes: Vec<u8>) -> Self {
        let state = State {
            synced: bytes.clone(),
            seen: bytes,
            ..State::default()
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Returns the disk after its process was killed. Nothing is lost, because everything that was written is in the
    /// kernel.
    pub fn after_kill(&self) -> Self {
        let state = self.0.lock().unwrap();
        Self(Arc::new(Mutex::new(State {
            seen: state.seen.clone(),
            synced: state.synced.clone(),
            unsynced: state.unsynced.clone(),
            ..State::default()
        })))
    }

    /// Returns the disk after the worst loss of power, in which only the synced content survives.
    pub fn lasting(&self) -> Self {
        Self::of(self.0.lock().unwrap().synced.clone())
    }

    /// Returns the disk after a loss of power in which only the file's new size was lost.
    pub fn without_growth(&self) -> Self {
        let state = self.0.lock().unwrap();
        let mut bytes = state.seen.clone();
        bytes.truncate(state.synced.len());
        Self::of(bytes)
    }

    /// Returns the disk after a random loss of power. Each change since the last sync is kept or lost. Of a lost write,
    /// some sectors may be kept.
    pub fn after_power_loss(&self, rng: &mut Rng) -> Self {
        let state = self.0.lock().unwrap();
        let mut bytes = state.synced.clone();
        let how = rng.below(4);
        for (n, change) in state.unsynced.iter().enumerate() {
            let happens = match how {
                0 => false,
                1 => rng.one_in(2),
                2 => !rng.one_in(5),
                _ => n < rng.index(state.unsynced.len() + 1),
            };
            if happens {
                apply(&mut bytes, change, |_| true);
            } else if rng.one_in(3) {
                let sectors = rng.next();
                apply(&mut bytes, change, |sector| {
                    sectors >> (sector % 64) & 1 == 1
                });
            }
        }
        Self::of(bytes)
    }
}

/// Extends the content to `size` with zeros, all at once. In an unoptimised simulation, appending one zero after the
/// other would take half of the run time.
fn grow(bytes: &mut Vec<u8>, size: usize) {
    let more = size.saturating_sub(bytes.len());
    bytes.extend_from_slice(&vec![0; more]);
}

fn apply(bytes: &mut Vec<u8>, change: &Change, takes: impl Fn(usize) -> bool) {
    match change {
        Change::Grow(size) => grow(bytes, usize::try_from(*size).unwrap()),
        Change::Write(at, data) => {
            let at = usize::try_from(*at).unwrap();
            grow(bytes, at + data.len());
            let mut from = 0;
            while from < data.len() {
                let sector = (at + from) / SECTOR;
                let to = data.len().min((sector + 1) * SECTOR - at);
                if takes(sector) {
                    bytes[at + from..at + to].copy_from_slice(&data[from..to]);
                }
                from = to;
            }
        }
    }
}

impl State {
    /// Counts an access. Returns `Ok(false)` if only half of a write happens, and an error if the access fails.
    fn step(&mut self, is_write: bool) -> io::Result<bool> {
        let at = self.count;
        self.count += 1;
        match self.fate {
            Some(Fate::Dies(n)) if at >= n => Err(io::Error::other("killed")),
            Some(Fate::Tears(n)) if at > n => Err(io::Error::other("killed")),
            Some(Fate::Tears(n)) if at == n => Ok(false),
            Some(Fate::Full(n)) if at >= n && is_write => {
                Err(io::Error::from_raw_os_error(28)) // ENOSPC
            }
            Some(Fate::Fails(n)) if at >= n => Err(io::Error::from_raw_os_error(5)), // EIO
            _ => Ok(true),
        }
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.seen, &change, |_| true);
        self.unsynced.push(change);
    }
}

impl Disk for MemoryDisk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().seen.len() as u64)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.0.lock().unwrap();
        let at = usize::try_from(at).unwrap();
        let from = state.seen.get(at..at + out.len());
        out.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        let whole = state.step(true)?;
        let part = if whole { data.len() } else { data.len() / 2 };
        state.change(Change::Write(at, data[..part].to_vec()));
        if whole {
            return Ok(());
        }
        Err(io::Error::other("killed"))
    }

    fn grow(&self, size: u64) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.step(true)?;
        state.change(Change::Grow(size));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        state.step(false)?;
        state.syncs += 1;
        let State {
            synced, unsynced, ..
        } = &mut *state;
        for change in unsynced.drain(..) {
            apply(synced, &change, |_| true);
        }
        Ok(())
    }
}
