//! Who has which file, without reading the files.
//!
//! host-local's format has an owner inside each address's file, and no index: every call reads every
//! file. This one keeps, beside the network's directory, a note of each file's name and a hash of its
//! content. The note is good as long as nothing was made or removed in the directory since, by whom
//! ever. That is told by a seal: with each note the directory's time of modification is set to a
//! moment of its own, in the past and to the nanosecond, which the note repeats. Whoever makes,
//! renames or removes a file there, host-local or a person, breaks the seal, for the kernel sets that
//! time to the present; then every file is read again.
//!
//! - Everything happens under host-local's lock. People with `rm` do not take it: so the directory is
//!   sealed first, then listed once more, and only what is found then is noted. What comes before the
//!   seal is seen, what comes after breaks it.
//! - A file written over in place breaks no seal. Each file's size and time of change are noted, too,
//!   and where they are others the file is read again. A file that was changed within [`TICK`] of being
//!   looked at may change again without a new time, so its time is not noted.
//! - A hit is looked up in the file itself before it counts.
//! - A note that is torn, or of another directory, or older, is none. So the order of writes on disk
//!   does not matter, and nothing is lost with the note.
//! - host-local never sees it: it reads `<dataDir>/<name>`, the note is `<dataDir>/.<name>.index`,
//!   and no network's name begins with a dot.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::store::open_over;

/// More than the kernel's clock for files takes from one time to the next.
const TICK: Duration = Duration::from_millis(100);

/// Size and time of a file's last change, in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp(u64);

impl Stamp {
    /// Of no file.
    pub(super) const NONE: Self = Self(0);

    /// Of a file that is about to be read.
    pub(super) fn of(meta: &std::fs::Metadata) -> Self {
        let since = meta.modified().ok().and_then(|it| it.elapsed().ok());
        if since.is_none_or(|since| since < TICK) {
            return Self::NONE;
        }
        let (seconds, nanoseconds) = (meta.mtime(), meta.mtime_nsec());
        Self(hash(
            &[
                meta.size().to_le_bytes(),
                seconds.to_le_bytes(),
                nanoseconds.to_le_bytes(),
            ]
            .concat(),
        ))
    }
}

/// The files of a directory, in the order of a walk: their names, the [`hash`] of what is in them, and
/// when that was put there.
#[derive(Clone, Debug, Default)]
pub(super) struct Files {
    /// All names, without anything between them
    text: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: usize,
    length: usize,
    hash: u64,
    stamp: Stamp,
}

impl Files {
    fn name(&self, entry: &Entry) -> &[u8] {
        let end = entry.start.saturating_add(entry.length);
        self.text.get(entry.start..end).unwrap_or_default()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.iter().map(|entry| self.name(entry))
    }

    /// Those whose content has that hash.
    pub(super) fn of_hash(&self, hash: u64) -> impl Iterator<Item = &[u8]> {
        let found = self.entries.iter().filter(move |entry| entry.hash == hash);
        found.map(|entry| self.name(entry))
    }

    /// Where a name is, or would be, if all of them are in the order of their bytes.
    pub(super) fn search(&self, name: &[u8]) -> Result<usize, usize> {
        self.entries
            .binary_search_by(|entry| self.name(entry).cmp(name))
    }

    pub(super) fn insert(&mut self, at: usize, name: &[u8], hash: u64, stamp: Stamp) {
        let entry = Entry {
            start: self.text.len(),
            length: name.len(),
            hash,
            stamp,
        };
        self.text.extend_from_slice(name);
        self.entries.insert(at.min(self.entries.len()), entry);
    }

    pub(super) fn push(&mut self, name: &[u8], hash: u64, stamp: Stamp) {
        self.insert(self.entries.len(), name, hash, stamp);
    }

