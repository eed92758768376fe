//! What must hold of blocks at the end of a run.
//!
//! Block objects, NodeSubnets and agents' stores agree. Deleted nodes have no blocks, and no empty block is left that
//! should have been recalled. No node lacks a block that a pool could allocate, or that another node keeps unused.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_api::{AllocatedBlock, AllocationMode, Recall};
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::{AgentReport, Block, Node};
use cadastre_core::{Addr, Cidr, Family, IpRange};

use super::checks::{Verdict, wrong};
use super::host::{Host, Key, key};
use super::run::Sim;
use super::shape::Shape;

/// A block of a node, with the number of its addresses in use or cooling (`busy`) and of all of them (`worth`).
#[derive(Debug)]
struct Lent {
    cidr: Cidr,
    busy: u64,
    worth: u64,
}

/// The blocks that a node has of a pool, and how many addresses it demands and keeps ready.
#[derive(Debug)]
struct Standing {
    blocks: Vec<Lent>,
    wanted: u64,
    low: u64,
}

impl Standing {
    fn of(&self, family: Family) -> impl Iterator<Item = &Lent> {
        let blocks = self.blocks.iter();
        blocks.filter(move |it| it.cidr.family() == family)
    }

    fn worth(&self, family: Family) -> u64 {
        self.of(family).map(|it| it.worth).sum()
    }

    fn busy(&self) -> u64 {
        let of = |family| self.of(family).map(|it| it.busy).sum();
        Family::ALL.into_iter().map(of).max().unwrap_or(0)
    }

    /// Whether the node has blocks, uses none of them, and demands no more than its reserve.
    fn is_idle(&self) -> bool {
        !self.blocks.is_empty() && self.busy() == 0 && self.wanted <= self.low
    }

    /// Whether pods wait: the node demands more than the addresses that it uses and its reserve.
    fn has_pods_waiting(&self) -> bool {
        self.wanted > 0 && (self.blocks.is_empty() || self.wanted > self.busy() + self.low)
    }
}

impl Sim {
    pub fn check_blocks(&self) -> Verdict {
        let mut listed: BTreeMap<Key, (ObjectUid, AllocatedBlock)> = BTreeMap::new();
        for node in self.api.nodes.live.values() {
            for held in self.listed_to(node) {
                listed.insert(key(&held), (node.uid.clone(), held));
            }
        }
        for block in self.api.blocks.live.values() {
            self.check_object(block, &listed)?;
        }
        for ((cidr, uid), (owner, _)) in &listed {
            let object = self.api.blocks.live.values().find(|b| b.uid == *uid);
            let theirs = object.and_then(|b| b.spec.as_ref().ok());
            if theirs.is_none_or(|spec| spec.cidr != *cidr || spec.owner.uid != *owner) {
                let text = format!("{cidr} {uid} is listed to {owner}, its object says {theirs:?}");
                return wrong("blocks", text, None::<&str>);
            }
        }
        for node in self.api.nodes.live.values() {
            let lists: Vec<AllocatedBlock> = self.listed_to(node);
            self.check_reserved(node, &lists)?;
            let Some(agent) = self.working_agent(node) else {
                continue;
            };
            let used: BTreeSet<&Key> = agent.uses(&node.uid).map(|(key, _)| key).collect();
            let told: Vec<Key> = lists.iter().map(key).collect();
            if used != told.iter().collect() {
                let text = format!("{} is listed {told:?} and uses {used:?}", node.name);
                return wrong("blocks", text, [node.name.clone()]);
            }
            let Some(report) = self.word_of(node) else {
                continue;
            };
            self.check_spared(node, report, &lists)?;
            self.check_supplied(node, report)?;
            self.check_lent(node, report)?;
        }
        Ok(())
    }

    fn listed_to(&self, node: &Node) -> Vec<AllocatedBlock> {
        let subnet = self.api.subnets.get(&node.name);
        let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
        let spec = spec.filter(|spec| spec.node_uid.as_deref() == Some(&*node.uid));
        spec.map(|spec| spec.blocks.clone()).unwrap_or_default()
    }

