//! Computes the spec that a NodeSubnet should have.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::MOST_BYTES_OF_POOLS;
use super::conditions::rejected_write;
use super::pace::AgentPace;
use crate::allocations::AllocationState;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::names::NodeName;
use crate::cluster::objects::{Node, Subnet};
use crate::pools::{PoolPhase, PoolState, min_addresses};
use crate::withdrawals::Withdrawals;
use cadastre_api::{
    AllocatedBlock, AllocationMode, AssignmentMode, MOST_POOLS, NodePool, NodeSubnetSpec,
    QuarantinedNode,
};
use cadastre_core::mutation::Mutation;

/// Returns the spec that the NodeSubnet should have, or `None` if the NodeSubnet should not exist. The argument `is`
/// has the present NodeSubnet.
pub(super) fn wanted(
    name: &NodeName,
    is: Option<&Subnet>,
    cache: &ClusterCache,
    allocations: &AllocationState,
    pace: AgentPace,
) -> Option<NodeSubnetSpec> {
    let quarantines = allocations.quarantined_of(name);
    let quarantines = quarantines.filter(|(_, it)| !it.released);
    let quarantined: Vec<QuarantinedNode> = quarantines
        .map(|((_, uid), it)| QuarantinedNode {
            node_uid: uid.to_string(),
            provider_id: it.machine.provider_id.as_deref().map(str::to_owned),
            machine_id: it.machine.machine_id.as_deref().map(str::to_owned),
            pod_cidrs: allocations.allocated_ranges(&it.ranges),
            until: Time(it.until_wall),
        })
        .collect();
    let Some(node) = cache.nodes.get(name) else {
        return (!quarantined.is_empty()).then(|| NodeSubnetSpec {
            quarantined,
            ..NodeSubnetSpec::default()
        });
    };
    let report = report_of(node, cache);
    let blocks = allocations.listed_blocks(&node.uid, report);
    let pod_cidrs = allocations.listed_pod_cidrs(node, is);
    let is_empty = pod_cidrs.is_empty() && quarantined.is_empty() && blocks.is_empty();
    if is_empty && !is_needed_while_empty(node, is, allocations) {
        return None;
    }
    let pools = pools(node, &blocks, is, allocations);
    let Withdrawals {
        withdraw,
        claimed,
        lent,
        returned,
    } = Withdrawals::of(node, is, &blocks, cache, allocations);
    Some(NodeSubnetSpec {
        node_uid: Some(node.uid.to_string()),
        provider_id: node.machine.provider_id.as_deref().map(str::to_owned),
        machine_id: node.machine.machine_id.as_deref().map(str::to_owned),
        pod_cidrs,
        blocks,
        status_interval_seconds: match pools.as_slice() {
            [] => 0,
            _ => pace.interval(),
        },
        // On a node without any pool, no agent of Cadastre runs, so nobody needs the ranges.
        pod_ranges: match pools.as_slice() {
            [] => Vec::new(),
            _ => allocations.pools.pod_ranges().to_vec(),
        },
        pools,
        leak_candidates: allocations.leak_candidates_of(&node.uid, report),
        withdraw,
        claimed,
        lent,
        returned,
        quarantined,
    })
}

/// Returns whether a live node needs a NodeSubnet that lists no range.
fn is_needed_while_empty(node: &Node, is: Option<&Subnet>, allocations: &AllocationState) -> bool {
    // A NodeSubnet is needed even if the pool allocates nothing now. The agent may have blocks of the pool, and an
    // earlier leader's creation of a block may still be in flight.
    let has_blocks = |pool: &&PoolState| {
        let is_valid = !matches!(pool.phase, PoolPhase::Invalid(_));
        is_valid && pool.allocation_mode == AllocationMode::Blocks
    };
    let mut block_pools = allocations.pools.iter().filter(has_blocks);
    let may_demand = |pool: &PoolState| pool.phase != PoolPhase::Starting && pool.selects(node);
    // The NodeSubnet of a live node is never deleted. A late write of an earlier leader can still add a block to its
    // list.
    let is_needed =
        is.is_some() || block_pools.any(|pool| allocations.in_agent_grace || may_demand(pool));
    // While the node's first blocks are being created, the NodeSubnet is not created yet, so that one write with the
    // blocks suffices. There are two exceptions. During the agent grace, the NodeSubnet is needed at once, because the
    // agent reports in it. If the API server rejects the blocks, it is needed at once, because one of its conditions
    // must report that.
    let waits_for_blocks = is.is_none()
        && !allocations.in_agent_grace
        && allocations.blocks.has(&node.uid)
        && rejected_write(node, allocations).is_none();
    is_needed && !waits_for_blocks && !Mutation::EmptySubnetDeleted.is_on()
}

/// Returns the pools that a NodeSubnet lists. The pools that allocate to the node come first, the best of them at the
/// head. They are followed by the pools that do not allocate to the node, but of which the node has ranges. If one
/// object has no room for all pools, the last pools of which the node has no ranges are left out.
fn pools(
    node: &Node,
    blocks: &[AllocatedBlock],
    is: Option<&Subnet>,
    allocations: &AllocationState,
) -> Vec<NodePool> {
    let mut pools: Vec<NodePool> = Vec::new();
    let mut add = |pool: &NodePool, retained| {
        if !pools.iter().any(|it| it.name == pool.name) {
            pools.push(NodePool {
                retained,
                min_addresses: min_addresses(pool, node),
                ..pool.clone()
            });
        }
    };
    for (pool, by_name) in allocations.pools.block_pools(node) {
        let mut entry = pool.node_view.clone();
        if by_name {
            entry.assignment = AssignmentMode::Manual;
        }
        add(&entry, false);
    }
    let mut with_ranges: BTreeSet<&str> = BTreeSet::new();
    let of_pod_cidrs = allocations.pod_cidrs(node);
    for pool in of_pod_cidrs.filter_map(|range| allocations.pools.of(range)) {
        with_ranges.insert(&pool.name);
        add(&pool.node_view, false);
    }
    for block in blocks {
        with_ranges.insert(&block.pool);
        let pool = allocations.pools.get(&*block.pool);
        let valid = pool.filter(|pool| !matches!(pool.phase, PoolPhase::Invalid(_)));
        // If the pool is gone or invalid, the settings in the present NodeSubnet stay valid for the node's blocks.
        let listed = || {
            let spec = is?.spec.as_ref().ok()?;
            spec.pools.iter().find(|it| it.name == block.pool)
        };
        if let Some(entry) = valid.map(|pool| &pool.node_view).or_else(listed) {
            add(entry, true);
        }
    }
    bound(&mut pools, &with_ranges);
    pools
}

/// Shortens the list to what one object may contain. Pools of which the node has ranges (`with_ranges`) are removed
/// last.
fn bound(pools: &mut Vec<NodePool>, with_ranges: &BTreeSet<&str>) {
    let has_ranges = |pool: &NodePool| with_ranges.contains(pool.name.as_str());
    let size = |pool: &NodePool| serde_json::to_vec(pool).map_or(0, |it| it.len());
    let staying = pools.iter().filter(|it| has_ranges(it));
    let (mut count, mut bytes) = staying.fold((0, 0), |(n, b), it| (n + 1, b + size(it)));
    let mut is_full = false;
    pools.retain(|pool| {
        if has_ranges(pool) {
            return true;
        }
        (count, bytes) = (count + 1, bytes + size(pool));
        is_full |= count > MOST_POOLS || bytes > MOST_BYTES_OF_POOLS;
        !is_full
    });
    pools.truncate(MOST_POOLS);
}
