//! The monotonic clock and the wall clock.
//!
//! Deadlines use a monotonic clock that continues while the host is suspended (`CLOCK_BOOTTIME`). So a leader that was
//! suspended until its lease expired notices the expiry as soon as it continues. Wall time is used only for times that
//! users or other processes read. For example, a new leader uses wall time to compute how much of a quarantine is left.

use std::time::Duration;

use cadastre_clock::since_boot;
use jiff::Timestamp;

/// Reads the monotonic clock and the wall clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Returns the time since boot, including the time in which the host was suspended.
    pub fn now(&self) -> Duration {
        since_boot()
    }

    /// Returns the wall time, which NTP or an administrator can change at any moment.
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
