//! Pauses after errors.

use std::time::{Duration, Instant};

/// Doubling pauses with jitter, so that those who lost the API server together do not come back at one
/// moment. Back to the first one after a quiet time: a stream that fails again and again says now and
/// then that it begins anew, which is no success.
#[derive(Clone, Debug)]
pub struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
    last: Option<Instant>,
    random: u64,
}

impl Pauses {
    /// From `first` to `longest`, each between half of that and one and a half; `seed` sets them apart
    /// from those of others.
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
        // The longest pause and as much again of quiet.
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
