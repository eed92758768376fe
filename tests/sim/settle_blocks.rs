//! Checks of blocks at the end of a run.
//!
//! Block objects, NodeSubnets and agents' stores agree. Deleted nodes have no blocks. No node keeps an empty block that
//! should have been recalled. No node lacks a block that a pool could allocate. No node lacks a block while another
//! node keeps a block unused, or could lend a part of one.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_api::{AllocatedBlock, AllocationMode, Recall, object_uid};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::{AgentReport, Block, BlockReport, BlockSpec, Node};
use cadastre_core::{Cidr, Family, IpRange};

use super::checks::{Verdict, wrong};
use super::host::{Host, Key, key};
use super::migrations::key_of_owner;
use super::pool_model::PoolModel;
use super::run::Sim;
use super::workload::MAX_PODS;

/// A block of a node. If the agent has not reported the block, `busy` is 0, and the check chooses `size`.
#[derive(Debug)]
struct BlockUse {
    cidr: Cidr,
    /// The number of addresses that are in use or cooling.
    busy: u64,
    /// The number of addresses that can be assigned, including those that are in use.
    size: u64,
}

/// A node's blocks of one pool, and how many addresses the node demands (`wanted`), keeps free beyond those in use
/// (`low`, from `warm.low`), and has at least in all (`minimum`).
#[derive(Debug)]
pub struct PoolUse {
    blocks: Vec<BlockUse>,
    wanted: u64,
    low: u64,
    minimum: u64,
}

impl PoolUse {
    /// Selects the blocks of the pool. A block that the agent has not reported counts as having `unreported` addresses.
    fn new<'a>(
        blocks: impl Iterator<Item = &'a AllocatedBlock>,
        model: &PoolModel,
        report: &AgentReport,
        unreported: u64,
    ) -> Self {
        let own = blocks.filter(|held| *held.pool == *model.name);
        let own = own.map(|held| {
            let (cidr, uid) = key(held);
            let report = report.of_block(&cidr, &uid);
            BlockUse {
                cidr,
                busy: report.map_or(0, BlockReport::busy),
                size: report.map_or(unreported, size_of),
            }
        });
        PoolUse {
            blocks: own.collect(),
            wanted: demand(report, &model.name),
            low: model.low,
            minimum: if model.keeps_max_pods { MAX_PODS } else { 0 },
        }
    }

    fn of(&self, family: Family) -> impl Iterator<Item = &BlockUse> {
        let blocks = self.blocks.iter();
        blocks.filter(move |it| it.cidr.family() == family)
    }

    fn busy(&self) -> u64 {
        let of = |family| self.of(family).map(|it| it.busy).sum();
        Family::ALL.into_iter().map(of).max().unwrap_or(0)
    }

    fn kept(&self) -> u64 {
        (self.busy() + self.low).max(self.minimum)
    }

    /// Whether the node has blocks, uses none of them, and demands at most `low` or `minimum` addresses.
    fn is_idle(&self) -> bool {
        !self.blocks.is_empty() && self.busy() == 0 && self.wanted <= self.low.max(self.minimum)
    }

    /// Whether pods wait: the node demands more addresses than it keeps (those in use and `low` more, but at least
    /// `minimum`), or the node demands addresses and has no block.
    fn has_pods_waiting(&self) -> bool {
        self.wanted > 0 && (self.blocks.is_empty() || self.wanted > self.kept())
    }

    /// Whether the node demands more addresses than it has, and may get another block.
    pub fn lacks_block(&self, model: &PoolModel) -> bool {
        let size = |family| {
            let sizes = self.of(family).map(|it| it.size);
            sizes.fold(0, u64::saturating_add)
        };
        let is_at_limit = |family| self.of(family).count() >= model.max_blocks;
        !model.each_family().any(is_at_limit)
            && model.each_family().any(|family| size(family) < self.wanted)
    }
}

fn size_of(report: &BlockReport) -> u64 {
    report.busy().saturating_add(report.free)
}

