//! Who leads: the decision, without clock or IO.
//!
//! One Lease object decides. Every write of it is a compare-and-swap by resourceVersion, so of two
//! candidates one wins. A candidate takes over when the record has not changed for the duration
//! that the record itself names, by the candidate's own monotonic clock; wall clocks are written for
//! people and never read.
//!
//! # Guarantees
//! - [`Tenure::valid_until`] lies before any other candidate can win: it counts from the *start* of
//!   the last renewal that came through, for the renew deadline, which is shorter than the lease.
//! - A tenure that has run out goes on if a later renewal succeeds: by compare-and-swap nobody led in
//!   between. A record that is somebody else's, or gone, ends it for good.
//! - A term is never used twice.
//!
//! # Assumptions
//! Clocks of two machines differ in rate by less than the renew deadline and the lease duration do.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

/// Monotonic time since an arbitrary start, as the caller measures it.
pub type Mono = Duration;

/// Pause between two looks of a candidate: a hand-over is seen within it.
const CANDIDATE_PAUSE: Duration = Duration::from_millis(400);

/// Duration written on release, so that nobody waits for a record without holder.
const RELEASED_DURATION: Duration = Duration::from_secs(1);

/// What an operator may set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Who this is, for people
    pub identity: String,
    /// What tells this process from all others of that identity
    pub nonce: String,
    /// How long others wait after the record last changed
    pub lease_duration: Duration,
    /// How long after the start of its last renewal a leader may write
    pub renew_deadline: Duration,
    /// Pause between renewals
    pub retry_period: Duration,
}

/// Settings that cannot work.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum SettingsError {
    /// The leader must stop before others start.
    #[error(
        "lease duration ({lease:?}) must be longer than the renew deadline ({renew:?}): the leader must stop before others start"
    )]
    LeaseTooShort { lease: Duration, renew: Duration },
    /// There must be time for a second try.
    #[error(
        "renew deadline ({renew:?}) must be longer than 1.2 times the retry period ({retry:?})"
    )]
    DeadlineTooShort { renew: Duration, retry: Duration },
    /// The Lease holds whole seconds.
    #[error("lease duration ({0:?}) must be a whole number of seconds, at least 1")]
    NotWholeSeconds(Duration),
}

impl Settings {
    /// Whether they can work.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let (lease, renew, retry) = (self.lease_duration, self.renew_deadline, self.retry_period);
        if lease.subsec_nanos() != 0 || lease.is_zero() {
            return Err(SettingsError::NotWholeSeconds(lease));
        }
        if lease <= renew {
            return Err(SettingsError::LeaseTooShort { lease, renew });
        }
        if renew <= retry.mul_f64(1.2) {
            return Err(SettingsError::DeadlineTooShort { renew, retry });
        }
        Ok(())
    }

    /// What stands in the record while this process holds it.
    fn holder(&self) -> String {
        format!("{}_{}", self.identity, self.nonce)
    }
}

