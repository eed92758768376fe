//! What a loop reads and changes in a step.

use std::time::Duration;

use super::Now;
use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::report::EventRecord;
use crate::cluster::cache::ClusterCache;

/// Interval at which loops check again whether addresses in use still prevent a range from being freed or allocated:
/// no watch event announces it.
pub(crate) const IN_USE_PAUSE: Duration = Duration::from_secs(5);

/// What a loop reads and changes in a step.
pub struct Context<'a> {
    /// The cached API objects
    pub cache: &'a ClusterCache,
    /// Which node has which range
    pub allocations: &'a mut AllocationState,
    /// Reports to be emitted as Kubernetes events
    pub reports: &'a mut Vec<EventRecord>,
    /// The time of this step
    pub now: Now,
}

impl<'a> Context<'a> {
    /// Borrows the parts for one step.
    pub fn new(
        cache: &'a ClusterCache,
        allocations: &'a mut AllocationState,
        reports: &'a mut Vec<EventRecord>,
        now: Now,
    ) -> Self {
        Context {
            cache,
            allocations,
            reports,
            now,
        }
    }

    /// Returns until when `call` has to wait, if it has to.
    pub(crate) fn paused(&self, call: &ObjectCall) -> Option<Duration> {
        self.allocations.refusals.paused(call, self.now.mono)
    }
}
