//! Checks of podCIDRs: when a controller decides on an allocation, and when the allocation takes effect.

use std::collections::BTreeSet;
use std::sync::Arc;

use cadastre_api::AllocationMode;
use cadastre_controller::cluster::names::{NodeName, ObjectUid, PoolName};
use cadastre_controller::cluster::objects::{Node, Pool};
use cadastre_controller::cluster::request::PodCidrAllocation;
use cadastre_core::{Addr, Cidr};

use super::api::Api;
use super::checks::{Checks, DUPLICATE, DeadNode, Verdict, wrong};
use super::clock::Time;
use super::describe::ranges;
use super::pool_model::{PoolModel, counted};
use super::received::{Labels, Received};
use super::record_checks::records;
use super::run::RunId;

impl Checks {
    pub fn chose(
        &mut self,
        run_id: RunId,
        a: &PodCidrAllocation,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let key = (a.uid.clone(), a.cidrs.clone());
        if received.decided.contains_key(&key) {
            return Ok(());
        }
        let hits = |dead: &&DeadNode| {
            let mut had = dead.ranges.iter();
            had.any(|range| a.cidrs.iter().any(|cidr| cidr.overlaps(range)))
        };
        let dead_nodes = self.dead_nodes.iter().filter(hits);
        let dead_nodes =
            dead_nodes.filter(|it| it.recorded || received.seen_deleted.contains(&it.uid));
        let considered_dead: BTreeSet<ObjectUid> = dead_nodes.map(|it| it.uid.clone()).collect();
        self.considered_dead
            .insert(key.clone(), considered_dead.clone());
        received
            .considered_dead
            .insert(key.clone(), considered_dead);
        received.decided.insert(key, now);
        self.check_allocation(run_id, a, received, api)?;
        received.chosen.insert((a.name.clone(), a.cidrs.clone()));
        Ok(())
    }

    /// Checks the ranges that a controller has chosen for a node. The controller must have respected every object that
    /// it had received.
    fn check_allocation(
        &self,
        run_id: RunId,
        a: &PodCidrAllocation,
        received: &Received,
        api: &Api,
    ) -> Verdict {
        let wrong = |what: String| {
            let (ranges, name, uid) = (ranges(&a.cidrs), &a.name, &a.uid);
            let text = format!("{run_id} allocates {ranges} to {name} ({uid}): {what}");
            wrong("policy", text, [a.name.clone()])
        };
        let hits = |cidr: &Cidr| a.cidrs.iter().any(|c| c.overlaps(cidr));
        let inside = |addr: &&Addr| a.cidrs.iter().any(|c| c.contains_addr(**addr));
        let returns = self.had_before(a, received);
        if self.dead_nodes.iter().any(|dead| dead.uid == a.uid) && returns {
            // The node that had these ranges is deleted, but the process may not know that. The write tests the UID, so
            // the server will reject it.
            return Ok(());
        }
        let none = BTreeSet::new();
        let max_pods = received.max_pods.get(&a.uid).unwrap_or(&none);
        let labels = received.labels.get(&a.uid);
        let could = |model: &&PoolModel| {
            let mut labels = labels.into_iter().flatten();
            labels.any(|it| {
                model.could_allocate(&a.cidrs, &a.name, max_pods, it)
                    || returns && model.could_return(&a.cidrs, &a.name, it)
            })
        };
        // If several pools have the same ranges, any of them may be the source of the allocation.
        let pools: Vec<&PoolModel> = received.models.iter().filter(could).collect();
        let Some(pool) = pools.first() else {
            return wrong("no pool it has seen could have".to_owned());
        };
        let assigned = pools.iter().any(|it| it.assigns(&a.name, &a.cidrs));
        let assigning = self.assigning(a, labels, received, api);
        if let (false, Some(pool)) = (assigned, assigning) {
            return wrong(format!("and {pool} assigns others to it"));
        }
        let before = |pool: &&PoolModel| self.starting_before(pool, labels, received, api);
        let better: Option<Vec<PoolName>> = pools.iter().map(before).collect();
        if let (false, Some(better)) = (returns || assigned, better) {
            let better = &better[0];
            return wrong(format!(
                "of {}, and {better} is about to serve it",
                pool.name
            ));
        }
        let nodes = received.nodes.objects.values();
        for node in nodes.filter(|node| node.name != a.name) {
            let live = api.nodes.get(&node.name);
            if live.is_none_or(|live| live.uid != node.uid) {
                continue;
            }
            let name = &node.name;
            if counted(node).any(hits) {
                let podcidrs = ranges(&node.pod_cidrs);
                return wrong(format!("{name} was seen with {podcidrs}"));
            }
            let own = node.addresses.iter().find(inside);
            if let Some(addr) = own.filter(|_| !returns) {
                return wrong(format!("{name} was seen with the address {addr}"));
            }
        }
        let services = received.services.objects.values();
        let mut services = services.map(|it| &it.cidrs);
        if let Some(cidrs) = services.find(|cidrs| cidrs.iter().any(hits)) {
            let cidrs = ranges(cidrs);
            return wrong(format!("the service range {cidrs} was seen there"));
        }
        let mut pods = received.pods.objects.values();
        let reports = pods.find(|pod| pod.addresses.iter().any(|addr| inside(&addr)));
        if let Some(pod) = reports.filter(|_| !returns) {
            let (name, addresses) = (&pod.name, &pod.addresses);
            return wrong(format!("pod {name} was seen with {addresses:?}"));
        }
        Ok(())
    }