    /// How many addresses of a block are in use and cooling, according to the agent's store, else to its last status.
    pub fn store_of(&self, cidr: Cidr, block: &ObjectUid, node: &ObjectUid) -> Option<(u64, u64)> {
        let node = self.api.nodes.live.values().find(|it| it.uid == *node)?;
        if let Some(agent) = self.working_agent(node) {
            let key = (cidr, block.clone());
            let of_block = agent.given.values().filter(|it| **it == key);
            let cooling = agent.cooling.get(&key).copied().unwrap_or(0);
            return Some((of_block.count() as u64, cooling));
        }
        let report = self.api.subnets.get(&node.name)?.report.as_ref()?;
        let report = (report.node_uid == node.uid).then_some(report)?;
        let word = report.of_block(&cidr, block)?;
        Some((word.used, word.cooling))
    }

    /// Returns what the node's agent has published, if the agent is running.
    fn word_of(&self, node: &Node) -> Option<&AgentReport> {
        self.working_agent(node)?;
        let report = self.api.subnets.get(&node.name)?.report.as_deref()?;
        (report.node_uid == node.uid).then_some(report)
    }

    fn working_agent(&self, node: &Node) -> Option<&Host> {
        let agent = self.machines.of(&node.uid)?;
        (!agent.is_off && agent.node.as_ref() == Some(&node.uid)).then_some(agent)
    }

    /// Checks that every block is listed for its owner, or is quarantined because a pod reports an address of it.
    fn check_object(
        &self,
        block: &Block,
        listed: &BTreeMap<Key, (ObjectUid, AllocatedBlock)>,
    ) -> Verdict {
        // The owner of an unreadable block is unknown. If such a block is listed, another check fails.
        let Ok(spec) = &block.spec else {
            return Ok(());
        };
        let key = (spec.cidr, block.uid.clone());
        let owner = listed.get(&key).map(|(uid, _)| uid);
        let own = |pod: &cadastre_controller::cluster::objects::Pod| {
            let inside = |addr: &Addr| spec.cidr.contains_addr(*addr);
            pod.addresses.iter().any(inside)
        };
        let kept = spec.owner.quarantined && self.api.pods.live.values().any(|pod| own(pod));
        if owner == Some(&spec.owner.uid) && !spec.owner.quarantined || kept {
            return Ok(());
        }
        let text = format!(
            "{} {} of {:?} is listed to {owner:?}",
            spec.cidr, block.uid, spec.owner
        );
        wrong("collected", text, [spec.owner.name.clone()])
    }

    fn shapes_now(&self) -> Vec<Shape> {
        let pools = self.api.pools.live.values();
        pools.filter_map(|pool| Shape::new(pool)).collect()
    }

