//! What a loop works on in a step.

use std::time::Duration;

use super::Now;
use super::refusals::Call;
use super::registry::Registry;
use super::report::Report;
use crate::cluster::world::World;

/// How often it is looked again whether addresses that keep a range from being free or given are gone:
/// nothing tells.
pub(crate) const IN_USE_PAUSE: Duration = Duration::from_secs(5);

/// What a loop works on.
pub struct Context<'a> {
    /// What the watches say
    pub world: &'a World,
    /// What is held
    pub registry: &'a mut Registry,
    /// Where events for people go
    pub reports: &'a mut Vec<Report>,
    /// The moment
    pub now: Now,
}

impl<'a> Context<'a> {
    /// All of it.
    pub fn new(
        world: &'a World,
        registry: &'a mut Registry,
        reports: &'a mut Vec<Report>,
        now: Now,
    ) -> Self {
        Context {
            world,
            registry,
            reports,
            now,
        }
    }

    /// Until when a call has to wait, if it has to.
    pub(crate) fn paused(&self, call: &Call) -> Option<Duration> {
        self.registry.refusals.paused(call, self.now.mono)
    }
}
