//! Blocks in NodeSubnets: restores blocks from the lists that exist, and returns the blocks that should be listed.

use std::collections::BTreeSet;

use super::BlockEntry;
use crate::Now;
use crate::allocations::holders::HolderUse;
use crate::allocations::{AllocationState, machine};
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, MachineIdentity, Owner};
use crate::purpose::Step;
use cadastre_api::{AllocatedBlock, MOST_RESERVED};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState, IpRange};

impl AllocationState {
    /// Records all blocks: first those with objects, then those that NodeSubnets list. Afterwards quarantines the
    /// blocks whose owner is gone.
    pub(crate) fn rebuild_blocks(&mut self, cache: &ClusterCache, now: Now) {
        for block in cache.blocks.iter() {
            self.block_seen(block, now);
        }
        // Lists of live nodes are read first, so that they prevail: the list of a deleted node may be very old.
        for alive in [true, false] {
            let subnets = cache.subnets.iter();
            for subnet in subnets.filter(|_| !Mutation::ListedBlocksNotRead.is_on()) {
                let Ok(spec) = &subnet.spec else { continue };
                let Some(uid) = &spec.node_uid else { continue };
                let node = cache.nodes.get(&subnet.name);
                if node.is_some_and(|node| *node.uid == **uid) != alive {
                    continue;
                }
                for held in &spec.blocks {
                    let uid = uid.as_str().into();
                    self.restore_listed(&subnet.name, &uid, held, alive, cache, now);
                }
            }
        }
        let owners: BTreeSet<(NodeName, ObjectUid)> = self
            .blocks
            .iter()
            .filter(|entry| !entry.owner.quarantined)
            .map(|entry| (entry.owner.name.clone(), entry.owner.uid.clone()))
            .collect();
        for (name, uid) in owners {
            let live = cache.nodes.get(&name).is_some_and(|node| node.uid == uid);
            if !live {
                let machine = machine_in(cache, &name, &uid);
                self.quarantine_blocks(&name, &uid, &machine, now);
            }
        }
    }

