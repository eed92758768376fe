//! The two clocks.
//!
//! Deadlines run on a monotonic clock that also counts while the machine is suspended
//! (`CLOCK_BOOTTIME`): a leader that slept through its lease should know it on waking. Wall time is
//! for people and for other processes only.

use std::time::Duration;

use cadastre_clock::since_boot;
use jiff::Timestamp;

/// Reads both clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Time since boot, suspension included.
    pub fn now(&self) -> Duration {
        since_boot()
    }

    /// The time of day.
    pub fn wall(&self) -> Timestamp {
        Timestamp::now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monotonic_time_never_goes_back() {
        let clock = Clock;
        let first = clock.now();
        assert!(clock.now() >= first && first > Duration::ZERO);
    }
}
