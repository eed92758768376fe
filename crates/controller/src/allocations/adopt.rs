//! Adoption: a node gets back blocks that its agent uses although the API server has lost them. The API server loses
//! blocks when it is restored from a backup.
//!
//! An agent reports every block with addresses in use, even if its NodeSubnet no longer lists the block. If no node
//! holds the range, the reporting node gets the block back: the controller creates its object, and the NodeSubnet lists
//! it again. If another node holds the range, or the pool would not allocate the block to the node now, the block waits
//! for adoption until that changes. Meanwhile no part of the block is allocated to another node, and the condition
//! `Accepted` of the NodeSubnet reports the block.
//!
//! If two agents report the same block, one of the reports is outdated, and it is unknown which. So neither node gets
//! the block until the other node's agent stops reporting it. For the same reason no block is adopted during the agent
//! grace, the time after a gap in which agents report. Only the list of NodeSubnets at the end of the grace contains
//! the reports of all agents. Blocks that a deleted node used are quarantined as if the node's NodeSubnet had listed
//! them.
//!
//! # Caveats
//! By reporting a range as a block, an agent can keep it from other nodes, for at most as many ranges as a node may
//! have blocks. A block is adopted only if the pool could also have allocated it to the node. So the block must lie in
//! a pool that selects the node, and must be no larger than the pool's blocks. The node must stay within
//! `maxBlocksPerNode`. After a gap (a time without a leader), the leader ignores this limit, because a node may have
//! got another block in place of a lost block that it still uses. The lost block must not go to another node.

use std::collections::BTreeMap;

use super::blocks::machine_in;
use crate::Now;
use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{AgentReport, BlockReport, Node};
use crate::pools::PoolState;
use cadastre_api::{AllocatedBlock, AllocationMode, MOST_BLOCKS, object_uid};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Blocks that agents use but that cannot be adopted now. For example, another node holds part of the block, or the
/// pool would not allocate the block to the node now. No part of these blocks is allocated to another node. The key is
/// the name of the node whose agent uses the blocks.
#[derive(Clone, Debug, Default)]
pub struct UnadoptedBlocks(BTreeMap<NodeName, Vec<Cidr>>);

impl UnadoptedBlocks {
    /// Creates the table with a single block of one node.
    #[cfg(test)]
    pub(crate) fn of(node: &str, block: Cidr) -> Self {
        UnadoptedBlocks([(node.into(), vec![block])].into())
    }

    /// Returns an address that lies both in the range and in one of these blocks. Returns `None` if there is no such
    /// address.
    pub(crate) fn any_in(&self, range: &Cidr) -> Option<Addr> {
        let mut blocks = self.0.values().flatten();
        let used = blocks.find(|it| it.overlaps(range))?;
        Some(used.first().max(range.first()))
    }

    /// Returns whether any of these blocks overlaps `block`. The report of the agent of `node` about
    /// exactly this block does not count.
    pub(crate) fn conflict_with(&self, block: &Cidr, node: &NodeName) -> bool {
        let mut all = self.0.iter();
        all.any(|(name, blocks)| {
            let is_same = |it: &Cidr| name == node && it == block;
            blocks.iter().any(|it| it.overlaps(block) && !is_same(it))
        })
    }

    /// Returns the names of the nodes that have blocks waiting for adoption.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.0.keys().cloned().collect()
    }

    /// Removes and returns the blocks of a node. The caller does this when the node is gone, or before it reads the
    /// report of the node's agent again.
    pub fn remove(&mut self, node: &NodeName) -> Vec<Cidr> {
        self.0.remove(node).unwrap_or_default()
    }
}

impl AllocationState {
    /// Adopts those blocks that a node's agent uses and that no node holds. Returns the adopted blocks, and whether any
    /// block of the node stopped waiting for adoption. Such a block may become free for other nodes.
    pub fn adopt_of_node(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        now: Now,
    ) -> (Vec<Cidr>, bool) {
        let before = self.unadopted.remove(name);
        let adopted = self.adopt_unheld(name, cache, now);
        let waiting = self.unadopted.0.get(name).map_or(&[][..], Vec::as_slice);
        let ended = before.iter().any(|block| !waiting.contains(block));
        (adopted, ended)
    }

