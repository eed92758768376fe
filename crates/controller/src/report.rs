//! Reports that become Kubernetes events; each is made once, when a state changes.

use std::collections::BTreeMap;
use std::time::Duration;

use super::now::Now;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{Node, Text};
use crate::cluster::request::ObjectKind;

/// How long a state that comes and goes is not reported again.
const REPORT_PAUSE: Duration = Duration::from_secs(600);

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct Regarding {
    pub kind: ObjectKind,
    pub name: Text,
    pub uid: ObjectUid,
}

impl Regarding {
    /// Names an object of a kind by its name and UID.
    pub(crate) fn new(kind: ObjectKind, name: impl Into<Text>, uid: &ObjectUid) -> Self {
        let (name, uid) = (name.into(), uid.clone());
        Regarding { kind, name, uid }
    }

    /// Names a node by its name and UID.
    pub fn node(node: &Node) -> Self {
        Regarding::new(ObjectKind::Node, node.name.clone(), &node.uid)
    }
}

/// A report about one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// The object
    pub about: Regarding,
    /// Whether it is a warning, which an operator should look at
    pub warning: bool,
    /// Reason of the event, CamelCase and stable, as alerts depend on it
    pub reason: &'static str,
    /// What happened, to what, and what to do
    pub note: String,
}

impl EventRecord {
    /// Creates a warning.
    pub(crate) fn warning(about: Regarding, reason: &'static str, note: String) -> Self {
        EventRecord {
            about,
            warning: true,
            reason,
            note,
        }
    }

    /// Creates a report that needs no attention.
    pub(crate) fn info(about: Regarding, reason: &'static str, note: String) -> Self {
        EventRecord {
            warning: false,
            ..EventRecord::warning(about, reason, note)
        }
    }
}

/// When reports about a node (by UID) and a pool were made last, by their reason, so that a state that comes and goes
/// is not reported each time.
#[derive(Debug, Default)]
pub(crate) struct RecentReports {
    /// Monotonic
    made: BTreeMap<(ObjectUid, PoolName, &'static str), Duration>,
}

impl RecentReports {
    /// Returns whether a report is due, which then counts as made.
    pub(crate) fn is_due(
        &mut self,
        node: &Node,
        pool: &PoolName,
        reason: &'static str,
        now: Now,
    ) -> bool {
        let key = (node.uid.clone(), pool.clone(), reason);
        let made = self.made.get(&key);
        let is_due = made.is_none_or(|at| *at + REPORT_PAUSE <= now.mono);
        if is_due {
            self.made.insert(key, now.mono);
        }
        is_due
    }

    /// Makes a report due at once if the state comes back. Returns whether it had been made.
    pub(crate) fn end(&mut self, node: &Node, pool: &PoolName, reason: &'static str) -> bool {
        let key = (node.uid.clone(), pool.clone(), reason);
        self.made.remove(&key).is_some()
    }

    /// Removes the reports about a node that is gone.
    pub(crate) fn forget(&mut self, uid: &ObjectUid) {
        self.made.retain(|(of, ..), _| of != uid);
    }
}

/// A node has podCIDRs after a wait.
pub(crate) const POD_CIDR_ALLOCATED: &str = "PodCIDRAllocated";
/// A node gets no podCIDR for now.
pub const WAITING: &str = "WaitingForPodCIDR";
/// The API server keeps rejecting a write.
pub(crate) const WRITE_REJECTED: &str = "WriteRejected";
/// A write that was rejected for long has succeeded.
pub(crate) const WRITE_ACCEPTED: &str = "WriteAccepted";
/// Two nodes have some of the same addresses.
pub(crate) const OVERLAPPING: &str = "OverlappingPodCIDR";
/// A podCIDR is not a CIDR.
pub(crate) const UNREADABLE: &str = "UnreadablePodCIDR";
/// A podCIDR is wider than a node can get.
pub(crate) const PODCIDR_TOO_WIDE: &str = "PodCIDRTooWide";
/// A foreign allocator writes podCIDRs.
pub(crate) const FOREIGN_ALLOCATOR: &str = "ForeignAllocator";
/// A node lacks blocks of an exhausted pool.
pub(crate) const WAITING_FOR_BLOCK: &str = "WaitingForBlock";
/// A node has blocks after a wait.
pub(crate) const BLOCK_ALLOCATED: &str = "BlockAllocated";
/// Several pods report one address.
pub(crate) const DUPLICATE_ADDRESS: &str = "DuplicateAddress";
/// A block of a deleted node stays in quarantine beyond its time.
pub(crate) const KEPT: &str = "KeptInQuarantine";
/// More pools serve a node than its NodeSubnet has room for.
pub(crate) const POOLS_LEFT_OUT: &str = "PoolsLeftOut";
/// A node wants more blocks than its limit.
pub(crate) const BLOCK_LIMIT: &str = "BlockLimitReached";
/// A block that a node uses but the API had lost was adopted.
pub(crate) const BLOCK_ADOPTED: &str = "BlockAdopted";
