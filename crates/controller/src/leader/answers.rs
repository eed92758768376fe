//! The way of an answer: to the loop that asked, then to the loops that it concerns.

use super::Leader;
use crate::cluster::request::Outcome;
use crate::cluster::world::World;
use crate::reconcile::Answer;
use crate::report::Report;
use crate::{Context, Now};

impl Leader {
    pub(crate) fn answered(
        &mut self,
        answer: &Answer,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        // podCIDRs are immutable once set.
        if let Outcome::Node(node) = answer.outcome
            && !node.is_empty()
        {
            self.registry.intents.settled(&node.uid);
        }
        self.note(answer, world, reports, now);
        let mut cx = Context::new(world, &mut self.registry, reports, now);
        let name = answer.purpose.loop_name();
        let asked = self.loops.all_mut().find(|(its, _)| *its == name);
        let noted = asked.map(|(_, it)| it.answered(answer, &mut cx));
        self.follow_up(noted.unwrap_or_default(), world);
        if self.registry.is_listening && self.loops.listening.is_over() {
            self.agents_heard(world, reports, now);
        }
    }

    /// Ends the time in which agents are listened to: what they report is in the cache, so blocks may be allocated.
    fn agents_heard(&mut self, world: &World, reports: &mut Vec<Report>, now: Now) {
        self.registry.is_listening = false;
        self.registry.intents.ask();
        for cidr in self.registry.yield_to_strays() {
            self.loops.blocks.queue.add(cidr);
        }
        self.take_up_all(world, reports, now);
        self.give_blocks_back(world, now);
    }
}
