//! Kubernetes events to be: told once, when a state changes.

use crate::cluster::request::Kind;
use crate::cluster::seen::{Node, Text};

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub struct About {
    pub kind: Kind,
    pub name: Text,
    pub uid: Text,
}

impl About {
    /// The object of that name and UID.
    pub(crate) fn new(kind: Kind, name: &Text, uid: &Text) -> Self {
        let (name, uid) = (name.clone(), uid.clone());
        About { kind, name, uid }
    }

    /// The node as seen.
    pub fn node(node: &Node) -> Self {
        About::new(Kind::Node, &node.name, &node.uid)
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The object it is about
    pub about: About,
    /// Whether somebody should look
    pub warning: bool,
    /// CamelCase, stable: people alert on it
    pub reason: &'static str,
    /// What happened, with what, and what to do
    pub note: String,
}

impl Report {
    /// Somebody should look.
    pub(crate) fn warning(about: About, reason: &'static str, note: String) -> Self {
        Report {
            about,
            warning: true,
            reason,
            note,
        }
    }

    /// Good to know.
    pub(crate) fn info(about: About, reason: &'static str, note: String) -> Self {
        Report {
            warning: false,
            ..Report::warning(about, reason, note)
        }
    }
}

/// A node has waited for a podCIDR and now has one.
pub(crate) const POD_CIDR_ASSIGNED: &str = "PodCIDRAssigned";
/// A node gets no podCIDR for now.
pub const WAITING: &str = "WaitingForPodCIDR";
/// The API server refuses a write again and again.
pub(crate) const WRITE_REJECTED: &str = "WriteRejected";
/// What was refused for long has come through.
pub(crate) const WRITE_ACCEPTED: &str = "WriteAccepted";
/// Two nodes hold the same addresses.
pub(crate) const OVERLAPPING: &str = "OverlappingPodCIDR";
/// A podCIDR that is no CIDR.
pub(crate) const UNREADABLE: &str = "UnreadablePodCIDR";
/// A podCIDR that no node could have been given.
pub(crate) const PODCIDR_TOO_WIDE: &str = "PodCIDRTooWide";
/// Somebody else writes podCIDRs.
pub(crate) const SECOND_WRITER: &str = "SecondWriter";
/// A node lacks blocks of a pool that has none left.
pub(crate) const WAITING_FOR_BLOCK: &str = "WaitingForBlock";
/// A node has waited for blocks and now has them.
pub(crate) const BLOCK_ASSIGNED: &str = "BlockAssigned";
/// Several pods report one address.
pub(crate) const DUPLICATE_ADDRESS: &str = "DuplicateAddress";
/// A block of a dead node is kept beyond its quarantine.
pub(crate) const KEPT: &str = "KeptInQuarantine";
/// More pools serve a node than its NodeSubnet has room for.
pub(crate) const POOLS_LEFT_OUT: &str = "PoolsLeftOut";
/// A node wants more blocks than it may have.
pub(crate) const BLOCK_LIMIT: &str = "BlockLimitReached";
/// A block that a node uses was lost by the API and is the node's again.
pub(crate) const BLOCK_TAKEN_UP: &str = "BlockTakenUp";
