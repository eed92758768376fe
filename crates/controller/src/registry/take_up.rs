//! Blocks that a node uses and the API has lost: those of a state that was put back to an older one.
//!
//! An agent tells of every block with addresses in use, also of one that its NodeSubnet lists no more. If
//! nobody has a claim to such a range, it is the node's from then on, as if it had been listed: its object is
//! made anew, and it is listed again. If somebody has, or the node could not have it now, it waits until something
//! comes free, and nobody else gets any of it; the condition `Accepted` of the NodeSubnet says so meanwhile.
//!
//! Of two agents that use the same block one is behind, and nobody knows which: neither gets it until the other
//! says otherwise. So while agents have their say after a gap nothing is taken up; the list that ends that time shows
//! all that was said. What a node used that dies before rests as if it had been listed.
//!
//! # Caveats
//! Any agent could say so of any range, and keep it from others: as many blocks as a node may have at most.
//! Only those are taken up that its node could get by asking: of pools
//! that serve it, no larger than their blocks are, and not more than it may have. Only a leader that follows a gap
//! leaves that limit aside: a node that got another block meanwhile uses the forgotten one all the same, and it
//! would be given to somebody else.

use std::collections::BTreeMap;

use super::blocks::machine_in;
use crate::Now;
use crate::cluster::seen::{AgentReport, BlockWord, Node, Text};
use crate::cluster::world::World;
use crate::cluster::world::report_of;
use crate::pools::PoolState;
use crate::registry::Registry;
use cadastre_api::{Allocate, HeldBlock, MOST_BLOCKS};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// Blocks that agents use and cannot have for now, as somebody else has a claim to some of it or a pool is
/// another one than it was, by the name of the node. Nobody else gets any of them meanwhile.
#[derive(Debug, Default)]
pub struct Strays(BTreeMap<Text, Vec<Cidr>>);

impl Strays {
    /// An address of the range in a block that an agent uses.
    pub(crate) fn any_in(&self, range: &Cidr) -> Option<Addr> {
        let mut blocks = self.0.values().flatten();
        let used = blocks.find(|it| it.overlaps(range))?;
        Some(used.first().max(range.first()))
    }

    /// Whether an agent uses some of the block, other than that of the node the very block.
    pub(crate) fn speak_against(&self, block: &Cidr, node: &Text) -> bool {
        let mut all = self.0.iter();
        all.any(|(name, blocks)| {
            let is_it = |it: &Cidr| name == node && it == block;
            blocks.iter().any(|it| it.overlaps(block) && !is_it(it))
        })
    }

    /// The nodes whose agents use any.
    pub fn nodes(&self) -> Vec<Text> {
        self.0.keys().cloned().collect()
    }

    /// The node is gone, or what its agent uses is looked at anew. Returns what that was.
    pub fn remove(&mut self, node: &Text) -> Vec<Cidr> {
        self.0.remove(node).unwrap_or_default()
    }

    fn of(&self, node: &Text) -> &[Cidr] {
        self.0.get(node).map_or(&[], Vec::as_slice)
    }

    /// Whether the agent of a node uses any.
    pub fn contains(&self, node: &str) -> bool {
        self.0.contains_key(node)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes note of what the agent of a node uses: of as many blocks as one may have, each of a pool.
    fn insert(&mut self, node: &Text, blocks: Vec<Cidr>) {
        self.0.insert(node.clone(), blocks);
    }
}

impl Registry {
    /// Takes up what the agent of a node uses and nobody has. Returns it, and whether others may have now what
    /// the agent uses no more.
    pub fn take_up(&mut self, name: &Text, world: &World, now: Now) -> (Vec<Cidr>, bool) {
        let before = self.strays.remove(name);
        let taken = self.take_up_of(name, world, now);
        let still = |block: &Cidr| self.strays.of(name).contains(block);
        let ended = before.iter().any(|block| !still(block));
        (taken, ended)
    }

