//! `kubectl cadastre release`: frees leaked addresses without waiting for the grace period.
//!
//! What is written is a request: the annotation `cadastre.dev/release` of the node's NodeSubnet, an
//! address with the UID of the pod that had it, or with the handle of a container that the caller says is
//! gone. The node's agent frees the address if the node, too,
//! says that the pod's sandbox is gone. What an earlier sandbox of a living pod had is waited for: its node
//! frees it as soon as that sandbox is gone, and needs nobody to ask.
//!
//! # Guarantees
//! - The API's word is never waived: an address of a living pod's newest sandbox, that a pod reports, or that
//!   another pod has by now is refused.
//! - `--force` is the caller's word that the container is gone, for where the node cannot tell. What the node
//!   sees is there is kept by the agent.
//! - The request is written onto the version of the NodeSubnet that was judged.
//! - What is done is taken out of the annotation again, and so is what applies no more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use serde::Serialize;

use super::check::{CheckReport, Leak};
use super::inventory::{Held, Inventory, SubnetFact, is_held_under};
use super::lists::Wanted;
use super::reach::{Reach, Written};
use super::render::{self, Columns, Report, Style};
use super::show::read_address;
use super::{Flags, Verdict};
use cadastre_api::{RELEASE_ANNOTATION, Requests};
use cadastre_controller::cluster::seen::PodUid;
use cadastre_core::Addr;

/// Free leaked addresses now, without waiting for the grace period
///
/// Refuses what lives: an address is freed only if its pod is gone or has ended by the API, or has a newer
/// sandbox, and its own sandbox is gone by its node, or by your word (--force) where the node cannot tell.
/// Exit code 2 where something was refused or remains.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre release 10.244.3.7
  kubectl cadastre release --handle cbr0/0123456789ab
  kubectl cadastre check -o json > a.json; sleep 600; kubectl cadastre check -o json > b.json
  kubectl cadastre release --report a.json --report b.json")]
pub struct Args {
    /// Addresses
    #[arg(required_unless_present_any = ["handle", "report"])]
    addresses: Vec<String>,

    /// What was given under this handle (network name and container id), or its beginning
    #[arg(long, value_name = "HANDLE", conflicts_with = "report")]
    handle: Option<String>,

    /// The leaked addresses of a report of `check -o json`; of several, what all of them name
    #[arg(long, value_name = "FILE", conflicts_with = "addresses")]
    report: Vec<PathBuf>,

    /// Say that the container which had it is gone, where its node cannot tell (no CRI socket, a network
    /// namespace that the agent does not see, no pod). See first that it does not run and that nothing
    /// answers at the address. Also passes over warnings: given less than a minute ago, a silent agent. An
    /// address whose container the node sees, or of a living pod, is kept all the same
    #[arg(long)]
    force: bool,

    /// Tell what would be asked for, and ask nothing
    #[arg(long)]
    dry_run: bool,

    /// Seconds to wait until the nodes have let go; 0 does not wait
    #[arg(long, default_value_t = 120)]
    timeout: u32,
}

/// Younger than this it may still be on its way to its pod.
const YOUNG: i64 = 60;
/// How often a NodeSubnet is read again that somebody else has written to.
const TRIES: usize = 8;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// What became of each address.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ReleaseReport {
    /// An entry an address
    pub addresses: Vec<Released>,
}

/// What became of an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Released {
    /// The address
    pub address: String,
    /// The node that holds it
    pub node: String,
    /// `namespace/name` of the pod that had it
    pub pod: String,
    /// How it ended
    pub state: State,
    /// Why
    pub why: String,
}

/// How the release of an address ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    /// The node has let go of it.
    Freed,
    /// The node was asked and still has it.
    Asked,
    /// It would be asked for.
    WouldAsk,
    /// It was not asked for.
    Refused,
}

/// An address to ask for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The address
    pub addr: Addr,
    /// The node
    pub node: String,
    /// The pod's name
    pub pod: String,
    /// The pod's UID
    pub uid: String,
    /// The pod lives and has a newer sandbox: the node frees it without being asked
    pub superseded: bool,
    /// Network and container id, where the caller says that the container is gone
    pub container_gone: Option<String>,
}

