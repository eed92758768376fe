//! The time of a step. It is passed as an argument, so no decision reads a clock.

use std::time::Duration;

/// Addresses in use can prevent a range from being freed or allocated. Loops check such a range again at least this
/// often, because no watch event announces that its addresses are no longer in use.
const CHECK_PAUSE: Duration = Duration::from_secs(5);

/// The time at which a step happens, by two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start. Deadlines use it, so that a jump of the wall clock moves no deadline.
    /// The exceptions are a claim's cooldown and the time for which a claim stays after its last use.
    pub mono: Duration,
    /// Wall time, for timestamps that users and other processes read. A new leader computes from such timestamps how
    /// much of a quarantine, or of a claim's cooldown, is left.
    pub wall: jiff::Timestamp,
}

impl Now {
    /// Returns the monotonic time at which an object is checked again although no event has announced a change: at most
    /// 5 s from now. It is a whole second, so that thousands of waiting objects do not wake the process one by one.
    pub(crate) fn next_check(self) -> Duration {
        self.check_within(CHECK_PAUSE)
    }

    /// Returns the last whole second of the monotonic clock that is at most `pause` from now.
    pub(crate) fn check_within(self, pause: Duration) -> Duration {
        Duration::from_secs((self.mono + pause).as_secs())
    }
}
