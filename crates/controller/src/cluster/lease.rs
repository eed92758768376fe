//! Who leads: the decision, without clock or IO.
//!
//! One Lease object decides. Every write of it is a compare-and-swap by resourceVersion, so of two
//! candidates one wins. A candidate takes over when the record has not changed for the duration
//! that the record itself names, by the candidate's own monotonic clock; wall clocks are written for
//! people and never read.
//!
//! # Guarantees
//! - [`Tenure::valid_until`] lies before any other candidate means to win: it counts from the *start* of
//!   the last renewal that came through, for the renew deadline, which is shorter than the lease.
//! - A tenure that has run out goes on if a later renewal succeeds: by compare-and-swap nobody led in
//!   between. A record that is somebody else's, or gone, ends it for good.
//! - A term is never used twice.
//! - What a watch shows of the Lease ([`Elector::shown`]) spares looks and is trusted with nothing else.
//! - A Lease is free only when its holder has released it. One that was deleted, or whose holder was
//!   cleared by hand, is waited out like any other change: whoever led may not have heard of it yet.
//!
//! - [`Tenure::named`] counts only writes that were begun after [`Elector::want`] and are known to have
//!   come through: no later holder can have been before them.
//!
//! # Assumptions
//! - Where clocks of two machines differ in rate by less than the renew deadline and the lease duration do,
//!   two never lead at once. Nothing rests on that: what a leader sends waits for [`Tenure::named`].
//! - Nobody deletes the Lease while somebody leads and a candidate starts that has never seen it:
//!   nothing is left that could tell it of the leader. (It fences the leader off where there are
//!   NodeSubnets, as [`Takeover::First`] alone is not taken for a first start.)
//!
//! # Caveats
//! After a deletion, or a holder cleared by hand, nobody leads for a full lease duration.

use std::sync::Arc;
use std::time::Duration;

use super::intents::Intents;
pub(super) use border::LONG_VACANT;
use border::RELEASED_DURATION;
pub use border::{
    Answer, Ask, Leadership, Mono, Record, Settings, SettingsError, Takeover, Tenure, Wanted,
};
use cadastre_core::mutation::Mutation;

mod border;
mod shown;

/// Pause between two looks of a candidate that no watch tells of renewals: a hand-over is seen within it.
pub(super) const CANDIDATE_PAUSE: Duration = Duration::from_millis(400);

/// Answers that lie further apart tell nothing of the time between them. An API server is not put back to an
/// older state in less.
const STEADY: Duration = Duration::from_secs(10);

/// Pause from a write that came to nothing to the next one: a server that fails at once is not
/// pressed.
const WRITE_PAUSE: Duration = Duration::from_millis(400);

/// From one write to the next that somebody waits for: those who wait in between share it.
const WANTED_PAUSE: Duration = Duration::from_millis(20);

/// Decides.
#[derive(Debug)]
pub struct Elector {
    settings: Settings,
    phase: Phase,
    view: View,
    /// Whether to look before the next attempt: what became of the last one is not known
    look_first: bool,
    /// A write that would make us the holder and whose answer is not known
    attempt: Option<Attempt>,
    outstanding: Option<(Kind, Mono)>,
    due: Mono,
    /// No write before, as the last one came to nothing
    no_write_before: Mono,
    /// The highest count of transitions seen
    transitions: i64,
    /// The duration that the Lease last named
    duration: Duration,
    /// The highest version seen
    newest: u64,
    /// When the last look began
    looked_at: Mono,
    /// Whether what was seen last was shown by a watch, and not looked at since
    only_shown: bool,
    /// So long a watch is taken to go on
    calm_until: Mono,
    /// Whether there ever was a Lease
    ever: bool,
    release: Option<bool>,
    /// What the Lease should say under this term
    wanted: Option<Wanted>,
    /// When the last write was begun, and the number of what was wanted then
    asked: (Mono, u64),
    /// See [`Tenure::answered_since`]
    answered_since: Mono,
    /// The last answer, if there was none after it that says nothing
    answered: Option<Mono>,
}

/// The Lease as last seen.
#[derive(Debug)]
enum View {
    Unknown,
    /// With the time since when it has been missing
    Absent(Mono),
    /// With the time since when it has been like that
    Present(Record, Mono),
}

#[derive(Debug)]
enum Phase {
    Candidate,
    Holding {
        tenure: Tenure,
        record: Record,
        certain: bool,
    },
    Released,
}

#[derive(Clone, Debug)]
struct Attempt {
    record: Record,
    takeover: Takeover,
    /// The start of the first such write
    at: Mono,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Look,
    Acquire,
    Renew,
    Release,
}

