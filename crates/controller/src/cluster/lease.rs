//! The leader election, without clock or IO: the caller passes in the time and makes the calls to the API server.
//!
//! The election uses one Lease object. Every write of the Lease is a compare-and-swap by resourceVersion, so of two
//! candidates at most one succeeds. A candidate takes over if the Lease has not changed for the duration that the Lease
//! names, by the candidate's own monotonic clock. The times in the Lease do not decide the election: they are for users
//! and for [`LeadershipTerm::vacant`].
//!
//! The lease duration is short while the API server answers fast, and grows while it answers slowly (see [`pace`]).
//! Candidates always wait for the duration that the Lease names.
//!
//! # Guarantees
//! - [`LeadershipTerm::valid_until`] lies before any other candidate tries to acquire the Lease. This time is the
//!   *start* of the last successful renewal plus the renew deadline, which is shorter than the lease duration.
//! - A term whose time has run out continues if a later renewal succeeds, because the compare-and-swap proves that no
//!   other process led in between. If the record has another holder, or the Lease is gone, the term is over for good.
//! - The id of a term is never used twice.
//! - Watch events of the Lease ([`Elector::watch_applied`]) only save reads. No other guarantee relies on these events.
//! - A Lease counts as free only if its holder has released it. If the Lease was deleted, or a user cleared its holder,
//!   candidates wait as after any other change, because the leader may not have noticed yet.
//! - [`LeadershipTerm::named`] counts only successful writes that began after [`Elector::want`], so no later holder can
//!   have written the Lease before these writes.
//!
//! # Assumptions
//! - Two processes never lead at once if the clocks of their hosts run at similar rates. Within a lease duration, one
//!   clock may gain on the other at most the difference between lease duration and renew deadline. Safety does not
//!   depend on this assumption, because a leader's writes wait for [`LeadershipTerm::named`].
//! - No process starts as a candidate just when a user deletes the Lease of an active leader. Such a process has never
//!   seen the Lease, so it cannot know of the leader. (But if NodeSubnets exist, even this process fences the leader
//!   off, because [`Takeover::First`] alone does not count as a first start.)
//!
//! # Caveats
//! After the Lease was deleted, or a user cleared its holder, there is no leader for a full lease duration.

use std::sync::Arc;
use std::time::Duration;

use super::intents::WriteIntents;
use cadastre_core::mutation::Mutation;
use pace::Pace;
pub(super) use types::LONG_VACANT;
use types::RELEASED_DURATION;
pub use types::{
    Leadership, LeadershipTerm, LeaseAnswer, LeaseCall, LeaseContent, LeaseRecord, LeaseSettings,
    Mono, Takeover,
};

mod pace;
mod types;
mod watched;

/// Interval between two reads by a candidate without a working watch. So the candidate notices a release after at most
/// this time.
pub(super) const CANDIDATE_PAUSE: Duration = Duration::from_millis(400);

/// If two answers of the API server are no further apart than this, the server was not restored in between, because a
/// restore takes longer.
const STEADY: Duration = Duration::from_secs(10);

/// Pause after a failed write. It limits the load on an API server that rejects writes immediately.
const WRITE_PAUSE: Duration = Duration::from_millis(400);

/// Minimum interval between a write of the Lease and the next write if requests wait for the next write. All requests
/// that arrive during this interval share the next write.
const WANTED_PAUSE: Duration = Duration::from_millis(20);

/// State of the election, as one candidate sees it.
#[derive(Clone, Debug)]
pub struct Elector {
    settings: LeaseSettings,
    pace: Pace,
    phase: Phase,
    view: LeaseView,
    /// Whether the Lease must be read before the next attempt to acquire it
    read_first: bool,
    /// The last attempt to acquire the Lease, as long as it may still succeed
    attempt: Option<Attempt>,
    /// The call that is not answered yet, and the time at which it began
    outstanding: Option<(CallKind, Mono)>,
    due: Mono,
    /// After a failed write, the earliest time of the next write
    no_write_before: Mono,
    /// The highest `spec.leaseTransitions` that this process has seen
    transitions: i64,
    /// The lease duration that the Lease named when it was last seen
    duration: Duration,
    /// The highest resourceVersion of the Lease that was seen
    newest: u64,
    /// The time at which the last read of the Lease began
    read_at: Mono,
    /// Whether the last record came from a watch, and no read has confirmed that record
    is_unconfirmed: bool,
    /// The time until which the watch counts as working even if no event arrives
    watch_works_until: Mono,
    /// Whether this process has ever seen the Lease
    has_seen: bool,
    /// `None` until leadership is given up. After that, the value says whether the outcome of every write was known at
    /// that moment
    release: Option<bool>,
    /// The content that the Lease should get in this term
    wanted: Option<LeaseContent>,
    /// The time at which the last write began, and the number in `wanted` at that time
    last_write: (Mono, u64),
    /// The time since which the API server has answered without interruption
    answered_since: Mono,
    /// The time of the last answer of the API server; `None` if the last call got no clear answer
    answered: Option<Mono>,
}

