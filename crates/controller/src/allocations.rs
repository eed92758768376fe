//! The leader's ledger records which node has which range, and which ranges of deleted nodes are in quarantine.
//!
//! The leader builds the ledger from the cache when its term begins and drops the ledger when the term ends. In
//! between, [`AllocationState::sync`] records every change of a Node, and [`AllocationState::quarantine`] records every
//! deletion of a Node.
//!
//! # Guarantees
//! - A podCIDR leaves the ledger in two ways only. `sync` removes a podCIDR if the node provably has other podCIDRs.
//!   `release` removes a podCIDR when its quarantine is over and no NodeSubnet records the quarantine any more.
//! - If two nodes have the same range, the ledger has one record for each of them. So releasing one record never frees
//!   the other node's addresses.

pub mod adopt;
pub mod blocks;
pub mod claims;
pub mod foreign;
pub mod holders;
pub mod lending;
pub mod open_routes;
pub mod pod_proof;
mod quarantined;

use std::collections::{BTreeMap, BTreeSet};

use super::Now;
use super::failing_calls::FailingCalls;
use super::intents::IntentBook;
use super::pools::PoolStates;
use crate::allocations::adopt::UnadoptedBlocks;
use crate::allocations::blocks::BlockTable;
use crate::allocations::claims::ClaimTable;
use crate::allocations::foreign::AllTooWide;
use crate::allocations::holders::{HolderIds, HolderUse};
use crate::allocations::lending::LendingTable;
use crate::allocations::open_routes::OpenRoutes;
use crate::allocations::pod_proof::PodProof;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Node, PodUid, Subnet};
use cadastre_api::AllocatedRange;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, Holder, HoldingId, HoldingState, RangeLedger};

pub(crate) use quarantined::QuarantineKey;
pub use quarantined::QuarantinedRanges;
pub(crate) use quarantined::whole_seconds;
use quarantined::{left_of, machine};

/// What [`AllocationState::sync`] found when it compared a Node's podCIDRs with the ledger.
#[derive(Debug, Default)]
pub struct SyncOutcome {
    /// podCIDRs of the Node that are new in the ledger, because this leader did not allocate them.
    pub foreign: Vec<Cidr>,
    /// Whether the Node has a podCIDR that the ledger had recorded as in flight, indeterminate or quarantined.
    pub confirmed: bool,
    /// Whether a range became free, because the node has got other podCIDRs.
    pub freed: bool,
    /// Allocated ranges of other nodes that overlap this node's podCIDRs. Each entry has the other node's name, its
    /// UID, and the range.
    pub overlaps: Vec<(NodeName, ObjectUid, Cidr)>,
}

/// The ledger of ranges, and the state on which decisions about ranges depend.
#[derive(Clone, Debug, Default)]
pub struct AllocationState {
    /// Which range each node and claim has, including quarantined ranges
    pub ledger: RangeLedger,
    /// What each pool may allocate now, and to which nodes
    pub pools: PoolStates,
    /// podCIDRs in quarantine. The key is the name and UID of the deleted Node
    pub quarantined: BTreeMap<QuarantineKey, QuarantinedRanges>,
    /// The blocks of all nodes, and the blocks in quarantine
    pub blocks: BlockTable,
    /// The addresses of each IPClaim, including addresses that its status does not contain yet
    pub claims: ClaimTable,
    /// Parts of blocks that the controller has asked nodes to lend
    pub lending: LendingTable,
    /// The leak candidates of each Node, by the Node's UID. The Node's NodeSubnet lists them, so that the agent checks
    /// them
    pub leak_candidates: BTreeMap<ObjectUid, BTreeSet<(Addr, PodUid)>>,
    /// Blocks that agents use although the API server has lost them, and that cannot be adopted yet
    pub unadopted: UnadoptedBlocks,
    /// Whether the agent grace still runs: the time after a gap in which agents report blocks that the API server has
    /// lost. During that time no block is allocated
    pub in_agent_grace: bool,
    /// Whether a gap preceded this term: a time without a leader, perhaps with a restore of the API server
    pub after_gap: bool,
    /// Failed calls, each with the end of its back-off
    pub refusals: FailingCalls,
    /// The revision of etcd that the newest consistent list of pods has shown
    pub(crate) pod_proof: PodProof,
    /// Ranges in writes of NodeRoutes and FRRConfigurations whose outcome is not known yet
    pub(crate) open_routes: OpenRoutes,
    /// podCIDR writes that may be in flight. The Lease must name each write before the write is sent
    pub(super) intents: IntentBook,
    pub(super) holders: HolderIds,
    /// podCIDRs so wide that they do not count against pools (see [`foreign`])
    pub(super) too_wide: AllTooWide,
    /// Pairs of holdings of different nodes that overlapped when the second holding of the pair was recorded
    conflicts: BTreeSet<(HoldingId, HoldingId)>,
}

