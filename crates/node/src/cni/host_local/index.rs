//! An index of what each file of a network's directory contains, so that a call need not read all files.
//!
//! In host-local's format each address has a file that contains the owner. There is no index, so host-local reads every
//! file. The index of this module is valid as long as no file in the directory has been created, renamed or removed
//! since the index was written. A *seal* shows whether the index is valid. The seal is the directory's modification
//! time: before the index is written, the modification time is set to a unique moment in the past, and the index
//! records this moment. If host-local or an administrator creates, renames or removes a file, the kernel sets the
//! modification time to the present, which breaks the seal. If the seal is broken, every file is read again.
//!
//! - The index is read and written under host-local's lock, but administrators change files without the lock. So the
//!   directory is sealed first and then listed once more, and the index is written only if the list has not changed.
//!   Changes before the seal are in the list; later changes break the seal.
//! - Writing to an existing file does not break the seal. So the index contains each file's size and modification time,
//!   and a file for which they differ is read again. A file that was modified less than [`TICK`] before it was read
//!   could be modified again and keep the same time. So that file is read at the next call, too.
//! - If an entry of the index matches a search, the file itself is read before the match is used ([`super::store`]).
//! - An index that is incomplete, out of date or of another directory is ignored. So the order in which the writes
//!   reach the disk does not matter, and a lost index does no harm.
//! - host-local never reads the index. The files of host-local are in `<dataDir>/<name>`. The index is
//!   `<dataDir>/.<name>.index`, and no network's name begins with a dot.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Stat, stat, statat};
use serde::{Deserialize, Serialize};

use super::store::{beside, open_over, read};

/// A duration longer than the resolution of the kernel's clock for file times.
const TICK: Duration = Duration::from_millis(100);

/// The files of a directory, by name.
pub(super) type Files = BTreeMap<String, Entry>;

/// A file's content without white space at its beginning and end, and the file's stamp from before the content was
/// read. The stamp is `None` if the file has to be read again at the next call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry(pub(super) String, pub(super) Option<Stamp>);

/// Size and modification time of a file: bytes, seconds, nanoseconds.
type Stamp = (i64, u64, u32);

/// Device, inode and modification time of a directory. The time has two numbers: seconds and nanoseconds.
type Seal = (u64, u64, i64, i64);

impl Entry {
    pub(super) fn read(path: &Path) -> Option<Self> {
        let stamp = stamp(&stat(path).ok()?, SystemTime::now());
        Some(Self(read(path)?.trim().to_owned(), stamp))
    }
}

/// Returns the stamp of a file. Returns `None` if the file was modified so recently that a further change might not
/// change the stamp.
fn stamp(stat: &Stat, now: SystemTime) -> Option<Stamp> {
    let seconds = u64::try_from(stat.st_mtime).ok()?;
    let nanoseconds = u32::try_from(stat.st_mtime_nsec).ok()?;
    let now = now.duration_since(UNIX_EPOCH).ok()?;
    let age = now.checked_sub(Duration::new(seconds, nanoseconds))?;
    (age >= TICK).then_some((stat.st_size, seconds, nanoseconds))
}

/// Returns the files of `dir`, and whether any of them differs from the index. Returns `None` if there is no valid
/// index.
pub(super) fn load(dir: &Path) -> Option<(Files, bool)> {
    let mut files = decode(&fs::read(path(dir)?).ok()?, seal(dir)?)?;
    // Files are looked up by name in the open directory, because the kernel resolves a name faster than a path.
    let folder = File::open(dir).ok()?;
    let mut changed = false;
    for (name, entry) in &mut files {
        let stat = statat(&folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW);
        let stamp = stamp(&stat.ok()?, SystemTime::now());
        if stamp.is_none() || stamp != entry.1 {
            *entry = Entry::read(&dir.join(name))?;
            changed = true;
        }
    }
    Some((files, changed))
}

/// Seals `dir`, and then writes the index if `still` confirms that `files` are all files of `dir`. Errors are ignored;
/// without a valid index the next call reads every file.
pub(super) fn save(dir: &Path, files: &Files, still: impl FnOnce() -> bool) {
    let Some(path) = path(dir) else { return };
    let Some(seal) = set_seal(dir).filter(|_| still()) else {
        return;
    };
    // The file is not truncated before it is written, because truncating takes longer than writing.
    let _ =
        encode(files, seal).and_then(|index| open_over(&path, 0o600).ok()?.write_all(&index).ok());
}

