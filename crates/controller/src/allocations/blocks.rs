//! Affinity blocks: which node has which block, and how far each block is.
//!
//! A block begins as a claim. Its object is created, seen on the watch, and listed in the owner's NodeSubnet. It ends
//! when it is recalled, released by the agent and taken off the list, and its object is deleted.
//!
//! # Guarantees
//! - A block is *provisional* until the watch has shown its object and nothing older overlaps it. Only then does its
//!   owner have it; a provisional block is never listed.
//! - Of two overlapping blocks the one that a NodeSubnet lists stays, else the one that was created first; the object
//!   of the other one is deleted.
//! - A listed block stays claimed until its agent has released it and the list without it is written; or until the
//!   node's UID is gone, the quarantine is over and no pod has an address in it. If somebody deletes or edits its
//!   object meanwhile, the object is restored.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::names::{NodeName, ObjectUid};
use cadastre_core::Cidr;

mod entry;
mod listed;
mod objects;
mod owners;
#[cfg(test)]
mod tests;

pub use entry::BlockEntry;
pub(crate) use listed::machine_in;
pub(crate) use objects::sound;

/// All blocks that the leader knows.
#[derive(Debug, Default)]
pub struct BlockTable {
    entries: BTreeMap<Cidr, BlockEntry>,
    by_owner: BTreeMap<ObjectUid, BTreeSet<Cidr>>,
    /// Name and UID of nodes with blocks
    owners: BTreeSet<(NodeName, ObjectUid)>,
    /// Provisional blocks whose objects the watch has shown
    to_judge: BTreeSet<Cidr>,
}

impl BlockTable {
    /// Returns the block of exactly that range.
    pub fn get(&self, cidr: &Cidr) -> Option<&BlockEntry> {
        self.entries.get(cidr)
    }

    /// Returns the block for a change of its state. Only [`crate::allocations::AllocationState`] changes the owner.
    pub fn get_mut(&mut self, cidr: &Cidr) -> Option<&mut BlockEntry> {
        self.entries.get_mut(cidr)
    }

    /// Returns all blocks in address order.
    pub fn iter(&self) -> impl Iterator<Item = &BlockEntry> {
        self.entries.values()
    }

    /// Returns the blocks of a node's UID in address order.
    pub fn of<'a>(&'a self, uid: &ObjectUid) -> impl Iterator<Item = &'a BlockEntry> + use<'a> {
        let cidrs = self.by_owner.get(uid).into_iter().flatten();
        cidrs.filter_map(|cidr| self.entries.get(cidr))
    }

    /// Returns whether the UID has any block.
    pub fn has(&self, uid: &ObjectUid) -> bool {
        self.by_owner.contains_key(uid)
    }

    fn insert(&mut self, entry: BlockEntry) {
        let (name, uid) = (entry.owner.name.clone(), entry.owner.uid.clone());
        self.owners.insert((name, uid.clone()));
        self.by_owner.entry(uid).or_default().insert(entry.cidr);
        self.entries.insert(entry.cidr, entry);
    }

    fn remove(&mut self, cidr: &Cidr) -> Option<BlockEntry> {
        let entry = self.entries.remove(cidr)?;
        self.to_judge.remove(cidr);
        let owner = &entry.owner;
        if let Some(cidrs) = self.by_owner.get_mut(&owner.uid) {
            cidrs.remove(cidr);
            if cidrs.is_empty() {
                self.by_owner.remove(&owner.uid);
                self.owners.remove(&(owner.name.clone(), owner.uid.clone()));
            }
        }
        Some(entry)
    }

    /// Returns the UIDs under a node's name that have blocks.
    fn uids<'a>(&'a self, name: &'a NodeName) -> impl Iterator<Item = &'a ObjectUid> {
        self.owners
            .range((name.clone(), "".into())..)
            .take_while(move |(n, _)| n == name)
            .map(|(_, uid)| uid)
    }
}

/// What a change means to other loops.
#[derive(Debug, Default)]
pub struct AffectedLoops {
    /// Blocks whose object may need a request
    pub blocks: Vec<Cidr>,
    /// Names of nodes whose list of blocks may have changed, or that may need another block
    pub nodes: Vec<NodeName>,
    /// Whether space may have become free in some pool
    pub freed: bool,
    /// NodeSubnets to look at; some may no longer need to record a quarantined range
    pub subnets: Vec<NodeName>,
}
