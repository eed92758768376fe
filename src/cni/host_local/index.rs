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
//! - Everything happens under host-local's lock.
//! - A hit is looked up in the file itself before it counts. A miss is trusted: a file written over
//!   in place by hand, which breaks no seal, is missed until the next change in the directory.
//! - A note that is torn, or of another directory, or older, is none. So the order of writes on disk
//!   does not matter, and nothing is lost with the note.
//! - host-local never sees it: it reads `<dataDir>/<name>`, the note is `<dataDir>/.<name>.index`,
//!   and no network's name begins with a dot.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A file of the directory: its name, and the [`hash`] of what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: Vec<u8>,
    pub(super) hash: u64,
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

/// The files of `dir` in the order of their names, if there is a note that is still good.
pub(super) fn load(dir: &Path) -> Option<Vec<Entry>> {
    let mut bytes = Vec::new();
    File::open(path(dir)?).ok()?.read_to_end(&mut bytes).ok()?;
    decode(&bytes, seal(dir)?)
}

/// Seals `dir` and notes its files. Without effect where that is not possible.
pub(super) fn save(dir: &Path, entries: &[Entry]) {
    if entries.iter().any(|entry| entry.name.contains(&b'\n')) {
        return;
    }
    // In the past, so that the kernel's clock does not come by it again.
    let moment = SystemTime::now() - Duration::from_secs(1);
    let sealed = File::open(dir).and_then(|dir| dir.set_modified(moment));
    let Some(seal) = sealed.ok().and_then(|()| seal(dir)) else {
        return;
    };
    // A file system of coarser times cannot tell one seal from the next.
    let since = moment.duration_since(SystemTime::UNIX_EPOCH);
    if since.is_ok_and(|since| i64::from(since.subsec_nanos()) == seal.nanoseconds)
        && let Some(path) = path(dir)
    {
        // Not truncated: most file systems write a file out when it is written anew after that.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path);
        let _ = file.and_then(|mut file| file.write_all(&encode(entries, seal)));
    }
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

/// A line of length and hash, then that many bytes: the seal, and a line for each file.
fn encode(entries: &[Entry], seal: Seal) -> Vec<u8> {
    let Seal {
        device,
        inode,
        seconds,
        nanoseconds,
    } = seal;
    let mut body = format!("{device} {inode} {seconds} {nanoseconds}\n").into_bytes();
    for entry in entries {
        body.extend_from_slice(format!("{:016x} ", entry.hash).as_bytes());
        body.extend_from_slice(&entry.name);
        body.push(b'\n');
    }
    let mut all = format!("{MAGIC} {} {:016x}\n", body.len(), hash(&body)).into_bytes();
    all.append(&mut body);
    all
}

const MAGIC: &str = "cadastre-index-1";

fn decode(bytes: &[u8], seal: Seal) -> Option<Vec<Entry>> {
    let line_end = bytes.iter().position(|&byte| byte == b'\n')?;
    let head = std::str::from_utf8(&bytes[..line_end]).ok()?;
    let mut head = head.strip_prefix(MAGIC)?.split_whitespace();
    let length: usize = head.next()?.parse().ok()?;
    let sum = u64::from_str_radix(head.next()?, 16).ok()?;
    let body = bytes.get(line_end + 1..)?.get(..length)?;
    if hash(body) != sum {
        return None;
    }
    let mut lines = body.split(|&byte| byte == b'\n');
    let noted = std::str::from_utf8(lines.next()?).ok()?;
    let Seal {
        device,
        inode,
        seconds,
        nanoseconds,
    } = seal;
    if noted != format!("{device} {inode} {seconds} {nanoseconds}") {
        return None;
    }
    let lines = lines.filter(|line| !line.is_empty());
    lines
        .map(|line| {
            let (hash, name) = (line.get(..16)?, line.get(17..)?);
            let hash = u64::from_str_radix(std::str::from_utf8(hash).ok()?, 16).ok()?;
            let name = name.to_owned();
            Some(Entry { name, hash })
        })
        .collect()
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

    fn entries() -> Vec<Entry> {
        ["10.0.0.2", "10.0.0.3"]
            .map(|name| Entry {
                name: name.into(),
                hash: hash(name.as_bytes()),
            })
            .to_vec()
    }

    #[test]
    fn a_note_is_good_for_its_seal_alone_and_whole_alone() {
        let mut bytes = encode(&entries(), SEAL);
        assert_eq!(decode(&bytes, SEAL), Some(entries()));
        let other = Seal {
            nanoseconds: 5,
            ..SEAL
        };
        assert_eq!(decode(&bytes, other), None);
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length], SEAL), None, "{length}");
        }
        bytes.extend_from_slice(b"of a longer one before");
        assert_eq!(decode(&bytes, SEAL), Some(entries()));
        bytes[60] ^= 1;
        assert_eq!(decode(&bytes, SEAL), None);
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
            save(&dir, &entries());
            assert_eq!(load(&dir), Some(entries()));
            change();
            assert_eq!(load(&dir), None);
        }
        save(&dir, &entries());
        std::fs::remove_dir(&dir).unwrap();
        std::fs::create_dir(&dir).unwrap();
        assert_eq!(load(&dir), None, "another directory");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
