//! Checks of the records of ranges: entries of NodeSubnets, and finalizers of pools.

use std::sync::Arc;

use cadastre_api::{FINALIZER, NodeSubnetSpec};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::{Node, Pool, Subnet};
use cadastre_core::Cidr;

use super::api::Api;
use super::checks::{Checks, DeadNode, Verdict, wrong};
use super::clock::{Time, seconds};
use super::pool_model::{PoolModel, counted, is_counted};
use super::received::Received;

impl Checks {
    pub fn subnet_written(
        &mut self,
        before: &Subnet,
        after: Option<&Subnet>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let after = after.map(|subnet| subnet.spec.as_ref()).transpose();
        let (Ok(was), Ok(is)) = (&before.spec, after) else {
            return Ok(());
        };
        let (was, is) = (records(was), is.map(records).unwrap_or_default());
        let stays = |it: &Record| is.iter().any(|i| i.uid == it.uid && i.range == it.range);
        let live = api.nodes.get(&before.name);
        let gone = was.iter().filter(|it| !stays(it) && is_counted(&it.range));
        for record in gone {
            self.tally.freed += 1;
            let mut dead_nodes = self.dead_nodes.iter();
            let dead = dead_nodes.find(|dead| *dead.uid == *record.uid);
            let holder = live.filter(|node| node.pod_cidrs.contains(&record.range));
            let held_on = holder.is_some_and(|node| *node.uid == *record.uid);
            // The record may be removed if a later node with the same name got the range back, even if that later node
            // is deleted before the write takes effect.
            let returned = holder.is_some() || is.iter().any(|it| it.range == record.range);
            let early = dead.is_some_and(|g| g.recorded && now < self.quarantined_until(g))
                && record.until.is_none_or(|until| until > seconds(now));
            if held_on || (early && !returned && !self.clocks_lie) {
                let text = format!(
                    "the record of {} for {} vanishes: {was:?} -> {is:?}",
                    record.range, record.uid
                );
                return wrong("records", text, [before.name.clone()]);
            }
        }
        Ok(())
    }

    pub fn pool_written(
        &mut self,
        before: &Pool,
        after: Option<&Pool>,
        received: Option<&Received>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let has = |pool: &Pool| pool.finalizers.iter().any(|f| f == FINALIZER);
        let dropped = has(before) && after.is_some_and(|after| !has(after));
        let Some(model) = PoolModel::new(before).filter(|_| dropped) else {
            return Ok(());
        };
        let fail = |name: &str, what: &str| {
            let pool = &before.name;
            let text = format!("pool {pool} loses its finalizer while {name} {what}");
            wrong("finalizer", text, [&before.name, name])
        };
        if !before.deleting {
            return fail(&before.name, "is not being deleted");
        }
        // The pool's finalizer may be removed if another pool contains the range. That other pool must exist, or the
        // process must have received it. If the other pool's spec can no longer be parsed, all of its earlier versions
        // count.
        let shown = received.iter().flat_map(|k| k.pools.objects.values());
        let there = api.pools.live.values().map(AsRef::as_ref);
        let others = there.chain(shown).filter(|pool| pool.name != before.name);
        let versions = |pool: &Pool| match PoolModel::new(pool) {
            Some(model) => vec![model],
            None => self.versions_of(&pool.uid),
        };
        let others: Vec<PoolModel> = others.flat_map(versions).collect();
        let only_here = |range: &Cidr| {
            model.contains(range) && !others.iter().any(|other| other.contains(range))
        };
        let mut nodes = api.nodes.live.values();
        let holds =
            |node: &&Arc<Node>| self.ours.contains(&node.uid) && counted(node).any(only_here);
        if let Some(node) = nodes.find(holds) {
            return fail(&node.name, "holds a range of it");
        }
        // A node may have appeared with podCIDRs of its own after the controller decided to remove the finalizer.
        // Ranges of such a node do not count, because the node could as well have appeared after the pool's deletion.
        let version = (before.uid.clone(), before.version);
        let decided = self.finalizer_dropped.get(&version);
        let has_quarantined = |dead: &&DeadNode| {
            let born = self.born.get(&dead.uid);
            let came_later = born.zip(decided).is_some_and(|(born, at)| born > at);
            let is_quarantined = dead.recorded && now < self.quarantined_until(dead) && !came_later;
            is_quarantined && dead.ranges.iter().any(only_here)
        };
        let dead = self.dead_nodes.iter().find(has_quarantined);
        match dead.filter(|_| !self.clocks_lie) {
            Some(dead) => fail(&dead.name, "has quarantined ranges in it"),
            None => Ok(()),
        }
    }

    fn versions_of(&self, pool: &ObjectUid) -> Vec<PoolModel> {
        let versions = self.models.iter().filter(|model| model.uid == *pool);
        versions.cloned().collect()
    }
}

/// A range of a node, as a NodeSubnet records it.
#[derive(Debug)]
pub struct Record {
    pub uid: String,
    pub range: Cidr,
    /// The end of the quarantine in seconds since 1970, if the node is deleted.
    pub until: Option<i64>,
}

pub fn records(spec: &NodeSubnetSpec) -> Vec<Record> {
    let present = spec.node_uid.iter().map(|uid| (uid, &spec.pod_cidrs, None));
    let quarantined = spec.quarantined.iter().map(|it| {
        let until = it.until.0.as_second();
        (&it.node_uid, &it.pod_cidrs, Some(until))
    });
    let all = present.chain(quarantined).flat_map(|(uid, held, until)| {
        let ranges = held
            .iter()
            .filter_map(|it| Cidr::parse_strict(&it.cidr).ok());
        ranges.map(move |range| Record {
            uid: uid.clone(),
            range,
            until,
        })
    });
    all.collect()
}
