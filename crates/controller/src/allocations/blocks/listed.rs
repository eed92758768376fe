//! Restores the ledger from the blocks that NodeSubnets list, and decides which blocks each NodeSubnet should list.

use std::collections::BTreeSet;

use super::BlockEntry;
use super::standby::Share;
use crate::Now;
use crate::allocations::holders::HolderUse;
use crate::allocations::{AllocationState, machine};
use crate::cluster::cache::{ClusterCache, report_of, spec_for};
use crate::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{AgentReport, MachineIdentity, Owner, Parent};
use crate::purpose::Step;
use cadastre_api::{AllocatedBlock, MOST_RESERVED, Recall, listed_uid, object_uid};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState, IpRange};

impl AllocationState {
    /// Records all blocks: first the blocks that have objects, then the blocks that NodeSubnets list. Afterwards
    /// quarantines the blocks whose owners are gone.
    pub(crate) fn rebuild_blocks(&mut self, cache: &ClusterCache, now: Now) {
        for block in cache.blocks.iter() {
            self.block_seen(block, now);
        }
        // The NodeSubnets of live nodes are read first, so that they take precedence. The list of a deleted node may be
        // very old.
        for alive in [true, false] {
            let subnets = cache.subnets.iter();
            for subnet in subnets.filter(|_| !Mutation::ListedBlocksNotRead.is_on()) {
                let Ok(spec) = &subnet.spec else { continue };
                let Some(uid) = spec.node_uid.as_deref() else {
                    continue;
                };
                let uid: ObjectUid = uid.into();
                let node = cache.nodes.get(&subnet.name);
                if node.is_some_and(|node| node.uid == uid) != alive {
                    continue;
                }
                for block in &spec.blocks {
                    self.restore_listed(&subnet.name, &uid, block, alive, cache, now);
                }
            }
        }
        let owners = self.blocks.iter().flat_map(|entry| {
            let standby = entry.standby.iter().map(|it| &it.owner);
            standby.chain([&entry.owner])
        });
        let owners = owners.filter(|owner| !owner.quarantined);
        let owners: BTreeSet<(NodeName, ObjectUid)> = owners
            .map(|owner| (owner.name.clone(), owner.uid.clone()))
            .collect();
        for (name, uid) in owners {
            let live = cache.nodes.get(&name).is_some_and(|node| node.uid == uid);
            if !live {
                let machine = machine_in(cache, &name, &uid);
                self.quarantine_blocks(&name, &uid, &machine, now);
            }
        }
    }

