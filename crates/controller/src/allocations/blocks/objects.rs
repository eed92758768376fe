//! Updates the ledger when the watch delivers changes of IPAMBlocks, and decides which of two overlapping blocks stays.

use super::owners::quarantine_of;
use super::{AffectedLoops, BlockEntry, Standby};
use crate::Now;
use crate::allocations::holders::HolderUse;
use crate::allocations::{AllocationState, left_of};
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{Block, BlockSpec, MachineIdentity, Owner};
use crate::purpose::Step;
use cadastre_api::block_name;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState};

impl AllocationState {
    /// Records an IPAMBlock that was created or has changed. Returns what other loops have to check.
    pub(crate) fn block_seen(&mut self, block: &Block, now: Now) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        let Some(spec) = sound(block) else {
            self.block_spoiled(block, now, &mut affected);
            return affected;
        };
        let cidr = spec.cidr;
        affected.blocks.push(cidr);
        let is_for_another =
            |entry: &BlockEntry| !entry.confirmed && entry.owner.uid != spec.owner.uid;
        if self.blocks.get(&cidr).is_some_and(is_for_another) {
            // Another writer created the object first, so the block belongs to the owner that the object names. The
            // node for which this block was chosen needs another block.
            let dropped = self.drop_block(&cidr);
            affected.nodes.extend(dropped.map(|it| it.owner.name));
        }
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            self.record_object(block, spec, now);
            affected.nodes.push(spec.owner.name.clone());
            affected
                .nodes
                .extend(spec.parent.iter().map(|it| it.node.clone()));
            return affected;
        };
        if entry.uid.as_ref() != Some(&block.uid) {
            entry.uid = Some(block.uid.clone());
            affected.nodes.push(entry.owner.name.clone());
        }
        affected
            .nodes
            .extend(entry.parent.iter().map(|it| it.node.clone()));
        for standby in &mut entry.standby {
            let mut named = spec.standby.iter().map(|(owner, _)| owner);
            let is_named = spec.owner.uid == standby.owner.uid
                || named.any(|owner| owner.uid == standby.owner.uid);
            if is_named && !standby.is_stored {
                standby.is_stored = true;
                affected.nodes.push(standby.owner.name.clone());
            }
        }
        if entry.step != Step::Delete {
            // The object of a provisional block is not written. A write would change the resourceVersion, by which the
            // ages of objects are compared.
            let differs = entry.confirmed && *spec != entry.spec();
            entry.step = if differs {
                Step::Replace
            } else {
                Step::Settled
            };
        }
        if !entry.confirmed {
            self.blocks.to_judge.insert(cidr);
        }
        affected
    }

    /// Handles an object with an invalid spec. If the block is confirmed, its object is written again. If the block is
    /// provisional, its range is quarantined, because it is unknown for which node the object was created. This takes
    /// no addresses in use from any node, because no NodeSubnet lists a provisional block.
    pub(crate) fn block_spoiled(&mut self, block: &Block, now: Now, affected: &mut AffectedLoops) {
        let known = self.blocks.entries.values();
        let known = known.filter(|entry| *block.name == *block_name(&entry.cidr));
        let known = known.map(|entry| (entry.cidr, entry.confirmed, entry.is_leaving()));
        let Some((cidr, confirmed, false)) = { known }.next() else {
            return;
        };
        if !confirmed && let Some(entry) = self.blocks.get(&cidr) {
            affected.nodes.push(entry.owner.name.clone());
            let nobody = Owner {
                quarantined: true,
                name: "".into(),
                uid: block.uid.clone(),
                machine: MachineIdentity::default(),
            };
            self.reassign_block(&cidr, nobody);
            self.confirm(&cidr);
            self.set_quarantine(&cidr, now);
        }
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.uid = Some(block.uid.clone());
            // The invalid object of a provisional block is not written again. Its CIDR may be wrong, and no write can
            // correct this immutable field. The object is deleted after the quarantine.
            entry.step = if confirmed {
                Step::Replace
            } else {
                Step::Settled
            };
            affected.blocks.push(cidr);
        }
    }

    /// Handles the deletion of an object. If the block must stay, its object is created again. Otherwise the ledger
    /// drops the block.
    pub fn block_gone(&mut self, block: &Block) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        let Some(spec) = sound(block) else {
            return affected;
        };
        let cidr = spec.cidr;
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            return affected;
        };
        if entry.uid.as_ref().is_some_and(|uid| *uid != block.uid) {
            return affected;
        }
        affected.nodes.push(entry.owner.name.clone());
        if entry.is_leaving() || entry.owner.quarantined && !entry.confirmed {
            self.drop_block(&cidr);
            affected.freed = true;
        } else {
            entry.step = Step::Create;
        }
        affected.blocks.push(cidr);
        affected
    }

    /// Records a block of which the ledger has no record yet, from the block's object.
    fn record_object(&mut self, block: &Block, spec: &BlockSpec, now: Now) {
        let owner = &spec.owner;
        let holder = self
            .holders
            .intern(HolderUse::Blocks, &owner.name, &owner.uid);
        let holding = self
            .ledger
            .record(holder, spec.cidr, HoldingState::InFlight);
        let quarantine = quarantine_of(&self.pools, &spec.pool);
        let mut left = spec
            .until
            .map_or(quarantine, |until| left_of(until, quarantine, now));
        if Mutation::RecordedBlockQuarantineIgnored.is_on() {
            left = std::time::Duration::ZERO;
        }
        // A user may have made a standby the owner. The node keeps the number under which its NodeSubnet lists the block.
        let of_owner = |(it, _): &&(Owner, u32)| it.uid == owner.uid;
        let number = spec.standby.iter().find(of_owner);
        let number = number.map_or(spec.number, |(_, number)| *number);
        let entry = BlockEntry {
            since: spec.since,
            until: spec.until,
            quarantined_until: owner.quarantined.then_some(now.mono + left),
            uid: Some(block.uid.clone()),
            parent: spec.parent.clone(),
            // The controller marks an object as quarantined only if the block was confirmed before.
            confirmed: owner.quarantined,
            step: Step::Settled,
            vmi: spec.vmi.clone(),
            number,
            standby: {
                let standby = spec.standby.iter().filter(|it| !of_owner(it)).cloned();
                standby
                    .map(|(owner, number)| Standby::stored(owner, number))
                    .collect()
            },
            last_number: spec.last_number,
            ..BlockEntry::new(spec.cidr, spec.pool.clone(), owner.clone(), holding, now)
        };
        self.ledger.set_state(holding, entry.state());
        self.blocks.insert(entry);
        if !owner.quarantined {
            self.blocks.to_judge.insert(spec.cidr);
        }
    }

    /// Confirms each provisional block whose object the watch has delivered. If something older overlaps the block,
    /// marks the block for deletion instead. Decides nothing while the watch receives an initial list, because a list
    /// does not deliver objects in the order of their creation.
    pub fn judge_blocks(&mut self, cache: &ClusterCache) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        if cache.blocks.is_listing() && !Mutation::BlocksJudgedDuringList.is_on() {
            return affected;
        }
        // Blocks of live nodes are judged before quarantined blocks. A quarantined block is always confirmed, and a
        // confirmed block would cause the deletion of a live node's block that overlaps it.
        let to_judge = std::mem::take(&mut self.blocks.to_judge);
        let mut to_judge: Vec<Cidr> = to_judge.into_iter().collect();
        to_judge.sort_by_cached_key(|cidr| {
            let entry = self.blocks.get(cidr);
            entry.is_some_and(|it| it.owner.quarantined)
        });
        for cidr in to_judge {
            let Some(entry) = self.blocks.get(&cidr) else {
                continue;
            };
            if entry.is_leaving() || entry.confirmed {
                continue;
            }
            let name = entry.owner.name.clone();
            if !entry.owner.quarantined && self.is_being_lent(&cidr, cache) {
                // The block cannot be confirmed before the NodeSubnet of the lender lists the block as lent.
                self.blocks.to_judge.insert(cidr);
                continue;
            }
            // A quarantined block is confirmed even if another block overlaps it, because its deleted owner may have
            // used it.
            if entry.owner.quarantined || self.is_first(&cidr, cache) {
                self.confirm(&cidr);
                self.correct_object(&cidr, cache);
            } else if let Some(entry) = self.blocks.get_mut(&cidr) {
                entry.step = Step::Delete;
            }
            affected.nodes.push(name);
            affected.blocks.push(cidr);
        }
        affected
    }

    /// Schedules a write of the block's object if the object differs from the ledger.
    pub(super) fn correct_object(&mut self, cidr: &Cidr, cache: &ClusterCache) {
        let object = cache.blocks.get(&*block_name(cidr));
        let spec = object.and_then(|block| block.spec.as_ref().ok());
        if let Some(entry) = self.blocks.get_mut(cidr)
            && spec.is_some_and(|spec| *spec != entry.spec())
        {
            entry.must_be_stored();
        }
    }

    /// Marks for deletion each provisional block that overlaps a block that another node's agent uses. A restore of the
    /// API server from a backup may have brought back such provisional blocks. Returns the marked blocks. A leader calls
    /// this at the end of the agent grace, or when its term begins if there is no agent grace.
    pub(crate) fn yield_to_unadopted(&mut self) -> Vec<Cidr> {
        let mut ended = Vec::new();
        for cidr in self.blocks.to_judge.clone() {
            let Some(entry) = self.blocks.entries.get_mut(&cidr) else {
                continue;
            };
            let owner = &entry.owner;
            if !entry.confirmed
                && !owner.quarantined
                && self.unadopted.conflict_with(&cidr, &owner.name)
            {
                entry.step = Step::Delete;
                ended.push(cidr);
            }
        }
        ended
    }

    /// Returns whether the block may be confirmed. A block must not be confirmed if a confirmed block, an older block
    /// or a podCIDR overlaps it.
    fn is_first(&self, cidr: &Cidr, cache: &ClusterCache) -> bool {
        let Some(mine) = Self::age(cidr, cache) else {
            return false;
        };
        let own = self.blocks.get(cidr).map(|entry| entry.holding);
        let mut others = self.ledger.overlapping(cidr);
        others.all(|(id, holding)| {
            if Some(id) == own {
                return true;
            }
            // A block that is exactly the address of a claim belongs to the claim.
            if self.is_of_claims(holding.holder) {
                return holding.cidr == *cidr
                    || self.may_be_handed_over(&holding.cidr, cidr, cache);
            }
            match self
                .blocks
                .get(&holding.cidr)
                .filter(|other| other.holding == id)
            {
                Some(other) if other.is_leaving() && !other.confirmed => true,
                Some(other) if self.is_claim_inside(cidr, &other.cidr) => true,
                Some(other) if self.is_handed_over(cidr, &other.cidr, cache) => true,
                Some(other) if self.may_be_handed_over(&other.cidr, cidr, cache) => true,
                Some(other) if other.confirmed => false,
                // The object of the other block is newer, or not created yet, so the other block will be deleted and
                // this block stays.
                Some(other) => Self::age(&other.cidr, cache).is_none_or(|theirs| mine < theirs),
                // The holding belongs to a podCIDR, perhaps one in quarantine. The podCIDR stays, so the block is not
                // confirmed.
                None => Mutation::BlockDoesNotYieldToPodCidr.is_on(),
            }
        })
    }

    /// Returns whether the node of `block` may have handed `address` over to a claim. The NodeSubnet that recorded this
    /// may be lost, so the ages of the objects decide: `block` must be older than the last writes of the claim and of
    /// the claim's block. If nothing was handed over yet, the NodeSubnet requests the address when it lists `block`.
    fn may_be_handed_over(&self, address: &Cidr, block: &Cidr, cache: &ClusterCache) -> bool {
        let claim = self.claims.of(address);
        let Some(claim) = claim.and_then(|name| cache.claims.get(name)) else {
            return false;
        };
        let own = cache.blocks.get(&*block_name(address));
        let own = own.map_or(u64::MAX, |it| it.version);
        self.is_claim_inside(address, block)
            && Self::age(block, cache).is_some_and(|(is_unedited, version)| {
                !is_unedited || version < claim.version.min(own)
            })
    }

    /// Returns a sort key for the age of a block's object: the older the object, the lower the key. Objects that were
    /// edited after their creation count as older than all others, because only blocks that a node has had are edited.
    fn age(cidr: &Cidr, cache: &ClusterCache) -> Option<(bool, u64)> {
        let block = cache.blocks.get(&*block_name(cidr))?;
        let touched = block.touched && !Mutation::EditedBlockKeepsItsAge.is_on();
        Some((!touched, block.version))
    }
}

/// Returns the spec of an object, if the spec is valid and the object's name is derived from its CIDR. Under any other
/// name, the API server would accept a second object for the same range.
pub(crate) fn sound(block: &Block) -> Option<&BlockSpec> {
    let spec = block.spec.as_ref().ok()?;
    (*block.name == *block_name(&spec.cidr)).then_some(spec)
}
