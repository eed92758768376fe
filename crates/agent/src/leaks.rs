//! Addresses whose attachments are gone although no DEL came, and how that is proven.
//!
//! That a DEL never comes is ordinary: a runtime runs a chain in reverse and stops at the first
//! plugin that fails. Two proofs free an address then:
//!
//! | | |
//! |---|---|
//! | by the API | the pod's UID is in no complete list of this node's pods, or has finished, for a grace period; or the controller named the address (it has waited already) |
//! | by the node | the runtime has no sandbox of that id; or the network namespace is gone; or the attachment is of an earlier boot |
//!
//! A pod may live and have addresses of sandboxes that failed or were lost. What such a sandbox had is freed
//! when it is [`superseded`]: the same pod has the same interface on the same network in a newer one. That
//! takes the place of the API's word, as the runtime has made the pod anew; the node's word is needed as
//! before. So it is after a reboot, too: the pods are the same, and their sandboxes are others.
//!
//! An attachment that came without a pod's UID is not Kubernetes', and the API can say nothing of it.
//! It is freed by the node's word alone, after the grace period: an interface cannot outlive its
//! network namespace, nor that a reboot. The runtime's list is no proof there, as the sandbox need not
//! be the runtime's. Without a known path, only a reboot tells.
//!
//! Where the node cannot tell (no runtime to ask, a network namespace whose path it does not know or see),
//! people may give their word for it, for an address and a container id: see
//! [`requests`](cadastre_api::Requests). It counts only while the node itself sees neither the sandbox nor its
//! network namespace, and takes the place of no word of the API.
//!
//! # Guarantees
//! - Looking at the index of pods only raises a suspicion; what frees is a list asked for afterwards,
//!   and the node's word from after that list.
//! - A pod that is in the list keeps what its newest sandbox has, whoever says what.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::addresses::handle;
use super::pods::Pods;
use super::snapshot::{addresses, pod_uid};
use super::superseded::superseded;
use cadastre_api::Suspect;
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;
use cadastre_node::{Attachment, Snapshot, Tenant};

/// Between two looks at one that the node still has: at least and at most.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The grace period of superseded attachments: the runtime may still be about to give them back itself.
const SUPERSEDED_GRACE: Duration = Duration::from_secs(5);

/// Why an attachment may be leaked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Its pod is gone.
    PodGone,
    /// Its pod has finished.
    PodFinished,
    /// The controller says so.
    Suspect,
    /// It is of an earlier boot, and its pod, if it has one, was set up anew since.
    Reboot,
    /// Its pod has a newer sandbox with the same interface on the same network.
    Superseded,
    /// It has no pod, and its network namespace is gone.
    NoNetns,
    /// It has no pod, and people say that its container is gone.
    Confirmed,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::PodGone,
        Self::PodFinished,
        Self::Suspect,
        Self::Reboot,
        Self::Superseded,
        Self::NoNetns,
        Self::Confirmed,
    ];

    /// As a label of a metric, and in lists.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PodGone => "podGone",
            Self::PodFinished => "podFinished",
            Self::Suspect => "suspect",
            Self::Reboot => "reboot",
            Self::Superseded => "superseded",
            Self::NoNetns => "noNetns",
            Self::Confirmed => "confirmed",
        }
    }

    /// Whether the API must agree once more before it is freed.
    pub fn is_of_pod(self) -> bool {
        matches!(self, Self::PodGone | Self::PodFinished | Self::Suspect)
    }

    /// Whether the list of sandboxes says something of it: a pod's sandboxes are the runtime's, and what
    /// people say is gone may not be there.
    pub fn asks_runtime(self) -> bool {
        self.is_of_pod() || matches!(self, Self::Superseded | Self::Confirmed)
    }
}

/// Attachments that may be leaked, and why.
pub type Reasons = BTreeMap<Attachment, Reason>;

/// What the node itself says.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The running boot
    pub boot: String,
    /// Ids of all sandboxes that the runtime has; `None` if it was not asked or gave no answer
    pub sandboxes: Option<BTreeSet<String>>,
    /// Paths of network namespaces that are gone: there is nothing where such paths are known to be
    pub gone: BTreeSet<String>,
    /// Paths of network namespaces at which there is something
    pub present: BTreeSet<String>,
}

