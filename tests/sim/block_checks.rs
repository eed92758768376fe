//! Checks of blocks after every step.
//!
//! # Guarantees that are checked
//! 1. *One holder.* No address is assigned to a pod while another live host may assign it as well, or while another
//!    existing pod reports it. No listed block overlaps a block that is listed for another live node, or a podCIDR that
//!    a controller has allocated. There are two exceptions. An address that a NodeSubnet withdraws from a block may be
//!    a block of its own, for a claim. A range that a NodeSubnet withdraws and lists as lent may be a block of its own,
//!    too.
//! 2. *Release.* A block listed for a live node stays listed until the node's agent has reported the release of that
//!    block, by CIDR and UID.
//! 3. *The end of a block.* A controller deletes the object of a block only in three cases. In the first case, the
//!    agent has reported the block's release. In the second case, the block was never listed, and another range held
//!    its addresses. In the third case, the block's node is deleted, the quarantine is over, and no pod of the node
//!    reports an address of the block.
//! 4. *Policy.* A new block lies inside its pool and is for a node that the pool selects. It overlaps no range that the
//!    writing process had received as allocated, and no older pool.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_api::{AllocationMode, NodeSubnetSpec};
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{Block, BlockSpec, Node, Pod, ServiceRange, Subnet};
use cadastre_core::{Addr, Cidr};

use super::api::{Api, Author};
use super::checks::{Checks, DUPLICATE, Verdict, wrong};
use super::clock::{SECOND, Time};
use super::host::{Held, Key, key};
use super::migrations::key_of_owner;
use super::pool_model::{PoolModel, counted};
use super::received::Received;
use super::run::{RunId, Sim};

/// A controller must respect a pool, service range or pod that it received at least this long ago.
const HEEDED: Time = 120 * SECOND;

/// The history of each block (by CIDR and UID), and when each node was deleted.
#[derive(Clone, Default)]
pub struct BlockChecks {
    histories: BTreeMap<Key, BlockHistory>,
    /// The keys of blocks that several nodes may have for one virtual machine. A block has one key for each node that
    /// its object has named.
    pub(super) named: BTreeMap<Key, ObjectUid>,
    /// For each deleted node (UID), the time of its deletion.
    pub died: BTreeMap<ObjectUid, Time>,
}

#[derive(Clone, Debug, Default)]
struct BlockHistory {
    /// UIDs of the nodes for which the block was listed.
    listed: BTreeSet<ObjectUid>,
    /// When a NodeSubnet last began to list the block.
    since: Time,
    /// UIDs of the nodes whose agents have released the block.
    released: BTreeSet<ObjectUid>,
    /// Whether another range held addresses of the block.
    contested: bool,
    /// Whether a user edited the block's object or its entry in a NodeSubnet, or a restore lost the object.
    edited: bool,
}

/// Returns the blocks that a NodeSubnet lists.
pub fn listed(subnet: Option<&Subnet>) -> Vec<Key> {
    let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
    spec.map(|spec| spec.blocks.iter().map(key).collect())
        .unwrap_or_default()
}

/// Whether a claim has an address of the range.
fn is_claimed(range: &Cidr, api: &Api) -> bool {
    let claims = &mut api.claims.live.values();
    claims.any(|claim| claim.addresses().any(|addr| range.contains_addr(addr)))
}

/// Whether the NodeSubnet withdraws the range from its block `wide`.
fn is_withdrawn_from(subnet: Option<&Subnet>, wide: &Cidr, range: &Cidr) -> bool {
    let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
    let text = range.to_string();
    range != wide && wide.contains(range) && spec.is_some_and(|spec| spec.withdraw.contains(&text))
}

