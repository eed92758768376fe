//! The state directory of a network, in host-local's format.
//!
//! ```text
//! <dataDir>/<network>/          0755
//!   <address>                   0600, created exclusively: container id, CR LF, interface
//!   last_reserved_ip.<set>      0600: the address assigned last of each range set
//!   lock                        0750, empty: flock
//! ```
//!
//! Files are read as host-local reads them: with space around their content, and with the container id
//! alone, as its first releases wrote it. What is not a file (a pipe, on which host-local waits forever) is
//! ignored. Nothing is written through symbolic links: whoever can create one here must not choose what root
//! writes elsewhere.

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

/// Where host-local keeps its networks by default.
const DATA_DIR: &str = "/var/lib/cni/networks";

const LOCK: &str = "lock";
const CURSOR: &str = "last_reserved_ip.";

/// More than an allocation can have, in bytes: the environment has no longer strings.
const MAX_FILE: u64 = 256 * 1024;

/// A network's directory, locked.
pub(super) struct Store {
    dir: PathBuf,
    /// Locked until the store is dropped, unless the file system has no locks
    _lock: File,
    locked: bool,
    /// Each file that may be an allocation
    files: Files,
    /// Whether `files` differ from the index ([`index`])
    changed: bool,
}

/// The owner of files: what is in them.
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

/// Returns the directory of a network.
pub(super) fn dir(data_dir: &str, network: &str) -> PathBuf {
    let data_dir = if data_dir.is_empty() {
        DATA_DIR
    } else {
        data_dir
    };
    Path::new(data_dir).join(network)
}

/// Fails if a directory cannot be used, or created when it is needed.
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
    /// Opens a directory, creates it if it is missing, and waits for its lock.
    pub(super) fn open(dir: &Path) -> Result<Self, String> {
        let created = DirBuilder::new().recursive(true).mode(0o755).create(dir);
        created.map_err(|error| fault("create the directory", dir, &error))?;
        let path = dir.join(LOCK);
        let lock = open_over(&path, 0o750).map_err(|error| fault("open", &path, &error))?;
        // As host-local: it goes on where the file system has no locks, and each address's file is created by
        // one process alone in any case.
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

    /// Writes the index that saves the next call reading every file.
    pub(super) fn save_index(&self) {
        if self.locked && self.changed {
            index::save(&self.dir, &self.files, || self.is_complete());
        }
    }

    /// Whether the directory has exactly the known files, and all are plain: where a link leads, a file can change
    /// without a trace here.
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

    /// Finds files by name and content. As an index may be outdated, the content of a match is read from the file.
    fn find(&self, is: impl Fn(&str, &str) -> bool) -> Vec<String> {
        let matches = |(name, Entry(content, _)): &(&String, &Entry)| {
            is(name, content)
                && read(&self.dir.join(name)).is_some_and(|content| is(name, content.trim()))
        };
        let found = self.files.iter().filter(matches);
        found.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the addresses of an owner, with those of its container without interface.
    pub(super) fn addresses(&self, owner: &Owner) -> Vec<Addr> {
        let names = self.find(|_, content| owner.has(content));
        names.iter().filter_map(|name| parse_ip(name)).collect()
    }

    /// Whether an owner, or its container, has any file.
    pub(super) fn has_any(&self, owner: &Owner) -> bool {
        !self.find(|_, content| owner.has(content)).is_empty()
    }

    /// Whether an owner, or its container, has the file of an address.
    pub(super) fn has(&self, owner: &Owner, ip: Addr) -> bool {
        let ip = ip.to_string();
        let found = self.find(|name, content| name == ip && owner.has(content));
        !found.is_empty()
    }

    /// Returns the address assigned last of a range set.
    pub(super) fn cursor(&self, set: usize) -> Option<Addr> {
        let path = self.dir.join(format!("{CURSOR}{set}"));
        parse_ip(&path.is_file().then(|| read(&path)).flatten()?)
    }

    /// Creates the file of an address; `false` if there is one. An error leaves nothing behind.
    pub(super) fn reserve(&mut self, owner: &Owner, ip: Addr, set: usize) -> Result<bool, String> {
        let name = ip.to_string();
        if self.files.contains_key(&name) {
            return Ok(false);
        }
        let path = self.dir.join(&name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let mut file = match file {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(fault("create", &path, &error)),
        };
        self.changed = true;
        let cursor = self.dir.join(format!("{CURSOR}{set}"));
        let written = file
            .write_all(owner.new.as_bytes())
            .map_err(|error| fault("write", &path, &error))
            .and_then(|()| {
                replace(&cursor, name.as_bytes()).map_err(|error| fault("write", &cursor, &error))
            });
        if let Err(text) = written {
            let _ = fs::remove_file(&path);
            return Err(text);
        }
        self.files.insert(name, Entry(owner.new.clone(), None));
        Ok(true)
    }

    /// Removes the files of an owner; if there are none, those of its container without interface.
    pub(super) fn release(&mut self, owner: &Owner) {
        if !self.remove(|_, content| content == owner.new) {
            self.remove(|_, content| content == owner.old);
        }
    }

    /// Removes files by name and content; whether there was one.
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

    /// Removes what belongs to no valid attachment: files with an address for a name and an owner in them,
    /// or nothing at all, which is what a crash leaves.
    pub(super) fn collect(&mut self, valid: &[ValidAttachment]) {
        let valid = valid
            .iter()
            .map(|it| Owner::new(&it.container_id, &it.ifname));
        let valid: BTreeSet<String> = valid.flat_map(|it| [it.new, it.old]).collect();
        self.remove(|name, content| parse_ip(name).is_some() && !valid.contains(content));
    }
}

/// Whether a file may be an allocation, by its name.
fn is_allocation(name: &str) -> bool {
    name != LOCK && !name.starts_with(CURSOR)
}

/// Reads each file of a directory that may be an allocation.
fn read_all(dir: &Path) -> Result<Files, String> {
    let found = fs::read_dir(dir).map_err(|error| fault("read", dir, &error))?;
    let files = found.filter_map(|item| {
        let item = item.ok()?;
        let name = item.file_name().into_string().ok();
        let name = name.filter(|name| is_allocation(name))?;
        // The directory tells the kind of nearly every file, which saves a call to the kernel for each.
        let is_file = item.file_type().ok()?.is_file() || item.path().is_file();
        let entry = is_file.then(|| Entry::read(&item.path())).flatten()?;
        Some((name, entry))
    });
    Ok(files.collect())
}

/// Reads a plain file.
pub(super) fn read(path: &Path) -> Option<String> {
    let mut content = vec![0; 256];
    let mut file = File::open(path).ok()?;
    let length = file.read(&mut content).ok()?;
    content.truncate(length);
    // A plain file yields all that is asked for, up to its end.
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

/// Replaces the content of a file, creates it where it is missing, and fails at a symbolic link.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = open_over(path, 0o600)?;
    file.write_all(content)?;
    // Cut afterwards, and only if needed: some file systems write a file to the disk at once if it was emptied first.
    let length = content.len() as u64;
    if file.metadata()?.len() > length {
        file.set_len(length)?;
    }
    Ok(())
}

/// Opens a file for writing from its beginning, creates it where it is missing, and fails at a symbolic link.
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
