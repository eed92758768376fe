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

/// The clocks of one machine. The monotonic one never goes back; it may run at any rate, stand still and
/// jump ahead.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// When its pace last changed, and what the monotonic clock showed then, in microseconds.
    since: Time,
    shown: u64,
    /// Until then it stands still.
    stands_until: Time,
    /// How fast it runs, in parts per million of true time.
    rate: u64,
    /// How far its wall clock is off, in microseconds.
    pub wall_off: i64,
}

impl Clocks {
    pub fn new(rate: u64) -> Self {
        Clocks {
            since: 0,
            shown: 0,
            stands_until: 0,
            rate,
            wall_off: 0,
        }
    }

    fn micros(&self, now: Time) -> u64 {
        let runs_since = self.since.max(self.stands_until);
        self.shown + now.saturating_sub(runs_since) * self.rate / 1_000_000
    }

    pub fn mono(&self, now: Time) -> Duration {
        Duration::from_micros(self.micros(now))
    }

    /// The first moment at which the monotonic clock shows `mono` or more, as it runs now.
    pub fn when(&self, mono: Duration) -> Time {
        let micros = u64::try_from(mono.as_micros())
            .unwrap_or(u64::MAX / 2_000_000)
            .min(u64::MAX / 2_000_000);
        let left = micros.saturating_sub(self.shown);
        self.since.max(self.stands_until) + (left * 1_000_000).div_ceil(self.rate)
    }

    /// The machine is started anew.
    pub fn boot(&mut self, now: Time) {
        (self.since, self.shown, self.stands_until) = (now, 0, now);
    }

    /// From now on it runs at that rate, standing still until then.
    pub fn set_pace(&mut self, now: Time, rate: u64, stands_until: Time) {
        self.shown = self.micros(now);
        (self.since, self.rate, self.stands_until) = (now, rate, stands_until);
    }

    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// It jumps ahead.
    pub fn jump(&mut self, by: Time) {
        self.shown += by;
    }

    pub fn wall(&self, now: Time) -> Timestamp {
        wall(now, self.wall_off)
    }
}
