//! Computes random delays, so that agents that start together do not all write at once. Also computes pauses that grow
//! with each failure.

use std::time::Duration;

/// A pseudo-random sequence. Different seeds give different sequences.
#[derive(Debug)]
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Returns a random duration below `of`.
    pub(crate) fn part(&mut self, of: Duration) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let thousandths = u32::try_from(self.0 % 1000).unwrap_or(0);
        of * thousandths / 1000
    }

    /// Returns `interval` plus a random duration below a fifth of `interval`.
    pub(crate) fn pause(&mut self, interval: Duration) -> Duration {
        interval + self.part(interval / 5)
    }
}

/// Returns the pause after a failure. `failures` is the number of earlier failures. The pause is `first`, doubled for
/// each earlier failure, but at most `longest`.
pub(crate) fn backoff((first, longest): (Duration, Duration), failures: u32) -> Duration {
    longest.min(first * 2u32.pow(failures.min(16)))
}
