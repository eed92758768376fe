//! Holders in the ledger are small consecutive numbers. One holder stands for all claims. Every other holder stands for
//! the UID of a node.
//!
//! A node has one holder for its podCIDRs and another holder for its blocks.

use std::collections::BTreeMap;

use crate::cluster::names::{NodeName, ObjectUid};
use cadastre_core::Holder;

/// Whether a holder number stands for the podCIDRs or the blocks of a node. A node has a separate number for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HolderUse {
    /// Ranges in `node.spec.podCIDRs`
    PodCidrs,
    /// Ranges of IPAMBlocks
    Blocks,
}

/// Maps the UID of a node to its holder numbers in the ledger, and a holder number to the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct HolderIds {
    by_uid: BTreeMap<(HolderUse, ObjectUid), Holder>,
    nodes: Vec<Option<(NodeName, ObjectUid)>>,
    free: Vec<Holder>,
    /// The holder of all claims, which is no node
    claims: Option<Holder>,
}

impl HolderIds {
    pub(crate) fn intern(
        &mut self,
        purpose: HolderUse,
        name: &NodeName,
        uid: &ObjectUid,
    ) -> Holder {
        if let Some(holder) = self.by_uid.get(&(purpose, uid.clone())) {
            return *holder;
        }
        let holder = self.number(Some((name.clone(), uid.clone())));
        self.by_uid.insert((purpose, uid.clone()), holder);
        holder
    }

    /// Returns the holder that all claims share.
    pub(crate) fn of_claims(&mut self) -> Holder {
        if let Some(holder) = self.claims {
            return holder;
        }
        let holder = self.number(None);
        self.claims = Some(holder);
        holder
    }

    pub(crate) fn is_of_claims(&self, holder: Holder) -> bool {
        self.claims == Some(holder)
    }

    /// Assigns an unused holder number to the node `who`, or to all claims if `who` is `None`.
    fn number(&mut self, who: Option<(NodeName, ObjectUid)>) -> Holder {
        if let Some(holder) = self.free.pop() {
            self.nodes[holder.0 as usize] = who;
            return holder;
        }
        self.nodes.push(who);
        Holder(u32::try_from(self.nodes.len() - 1).unwrap_or(u32::MAX))
    }

    pub(crate) fn get(&self, purpose: HolderUse, uid: &ObjectUid) -> Option<Holder> {
        self.by_uid.get(&(purpose, uid.clone())).copied()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Holder> + '_ {
        self.by_uid.values().copied()
    }

    pub(crate) fn node_of(&self, holder: Holder) -> Option<&(NodeName, ObjectUid)> {
        self.nodes.get(holder.0 as usize)?.as_ref()
    }

    /// Frees the holder number of the UID for reuse. The caller must have released all holdings of the holder before
    /// this call.
    pub(crate) fn drop_uid(&mut self, purpose: HolderUse, uid: &ObjectUid) {
        if let Some(holder) = self.by_uid.remove(&(purpose, uid.clone())) {
            self.nodes[holder.0 as usize] = None;
            self.free.push(holder);
        }
    }
}
