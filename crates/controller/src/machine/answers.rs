//! How the objects in an answer enter the cache: whoever led when the request was sent, and before any decision uses
//! them.

use super::{Controller, Kept, Pending};
use crate::Now;
use crate::cluster::request::{Kind, Known, Outcome, Refusal, RequestId};
use crate::cluster::seen::{Block, Node, Pool, Subnet};
use crate::cluster::table::{Replaced, Sent};
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
            wrote: pending.wrote,
            outcome,
            taken,
        };
        leader.answered(&answer, &self.world, &mut self.reports, now);
    }

    /// Applies the objects in an answer to the cache. Returns whether a list was applied.
    fn take_in(&mut self, pending: &Pending, outcome: &Outcome, now: Now) -> bool {
        let sent = pending.sent;
        match outcome {
            Outcome::Node(node) => self.shown(node, sent, now),
            Outcome::Subnet(subnet) => self.shown(subnet, sent, now),
            Outcome::Pool(pool) => self.shown(pool, sent, now),
            // The answer to a creation does not enter the cache: only the watch shows what was created before it.
            Outcome::Block(block)
                if self.world.blocks.get(&block.name).is_some()
                    || Mutation::BlockConfirmedByAnswer.is_on() =>
            {
                self.shown(block, sent, now);
            }
            Outcome::Nodes(nodes) => return self.listed(nodes, sent, now),
            Outcome::Subnets(subnets) => return self.listed(subnets, sent, now),
            Outcome::Blocks(blocks) => return self.listed(blocks, sent, now),
            Outcome::Pools(pools) => return self.listed(pools, sent, now),
            Outcome::Refused(Refusal::Missing) | Outcome::Gone => match &pending.known {
                Some((Kind::Node, known)) => self.missing::<Node>(known, now),
                Some((Kind::Subnet, known)) => self.missing::<Subnet>(known, now),
                Some((Kind::Block, known)) => self.missing::<Block>(known, now),
                Some((Kind::Pool, known)) => self.missing::<Pool>(known, now),
                None => {}
            },
            _ => {}
        }
        false
    }

    fn shown<T: Kept>(&mut self, object: &T, sent: Sent, now: Now) {
        if let Some(delta) = T::table(&mut self.world).answer(object.clone(), sent.epoch) {
            T::changed(self, &delta, now);
        }
    }

    fn missing<T: Kept>(&mut self, known: &Known, now: Now) {
        if let Some(delta) = T::table(&mut self.world).forget(&known.name, &known.uid) {
            T::changed(self, &delta, now);
        }
    }

    /// Applies a list to the cache. Returns whether that was possible.
    fn listed<T: Kept>(&mut self, objects: &[T], sent: Sent, now: Now) -> bool {
        match T::table(&mut self.world).replace(objects.to_vec(), sent) {
            Replaced::By(deltas) => {
                for delta in &deltas {
                    T::changed(self, delta, now);
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
