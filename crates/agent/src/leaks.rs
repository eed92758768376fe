//! Finds leaked addresses and proves the leaks. An address is leaked if its attachment is gone although no DEL came.
//!
//! A runtime calls DEL on the CNI plugins of a chain in reverse order, and stops at the first plugin that fails. So
//! sometimes a DEL never reaches Cadastre's plugin. Without a DEL, an address of a pod is released only on two proofs:
//!
//! - The proof from the API shows that the pod is gone or finished: a complete list of this node's pods does not
//!   contain the pod, or contains it as finished. Before that, the agent waits for a grace period, but not if the
//!   controller has named the address or a user has confirmed that the container is gone.
//! - The proof from the node shows that the sandbox is gone: the runtime has no sandbox of that id, or the network
//!   namespace is gone, or the attachment is of an earlier boot.
//!
//! A live pod may have addresses of sandboxes that failed or were lost. The addresses of such a sandbox are released
//! when the sandbox is [`superseded`], which means that the same pod has the same interface on the same network in a
//! newer sandbox. The newer sandbox replaces the proof from the API, because the runtime has set the pod up again. The
//! proof from the node is still needed. The same applies after a reboot, when the same pods have new sandboxes.
//!
//! An attachment without a pod UID does not belong to Kubernetes, so the API proves nothing about it. Such an
//! attachment is released on proof from the node alone, after the grace period. The proof is that the network namespace
//! is gone or that the node was rebooted. An interface cannot outlive its network namespace, and a network namespace
//! cannot outlive a reboot. The runtime's list of sandboxes is no proof here, because another program may have created
//! the sandbox. If the path of the network namespace is unknown, only a reboot proves the leak.
//!
//! The node may have no proof, because there is no runtime to ask, or because the path of the network namespace is
//! unknown or invisible. In that case a user may confirm that a container is gone, by address and container id: see
//! [`requests`](cadastre_api::Requests). The confirmation counts only while the node observes neither the sandbox nor
//! its network namespace. The confirmation does not replace the proof from the API.
//!
//! # Guarantees
//! - The watch of pods only makes an attachment a leak candidate. The proof is a list of pods that is requested
//!   afterwards, together with evidence from the node that is newer than that list.
//! - If a pod is in that list and is not finished, its newest sandbox keeps its addresses, even if the controller or a
//!   user claims a leak.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::addresses::handle;
use super::pods::Pods;
use super::snapshot::{addresses, pod_uid};
use super::superseded::superseded;
use cadastre_api::LeakCandidate;
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;
use cadastre_node::{Attachment, AttachmentRecord, Snapshot};

/// The shortest and the longest pause between two attempts to prove the leak of a candidate.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The grace period of superseded attachments. During this time the runtime may still send the DEL.
const SUPERSEDED_GRACE: Duration = Duration::from_secs(5);

/// Why an attachment may be leaked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeakReason {
    /// The API has no pod with the attachment's pod UID.
    PodGone,
    /// The pod's phase is Succeeded or Failed.
    PodFinished,
    /// The controller has named the address and its pod as a leak candidate.
    LeakCandidate,
    /// The attachment is of an earlier boot, and its pod, if it has one, has been set up again.
    Reboot,
    /// The attachment's pod has a newer sandbox with the same interface on the same network.
    Superseded,
    /// The attachment has no pod, and its network namespace is gone.
    NoNetns,
    /// The attachment has no pod, and a user has confirmed that its container is gone.
    Confirmed,
}

impl LeakReason {
    /// All reasons, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::PodGone,
        Self::PodFinished,
        Self::LeakCandidate,
        Self::Reboot,
        Self::Superseded,
        Self::NoNetns,
        Self::Confirmed,
    ];

    /// Returns the reason as text, for the label of metrics and for lists of leak candidates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PodGone => "podGone",
            Self::PodFinished => "podFinished",
            Self::LeakCandidate => "leakCandidate",
            Self::Reboot => "reboot",
            Self::Superseded => "superseded",
            Self::NoNetns => "noNetns",
            Self::Confirmed => "confirmed",
        }
    }

    /// Whether the reason is that the pod is gone or finished. If so, a release needs the proof from the API in
    /// addition to the proof from the node.
    pub fn is_of_pod(self) -> bool {
        matches!(
            self,
            Self::PodGone | Self::PodFinished | Self::LeakCandidate
        )
    }

    /// Whether the runtime's list of sandboxes is needed to prove the leak. The list is not needed if a reboot or a
    /// missing network namespace proves the leak. If a user has declared a container gone, the list must not contain
    /// its sandbox.
    pub(crate) fn asks_runtime(self) -> bool {
        self.is_of_pod() || matches!(self, Self::Superseded | Self::Confirmed)
    }
}

/// Attachments that may be leaked, and why.
pub type Reasons = BTreeMap<Attachment, LeakReason>;