    fn adopt_unheld(&mut self, name: &NodeName, cache: &ClusterCache, now: Now) -> Vec<Cidr> {
        let Some(node) = cache.nodes.get(name).cloned() else {
            return Vec::new();
        };
        let Some(report) = report_of(&node, cache) else {
            return Vec::new();
        };
        let (mut adopted, mut waiting) = (Vec::new(), Vec::new());
        let mut waits = false;
        for block in &report.blocks {
            let cidr = block.cidr;
            let entry = self.blocks.get(&cidr);
            let has_it = entry.is_some_and(|it| it.is_at(&node.uid));
            let object = object_uid(&block.uid).0;
            let is_same_object = entry.is_some_and(|it| it.uid.as_deref() == Some(object));
            let ignored = Mutation::ForgottenBlockNotAdopted.is_on();
            if !block.is_in_use() || has_it || ignored {
                continue;
            }
            let is_held = self.is_held_by_node(&cidr);
            let is_held = is_held && !Mutation::HeldBlockAdopted.is_on();
            let is_contested = self.unadopted.conflict_with(&cidr, name);
            let must_wait = is_held || is_contested || self.in_agent_grace;
            match self.pool_for(block, &node, report, waiting.len()) {
                Some(pool) if !must_wait => {
                    let listed = listed_block(block, pool);
                    self.restore_listed(name, &node.uid, &listed, true, cache, now);
                    adopted.push(cidr);
                }
                // The block may be adoptable later: when a range becomes free, when all agents have reported, or when
                // the pool changes.
                _ => {
                    waits = true;
                    let is_of_pool = self.source_of(&cidr).is_some();
                    if waiting.len() < MOST_BLOCKS && (is_of_pool || is_same_object) {
                        waiting.push(cidr);
                    }
                }
            }
        }
        if waits {
            self.unadopted.0.insert(name.clone(), waiting);
        }
        adopted
    }

    /// Records those blocks that the agent of a deleted node used and that no node holds, so that the caller can
    /// quarantine them.
    pub(crate) fn keep_for_quarantine(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        cache: &ClusterCache,
        now: Now,
    ) {
        let report = cache.subnets.get(name).and_then(|it| it.report.as_deref());
        let report = report.filter(|it| it.node_uid == *uid);
        let blocks = report.into_iter().flat_map(|it| &it.blocks);
        for block in blocks.filter(|it| it.is_in_use()) {
            if let Some(pool) = self.source_of(&block.cidr) {
                let listed = listed_block(block, pool);
                self.restore_listed(name, uid, &listed, false, cache, now);
            }
        }
    }

    /// Quarantines blocks of nodes that were deleted while there was no leader, if the nodes' agents reported addresses
    /// in use in these blocks.
    pub(crate) fn quarantine_reported(&mut self, cache: &ClusterCache, now: Now) {
        for subnet in cache.subnets.iter() {
            let Some(report) = &subnet.report else {
                continue;
            };
            let (name, uid) = (&subnet.name, &report.node_uid);
            let lives = cache.nodes.get(name).is_some_and(|node| node.uid == *uid);
            if lives || uid.is_empty() {
                continue;
            }
            self.keep_for_quarantine(name, uid, cache, now);
            let machine = machine_in(cache, name, uid);
            self.quarantine_blocks(name, uid, &machine, now);
        }
    }

    /// If an agent uses the quarantined block and no pool could allocate the block today, returns an address of the
    /// block. Such a block stays in quarantine until the agent no longer uses it, because only the block's object keeps
    /// the range from other nodes.
    pub(crate) fn quarantined_in_use(&self, block: &Cidr) -> Option<Addr> {
        let is_of_pool = self.source_of(block).is_some();
        self.unadopted.any_in(block).filter(|_| !is_of_pool)
    }

