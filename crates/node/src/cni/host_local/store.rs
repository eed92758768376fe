//! The state directory of a network, in host-local's format.
//!
//! ```text
//! <dataDir>/<network>/          0755
//!   <address>                   0600, made exclusively: container id, CR LF, interface
//!   last_reserved_ip.<set>      0600: the address given last of each range set
//!   lock                        0750, empty: flock
//! ```
//!
//! What is in no file of an attachment's is nobody's: files are read as host-local reads them, in
//! folders inside too, with space around their content, and with the container id alone, as its first
//! releases wrote it. Two things are never looked into, `lock` and `last_reserved_ip.*`, and what is
//! no file (a pipe, on which host-local waits forever) counts as nothing. Nothing is written through
//! symbolic links: whoever may make one here shall not choose what root writes elsewhere.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::index::{self, Files, Stamp, hash};
use crate::cni::attachments::Valid;
use crate::cni::golang;
use cadastre_core::Addr;

/// Where host-local keeps its networks when nothing else is said.
const DATA_DIR: &str = "/var/lib/cni/networks";

const CURSOR: &str = "last_reserved_ip.";

/// More than an allocation can hold, in bytes: the environment has no longer strings.
const MAX_FILE: u64 = 256 * 1024;

/// A network's directory, locked.
pub(super) struct Store {
    /// The path as host-local's errors name it
    dir: PathBuf,
    /// Held until the store is dropped
    _lock: File,
    /// Files in the order of a walk; names of those in folders have slashes
    files: Files,
    /// Whether all of them stand in the directory itself and are plain files, so that the
    /// directory's own time tells of every change
    plain: bool,
    /// Whether [`Store::files`] was changed since the note was read or written
    changed: bool,
}

/// The owner of files: what is in them.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    new: Vec<u8>,
    old: Vec<u8>,
}

impl Owner {
    pub(super) fn new(container_id: &[u8], ifname: &[u8]) -> Self {
        Self {
            new: [container_id, b"\r\n", ifname].concat(),
            old: container_id.to_owned(),
        }
    }
}

/// The directory of a network, by text.
pub(super) fn dir(data_dir: &str, network: &str) -> PathBuf {
    let data_dir = match data_dir {
        "" => DATA_DIR,
        other => other,
    };
    PathBuf::from(golang::clean(&format!("{data_dir}/{network}")))
}

/// Whether a directory can be used, or made when it is needed.
pub(super) fn usable(dir: &Path) -> Result<(), String> {
    let mut above = dir.ancestors();
    let nearest = above.find_map(|it| Some((it, fs::metadata(it).ok()?)));
    match nearest {
        Some((path, meta)) if !meta.is_dir() => {
            Err(fault("open", path, &ErrorKind::NotADirectory.into()))
        }
        _ => Ok(()),
    }
}

impl Store {
    /// Opens a directory, makes it if it is missing, and waits for its lock. Errors have
    /// host-local's texts, here and below.
    pub(super) fn open(dir: &Path) -> Result<Self, String> {
        make_dir(dir)?;
        let lock = dir.join("lock");
        let lock = open_lock(&lock).map_err(|error| {
            if is_link(&error) {
                fault("open", &lock, &error)
            } else {
                golang::errno(&error)
            }
        })?;
        // host-local goes on without a lock where there are none, and each address's file is made
        // by one process alone in any case.
        let locked = lock.lock().is_ok();
        let noted = if locked { index::load(dir) } else { None };
        let mut store = Self {
            dir: dir.to_owned(),
            _lock: lock,
            changed: noted.is_none(),
            files: noted.unwrap_or_default(),
            plain: locked,
        };
        if store.changed || !store.refresh() {
            store.files = Files::default();
            store.changed = true;
            store.walk(&PathBuf::new());
        }
        Ok(store)
    }

    /// Reads again which of the noted files were written over; whether all are still there.
    fn refresh(&mut self) -> bool {
        let path = |name: &[u8]| self.dir.join(OsStr::from_bytes(name));
        let look = |name: &[u8]| Some(Stamp::of(&fs::symlink_metadata(path(name)).ok()?));
        let any = self.files.refresh(look, |name| read_stamped(&path(name)));
        self.changed |= any == Some(true);
        any.is_some()
    }

