//! The time of a step, passed as an argument: no decision reads a clock.

use std::time::Duration;

/// The time of a step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start. Deadlines use it, so that a jump of the wall clock moves none.
    pub mono: Duration,
    /// Wall time, for timestamps that people and other processes read.
    pub wall: jiff::Timestamp,
}