    /// Returns the pool from which some node could have got the block. This is the pool that covers the block. Returns
    /// `None` if this pool does not allocate blocks, or if its blocks are smaller than `block`.
    fn source_of(&self, block: &Cidr) -> Option<&PoolState> {
        let pool = self.pools.of(block)?;
        let len = pool.space.block_len(block.family())?;
        (pool.allocation_mode == AllocationMode::Blocks && len <= block.len()).then_some(pool)
    }

    /// Returns the pool of a reported block if the pool could allocate the block to the node. `more` is the number of
    /// other blocks of the node that wait for adoption.
    fn pool_for(
        &self,
        block: &BlockReport,
        node: &Node,
        report: &AgentReport,
        more: usize,
    ) -> Option<&PoolState> {
        let pool = self.source_of(&block.cidr)?;
        let family = block.cidr.family();
        let of_pool = self.blocks.of(&node.uid);
        let of_pool = of_pool.filter(|it| it.pool == pool.name && it.cidr.family() == family);
        let of_pool = of_pool.filter(|it| !it.is_released(Some(report)));
        let most = pool.terms.most.filter(|_| !self.after_gap);
        let fits = pool.selects(node) && of_pool.count() + more < most.unwrap_or(MOST_BLOCKS);
        fits.then_some(pool)
    }
}

