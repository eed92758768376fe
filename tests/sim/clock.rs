//! Virtual time, and the clocks of hosts.

use std::time::Duration;

use jiff::Timestamp;

/// Microseconds of virtual time since the start of the run.
pub type Time = u64;

pub const MS: Time = 1_000;
pub const SECOND: Time = 1_000_000;

/// The correct wall time at virtual time 0, in seconds since 1970.
const EPOCH: i64 = 1_800_000_000;

/// The correct wall time, in whole seconds since 1970.
pub fn seconds(now: Time) -> i64 {
    EPOCH + i64::try_from(now / SECOND).unwrap()
}

/// The clocks of one host. The monotonic clock never goes back, but it may run at any rate, stop, and jump ahead.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// When the rate last changed.
    since: Time,
    /// The reading of the monotonic clock at the time `since`, in microseconds.
    shown: u64,
    /// The virtual time until which the monotonic clock stands still.
    stands_until: Time,
    /// The rate of the monotonic clock, in parts per million of true time.
    rate: u64,
    /// The deviation of the wall clock, in microseconds.
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

    /// The earliest virtual time at which the monotonic clock shows at least `mono`, at its present rate.
    pub fn when(&self, mono: Duration) -> Time {
        let micros = u64::try_from(mono.as_micros()).unwrap_or(u64::MAX);
        let micros = micros.min(u64::MAX / 2_000_000);
        let left = micros.saturating_sub(self.shown);
        self.since.max(self.stands_until) + (left * 1_000_000).div_ceil(self.rate)
    }

    /// Resets the monotonic clock, as a reboot does.
    pub fn boot(&mut self, now: Time) {
        (self.since, self.shown, self.stands_until) = (now, 0, now);
    }

    /// Stops the monotonic clock until `stands_until`, and sets its rate from then on.
    pub fn set_pace(&mut self, now: Time, rate: u64, stands_until: Time) {
        self.shown = self.micros(now);
        (self.since, self.rate, self.stands_until) = (now, rate, stands_until);
    }

    /// Stops the monotonic clock until the time `until`.
    pub fn stop(&mut self, now: Time, until: Time) {
        self.set_pace(now, self.rate, until);
    }

    /// Lets the monotonic clock jump ahead by `by` microseconds.
    pub fn jump(&mut self, by: Time) {
        self.shown += by;
    }

    pub fn wall(&self, now: Time) -> Timestamp {
        let micros = EPOCH * 1_000_000 + i64::try_from(now).unwrap() + self.wall_off;
        Timestamp::from_microsecond(micros).unwrap()
    }
}
