//! Where the bytes are.

use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that last. Tests put in disks that fail.
pub trait Disk: Debug + Send + Sync + 'static {
    /// How many there are
    fn size(&self) -> io::Result<u64>;
    /// Reads so many from there on
    fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes
    fn write(&self, at: u64, data: &[u8]) -> io::Result<()>;
    /// Makes it longer, with zeros
    fn grow(&self, size: u64) -> io::Result<()>;
    /// Returns when all that was written lasts
    fn sync(&self) -> io::Result<()>;
}

/// A file that no other process has.
#[derive(Debug)]
pub(super) struct LockedFile(File);

/// How long between the first two looks whether a file is free; twice as long each time, up to the other.
const POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(8));

impl LockedFile {
    /// Opens a file that exists, when nobody else has it: `None` if that takes longer than `wait`.
    pub(super) fn open(path: &Path, wait: Duration) -> io::Result<Option<Self>> {
        let start = Instant::now();
        let mut poll = POLL.0;
        let mut file = reopen(path)?;
        loop {
            match file.try_lock() {
                Ok(()) if is_same(&file, path)? => return Ok(Some(Self(file))),
                // Another was put in its place meanwhile.
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

    /// Makes a file that must not exist, for its owner alone.
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

    /// Writes the zeros, so that a disk that is full later does not keep what is there from changing.
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

/// Which file has that name.
pub(super) fn id(path: &Path) -> Option<(u64, u64)> {
    let there = fs::metadata(path).ok()?;
    Some((there.dev(), there.ino()))
}

/// Makes the directory of a file for its owner alone, if it is not there.
pub(super) fn make_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            DirBuilder::new().recursive(true).mode(0o700).create(parent)
        }
        _ => Ok(()),
    }
}

/// Makes what was done to the names in the directory of a file last.
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