/// Whether the NodeSubnet withdraws the range from its block `wide` for another holder. If the range is not a single
/// address, the NodeSubnet must list it as lent.
fn is_handed_over(subnet: Option<&Subnet>, wide: &Cidr, range: &Cidr) -> bool {
    let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
    let is_host = *range == Cidr::host(range.first());
    let text = range.to_string();
    let is_lent = spec.is_some_and(|spec| spec.lent.iter().any(|it| it.cidr == text));
    (is_host || is_lent) && is_withdrawn_from(subnet, wide, range)
}

fn owner(subnet: Option<&Subnet>) -> Option<ObjectUid> {
    let spec: &NodeSubnetSpec = subnet?.spec.as_ref().ok()?;
    spec.node_uid.as_deref().map(ObjectUid::from)
}

fn is_live(api: &Api, uid: &ObjectUid) -> bool {
    api.nodes.live.values().any(|node| node.uid == *uid)
}

impl BlockChecks {
    /// Whether the block was ever listed for the node.
    pub fn was_listed(&self, block: &Key, uid: &ObjectUid) -> bool {
        let history = self.histories.get(block);
        history.is_some_and(|history| history.listed.contains(uid))
    }

    /// Whether the node may have the block: a NodeSubnet has listed the block for the node, and the node's agent has
    /// not released the block.
    pub fn may_have(&self, block: &Key, uid: &ObjectUid) -> bool {
        let history = self.histories.get(block);
        history
            .is_some_and(|it| it.listed.contains(uid) && !it.released.contains(uid) && !it.edited)
    }

    /// Records that a host uses a range that the restored server does not know. Blocks that overlap the range count as
    /// contested.
    pub fn used(&mut self, range: &Cidr) {
        for ((cidr, _), history) in &mut self.histories {
            history.contested |= cidr.overlaps(range);
        }
    }

    /// Records that a restore has lost the block's object. The block then counts as edited.
    pub fn lost(&mut self, block: Key) {
        self.histories.entry(block).or_default().edited = true;
    }
}

