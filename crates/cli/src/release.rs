//! `kubectl cadastre release`: releases leaked addresses without waiting for the grace period.
//!
//! The command writes a request to the annotation `cadastre.dev/release` of the node's NodeSubnet. A request names an
//! address, and either the UID of its pod or the handle of a container that the user declares gone. The node's agent
//! releases the address if the node confirms that the pod's sandbox is gone. An address of an earlier sandbox of a
//! living pod needs no request, because the agent releases it as soon as that sandbox is gone. For such an address, the
//! command only waits.
//!
//! An address can also be in conflict with another host: the host answers for the address, so the node has set the
//! address aside. The request then names the time at which the conflict began. The node ends the conflict, and probes
//! the address again before assigning it.
//!
//! # Guarantees
//! - Proof from the API is always required. The command refuses an address of the newest sandbox of a living pod, an
//!   address that a pod reports, and an address that another pod has by now.
//! - With `--force` the user declares that the container is gone, for cases in which the node cannot find out. If the
//!   node finds that the container exists, the agent keeps the address.
//! - The write of a request fails if the NodeSubnet has changed since it was read. In that case the command reads the
//!   NodeSubnet again and repeats the write.
//! - Requests that are done or no longer apply are removed from the annotation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jiff::Timestamp;
use serde::Serialize;

use super::check::{CheckReport, Leak};
use super::inventory::{AddressInUse, Inventory, SubnetFact};
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::render::{self, Columns, Style, VerbReport};
use super::show::read_address;
use super::update::{POLL, update};
use super::{ExitVerdict, Flags};
use cadastre_api::{AddressEntry, RELEASE_ANNOTATION, Requests};
use cadastre_controller::cluster::objects::PodUid;
use cadastre_core::Addr;

/// Release leaked addresses now, without waiting for the grace period
///
/// Addresses in use are refused. An address is released only if the API shows that its pod is gone, has ended or has a
/// newer sandbox, and if the node also finds that the address's own sandbox is gone. If the node cannot find out, you
/// can declare the sandbox gone with --force. An address that was set aside because another host answers for it is
/// probed again before it is assigned. Exit code 2 if an address was refused or is still in use.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre release 10.244.3.7
  kubectl cadastre release --handle cbr0/0123456789ab
  kubectl cadastre check -o json > a.json; sleep 600; kubectl cadastre check -o json > b.json
  kubectl cadastre release --report a.json --report b.json")]
pub(crate) struct ReleaseArgs {
    /// Addresses to release
    #[arg(required_unless_present_any = ["handle", "report"])]
    addresses: Vec<String>,

    /// Release the addresses whose handle (network name and container id) is HANDLE or begins with it
    #[arg(long, value_name = "HANDLE", conflicts_with = "report")]
    handle: Option<String>,

    /// Release the leaked addresses in a report of `check -o json`; if repeated, only addresses that are in all reports
    #[arg(long, value_name = "FILE", conflicts_with = "addresses")]
    report: Vec<PathBuf>,

    /// Declare that the container is gone, for cases where its node cannot tell (no CRI socket, a network namespace
    /// that the agent does not see, no pod). First make sure that the container does not run and that nothing answers
    /// at the address. Also releases an address that was assigned less than a minute ago, or whose agent has not
    /// reported since the Node was created. An address is kept in any case if the node sees its container, or if it
    /// belongs to a living pod
    #[arg(long)]
    force: bool,

    /// Only show what would be requested
    #[arg(long)]
    dry_run: bool,

    /// Seconds to wait until the nodes have released the addresses; 0 does not wait
    #[arg(long, default_value_t = 120)]
    timeout: u32,
}

/// An address that was assigned more recently than this many seconds ago may be missing in its pod's status.
const YOUNG: i64 = 60;

/// The report of `release`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ReleaseReport {
    pub addresses: Vec<Released>,
}

/// The result for one address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Released {
    pub address: String,
    /// The node whose agent lists the address; empty if no agent lists it
    pub node: String,
    /// The pod to which the address was assigned, as `namespace/name`; may be empty
    pub pod: String,
    pub state: ReleaseState,
    /// The reason of the state, for users; may be empty
    pub why: String,
}

