//! Determines from one version of a NodeSubnet which ranges its node has handed over ([`crate::withdrawals`]).

use crate::cluster::cache::{ClusterCache, report_of, spec_for};
use crate::cluster::names::ObjectUid;
use crate::cluster::objects::Node;
use cadastre_api::{ClaimedAddress, LentRange};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// Returns whether `node` has handed an address of its block over to the claim with this UID. This is so if
/// `spec.claimed` lists the address for the claim and the address is withdrawn.
pub(crate) fn is_handed_over(
    node: &Node,
    address: &Cidr,
    claim: &ObjectUid,
    cache: &ClusterCache,
) -> bool {
    let is_claimed = is_claimed(node, address, claim, cache);
    let is_claimed = is_claimed || Mutation::ClaimedBeforeRecorded.is_on();
    is_claimed && is_withdrawn(node, address, cache)
}

/// Returns whether `node` has handed a part of its block over to the borrowed block with this UID. This is so if
/// `spec.lent` lists the part for the borrowed block and the part is withdrawn.
pub(crate) fn is_lent(node: &Node, part: &Cidr, block: &ObjectUid, cache: &ClusterCache) -> bool {
    let is_listed = is_listed_as_lent(node, part, block, cache);
    let is_listed = is_listed || Mutation::LentBeforeRecorded.is_on();
    is_listed && is_ready_to_lend(node, part, cache)
}

/// Returns whether a node has withdrawn a part of its block, so that the part can be lent.
pub(crate) fn is_ready_to_lend(node: &Node, part: &Cidr, cache: &ClusterCache) -> bool {
    is_withdrawn(node, part, cache) || Mutation::LentBeforeWithdrawn.is_on()
}

/// Returns whether the node's NodeSubnet lists the address in `spec.claimed`, for the claim with this UID.
pub(crate) fn is_claimed(
    node: &Node,
    address: &Cidr,
    claim: &ObjectUid,
    cache: &ClusterCache,
) -> bool {
    let address = address.first().to_string();
    let is_same = |it: &ClaimedAddress| it.address == address && it.claim_uid == **claim;
    let spec = spec_for(cache, &node.name, &node.uid);
    spec.is_some_and(|spec| spec.claimed.iter().any(is_same))
}

/// Returns whether the node's NodeSubnet lists the part in `spec.lent`, for the block with this UID.
pub(crate) fn is_listed_as_lent(
    node: &Node,
    part: &Cidr,
    block: &ObjectUid,
    cache: &ClusterCache,
) -> bool {
    let part = part.to_string();
    let is_same = |it: &LentRange| it.cidr == part && it.block_uid == **block;
    let spec = spec_for(cache, &node.name, &node.uid);
    spec.is_some_and(|spec| spec.lent.iter().any(is_same))
}

/// Returns whether the node's agent no longer assigns addresses of the range. One version of the NodeSubnet must list
/// the range in `spec.withdraw` and in `status.withdrawn`, but not in `spec.returned`.
pub(crate) fn is_withdrawn(node: &Node, range: &Cidr, cache: &ClusterCache) -> bool {
    let Some(spec) = spec_for(cache, &node.name, &node.uid) else {
        return false;
    };
    let is_asked = lists(&spec.withdraw, range) && !lists(&spec.returned, range);
    let report = report_of(node, cache);
    let is_answered = report.is_some_and(|report| report.withdrawn.contains(range));
    let is_answered = is_answered || Mutation::ClaimedBeforeWithdrawn.is_on();
    is_asked && is_answered
}

/// Returns whether one of the texts is the range in canonical form.
pub(crate) fn lists(texts: &[String], range: &Cidr) -> bool {
    !texts.is_empty() && texts.contains(&range.to_string())
}
