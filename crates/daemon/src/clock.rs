//! The monotonic clock and the wall clock.
//!
//! Deadlines use a monotonic clock that also counts while the machine is suspended (`CLOCK_BOOTTIME`): a leader that
//! was suspended until its lease expired must know it on waking. Wall time is only for people and for other processes.

use std::time::Duration;

use cadastre_clock::since_boot;
use jiff::Timestamp;

/// Reads both clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Time since boot, including suspend.
    pub fn now(&self) -> Duration {
        since_boot()
    }

    /// The time of day, which may be changed at any moment.
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