    fn take_up_of(&mut self, name: &Text, world: &World, now: Now) -> Vec<Cidr> {
        let Some(node) = world.nodes.get(name).cloned() else {
            return Vec::new();
        };
        let Some(report) = report_of(&node, world) else {
            return Vec::new();
        };
        let (mut taken, mut strays) = (Vec::new(), Vec::new());
        let mut is_stray = false;
        for word in &report.blocks {
            let known = self.blocks.get(&word.cidr);
            let is_theirs = known.is_some_and(|entry| entry.owner.uid == node.uid);
            let is_the_very = known.is_some_and(|entry| entry.uid.as_ref() == Some(&word.uid));
            let unheard = Mutation::ForgottenBlockNotTakenUp.is_on();
            if !word.is_in_use() || is_theirs || unheard {
                continue;
            }
            let is_claimed = self.ledger.overlapping(&word.cidr).next().is_some();
            let is_claimed = is_claimed && !Mutation::ClaimedBlockTakenUp.is_on();
            let is_used = self.strays.speak_against(&word.cidr, name);
            let must_wait = is_claimed || is_used || self.is_listening;
            let more = strays.len();
            match self.could_get(word, &node, report, more) {
                Some(held) if !must_wait => {
                    self.recall_listed(name, &node.uid, &held, true, world, now);
                    taken.push(word.cidr);
                }
                // Once something comes free, all have spoken, or a pool is another one, it may be.
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
            self.strays.insert(name, strays);
        }
        taken
    }

    /// The node of that UID is gone, and its agent used blocks that nobody has: they are the dead node's, so that
    /// they rest.
    pub(crate) fn keep_for_rest(&mut self, name: &Text, uid: &Text, world: &World, now: Now) {
        let report = world.subnets.get(name).and_then(|it| it.report.as_deref());
        let report = report.filter(|it| it.node_uid == *uid);
        let words = report.into_iter().flat_map(|it| &it.blocks);
        for word in words.filter(|word| word.is_in_use()) {
            if let Some(pool) = self.source_of(&word.cidr) {
                let held = held(word, pool);
                self.recall_listed(name, uid, &held, false, world, now);
            }
        }
    }

    /// The same of all nodes that died while nobody led.
    pub(crate) fn keep_of_dead_for_rest(&mut self, world: &World, now: Now) {
        for subnet in world.subnets.iter() {
            let Some(report) = &subnet.report else {
                continue;
            };
            let (name, uid) = (&subnet.name, &report.node_uid);
            let lives = world.nodes.get(name).is_some_and(|node| node.uid == *uid);
            if lives || uid.is_empty() {
                continue;
            }
            self.keep_for_rest(name, uid, world, now);
            let machine = machine_in(world, name, uid);
            self.retire_blocks(name, uid, &machine, now);
        }
    }

    /// An address of a resting block that an agent uses although no pool could give it today. So the object is
    /// all that keeps it from others: it rests until the agent says otherwise.
    pub(crate) fn rests_in_use(&self, block: &Cidr) -> Option<Addr> {
        let is_given = self.source_of(block).is_some();
        self.strays.any_in(block).filter(|_| !is_given)
    }

    /// The pool that could have given the block to some node.
    fn source_of(&self, block: &Cidr) -> Option<&PoolState> {
        let pool = self.pools.of(block)?;
        let len = pool.space.block_len(block.family())?;
        (pool.allocate == Allocate::Blocks && len <= block.len()).then_some(pool)
    }

    /// The block as the node could have got it by asking, `more` of them besides those that it has.
    fn could_get(
        &self,
        word: &BlockWord,
        node: &Node,
        report: &AgentReport,
        more: usize,
    ) -> Option<HeldBlock> {
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

/// As a NodeSubnet lists the block.
fn held(word: &BlockWord, pool: &PoolState) -> HeldBlock {
    HeldBlock {
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
    use crate::cluster::seen::Subnet;
    use crate::demand::tests::{NOW, list, node, objects, pool, subnet};
    use cadastre_api::IPPoolSpec;
    use cadastre_daemon::watch::Change;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    /// Listed `blocks`, and using those of `used` besides.
    fn using(name: &str, blocks: &[&str], used: &[&str]) -> Subnet {
        let mut subnet = subnet(name, blocks, 0);
        let report = subnet.report.as_mut().unwrap();
        let word = |text: &&str| BlockWord {
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

    fn world(subnets: Vec<Subnet>) -> World {
        let mut world = World::default();
        list(&mut world.pools, vec![pool("p", "10.0.0.0/24")]);
        let names = subnets.iter().map(|it| node(&it.name));
        list(&mut world.nodes, names.collect());
        let blocks = subnets.iter().flat_map(objects).collect();
        list(&mut world.blocks, blocks);
        list(&mut world.subnets, subnets);
        world
    }

    fn change_pool(world: &mut World, version: u64, change: impl FnOnce(&mut IPPoolSpec)) {
        let mut one = pool("p", "10.0.0.0/24");
        (one.version, one.generation) = (version, i64::try_from(version).unwrap());
        change(one.spec.as_mut().unwrap());
        world.pools.change(Change::Applied(one));
    }

    fn taken(registry: &mut Registry, world: &World, name: &str) -> Vec<String> {
        let taken = registry.take_up(&name.into(), world, NOW).0;
        taken.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_a_node_uses_and_nobody_has_is_its_own() {
        let used = ["10.0.0.32/28", "10.0.0.64/27", "10.9.0.0/28"];
        let world = world(vec![using("n1", &["10.0.0.16/28"], &used)]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        // Not what is larger than a block, or of no pool.
        assert_eq!(taken(&mut registry, &world, "n1"), ["10.0.0.32/28"]);
        let listed = registry.listed_blocks("n1", None);
        let listed: Vec<&str> = listed.iter().map(|it| it.cidr.as_str()).collect();
        assert_eq!(listed, ["10.0.0.16/28", "10.0.0.32/28"]);
        assert!(taken(&mut registry, &world, "n1").is_empty(), "known now");
    }

    #[test]
    fn what_somebody_has_a_claim_to_waits_until_that_ends() {
        let block = "10.0.0.16/28";
        let world = world(vec![using("n1", &[block], &[]), using("n2", &[], &[block])]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        assert!(taken(&mut registry, &world, "n2").is_empty());
        assert!(registry.strays.contains("n2"));
        registry.drop_block(&cidr(block));
        assert_eq!(taken(&mut registry, &world, "n2"), [block]);
        assert!(registry.strays.is_empty());
    }

    #[test]
    fn of_two_agents_that_use_the_same_neither_gets_it_before_one_says_otherwise() {
        let block = "10.0.0.16/28";
        let mut world = world(vec![using("n1", &[], &[block]), using("n2", &[], &[block])]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        registry.is_listening = true;
        for name in ["n1", "n2"] {
            assert!(
                taken(&mut registry, &world, name).is_empty(),
                "not all have spoken"
            );
        }
        registry.is_listening = false;
        for name in ["n1", "n2"] {
            assert!(taken(&mut registry, &world, name).is_empty(), "both use it");
        }
        let mut idle = using("n1", &[], &[]);
        idle.version += 1;
        world.subnets.change(Change::Applied(idle));
        assert_eq!(
            registry.take_up(&"n1".into(), &world, NOW),
            (Vec::new(), true)
        );
        assert_eq!(taken(&mut registry, &world, "n2"), [block]);
    }

    #[test]
    fn what_only_the_agent_of_a_dead_node_spoke_of_rests() {
        let block = "10.0.0.16/28";
        let world = world(vec![using("n1", &[], &[block])]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        registry.is_listening = true;
        assert!(taken(&mut registry, &world, "n1").is_empty());
        let gone = node("n1");
        registry.keep_for_rest(&gone.name, &gone.uid, &world, NOW);
        let resting = registry.retire_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert_eq!(resting, [cidr(block)]);
        assert!(registry.blocks.get(&cidr(block)).unwrap().owner.resting);
    }

    #[test]
    fn what_an_agent_spoke_of_rests_too_where_its_node_died_while_nobody_led() {
        let block = "10.0.0.16/28";
        let mut world = world(vec![using("n1", &[], &[block])]);
        world.nodes.change(Change::Deleted(node("n1")));
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        registry.keep_of_dead_for_rest(&world, NOW);
        let kept = registry.blocks.get(&cidr(block)).unwrap();
        assert!(kept.owner.resting && kept.rests_until.is_some());
    }

    #[test]
    fn no_part_of_what_an_agent_uses_goes_to_others() {
        // Half of what n2 uses is claimed, so it cannot have it back; the other half is free.
        let n1 = using("n1", &["10.0.0.16/29"], &[]);
        let world = world(vec![n1, using("n2", &[], &["10.0.0.16/28"])]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        assert!(taken(&mut registry, &world, "n2").is_empty());
        let used = |text: &str| registry.strays.any_in(&cidr(text)).is_some();
        assert!(used("10.0.0.24/29") && used("10.0.0.0/24") && !used("10.0.0.32/28"));
        let against = |text: &str, node: &str| {
            let (block, node) = (cidr(text), node.into());
            registry.strays.speak_against(&block, &node)
        };
        assert!(against("10.0.0.16/28", "n1") && against("10.0.0.24/29", "n2"));
        assert!(!against("10.0.0.16/28", "n2"), "its own");
    }

    #[test]
    fn a_resting_block_that_no_pool_could_give_today_rests_on_while_an_agent_uses_it() {
        let block = "10.0.0.16/28";
        let mut world = world(vec![using("n1", &[block], &[]), using("n2", &[], &[block])]);
        change_pool(&mut world, 2, |spec| {
            spec.ipv4.as_mut().unwrap().block_size = Some(29);
        });
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        let gone = node("n1");
        registry.retire_blocks(&gone.name, &gone.uid, &gone.machine, NOW);
        assert!(taken(&mut registry, &world, "n2").is_empty());
        let block = cidr(block);
        assert_eq!(registry.rests_in_use(&block), Some(block.first()));
        let mut idle = using("n2", &[], &[]);
        idle.version += 1;
        world.subnets.change(Change::Applied(idle));
        assert!(taken(&mut registry, &world, "n2").is_empty());
        assert_eq!(registry.rests_in_use(&block), None);
    }

    #[test]
    fn the_limit_of_a_node_counts_what_it_keeps_and_not_after_a_gap() {
        let subnet = || using("n1", &["10.0.0.16/28"], &["10.0.0.32/28"]);
        let of_one_block = |subnet| {
            let mut world = world(vec![subnet]);
            change_pool(&mut world, 2, |spec| spec.max_blocks_per_node = Some(1));
            let (registry, _) = Registry::rebuild(&world, &[], NOW);
            (registry, world)
        };
        let (mut registry, world) = of_one_block(subnet());
        assert!(taken(&mut registry, &world, "n1").is_empty());
        assert!(registry.strays.contains("n1"), "it may be, some day");
        registry.after_gap = true;
        assert_eq!(taken(&mut registry, &world, "n1"), ["10.0.0.32/28"]);
        let mut letting_go = subnet();
        letting_go.report.as_mut().unwrap().blocks[0].released = true;
        let (mut registry, world) = of_one_block(letting_go);
        assert_eq!(taken(&mut registry, &world, "n1"), ["10.0.0.32/28"]);
        assert!(registry.strays.is_empty());
    }

    #[test]
    fn what_cannot_be_had_now_is_tried_again() {
        let mut world = world(vec![using("n1", &[], &["10.0.0.32/28"])]);
        change_pool(&mut world, 2, |spec| spec.allocate = Allocate::NodeCIDR);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        assert!(taken(&mut registry, &world, "n1").is_empty());
        assert!(registry.strays.contains("n1"), "it may be, some day");
        change_pool(&mut world, 3, |spec| spec.allocate = Allocate::Blocks);
        registry.pools.survey(&world, &[], NOW.mono);
        assert_eq!(taken(&mut registry, &world, "n1"), ["10.0.0.32/28"]);
        assert!(registry.strays.is_empty());
    }

    #[test]
    fn what_is_let_go_or_unused_is_nobodys() {
        let mut subnet = using("n1", &[], &["10.0.0.16/28", "10.0.0.32/28"]);
        let report = subnet.report.as_mut().unwrap();
        report.blocks[0].released = true;
        report.blocks[1].used = 0;
        let world = world(vec![subnet]);
        let (mut registry, _) = Registry::rebuild(&world, &[], NOW);
        assert!(taken(&mut registry, &world, "n1").is_empty());
    }
}