/// The Lease, in the fields that count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// `spec.holderIdentity`; none: free
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds`
    pub lease_duration: Duration,
    /// `spec.leaseTransitions`
    pub transitions: i64,
    /// The annotation `cadastre.dev/unsettled`: the last holder left with writes of unknown outcome
    pub unsettled: bool,
    /// `metadata.resourceVersion`; empty in a record to be created
    pub resource_version: String,
}

/// A call of the API server; at most one is outstanding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Read it.
    Get,
    /// Create it; refused when it exists.
    Create(Record),
    /// Replace it if it still has the record's resourceVersion.
    Replace(Record),
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is like this.
    Found(Record),
    /// There is none.
    Missing,
    /// It is now like this.
    Written(Record),
    /// Refused: it exists already, has changed, or is gone.
    Conflict,
    /// Surely not executed.
    Failed,
    /// Nobody knows.
    Unclear,
}

/// The state of affairs, for all who write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// Somebody else leads, or nobody yet.
    Standby {
        /// Who, as far as known
        leader: Option<String>,
    },
    /// This process leads, until [`Tenure::valid_until`].
    Leading(Tenure),
    /// Given up for good.
    Released,
}

/// One reign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// Names it; never used twice
    pub term: Arc<str>,
    /// How it began
    pub takeover: Takeover,
    /// Nothing may be written from then on, unless it moves
    pub valid_until: Mono,
}

/// How a tenure began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// There was no Lease at all, and never had been as far as this process knows.
    First,
    /// The last holder left with everything settled.
    Clean,
    /// The last holder may have left writes on the wire.
    Unclean,
}

impl Takeover {
    /// A word for people.
    pub fn word(self) -> &'static str {
        match self {
            Takeover::First => "first start",
            Takeover::Clean => "clean hand-over",
            Takeover::Unclean => "take-over",
        }
    }
}

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
    /// The highest count of transitions seen
    transitions: i64,
    /// Whether there ever was a Lease
    ever: bool,
    release: Option<bool>,
}

/// The Lease as last seen.
#[derive(Debug)]
enum View {
    Unknown,
    Absent,
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
            transitions: 0,
            ever: false,
            release: None,
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
                    View::Unknown | View::Absent => None,
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
            Phase::Holding { record, .. } => match self.release {
                Some(settled) => {
                    let free = Record {
                        holder: None,
                        lease_duration: RELEASED_DURATION,
                        unsettled: !settled,
                        ..record.clone()
                    };
                    (Kind::Release, Ask::Replace(free))
                }
                None => (Kind::Renew, Ask::Replace(record.clone())),
            },
            Phase::Candidate => self.candidate(now),
        };
        self.outstanding = Some((kind, now));
        Some(ask)
    }

    fn candidate(&mut self, now: Mono) -> (Kind, Ask) {
        if self.look_first {
            return (Kind::Look, Ask::Get);
        }
        match &self.view {
            View::Unknown => (Kind::Look, Ask::Get),
            View::Absent => {
                let takeover = if self.ever {
                    Takeover::Unclean
                } else {
                    Takeover::First
                };
                (
                    Kind::Acquire,
                    Ask::Create(self.wanted(String::new(), takeover, now)),
                )
            }
            View::Present(record, since) => {
                let free = record.holder.is_none();
                if !free && now < *since + record.lease_duration {
                    return (Kind::Look, Ask::Get);
                }
                let takeover = if free && !record.unsettled {
                    Takeover::Clean
                } else {
                    Takeover::Unclean
                };
                let version = record.resource_version.clone();
                (
                    Kind::Acquire,
                    Ask::Replace(self.wanted(version, takeover, now)),
                )
            }
        }
    }

    /// The record that makes us the holder; the same one again while the outcome of a first try is
    /// not known.
    fn wanted(&mut self, resource_version: String, takeover: Takeover, now: Mono) -> Record {
        if let Some(attempt) = &self.attempt
            && attempt.record.resource_version == resource_version
        {
            return attempt.record.clone();
        }
        self.transitions += 1;
        let record = Record {
            holder: Some(self.settings.holder()),
            lease_duration: self.settings.lease_duration,
            transitions: self.transitions,
            unsettled: false,
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
        match (kind, answer) {
            (Kind::Renew, Answer::Written(record)) => {
                self.note(&record, now);
                self.renewed(record, at);
                self.due = at + self.settings.retry_period;
            }
            (Kind::Acquire, Answer::Written(record)) => {
                self.note(&record, now);
                self.acquired(record);
                self.due = at + self.settings.retry_period;
            }
            (Kind::Release, Answer::Written(_) | Answer::Unclear) => self.phase = Phase::Released,
            (Kind::Renew | Kind::Release, Answer::Conflict | Answer::Unclear | Answer::Missing) => {
                if let Phase::Holding { certain, .. } = &mut self.phase {
                    *certain = false;
                }
                self.due = now;
            }
            (Kind::Acquire, Answer::Conflict | Answer::Unclear) => {
                // The record may be ours by now, or somebody else's.
                self.look_first = true;
                self.due = now;
            }
            (Kind::Look, Answer::Found(record)) => self.found(record, now),
            (Kind::Look, Answer::Missing) => {
                self.view = View::Absent;
                self.look_first = false;
                self.phase = Phase::Candidate;
                self.due = now;
            }
            _ => {}
        }
        if self.release.is_some() && matches!(self.phase, Phase::Candidate) {
            self.phase = Phase::Released;
        }
    }

    fn pause(&self) -> Duration {
        match self.phase {
            Phase::Candidate => CANDIDATE_PAUSE.min(self.settings.retry_period),
            _ => self.settings.retry_period,
        }
    }

    fn note(&mut self, record: &Record, now: Mono) {
        self.ever = true;
        self.transitions = self.transitions.max(record.transitions);
        if !matches!(&self.view, View::Present(known, _) if known == record) {
            self.view = View::Present(record.clone(), now);
        }
    }

    fn found(&mut self, record: Record, now: Mono) {
        self.note(&record, now);
        self.look_first = false;
        let mine = record.holder.as_deref() == Some(&*self.settings.holder());
        match &mut self.phase {
            Phase::Holding {
                record: held,
                certain,
                ..
            } if mine && held.transitions == record.transitions => {
                *held = record;
                *certain = true;
                self.due = now;
            }
            Phase::Holding { .. } => {
                self.phase = Phase::Candidate;
                self.due = now;
            }
            Phase::Candidate => {
                let ours = mine
                    && self
                        .attempt
                        .as_ref()
                        .is_some_and(|a| a.record.transitions == record.transitions);
                if ours {
                    self.acquired(record);
                    self.due = now;
                } else if record.holder.is_none() {
                    self.due = now;
                } else if let View::Present(known, since) = &self.view {
                    // Expired: the next call is the attempt. It rests on what was just read.
                    self.due = self.due.min((*since + known.lease_duration).max(now));
                }
            }
            Phase::Released => {}
        }
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
            tenure.valid_until = tenure.valid_until.max(at + self.settings.renew_deadline);
        }
    }

    fn acquired(&mut self, record: Record) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let term = format!("{}-{}", record.transitions, self.settings.nonce);
        let valid_until = attempt.at + self.settings.renew_deadline;
        let tenure = Tenure {
            term: term.into(),
            takeover: attempt.takeover,
            valid_until,
        };
        self.phase = Phase::Holding {
            tenure,
            record,
            certain: true,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Mono {
        Duration::from_secs(seconds)
    }

    fn settings(nonce: &str) -> Settings {
        Settings {
            identity: "c".into(),
            nonce: nonce.into(),
            lease_duration: s(15),
            renew_deadline: s(10),
            retry_period: s(2),
        }
    }

    /// The Lease as a server keeps it.
    #[derive(Default)]
    struct Server(Option<Record>, u64);

    impl Server {
        fn answer(&mut self, ask: Ask) -> Answer {
            match (ask, &self.0) {
                (Ask::Get, None) => Answer::Missing,
                (Ask::Get, Some(record)) => Answer::Found(record.clone()),
                (Ask::Create(record), None) => self.write(record),
                (Ask::Replace(record), Some(is))
                    if is.resource_version == record.resource_version =>
                {
                    self.write(record)
                }
                _ => Answer::Conflict,
            }
        }

        fn write(&mut self, record: Record) -> Answer {
            self.1 += 1;
            let record = Record {
                resource_version: self.1.to_string(),
                ..record
            };
            self.0 = Some(record.clone());
            Answer::Written(record)
        }
    }

    /// Lets the elector make every call that is due.
    fn settle(elector: &mut Elector, server: &mut Server, now: Mono) {
        while let Some(ask) = elector.poll(now) {
            let answer = server.answer(ask);
            elector.answer(answer, now);
        }
    }

    fn tenure(elector: &Elector) -> Tenure {
        match elector.leadership() {
            Leadership::Leading(tenure) => tenure,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_ever_creates_the_lease_and_may_write_for_the_renew_deadline() {
        let (mut a, mut server) = (Elector::new(settings("a")), Server::default());
        settle(&mut a, &mut server, s(100));
        let tenure = tenure(&a);
        assert_eq!(
            (tenure.takeover, tenure.valid_until, &*tenure.term),
            (Takeover::First, s(110), "1-a")
        );
    }

    #[test]
    fn a_candidate_waits_a_full_lease_after_the_last_change() {
        let (mut a, mut b, mut server) = (
            Elector::new(settings("a")),
            Elector::new(settings("b")),
            Server::default(),
        );
        settle(&mut a, &mut server, s(0));
        settle(&mut b, &mut server, s(1));
        settle(&mut a, &mut server, s(2));
        for t in 2..17 {
            settle(&mut b, &mut server, s(t));
            assert!(
                matches!(b.leadership(), Leadership::Standby { .. }),
                "at {t} s; the record changed at 2 s"
            );
        }
        settle(&mut b, &mut server, s(17));
        assert_eq!(tenure(&b).takeover, Takeover::Unclean);
        assert_eq!(&*tenure(&b).term, "2-b");
        assert!(
            tenure(&a).valid_until <= s(12),
            "the old leader stopped writing long before"
        );
        settle(&mut a, &mut server, s(19));
        assert_eq!(
            a.leadership(),
            Leadership::Standby {
                leader: Some("c_b".into())
            }
        );
    }

    #[test]
    fn a_clean_release_hands_over_at_once_and_an_unsettled_one_says_so() {
        for (settled, takeover) in [(true, Takeover::Clean), (false, Takeover::Unclean)] {
            let (mut a, mut b, mut server) = (
                Elector::new(settings("a")),
                Elector::new(settings("b")),
                Server::default(),
            );
            settle(&mut a, &mut server, s(0));
            settle(&mut b, &mut server, s(0));
            a.release(settled);
            assert_eq!(
                a.leadership(),
                Leadership::Released,
                "nothing is written from now on"
            );
            settle(&mut a, &mut server, s(1));
            settle(&mut b, &mut server, s(1));
            assert_eq!(tenure(&b).takeover, takeover);
            settle(&mut a, &mut server, s(2));
            assert_eq!(a.leadership(), Leadership::Released, "for good");
        }
    }

    #[test]
    fn an_acquisition_whose_answer_was_lost_counts_from_its_start() {
        let (mut a, mut server) = (Elector::new(settings("a")), Server::default());
        let missing = server.answer(a.poll(s(0)).unwrap());
        a.answer(missing, s(0));
        let create = a.poll(s(1)).unwrap();
        server.answer(create);
        a.answer(Answer::Unclear, s(4));
        settle(&mut a, &mut server, s(5));
        assert_eq!(tenure(&a).takeover, Takeover::First);
        assert!(
            tenure(&a).valid_until >= s(11),
            "from the write at 1 s, or from the renewal at 5 s"
        );
    }

    #[test]
    fn a_tenure_that_ran_out_goes_on_if_nobody_came_between() {
        let (mut a, mut server) = (Elector::new(settings("a")), Server::default());
        settle(&mut a, &mut server, s(0));
        let term = tenure(&a).term;
        a.poll(s(2));
        a.answer(Answer::Unclear, s(30));
        assert!(tenure(&a).valid_until < s(30));
        settle(&mut a, &mut server, s(30));
        assert_eq!((tenure(&a).term, tenure(&a).valid_until), (term, s(40)));
    }

    #[test]
    fn a_lease_deleted_under_us_ends_the_tenure_and_is_never_a_first_start() {
        let (mut a, mut server) = (Elector::new(settings("a")), Server::default());
        settle(&mut a, &mut server, s(0));
        server.0 = None;
        settle(&mut a, &mut server, s(2));
        assert_eq!(
            (tenure(&a).takeover, &*tenure(&a).term),
            (Takeover::Unclean, "2-a")
        );
    }

    #[test]
    fn the_same_identity_with_another_nonce_is_somebody_else() {
        let (mut a, mut again, mut server) = (
            Elector::new(settings("a")),
            Elector::new(settings("a2")),
            Server::default(),
        );
        settle(&mut a, &mut server, s(0));
        settle(&mut again, &mut server, s(1));
        assert_eq!(
            again.leadership(),
            Leadership::Standby {
                leader: Some("c_a".into())
            }
        );
    }

    #[test]
    fn settings_that_cannot_work_are_refused_with_the_reason() {
        let good = settings("a");
        assert_eq!(good.validate(), Ok(()));
        let short = Settings {
            lease_duration: s(10),
            ..good.clone()
        };
        assert!(
            short
                .validate()
                .unwrap_err()
                .to_string()
                .contains("must stop before others start")
        );
        let late = Settings {
            renew_deadline: s(2),
            ..good.clone()
        };
        assert!(
            late.validate()
                .unwrap_err()
                .to_string()
                .contains("1.2 times")
        );
        let odd = Settings {
            lease_duration: Duration::from_millis(15_500),
            ..good
        };
        assert!(
            odd.validate()
                .unwrap_err()
                .to_string()
                .contains("whole number")
        );
    }
}
