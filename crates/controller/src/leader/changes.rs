//! Handles changes of API objects: updates the allocations, and queues the affected objects in the loops.

use std::collections::BTreeSet;

use super::{Leader, RouteLoopOf};
use crate::Now;
use crate::allocations::SyncOutcome;
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use crate::cluster::object_cache::ObjectUpdate;
use crate::cluster::objects::{Block, Claim, MachineIdentity, Node, Owner};
use crate::cluster::request::ObjectKind;
use crate::quarantine::Quarantine;
use crate::report::{
    BLOCK_ADOPTED, EventRecord, FOREIGN_ALLOCATOR, OVERLAPPING, Regarding, UNREADABLE,
};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Which parts of a NodeSubnet an update of the object has changed.
#[derive(Clone, Copy)]
pub(crate) struct SubnetDiff {
    /// Whether the update has changed the agent's report
    pub reported: bool,
    /// Whether the update has changed the requests of users, for example a request to withdraw a range. Users make
    /// these requests in annotations of the NodeSubnet
    pub requested: bool,
}

impl Leader {
    /// Updates the ledger after a NodeSubnet has changed. Queues the node of the NodeSubnet, and the claims whose
    /// addresses lie in blocks of the node.
    pub(crate) fn subnet_changed(
        &mut self,
        name: &NodeName,
        changed: SubnetDiff,
        cache: &ClusterCache,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        self.loops.subnets.queue.add(name.clone());
        self.release(name, cache);
        let mut blocks = self.allocations.listed_blocks_changed(name, cache, now);
        blocks.extend(self.allocations.released_blocks(name, cache, now));
        self.follow_up(
            AffectedLoops {
                blocks,
                ..AffectedLoops::default()
            },
            cache,
        );
        if changed.reported {
            self.adopt(name, cache, reports, now);
        }
        // A user may have requested the release of an address. The agent reports the address as soon as the pod of the
        // address is gone. So the changed report may make the address a leak candidate.
        let subnet = cache.subnets.get(name);
        let is_awaited = subnet.is_some_and(|it| !it.requests.release.is_empty());
        if changed.requested || changed.reported && is_awaited {
            self.loops.leaks.scan_soon();
        }
        self.look_at_claims_in_blocks_of(name, cache);
        self.loops.exhaustion.queue.add(name.clone());
        self.loops.queue_routes(name);
        self.loops.demand.subnet_changed();
        if changed.reported || changed.requested {
            self.loops.demand.add_name(name, cache, &self.allocations);
            self.loops.pools.mark();
        }
    }

    /// Queues the node of a changed NodeRoutes or FRRConfiguration, and the blocks that the object no longer lists.
    pub(crate) fn routes_changed<K: RouteLoopOf>(&mut self, delta: &ObjectUpdate<K>) {
        let (before, after) = (delta.before.as_deref(), delta.after.as_deref());
        if let Some(object) = after.or(before) {
            let queue = &mut K::route_loop(&mut self.loops).queue;
            queue.add(object.name().clone());
        }
        let ranges = |it: Option<&K>| it.map(K::ranges).unwrap_or_default();
        let gone = &ranges(before) - &ranges(after);
        self.look_at_blocks(gone.into_iter().collect());
    }

    /// Queues the claims whose addresses lie in blocks of the node, because the node may have withdrawn or released
    /// these addresses for the claims.
    fn look_at_claims_in_blocks_of(&mut self, name: &NodeName, cache: &ClusterCache) {
        if self.allocations.claims.is_empty() {
            return;
        }
        let Some(node) = cache.nodes.get(name) else {
            return;
        };
        let plain = self.allocations.plain_blocks(&node.uid);
        let claims = plain.flat_map(|block| self.allocations.claims.inside(&block.cidr));
        for (_, claim, _) in claims {
            self.loops.claims.queue.add(claim.clone());
        }
        for block in self.allocations.blocks.on_standby(&node.uid) {
            let claim = self.allocations.claims.of(&block.cidr);
            if let Some(name) = claim {
                self.loops.claims.queue.add(name.clone());
            }
        }
    }