/// What others say of attachments.
#[derive(Clone, Copy, Debug)]
pub struct Claims<'a> {
    /// Addresses that the controller names
    pub suspects: &'a [Suspect],
    /// Addresses with the handles of containers that are gone by people's word
    pub container_gone: &'a BTreeSet<(Addr, String)>,
}

/// An attachment that has been suspicious for long enough.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Which one
    pub attachment: Attachment,
    /// Why
    pub reason: Reason,
    pod_uid: String,
    netns: String,
    boot: String,
    /// People say that its container is gone
    confirmed: bool,
}

/// Remembers since when each attachment is suspicious.
#[derive(Debug)]
pub struct Leaks {
    grace: Duration,
    since: BTreeMap<Attachment, (Reason, Duration)>,
}

/// What a look has shown.
#[derive(Debug, Default, PartialEq)]
pub struct Look {
    /// Those to be proven now
    pub due: Vec<Candidate>,
    /// When to look again, if nothing happens before
    pub next: Option<Duration>,
}

impl Leaks {
    /// None yet. Suspicion has to last for `grace`.
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            since: BTreeMap::new(),
        }
    }

    /// Why each attachment is suspicious that is.
    pub fn reasons(&self) -> Reasons {
        let each = |(it, (reason, _)): (&Attachment, &(Reason, Duration))| (it.clone(), *reason);
        self.since.iter().map(each).collect()
    }

    /// Addresses whose pods are gone or have finished by the index of pods, with their pods' UIDs, sorted: those
    /// that are named, and others after twice the grace period, as this node had time to free them by itself and
    /// has not.
    pub fn orphans(
        &self,
        snapshot: &Snapshot,
        named: &BTreeSet<Addr>,
        now: Duration,
    ) -> Vec<(Addr, String)> {
        let is_orphan = |tenant: &&Tenant| {
            let is_named = || addresses(tenant).any(|addr| named.contains(&addr));
            let suspicion = self.since.get(&tenant.attachment);
            suspicion.is_some_and(|(reason, since)| {
                reason.is_of_pod() && (*since + 2 * self.grace <= now || is_named())
            })
        };
        let orphans = snapshot.tenants.iter().filter(is_orphan);
        let each = |it| addresses(it).map(|addr| (addr, pod_uid(it).to_owned()));
        let mut all: Vec<_> = orphans.flat_map(each).collect();
        all.sort_unstable();
        all
    }

    /// Looks at all attachments; `evidence` needs no sandboxes for that.
    pub fn look(
        &mut self,
        snapshot: &Snapshot,
        pods: &Pods,
        claims: Claims<'_>,
        evidence: &Evidence,
        now: Duration,
    ) -> Look {
        let named = named(claims.suspects);
        let superseded = superseded(&snapshot.tenants, &evidence.boot);
        let before = std::mem::take(&mut self.since);
        let mut look = Look::default();
        for tenant in &snapshot.tenants {
            let is_superseded = superseded.contains(&tenant.attachment);
            let confirmed = is_confirmed(tenant, claims.container_gone);
            let reason = suspicion(tenant, is_superseded, pods, &named, evidence);
            let nobodys = || pod_uid(tenant).is_empty().then_some(Reason::Confirmed);
            let Some(reason) = reason.or_else(|| nobodys().filter(|_| confirmed)) else {
                continue;
            };
            let known = before.get(&tenant.attachment);
            let since = known.map_or(now, |(_, since)| *since);
            self.since
                .insert(tenant.attachment.clone(), (reason, since));
            let grace = match reason {
                // The controller, or people, have waited already.
                Reason::Suspect => Duration::ZERO,
                _ if confirmed => Duration::ZERO,
                Reason::Superseded => self.grace.min(SUPERSEDED_GRACE),
                _ => self.grace,
            };
            let at = if since + grace <= now {
                look.due.push(Candidate {
                    confirmed,
                    ..Candidate::new(tenant, reason)
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

impl Candidate {
    fn new(tenant: &Tenant, reason: Reason) -> Self {
        Self {
            attachment: tenant.attachment.clone(),
            reason,
            pod_uid: pod_uid(tenant).to_owned(),
            netns: tenant.netns.clone(),
            boot: tenant.boot.clone(),
            confirmed: false,
        }
    }

    /// The network namespace to look for before it is judged; empty if unknown.
    pub fn netns(&self) -> &str {
        &self.netns
    }

    /// Whether it is proven that nobody has its addresses any more. `pods` is a complete list that
    /// was asked for after the look that found it, if there is one; `evidence` is later than that.
    pub fn is_proven(&self, pods: Option<&Pods>, evidence: &Evidence) -> bool {
        let rebooted = self.boot != evidence.boot && !evidence.boot.is_empty();
        let gone = !self.netns.is_empty() && evidence.gone.contains(&self.netns);
        let id = &self.attachment.container_id;
        let sandboxes = evidence.sandboxes.as_ref();
        let unknown = sandboxes.is_some_and(|all| !all.contains(id));
        let is_there =
            evidence.present.contains(&self.netns) || sandboxes.is_some_and(|all| all.contains(id));
        let confirmed = self.confirmed && !is_there;
        let no_sandbox = unknown || gone || rebooted || confirmed;
        match self.reason {
            Reason::Reboot => rebooted,
            Reason::NoNetns => gone,
            Reason::Confirmed => confirmed,
            Reason::Superseded => no_sandbox,
            Reason::PodGone | Reason::PodFinished | Reason::Suspect => {
                let is_live = |pods: &Pods| is_live(pods, &self.pod_uid);
                let by_api = pods.is_some_and(|pods| pods.is_complete() && !is_live(pods));
                by_api && (no_sandbox || Mutation::OneProofIsEnough.is_on())
            }
        }
    }
}

/// The network namespaces to look for before a look: of attachments that have nothing else.
pub fn netns_of_others(snapshot: &Snapshot) -> impl Iterator<Item = &str> {
    let others = snapshot
        .tenants
        .iter()
        .filter(|tenant| pod_uid(tenant).is_empty());
    others
        .map(|tenant| tenant.netns.as_str())
        .filter(|it| !it.is_empty())
}

fn suspicion(
    tenant: &Tenant,
    is_superseded: bool,
    pods: &Pods,
    named: &BTreeSet<(Addr, &str)>,
    evidence: &Evidence,
) -> Option<Reason> {
    let uid = pod_uid(tenant);
    let rebooted = tenant.boot != evidence.boot && !evidence.boot.is_empty();
    if uid.is_empty() {
        let gone = !tenant.netns.is_empty() && evidence.gone.contains(&tenant.netns);
        return match (rebooted, gone) {
            (true, _) => Some(Reason::Reboot),
            (_, true) => Some(Reason::NoNetns),
            _ => None,
        };
    }
    if is_superseded {
        return Some(if rebooted {
            Reason::Reboot
        } else {
            Reason::Superseded
        });
    }
    if pods.is_complete() && is_live(pods, uid) {
        return None;
    }
    let is_named = |addr: &Addr| named.contains(&(*addr, uid));
    if addresses(tenant).any(|addr| is_named(&addr)) {
        return Some(Reason::Suspect);
    }
    if !pods.is_complete() {
        return None;
    }
    match pods.by_uid(uid) {
        Some(_) => Some(Reason::PodFinished),
        None => Some(Reason::PodGone),
    }
}

fn named(suspects: &[Suspect]) -> BTreeSet<(Addr, &str)> {
    let read = |it: &Suspect| Addr::parse_lenient(&it.address);
    suspects
        .iter()
        .filter_map(|it| Some((read(it)?, it.pod_uid.as_str())))
        .collect()
}

/// Whether people say that its container is gone. A handle that was cut for its length names nothing.
fn is_confirmed(tenant: &Tenant, container_gone: &BTreeSet<(Addr, String)>) -> bool {
    let handle = handle(&tenant.attachment);
    addresses(tenant).any(|addr| container_gone.contains(&(addr, handle.clone())))
}

fn is_live(pods: &Pods, uid: &str) -> bool {
    pods.by_uid(uid).is_some_and(|pod| !pod.finished)
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// Nobody says anything.
    pub const NO_CLAIMS: Claims<'static> = Claims {
        suspects: &[],
        container_gone: &BTreeSet::new(),
    };
}

#[cfg(test)]
mod tests;
