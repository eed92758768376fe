//! Pauses after errors.

use std::time::{Duration, Instant};

/// Pauses whose lengths double, with jitter. So clients that lost the API server at the same moment do not all retry at
/// the same moment. The pauses become short again only after a time without errors. A restart of a stream does not
/// count as success, because a stream that always fails is restarted, too.
#[derive(Clone, Debug)]
pub struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
    last: Option<Instant>,
    random: u64,
}

impl Pauses {
    /// Returns pauses that grow from `first` to `longest`, each multiplied by a random factor from 0.5 to 1.5. The
    /// random numbers depend on `seed`.
    pub fn new(first: Duration, longest: Duration, seed: u64) -> Self {
        Self {
            first,
            longest,
            next: first,
            last: None,
            random: seed | 1,
        }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        // If the time since the last error exceeds twice the longest possible pause (1.5 times `longest`), the pauses
        // start again with `first`.
        if self
            .last
            .is_some_and(|last| last.elapsed() > 3 * self.longest)
        {
            self.next = self.first;
        }
        self.last = Some(Instant::now());
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let thousandths = u32::try_from(self.random % 1000).unwrap_or(0);
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        Some(pause / 2 + pause * thousandths / 1000)
    }
}
