//! Changes the owner of a block: allocation, quarantine, return to the same machine, and removal.

use std::time::Duration;

use super::BlockEntry;
use crate::Now;
use crate::allocations::holders::HolderUse;
use crate::allocations::{AllocationState, whole_seconds};
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{MachineIdentity, Node, Owner};
use crate::pools::{DEFAULT_QUARANTINE, PoolStates};
use crate::purpose::Step;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingId, HoldingState};

impl AllocationState {
    /// Records a block that was just allocated to a node, with its holding in the ledger.
    pub(crate) fn begin_block(
        &mut self,
        holding: HoldingId,
        cidr: Cidr,
        pool: &PoolName,
        node: &Node,
        now: Now,
    ) {
        let owner = Owner::node(&node.name, &node.uid);
        let entry = BlockEntry::new(cidr, pool.clone(), owner, holding, now);
        self.blocks.insert(entry);
    }

    /// Records that a block is no longer provisional, so that its node may use it.
    pub(crate) fn confirm(&mut self, cidr: &Cidr) {
        self.blocks.to_judge.remove(cidr);
        if let Some(entry) = self.blocks.get_mut(cidr) {
            entry.confirmed = true;
            self.ledger.set_state(entry.holding, entry.state());
        }
    }

    /// Quarantines the blocks of a node whose UID is gone. Two kinds of blocks are not quarantined. A block whose
    /// creation was never requested is dropped. If a block has a live standby, the standby becomes the owner. Returns
    /// all blocks of which the node was the owner or a standby.
    pub(crate) fn quarantine_blocks(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        machine: &MachineIdentity,
        now: Now,
    ) -> Vec<Cidr> {
        let mut all = self.quarantine_standbys(uid, machine);
        let cidrs: Vec<Cidr> = self.blocks.of(uid).map(|entry| entry.cidr).collect();
        for cidr in &cidrs {
            let Some(entry) = self.blocks.get(cidr) else {
                continue;
            };
            if entry.owner.quarantined || entry.is_leaving() {
                continue;
            }
            if entry.is_unsent() {
                if Mutation::DroppedBlockKeepsItsHolding.is_on() {
                    self.blocks.remove(cidr);
                    continue;
                }
                self.drop_block(cidr);
                continue;
            }
            let next = entry.live_standbys().next();
            if let Some(next) = next.map(|it| it.owner.uid.clone()) {
                self.make_owner(cidr, &next);
                self.quarantine_standbys(uid, machine);
                continue;
            }
            let owner = Owner {
                quarantined: true,
                name: name.clone(),
                uid: uid.clone(),
                machine: machine.clone(),
            };
            self.reassign_block(cidr, owner);
            self.set_quarantine(cidr, now);
            if let Some(entry) = self.blocks.get_mut(cidr)
                && entry.confirmed
                && entry.step == Step::Settled
            {
                entry.step = Step::Replace;
            }
        }
        all.extend(cidrs);
        all
    }

    /// Drops the blocks that overlap ranges of a foreign allocator, if no request for them was sent yet. Returns the
    /// names of the nodes for which these blocks were chosen.
    pub(crate) fn drop_unsent(&mut self, foreign: &[Cidr]) -> Vec<NodeName> {
        let overlaps = |entry: &&BlockEntry| foreign.iter().any(|it| it.overlaps(&entry.cidr));
        let unsent = self.blocks.iter().filter(|it| it.is_unsent());
        let unsent = unsent.filter(|it| !it.owner.quarantined).filter(overlaps);
        let cidrs: Vec<Cidr> = unsent.map(|entry| entry.cidr).collect();
        let dropped = cidrs.iter().filter_map(|cidr| self.drop_block(cidr));
        dropped.map(|entry| entry.owner.name).collect()
    }

    /// Reassigns quarantined blocks of a machine to the machine's new Node. Blocks that their pools would no longer
    /// allocate to the Node stay in quarantine. Returns the reassigned blocks.
    pub(crate) fn return_blocks(&mut self, node: &Node, now: Now) -> Vec<Cidr> {
        let returned = self.quarantined_blocks_of(node);
        for cidr in &returned {
            self.reassign_block(cidr, Owner::node(&node.name, &node.uid));
            if let Some(entry) = self.blocks.get_mut(cidr) {
                entry.since = whole_seconds(now.wall);
                entry.until = None;
                entry.quarantined_until = None;
                entry.step = Step::Replace;
            }
        }
        returned
    }