    /// Returns a pool that assigns ranges to the node. The process knew this version of the pool before the node
    /// existed, so it cannot have chosen ranges for the node before it knew of the assignment.
    fn assigning(
        &self,
        a: &PodCidrAllocation,
        labels: Option<&BTreeSet<Labels>>,
        received: &Received,
        api: &Api,
    ) -> Option<PoolName> {
        let born = *self.born.get(&a.uid)?;
        let is_known = |pool: &&Pool| {
            is_current(pool, received, api) && received.has_known_since(&pool.uid, born)
        };
        let known = received.pools.objects.values().filter(is_known);
        let mut known = known.filter_map(PoolModel::new).filter(|it| {
            let is_able = it.allocation_mode == AllocationMode::NodeCIDR && !it.deleting;
            let mut labels = labels.into_iter().flatten();
            is_able && it.assigned(&a.name).is_some() && labels.all(|labels| it.matches(labels))
        });
        known.next().map(|it| it.name)
    }

    /// Returns a pool for which the controller should have waited instead of allocating from `dealt`. According to the
    /// objects that the process has received, this pool is better than `dealt` and lacks only its finalizer.
    fn starting_before(
        &self,
        dealt: &PoolModel,
        labels: Option<&BTreeSet<Labels>>,
        received: &Received,
        api: &Api,
    ) -> Option<PoolName> {
        let shown = received.pools.objects.values();
        let all: Vec<PoolModel> = shown.clone().filter_map(PoolModel::new).collect();
        let shown: Vec<PoolModel> = shown
            .filter(|it| is_current(it, received, api))
            .filter_map(PoolModel::new)
            .collect();
        let rank = |model: &PoolModel| (model.priority, model.selector.len());
        // The process may have used any version of `dealt`, so the best rank of all versions counts.
        let versions = received.models.iter().filter(|it| it.name == dealt.name);
        let best = versions.map(rank).max()?;
        let serves = |model: &&PoolModel| {
            let older =
                |o: &PoolModel| o.age() < model.age() && o.cidrs().any(|cidr| model.overlaps(cidr));
            model.allocation_mode == AllocationMode::NodeCIDR
                && !model.has_finalizer
                && !model.disabled
                && !model.deleting
                && rank(model) > best
                && labels.into_iter().flatten().all(|it| model.matches(it))
                && !all.iter().any(older)
        };
        let starting = shown.iter().filter(serves);
        let never_had_finalizer = |model: &&PoolModel| {
            let mut same = received.models.iter().filter(|it| it.uid == model.uid);
            !same.any(|it| it.has_finalizer)
        };
        let mut starting = starting.filter(never_had_finalizer);
        starting.next().map(|it| it.name.clone())
    }

