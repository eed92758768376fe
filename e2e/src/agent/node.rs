//! What one test agent decides: which address a pod gets, which block it lets go, what it tells.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_api::{
    AddressEntry, AllocatedBlock, BlockStatus, NodeAddressesSpec, NodePool, NodeSubnet,
    NodeSubnetStatus, PoolDemand, Recall,
};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// The agent of one Node object.
#[derive(Debug)]
pub struct Agent {
    uid: String,
    blocks: BTreeMap<Cidr, Block>,
    /// The families of each pool that serves the node: a pod gets an address of each
    families: BTreeMap<String, BTreeSet<Family>>,
    /// What it asks of each pool: addresses of each family, in all
    asked: BTreeMap<String, u64>,
}

#[derive(Debug, Default)]
struct Block {
    uid: String,
    pool: String,
    recall: Option<Recall>,
    /// What may be given, lowest first
    spans: Vec<(u128, u128)>,
    /// Addresses in use, by number, with their pods; of none while they cool
    taken: BTreeMap<u128, Option<String>>,
    listed: bool,
    released: bool,
}

impl Agent {
    /// The agent of the Node with that UID; it holds nothing.
    pub fn new(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            blocks: BTreeMap::new(),
            families: BTreeMap::new(),
            asked: BTreeMap::new(),
        }
    }

    /// Takes over what the NodeSubnet lists, and lets go what is asked back and empty.
    pub fn see(&mut self, subnet: &NodeSubnet) {
        if subnet.spec.node_uid.as_ref() != Some(&self.uid) {
            return;
        }
        let pools = subnet.spec.pools.iter();
        self.families = pools.map(|it| (it.name.clone(), families(it))).collect();
        for block in self.blocks.values_mut() {
            block.listed = false;
        }
        for held in &subnet.spec.blocks {
            let Ok(cidr) = Cidr::parse_strict(&held.cidr) else {
                continue;
            };
            match self.blocks.get_mut(&cidr) {
                // Let go, and this list does not know it yet; made anew, it is another block.
                Some(known) if known.released && known.uid == held.uid => known.listed = true,
                Some(known) if !known.released => known.take_over(&cidr, held),
                _ => {
                    let mut block = Block::default();
                    block.take_over(&cidr, held);
                    self.blocks.insert(cidr, block);
                }
            }
        }
        // What is no longer listed goes with its last address: only the agent's word ends its use.
        self.blocks
            .retain(|_, block| block.listed || !(block.released || block.taken.is_empty()));
        self.let_go();
    }

    /// What it asks of a pool: addresses of each family, in all.
    pub fn ask(&mut self, pool: &str, addresses: u64) {
        self.asked.insert(pool.to_owned(), addresses);
    }

    /// An address for the pod of each family of the pool's blocks here, or of none. Where there is
    /// none it asks for one more than are taken.
    pub fn give(&mut self, pool: &str, pod: &str) -> Option<Vec<Addr>> {
        let of_pool = |block: &&Block| block.pool == pool && block.is_in_use();
        let of_blocks = || {
            let blocks = self.blocks.iter().filter(|(_, block)| of_pool(block));
            blocks.map(|(cidr, _)| cidr.family()).collect()
        };
        // The blocks of two families may be listed one after the other.
        let families = self.families.get(pool).cloned();
        let families: BTreeSet<Family> = families.unwrap_or_else(of_blocks);
        let free = |family: &Family| {
            let mut blocks = self.blocks.iter().filter(|(_, block)| of_pool(block));
            blocks.find_map(|(cidr, block)| {
                let value = (cidr.family() == *family).then(|| block.first_free())??;
                Some((*cidr, value))
            })
        };
        let found: Option<Vec<(Cidr, u128)>> = families.iter().map(free).collect();
        let Some(found) = found.filter(|found| !found.is_empty()) else {
            let taken = Family::ALL
                .into_iter()
                .map(|family| self.taken(pool, family));
            let wanted = taken.max().unwrap_or(0) + 1;
            let asked = self.asked.entry(pool.to_owned()).or_default();
            *asked = wanted.max(*asked);
            return None;
        };
        for (cidr, value) in &found {
            if let Some(block) = self.blocks.get_mut(cidr) {
                block.taken.insert(*value, Some(pod.to_owned()));
            }
        }
        let addr = |(cidr, value): &(Cidr, u128)| addr(cidr, *value);
        Some(found.iter().map(addr).collect())
    }

    /// The addresses of a pod cool.
    pub fn free(&mut self, pod: &str) {
        for block in self.blocks.values_mut() {
            for owner in block.taken.values_mut() {
                if owner.as_deref() == Some(pod) {
                    *owner = None;
                }
            }
        }
    }

    /// What cools is free.
    pub fn warm_up(&mut self) {
        for block in self.blocks.values_mut() {
            block.taken.retain(|_, pod| pod.is_some());
        }
        self.let_go();
    }

    /// What it tells.
    pub fn status(&self) -> NodeSubnetStatus {
        let asked = self.asked.iter().filter(|(_, demand)| **demand > 0);
        let pools = asked.map(|(pool, demand)| PoolDemand {
            pool: pool.clone(),
            demand: i64::try_from(*demand).unwrap_or(i64::MAX),
        });
        NodeSubnetStatus {
            node_uid: Some(self.uid.clone()),
            pools: pools.collect(),
            blocks: self.blocks.iter().map(|(c, b)| b.report(c)).collect(),
            agent: None,
            orphans: Vec::new(),
            conditions: Vec::new(),
        }
    }

    /// The addresses in use.
    pub fn addresses(&self) -> NodeAddressesSpec {
        let entries = self.blocks.iter().flat_map(|(cidr, block)| {
            let taken = block.taken.iter();
            taken.filter_map(|(value, pod)| {
                let pod = pod.as_ref()?;
                Some(AddressEntry {
                    addresses: vec![addr(cidr, *value)],
                    handle: pod.clone(),
                    pod: format!("default/{pod}"),
                    interface: "eth0".to_owned(),
                    ..AddressEntry::default()
                })
            })
        });
        NodeAddressesSpec {
            node_uid: self.uid.clone(),
            addresses: entries.map(|it| it.to_string()).collect(),
            ..NodeAddressesSpec::default()
        }
    }

    fn taken(&self, pool: &str, family: Family) -> u64 {
        let of = |(cidr, block): &(&Cidr, &Block)| block.pool == pool && cidr.family() == family;
        let blocks = self.blocks.iter().filter(of);
        blocks.map(|(_, block)| block.taken.len() as u64).sum()
    }

    fn let_go(&mut self) {
        for block in self.blocks.values_mut() {
            block.released |= block.listed && block.recall.is_some() && block.taken.is_empty();
        }
    }
}

