//! The table of blocks records which node has which block, and which stage of its life each block has reached.
//!
//! A new block is at first only a holding in the ledger. Then its object is created, the watch delivers the object, and
//! the owner's NodeSubnet lists the block. At the end the block is recalled, the agent releases it, the NodeSubnet no
//! longer lists it, and its object is deleted.
//!
//! # Guarantees
//! - A block is *provisional* until the watch has delivered its object and nothing older overlaps the block. A
//!   NodeSubnet never lists a provisional block, so the owner cannot use it.
//! - Of two overlapping blocks, the block that a NodeSubnet lists stays. If no NodeSubnet lists either block, the block
//!   that was created first stays. The object of the other block is deleted.
//! - A listed block is not free until its agent has released the block and its NodeSubnet was written without the
//!   block. If the Node's UID is gone instead, the block is not free until the quarantine is over and no pod has an
//!   address in the block. If a user deletes or edits the block's object before that, the controller restores the
//!   object.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::names::{NodeName, ObjectUid};
use cadastre_core::Cidr;

mod entry;
mod listed;
mod objects;
mod owners;
mod standby;
#[cfg(test)]
mod tests;

pub use entry::BlockEntry;
pub(crate) use listed::machine_in;
pub(crate) use objects::sound;
pub use standby::Standby;

/// All blocks of live nodes and all quarantined blocks, by range and by owner.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    entries: BTreeMap<Cidr, BlockEntry>,
    by_owner: BTreeMap<ObjectUid, BTreeSet<Cidr>>,
    by_standby: BTreeMap<ObjectUid, BTreeSet<Cidr>>,
    /// Name and UID of each Node, live or deleted, that has blocks
    owners: BTreeSet<(NodeName, ObjectUid)>,
    /// Provisional blocks whose objects the watch has delivered. Each is to be confirmed or deleted next
    to_judge: BTreeSet<Cidr>,
}

impl BlockTable {
    /// Returns the block with exactly this range. A block that only contains the range does not count.
    pub fn get(&self, cidr: &Cidr) -> Option<&BlockEntry> {
        self.entries.get(cidr)
    }

    /// Returns a block so that the caller can change its state. The caller must not change the owner, because the table
    /// finds blocks by owner.
    pub fn get_mut(&mut self, cidr: &Cidr) -> Option<&mut BlockEntry> {
        self.entries.get_mut(cidr)
    }

    /// Returns all blocks in address order.
    pub fn iter(&self) -> impl Iterator<Item = &BlockEntry> {
        self.entries.values()
    }

    /// Returns the blocks that lie inside a range, in address order. The block with exactly this range is not among
    /// them.
    pub(crate) fn inside<'a>(&'a self, range: &Cidr) -> impl Iterator<Item = &'a BlockEntry> {
        let range = *range;
        // A CIDR sorts before the CIDRs inside it.
        let from = self.entries.range(range..).map(|(_, entry)| entry);
        let inside = from.take_while(move |it| range.contains(&it.cidr));
        inside.filter(move |it| it.cidr != range)
    }

    /// Returns the blocks of the node with this UID, in address order.
    pub fn of<'a>(&'a self, uid: &ObjectUid) -> impl Iterator<Item = &'a BlockEntry> + use<'a> {
        let cidrs = self.by_owner.get(uid).into_iter().flatten();
        cidrs.filter_map(|cidr| self.entries.get(cidr))
    }

    /// Returns whether the node with this UID has any block, even a provisional or quarantined one.
    pub fn has(&self, uid: &ObjectUid) -> bool {
        self.by_owner.contains_key(uid)
    }

    fn insert(&mut self, entry: BlockEntry) {
        let (name, uid) = (entry.owner.name.clone(), entry.owner.uid.clone());
        self.owners.insert((name, uid.clone()));
        self.by_owner.entry(uid).or_default().insert(entry.cidr);
        for standby in &entry.standby {
            let cidrs = self.by_standby.entry(standby.owner.uid.clone());
            cidrs.or_default().insert(entry.cidr);
        }
        self.entries.insert(entry.cidr, entry);
    }

    fn remove(&mut self, cidr: &Cidr) -> Option<BlockEntry> {
        let entry = self.entries.remove(cidr)?;
        self.to_judge.remove(cidr);
        for standby in &entry.standby {
            if let Some(cidrs) = self.by_standby.get_mut(&standby.owner.uid) {
                cidrs.remove(cidr);
                if cidrs.is_empty() {
                    self.by_standby.remove(&standby.owner.uid);
                }
            }
        }
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

    /// Returns the UIDs of all Nodes of this name, live or deleted, that have blocks.
    fn uids<'a>(&'a self, name: &'a NodeName) -> impl Iterator<Item = &'a ObjectUid> {
        self.owners
            .range((name.clone(), "".into())..)
            .take_while(move |(n, _)| n == name)
            .map(|(_, uid)| uid)
    }
}

/// What other loops have to check after blocks have changed.
#[derive(Debug, Default)]
pub struct AffectedLoops {
    /// Blocks whose IPAMBlock may need a request
    pub blocks: Vec<Cidr>,
    /// Names of nodes whose NodeSubnet may have to list other blocks, or that may need another block
    pub nodes: Vec<NodeName>,
    /// Whether space may have become free in some pool
    pub freed: bool,
    /// Names of NodeSubnets to check, because they may no longer need to record a quarantined range
    pub subnets: Vec<NodeName>,
}