/// The leaks that all reports name.
pub(crate) fn intersection(reports: &[CheckReport]) -> Vec<Leak> {
    let leaks = |report: &CheckReport| -> BTreeSet<Leak> {
        report
            .findings
            .iter()
            .filter_map(|it| it.leak.clone())
            .collect()
    };
    let mut all = reports.iter().map(leaks);
    let first = all.next().unwrap_or_default();
    let common = all.fold(first, |common, other| {
        common.intersection(&other).cloned().collect()
    });
    common.into_iter().collect()
}

/// Judges one address: what is to be asked, or why not. `expected` is what a report says of it.
pub fn judge(
    addr: Addr,
    expected: Option<&Leak>,
    force: bool,
    inventory: &Inventory,
) -> Result<Target, Released> {
    let refused = |held: Option<&Held>, why: String| Released {
        address: addr.to_string(),
        node: held.map_or(String::new(), |held| held.node.to_string()),
        pod: held.map_or(String::new(), |held| held.allocation.pod.clone()),
        state: State::Refused,
        why,
    };
    let all: Vec<&Held> = inventory.held_at(addr).iter().collect();
    let of_report = |held: &&&Held| {
        expected.is_none_or(|leak| {
            leak.node == *held.node
                && PodUid::read(&leak.pod_uid) == PodUid::read(&held.allocation.pod_uid)
        })
    };
    let Some(held) = all.iter().find(of_report) else {
        let why = match all.first() {
            Some(other) => format!(
                "it is not what the report says: node {} holds it for pod {} now",
                other.node, other.allocation.pod
            ),
            None => "no node holds it by the nodes' lists, which are written every few minutes: there is nothing to release".to_owned(),
        };
        return Err(refused(all.first().copied(), why));
    };
    let held: &Held = held;
    let uid = &held.allocation.pod_uid;
    let handle = &held.allocation.handle;
    if uid.is_empty() && (!force || handle.is_empty()) {
        return Err(refused(Some(held), no_pod(addr, held)));
    }
    let superseded = held.allocation.superseded;
    let pod = inventory.pod_by_uid(uid).filter(|pod| !pod.finished);
    if let Some(pod) = pod.filter(|_| !superseded) {
        let on = pod.node.as_deref().unwrap_or("no node");
        return Err(refused(
            Some(held),
            format!("its pod {} lives on {on}: delete the pod instead", pod.name),
        ));
    }
    if let Some(pod) = inventory.pods_at(addr).next() {
        return Err(refused(Some(held), format!("pod {} reports it", pod.name)));
    }
    let since = held.allocation.since;
    let young = since.is_some_and(|since| inventory.now.duration_since(since).as_secs() < YOUNG);
    if young && !force {
        return Err(refused(
            Some(held),
            "it was given less than a minute ago, its pod may not show yet: wait, or give --force"
                .to_owned(),
        ));
    }
    if !held.current && !force {
        return Err(refused(
            Some(held),
            format!(
                "the agent of {} has said nothing since the Node was made anew, so it may not act: see that it runs, or give --force",
                held.node
            ),
        ));
    }
    Ok(Target {
        addr,
        node: held.node.to_string(),
        pod: held.allocation.pod.clone(),
        uid: uid.clone(),
        superseded: superseded && pod.is_some(),
        container_gone: (force && !handle.is_empty()).then(|| handle.clone()),
    })
}

/// What to look at before saying that a container which is no pod's is gone.
fn no_pod(addr: Addr, held: &Held) -> String {
    let id = held.allocation.handle.split_once('/').map_or("", |it| it.1);
    format!(
        "it belongs to no pod, so only node {} can say that its container is gone, and it has not. See on that node that container {id} does not run (crictl ps -a, podman ps -a, ip netns) and that nothing answers at {addr} (ping, ip neigh); then give --force",
        held.node
    )
}

