//! Adoption of blocks that a node uses although the API has lost them, because the API server was restored from a
//! backup.
//!
//! An agent reports every block with addresses in use, even if its NodeSubnet no longer lists the block. If no node
//! holds the range, the node gets the block back: its object is created and the NodeSubnet lists it again. If
//! another node holds the range, or the pool would not allocate the block to the node now, the block waits until something
//! becomes free. Meanwhile no part of the block is allocated to another node, and the condition `Accepted` of the
//! NodeSubnet reports the block.
//!
//! If two agents report the same block, one of the reports is outdated, and it is unknown which. So neither node gets
//! the block until the other agent stops reporting it. For the same reason nothing is adopted during the agent grace:
//! only the list at its end contains all reports. Blocks that a deleted node used are quarantined as if they had been
//! listed.
//!
//! # Caveats
//! An agent can report any range and so keep it from other nodes, but only as many blocks as a node may have. A block
//! is adopted only if demand could have given it to the node: it lies in a pool that selects the node, it is no larger
//! than the pool's blocks, and the node stays within its limit. After a gap, the leader ignores that limit: a node that
//! got another block in place of the lost one still uses the lost one, which must not go to another node.

use std::collections::BTreeMap;

use super::blocks::machine_in;
use crate::Now;
use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{AgentReport, BlockReport, Node};
use crate::pools::PoolState;
use cadastre_api::{AllocatedBlock, AllocationMode, MOST_BLOCKS};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Blocks that agents report in use but that cannot be adopted now, by node name. Either another node holds
/// part of the block, or the pool would not allocate it to the node now. No part of these blocks is allocated to
/// another node.
#[derive(Debug, Default)]
pub struct UnadoptedBlocks(BTreeMap<NodeName, Vec<Cidr>>);

impl UnadoptedBlocks {
    /// Returns an address of the range that lies in one of these blocks, if there is one.
    pub(crate) fn any_in(&self, range: &Cidr) -> Option<Addr> {
        let mut blocks = self.0.values().flatten();
        let used = blocks.find(|it| it.overlaps(range))?;
        Some(used.first().max(range.first()))
    }

    /// Returns whether any of these blocks overlaps `block`. Exactly the same block, reported by the agent of `node`,
    /// does not count.
    pub(crate) fn conflict_with(&self, block: &Cidr, node: &NodeName) -> bool {
        let mut all = self.0.iter();
        all.any(|(name, blocks)| {
            let is_it = |it: &Cidr| name == node && it == block;
            blocks.iter().any(|it| it.overlaps(block) && !is_it(it))
        })
    }

    /// Returns the names of the nodes whose agents report such blocks.
    pub fn nodes(&self) -> Vec<NodeName> {
        self.0.keys().cloned().collect()
    }

    /// Removes and returns the blocks of a node, because the node is gone or its report is about to be read again.
    pub fn remove(&mut self, node: &NodeName) -> Vec<Cidr> {
        self.0.remove(node).unwrap_or_default()
    }

    fn of(&self, node: &NodeName) -> &[Cidr] {
        self.0.get(node).map_or(&[], Vec::as_slice)
    }

    /// Returns whether the node's agent reports any such block.
    pub fn contains(&self, node: &NodeName) -> bool {
        self.0.contains_key(node)
    }

    /// Returns whether no agent reports such a block.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records the blocks that a node's agent reports. The caller bounds their number.
    fn insert(&mut self, node: &NodeName, blocks: Vec<Cidr>) {
        self.0.insert(node.clone(), blocks);
    }
}

impl AllocationState {
    /// Adopts the blocks that a node's agent uses and no node holds. Returns the adopted blocks. Also returns
    /// whether any block waits for adoption no longer, in which case other nodes may be able to get it.
    pub fn adopt_of_node(
        &mut self,
        name: &NodeName,
        cache: &ClusterCache,
        now: Now,
    ) -> (Vec<Cidr>, bool) {
        let before = self.unadopted.remove(name);
        let taken = self.adopt_unheld(name, cache, now);
        let still = |block: &Cidr| self.unadopted.of(name).contains(block);
        let ended = before.iter().any(|block| !still(block));
        (taken, ended)
    }