/// The state of a request to release an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum ReleaseState {
    /// The node has released the address.
    Freed,
    /// The node still has the address. If the release needs a request, the request is written.
    Asked,
    /// The request would be written without `--dry-run`.
    WouldAsk,
    /// The address must not be released, so no request was written.
    Refused,
}

/// An address for which the user can request the release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub addr: Addr,
    /// The node whose agent reports the address as in use or in conflict
    pub node: String,
    /// The pod to which the address was assigned, as `namespace/name`
    pub pod: String,
    /// The UID of the pod to which the address was assigned; empty if the address belongs to no pod
    pub uid: String,
    /// Whether the pod exists and has a newer sandbox, so that the node releases the address without a request
    pub superseded: bool,
    /// The handle of the container that the user declares gone (`--force`)
    pub container_gone: Option<String>,
    /// The time at which the conflict of the address with another host began, in milliseconds of Unix time; `None` if
    /// the address is in no conflict
    pub conflict: Option<i64>,
}

/// Returns the leaks that are in every report.
pub(crate) fn intersection(reports: &[CheckReport]) -> BTreeSet<Leak> {
    let leaks = |report: &CheckReport| -> BTreeSet<Leak> {
        let findings = report.findings.iter();
        findings.filter_map(|it| it.leak.clone()).collect()
    };
    let all = reports.iter().map(leaks);
    all.reduce(|common, other| &common & &other)
        .unwrap_or_default()
}

/// Returns what to request for an address. `Err` has the reason why the address must not be released. If the address is
/// from a report, `expected` is the leak to which the agent's entry must correspond.
pub(crate) fn judge(
    addr: Addr,
    expected: Option<&Leak>,
    force: bool,
    inventory: &Inventory,
) -> Result<Target, Released> {
    let refused = |entry: Option<&AddressInUse>, why: String| Released {
        address: addr.to_string(),
        node: entry.map_or(String::new(), |it| it.node.to_string()),
        pod: entry.map_or(String::new(), |it| it.allocation.pod.clone()),
        state: ReleaseState::Refused,
        why,
    };
    let all = inventory.in_use_at(addr);
    if all.is_empty()
        && let Some(target) = in_conflict(addr, inventory)
    {
        return Ok(target);
    }
    let is_expected = |entry: &&AddressInUse| {
        let uid = PodUid::read(&entry.allocation.pod_uid);
        expected.is_none_or(|leak| leak.node == *entry.node && PodUid::read(&leak.pod_uid) == uid)
    };
    let Some(entry) = all.iter().find(is_expected) else {
        let why = match all.first() {
            Some(other) => format!(
                "it is not what the report says: node {} has it assigned to pod {} now",
                other.node, other.allocation.pod
            ),
            None => "no node lists it as in use (the lists are published every few minutes): there is nothing to release".to_owned(),
        };
        return Err(refused(all.first(), why));
    };
    let AddressEntry {
        pod: name,
        pod_uid: uid,
        handle,
        since,
        superseded,
        ..
    } = &entry.allocation;
    let pod = inventory.pod_by_uid(uid).filter(|pod| !pod.finished);
    let age = since.map(|since| inventory.now.duration_since(since).as_secs());
    let why = if uid.is_empty() && (!force || handle.is_empty()) {
        no_pod(addr, entry)
    } else if let Some(pod) = pod.filter(|_| !superseded) {
        let on = pod.node.as_deref().unwrap_or("no node");
        format!("its pod {} lives on {on}: delete the pod instead", pod.name)
    } else if let Some(pod) = inventory.pods_at(addr).next() {
        format!("pod {} reports it", pod.name)
    } else if !force && age.is_some_and(|seconds| seconds < YOUNG) {
        "it was assigned less than a minute ago, and its pod may not report it yet: wait, or use --force".to_owned()
    } else if !force && !entry.current {
        format!(
            "the agent of {} has not reported since the Node was created again, so it may not act: check that it runs, or use --force",
            entry.node
        )
    } else {
        return Ok(Target {
            addr,
            node: entry.node.to_string(),
            pod: name.clone(),
            uid: uid.clone(),
            superseded: *superseded && pod.is_some(),
            container_gone: (force && !handle.is_empty()).then(|| handle.clone()),
            conflict: None,
        });
    };
    Err(refused(Some(entry), why))
}