impl Checks {
    /// Checks a NodeSubnet that a controller writes against the guarantees 1 (*One holder*) and 2 (*Release*). Records
    /// the blocks that the agent has released, and the blocks whose entries a user may have changed.
    pub fn blocks_listed(
        &mut self,
        before: Option<&Subnet>,
        after: Option<&Subnet>,
        author: Author,
        api: &Api,
        now: Time,
    ) -> Verdict {
        for block in listed(after) {
            if !listed(before).contains(&block) {
                self.blocks.histories.entry(block).or_default().since = now;
            }
        }
        if let Some(report) = after.and_then(|after| after.report.as_ref()) {
            for entry in report.blocks.iter().filter(|entry| entry.released) {
                let history = self
                    .blocks
                    .histories
                    .get_mut(&(entry.cidr, entry.uid.clone()));
                if let Some(history) = history {
                    history.released.insert(report.node_uid.clone());
                }
            }
        }
        if author == Author::World {
            // A user has changed the NodeSubnet. So the blocks that it listed before the change count as edited.
            for block in listed(before) {
                self.blocks.histories.entry(block).or_default().edited = true;
            }
        }
        if !matches!(author, Author::Controller(_)) {
            return Ok(());
        }
        let (was, is) = (listed(before), listed(after));
        let (had, has) = (owner(before), owner(after));
        if let Some(uid) = had.filter(|uid| is_live(api, uid)) {
            let report = before.and_then(|before| before.report.as_ref());
            let report = report.filter(|report| report.node_uid == uid);
            for block in was {
                // A block that was deleted by hand and created again has a new UID, so only the CIDR is compared.
                let stays = has.as_ref() == Some(&uid) && is.iter().any(|it| it.0 == block.0);
                let entry = report.and_then(|report| report.of_block(&block.0, &block.1));
                if !stays && !entry.is_some_and(|entry| entry.released) {
                    let name = before.map(|it| it.name.clone());
                    let text = format!(
                        "{} {} is taken from {name:?} ({uid}) whose agent has not let go of it",
                        block.0, block.1
                    );
                    return wrong("release", text, name);
                }
            }
        }
        let Some((uid, subnet)) = has.filter(|uid| is_live(api, uid)).zip(after) else {
            return Ok(());
        };
        for block in &is {
            let history = self.blocks.histories.entry(block.clone()).or_default();
            if history.listed.insert(uid.clone()) {
                self.tally.listed += 1;
                *self.allocated.entry(uid.clone()).or_default() += 1;
            }
            let is_nested = |b: &Key| {
                let of = |wide, range| is_handed_over(Some(subnet), wide, range);
                of(&b.0, &block.0) || of(&block.0, &b.0)
            };
            let clashes = |b: &&Key| *b != block && b.0.overlaps(&block.0) && !is_nested(b);
            let clash = is.iter().find(clashes);
            if let Some(other) = clash {
                let text = format!("{} and {} are both listed", block.0, other.0);
                return wrong(DUPLICATE, text, [subnet.name.clone()]);
            }
            // After a user has deleted the NodeSubnet, a late creation may list a block that the agent has released.
            // That does no harm, because the agent assigns nothing from the block.
            if before.is_none() && history.released.contains(&uid) {
                history.edited = true;
                continue;
            }
            for other in api.subnets.live.values().filter(|o| o.name != subnet.name) {
                let live = owner(Some(other)).filter(|uid| is_live(api, uid));
                let uses = |theirs: &&Key| {
                    let history = self.blocks.histories.get(theirs);
                    let is_over =
                        |uid| history.is_some_and(|history| history.released.contains(uid));
                    let is_nested = is_handed_over(Some(other), &theirs.0, &block.0)
                        || is_handed_over(Some(subnet), &block.0, &theirs.0);
                    theirs.0.overlaps(&block.0)
                        && !is_nested
                        && !self.blocks.are_shared(theirs, block)
                        && live.as_ref().is_some_and(|uid| !is_over(uid))
                };
                if let Some(theirs) = listed(Some(other)).iter().find(uses) {
                    let text = format!(
                        "{} is listed to {} and {} to {}",
                        block.0, subnet.name, theirs.0, other.name
                    );
                    let names = [subnet.name.clone(), other.name.clone()];
                    return wrong(DUPLICATE, text, names);
                }
            }
        }
        Ok(())
    }

    /// Checks a write or deletion of a block's object.
    pub fn block_written(
        &mut self,
        before: Option<&Block>,
        after: Option<&Block>,
        author: Author,
        api: &Api,
        times: (Time, Time),
    ) -> Verdict {
        self.blocks.note_holders(after);
        if let (None, Some(Ok(spec))) = (before, after.map(|after| &after.spec)) {
            self.block_created(after.map(|it| &it.uid), spec, api);
        }
        if !matches!(author, Author::Controller(_)) {
            let spec = before.and_then(|before| before.spec.as_ref().ok());
            if let (Some(spec), Some(before)) = (spec, before) {
                let key = (spec.cidr, before.uid.clone());
                self.blocks.histories.entry(key).or_default().edited = true;
            }
            return Ok(());
        }
        let spec = |block: Option<&Block>| block.and_then(|b| b.spec.as_ref().ok()).cloned();
        if let Some(after) = spec(after)
            && after.owner.quarantined
            && is_live(api, &after.owner.uid)
            && self.is_listed_to(before, &after)
        {
            let text = format!(
                "{} is quarantined while node {} exists",
                after.cidr, after.owner.uid
            );
            return wrong("release", text, [after.owner.name]);
        }
        match (before, spec(before), after) {
            (Some(block), Some(spec), None) => self.block_ended(block, &spec, api, times),
            _ => Ok(()),
        }
    }

    /// Whether a user edited, or a restore lost, a block that contains the address.
    fn was_edited(&self, addr: Addr) -> bool {
        let mut histories = self.blocks.histories.iter();
        histories.any(|(key, history)| history.edited && key.0.contains_addr(addr))
    }

