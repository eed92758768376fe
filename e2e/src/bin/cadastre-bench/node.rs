//! The node side: ADD and DEL as whole processes, as a runtime starts them, beside real host-local.
//!
//! All kinds take turns, call by call, so that whatever else the machine does falls on all of them.

mod calls;
mod kinds;

use std::time::Duration;

use anyhow::Result;
use cadastre_e2e::assets::{self, Program};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;

use crate::{progress, say};
use calls::{Verb, call, timed};
use kinds::{Kind, Place};

/// Pods that the node has already.
const PODS: [usize; 3] = [0, 110, 330];
/// Calls of each kind and verb.
const CALLS: usize = 300;
/// Calls at the same time.
const AT_ONCE: usize = 100;

/// Runs everything and prints its tables.
pub async fn run() -> Result<()> {
    tokio::task::spawn_blocking(|| assets::ensure(&[Program::HostLocal])).await??;
    let scratch = cadastre_e2e::scratch::Scratch::new()?;
    let place = Place::new(scratch.path())?;
    let mut figures = table(&[
        "pods",
        "kind",
        "ADD p50",
        "p99",
        "DEL p50",
        "p99",
        "ADD / floor",
    ]);
    let mut bursts = table(&["pods", "kind", "100 ADDs at once", "p50", "p99"]);
    for pods in PODS {
        progress(&format!("{pods} pods on the node"))?;
        let kinds = Kind::all(&place, pods)?;
        for kind in &kinds {
            for n in 0..pods {
                call(kind, Verb::Add, &format!("old-{n}"))?;
            }
        }
        let mut times = vec![(Vec::new(), Vec::new()); kinds.len()];
        for n in 0..CALLS {
            // Not always the same one after the same other one.
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
    say(&format!("{figures}\n\n{bursts}"))
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(head);
    table
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    times.get(last * percent / 100).copied().unwrap_or_default()
}

fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
