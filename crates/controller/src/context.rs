//! The state that a loop may read and change while it makes a decision.

use std::time::Duration;

use super::Now;
use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::report::EventRecord;
use crate::cluster::cache::ClusterCache;

/// The state that a loop may read and change in one step.
pub struct Context<'a> {
    /// The cached API objects, which the step cannot change
    pub cache: &'a ClusterCache,
    /// The ledger: which node has which range
    pub allocations: &'a mut AllocationState,
    /// Reports of the step, to be emitted as Kubernetes events
    pub reports: &'a mut Vec<EventRecord>,
    /// The time of this step
    pub now: Now,
}

impl<'a> Context<'a> {
    /// Creates the context of one step. The events that the step causes are added to `reports`.
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

    /// Returns the end of the back-off of `call`, or `None` if `call` may be made now.
    pub(crate) fn paused(&self, call: &ObjectCall) -> Option<Duration> {
        self.allocations.refusals.paused(call, self.now.mono)
    }
}