    /// Takes every file of a folder, whose path is relative, and of those inside. What cannot be
    /// read is left out.
    fn walk(&mut self, folder: &Path) {
        let Ok(found) = fs::read_dir(self.dir.join(folder)) else {
            return;
        };
        let mut found: Vec<_> = found.filter_map(Result::ok).collect();
        found.sort_by_key(fs::DirEntry::file_name);
        let top = folder.as_os_str().is_empty();
        for item in found {
            let Ok(kind) = item.file_type() else {
                continue;
            };
            let file_name = item.file_name();
            let name = folder.join(&file_name);
            self.plain &= kind.is_file();
            if kind.is_dir() {
                self.walk(&name);
                continue;
            }
            let path = self.dir.join(&name);
            let found = match kind.is_file() {
                true if top && is_own(&file_name) => continue,
                true => read_stamped(&path),
                false => read_any(&path).map(|it| (hash(trim(&it)), Stamp::NONE)),
            };
            let Some((hash, stamp)) = found else {
                self.plain = false;
                continue;
            };
            let name = name.as_os_str().as_bytes();
            self.files.push(name, hash, stamp);
        }
    }

    fn path(&self, name: &[u8]) -> PathBuf {
        self.dir.join(OsStr::from_bytes(name))
    }

    /// The files that hold exactly this, in the order of a walk.
    fn holding(&self, content: &[u8]) -> Vec<Vec<u8>> {
        let hits = self.files.of_hash(hash(content));
        let really =
            |name: &&[u8]| read(&self.path(name)).is_some_and(|found| trim(&found) == content);
        hits.filter(really).map(<[u8]>::to_owned).collect()
    }

    /// The addresses of an owner, with those of its container's that have no interface.
    pub(super) fn addresses(&self, owner: &Owner) -> Vec<Addr> {
        let mut names = self.holding(&owner.new);
        names.extend(self.holding(&owner.old));
        names.sort_by(|a, b| walk_order(a, b));
        let address = |name: &Vec<u8>| {
            let last = name.rsplit(|&byte| byte == b'/').next()?;
            golang::parse_ip(std::str::from_utf8(last).ok()?)
        };
        names.iter().filter_map(address).collect()
    }

    /// Whether an owner has any file, or failing that its container.
    pub(super) fn has_any(&self, owner: &Owner) -> bool {
        !self.holding(&owner.new).is_empty() || !self.holding(&owner.old).is_empty()
    }

    /// Whether the file of `ip` is an owner's, or its container's.
    pub(super) fn has(&self, owner: &Owner, ip: Addr) -> bool {
        let content = read_any(&self.path(ip.to_string().as_bytes()));
        content.is_some_and(|content| {
            let content = trim(&content);
            content == owner.new || content == owner.old
        })
    }

    /// The address given last of a range set.
    pub(super) fn cursor(&self, set: usize) -> Option<Addr> {
        let content = read_any(&self.dir.join(format!("{CURSOR}{set}")))?;
        golang::parse_ip(std::str::from_utf8(&content).ok()?)
    }

