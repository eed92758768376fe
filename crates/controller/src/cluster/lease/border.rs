//! What an elector is told, asks and says.

use std::sync::Arc;
use std::time::Duration;

use cadastre_core::mutation::Mutation;
use thiserror::Error;

use crate::cluster::intents::Intents;

/// Monotonic time since an arbitrary start, as the caller measures it.
pub type Mono = Duration;

/// Duration written on release. It also marks the record: nobody else writes so short a one.
pub(super) const RELEASED_DURATION: Duration = Duration::from_secs(1);

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
    pub(super) fn holder(&self) -> String {
        format!("{}_{}", self.identity, self.nonce)
    }
}

/// The Lease, in the fields that count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// `spec.holderIdentity`
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds`
    pub lease_duration: Duration,
    /// `spec.leaseTransitions`
    pub transitions: i64,
    /// The annotation `cadastre.dev/unsettled`: the last holder left with writes of unknown outcome
    pub unsettled: bool,
    /// The annotation `cadastre.dev/intents`: what its holders may have in flight, if that is known
    pub intents: Option<Arc<Intents>>,
    /// `metadata.resourceVersion`; empty in a record to be created
    pub resource_version: String,
}

impl Record {
    /// Whether its last holder gave it up. A holder cleared by hand gave up nothing.
    pub(super) fn is_released(&self) -> bool {
        let by_hand = Mutation::ClearedHolderCountsAsReleased.is_on();
        self.holder.is_none() && (self.lease_duration <= RELEASED_DURATION || by_hand)
    }

    /// Versions of one kind grow as numbers; one that is none is older than all.
    pub(super) fn version(&self) -> u64 {
        self.resource_version.parse().unwrap_or_default()
    }
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
    /// For how long nobody had led before, by wall clocks: a hint that the API server was put back to
    /// an older state. No decision about who leads rests on it
    pub vacant: Duration,
    /// What earlier holders may have in flight, as the Lease named it when it was taken over; nothing
    /// where that is not known
    pub inherited: Option<Arc<Intents>>,
    /// Since when the API server has answered all along: what was listed before may be of a state that is no
    /// more
    pub answered_since: Mono,
    /// The highest [`Wanted::number`] that the Lease was written for in this reign
    pub named: u64,
}

/// What the Lease should say besides who holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Under which term; another one's is not for this Lease
    pub term: Arc<str>,
    /// Grows with all that waits for the Lease to be written: then it is written at once
    pub number: u64,
    /// What may be in flight; nothing as long as what was inherited is all that is known
    pub intents: Option<Arc<Intents>>,
    /// Whether agents have had their say, where nobody had led for long: until then the Lease tells of that gap
    pub agents_heard: bool,
}

/// Longer than any leader is missing while the others are well.
pub(in crate::cluster) const LONG_VACANT: Duration = Duration::from_secs(60);

impl Tenure {
    /// Whether the record of the last leader is so old that the API server may have been put back to
    /// an older state.
    pub fn follows_a_gap(&self) -> bool {
        self.takeover != Takeover::First && self.vacant > LONG_VACANT
    }
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