    /// Whether the address is in a podCIDR of a deleted node that no NodeSubnet contained when the node was deleted.
    fn is_unrecorded(&self, addr: Addr) -> bool {
        let mut unrecorded = self.dead_nodes.iter().filter(|it| !it.recorded);
        unrecorded.any(|it| it.ranges.iter().any(|range| range.contains_addr(addr)))
    }

    fn is_listed_to(&self, block: Option<&Block>, spec: &BlockSpec) -> bool {
        let uid = block.map(|block| block.uid.clone()).unwrap_or_default();
        let history = self.blocks.histories.get(&key_of_owner(spec, &uid));
        history.is_some_and(|history| history.listed.contains(&spec.owner.uid))
    }

    fn block_created(&mut self, uid: Option<&ObjectUid>, spec: &BlockSpec, api: &Api) {
        let Some(uid) = uid else { return };
        let cidr = spec.cidr;
        let others = api.blocks.live.values().filter(|b| b.uid != *uid);
        let others = others.filter_map(|b| Some((b.spec.as_ref().ok()?.cidr, b.uid.clone())));
        let hit: Vec<Key> = others.filter(|(c, _)| c.overlaps(&cidr)).collect();
        let nodes = &mut api.nodes.live.values();
        let podcidr = nodes.any(|node| counted(node).any(|c| c.overlaps(&cidr)));
        let dead_nodes = &mut self.dead_nodes.iter();
        let quarantined = dead_nodes.any(|dead| dead.ranges.iter().any(|c| c.overlaps(&cidr)));
        let contested = !hit.is_empty() || podcidr || quarantined || is_claimed(&cidr, api);
        for other in hit {
            self.blocks.histories.entry(other).or_default().contested = true;
        }
        let history = self
            .blocks
            .histories
            .entry((cidr, uid.clone()))
            .or_default();
        history.contested |= contested;
    }

    /// Records that podCIDRs were written, whoever wrote them. Blocks that overlap these ranges count as contested.
    pub fn podcidrs_written(&mut self, ranges: &[Cidr]) {
        for ((cidr, _), history) in &mut self.blocks.histories {
            history.contested |= ranges.iter().any(|range| range.overlaps(cidr));
        }
    }