    /// Whether an earlier node with the same name had the ranges of this allocation, or the process had chosen them for
    /// such a node. This is known from the history, the process's own decisions, and the NodeSubnet that the process
    /// received.
    fn had_before(&self, a: &PodCidrAllocation, received: &Received) -> bool {
        let all = |had: &[Cidr]| a.cidrs.iter().all(|cidr| had.contains(cidr));
        let had = |dead: &DeadNode| dead.name == a.name && all(&dead.ranges);
        let chosen = |(name, ranges): &(NodeName, Vec<Cidr>)| *name == a.name && all(ranges);
        let subnet = received.subnets.objects.get(&a.name);
        let specs = subnet.into_iter().flat_map(|subnet| subnet.spec.iter());
        let listed: Vec<Cidr> = specs.flat_map(records).map(|r| r.range).collect();
        self.dead_nodes.iter().any(had) || received.chosen.iter().any(chosen) || all(&listed)
    }

    /// Checks an allocation of podCIDRs that took effect.
    pub fn assigned(
        &mut self,
        node: &Arc<Node>,
        received: Option<&Received>,
        api: &Api,
        decided: Time,
    ) -> Verdict {
        self.tally.assigned += 1;
        let hits = |ranges: &[Cidr]| ranges.iter().any(|r| counted(node).any(|c| c.overlaps(r)));
        for other in api.nodes.live.values() {
            if other.uid != node.uid && self.ours.contains(&other.uid) && hits(&other.pod_cidrs) {
                let whose = |node: &Node| format!("{} ({})", node.name, node.uid);
                let text = format!(
                    "{} gets {} and {} has {}",
                    whose(node),
                    ranges(&node.pod_cidrs),
                    whose(other),
                    ranges(&other.pod_cidrs)
                );
                return wrong(DUPLICATE, text, [node.name.clone(), other.name.clone()]);
            }
        }
        self.ours.insert(node.uid.clone());
        let back = |dead: &DeadNode| dead.name == node.name && dead.machine.same(&node.machine);
        for dead in self.dead_nodes.iter().filter(|dead| hits(&dead.ranges)) {
            // A host may get its own range back, even if an earlier host of the same name had the range before it.
            let had = |range: &Cidr| {
                let mut later = self.dead_nodes.iter().filter(|it| it.died >= dead.died);
                later.any(|it| back(it) && it.ranges.contains(range))
            };
            if dead.name == node.name && dead.ranges.iter().all(had) {
                continue;
            }
            let seen = received.is_some_and(|received| received.seen_deleted.contains(&dead.uid));
            // If another node got all ranges of the dead node after it and has died, too, the quarantine of that other
            // node counts instead.
            let covers = |it: &Cidr, range: &Cidr| it.overlaps(range) && it.len() <= range.len();
            let had_since = |it: &DeadNode| {
                let covered = |range| it.ranges.iter().any(|it| covers(it, range));
                it.died > dead.died && dead.ranges.iter().all(covered)
            };
            let seen = seen && !dead.edited && !self.dead_nodes.iter().any(had_since);
            if !dead.recorded && !seen {
                continue;
            }
            // Two kinds of writes are not checked. A write that was sent before the node was deleted may take effect at
            // any time. And a process may have chosen the ranges without knowing the node, even if another leader
            // repeats the write.
            let key = (node.uid.clone(), node.pod_cidrs.to_vec());
            let considered_dead = received.and_then(|received| received.considered_dead.get(&key));
            let considered_dead = considered_dead.or_else(|| self.considered_dead.get(&key));
            if considered_dead.is_some_and(|dead_nodes| !dead_nodes.contains(&dead.uid)) {
                continue;
            }
            let fail = |why: String| {
                let lost = ranges(&dead.ranges);
                let (node, dead, uid) = (&node.name, &dead.name, &dead.uid);
                let text = format!("{node} gets {lost} of {dead} ({uid}) {why}");
                wrong("quarantine", text, [node.clone(), dead.clone()])
            };
            let over = if self.clocks_lie {
                0
            } else {
                self.quarantined_until(dead)
            };
            if decided < over {
                let ms = decided.saturating_sub(dead.died) / 1000;
                return fail(format!("dead for {ms} ms only"));
            }
            if !dead.looked.iter().any(|at| (over..=decided).contains(at)) {
                return fail("without a look at its pods".to_owned());
            }
        }
        Ok(())
    }
}

/// Whether the process has received no newer version of the pool, and the API has none either. A response may have shown
/// the process a newer version than the watch.
fn is_current(pool: &Pool, received: &Received, api: &Api) -> bool {
    let now = api.pools.get(&pool.name);
    let is_live = now.is_some_and(|it| (&it.uid, &it.spec) == (&pool.uid, &pool.spec));
    is_live && received.is_newest(pool)
}
