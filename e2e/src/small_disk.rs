//! A small file system that tests can fill up.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::process::{self, Process};
use crate::wait::until;

/// A file system in memory. It is mounted in the mount namespace of a process of its own, so it ends with this value or
/// with this process, however this process ends.
#[derive(Debug)]
pub struct SmallDisk {
    path: PathBuf,
    /// Keeps the namespace
    _process: Process,
    _mount_point: TempDir,
}

impl SmallDisk {
    /// Mounts a file system of at most `bytes`. Needs root.
    pub async fn mount(bytes: u64) -> Result<Self> {
        let mount_point = tempfile::tempdir()?;
        let at = mount_point.path();
        let script = r#"mount -t tmpfs -o "size=$1,mode=0755" tmpfs "$0" && touch "$0/mounted" && exec sleep infinity"#;
        let mut command = process::command(Path::new("unshare"));
        command
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .args([at.display().to_string(), bytes.to_string()]);
        let mut process = Process::spawn("a small disk", command, &at.join("log"))?;
        // Other processes reach the files of the namespace through the root of its process.
        let path = PathBuf::from(format!("/proc/{}/root{}", process.pid(), at.display()));
        until("the disk is mounted", Duration::from_secs(30), async || {
            process.check_running()?;
            Ok(path.join("mounted").is_file().then_some(()))
        })
        .await?;
        Ok(Self {
            path,
            _process: process,
            _mount_point: mount_point,
        })
    }

    /// The path of the file system's root.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills the file system until not a byte is left.
    pub fn fill(&self) -> Result<()> {
        let mut file = File::create(self.filler())?;
        loop {
            match file.write_all(&[0; 4096]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => bail!("cannot fill the disk: {error}"),
            }
        }
    }

    /// Frees what [`Self::fill`] has taken.
    pub fn free(&self) -> Result<()> {
        fs::remove_file(self.filler()).context("cannot free the disk")
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}