    /// Adopts the blocks that the node's agent uses and that are allocated to no node. Reports each by an event.
    pub(super) fn adopt(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        let (blocks, ended) = self.allocations.adopt_of_node(name, cache, now);
        self.freed |= ended;
        let Some(node) = cache.nodes.get(name).filter(|_| !blocks.is_empty()) else {
            return;
        };
        for cidr in &blocks {
            let note = format!(
                "its agent uses block {cidr}, of which the API knew nothing: it is this node's again. If the API was put back to an older state, see docs/backup.md"
            );
            reports.push(EventRecord::warning(&**node, BLOCK_ADOPTED, note));
        }
        let nodes = vec![name.clone()];
        let noted = AffectedLoops {
            blocks,
            nodes,
            ..AffectedLoops::default()
        };
        self.follow_up(noted, cache);
    }

    /// Updates the ledger after an IPAMBlock has changed. If the owner or a standby of the block is a Node that is
    /// gone, handles the blocks of this Node like those of a deleted Node.
    pub(crate) fn block_changed(
        &mut self,
        delta: &ObjectUpdate<Block>,
        cache: &ClusterCache,
        now: Now,
    ) {
        let noted = match (&delta.before, &delta.after) {
            (_, Some(after)) => self.allocations.block_seen(after, now),
            (Some(before), None) => self.allocations.block_gone(before),
            (None, None) => return,
        };
        // The Node of the owner may have been deleted before the watch delivered the IPAMBlock. In this case, the block
        // must be quarantined now.
        if let Some(Ok(spec)) = delta.after.as_ref().map(|block| &block.spec) {
            self.quarantine_stale(&spec.cidr, cache, now);
        }
        self.follow_up(noted, cache);
    }

    fn quarantine_stale(&mut self, cidr: &Cidr, cache: &ClusterCache, now: Now) {
        let Some(entry) = self.allocations.blocks.get(cidr) else {
            return;
        };
        let standby = entry.standby.iter().map(|it| &it.owner);
        let nodes = standby.chain([&entry.owner]).filter(|it| !it.quarantined);
        let is_live = |it: &&Owner| {
            cache
                .nodes
                .get(&it.name)
                .is_some_and(|node| node.uid == it.uid)
        };
        let stale = nodes.filter(|it| !is_live(it));
        let stale = stale.map(|it| (it.name.clone(), it.uid.clone()));
        for (name, uid) in stale.collect::<Vec<_>>() {
            self.quarantine_blocks(&name, &uid, &MachineIdentity::default(), now);
        }
    }

    fn quarantine_blocks(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        machine: &MachineIdentity,
        now: Now,
    ) {
        let mut freed = false;
        for cidr in self.allocations.quarantine_blocks(name, uid, machine, now) {
            freed |= self.allocations.blocks.get(&cidr).is_none();
            self.loops.blocks.queue.add(cidr);
            self.look_at_claim(&cidr);
        }
        if freed {
            self.requeue_waiting();
        }
    }

    /// Handles a change of a pool. `spec` is true if more than the pool's status has changed. `exists` is true if the
    /// pool still exists.
    pub(crate) fn pool_changed(&mut self, name: &PoolName, spec: bool, exists: bool) {
        self.loops.pools.queue.add(name.clone());
        if !exists {
            self.loops.default_pool.queue.add(());
        }
        self.needs_evaluation |= spec;
        self.reattribute |= spec;
    }