    fn adopt_unheld(&mut self, name: &NodeName, cache: &ClusterCache, now: Now) -> Vec<Cidr> {
        let Some(node) = cache.nodes.get(name).cloned() else {
            return Vec::new();
        };
        let Some(report) = report_of(&node, cache) else {
            return Vec::new();
        };
        let (mut taken, mut strays) = (Vec::new(), Vec::new());
        let mut is_stray = false;
        for word in &report.blocks {
            let known = self.blocks.get(&word.cidr);
            let is_theirs = known.is_some_and(|entry| entry.owner.uid == node.uid);
            let is_the_very = known.is_some_and(|entry| entry.uid.as_ref() == Some(&word.uid));
            let unheard = Mutation::ForgottenBlockNotAdopted.is_on();
            if !word.is_in_use() || is_theirs || unheard {
                continue;
            }
            let is_held = self.ledger.overlapping(&word.cidr).next().is_some();
            let is_held = is_held && !Mutation::HeldBlockAdopted.is_on();
            let is_used = self.unadopted.conflict_with(&word.cidr, name);
            let must_wait = is_held || is_used || self.in_agent_grace;
            let more = strays.len();
            match self.could_get(word, &node, report, more) {
                Some(held) if !must_wait => {
                    self.restore_listed(name, &node.uid, &held, true, cache, now);
                    taken.push(word.cidr);
                }
                // Adoption may be possible later: if something becomes free, all agents have reported, or the pool
                // changes.
                _ => {
                    is_stray = true;
                    let is_of_pool = self.source_of(&word.cidr).is_some();
                    if more < MOST_BLOCKS && (is_of_pool || is_the_very) {
                        strays.push(word.cidr);
                    }
                }
            }
        }
        if is_stray {
            self.unadopted.insert(name, strays);
        }
        taken
    }

    /// Records the blocks that the agent of a deleted node used and no node holds. The caller then quarantines
    /// them.
    pub(crate) fn keep_for_quarantine(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        cache: &ClusterCache,
        now: Now,
    ) {
        let report = cache.subnets.get(name).and_then(|it| it.report.as_deref());
        let report = report.filter(|it| it.node_uid == *uid);
        let words = report.into_iter().flat_map(|it| &it.blocks);
        for word in words.filter(|word| word.is_in_use()) {
            if let Some(pool) = self.source_of(&word.cidr) {
                let held = held(word, pool);
                self.restore_listed(name, uid, &held, false, cache, now);
            }
        }
    }

