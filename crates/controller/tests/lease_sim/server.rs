//! The Lease in an API server, and the true history of its holders.

use std::collections::BTreeMap;

use cadastre_controller::cluster::lease::{LeaseAnswer, LeaseCall, LeaseRecord, Takeover};

/// True time in microseconds.
pub type Time = u64;

/// How a term of leadership truly began.
#[derive(Clone, Copy, Debug)]
pub struct TermStart {
    /// The takeover that an elector with full knowledge would report. If the Lease was deleted before the term, this is
    /// a first start.
    pub takeover: Takeover,
    /// Whether the write that began the term created the Lease.
    pub created: bool,
    /// When the write that began the term took effect, in true time.
    pub at: Time,
}

/// An event that the watches of the Lease deliver.
#[derive(Clone, Debug)]
pub enum LeaseEvent {
    Written(LeaseRecord),
    /// The Lease was deleted. The record has the version of the deletion
    Deleted(LeaseRecord),
}

#[derive(Default)]
pub struct Server {
    pub lease: Option<LeaseRecord>,
    /// Events that the watches have not received yet, the oldest first.
    pub events: Vec<LeaseEvent>,
    revision: u64,
    /// Whether the Lease is free because its last holder released it.
    released: bool,
    /// When the Lease was deleted, in true time.
    pub deleted: Option<Time>,
    /// How each term began, by holder and `spec.leaseTransitions`.
    pub term_starts: BTreeMap<(String, i64), TermStart>,
    pub conflicts: u64,
    pub cleared: u64,
}

impl Server {
    pub fn execute(&mut self, ask: LeaseCall, now: Time) -> LeaseAnswer {
        match (ask, &self.lease) {
            (LeaseCall::Get, None) => LeaseAnswer::Missing,
            (LeaseCall::Get, Some(lease)) => LeaseAnswer::Found(lease.clone()),
            (LeaseCall::Create(wanted), None) => self.store(wanted, now),
            (LeaseCall::Replace(wanted), Some(lease))
                if lease.resource_version == wanted.resource_version =>
            {
                self.store(wanted, now)
            }
            _ => {
                self.conflicts += 1;
                LeaseAnswer::Conflict
            }
        }
    }

    fn store(&mut self, wanted: LeaseRecord, now: Time) -> LeaseAnswer {
        let before = self.lease.take();
        if let Some(holder) = wanted.holder.clone() {
            let takeover = match &before {
                None => Takeover::First,
                Some(lease) if self.released && !lease.unsettled => Takeover::Clean,
                Some(_) => Takeover::Unclean,
            };
            let key = (holder, wanted.transitions);
            let is_renewal = before.as_ref().is_some_and(|lease| {
                (lease.holder.as_ref(), lease.transitions) == (Some(&key.0), key.1)
            });
            if !is_renewal {
                let known = before.as_ref().map_or(0, |lease| lease.transitions);
                assert!(
                    wanted.transitions > known,
                    "a new holder without a transition: {wanted:?}"
                );
                let start = TermStart {
                    takeover,
                    created: before.is_none(),
                    at: now,
                };
                self.term_starts.insert(key, start);
            }
        }
        self.released = wanted.holder.is_none();
        self.revision += 1;
        let stored = LeaseRecord {
            resource_version: self.revision.to_string(),
            ..wanted
        };
        self.lease = Some(stored.clone());
        self.events.push(LeaseEvent::Written(stored.clone()));
        LeaseAnswer::Written(stored)
    }

    /// Edits the Lease like a program that adds an annotation. In the record, only the version changes.
    pub fn edit(&mut self) {
        self.change(|_| ());
    }

    fn change(&mut self, how: impl FnOnce(&mut LeaseRecord)) {
        self.revision += 1;
        if let Some(lease) = &mut self.lease {
            lease.resource_version = self.revision.to_string();
            how(lease);
            self.events.push(LeaseEvent::Written(lease.clone()));
        }
    }

    /// Clears the holder of the Lease while the holder leads, as a user might do by hand.
    pub fn clear(&mut self) {
        let mut cleared = false;
        self.change(|lease| cleared = lease.holder.take().is_some());
        self.cleared += u64::from(cleared);
    }

    pub fn delete(&mut self, now: Time) {
        if let Some(lease) = self.lease.take() {
            self.deleted = Some(now);
            self.revision += 1;
            self.events.push(LeaseEvent::Deleted(LeaseRecord {
                resource_version: self.revision.to_string(),
                ..lease
            }));
        }
    }
}
