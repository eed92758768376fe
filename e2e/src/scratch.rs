//! A temporary folder that is removed when the process that created it ends, in whatever way.
//!
//! A small `sh` reads from a pipe whose other end only this process has. When the pipe closes, by drop, exit or
//! SIGKILL, the shell removes the folder. So nothing has to be cleaned up at the next start.
//!
//! The folder is kept, and its path printed, in three cases: the [`Scratch`] is dropped while its thread panics (a
//! failed test), [`Scratch::keep`] was called, or `CADASTRE_KEEP` is set in the environment.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};

/// The script that removes the folder. It tries for about 10 s, because processes that are being killed may still write
/// to the folder for a moment.
const REMOVE: &str = r#"
tries=0
until rm -rf -- "$1" || [ "$tries" -ge 100 ]; do tries=$((tries + 1)); sleep 0.1; done
"#;

/// A private folder (mode 0700) in the system's folder for temporary files.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    keep: AtomicBool,
    caretaker: Option<Caretaker>,
}

/// A child process that runs a script once the test process has ended.
#[derive(Debug)]
pub(crate) struct Caretaker {
    child: Child,
}

impl Caretaker {
    /// Starts a process that runs a shell script, with `what` as `$1`, as soon as the returned value is dropped or this
    /// process ends.
    pub(crate) fn start(script: &str, what: &OsStr) -> Result<Self> {
        let wait = r#"read -r word && [ "$word" = keep ] && exit 0"#;
        let child = Command::new("sh")
            .args(["-c", &format!("{wait}\n{script}"), "sh"])
            .arg(what)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start sh, which cleans up at the end")?;
        Ok(Self { child })
    }

    /// Runs the caretaker's script now, and waits until the script has ended.
    pub(crate) fn end(mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }

    /// Ends the caretaker without running its script.
    fn dismiss(mut self) {
        if let Some(mut pipe) = self.child.stdin.take() {
            let _ = pipe.write_all(b"keep\n");
        }
        let _ = self.child.wait();
    }
}

impl Scratch {
    /// Creates an empty folder in the system's folder for temporary files.
    pub fn new() -> Result<Self> {
        let path = tempfile::Builder::new()
            .prefix("cadastre-e2e-")
            .tempdir()
            .context("cannot make a temporary folder; set TMPDIR to a writable one")?
            .keep();
        let caretaker = Some(Caretaker::start(REMOVE, path.as_ref())?);
        let keep = AtomicBool::new(false);
        Ok(Self {
            path,
            keep,
            caretaker,
        })
    }

    /// Prevents the removal of the folder when this value is dropped.
    pub fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
    }

    /// The path of the folder, which exists at least until this value is dropped.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let Some(caretaker) = self.caretaker.take() else {
            return;
        };
        let asked = || std::env::var_os("CADASTRE_KEEP").is_some();
        if std::thread::panicking() || self.keep.load(Ordering::Relaxed) || asked() {
            eprintln!("logs and data are kept in {}", self.path.display());
            caretaker.dismiss();
        } else {
            caretaker.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_owner() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        std::fs::create_dir(path.join("inner")).unwrap();
        std::fs::write(path.join("inner/file"), "x").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_is_kept_when_its_owner_panics() {
        let (send, receive) = std::sync::mpsc::channel();
        let outcome = std::thread::spawn(move || {
            let scratch = Scratch::new().unwrap();
            send.send(scratch.path().to_owned()).unwrap();
            panic!("on purpose");
        })
        .join();
        assert!(outcome.is_err());
        let path = receive.recv().unwrap();
        assert!(path.is_dir());
        std::fs::remove_dir(path).unwrap();
    }
}
