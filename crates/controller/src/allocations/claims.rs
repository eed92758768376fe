//! The part of the ledger about claims: it records which addresses each IPClaim has.
//!
//! A claim's addresses are holdings like those of nodes, so nothing else is allocated from them. When a pod uses the
//! claim, each address also becomes a block of the pod's node. This block is a second holding of the same range, and is
//! created, listed and released like every block. A block that is exactly the address of a claim belongs to the claim,
//! even if it was allocated for something else.
//!
//! # Guarantees
//! - A claim's holding leaves the ledger only when the claim's object is gone.
//! - No address is recorded for two claims.
//! - A node may assign an address of a claim only if the node has the address as a block. The claim's holding alone
//!   gives no node this right. So a wrong record of a claim can make a pod wait, but never gives an address to two
//!   nodes.

use std::collections::BTreeMap;

use super::AllocationState;
use super::blocks::BlockEntry;
use crate::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use crate::cluster::objects::Claim;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Holder, HoldingId, HoldingState};

/// All claims that have addresses, by claim name and by address.
#[derive(Clone, Debug, Default)]
pub struct ClaimTable {
    entries: BTreeMap<ClaimName, ClaimEntry>,
    by_address: BTreeMap<Cidr, ClaimName>,
}

/// The addresses of one claim, each with its holding in the ledger.
#[derive(Clone, Debug)]
pub(crate) struct ClaimEntry {
    pub uid: ObjectUid,
    pub pool: PoolName,
    /// The addresses as ranges of one address, IPv4 first
    pub addresses: Vec<(Cidr, HoldingId)>,
    /// Whether the API server has stored the addresses in the claim's status
    pub is_stored: bool,
    /// Addresses that the claim's status still has, and that `addresses` replace. They stay allocated until the API
    /// server has stored `addresses`
    pub replaced: Vec<(Cidr, HoldingId)>,
}

impl ClaimEntry {
    /// Returns the addresses as ranges of one address, IPv4 first.
    pub(crate) fn cidrs(&self) -> impl Iterator<Item = Cidr> + Clone + '_ {
        self.addresses.iter().map(|(cidr, _)| *cidr)
    }
}

impl ClaimTable {
    /// Returns the addresses of a claim. Returns `None` if the claim has no addresses.
    pub(crate) fn get(&self, name: &ClaimName) -> Option<&ClaimEntry> {
        self.entries.get(name)
    }

    /// Returns the claim that has exactly this address. Returns `None` for a range of several addresses.
    pub fn of(&self, range: &Cidr) -> Option<&ClaimName> {
        self.by_address.get(range)
    }

    /// Returns the addresses of claims that lie in a range, each with the name and the UID of the claim.
    pub(crate) fn inside(&self, range: &Cidr) -> Vec<(Cidr, &ClaimName, &ObjectUid)> {
        let hosts = Cidr::host(range.first())..=Cidr::host(range.last());
        let claims = self.by_address.range(hosts).filter_map(|(cidr, name)| {
            let entry = self.entries.get(name)?;
            Some((*cidr, name, &entry.uid))
        });
        claims.collect()
    }

    /// Returns whether the API server has stored the addresses of a claim.
    pub(crate) fn is_stored(&self, claim: &ClaimName) -> bool {
        self.entries.get(claim).is_some_and(|it| it.is_stored)
    }

    /// Returns how many claims have addresses of the pool.
    pub(crate) fn of_pool(&self, pool: &PoolName) -> usize {
        let entries = self.entries.values();
        entries.filter(|entry| entry.pool == *pool).count()
    }

    /// Returns the number of claims that have addresses. A claim counts even if the API server has not stored its
    /// addresses yet.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no claim has addresses. Addresses count even if the API server has not stored them yet.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl AllocationState {
    /// Returns whether `holder` is the holder number that all claims share.
    pub(crate) fn is_of_claims(&self, holder: Holder) -> bool {
        self.holders.is_of_claims(holder)
    }

    /// Returns whether any node, live or deleted, has a part of the range.
    pub(crate) fn is_held_by_node(&self, range: &Cidr) -> bool {
        let mut holdings = self.ledger.overlapping(range);
        holdings.any(|(_, holding)| !self.is_of_claims(holding.holder))
    }

