//! Programs of other people, in Python and Go, that ask the agent: the code of `docs/node.md`.
//!
//! grpcio and protoc come from PyPI, into an environment of their own in the cache, once; the plugins that make Go
//! of a proto are among the programs of [`assets`], and `e2e/grpc-go` pins the modules of the Go client.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::assets::{self, Program, say};

/// The release of grpcio and grpcio-tools.
const GRPCIO: &str = "1.85.1";
/// What Go clients are made of.
const GO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/grpc-go");
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The folder of an environment with grpcio, made where it is missing, or why there can be none here.
pub fn ready() -> Result<Result<PathBuf, String>> {
    let cache = assets::cache()?;
    let folder = cache.join("grpcio").join(GRPCIO);
    if let Err(reason) = python(&folder, &cache)? {
        return Ok(Err(reason));
    }
    assets::ensure(&assets::GENERATORS)?;
    Ok(Ok(folder))
}

fn python(folder: &Path, cache: &Path) -> Result<Result<(), String>> {
    fs::create_dir_all(folder.with_file_name(""))?;
    let _lock = assets::lock(cache)?;
    if folder.is_dir() {
        return Ok(Ok(()));
    }
    let partial = folder.with_file_name(".partial");
    let _ = fs::remove_dir_all(&partial);
    let made = Command::new("python3")
        .args(["-m", "venv"])
        .arg(&partial)
        .output();
    if !made.is_ok_and(|it| it.status.success()) {
        let reason = "`python3 -m venv` does not work: apt-get install python3-venv";
        return Ok(Err(reason.to_owned()));
    }
    say("installing grpcio from PyPI …");
    let mut pip = Command::new(partial.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip.args([
        format!("grpcio=={GRPCIO}"),
        format!("grpcio-tools=={GRPCIO}"),
    ]);
    run(&mut pip)?;
    fs::rename(&partial, folder)?;
    Ok(Ok(()))
}

/// A folder as the page supposes it: `venv`, `proto`, and `protoc` and its plugins in the path.
pub struct Desk {
    folder: PathBuf,
    path: String,
}

impl Desk {
    /// In an empty folder, with the environment that is [`ready`].
    pub fn new(folder: &Path, environment: &Path) -> Result<Self> {
        symlink(environment, folder.join("venv"))?;
        symlink(Path::new(REPOSITORY).join("proto"), folder.join("proto"))?;
        let protoc = folder.join("protoc");
        let script = "#!/bin/sh\nexec venv/bin/python -m grpc_tools.protoc \"$@\"\n";
        fs::write(&protoc, script)?;
        fs::set_permissions(&protoc, fs::Permissions::from_mode(0o755))?;
        for file in ["go.mod", "go.sum"] {
            fs::copy(Path::new(GO).join(file), folder.join(file))?;
        }
        let plugins = assets::find(Program::ProtocGenGo)?;
        let plugins = plugins.parent().context("a plugin without a folder")?;
        let inherited = std::env::var("PATH").unwrap_or_default();
        Ok(Self {
            path: format!("{}:{}:{inherited}", folder.display(), plugins.display()),
            folder: folder.to_owned(),
        })
    }

    /// Puts a file there.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        Ok(fs::write(self.folder.join(name), text)?)
    }

    /// Runs a line there and returns what it printed; what it complains of is the error.
    pub fn sh(&self, line: &str) -> Result<String> {
        let mut sh = Command::new("sh");
        sh.args(["-c", line]).current_dir(&self.folder);
        run(sh.env("PATH", &self.path).env("CGO_ENABLED", "0"))
    }
}

fn run(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {said}",
        output.status
    );
    Ok(String::from_utf8(output.stdout)?)
}
