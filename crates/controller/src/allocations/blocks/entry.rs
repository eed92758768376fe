//! A block's state, and the next step for its object.

use std::time::Duration;

use jiff::Timestamp;

use crate::Now;
use crate::allocations::whole_seconds;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, BlockReport, BlockSpec, Owner};
use crate::purpose::Step;
use cadastre_api::Recall;
use cadastre_core::{Cidr, ClaimId, ClaimState};

/// State of one block.
#[derive(Clone, Debug)]
pub struct BlockEntry {
    /// Range of the block
    pub cidr: Cidr,
    /// The pool that it was allocated from
    pub pool: PoolName,
    /// The node that has it, or had it before quarantine
    pub owner: Owner,
    /// Since when the owner has it
    pub since: Timestamp,
    /// Earliest end of its quarantine as wall time, for people and for the next leader
    pub until: Option<Timestamp>,
    /// The same end, monotonic
    pub rests_until: Option<Duration>,
    /// Its claim in the ledger
    pub claim: ClaimId,
    /// The last known UID of its object
    pub uid: Option<ObjectUid>,
    /// Whether the block is no longer provisional
    pub confirmed: bool,
    /// The next request about its object
    pub step: Step,
    /// Whether a request about its object is in flight
    pub in_flight: bool,
    /// Whether its object has to be read first, as a write is indeterminate
    pub to_read: bool,
    /// Until when the watch has time to show its object, monotonic
    pub await_until: Duration,
    /// Whether and how it is recalled
    pub recall: Option<Recall>,
    /// Since when it is recalled for nodes that wait, monotonic
    pub recalled_at: Option<Duration>,
    /// Since when it is empty, monotonic
    pub idle_since: Option<Duration>,
}

impl BlockEntry {
    /// Creates a provisional block, whose object is still to be created.
    pub(crate) fn new(cidr: Cidr, pool: PoolName, owner: Owner, claim: ClaimId, now: Now) -> Self {
        BlockEntry {
            cidr,
            pool,
            owner,
            since: whole_seconds(now.wall),
            until: None,
            rests_until: None,
            claim,
            uid: None,
            confirmed: false,
            step: Step::Create,
            in_flight: false,
            to_read: false,
            await_until: Duration::ZERO,
            recall: None,
            recalled_at: None,
            idle_since: None,
        }
    }

    /// Returns the state of its claim in the ledger.
    pub(crate) fn state(&self) -> ClaimState {
        match (self.owner.quarantined, self.confirmed) {
            (true, _) => ClaimState::Quarantined,
            (false, true) => ClaimState::Allocated,
            (false, false) => ClaimState::InFlight,
        }
    }

    /// Returns whether a live node has the block, and it is not about to be deleted.
    pub fn is_held(&self) -> bool {
        self.confirmed && !self.owner.quarantined && !self.is_leaving()
    }

    /// Returns whether the owner's agent has released it.
    pub(crate) fn is_released(&self, report: Option<&AgentReport>) -> bool {
        self.report_for(report).is_some_and(|word| word.released)
    }

    /// Returns the spec that its object should have.
    pub fn spec(&self) -> BlockSpec {
        BlockSpec {
            cidr: self.cidr,
            pool: self.pool.clone(),
            owner: self.owner.clone(),
            since: self.since,
            until: self.until,
        }
    }

    /// Returns whether it exists only in the ledger: no request for its object was sent yet.
    pub(crate) fn is_unsent(&self) -> bool {
        !self.confirmed && self.step == Step::Create && !self.in_flight && !self.to_read
    }

    /// Returns whether it is to be deleted: an older block overlaps it, or it was released.
    pub(crate) fn is_leaving(&self) -> bool {
        self.step == Step::Delete
    }

    /// Returns the report of the owner's agent about it.
    pub fn report_for<'a>(&self, report: Option<&'a AgentReport>) -> Option<&'a BlockReport> {
        let report = report.filter(|report| report.node_uid == self.owner.uid)?;
        report.of_block(&self.cidr, self.uid.as_ref()?)
    }
}
