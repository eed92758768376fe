//! What a watch shows of the Lease: a hint that saves a candidate most of its reads.
//!
//! # Guarantees
//! - A late watch can only delay a takeover. The time of a record counts from when the watch showed it, and a record is
//!   ignored unless its version is newer than all seen before.
//! - A watch that has stopped silently is not trusted. A Lease that seems to have run out is read before it is
//!   acquired. A candidate whose watch showed nothing for longer than the interval of renewals reads as often as one
//!   without a watch.
//!   watch.

use std::time::Duration;

use super::{CANDIDATE_PAUSE, Elector, LeaseRecord, LeaseView, Mono, Phase};
use cadastre_core::mutation::Mutation;

/// Interval of reads by a candidate whose watch shows each renewal. The reads detect a late watch, and an API server
/// that was restored to an older state.
const CALM_PAUSE: Duration = Duration::from_secs(10);

impl Elector {
    /// Handles a record that a watch shows. Returns whether the record was accepted. It is accepted only by a candidate
    /// without an outstanding call, and only if it is newer than all seen before.
    pub fn shown(&mut self, record: &LeaseRecord, now: Mono) -> bool {
        if self.has_just_seen(record, now) {
            // A read was faster than the watch, so the record is known. But the watch works.
            self.stay_calm(now);
            self.due = self.candidate_due(now);
            return false;
        }
        if !self.is_news(record) {
            return false;
        }
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        if mine || !matches!(self.view, LeaseView::Present(..)) {
            // The record is of a late write by this process, or of a Lease that was created again, so a read must
            // clarify it.
            self.look_soon(now);
            return false;
        }
        self.note(record, now);
        self.only_shown = true;
        self.stay_calm(now);
        self.found_as_candidate(record.clone(), false, now);
        true
    }

    /// Handles the deletion of the Lease, as a watch shows it. The next read decides what the deletion means.
    pub fn shown_deleted(&mut self, record: &LeaseRecord, now: Mono) {
        if self.is_news(record) {
            self.look_soon(now);
        }
    }

    fn listens(&self) -> bool {
        matches!(self.phase, Phase::Candidate) && self.outstanding.is_none() && !self.look_first
    }

    fn is_news(&self, record: &LeaseRecord) -> bool {
        let is_newer = record.version() > self.newest || Mutation::OldNewsCounts.is_on();
        self.listens() && is_newer
    }

    /// Returns whether a read found the same version so recently that the watch is not late.
    fn has_just_seen(&self, record: &LeaseRecord, now: Mono) -> bool {
        let is_same = |known: &LeaseRecord| known.resource_version == record.resource_version;
        self.listens()
            && matches!(&self.view, LeaseView::Present(known, since)
                if is_same(known) && now <= *since + CANDIDATE_PAUSE)
    }

    /// Records that the watch works.
    fn stay_calm(&mut self, now: Mono) {
        self.came(true, now);
        self.calm_until = now + self.silence();
        self.due = self.calm_due().max(now);
    }

    /// Makes a read due at once, but keeps the interval between reads that holds without a watch.
    fn look_soon(&mut self, now: Mono) {
        self.look_first = true;
        self.due = self.due.min(now.max(self.looked_at + CANDIDATE_PAUSE));
    }

    /// Returns for how long a working watch can show nothing. A leader renews once per retry period.
    fn silence(&self) -> Duration {
        self.settings.retry_period * 3 / 2
    }

    /// Returns when a candidate with a working watch reads next.
    pub(super) fn calm_due(&self) -> Mono {
        self.calm_until.min(self.looked_at + CALM_PAUSE)
    }

    /// Returns whether the Lease must be read before it is acquired: its last record came only from a watch, which may
    /// have stopped since. A free Lease needs no read: at worst the write that acquires it is rejected.
    pub(super) fn is_hearsay(&self) -> bool {
        let is_free = matches!(&self.view, LeaseView::Present(record, _) if record.is_released());
        self.only_shown && !is_free && !Mutation::SilentWatchTrusted.is_on()
    }
}