    /// Checks that NodeSubnets contain the reserved addresses of their blocks.
    fn check_reserved(&self, node: &Node, lists: &[AllocatedBlock]) -> Verdict {
        for held in lists {
            let (cidr, _) = key(held);
            let spans = |texts: &[String]| -> Vec<IpRange> {
                texts.iter().map(|it| IpRange::parse(it).unwrap()).collect()
            };
            for shape in self.shapes_now() {
                let told = if shape.on_request {
                    spans(&held.on_request)
                } else {
                    spans(&held.reserved)
                };
                let Some(addr) = shape
                    .reserved
                    .iter()
                    .filter(|_| *shape.name == *held.pool)
                    .filter_map(|span| span.within(&cidr))
                    .flat_map(|span| span.to_cidrs())
                    .find(|part| !told.iter().any(|span| span.overlaps(part)))
                else {
                    continue;
                };
                let text = format!("{addr} of {cidr} is reserved, told {told:?}");
                return wrong("reserved", text, [node.name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks that a node has no empty block that should have been recalled or that the node does not need.
    fn check_spared(&self, node: &Node, report: &AgentReport, lists: &[AllocatedBlock]) -> Verdict {
        let shapes = self.shapes_now();
        let mut free: BTreeMap<(&str, Family), Vec<(Cidr, u64, bool)>> = BTreeMap::new();
        for held in lists {
            let (cidr, uid) = key(held);
            let unreadable = self
                .api
                .pools
                .get(&*held.pool)
                .is_some_and(|p| p.spec.is_err());
            let pool = shapes.iter().find(|shape| *shape.name == *held.pool);
            let stays = pool.is_some_and(|pool| {
                !pool.deleting && pool.matches(&node.labels) && pool.contains(&cidr)
            });
            let word = report.of_block(&cidr, &uid);
            let is_empty = word.is_some_and(|word| word.used + word.cooling == 0);
            if !stays && !unreadable && is_empty {
                let text = format!("{} keeps {cidr} of pool {}", node.name, held.pool);
                return wrong("recall", text, [&*node.name, held.pool.as_str()]);
            }
            let worth = word.map_or(0, |word| word.used + word.cooling + word.free);
            let blocks = free.entry((&held.pool, cidr.family())).or_default();
            if stays {
                blocks.push((cidr, worth, is_empty));
            }
        }
        for ((pool, _), blocks) in &free {
            let sum: u64 = blocks.iter().map(|(_, worth, _)| worth).sum();
            let wanted = report.demand.iter().find(|(name, _)| **name == **pool);
            let wanted = wanted.map_or(0, |(_, wanted)| *wanted);
            let spare = |(_, worth, is_empty): &&(Cidr, u64, bool)| {
                *is_empty && blocks.len() > 1 && sum - worth >= wanted
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
        let unasked = unasked.iter().filter(|shape| {
            shape.allocation_mode == AllocationMode::Blocks
                && !shape.on_sight
                && shape.matches(&node.labels)
        });
        for shape in unasked {
            let state = self.standing(node, shape, report);
            if state.is_idle() && state.blocks.iter().all(|it| shape.contains(&it.cidr)) {
                let text = format!(
                    "{} keeps the last blocks of pool {} for nothing: {:?}",
                    node.name, shape.name, state.blocks
                );
                return wrong("recall", text, [&*node.name, &*shape.name]);
            }
        }
        Ok(())
    }

    /// What a node has and demands of a pool, according to its agent's report.
    fn standing(&self, node: &Node, shape: &Shape, report: &AgentReport) -> Standing {
        let lists = self.listed_to(node);
        let own = lists
            .iter()
            .filter(|held| *held.pool == *shape.name && held.recall != Some(Recall::Drain));
        let blocks = own.map(|held| {
            let (cidr, uid) = key(held);
            let word = report.of_block(&cidr, &uid);
            Lent {
                cidr,
                busy: word.map_or(0, |word| word.used + word.cooling),
                worth: word.map_or(0, |word| word.used + word.cooling + word.free),
            }
        });
        let wanted = report.demand.iter().find(|(name, _)| *name == shape.name);
        Standing {
            blocks: blocks.collect(),
            wanted: wanted.map_or(0, |(_, wanted)| *wanted),
            low: shape.low,
        }
    }

    /// Checks that no node waits for blocks while another node keeps some that it does not need.
    fn check_lent(&self, node: &Node, report: &AgentReport) -> Verdict {
        if node.deleting {
            return Ok(());
        }
        for shape in self.serving() {
            if shape.allocation_mode != AllocationMode::Blocks || !shape.matches(&node.labels) {
                continue;
            }
            let own = self.standing(node, &shape, report);
            let families = || shape.families.iter().map(|(family, _, _)| *family);
            let lacks = |family: &Family| own.worth(*family) < own.wanted;
            let at_limit = families().any(|family| own.of(family).count() >= shape.most);
            if at_limit || !families().any(|family| lacks(&family)) {
                continue;
            }
            for other in self.api.nodes.live.values().filter(|it| it.uid != node.uid) {
                let Some(report) = self.word_of(other) else {
                    continue;
                };
                let theirs = self.standing(other, &shape, report);
                // If both nodes are idle, no block has to move between them.
                let freed: Vec<Cidr> = if theirs.is_idle() && !own.is_idle() {
                    theirs.blocks.iter().map(|it| it.cidr).collect()
                } else if own.has_pods_waiting() && !theirs.has_pods_waiting() {
                    let spare =
                        |it: &&Lent| it.busy == 0 && theirs.of(it.cidr.family()).count() > 1;
                    theirs
                        .blocks
                        .iter()
                        .filter(spare)
                        .map(|it| it.cidr)
                        .collect()
                } else {
                    Vec::new()
                };
                let has_room = |family: Family| self.has_room(&shape, family, &freed);
                if !freed.is_empty() && families().all(has_room) {
                    let text = format!(
                        "{} ({}) waits with {own:?} for pool {}, and {} keeps {freed:?}: {theirs:?}",
                        node.name, node.uid, shape.name, other.name
                    );
                    return wrong("lent", text, [&*node.name, &*other.name, &*shape.name]);
                }
            }
        }
        Ok(())
    }

    /// Checks that a node has as many addresses as it demands, unless the pool is exhausted.
    fn check_supplied(&self, node: &Node, report: &AgentReport) -> Verdict {
        if node.deleting {
            return Ok(());
        }
        let all = self.serving();
        let serving = all.iter().filter(|shape| {
            shape.allocation_mode == AllocationMode::Blocks && shape.matches(&node.labels)
        });
        let lists: Vec<(Key, AllocatedBlock)> = self
            .listed_to(node)
            .into_iter()
            .map(|held| (key(&held), held))
            .collect();
        let mut could_be_first = None;
        for shape in serving {
            let of_family = |family: Family| {
                let own = lists.iter().filter(move |((cidr, _), held)| {
                    *held.pool == *shape.name && cidr.family() == family && shape.contains(cidr)
                });
                own.map(|((cidr, uid), _)| {
                    let word = report.of_block(cidr, uid);
                    word.map_or(0, |word| word.used + word.cooling + word.free)
                })
            };
            let room = shape
                .families
                .iter()
                .all(|(family, _, _)| self.has_room(shape, *family, &[]));
            let at_limit = shape
                .families
                .iter()
                .any(|(family, _, _)| of_family(*family).count() >= shape.most);
            let wanted = report.demand.iter().find(|(name, _)| *name == shape.name);
            let wanted = wanted.map_or(0, |(_, wanted)| *wanted);
            let mut families = shape.families.iter();
            let lacks = families.any(|(family, _, _)| of_family(*family).sum::<u64>() < wanted);
            if lacks && room && !at_limit {
                let text = format!(
                    "{} ({}) wants {wanted} of pool {}, has {lists:?}, and there is room",
                    node.name, node.uid, shape.name
                );
                return wrong("supplied", text, [&*node.name, &*shape.name]);
            }
            if shape.on_sight && room && !shape.is_passed_over(&all, &node.labels) {
                could_be_first = could_be_first.or(Some(shape.name.clone()));
            }
        }
        let mut lasting = lists
            .iter()
            .filter(|(_, it)| it.recall != Some(Recall::Drain));
        if let Some(pool) = could_be_first.filter(|_| lasting.next().is_none()) {
            let text = format!("{} has no block of pool {pool}", node.name);
            return wrong("supplied", text, [&*node.name, &*pool]);
        }
        Ok(())
    }

    /// Whether a block of the pool's size, or down to 1/64 of it, could be allocated if the blocks in `freed` were
    /// free.
    fn has_room(&self, shape: &Shape, family: Family, freed: &[Cidr]) -> bool {
        let Some((_, _, len)) = shape.families.iter().find(|(f, _, _)| *f == family) else {
            return false;
        };
        let mut held = self.held();
        held.retain(|it| !freed.contains(it));
        let services: Vec<Cidr> = self.services_now();
        (*len..=len.saturating_add(6).min(family.bits())).any(|len| {
            let mut smaller = shape.clone();
            for (_, _, of) in smaller.families.iter_mut().filter(|(f, _, _)| *f == family) {
                *of = len;
            }
            let open = |block: &Cidr| {
                !held.iter().any(|it| it.overlaps(block))
                    && !services.iter().any(|it| it.overlaps(block))
                    && !shape.reserved.iter().any(|span| span.overlaps(block))
                    && !self.pod_in(block)
                    && !self.node_in(block)
            };
            smaller.blocks(family).iter().any(open)
        })
    }
}
