//! Measures how long an ADD or DEL takes from the start of its process to the end. Compares the times with those of the
//! reference plugin host-local. Also measures the agent's memory and processor time.
//!
//! The compared programs take turns, so that unrelated load on the host affects all of them.

mod agents;
mod calls;
mod kinds;

use std::time::Duration;

use anyhow::Result;
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::node_agent::in_memory;
use cadastre_e2e::process::Usage;
use cadastre_e2e::scratch::Scratch;
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;

use crate::{grown, mib, progress, say};
use agents::Agents;
use calls::{Verb, call, timed};
use kinds::Kind;

/// How many pods have addresses on the node before the measured calls, in ascending order.
const PODS: [usize; 3] = [0, 110, 330];
/// How many times each program is called with each verb.
const CALLS: usize = 200;
/// Number of concurrent ADDs in a burst.
const AT_ONCE: usize = 100;
/// How long an agent without work is observed, to measure its processor time.
const IDLE: Duration = Duration::from_secs(30);

pub async fn run() -> Result<()> {
    tokio::task::spawn_blocking(|| assets::ensure(&[Program::HostLocal])).await??;
    progress("starting a control plane and two agents")?;
    let scratch = Scratch::new()?;
    let agents = Agents::start().await?;
    let mut agent = agents.agent("quiet", &[]).await?;
    let busy = agents
        .agent("busy", &["--publish-interval", "0.02"])
        .await?;
    let run = in_memory()?;
    let kinds = Kind::all(scratch.path(), run.path(), &agent, &busy)?;

    let head = [
        "pods",
        "kind",
        "ADD p50",
        "p99",
        "DEL p50",
        "p99",
        "ADD / floor",
    ];
    let mut figures = table(&head);
    let mut bursts = table(&["pods", "kind", "100 ADDs at once", "p50", "p99"]);
    let mut there = 0;
    for pods in PODS {
        progress(&format!("{pods} pods on the node"))?;
        for kind in &kinds {
            for n in there..pods {
                call(kind, Verb::Add, &format!("old-{n}"))?;
            }
        }
        there = pods;
        turns(&kinds, pods, &mut figures)?;
        for kind in &kinds {
            let (whole, mut each) = calls::at_once(kind, AT_ONCE)?;
            bursts.add_row([
                pods.to_string(),
                kind.name.clone(),
                millis(whole),
                millis(percentile(&mut each, 50)),
                millis(percentile(&mut each, 99)),
            ]);
        }
    }
    say(&format!("{figures}\n\n{bursts}\n"))?;
    drop(busy);

    progress("API requests, memory, idle time, start")?;
    let quiet = kinds.iter().find(|it| it.name == kinds::AGENT);
    let before = agents.requests().await?;
    if let Some(kind) = quiet {
        for n in 0..CALLS {
            call(kind, Verb::Add, &format!("counted-{n}"))?;
            call(kind, Verb::Del, &format!("counted-{n}"))?;
        }
    }
    let requests = grown(&before, &agents.requests().await?);
    let (start, end) = (agent.usage()?, {
        tokio::time::sleep(IDLE).await;
        agent.usage()?
    });
    let idle = end.cpu.saturating_sub(start.cpu).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let mut full = agents.agent("full", &[]).await?;
    full.fill(1000).await?;
    let restarts = [
        full.restart().await?,
        full.restart().await?,
        full.restart().await?,
    ];
    let filled = full.usage()?;
    let mut facts = table(&["of an agent", ""]);
    facts.add_row(["API requests of all during 200 ADDs and DELs", &requests]);
    facts.add_row(["memory with 330 pods", &memory(&end)]);
    facts.add_row(["its most", &format!("{:.1} MiB", mib(end.peak_rss))]);
    facts.add_row(["memory with 1,000 pods", &memory(&filled)]);
    facts.add_row(["processor without work", &format!("{idle:.2} % of a core")]);
    facts.add_row([
        "kill -9 to ready with 1,000 pods",
        &restarts.map(millis).join(", "),
    ]);
    say(&facts.to_string())
}

/// Formats the resident memory and the anonymous part of it.
fn memory(usage: &Usage) -> String {
    format!("{:.1} MiB, {:.1} its own", mib(usage.rss), mib(usage.anon))
}

/// Measures [`CALLS`] ADDs and as many DELs of each of `kinds`, and adds a row for each kind to `figures`. The kinds
/// take turns.
fn turns(kinds: &[Kind], pods: usize, figures: &mut Table) -> Result<()> {
    let mut times = vec![(Vec::new(), Vec::new()); kinds.len()];
    for n in 0..CALLS {
        // Each round begins with another program, so that no program runs after the same program in every round.
        for i in (0..kinds.len()).map(|i| (i + n) % kinds.len()) {
            let id = format!("new-{n}");
            times[i].0.push(timed(&kinds[i], Verb::Add, &id)?);
            times[i].1.push(timed(&kinds[i], Verb::Del, &id)?);
        }
    }
    let floor = percentile(&mut times[0].0.clone(), 50);
    for (kind, (adds, dels)) in kinds.iter().zip(&mut times) {
        let ratio = percentile(adds, 50).as_secs_f64() / floor.as_secs_f64();
        figures.add_row([
            pods.to_string(),
            kind.name.clone(),
            millis(percentile(adds, 50)),
            millis(percentile(adds, 99)),
            millis(percentile(dels, 50)),
            millis(percentile(dels, 99)),
            format!("{ratio:.1}"),
        ]);
    }
    Ok(())
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(head);
    table
}

/// Sorts `times` and returns the percentile `percent`, for example the median if `percent` is 50.
pub(super) fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    times.get(last * percent / 100).copied().unwrap_or_default()
}

fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
