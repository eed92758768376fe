//! The part of the ledger about lending: parts of blocks that other nodes have borrowed, or are about to borrow.
//!
//! A borrowed block has an IPAMBlock of its own, like every block. Its entry names its *parent*: the lender's block
//! that contains it. The lender assigns no address of the part, because its NodeSubnet lists the part in
//! `spec.withdraw` for as long as the borrowed block exists. If the parent ends first, the borrowed block stays.
//!
//! Before the borrowed block exists, an `Ask` records that the controller has asked the lender for the part. The lender
//! may have withdrawn the part already. The asks are in no API object, so the next leader does not know them. If a
//! withdrawn part has not become a block by then, the next leader returns the part to the lender.
//!
//! # Guarantees
//! - A confirmed block lies inside another node's block only if that node has handed the range over, either to a claim
//!   or to the node that borrows the range.

use std::collections::BTreeMap;
use std::time::Duration;

use super::AllocationState;
use super::blocks::BlockEntry;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{Node, Parent};
use crate::handover::{is_lent, is_ready_to_lend};
use cadastre_api::node_allocation::never_assigned;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, IpRange};

/// A part of a block that the controller has asked the block's node to lend.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub pool: PoolName,
    /// The block that contains the part, with the name of the block's node
    pub parent: Parent,
    /// UID of the node that has the parent
    pub lender: ObjectUid,
    /// Name and UID of the node that borrows the part
    pub borrower: (NodeName, ObjectUid),
    /// How many addresses of the part the borrower can assign to pods
    pub addresses: u64,
    /// The monotonic time at which the lender was asked
    pub since: Duration,
}

/// A part of a block that another node has borrowed or is about to borrow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loan<'a> {
    pub part: Cidr,
    /// Name of the node that borrows the part
    pub borrower: &'a NodeName,
    /// The borrowed block; `None` while the lender has not withdrawn the part yet
    pub block: Option<&'a BlockEntry>,
}

/// Lending that is under way: the asks of this leader, and the borrowed blocks that no longer exist.
#[derive(Clone, Debug, Default)]
pub struct LendingTable {
    pub(crate) asks: BTreeMap<Cidr, Ask>,
    /// Borrowed blocks that the ledger has dropped, each with its lender. The demand loop empties this list
    pub(crate) given_back: Vec<(Cidr, NodeName)>,
}

impl AllocationState {
    /// Returns the parts of a block that other nodes have borrowed or are about to borrow.
    pub(crate) fn lent_inside<'a>(&'a self, block: &'a Cidr) -> impl Iterator<Item = Loan<'a>> {
        let asks = self.lending.asks.iter();
        let asks = asks.filter(move |(_, ask)| ask.parent.cidr == *block);
        let asks = asks.map(|(part, ask)| Loan {
            part: *part,
            borrower: &ask.borrower.0,
            block: None,
        });
        let borrowed = self.borrowed_from(block).filter(|it| {
            let is_early = it.recall.is_some() && Mutation::LentReturnedInUse.is_on();
            // A provisional block that is about to be deleted does not count, because no NodeSubnet ever listed it.
            let is_void = it.is_leaving() && !it.confirmed;
            !is_early && !is_void
        });
        asks.chain(borrowed.map(|it| Loan {
            part: it.cidr,
            borrower: &it.owner.name,
            block: Some(it),
        }))
    }

    /// Returns whether `block` is a borrowed block whose parent is `of`.
    pub fn is_part_of(&self, block: &Cidr, of: &Cidr) -> bool {
        let parent = self.blocks.get(block).and_then(|it| it.parent.as_ref());
        parent.is_some_and(|parent| parent.cidr == *of && block != of && of.contains(block))
    }

    /// Returns the blocks that other nodes have borrowed from a block.
    pub fn borrowed_from<'a>(&'a self, block: &'a Cidr) -> impl Iterator<Item = &'a BlockEntry> {
        let inside = self.blocks.inside(block);
        inside.filter(move |it| self.is_part_of(&it.cidr, block))
    }

    /// Returns the parent of a borrowed block, if any node, live or deleted, still has the parent.
    pub fn parent_of(&self, entry: &BlockEntry) -> Option<&BlockEntry> {
        let parent = self.blocks.get(&entry.parent.as_ref()?.cidr)?;
        self.is_part_of(&entry.cidr, &parent.cidr).then_some(parent)
    }

    /// Returns whether `block` may be confirmed although it overlaps the block `other`. This is allowed if one of them
    /// is a part of the other, and the node of the wider block has handed the part over.
    pub(super) fn is_handed_over(&self, block: &Cidr, other: &Cidr, cache: &ClusterCache) -> bool {
        // If `other` is a borrowed part of `block`, the part was handed over before it was confirmed.
        if self.is_part_of(other, block) {
            return true;
        }
        let uid = self.blocks.get(block).and_then(|it| it.uid.as_ref());
        let lender = self.lender_of(block, other, cache).zip(uid);
        lender.is_some_and(|(node, uid)| is_lent(node, block, uid, cache))
    }

    /// Returns whether a provisional block still waits for a write of the lender's NodeSubnet. The lender has withdrawn
    /// the range of the block, but its NodeSubnet does not list the block as lent yet.
    pub(super) fn is_being_lent(&self, block: &Cidr, cache: &ClusterCache) -> bool {
        let parent = self.blocks.get(block).and_then(|it| it.parent.as_ref());
        let lender = parent.and_then(|it| self.lender_of(block, &it.cidr, cache));
        lender.is_some_and(|node| is_ready_to_lend(node, block, cache))
            && !self.is_handed_over(block, &parent.map_or(*block, |it| it.cidr), cache)
    }

    /// Returns the lender of `block`: the node that has `other`, the wider block from which `block` is borrowed.
    /// Returns `None` if `block` is not borrowed from `other`, or if the lender is not live.
    fn lender_of<'a>(
        &self,
        block: &Cidr,
        other: &Cidr,
        cache: &'a ClusterCache,
    ) -> Option<&'a Node> {
        let parent = self
            .blocks
            .get(other)
            .filter(|_| self.is_part_of(block, other))?;
        let owner = Some(&parent.owner).filter(|it| !it.quarantined)?;
        let node = cache.nodes.get(&owner.name)?;
        (node.uid == owner.uid).then_some(node.as_ref())
    }

    /// Returns whether `addr`, an address of `block`, lies in a smaller block inside `block`. The smaller block is
    /// either the address of a claim, or a part that another node has borrowed.
    pub(crate) fn is_in_nested_block(&self, addr: Addr, block: &Cidr) -> bool {
        let host = Cidr::host(addr);
        let is_of_claim = host != *block && self.blocks.get(&host).is_some();
        is_of_claim
            || self
                .borrowed_from(block)
                .any(|it| it.cidr.contains_addr(addr))
    }

    /// Returns the addresses of a borrowed block that no node assigns, because they are the network address, the
    /// gateway or the broadcast address of the block's parent.
    pub(super) fn never_of_parent(&self, entry: &BlockEntry) -> Vec<IpRange> {
        let pool = self.pools.get(&entry.pool);
        let parent = entry.parent.as_ref().zip(pool);
        parent.map_or_else(Vec::new, |(parent, pool)| {
            let never = never_assigned(parent.cidr, false, &pool.node_view);
            let inside = never.iter().filter_map(|span| span.within(&entry.cidr));
            inside.collect()
        })
    }
}
