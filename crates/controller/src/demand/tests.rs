//! Tests of which nodes get blocks while there are too few, and from which nodes blocks are recalled. Tests of other
//! modules use the functions here that build objects.

use serde_json::json;

use super::*;
use crate::Now;
use crate::cluster::names::NodeName;
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{
    Block, BlockReport, BlockSpec, MachineIdentity, Object, Owner, Pod, Pool, Subnet,
};
use cadastre_api::{AllocatedBlock, FINALIZER, FirstBlock, NodeSubnetSpec, Requests, block_name};
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;

pub(crate) const NOW: Now = Now {
    mono: Duration::ZERO,
    wall: jiff::Timestamp::UNIX_EPOCH,
};

/// Returns a node without podCIDRs. Its UID equals its name.
pub(crate) fn node(name: &str) -> Node {
    Node {
        name: name.into(),
        uid: name.into(),
        version: 1,
        labels: [].into(),
        term: None,
        annotated: false,
        deleting: false,
        pod_cidrs: [].into(),
        unreadable: [].into(),
        addresses: [].into(),
        machine: MachineIdentity::default(),
    }
}

pub(crate) fn list<T: Object>(table: &mut ObjectCache<T>, objects: Vec<T>) {
    let asked = Duration::ZERO;
    table.change(ObjectEvent::Restarted { asked });
    for object in objects {
        table.change(ObjectEvent::Applied(object));
    }
    table.change(ObjectEvent::Listed);
}

/// Returns a pool with one IPv6 range and no IPv4 range.
pub(crate) fn pool_of_v6(name: &str, range: &str, block_size: u32) -> Pool {
    let mut pool = pool(name, "10.0.0.0/24");
    let spec = pool.spec.as_mut().unwrap();
    spec.ipv4 = None;
    spec.ipv6 = Some(cadastre_api::IPv6Ranges {
        cidrs: vec![range.to_owned()],
        block_size: Some(block_size),
        gateway: None,
    });
    pool
}

pub(crate) fn pool(name: &str, cidr: &str) -> Pool {
    let spec = json!({"ipv4": {"cidrs": [cidr], "blockSize": 28}});
    Pool {
        name: name.into(),
        uid: name.into(),
        version: 1,
        generation: 1,
        created: 0,
        deleting: false,
        finalizers: vec![FINALIZER.to_owned()],
        spec: Ok(serde_json::from_value(spec).unwrap()),
        status: None,
    }
}

/// Returns a NodeSubnet with a demand of `wanted` in pool `p`. It lists the blocks, and reports them as empty.
pub(crate) fn subnet(name: &str, blocks: &[&str], wanted: u64) -> Subnet {
    let cidr = |text: &&str| Cidr::parse_strict(text).unwrap();
    let held = |text: &&str| AllocatedBlock {
        cidr: (*text).to_owned(),
        uid: (*text).to_owned(),
        pool: "p".to_owned(),
        recall: None,
        reserved: Vec::new(),
        on_request: Vec::new(),
    };
    let word = |text: &&str| BlockReport {
        cidr: cidr(text),
        uid: (*text).into(),
        used: 0,
        cooling: 0,
        free: 16,
        released: false,
    };
    Subnet {
        name: name.into(),
        uid: name.into(),
        version: 1,
        spec: Ok(NodeSubnetSpec {
            node_uid: Some(name.to_owned()),
            blocks: blocks.iter().map(held).collect(),
            ..NodeSubnetSpec::default()
        }),
        is_partial: false,
        requests: Requests::default(),
        report: Some(Box::new(AgentReport {
            node_uid: name.into(),
            demand: [("p".into(), wanted)].into(),
            blocks: blocks.iter().map(word).collect(),
            ..AgentReport::default()
        })),
    }
}

pub(crate) fn objects(subnet: &Subnet) -> Vec<Block> {
    let spec = subnet.spec.as_ref().unwrap();
    let block = |held: &AllocatedBlock| {
        let cidr = Cidr::parse_strict(&held.cidr).unwrap();
        Block {
            name: block_name(&cidr).into(),
            uid: held.uid.as_str().into(),
            version: 1,
            touched: false,
            spec: Ok(BlockSpec {
                cidr,
                pool: "p".into(),
                owner: Owner {
                    quarantined: false,
                    name: subnet.name.clone(),
                    uid: subnet.uid.clone(),
                    machine: MachineIdentity::default(),
                },
                since: NOW.wall,
                until: None,
            }),
        }
    };
    spec.blocks.iter().map(block).collect()
}