/// Evidence from the node itself about sandboxes and network namespaces.
#[derive(Clone, Debug, Default)]
pub struct NodeEvidence {
    /// The id of the current boot
    pub boot: String,
    /// Ids of all sandboxes of the runtime; `None` if the runtime was not asked or did not answer
    pub sandboxes: Option<BTreeSet<String>>,
    /// Paths of network namespaces that are gone (see [`netns`](super::netns))
    pub gone: BTreeSet<String>,
    /// Paths of network namespaces that exist
    pub present: BTreeSet<String>,
}

/// The statements of the controller and of users that attachments are leaked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeakClaims<'a> {
    /// Addresses that the controller has named as leak candidates, each with the UID of the pod
    pub leak_candidates: &'a [LeakCandidate],
    /// Addresses, each with the handle of a container that a user declared gone
    pub container_gone: &'a BTreeSet<(Addr, String)>,
}

impl LeakClaims<'static> {
    /// No statements: neither the controller nor a user says that an attachment is leaked.
    pub(crate) const NONE: Self = Self {
        leak_candidates: &[],
        container_gone: &BTreeSet::new(),
    };
}

/// A leak candidate whose grace period is over, so that its leak can be proven.
#[derive(Clone, Debug, PartialEq)]
pub struct LeakedAttachment {
    /// The store's record of the attachment
    pub record: AttachmentRecord,
    /// Why the attachment is a candidate
    pub reason: LeakReason,
    /// Whether a user declared the container gone
    confirmed: bool,
}

/// Remembers since when each attachment is a leak candidate.
#[derive(Debug)]
pub(crate) struct LeakDetector {
    grace: Duration,
    since: BTreeMap<Attachment, (LeakReason, Duration)>,
}

/// The result of [`LeakDetector::look`], a search for leak candidates.
#[derive(Debug, Default, PartialEq)]
pub struct Look {
    /// Candidates to prove now
    pub due: Vec<LeakedAttachment>,
    /// The time since boot of the next search if no event causes an earlier one; `None` if there is no candidate
    pub next: Option<Duration>,
}

impl LeakDetector {
    /// Returns a detector without candidates. `grace` is how long an attachment must be a candidate before the agent
    /// tries to prove its leak.
    pub(crate) fn new(grace: Duration) -> Self {
        Self {
            grace,
            since: BTreeMap::new(),
        }
    }

    /// Returns all candidates with their reasons, including candidates whose grace period is not over.
    pub(crate) fn reasons(&self) -> Reasons {
        let each =
            |(it, (reason, _)): (&Attachment, &(LeakReason, Duration))| (it.clone(), *reason);
        self.since.iter().map(each).collect()
    }

    /// Returns the orphans, sorted, each with the UID of its pod. An orphan is an address whose pod is gone or finished
    /// according to the watch of pods. If the address is in `named`, it is an orphan at once. Otherwise it becomes an
    /// orphan after two grace periods in which the node has not released it.
    pub(crate) fn orphans(
        &self,
        snapshot: &Snapshot,
        named: &BTreeSet<Addr>,
        now: Duration,
    ) -> Vec<(Addr, String)> {
        let is_orphan = |record: &&AttachmentRecord| {
            let is_named = || addresses(record).any(|addr| named.contains(&addr));
            let candidate = self.since.get(&record.attachment);
            candidate.is_some_and(|(reason, since)| {
                reason.is_of_pod() && (*since + 2 * self.grace <= now || is_named())
            })
        };
        let orphans = snapshot.attachments.iter().filter(is_orphan);
        let each = |it| addresses(it).map(|addr| (addr, pod_uid(it).to_owned()));
        let mut all: Vec<_> = orphans.flat_map(each).collect();
        all.sort_unstable();
        all
    }

    /// Finds the leak candidates among all attachments. This step does not use the sandboxes in `evidence`.
    pub(crate) fn look(
        &mut self,
        snapshot: &Snapshot,
        pods: &Pods,
        claims: LeakClaims<'_>,
        evidence: &NodeEvidence,
        now: Duration,
    ) -> Look {
        let named = named(claims.leak_candidates);
        let superseded = superseded(&snapshot.attachments, &evidence.boot);
        let before = std::mem::take(&mut self.since);
        let mut look = Look::default();
        for record in &snapshot.attachments {
            let is_superseded = superseded.contains(&record.attachment);
            let confirmed = is_confirmed(record, claims.container_gone);
            let reason = leak_reason(record, is_superseded, pods, &named, evidence);
            let is_confirmed = confirmed && pod_uid(record).is_empty();
            let Some(reason) = reason.or(is_confirmed.then_some(LeakReason::Confirmed)) else {
                continue;
            };
            let earlier = before.get(&record.attachment);
            let since = earlier.map_or(now, |(_, since)| *since);
            self.since
                .insert(record.attachment.clone(), (reason, since));
            let grace = match reason {
                // The controller and users wait before they name a leak. So the agent does not wait for a grace period.
                LeakReason::LeakCandidate => Duration::ZERO,
                _ if confirmed => Duration::ZERO,
                LeakReason::Superseded => self.grace.min(SUPERSEDED_GRACE),
                _ => self.grace,
            };
            let at = if since + grace <= now {
                look.due.push(LeakedAttachment {
                    record: record.clone(),
                    reason,
                    confirmed,
                });
                now + (self.grace / 2).clamp(LOOK_PAUSE.0, LOOK_PAUSE.1)
            } else {
                since + grace
            };
            look.next = Some(look.next.map_or(at, |next| next.min(at)));
        }
        look
    }
}

