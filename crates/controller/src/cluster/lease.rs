//! The leader election, without clock or IO: the caller passes in the time and makes the calls to the API server.
//!
//! The election uses one Lease object. Every write of the Lease is a compare-and-swap by resourceVersion, so at most
//! one of two candidates succeeds. A candidate takes over if the record has not changed for the lease duration in the
//! record, by the candidate's own monotonic clock. The times in the Lease are for users and for the hint
//! [`Tenure::vacant`]; the election does not depend on them.
//!
//! # Guarantees
//! - [`Tenure::valid_until`] lies before any other candidate tries to acquire the Lease. It is the *start* of the last
//!   successful renewal plus the renew deadline, which is shorter than the lease duration.
//! - A tenure that has run out continues if a later renewal succeeds, because the compare-and-swap proves that no other
//!   process led in between. If the record has another holder, or the Lease is gone, the tenure is over for good.
//! - A term is never used twice.
//! - What a watch shows of the Lease ([`Elector::shown`]) only saves reads. No other guarantee relies on it.
//! - A Lease is free only if its holder has released it. If the Lease was deleted, or a user cleared its holder,
//!   candidates wait as after any other change, because the leader may not have noticed yet.
//! - [`Tenure::named`] counts only successful writes that began after [`Elector::want`], so no later holder can have
//!   written the Lease before them.
//!
//! # Assumptions
//! - Two processes never lead at once, provided that the clocks of their hosts run at similar rates: the difference
//!   must be smaller than that between renew deadline and lease duration. Safety does not depend on this, because a
//!   leader's writes wait for [`Tenure::named`].
//! - These three never coincide: a leader is active, a user deletes the Lease, and a process starts as a candidate. The
//!   new process has never seen the Lease, so it could not know of the leader. (If NodeSubnets exist, the candidate
//!   still fences the leader off, because [`Takeover::First`] alone does not count as a first start.)
//!
//! # Caveats
//! After the Lease was deleted, or a user cleared its holder, there is no leader for a full lease duration.

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

/// Interval between two reads of a candidate without a watch. So a candidate sees a hand-over within this time.
pub(super) const CANDIDATE_PAUSE: Duration = Duration::from_millis(400);

/// If two answers of the API server are further apart than this, the server may have been restored in between. A
/// restore takes longer than this.
const STEADY: Duration = Duration::from_secs(10);

/// Pause after a failed write. It limits the load on an API server that rejects writes immediately.
const WRITE_PAUSE: Duration = Duration::from_millis(400);

/// Minimum interval between two writes of the Lease while requests wait for such a write. Requests that arrive in
/// between share the next write.
const WANTED_PAUSE: Duration = Duration::from_millis(20);

/// State of the election, as one candidate sees it.
#[derive(Debug)]
pub struct Elector {
    settings: LeaseSettings,
    phase: Phase,
    view: LeaseView,
    /// Whether to read the Lease before the next attempt to acquire it
    look_first: bool,
    /// The last attempt to acquire the Lease, as long as it may still succeed
    attempt: Option<Attempt>,
    outstanding: Option<(AttemptKind, Mono)>,
    due: Mono,
    /// After a failed write, the earliest time of the next one
    no_write_before: Mono,
    /// The highest `spec.leaseTransitions` seen
    transitions: i64,
    /// The lease duration in the Lease as last seen
    duration: Duration,
    /// The highest resourceVersion of the Lease that was seen
    newest: u64,
    /// When the last read began
    looked_at: Mono,
    /// Whether the last record came from a watch and was not confirmed by a read since
    only_shown: bool,
    /// Until when the watch counts as working although it shows nothing
    calm_until: Mono,
    /// Whether this process has ever seen the Lease
    ever: bool,
    release: Option<bool>,
    /// The content that the Lease should get in this term
    wanted: Option<LeaseContent>,
    /// Start of the last write, and the number of `wanted` at that time
    asked: (Mono, u64),
    /// See [`Tenure::answered_since`]
    answered_since: Mono,
    /// Time of the last useful answer; `None` if a call without one followed
    answered: Option<Mono>,
}

/// The Lease as last seen.
#[derive(Debug)]
enum LeaseView {
    Unknown,
    /// Since when the Lease has been missing
    Absent(Mono),
    /// The record, and since when it has been unchanged
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
    /// Creates a candidate that has not seen the Lease yet.
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

    /// Sets the content that the Lease should get, if it is for the present term. [`Tenure::named`] reaches the number
    /// in `wanted` once a write that began later has succeeded.
    pub fn want(&mut self, wanted: LeaseContent, now: Mono) {
        let ours =
            matches!(&self.phase, Phase::Holding { tenure, .. } if tenure.term == wanted.term);
        if ours {
            self.wanted = Some(wanted);
            self.hurry(now);
        }
    }

    /// Makes the next write due as early as allowed if a request waits for it.
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

    /// Returns when to call [`Elector::poll`]. Returns `None` while a call is outstanding, and after the release.
    pub fn wake_at(&self) -> Option<Mono> {
        let idle = self.outstanding.is_some() || matches!(self.phase, Phase::Released);
        (!idle).then_some(self.due)
    }

    /// Gives up leadership for good. [`Elector::leadership`] is `Released` from now on, so that writers stop at once,
    /// even before the Lease is written. `settled` says that no write is in flight or indeterminate.
    pub fn release(&mut self, settled: bool) {
        self.release = Some(settled);
        self.due = Mono::ZERO;
        if matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Returns the next call to make, if one is due. The caller passes its answer to [`Elector::answer`].
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

    /// Returns the record that makes this process the holder and keeps the intents. While the outcome of a first try is
    /// unknown, returns the same record again.
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

    /// Handles the answer to the last call.
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
                // The write may have succeeded, or another process may hold the Lease by now, so the Lease is read
                // next.
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

    /// Keeps the time since which the API server has answered without a gap: no request failed, and answers were never
    /// further apart than [`STEADY`]. The time before the first answer of the process is no gap.
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

    /// Returns when to write next after a write that began at `at`. A release is written at once.
    fn next_renewal(&self, at: Mono, now: Mono) -> Mono {
        match self.release {
            Some(_) => now,
            None => at + self.settings.retry_period,
        }
    }

    /// Returns when a candidate makes its next call: when it may acquire the Lease, or earlier for the next read.
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
        // An attempt that was based on another version of the record can no longer succeed. A creation still can if the
        // Lease is deleted; then the candidate waits until the created record runs out, like any other.
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
