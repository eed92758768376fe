//! What the watch shows of blocks' objects, and which of two that overlap stays.

use super::{Entry, Noted};
use crate::Now;
use crate::cluster::seen::{Block, BlockSpec, Machine, Owner};
use crate::cluster::world::World;
use crate::purpose::Step;
use crate::registry::holders::Use;
use crate::registry::{Registry, left_of};
use cadastre_api::block_name;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, State};

impl Registry {
    /// An object is there, or has changed.
    pub(crate) fn block_seen(&mut self, block: &Block, now: Now) -> Noted {
        let mut noted = Noted::default();
        let Some(spec) = sound(block) else {
            self.block_spoiled(block, now, &mut noted);
            return noted;
        };
        let cidr = spec.cidr;
        let Some(entry) = self.blocks.get(&cidr) else {
            self.adopt(block, spec, now);
            noted.blocks.push(cidr);
            noted.nodes.push(spec.owner.name.clone());
            return noted;
        };
        let ours = entry.owner.uid == spec.owner.uid;
        let owner = entry.owner.name.clone();
        if !entry.confirmed && !ours {
            // Somebody else was first with that name: it is theirs, and our node needs another.
            if let Some(entry) = self.drop_block(&cidr) {
                noted.nodes.push(entry.owner.name);
            }
            self.adopt(block, spec, now);
            noted.nodes.push(spec.owner.name.clone());
            noted.blocks.push(cidr);
            return noted;
        }
        let wanted = entry.spec();
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            return noted;
        };
        let is_provisional = !entry.confirmed;
        if entry.uid.as_ref() != Some(&block.uid) {
            entry.uid = Some(block.uid.clone());
            noted.nodes.push(owner);
        }
        if entry.step != Step::Delete {
            // Until it is judged nothing is written to it: an untouched object tells its age.
            let differs = entry.confirmed && *spec != wanted;
            entry.step = if differs {
                Step::Replace
            } else {
                Step::Settled
            };
        }
        if is_provisional {
            self.blocks.to_judge.insert(cidr);
        }
        noted.blocks.push(cidr);
        noted
    }

    /// An object that says nothing any more is written anew where its block is known. Where one was
    /// to be created under its name, it rests: nobody knows who had it, but no node is listed it.
    pub(crate) fn block_spoiled(&mut self, block: &Block, now: Now, noted: &mut Noted) {
        let known = self.blocks.entries.values();
        let known = known.filter(|entry| *block.name == *block_name(&entry.cidr));
        let known = known.map(|entry| (entry.cidr, entry.confirmed, entry.is_leaving()));
        let Some((cidr, confirmed, false)) = { known }.next() else {
            return;
        };
        if !confirmed && let Some(entry) = self.blocks.get(&cidr) {
            noted.nodes.push(entry.owner.name.clone());
            let nobody = Owner {
                resting: true,
                name: "".into(),
                uid: block.uid.clone(),
                machine: Machine::default(),
            };
            let rest = self.quarantine_of_block(&entry.pool);
            self.give_block(&cidr, nobody);
            self.confirm(&cidr);
            self.set_rest(&cidr, rest, now);
        }
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.uid = Some(block.uid.clone());
            // What says another CIDR cannot be mended, as that field is immutable: after its rest it goes.
            entry.step = if confirmed {
                Step::Replace
            } else {
                Step::Settled
            };
            noted.blocks.push(cidr);
        }
    }

    /// An object is gone.
    pub fn block_gone(&mut self, block: &Block) -> Noted {
        let mut noted = Noted::default();
        let Some(spec) = sound(block) else {
            return noted;
        };
        let cidr = spec.cidr;
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            return noted;
        };
        if entry.uid.as_ref().is_some_and(|uid| *uid != block.uid) {
            return noted;
        }
        noted.nodes.push(entry.owner.name.clone());
        if entry.is_leaving() || entry.owner.resting && !entry.confirmed {
            self.drop_block(&cidr);
            noted.freed = true;
        } else {
            entry.step = Step::Create;
            noted.blocks.push(cidr);
        }
        noted
    }

    fn adopt(&mut self, block: &Block, spec: &BlockSpec, now: Now) {
        let owner = &spec.owner;
        let holder = self.holders.intern(Use::Blocks, &owner.name, &owner.uid);
        let claim = self.ledger.record(holder, spec.cidr, State::InFlight);
        let rest = self.quarantine_of_block(&spec.pool);
        let left = spec.until.map_or(rest, |until| left_of(until, rest, now));
        let left = if Mutation::RecordedRestOfBlockIgnored.is_on() {
            std::time::Duration::ZERO
        } else {
            left
        };
        let entry = Entry {
            since: spec.since,
            until: spec.until,
            rests_until: owner.resting.then_some(now.mono + left),
            uid: Some(block.uid.clone()),
            // Only what has been its owner's comes to rest.
            confirmed: owner.resting,
            step: Step::Settled,
            ..Entry::new(spec.cidr, spec.pool.clone(), owner.clone(), claim, now)
        };
        self.ledger.set_state(claim, entry.state());
        self.blocks.insert(entry);
        if !owner.resting {
            self.blocks.to_judge.insert(spec.cidr);
        }
    }

    /// Judges the blocks whose objects the watch has shown, unless a list runs: then the objects are
    /// not in the order in which they were made.
    pub fn judge_blocks(&mut self, world: &World) -> Noted {
        let mut noted = Noted::default();
        if world.blocks.is_listing() && !Mutation::BlocksJudgedDuringList.is_on() {
            return noted;
        }
        // What rests takes nothing from anybody, so the living come first.
        let mut to_judge: Vec<Cidr> = std::mem::take(&mut self.blocks.to_judge)
            .into_iter()
            .collect();
        let rests = |cidr: &Cidr| self.blocks.get(cidr).is_some_and(|it| it.owner.resting);
        to_judge.sort_by_cached_key(rests);
        for cidr in to_judge {
            let Some(entry) = self.blocks.get(&cidr) else {
                continue;
            };
            if entry.is_leaving() || entry.confirmed {
                continue;
            }
            let name = entry.owner.name.clone();
            // It might have been used.
            let rests = entry.owner.resting;
            if rests || self.is_first(&cidr, world) {
                self.confirm(&cidr);
                let there = world.blocks.get(&block_name(&cidr));
                let there = there.and_then(|block| block.spec.as_ref().ok());
                if let Some(entry) = self.blocks.get_mut(&cidr)
                    && there.is_some_and(|there| *there != entry.spec())
                {
                    entry.step = Step::Replace;
                }
            } else if let Some(entry) = self.blocks.get_mut(&cidr) {
                entry.step = Step::Delete;
            }
            noted.nodes.push(name);
            noted.blocks.push(cidr);
        }
        noted
    }

    /// Agents have had their say after a gap: what no NodeSubnet lists yet, and the agent of another node
    /// uses, is of a state that is no more, and ends. Returns it.
    pub(crate) fn yield_to_strays(&mut self) -> Vec<Cidr> {
        let mut ended = Vec::new();
        for cidr in self.blocks.to_judge.clone() {
            let Some(entry) = self.blocks.entries.get_mut(&cidr) else {
                continue;
            };
            let owner = &entry.owner;
            if !entry.confirmed && !owner.resting && self.strays.speak_against(&cidr, &owner.name) {
                entry.step = Step::Delete;
                ended.push(cidr);
            }
        }
        ended
    }

    /// Whether nothing that overlaps the block stood before it.
    fn is_first(&self, cidr: &Cidr, world: &World) -> bool {
        let Some(mine) = Self::age(cidr, world) else {
            return false;
        };
        let own = self.blocks.get(cidr).map(|entry| entry.claim);
        let mut others = self.ledger.overlapping(cidr);
        others.all(|(id, claim)| {
            if Some(id) == own {
                return true;
            }
            match self
                .blocks
                .get(&claim.cidr)
                .filter(|other| other.claim == id)
            {
                Some(other) if other.is_leaving() && !other.confirmed => true,
                Some(other) if other.confirmed => false,
                // One without an object yet will find this one before it.
                Some(other) => Self::age(&other.cidr, world).is_none_or(|theirs| mine < theirs),
                // A podCIDR, or what rests of one.
                None => Mutation::BlockDoesNotYieldToPodCidr.is_on(),
            }
        })
    }

    /// When an object was made, in comparison with others: what has been changed since was somebody's
    /// before.
    fn age(cidr: &Cidr, world: &World) -> Option<(bool, u64)> {
        let block = world.blocks.get(&block_name(cidr))?;
        let touched = block.touched && !Mutation::EditedBlockKeepsItsAge.is_on();
        Some((!touched, block.version))
    }
}

/// The spec of an object that can be used: one whose name is not that of its CIDR locks nothing.
pub(crate) fn sound(block: &Block) -> Option<&BlockSpec> {
    let spec = block.spec.as_ref().ok()?;
    (*block.name == *block_name(&spec.cidr)).then_some(spec)
}