    /// Records a block that a NodeSubnet lists. A live node (`alive`) gets the block, even if the block's object names
    /// another owner. An outdated list is ignored: another node has the range by now, with another object than the list
    /// names. The list of a deleted node counts only if no other node has the range.
    pub(crate) fn restore_listed(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        listed: &AllocatedBlock,
        alive: bool,
        cache: &ClusterCache,
        now: Now,
    ) {
        let Ok(cidr) = Cidr::parse_strict(&listed.cidr) else {
            return;
        };
        let (object, number) = object_uid(&listed.uid);
        let entry = self.blocks.get(&cidr);
        // The object of a virtual machine's block names the right owner, because the object names each node before the
        // node gets the block. But if a new leader finds that the NodeSubnet of this owner does not list the block, a
        // user has edited the object.
        let is_right = |it: &BlockEntry| it.confirmed || is_listed(it, cache);
        let is_shared =
            |it: &BlockEntry| it.lacks(uid, object) && !it.owner.quarantined && is_right(it);
        if let Some(entry) = entry.filter(|it| it.standby_of(uid).is_some() || is_shared(it)) {
            if alive && entry.standby_of(uid).is_none() {
                self.restore_standby(&cidr, Owner::node(name, uid), number);
            }
            return;
        }
        let has_other_owner = match entry {
            Some(entry) => entry.owner.quarantined || entry.owner.uid != *uid,
            None => self.is_held_by_node(&cidr),
        };
        if !alive && has_other_owner {
            return;
        }
        // A NodeSubnet's list is outdated if another node has the range with another object than the list names. In
        // that case a late write has restored the list. But if the other node's block is neither quarantined nor
        // listed, no node ever used that block. Such a block does not make the list outdated. A quarantine does not
        // either if the agent uses the block: then a user has deleted the object, and edited the one that followed.
        let is_used = || {
            let node = cache.nodes.get(name).filter(|it| it.uid == *uid);
            let report = node.and_then(|it| report_of(it, cache));
            let reported = report.and_then(|it| it.of_block(&cidr, &listed.uid.as_str().into()));
            reported.is_some_and(|it| it.used > 0 && !it.released)
        };
        let is_outdated = |entry: &BlockEntry| {
            let is_other = |uid: &ObjectUid| **uid != *object;
            let has_other_object = entry.uid.as_ref().is_some_and(is_other);
            let could_be_used = || entry.owner.quarantined && !is_used() || is_listed(entry, cache);
            entry.owner.uid != *uid && has_other_object && could_be_used()
        };
        if alive && entry.is_some_and(is_outdated) {
            return;
        }
        let owner = Owner::node(name, uid);
        let Some(before) = entry.map(|entry| entry.owner.clone()) else {
            let holder = self.holders.intern(HolderUse::Blocks, name, uid);
            let holding = self.ledger.record(holder, cidr, HoldingState::Allocated);
            self.blocks.insert(BlockEntry {
                uid: Some(object.into()),
                vmi: listed.vmi_uid.as_deref().map(ObjectUid::from),
                number,
                last_number: number,
                confirmed: true,
                parent: listed.parent.as_ref().and_then(|it| Parent::read(it).ok()),
                recall: listed.recall,
                ..BlockEntry::new(cidr, listed.pool.as_str().into(), owner, holding, now)
            });
            return;
        };
        let is_reassigned = before != owner;
        if is_reassigned {
            self.reassign_block(&cidr, owner);
        }
        self.confirm(&cidr);
        self.correct_object(&cidr, cache);
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.recall = listed.recall;
            if is_reassigned {
                entry.number = number;
                entry.last_number = entry.last_number.max(number);
                (entry.until, entry.quarantined_until) = (None, None);
                entry.step = Step::Replace;
            }
        }
    }

    /// Records blocks that a late write of an earlier leader may have listed in a node's NodeSubnet. These are the
    /// listed blocks that the ledger lacks, or that it has as quarantined or provisional. The node keeps them until its
    /// agent releases them. Returns the blocks.
    pub(crate) fn listed_blocks_changed(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        now: Now,
    ) -> Vec<Cidr> {
        let Some(node) = cache.nodes.get(name) else {
            return Vec::new();
        };
        let Some(spec) = spec_for(cache, name, &node.uid) else {
            return Vec::new();
        };
        let report = report_of(node, cache);
        let mut restored = Vec::new();
        for block in &spec.blocks {
            let Ok(cidr) = Cidr::parse_strict(&block.cidr) else {
                continue;
            };
            let reported = report.and_then(|it| it.of_block(&cidr, &block.uid.as_str().into()));
            let is_released = reported.is_some_and(|it| it.released);
            // An earlier leader's late write listed the block. If the ledger has the block in quarantine, this write
            // gave the block back to this node. If the ledger has the block as provisional, that leader found that no
            // older block overlaps the block.
            let is_new = |entry: &BlockEntry| {
                let own = entry.owner.uid == node.uid;
                entry.owner.quarantined || (own && !entry.confirmed && !entry.is_leaving())
            };
            let object = object_uid(&block.uid).0;
            let is_new = |entry: &BlockEntry| is_new(entry) || entry.lacks(&node.uid, object);
            let is_new = self.blocks.get(&cidr).is_none_or(is_new);
            if is_new && !is_released && !Mutation::LateListIgnored.is_on() {
                self.restore_listed(name, &node.uid, block, true, cache, now);
                restored.push(cidr);
            }
        }
        restored
    }

    /// Ends each block that the node's agent has released and that the node's NodeSubnet no longer lists. The block's
    /// object is deleted, or a standby becomes the owner. Returns these blocks. One version of the NodeSubnet shows
    /// both facts, so no write that is based on an older version can list the blocks again.
    pub(crate) fn released_blocks(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        now: Now,
    ) -> Vec<Cidr> {
        let Some((node, subnet)) = cache.nodes.get(name).zip(cache.subnets.get(name)) else {
            return Vec::new();
        };
        let Ok(spec) = &subnet.spec else {
            return Vec::new();
        };
        let report = subnet.report.as_deref();
        let listed: BTreeSet<&str> = spec.blocks.iter().map(|it| it.cidr.as_str()).collect();
        let is_unlisted = |cidr: &Cidr| {
            !listed.contains(&*cidr.to_string()) || Mutation::BlockEndsWhileListed.is_on()
        };
        let own = self.blocks.of(&node.uid);
        let released = own.filter(|it| it.is_held() && it.is_released(report));
        let cidrs = released.map(|it| it.cidr).filter(is_unlisted);
        let cidrs: Vec<Cidr> = cidrs.collect();
        for cidr in &cidrs {
            self.owner_left(cidr, now);
        }
        let mut all = self.released_standbys(node, report, is_unlisted);
        all.extend(cidrs);
        all
    }

    /// Returns the blocks that the NodeSubnet of the node with this UID should list: the confirmed blocks that the
    /// agent has not released.
    pub(crate) fn listed_blocks(
        &self,
        uid: &ObjectUid,
        report: Option<&AgentReport>,
    ) -> Vec<AllocatedBlock> {
        let all = self.blocks.of(uid).chain(self.blocks.on_standby(uid));
        let mut all: Vec<&BlockEntry> = all.collect();
        all.sort_unstable_by_key(|entry| entry.cidr);
        let all = all.into_iter().filter(|it| it.is_to_list(uid, report));
        let listed = all.filter_map(|entry| match self.claims.of(&entry.cidr) {
            Some(claim) => self.listed_claim(entry, claim, uid, report),
            None if entry.vmi.is_some() => self.listed_without_claim(entry, uid),
            None => self.listed_plain(entry),
        });
        listed.collect()
    }

    fn listed_plain(&self, entry: &BlockEntry) -> Option<AllocatedBlock> {
        let pool = self.pools.get(&entry.pool);
        let reserved = pool.map_or(&[][..], |pool| &pool.reserved);
        let on_request = pool.map_or(&[][..], |pool| &pool.on_request);
        Some(AllocatedBlock {
            cidr: entry.cidr.to_string(),
            uid: entry.listed_uid()?,
            pool: entry.pool.to_string(),
            claim: None,
            vmi_uid: None,
            standby: false,
            parent: entry.parent.as_ref().map(Parent::text),
            recall: entry.recall,
            reserved: within(
                &entry.cidr,
                reserved.iter().chain(&self.never_of_parent(entry)),
            ),
            on_request: within(&entry.cidr, on_request),
        })
    }

    /// Returns the entry of a virtual machine's block whose claim is gone, because somebody has removed the claim's
    /// finalizer by hand. Two nodes may have the block. So the entry says that the block drains, and no further pod
    /// gets its address.
    fn listed_without_claim(&self, entry: &BlockEntry, node: &ObjectUid) -> Option<AllocatedBlock> {
        Some(AllocatedBlock {
            uid: listed_uid(entry.uid.as_ref()?, entry.share_of(node)?.number),
            vmi_uid: entry.vmi.as_ref().map(ToString::to_string),
            standby: entry.owner.uid != *node,
            recall: Some(Recall::Drain),
            ..self.listed_plain(entry)?
        })
    }

    /// Returns the entry of a claim's block in the NodeSubnet of a node. Returns `None` if the NodeSubnet should not
    /// list the block now. The entry names the block's address as reserved, so that an agent too old to know claims
    /// does not assign it. Agents that know claims ignore this reservation.
    fn listed_claim(
        &self,
        entry: &BlockEntry,
        claim: &ClaimName,
        node: &ObjectUid,
        report: Option<&AgentReport>,
    ) -> Option<AllocatedBlock> {
        // A pod gets all addresses of a claim or none, so a NodeSubnet lists all blocks of a claim or none. There is
        // one exception: a draining block is listed even without the claim's other blocks. The agent assigns no address
        // of a draining block, and it can release only a block that is listed.
        let all = self.claims.get(claim)?.cidrs();
        let all = all.map(|cidr| self.blocks.get(&cidr));
        let mut blocks = all.clone();
        let is_whole = blocks.all(|it| it.is_some_and(|it| it.is_to_list(node, report)));
        let Share { number, recall, .. } = entry.share_of(node)?;
        let drains = recall == Some(Recall::Drain);
        let is_alone = !is_whole && !drains;
        // While the NodeSubnet began to list all blocks of the claim, the agent released one that had been draining.
        let report = report.filter(|it| it.node_uid == *node);
        let has_it = report.is_some_and(|it| entry.reported(it, number).is_some());
        if is_alone && !has_it && !entry.is_listed_alone(node, all) {
            return None;
        }
        let recall = if is_alone {
            Some(Recall::Drain)
        } else {
            recall
        };
        Some(AllocatedBlock {
            cidr: entry.cidr.to_string(),
            uid: listed_uid(entry.uid.as_ref()?, number),
            pool: entry.pool.to_string(),
            claim: Some(claim.to_string()),
            vmi_uid: entry.vmi.as_ref().map(ToString::to_string),
            standby: entry.owner.uid != *node,
            parent: None,
            recall,
            reserved: vec![entry.cidr.first().to_string()],
            on_request: Vec::new(),
        })
    }

    /// Returns how many addresses of a block can be assigned to pods that do not ask for a particular address. Reserved
    /// addresses do not count, and neither do addresses that are assigned only on request.
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