    /// Quarantines the blocks that agents reported in use on nodes that were deleted while there was no leader.
    pub(crate) fn keep_of_dead_for_rest(&mut self, cache: &ClusterCache, now: Now) {
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

    /// Returns an address of a quarantined block that an agent uses, if no pool could allocate the block today. Such a
    /// block must stay until the agent no longer uses it, because only the block's object keeps the range from other
    /// nodes.
    pub(crate) fn quarantined_in_use(&self, block: &Cidr) -> Option<Addr> {
        let is_given = self.source_of(block).is_some();
        self.unadopted.any_in(block).filter(|_| !is_given)
    }

    /// Returns the pool that could have allocated the block to some node: its blocks are at least as large.
    fn source_of(&self, block: &Cidr) -> Option<&PoolState> {
        let pool = self.pools.of(block)?;
        let len = pool.space.block_len(block.family())?;
        (pool.allocation_mode == AllocationMode::Blocks && len <= block.len()).then_some(pool)
    }

    /// Returns the block, in the form in which a NodeSubnet lists it, if the node could get it by demand. `more` is the
    /// number of blocks that the node is to get besides those that it has and this one.
    fn could_get(
        &self,
        word: &BlockReport,
        node: &Node,
        report: &AgentReport,
        more: usize,
    ) -> Option<AllocatedBlock> {
        let pool = self.source_of(&word.cidr)?;
        let family = word.cidr.family();
        let of_pool = self.blocks.of(&node.uid);
        let of_pool = of_pool.filter(|it| it.pool == pool.name && it.cidr.family() == family);
        let of_pool = of_pool.filter(|it| !it.is_released(Some(report)));
        let most = pool.terms.most.filter(|_| !self.after_gap);
        let fits = pool.selects(node) && of_pool.count() + more < most.unwrap_or(MOST_BLOCKS);
        fits.then(|| held(word, pool))
    }
}

/// Returns the block in the form in which a NodeSubnet lists it.
fn held(word: &BlockReport, pool: &PoolState) -> AllocatedBlock {
    AllocatedBlock {
        cidr: word.cidr.to_string(),
        uid: word.uid.to_string(),
        pool: pool.name.to_string(),
        recall: None,
        reserved: Vec::new(),
        on_request: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::Subnet;
    use crate::demand::tests::{NOW, list, node, objects, pool, subnet};
    use cadastre_api::IPPoolSpec;
    use cadastre_daemon::watch::ObjectEvent;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    /// Returns a NodeSubnet that lists `blocks`, while its agent also uses the blocks in `used`.
    fn using(name: &str, blocks: &[&str], used: &[&str]) -> Subnet {
        let mut subnet = subnet(name, blocks, 0);
        let report = subnet.report.as_mut().unwrap();
        let word = |text: &&str| BlockReport {
            cidr: cidr(text),
            uid: (*text).into(),
            used: 1,
            cooling: 0,
            free: 12,
            released: false,
        };
        let mut words = report.blocks.to_vec();
        words.extend(used.iter().map(word));
        words.sort_by_key(|it| it.cidr);
        report.blocks = words.into();
        subnet
    }

    fn cache(subnets: Vec<Subnet>) -> ClusterCache {
        let mut cache = ClusterCache::default();
        list(&mut cache.pools, vec![pool("p", "10.0.0.0/24")]);
        let names = subnets.iter().map(|it| node(&it.name));
        list(&mut cache.nodes, names.collect());
        let blocks = subnets.iter().flat_map(objects).collect();
        list(&mut cache.blocks, blocks);
        list(&mut cache.subnets, subnets);
        cache
    }

    fn change_pool(cache: &mut ClusterCache, version: u64, change: impl FnOnce(&mut IPPoolSpec)) {
        let mut one = pool("p", "10.0.0.0/24");
        (one.version, one.generation) = (version, i64::try_from(version).unwrap());
        change(one.spec.as_mut().unwrap());
        cache.pools.change(ObjectEvent::Applied(one));
    }

    fn taken(allocations: &mut AllocationState, cache: &ClusterCache, name: &str) -> Vec<String> {
        let taken = allocations.adopt_of_node(&name.into(), cache, NOW).0;
        taken.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_a_node_uses_and_nobody_has_is_its_own() {
        let used = ["10.0.0.32/28", "10.0.0.64/27", "10.9.0.0/28"];
        let cache = cache(vec![using("n1", &["10.0.0.16/28"], &used)]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        // Two blocks are not adopted: one is larger than the pool's blocks, the other lies outside all pools.
        assert_eq!(taken(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        let listed = allocations.listed_blocks(&"n1".into(), None);
        let listed: Vec<&str> = listed.iter().map(|it| it.cidr.as_str()).collect();
        assert_eq!(listed, ["10.0.0.16/28", "10.0.0.32/28"]);
        assert!(
            taken(&mut allocations, &cache, "n1").is_empty(),
            "known now"
        );
    }

    #[test]
    fn what_another_node_holds_waits_until_that_ends() {
        let block = "10.0.0.16/28";
        let cache = cache(vec![using("n1", &[block], &[]), using("n2", &[], &[block])]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        assert!(taken(&mut allocations, &cache, "n2").is_empty());
        assert!(allocations.unadopted.contains(&"n2".into()));
        allocations.drop_block(&cidr(block));
        assert_eq!(taken(&mut allocations, &cache, "n2"), [block]);
        assert!(allocations.unadopted.is_empty());
    }

    #[test]
    fn of_two_agents_that_use_the_same_neither_gets_it_before_one_says_otherwise() {
        let block = "10.0.0.16/28";
        let mut cache = cache(vec![using("n1", &[], &[block]), using("n2", &[], &[block])]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        allocations.in_agent_grace = true;
        for name in ["n1", "n2"] {
            assert!(
                taken(&mut allocations, &cache, name).is_empty(),
                "not all have spoken"
            );
        }
        allocations.in_agent_grace = false;
        for name in ["n1", "n2"] {
            assert!(
                taken(&mut allocations, &cache, name).is_empty(),
                "both use it"
            );
        }
        let mut idle = using("n1", &[], &[]);
        idle.version += 1;
        cache.subnets.change(ObjectEvent::Applied(idle));
        assert_eq!(
            allocations.adopt_of_node(&"n1".into(), &cache, NOW),
            (Vec::new(), true)
        );
        assert_eq!(taken(&mut allocations, &cache, "n2"), [block]);
    }

    #[test]
    fn what_only_the_agent_of_a_dead_node_spoke_of_rests() {
        let block = "10.0.0.16/28";
        let cache = cache(vec![using("n1", &[], &[block])]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        allocations.in_agent_grace = true;
        assert!(taken(&mut allocations, &cache, "n1").is_empty());
        let gone = node("n1");
        allocations.keep_for_quarantine(&gone.name, &gone.uid, &cache, NOW);
        let resting = allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert_eq!(resting, [cidr(block)]);
        assert!(
            allocations
                .blocks
                .get(&cidr(block))
                .unwrap()
                .owner
                .quarantined
        );
    }

    #[test]
    fn what_an_agent_spoke_of_rests_too_where_its_node_died_while_nobody_led() {
        let block = "10.0.0.16/28";
        let mut cache = cache(vec![using("n1", &[], &[block])]);
        cache.nodes.change(ObjectEvent::Deleted(node("n1")));
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        allocations.keep_of_dead_for_rest(&cache, NOW);
        let kept = allocations.blocks.get(&cidr(block)).unwrap();
        assert!(kept.owner.quarantined && kept.rests_until.is_some());
    }

    #[test]
    fn no_part_of_what_an_agent_uses_goes_to_others() {
        // Half of the block that n2 uses is held by n1, so n2 cannot get the block back. The other half is free.
        let n1 = using("n1", &["10.0.0.16/29"], &[]);
        let cache = cache(vec![n1, using("n2", &[], &["10.0.0.16/28"])]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        assert!(taken(&mut allocations, &cache, "n2").is_empty());
        let used = |text: &str| allocations.unadopted.any_in(&cidr(text)).is_some();
        assert!(used("10.0.0.24/29") && used("10.0.0.0/24") && !used("10.0.0.32/28"));
        let against = |text: &str, node: &str| {
            let (block, node) = (cidr(text), node.into());
            allocations.unadopted.conflict_with(&block, &node)
        };
        assert!(against("10.0.0.16/28", "n1") && against("10.0.0.24/29", "n2"));
        assert!(!against("10.0.0.16/28", "n2"), "its own");
    }

    #[test]
    fn a_resting_block_that_no_pool_could_give_today_rests_on_while_an_agent_uses_it() {
        let block = "10.0.0.16/28";
        let mut cache = cache(vec![using("n1", &[block], &[]), using("n2", &[], &[block])]);
        change_pool(&mut cache, 2, |spec| {
            spec.ipv4.as_mut().unwrap().block_size = Some(29);
        });
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let gone = node("n1");
        allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert!(taken(&mut allocations, &cache, "n2").is_empty());
        let block = cidr(block);
        assert_eq!(allocations.quarantined_in_use(&block), Some(block.first()));
        let mut idle = using("n2", &[], &[]);
        idle.version += 1;
        cache.subnets.change(ObjectEvent::Applied(idle));
        assert!(taken(&mut allocations, &cache, "n2").is_empty());
        assert_eq!(allocations.quarantined_in_use(&block), None);
    }

    #[test]
    fn the_limit_of_a_node_counts_what_it_keeps_and_not_after_a_gap() {
        let subnet = || using("n1", &["10.0.0.16/28"], &["10.0.0.32/28"]);
        let of_one_block = |subnet| {
            let mut cache = cache(vec![subnet]);
            change_pool(&mut cache, 2, |spec| spec.max_blocks_per_node = Some(1));
            let (allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
            (allocations, cache)
        };
        let (mut allocations, cache) = of_one_block(subnet());
        assert!(taken(&mut allocations, &cache, "n1").is_empty());
        assert!(
            allocations.unadopted.contains(&"n1".into()),
            "it may be, some day"
        );
        allocations.after_gap = true;
        assert_eq!(taken(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        let mut letting_go = subnet();
        letting_go.report.as_mut().unwrap().blocks[0].released = true;
        let (mut allocations, cache) = of_one_block(letting_go);
        assert_eq!(taken(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        assert!(allocations.unadopted.is_empty());
    }

    #[test]
    fn what_cannot_be_had_now_is_tried_again() {
        let mut cache = cache(vec![using("n1", &[], &["10.0.0.32/28"])]);
        change_pool(&mut cache, 2, |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
        });
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        assert!(taken(&mut allocations, &cache, "n1").is_empty());
        assert!(
            allocations.unadopted.contains(&"n1".into()),
            "it may be, some day"
        );
        change_pool(&mut cache, 3, |spec| {
            spec.allocation_mode = AllocationMode::Blocks;
        });
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        assert_eq!(taken(&mut allocations, &cache, "n1"), ["10.0.0.32/28"]);
        assert!(allocations.unadopted.is_empty());
    }

    #[test]
    fn what_is_let_go_or_unused_is_nobodys() {
        let mut subnet = using("n1", &[], &["10.0.0.16/28", "10.0.0.32/28"]);
        let report = subnet.report.as_mut().unwrap();
        report.blocks[0].released = true;
        report.blocks[1].used = 0;
        let cache = cache(vec![subnet]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        assert!(taken(&mut allocations, &cache, "n1").is_empty());
    }
}
