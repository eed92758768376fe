//! Reports that become Kubernetes events. A state is reported once when it begins, and once when it ends. Only writes
//! that keep failing, and nodes that go on to borrow or lend, are reported again after [`REPORT_PAUSE`].

use std::collections::BTreeMap;
use std::time::Duration;

use super::now::Now;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{Node, Text};
use crate::cluster::request::ObjectKind;

/// Minimum interval between two reports of one state of an object, so that a state that ends and begins again every few
/// seconds causes few events. A wait for blocks whose end was reported is exempt: if it begins again, it is reported at
/// once.
pub(crate) const REPORT_PAUSE: Duration = Duration::from_secs(600);

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct Regarding {
    pub kind: ObjectKind,
    pub name: Text,
    pub uid: ObjectUid,
}

impl Regarding {
    /// Creates a reference to an object. The name of a pod must contain its namespace.
    pub(crate) fn new(kind: ObjectKind, name: impl Into<Text>, uid: &ObjectUid) -> Self {
        let (name, uid) = (name.into(), uid.clone());
        Regarding { kind, name, uid }
    }

    /// Creates a reference to a node, for events about it.
    pub fn node(node: &Node) -> Self {
        Regarding::new(ObjectKind::Node, node.name.clone(), &node.uid)
    }
}

impl From<&Node> for Regarding {
    fn from(node: &Node) -> Self {
        Regarding::node(node)
    }
}

/// A report about one object, which becomes a Kubernetes event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// The object that the event is attached to
    pub about: Regarding,
    /// Whether an operator should act: the type of the event is then `Warning`, else `Normal`
    pub warning: bool,
    /// Reason of the event, in CamelCase. It must never change, because users' alerts depend on it
    pub reason: &'static str,
    /// The message: the problem or change, the object, and what an operator should do
    pub note: String,
}

impl EventRecord {
    /// Creates a report on which an operator should act. Its event has the type `Warning`.
    pub(crate) fn warning(about: impl Into<Regarding>, reason: &'static str, note: String) -> Self {
        EventRecord {
            about: about.into(),
            warning: true,
            reason,
            note,
        }
    }

    /// Creates a report on which nobody has to act. Its event has the type `Normal`.
    pub(crate) fn info(about: impl Into<Regarding>, reason: &'static str, note: String) -> Self {
        EventRecord {
            warning: false,
            ..EventRecord::warning(about, reason, note)
        }
    }
}

/// The last reports about nodes and pools, by reason. With these, a state that ends and begins again is not reported
/// each time.
#[derive(Debug, Default)]
pub(crate) struct RecentReports {
    /// Monotonic time of the last report, by the node's UID, the pool's name and the reason
    made: BTreeMap<(ObjectUid, PoolName, &'static str), Duration>,
}

impl RecentReports {
    /// Returns whether a report is due now. If so, the caller must make the report, because it is recorded as made.
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

    /// Forgets a report, so that it is due at once if the state begins again. Returns whether there was such a report.
    pub(crate) fn end(&mut self, node: &Node, pool: &PoolName, reason: &'static str) -> bool {
        let key = (node.uid.clone(), pool.clone(), reason);
        self.made.remove(&key).is_some()
    }

    /// Removes the reports about a node that is gone.
    pub(crate) fn forget(&mut self, uid: &ObjectUid) {
        self.made.retain(|(of, ..), _| of != uid);
    }
}

/// A node that waited has got podCIDRs.
pub(crate) const POD_CIDR_ALLOCATED: &str = "PodCIDRAllocated";
/// A node waits for podCIDRs.
pub const WAITING: &str = "WaitingForPodCIDR";
/// The API server keeps rejecting a write, or does not answer it.
pub(crate) const WRITE_REJECTED: &str = "WriteRejected";
/// A write that kept failing has succeeded.
pub(crate) const WRITE_ACCEPTED: &str = "WriteAccepted";
/// The podCIDRs of two nodes overlap.
pub(crate) const OVERLAPPING: &str = "OverlappingPodCIDR";
/// An entry of a node's `spec.podCIDRs` is not a valid CIDR.
pub(crate) const UNREADABLE: &str = "UnreadablePodCIDR";
/// A podCIDR that overlaps a pool is wider than any range that a node can have been allocated, so it is ignored.
pub(crate) const PODCIDR_TOO_WIDE: &str = "PodCIDRTooWide";
/// A foreign allocator has written podCIDRs in a pool's range.
pub(crate) const FOREIGN_ALLOCATOR: &str = "ForeignAllocator";
/// A node waits for blocks of an exhausted pool.
pub(crate) const WAITING_FOR_BLOCK: &str = "WaitingForBlock";
/// A node that waited has got blocks.
pub(crate) const BLOCK_ALLOCATED: &str = "BlockAllocated";
/// A node borrows parts of other nodes' blocks.
pub(crate) const BLOCK_BORROWED: &str = "BlockBorrowed";
/// A node lends parts of its blocks.
pub(crate) const BLOCK_LENT: &str = "BlockLent";
/// Several pods report one address.
pub(crate) const DUPLICATE_ADDRESS: &str = "DuplicateAddress";
/// A block of a deleted node stays in quarantine beyond its time, because addresses in it are still used.
pub(crate) const KEPT: &str = "KeptInQuarantine";
/// A NodeSubnet has no room for all pools that select the node.
pub(crate) const POOLS_LEFT_OUT: &str = "PoolsLeftOut";
/// A node demands more blocks than `maxBlocksPerNode` allows.
pub(crate) const BLOCK_LIMIT: &str = "BlockLimitReached";
/// No pool can serve the claim of a StatefulSet's pod, so the claim is not created.
pub(crate) const NO_POOL_FOR_CLAIM: &str = "NoPoolForClaim";
/// A pod cannot have the addresses that it asks for now.
pub(crate) const ADDRESS_UNAVAILABLE: &str = "AddressUnavailable";
/// An agent uses a block that the API had lost, so the block was adopted.
pub(crate) const BLOCK_ADOPTED: &str = "BlockAdopted";
