//! The fixed ranges that a pool assigns to a node (`spec.assignments`).
//!
//! # Guarantees
//! - A node to which a pool assigns ranges gets exactly these ranges or waits. An event reports the obstacle.
//! - Nobody else gets an address of these ranges, because the pool's `space` keeps them for the node.

use super::{PodCidrDecision, PodCidrs, WaitReason, address_in_use, barred, write};
use crate::allocations::AllocationState;
use crate::cluster::names::PoolName;
use crate::cluster::objects::Node;
use crate::context::Context;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Holding, HoldingState, Obstacle};

/// What keeps a node from its assigned ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AssignmentObstacle {
    /// The assignment cannot be used, for example because its ranges are not in the pool
    Unusable,
    /// An address of the ranges is allocated to a live node or to a claim
    Held,
    /// The ranges belonged to a deleted node, and are in quarantine
    Quarantined,
    /// A pod or a node uses an address of the ranges
    InUse,
}

impl PodCidrs {
    /// Allocates the ranges that a pool assigns to the node, or decides that the node waits for them. Returns `None` if
    /// no pool assigns ranges to the node.
    pub(super) fn allocate_assigned(
        &mut self,
        node: &Node,
        cx: &mut Context,
    ) -> Option<PodCidrDecision> {
        let (cache, allocations) = (cx.cache, &mut *cx.allocations);
        let pool = allocations.pools.assigning(node)?;
        if !pool.is_serving() {
            return Some(barred(&[pool]));
        }
        let name = pool.name.clone();
        let assigned = pool.assignments.of(&node.name)?.clone();
        if let Some(problem) = assigned.problem {
            let note = format!("pool \"{name}\": its assignment cannot be used: {problem}");
            return Some(waits(name, AssignmentObstacle::Unusable, note));
        }
        let holder = allocations.holder(&node.name, &node.uid);
        let in_use = address_in_use(cache, &allocations.unadopted);
        let obstacle = match allocations.ledger.take(holder, &assigned.cidrs, in_use) {
            Ok(()) => return Some(write(assigned.cidrs.into_iter(), allocations, cache)),
            Err(_) if Mutation::OtherRangesThanAssigned.is_on() => return None,
            Err(obstacle) => obstacle,
        };
        let ranges: Vec<String> = assigned.cidrs.iter().map(Cidr::to_string).collect();
        let (kind, why) = explain(obstacle, allocations);
        let note = format!(
            "pool \"{name}\" assigns {} to it, and gives it nothing else: {why}",
            ranges.join(" and ")
        );
        if kind == AssignmentObstacle::InUse {
            // No watch event announces that the address is no longer used, so the node is queued for a later check.
            let at = cx.now.next_check();
            self.queue.add_at(node.name.clone(), at);
        }
        Some(waits(name, kind, note))
    }
}

fn waits(pool: PoolName, obstacle: AssignmentObstacle, note: String) -> PodCidrDecision {
    let pools = vec![pool];
    PodCidrDecision::Wait(WaitReason::Assigned { pools, obstacle }, note)
}

/// Returns the kind of an obstacle, and a text for users that explains it and says what to do.
fn explain(obstacle: Obstacle, allocations: &AllocationState) -> (AssignmentObstacle, String) {
    let Holding {
        holder,
        cidr,
        state,
    } = match obstacle {
        Obstacle::Held(holding) => holding,
        Obstacle::InUse(addr) => {
            let text = format!(
                "{addr} is in use: the node waits until nobody uses it (kubectl cadastre show ip {addr})"
            );
            return (AssignmentObstacle::InUse, text);
        }
    };
    let Some((node, _)) = allocations.node_of(holder) else {
        let text = format!("a claim has {cidr}: delete the claim, or assign another range");
        return (AssignmentObstacle::Held, text);
    };
    if state == HoldingState::Quarantined {
        let text = format!(
            "{cidr} was a range of the deleted node \"{node}\", and is in quarantine: the node gets its range once spec.quarantineSeconds are over and no pod uses an address of it"
        );
        return (AssignmentObstacle::Quarantined, text);
    }
    let text = format!(
        "node \"{node}\" has {cidr}: drain and delete the Node \"{node}\" and restart its kubelet, or assign another range"
    );
    (AssignmentObstacle::Held, text)
}
