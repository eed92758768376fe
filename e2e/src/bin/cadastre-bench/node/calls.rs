//! Calls CNI plugins as a container runtime does: as a process with environment variables and a configuration on
//! standard input.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::kinds::Kind;

#[derive(Clone, Copy, Debug)]
pub enum Verb {
    /// Assigns addresses to a container
    Add,
    /// Releases the addresses of a container
    Del,
}

/// Calls the CNI plugin once. Returns an error if the plugin fails.
pub fn call(kind: &Kind, verb: Verb, container: &str) -> Result<()> {
    timed(kind, verb, container).map(|_| ())
}

/// Calls the CNI plugin once. Returns the time from the start of the process until it has ended and its output has been
/// read.
pub fn timed(kind: &Kind, verb: Verb, container: &str) -> Result<Duration> {
    let mut command = Command::new(&kind.program);
    command
        .args(&kind.args)
        .env_clear()
        .env(
            "CNI_COMMAND",
            match verb {
                Verb::Add => "ADD",
                Verb::Del => "DEL",
            },
        )
        .env("CNI_CONTAINERID", container)
        .env("CNI_IFNAME", "eth0")
        .env("CNI_NETNS", format!("/run/netns/{container}"))
        .env("CNI_PATH", "/opt/cni/bin")
        // CNI_ARGS names no pod. Otherwise, the agent would wait for the Pod object, which does not exist.
        .env("CNI_ARGS", "IgnoreUnknown=1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().context("cannot start the plugin")?;
    if let Some(mut stdin) = child.stdin.take() {
        // An error is ignored, because a program that does not read its input may have ended already.
        let _ = stdin.write_all(kind.config.as_bytes());
    }
    let output = child.wait_with_output()?;
    let took = start.elapsed();
    if !output.status.success() {
        bail!(
            "{} {verb:?} of {container} failed: {}{}",
            kind.name,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(took)
}

/// Runs `count` ADDs concurrently, then their DELs one by one. Returns how long all ADDs took from the first start to
/// the last end, and how long each ADD took.
pub fn at_once(kind: &Kind, count: usize) -> Result<(Duration, Vec<Duration>)> {
    let start = Instant::now();
    let (whole, times) = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..count)
            .map(|n| scope.spawn(move || timed(kind, Verb::Add, &format!("once-{n}"))))
            .collect();
        let joined: Vec<_> = calls
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        (start.elapsed(), joined)
    });
    let mut each = Vec::new();
    for time in times {
        each.push(time.map_err(|_| anyhow::anyhow!("a call panicked"))??);
    }
    for n in 0..count {
        call(kind, Verb::Del, &format!("once-{n}"))?;
    }
    Ok((whole, each))
}
