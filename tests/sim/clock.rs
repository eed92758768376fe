//! Virtual time, and what a process's own clocks make of it.

use std::time::Duration;

use jiff::Timestamp;

/// Virtual time since the start of the run, in microseconds.
pub type Time = u64;

pub const MS: Time = 1_000;
pub const SECOND: Time = 1_000_000;

/// What wall clocks that are right show at time 0: seconds since 1970.
const EPOCH: i64 = 1_800_000_000;

/// The right wall time, in whole seconds since 1970.
pub fn seconds(now: Time) -> i64 {
    EPOCH + i64::try_from(now / SECOND).unwrap()
}

fn wall(now: Time, off: i64) -> Timestamp {
    let micros = EPOCH * 1_000_000 + i64::try_from(now).unwrap() + off;
    Timestamp::from_microsecond(micros).unwrap()
}

/// The clocks of one machine.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// When it was booted: zero of its monotonic clock.
    pub booted: Time,
    /// How fast its monotonic clock runs, in parts per million of true time.
    pub rate: u64,
    /// How far its wall clock is off, in microseconds.
    pub wall_off: i64,
}

impl Clocks {
    pub fn mono(&self, now: Time) -> Duration {
        Duration::from_micros((now - self.booted) * self.rate / 1_000_000)
    }

    /// The first moment at which the monotonic clock shows `mono` or more.
    pub fn when(&self, mono: Duration) -> Time {
        let micros = u64::try_from(mono.as_micros())
            .unwrap_or(u64::MAX / 2_000_000)
            .min(u64::MAX / 2_000_000);
        self.booted + (micros * 1_000_000).div_ceil(self.rate)
    }

    pub fn wall(&self, now: Time) -> Timestamp {
        wall(now, self.wall_off)
    }
}