/// Returns the request that ends the conflict of an address with another host, or `None` if the address is in no
/// conflict.
fn in_conflict(addr: Addr, inventory: &Inventory) -> Option<Target> {
    let mut subnets = inventory.subnets.values();
    let found = subnets.find_map(|it| Some((it, it.conflict_at(addr)?)));
    found.map(|(subnet, conflict)| Target {
        addr,
        node: subnet.name.to_string(),
        pod: String::new(),
        uid: String::new(),
        superseded: false,
        container_gone: None,
        conflict: Some(conflict.since_ms),
    })
}

/// Returns the text that tells the user what to check before `--force`, if the address belongs to no pod.
fn no_pod(addr: Addr, entry: &AddressInUse) -> String {
    let id = entry
        .allocation
        .handle
        .split_once('/')
        .map_or("", |it| it.1);
    format!(
        "it belongs to no pod, so only node {} can prove that its container is gone, and it has not. Check on that node that container {id} does not run (crictl ps -a, podman ps -a, ip netns) and that nothing answers at {addr} (ping, ip neigh); then use --force",
        entry.node
    )
}

/// Returns the requests to write to the annotation: the present requests that still apply, and new requests for the
/// targets in `more` that the agent still reports ([`Target::is_assigned`]).
pub(crate) fn wanted(subnet: &SubnetFact, more: &[Target]) -> Requests {
    let mut requests = subnet.requests.clone();
    for target in more.iter().filter(|it| it.is_assigned(subnet)) {
        if !target.uid.is_empty() && !target.superseded {
            requests.release.insert((target.addr, target.uid.clone()));
        }
        let handle = target.container_gone.clone();
        requests
            .container_gone
            .extend(handle.map(|it| (target.addr, it)));
        let conflict = target.conflict.map(|since| (target.addr, since));
        requests.conflict_over.extend(conflict);
    }
    requests.conflict_over.retain(|(addr, since)| {
        let conflict = subnet.conflict_at(*addr);
        conflict.is_some_and(|it| it.since_ms == *since)
    });
    requests
        .release
        .retain(|(addr, uid)| subnet.has_pod(*addr, uid));
    requests
        .container_gone
        .retain(|(addr, handle)| subnet.has_handle(*addr, handle));
    requests
}

impl Target {
    /// Returns whether the agent's list still has the address for the same pod. For an address in conflict, returns
    /// whether the agent still reports the same conflict.
    fn is_assigned(&self, subnet: &SubnetFact) -> bool {
        if let Some(since) = self.conflict {
            let conflict = subnet.conflict_at(self.addr);
            return conflict.is_some_and(|it| it.since_ms == since);
        }
        subnet.has_pod(self.addr, &self.uid)
    }

    fn result(&self, state: ReleaseState, why: String) -> Released {
        Released {
            address: self.addr.to_string(),
            node: self.node.clone(),
            pod: self.pod.clone(),
            state,
            why,
        }
    }
}

/// Explains why a node still has an address although its release was requested.
fn remains(target: &Target, subnet: &SubnetFact) -> String {
    let node = &target.node;
    let address = target.addr.to_string();
    let candidates = subnet.spec.as_ref().map(|spec| spec.leak_candidates.iter());
    if target.conflict.is_some() {
        format!(
            "the agent of {node} has not ended the conflict yet: check that it runs. The request stays"
        )
    } else if target.container_gone.is_some() {
        format!(
            "the agent of {node} keeps it: it sees the container (crictl pods, its network namespace), or a new list still has the pod; or the agent is down. The request stays"
        )
    } else if target.superseded {
        format!(
            "it belongs to an earlier sandbox of its pod, which still exists on its node (crictl pods on {node}), or the agent is down; it is released once that is resolved. If the agent can see neither the runtime (--cri-socket) nor /var/run/netns, make sure that the sandbox is gone and use --force"
        )
    } else if candidates.is_ok_and(|mut it| it.any(|candidate| candidate.address == address)) {
        format!(
            "the agent of {node} keeps it: the pod's sandbox is still there (crictl pods on {node}), or the agent is down; it is released once that is resolved. If the agent can see neither the runtime (--cri-socket) nor /var/run/netns, make sure that the sandbox is gone and use --force"
        )
    } else {
        "the controller has not passed the request on: check that one leads (kubectl get lease -A | grep cadastre); the request stays".to_owned()
    }
}

