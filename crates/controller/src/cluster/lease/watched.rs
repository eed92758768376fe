//! Handles watch events of the Lease. The events are hints that save a candidate most of its reads of the Lease.
//!
//! # Guarantees
//! - A watch that delivers events late can only delay a takeover, because the age of a record counts from the arrival
//!   of its watch event. A record is ignored unless its version is newer than all versions seen before.
//! - A watch that has stopped silently is not trusted. A Lease that seems to have run out is read before it is
//!   acquired. If the watch has delivered nothing for one and a half retry periods, the candidate reads as often as
//!   without a watch.

use std::time::Duration;

use super::{CANDIDATE_PAUSE, Elector, LeaseRecord, LeaseView, Mono, Phase};
use cadastre_core::mutation::Mutation;

/// Interval of reads by a candidate whose watch delivers each renewal. The reads detect a late watch, and an API server
/// that was restored to an older state.
const WATCHED_PAUSE: Duration = Duration::from_secs(10);

impl Elector {
    /// Handles the record of a watch event. Returns whether the record was accepted. A record is accepted only by a
    /// candidate without an unanswered call, and only if the record is newer than all records seen before.
    pub fn watch_applied(&mut self, record: &LeaseRecord, now: Mono) -> bool {
        if self.was_just_read(record, now) {
            // A read found this version before the watch delivered it. But the event shows that the watch works.
            self.note_watch(now);
            self.due = self.candidate_due(now);
            return false;
        }
        if !self.is_new(record) {
            return false;
        }
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        if mine || !matches!(self.view, LeaseView::Present(..)) {
            // A late write by this process caused the event, or the Lease was created again. So the Lease must be read.
            self.read_soon(now);
            return false;
        }
        self.note(record, now);
        self.is_unconfirmed = true;
        self.note_watch(now);
        self.found_as_candidate(record.clone(), false, now);
        true
    }

    /// Handles a watch event that the Lease was deleted. The event only causes a read. The candidate acts on the
    /// deletion only if this read finds no Lease.
    pub fn watch_deleted(&mut self, record: &LeaseRecord, now: Mono) {
        if self.is_new(record) {
            self.read_soon(now);
        }
    }

    /// Returns whether watch events count now. They count if this process is a candidate, no call is unanswered, and
    /// the Lease need not be read first.
    fn uses_watch(&self) -> bool {
        matches!(self.phase, Phase::Candidate) && self.outstanding.is_none() && !self.read_first
    }

    fn is_new(&self, record: &LeaseRecord) -> bool {
        let is_newer = record.version() > self.newest || Mutation::OldNewsCounts.is_on();
        self.uses_watch() && is_newer
    }

    /// Returns whether a read found the version of `record` so recently that the watch is not late.
    fn was_just_read(&self, record: &LeaseRecord, now: Mono) -> bool {
        let is_same = |known: &LeaseRecord| known.resource_version == record.resource_version;
        self.uses_watch()
            && matches!(&self.view, LeaseView::Present(known, since)
                if is_same(known) && now <= *since + CANDIDATE_PAUSE)
    }

    /// Records that the watch works, because it delivered an event.
    fn note_watch(&mut self, now: Mono) {
        self.note_answer(true, now);
        // A leader renews once per retry period, so a working watch delivers the next event within one and a half retry
        // periods.
        self.watch_works_until = now + self.settings.retry_period_of(self.duration) * 3 / 2;
        self.due = self.watched_read_due().max(now);
    }

    /// Schedules a read for now. If the last read began less than [`CANDIDATE_PAUSE`] ago, schedules the read for the
    /// end of that pause.
    fn read_soon(&mut self, now: Mono) {
        self.read_first = true;
        self.due = self.due.min(now.max(self.read_at + CANDIDATE_PAUSE));
    }

    /// Returns the time of the next read by a candidate whose watch works.
    pub(super) fn watched_read_due(&self) -> Mono {
        self.watch_works_until.min(self.read_at + WATCHED_PAUSE)
    }

    /// Returns whether the Lease must be read before it is acquired. A read is needed if only a watch delivered the
    /// last record, because the watch may have stopped after that. A free Lease needs no read: at worst the write that
    /// acquires it is rejected.
    pub(super) fn needs_read(&self) -> bool {
        let is_free = matches!(&self.view, LeaseView::Present(record, _) if record.is_released());
        self.is_unconfirmed && !is_free && !Mutation::SilentWatchTrusted.is_on()
    }
}
