//! Writes the files that other programs on the node read, and checks the CNI configurations of other networks.
//!
//! | file | subject |
//! |---|---|
//! | [`conflist`] | the CNI configuration, from a template |
//! | [`subnet_env`] | flannel's `subnet.env` |
//! | [`kept`] | keeps the CNI configuration and `subnet.env` up to date with the node's ranges |
//! | [`others`] | CNI configurations of other networks, and which configuration the runtime uses |
//! | [`install`] | installs the executable of the CNI plugin |
//!
//! # Guarantees
//! - A reader gets either the complete old file or the complete new file. A new file is written under a name that
//!   runtimes do not load, synced, and renamed within the directory. Runtimes that watch the directory notice the
//!   rename.
//! - A file that has the right content and mode already is not written again.

pub mod conflist;
pub mod install;
pub mod kept;
pub mod others;
pub mod subnet_env;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cadastre_node::advice;

/// The advice for I/O errors for which there is no specific advice.
const USUAL: &str = "Check the path, its owner and the space on its disk.";

/// An error of an operation on a file or directory. The text of the error contains advice for the administrator.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}: {error}. {}", path.display(), advice(error).unwrap_or(USUAL))]
pub struct FileError {
    /// The operation that failed: `write`, `rename`, ...
    what: &'static str,
    path: PathBuf,
    error: io::Error,
}

impl FileError {
    /// Returns the error of the operating system, without the path and the advice.
    pub(crate) fn into_error(self) -> io::Error {
        self.error
    }

    pub(crate) fn at<'a>(
        what: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> Self + 'a {
        move |error| Self {
            what,
            path: path.to_owned(),
            error,
        }
    }
}

/// Replaces a file unless it has these bytes and this mode already. Creates the file's directory if it is missing.
/// Returns whether anything was written.
pub(crate) fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<bool, FileError> {
    if is_same(path, bytes, mode) {
        return Ok(false);
    }
    replace(path, bytes, mode)?;
    Ok(true)
}

/// Replaces a file, even if it has these bytes already. Creates the file's directory if it is missing. Once this
/// function has returned, the new content survives a loss of power.
pub(crate) fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    let folder = folder(path);
    fs::create_dir_all(folder).map_err(FileError::at("create", folder))?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".temp");
    let temp = folder.join(name);
    let written = write(&temp, bytes, mode)
        .and_then(|()| fs::rename(&temp, path).map_err(FileError::at("rename", &temp)));
    if written.is_err() {
        let _ = fs::remove_file(&temp);
    }
    written?;
    // A rename is durable only once the directory is synced.
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(FileError::at("sync", folder))
}

/// Syncs a file and its directory, so that the present content survives a loss of power.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()?;
    File::open(folder(path))?.sync_all()
}

fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Removes a file. Returns whether it existed.
pub fn remove(path: &Path) -> Result<bool, FileError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(FileError::at("remove", path)(error)),
    }
}

fn is_same(path: &Path, bytes: &[u8], mode: u32) -> bool {
    let Ok(found) = fs::symlink_metadata(path) else {
        return false;
    };
    found.is_file()
        && found.len() == bytes.len() as u64
        && found.permissions().mode() & 0o7777 == mode
        && fs::read(path).is_ok_and(|is| is == bytes)
}

fn write(temp: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    // A killed process may have left a temporary file, which is removed first.
    remove(temp)?;
    let opened = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(temp);
    let mut file = opened.map_err(FileError::at("create", temp))?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| file.sync_all());
    written.map_err(FileError::at("write", temp))
}

#[cfg(test)]
/// Returns a new directory for each test, because tests run in parallel.
pub(super) fn temp_folder() -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "cadastre-files-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_only_if_it_differs() {
        let folder = temp_folder();
        let path = folder.join("sub/10-x.conflist");
        assert!(put(&path, b"one", 0o644).unwrap());
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.permissions().mode() & 0o7777, 0o644);
        assert!(!put(&path, b"one", 0o644).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        // A writer that was killed has left a partial file.
        fs::write(folder.join("sub/10-x.conflist.temp"), "o").unwrap();
        assert!(put(&path, b"two", 0o644).unwrap());
        assert_ne!(fs::metadata(&path).unwrap().ino(), first.ino());
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(put(&path, b"two", 0o600).unwrap(), "the mode counts");
        assert_eq!(fs::read_dir(folder.join("sub")).unwrap().count(), 1);
        assert!(remove(&path).unwrap() && !remove(&path).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_failed_write_names_the_path_and_leaves_no_temporary_file() {
        let folder = temp_folder();
        let path = folder.join("x");
        fs::create_dir(&path).unwrap();
        let error = put(&path, b"one", 0o644).unwrap_err().to_string();
        assert!(
            error.contains("rename") && error.contains("/x.temp"),
            "{error}"
        );
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        let file = folder.join("file");
        fs::write(&file, "").unwrap();
        let error = put(&file.join("x"), b"one", 0o644).unwrap_err().to_string();
        assert!(
            error.contains("/file: ") && error.contains("There is a file"),
            "{error}"
        );
        let error = io::Error::from_raw_os_error(30);
        let error = FileError::at("create", &file)(error).to_string();
        assert!(error.contains("so that it can be written"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