    fn block_ended(
        &mut self,
        block: &Block,
        spec: &BlockSpec,
        api: &Api,
        (now, decided): (Time, Time),
    ) -> Verdict {
        self.tally.ended += 1;
        let owner = &spec.owner;
        let names = [owner.name.clone()];
        let key = key_of_owner(spec, &block.uid);
        // The block may have been deleted by hand and created again. In that case, the agent released it under its
        // earlier UID. So the histories of all blocks of this CIDR are considered.
        let same = self.blocks.histories.range((spec.cidr, "".into())..);
        let same = same.take_while(|((cidr, _), _)| *cidr == spec.cidr);
        let same: Vec<(&Key, &BlockHistory)> = same.collect();
        let was_listed =
            |it: &&(&Key, &BlockHistory)| *it.0 == key && it.1.listed.contains(&owner.uid);
        let was_listed = same.iter().any(|it| was_listed(&it));
        // Perhaps a late deletion removed the block, and the controller created it again. In that case, the release of
        // the earlier object counts.
        let is_let_go = |it: &BlockHistory| it.released.contains(&owner.uid);
        let remade = |it: &BlockHistory| is_let_go(it) && (it.edited || !was_listed);
        let remade = same.iter().any(|(_, it)| remade(it));
        let was_edited = same.iter().any(|(_, it)| it.edited);
        let history = self.blocks.histories.entry(key.clone()).or_default();
        history.contested |= is_claimed(&spec.cidr, api);
        if is_live(api, &owner.uid) {
            let subnet = api.subnets.get(&owner.name).map(AsRef::as_ref);
            // If the NodeSubnet had listed the block again before the deletion was decided, the agent must have reported
            // the release once more. After a late deletion of an earlier leader, the next leader restores the block.
            let report = subnet.and_then(|subnet| subnet.report.as_ref());
            let report = report.filter(|report| report.node_uid == owner.uid);
            let entry = report.and_then(|report| report.of_block(&key.0, &key.1));
            let is_released = entry.is_some_and(|entry| entry.released);
            let is_listed = owner_is(subnet, &owner.uid) && listed(subnet).contains(&key);
            let still = is_listed && history.since <= decided && !is_released;
            let released = history.released.contains(&owner.uid) && !still;
            let lost =
                history.contested && (history.edited || !history.listed.contains(&owner.uid));
            let strange = history.edited || was_edited || owner.quarantined;
            let never = strange && !history.listed.contains(&owner.uid);
            let fair = released || lost || never || remade && !still;
            if !fair {
                let (name, cidr, uid) = (&owner.name, spec.cidr, &block.uid);
                let text = format!(
                    "{cidr} {uid} of {name} ({}) is deleted: {history:?}",
                    owner.uid
                );
                return wrong("end of a block", text, names);
            }
            return Ok(());
        }
        let held = |uid: &ObjectUid| {
            let pods = api.pods_on(&owner.name);
            let pods = pods.filter(|pod| !self.given_too_late.contains(&pod.uid));
            let mut addresses = pods.flat_map(|pod| pod.addresses.iter());
            // An address may belong to a smaller block inside this block. Such a block belongs to a claim, or to a node
            // that borrows it.
            let blocks = api.blocks.live.values();
            let nested = blocks.filter_map(|it| Some(it.spec.as_ref().ok()?.cidr));
            let nested = nested.filter(|it| spec.cidr.contains(it) && *it != spec.cidr);
            let nested: Vec<Cidr> = nested.collect();
            let is_own = |addr: Addr| {
                spec.cidr.contains_addr(addr) && !nested.iter().any(|it| it.contains_addr(addr))
            };
            history.listed.contains(uid) && addresses.any(|addr| is_own(*addr))
        };
        if held(&owner.uid) {
            let (cidr, uid) = (spec.cidr, &owner.uid);
            let text = format!("{cidr} of {uid} ends while a pod reports an address of it");
            return wrong("end of a block", text, names);
        }
        // The same host may have released the block while it was registered as another Node, which may be deleted by
        // now.
        let released = !history.released.is_empty() || !history.listed.contains(&owner.uid);
        let died = self.blocks.died.get(&owner.uid).copied();
        let quarantine = self.quarantine_of(|it| it.name == spec.pool);
        let rested = died.map(|died| died + quarantine);
        if !released && !self.clocks_lie && rested.is_some_and(|rested| now < rested) {
            let (cidr, uid, ms) = (spec.cidr, &owner.uid, (now - died.unwrap_or(now)) / 1000);
            let text = format!("{cidr} of {uid} ends {ms} ms after its node");
            return wrong("end of a block", text, names);
        }
        Ok(())
    }

