//! The state directory of a network, in host-local's format.
//!
//! ```text
//! <dataDir>/<network>/          0755
//!   <address>                   0600, created exclusively with its content: container id, CR LF, interface
//!   last_reserved_ip.<set>      0600: the address of this range set that was assigned last
//!   lock                        0750, empty: flock
//! ```
//!
//! Files are read as host-local reads them. There may be white space around the content, and the content may be the
//! container ID alone, as the first releases of host-local wrote it. Everything but a plain file is ignored, for
//! example a pipe, on which host-local would wait forever. Nothing is written through symbolic links. Otherwise, a user
//! who can create a link in the directory could choose a file elsewhere that root overwrites.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, DirEntry, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::index::{self, Entry, Files};
use crate::cni::address::parse_ip;
use crate::cni::config::ValidAttachment;
use cadastre_core::Addr;

/// The directory in which host-local keeps the directories of networks by default.
const DATA_DIR: &str = "/var/lib/cni/networks";

const LOCK: &str = "lock";
const CURSOR: &str = "last_reserved_ip.";

/// Maximum number of bytes that are read from a file. The content comes from the environment, which cannot contain
/// longer strings.
const MAX_FILE: u64 = 256 * 1024;

/// The state directory of a network. The directory is locked as long as this value exists.
pub(super) struct Store {
    dir: PathBuf,
    /// The lock file. It is locked until the store is dropped, unless the file system does not support locks
    _lock: File,
    locked: bool,
    /// The files in the directory that can be files of addresses, by name
    files: Files,
    /// Whether `files` differ from the index (see [`index`])
    changed: bool,
}

/// The owner of an address, in the two forms that the address's file can have: `new` contains the interface, and `old`
/// is the container ID alone.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    new: String,
    old: String,
}

impl Owner {
    pub(super) fn new(container_id: &str, ifname: &str) -> Self {
        Self {
            new: format!("{container_id}\r\n{ifname}"),
            old: container_id.to_owned(),
        }
    }

    fn has(&self, content: &str) -> bool {
        content == self.new || content == self.old
    }
}

/// Returns the path of a network's state directory.
pub(super) fn dir(data_dir: &str, network: &str) -> PathBuf {
    let data_dir = if data_dir.is_empty() {
        DATA_DIR
    } else {
        data_dir
    };
    Path::new(data_dir).join(network)
}

/// Fails if the path cannot be used as a directory, because the path itself or a path above it is not a directory.
pub(super) fn usable(dir: &Path) -> Result<(), String> {
    let mut above = dir.ancestors();
    match above.find_map(|it| Some((it, fs::metadata(it).ok()?))) {
        Some((path, meta)) if !meta.is_dir() => Err(format!(
            "{} is not a directory: remove it, or correct ipam.dataDir",
            path.display()
        )),
        _ => Ok(()),
    }
}

impl Store {
    /// Opens a state directory, and creates the directory if it is missing. Waits for the directory's lock.
    pub(super) fn open(dir: &Path) -> Result<Self, String> {
        let created = DirBuilder::new().recursive(true).mode(0o755).create(dir);
        created.map_err(|error| fault("create the directory", dir, &error))?;
        let path = dir.join(LOCK);
        let lock = open_over(&path, 0o750).map_err(|error| fault("open", &path, &error))?;
        // A file system without locks is no error, as in host-local. Even without the lock, only one process can create
        // the file of an address.
        let locked = lock.lock().is_ok();
        let indexed = if locked { index::load(dir) } else { None };
        let (files, changed) = match indexed {
            Some(indexed) => indexed,
            None => (read_all(dir)?, true),
        };
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
            locked,
            files,
            changed,
        })
    }

    /// Writes the index if the files differ from the index, so that the next call need not read every file.
    pub(super) fn save_index(&self) {
        if self.locked && self.changed {
            index::save(&self.dir, &self.files, || self.is_complete());
        }
    }

    /// Returns whether the directory has exactly `files`, and all of `files` are plain files. If a file is a symbolic
    /// link, no index may be written, because the file to which the link points can change without any change in this
    /// directory.
    fn is_complete(&self) -> bool {
        let known = |item: io::Result<DirEntry>| {
            let item = item.ok()?;
            let name = item.file_name().into_string().ok()?;
            if !is_allocation(&name) {
                return Some(0);
            }
            let is_file = item.file_type().ok()?.is_file();
            (is_file && self.files.contains_key(&name)).then_some(1)
        };
        let found = fs::read_dir(&self.dir).ok();
        found.and_then(|found| found.map(known).sum()) == Some(self.files.len())
    }

    /// Returns the names of the files for whose name and content `is` returns true. The index may be outdated, so the
    /// content of each match is read from its file again.
    fn find(&self, is: impl Fn(&str, &str) -> bool) -> Vec<String> {
        let matches = |(name, Entry(content, _)): &(&String, &Entry)| {
            is(name, content)
                && read(&self.dir.join(name)).is_some_and(|content| is(name, content.trim()))
        };
        let found = self.files.iter().filter(matches);
        found.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the names of an owner's files, including files that contain only the owner's container ID, without an
    /// interface. A name is an address, unless another program created the file.
    pub(super) fn names(&self, owner: &Owner) -> Vec<String> {
        self.find(|_, content| owner.has(content))
    }

    /// Returns the address that was assigned last from a range set.
    pub(super) fn cursor(&self, set: usize) -> Option<Addr> {
        let path = self.dir.join(format!("{CURSOR}{set}"));
        parse_ip(&path.is_file().then(|| read(&path)).flatten()?)
    }

    /// Creates the file of an address. Returns `false` if the file exists already. After an error the address is still
    /// free.
    pub(super) fn reserve(&mut self, owner: &Owner, ip: Addr, set: usize) -> Result<bool, String> {
        let name = ip.to_string();
        if self.files.contains_key(&name) {
            return Ok(false);
        }
        let path = self.dir.join(&name);
        match self.create(&path, owner.new.as_bytes()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(fault("create", &path, &error)),
        }
        self.changed = true;
        let cursor = self.dir.join(format!("{CURSOR}{set}"));
        let written =
            replace(&cursor, name.as_bytes()).map_err(|error| fault("write", &cursor, &error));
        if let Err(text) = written {
            let _ = fs::remove_file(&path);
            return Err(text);
        }
        self.files.insert(name, Entry(owner.new.clone(), None));
        Ok(true)
    }

    /// Creates the file of an address. The file appears together with its content: if this process is killed, no file
    /// is left that names no owner and that no DEL would remove.
    fn create(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        // Without the lock, another process could use the same draft.
        if let Some(draft) = beside(&self.dir, "new").filter(|_| self.locked) {
            match publish(&draft, path, content) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
                // Perhaps the file system has no hard links, or the directory is a mount point.
                Err(_) => {}
            }
        }
        let mut file = create_new(path)?;
        file.write_all(content).inspect_err(|_| {
            let _ = fs::remove_file(path);
        })
    }

    /// Removes the files of an owner that name its container ID and interface. If no such file exists, removes the
    /// files that contain only the owner's container ID, without an interface.
    pub(super) fn release(&mut self, owner: &Owner) {
        if !self.remove(|_, content| content == owner.new) {
            self.remove(|_, content| content == owner.old);
        }
    }

    /// Removes the files for whose name and content `is` returns true. Returns whether any file was removed.
    fn remove(&mut self, is: impl Fn(&str, &str) -> bool) -> bool {
        let before = self.files.len();
        for name in self.find(is) {
            if fs::remove_file(self.dir.join(&name)).is_ok() {
                self.files.remove(&name);
                self.changed = true;
            }
        }
        self.files.len() < before
    }

    /// Removes the files of addresses that belong to no valid attachment. Also removes empty files, which a crash can
    /// leave behind. Files whose name is not an address are kept.
    pub(super) fn collect(&mut self, valid: &[ValidAttachment]) {
        let valid = valid
            .iter()
            .map(|it| Owner::new(&it.container_id, &it.ifname));
        let valid: BTreeSet<String> = valid.flat_map(|it| [it.new, it.old]).collect();
        self.remove(|name, content| parse_ip(name).is_some() && !valid.contains(content));
    }
}

