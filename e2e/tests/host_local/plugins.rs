//! The executables of both plugins.

use std::path::{Path, PathBuf};

use cadastre_e2e::assets::{self, Program};

pub struct Plugins {
    /// The published host-local
    pub theirs: PathBuf,
    /// Our plugin, called by the name of host-local
    pub ours: PathBuf,
    /// Our plugin, called by its own name
    pub own_name: PathBuf,
}

impl Plugins {
    /// Finds or builds the plugins; creates a link to ours in `folder`.
    pub fn new(folder: &Path) -> Self {
        let given = std::env::var_os("CADASTRE_HOST_LOCAL").map(PathBuf::from);
        let theirs = given.unwrap_or_else(|| {
            assets::ensure(&[Program::HostLocal]).unwrap();
            assets::find(Program::HostLocal).unwrap()
        });
        let own_name = own();
        let ours = folder.join("host-local");
        std::os::unix::fs::symlink(&own_name, &ours).unwrap();
        Self {
            theirs,
            ours,
            own_name,
        }
    }
}

/// `CADASTRE_IPAM_BIN`, else the plugin of this build.
fn own() -> PathBuf {
    if let Some(path) = std::env::var_os("CADASTRE_IPAM_BIN") {
        return PathBuf::from(path);
    }
    let this = std::env::current_exe().unwrap();
    let folders = this.ancestors().skip(1).take(2);
    let mut found = folders
        .map(|folder| folder.join("cadastre-ipam"))
        .filter(|path| path.is_file());
    found
        .next()
        .expect("no cadastre-ipam of this build: run `cargo build --workspace --bins`")
}