/// Whether an entry of the annotation is still about something that the node holds.
fn applies(subnet: &SubnetFact, entry: &(Addr, String)) -> bool {
    let mut held = subnet.allocations.iter();
    held.any(|(addr, it)| *addr == entry.0 && PodUid::read(&it.pod_uid) == PodUid::read(&entry.1))
}

/// What the annotation should be: what still applies, and what is asked for now.
pub fn wanted(subnet: &SubnetFact, more: &[Target]) -> Requests {
    let mut requests = subnet.requests.clone();
    requests.release.retain(|entry| applies(subnet, entry));
    let is_held = |entry: &(Addr, String)| is_held_under(subnet, entry);
    requests.container_gone.retain(is_held);
    for target in more {
        if !target.uid.is_empty() && !target.superseded {
            requests.release.insert((target.addr, target.uid.clone()));
        }
        let handle = target.container_gone.iter();
        let entries = handle.map(|handle| (target.addr, handle.clone()));
        requests.container_gone.extend(entries.filter(is_held));
    }
    requests
}

/// Writes the annotation of a node, again where somebody else was faster.
async fn ask(node: &str, targets: &[Target], reach: &Reach) -> anyhow::Result<()> {
    for _ in 0..TRIES {
        let subnet = reach.subnet(node).await?;
        let subnet =
            subnet.with_context(|| format!("NodeSubnet {node} is gone: its node has left"))?;
        let subnet = SubnetFact::read(&subnet, reach.addresses(node).await?.as_ref());
        let still: Vec<Target> = targets
            .iter()
            .filter(|target| applies(&subnet, &(target.addr, target.uid.clone())))
            .cloned()
            .collect();
        let wanted = wanted(&subnet, &still);
        if wanted == subnet.requests {
            return Ok(());
        }
        let text = wanted.release_text();
        let written = reach
            .annotate(node, &subnet.version, RELEASE_ANNOTATION, text.as_deref())
            .await?;
        if written == Written::Done {
            return Ok(());
        }
    }
    bail!("NodeSubnet {node} changes too fast to be written to: try again")
}

/// Why a node still has an address that it was asked for.
fn remains(target: &Target, subnet: &SubnetFact) -> String {
    if target.container_gone.is_some() {
        return format!(
            "the agent of {} keeps it: it sees the container (crictl pods, its network namespace) or, by a fresh list, the pod; or the agent is down. The request stays",
            target.node
        );
    }
    if target.superseded {
        return format!(
            "an earlier sandbox of its pod had it, and that is still there by its node (crictl pods on {}), or the agent is down; it goes by itself then. If the agent can see neither the runtime (--cri-socket) nor /var/run/netns, see that the sandbox is gone and give --force",
            target.node
        );
    }
    let suspects = subnet.spec.as_ref().map(|spec| spec.suspects.as_slice());
    let address = target.addr.to_string();
    let named = suspects.is_ok_and(|it| it.iter().any(|suspect| suspect.address == address));
    if named {
        format!(
            "the agent of {} keeps it: the pod's sandbox is still there (crictl pods on {}), or the agent is down; it goes by itself then. If the agent can see neither the runtime (--cri-socket) nor /var/run/netns, see that the sandbox is gone and give --force",
            target.node, target.node
        )
    } else {
        "the controller has not passed it on: see that one leads (kubectl get lease -A | grep cadastre); the request stays".to_owned()
    }
}

