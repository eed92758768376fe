//! Records the podCIDRs of every revision of every node, in the API server's order.
//!
//! The recording is an independent check of the first invariant, that two live nodes never have overlapping ranges. The
//! recording uses a watch and does not poll. So the recording contains even violations that last only for a
//! millisecond.
//!
//! # Guarantees
//! - Everything that happens after [`History::start`] has returned is recorded.
//! - After an outage of the API server, the watch resumes where it stopped. If the server no longer has that revision,
//!   the nodes are listed instead. Nodes that are missing from the list count as deleted.
//!
//! # Caveats
//! - If the nodes are listed after an outage, the states between the outage and the list are unknown. [`History::gaps`]
//!   counts such lists. If a list lacks a node, the deletion of this node is recorded before the changes that the list
//!   contains. So if a range moved from a deleted node to another node while the state was unknown, this is not
//!   reported as a duplicate.
//! - A range counts as free as soon as its node is deleted. Quarantine is not checked here.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use cadastre_api::TERM_ANNOTATION;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node;
use kube::api::ObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The fields of a Node that are checked. Decoding a full Node would cost several times as much.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = Node)]
struct Seen {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: SeenSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SeenSpec {
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

/// One revision of one node, as the API server stored it.
#[derive(Clone, Debug)]
pub struct Revision {
    /// When the recorder received this revision.
    pub at: Instant,
    /// The node's UID, which differs from the UIDs of all other nodes with the same name.
    pub uid: String,
    /// The node's name. A later node can have the same name.
    pub name: String,
    /// The podCIDRs as written in the API; empty if the node has none.
    pub pod_cidrs: Vec<String>,
    /// The annotation `cadastre.dev/term`: the id of the leader's term that touched the Node, so that writes of earlier
    /// leaders fail.
    pub term: Option<String>,
    /// Whether this is the last revision, recorded because the node was deleted.
    pub deleted: bool,
}

/// Two live nodes with overlapping ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Duplicate {
    /// Name, UID and range of the node that got its range earlier than the other node.
    pub first: (String, String, String),
    /// Name, UID and range of the node whose range overlaps the range of `first`.
    pub second: (String, String, String),
}

/// A running recording; it stops when this value is dropped.
#[derive(Debug)]
pub struct History {
    log: Arc<Mutex<Log>>,
    progress: watch::Receiver<Progress>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    listed: bool,
    live: usize,
    assigned: usize,
    last_assignment: Option<Instant>,
}

#[derive(Debug, Default)]
struct Log {
    revisions: Vec<Revision>,
    /// Maps the UID of each live node to the index of the node's last revision.
    live: HashMap<String, usize>,
    /// Nodes received so far from a list of which parts are still missing; `None` if no list is being received.
    listing: Option<Vec<Seen>>,
    lists: usize,
    progress: Progress,
}

impl History {
    /// Lists the nodes and starts to record. Every change after this function has returned is recorded.
    pub async fn start(client: Client) -> Result<Self> {
        let log = Arc::new(Mutex::new(Log::default()));
        let (send, mut progress) = watch::channel(Progress::default());
        let task = tokio::spawn(record(client, Arc::clone(&log), send));
        let listed = progress.wait_for(|it| it.listed);
        tokio::time::timeout(Duration::from_secs(60), listed)
            .await
            .context("no list of nodes within 60 s")??;
        Ok(Self {
            log,
            progress,
            task,
        })
    }

    /// Waits at most `limit` until `count` live nodes have podCIDRs. Returns the time at which the recorder last
    /// observed that a node got podCIDRs.
    pub async fn wait_until_all_assigned(&self, count: usize, limit: Duration) -> Result<Instant> {
        let mut progress = self.progress.clone();
        let reached = progress.wait_for(|it| it.assigned >= count);
        let Ok(reached) = tokio::time::timeout(limit, reached).await else {
            let Progress { live, assigned, .. } = *self.progress.borrow();
            bail!(
                "{assigned} of {live} nodes have podCIDRs after {limit:?}, {count} were expected"
            );
        };
        reached?
            .last_assignment
            .context("no node had to be assigned")
    }

    /// Returns how many live nodes have podCIDRs now.
    pub fn assigned(&self) -> usize {
        self.progress.borrow().assigned
    }

    /// Waits at most `limit` until exactly `count` nodes are live.
    pub async fn wait_until_live(&self, count: usize, limit: Duration) -> Result<()> {
        let mut progress = self.progress.clone();
        let reached = progress.wait_for(|it| it.live == count);
        if tokio::time::timeout(limit, reached).await.is_err() {
            let live = self.progress.borrow().live;
            bail!("{live} nodes are alive after {limit:?}, {count} were expected");
        }
        Ok(())
    }

    /// Returns the time at which the recorder last observed that a node got podCIDRs, or `None` if no node got any.
    pub fn last_assignment(&self) -> Option<Instant> {
        self.progress.borrow().last_assignment
    }

    /// Returns all revisions recorded so far, oldest first.
    pub fn revisions(&self) -> Vec<Revision> {
        lock(&self.log).revisions.clone()
    }

    /// Returns how often the nodes were listed after the first list. Each of these lists replaced a watch that could
    /// not resume.
    pub fn gaps(&self) -> usize {
        lock(&self.log).lists.saturating_sub(1)
    }

    /// Returns all pairs of live nodes whose podCIDRs overlapped at any time so far. A podCIDR that cannot be parsed is
    /// an error.
    pub fn duplicates(&self) -> Result<Vec<Duplicate>> {
        duplicates(&lock(&self.log).revisions)
    }

