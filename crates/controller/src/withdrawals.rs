//! Withdrawals: which ranges the controller withdraws from a node, and which withdrawn ranges it returns to the node.
//! The NodeSubnet of the node lists both.
//!
//! A range is withdrawn for one of three reasons: a user requests the range, the range is the address of a claim, or
//! another node borrows the range. For a claim or another node, the range is handed over in three versions of the
//! NodeSubnet:
//! 1. The controller lists the range in `spec.withdraw`.
//! 2. The agent reports the range as withdrawn.
//! 3. The controller lists the range in `spec.claimed`, with the UID of the claim, or in `spec.lent`, with the UID of
//!    the block that the other node is to get.
//!
//! After step 3 the address of the claim may become a block of any node, and the block of the borrower may be
//! confirmed. The write of step 3 is based on a version that contains the results of steps 1 and 2. This write gives
//! the NodeSubnet a new version, so that every write that is based on an older version fails, whichever leader has sent
//! it. Without step 3, a write that was decided before the claim or the block was known could still return the range to
//! the node.
//!
//! The decision follows from the requests, the claims, the borrowed blocks, the present NodeSubnet and what the agent
//! reports as withdrawn. So the decision is the same after a change of leaders, and after a restore of the API server.
//! There is one exception: a new leader does not know for which parts its predecessor has asked. It returns these parts
//! to their nodes.
//!
//! # Guarantees
//! - A range is withdrawn only if it lies inside one of the node's blocks and is smaller than the block. A complete
//!   block is drained instead.
//! - A range that the agent has withdrawn and that nobody wants any more is listed as returned until the agent no
//!   longer reports it as withdrawn. Until then the range is not withdrawn again, because the report might be older
//!   than the return. The range also stays listed if somebody uses an address of it, because the user may be a pod of
//!   the node itself.
//! - A range is not returned while a block, a pod, or a report of an agent shows that an address of it may be in use.
//!   No range is returned during the agent grace.

use std::collections::BTreeSet;

use crate::Context;
use crate::allocations::AllocationState;
use crate::allocations::lending::Loan;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::names::NodeName;
use crate::cluster::objects::{Node, Subnet};
use crate::handover::{is_claimed, is_listed_as_lent, is_ready_to_lend, is_withdrawn, lists};
use cadastre_api::{AllocatedBlock, ClaimedAddress, LentRange, MOST_WITHDRAWALS, NodeSubnetSpec};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// The ranges that a NodeSubnet names in `spec.withdraw`, `spec.claimed`, `spec.lent` and `spec.returned`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Withdrawals {
    pub withdraw: Vec<String>,
    pub claimed: Vec<ClaimedAddress>,
    pub lent: Vec<LentRange>,
    pub returned: Vec<String>,
}