impl AllocationState {
    /// Builds the ledger from the cache: podCIDRs of Nodes, quarantined ranges that NodeSubnets record, blocks, and
    /// addresses of claims. Also returns each node whose podCIDRs overlap other nodes' ranges.
    /// [`SyncOutcome::overlaps`] contains these ranges.
    pub fn rebuild(
        cache: &ClusterCache,
        flag_services: &[Cidr],
        now: Now,
    ) -> (Self, Vec<(NodeName, SyncOutcome)>) {
        let mut allocations = AllocationState::default();
        let mut overlapping = Vec::new();
        allocations.pools.evaluate(cache, flag_services, now.mono);
        for node in cache.nodes.iter() {
            let synced = allocations.sync(node, cache.subnets.get(&node.name).map(AsRef::as_ref));
            if !synced.overlaps.is_empty() {
                overlapping.push((node.name.clone(), synced));
            }
        }
        for subnet in cache.subnets.iter() {
            allocations.restore_subnet(subnet, cache, now);
        }
        for node in cache.nodes.iter() {
            allocations.end_superseded_quarantine(node);
        }
        allocations.rebuild_blocks(cache, now);
        // If the statuses of two claims contain the same address, the one that a node has keeps it, then one that may be
        // about to be used, then the older one.
        let mut claims: Vec<_> = cache.claims.iter().collect();
        claims.sort_by_key(|claim| {
            let is_at_no_node = claim.status.node.is_none();
            (
                is_at_no_node,
                !claim.has_finalizer(),
                claim.created,
                claim.uid.clone(),
            )
        });
        for claim in claims {
            allocations.claim_seen(claim);
        }
        (allocations, overlapping)
    }

    /// Returns the holder number under which the ledger records the podCIDRs of the node with the UID `uid`. Assigns a
    /// number to a node that has none.
    pub fn holder(&mut self, name: &NodeName, uid: &ObjectUid) -> Holder {
        self.holders.intern(HolderUse::PodCidrs, name, uid)
    }

    /// Returns the podCIDRs that the ledger records for the node with this UID.
    pub(crate) fn holdings_of(&self, uid: &ObjectUid) -> Vec<(HoldingId, Cidr, HoldingState)> {
        let Some(holder) = self.holders.get(HolderUse::PodCidrs, uid) else {
            return Vec::new();
        };
        self.ledger
            .of(holder)
            .map(|(id, holding)| (id, holding.cidr, holding.state))
            .collect()
    }

    /// Returns whether the outcome of any write of podCIDRs is unknown.
    pub(crate) fn has_indeterminate(&self) -> bool {
        self.indeterminate() > 0
    }

    /// Returns how many ranges count as allocated although it is unknown whether their write succeeded.
    pub fn indeterminate(&self) -> usize {
        self.holders
            .all()
            .flat_map(|holder| self.ledger.of(holder))
            .filter(|(_, c)| c.state == HoldingState::Indeterminate)
            .count()
    }

    /// Returns how many pairs of allocated ranges of different nodes overlap.
    pub fn overlaps(&mut self) -> usize {
        let AllocationState {
            ledger, conflicts, ..
        } = self;
        let is_allocated = |id: &HoldingId| {
            let holding = ledger.get(*id);
            holding.is_some_and(|it| it.state == HoldingState::Allocated)
        };
        conflicts.retain(|(a, b)| is_allocated(a) && is_allocated(b));
        conflicts.len()
    }

    /// Returns the name and UID of the node to which a holder number belongs, or `None` for the number of all claims.
    pub fn node_of(&self, holder: Holder) -> Option<&(NodeName, ObjectUid)> {
        self.holders.node_of(holder)
    }

    /// Records the podCIDRs of a live node. podCIDRs are immutable once set. So if the node has podCIDRs, the ledger
    /// releases all other podCIDRs that it records for the node, because their writes can no longer succeed. `listed`
    /// is the NodeSubnet of the node's name.
    pub fn sync(&mut self, node: &Node, listed: Option<&Subnet>) -> SyncOutcome {
        let mut synced = SyncOutcome::default();
        // The node's ranges are in quarantine if an earlier read did not find the Node. But now the watch has delivered
        // the Node, so the quarantine ends.
        let key = (node.name.clone(), node.uid.clone());
        let revived = self.quarantined.remove(&key).is_some();
        if node.is_empty() {
            for (id, _, _) in self.holdings_of(&node.uid).into_iter().filter(|_| revived) {
                self.ledger.set_state(id, HoldingState::Indeterminate);
                if Mutation::RevivedNodeLosesHolding.is_on() {
                    self.ledger.release(id);
                }
            }
            return synced;
        }
        let holder = self.holder(&node.name, &node.uid);
        let mut missing: Vec<Cidr> = node.pod_cidrs.to_vec();
        for (id, cidr, state) in self.holdings_of(&node.uid) {
            if let Some(at) = missing.iter().position(|m| *m == cidr) {
                missing.swap_remove(at);
                synced.confirmed |= state != HoldingState::Allocated;
                self.ledger.set_state(id, HoldingState::Allocated);
            } else if !Mutation::ImpossibleHoldingKept.is_on() {
                self.ledger.release(id);
                synced.freed = true;
            }
        }
        let counts = |cidr: &Cidr| self.counts(cidr, node, listed);
        let too_wide = missing.extract_if(.., |it| !counts(it)).collect();
        self.note_too_wide(node, too_wide);
        for cidr in &missing {
            self.ledger.record(holder, *cidr, HoldingState::Allocated);
        }
        if synced.confirmed || !missing.is_empty() {
            synced.overlaps = self.conflicts_of(holder);
        }
        synced.foreign = missing;
        self.end_superseded_quarantine(node);
        synced
    }