    /// Returns the blocks of a node that are not addresses of claims.
    pub(crate) fn plain_blocks<'a>(
        &'a self,
        uid: &ObjectUid,
    ) -> impl Iterator<Item = &'a BlockEntry> + use<'a> {
        let own = self.blocks.of(uid);
        own.filter(|entry| self.claims.of(&entry.cidr).is_none())
    }

    /// Returns a range of a node that overlaps the claim's address. The block that is exactly this address does not
    /// count.
    pub(crate) fn conflict_with_claim(&self, address: &Cidr) -> Option<Cidr> {
        self.conflicts_with_claim(address).next()
    }

    fn conflicts_with_claim(&self, address: &Cidr) -> impl Iterator<Item = Cidr> {
        let others = self.ledger.overlapping(address).filter(|(_, holding)| {
            let is_own_block = holding.cidr == *address && self.blocks.get(address).is_some();
            !self.is_of_claims(holding.holder) && !is_own_block
        });
        others.map(|(_, holding)| holding.cidr)
    }

    /// Returns the block in which the address of a claim lies, if the node of the block can withdraw the address. The
    /// node can withdraw it if the node is live and no other range overlaps the address.
    pub(crate) fn block_around(&self, address: &Cidr) -> Option<&BlockEntry> {
        let mut others = self.conflicts_with_claim(address);
        let (Some(wide), None) = (others.next(), others.next()) else {
            return None;
        };
        let entry = self.blocks.get(&wide)?;
        (entry.is_held() && wide != *address).then_some(entry)
    }

    /// Returns whether any node, live or deleted, has a block that is an address of the claim.
    pub(crate) fn has_block_of(&self, claim: &ClaimName) -> bool {
        let mut cidrs = self
            .claims
            .get(claim)
            .into_iter()
            .flat_map(ClaimEntry::cidrs);
        cidrs.any(|cidr| self.blocks.get(&cidr).is_some())
    }

    /// Returns the nodes in whose blocks addresses of a claim lie.
    pub(crate) fn nodes_around(&self, claim: &ClaimName) -> Vec<NodeName> {
        let cidrs = self
            .claims
            .get(claim)
            .into_iter()
            .flat_map(|it| it.cidrs().chain(it.replaced.iter().map(|it| it.0)));
        let blocks = cidrs.filter_map(|cidr| self.block_around(&cidr));
        blocks.map(|entry| entry.owner.name.clone()).collect()
    }

    /// Returns whether `block` is the address of a claim inside the larger block `other`. The two may overlap, because
    /// the node of `other` hands the address over to the claim.
    pub(super) fn is_claim_inside(&self, block: &Cidr, other: &Cidr) -> bool {
        self.claims.of(block).is_some() && other != block && other.contains(block)
    }

    /// Records the addresses of a claim that has none in the ledger. The caller has already recorded a holding for each
    /// address.
    pub(crate) fn begin_claim(
        &mut self,
        claim: &Claim,
        pool: &PoolName,
        addresses: Vec<(Cidr, HoldingId)>,
        is_stored: bool,
    ) {
        for (cidr, holding) in &addresses {
            if Mutation::ClaimsNotInLedger.is_on() {
                self.ledger.release(*holding);
            }
            self.claims.by_address.insert(*cidr, claim.name.clone());
        }
        self.claims.entries.insert(
            claim.name.clone(),
            ClaimEntry {
                uid: claim.uid.clone(),
                pool: pool.clone(),
                addresses,
                is_stored,
                replaced: Vec::new(),
            },
        );
    }

    /// Records other addresses for a claim that has some. The caller has already recorded a holding for each of the
    /// new addresses. The old ones stay allocated until the API server has stored the new ones, because the claim's
    /// status has them until then.
    pub(crate) fn replace_claim(
        &mut self,
        claim: &Claim,
        pool: &PoolName,
        addresses: Vec<(Cidr, HoldingId)>,
    ) {
        if Mutation::ReplacedAddressesFreedEarly.is_on() {
            self.drop_claim(&claim.name);
        }
        let old = self.claims.entries.remove(&claim.name);
        self.begin_claim(claim, pool, addresses, false);
        if let (Some(old), Some(new)) = (old, self.claims.entries.get_mut(&claim.name)) {
            new.replaced = [old.addresses, old.replaced].concat();
        }
    }

    /// Records the addresses that a claim's status contains. Does nothing if the ledger already has other addresses of
    /// the claim, or if another claim has one of these addresses. The addresses in the status replace addresses that
    /// this leader chose but the API server has not stored yet, because an earlier leader wrote the status. Returns
    /// whether addresses have become free, because the status has the addresses that replace them.
    pub(crate) fn claim_seen(&mut self, claim: &Claim) -> bool {
        let stored: Vec<Cidr> = claim.addresses().map(Cidr::host).collect();
        if let Some(entry) = self.claims.entries.get_mut(&claim.name) {
            let is_same = entry.uid == claim.uid;
            if is_same && entry.cidrs().eq(stored.iter().copied()) {
                entry.is_stored = true;
                let replaced = std::mem::take(&mut entry.replaced);
                return self.free_addresses(&replaced);
            }
            let is_replaced = |cidr: &Cidr| entry.replaced.iter().any(|it| it.0 == *cidr);
            if is_same && (entry.is_stored || stored.iter().all(is_replaced)) {
                return false;
            }
            self.drop_claim(&claim.name);
        }
        let is_anothers = |cidr: &Cidr| self.claims.of(cidr).is_some();
        if stored.is_empty() || stored.iter().any(is_anothers) {
            return false;
        }
        let pool = claim
            .status
            .pool
            .clone()
            .or_else(|| Some(self.pools.of(&stored[0])?.name.clone()));
        let holder = self.holders.of_claims();
        let addresses = stored.into_iter().map(|cidr| {
            let holding = self.ledger.record(holder, cidr, HoldingState::Allocated);
            (cidr, holding)
        });
        let addresses = addresses.collect();
        self.begin_claim(claim, &pool.unwrap_or_default(), addresses, true);
        false
    }

    /// Removes the addresses of a claim whose object is gone. Returns whether the claim had any addresses.
    pub(crate) fn drop_claim(&mut self, name: &ClaimName) -> bool {
        let Some(entry) = self.claims.entries.remove(name) else {
            return false;
        };
        self.free_addresses(&[entry.addresses, entry.replaced].concat());
        true
    }

    fn free_addresses(&mut self, addresses: &[(Cidr, HoldingId)]) -> bool {
        for (cidr, holding) in addresses {
            self.claims.by_address.remove(cidr);
            self.ledger.release(*holding);
        }
        !addresses.is_empty()
    }
}