/// Waits until the nodes have let go, or the time is over; tells what remains.
async fn wait(
    targets: &[Target],
    limit: Duration,
    reach: &Reach,
) -> anyhow::Result<BTreeMap<Target, Option<String>>> {
    let start = Instant::now();
    let nodes: BTreeSet<&str> = targets.iter().map(|target| target.node.as_str()).collect();
    loop {
        let mut ends: BTreeMap<Target, Option<String>> = BTreeMap::new();
        for node in &nodes {
            let list = reach.addresses(node).await?;
            let subnet = reach.subnet(node).await?;
            let subnet = subnet.map(|subnet| SubnetFact::read(&subnet, list.as_ref()));
            for target in targets.iter().filter(|target| target.node == *node) {
                let left = subnet
                    .as_ref()
                    .filter(|it| applies(it, &(target.addr, target.uid.clone())));
                ends.insert(target.clone(), left.map(|subnet| remains(target, subnet)));
            }
        }
        if ends.values().all(Option::is_none) || start.elapsed() >= limit {
            return Ok(ends);
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn read_reports(paths: &[PathBuf]) -> anyhow::Result<Vec<CheckReport>> {
    let read = |path: &PathBuf| {
        let shown = path.display();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read"))?;
        serde_json::from_str(&text).with_context(|| {
            format!("{shown} is no report: make one with kubectl cadastre check -o json")
        })
    };
    paths.iter().map(read).collect()
}

/// Runs the verb.
pub async fn exec(args: &Args, flags: &Flags, reach: &Reach) -> anyhow::Result<Verdict> {
    let reports = read_reports(&args.report)?;
    let leaks = intersection(&reports);
    // Pods are listed after NodeSubnets, consistently: a pod that is not in the list is gone.
    let inventory = reach.inventory(Wanted::PODS).await?;
    let mut wanted: Vec<(Addr, Option<&Leak>)> = Vec::new();
    for text in &args.addresses {
        wanted.push((read_address(text)?, None));
    }
    for leak in &leaks {
        wanted.push((read_address(&leak.address)?, Some(leak)));
    }
    if let Some(handle) = &args.handle {
        let report = super::show::handle(handle, &inventory)?;
        wanted.extend(report.allocations.iter().map(|row| (row.address, None)));
    }
    let mut done = ReleaseReport::default();
    let mut targets = Vec::new();
    for (addr, expected) in wanted {
        match judge(addr, expected, args.force, &inventory) {
            Ok(target) => targets.push(target),
            Err(refused) => done.addresses.push(refused),
        }
    }
    targets.sort();
    targets.dedup();
    let ended = |target: &Target, state, why: String| Released {
        address: target.addr.to_string(),
        node: target.node.clone(),
        pod: target.pod.clone(),
        state,
        why,
    };
    if args.dry_run {
        let would = targets
            .iter()
            .map(|it| ended(it, State::WouldAsk, String::new()));
        done.addresses.extend(would);
        return finish(&done, flags);
    }
    let mut by_node: BTreeMap<&str, Vec<Target>> = BTreeMap::new();
    let to_ask = |it: &&Target| !it.superseded || it.container_gone.is_some();
    for target in targets.iter().filter(to_ask) {
        by_node
            .entry(&target.node)
            .or_default()
            .push(target.clone());
    }
    for (node, targets) in &by_node {
        ask(node, targets, reach).await?;
    }
    let limit = Duration::from_secs(args.timeout.into());
    for (target, left) in wait(&targets, limit, reach).await? {
        done.addresses.push(match left {
            None => ended(&target, State::Freed, String::new()),
            Some(why) => ended(&target, State::Asked, why),
        });
    }
    // What is done is asked for no longer.
    for node in by_node.keys() {
        if reach.subnet(node).await?.is_some() {
            ask(node, &[], reach).await?;
        }
    }
    finish(&done, flags)
}

fn finish(report: &ReleaseReport, flags: &Flags) -> anyhow::Result<Verdict> {
    render::print(report, flags.output, Timestamp::now())?;
    let well = |it: &Released| matches!(it.state, State::Freed | State::WouldAsk);
    Ok(if report.addresses.iter().all(well) {
        Verdict::Clean
    } else {
        Verdict::Findings
    })
}

impl Report for ReleaseReport {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["ADDRESS", "STATE", "NODE", "POD", "WHY"]);
        for it in &self.addresses {
            table.row([
                it.address.clone(),
                format!("{:?}", it.state),
                it.node.clone(),
                it.pod.clone(),
                it.why.clone(),
            ]);
        }
        table.text(style, "There is nothing to release.")
    }
}