impl Withdrawals {
    /// Returns the withdrawals that the NodeSubnet of a node with these blocks should list. The argument `is` has the
    /// present NodeSubnet, whose annotations contain the requests of users.
    pub(crate) fn of(
        node: &Node,
        is: Option<&Subnet>,
        blocks: &[AllocatedBlock],
        cache: &ClusterCache,
        allocations: &AllocationState,
    ) -> Self {
        let plain = blocks.iter().filter(|block| block.claim.is_none());
        let plain: Vec<Cidr> = plain
            .filter_map(|block| Cidr::parse_strict(&block.cidr).ok())
            .collect();
        let spec = is.and_then(|is| is.spec.as_ref().ok());
        let report = report_of(node, cache);
        let withdrawn = report.map_or(&[][..], |report| &report.withdrawn);
        let is_returned = |range: &Cidr| {
            let is_listed = spec.is_some_and(|spec| lists(&spec.returned, range));
            is_listed && withdrawn.contains(range) && !Mutation::ReturnTakenBack.is_on()
        };
        let mut wanted = requested(is, &plain);
        let mut claims = Vec::new();
        let mut lent: Vec<Loan> = Vec::new();
        for block in &plain {
            claims.extend(allocations.claims.inside(block));
            lent.extend(allocations.lent_inside(block));
        }
        // A user's request for a range that overlaps a borrowed part is ignored while another node has the part.
        wanted.retain(|range| !lent.iter().any(|it| it.part.overlaps(range)));
        wanted.extend(claims.iter().map(|(address, ..)| *address));
        wanted.extend(lent.iter().map(|it| it.part));
        wanted.retain(|range| !is_returned(range));
        let wanted: BTreeSet<Cidr> = wanted.into_iter().take(MOST_WITHDRAWALS).collect();
        let claimed = claims.into_iter().filter(|(address, claim, uid)| {
            let is_known = wanted.contains(address);
            let is_handed_over = is_claimed(node, address, uid, cache)
                || allocations.claims.is_stored(claim) && is_withdrawn(node, address, cache);
            is_known && is_handed_over
        });
        let claimed = claimed.map(|(address, claim, uid)| ClaimedAddress {
            address: address.first().to_string(),
            claim: claim.to_string(),
            claim_uid: uid.to_string(),
        });
        let claimed = claimed.collect();
        let lent = lent.into_iter().filter_map(|it| {
            let block = it.block?;
            let uid = block.uid.as_ref()?;
            let is_handed_over = block.confirmed
                || is_listed_as_lent(node, &it.part, uid, cache)
                || is_ready_to_lend(node, &it.part, cache);
            (wanted.contains(&it.part) && is_handed_over).then(|| LentRange {
                cidr: it.part.to_string(),
                node: it.borrower.to_string(),
                block_uid: uid.to_string(),
            })
        });
        // A range that is listed as returned stays listed, because the agent may already assign addresses of it again.
        let is_returnable = |range: &&Cidr| {
            let is_free = || may_return(range, &wanted, cache, allocations);
            let stays = is_returned(range) && !Mutation::ReturnEndsEarly.is_on();
            !wanted.contains(*range) && (stays || is_free())
        };
        let returned = withdrawn.iter().filter(is_returnable);
        Self {
            claimed,
            lent: lent.collect(),
            returned: returned.map(ToString::to_string).collect(),
            withdraw: wanted.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Returns whether a node's agent has withdrawn ranges that its NodeSubnet lists neither in `withdraw` nor in
/// `returned`. No reason to withdraw these ranges is left, but they cannot be returned to the node yet, because
/// something may still use them.
pub(crate) fn holds_back(spec: &NodeSubnetSpec, withdrawn: &[Cidr]) -> bool {
    let is_listed = |range| lists(&spec.withdraw, range) || lists(&spec.returned, range);
    withdrawn.iter().any(|range| !is_listed(range))
}

/// Returns whether a user has requested to withdraw the address from the node, so that something other than a pod can
/// use it.
pub(crate) fn is_taken_out(node: &NodeName, address: &Cidr, cx: &Context) -> bool {
    let subnet = cx.cache.subnets.get(node);
    let mut ranges = subnet.into_iter().flat_map(|it| &it.requests.withdraw);
    ranges.any(|range| range.contains(address))
}

/// Returns whether nobody else uses a withdrawn range, so that it can be returned to its node. `wanted` are the ranges
/// that stay withdrawn.
fn may_return(
    range: &Cidr,
    wanted: &BTreeSet<Cidr>,
    cache: &ClusterCache,
    allocations: &AllocationState,
) -> bool {
    let mut holdings = allocations.ledger.overlapping(range).map(|(_, it)| it.cidr);
    let is_held = holdings.any(|it| range.contains(&it) && !wanted.contains(&it));
    let is_used = is_held
        || allocations.unadopted.any_in(range).is_some()
        || cache.pods.any_in(range).is_some();
    let is_lent = allocations
        .blocks
        .get(range)
        .is_some_and(|it| it.parent.is_some());
    let is_used = is_used && !(is_lent && Mutation::LentReturnedInUse.is_on());
    !allocations.in_agent_grace && (!is_used || Mutation::ReturnedInUse.is_on())
}

/// Returns the ranges that users have requested to withdraw from the node. A request counts only if its range is a part
/// of a block.
fn requested(is: Option<&Subnet>, blocks: &[Cidr]) -> BTreeSet<Cidr> {
    let is_part = |range: &&Cidr| {
        let is_inside = |block: &Cidr| block.contains(range) && block != *range;
        blocks.iter().any(is_inside)
    };
    let requested = is.into_iter().flat_map(|is| &is.requests.withdraw);
    let mut wanted: BTreeSet<Cidr> = BTreeSet::new();
    // A CIDR sorts before the CIDRs inside it, so the outermost of several nested requests comes first.
    for range in requested.filter(is_part).take(MOST_WITHDRAWALS) {
        let is_nested = wanted.last().is_some_and(|last| last.contains(range));
        if !is_nested {
            wanted.insert(*range);
        }
    }
    wanted
}

#[cfg(test)]
mod tests;
