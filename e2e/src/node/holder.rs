//! Namespaces that live as long as one process, the holder.
//!
//! The holder is the first process of its own pid namespace. When the holder dies, the kernel kills every process in
//! that namespace. When the last process is gone, the other namespaces disappear with their interfaces, routes and
//! mounts. The holder also dies when this process ends in any way, because the kernel then kills `unshare` and, by
//! `--kill-child`, the holder.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::guest::{Guest, first_child};
use crate::process::{self, Process};

const START_LIMIT: Duration = Duration::from_secs(120);
const RUN_LIMIT: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(5);

/// The last part of the holder's script, after the caller's part: reports readiness, then reaps orphaned processes.
const HOLD: &str = r#"
: > "$1/ready"
while :; do sleep 3600 & wait $!; done
"#;

/// Running namespaces (net, mount, uts, ipc and pid). All processes in them are killed when this value is dropped.
#[derive(Debug)]
pub struct Holder {
    unshare: Process,
    pid: u32,
    log_folder: PathBuf,
}

impl Holder {
    /// Creates the namespaces and runs a shell script in them. In the script, `$1` is `folder`, and `args` follow.
    /// Returns when the script has ended. The shell then remains as the holder, the first process of the namespaces.
    /// Programs in the namespaces log to `folder`.
    pub async fn start(name: &str, script: &str, folder: &Path, args: &[&str]) -> Result<Self> {
        let ready = folder.join("ready");
        let _ = std::fs::remove_file(&ready);
        let mut command = process::command(Path::new("unshare"));
        command
            .args(["--net", "--mount", "--uts", "--ipc", "--pid"])
            .args(["--fork", "--kill-child=KILL", "--mount-proc"])
            .args(["--propagation", "private", "sh", "-c"])
            .arg(format!("set -eu\n{script}\n{HOLD}"))
            .arg(name)
            .arg(folder)
            .args(args);
        let log = folder.join("holder.log");
        let mut unshare = Process::spawn(&format!("holder of {name}"), command, &log)?;
        let start = Instant::now();
        while !ready.exists() {
            unshare.check_running()?;
            if start.elapsed() > START_LIMIT {
                bail!(
                    "{name} is not up after {START_LIMIT:?}; {}",
                    unshare.log_tail(20)
                );
            }
            tokio::time::sleep(LOOK).await;
        }
        let pid = first_child(unshare.pid()).context("the holder has no process")?;
        // The file is for developers who want to enter the namespaces with nsenter.
        std::fs::write(folder.join("pid"), format!("{pid}\n"))?;
        Ok(Self {
            unshare,
            pid,
            log_folder: folder.to_owned(),
        })
    }

    /// The process id of the holder, as seen from the host.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Opens the network namespace, so that a thread can move into it.
    pub fn network(&self) -> Result<File> {
        let path = format!("/proc/{}/ns/net", self.pid);
        File::open(&path).with_context(|| format!("cannot open {path}"))
    }

    /// Returns a command that enters all namespaces. The caller adds the program and its arguments.
    pub fn enter(&self) -> Command {
        let mut command = process::command(Path::new("nsenter"));
        command
            .arg(format!("--target={}", self.pid))
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--"]);
        command
    }

    /// Runs a program in the namespaces and returns its standard output. Returns an error if the program fails or takes
    /// longer than [`RUN_LIMIT`].
    pub async fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<String> {
        let mut command = self.enter();
        command.args(args);
        output(command).await
    }

    /// Runs a program that enters only the network namespace. So the program can use the host's files and process ids.
    pub async fn run_in_network<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<String> {
        let mut command = process::command(Path::new("nsenter"));
        command
            .arg(format!("--net=/proc/{}/ns/net", self.pid))
            .arg("--")
            .args(args);
        output(command).await
    }

    /// Starts a program in the namespaces, which logs to `NAME.log`.
    pub async fn spawn<S: AsRef<OsStr>>(
        &self,
        name: &str,
        env: &[(&str, String)],
        args: &[S],
    ) -> Result<Guest> {
        let mut command = self.enter();
        command.args(args).envs(env.iter().map(|(k, v)| (*k, v)));
        Guest::spawn(name, command, &self.log_folder.join(format!("{name}.log"))).await
    }

    /// Kills all processes in the namespaces at once, like a power cut, and waits until they have ended.
    pub async fn kill(mut self) -> Result<()> {
        self.strike()?;
        let ended = self.unshare.wait(Duration::from_secs(30)).await?;
        ended
            .context("the namespaces are still there 30 s after their first process was killed")?;
        Ok(())
    }

    fn strike(&mut self) -> Result<()> {
        self.unshare.check_running()?;
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        kill_process(pid.context("no process id")?, Signal::KILL)?;
        Ok(())
    }
}

impl Drop for Holder {
    /// Kills all processes and waits for `unshare` to end, so that their files can be removed afterwards.
    fn drop(&mut self) {
        if self.strike().is_err() {
            return;
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) {
            if !matches!(self.unshare.exit_status(), Ok(None)) {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Runs a command and returns its standard output. If the command fails, its standard error and output are the error.
async fn output(command: Command) -> Result<String> {
    let shown = format!("{:?}", command.get_args().collect::<Vec<_>>());
    let child = tokio::process::Command::from(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot run nsenter")?;
    let output = tokio::time::timeout(RUN_LIMIT, child.wait_with_output())
        .await
        .with_context(|| format!("{shown} has not ended after {RUN_LIMIT:?}"))??;
    if !output.status.success() {
        bail!(
            "{shown} failed ({}): {}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim(),
            String::from_utf8_lossy(&output.stdout).trim(),
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
