//! The data that an elector exchanges with its caller: settings, records, calls, answers, and the result.

use std::sync::Arc;
use std::time::Duration;

use cadastre_core::mutation::Mutation;

use crate::cluster::intents::WriteIntents;
use crate::cluster::names::TermId;

/// Monotonic time since an arbitrary start, as the caller measures it.
pub type Mono = Duration;

/// Lease duration that is written on release. An empty holder with this duration marks the Lease as released.
pub(super) const RELEASED_DURATION: Duration = Duration::from_secs(1);

/// The identity of a candidate, and the durations of the election while the API server answers fast. While it answers
/// slowly, all three durations are up to four times as long, but the lease duration at most 30 s.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    /// Name of this process, usually the host name: the first part of the Lease's `holderIdentity`
    pub identity: String,
    /// Distinguishes this process from all others of the same name: the second part of `holderIdentity`
    pub nonce: String,
    /// How long other candidates wait after the last change of the Lease before they take over
    pub lease_duration: Duration,
    /// For how long a leader may write after the start of its last renewal
    pub renew_deadline: Duration,
    /// Interval at which a leader renews the Lease
    pub retry_period: Duration,
}

impl LeaseSettings {
    /// Checks that a leader stops writing before another candidate may take over, and that there is time to retry a
    /// renewal. Also checks that the lease duration is a whole number of seconds, because the Lease stores whole
    /// seconds.
    pub fn validate(&self) -> Result<(), String> {
        let (lease, renew, retry) = (self.lease_duration, self.renew_deadline, self.retry_period);
        let problem = if lease.subsec_nanos() != 0 || lease.is_zero() {
            format!("lease duration ({lease:?}) must be a whole number of seconds, at least 1")
        } else if lease <= renew {
            format!(
                "lease duration ({lease:?}) must be longer than the renew deadline ({renew:?}): the leader must stop before others start"
            )
        } else if renew <= retry.mul_f64(1.2) {
            format!(
                "renew deadline ({renew:?}) must be longer than 1.2 times the retry period ({retry:?})"
            )
        } else {
            return Ok(());
        };
        Err(problem)
    }

    /// Returns the `spec.holderIdentity` of this process: identity and nonce, joined by `_`.
    pub(super) fn holder(&self) -> String {
        format!("{}_{}", self.identity, self.nonce)
    }
}

/// The fields of the Lease that the election uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The value of `spec.holderIdentity`; `None` if the Lease has no holder
    pub holder: Option<String>,
    /// The value of `spec.leaseDurationSeconds`; 15 seconds if this field is not valid
    pub lease_duration: Duration,
    /// The value of `spec.leaseTransitions`, which grows when the holder changes; 0 if it is not set
    pub transitions: i64,
    /// Whether the annotation `cadastre.dev/unsettled` is set: the last holder released the Lease while writes were
    /// indeterminate
    pub unsettled: bool,
    /// The annotation `cadastre.dev/intents`: writes that holders may have in flight. `None` if these are unknown
    pub intents: Option<Arc<WriteIntents>>,
    /// `metadata.resourceVersion`; empty if the Lease is to be created
    pub resource_version: String,
}

impl LeaseRecord {
    /// Returns whether the last holder released the Lease. A Lease whose holder was cleared by a user is not released.
    pub(super) fn is_released(&self) -> bool {
        let by_hand = Mutation::ClearedHolderCountsAsReleased.is_on();
        self.holder.is_none() && (self.lease_duration <= RELEASED_DURATION || by_hand)
    }

    /// Returns the resourceVersion as a number, which grows with each write. An invalid resourceVersion counts as the
    /// oldest.
    pub(super) fn version(&self) -> u64 {
        self.resource_version.parse().unwrap_or_default()
    }
}

/// A call to the API server. At most one call is unanswered at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseCall {
    /// Read the Lease.
    Get,
    /// Create the Lease; rejected if it exists.
    Create(LeaseRecord),
    /// Replace the Lease if it still has the record's resourceVersion.
    Replace(LeaseRecord),
}

