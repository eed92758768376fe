//! The values that an elector receives, asks for and returns.

use std::sync::Arc;
use std::time::Duration;

use cadastre_core::mutation::Mutation;
use thiserror::Error;

use crate::cluster::intents::WriteIntents;
use crate::cluster::names::LeaderTerm;

/// Monotonic time since an arbitrary start, as the caller measures it.
pub type Mono = Duration;

/// Duration written on release. It marks the record as released: no holder writes so short a duration.
pub(super) const RELEASED_DURATION: Duration = Duration::from_secs(1);

/// Settings of a candidate.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    /// Name of this process, for the record's holder
    pub identity: String,
    /// Tells this process from all others of that name
    pub nonce: String,
    /// How long others wait after the last change of the record
    pub lease_duration: Duration,
    /// How long after the start of its last renewal a leader may write
    pub renew_deadline: Duration,
    /// Interval of renewals
    pub retry_period: Duration,
}

/// Why settings are invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum LeaseSettingsError {
    /// The leader would not stop before others start.
    #[error(
        "lease duration ({lease:?}) must be longer than the renew deadline ({renew:?}): the leader must stop before others start"
    )]
    LeaseTooShort { lease: Duration, renew: Duration },
    /// There would be no time for a second try.
    #[error(
        "renew deadline ({renew:?}) must be longer than 1.2 times the retry period ({retry:?})"
    )]
    DeadlineTooShort { renew: Duration, retry: Duration },
    /// The Lease stores whole seconds.
    #[error("lease duration ({0:?}) must be a whole number of seconds, at least 1")]
    NotWholeSeconds(Duration),
}

impl LeaseSettings {
    /// Checks that the leader stops before others start, and that a renewal can be retried.
    pub fn validate(&self) -> Result<(), LeaseSettingsError> {
        let (lease, renew, retry) = (self.lease_duration, self.renew_deadline, self.retry_period);
        if lease.subsec_nanos() != 0 || lease.is_zero() {
            return Err(LeaseSettingsError::NotWholeSeconds(lease));
        }
        if lease <= renew {
            return Err(LeaseSettingsError::LeaseTooShort { lease, renew });
        }
        if renew <= retry.mul_f64(1.2) {
            return Err(LeaseSettingsError::DeadlineTooShort { renew, retry });
        }
        Ok(())
    }

    /// Returns the holder identity in the record while this process leads.
    pub(super) fn holder(&self) -> String {
        format!("{}_{}", self.identity, self.nonce)
    }
}

/// The Lease, in the fields that count here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// `spec.holderIdentity`
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds`
    pub lease_duration: Duration,
    /// `spec.leaseTransitions`
    pub transitions: i64,
    /// The annotation `cadastre.dev/unsettled`: the last holder left with indeterminate writes
    pub unsettled: bool,
    /// The annotation `cadastre.dev/intents`: what holders may have in flight, if that is known
    pub intents: Option<Arc<WriteIntents>>,
    /// `metadata.resourceVersion`; empty in a record to be created
    pub resource_version: String,
}

impl LeaseRecord {
    /// Returns whether the last holder released the Lease. A holder cleared by hand released nothing.
    pub(super) fn is_released(&self) -> bool {
        let by_hand = Mutation::ClearedHolderCountsAsReleased.is_on();
        self.holder.is_none() && (self.lease_duration <= RELEASED_DURATION || by_hand)
    }

    /// Returns the version as a number, which grows; an invalid one counts as the oldest.
    pub(super) fn version(&self) -> u64 {
        self.resource_version.parse().unwrap_or_default()
    }
}

/// A call to the API server; at most one is outstanding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseCall {
    /// Read the Lease.
    Get,
    /// Create the Lease; rejected if it exists.
    Create(LeaseRecord),
    /// Replace the Lease if it still has the record's resourceVersion.
    Replace(LeaseRecord),
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The Lease as read.
    Found(LeaseRecord),
    /// There is no Lease.
    Missing,
    /// The Lease as written.
    Written(LeaseRecord),
    /// Rejected: the Lease exists already, has changed, or is gone.
    Conflict,
    /// The call had no effect.
    Failed,
    /// The outcome is unknown.
    Unclear,
}

/// The election's result, for all who write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// Another process leads, or none yet.
    Standby {
        /// The leader, if it is known
        leader: Option<String>,
    },
    /// This process leads, until [`Tenure::valid_until`].
    Leading(Tenure),
    /// This process gave up leadership for good.
    Released,
}

/// The time of one leadership, from its beginning to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// Identifies the tenure; never used twice
    pub term: LeaderTerm,
    /// How the tenure began
    pub takeover: Takeover,
    /// Time from which nothing may be written; renewals move it
    pub valid_until: Mono,
    /// How long nobody had led before, by wall clocks: a hint that the API server was restored to an older state. The
    /// election does not depend on it
    pub vacant: Duration,
    /// What earlier holders may have in flight, as the Lease named it at the takeover; `None` if unknown
    pub inherited: Option<Arc<WriteIntents>>,
    /// Since when the API server has answered without a gap: lists from before may show a lost state
    pub answered_since: Mono,
    /// The highest [`LeaseContent::number`] for which the Lease was written in this tenure
    pub named: u64,
}

/// The content that the Lease should get, apart from its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseContent {
    /// The term that this is for; in another term it is ignored
    pub term: LeaderTerm,
    /// Grows with each request that waits for a write of the Lease; a higher number makes a write due at once
    pub number: u64,
    /// What may be in flight; `None` as long as only the inherited intents are known
    pub intents: Option<Arc<WriteIntents>>,
    /// Whether agents were listened to after a gap; until then the Lease records the gap
    pub agents_heard: bool,
}

/// Longer than a cluster with a healthy standby is ever without a leader.
pub(in crate::cluster) const LONG_VACANT: Duration = Duration::from_secs(60);

impl Tenure {
    /// Returns whether nobody led for so long before that the API server may have been restored to an older state.
    pub fn follows_a_gap(&self) -> bool {
        self.takeover != Takeover::First && self.vacant > LONG_VACANT
    }
}

/// How a tenure began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// There was no Lease, and never had been as far as this process knows.
    First,
    /// The last holder left with all its writes settled.
    Clean,
    /// The last holder may have left writes in flight.
    Unclean,
}

impl Takeover {
    /// Returns a description for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Takeover::First => "first start",
            Takeover::Clean => "clean hand-over",
            Takeover::Unclean => "take-over",
        }
    }
}
