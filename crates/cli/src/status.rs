//! `kubectl cadastre status`: the health of each part of Cadastre, one line for each.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::plan::whatif;
use super::reach::ApiReach;
use super::render::{self, Columns, Style, VerbReport, age, count, some};
use super::running::AgentPod;
use super::{ExitVerdict, Flags};
use cadastre_controller::figures::figures;
use cadastre_controller::pools::PoolState;
use cadastre_core::inert;

/// Show the health of Cadastre, one line for each part
///
/// Exit code 0 if all is well, 2 if not. Use `check` to check every address.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre status
  kubectl cadastre status --wait 120
  kubectl cadastre status -o json")]
pub(crate) struct StatusArgs {
    /// Retry until all is well, for at most this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=3600))]
    wait: u16,
}

/// The time between two reads of the objects with `--wait`.
const PAUSE: Duration = Duration::from_secs(2);

/// Whether a part of Cadastre works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Health {
    /// The part works.
    Ok,
    /// The part does not exist, perhaps on purpose.
    None,
    /// The state is unknown, perhaps because the user has no right to read the objects.
    Unknown,
    /// The part does not work, and an administrator has to act.
    Bad,
}

/// A part of Cadastre, and whether it works.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PartStatus {
    pub part: &'static str,
    pub health: Health,
    pub says: String,
}

/// The report of `status`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StatusReport {
    pub parts: Vec<PartStatus>,
}

/// Finds out whether each part works.
pub(crate) fn status(inventory: &Inventory) -> StatusReport {
    let part = |part, (health, says)| PartStatus { part, health, says };
    StatusReport {
        parts: vec![
            part("leader", leader(inventory)),
            part("controllers", controllers(inventory)),
            part("agents", agents(inventory)),
            part("pools", pools(inventory)),
            part("nodes", nodes(inventory)),
        ],
    }
}

fn leader(inventory: &Inventory) -> (Health, String) {
    let lease = match &inventory.running.lease {
        Err(why) => return (Health::Unknown, why.clone()),
        Ok(None) => return (Health::Bad, "no controller has ever led here".to_owned()),
        Ok(Some(lease)) => lease,
    };
    let ago = age(lease.renewed, inventory.now);
    match (lease.holder.as_str(), lease.is_stale(inventory.now)) {
        ("", _) => (Health::Bad, "no controller leads".to_owned()),
        (holder, true) => {
            let says = format!("{holder} led, but last renewed its Lease {ago} ago");
            (Health::Bad, says)
        }
        (holder, false) => {
            let says = format!("{holder} leads, renewed its Lease {ago} ago");
            (Health::Ok, says)
        }
    }
}

fn controllers(inventory: &Inventory) -> (Health, String) {
    if let Err(why) = &inventory.running.parts {
        return (Health::Unknown, why.clone());
    }
    let all: Vec<bool> = inventory.running.pods(false).map(|it| it.ready).collect();
    let ready = all.iter().filter(|it| **it).count();
    match (all.len(), ready) {
        (0, _) => (
            Health::Unknown,
            "none runs as a pod of the chart".to_owned(),
        ),
        (all, ready) if all == ready => (Health::Ok, format!("{ready} of {all} are ready")),
        (all, ready) => (Health::Bad, format!("{ready} of {all} are ready")),
    }
}

fn agents(inventory: &Inventory) -> (Health, String) {
    if let Err(why) = &inventory.running.parts {
        return (Health::Unknown, why.clone());
    }
    let (mut health, mut says) = agent_pods(inventory);
    let others = inventory.served_by_others();
    let others: Vec<&str> = others.into_iter().map(|(node, _)| node).collect();
    if !others.is_empty() {
        health = Health::Bad;
        let others = some(&others, 4);
        let _ = write!(
            says,
            "; another network has the pods of {others} (see kubectl cadastre check)"
        );
    }
    (health, says)
}

