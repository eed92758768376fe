//! Reports that become Kubernetes events. A state is reported once when it begins, and some states also when they end.
//! The following states are reported again after [`REPORT_PAUSE`] while they last:
//! - a write keeps failing
//! - a node borrows or lends
//! - a pod's claim is not created, because no pool can serve it or its IPAMClaim is missing

use std::collections::BTreeMap;
use std::time::Duration;

use super::now::Now;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{Node, Text};
use crate::cluster::request::ObjectKind;

/// Minimum interval between two reports of one state of an object, so that a state that ends and begins again every few
/// seconds causes few events. There is one exception: if the end of a node's wait for blocks was reported, the next
/// wait is reported at once.
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
    /// Creates a reference to an object. For a pod, `name` must be `namespace/name`.
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
    /// Whether an operator should act. If so, the event has the type `Warning`, otherwise `Normal`
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

/// When each state of a node and a pool was last reported. If a state ends and begins again every few seconds, this
/// record prevents a report each time.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentReports {
    /// Monotonic time of the last report, by the node's UID, the pool's name and the reason
    made: BTreeMap<(ObjectUid, PoolName, &'static str), Duration>,
}

impl RecentReports {
    /// Returns whether a report is due now. If it is due, it is recorded as made, so the caller must make it.
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

    /// Forgets the last report of a state, so that a report is due at once if the state begins again. Returns whether
    /// the state had been reported.
    pub(crate) fn end(&mut self, node: &Node, pool: &PoolName, reason: &'static str) -> bool {
        let key = (node.uid.clone(), pool.clone(), reason);
        self.made.remove(&key).is_some()
    }

    /// Removes the reports about a node that is gone.
    pub(crate) fn forget(&mut self, uid: &ObjectUid) {
        self.made.retain(|(of, ..), _| of != uid);
    }
}

/// Event reason: a node that waited for podCIDRs has got them.
pub(crate) const POD_CIDR_ALLOCATED: &str = "PodCIDRAllocated";
/// Event reason: a node waits for podCIDRs.
pub const WAITING: &str = "WaitingForPodCIDR";
/// Event reason: the API server keeps rejecting a write, or answers no attempt of a write.
pub(crate) const WRITE_REJECTED: &str = "WriteRejected";
/// Event reason: a write that kept failing has succeeded.
pub(crate) const WRITE_ACCEPTED: &str = "WriteAccepted";
/// Event reason: the podCIDRs of two nodes overlap.
pub(crate) const OVERLAPPING: &str = "OverlappingPodCIDR";
/// Event reason: an entry of a node's `spec.podCIDRs` is not a valid CIDR.
pub(crate) const UNREADABLE: &str = "UnreadablePodCIDR";
/// Event reason: a podCIDR that overlaps a pool is wider than any range that can have been allocated to a node. The
/// controller ignores such a podCIDR.
pub(crate) const PODCIDR_TOO_WIDE: &str = "PodCIDRTooWide";
/// Event reason: a foreign allocator has written podCIDRs in a pool's range.
pub(crate) const FOREIGN_ALLOCATOR: &str = "ForeignAllocator";
/// Event reason: a node waits for blocks of an exhausted pool.
pub(crate) const WAITING_FOR_BLOCK: &str = "WaitingForBlock";
/// Event reason: a node that waited for blocks has got blocks.
pub(crate) const BLOCK_ALLOCATED: &str = "BlockAllocated";
/// Event reason: a node borrows parts of other nodes' blocks.
pub(crate) const BLOCK_BORROWED: &str = "BlockBorrowed";
/// Event reason: a node lends parts of its blocks.
pub(crate) const BLOCK_LENT: &str = "BlockLent";
/// Event reason: several pods report one address.
pub(crate) const DUPLICATE_ADDRESS: &str = "DuplicateAddress";
/// Event reason: a block of a deleted node stays in quarantine beyond its time, because addresses in it are still used.
pub(crate) const KEPT: &str = "KeptInQuarantine";
/// Event reason, and condition of a NodeSubnet: a NodeSubnet has no room for all pools that select the node.
pub(crate) const POOLS_LEFT_OUT: &str = "PoolsLeftOut";
/// Event reason: a node demands more blocks than `maxBlocksPerNode` allows.
pub(crate) const BLOCK_LIMIT: &str = "BlockLimitReached";
/// Event reason: a pod's claim is not created, because no pool can serve it or its IPAMClaim is missing.
pub(crate) const NO_POOL_FOR_CLAIM: &str = "NoPoolForClaim";
/// Event reason: the addresses that a pod requests are not available now.
pub(crate) const ADDRESS_UNAVAILABLE: &str = "AddressUnavailable";
/// Event reason: the FRRConfiguration of a node is not written, or not as the node's annotation requests.
pub(crate) const FRR_CONFIGURATION: &str = "FRRConfigurationNotWritten";
/// Event reason: an agent uses a block that the API server had lost, so the block was adopted.
pub(crate) const BLOCK_ADOPTED: &str = "BlockAdopted";
