//! Runs the gRPC clients of `docs/node.md`, written in Python and Go, against the agent.
//!
//! grpcio and protoc come from PyPI and are installed once into a virtual environment in the cache. protoc's plugins
//! that generate Go code are among the programs of [`assets`]. `e2e/grpc-go` pins the modules of the Go client.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::assets::{self, Program, say};

/// The release of grpcio and grpcio-tools that is installed.
const GRPCIO: &str = "1.85.1";
/// The folder with the `go.mod` and `go.sum` of the Go clients.
const GO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/grpc-go");
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Returns the virtual environment with grpcio, and creates it if it is missing. The inner error says why this host
/// cannot have such an environment.
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

/// A working folder as `docs/node.md` assumes it: with `venv` and `proto`, and with protoc and protoc's plugins in the
/// PATH.
pub struct Desk {
    folder: PathBuf,
    path: String,
}

impl Desk {
    /// Prepares `folder`, which must be empty; `environment` is the virtual environment that [`ready`] returned.
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

    /// Writes a file into the folder, or replaces it.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        Ok(fs::write(self.folder.join(name), text)?)
    }

    /// Runs a shell command in the folder and returns its standard output. If the command fails, its standard error is
    /// the error.
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
