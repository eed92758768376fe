//! The moment of a step: no decision reads a clock.

use std::time::Duration;

/// The moment of a step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start; deadlines are kept in it, so that a wall clock that
    /// jumps moves none.
    pub mono: Duration,
    /// Wall time, for what people and other processes read.
    pub wall: jiff::Timestamp,
}