    fn quarantined_blocks_of(&self, node: &Node) -> Vec<Cidr> {
        let uids = self.blocks.uids(&node.name);
        let fits = |entry: &&BlockEntry| {
            let pool = self.pools.get(&entry.pool);
            entry.confirmed
                && entry.owner.quarantined
                && entry.owner.machine.same(&node.machine)
                && !entry.is_leaving()
                && !self.unadopted.conflict_with(&entry.cidr, &node.name)
                && pool.is_some_and(|pool| {
                    pool.is_serving() && pool.selects(node) && pool.space.covers(&entry.cidr)
                })
        };
        let entries = uids.flat_map(|uid| self.blocks.of(uid)).filter(fits);
        let alone = entries.filter(|entry| self.is_alone(entry));
        alone.map(|entry| entry.cidr).collect()
    }

    /// Returns whether no other holding overlaps the block. Three kinds of holdings do not count:
    /// - addresses of claims, and the blocks of claims
    /// - blocks that are borrowed from this block, and the parent of this block
    /// - smaller quarantined blocks of the same deleted node inside this block. Late writes created these blocks, and
    ///   they stay in quarantine
    fn is_alone(&self, entry: &BlockEntry) -> bool {
        let holder = self.ledger.get(entry.holding).map(|own| own.holder);
        self.ledger.overlapping(&entry.cidr).all(|(id, holding)| {
            let is_quarantined_inside = holding.state == HoldingState::Quarantined
                && Some(holding.holder) == holder
                && holding.cidr.len() > entry.cidr.len();
            let is_claim = entry.cidr.contains(&holding.cidr) && self.is_of_claims(holding.holder);
            let is_block_of_claim = self.is_claim_inside(&holding.cidr, &entry.cidr)
                || self.is_claim_inside(&entry.cidr, &holding.cidr);
            let is_lent = self.is_part_of(&holding.cidr, &entry.cidr)
                || self.is_part_of(&entry.cidr, &holding.cidr);
            id == entry.holding || is_quarantined_inside || is_claim || is_block_of_claim || is_lent
        })
    }

    /// Removes a block and its holding. The range is then free unless another holding overlaps it.
    pub(crate) fn drop_block(&mut self, cidr: &Cidr) -> Option<BlockEntry> {
        if Mutation::LentForgottenWithParent.is_on() {
            let lent: Vec<Cidr> = self.lent_inside(cidr).map(|it| it.part).collect();
            for part in lent {
                self.drop_block(&part);
            }
        }
        let entry = self.blocks.remove(cidr)?;
        self.ledger.release(entry.holding);
        if let Some(parent) = &entry.parent {
            self.lending.given_back.push((*cidr, parent.node.clone()));
        }
        if !self.blocks.has(&entry.owner.uid) {
            self.holders.drop_uid(HolderUse::Blocks, &entry.owner.uid);
        }
        Some(entry)
    }

    /// Moves a block and its holding to another owner.
    pub(crate) fn reassign_block(&mut self, cidr: &Cidr, owner: Owner) {
        let holder = self
            .holders
            .intern(HolderUse::Blocks, &owner.name, &owner.uid);
        let to_judge = self.blocks.to_judge.contains(cidr);
        let Some(mut entry) = self.blocks.remove(cidr) else {
            return;
        };
        self.ledger.set_holder(entry.holding, holder);
        if entry.owner.uid != owner.uid && !self.blocks.has(&entry.owner.uid) {
            self.holders.drop_uid(HolderUse::Blocks, &entry.owner.uid);
        }
        entry.owner = owner;
        self.ledger.set_state(entry.holding, entry.state());
        self.blocks.insert(entry);
        if to_judge {
            self.blocks.to_judge.insert(*cidr);
        }
    }

    /// Begins the quarantine of a block. The block's pool decides how long the quarantine lasts.
    pub(super) fn set_quarantine(&mut self, cidr: &Cidr, now: Now) {
        if let Some(entry) = self.blocks.get_mut(cidr) {
            let quarantine = quarantine_of(&self.pools, &entry.pool);
            entry.since = whole_seconds(now.wall);
            entry.until = now.wall.saturating_add(quarantine).ok().map(whole_seconds);
            entry.quarantined_until = Some(now.mono + quarantine);
            entry.recall = None;
        }
    }
}

pub(super) fn quarantine_of(pools: &PoolStates, pool: &PoolName) -> Duration {
    let pool = pools.get(pool);
    pool.map_or(DEFAULT_QUARANTINE, |pool| pool.quarantine)
}