/// Sets the modification time of `dir` to a moment that no other seal has.
fn set_seal(dir: &Path) -> Option<Seal> {
    // The moment is in the past, so that the kernel's clock does not reach it again.
    let moment = SystemTime::now() - Duration::from_secs(1);
    File::open(dir).ok()?.set_modified(moment).ok()?;
    let since = moment.duration_since(UNIX_EPOCH).ok()?;
    // A file system with a coarser resolution could store equal times for two seals. On such a file system, no index is
    // written.
    seal(dir).filter(|seal| i64::from(since.subsec_nanos()) == seal.3)
}

fn path(dir: &Path) -> Option<PathBuf> {
    beside(dir, "index")
}

fn seal(dir: &Path) -> Option<Seal> {
    let meta = fs::metadata(dir).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

const HEADER: usize = 16;

/// Encodes an index. The encoding consists of the length of the JSON and its checksum, eight bytes each, and then the
/// JSON. In the file, the index can be followed by the end of an earlier, longer index. An index that was written only
/// in part does not match its checksum.
fn encode(files: &Files, seal: Seal) -> Option<Vec<u8>> {
    // The initial capacity is about the length of an index, so that the buffer need not be enlarged and copied.
    let mut index = Vec::with_capacity(128 * (1 + files.len()));
    index.resize(HEADER, 0);
    serde_json::to_writer(&mut index, &(seal, files)).ok()?;
    let (header, json) = index.split_at_mut(HEADER);
    let numbers = [json.len() as u64, checksum(json)].map(u64::to_le_bytes);
    header.copy_from_slice(numbers.as_flattened());
    Some(index)
}

fn decode(index: &[u8], seal: Seal) -> Option<Files> {
    let (length, index) = index.split_first_chunk()?;
    let (sum, index) = index.split_first_chunk()?;
    let json = index.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    if u64::from_le_bytes(*sum) != checksum(json) {
        return None;
    }
    let (sealed, files): (Seal, Files) = serde_json::from_slice(json).ok()?;
    (sealed == seal).then_some(files)
}

/// Returns a checksum. A different build of the plugin can compute a different checksum for the same bytes. Such a
/// build ignores the index and writes a new one.
fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAL: Seal = (1, 2, -3, 4);

    fn files() -> Files {
        let entry = |id: &str, stamp| Entry(format!("{id}\r\neth0"), stamp);
        Files::from([
            ("10.0.0.2".to_owned(), entry("a", Some((6, 7, 8)))),
            ("10.0.0.3".to_owned(), entry("b", None)),
        ])
    }

    #[test]
    fn only_a_complete_index_with_the_right_seal_is_valid() {
        let mut index = encode(&files(), SEAL).unwrap();
        assert_eq!(decode(&index, SEAL), Some(files()));
        assert_eq!(decode(&index, (1, 2, -3, 5)), None);
        for length in 0..index.len() {
            assert_eq!(decode(&index[..length], SEAL), None, "{length}");
        }
        index.extend_from_slice(b"of a longer index before");
        assert_eq!(decode(&index, SEAL), Some(files()));
        let at = index.len() - 50;
        index[at] ^= 1;
        assert_eq!(decode(&index, SEAL), None);
    }

    #[test]
    fn a_file_that_changed_just_now_or_in_the_future_has_no_stamp() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (found, time) = (stat(file.path()), file.as_file().metadata());
        let (found, time) = (found.unwrap(), time.unwrap().modified().unwrap());
        let short = Duration::from_nanos(1);
        assert!(stamp(&found, time + TICK).is_some());
        assert_eq!(stamp(&found, time + TICK - short), None);
        assert_eq!(stamp(&found, time - short), None);
    }

    #[test]
    fn creating_renaming_or_removing_a_file_breaks_the_seal() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("net");
        fs::create_dir(&dir).unwrap();
        let none = Files::new();
        let changes: [&dyn Fn(); 3] = [
            &|| fs::write(dir.join("a"), "").unwrap(),
            &|| fs::rename(dir.join("a"), dir.join("b")).unwrap(),
            &|| fs::remove_file(dir.join("b")).unwrap(),
        ];
        for change in changes {
            // A longer index is written first. The end of the longer index stays in the file, and must have no effect
            // on the shorter index.
            save(&dir, &files(), || true);
            save(&dir, &none, || true);
            assert_eq!(load(&dir), Some((Files::new(), false)));
            change();
            assert_eq!(load(&dir), None);
        }
        save(&dir, &none, || true);
        fs::rename(&dir, scratch.path().join("old")).unwrap();
        fs::create_dir(&dir).unwrap();
        let time = fs::metadata(scratch.path().join("old")).unwrap().modified();
        File::open(&dir)
            .unwrap()
            .set_modified(time.unwrap())
            .unwrap();
        assert_eq!(load(&dir), None, "another directory");
    }
}