impl Elector {
    /// A candidate that has seen nothing.
    pub fn new(settings: Settings) -> Self {
        Elector {
            settings,
            phase: Phase::Candidate,
            view: View::Unknown,
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

    /// Says what the Lease should name from now on. Whoever waits for its number is answered by
    /// [`Tenure::named`], once a write that was begun later has come through.
    pub fn want(&mut self, wanted: Wanted, now: Mono) {
        let ours =
            matches!(&self.phase, Phase::Holding { tenure, .. } if tenure.term == wanted.term);
        if ours {
            self.wanted = Some(wanted);
            self.hurry(now);
        }
    }

    /// A write is due at once where somebody waits for it.
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

    /// The state of affairs.
    pub fn leadership(&self) -> Leadership {
        match &self.phase {
            Phase::Released => Leadership::Released,
            Phase::Holding { .. } if self.release.is_some() => Leadership::Released,
            Phase::Holding { tenure, .. } => Leadership::Leading(tenure.clone()),
            Phase::Candidate => {
                let leader = match &self.view {
                    View::Present(record, _) => record.holder.clone(),
                    View::Unknown | View::Absent(_) => None,
                };
                Leadership::Standby { leader }
            }
        }
    }

    /// When [`Elector::poll`] may have something to ask.
    pub fn wake_at(&self) -> Option<Mono> {
        let idle = self.outstanding.is_some() || matches!(self.phase, Phase::Released);
        (!idle).then_some(self.due)
    }

    /// Gives up: for good, and at once as far as writers are concerned. `settled` says whether
    /// nothing is left in flight or of unclear outcome.
    pub fn release(&mut self, settled: bool) {
        self.release = Some(settled);
        self.due = Mono::ZERO;
        if matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// The next call, if one is due.
    pub fn poll(&mut self, now: Mono) -> Option<Ask> {
        if self.outstanding.is_some() || now < self.due {
            return None;
        }
        let (kind, ask) = match &self.phase {
            Phase::Released => return None,
            Phase::Holding { certain: false, .. } => (Kind::Look, Ask::Get),
            Phase::Holding { record, tenure, .. } => {
                let wanted = self.wanted.as_ref();
                self.asked = (now, wanted.map_or(0, |it| it.number));
                let intents = wanted.and_then(|it| it.intents.clone());
                let record = Record {
                    intents: intents.or_else(|| tenure.inherited.clone()),
                    ..record.clone()
                };
                match self.release {
                    Some(settled) => {
                        let free = Record {
                            holder: None,
                            lease_duration: RELEASED_DURATION,
                            unsettled: !settled,
                            intents: if settled {
                                Some(Arc::new(Intents::default()))
                            } else {
                                record.intents
                            },
                            ..record
                        };
                        (Kind::Release, Ask::Replace(free))
                    }
                    None => (Kind::Renew, Ask::Replace(record)),
                }
            }
            Phase::Candidate => self.candidate(now),
        };
        self.outstanding = Some((kind, now));
        Some(ask)
    }

    fn candidate(&mut self, now: Mono) -> (Kind, Ask) {
        if self.look_first || self.is_hearsay() {
            return (Kind::Look, Ask::Get);
        }
        let Some(takeover) = self.opening(now) else {
            return (Kind::Look, Ask::Get);
        };
        let ask = match &self.view {
            View::Present(record, _) => {
                let version = record.resource_version.clone();
                let intents = record.intents.clone();
                Ask::Replace(self.attempt(version, intents, takeover, now))
            }
            View::Unknown | View::Absent(_) => {
                Ask::Create(self.attempt(String::new(), None, takeover, now))
            }
        };
        (Kind::Acquire, ask)
    }

    /// How a tenure would begin that is sought now; nothing while somebody may lead.
    fn opening(&self, now: Mono) -> Option<Takeover> {
        match &self.view {
            View::Unknown => None,
            View::Absent(_) if !self.ever => Some(Takeover::First),
            View::Present(record, _) if record.is_released() && !record.unsettled => {
                Some(Takeover::Clean)
            }
            View::Present(..) | View::Absent(_) => {
                (self.opens_at()? <= now).then_some(Takeover::Unclean)
            }
        }
    }

    /// When the Lease as last seen may be sought.
    fn opens_at(&self) -> Option<Mono> {
        match &self.view {
            View::Unknown => None,
            View::Absent(_) if !self.ever => Some(Mono::ZERO),
            View::Absent(since) => Some(*since + self.settings.lease_duration.max(self.duration)),
            View::Present(record, _) if record.is_released() => Some(Mono::ZERO),
            View::Present(record, since) => Some(*since + record.lease_duration),
        }
    }

    /// The record that makes us the holder, and keeps what it names; the same one again while the
    /// outcome of a first try is not known.
    fn attempt(
        &mut self,
        resource_version: String,
        intents: Option<Arc<Intents>>,
        takeover: Takeover,
        now: Mono,
    ) -> Record {
        if let Some(attempt) = &self.attempt
            && attempt.record.resource_version == resource_version
            && attempt.takeover == takeover
            && !Mutation::TenureCountsFromLastTry.is_on()
        {
            return attempt.record.clone();
        }
        self.transitions += 1;
        let record = Record {
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
    pub fn answer(&mut self, answer: Answer, now: Mono) {
        let Some((kind, at)) = self.outstanding.take() else {
            return;
        };
        self.due = now + self.pause();
        self.came(answer != Answer::Unclear, now);
        if kind == Kind::Look {
            self.looked_at = at;
        }
        match (kind, answer) {
            (Kind::Renew, Answer::Written(record)) => {
                self.note(&record, now);
                let late = Mutation::RenewalCountsFromAnswer.is_on();
                self.renewed(record, if late { now } else { at });
                self.due = self.next_renewal(at, now);
            }
            (Kind::Acquire, Answer::Written(record)) => {
                self.note(&record, now);
                self.acquired(record);
                self.due = self.next_renewal(at, now);
            }
            (Kind::Renew, Answer::Conflict) if Mutation::RenewalConflictIgnored.is_on() => {
                if let Phase::Holding { record, .. } = &self.phase {
                    self.renewed(record.clone(), at);
                }
            }
            (Kind::Release, Answer::Written(_)) => self.phase = Phase::Released,
            (
                Kind::Renew | Kind::Release,
                answer @ (Answer::Conflict | Answer::Unclear | Answer::Missing),
            ) => {
                let trusted =
                    answer == Answer::Unclear && Mutation::UnclearLeaseWriteCounts.is_on();
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
            (Kind::Acquire, answer @ (Answer::Conflict | Answer::Unclear)) => {
                // The record may be ours by now, or somebody else's.
                self.ever |= answer == Answer::Conflict;
                self.look_first = true;
                self.due = now;
                self.no_write_before = at + WRITE_PAUSE;
            }
            (Kind::Look, Answer::Found(record)) => self.found(record, now),
            (Kind::Look, Answer::Missing) => self.missing(now),
            (Kind::Renew, Answer::Failed) => self.no_write_before = at + WRITE_PAUSE,
            _ => {}
        }
        self.hurry(now);
        if self.release.is_some() && matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    /// Takes note of whether the API server answers all along. The process's own start is no gap: it knew nothing
    /// before.
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

    /// When to renew what was written by a call that began at `at`; a release does not wait.
    fn next_renewal(&self, at: Mono, now: Mono) -> Mono {
        match self.release {
            Some(_) => now,
            None => at + self.settings.retry_period,
        }
    }

    /// A candidate tries as soon as the Lease is open, and looks again until then.
    fn candidate_due(&self, now: Mono) -> Mono {
        let opens = self.opens_at().map_or(self.due, |at| at.max(now));
        self.due.min(opens).max(self.no_write_before)
    }

    fn note(&mut self, record: &Record, now: Mono) {
        self.ever = true;
        self.newest = self.newest.max(record.version());
        self.duration = record.lease_duration;
        self.transitions = self.transitions.max(record.transitions);
        if !matches!(&self.view, View::Present(known, _) if known == record) {
            self.view = View::Present(record.clone(), now);
        }
    }

    fn found(&mut self, record: Record, now: Mono) {
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

    fn found_as_candidate(&mut self, record: Record, mine: bool, now: Mono) {
        let of_attempt = |attempt: &Attempt| attempt.record.transitions == record.transitions;
        if mine && self.attempt.as_ref().is_some_and(of_attempt) {
            self.acquired(record);
            self.due = now.max(self.no_write_before);
            return;
        }
        // What rested on another version of the record can no longer take effect. A creation still
        // can once the Lease is gone; then its record is waited out like anybody's.
        let rests_on_this =
            |attempt: &Attempt| attempt.record.resource_version == record.resource_version;
        self.attempt = self.attempt.take().filter(rests_on_this);
        self.due = self.candidate_due(now);
    }

    fn missing(&mut self, now: Mono) {
        if !matches!(self.view, View::Absent(_)) {
            self.view = View::Absent(now);
        }
        (self.look_first, self.only_shown) = (false, false);
        self.phase = Phase::Candidate;
        self.due = self.candidate_due(now);
    }

    fn renewed(&mut self, renewed: Record, at: Mono) {
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

    fn acquired(&mut self, record: Record) {
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
