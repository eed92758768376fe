//! Whom an answer is for, and what it means to others.

use super::Leader;
use crate::cluster::request::Outcome;
use crate::cluster::world::World;
use crate::report::Report;
use crate::{Context, Now, Purpose};

impl Leader {
    pub(crate) fn answered(
        &mut self,
        purpose: &Purpose,
        outcome: &Outcome,
        taken: bool,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        match purpose {
            Purpose::Relist(_) if self.dealing => {
                self.listening.listed(taken, now);
                if self.registry.is_listening && self.listening.is_over() {
                    self.registry.is_listening = false;
                    self.registry.intents.ask();
                    for cidr in self.registry.yield_to_strays() {
                        self.blocks.queue.add(cidr);
                    }
                    self.take_up_all(world, reports, now);
                    self.give_blocks_back(world, now);
                }
                return;
            }
            Purpose::Relist(kind) => {
                self.fence.listed(*kind, taken, world, now);
                return;
            }
            Purpose::Touch { name, uid } | Purpose::TouchRead { name, uid } => {
                self.fence.answered_touch(name, uid, outcome, reports, now);
                if self.dealing && self.fence.is_done() {
                    self.registry.intents.become_known();
                }
                return;
            }
            _ => {}
        }
        // podCIDRs are frozen once set.
        if let Outcome::Node(node) = outcome
            && !node.is_empty()
        {
            self.registry.intents.settled(&node.uid);
        }
        self.note(purpose, outcome, world, reports, now);
        let mut cx = Context {
            world,
            registry: &mut self.registry,
            reports,
            now,
        };
        match purpose {
            Purpose::Assign { name, uid } => {
                self.podcidrs.answered_write(name, uid, outcome, &mut cx);
            }
            Purpose::AssignRead { name, uid } => {
                self.podcidrs.answered_read(name, uid, outcome, &mut cx);
            }
            Purpose::Subnet { name, .. } | Purpose::SubnetRead { name } => {
                let wrote = matches!(purpose, Purpose::Subnet { .. });
                self.subnets.answered(name, wrote, outcome);
                self.release(name, world);
            }
            Purpose::Block { cidr, claim, step } => {
                let noted = self
                    .blocks
                    .answered((cidr, *claim), *step, outcome, &mut cx);
                self.follow_up(noted, world);
            }
            Purpose::BlockPods { uid, .. } => self.blocks.answered_pods(uid, outcome, &mut cx),
            Purpose::DefaultPool => self.default_pool.answered(outcome, &cx),
            Purpose::LeakPods { name, uid }
                if self
                    .leaks
                    .answered(name, uid, outcome, self.leak_grace, &mut cx) =>
            {
                self.subnets.queue.add(name.clone());
            }
            Purpose::Answer { name } => self.subnets.answered_condition(name, outcome),
            Purpose::Quarantine { name, uid }
                if self.quarantine.answered(name, uid, outcome, &mut cx) =>
            {
                self.subnets.queue.add(name.clone());
                self.release(name, world);
            }
            Purpose::PoolFinalizers { name } | Purpose::PoolStatus { name } => {
                self.pools.answered(name, true, outcome);
            }
            Purpose::PoolRead { name } => self.pools.answered(name, false, outcome),
            _ => {}
        }
    }
}
