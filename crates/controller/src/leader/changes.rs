//! What a change of an object means to the loops.

use super::Leader;
use crate::Now;
use crate::cluster::request::Kind;
use crate::cluster::seen::{Block, Machine, Node, Text};
use crate::cluster::table::Delta;
use crate::cluster::world::World;
use crate::quarantine::Quarantine;
use crate::registry::Synced;
use crate::registry::blocks::Noted;
use crate::report::{About, BLOCK_ADOPTED, FOREIGN_ALLOCATOR, OVERLAPPING, Report, UNREADABLE};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Which parts of a NodeSubnet have changed.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    /// The agent's report
    pub reported: bool,
    /// Requests of users
    pub requested: bool,
}

impl Leader {
    /// Takes in a change of a NodeSubnet.
    pub(crate) fn subnet_changed(
        &mut self,
        name: &Text,
        told: Told,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        self.loops.subnets.queue.add(name.clone());
        self.release(name, world);
        let mut blocks = self.registry.blocks_told(name, world, now);
        blocks.extend(self.registry.blocks_let_go(name, world));
        self.follow_up(
            Noted {
                blocks,
                ..Noted::default()
            },
            world,
        );
        if told.reported {
            self.take_up(name, world, reports, now);
        }
        // The agent reports a leak candidate that users asked to release as soon as its pod is gone.
        let subnet = world.subnets.get(name);
        let is_awaited = subnet.is_some_and(|it| !it.requests.release.is_empty());
        if told.requested || told.reported && is_awaited {
            self.loops.leaks.hurry();
        }
        if told.reported || told.requested {
            self.loops.demand.add_name(name, world, &self.registry);
            self.loops.pools.mark();
        }
    }

    /// Adopts blocks that the node's agent uses and nobody has a claim to.
    pub(super) fn take_up(
        &mut self,
        name: &Text,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        let (blocks, ended) = self.registry.take_up(name, world, now);
        self.freed |= ended;
        let Some(node) = world.nodes.get(name).filter(|_| !blocks.is_empty()) else {
            return;
        };
        for cidr in &blocks {
            let note = format!(
                "its agent uses block {cidr}, of which the API knew nothing: it is this node's again. If the API was put back to an older state, see docs/backup.md"
            );
            reports.push(Report::warning(About::node(node), BLOCK_ADOPTED, note));
        }
        let nodes = vec![name.clone()];
        let noted = Noted {
            blocks,
            nodes,
            ..Noted::default()
        };
        self.follow_up(noted, world);
    }

    /// Takes in a change of a block's object.
    pub(crate) fn block_changed(&mut self, delta: &Delta<Block>, world: &World, now: Now) {
        let noted = match (&delta.before, &delta.after) {
            (_, Some(after)) => self.registry.block_seen(after, now),
            (Some(before), None) => self.registry.block_gone(before),
            (None, None) => return,
        };
        // The owner may have been deleted before the object was seen.
        if let Some(Ok(spec)) = delta.after.as_ref().map(|block| &block.spec) {
            self.retire_stale(&spec.cidr, world, now);
        }
        self.follow_up(noted, world);
    }

    fn retire_stale(&mut self, cidr: &Cidr, world: &World, now: Now) {
        let Some(owner) = self.registry.blocks.get(cidr).map(|entry| &entry.owner) else {
            return;
        };
        let (name, uid) = (owner.name.clone(), owner.uid.clone());
        let live = world.nodes.get(&name).is_some_and(|node| node.uid == uid);
        if !live && !owner.resting {
            self.retire_blocks(&name, &uid, &Machine::default(), now);
        }
    }

    fn retire_blocks(&mut self, name: &Text, uid: &Text, machine: &Machine, now: Now) {
        let mut freed = false;
        for cidr in self.registry.retire_blocks(name, uid, machine, now) {
            freed |= self.registry.blocks.get(&cidr).is_none();
            self.loops.blocks.queue.add(cidr);
        }
        if freed {
            self.space_came();
        }
    }

    /// Takes in a change of a pool; `spec`: in more than its status; `exists`: the pool still exists.
    pub(crate) fn pool_changed(&mut self, name: &Text, spec: bool, exists: bool) {
        self.loops.pools.queue.add(name.clone());
        if !exists {
            self.loops.default_pool.queue.add(());
        }
        self.survey |= spec;
        self.reattribute |= spec;
    }

    /// Takes in a change of pods' addresses, which count where no agent reports.
    pub(crate) fn pods_changed(&mut self) {
        self.loops.pools.mark();
    }

    pub(crate) fn services_changed(&mut self) {
        self.survey = true;
    }