    /// Checks a new block that a controller requests. The controller must have respected every object that it had
    /// received long enough ago.
    pub fn carved(
        &self,
        run_id: RunId,
        spec: &BlockSpec,
        received: &Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let fail = |what: String| {
            let owner = &spec.owner;
            let text = format!(
                "{run_id} carves {} of {} for {} ({}): {what}",
                spec.cidr, spec.pool, owner.name, owner.uid
            );
            wrong("policy", text, [&*owner.name, &*spec.pool])
        };
        let subnet = received.subnets.objects.get(&spec.owner.name);
        // If a new block is quarantined, or the node had the block already, its creation is a repair, because the node
        // gains nothing by it.
        let restored = spec.owner.quarantined
            || received
                .used
                .contains(&(spec.cidr, spec.owner.name.clone()))
            || received.had.contains(&(spec.cidr, spec.owner.name.clone()))
            || listed(subnet).iter().any(|(cidr, _)| *cidr == spec.cidr);
        if restored {
            return Ok(());
        }
        let labels = received.labels.get(&spec.owner.uid);
        // A pool that is disabled or overlaps an older pool allocates nothing new, but the addresses of its claims
        // still move from node to node.
        let mut claims = api.claims.live.values();
        let is_claim = claims.any(|it| it.addresses().any(|it| Cidr::host(it) == spec.cidr));
        let could = |model: &PoolModel| {
            model.name == spec.pool
                && (model.borrows || spec.parent.is_none())
                && model.allocation_mode == AllocationMode::Blocks
                && (!model.disabled || is_claim)
                && !model.deleting
                && model.contains(&spec.cidr)
                && labels.into_iter().flatten().any(|it| model.matches(it))
        };
        if !received.models.iter().any(could) {
            return fail("no pool it has seen could have".to_owned());
        }
        let hits = |cidr: &Cidr| cidr.overlaps(&spec.cidr);
        let mut subnets = received.subnets.objects.values();
        let theirs = subnets.find(|it| {
            let now = api.subnets.get(&it.name).map(AsRef::as_ref);
            let alive = owner(now).is_some_and(|uid| is_live(api, &uid));
            let still = if alive { listed(now) } else { Vec::new() };
            let is_part = is_claim || spec.parent.is_some();
            // A response can contain the withdrawal before the watch delivers it.
            let is_withdrawn = |wide: &Cidr| {
                let mut versions = [Some(&**it), now].into_iter();
                versions.any(|version| {
                    let report = version.and_then(|it| it.report.as_ref());
                    let is_answered = report.is_some_and(|it| it.withdrawn.contains(&spec.cidr));
                    (is_claim || is_answered) && is_withdrawn_from(version, wide, &spec.cidr)
                })
            };
            let is_nested = |wide: &Cidr| is_part && is_withdrawn(wide);
            let mut seen = listed(Some(it)).into_iter();
            seen.any(|block| hits(&block.0) && still.contains(&block) && !is_nested(&block.0))
        });
        if let Some(theirs) = theirs {
            return fail(format!("{} was seen with some of it", theirs.name));
        }
        let mut nodes = received.nodes.objects.values();
        let holds = |node: &&Node| counted(node).any(hits) && is_live(api, &node.uid);
        if let Some(node) = nodes.find(holds) {
            return fail(format!("{} was seen with a podCIDR there", node.name));
        }
        // The request may have been sent long after the decision, so only objects known for long enough count.
        let heeded = |uid: &ObjectUid| received.has_known_since(uid, now.saturating_sub(HEEDED));
        let mut services = received.services.objects.values();
        let covers = |s: &&ServiceRange| {
            let there = api.services.get(&s.name).is_some();
            there && heeded(&s.uid) && s.cidrs.iter().any(|c| c.contains(&spec.cidr))
        };
        if let Some(it) = services.find(covers) {
            return fail(format!("the service range {} covers it", it.name));
        }
        let mut pods = received.pods.objects.values();
        let inside = |addr: &Addr| spec.cidr.contains_addr(*addr);
        let reports = |pod: &&Pod| {
            let there = api.pods.get(&pod.name);
            pod.addresses.iter().any(inside)
                && heeded(&pod.uid)
                && there.is_some_and(|it| it.addresses.iter().any(inside))
        };
        if let Some(pod) = pods.find(reports) {
            return fail(format!("pod {} was seen there", pod.name));
        }
        if is_claim {
            return Ok(());
        }
        let pools = received.pools.objects.values();
        let pools: Vec<PoolModel> = pools.filter_map(PoolModel::new).collect();
        let Some(own) = pools.iter().find(|model| model.name == spec.pool) else {
            return Ok(());
        };
        let older = |model: &&PoolModel| {
            // Perhaps the pool is deleted now, or a response has shown a newer version of it than the watch.
            let there = api.pools.get(&model.name);
            there.is_some_and(|it| it.uid == model.uid)
                && model.age() < own.age()
                && model.overlaps(&spec.cidr)
                && received.has_known_since(&model.uid, now.saturating_sub(HEEDED))
                && received.has_known_since(&own.uid, now.saturating_sub(HEEDED))
        };
        if let Some(older) = pools.iter().find(older) {
            return fail(format!("the older pool {} has it too", older.name));
        }
        Ok(())
    }
}