impl Block {
    fn take_over(&mut self, cidr: &Cidr, held: &AllocatedBlock) {
        self.uid.clone_from(&held.uid);
        self.pool.clone_from(&held.pool);
        self.recall = held.recall;
        self.listed = true;
        let mut reserved: Vec<IpRange> = held
            .reserved
            .iter()
            .chain(&held.on_request)
            .filter_map(|text| IpRange::parse(text).ok()?.within(cidr))
            .collect();
        reserved.sort_by_key(|span| (span.first(), span.last()));
        self.spans.clear();
        let mut next = Some(cidr.first().value);
        for span in reserved {
            let Some(from) = next else { break };
            if from < span.first().value {
                self.spans.push((from, span.first().value - 1));
            }
            next = span.last().value.checked_add(1).map(|it| it.max(from));
        }
        if let Some(from) = next.filter(|from| *from <= cidr.last().value) {
            self.spans.push((from, cidr.last().value));
        }
    }

    /// Whether new addresses may come from it.
    fn is_in_use(&self) -> bool {
        self.listed && !self.released && self.recall != Some(Recall::Drain)
    }

    fn first_free(&self) -> Option<u128> {
        let mut spans = self.spans.iter();
        spans.find_map(|(first, last)| (*first..=*last).find(|it| !self.taken.contains_key(it)))
    }

    fn report(&self, cidr: &Cidr) -> BlockStatus {
        let count = |count: u128| i64::try_from(count).unwrap_or(i64::MAX);
        let usable = self.spans.iter().map(|(first, last)| last - first + 1);
        let used = self.taken.values().flatten().count();
        let free = usable
            .sum::<u128>()
            .saturating_sub(self.taken.len() as u128);
        BlockStatus {
            cidr: cidr.to_string(),
            uid: self.uid.clone(),
            used: count(used as u128),
            cooling: count((self.taken.len() - used) as u128),
            free: if self.released { 0 } else { count(free) },
            released: self.released,
        }
    }
}

fn families(pool: &NodePool) -> BTreeSet<Family> {
    let of = [(Family::V4, &pool.ipv4), (Family::V6, &pool.ipv6)];
    let there = of.into_iter().filter(|(_, ranges)| ranges.is_some());
    there.map(|(family, _)| family).collect()
}