fn agent_pods(inventory: &Inventory) -> (Health, String) {
    let agents = inventory.running.agents(inventory.now);
    let nodes = || inventory.cache.nodes.iter();
    let reported = nodes().filter(|node| inventory.subnet_of(node).is_some());
    if agents.is_empty() {
        return match reported.count() {
            0 => (
                Health::None,
                "there are none (mode podCIDRs needs none)".to_owned(),
            ),
            of => (
                Health::Unknown,
                format!(
                    "those of {} have reported, but none is a pod of the chart now",
                    count(of, "node")
                ),
            ),
        };
    }
    let is = |node: &str| agents.get(node).copied().unwrap_or(AgentPod::None);
    let without: Vec<&str> = nodes()
        .map(|node| &*node.name)
        .filter(|name| is(name) != AgentPod::Ready)
        .collect();
    let all = inventory.cache.nodes.len();
    let ready = all - without.len();
    let mut says = format!("{ready} of {} have a ready one", count(all, "node"));
    if !without.is_empty() {
        let _ = write!(says, "; not {}", some(&without, 4));
    }
    let is_well = without.is_empty();
    (if is_well { Health::Ok } else { Health::Bad }, says)
}

fn pools(inventory: &Inventory) -> (Health, String) {
    let all: Vec<&PoolState> = inventory.registry.pools.iter().collect();
    if all.is_empty() {
        let says = "there is none: no pod gets an address";
        return (Health::Bad, says.to_owned());
    }
    let named = |which: &dyn Fn(&PoolState) -> bool| -> Vec<&str> {
        let some = all.iter().filter(|it| which(it));
        some.map(|it| &*it.name).collect()
    };
    let idle = named(&|it| !it.is_serving());
    let full = named(&|it| it.is_serving() && is_full(it, inventory));
    let nobody = named(&|it| it.is_serving() && it.selects_none(&inventory.cache));
    let mut says = format!("{} of {} serve", all.len() - idle.len(), all.len());
    for (what, which) in [
        ("not serving", &idle),
        ("exhausted", &full),
        ("for no node", &nobody),
    ] {
        if !which.is_empty() {
            let _ = write!(says, "; {what}: {}", some(which, 4));
        }
    }
    let bad = !full.is_empty() || idle.len() == all.len();
    (if bad { Health::Bad } else { Health::Ok }, says)
}

fn is_full(state: &PoolState, inventory: &Inventory) -> bool {
    let mut families = state.space.families();
    families.any(|family| figures(state, family, &inventory.registry).free == 0)
}

fn nodes(inventory: &Inventory) -> (Health, String) {
    let outcome = whatif::simulate_now(inventory);
    let waiting = Vec::from_iter(outcome.waits());
    let all = count(inventory.cache.nodes.len(), "node");
    if waiting.is_empty() {
        return (Health::Ok, format!("{all}, none waits for addresses"));
    }
    let (number, names) = (waiting.len(), some(&waiting, 4));
    let says = format!("{all}, {number} wait for addresses: {names}");
    (Health::Bad, says)
}

impl VerbReport for StatusReport {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["PART", "HEALTH", "DETAILS"]);
        for part in &self.parts {
            let health = format!("{:?}", part.health).to_lowercase();
            table.row([part.part.to_owned(), health, part.says.clone()]);
        }
        table.text(style, "")
    }
}

impl StatusReport {
    /// Returns the details of all parts that do not work, in one line. Returns `None` if there are none.
    fn bad(&self) -> Option<String> {
        let bad = self.parts.iter().filter(|it| it.health == Health::Bad);
        let bad: Vec<String> = bad.map(|it| format!("{}: {}", it.part, it.says)).collect();
        (!bad.is_empty()).then(|| bad.join("; "))
    }
}

/// Runs `status`. Returns [`ExitVerdict::Findings`] if a part does not work.
pub(crate) async fn exec(
    args: &StatusArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let until = Instant::now() + Duration::from_secs(args.wait.into());
    let mut printed = None;
    let (report, inventory) = loop {
        let listed = reach.inventory(WantedKinds::Pods).await;
        let listed = listed.map(|inventory| (status(&inventory), inventory));
        let bad = match &listed {
            Ok((report, _)) => report.bad(),
            Err(error) => Some(format!("{error:#}")),
        };
        if bad.is_none() || Instant::now() + PAUSE > until {
            break listed?;
        }
        if bad != printed {
            eprintln!(
                "waiting: {}",
                inert::lines(bad.as_deref().unwrap_or_default())
            );
            printed = bad;
        }
        sleep(PAUSE).await;
    };
    render::print(&report, flags.output, inventory.now)?;
    Ok(ExitVerdict::of(report.bad().is_some()))
}
