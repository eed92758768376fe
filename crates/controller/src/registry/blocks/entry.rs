//! One block, and what has to be done about it.

use std::time::Duration;

use jiff::Timestamp;

use crate::Now;
use crate::cluster::seen::{AgentReport, BlockSpec, BlockWord, Owner, Text};
use crate::purpose::Step;
use crate::registry::whole_seconds;
use cadastre_api::Recall;
use cadastre_core::{Cidr, ClaimId, State};

/// One block.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The range
    pub cidr: Cidr,
    /// The pool that it was carved from
    pub pool: Text,
    /// Who has it
    pub owner: Owner,
    /// Since when
    pub since: Timestamp,
    /// When its quarantine is over at the earliest, for people and for the next leader
    pub until: Option<Timestamp>,
    /// The same, monotonic
    pub rests_until: Option<Duration>,
    /// Its claim in the ledger
    pub claim: ClaimId,
    /// UID of its object, the last that is known
    pub uid: Option<Text>,
    /// Whether it is its owner's for sure
    pub confirmed: bool,
    /// What has to be done
    pub step: Step,
    /// Whether a request about its object is on its way
    pub in_flight: bool,
    /// Whether its object has to be read first: what became of a write is not known
    pub to_read: bool,
    /// Until when the watch has time to show it, monotonic
    pub await_until: Duration,
    /// Whether it is asked back
    pub recall: Option<Recall>,
    /// Since when it is asked back for nodes that wait, monotonic
    pub recalled_at: Option<Duration>,
    /// Since when it is empty, monotonic
    pub idle_since: Option<Duration>,
}

impl Entry {
    /// A block of that owner from now on: provisional, with its object still to be made.
    pub(crate) fn new(cidr: Cidr, pool: Text, owner: Owner, claim: ClaimId, now: Now) -> Self {
        Entry {
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

    /// How sure its claim is.
    pub(crate) fn state(&self) -> State {
        match (self.owner.resting, self.confirmed) {
            (true, _) => State::Resting,
            (false, true) => State::Held,
            (false, false) => State::InFlight,
        }
    }

    /// Whether it is a live node's for sure, and stays so for now.
    pub fn is_held(&self) -> bool {
        self.confirmed && !self.owner.resting && !self.is_leaving()
    }

    /// Whether the agent of its owner has let go of it.
    pub(crate) fn is_released(&self, report: Option<&AgentReport>) -> bool {
        self.word(report).is_some_and(|word| word.released)
    }

    /// The spec that its object should have.
    pub fn spec(&self) -> BlockSpec {
        BlockSpec {
            cidr: self.cidr,
            pool: self.pool.clone(),
            owner: self.owner.clone(),
            since: self.since,
            until: self.until,
        }
    }

    /// Whether it is chosen only: the API server has not been asked for it.
    pub(crate) fn is_unasked(&self) -> bool {
        !self.confirmed && self.step == Step::Create && !self.in_flight && !self.to_read
    }

    /// Whether it is on its way out: lost against another, or let go.
    pub(crate) fn is_leaving(&self) -> bool {
        self.step == Step::Delete
    }

    /// What the agent of its owner says of it.
    pub fn word<'a>(&self, report: Option<&'a AgentReport>) -> Option<&'a BlockWord> {
        let report = report.filter(|report| report.node_uid == self.owner.uid)?;
        report.of_block(&self.cidr, self.uid.as_deref()?)
    }
}