    /// Reads again what has another stamp: `look` gives a file's stamp, `read` stamp and hash. Whether
    /// any had, or nothing where a file is no more.
    pub(super) fn refresh(
        &mut self,
        look: impl Fn(&[u8]) -> Option<Stamp>,
        read: impl Fn(&[u8]) -> Option<(u64, Stamp)>,
    ) -> Option<bool> {
        let mut any = false;
        for at in 0..self.entries.len() {
            let entry = self.entries[at];
            let name = self.name(&entry);
            let stamp = look(name)?;
            if stamp == Stamp::NONE || stamp != entry.stamp {
                let (hash, stamp) = read(name)?;
                any = true;
                self.entries[at] = Entry {
                    hash,
                    stamp,
                    ..entry
                };
            }
        }
        Some(any)
    }

    pub(super) fn remove(&mut self, name: &[u8]) {
        let text = &self.text;
        let is = |entry: &Entry| text.get(entry.start..entry.start + entry.length) == Some(name);
        self.entries.retain(|entry| !is(entry));
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

/// The directory as a note knows it: device, inode, and the time of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seal {
    device: u64,
    inode: u64,
    seconds: i64,
    nanoseconds: i64,
}

/// FNV-1a.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The files of `dir`, if there is a note that is still good.
pub(super) fn load(dir: &Path) -> Option<Files> {
    let mut bytes = Vec::new();
    File::open(path(dir)?).ok()?.read_to_end(&mut bytes).ok()?;
    decode(&bytes, seal(dir)?)
}

/// Seals `dir`, then notes its files, if they are still what `dir` has. Without effect where that is
/// not possible.
pub(super) fn save(dir: &Path, files: &Files, still: impl FnOnce() -> bool) {
    let Some(path) = path(dir) else { return };
    let Some(seal) = put_seal(dir).filter(|_| still()) else {
        return;
    };
    // Not truncated: most file systems write a file out when it is written anew after that.
    let _ = open_over(&path, 0o600).and_then(|mut file| file.write_all(&encode(files, seal)));
}

/// Sets the time of `dir` to a moment of its own.
fn put_seal(dir: &Path) -> Option<Seal> {
    // In the past, so that the kernel's clock does not come by it again.
    let moment = SystemTime::now() - Duration::from_secs(1);
    File::open(dir).ok()?.set_modified(moment).ok()?;
    let since = moment.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    // A file system of coarser times cannot tell one seal from the next.
    seal(dir).filter(|seal| i64::from(since.subsec_nanos()) == seal.nanoseconds)
}

fn path(dir: &Path) -> Option<PathBuf> {
    let name = dir.file_name()?.to_str()?;
    Some(dir.with_file_name(format!(".{name}.index")))
}

fn seal(dir: &Path) -> Option<Seal> {
    let meta = std::fs::metadata(dir).ok()?;
    Some(Seal {
        device: meta.dev(),
        inode: meta.ino(),
        seconds: meta.mtime(),
        nanoseconds: meta.mtime_nsec(),
    })
}

const MAGIC: &[u8; 8] = b"cadidx03";

/// A mark, then eight bytes each: how long the rest is, its [`sum`], the seal, the number of files; for
/// each file the hash, the stamp and the length of its name; then the names.
fn encode(files: &Files, seal: Seal) -> Vec<u8> {
    let mut rest = Vec::with_capacity(40 + files.len() * 24 + files.text.len());
    let mut put = |number: u64| rest.extend_from_slice(&number.to_le_bytes());
    put(seal.device);
    put(seal.inode);
    put(seal.seconds.cast_unsigned());
    put(seal.nanoseconds.cast_unsigned());
    put(files.len() as u64);
    for entry in &files.entries {
        put(entry.hash);
        put(entry.stamp.0);
        put(entry.length as u64);
    }
    for name in files.names() {
        rest.extend_from_slice(name);
    }
    let mut all = Vec::with_capacity(24 + rest.len());
    all.extend_from_slice(MAGIC);
    all.extend_from_slice(&(rest.len() as u64).to_le_bytes());
    all.extend_from_slice(&sum(&rest).to_le_bytes());
    all.append(&mut rest);
    all
}

fn decode(bytes: &[u8], seal: Seal) -> Option<Files> {
    let mut rest = bytes.strip_prefix(MAGIC)?;
    let length = usize::try_from(number(&mut rest)?).ok()?;
    let summed = number(&mut rest)?;
    let mut rest = rest.get(..length)?;
    if sum(rest) != summed {
        return None;
    }
    let noted = Seal {
        device: number(&mut rest)?,
        inode: number(&mut rest)?,
        seconds: number(&mut rest)?.cast_signed(),
        nanoseconds: number(&mut rest)?.cast_signed(),
    };
    if noted != seal {
        return None;
    }
    let count = usize::try_from(number(&mut rest)?).ok()?;
    let mut files = Files::default();
    files.entries.reserve(count.min(length / 24) + 1);
    let mut start: usize = 0;
    for _ in 0..count {
        let hash = number(&mut rest)?;
        let stamp = Stamp(number(&mut rest)?);
        let length = usize::try_from(number(&mut rest)?).ok()?;
        files.entries.push(Entry {
            start,
            length,
            hash,
            stamp,
        });
        start = start.checked_add(length)?;
    }
    files.text.extend_from_slice(rest);
    (start == rest.len()).then_some(files)
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u64::from_le_bytes(*number))
}

