//! The clock for deadlines. The agent and the CNI plugin send points in time to each other, so both read the clock
//! through this crate.

use std::time::Duration;

/// Returns the time since boot, including suspend (`CLOCK_BOOTTIME`). All processes of a host read the same clock.
#[cfg(target_os = "linux")]
pub fn since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the time since the first call. This variant is for systems other than Linux. Only command line tools run on
/// such systems, because the daemons run on Linux.
#[cfg(not(target_os = "linux"))]
pub fn since_boot() -> Duration {
    use std::sync::OnceLock;
    use std::time::Instant;
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
}
