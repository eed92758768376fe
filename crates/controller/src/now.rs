//! The time of a step. It is passed as an argument, so no decision reads a clock.

use std::time::Duration;

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
