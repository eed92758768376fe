//! Reading the clocks that [`Now`] is made of.

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use super::ops::Now;

/// Reads all of them.
pub fn now() -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    Now {
        boot: boot().to_owned(),
        since_boot: since_boot(),
        wall_ms: wall.map_or(0, |it| i64::try_from(it.as_millis()).unwrap_or(i64::MAX)),
    }
}

/// Time since boot, with the time that the machine slept. The same for every process of a machine:
/// what deadlines between plugin and agent are told in.
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The running boot; it stays the same for the life of a process. Empty where the kernel does not say:
/// then a reboot goes unnoticed, and addresses that cooled before it may cool longer.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.unwrap_or_default().trim().to_owned()
    })
}