/// The last known state of the Lease.
#[derive(Clone, Debug)]
enum LeaseView {
    Unknown,
    /// The Lease is missing. The value is the time since which it has been missing
    Absent(Mono),
    /// The Lease, and the time since which it has been unchanged
    Present(LeaseRecord, Mono),
}

#[derive(Clone, Debug)]
enum Phase {
    Candidate,
    Leading(HeldLease),
    Released,
}

/// The present term, and the Lease as last read or written in this term.
#[derive(Clone, Debug)]
struct HeldLease {
    term: LeadershipTerm,
    record: LeaseRecord,
    /// Whether the Lease must be read, because the outcome of the last write is unknown
    is_unclear: bool,
}

#[derive(Clone, Debug)]
struct Attempt {
    record: LeaseRecord,
    takeover: Takeover,
    /// The time of the first attempt at this write
    at: Mono,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallKind {
    Read,
    Acquire,
    Renew,
    Release,
}

impl Elector {
    /// Creates a candidate that has not seen the Lease yet.
    pub fn new(settings: LeaseSettings) -> Self {
        Elector {
            settings,
            pace: Pace::FASTEST,
            phase: Phase::Candidate,
            view: LeaseView::Unknown,
            read_first: true,
            attempt: None,
            outstanding: None,
            due: Mono::ZERO,
            no_write_before: Mono::ZERO,
            transitions: 0,
            duration: Duration::ZERO,
            newest: 0,
            read_at: Mono::ZERO,
            is_unconfirmed: false,
            watch_works_until: Mono::ZERO,
            has_seen: false,
            release: None,
            wanted: None,
            last_write: (Mono::ZERO, 0),
            answered_since: Mono::ZERO,
            answered: Some(Mono::ZERO),
        }
    }

    /// Sets the content that the Lease should get, if the content is for the present term. Once a write of the Lease
    /// that began after this call has succeeded, [`LeadershipTerm::named`] reaches the content's number.
    pub fn want(&mut self, wanted: LeaseContent, now: Mono) {
        if matches!(&self.phase, Phase::Leading(held) if held.term.id == wanted.term) {
            self.wanted = Some(wanted);
            self.hurry(now);
        }
    }

    /// If a request waits for a Lease write, makes that write due as early as allowed.
    fn hurry(&mut self, now: Mono) {
        let (Phase::Leading(held), Some(wanted)) = (&self.phase, &self.wanted) else {
            return;
        };
        let waits = !held.is_unclear && wanted.number > held.term.named;
        if waits && self.outstanding.is_none() && self.release.is_none() {
            let earliest = (self.last_write.0 + WANTED_PAUSE).max(self.no_write_before);
            self.due = self.due.min(now.max(earliest));
        }
    }

    /// Returns whether this process leads, stands by, or has given up leadership.
    pub fn leadership(&self) -> Leadership {
        match &self.phase {
            Phase::Released => Leadership::Released,
            Phase::Leading(_) if self.release.is_some() => Leadership::Released,
            Phase::Leading(held) => Leadership::Leading(held.term.clone()),
            Phase::Candidate => {
                let leader = match &self.view {
                    LeaseView::Present(record, _) => record.holder.clone(),
                    LeaseView::Unknown | LeaseView::Absent(_) => None,
                };
                Leadership::Standby { leader }
            }
        }
    }