/// How many addresses of a pool an agent demands.
fn demand(report: &AgentReport, pool: &str) -> u64 {
    let mut demand = report.demand.iter();
    let of_pool = demand.find(|(name, _)| **name == *pool);
    of_pool.map_or(0, |(_, wanted)| *wanted)
}

impl Sim {
    pub fn check_blocks(&self) -> Verdict {
        let nodes = self.api.nodes.live.values();
        let listed = nodes.flat_map(|node| {
            let blocks = self.listed_to(node).iter();
            blocks.map(|held| (key(held), node.uid.clone()))
        });
        let listed: BTreeMap<Key, ObjectUid> = listed.collect();
        for block in self.api.blocks.live.values() {
            self.check_object(block, &listed)?;
        }
        for ((cidr, uid), owner) in &listed {
            let (object, number) = object_uid(uid);
            let object = self.api.blocks.live.values().find(|b| *b.uid == *object);
            let theirs = object.and_then(|b| b.spec.as_ref().ok());
            let is_named = |spec: &BlockSpec| {
                let standby = spec.standby.iter().map(|(it, number)| (&it.uid, *number));
                let mut all = standby.chain([(&spec.owner.uid, spec.number)]);
                spec.cidr == *cidr && all.any(|it| it == (owner, number))
            };
            if !theirs.is_some_and(is_named) {
                let text = format!("{cidr} {uid} is listed to {owner}, its object says {theirs:?}");
                return wrong("blocks", text, None::<&str>);
            }
        }
        for node in self.api.nodes.live.values() {
            let lists = self.listed_to(node);
            self.check_reserved(node, lists)?;
            let Some(agent) = self.working_agent(node) else {
                continue;
            };
            let used: BTreeSet<&Key> = agent.uses(&node.uid).map(|(key, _)| key).collect();
            let listed: Vec<Key> = lists.iter().map(key).collect();
            if used != listed.iter().collect() {
                let text = format!("{} is listed {listed:?} and uses {used:?}", node.name);
                return wrong("blocks", text, [node.name.clone()]);
            }
            let Some(report) = self.report_of(node) else {
                continue;
            };
            self.check_recalled(node, report, lists)?;
            self.check_supplied(node, report)?;
            self.check_idle_blocks(node, report)?;
            self.check_borrowed(node, report)?;
        }
        Ok(())
    }

    pub fn listed_to(&self, node: &Node) -> &[AllocatedBlock] {
        let subnet = self.api.subnets.get(&node.name);
        let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
        let spec = spec.filter(|spec| spec.node_uid.as_deref() == Some(&*node.uid));
        spec.map_or(&[], |spec| &spec.blocks)
    }

    /// How many of a block's addresses are in use, and how many are in cooldown. The numbers are from the agent's store
    /// or, if no agent works for the node, from the last status. `None` if the status does not name the block.
    pub fn store_of(&self, key: &Key, node: &ObjectUid) -> Option<(u64, u64)> {
        let node = self.api.nodes.live.values().find(|it| it.uid == *node)?;
        if let Some(agent) = self.working_agent(node) {
            let of_block = agent.given.values().filter(|it| *it == key);
            let cooling = agent.cooling.get(key).copied().unwrap_or(0);
            return Some((of_block.count() as u64, cooling));
        }
        let report = self.report_of(node)?.of_block(&key.0, &key.1)?;
        Some((report.used, report.cooling))
    }

    /// Returns the last report of the Node's agent, or `None` if the agent has not reported for this Node.
    pub fn report_of(&self, node: &Node) -> Option<&AgentReport> {
        let report = self.api.subnets.get(&node.name)?.report.as_deref()?;
        (report.node_uid == node.uid).then_some(report)
    }

    fn working_agent(&self, node: &Node) -> Option<&Host> {
        let agent = self.machines.of(&node.uid)?;
        (!agent.is_off && agent.node.as_ref() == Some(&node.uid)).then_some(agent)
    }

