//! Blocks that a node uses and the API has lost: those of a state that was put back to an older one.
//!
//! An agent tells of every block with addresses in use, also of one that its NodeSubnet lists no more. If
//! nobody has a claim to such a range, it is the node's from then on, as if it had been listed: its object is
//! made anew, and it is listed again. If somebody has, or the node could not have it now, it waits until something
//! comes free; the condition `Accepted` of the NodeSubnet says so meanwhile.
//!
//! # Caveats
//! Any agent could say so of any range. So only those are taken up that its node could get by asking: of pools
//! that serve it, no larger than their blocks are, and not more than it may have. Only a leader that follows a gap
//! leaves that limit aside: a node that got another block meanwhile uses the forgotten one all the same, and it
//! would be given to somebody else.

use super::Now;
use super::account::report_of;
use super::registry::Registry;
use crate::api::{Allocate, HeldBlock, MOST_BLOCKS};
use crate::cluster::seen::{AgentReport, BlockWord, Node, Text};
use crate::cluster::world::World;
use crate::ipam::Cidr;
use crate::mutation::Mutation;

impl Registry {
    /// Takes up what the agent of a node uses and nobody has, by a leader that follows a gap or another.
    /// Returns it.
    pub fn take_up(&mut self, name: &Text, world: &World, after_gap: bool, now: Now) -> Vec<Cidr> {
        self.strays.remove(name);
        let Some(node) = world.nodes.get(name).cloned() else {
            return Vec::new();
        };
        let Some(report) = report_of(&node, world) else {
            return Vec::new();
        };
        let mut taken = Vec::new();
        for word in &report.blocks {
            let known = self.blocks.get(&word.cidr);
            let is_theirs = known.is_some_and(|entry| entry.owner.uid == node.uid);
            let unheard = Mutation::ForgottenBlockNotTakenUp.is_on();
            if word.released || word.used + word.cooling == 0 || is_theirs || unheard {
                continue;
            }
            let is_claimed = self.ledger.overlapping(&word.cidr).next().is_some();
            let is_claimed = is_claimed && !Mutation::ClaimedBlockTakenUp.is_on();
            let held = self.could_get(word, &node, report, after_gap);
            match held.filter(|_| !is_claimed) {
                Some(held) => {
                    self.recall_listed(name, &node.uid, &held, true, now);
                    taken.push(word.cidr);
                }
                // Once something comes free, or a pool is another one, it may be.
                None => _ = self.strays.insert(name.clone()),
            }
        }
        taken
    }

    /// The block as the node could have got it by asking.
    fn could_get(
        &self,
        word: &BlockWord,
        node: &Node,
        report: &AgentReport,
        after_gap: bool,
    ) -> Option<HeldBlock> {
        let pool = self.pools.of(&word.cidr)?;
        let family = word.cidr.family();
        let of_pool = self.blocks.of(&node.uid);
        let of_pool = of_pool.filter(|it| it.pool == pool.name && it.cidr.family() == family);
        let of_pool = of_pool.filter(|it| !it.is_released(Some(report)));
        let most = pool.terms.most.filter(|_| !after_gap);
        let fits = pool.allocate == Allocate::Blocks
            && pool.selects(node)
            && pool.space.block_len(family)? <= word.cidr.len()
            && of_pool.count() < most.unwrap_or(MOST_BLOCKS);
        fits.then(|| HeldBlock {
            cidr: word.cidr.to_string(),
            uid: word.uid.to_string(),
            pool: pool.name.to_string(),
            recall: None,
            reserved: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::IPPoolSpec;
    use crate::cluster::seen::{Change, Subnet};
    use crate::controller::demand::tests::{NOW, list, node, objects, pool, subnet};

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
        let taken = registry.take_up(&name.into(), world, false, NOW);
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
        let after_gap = registry.take_up(&"n1".into(), &world, true, NOW);
        assert_eq!(after_gap, [cidr("10.0.0.32/28")]);
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
