//! The time of a step. It is passed as an argument, so no decision reads a clock.

use std::time::Duration;

/// The time at which a step happens, by two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start. Deadlines use it, so that a jump of the wall clock moves no deadline.
    /// An exception is a claim's time after its last use.
    pub mono: Duration,
    /// Wall time, for timestamps that users and other processes read. A new leader computes from such timestamps how
    /// long a quarantine, or a claim after its last use, still lasts.
    pub wall: jiff::Timestamp,
}