    /// Records a block that a NodeSubnet lists. If the node is live (`alive`), the block becomes the node's, even if
    /// the block's object names another owner. There is one exception: another node got the range later, under another
    /// object. The list of a deleted node counts only if no other node holds the range.
    pub(crate) fn restore_listed(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        held: &AllocatedBlock,
        alive: bool,
        cache: &ClusterCache,
        now: Now,
    ) {
        let Ok(cidr) = Cidr::parse_strict(&held.cidr) else {
            return;
        };
        let known = self.blocks.get(&cidr).map(|entry| entry.owner.clone());
        let theirs = match &known {
            Some(known) => known.quarantined || known.uid != *uid,
            None => self.ledger.overlapping(&cidr).next().is_some(),
        };
        if !alive && theirs {
            return;
        }
        // If the list names an earlier object than the one by which another node got the range, a late write has
        // restored an outdated list. An object of another node that is neither quarantined nor listed does not count:
        // it was created late, and no node used it.
        let is_earlier = |entry: &BlockEntry| {
            let is_other = |uid: &ObjectUid| **uid != *held.uid;
            let is_another = entry.uid.as_ref().is_some_and(is_other);
            let was_given = entry.owner.quarantined || is_listed(entry, cache);
            entry.owner.uid != *uid && is_another && was_given
        };
        if alive && self.blocks.get(&cidr).is_some_and(is_earlier) {
            return;
        }
        let owner = Owner::node(name, uid);
        let Some(known) = known else {
            let holder = self.holders.intern(HolderUse::Blocks, name, uid);
            let holding = self.ledger.record(holder, cidr, HoldingState::Allocated);
            self.blocks.insert(BlockEntry {
                uid: Some(held.uid.as_str().into()),
                confirmed: true,
                recall: held.recall,
                ..BlockEntry::new(cidr, held.pool.as_str().into(), owner, holding, now)
            });
            return;
        };
        if known != owner {
            self.reassign_block(&cidr, owner);
        }
        self.confirm(&cidr);
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.recall = held.recall;
            if known != entry.owner {
                (entry.until, entry.rests_until) = (None, None);
                entry.step = Step::Replace;
            }
        }
    }

    /// Records the blocks that a node's changed NodeSubnet lists and that are unknown, quarantined or provisional in
    /// the ledger: a late write of an earlier leader may have listed them. From then on the node has them until its
    /// agent releases them. Returns these blocks.
    pub(crate) fn listed_blocks_changed(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        now: Now,
    ) -> Vec<Cidr> {
        let subnet = cache.subnets.get(name);
        let Some(Ok(spec)) = subnet.map(|subnet| &subnet.spec) else {
            return Vec::new();
        };
        let report = subnet.and_then(|subnet| subnet.report.as_deref());
        let node = cache.nodes.get(name);
        let Some(node) = node.filter(|it| spec.node_uid.as_deref() == Some(&*it.uid)) else {
            return Vec::new();
        };
        let mut told = Vec::new();
        for held in &spec.blocks {
            let Ok(cidr) = Cidr::parse_strict(&held.cidr) else {
                continue;
            };
            let report = report.filter(|report| report.node_uid == node.uid);
            let word = report.and_then(|report| report.of_block(&cidr, &held.uid.as_str().into()));
            let let_go = word.is_some_and(|word| word.released);
            if Mutation::LateListIgnored.is_on() {
                continue;
            }
            // If the block is quarantined here, the late write gave it back to this node. If it is provisional here,
            // the writer found that no older block overlaps it.
            let is_new = |entry: &BlockEntry| {
                let own = entry.owner.uid == node.uid;
                entry.owner.quarantined || (own && !entry.confirmed && !entry.is_leaving())
            };
            if !let_go && self.blocks.get(&cidr).is_none_or(is_new) {
                self.restore_listed(name, &node.uid, held, true, cache, now);
                told.push(cidr);
            }
        }
        told
    }

    /// Marks for deletion the blocks that a node's agent has released and its NodeSubnet no longer lists, and returns
    /// them. One version of the NodeSubnet shows both, so no write that is based on an older version can list the
    /// blocks again.
    pub(crate) fn released_blocks(&mut self, name: &NodeName, cache: &ClusterCache) -> Vec<Cidr> {
        let Some(node) = cache.nodes.get(name) else {
            return Vec::new();
        };
        let Some(subnet) = cache.subnets.get(name) else {
            return Vec::new();
        };
        let Ok(spec) = &subnet.spec else {
            return Vec::new();
        };
        let report = subnet.report.as_deref();
        let listed: BTreeSet<&str> = spec.blocks.iter().map(|held| held.cidr.as_str()).collect();
        let ends = |entry: &&BlockEntry| {
            entry.is_held()
                && entry.is_released(report)
                && (!listed.contains(entry.cidr.to_string().as_str())
                    || Mutation::BlockEndsWhileListed.is_on())
        };
        let cidrs: Vec<Cidr> = self
            .blocks
            .of(&node.uid)
            .filter(ends)
            .map(|e| e.cidr)
            .collect();
        for cidr in &cidrs {
            if let Some(entry) = self.blocks.get_mut(cidr) {
                entry.step = Step::Delete;
            }
        }
        cidrs
    }

    /// Returns the blocks that the NodeSubnet should list for a node's UID: those that are confirmed and that the agent
    /// has not released.
    pub(crate) fn listed_blocks(
        &self,
        uid: &ObjectUid,
        report: Option<&AgentReport>,
    ) -> Vec<AllocatedBlock> {
        let stays = |entry: &&BlockEntry| entry.is_held() && !entry.is_released(report);
        self.blocks
            .of(uid)
            .filter(stays)
            .filter_map(|entry| {
                let pool = self.pools.get(&entry.pool);
                let reserved = pool.map_or(&[][..], |pool| &pool.reserved);
                let on_request = pool.map_or(&[][..], |pool| &pool.on_request);
                Some(AllocatedBlock {
                    cidr: entry.cidr.to_string(),
                    uid: entry.uid.as_ref()?.to_string(),
                    pool: entry.pool.to_string(),
                    recall: entry.recall,
                    reserved: within(&entry.cidr, reserved),
                    on_request: within(&entry.cidr, on_request),
                })
            })
            .collect()
    }

    /// Returns how many addresses of a block can be assigned to pods that do not ask for a particular address. These
    /// are all addresses except the reserved ones, whether or not pods may ask for those.
    pub fn usable(&self, cidr: &Cidr, pool: &PoolName) -> u128 {
        let pool = self.pools.get(pool);
        let mut reserved: Vec<(u128, u128)> = pool
            .into_iter()
            .flat_map(|pool| pool.reserved.iter().chain(&pool.on_request))
            .filter_map(|span| span.within(cidr))
            .map(|span| (span.first().value, span.last().value))
            .collect();
        reserved.sort_unstable();
        let mut next = cidr.first().value;
        let mut taken = 0u128;
        for (first, last) in reserved {
            let first = first.max(next);
            if last >= first {
                taken = taken.saturating_add(last - first).saturating_add(1);
                next = last.saturating_add(1);
            }
        }
        cidr.size().saturating_sub(taken)
    }
}

