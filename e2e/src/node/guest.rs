//! A process inside a machine's namespaces, started from the host.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::Process;

/// The maximum time until nsenter has entered the namespaces and forked, which usually takes a millisecond.
const FORK_LIMIT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(2);

/// A running process of a machine, killed when dropped.
///
/// A process can enter a pid namespace only by being created there. So nsenter forks and is the parent of the guest.
/// nsenter ends when the guest ends, so the guest's pid is not reused while nsenter runs.
#[derive(Debug)]
pub struct Guest {
    outer: Process,
    pid: u32,
}

impl Guest {
    /// Starts `command`, which must run `nsenter` in such a way that it forks. The output is appended to `log`.
    pub(super) async fn spawn(name: &str, command: Command, log: &Path) -> Result<Self> {
        let mut outer = Process::spawn(name, command, log)?;
        let start = Instant::now();
        loop {
            // setpriv executes nsenter without a fork, so the first child of the process is the guest.
            if let Some(pid) = first_child(outer.pid()) {
                return Ok(Self { outer, pid });
            }
            outer.check_running()?;
            if start.elapsed() > FORK_LIMIT {
                bail!(
                    "{name} is not started after {FORK_LIMIT:?}; {}",
                    outer.log_tail(10)
                );
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The guest's process id, as seen from the host.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the path of the log and its last `lines` lines, for an error message.
    pub fn log_tail(&self, lines: usize) -> String {
        self.outer.log_tail(lines)
    }

    /// Sends a signal. Returns an error if the process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.outer.check_running()?;
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("no process id")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal process {pid:?}"))?;
        // nsenter stops itself when its child is stopped. So nsenter is continued at once.
        let _ = self.outer.signal(Signal::CONT);
        Ok(())
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub async fn kill(&mut self) -> Result<()> {
        if self.signal(Signal::KILL).is_ok() {
            let ended = self.outer.wait(Duration::from_secs(20)).await?;
            ended.context("nsenter does not end after its child was killed")?;
        }
        Ok(())
    }

    /// Returns an error with the end of the log if the process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        self.outer.check_running()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.signal(Signal::KILL);
    }
}

/// Returns the process id of a process's first child, if it has one.
pub(super) fn first_child(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}