    /// Panics if two live nodes ever had overlapping podCIDRs.
    #[allow(clippy::panic)] // an assertion
    #[track_caller]
    pub fn assert_no_duplicates(&self) {
        match self.duplicates() {
            Ok(found) if found.is_empty() => {}
            Ok(found) => panic!(
                "{} overlapping podCIDRs of live nodes: {found:#?}",
                found.len()
            ),
            Err(error) => panic!("{error:#}"),
        }
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn record(client: Client, log: Arc<Mutex<Log>>, progress: watch::Sender<Progress>) {
    let nodes = Api::<Seen>::all(client);
    let mut events = watcher(nodes, watcher::Config::default())
        .default_backoff()
        .boxed();
    loop {
        // An error means that the API server is down. The stream resumes by itself after a pause.
        let Ok(event) = events.try_next().await else {
            continue;
        };
        let Some(event) = event else { return };
        let mut log = lock(&log);
        log.take(event);
        progress.send_replace(log.progress);
    }
}

impl Log {
    fn take(&mut self, event: Event<Seen>) {
        match event {
            Event::Init => self.listing = Some(Vec::new()),
            Event::InitApply(node) => self.listing.get_or_insert_default().push(node),
            Event::InitDone => self.listed(),
            Event::Apply(node) => self.apply(&node),
            Event::Delete(node) => self.delete(&node.uid().unwrap_or_default()),
        }
        self.progress.live = self.live.len();
    }

    fn listed(&mut self) {
        let nodes = self.listing.take().unwrap_or_default();
        let gone: Vec<String> = self
            .live
            .keys()
            .filter(|uid| {
                !nodes
                    .iter()
                    .any(|node| node.metadata.uid.as_ref() == Some(*uid))
            })
            .cloned()
            .collect();
        for uid in gone {
            self.delete(&uid);
        }
        for node in &nodes {
            self.apply(node);
        }
        self.lists += 1;
        self.progress.listed = true;
    }

    fn apply(&mut self, node: &Seen) {
        let uid = node.uid().unwrap_or_default();
        let pod_cidrs = node.spec.pod_cidrs.clone();
        let had = self
            .live
            .get(&uid)
            .is_some_and(|at| !self.revisions[*at].pod_cidrs.is_empty());
        let at = Instant::now();
        if !had && !pod_cidrs.is_empty() {
            self.progress.assigned += 1;
            self.progress.last_assignment = Some(at);
        }
        self.live.insert(uid.clone(), self.revisions.len());
        self.revisions.push(Revision {
            at,
            uid,
            name: node.name_any(),
            pod_cidrs,
            term: node.annotations().get(TERM_ANNOTATION).cloned(),
            deleted: false,
        });
    }

    fn delete(&mut self, uid: &str) {
        let Some(at) = self.live.remove(uid) else {
            return;
        };
        let last = self.revisions[at].clone();
        if !last.pod_cidrs.is_empty() {
            self.progress.assigned -= 1;
        }
        self.revisions.push(Revision {
            at: Instant::now(),
            deleted: true,
            ..last
        });
    }
}

/// Replays the history. A range that overlaps a live range is reported and then ignored, so that the live ranges stay
/// disjoint. Therefore each new range has to be compared with only one neighbour.
fn duplicates(revisions: &[Revision]) -> Result<Vec<Duplicate>> {
    let mut live: BTreeMap<Bounds, (&Revision, &str)> = BTreeMap::new();
    let mut found: Vec<Duplicate> = Vec::new();
    for revision in revisions {
        if revision.deleted {
            live.retain(|_, (holder, _)| holder.uid != revision.uid);
            continue;
        }
        for cidr in &revision.pod_cidrs {
            let bounds = bounds(cidr).with_context(|| {
                format!(
                    "node {} has the podCIDR {cidr:?}, which is no CIDR",
                    revision.name
                )
            })?;
            // The neighbour is the last live range that starts at or before the end of `bounds`. Live ranges are
            // disjoint. So if a range before the neighbour overlaps `bounds`, the neighbour overlaps `bounds`, too.
            let neighbour = live.range(..=(bounds.1, (u8::MAX, u128::MAX))).next_back();
            match neighbour.filter(|((_, end), _)| *end >= bounds.0) {
                Some((_, (holder, _))) if holder.uid == revision.uid => {}
                Some((_, (holder, held))) => {
                    let duplicate = Duplicate {
                        first: (holder.name.clone(), holder.uid.clone(), (*held).to_owned()),
                        second: (revision.name.clone(), revision.uid.clone(), cidr.clone()),
                    };
                    if !found.contains(&duplicate) {
                        found.push(duplicate);
                    }
                }
                None => {
                    live.insert(bounds, (revision, cidr));
                }
            }
        }
    }
    Ok(found)
}

/// An IP version and the bits of an address. In this form, all IPv4 addresses sort before all IPv6 addresses.
type Address = (u8, u128);

/// First and last address of a range.
type Bounds = (Address, Address);

/// Parses a CIDR, ignoring its host bits.
fn bounds(cidr: &str) -> Option<Bounds> {
    let (address, length) = cidr.split_once('/')?;
    let (version, bits, width) = match address.parse().ok()? {
        IpAddr::V4(address) => (4, u128::from(address.to_bits()), 32_u32),
        IpAddr::V6(address) => (6, address.to_bits(), 128),
    };
    let host_bits = width.checked_sub(length.parse().ok()?)?;
    let host = u128::MAX.checked_shr(128 - host_bits).unwrap_or_default();
    Some(((version, bits & !host), (version, bits | host)))
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