    /// Handles a change of pods. `changed` is true if a pod may have stopped reporting an address. `claims` are the
    /// claims whose pods have changed, and `nodes` are the nodes whose pods have changed.
    pub(crate) fn pods_changed(
        &mut self,
        changed: bool,
        claims: BTreeSet<ClaimName>,
        nodes: BTreeSet<NodeName>,
    ) {
        for name in nodes {
            self.loops.exhaustion.queue.add(name);
        }
        for name in claims {
            self.loops.pod_claims.queue.add(name.clone());
            self.loops.ipam_claims.queue.add(name.clone());
            self.loops.claims.queue.add(name);
        }
        if changed {
            self.loops.claims.requeue_in_use();
            self.loops.pools.mark();
        }
    }

    /// Records the addresses of a new or changed claim, or frees those of a deleted claim.
    pub(crate) fn claim_changed(&mut self, delta: &ObjectUpdate<Claim>) {
        let (before, after) = (delta.before.as_deref(), delta.after.as_deref());
        let is_same = |it: &&Claim| after.is_some_and(|after| after.uid == it.uid);
        if let Some(gone) = before.filter(|it| !is_same(it)) {
            self.loops.claims.gone(&gone.name);
            for node in self.allocations.nodes_around(&gone.name) {
                self.loops.subnets.queue.add(node);
            }
            self.loops.pod_claims.queue.add(gone.name.clone());
            self.loops.ipam_claims.queue.add(gone.name.clone());
            if self.allocations.drop_claim(&gone.name) {
                self.requeue_waiting();
            }
        }
        if let Some(claim) = after {
            let around = self.allocations.nodes_around(&claim.name);
            if self.allocations.claim_seen(claim) {
                // These nodes no longer have to withdraw the addresses that were replaced.
                for node in around {
                    self.loops.subnets.queue.add(node);
                }
                self.requeue_waiting();
            }
            self.loops.claims.queue.add(claim.name.clone());
            if claim.ipam_claim.is_some() {
                self.loops.ipam_claims.queue.add(claim.name.clone());
            }
        }
    }

    pub(crate) fn services_changed(&mut self) {
        self.needs_evaluation = true;
    }