/// Returns the state after all nodes were handled once, in the given order.
fn looked(pools: Vec<Pool>, subnets: Vec<Subnet>) -> (Demand, AllocationState) {
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, pools);
    let nodes = subnets.iter().map(|it| node(&it.name)).collect();
    list(&mut cache.nodes, nodes);
    list(
        &mut cache.blocks,
        subnets.iter().flat_map(objects).collect(),
    );
    let names: Vec<NodeName> = subnets.iter().map(|it| it.name.clone()).collect();
    list(&mut cache.subnets, subnets);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
    let mut demand = Demand::default();
    for name in &names {
        demand.add_name(name, &cache, &allocations);
    }
    let mut reports = Vec::new();
    let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
    demand.work(&mut cx);
    (demand, allocations)
}

fn count(allocations: &AllocationState, node: &str) -> usize {
    allocations.blocks.of(&node.into()).count()
}

#[test]
fn every_node_gets_its_first_block_before_any_gets_a_second_one() {
    let greedy = ["a", "b", "c"].map(|name| subnet(name, &[], 1000));
    let (_, allocations) = looked(vec![pool("p", "10.0.0.0/26")], greedy.into());
    let counts = ["a", "b", "c"].map(|name| count(&allocations, name));
    assert!(counts.iter().all(|it| *it > 0), "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 4, "none is left over");
}

#[test]
fn for_a_node_without_any_block_one_gives_that_wants_more_than_it_uses() {
    let all = ["10.0.0.0/28", "10.0.0.16/28"];
    let nodes = vec![subnet("rich", &all, 1000), subnet("poor", &[], 1)];
    let (_, allocations) = looked(vec![pool("p", "10.0.0.0/27")], nodes);
    let recalled = allocations
        .blocks
        .of(&"rich".into())
        .filter(|it| it.recall.is_some());
    assert_eq!(recalled.count(), 1);
    // Nothing is recalled for a node that has a block already, nor from a node with only one block.
    for poor in ["10.0.0.32/28", ""] {
        let (rich, poor): (&[&str], &[&str]) = match poor {
            "" => (&all[..1], &[]),
            _ => (&all, &["10.0.0.32/28"]),
        };
        let nodes = vec![subnet("rich", rich, 1000), subnet("poor", poor, 1000)];
        let range = if poor.is_empty() {
            "10.0.0.0/28"
        } else {
            "10.0.0.0/26"
        };
        let (_, allocations) = looked(vec![pool("p", range)], nodes);
        let mut recalled = allocations
            .blocks
            .of(&"rich".into())
            .filter(|it| it.recall.is_some());
        assert!(recalled.next().is_none(), "{range}");
    }
}

#[test]
fn a_node_that_no_pool_serves_any_more_waits_for_none() {
    let mut two = vec![pool("p", "10.0.0.0/28"), pool("q", "10.0.1.0/28")];
    let subnets = || {
        let mut wants = subnet("a", &[], 1000);
        if let Some(report) = &mut wants.report {
            report.demand = [("p".into(), 1000), ("q".into(), 1000)].into();
        }
        vec![wants]
    };
    let (mut demand, mut allocations) = looked(two.clone(), subnets());
    assert_eq!(demand.waiting().map(|(_, nodes)| nodes).sum::<usize>(), 2);
    for pool in &mut two {
        if let Ok(spec) = &mut pool.spec {
            spec.disabled = true;
        }
    }
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, two);
    list(&mut cache.nodes, vec![node("a")]);
    list(&mut cache.subnets, subnets());
    allocations.pools.evaluate(&cache, &[], NOW.mono);
    demand.add_name(&"a".into(), &cache, &allocations);
    let mut reports = Vec::new();
    let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
    demand.work(&mut cx);
    assert_eq!(demand.waiting().map(|(_, nodes)| nodes).sum::<usize>(), 0);
}

#[test]
fn what_is_on_its_way_to_a_node_counts() {
    let (_, allocations) = looked(vec![pool("p", "10.0.0.0/24")], vec![subnet("a", &[], 10)]);
    assert_eq!(count(&allocations, "a"), 1);
}

#[test]
fn a_block_that_a_node_lets_go_of_is_none_that_it_has() {
    for (released, blocks) in [(false, 1), (true, 2)] {
        let mut wants = subnet("a", &["10.0.0.0/28"], 10);
        wants.report.as_mut().unwrap().blocks[0].released = released;
        let (_, allocations) = looked(vec![pool("p", "10.0.0.0/24")], vec![wants]);
        assert_eq!(count(&allocations, "a"), blocks);
    }
}