fn addr(cidr: &Cidr, value: u128) -> Addr {
    Addr {
        value,
        ..cidr.first()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn subnet(blocks: &Value) -> NodeSubnet {
        serde_json::from_value(json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": "n1"},
            "spec": {"nodeUID": "u1", "blocks": blocks},
        }))
        .unwrap()
    }

    fn block(uid: &str, recall: &Value) -> Value {
        json!({
            "cidr": "10.0.0.0/30", "uid": uid, "pool": "p", "recall": recall,
            "reserved": ["10.0.0.0", "10.0.0.2"],
        })
    }

    fn given(agent: &mut Agent, pod: &str) -> Option<String> {
        let addresses = agent.give("p", pod)?;
        Some(addresses[0].to_string())
    }

    #[test]
    fn a_pod_gets_an_address_of_each_family_of_the_pool_or_none() {
        let mut agent = Agent::new("u1");
        let v6 = json!({"cidr": "fd00::/126", "uid": "b6", "pool": "p"});
        let v4 = json!({"cidr": "10.0.0.0/30", "uid": "b4", "pool": "p"});
        let both = json!([{"name": "p", "ipv4": {"cidrs": ["10.0.0.0/8"]}, "ipv6": {"cidrs": ["fd00::/64"]}}]);
        let see = |agent: &mut Agent, blocks: Value| {
            let mut seen = subnet(&blocks);
            seen.spec.pools = serde_json::from_value(both.clone()).unwrap();
            agent.see(&seen);
        };
        see(&mut agent, json!([v6]));
        assert_eq!(agent.give("p", "one"), None);
        see(&mut agent, json!([v4, v6]));
        assert_eq!(agent.give("p", "one").unwrap().len(), 2);
    }

    #[test]
    fn reserved_addresses_are_never_given_and_a_full_node_asks_for_one_more() {
        let mut agent = Agent::new("u1");
        assert_eq!(given(&mut agent, "a"), None);
        agent.see(&subnet(&json!([block("b1", &Value::Null)])));
        assert_eq!(given(&mut agent, "a").as_deref(), Some("10.0.0.1"));
        assert_eq!(given(&mut agent, "b").as_deref(), Some("10.0.0.3"));
        assert_eq!(agent.status().pools[0].demand, 1);
        assert_eq!(given(&mut agent, "c"), None);
        let status = agent.status();
        assert_eq!(status.pools[0].demand, 3);
        assert_eq!((status.blocks[0].used, status.blocks[0].free), (2, 0));
        assert!(agent.addresses().addresses[1].starts_with("10.0.0.3 b eth0 "));
    }

    #[test]
    fn a_block_that_is_asked_back_is_released_when_empty_and_not_before() {
        for (recall, gives) in [("IfEmpty", true), ("Drain", false)] {
            let mut agent = Agent::new("u1");
            agent.see(&subnet(&json!([block("b1", &Value::Null)])));
            given(&mut agent, "a").unwrap();
            agent.see(&subnet(&json!([block("b1", &json!(recall))])));
            assert!(!agent.status().blocks[0].released);
            assert_eq!(given(&mut agent, "b").is_some(), gives);
            agent.free("a");
            agent.free("b");
            assert!(!agent.status().blocks[0].released, "it cools");
            agent.warm_up();
            assert!(agent.status().blocks[0].released);
            assert_eq!(given(&mut agent, "c"), None);
            agent.see(&subnet(&json!([block("b1", &Value::Null)])));
            assert!(agent.status().blocks[0].released, "its word stands");
            agent.see(&subnet(&json!([])));
            assert!(agent.status().blocks.is_empty());
            agent.see(&subnet(&json!([block("b2", &Value::Null)])));
            assert!(given(&mut agent, "d").is_some());
        }
    }

    #[test]
    fn a_block_that_vanishes_keeps_its_pods_and_gives_nothing() {
        let mut agent = Agent::new("u1");
        agent.see(&subnet(&json!([block("b1", &Value::Null)])));
        given(&mut agent, "a").unwrap();
        agent.see(&subnet(&json!([])));
        assert_eq!(agent.status().blocks[0].used, 1);
        assert_eq!(given(&mut agent, "b"), None);
        agent.see(&subnet(&json!([block("b2", &Value::Null)])));
        assert_eq!(agent.status().blocks[0].uid, "b2");
        assert_eq!(given(&mut agent, "b").as_deref(), Some("10.0.0.3"));
    }

    #[test]
    fn a_list_for_another_node_of_the_name_is_not_read() {
        let mut agent = Agent::new("u2");
        agent.see(&subnet(&json!([block("b1", &Value::Null)])));
        assert!(agent.status().blocks.is_empty());
    }
}
