//! Passes each answer to the loop that sent the request. Then queues the objects that other loops must check because of
//! the answer.

use super::Leader;
use crate::cluster::cache::ClusterCache;
use crate::cluster::request::RequestOutcome;
use crate::reconcile::RequestAnswer;
use crate::report::EventRecord;
use crate::{Context, Now};

impl Leader {
    pub(crate) fn answered(
        &mut self,
        answer: &RequestAnswer,
        cache: &ClusterCache,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        // The node has podCIDRs. Because podCIDRs never change, no write of podCIDRs to this node can take effect any
        // more.
        if let RequestOutcome::Node(node) = answer.outcome
            && !node.is_empty()
        {
            self.allocations.intents.settled(&node.uid);
        }
        self.note(answer, cache, reports, now);
        let mut cx = Context::new(cache, &mut self.allocations, reports, now);
        let name = answer.purpose.loop_name();
        let sender = self.loops.all_mut().find(|(its, _)| *its == name);
        let noted = sender.map(|(_, it)| it.answered(answer, &mut cx));
        self.follow_up(noted.unwrap_or_default(), cache);
        if self.allocations.in_agent_grace && self.loops.listening.is_over() {
            self.agents_heard(cache, reports, now);
        }
    }

    /// Handles the end of the agent grace. From now on blocks may be allocated, because the cache contains the reports
    /// of all agents.
    fn agents_heard(&mut self, cache: &ClusterCache, reports: &mut Vec<EventRecord>, now: Now) {
        self.allocations.in_agent_grace = false;
        self.allocations.intents.want_write();
        for cidr in self.allocations.yield_to_unadopted() {
            self.loops.blocks.queue.add(cidr);
        }
        self.take_up_all(cache, reports, now);
        self.return_blocks(cache, now);
    }
}