#[test]
fn what_speaks_against_the_smaller_pieces_of_a_pool_may_go() {
    let pod = |version, addresses: &[&str]| {
        let addresses = addresses.iter().map(|it| it.parse().unwrap());
        ObjectEvent::Applied(Pod {
            name: "default/pod".into(),
            uid: "pod".into(),
            version,
            finished: false,
            mirror_of: None,
            addresses: addresses.map(|it: std::net::IpAddr| it.into()).collect(),
        })
    };
    // Only one address of the pool is not allocated, and a pod reports it.
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, vec![pool("p", "10.0.0.0/28")]);
    let mut holder = node("holder");
    let ranges = ["10.0.0.0/29", "10.0.0.8/30", "10.0.0.12/31", "10.0.0.14/32"];
    holder.pod_cidrs = ranges.map(|it| Cidr::parse_strict(it).unwrap()).into();
    list(&mut cache.nodes, vec![holder, node("a")]);
    list(&mut cache.subnets, vec![subnet("a", &[], 1)]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
    let mut demand = Demand::default();
    demand.add_name(&"a".into(), &cache, &allocations);
    let mut carved = Vec::new();
    for (second, addresses) in [(0, &["10.0.0.15"][..]), (6, &[][..])] {
        cache.pods.change(pod(second + 1, addresses));
        let now = Now {
            mono: Duration::from_secs(second),
            ..NOW
        };
        let mut reports = Vec::new();
        let mut cx = Context::new(&cache, &mut allocations, &mut reports, now);
        carved.push(demand.work(&mut cx).blocks);
    }
    let piece = Cidr::parse_strict("10.0.0.15/32").unwrap();
    assert_eq!(carved, [vec![], vec![piece]]);
}

/// Returns, by node name, how many blocks of each node are recalled after `seconds`.
fn recalled_after(
    seconds: u64,
    spec: &serde_json::Value,
    subnets: Vec<Subnet>,
) -> Vec<(String, usize)> {
    let mut p = pool("p", "10.0.0.0/26");
    if let (Ok(known), Some(more)) = (&mut p.spec, spec.as_object()) {
        let mut whole = serde_json::to_value(&*known).unwrap();
        whole.as_object_mut().unwrap().extend(more.clone());
        *known = serde_json::from_value(whole).unwrap();
    }
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, vec![p]);
    let nodes = subnets.iter().map(|it| node(&it.name)).collect();
    list(&mut cache.nodes, nodes);
    let blocks = subnets.iter().flat_map(objects).collect();
    list(&mut cache.blocks, blocks);
    let names: Vec<NodeName> = subnets.iter().map(|it| it.name.clone()).collect();
    list(&mut cache.subnets, subnets);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
    let mut demand = Demand::default();
    for at in [0, seconds] {
        for name in &names {
            demand.add_name(name, &cache, &allocations);
        }
        let mono = Duration::from_secs(at);
        let now = Now { mono, ..NOW };
        let mut reports = Vec::new();
        let mut cx = Context::new(&cache, &mut allocations, &mut reports, now);
        demand.work(&mut cx);
    }
    let recalled = |name: &NodeName| {
        // Its UID is its name.
        let own = allocations.blocks.of(&(**name).into());
        own.filter(|it| it.recall.is_some()).count()
    };
    let all = names.iter().map(|it| (it.to_string(), recalled(it)));
    all.filter(|(_, count)| *count > 0).collect()
}

const FOUR: [&str; 4] = [
    "10.0.0.0/28",
    "10.0.0.16/28",
    "10.0.0.32/28",
    "10.0.0.48/28",
];

/// Returns NodeSubnets of four nodes, each with one empty block and a demand of 3 addresses, and that of a fifth node.
fn four_idle_and(fifth: Subnet) -> Vec<Subnet> {
    let idle = FOUR.iter().enumerate();
    let idle = idle.map(|(at, cidr)| subnet(&format!("idle-{at}"), &[cidr], 3));
    idle.chain([fifth]).collect()
}

#[test]
fn the_last_block_of_a_node_that_uses_none_goes_to_pods_that_wait() {
    let spec = json!({});
    let asks = || four_idle_and(subnet("fifth", &[], 4));
    assert_eq!(recalled_after(4, &spec, asks()), []);
    let after = recalled_after(5, &spec, asks());
    assert_eq!(after, [("idle-0".to_owned(), 1)]);
    // Nothing is recalled for a first block without demand, nor from a node whose pods are about to use the block.
    let sight = four_idle_and(subnet("fifth", &[], 0));
    assert_eq!(recalled_after(1000, &spec, sight), []);
    let mut all = asks();
    for it in &mut all[..4] {
        it.report.as_mut().unwrap().demand = [("p".into(), 4)].into();
    }
    assert_eq!(recalled_after(1000, &spec, all), []);
}

#[test]
fn pools_that_give_nothing_unasked_get_their_last_blocks_back() {
    let two = || vec![subnet("a", &FOUR[..1], 3)];
    for (spec, count) in [
        (json!({"assignment": "Manual"}), 1),
        (json!({"firstBlock": "OnDemand"}), 1),
        (json!({"podSelector": {"matchLabels": {"a": "b"}}}), 1),
        (json!({"assignment": "Manual", "disabled": true}), 0),
        (json!({}), 0),
    ] {
        assert_eq!(recalled_after(299, &spec, two()), [], "{spec}");
        let after: usize = recalled_after(300, &spec, two())
            .iter()
            .map(|it| it.1)
            .sum();
        assert_eq!(after, count, "{spec}");
    }
}

