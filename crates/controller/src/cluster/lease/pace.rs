//! The pace of an election: its durations grow while the API server answers slowly.
//!
//! Short durations make takeovers fast. But a leader whose renewals take longer than these durations would lose the
//! Lease again and again. So if a call takes longer than a retry period, all durations double. They shrink again after
//! a time without slow calls.

use std::time::Duration;

use super::{LeaseSettings, Mono};

/// The durations grow no further if the lease duration would exceed this. A takeover must not take so long that the
/// time without a leader counts as a gap (`LONG_VACANT`).
const LONGEST: Duration = Duration::from_secs(30);

/// After this time without slow calls, the durations are halved.
const CALM: Duration = Duration::from_secs(60);

/// The factor by which a candidate multiplies the durations of its settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    factor: u32,
    /// The time since which every call has been fast enough for half of the factor. Unused while the factor is 1
    calm_since: Mono,
}

impl Pace {
    /// Returns the pace with the durations of the settings.
    pub(super) const FASTEST: Self = Pace {
        factor: 1,
        calm_since: Mono::ZERO,
    };

    pub(super) fn factor(self) -> u32 {
        self.factor
    }

    /// Adapts the pace to a call that ended now, with an answer or without.
    pub(super) fn note_call(&mut self, took: Duration, settings: &LeaseSettings, now: Mono) {
        let retry_period = settings.retry_period * self.factor;
        if took > retry_period {
            self.factor = (self.factor * 2).min(settings.slowest_factor());
            self.calm_since = now;
        } else if self.factor > 1 && took > retry_period / 4 {
            // With half of the factor, a call that takes twice as long would be slow.
            self.calm_since = now;
        } else if self.factor > 1 && now >= self.calm_since + CALM {
            self.factor /= 2;
            self.calm_since = now;
        }
    }
}

impl LeaseSettings {
    /// Returns the highest factor of the durations, a power of two.
    pub(super) fn slowest_factor(&self) -> u32 {
        let doubled = std::iter::successors(Some(1), |factor| Some(factor * 2));
        let fits = |factor: &u32| self.lease_duration * *factor <= LONGEST;
        doubled.take_while(fits).last().unwrap_or(1)
    }

    /// Returns the longest lease duration that a leader with these settings writes.
    pub(super) fn longest_duration(&self) -> Duration {
        self.lease_duration * self.slowest_factor()
    }

    /// Returns the factor of a leader with these settings that has written this lease duration.
    fn factor_of(&self, lease_duration: Duration) -> u32 {
        let factor = lease_duration.as_secs() / self.lease_duration.as_secs().max(1);
        u32::try_from(factor)
            .unwrap_or(u32::MAX)
            .clamp(1, self.slowest_factor())
    }

    /// Returns for how long a leader may write after it began to write this lease duration.
    pub(super) fn renew_deadline_of(&self, lease_duration: Duration) -> Duration {
        self.renew_deadline * self.factor_of(lease_duration)
    }

    /// Returns the interval at which a leader renews that has written this lease duration.
    pub(super) fn retry_period_of(&self, lease_duration: Duration) -> Duration {
        self.retry_period * self.factor_of(lease_duration)
    }
}

#[cfg(test)]
mod tests;