fn owner_is(subnet: Option<&Subnet>, uid: &ObjectUid) -> bool {
    owner(subnet).as_ref() == Some(uid)
}

impl Sim {
    /// Returns the blocks that a host uses. These are the blocks of its present Node that it has not released. A block
    /// of a Node that a restore has removed counts, too, if an address of the block is in use. After a restore, a host
    /// that is off for good uses no block.
    fn used_by(&self, id: usize) -> Vec<&Key> {
        let agent = &self.machines.hosts[id];
        if agent.is_gone && self.was_restored() {
            return Vec::new();
        }
        let node = self.machines.live_node(id, &self.api);
        // After a restore, a host stays without a Node if the restore brought back an earlier Node of its name. Such a
        // host cannot publish which blocks it uses.
        if node.is_none() && self.was_restored() && !self.registering.contains(&agent.name) {
            return Vec::new();
        }
        let uses = |(key, held): &(&Key, &Held)| {
            let is_current = Some(&held.node) == node.as_ref() && !held.released;
            let is_lost = agent.forgotten.contains(&held.node);
            is_current || is_lost && agent.given.values().any(|it| it == *key)
        };
        let used = agent.blocks.iter().filter(uses);
        used.map(|(key, _)| key).collect()
    }

    /// Checks after a restore that no block is newly listed for a node while another host uses it, even if the server
    /// does not know of that use.
    pub fn check_listed(&self, before: Option<&Subnet>, after: Option<&Subnet>) -> Verdict {
        let Some(uid) = owner(after).filter(|uid| self.was_restored() && is_live(&self.api, uid))
        else {
            return Ok(());
        };
        let was = listed(before.filter(|_| owner_is(before, &uid)));
        let own = self.machines.of_node.get(&uid);
        for (cidr, listed_as) in listed(after) {
            if was.iter().any(|it| it.0 == cidr) {
                continue;
            }
            for other in (0..self.machines.hosts.len()).filter(|it| Some(it) != own) {
                let subnet_of = |id: usize| {
                    let name = &self.machines.hosts[id].name;
                    self.api.subnets.get(name).map(AsRef::as_ref)
                };
                let is_nested = |used: &Cidr| {
                    is_handed_over(subnet_of(other), used, &cidr)
                        || is_handed_over(after, &cidr, used)
                        || self.machines.hosts[other].has_withdrawn(&cidr)
                };
                let mut used = self.used_by(other).into_iter();
                let own = (cidr, listed_as.clone());
                let is_shared = |it: &Key| self.checks.blocks.are_shared(&own, it);
                let clashes =
                    |it: &&Key| it.0.overlaps(&cidr) && !is_nested(&it.0) && !is_shared(it);
                if let Some(used) = used.find(clashes) {
                    let theirs = self.machines.hosts[other].name.clone();
                    let text = format!("{cidr} is listed to {uid}, and {theirs} uses {}", used.0);
                    let name = after.map(|it| it.name.clone());
                    return wrong(DUPLICATE, text, name.into_iter().chain([theirs]));
                }
            }
        }
        Ok(())
    }

