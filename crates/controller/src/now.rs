//! The time of a step. It is passed as an argument, so no decision reads a clock.

use std::time::Duration;

/// The time at which a step happens, by two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start. All deadlines use it, so that a jump of the wall clock moves no
    /// deadline.
    pub mono: Duration,
    /// Wall time, for timestamps that users and other processes read.
    pub wall: jiff::Timestamp,
}
