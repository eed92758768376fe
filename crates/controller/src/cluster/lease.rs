//! The election: decides who leads, without clock or IO.
//!
//! It uses one Lease object. Every write of the Lease is a compare-and-swap by resourceVersion, so of two candidates
//! one wins. A candidate takes over when the record has not changed for the duration in the record, by the
//! candidate's own monotonic clock. Wall clocks are written for people and never read.
//!
//! # Guarantees
//! - [`Tenure::valid_until`] lies before any other candidate tries to win: it counts from the *start* of the last
//!   successful renewal, for the renew deadline, which is shorter than the lease.
//! - A tenure that has run out continues if a later renewal succeeds: by compare-and-swap nobody led in between. If
//!   the record has another holder, or is gone, the tenure is over for good.
//! - A term is never used twice.
//! - What a watch shows of the Lease ([`Elector::shown`]) only saves reads; nothing else relies on it.
//! - A Lease is free only when its holder has released it. If it was deleted, or its holder was cleared by hand,
//!   candidates wait as after any other change: the leader may not know of it yet.
//! - [`Tenure::named`] counts only successful writes that were begun after [`Elector::want`]: no later holder can
//!   have written before them.
//!
//! # Assumptions
//! - Two processes never lead at once if the clock rates of their machines differ by less than the renew deadline and
//!   the lease duration do. Safety does not depend on it: what a leader sends waits for [`Tenure::named`].
//! - Nobody deletes the Lease while a leader is active and a candidate starts that has never seen the Lease: the
//!   candidate could not know of the leader. (If NodeSubnets exist the candidate still fences the leader off, as
//!   [`Takeover::First`] alone does not count as a first start.)
//!
//! # Caveats
//! After a deletion, or a holder cleared by hand, nobody leads for a full lease duration.

use std::sync::Arc;
use std::time::Duration;

use super::intents::WriteIntents;
use cadastre_core::mutation::Mutation;
pub(super) use types::LONG_VACANT;
use types::RELEASED_DURATION;
pub use types::{
    Leadership, LeaseAnswer, LeaseCall, LeaseContent, LeaseRecord, LeaseSettings,
    LeaseSettingsError, Mono, Takeover, Tenure,
};

mod shown;
mod types;

/// Interval between two reads of a candidate without a watch. It sees a hand-over within this time.
pub(super) const CANDIDATE_PAUSE: Duration = Duration::from_millis(400);

/// Answers further apart than this prove nothing about the time between them. A restore of an API server takes
/// longer.
const STEADY: Duration = Duration::from_secs(10);

/// Pause after a failed write, which limits the load on a server that fails at once.
const WRITE_PAUSE: Duration = Duration::from_millis(400);

/// Least interval between two writes that requests wait for; requests in between share the next write.
const WANTED_PAUSE: Duration = Duration::from_millis(20);

/// The election's state of one candidate.
#[derive(Debug)]
pub struct Elector {
    settings: LeaseSettings,
    phase: Phase,
    view: LeaseView,
    /// Whether to read before the next attempt, as the outcome of the last one is unknown
    look_first: bool,
    /// An acquiring write of indeterminate outcome
    attempt: Option<Attempt>,
    outstanding: Option<(AttemptKind, Mono)>,
    due: Mono,
    /// Earliest time of the next write after one that failed
    no_write_before: Mono,
    /// The highest count of transitions seen
    transitions: i64,
    /// The duration in the Lease as last seen
    duration: Duration,
    /// The highest version seen
    newest: u64,
    /// When the last read began
    looked_at: Mono,
    /// Whether the last record came from a watch and was not confirmed by a read
    only_shown: bool,
    /// Until when the watch is believed to show renewals
    calm_until: Mono,
    /// Whether the Lease was ever seen
    ever: bool,
    release: Option<bool>,
    /// The content that the Lease should get in this term
    wanted: Option<LeaseContent>,
    /// Start of the last write, and the number of `wanted` at that time
    asked: (Mono, u64),
    /// See [`Tenure::answered_since`]
    answered_since: Mono,
    /// Time of the last answer, unless a call without a useful answer followed
    answered: Option<Mono>,
}

/// The Lease as last seen.
#[derive(Debug)]
enum LeaseView {
    Unknown,
    /// Since when it has been missing
    Absent(Mono),
    /// The record, and since when it has not changed
    Present(LeaseRecord, Mono),
}

#[derive(Debug)]
enum Phase {
    Candidate,
    Holding {
        tenure: Tenure,
        record: LeaseRecord,
        certain: bool,
    },
    Released,
}