/// Returns a reported block in the form in which a NodeSubnet lists it.
fn listed_block(block: &BlockReport, pool: &PoolState) -> AllocatedBlock {
    AllocatedBlock {
        cidr: block.cidr.to_string(),
        uid: block.uid.to_string(),
        pool: pool.name.to_string(),
        claim: None,
        vmi_uid: None,
        standby: false,
        parent: None,
        recall: None,
        reserved: Vec::new(),
        on_request: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::{Pool, Subnet};
    use crate::fixtures::{
        NOW, block_report, cidr, cluster_of, node, pool, pool_with, rebuilt, subnet,
    };
    use cadastre_api::IPPoolSpec;
    use cadastre_daemon::watch::ObjectEvent;

    const BLOCK: &str = "10.0.0.16/28";

    /// Returns a NodeSubnet that lists `blocks`, and whose agent also reports addresses in use in the blocks `used`.
    fn using(name: &str, blocks: &[&str], used: &[&str]) -> Subnet {
        let mut subnet = subnet(name, blocks, 0);
        let report = subnet.report.as_mut().unwrap();
        let mut reported = report.blocks.to_vec();
        reported.extend(used.iter().map(|text| BlockReport {
            used: 1,
            ..block_report(text)
        }));
        reported.sort_by_key(|it| it.cidr);
        report.blocks = reported.into();
        subnet
    }

    fn cache(subnets: Vec<Subnet>) -> ClusterCache {
        cluster_of(vec![pool("p", "10.0.0.0/24")], subnets)
    }

    fn change_pool(cache: &mut ClusterCache, version: u64, change: impl FnOnce(&mut IPPoolSpec)) {
        cache.pools.change(ObjectEvent::Applied(Pool {
            version,
            generation: i64::try_from(version).unwrap(),
            ..pool_with("p", "10.0.0.0/24", change)
        }));
    }

    /// Changes the cache so that the agent of the node no longer reports any block.
    fn stop_using(cache: &mut ClusterCache, name: &str) {
        cache.subnets.change(ObjectEvent::Applied(Subnet {
            version: 2,
            ..using(name, &[], &[])
        }));
    }

    fn adopted(allocations: &mut AllocationState, cache: &ClusterCache, name: &str) -> Vec<String> {
        let adopted = allocations.adopt_of_node(&name.into(), cache, NOW).0;
        adopted.iter().map(ToString::to_string).collect()
    }

    fn waits(allocations: &AllocationState, name: &str) -> bool {
        allocations.unadopted.0.contains_key(name)
    }

    #[test]
    fn a_block_that_a_node_uses_and_nobody_holds_is_adopted() {
        let used = ["10.0.0.32/28", "10.0.0.64/27", "10.9.0.0/28"];
        let cache = cache(vec![using("n1", &[BLOCK], &used)]);
        let mut allocations = rebuilt(&cache);
        // Two blocks are not adopted, because one is larger than the pool's blocks and the other lies outside all
        // pools.
        assert_eq!(adopted(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        let listed = allocations.listed_blocks(&"n1".into(), None);
        let listed: Vec<&str> = listed.iter().map(|it| it.cidr.as_str()).collect();
        assert_eq!(listed, [BLOCK, "10.0.0.32/28"]);
        let again = adopted(&mut allocations, &cache, "n1");
        assert!(again.is_empty(), "adopted already");
    }

    #[test]
    fn an_adopted_block_is_listed_with_the_number_that_its_agent_reports() {
        let mut cache = cache(vec![using("n1", &[], &[BLOCK])]);
        let mut subnet = Subnet::clone(cache.subnets.get("n1").unwrap());
        let report = subnet.report.as_mut().unwrap();
        report.blocks[0].uid = "lost+1".into();
        subnet.version += 1;
        cache.subnets.change(ObjectEvent::Applied(subnet));
        let mut allocations = rebuilt(&cache);
        assert_eq!(adopted(&mut allocations, &cache, "n1"), [BLOCK]);
        let listed = allocations.listed_blocks(&"n1".into(), None);
        assert_eq!(
            listed[0].uid, "lost+1",
            "its release would not be recognised"
        );
    }

    #[test]
    fn a_block_that_another_node_holds_waits_until_that_ends() {
        let cache = cache(vec![using("n1", &[BLOCK], &[]), using("n2", &[], &[BLOCK])]);
        let mut allocations = rebuilt(&cache);
        assert!(adopted(&mut allocations, &cache, "n2").is_empty());
        assert!(waits(&allocations, "n2"));
        allocations.drop_block(&cidr(BLOCK));
        assert_eq!(adopted(&mut allocations, &cache, "n2"), [BLOCK]);
        assert!(!waits(&allocations, "n2"));
    }

    #[test]
    fn a_block_that_two_agents_use_is_adopted_once_one_of_them_stops() {
        let mut cache = cache(vec![using("n1", &[], &[BLOCK]), using("n2", &[], &[BLOCK])]);
        let mut allocations = rebuilt(&cache);
        for in_agent_grace in [true, false] {
            allocations.in_agent_grace = in_agent_grace;
            for name in ["n1", "n2"] {
                assert!(adopted(&mut allocations, &cache, name).is_empty());
            }
        }
        stop_using(&mut cache, "n1");
        let ended = allocations.adopt_of_node(&"n1".into(), &cache, NOW);
        assert_eq!(ended, (Vec::new(), true));
        assert_eq!(adopted(&mut allocations, &cache, "n2"), [BLOCK]);
    }

    #[test]
    fn a_block_that_only_the_agent_of_a_deleted_node_reports_is_quarantined() {
        let cache = cache(vec![using("n1", &[], &[BLOCK])]);
        let mut allocations = rebuilt(&cache);
        allocations.in_agent_grace = true;
        assert!(adopted(&mut allocations, &cache, "n1").is_empty());
        let gone = node("n1");
        allocations.keep_for_quarantine(&gone.name, &gone.uid, &cache, NOW);
        let quarantined = allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert_eq!(quarantined, [cidr(BLOCK)]);
        let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
        assert!(entry.owner.quarantined);
    }

    #[test]
    fn a_reported_block_is_quarantined_if_its_node_was_deleted_while_nobody_led() {
        let mut cache = cache(vec![using("n1", &[], &[BLOCK])]);
        cache.nodes.change(ObjectEvent::Deleted(node("n1")));
        let mut allocations = rebuilt(&cache);
        allocations.quarantine_reported(&cache, NOW);
        let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
        assert!(entry.owner.quarantined && entry.quarantined_until.is_some());
    }

    #[test]
    fn no_part_of_a_block_that_an_agent_uses_goes_to_others() {
        // Node n1 holds half of the block that n2 uses, so n2 cannot get the block back. The other half is free.
        let n1 = using("n1", &["10.0.0.16/29"], &[]);
        let cache = cache(vec![n1, using("n2", &[], &[BLOCK])]);
        let mut allocations = rebuilt(&cache);
        assert!(adopted(&mut allocations, &cache, "n2").is_empty());
        let used = |text: &str| allocations.unadopted.any_in(&cidr(text)).is_some();
        assert!(used("10.0.0.24/29") && used("10.0.0.0/24") && !used("10.0.0.32/28"));
        let conflicts = |text: &str, node: &str| {
            let (block, node) = (cidr(text), node.into());
            allocations.unadopted.conflict_with(&block, &node)
        };
        assert!(conflicts(BLOCK, "n1") && conflicts("10.0.0.24/29", "n2"));
        assert!(!conflicts(BLOCK, "n2"), "its own");
    }

    #[test]
    fn a_quarantined_block_that_no_pool_could_allocate_stays_while_an_agent_uses_it() {
        let mut cache = cache(vec![using("n1", &[BLOCK], &[]), using("n2", &[], &[BLOCK])]);
        change_pool(&mut cache, 2, |spec| {
            spec.ipv4.as_mut().unwrap().block_size = Some(29);
        });
        let mut allocations = rebuilt(&cache);
        let gone = node("n1");
        allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert!(adopted(&mut allocations, &cache, "n2").is_empty());
        let block = cidr(BLOCK);
        assert_eq!(allocations.quarantined_in_use(&block), Some(block.first()));
        stop_using(&mut cache, "n2");
        assert!(adopted(&mut allocations, &cache, "n2").is_empty());
        assert_eq!(allocations.quarantined_in_use(&block), None);
    }

    #[test]
    fn the_limit_of_a_node_leaves_out_released_blocks_and_ends_with_a_gap() {
        for (released, after_gap, adopts) in [
            (false, false, false),
            (false, true, true),
            (true, false, true),
        ] {
            let mut subnet = using("n1", &[BLOCK], &["10.0.0.32/28"]);
            subnet.report.as_mut().unwrap().blocks[0].released = released;
            let mut cache = cache(vec![subnet]);
            change_pool(&mut cache, 2, |spec| spec.max_blocks_per_node = Some(1));
            let mut allocations = rebuilt(&cache);
            allocations.after_gap = after_gap;
            let adopted = adopted(&mut allocations, &cache, "n1");
            assert_eq!(adopted == ["10.0.0.32/28"], adopts, "{adopted:?}");
            assert_eq!(waits(&allocations, "n1"), !adopts);
        }
    }

    #[test]
    fn a_block_that_its_pool_would_not_allocate_is_adopted_once_the_pool_would() {
        let mut cache = cache(vec![using("n1", &[], &["10.0.0.32/28"])]);
        change_pool(&mut cache, 2, |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
        });
        let mut allocations = rebuilt(&cache);
        assert!(adopted(&mut allocations, &cache, "n1").is_empty());
        assert!(waits(&allocations, "n1"));
        change_pool(&mut cache, 3, |_| {});
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        assert_eq!(adopted(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        assert!(!waits(&allocations, "n1"));
    }

    #[test]
    fn released_and_unused_blocks_are_not_adopted() {
        let mut subnet = using("n1", &[], &[BLOCK, "10.0.0.32/28"]);
        let report = subnet.report.as_mut().unwrap();
        report.blocks[0].released = true;
        report.blocks[1].used = 0;
        let cache = cache(vec![subnet]);
        let mut allocations = rebuilt(&cache);
        assert!(adopted(&mut allocations, &cache, "n1").is_empty());
    }
}
