//! Reading the clocks that [`Now`] is made of.

use std::fs;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

pub use cadastre_clock::since_boot;

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

/// The running boot; it stays the same for the life of a process. Empty where the kernel does not say:
/// then a reboot goes unnoticed, and addresses that cooled before it may cool longer.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.unwrap_or_default().trim().to_owned()
    })
}
