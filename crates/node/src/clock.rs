//! Reads the current time as a [`Now`].

use std::fs;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

pub use cadastre_clock::since_boot;

use super::ops::Now;

/// Returns the boot ID, the time since boot and the time of day.
pub fn now() -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    Now {
        boot: boot().to_owned(),
        since_boot: since_boot(),
        wall_ms: wall.map_or(0, |it| i64::try_from(it.as_millis()).unwrap_or(i64::MAX)),
    }
}

/// Returns the ID of the running boot, which is read once per process. If the kernel does not report an ID, the result
/// is empty. In this case, reboots are not noticed, and an address that was released before a reboot can cool for
/// longer than its cooldown.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.unwrap_or_default().trim().to_owned()
    })
}