/// Tells a whole note from a torn one.
fn sum(bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let mix = |sum: u64, word: u64| (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    let all = words.chain(tail.iter().map(|&byte| u64::from(byte)));
    all.fold(bytes.len() as u64, mix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAL: Seal = Seal {
        device: 1,
        inode: 2,
        seconds: -3,
        nanoseconds: 4,
    };

    fn files() -> Files {
        let mut files = Files::default();
        files.push(b"10.0.0.9", 3, Stamp::NONE);
        files.push(b"10.0.0.3", 2, Stamp(7));
        files.insert(0, b"10.0.0.2", 1, Stamp(6));
        files.remove(b"10.0.0.9");
        files
    }

    /// What it knows.
    fn told(files: Option<Files>) -> Option<Vec<String>> {
        let files = files?;
        let known = files.names().zip(&files.entries);
        let known = known.map(|(name, it)| format!("{name:?} {} {:?}", it.hash, it.stamp));
        Some(known.collect())
    }

    #[test]
    fn a_note_is_good_for_its_seal_alone_and_whole_alone() {
        let mut bytes = encode(&files(), SEAL);
        assert_eq!(told(decode(&bytes, SEAL)), told(Some(files())));
        let other = Seal {
            nanoseconds: 5,
            ..SEAL
        };
        assert!(decode(&bytes, other).is_none());
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length], SEAL).is_none(), "{length}");
        }
        bytes.extend_from_slice(b"of a longer one before");
        assert_eq!(told(decode(&bytes, SEAL)), told(Some(files())));
        bytes[60] ^= 1;
        assert!(decode(&bytes, SEAL).is_none());
    }

    #[test]
    fn whatever_is_made_or_removed_breaks_the_seal() {
        let root = std::env::temp_dir().join(format!("cadastre-index-{}", std::process::id()));
        let dir = root.join("net");
        std::fs::create_dir_all(&dir).unwrap();
        let changes: [&dyn Fn(); 3] = [
            &|| std::fs::write(dir.join("a"), "").unwrap(),
            &|| std::fs::rename(dir.join("a"), dir.join("b")).unwrap(),
            &|| std::fs::remove_file(dir.join("b")).unwrap(),
        ];
        for change in changes {
            save(&dir, &files(), || true);
            assert_eq!(told(load(&dir)), told(Some(files())));
            change();
            assert!(load(&dir).is_none());
        }
        save(&dir, &files(), || true);
        std::fs::remove_dir(&dir).unwrap();
        std::fs::create_dir(&dir).unwrap();
        assert!(load(&dir).is_none(), "another directory");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
