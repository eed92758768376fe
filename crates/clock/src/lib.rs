//! The clock for deadlines, shared by the daemons and the CNI plugin, which exchange times of it.

use std::time::Duration;

/// Time since boot, including suspend (`CLOCK_BOOTTIME`). All processes of a machine agree on it.
#[cfg(target_os = "linux")]
pub fn since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Time since the first call. Only for command line tools on other systems: daemons run on Linux.
#[cfg(not(target_os = "linux"))]
pub fn since_boot() -> Duration {
    use std::sync::OnceLock;
    use std::time::Instant;
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
}
