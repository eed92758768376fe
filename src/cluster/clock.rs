//! The two clocks.
//!
//! Deadlines run on a monotonic clock that also counts while the machine is suspended
//! (`CLOCK_BOOTTIME`): a leader that slept through its lease must know it on waking. Wall time is
//! for people and for other processes only.

use std::time::Duration;

use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use super::lease::Mono;

/// Reads both clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Time since boot, suspension included.
    pub fn now(&self) -> Mono {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
        Duration::new(seconds, nanos)
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
