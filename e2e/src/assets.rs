//! The programs of a control plane, found or built.
//!
//! Looked for in this order: the folder named by `KUBEBUILDER_ASSETS`; the cache,
//! `$CADASTRE_CACHE`, else `$XDG_CACHE_HOME/cadastre`, else `~/.cache/cadastre`, in its sub-folder
//! `control-plane/v1.36.3`. What is missing is built once into the cache by `go build`, from the
//! module in `e2e/control-plane` whose `go.sum` pins every source; about six minutes on two cores for
//! the four of [`CONTROL_PLANE`]. A lock file keeps two processes from building at once, and a build
//! gets its name only when it is complete.

use std::env;
use std::fs::{self, File};
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::process::{self, Process};

/// The release of Kubernetes that is built.
pub const KUBERNETES: &str = "v1.36.3";

/// What [`ControlPlane`](crate::ControlPlane) needs.
pub const CONTROL_PLANE: [Program; 4] = [
    Program::Etcd,
    Program::KubeApiserver,
    Program::KubeControllerManager,
    Program::Kubectl,
];

/// A program that the harness can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `etcd`
    Etcd,
    /// `kube-apiserver`
    KubeApiserver,
    /// `kube-controller-manager`
    KubeControllerManager,
    /// `kube-scheduler`
    KubeScheduler,
    /// `kubelet`
    Kubelet,
    /// `kubectl`
    Kubectl,
}

impl Program {
    /// The file's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeControllerManager => "kube-controller-manager",
            Self::KubeScheduler => "kube-scheduler",
            Self::Kubelet => "kubelet",
            Self::Kubectl => "kubectl",
        }
    }

    fn package(self) -> String {
        match self {
            Self::Etcd => "go.etcd.io/etcd/server/v3".to_owned(),
            other => format!("k8s.io/kubernetes/cmd/{}", other.name()),
        }
    }

    /// Without these the binaries call themselves `v0.0.0-master`.
    fn ldflags(self) -> String {
        const VERSION: &str = "k8s.io/component-base/version";
        match self {
            Self::Etcd => "-s -w".to_owned(),
            _ => format!(
                "-s -w -X {VERSION}.gitVersion={KUBERNETES} -X {VERSION}.gitMajor=1 -X {VERSION}.gitMinor=36"
            ),
        }
    }
}

/// The path of a program that is there already.
pub fn find(program: Program) -> Result<PathBuf> {
    present(program, &cache()?).with_context(|| {
        format!(
            "{} is not built yet: run `make control-plane`",
            program.name()
        )
    })
}

/// Makes sure that every one of `programs` is there; builds what is not and says so on standard
/// error. Blocks for minutes when it has to build.
pub fn ensure(programs: &[Program]) -> Result<()> {
    let cache = cache()?;
    let missing = || {
        programs
            .iter()
            .copied()
            .filter(|it| present(*it, &cache).is_none())
            .collect()
    };
    let all: Vec<Program> = missing();
    if all.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let lock = File::create(cache.join(".lock"))?;
    if lock.try_lock().is_err() {
        say("waiting for another process that builds the control plane …");
        lock.lock()?;
    }
    let left: Vec<Program> = missing();
    for (i, program) in left.iter().enumerate() {
        build(
            *program,
            &cache,
            &format!("{} ({} of {})", program.name(), i + 1, left.len()),
        )?;
    }
    Ok(())
}

fn cache() -> Result<PathBuf> {
    let folder = |name| {
        env::var_os(name)
            .filter(|it| !it.is_empty())
            .map(PathBuf::from)
    };
    let root = folder("CADASTRE_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("cadastre")))
        .or_else(|| Some(folder("HOME")?.join(".cache/cadastre")))
        .context("neither HOME nor CADASTRE_CACHE is set: set CADASTRE_CACHE to a folder for the binaries")?;
    Ok(root.join("control-plane").join(KUBERNETES))
}

fn present(program: Program, cache: &Path) -> Option<PathBuf> {
    env::var_os("KUBEBUILDER_ASSETS")
        .map(PathBuf::from)
        .into_iter()
        .chain([cache.to_owned()])
        .map(|folder| folder.join(program.name()))
        .find(|path| path.is_file())
}

fn build(program: Program, cache: &Path, title: &str) -> Result<()> {
    if Command::new("go").arg("version").output().is_err() {
        bail!(
            "{} has to be built once and needs Go 1.26 or newer, which is not installed: see \
             https://go.dev/dl (golang-go of Debian 12 is too old). Or set KUBEBUILDER_ASSETS to a \
             folder with etcd, kube-apiserver, kube-controller-manager and kubectl",
            program.name()
        );
    }
    let partial = cache.join(format!(".{}.partial", program.name()));
    let mut go = process::command(Path::new("go"));
    go.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/control-plane"))
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "-mod=readonly -buildvcs=false -trimpath")
        .args(["build", "-ldflags", &program.ldflags(), "-o"])
        .arg(&partial)
        .arg(program.package());
    let log = cache.join(format!("{}.log", program.name()));
    let _ = fs::remove_file(&log);
    let start = Instant::now();
    let mut go = Process::spawn("go build", go, &log)?;
    let mut progress = Progress::new(title);
    let status = loop {
        if let Some(status) = go.exit_status()? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(200));
        progress.tick(start.elapsed());
    };
    if !status.success() {
        bail!(
            "go build of {} failed ({status}); {}",
            program.package(),
            go.log_tail(40)
        );
    }
    fs::rename(&partial, cache.join(program.name()))?;
    let _ = fs::remove_file(&log);
    progress.done(start.elapsed());
    Ok(())
}

/// One line that counts on a terminal; elsewhere a line every 15 s.
struct Progress<'a> {
    title: &'a str,
    terminal: bool,
    said: Duration,
}

impl<'a> Progress<'a> {
    fn new(title: &'a str) -> Self {
        say(&format!("building {title} …"));
        Self {
            title,
            terminal: std::io::stderr().is_terminal(),
            said: Duration::ZERO,
        }
    }

    fn tick(&mut self, elapsed: Duration) {
        let every = Duration::from_secs(if self.terminal { 1 } else { 15 });
        if elapsed < self.said + every {
            return;
        }
        self.said = elapsed;
        let line = format!("building {} … {} s", self.title, elapsed.as_secs());
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r{line}");
        } else {
            say(&line);
        }
    }

    fn done(&self, elapsed: Duration) {
        let start = if self.terminal { "\r" } else { "" };
        say(&format!(
            "{start}built {} in {} s",
            self.title,
            elapsed.as_secs()
        ));
    }
}

/// Straight to standard error, so that it also shows while a test runs.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