    /// Checks that a block is listed for its owner, or is quarantined because a pod reports an address of it.
    fn check_object(&self, block: &Block, listed: &BTreeMap<Key, ObjectUid>) -> Verdict {
        // The owner of an unreadable block is unknown. If such a block is listed, another check fails.
        let Ok(spec) = &block.spec else {
            return Ok(());
        };
        let key = key_of_owner(spec, &block.uid);
        let owner = listed.get(&key);
        let kept = spec.owner.quarantined && self.pod_in(&spec.cidr);
        if owner == Some(&spec.owner.uid) && !spec.owner.quarantined || kept {
            return Ok(());
        }
        let text = format!(
            "{} {} of {:?} is listed to {owner:?}",
            spec.cidr, block.uid, spec.owner
        );
        wrong("cleanup", text, [spec.owner.name.clone()])
    }

    pub fn models_now(&self) -> Vec<PoolModel> {
        let pools = self.api.pools.live.values();
        pools.filter_map(|pool| PoolModel::new(pool)).collect()
    }

    /// Checks that the NodeSubnet lists the reserved addresses of its blocks.
    fn check_reserved(&self, node: &Node, lists: &[AllocatedBlock]) -> Verdict {
        for held in lists {
            let (cidr, _) = key(held);
            let spans = |texts: &[String]| -> Vec<IpRange> {
                texts.iter().map(|it| IpRange::parse(it).unwrap()).collect()
            };
            for model in self.models_now() {
                // The block of a claim lists its address as reserved, whatever the pool says.
                let reserved = if model.on_request && held.claim.is_none() {
                    spans(&held.on_request)
                } else {
                    spans(&held.reserved)
                };
                let Some(addr) = model
                    .reserved
                    .iter()
                    .filter(|_| *model.name == *held.pool)
                    .filter_map(|span| span.within(&cidr))
                    .flat_map(|span| span.to_cidrs())
                    .find(|part| !reserved.iter().any(|span| span.overlaps(part)))
                else {
                    continue;
                };
                let text = format!("{addr} of {cidr} is reserved, the NodeSubnet has {reserved:?}");
                return wrong("reserved", text, [node.name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks that a node has no empty block that should have been recalled or that the node does not need.
    fn check_recalled(
        &self,
        node: &Node,
        report: &AgentReport,
        lists: &[AllocatedBlock],
    ) -> Verdict {
        let models = self.models_now();
        let mut free: BTreeMap<(&str, Family), Vec<(Cidr, u64, bool)>> = BTreeMap::new();
        for held in lists {
            let (cidr, uid) = key(held);
            let pool = self.api.pools.get(&*held.pool);
            let unreadable = pool.is_some_and(|pool| pool.spec.is_err());
            let pool = models.iter().find(|model| *model.name == *held.pool);
            let stays = pool.is_some_and(|pool| {
                !pool.deleting && pool.matches(&node.labels) && pool.contains(&cidr)
            });
            let entry = report.of_block(&cidr, &uid);
            let is_empty = entry.is_some_and(|entry| entry.busy() == 0);
            if !stays && !unreadable && is_empty {
                let text = format!("{} keeps {cidr} of pool {}", node.name, held.pool);
                return wrong("recall", text, [&*node.name, held.pool.as_str()]);
            }
            let size = entry.map_or(0, size_of);
            let blocks = free.entry((&held.pool, cidr.family())).or_default();
            if stays {
                blocks.push((cidr, size, is_empty));
            }
        }
        for ((pool, _), blocks) in &free {
            let sum: u64 = blocks.iter().map(|(_, size, _)| size).sum();
            let wanted = demand(report, pool);
            let spare = |(_, size, is_empty): &&(Cidr, u64, bool)| {
                *is_empty && blocks.len() > 1 && sum - size >= wanted
            };
            if let Some((cidr, _, _)) = blocks.iter().find(spare) {
                let text = format!(
                    "{} keeps {cidr} of pool {pool} idle: {blocks:?}, wanted {wanted}",
                    node.name
                );
                return wrong("recall", text, [node.name.clone(), (*pool).into()]);
            }
        }
        // An idle node keeps no block of a pool whose nodes get blocks only on demand.
        let unasked = self.serving();
        let unasked = unasked.iter().filter(|model| {
            model.allocation_mode == AllocationMode::Blocks
                && !model.is_immediate
                && model.matches(&node.labels)
        });
        for model in unasked {
            let state = self.pool_use(node, model, report, 0);
            if state.is_idle() && state.blocks.iter().all(|it| model.contains(&it.cidr)) {
                let text = format!(
                    "{} keeps the last blocks of pool {} for nothing: {:?}",
                    node.name, model.name, state.blocks
                );
                return wrong("recall", text, [&*node.name, &*model.name]);
            }
        }
        Ok(())
    }

    /// What a node has and demands of a pool, according to its agent's report. Blocks that a user drains do not count.
    pub fn pool_use(
        &self,
        node: &Node,
        model: &PoolModel,
        report: &AgentReport,
        unreported: u64,
    ) -> PoolUse {
        let own = self.listed_to(node).iter();
        let own = own.filter(|held| held.recall != Some(Recall::Drain));
        PoolUse::new(own, model, report, unreported)
    }

    /// Checks that no node waits for blocks while another node keeps some that it does not need.
    fn check_idle_blocks(&self, node: &Node, report: &AgentReport) -> Verdict {
        if node.deleting {
            return Ok(());
        }
        for model in self.serving() {
            if model.allocation_mode != AllocationMode::Blocks || !model.matches(&node.labels) {
                continue;
            }
            let own = self.pool_use(node, &model, report, 0);
            if !own.lacks_block(&model) {
                continue;
            }
            for other in self.api.nodes.live.values().filter(|it| it.uid != node.uid) {
                let report = self.working_agent(other).and(self.report_of(other));
                let Some(report) = report else { continue };
                let theirs = self.pool_use(other, &model, report, 0);
                // If both nodes are idle, no block has to move between them.
                let gives_all = theirs.is_idle() && !own.is_idle();
                let gives_spare = own.has_pods_waiting() && !theirs.has_pods_waiting();
                let is_freed = |it: &&BlockUse| {
                    let is_spare = it.busy == 0 && theirs.of(it.cidr.family()).count() > 1;
                    gives_all || gives_spare && is_spare
                };
                let freed = theirs.blocks.iter().filter(is_freed);
                let freed: Vec<Cidr> = freed.map(|it| it.cidr).collect();
                let mut families = model.each_family();
                let has_room = |family: Family| self.has_room(&model, family, &freed);
                if !freed.is_empty() && families.all(has_room) {
                    let text = format!(
                        "{} ({}) waits with {own:?} for pool {}, and {} keeps {freed:?}: {theirs:?}",
                        node.name, node.uid, model.name, other.name
                    );
                    return wrong(
                        "idle blocks",
                        text,
                        [&*node.name, &*other.name, &*model.name],
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks that no node waits for addresses of a pool whose nodes borrow, while another node could lend some. Only
    /// pools of one family are checked, because in a pool of both families, parts of both must be free at the same
    /// time.
    fn check_borrowed(&self, node: &Node, report: &AgentReport) -> Verdict {
        for model in self.serving() {
            let [(family, ..)] = model.families.as_slice() else {
                continue;
            };
            let own = self.pool_use(node, &model, report, 0);
            let is_borrower = model.borrows && !node.deleting && model.matches(&node.labels);
            let waits = own.has_pods_waiting() && own.lacks_block(&model);
            if !is_borrower || !waits {
                continue;
            }
            for other in self.api.nodes.live.values().filter(|it| it.uid != node.uid) {
                let Some(agent) = self.working_agent(other) else {
                    continue;
                };
                if let Some(part) = self.part_to_lend(other, agent, &model, *family) {
                    let text = format!(
                        "{} ({}) waits with {own:?} for pool {}, and {} could lend {part}",
                        node.name, node.uid, model.name, other.name
                    );
                    return wrong("lending", text, [&*node.name, &*other.name, &*model.name]);
                }
            }
        }
        Ok(())
    }

    /// Returns a pair of addresses that the node could lend. The node does not need them, and neither of them is in
    /// use, claimed or withdrawn.
    fn part_to_lend(
        &self,
        node: &Node,
        agent: &Host,
        model: &PoolModel,
        family: Family,
    ) -> Option<Cidr> {
        let report = self.report_of(node)?;
        let theirs = self.pool_use(node, model, report, 0);
        let size: u64 = theirs.of(family).map(|it| it.size).sum();
        let kept = theirs.wanted.max(theirs.kept());
        if node.deleting || size < kept + 2 {
            return None;
        }
        let spec = self.api.subnets.get(&node.name)?.spec.as_ref().ok()?;
        let of_spec = spec.withdraw.iter().chain(&spec.returned);
        let of_spec = of_spec.filter_map(|it| Cidr::parse_strict(it).ok());
        let withdrawn: Vec<Cidr> = of_spec.chain(report.withdrawn.iter().copied()).collect();
        let held = self.held();
        for block in spec.blocks.iter().filter(|it| *it.pool == *model.name) {
            let (cidr, uid) = key(block);
            let cools = agent.cooling.get(&(cidr, uid)).is_some_and(|it| *it > 0);
            let is_own = block.parent.is_none() && block.claim.is_none() && block.recall.is_none();
            let longest = (cidr.len() + 6).min(family.bits() - 1);
            if cidr.family() != family || !is_own || cools || longest <= cidr.len() {
                continue;
            }
            let inside: Vec<Cidr> = held.iter().filter(|it| **it != cidr).copied().collect();
            let pairs = model.blocks_of_length(family, longest).into_iter();
            let mut pairs = pairs.filter(|it| cidr.contains(it));
            let ends = |it: &Cidr| it.first() == cidr.first() || it.last() == cidr.last();
            let found = pairs.find(|pair| {
                !ends(pair)
                    && self.is_free(model, pair, &inside)
                    && !withdrawn.iter().any(|it| it.overlaps(pair))
                    && !agent.given.keys().any(|it| pair.contains_addr(*it))
            });
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Checks that a node has as many addresses as it demands, unless the pool is exhausted.
    fn check_supplied(&self, node: &Node, report: &AgentReport) -> Verdict {
        if node.deleting {
            return Ok(());
        }
        let all = self.serving();
        let serving = all.iter().filter(|model| {
            model.allocation_mode == AllocationMode::Blocks && model.matches(&node.labels)
        });
        let lists = self.listed_to(node);
        let mut could_be_first = None;
        for model in serving {
            let inside = lists.iter().filter(|held| model.contains(&key(held).0));
            let own = PoolUse::new(inside, model, report, 0);
            let mut families = model.each_family();
            let room = families.all(|family| self.has_room(model, family, &[]));
            if own.lacks_block(model) && room {
                let text = format!(
                    "{} ({}) wants more of pool {} than {own:?}, and there is room",
                    node.name, node.uid, model.name
                );
                return wrong("supplied", text, [&*node.name, &*model.name]);
            }
            if model.is_immediate && room && !model.is_passed_over(&all, &node.labels) {
                could_be_first = could_be_first.or(Some(model.name.clone()));
            }
        }
        let is_drained = |held: &AllocatedBlock| held.recall == Some(Recall::Drain);
        if let Some(pool) = could_be_first.filter(|_| lists.iter().all(is_drained)) {
            let text = format!("{} has no block of pool {pool}", node.name);
            return wrong("supplied", text, [&*node.name, &*pool]);
        }
        Ok(())
    }

    /// Whether a block of the pool's size, or a smaller one down to 1/64 of that size, could be allocated if the blocks
    /// in `freed` were free.
    fn has_room(&self, model: &PoolModel, family: Family, freed: &[Cidr]) -> bool {
        let mut held = self.held();
        held.retain(|it| !freed.contains(it));
        let own = model.families.iter().filter(|(f, _, _)| *f == family);
        let mut lengths = own.flat_map(|(_, _, len)| *len..=(len + 6).min(family.bits()));
        lengths.any(|len| {
            let mut blocks = model.blocks_of_length(family, len).into_iter();
            blocks.any(|block| self.is_free(model, &block, &held))
        })
    }
}
