//! The two clocks.
//!
//! Deadlines run on a monotonic clock that also counts while the machine is suspended
//! (`CLOCK_BOOTTIME`): a leader that slept through its lease should know it on waking. Wall time is
//! for people and for other processes only.

use std::time::Duration;

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

/// Time since boot, with the time that the machine slept.
#[cfg(target_os = "linux")]
pub fn since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Time since it was first asked for. Daemons run on Linux; this is for people's tools elsewhere.
#[cfg(not(target_os = "linux"))]
pub fn since_boot() -> Duration {
    use std::sync::OnceLock;
    use std::time::Instant;
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
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