    /// Checks a block that an agent begins to use.
    pub fn check_taken(&self, id: usize, block: &Key) -> Verdict {
        let agent = &self.machines.hosts[id];
        let Some(uid) = self.live_node_of(id) else {
            return Ok(());
        };
        for (other, theirs) in self.machines.hosts.iter().enumerate() {
            let subnet_of = |host: &NodeName| self.api.subnets.get(host).map(AsRef::as_ref);
            for held in self.used_by(other) {
                // The store counts, too, because a user may have deleted the NodeSubnet after the withdrawal.
                let is_nested = is_handed_over(subnet_of(&theirs.name), &held.0, &block.0)
                    || is_handed_over(subnet_of(&agent.name), &block.0, &held.0)
                    || theirs.has_withdrawn(&block.0);
                let is_same = other == id && held.0 == block.0;
                let is_shared = self.checks.blocks.are_shared(held, block);
                if held.0.overlaps(&block.0) && !is_same && !is_nested && !is_shared {
                    let text = format!(
                        "{} ({uid}) takes over {} {} and {} uses {} {}",
                        agent.name, block.0, block.1, theirs.name, held.0, held.1
                    );
                    let names = [agent.name.clone(), theirs.name.clone()];
                    return wrong(DUPLICATE, text, names);
                }
            }
        }
        Ok(())
    }

    /// Checks an address that an agent assigns to a pod.
    pub fn check_given(&self, id: usize, pod: &ObjectUid, addr: Addr, block: &Key) -> Verdict {
        let agent = &self.machines.hosts[id];
        let Some(uid) = self.live_node_of(id) else {
            return Ok(());
        };
        let says = |who: String, other: NodeName| {
            let text = format!(
                "{addr} of {} {} goes to pod {pod} on {} ({uid}), and {who} has it",
                block.0, block.1, agent.name
            );
            wrong(DUPLICATE, text, [agent.name.clone(), other])
        };
        for (other, theirs) in self.machines.hosts.iter().enumerate() {
            let it = theirs.given.get(&addr).filter(|_| other != id);
            let used = || self.used_by(other);
            let is_alone = |it: &Key| !self.checks.blocks.are_shared(it, block);
            if it.is_some_and(|it| is_alone(it) && used().contains(&it)) {
                return says(format!("the agent of {}", theirs.name), theirs.name.clone());
            }
        }
        let others = self.api.pods.live.values();
        let is_other = |it: &&Arc<Pod>| it.uid != *pod && !self.migrations.are_one(&it.uid, pod);
        for other in others.filter(is_other) {
            // Nothing is guaranteed for addresses that no agent assigned, or that an agent assigned too late.
            let from_agent = self.machines.of_pod.contains_key(&other.uid)
                && !self.checks.ghosts.contains(&other.uid)
                && !self.checks.given_too_late.contains(&other.uid);
            // If a user edits the block of a dead node, that edit decides which node has the block. If a user has
            // deleted the record of a node's podCIDRs before the node's deletion, nothing records them any more. So
            // nothing is checked in these cases.
            let edited = self.checks.was_edited(addr) || self.checks.is_unrecorded(addr);
            // The quarantine of a dead node's addresses is measured by clocks. If a clock is fast, the quarantine ends
            // too early.
            let of_dead = || {
                let of_pod = self.machines.of_pod.get(&other.uid);
                of_pod.is_none_or(|(_, node)| !is_live(&self.api, node))
            };
            if self.plan.clocks_hurry() && of_dead() {
                continue;
            }
            // The status of a pod can lag behind its host, which knows that the sandbox with the address is gone.
            let of_host = self.machines.of_pod.get(&other.uid);
            let is_here = of_host.is_some_and(|(host, _)| *host == id);
            let is_stale = is_here && !self.addresses_on_host(id, &other.uid).contains(&addr);
            if from_agent && !edited && !is_stale && other.addresses.contains(&addr) {
                let placed = self.api.placed.get(&other.uid).cloned();
                let who = format!("pod {} on {placed:?}", other.uid);
                return says(who, placed.unwrap_or_default());
            }
        }
        Ok(())
    }
}
