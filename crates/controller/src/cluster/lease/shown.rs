//! What a watch shows of the Lease: a hint that saves a candidate most of its reads.
//!
//! # Guarantees
//! - A late watch only postpones a takeover: a record counts from the time when it was shown, and only newer versions
//!   than all seen before are taken in.
//! - A watch that stopped silently is not trusted: a Lease that seems to have run out is read before it is acquired,
//!   and a candidate that was shown nothing for longer than the interval of renewals reads as often as one without a
//!   watch.

use std::time::Duration;

use super::{CANDIDATE_PAUSE, Elector, LeaseRecord, LeaseView, Mono, Phase};
use cadastre_core::mutation::Mutation;

/// Interval of reads of a candidate whose watch shows each renewal. The reads detect a late watch, and an API server
/// that was restored to an older state.
const CALM_PAUSE: Duration = Duration::from_secs(10);

impl Elector {
    /// Takes in what a watch shows. Returns whether the record was accepted: only by a candidate without an
    /// outstanding call, and only if it is newer than all seen before.
    pub fn shown(&mut self, record: &LeaseRecord, now: Mono) -> bool {
        if self.has_just_seen(record, now) {
            // A read was faster than the watch.
            self.stay_calm(now);
            self.due = self.candidate_due(now);
            return false;
        }
        if !self.is_news(record) {
            return false;
        }
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        if mine || !matches!(self.view, LeaseView::Present(..)) {
            // The record is from a late write of this process, or of a Lease that was created again.
            self.look_soon(now);
            return false;
        }
        self.note(record, now);
        self.only_shown = true;
        self.stay_calm(now);
        self.found_as_candidate(record.clone(), false, now);
        true
    }

    /// Takes in that a watch shows the deletion of the Lease; the next read decides what it means.
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

    /// Returns whether a read found the same version recently enough that the watch is not late.
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

    /// Makes a read due at once, but no sooner after the last one than without a watch.
    fn look_soon(&mut self, now: Mono) {
        self.look_first = true;
        self.due = self.due.min(now.max(self.looked_at + CANDIDATE_PAUSE));
    }

    /// Returns how long a working watch may show nothing: a leader renews once per retry period.
    fn silence(&self) -> Duration {
        self.settings.retry_period * 3 / 2
    }

    /// Returns when a candidate with a working watch reads next.
    pub(super) fn calm_due(&self) -> Mono {
        self.calm_until.min(self.looked_at + CALM_PAUSE)
    }

    /// Returns whether the last record came from a watch alone, which may have stopped since. A free Lease is
    /// acquired all the same: at worst the write is rejected.
    pub(super) fn is_hearsay(&self) -> bool {
        let is_free = matches!(&self.view, LeaseView::Present(record, _) if record.is_released());
        self.only_shown && !is_free && !Mutation::SilentWatchTrusted.is_on()
    }
}
