//! What a loop reads and changes in a step.

use std::time::Duration;

use super::Now;
use super::refusals::Call;
use super::registry::Registry;
use super::report::Report;
use crate::cluster::world::World;

/// Interval at which loops check again whether addresses in use still prevent a range from being freed or allocated:
/// no watch event announces it.
pub(crate) const IN_USE_PAUSE: Duration = Duration::from_secs(5);

/// What a loop reads and changes in a step.
pub struct Context<'a> {
    /// The cached API objects
    pub world: &'a World,
    /// Which node has which range
    pub registry: &'a mut Registry,
    /// Reports to be emitted as Kubernetes events
    pub reports: &'a mut Vec<Report>,
    /// The time of this step
    pub now: Now,
}

impl<'a> Context<'a> {
    /// Borrows the parts for one step.
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

    /// Returns until when `call` has to wait, if it has to.
    pub(crate) fn paused(&self, call: &Call) -> Option<Duration> {
        self.registry.refusals.paused(call, self.now.mono)
    }
}
