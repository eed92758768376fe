//! The executables of host-local and of cadastre-ipam.

use std::path::{Path, PathBuf};

use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::daemon;

pub struct Plugins {
    /// The published host-local
    pub theirs: PathBuf,
    /// cadastre-ipam, called by the name `host-local`
    pub ours: PathBuf,
    /// cadastre-ipam, called by its own name
    pub own_name: PathBuf,
}

impl Plugins {
    /// Finds both plugins, and builds host-local if it is missing. Creates a link named `host-local` to cadastre-ipam
    /// in `folder`.
    pub fn new(folder: &Path) -> Self {
        let given = std::env::var_os("CADASTRE_HOST_LOCAL").map(PathBuf::from);
        let theirs = given.unwrap_or_else(|| {
            assets::ensure(&[Program::HostLocal]).unwrap();
            assets::find(Program::HostLocal).unwrap()
        });
        let own_name = daemon::plugin().unwrap();
        let ours = folder.join("host-local");
        std::os::unix::fs::symlink(&own_name, &ours).unwrap();
        Self {
            theirs,
            ours,
            own_name,
        }
    }
}
