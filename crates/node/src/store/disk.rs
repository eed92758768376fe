//! The [`Disk`] on which a store is kept, and its implementation by a locked file.

use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Durable storage of bytes at offsets. Tests implement this trait with disks that fail.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Returns the size in bytes
    fn size(&self) -> io::Result<u64>;
    /// Fills `out` with the bytes from offset `at` on; fails if there are fewer bytes
    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes all of `data` at the offset `at`
    fn write(&self, at: u64, data: &[u8]) -> io::Result<()>;
    /// Extends the storage to `size` bytes with zeros
    fn grow(&self, size: u64) -> io::Result<()>;
    /// Waits until everything that was written is durable
    fn sync(&self) -> io::Result<()>;
}

/// A file that this process has locked against other processes.
#[derive(Debug)]
pub(super) struct LockedFile(File);

/// The first and the longest interval between attempts to lock a file. Each interval is twice as long as the previous
/// one.
const POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(8));

impl LockedFile {
    /// Opens and locks an existing file. Returns `None` if it cannot be locked within `wait`.
    pub(super) fn open(path: &Path, wait: Duration) -> io::Result<Option<Self>> {
        let start = Instant::now();
        let mut poll = POLL.0;
        let mut file = reopen(path)?;
        loop {
            match file.try_lock() {
                Ok(()) if is_same(&file, path)? => return Ok(Some(Self(file))),
                // The file was replaced by a new file before it was locked, so this loop tries the new file.
                Ok(()) => {
                    file = reopen(path)?;
                    continue;
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let left = wait.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            thread::sleep(poll.min(left));
            poll = POLL.1.min(poll * 2);
        }
    }

    /// Creates and locks a file. Fails if the file exists. Only the owner of the file can read and write it.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Disk for LockedFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, at)
    }

    fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, at)
    }

    /// Writes zeros instead of setting the length. The zeros allocate the disk space now, so that later changes to
    /// these pages do not fail because the disk is full.
    fn grow(&self, size: u64) -> io::Result<()> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        let mut at = self.size()?;
        while at < size {
            let part = usize::try_from(size - at).unwrap_or(usize::MAX);
            let part = part.min(ZEROS.len());
            self.0.write_all_at(&ZEROS[..part], at)?;
            at += part as u64;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// Returns device and inode number of the file at the path, or `None` if there is no file.
pub(super) fn id(path: &Path) -> Option<(u64, u64)> {
    let there = fs::metadata(path).ok()?;
    Some((there.dev(), there.ino()))
}

/// Creates the directory of a file if the directory does not exist. Only the owner of the directory can use it.
pub(super) fn make_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            DirBuilder::new().recursive(true).mode(0o700).create(parent)
        }
        _ => Ok(()),
    }
}

/// Syncs the directory that contains the file, so that a created or renamed file survives a crash.
pub(super) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn reopen(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn is_same(file: &File, path: &Path) -> io::Result<bool> {
    let (has, there) = (file.metadata()?, fs::metadata(path)?);
    Ok((has.dev(), has.ino()) == (there.dev(), there.ino()))
}
