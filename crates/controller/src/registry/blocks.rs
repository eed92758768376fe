//! Affinity blocks: which node has which, and how far each one is.
//!
//! A block begins as a claim, becomes an object, is seen back on the watch, is listed in its owner's
//! NodeSubnet, is asked back, is let go by the agent, is taken off the list, and ends with its object.
//!
//! # Guarantees
//! - A block is *provisional* until its object came back on the watch and nothing that overlaps it
//!   stood before it. Only then does it count as its owner's; a provisional block is never listed.
//! - Of two that overlap the one that a NodeSubnet lists stays, else the one that was created first;
//!   the other one's object is deleted.
//! - What a node has been listed stays claimed until its agent has said that it let go of it, and the
//!   list without it has been written; or until the node's UID is gone, the quarantine is over and no
//!   pod has an address in it. An object that somebody deletes or edits meanwhile is restored.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::seen::Text;
use cadastre_core::Cidr;

mod entry;
mod listed;
mod objects;
mod owners;
#[cfg(test)]
mod tests;

pub use entry::Entry;
pub(crate) use listed::machine_in;
pub(crate) use objects::sound;

/// All blocks of the leader.
#[derive(Debug, Default)]
pub struct Blocks {
    entries: BTreeMap<Cidr, Entry>,
    by_owner: BTreeMap<Text, BTreeSet<Cidr>>,
    /// Nodes by name and UID that have any
    owners: BTreeSet<(Text, Text)>,
    /// Provisional ones whose objects the watch has shown
    to_judge: BTreeSet<Cidr>,
}

impl Blocks {
    /// The block of exactly that range.
    pub fn get(&self, cidr: &Cidr) -> Option<&Entry> {
        self.entries.get(cidr)
    }

    /// The same, to change what is done about it. The owner is changed by [`crate::registry::Registry`] alone.
    pub fn get_mut(&mut self, cidr: &Cidr) -> Option<&mut Entry> {
        self.entries.get_mut(cidr)
    }

    /// All blocks by address.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The blocks of a node's UID, by address.
    pub fn of<'a>(&'a self, uid: &str) -> impl Iterator<Item = &'a Entry> + use<'a> {
        let cidrs = self.by_owner.get(uid).into_iter().flatten();
        cidrs.filter_map(|cidr| self.entries.get(cidr))
    }

    /// Whether the UID has any.
    pub fn has(&self, uid: &str) -> bool {
        self.by_owner.contains_key(uid)
    }

    fn insert(&mut self, entry: Entry) {
        let (name, uid) = (entry.owner.name.clone(), entry.owner.uid.clone());
        self.owners.insert((name, uid.clone()));
        self.by_owner.entry(uid).or_default().insert(entry.cidr);
        self.entries.insert(entry.cidr, entry);
    }

    fn remove(&mut self, cidr: &Cidr) -> Option<Entry> {
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

    /// The UIDs under a node's name that have any.
    fn uids<'a>(&'a self, name: &'a Text) -> impl Iterator<Item = &'a Text> {
        self.owners
            .range((name.clone(), "".into())..)
            .take_while(move |(n, _)| n == name)
            .map(|(_, uid)| uid)
    }
}

/// What something means to other loops.
#[derive(Debug, Default)]
pub struct Noted {
    /// Blocks whose object wants something done
    pub blocks: Vec<Cidr>,
    /// Names of nodes whose list of blocks may have changed, or that may lack one now
    pub nodes: Vec<Text>,
    /// Pools in which space may have come free
    pub freed: bool,
    /// Names of NodeSubnets to look at, some of which may not name who had a range any more
    pub subnets: Vec<Text>,
}