    /// Returns the time at which to call [`Elector::poll`]. Returns `None` while a call is not answered yet, and after
    /// the release.
    pub fn wake_at(&self) -> Option<Mono> {
        let idle = self.outstanding.is_some() || matches!(self.phase, Phase::Released);
        (!idle).then_some(self.due)
    }

    /// Gives up leadership for good. [`Elector::leadership`] is `Released` from now on, so writers stop at once, even
    /// before the Lease is written. `settled` is true if no write is in flight or indeterminate.
    pub fn release(&mut self, settled: bool) {
        self.release = Some(settled);
        self.due = Mono::ZERO;
        if matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Returns for how long the caller should wait for the answer to a call. This is shorter than the renew deadline, so
    /// that after a call without an answer there is time for two more.
    pub fn patience(&self) -> Duration {
        self.retry_period() * 3 / 2
    }

    /// Returns the lease duration that this process writes as a leader.
    pub fn lease_duration(&self) -> Duration {
        self.settings.lease_duration * self.pace.factor()
    }

    fn retry_period(&self) -> Duration {
        self.settings.retry_period * self.pace.factor()
    }

    /// Returns the next call to make, if one is due. The caller passes the answer to this call to [`Elector::answer`].
    /// The call may shorten [`LeadershipTerm::valid_until`], so the caller must look at [`Elector::leadership`] before it
    /// makes the call.
    pub fn poll(&mut self, now: Mono) -> Option<LeaseCall> {
        if self.outstanding.is_some() || now < self.due {
            return None;
        }
        let lease_duration = self.lease_duration();
        let (kind, call) = match &mut self.phase {
            Phase::Released => return None,
            Phase::Leading(held) if held.is_unclear => (CallKind::Read, LeaseCall::Get),
            Phase::Leading(HeldLease { record, term, .. }) => {
                let wanted = self.wanted.as_ref();
                self.last_write = (now, wanted.map_or(0, |it| it.number));
                let intents = wanted.and_then(|it| it.intents.clone());
                let record = LeaseRecord {
                    intents: intents.or_else(|| term.inherited.clone()),
                    ..record.clone()
                };
                if let Some(settled) = self.release {
                    (
                        CallKind::Release,
                        LeaseCall::Replace(released(record, settled)),
                    )
                } else {
                    let is_shorter = lease_duration < record.lease_duration;
                    if is_shorter && !Mutation::LongerLeaseCountsOn.is_on() {
                        // From now on, candidates may see the shorter duration.
                        let until = now + self.settings.renew_deadline_of(lease_duration);
                        term.valid_until = term.valid_until.min(until);
                    }
                    let renewed = LeaseRecord {
                        lease_duration,
                        ..record
                    };
                    (CallKind::Renew, LeaseCall::Replace(renewed))
                }
            }
            Phase::Candidate => self.candidate(now),
        };
        self.outstanding = Some((kind, now));
        Some(call)
    }

    fn candidate(&mut self, now: Mono) -> (CallKind, LeaseCall) {
        let takeover = self.possible_takeover(now);
        let Some(takeover) = takeover.filter(|_| !self.read_first && !self.needs_read()) else {
            return (CallKind::Read, LeaseCall::Get);
        };
        let call = match &self.view {
            LeaseView::Present(record, _) => {
                let version = record.resource_version.clone();
                let intents = record.intents.clone();
                LeaseCall::Replace(self.attempt(version, intents, takeover, now))
            }
            LeaseView::Unknown | LeaseView::Absent(_) => {
                LeaseCall::Create(self.attempt(String::new(), None, takeover, now))
            }
        };
        (CallKind::Acquire, call)
    }

    /// Returns how the term would begin if this process took over now, or `None` while another process may lead.
    fn possible_takeover(&self, now: Mono) -> Option<Takeover> {
        if self.may_acquire_at()? > now {
            return None;
        }
        Some(match &self.view {
            LeaseView::Absent(_) if !self.has_seen => Takeover::First,
            LeaseView::Present(record, _) if record.is_released() && !record.unsettled => {
                Takeover::Clean
            }
            _ => Takeover::Unclean,
        })
    }

    /// Returns the earliest time at which the Lease may be acquired, judging from its last known state. Returns `None`
    /// if the Lease was never read.
    fn may_acquire_at(&self) -> Option<Mono> {
        match &self.view {
            LeaseView::Unknown => None,
            LeaseView::Absent(_) if !self.has_seen => Some(Mono::ZERO),
            LeaseView::Absent(since) => {
                Some(*since + self.settings.longest_duration().max(self.duration))
            }
            LeaseView::Present(record, _) if record.is_released() => Some(Mono::ZERO),
            LeaseView::Present(record, since) => Some(*since + record.lease_duration),
        }
    }

    /// Returns the record that makes this process the holder and keeps the intents of the Lease. While it is unknown
    /// whether an earlier attempt succeeded, returns the record of that attempt again.
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
            && !Mutation::TermCountsFromLastTry.is_on()
        {
            return attempt.record.clone();
        }
        self.transitions += 1;
        // A creation may arrive late, after the Lease of another leader was deleted. This leader may still count on the
        // longest duration.
        let lease_duration = if resource_version.is_empty() {
            self.settings.longest_duration()
        } else {
            self.lease_duration()
        };
        let record = LeaseRecord {
            holder: Some(self.settings.holder()),
            lease_duration,
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

    /// Handles the answer to the last call. An answer is ignored if the last call is answered already.
    pub fn answer(&mut self, answer: LeaseAnswer, now: Mono) {
        let Some((kind, at)) = self.outstanding.take() else {
            return;
        };
        self.pace
            .note_call(now.saturating_sub(at), &self.settings, now);
        self.due = now + self.pause();
        self.note_answer(answer != LeaseAnswer::Unclear, now);
        if kind == CallKind::Read {
            self.read_at = at;
        }
        match (kind, answer) {
            (CallKind::Renew, LeaseAnswer::Written(record)) => {
                self.note(&record, now);
                let late = Mutation::RenewalCountsFromAnswer.is_on();
                self.renewed(record, if late { now } else { at });
                self.due = self.next_renewal(at, now);
            }
            (CallKind::Acquire, LeaseAnswer::Written(record)) => {
                self.note(&record, now);
                let is_longer = record.lease_duration > self.lease_duration();
                self.acquired(record);
                // If this process crashed, others would have to wait for the long duration of a created Lease.
                self.due = if is_longer {
                    now
                } else {
                    self.next_renewal(at, now)
                };
            }
            (CallKind::Renew, LeaseAnswer::Conflict)
                if Mutation::RenewalConflictIgnored.is_on() =>
            {
                if let Phase::Leading(held) = &self.phase {
                    self.renewed(held.record.clone(), at);
                }
            }
            (CallKind::Release, LeaseAnswer::Written(_)) => self.phase = Phase::Released,
            (
                CallKind::Renew | CallKind::Release,
                answer @ (LeaseAnswer::Conflict | LeaseAnswer::Unclear | LeaseAnswer::Missing),
            ) => {
                let trusted = answer == LeaseAnswer::Unclear
                    && Mutation::IndeterminateLeaseWriteCounts.is_on();
                if let Phase::Leading(held) = &mut self.phase {
                    held.is_unclear = true;
                    if trusted {
                        held.term.named = self.last_write.1;
                    }
                }
                self.due = now;
                self.no_write_before = at + WRITE_PAUSE;
            }
            (CallKind::Acquire, answer @ (LeaseAnswer::Conflict | LeaseAnswer::Unclear)) => {
                // This write may have succeeded, or another process may hold the Lease by now. So the Lease is read
                // next.
                if answer == LeaseAnswer::Conflict {
                    self.has_seen = true;
                    if matches!(self.view, LeaseView::Absent(_)) {
                        // The Lease exists now. If it is missing later, it has not been missing since before.
                        self.view = LeaseView::Unknown;
                    }
                }
                self.read_first = true;
                self.due = now;
                self.no_write_before = at + WRITE_PAUSE;
            }
            (CallKind::Read, LeaseAnswer::Found(record)) => self.found(record, now),
            (CallKind::Read, LeaseAnswer::Missing) => self.missing(now),
            (CallKind::Renew, LeaseAnswer::Failed) => self.no_write_before = at + WRITE_PAUSE,
            _ => {}
        }
        self.hurry(now);
        if self.release.is_some() && matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Keeps track of how long the API server has answered without interruption. An interruption is a call without a
    /// clear answer, or more than [`STEADY`] between two answers. The time before the process's first answer is no
    /// interruption.
    fn note_answer(&mut self, is_answer: bool, now: Mono) {
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
            Phase::Leading(_) if self.release.is_none() => self.retry_period(),
            _ => CANDIDATE_PAUSE.min(self.settings.retry_period),
        }
    }

    /// Returns the time of a leader's next write of the Lease, if its last write began at `at`. A release is written at
    /// once.
    fn next_renewal(&self, at: Mono, now: Mono) -> Mono {
        match self.release {
            Some(_) => now,
            None => at + self.retry_period(),
        }
    }

    /// Returns the time of a candidate's next call. This is the time of its next read, or the time at which it may
    /// acquire the Lease, whichever is earlier.
    fn candidate_due(&self, now: Mono) -> Mono {
        let acquire_at = self.may_acquire_at().map_or(self.due, |at| at.max(now));
        self.due.min(acquire_at).max(self.no_write_before)
    }

    fn note(&mut self, record: &LeaseRecord, now: Mono) {
        self.has_seen = true;
        self.newest = self.newest.max(record.version());
        self.duration = record.lease_duration;
        self.transitions = self.transitions.max(record.transitions);
        if !matches!(&self.view, LeaseView::Present(known, _) if known == record) {
            self.view = LeaseView::Present(record.clone(), now);
        }
    }

    fn found(&mut self, record: LeaseRecord, now: Mono) {
        self.note(&record, now);
        (self.read_first, self.is_unconfirmed) = (false, false);
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        match &mut self.phase {
            Phase::Leading(held) if mine && held.record.transitions == record.transitions => {
                (held.record, held.is_unclear) = (record, false);
                self.due = now.max(self.no_write_before);
            }
            Phase::Leading(_) => {
                self.phase = Phase::Candidate;
                self.due = self.candidate_due(now);
            }
            Phase::Candidate => {
                self.due = self.due.max(self.watched_read_due());
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
        // An attempt that was based on another version of the Lease can no longer succeed. There is one exception: an
        // attempt to create the Lease can still succeed after the Lease was deleted. In this case, the candidate waits
        // until the Lease that it created runs out, as it does for the Lease of any other process.
        let is_based_on_this =
            |attempt: &Attempt| attempt.record.resource_version == record.resource_version;
        self.attempt = self.attempt.take().filter(is_based_on_this);
        self.due = self.candidate_due(now);
    }

    fn missing(&mut self, now: Mono) {
        if !matches!(self.view, LeaseView::Absent(_)) {
            self.view = LeaseView::Absent(now);
        }
        (self.read_first, self.is_unconfirmed) = (false, false);
        self.phase = Phase::Candidate;
        self.due = self.candidate_due(now);
    }

    fn renewed(&mut self, renewed: LeaseRecord, at: Mono) {
        if let Phase::Leading(held) = &mut self.phase {
            let until = at + self.settings.renew_deadline_of(renewed.lease_duration);
            (held.record, held.is_unclear) = (renewed, false);
            let term = &mut held.term;
            term.named = term.named.max(self.last_write.1);
            term.valid_until = term.valid_until.max(until);
        }
    }

    fn acquired(&mut self, record: LeaseRecord) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let id = format!("{}-{}", attempt.record.transitions, self.settings.nonce);
        let term = LeadershipTerm {
            id: id.into(),
            takeover: attempt.takeover,
            valid_until: attempt.at + self.settings.renew_deadline_of(record.lease_duration),
            vacant: Duration::ZERO,
            inherited: attempt.record.intents,
            answered_since: self.answered_since,
            named: 0,
        };
        self.wanted = None;
        self.last_write = (attempt.at, 0);
        self.phase = Phase::Leading(HeldLease {
            term,
            record,
            is_unclear: false,
        });
    }
}

/// Returns the record by which a leader releases the Lease. `settled` is true if the outcome of every write is known.
fn released(record: LeaseRecord, settled: bool) -> LeaseRecord {
    let nothing = Arc::new(WriteIntents::default());
    LeaseRecord {
        holder: None,
        lease_duration: RELEASED_DURATION,
        unsettled: !settled,
        intents: if settled {
            Some(nothing)
        } else {
            record.intents
        },
        ..record
    }
}

#[cfg(test)]
mod tests;