    pub(crate) fn node_changed(
        &mut self,
        delta: &Delta<Node>,
        world: &World,
        reports: &mut Vec<Report>,
        foreign_allocations: &mut u64,
        now: Now,
    ) {
        let same = |a: &Node, b: &Node| a.uid == b.uid;
        let before = delta.before.as_deref();
        let gone = |node: &Node| node.deleting && Mutation::DeletingNodeCountsAsGone.is_on();
        let after = delta.after.as_deref().filter(|node| !gone(node));
        if let Some(gone) = before.filter(|b| after.is_none_or(|a| !same(a, b))) {
            self.node_gone(gone, world, now);
        }
        self.resurvey_for(before, after);
        let Some(node) = after else { return };
        let before = before.filter(|b| same(b, node));
        if before.is_none() && !self.registry.is_listening {
            let given = self.registry.give_blocks_back(node, now);
            for cidr in given {
                self.loops.blocks.queue.add(cidr);
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
        if before.is_none_or(|b| b.labels != node.labels || b.deleting != node.deleting) {
            self.loops.demand.add(node, &self.registry);
            self.loops.subnets.queue.add(node.name.clone());
            // The status of a pool says whether it selects any node.
            self.loops.pools.mark();
        }
        let listed = world.subnets.get(&node.name).map(AsRef::as_ref);
        let synced = self.registry.sync(node, listed);
        if synced.freed {
            self.space_came();
        }
        if node.is_empty() {
            self.loops.podcidrs.queue.add(node.name.clone());
            return;
        }
        for name in self.registry.give_up_unasked(&synced.foreign) {
            self.loops.demand.add_name(&name, world, &self.registry);
        }
        self.registry.intents.settled(&node.uid);
        self.loops.podcidrs.served(node, reports);
        report_overlaps(node, &synced, reports);
        self.registry.report_too_wide(reports);
        let given = before.is_some_and(Node::is_empty);
        if given && !synced.foreign.is_empty() {
            *foreign_allocations += 1;
            self.foreign_allocator(node, &synced.foreign, reports, now);
        }
        if before.is_none_or(|b| b.unreadable != node.unreadable) {
            report_unreadable(node, reports);
        }
        if before.is_none_or(|b| b.pod_cidrs != node.pod_cidrs || b.machine != node.machine) {
            self.loops.subnets.has_podcidrs(&node.name, now.mono);
            self.loops.pools.mark();
        }
    }

    fn node_gone(&mut self, node: &Node, world: &World, now: Now) {
        self.loops.podcidrs.gone(node);
        self.registry.intents.settled(&node.uid);
        self.loops.demand.gone(node);
        self.freed |= !self.registry.strays.remove(&node.name).is_empty();
        self.loops.subnets.gone(node);
        self.registry
            .keep_for_rest(&node.name, &node.uid, world, now);
        self.retire_blocks(&node.name, &node.uid, &node.machine, now);
        if self.registry.retire(node, now) {
            self.loops
                .quarantine
                .watch((node.name.clone(), node.uid.clone()), &self.registry);
        }
        self.loops.subnets.queue.add(node.name.clone());
        self.loops.pools.mark();
    }

    /// Surveys the pools again if a node's own addresses change in them, which are not allocated.
    fn resurvey_for(&mut self, before: Option<&Node>, after: Option<&Node>) {
        let of = |node: Option<&Node>| node.map(|n| n.addresses.clone()).unwrap_or_default();
        let (was, is) = (of(before), of(after));
        if was == is {
            return;
        }
        let host = |addr: &Addr| Cidr::host(*addr);
        let touches = |range: Cidr| self.registry.pools.is_any_over(&range);
        if was.iter().chain(is.iter()).map(host).any(touches) {
            self.survey = true;
        }
    }

    fn foreign_allocator(
        &mut self,
        node: &Node,
        foreign: &[Cidr],
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        for range in foreign {
            self.registry.pools.hold(range, now.mono + self.hold);
        }
        self.survey = true;
        let ranges: Vec<String> = foreign.iter().map(ToString::to_string).collect();
        let note = format!(
            "podCIDRs {} were written by somebody else while Cadastre deals: turn off the other allocator (kube-controller-manager: --allocate-node-cidrs=false, also in the kubeadm-config ConfigMap; cloud controllers: their route or IPAM controller)",
            ranges.join(", ")
        );
        reports.push(Report::warning(About::node(node), FOREIGN_ALLOCATOR, note));
    }

    pub(super) fn release(&mut self, name: &Text, world: &World) {
        if !self.loops.subnets.is_open(name) && Quarantine::release(name, world, &mut self.registry)
        {
            self.space_came();
        }
    }
}

pub(super) fn report_overlaps(node: &Node, synced: &Synced, reports: &mut Vec<Report>) {
    for (name, uid, range) in &synced.overlaps {
        let note = format!(
            "its podCIDRs overlap {range} of node \"{name}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet"
        );
        reports.push(Report::warning(About::node(node), OVERLAPPING, note));
        let note = format!(
            "its podCIDR {range} overlaps podCIDRs of node \"{}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet",
            node.name
        );
        let about = About::new(Kind::Node, name, uid);
        reports.push(Report::warning(about, OVERLAPPING, note));
    }
}

pub(super) fn report_unreadable(node: &Node, reports: &mut Vec<Report>) {
    if node.unreadable.is_empty() {
        return;
    }
    let texts: Vec<&str> = node.unreadable.iter().map(AsRef::as_ref).collect();
    let note = format!(
        "spec.podCIDRs holds what is no CIDR: {}: it cannot be changed any more; delete the Node object and restart its kubelet",
        texts.join(", ")
    );
    reports.push(Report::warning(About::node(node), UNREADABLE, note));
}
