//! What a watch shows of the Lease: a hint that spares a candidate most of its looks.
//!
//! # Guarantees
//! - A watch that is late only postpones: what it shows counts from when it was shown, and only what is newer than
//!   all that was seen is taken in.
//! - A watch that died without a word is not trusted: a Lease that seems to have run out is looked at before it is
//!   sought, and a candidate that was shown nothing for longer than a leader lets pass between two renewals looks
//!   as often as one without a watch.

use std::time::Duration;

use super::{CANDIDATE_PAUSE, Elector, Mono, Phase, Record, View};
use cadastre_core::mutation::Mutation;

/// Pause between two looks of a candidate whose watch shows each renewal. They show whether the watch is late, and
/// whether the API server was put back to an older state.
const CALM_PAUSE: Duration = Duration::from_secs(10);

impl Elector {
    /// Takes in how a watch shows the Lease, as the answer to a look that nobody asked for. Gives whether it was
    /// taken: by a candidate with nothing outstanding, where it is newer than all that was seen.
    pub fn shown(&mut self, record: &Record, now: Mono) -> bool {
        if self.has_just_seen(record, now) {
            // A look was faster.
            self.stay_calm(now);
            self.due = self.candidate_due(now);
            return false;
        }
        if !self.is_news(record) {
            return false;
        }
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        if mine || !matches!(self.view, View::Present(..)) {
            // A late write of ours, or a Lease made anew.
            self.look_soon(now);
            return false;
        }
        self.note(record, now);
        self.only_shown = true;
        self.stay_calm(now);
        self.found_as_candidate(record.clone(), false, now);
        true
    }

    /// Takes in that a watch shows the Lease as deleted, in that version: a look tells what to make of it.
    pub fn shown_deleted(&mut self, record: &Record, now: Mono) {
        if self.is_news(record) {
            self.look_soon(now);
        }
    }

    fn listens(&self) -> bool {
        matches!(self.phase, Phase::Candidate) && self.outstanding.is_none() && !self.look_first
    }

    fn is_news(&self, record: &Record) -> bool {
        let is_newer = record.version() > self.newest || Mutation::OldNewsCounts.is_on();
        self.listens() && is_newer
    }

    /// Whether a look has found the same, and so short a time ago that the watch is not late.
    fn has_just_seen(&self, record: &Record, now: Mono) -> bool {
        let is_same = |known: &Record| known.resource_version == record.resource_version;
        self.listens()
            && matches!(&self.view, View::Present(known, since)
                if is_same(known) && now <= *since + CANDIDATE_PAUSE)
    }

    /// The watch goes on.
    fn stay_calm(&mut self, now: Mono) {
        self.came(true, now);
        self.calm_until = now + self.silence();
        self.due = self.calm_due().max(now);
    }

    /// The next look is due at once, though not sooner after the last one than without a watch.
    fn look_soon(&mut self, now: Mono) {
        self.look_first = true;
        self.due = self.due.min(now.max(self.looked_at + CANDIDATE_PAUSE));
    }

    /// For how long a watch may show nothing: a leader renews once in a retry period.
    fn silence(&self) -> Duration {
        self.settings.retry_period * 3 / 2
    }

    /// When a candidate looks whose watch goes on as it does.
    pub(super) fn calm_due(&self) -> Mono {
        self.calm_until.min(self.looked_at + CALM_PAUSE)
    }

    /// Whether the Lease as last seen has been shown by a watch alone, which may have stopped since. One that is
    /// free is sought all the same: it can but be refused.
    pub(super) fn is_hearsay(&self) -> bool {
        let is_free = matches!(&self.view, View::Present(record, _) if record.is_released());
        self.only_shown && !is_free && !Mutation::SilentWatchTrusted.is_on()
    }
}
