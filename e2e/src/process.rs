//! Starts child processes that never outlive this one.
//!
//! # Guarantees
//! - A child gets SIGKILL when this process ends in any way, even by SIGKILL: `setpriv` requests that from the kernel
//!   (`PR_SET_PDEATHSIG`) before it executes the program. The kernel ties the request to the *thread* that created the
//!   child. Therefore one thread, which lives as long as this process, creates all children.
//! - A dropped [`Process`] is killed by its process id and waited for; no process is looked up by name.
//! - Each child leads its own process group. So Ctrl-C in a terminal reaches only this process, which then ends its
//!   children in the right order.
//!
//! # Caveats
//! - If this process is killed in the millisecond between the fork and the request of `setpriv`, the child survives.
//! - Children of a child are not killed. Chromium's children end with Chromium, and those of a node's programs end with
//!   the node's namespaces.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};

/// The interval between two checks of whether a process has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Returns a command for [`Process::spawn`]: the command's process is killed when this process ends.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// A running child process, killed when dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// A process that can be killed and started again. It is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Restartable {
    name: String,
    running: Option<Process>,
}

impl Restartable {
    /// Returns a process that does not run yet. Its log is `NAME.log`.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            running: None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Starts `command` with a log in `folder`, unless the process runs.
    pub(crate) fn start(&mut self, command: Command, folder: &Path) -> Result<()> {
        if self.running.is_none() {
            let log = folder.join(format!("{}.log", self.name));
            self.running = Some(Process::spawn(&self.name, command, &log)?);
        }
        Ok(())
    }

    /// Kills the process with SIGKILL, and waits until it has ended.
    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.running.take() {
            process.kill()?;
        }
        Ok(())
    }

    /// Returns the running process, to send signals and to measure memory and processor time.
    pub(crate) fn process(&self) -> Result<&Process> {
        let none = || format!("{} does not run: start it first", self.name);
        self.running.as_ref().with_context(none)
    }

    /// Returns an error with the end of the log if the process has ended by itself.
    pub(crate) fn check_running(&mut self) -> Result<()> {
        self.running.as_mut().map_or(Ok(()), Process::check_running)
    }
}

/// Resources that a process has used so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// Resident memory, in bytes.
    pub rss: u64,
    /// Anonymous memory, in bytes. This is `rss` without the pages of files, such as the executable, which the kernel
    /// can drop and read again
    pub anon: u64,
    /// The peak of resident memory, in bytes.
    pub peak_rss: u64,
    /// User and system processor time of all threads of the process.
    pub cpu: Duration,
}

impl Process {
    /// Starts `command`, which [`command()`] must have created. Standard output and error are appended to `log`.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot open the log {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0);
        let child = spawn_for_life(command).with_context(|| {
            format!("cannot start {name} through setpriv (Debian package util-linux)")
        })?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// The process id. The kernel does not reuse it before this value is dropped or the process was waited for.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file to which the process writes its standard output and error.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Sends a signal: `TERM`, `KILL`, `STOP`, `CONT`, … Fails if the process has ended and was waited for.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| anyhow!("{} is no process id", self.pid()))?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {} ({pid:?})", self.name))
    }

    /// Returns the exit status if the process has ended, else `None`.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Returns an error with the end of the log if the process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.exit_status()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}); {}", self.name, self.log_tail(30)),
        }
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        Ok(self.child.wait()?)
    }

    /// Sends SIGTERM, waits at most `grace`, then sends SIGKILL. Returns the exit status.
    pub async fn stop(&mut self, grace: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        match self.wait(grace).await? {
            Some(status) => Ok(status),
            None => self.kill(),
        }
    }

    /// Waits at most `limit` for the process to end by itself. Returns `None` if it still runs when `limit` has passed.
    pub async fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            let status = self.exit_status()?;
            if status.is_some() || start.elapsed() >= limit {
                return Ok(status);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Returns the process's memory and its processor time so far.
    pub fn usage(&self) -> Result<Usage> {
        usage(self.pid()).with_context(|| format!("cannot read what {} uses", self.name))
    }

    /// Returns the path of the log and its last `lines` lines, for an error message.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<&str> = text.lines().collect();
        let tail = &all[all.len().saturating_sub(lines)..];
        format!(
            "its log {} ends with:\n{}",
            self.log.display(),
            tail.join("\n")
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Starts a child from a thread that lives as long as this process (see the module's guarantees).
fn spawn_for_life(command: Command) -> io::Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (send, jobs) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in jobs {
                let _ = answer.send(command.spawn());
            }
        });
        send
    });
    let gone = || io::Error::other("the thread that starts processes is gone");
    let (send, answer) = mpsc::channel();
    spawner.send((command, send)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// Returns the memory and the processor time of the process `pid`, from /proc.
pub fn usage(pid: u32) -> Result<Usage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let bytes = |key: &str| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
        let kib = kib.with_context(|| format!("/proc/{pid}/status has no {key}"))?;
        Ok(kib.parse::<u64>()? * 1024)
    };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Field 2 is the process's name in brackets, which may contain spaces. So fields are counted from the end of the
    // name. Fields 14 and 15 are the user and system ticks.
    let (_, fields) = stat
        .rsplit_once(") ")
        .context("/proc/PID/stat has no name")?;
    let ticks = fields
        .split(' ')
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<u64, _>>()?;
    let millis = ticks * 1000 / rustix::param::clock_ticks_per_second();
    Ok(Usage {
        rss: bytes("VmRSS:")?,
        anon: bytes("RssAnon:")?,
        peak_rss: bytes("VmHWM:")?,
        cpu: Duration::from_millis(millis),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    fn shell(script: &str) -> (Process, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command(Path::new("sh"));
        command.args(["-c", script]);
        (
            Process::spawn("sh", command, &folder.path().join("log")).unwrap(),
            folder,
        )
    }

    fn state(pid: u32) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    #[tokio::test]
    async fn a_child_outlives_the_thread_that_asked_for_it_and_ends_on_drop() {
        let (process, _folder) = std::thread::spawn(|| shell("sleep 1000")).join().unwrap();
        let pid = process.pid();
        assert!(state(pid).is_some_and(|state| state != 'Z'));
        drop(process);
        assert_eq!(state(pid), None);
    }

    #[tokio::test]
    async fn a_child_that_ended_is_reported_with_its_log() {
        let (mut process, _folder) = shell("echo no such flag >&2; exit 3");
        let status = process
            .wait(Duration::from_secs(10))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(status.code(), Some(3));
        let text = process.check_running().unwrap_err().to_string();
        assert!(
            text.contains("no such flag") && text.contains("exit status: 3"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn one_that_ignores_sigterm_is_killed_after_its_grace() {
        let (mut process, _folder) = shell("trap '' TERM; echo ready; while :; do sleep 1; done");
        let start = Instant::now();
        while !process.log_tail(1).ends_with("ready") {
            assert!(start.elapsed() < Duration::from_secs(10));
            tokio::time::sleep(LOOK).await;
        }
        let status = process.stop(Duration::from_millis(50)).await.unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    }

    #[test]
    fn a_process_reads_its_own_usage() {
        let usage = usage(std::process::id()).unwrap();
        assert!(
            usage.rss > 500_000 && usage.peak_rss >= usage.rss && usage.anon < usage.rss,
            "{usage:?}"
        );
    }
}
