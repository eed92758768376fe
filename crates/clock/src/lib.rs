//! The clock that deadlines are kept by: one for the daemons and the CNI plugin, which tell each other times of it.

use std::time::Duration;

/// Time since boot, with the time that the machine slept. The same for every process of a machine.
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