/// Returns the parts of the spans that lie in a block, as texts for the NodeSubnet. If there are more than a NodeSubnet
/// may list, it returns the whole block: a block without usable addresses is better than the assignment of a reserved
/// one.
fn within(cidr: &Cidr, spans: &[IpRange]) -> Vec<String> {
    let inside = spans.iter().filter_map(|span| span.within(cidr));
    let mut texts: Vec<String> = inside.map(|span| span.to_string()).collect();
    texts.sort();
    texts.dedup();
    if texts.len() > MOST_RESERVED {
        return vec![cidr.to_string()];
    }
    texts
}

/// Returns whether the NodeSubnet of the block's owner lists the block with the UID of its known object.
fn is_listed(entry: &BlockEntry, cache: &ClusterCache) -> bool {
    let subnet = cache.subnets.get(&entry.owner.name);
    let spec = subnet.and_then(|it| it.spec.as_ref().ok());
    let spec = spec.filter(|it| it.node_uid.as_deref() == Some(&*entry.owner.uid));
    let cidr = entry.cidr.to_string();
    let is_it =
        |held: &AllocatedBlock| held.cidr == cidr && entry.uid.as_deref() == Some(&*held.uid);
    spec.is_some_and(|spec| spec.blocks.iter().any(is_it))
}

/// Returns the identity of a deleted node's machine. It is empty if the NodeSubnet does not record that node.
pub(crate) fn machine_in(
    cache: &ClusterCache,
    name: &NodeName,
    uid: &ObjectUid,
) -> MachineIdentity {
    let spec = cache.subnets.get(name).and_then(|it| it.spec.as_ref().ok());
    let spec = spec.filter(|spec| spec.node_uid.as_deref() == Some(&**uid));
    spec.map(|spec| machine(spec.provider_id.as_deref(), spec.machine_id.as_deref()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cadastre_core::Addr;

    #[test]
    fn what_is_reserved_of_a_block_is_listed_or_else_the_whole_block() {
        let block = Cidr::parse_strict("10.0.0.0/20").unwrap();
        let spans = |count: u128| -> Vec<IpRange> {
            let every_other = (0..count).map(|n| Addr {
                value: block.first().value + 2 * n,
                ..block.first()
            });
            every_other.map(IpRange::from).collect()
        };
        assert_eq!(within(&block, &spans(1024)).len(), 1024);
        assert_eq!(within(&block, &spans(1025)), ["10.0.0.0/20"]);
    }
}