/// The API server's answer to a [`LeaseCall`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The Lease that the API server returned to a read.
    Found(LeaseRecord),
    /// There is no Lease.
    Missing,
    /// The Lease that the API server has stored after a write.
    Written(LeaseRecord),
    /// Rejected: the Lease exists already, has changed, or is gone.
    Conflict,
    /// Rejected for another reason. The call had no effect.
    Failed,
    /// No clear answer: the call may have taken effect, or may still do so.
    Unclear,
}

/// The result of the election, as the controller and its writer see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// Another process leads, or none does.
    Standby {
        /// The `spec.holderIdentity` of the leader, if it is known
        leader: Option<String>,
    },
    /// This process leads, until [`LeadershipTerm::valid_until`].
    Leading(LeadershipTerm),
    /// This process gave up leadership for good.
    Released,
}

/// A term: one period of leadership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeadershipTerm {
    /// Id of the term, never used twice
    pub id: TermId,
    /// How the term began; the fence does more after an unclean takeover
    pub takeover: Takeover,
    /// The time at which the leader must stop writing, unless a renewal postpones this time
    pub valid_until: Mono,
    /// The time without a leader before this term: how long the Lease had not been renewed, by wall clocks. If this
    /// time is long, the API server may have been restored to an older state. The election does not depend on this
    /// field
    pub vacant: Duration,
    /// Writes that earlier holders may have in flight, as the Lease named them at the takeover; `None` if they are
    /// unknown
    pub inherited: Option<Arc<WriteIntents>>,
    /// The time since which the API server has answered without interruption. Before this time, the API server may have
    /// been restored to an older state. So lists that were requested before this time do not count
    pub answered_since: Mono,
    /// The highest [`LeaseContent::number`] for which the Lease was written in this term
    pub named: u64,
}

/// The content that the Lease should get, apart from its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseContent {
    /// The term for which the content was decided. During any other term, the elector ignores the content
    pub term: TermId,
    /// Requests may wait until [`LeadershipTerm::named`] reaches this number, which happens when the content is
    /// written. If the number is higher than in the last content, the Lease is written at once
    pub number: u64,
    /// Allocations of podCIDRs that may be in flight; `None` as long as only those of earlier leaders are known
    pub intents: Option<Arc<WriteIntents>>,
    /// Whether the agent grace is over: the time after a gap in which agents report. Until then, the Lease records the
    /// gap
    pub agents_heard: bool,
}

/// A time without a leader is a gap if it is longer than this. A healthy standby always takes over sooner.
pub(in crate::cluster) const LONG_VACANT: Duration = Duration::from_secs(60);

impl LeadershipTerm {
    /// Returns whether there was a gap before this term: a time without a leader, so long that the API server may have
    /// been restored to an older state.
    pub fn follows_a_gap(&self) -> bool {
        self.takeover != Takeover::First && self.vacant > LONG_VACANT
    }
}

#[cfg(test)]
impl LeadershipTerm {
    /// Returns a term that never runs out. Its Lease names no inherited writes, and has not been written in this term.
    pub(crate) fn of(id: &str, takeover: Takeover) -> Self {
        LeadershipTerm {
            id: id.into(),
            takeover,
            valid_until: Duration::MAX,
            vacant: Duration::ZERO,
            inherited: None,
            answered_since: Duration::ZERO,
            named: 0,
        }
    }
}

/// How a term began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// The Lease did not exist, and this process had never seen it.
    First,
    /// The last holder released the Lease, and knew the outcome of all its writes.
    Clean,
    /// The last holder may have left writes in flight.
    Unclean,
}

impl Takeover {
    /// Returns a description for logs, such as `clean hand-over`.
    pub fn as_str(self) -> &'static str {
        match self {
            Takeover::First => "first start",
            Takeover::Clean => "clean hand-over",
            Takeover::Unclean => "take-over",
        }
    }
}