/// Returns whether a file with this name can be the file of an address.
fn is_allocation(name: &str) -> bool {
    name != LOCK && !name.starts_with(CURSOR)
}

/// Reads all files of a directory that have the name and type of a file of an address.
fn read_all(dir: &Path) -> Result<Files, String> {
    let found = fs::read_dir(dir).map_err(|error| fault("read", dir, &error))?;
    let files = found.filter_map(|item| {
        let item = item.ok()?;
        let name = item.file_name().into_string().ok();
        let name = name.filter(|name| is_allocation(name))?;
        // For nearly every file the directory's entry contains the type, which saves a call to the kernel.
        let is_file = item.file_type().ok()?.is_file() || item.path().is_file();
        let entry = is_file.then(|| Entry::read(&item.path())).flatten()?;
        Some((name, entry))
    });
    Ok(files.collect())
}

/// Reads a plain file. Returns `None` if it cannot be read.
pub(super) fn read(path: &Path) -> Option<String> {
    let mut content = vec![0; 256];
    let mut file = File::open(path).ok()?;
    let length = file.read(&mut content).ok()?;
    content.truncate(length);
    // A read from a plain file returns fewer bytes than requested only at the end of the file.
    if length == 256 {
        file.take(MAX_FILE).read_to_end(&mut content).ok()?;
    }
    Some(String::from_utf8_lossy(&content).into_owned())
}

fn fault(what: &str, path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
        return format!(
            "cannot {what} {path}: it is a symbolic link, and nothing is written through one; remove it"
        );
    }
    format!("cannot {what} {path}: {error}")
}

/// Returns the path of a file that belongs to a network's directory, but is not in it: `<dataDir>/.<name>.<kind>`.
/// host-local never reads it, because no network's name begins with a dot.
pub(super) fn beside(dir: &Path, kind: &str) -> Option<PathBuf> {
    let name = dir.file_name()?.to_str()?;
    Some(dir.with_file_name(format!(".{name}.{kind}")))
}

/// Writes a draft, and gives it the name `path` as a second name. Fails if `path` exists already.
fn publish(draft: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    // A draft of a process that was killed can be the file of an address, too. So it is not written to.
    match fs::remove_file(draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = create_new(draft).and_then(|mut it| it.write_all(content));
    let published = written.and_then(|()| fs::hard_link(draft, path));
    let _ = fs::remove_file(draft);
    published
}

fn create_new(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Replaces the content of a file. Creates the file if it is missing. Fails if it is a symbolic link.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = open_over(path, 0o600)?;
    file.write_all(content)?;
    // The file is truncated only after the write, and only if the old content was longer. If a file is emptied before
    // it is written, some file systems write it to the disk at once, which takes more time.
    let length = content.len() as u64;
    if file.metadata()?.len() > length {
        file.set_len(length)?;
    }
    Ok(())
}

/// Opens a file for writing from its beginning. Creates the file if it is missing. Fails if it is a symbolic link.
pub(super) fn open_over(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(mode)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
}

#[cfg(test)]
mod tests;