#[derive(Clone, Debug)]
struct Attempt {
    record: LeaseRecord,
    takeover: Takeover,
    /// Start of the first try of this write
    at: Mono,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptKind {
    Look,
    Acquire,
    Renew,
    Release,
}

impl Elector {
    /// Creates a candidate that has seen nothing.
    pub fn new(settings: LeaseSettings) -> Self {
        Elector {
            settings,
            phase: Phase::Candidate,
            view: LeaseView::Unknown,
            look_first: true,
            attempt: None,
            outstanding: None,
            due: Mono::ZERO,
            no_write_before: Mono::ZERO,
            transitions: 0,
            duration: Duration::ZERO,
            newest: 0,
            looked_at: Mono::ZERO,
            only_shown: false,
            calm_until: Mono::ZERO,
            ever: false,
            release: None,
            wanted: None,
            asked: (Mono::ZERO, 0),
            answered_since: Mono::ZERO,
            answered: Some(Mono::ZERO),
        }
    }

    /// Sets the content that the Lease should get. [`Tenure::named`] reaches the number in `wanted` once a write that
    /// was begun later has succeeded.
    pub fn want(&mut self, wanted: LeaseContent, now: Mono) {
        let ours =
            matches!(&self.phase, Phase::Holding { tenure, .. } if tenure.term == wanted.term);
        if ours {
            self.wanted = Some(wanted);
            self.hurry(now);
        }
    }

    /// Makes a write due at once if a request waits for it.
    fn hurry(&mut self, now: Mono) {
        let Phase::Holding {
            tenure,
            certain: true,
            ..
        } = &self.phase
        else {
            return;
        };
        let waits = self
            .wanted
            .as_ref()
            .is_some_and(|it| it.number > tenure.named);
        if waits && self.outstanding.is_none() && self.release.is_none() {
            let earliest = (self.asked.0 + WANTED_PAUSE).max(self.no_write_before);
            self.due = self.due.min(now.max(earliest));
        }
    }

    /// Returns the present result of the election.
    pub fn leadership(&self) -> Leadership {
        match &self.phase {
            Phase::Released => Leadership::Released,
            Phase::Holding { .. } if self.release.is_some() => Leadership::Released,
            Phase::Holding { tenure, .. } => Leadership::Leading(tenure.clone()),
            Phase::Candidate => {
                let leader = match &self.view {
                    LeaseView::Present(record, _) => record.holder.clone(),
                    LeaseView::Unknown | LeaseView::Absent(_) => None,
                };
                Leadership::Standby { leader }
            }
        }
    }

    /// Returns when [`Elector::poll`] may return a call.
    pub fn wake_at(&self) -> Option<Mono> {
        let idle = self.outstanding.is_some() || matches!(self.phase, Phase::Released);
        (!idle).then_some(self.due)
    }