/// Waits until the nodes have released the addresses, for at most the time `limit`. Returns the result for each target.
async fn wait(
    targets: &[Target],
    limit: Duration,
    reach: &ApiReach,
) -> anyhow::Result<Vec<Released>> {
    let start = Instant::now();
    let nodes: BTreeSet<&str> = targets.iter().map(|target| target.node.as_str()).collect();
    loop {
        let mut subnets: BTreeMap<&str, SubnetFact> = BTreeMap::new();
        for node in &nodes {
            let list = reach.addresses(node).await?;
            let subnet = reach.subnet(node).await?;
            let subnet = subnet.map(|subnet| SubnetFact::read(&subnet, list.as_ref()));
            subnets.extend(subnet.map(|it| (*node, it)));
        }
        let result = |target: &Target| {
            let subnet = subnets.get(&*target.node);
            match subnet.filter(|it| target.is_assigned(it)) {
                Some(subnet) => target.result(ReleaseState::Asked, remains(target, subnet)),
                None => target.result(ReleaseState::Freed, String::new()),
            }
        };
        let results: Vec<Released> = targets.iter().map(result).collect();
        let is_done = results.iter().all(|it| it.state == ReleaseState::Freed);
        if is_done || start.elapsed() >= limit {
            return Ok(results);
        }
        tokio::time::sleep(POLL).await;
    }
}

fn read_reports(paths: &[PathBuf]) -> anyhow::Result<Vec<CheckReport>> {
    let read = |path: &PathBuf| {
        let shown = path.display();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read"))?;
        serde_json::from_str(&text).with_context(|| {
            format!("{shown} is not a report: create one with kubectl cadastre check -o json")
        })
    };
    paths.iter().map(read).collect()
}

/// Runs `release`. Returns [`ExitVerdict::Findings`] if an address was refused or is still in use.
pub(crate) async fn exec(
    args: &ReleaseArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let reports = read_reports(&args.report)?;
    let leaks = intersection(&reports);
    // NodeSubnets are listed before pods, and no list comes from a cache. So a pod that is missing in the list of pods
    // is gone.
    let inventory = reach.inventory(WantedKinds::Pods).await?;
    let mut given: Vec<(Addr, Option<&Leak>)> = Vec::new();
    for text in &args.addresses {
        given.push((read_address(text)?, None));
    }
    for leak in &leaks {
        given.push((read_address(&leak.address)?, Some(leak)));
    }
    if let Some(handle) = &args.handle {
        let report = super::show::handle(handle, &inventory)?;
        given.extend(report.allocations.iter().map(|row| (row.address, None)));
    }
    let mut done = ReleaseReport::default();
    let mut targets = Vec::new();
    for (addr, expected) in given {
        match judge(addr, expected, args.force, &inventory) {
            Ok(target) => targets.push(target),
            Err(refused) => done.addresses.push(refused),
        }
    }
    targets.sort();
    targets.dedup();
    if args.dry_run {
        let would = |it: &Target| it.result(ReleaseState::WouldAsk, String::new());
        done.addresses.extend(targets.iter().map(would));
        return finish(&done, flags);
    }
    let mut by_node: BTreeMap<&str, Vec<Target>> = BTreeMap::new();
    let needs_request = |it: &&Target| !it.superseded || it.container_gone.is_some();
    for target in targets.iter().filter(needs_request) {
        let of_node = by_node.entry(&target.node).or_default();
        of_node.push(target.clone());
    }
    for (node, targets) in &by_node {
        update(node, RELEASE_ANNOTATION, reach, |it| wanted(it, targets)).await?;
    }
    let limit = Duration::from_secs(args.timeout.into());
    done.addresses.extend(wait(&targets, limit, reach).await?);
    // The waiting is over, so requests that are done are removed from the annotations.
    for node in by_node.keys() {
        if reach.subnet(node).await?.is_some() {
            update(node, RELEASE_ANNOTATION, reach, |it| wanted(it, &[])).await?;
        }
    }
    finish(&done, flags)
}

fn finish(report: &ReleaseReport, flags: &Flags) -> anyhow::Result<ExitVerdict> {
    render::print(report, flags.output, Timestamp::now())?;
    let is_undone = |it: &Released| matches!(it.state, ReleaseState::Refused | ReleaseState::Asked);
    Ok(ExitVerdict::of(report.addresses.iter().any(is_undone)))
}

impl VerbReport for ReleaseReport {
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