impl NodeEvidence {
    /// Whether the attachment was set up in an earlier boot of the node. If the id of the current boot is unknown,
    /// returns false.
    fn is_of_earlier_boot(&self, record: &AttachmentRecord) -> bool {
        record.boot != self.boot && !self.boot.is_empty()
    }

    /// Whether the attachment's network namespace is gone. If the path of the network namespace is unknown, returns
    /// false.
    fn is_netns_gone(&self, record: &AttachmentRecord) -> bool {
        !record.netns.is_empty() && self.gone.contains(&record.netns)
    }
}

impl LeakedAttachment {
    /// Returns the path of the network namespace to look up before [`Self::is_proven`]; empty if unknown.
    pub fn netns(&self) -> &str {
        &self.record.netns
    }

    /// Whether it is proven that nothing uses the addresses any more. `pods` is a complete list that was requested
    /// after the look that found the candidate; `None` if there is no such list. `evidence` must be newer than this
    /// list.
    pub fn is_proven(&self, pods: Option<&Pods>, evidence: &NodeEvidence) -> bool {
        let rebooted = evidence.is_of_earlier_boot(&self.record);
        let gone = evidence.is_netns_gone(&self.record);
        let has = |all: &BTreeSet<String>| all.contains(&self.record.attachment.container_id);
        let sandboxes = evidence.sandboxes.as_ref();
        let is_there = evidence.present.contains(self.netns()) || sandboxes.is_some_and(has);
        let confirmed = self.confirmed && !is_there;
        let unlisted = sandboxes.is_some_and(|all| !has(all));
        let no_sandbox = unlisted || gone || rebooted || confirmed;
        match self.reason {
            LeakReason::Reboot => rebooted,
            LeakReason::NoNetns => gone,
            LeakReason::Confirmed => confirmed,
            LeakReason::Superseded => no_sandbox,
            LeakReason::PodGone | LeakReason::PodFinished | LeakReason::LeakCandidate => {
                let is_gone =
                    |pods: &Pods| pods.is_complete() && !is_live(pods, pod_uid(&self.record));
                let by_api = pods.is_some_and(is_gone);
                by_api && (no_sandbox || Mutation::OneProofIsEnough.is_on())
            }
        }
    }
}

/// Returns the paths of the network namespaces of attachments without a pod. The caller looks these paths up before it
/// calls [`LeakDetector::look`].
pub(crate) fn netns_of_others(snapshot: &Snapshot) -> impl Iterator<Item = &str> {
    let others = snapshot
        .attachments
        .iter()
        .filter(|record| pod_uid(record).is_empty());
    others
        .map(|record| record.netns.as_str())
        .filter(|it| !it.is_empty())
}

fn leak_reason(
    record: &AttachmentRecord,
    is_superseded: bool,
    pods: &Pods,
    named: &BTreeSet<(Addr, &str)>,
    evidence: &NodeEvidence,
) -> Option<LeakReason> {
    let uid = pod_uid(record);
    let rebooted = evidence.is_of_earlier_boot(record);
    if uid.is_empty() {
        return match (rebooted, evidence.is_netns_gone(record)) {
            (true, _) => Some(LeakReason::Reboot),
            (_, true) => Some(LeakReason::NoNetns),
            _ => None,
        };
    }
    if is_superseded {
        return Some(if rebooted {
            LeakReason::Reboot
        } else {
            LeakReason::Superseded
        });
    }
    if pods.is_complete() && is_live(pods, uid) {
        return None;
    }
    let is_named = |addr: &Addr| named.contains(&(*addr, uid));
    if addresses(record).any(|addr| is_named(&addr)) {
        return Some(LeakReason::LeakCandidate);
    }
    if !pods.is_complete() {
        return None;
    }
    match pods.by_uid(uid) {
        Some(_) => Some(LeakReason::PodFinished),
        None => Some(LeakReason::PodGone),
    }
}

fn named(candidates: &[LeakCandidate]) -> BTreeSet<(Addr, &str)> {
    let read = |it: &LeakCandidate| Addr::parse_lenient(&it.address);
    candidates
        .iter()
        .filter_map(|it| Some((read(it)?, it.pod_uid.as_str())))
        .collect()
}

/// Whether a user has declared the attachment's container gone. A handle that was truncated because of its length
/// matches no container.
fn is_confirmed(record: &AttachmentRecord, container_gone: &BTreeSet<(Addr, String)>) -> bool {
    let handle = handle(&record.attachment);
    addresses(record).any(|addr| container_gone.contains(&(addr, handle.clone())))
}

fn is_live(pods: &Pods, uid: &str) -> bool {
    pods.by_uid(uid).is_some_and(|pod| !pod.finished)
}

#[cfg(test)]
mod tests;