    /// Gives up leadership for good; writers are stopped at once. `settled` says whether no write is in flight or
    /// indeterminate.
    pub fn release(&mut self, settled: bool) {
        self.release = Some(settled);
        self.due = Mono::ZERO;
        if matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Returns the next call that is due.
    pub fn poll(&mut self, now: Mono) -> Option<LeaseCall> {
        if self.outstanding.is_some() || now < self.due {
            return None;
        }
        let (kind, ask) = match &self.phase {
            Phase::Released => return None,
            Phase::Holding { certain: false, .. } => (AttemptKind::Look, LeaseCall::Get),
            Phase::Holding { record, tenure, .. } => {
                let wanted = self.wanted.as_ref();
                self.asked = (now, wanted.map_or(0, |it| it.number));
                let intents = wanted.and_then(|it| it.intents.clone());
                let record = LeaseRecord {
                    intents: intents.or_else(|| tenure.inherited.clone()),
                    ..record.clone()
                };
                match self.release {
                    Some(settled) => {
                        let free = LeaseRecord {
                            holder: None,
                            lease_duration: RELEASED_DURATION,
                            unsettled: !settled,
                            intents: if settled {
                                Some(Arc::new(WriteIntents::default()))
                            } else {
                                record.intents
                            },
                            ..record
                        };
                        (AttemptKind::Release, LeaseCall::Replace(free))
                    }
                    None => (AttemptKind::Renew, LeaseCall::Replace(record)),
                }
            }
            Phase::Candidate => self.candidate(now),
        };
        self.outstanding = Some((kind, now));
        Some(ask)
    }

    fn candidate(&mut self, now: Mono) -> (AttemptKind, LeaseCall) {
        if self.look_first || self.is_hearsay() {
            return (AttemptKind::Look, LeaseCall::Get);
        }
        let Some(takeover) = self.opening(now) else {
            return (AttemptKind::Look, LeaseCall::Get);
        };
        let ask = match &self.view {
            LeaseView::Present(record, _) => {
                let version = record.resource_version.clone();
                let intents = record.intents.clone();
                LeaseCall::Replace(self.attempt(version, intents, takeover, now))
            }
            LeaseView::Unknown | LeaseView::Absent(_) => {
                LeaseCall::Create(self.attempt(String::new(), None, takeover, now))
            }
        };
        (AttemptKind::Acquire, ask)
    }

    /// Returns what kind of takeover is possible now; `None` while another process may lead.
    fn opening(&self, now: Mono) -> Option<Takeover> {
        match &self.view {
            LeaseView::Unknown => None,
            LeaseView::Absent(_) if !self.ever => Some(Takeover::First),
            LeaseView::Present(record, _) if record.is_released() && !record.unsettled => {
                Some(Takeover::Clean)
            }
            LeaseView::Present(..) | LeaseView::Absent(_) => {
                (self.opens_at()? <= now).then_some(Takeover::Unclean)
            }
        }
    }

    /// Returns when the Lease, as last seen, may be acquired.
    fn opens_at(&self) -> Option<Mono> {
        match &self.view {
            LeaseView::Unknown => None,
            LeaseView::Absent(_) if !self.ever => Some(Mono::ZERO),
            LeaseView::Absent(since) => {
                Some(*since + self.settings.lease_duration.max(self.duration))
            }
            LeaseView::Present(record, _) if record.is_released() => Some(Mono::ZERO),
            LeaseView::Present(record, since) => Some(*since + record.lease_duration),
        }
    }

    /// Returns the record that makes this process the holder and keeps the intents; the same record again while the
    /// outcome of a first try is unknown.
    fn attempt(
        &mut self,
        resource_version: String,
        intents: Option<Arc<WriteIntents>>,
        takeover: Takeover,
        now: Mono,
    ) -> LeaseRecord {
        if let Some(attempt) = &self.attempt
            && attempt.record.resource_version == resource_version
            && attempt.takeover == takeover
            && !Mutation::TenureCountsFromLastTry.is_on()
        {
            return attempt.record.clone();
        }
        self.transitions += 1;
        let record = LeaseRecord {
            holder: Some(self.settings.holder()),
            lease_duration: self.settings.lease_duration,
            transitions: self.transitions,
            unsettled: false,
            intents,
            resource_version,
        };
        self.attempt = Some(Attempt {
            record: record.clone(),
            takeover,
            at: now,
        });
        record
    }

    /// Takes in the answer to the last call.
    pub fn answer(&mut self, answer: LeaseAnswer, now: Mono) {
        let Some((kind, at)) = self.outstanding.take() else {
            return;
        };
        self.due = now + self.pause();
        self.came(answer != LeaseAnswer::Unclear, now);
        if kind == AttemptKind::Look {
            self.looked_at = at;
        }
        match (kind, answer) {
            (AttemptKind::Renew, LeaseAnswer::Written(record)) => {
                self.note(&record, now);
                let late = Mutation::RenewalCountsFromAnswer.is_on();
                self.renewed(record, if late { now } else { at });
                self.due = self.next_renewal(at, now);
            }
            (AttemptKind::Acquire, LeaseAnswer::Written(record)) => {
                self.note(&record, now);
                self.acquired(record);
                self.due = self.next_renewal(at, now);
            }
            (AttemptKind::Renew, LeaseAnswer::Conflict)
                if Mutation::RenewalConflictIgnored.is_on() =>
            {
                if let Phase::Holding { record, .. } = &self.phase {
                    self.renewed(record.clone(), at);
                }
            }
            (AttemptKind::Release, LeaseAnswer::Written(_)) => self.phase = Phase::Released,
            (
                AttemptKind::Renew | AttemptKind::Release,
                answer @ (LeaseAnswer::Conflict | LeaseAnswer::Unclear | LeaseAnswer::Missing),
            ) => {
                let trusted = answer == LeaseAnswer::Unclear
                    && Mutation::IndeterminateLeaseWriteCounts.is_on();
                if let Phase::Holding {
                    certain, tenure, ..
                } = &mut self.phase
                {
                    *certain = false;
                    if trusted {
                        tenure.named = self.asked.1;
                    }
                }
                self.due = now;
                self.no_write_before = at + WRITE_PAUSE;
            }
            (AttemptKind::Acquire, answer @ (LeaseAnswer::Conflict | LeaseAnswer::Unclear)) => {
                // The record may be ours by now, or another holder's.
                self.ever |= answer == LeaseAnswer::Conflict;
                self.look_first = true;
                self.due = now;
                self.no_write_before = at + WRITE_PAUSE;
            }
            (AttemptKind::Look, LeaseAnswer::Found(record)) => self.found(record, now),
            (AttemptKind::Look, LeaseAnswer::Missing) => self.missing(now),
            (AttemptKind::Renew, LeaseAnswer::Failed) => self.no_write_before = at + WRITE_PAUSE,
            _ => {}
        }
        self.hurry(now);
        if self.release.is_some() && matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Tracks since when the API server has answered without a gap. The start of the process is no gap, as nothing
    /// was known before.
    fn came(&mut self, is_answer: bool, now: Mono) {
        if !is_answer {
            self.answered = None;
            return;
        }
        let goes_on = |last: Mono| last == Mono::ZERO || now <= last + STEADY;
        if !self.answered.is_some_and(goes_on) {
            self.answered_since = now;
        }
        self.answered = Some(now);
    }

    fn pause(&self) -> Duration {
        match self.phase {
            Phase::Holding { .. } if self.release.is_none() => self.settings.retry_period,
            _ => CANDIDATE_PAUSE.min(self.settings.retry_period),
        }
    }

    /// Returns when to renew after a write that began at `at`; a release does not wait.
    fn next_renewal(&self, at: Mono, now: Mono) -> Mono {
        match self.release {
            Some(_) => now,
            None => at + self.settings.retry_period,
        }
    }

    /// Returns when a candidate tries next: when the Lease opens, or for the next read before that.
    fn candidate_due(&self, now: Mono) -> Mono {
        let opens = self.opens_at().map_or(self.due, |at| at.max(now));
        self.due.min(opens).max(self.no_write_before)
    }

    fn note(&mut self, record: &LeaseRecord, now: Mono) {
        self.ever = true;
        self.newest = self.newest.max(record.version());
        self.duration = record.lease_duration;
        self.transitions = self.transitions.max(record.transitions);
        if !matches!(&self.view, LeaseView::Present(known, _) if known == record) {
            self.view = LeaseView::Present(record.clone(), now);
        }
    }

    fn found(&mut self, record: LeaseRecord, now: Mono) {
        self.note(&record, now);
        (self.look_first, self.only_shown) = (false, false);
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        match &mut self.phase {
            Phase::Holding {
                record: held,
                certain,
                ..
            } if mine && held.transitions == record.transitions => {
                *held = record;
                *certain = true;
                self.due = now.max(self.no_write_before);
            }
            Phase::Holding { .. } => {
                self.phase = Phase::Candidate;
                self.due = self.candidate_due(now);
            }
            Phase::Candidate => {
                self.due = self.due.max(self.calm_due());
                self.found_as_candidate(record, mine, now);
            }
            Phase::Released => {}
        }
    }

    fn found_as_candidate(&mut self, record: LeaseRecord, mine: bool, now: Mono) {
        let of_attempt = |attempt: &Attempt| attempt.record.transitions == record.transitions;
        if mine && self.attempt.as_ref().is_some_and(of_attempt) {
            self.acquired(record);
            self.due = now.max(self.no_write_before);
            return;
        }
        // An attempt that was based on another version of the record can no longer succeed. A creation still can if
        // the Lease is deleted; its record is then waited out like any other.
        let rests_on_this =
            |attempt: &Attempt| attempt.record.resource_version == record.resource_version;
        self.attempt = self.attempt.take().filter(rests_on_this);
        self.due = self.candidate_due(now);
    }

    fn missing(&mut self, now: Mono) {
        if !matches!(self.view, LeaseView::Absent(_)) {
            self.view = LeaseView::Absent(now);
        }
        (self.look_first, self.only_shown) = (false, false);
        self.phase = Phase::Candidate;
        self.due = self.candidate_due(now);
    }

    fn renewed(&mut self, renewed: LeaseRecord, at: Mono) {
        if let Phase::Holding {
            tenure,
            record,
            certain,
        } = &mut self.phase
        {
            *record = renewed;
            *certain = true;
            tenure.named = tenure.named.max(self.asked.1);
            tenure.valid_until = tenure.valid_until.max(at + self.settings.renew_deadline);
        }
    }

    fn acquired(&mut self, record: LeaseRecord) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let term = format!("{}-{}", attempt.record.transitions, self.settings.nonce);
        let valid_until = attempt.at + self.settings.renew_deadline;
        let tenure = Tenure {
            term: term.into(),
            takeover: attempt.takeover,
            valid_until,
            vacant: Duration::ZERO,
            inherited: attempt.record.intents,
            answered_since: self.answered_since,
            named: 0,
        };
        self.wanted = None;
        self.asked = (attempt.at, 0);
        self.phase = Phase::Holding {
            tenure,
            record,
            certain: true,
        };
    }
}

#[cfg(test)]
mod tests;
