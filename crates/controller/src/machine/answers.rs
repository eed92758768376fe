//! Handles the answers to requests. The objects in an answer are written to the cache before any decision uses them,
//! even if another process leads by now.

use std::borrow::Borrow;

use super::{CachedKind, Controller, Pending};
use crate::cluster::object_cache::{CacheMark, ListOutcome};
use crate::cluster::objects::{Block, Claim, FrrConfiguration, Node, Pool, Routes, Subnet};
use crate::cluster::request::{KnownObject, ObjectKind, Rejection, RequestId, RequestOutcome};
use crate::reconcile::RequestAnswer;
use crate::{Now, Purpose};
use cadastre_core::mutation::Mutation;

impl Controller {
    pub(super) fn answered(&mut self, id: RequestId, outcome: &RequestOutcome, now: Now) {
        let Some(pending) = self.pending.remove(&id) else {
            return;
        };
        let applied = self.apply_answer(&pending, outcome, now);
        let Some(leader) = self
            .leader
            .as_mut()
            .filter(|leader| leader.term.id == pending.term)
        else {
            return;
        };
        let answer = RequestAnswer {
            purpose: &pending.purpose,
            wrote: pending.written.is_some(),
            outcome,
            kept: pending
                .written
                .as_ref()
                .is_none_or(|it| it.is_kept_in(outcome)),
            applied,
        };
        leader.answered(&answer, &self.cache, &mut self.reports, now);
    }

    /// Applies the objects in an answer to the cache. Returns whether the answer was a list and the cache has applied
    /// the list.
    fn apply_answer(&mut self, pending: &Pending, outcome: &RequestOutcome, now: Now) -> bool {
        let sent = pending.sent;
        match outcome {
            RequestOutcome::Node(node) => self.shown(node, sent, now),
            RequestOutcome::Subnet(subnet) => self.shown(subnet, sent, now),
            RequestOutcome::Routes(routes) => self.shown(routes, sent, now),
            // The watch delivers only the controller's own objects, so it would not deliver the deletion of others.
            RequestOutcome::FrrConfiguration(object) if object.is_ours => {
                self.shown(object, sent, now);
            }
            RequestOutcome::Pool(pool) => self.shown(pool, sent, now),
            RequestOutcome::Claim(claim) => self.shown(claim, sent, now),
            // The answer to a creation does not enter the cache, because an older block may overlap the new one. Only
            // the watch shows all blocks that were created before the new one.
            RequestOutcome::Block(block)
                if self.cache.blocks.get(&block.name).is_some()
                    || Mutation::BlockConfirmedByAnswer.is_on() =>
            {
                self.shown(block, sent, now);
            }
            RequestOutcome::Nodes(nodes) => return self.listed(nodes, sent, now),
            RequestOutcome::Subnets(subnets) => return self.listed(subnets, sent, now),
            RequestOutcome::Blocks(blocks) => return self.listed(blocks, sent, now),
            RequestOutcome::Pools(pools) => return self.listed(pools, sent, now),
            RequestOutcome::Claims(claims) => return self.listed(claims, sent, now),
            RequestOutcome::RoutesList(routes) => {
                let applied = self.listed(routes, sent, now);
                self.cache.awaits_routes &= !applied;
                return applied;
            }
            RequestOutcome::FrrConfigurations(objects) => {
                let applied = self.listed(objects, sent, now);
                self.cache.awaits_frr_configurations &= !applied;
                return applied;
            }
            // The API server does not have the kind.
            RequestOutcome::Rejected(Rejection::Missing)
                if let Purpose::ListRoutes(kind) = &pending.purpose =>
            {
                match kind {
                    ObjectKind::FrrConfiguration => self.cache.awaits_frr_configurations = false,
                    _ => self.cache.awaits_routes = false,
                }
            }
            RequestOutcome::Rejected(Rejection::Missing) | RequestOutcome::Gone => {
                match &pending.known {
                    Some((ObjectKind::Node, known)) => self.missing::<Node>(known, now),
                    Some((ObjectKind::Subnet, known)) => self.missing::<Subnet>(known, now),
                    Some((ObjectKind::Routes, known)) => self.missing::<Routes>(known, now),
                    Some((ObjectKind::FrrConfiguration, known)) => {
                        self.missing::<FrrConfiguration>(known, now);
                    }
                    Some((ObjectKind::Block, known)) => self.missing::<Block>(known, now),
                    Some((ObjectKind::Pool, known)) => self.missing::<Pool>(known, now),
                    Some((ObjectKind::Claim, known)) => self.missing::<Claim>(known, now),
                    Some((ObjectKind::Pod, _)) | None => {}
                }
            }
            _ => {}
        }
        false
    }

    fn shown<T: CachedKind>(&mut self, object: &T, sent: CacheMark, now: Now) {
        if let Some(delta) = T::table(&mut self.cache).answer(object.clone(), sent.epoch) {
            T::changed(self, &delta, now);
        }
    }

    fn missing<T: CachedKind>(&mut self, known: &KnownObject, now: Now)
    where
        T::Name: Borrow<str>,
    {
        if let Some(delta) = T::table(&mut self.cache).forget(&*known.name, &known.uid) {
            T::changed(self, &delta, now);
        }
    }

    /// Applies a list to the cache. Returns false if the cache could not apply the list, because the list may be older
    /// than the cache, the watch is listing again, or the API server was restored to an older state.
    fn listed<T: CachedKind>(&mut self, objects: &[T], sent: CacheMark, now: Now) -> bool {
        match T::table(&mut self.cache).replace(objects.to_vec(), sent) {
            ListOutcome::Applied(updates) => {
                for delta in &updates {
                    T::changed(self, delta, now);
                }
                true
            }
            ListOutcome::Outdated => false,
            ListOutcome::PutBack => {
                self.put_back = true;
                false
            }
        }
    }
}