#[test]
fn an_agent_that_does_not_answer_holds_up_nobody() {
    let asks = four_idle_and(subnet("fifth", &[], 4));
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, vec![pool("p", "10.0.0.0/26")]);
    list(
        &mut cache.nodes,
        asks.iter().map(|it| node(&it.name)).collect(),
    );
    list(&mut cache.blocks, asks.iter().flat_map(objects).collect());
    list(&mut cache.subnets, asks);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
    let mut demand = Demand::default();
    let mut counts = Vec::new();
    for at in [0, 5, 14, 15] {
        for it in cache.nodes.iter() {
            demand.add(it, &allocations);
        }
        let mono = Duration::from_secs(at);
        demand.work(&mut Context {
            cache: &cache,
            allocations: &mut allocations,
            reports: &mut Vec::new(),
            now: Now { mono, ..NOW },
        });
        let recalled = allocations.blocks.iter().filter(|it| it.recall.is_some());
        counts.push(recalled.count());
    }
    assert_eq!(counts, [0, 1, 1, 2]);
}

/// The blocks are /48s, of which an agent reports the largest numbers that the API allows, so sums must not overflow.
#[test]
fn blocks_with_more_addresses_than_can_be_counted_are_enough_for_anybody() {
    const MOST: u64 = i64::MAX.unsigned_abs();
    let blocks = [
        "fd00::/48",
        "fd00:0:1::/48",
        "fd00:0:2::/48",
        "fd00:0:3::/48",
    ];
    let wide = pool_of_v6("p", "fd00::/46", 48);
    // An empty node can spare a block even if its agent has not reported all its blocks, but not if it has reported
    // none.
    for (busy, known, recalled) in [(0, 4, 1), (0, 1, 1), (MOST, 4, 0), (0, 0, 0)] {
        let mut rich = subnet("rich", &blocks, 1000);
        let report = rich.report.as_mut().unwrap();
        let mut words = std::mem::take(&mut report.blocks).into_vec();
        words.truncate(known);
        for word in &mut words {
            (word.used, word.cooling, word.free) = (busy, busy, MOST);
        }
        report.blocks = words.into();
        let nodes = vec![rich, subnet("poor", &[], 1)];
        let (_, allocations) = looked(vec![wide.clone()], nodes);
        assert_eq!(
            (count(&allocations, "rich"), count(&allocations, "poor")),
            (4, 0)
        );
        let own = allocations.blocks.of(&"rich".into());
        let asked_back = own.filter(|it| it.recall.is_some()).count();
        assert_eq!(asked_back, recalled, "{busy} busy, {known} known");
    }
}

/// Pods fail and are created again, so the demand of their node comes and goes while the pool stays exhausted.
#[test]
fn a_wait_that_ends_without_a_block_is_not_reported_as_one_and_reported_again_only_much_later() {
    let pools = |range: &str| {
        let mut pool = pool("p", range);
        pool.spec.as_mut().unwrap().first_block = FirstBlock::OnDemand;
        vec![pool]
    };
    let nodes = |wanted| vec![subnet("a", &[], wanted), subnet("b", &["10.0.0.0/28"], 16)];
    let (mut demand, mut allocations) = looked(pools("10.0.0.0/28"), nodes(0));
    // Handles both nodes, and returns the reasons of the events.
    let mut look = |minutes: u64, range: &str, wanted: u64| {
        let mut cache = ClusterCache::default();
        list(&mut cache.pools, pools(range));
        list(&mut cache.nodes, vec![node("a"), node("b")]);
        list(&mut cache.subnets, nodes(wanted));
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        demand.requeue();
        demand.add_name(&"a".into(), &cache, &allocations);
        let mut reports = Vec::new();
        let now = Now {
            mono: NOW.mono + Duration::from_secs(60 * minutes),
            ..NOW
        };
        let mut cx = Context::new(&cache, &mut allocations, &mut reports, now);
        demand.work(&mut cx);
        let reasons: Vec<_> = reports.iter().map(|report| report.reason).collect();
        reasons
    };
    let exhausted = "10.0.0.0/28";
    assert_eq!(look(0, exhausted, 5), [WAITING_FOR_BLOCK]);
    for minute in 1..9 {
        let wanted = 5 * (minute % 2);
        assert!(look(minute, exhausted, wanted).is_empty(), "{minute}");
    }
    assert_eq!(look(30, exhausted, 5), [WAITING_FOR_BLOCK]);
    assert_eq!(look(31, "10.0.0.0/24", 5), [BLOCK_ALLOCATED]);
    assert!(look(32, "10.0.0.0/24", 0).is_empty());
}
