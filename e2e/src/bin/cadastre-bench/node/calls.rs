//! Calls of a plugin, as a runtime makes them: a process, its environment, its standard input.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::kinds::Kind;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub enum Verb {
    /// Addresses for a container
    Add,
    /// Its end
    Del,
}

/// One call; an error if it fails.
pub fn call(kind: &Kind, verb: Verb, container: &str) -> Result<()> {
    timed(kind, verb, container).map(|_| ())
}

/// One call, and the time from its start until it has ended and its answer is read.
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
        // No pod is named: for one that is not there the agent would wait a little.
        .env("CNI_ARGS", "IgnoreUnknown=1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().context("cannot start the plugin")?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read its input may have ended already.
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

/// So many ADDs at the same time, then their DELs one by one: the time of all, and of each.
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