/// Returns the parts of the spans that lie in a block, as texts for the NodeSubnet. If there are more parts than a
/// NodeSubnet may list, returns the range of the block. In that case no address of the block is assigned, which is
/// better than assigning a reserved address.
fn within<'a>(cidr: &Cidr, spans: impl IntoIterator<Item = &'a IpRange>) -> Vec<String> {
    let inside = spans.into_iter().filter_map(|span| span.within(cidr));
    let mut texts: Vec<String> = inside.map(|span| span.to_string()).collect();
    texts.sort();
    texts.dedup();
    if texts.len() > MOST_RESERVED {
        return vec![cidr.to_string()];
    }
    texts
}

/// Returns whether the NodeSubnet of the block's owner lists the block under the UID that the ledger knows for the
/// block's object.
fn is_listed(entry: &BlockEntry, cache: &ClusterCache) -> bool {
    let cidr = entry.cidr.to_string();
    let is_same = |it: &AllocatedBlock| {
        it.cidr == cidr && entry.uid.as_deref() == Some(object_uid(&it.uid).0)
    };
    let spec = spec_for(cache, &entry.owner.name, &entry.owner.uid);
    spec.is_some_and(|spec| spec.blocks.iter().any(is_same))
}

/// Returns the identity of a deleted node's machine. The identity is empty if the NodeSubnet does not record that node.
pub(crate) fn machine_in(
    cache: &ClusterCache,
    name: &NodeName,
    uid: &ObjectUid,
) -> MachineIdentity {
    spec_for(cache, name, uid)
        .map(|spec| machine(spec.provider_id.as_deref(), spec.machine_id.as_deref()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cadastre_core::Addr;

    #[test]
    fn a_block_with_too_many_reserved_ranges_is_listed_as_reserved_altogether() {
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
