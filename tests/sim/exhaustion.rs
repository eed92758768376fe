//! At the end of a run, exactly those nodes are marked as exhausted that have no free address for another pod.
//!
//! The check uses only what is certain. A node must be marked if its agent reports no free address and no pool has room
//! for it. A node must not be marked if a pool has room for it, or if it has more free addresses than pods without one.

use cadastre_api::{AllocatedBlock, AllocationMode, Recall};
use cadastre_controller::cluster::objects::{AgentReport, Node, NodeTaint};
use cadastre_core::{Cidr, Family};

use super::checks::{Verdict, wrong};
use super::host::key;
use super::pool_model::PoolModel;
use super::run::Sim;

impl Sim {
    pub fn check_marks(&self) -> Verdict {
        let serving = self.serving();
        for node in self.api.nodes.live.values().filter(|node| !node.deleting) {
            let pools: Vec<&PoolModel> = serving
                .iter()
                .filter(|it| it.is_automatic && it.matches(&node.labels))
                .filter(|it| !it.is_passed_over(&serving, &node.labels))
                .collect();
            let is_marked = node.exhausted.is_some();
            let is_tainted = node.taints.iter().any(NodeTaint::is_of_exhaustion);
            let wants_taint = is_marked && pools.iter().any(|it| it.taints_nodes);
            let found = match self.is_exhausted(node, &pools) {
                _ if is_tainted != wants_taint => format!("tainted: {is_tainted}"),
                Some(true) if !is_marked => "not marked as exhausted".to_owned(),
                Some(false) if is_marked => "marked as exhausted".to_owned(),
                _ => continue,
            };
            let names: Vec<&str> = pools.iter().map(|it| &*it.name).collect();
            let text = format!("{} ({}) of {names:?} is {found}", node.name, node.uid);
            return wrong("exhaustion", text, [node.name.clone()]);
        }
        Ok(())
    }

    /// Whether the node is exhausted; `None` if it is not certain.
    fn is_exhausted(&self, node: &Node, pools: &[&PoolModel]) -> Option<bool> {
        let report = self.report_of(node);
        if pools.is_empty() || pools.iter().any(|pool| self.can_grow(node, pool)) {
            return Some(false);
        }
        let free = pools.iter().map(|pool| self.free_on(node, pool, report));
        let free = free.collect::<Option<Vec<u64>>>()?;
        let free = free.into_iter().fold(0, u64::saturating_add);
        let waits = self.api.pods_on(&node.name).filter(|pod| {
            let is_by_default = pod.claim.is_none() && pod.mirror_of.is_none();
            !pod.finished && pod.addresses.is_empty() && is_by_default
        });
        let waits = waits.count() as u64;
        match free {
            0 => Some(true),
            _ if free > waits => Some(false),
            _ => None,
        }
    }

    /// Whether the pool has a range of each family that the node may get.
    fn can_grow(&self, node: &Node, pool: &PoolModel) -> bool {
        let has_room = || {
            let free = self.free_of(pool, node, &[]);
            free.iter().all(|free| !free.is_empty())
        };
        let may_get = match pool.allocation_mode {
            AllocationMode::NodeCIDR => {
                node.is_empty() && self.may_allocate(pool, node, &self.serving())
            }
            AllocationMode::Blocks => pool.each_family().all(|family| {
                let of_family = |it: &&AllocatedBlock| key(it).0.family() == family;
                let own = self.plain_blocks(node, pool);
                own.filter(of_family).count() < pool.max_blocks
            }),
        };
        may_get && has_room()
    }

    /// Returns the number of free addresses of the pool on the node, in the family that has fewer of them. Returns
    /// `None` if the agent has not reported a block.
    fn free_on(&self, node: &Node, pool: &PoolModel, report: Option<&AgentReport>) -> Option<u64> {
        if pool.allocation_mode == AllocationMode::NodeCIDR {
            // No podCIDR of the simulation is small enough that pods use all of it.
            return Some(if node.pod_cidrs.is_empty() {
                0
            } else {
                u64::MAX
            });
        }
        let of = |family: Family| -> Option<u64> {
            let own = self.plain_blocks(node, pool).map(key);
            let own = own.filter(|(cidr, _): &(Cidr, _)| cidr.family() == family);
            let free = own.map(|(cidr, uid)| Some(report?.of_block(&cidr, &uid)?.free));
            free.sum()
        };
        let families = pool.each_family().map(of);
        families.min_by_key(|it| it.unwrap_or(0))?
    }

    fn plain_blocks<'a>(
        &'a self,
        node: &Node,
        pool: &'a PoolModel,
    ) -> impl Iterator<Item = &'a AllocatedBlock> {
        let own = self
            .listed_to(node)
            .iter()
            .filter(|it| *it.pool == *pool.name);
        own.filter(|it| it.claim.is_none() && it.recall != Some(Recall::Drain))
    }
}