    pub(crate) fn node_changed(
        &mut self,
        delta: &ObjectUpdate<Node>,
        cache: &ClusterCache,
        reports: &mut Vec<EventRecord>,
        foreign_allocations: &mut u64,
        now: Now,
    ) {
        let same = |a: &Node, b: &Node| a.uid == b.uid;
        let before = delta.before.as_deref();
        let gone = |node: &Node| node.deleting && Mutation::DeletingNodeCountsAsGone.is_on();
        let after = delta.after.as_deref().filter(|node| !gone(node));
        if let Some(gone) = before.filter(|b| after.is_none_or(|a| !same(a, b))) {
            self.node_gone(gone, cache, now);
        }
        self.reevaluate_for(before, after);
        if before.is_some() != after.is_some() {
            self.loops.subnets.nodes_counted(cache, now.mono);
        }
        let Some(node) = after else { return };
        self.loops.exhaustion.queue.add(node.name.clone());
        self.loops.queue_routes(&node.name);
        let before = before.filter(|b| same(b, node));
        if before.is_none() && !self.allocations.in_agent_grace {
            for cidr in self.allocations.return_blocks(node, now) {
                self.loops.blocks.queue.add(cidr);
                self.look_at_claim(&cidr);
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
        if before.is_none_or(|b| b.labels != node.labels || b.deleting != node.deleting) {
            self.loops.demand.add(node, &self.allocations);
            self.loops.subnets.queue.add(node.name.clone());
            // A pool's condition reports whether the pool selects any node.
            self.loops.pools.mark();
        }
        let listed = cache.subnets.get(&node.name).map(AsRef::as_ref);
        let synced = self.allocations.sync(node, listed);
        if synced.freed {
            self.requeue_waiting();
        }
        if node.is_empty() {
            self.loops.podcidrs.queue.add(node.name.clone());
            return;
        }
        for name in self.allocations.drop_unsent(&synced.foreign) {
            self.loops.demand.add_name(&name, cache, &self.allocations);
        }
        self.allocations.intents.settled(&node.uid);
        self.loops.podcidrs.served(node, reports);
        report_overlaps(node, &synced, reports);
        self.allocations.report_too_wide(reports);
        let is_first_write = before.is_some_and(Node::is_empty);
        if is_first_write && !synced.foreign.is_empty() {
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

    fn node_gone(&mut self, node: &Node, cache: &ClusterCache, now: Now) {
        self.loops.podcidrs.gone(node);
        self.allocations.intents.settled(&node.uid);
        self.loops.demand.gone(node);
        self.loops.queue_routes(&node.name);
        self.loops.exhaustion.queue.add(node.name.clone());
        self.freed |= !self.allocations.unadopted.remove(&node.name).is_empty();
        self.loops.subnets.gone(node);
        self.allocations
            .keep_for_quarantine(&node.name, &node.uid, cache, now);
        self.quarantine_blocks(&node.name, &node.uid, &node.machine, now);
        if self.allocations.quarantine(node, now) {
            self.loops
                .quarantine
                .watch((node.name.clone(), node.uid.clone()), &self.allocations);
        }
        self.loops.subnets.queue.add(node.name.clone());
        self.loops.pools.mark();
    }

    /// Schedules a new evaluation of the pools if the node's own addresses have changed and an old or new address lies
    /// in a pool. The reason is that pools do not allocate addresses of nodes.
    fn reevaluate_for(&mut self, before: Option<&Node>, after: Option<&Node>) {
        let of = |node: Option<&Node>| node.map(|n| n.addresses.clone()).unwrap_or_default();
        let (was, is) = (of(before), of(after));
        if was == is {
            return;
        }
        let host = |addr: &Addr| Cidr::host(*addr);
        let touches = |range: Cidr| self.allocations.pools.is_any_over(&range);
        if was.iter().chain(is.iter()).map(host).any(touches) {
            self.needs_evaluation = true;
        }
    }

    fn foreign_allocator(
        &mut self,
        node: &Node,
        foreign: &[Cidr],
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        for range in foreign {
            self.allocations
                .pools
                .pause(range, now.mono + self.foreign_pause);
        }
        self.needs_evaluation = true;
        let ranges: Vec<String> = foreign.iter().map(ToString::to_string).collect();
        let note = format!(
            "podCIDRs {} were written by a foreign allocator while Cadastre allocates them: turn off the other allocator (kube-controller-manager: --allocate-node-cidrs=false, also in the kubeadm-config ConfigMap; cloud controllers: their route or IPAM controller)",
            ranges.join(", ")
        );
        reports.push(EventRecord::warning(node, FOREIGN_ALLOCATOR, note));
    }

    pub(super) fn release(&mut self, name: &NodeName, cache: &ClusterCache) {
        if !self.loops.subnets.is_open(name)
            && Quarantine::release(name, cache, &mut self.allocations)
        {
            self.requeue_waiting();
        }
    }
}

pub(super) fn report_overlaps(node: &Node, synced: &SyncOutcome, reports: &mut Vec<EventRecord>) {
    for (name, uid, range) in &synced.overlaps {
        let note = format!(
            "its podCIDRs overlap {range} of node \"{name}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet"
        );
        reports.push(EventRecord::warning(node, OVERLAPPING, note));
        let note = format!(
            "its podCIDR {range} overlaps podCIDRs of node \"{}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet",
            node.name
        );
        let about = Regarding::new(ObjectKind::Node, name.clone(), uid);
        reports.push(EventRecord::warning(about, OVERLAPPING, note));
    }
}

pub(super) fn report_unreadable(node: &Node, reports: &mut Vec<EventRecord>) {
    if node.unreadable.is_empty() {
        return;
    }
    let texts: Vec<&str> = node.unreadable.iter().map(AsRef::as_ref).collect();
    let note = format!(
        "spec.podCIDRs holds what is no CIDR: {}: it cannot be changed any more; delete the Node object and restart its kubelet",
        texts.join(", ")
    );
    reports.push(EventRecord::warning(node, UNREADABLE, note));
}
