//! What an answer shows of the world: taken in whoever led when it was asked for, and before anybody decides
//! by it.

use super::{Controller, Pending};
use crate::Now;
use crate::cluster::request::{Kind, Known, Outcome, Refusal, RequestId};
use crate::cluster::table::{Delta, Replaced};
use crate::reconcile::Answer;
use cadastre_core::mutation::Mutation;

impl Controller {
    pub(super) fn answered(&mut self, id: RequestId, outcome: &Outcome, now: Now) {
        let Some(pending) = self.pending.remove(&id) else {
            return;
        };
        let taken = self.take_in(&pending, outcome, now);
        let Some(leader) = self
            .leader
            .as_mut()
            .filter(|leader| leader.tenure.term == pending.term)
        else {
            return;
        };
        let answer = Answer {
            purpose: &pending.purpose,
            outcome,
            taken,
        };
        leader.answered(&answer, &self.world, &mut self.reports, now);
    }

    /// What an answer shows of the world. Returns whether a list was taken.
    fn take_in(&mut self, pending: &Pending, outcome: &Outcome, now: Now) -> bool {
        let sent = pending.sent;
        let epoch = sent.epoch;
        match outcome {
            Outcome::Node(node) => {
                if let Some(delta) = self.world.nodes.answer(node.clone(), epoch) {
                    self.node_changed(&delta, now);
                }
            }
            Outcome::Subnet(subnet) => {
                if let Some(delta) = self.world.subnets.answer(subnet.clone(), epoch) {
                    self.subnet_changed(&delta, now);
                }
            }
            Outcome::Pool(pool) => {
                if let Some(delta) = self.world.pools.answer(pool.clone(), epoch) {
                    self.pool_changed(&delta);
                }
            }
            // A creation counts once the watch shows it: only the watch tells what stood before it.
            Outcome::Block(block)
                if self.world.blocks.get(&block.name).is_some()
                    || Mutation::BlockConfirmedByAnswer.is_on() =>
            {
                if let Some(delta) = self.world.blocks.answer(block.clone(), epoch) {
                    self.block_changed(&delta, now);
                }
            }
            Outcome::Nodes(nodes) => {
                let replaced = self.world.nodes.replace(nodes.clone(), sent);
                return self.replaced(replaced, |it, delta| it.node_changed(delta, now));
            }
            Outcome::Subnets(subnets) => {
                let replaced = self.world.subnets.replace(subnets.clone(), sent);
                return self.replaced(replaced, |it, delta| it.subnet_changed(delta, now));
            }
            Outcome::Blocks(blocks) => {
                let replaced = self.world.blocks.replace(blocks.clone(), sent);
                return self.replaced(replaced, |it, delta| it.block_changed(delta, now));
            }
            Outcome::Pools(pools) => {
                let replaced = self.world.pools.replace(pools.clone(), sent);
                return self.replaced(replaced, Self::pool_changed);
            }
            Outcome::Refused(Refusal::Missing) | Outcome::Gone => {
                if let Some((kind, known)) = &pending.known {
                    self.gone(*kind, known, now);
                }
            }
            _ => {}
        }
        false
    }

    /// An object is there no more.
    fn gone(&mut self, kind: Kind, Known { name, uid, .. }: &Known, now: Now) {
        match kind {
            Kind::Node => {
                if let Some(delta) = self.world.nodes.forget(name, uid) {
                    self.node_changed(&delta, now);
                }
            }
            Kind::Subnet => {
                if let Some(delta) = self.world.subnets.forget(name, uid) {
                    self.subnet_changed(&delta, now);
                }
            }
            Kind::Block => {
                if let Some(delta) = self.world.blocks.forget(name, uid) {
                    self.block_changed(&delta, now);
                }
            }
            Kind::Pool => {
                if let Some(delta) = self.world.pools.forget(name, uid) {
                    self.pool_changed(&delta);
                }
            }
        }
    }

    /// Takes in what a list of ours has changed. Returns whether that was possible.
    fn replaced<T>(
        &mut self,
        replaced: Replaced<T>,
        mut changed: impl FnMut(&mut Self, &Delta<T>),
    ) -> bool {
        match replaced {
            Replaced::By(deltas) => {
                for delta in &deltas {
                    changed(self, delta);
                }
                true
            }
            Replaced::Again => false,
            Replaced::PutBack => {
                self.put_back = true;
                false
            }
        }
    }
}
