//! The agent grace is the time that a new leader gives agents after a gap. In this time agents report their blocks, and
//! the leader allocates no block. A gap is a time of over a minute in which no controller led.
//!
//! During the gap, an administrator may have restored the API server to an older state. In that case only agents know
//! the blocks that the restore lost. At the end of the grace, the leader requests a list of NodeSubnets. The API server
//! reads this list from etcd, so the list contains all reports, even those that the watch has not delivered yet.

use std::time::Duration;

use super::queue::{Load, Queue};
use super::reconcile::{Loop, RequestAnswer};
use super::{Context, Now, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::lease::LeadershipTerm;
use crate::cluster::request::{ApiRequest, ObjectKind};
use cadastre_core::mutation::Mutation;

/// Length of the agent grace. After a gap, agents notice within half a minute that the API server answers again, and
/// then report.
const GRACE: Duration = Duration::from_secs(45);

/// Whether the agent grace is over, and the request that ends the grace.
#[derive(Clone, Debug, Default)]
pub(crate) struct AgentGrace {
    /// The request for the list of NodeSubnets that ends the grace; empty before the grace and while the request is in
    /// flight
    list: Queue<ObjectKind>,
    is_over: bool,
}

impl Loop for AgentGrace {
    fn load(&self) -> Load {
        self.list.load()
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        self.listed(answer.applied, cx.now);
        AffectedLoops::default()
    }
}

impl AgentGrace {
    /// Creates the loop for a term. The grace is needed only if the term follows a gap.
    pub(crate) fn after(term: &LeadershipTerm) -> Self {
        AgentGrace::new(term.follows_a_gap() && !Mutation::AgentGraceSkipped.is_on())
    }

    /// Creates the loop. If `needed` is false, the grace counts as over from the start.
    fn new(needed: bool) -> Self {
        AgentGrace {
            list: Queue::default(),
            is_over: !needed,
        }
    }

    /// Starts the grace. The list of NodeSubnets that ends the grace is due in 45 s. The caller ensures that every node
    /// gets a NodeSubnet, because agents report blocks in the status of the NodeSubnet.
    pub(crate) fn begin(&mut self, now: Duration) {
        if !self.is_over {
            self.list.add_at(ObjectKind::Subnet, now + GRACE);
        }
    }

    /// Returns whether the grace is over, so that blocks may be allocated.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns the request for the list of NodeSubnets that ends the grace, once that request is due.
    pub(crate) fn next_urgent(&mut self, now: Now) -> Option<(ApiRequest, Purpose)> {
        let kind = self.list.pop(now.mono)?;
        Some((ApiRequest::List(kind), Purpose::Listening))
    }

    /// Handles the answer to the list request. If the list is in the cache (`applied`), ends the grace. Otherwise
    /// schedules a retry of the request.
    fn listed(&mut self, applied: bool, now: Now) {
        self.is_over |= applied;
        if !self.is_over {
            self.list.add_failed(ObjectKind::Subnet, now.mono);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::tests::NOW;

    fn at(second: u64) -> Now {
        Now {
            mono: Duration::from_secs(second),
            ..NOW
        }
    }

    #[test]
    fn the_grace_ends_with_a_list_after_agents_had_time() {
        let mut grace = AgentGrace::new(true);
        assert!(grace.next_urgent(at(5)).is_none() && !grace.is_over());
        grace.begin(Duration::from_secs(7));
        assert!(grace.next_urgent(at(51)).is_none() && !grace.is_over());
        let (request, purpose) = grace.next_urgent(at(52)).unwrap();
        assert_eq!(request, ApiRequest::List(ObjectKind::Subnet));
        assert_eq!(purpose, Purpose::Listening);
        assert!(grace.next_urgent(at(53)).is_none(), "one at a time");
        grace.listed(false, at(54));
        assert!(!grace.is_over());
        assert!(grace.next_urgent(at(60)).is_some(), "once more");
        grace.listed(true, at(61));
        assert!(grace.is_over() && grace.load().next_at.is_none());
    }

    #[test]
    fn without_a_gap_there_is_no_grace() {
        let mut grace = AgentGrace::new(false);
        grace.begin(Duration::ZERO);
        assert!(grace.is_over() && grace.next_urgent(at(99)).is_none());
    }
}