    /// Returns whether the address lies in a podCIDR of the node, or in a block of which it is owner or standby.
    pub(crate) fn is_in_range_of(&self, node: &Node, addr: Addr) -> bool {
        let blocks = self.blocks.of(&node.uid);
        let blocks = blocks.chain(self.blocks.on_standby(&node.uid));
        let blocks = blocks.map(|entry| &entry.cidr);
        let mut ranges = blocks.chain(self.pod_cidrs(node));
        ranges.any(|range| range.contains_addr(addr))
    }

    /// Returns the ranges in the form in which a NodeSubnet lists them, each with the pool against which it counts.
    pub(crate) fn allocated_ranges(&self, ranges: &[Cidr]) -> Vec<AllocatedRange> {
        let listed = |cidr: &Cidr| AllocatedRange {
            cidr: cidr.to_string(),
            pool: self.pools.of(cidr).map(|pool| pool.name.to_string()),
            withheld: false,
        };
        ranges.iter().map(listed).collect()
    }

    /// Records and returns the allocated holdings of other nodes that overlap holdings of `holder`.
    fn conflicts_of(&mut self, holder: Holder) -> Vec<(NodeName, ObjectUid, Cidr)> {
        let mut found = Vec::new();
        for (id, own) in self.ledger.of(holder) {
            for (other, holding) in self.ledger.overlapping(&own.cidr) {
                let is_allocated = holding.state == HoldingState::Allocated;
                let unreported = Mutation::OverlapsNotReported.is_on();
                let is_skipped = holding.holder == holder || self.is_of_claims(holding.holder);
                if is_skipped || !is_allocated || unreported {
                    continue;
                }
                self.conflicts.insert((id.min(other), id.max(other)));
                if let Some((name, uid)) = self.holders.node_of(holding.holder) {
                    found.push((name.clone(), uid.clone(), holding.cidr));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{NOW, cidr, node_with};

    #[test]
    fn a_holding_is_released_if_the_node_has_another_range() {
        let mut allocations = AllocationState::default();
        let has = node_with("n1", &["10.0.1.0/24"]);
        let holder = allocations.holder(&has.name, &has.uid);
        let wanted = cidr("10.0.0.0/24");
        allocations
            .ledger
            .record(holder, wanted, HoldingState::Indeterminate);
        assert!(allocations.sync(&has, None).freed);
        assert!(allocations.ledger.overlapping(&wanted).next().is_none());
        assert_eq!(allocations.holdings_of(&has.uid).len(), 1);
    }

    #[test]
    fn a_node_that_was_mistaken_for_deleted_keeps_the_range_it_may_get() {
        let empty = node_with("n1", &[]);
        let mut allocations = AllocationState::default();
        let holder = allocations.holder(&empty.name, &empty.uid);
        let wanted = cidr("10.0.0.0/24");
        allocations
            .ledger
            .record(holder, wanted, HoldingState::InFlight);
        assert!(allocations.quarantine(&empty, NOW));
        allocations.sync(&empty, None);
        let holdings = allocations.holdings_of(&empty.uid);
        let states: Vec<HoldingState> = holdings.iter().map(|(_, _, state)| *state).collect();
        assert_eq!(states, [HoldingState::Indeterminate]);
        assert!(allocations.quarantined.is_empty());
    }

    #[test]
    fn two_nodes_with_common_addresses_are_a_pair() {
        let mut allocations = AllocationState::default();
        allocations.sync(&node_with("n1", &["10.0.0.0/24"]), None);
        let other = node_with("n2", &["10.0.0.128/25"]);
        let overlaps = allocations.sync(&other, None).overlaps;
        let first = ("n1".into(), "n1".into(), cidr("10.0.0.0/24"));
        assert_eq!(overlaps, [first]);
        assert_eq!(allocations.overlaps(), 1);
    }
}
