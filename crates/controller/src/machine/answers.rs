//! What an answer shows of the world: taken in whoever led when it was asked for, and before anybody decides
//! by it.

use super::{Controller, Pending};
use crate::cluster::request::{Outcome, Refusal, RequestId};
use crate::cluster::table::{Delta, Replaced};
use crate::{Now, Purpose};
use cadastre_api::block_name;
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
        let sent = pending.sent;
        let epoch = sent.epoch;
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
                let replaced = self.world.blocks.replace(blocks.clone(), sent);
                let deltas = self.deltas(replaced);
                for delta in deltas.iter().flatten() {
                    self.block_changed(delta, now);
                }
                return deltas.is_some();
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
                let replaced = self.world.nodes.replace(nodes.clone(), sent);
                let deltas = self.deltas(replaced);
                for delta in deltas.iter().flatten() {
                    self.node_changed(delta, now);
                }
                return deltas.is_some();
            }
            (Outcome::Subnets(subnets), _) => {
                let replaced = self.world.subnets.replace(subnets.clone(), sent);
                let deltas = self.deltas(replaced);
                for delta in deltas.iter().flatten() {
                    self.subnet_changed(delta, now);
                }
                return deltas.is_some();
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

    /// What a list of ours has changed, if it could be taken in.
    fn deltas<T>(&mut self, replaced: Replaced<T>) -> Option<Vec<Delta<T>>> {
        match replaced {
            Replaced::By(deltas) => Some(deltas),
            Replaced::Again => None,
            Replaced::PutBack => {
                self.put_back = true;
                None
            }
        }
    }
}
