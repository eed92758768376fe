//! The state of a block, which includes the next step for its object.

use std::time::Duration;

use jiff::Timestamp;

use super::Standby;
use crate::Now;
use crate::allocations::whole_seconds;
use crate::cluster::names::{ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, BlockReport, BlockSpec, Owner, Parent};
use crate::purpose::Step;
use cadastre_api::Recall;
use cadastre_core::{Cidr, HoldingId, HoldingState};

/// What the leader knows about one block: its owner, its object, and its recall or quarantine.
#[derive(Clone, Debug)]
pub struct BlockEntry {
    /// Range of the block, from which the name of its object is derived
    pub cidr: Cidr,
    /// The pool from which the block was allocated; this pool may be gone
    pub pool: PoolName,
    /// The node that has the block; in quarantine, the deleted node that had it
    pub owner: Owner,
    /// The parent of the block, if the owner has borrowed the block. This field stays set when the parent is gone
    pub parent: Option<Parent>,
    /// When the block was allocated to a node; in quarantine, when the quarantine began. Rounded up to whole seconds
    pub since: Timestamp,
    /// Earliest end of the quarantine as wall time. The object records this time for users and for the next leader
    pub until: Option<Timestamp>,
    /// Earliest end of the quarantine by the monotonic clock; `None` if the block is not quarantined
    pub quarantined_until: Option<Duration>,
    /// The block's holding in the ledger; a later block with the same CIDR has another holding
    pub holding: HoldingId,
    /// The last known UID of the block's object; `None` if no object is known yet
    pub uid: Option<ObjectUid>,
    /// Whether the node may use the block. A block may be used if a NodeSubnet lists it, or if the watch has delivered
    /// the block's object and nothing older overlaps the block. A block that is not confirmed is *provisional*
    pub confirmed: bool,
    /// The next request for the block's object, if the object needs one
    pub step: Step,
    /// Whether a request for the block's object is unanswered; until then no other request for the object is sent
    pub in_flight: bool,
    /// Whether the block's object must be read before the next step, because the outcome of a write is unknown
    pub to_read: bool,
    /// Monotonic time until which the controller waits for the watch to deliver the object. After this time, the
    /// controller reads the object
    pub await_until: Duration,
    /// How the block is recalled from the owner; `None` if it is not recalled
    pub recall: Option<Recall>,
    /// The monotonic time since which the block has been recalled on behalf of waiting nodes
    pub recalled_at: Option<Duration>,
    /// The monotonic time since which the block has been empty
    pub idle_since: Option<Duration>,
    /// The monotonic time since which the owner has no longer needed this borrowed block
    pub unneeded_since: Option<Duration>,
    /// UID of the VirtualMachineInstance whose pods may have the block's address, if the block was allocated for the
    /// claim of such a pod. The UID never changes
    pub vmi: Option<ObjectUid>,
    /// The owner's standby number, which NodeSubnets append to the object's UID; 0 if the owner was never a standby
    pub number: u32,
    /// Nodes that may have the block in addition to the owner, in the order in which they were added
    pub standby: Vec<Standby>,
    /// The highest standby number that any node has had for this block; 0 if no node was ever a standby
    pub last_number: u32,
}

impl BlockEntry {
    /// Creates a provisional block, which the node may not use yet. The block's object is still to be created.
    pub(crate) fn new(
        cidr: Cidr,
        pool: PoolName,
        owner: Owner,
        holding: HoldingId,
        now: Now,
    ) -> Self {
        BlockEntry {
            cidr,
            pool,
            owner,
            parent: None,
            since: whole_seconds(now.wall),
            until: None,
            quarantined_until: None,
            holding,
            uid: None,
            confirmed: false,
            step: Step::Create,
            in_flight: false,
            to_read: false,
            await_until: Duration::ZERO,
            recall: None,
            recalled_at: None,
            idle_since: None,
            unneeded_since: None,
            vmi: None,
            number: 0,
            standby: Vec::new(),
            last_number: 0,
        }
    }

    /// Returns the state that the block's holding should have in the ledger.
    pub(crate) fn state(&self) -> HoldingState {
        match (self.owner.quarantined, self.confirmed) {
            (true, _) => HoldingState::Quarantined,
            (false, true) => HoldingState::Allocated,
            (false, false) => HoldingState::InFlight,
        }
    }

    /// Returns whether a live node has the block and the block is not about to be deleted.
    pub fn is_held(&self) -> bool {
        self.confirmed && !self.owner.quarantined && !self.is_leaving()
    }

    /// Returns whether the owner's agent has released the block, according to `report`.
    pub(crate) fn is_released(&self, report: Option<&AgentReport>) -> bool {
        self.report_for(report).is_some_and(|it| it.released)
    }

    /// Returns the spec that the block's object should have.
    pub fn spec(&self) -> BlockSpec {
        BlockSpec {
            cidr: self.cidr,
            pool: self.pool.clone(),
            owner: self.owner.clone(),
            parent: self.parent.clone(),
            since: self.since,
            until: self.until,
            vmi: self.vmi.clone(),
            number: self.number,
            standby: {
                let all = self.standby.iter();
                all.map(|it| (it.owner.clone(), it.number)).collect()
            },
            last_number: self.last_number,
        }
    }

    /// Returns whether the block exists only in the ledger, because no request for its object was sent yet.
    pub(crate) fn is_unsent(&self) -> bool {
        !self.confirmed && self.step == Step::Create && !self.in_flight && !self.to_read
    }

    /// Returns whether the block's object is to be deleted, because an older block overlaps the block or the agent has
    /// released the block.
    pub(crate) fn is_leaving(&self) -> bool {
        self.step == Step::Delete
    }

    /// Returns what the owner's agent reports about this block. Returns `None` if the report is for another node UID,
    /// or if it contains the block only under another object UID.
    pub fn report_for<'a>(&self, report: Option<&'a AgentReport>) -> Option<&'a BlockReport> {
        let report = report.filter(|report| report.node_uid == self.owner.uid)?;
        self.reported(report, self.number)
    }
}
