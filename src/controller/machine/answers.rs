//! What an answer shows of the world: taken in whoever led when it was asked for, and before anybody decides
//! by it.

use super::{Controller, Pending};
use crate::api::block_name;
use crate::cluster::request::{Outcome, Refusal, RequestId};
use crate::controller::{Now, Purpose};
use crate::mutation::Mutation;

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
        leader.answered(
            &pending.purpose,
            outcome,
            taken,
            &self.world,
            &mut self.reports,
            now,
        );
    }

    /// What an answer shows of the world. Returns whether a list was taken.
    fn take_in(&mut self, pending: &Pending, outcome: &Outcome, now: Now) -> bool {
        let epoch = pending.epoch;
        match (outcome, &pending.purpose) {
            (Outcome::Node(node), _) => {
                if let Some(delta) = self.world.nodes.answer(node.clone(), epoch) {
                    self.node_changed(&delta, now);
                }
            }
            (Outcome::Subnet(subnet), _) => {
                if let Some(delta) = self.world.subnets.answer(subnet.clone(), epoch) {
                    self.subnet_changed(&delta, now);
                }
            }
            (Outcome::Pool(pool), _) => {
                if let Some(delta) = self.world.pools.answer(pool.clone(), epoch) {
                    self.pool_changed(&delta);
                }
            }
            // A creation counts once the watch shows it: only the watch tells what stood before it.
            (Outcome::Block(block), _)
                if self.world.blocks.get(&block.name).is_some()
                    || Mutation::BlockConfirmedByAnswer.is_on() =>
            {
                if let Some(delta) = self.world.blocks.answer(block.clone(), epoch) {
                    self.block_changed(&delta, now);
                }
            }
            (Outcome::Blocks(blocks), _) => {
                let Some(deltas) = self.world.blocks.replace(blocks.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.block_changed(&delta, now);
                }
                return true;
            }
            (Outcome::Refused(Refusal::Missing) | Outcome::Gone, Purpose::Block { cidr, .. }) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.blocks.forget(&block_name(cidr), uid));
                if let Some(delta) = delta {
                    self.block_changed(&delta, now);
                }
            }
            (Outcome::Nodes(nodes), _) => {
                let Some(deltas) = self.world.nodes.replace(nodes.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.node_changed(&delta, now);
                }
                return true;
            }
            (Outcome::Subnets(subnets), _) => {
                let Some(deltas) = self.world.subnets.replace(subnets.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.subnet_changed(&delta, now);
                }
                return true;
            }
            (
                Outcome::Refused(Refusal::Missing),
                Purpose::Assign { name, uid }
                | Purpose::AssignRead { name, uid }
                | Purpose::Touch { name, uid }
                | Purpose::TouchRead { name, uid },
            ) => {
                if let Some(delta) = self.world.nodes.forget(name, uid) {
                    self.node_changed(&delta, now);
                }
            }
            (
                Outcome::Refused(Refusal::Missing) | Outcome::Gone,
                Purpose::Subnet { name, .. }
                | Purpose::SubnetRead { name }
                | Purpose::Answer { name },
            ) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.subnets.forget(name, uid));
                if let Some(delta) = delta {
                    self.subnet_changed(&delta, now);
                }
            }
            (
                Outcome::Refused(Refusal::Missing),
                Purpose::PoolFinalizers { name }
                | Purpose::PoolStatus { name }
                | Purpose::PoolRead { name },
            ) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.pools.forget(name, uid));
                if let Some(delta) = delta {
                    self.pool_changed(&delta);
                }
            }
            _ => {}
        }
        false
    }
}