    /// Makes the file of an address; `false` if there is one. An error leaves nothing behind.
    pub(super) fn reserve(&mut self, owner: &Owner, ip: Addr, set: usize) -> Result<bool, String> {
        let name = ip.to_string().into_bytes();
        let at = self.files.search(&name);
        if self.plain && at.is_ok() {
            return Ok(false);
        }
        let path = self.path(&name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let mut file = match file {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(fault("open", &path, &error)),
        };
        self.changed = true;
        let written = file
            .write_all(&owner.new)
            .map_err(|error| fault("write", &path, &error));
        if let Err(text) = written.and_then(|()| self.move_cursor(set, ip)) {
            let _ = fs::remove_file(&path);
            return Err(text);
        }
        let at = at.unwrap_or_else(|at| at);
        self.files.insert(at, &name, hash(&owner.new), Stamp::NONE);
        Ok(true)
    }

    fn move_cursor(&self, set: usize, ip: Addr) -> Result<(), String> {
        let path = self.dir.join(format!("{CURSOR}{set}"));
        let text = ip.to_string();
        let mut file = open_over(&path, 0o600).map_err(|error| fault("open", &path, &error))?;
        // Cut at the end and not at the start: a file that is emptied first is written out at once
        // by some file systems.
        let length = text.len() as u64;
        file.write_all(text.as_bytes())
            .and_then(|()| file.metadata())
            .and_then(|meta| {
                if meta.len() > length {
                    file.set_len(length)?;
                }
                Ok(())
            })
            .map_err(|error| fault("write", &path, &error))
    }

    /// Removes the files of an owner; if there are none, those of its container without interface.
    pub(super) fn release(&mut self, owner: &Owner) {
        if !self.remove(&self.holding(&owner.new)) {
            self.remove(&self.holding(&owner.old));
        }
    }

    /// Removes files; whether one could be.
    fn remove(&mut self, names: &[Vec<u8>]) -> bool {
        let before = self.files.len();
        for name in names {
            if fs::remove_file(self.path(name)).is_ok() {
                self.files.remove(name);
            }
        }
        self.changed |= self.files.len() < before;
        self.files.len() < before
    }

    /// Removes what belongs to none of `valid`, container id and interface: files with an address for
    /// a name and an owner in them, or nothing at all, which is what a crash leaves.
    pub(super) fn collect(&mut self, valid: &[Valid]) {
        let known: BTreeMap<&[u8], Vec<&[u8]>> =
            valid
                .iter()
                .fold(BTreeMap::new(), |mut known, (id, ifname)| {
                    known.entry(id).or_insert_with(Vec::new).push(ifname);
                    known
                });
        let is_garbage = |name: &&[u8]| {
            let is_address =
                std::str::from_utf8(name).is_ok_and(|name| golang::parse_ip(name).is_some());
            let Some(content) = is_address.then(|| read(&self.path(name))).flatten() else {
                return false;
            };
            let content = trim(&content);
            let end = content.iter().position(|&byte| byte == b'\r');
            match end.map(|at| content.split_at(at)) {
                None => content.is_empty() || !known.contains_key(content),
                Some((id, rest)) => {
                    let ifname = rest.strip_prefix(b"\r\n").unwrap_or(rest);
                    !known.get(id).is_some_and(|it| it.contains(&ifname))
                }
            }
        };
        let garbage = self.files.names().filter(is_garbage);
        let garbage: Vec<Vec<u8>> = garbage.map(<[u8]>::to_owned).collect();
        self.remove(&garbage);
    }

    /// Notes what is there, for the next call to be quick.
    pub(super) fn note(&mut self) {
        if self.plain && std::mem::take(&mut self.changed) {
            index::save(&self.dir, &self.files, || self.is_all());
        }
    }

    /// Whether the directory still has just the files that are known.
    fn is_all(&self) -> bool {
        let Ok(found) = fs::read_dir(&self.dir) else {
            return false;
        };
        let names = found.map(|it| it.map(|it| it.file_name()));
        let Ok(mut names) = names.collect::<io::Result<Vec<_>>>() else {
            return false;
        };
        names.retain(|name| !is_own(name));
        names.sort();
        let names = names.iter().map(|it| it.as_bytes());
        names.eq(self.files.names())
    }
}

/// Whether a file is no allocation by its name.
fn is_own(name: &OsStr) -> bool {
    name == "lock" || name.as_bytes().starts_with(CURSOR.as_bytes())
}

/// By the parts of a path, as a walk through folders goes.
fn walk_order(a: &[u8], b: &[u8]) -> std::cmp::Ordering {
    a.split(|&byte| byte == b'/')
        .cmp(b.split(|&byte| byte == b'/'))
}

/// The content of what may be anything; `None` if it is no plain file, also not through a link.
fn read_any(path: &Path) -> Option<Vec<u8>> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    read(path)
}

/// The hash of a plain file's content, and the stamp that it had before it was read.
fn read_stamped(path: &Path) -> Option<(u64, Stamp)> {
    let stamp = Stamp::of(&fs::symlink_metadata(path).ok()?);
    Some((hash(trim(&read(path)?)), stamp))
}

/// The content of a plain file.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let mut content = vec![0; 256];
    let length = file.read(&mut content).ok()?;
    content.truncate(length);
    // A plain file gives all that is asked for, up to its end.
    if length == 256 {
        file.take(MAX_FILE).read_to_end(&mut content).ok()?;
    }
    Some(content)
}

/// Content without the space around it.
fn trim(content: &[u8]) -> &[u8] {
    match std::str::from_utf8(content) {
        Ok(text) => text.trim().as_bytes(),
        Err(_) => content.trim_ascii(),
    }
}

fn fault(what: &str, path: &Path, error: &io::Error) -> String {
    if is_link(error) {
        return format!(
            "{what} {}: it is a symbolic link, and nothing is written through one: remove it",
            path.display()
        );
    }
    format!("{what} {}: {}", path.display(), golang::errno(error))
}

/// Whether it says that a file that [`open_over`] opened is one.
fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

/// Makes a folder and those above it, 0755.
fn make_dir(dir: &Path) -> Result<(), String> {
    let fault = |text: &str| format!("mkdir {}: {text}", dir.display());
    match fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => return Err(fault("not a directory")),
        Err(_) => {}
    }
    if let Some(parent) = dir.parent().filter(|it| !it.as_os_str().is_empty()) {
        make_dir(parent)?;
    }
    match fs::DirBuilder::new().mode(0o755).create(dir) {
        // By another process meanwhile.
        Err(_) if fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir()) => Ok(()),
        made => made.map_err(|error| fault(&golang::errno(&error))),
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    match File::open(path) {
        Ok(file) if file.metadata()?.is_dir() => {
            Err(io::Error::from_raw_os_error(21 /* EISDIR */))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => open_over(path, 0o750),
        other => other,
    }
}

/// Opens a file to be written over from its beginning, made where it is missing, unless it is a symbolic link.
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
