//! Tests with too few blocks for all nodes. They check which nodes get a block, and from which nodes blocks are
//! recalled.

use serde_json::json;

use super::*;
use crate::cluster::objects::{Pool, Subnet};
pub(crate) use crate::fixtures::*;
use cadastre_api::{FirstBlock, IPPoolSpec, Warm, WarmMinimum};
use cadastre_daemon::watch::ObjectEvent;

/// Makes the demand loop handle every node once.
fn handle_all(
    demand: &mut Demand,
    cache: &ClusterCache,
    allocations: &mut AllocationState,
    now: crate::Now,
) -> AffectedLoops {
    for node in cache.nodes.iter() {
        demand.add(node, allocations);
    }
    in_step(cache, allocations, now, |cx| demand.work(cx))
}

/// Returns the state after all nodes were handled once.
fn handled(pools: Vec<Pool>, subnets: Vec<Subnet>) -> (Demand, AllocationState) {
    let cache = cluster_of(pools, subnets);
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    handle_all(&mut demand, &cache, &mut allocations, NOW);
    (demand, allocations)
}

/// Returns how many blocks a node has. The UID of each node equals its name.
fn count(allocations: &AllocationState, node: &str) -> usize {
    allocations.blocks.of(&node.into()).count()
}

/// Returns how many blocks of a node are recalled.
fn recalled(allocations: &AllocationState, node: &str) -> usize {
    let own = allocations.blocks.of(&node.into());
    own.filter(|it| it.recall.is_some()).count()
}

fn waiting(demand: &Demand) -> usize {
    demand.waiting().map(|(_, nodes)| nodes).sum()
}

#[test]
fn every_node_gets_its_first_block_before_any_gets_a_second_one() {
    let greedy = ["a", "b", "c"].map(|name| subnet(name, &[], 1000));
    let (_, allocations) = handled(vec![pool("p", "10.0.0.0/26")], greedy.into());
    let counts = ["a", "b", "c"].map(|name| count(&allocations, name));
    assert!(counts.iter().all(|it| *it > 0), "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 4, "none is left over");
}

#[test]
fn for_a_node_without_any_block_one_gives_that_wants_more_than_it_uses() {
    let all = ["10.0.0.0/28", "10.0.0.16/28"];
    // No block is recalled for a node that has a block already, nor from a node with only one block.
    for (range, rich, poor, wanted, count) in [
        ("10.0.0.0/27", &all[..], &[][..], 1, 1),
        ("10.0.0.0/26", &all[..], &["10.0.0.32/28"][..], 1000, 0),
        ("10.0.0.0/28", &all[..1], &[][..], 1000, 0),
    ] {
        let nodes = vec![subnet("rich", rich, 1000), subnet("poor", poor, wanted)];
        let (_, allocations) = handled(vec![pool("p", range)], nodes);
        assert_eq!(recalled(&allocations, "rich"), count, "{range}");
    }
}

#[test]
fn a_node_that_lacks_its_minimum_takes_no_block_of_others() {
    let minimum = |spec: &mut IPPoolSpec| {
        spec.terms.warm = Warm {
            low: 20,
            high: 50,
            minimum: WarmMinimum::MaxPods,
        };
    };
    // All blocks are allocated, and node rich needs both of its blocks for its low mark. A demand of 60 is the minimum
    // of node poor. With a demand of 61, a pod waits.
    for (wanted, count) in [(60, 0), (61, 1)] {
        let nodes = vec![
            subnet("rich", &["10.0.0.0/28", "10.0.0.16/28"], 20),
            subnet("poor", &["10.0.0.32/28"], wanted),
            subnet("third", &["10.0.0.48/28"], 0),
        ];
        let mut cache = cluster_of(vec![pool_with("p", "10.0.0.0/26", minimum)], nodes);
        let poor = Node {
            max_pods: 60,
            version: 2,
            ..Node::clone(cache.nodes.get("poor").unwrap())
        };
        cache.nodes.change(ObjectEvent::Applied(poor));
        let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
        handle_all(&mut demand, &cache, &mut allocations, NOW);
        assert_eq!(recalled(&allocations, "rich"), count, "{wanted}");
    }
}

#[test]
fn a_node_that_no_pool_serves_any_more_waits_for_none() {
    let pools = |disabled: bool| -> Vec<Pool> {
        let pools = [("p", "10.0.0.0/28"), ("q", "10.0.1.0/28")];
        let pool = |(name, range)| pool_with(name, range, |spec| spec.disabled = disabled);
        pools.map(pool).into()
    };
    let subnets = || {
        let mut wants = subnet("a", &[], 1000);
        wants.report.as_mut().unwrap().demand = [("p".into(), 1000), ("q".into(), 1000)].into();
        vec![wants]
    };
    let (mut demand, mut allocations) = handled(pools(false), subnets());
    assert_eq!(waiting(&demand), 2);
    let cache = cluster_of(pools(true), subnets());
    allocations.pools.evaluate(&cache, &[], NOW.mono);
    handle_all(&mut demand, &cache, &mut allocations, NOW);
    assert_eq!(waiting(&demand), 0);
}

#[test]
fn what_is_on_its_way_to_a_node_counts() {
    let (_, allocations) = handled(vec![pool("p", "10.0.0.0/24")], vec![subnet("a", &[], 10)]);
    assert_eq!(count(&allocations, "a"), 1);
}

#[test]
fn a_block_that_a_node_lets_go_of_is_none_that_it_has() {
    for (released, blocks) in [(false, 1), (true, 2)] {
        let mut wants = subnet("a", &["10.0.0.0/28"], 10);
        wants.report.as_mut().unwrap().blocks[0].released = released;
        let (_, allocations) = handled(vec![pool("p", "10.0.0.0/24")], vec![wants]);
        assert_eq!(count(&allocations, "a"), blocks);
    }
}

#[test]
fn a_node_whose_only_block_is_drained_gets_another_one_without_demand() {
    for (is_drained, blocks) in [(false, 1), (true, 2)] {
        let mut idle = subnet("a", &["10.0.0.0/28"], 0);
        if is_drained {
            idle.requests.drain.insert(cidr("10.0.0.0/28"));
        }
        let (_, allocations) = handled(vec![pool("p", "10.0.0.0/24")], vec![idle]);
        assert_eq!(count(&allocations, "a"), blocks);
    }
}

#[test]
fn a_smaller_block_that_was_avoided_is_allocated_once_no_pod_uses_it() {
    // Only one address of the pool is not allocated, and a pod reports that address.
    let mut cache = cluster_of(vec![pool("p", "10.0.0.0/28")], vec![subnet("a", &[], 1)]);
    let ranges = ["10.0.0.0/29", "10.0.0.8/30", "10.0.0.12/31", "10.0.0.14/32"];
    let other = node_with("other", &ranges);
    cache.nodes.change(ObjectEvent::Applied(other));
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    demand.add_name(&"a".into(), &cache, &allocations);
    let mut carved = Vec::new();
    for (second, addresses) in [(0, &["10.0.0.15"][..]), (6, &[][..])] {
        let pod = pod(second + 1, addresses);
        cache.pods.change(ObjectEvent::Applied(pod));
        let work = |cx: &mut Context| demand.work(cx).blocks;
        carved.push(in_step(&cache, &mut allocations, at(second), work));
    }
    assert_eq!(carved, [vec![], vec![cidr("10.0.0.15/32")]]);
}

#[test]
fn a_node_does_not_get_a_range_that_it_is_asked_to_drain() {
    let mut asked = subnet("a", &[], 1);
    asked.requests.drain.insert(cidr("10.0.0.0/28"));
    let mut cache = cluster_of(vec![pool("p", "10.0.0.0/28")], vec![asked]);
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    demand.add_name(&"a".into(), &cache, &allocations);
    let mut reports = Vec::new();
    let blocks = demand
        .work(&mut Context::new(
            &cache,
            &mut allocations,
            &mut reports,
            at(0),
        ))
        .blocks;
    assert!(blocks.is_empty(), "{blocks:?}");
    let why = "what it is asked to drain: 10.0.0.0/28 (kubectl cadastre undrain)";
    assert!(
        matches!(&reports[..], [it] if it.reason == WAITING_FOR_BLOCK && it.note.contains(why)),
        "{reports:?}"
    );
    let undrained = Subnet {
        version: 9,
        ..subnet("a", &[], 1)
    };
    cache.subnets.change(ObjectEvent::Applied(undrained));
    let work = |cx: &mut Context| demand.work(cx).blocks;
    let blocks = in_step(&cache, &mut allocations, at(6), work);
    assert_eq!(blocks, [cidr("10.0.0.0/28")]);
}

/// Returns the name of each node, with the number of its blocks that are recalled after `seconds`. `more` are fields of
/// the pool's spec.
fn recalled_after(
    seconds: u64,
    more: &serde_json::Value,
    subnets: Vec<Subnet>,
) -> Vec<(String, usize)> {
    let pool = pool_with("p", "10.0.0.0/26", |spec| {
        let mut whole = serde_json::to_value(&*spec).unwrap();
        let more = more.as_object().unwrap().clone();
        whole.as_object_mut().unwrap().extend(more);
        *spec = serde_json::from_value(whole).unwrap();
    });
    let cache = cluster_of(vec![pool], subnets);
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    for second in [0, seconds] {
        handle_all(&mut demand, &cache, &mut allocations, at(second));
    }
    let names = cache.nodes.iter().map(|node| node.name.to_string());
    let all = names.map(|name| (name.clone(), recalled(&allocations, &name)));
    all.filter(|(_, count)| *count > 0).collect()
}

const FOUR: [&str; 4] = [
    "10.0.0.0/28",
    "10.0.0.16/28",
    "10.0.0.32/28",
    "10.0.0.48/28",
];

/// Returns five NodeSubnets. Four of them belong to nodes with one empty block and a demand of 3 addresses each. The
/// last one is `fifth`.
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
    // No block is recalled just to give a node without demand its first block. Also, no block is recalled from a node
    // whose pods are about to use the block.
    let sight = four_idle_and(subnet("fifth", &[], 0));
    assert_eq!(recalled_after(1000, &spec, sight), []);
    let mut all = asks();
    for it in &mut all[..4] {
        it.report.as_mut().unwrap().demand = [("p".into(), 4)].into();
    }
    assert_eq!(recalled_after(1000, &spec, all), []);
}

#[test]
fn the_last_block_is_recalled_if_the_pool_allocates_only_on_request() {
    let idle = || vec![subnet("a", &FOUR[..1], 3)];
    for (spec, count) in [
        (json!({"assignment": "Manual"}), 1),
        (json!({"firstBlock": "OnDemand"}), 1),
        (json!({"podSelector": {"matchLabels": {"a": "b"}}}), 1),
        (json!({"assignment": "Manual", "disabled": true}), 0),
        (json!({}), 0),
    ] {
        assert_eq!(recalled_after(299, &spec, idle()), [], "{spec}");
        let after = recalled_after(300, &spec, idle());
        let after: usize = after.iter().map(|it| it.1).sum();
        assert_eq!(after, count, "{spec}");
    }
}

/// Returns how many blocks are recalled at these times, in milliseconds, if four nodes have the pool's blocks and use
/// none, and a fifth one waits.
fn recalls_at<const N: usize>(times: [u64; N]) -> [usize; N] {
    let subnets = four_idle_and(subnet("fifth", &[], 4));
    let cache = cluster_of(vec![pool("p", "10.0.0.0/26")], subnets);
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    times.map(|ms| {
        let now = crate::Now {
            mono: Duration::from_millis(ms),
            ..NOW
        };
        handle_all(&mut demand, &cache, &mut allocations, now);
        let all = allocations.blocks.iter();
        all.filter(|it| it.recall.is_some()).count()
    })
}

#[test]
fn blocks_are_recalled_at_most_once_a_second() {
    assert_eq!(recalls_at([0, 4_500, 5_000, 5_500]), [0, 0, 0, 1]);
}

#[test]
fn at_most_64_blocks_are_requested_at_once() {
    let subnets = (0..70).map(|n| subnet(&format!("n{n}"), &[], 0)).collect();
    let cache = cluster_of(vec![pool("p", "10.0.0.0/16")], subnets);
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache));
    let affected = handle_all(&mut demand, &cache, &mut allocations, NOW);
    assert_eq!(affected.blocks.len(), 64);
}

#[test]
fn an_agent_that_does_not_answer_delays_nobody_for_long() {
    assert_eq!(recalls_at([0, 5_000, 14_000, 15_000]), [0, 1, 1, 2]);
}

/// The blocks are /48s. An agent reports for them the largest numbers that the API allows, and sums of these must not
/// overflow.
#[test]
fn sums_of_addresses_beyond_64_bits_do_not_overflow() {
    const MOST: u64 = i64::MAX.unsigned_abs();
    let blocks = [
        "fd00::/48",
        "fd00:0:1::/48",
        "fd00:0:2::/48",
        "fd00:0:3::/48",
    ];
    let wide = pool_of_v6("p", "fd00::/46", 48);
    // A node whose blocks are empty can spare a block even if its agent has not reported all of them. If the agent has
    // reported none of its blocks, the node can spare no block.
    for (busy, reported, spared) in [(0, 4, 1), (0, 1, 1), (MOST, 4, 0), (0, 0, 0)] {
        let mut rich = subnet("rich", &blocks, 1000);
        let report = rich.report.as_mut().unwrap();
        let mut of_blocks = std::mem::take(&mut report.blocks).into_vec();
        of_blocks.truncate(reported);
        for block in &mut of_blocks {
            (block.used, block.cooling, block.free) = (busy, busy, MOST);
        }
        report.blocks = of_blocks.into();
        let nodes = vec![rich, subnet("poor", &[], 1)];
        let (_, allocations) = handled(vec![wide.clone()], nodes);
        let counts = ["rich", "poor"].map(|name| count(&allocations, name));
        assert_eq!(counts, [4, 0]);
        let case = format!("{busy} busy, {reported} reported");
        assert_eq!(recalled(&allocations, "rich"), spared, "{case}");
    }
}

fn on_demand(spec: &mut IPPoolSpec) {
    spec.first_block = FirstBlock::OnDemand;
}

/// Pods fail and are created again, so the demand of their node comes and goes while the pool stays exhausted.
#[test]
fn a_wait_that_ends_without_a_block_is_not_reported_as_one_and_reported_again_only_much_later() {
    let pools = |range: &str| vec![pool_with("p", range, on_demand)];
    let nodes = |wanted| vec![subnet("a", &[], wanted), subnet("b", &["10.0.0.0/28"], 16)];
    let (mut demand, mut allocations) = handled(pools("10.0.0.0/28"), nodes(0));
    // Handles both nodes, and returns the reasons of the events.
    let mut handle = |minutes: u64, range: &str, wanted: u64| {
        let cache = cluster_of(pools(range), nodes(wanted));
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        demand.requeue();
        demand.add_name(&"a".into(), &cache, &allocations);
        let now = at(60 * minutes);
        reported(&cache, &mut allocations, now, |cx| demand.work(cx)).1
    };
    let exhausted = "10.0.0.0/28";
    assert_eq!(handle(0, exhausted, 5), [WAITING_FOR_BLOCK]);
    for minute in 1..9 {
        let wanted = 5 * (minute % 2);
        assert!(handle(minute, exhausted, wanted).is_empty(), "{minute}");
    }
    assert_eq!(handle(30, exhausted, 5), [WAITING_FOR_BLOCK]);
    assert_eq!(handle(31, "10.0.0.0/24", 5), [BLOCK_ALLOCATED]);
    assert!(handle(32, "10.0.0.0/24", 0).is_empty());
}

#[test]
fn blocks_of_another_pool_do_not_end_a_wait() {
    let cache = |of_p: u64, of_q: u64| {
        let pools = [("p", "10.0.0.0/28"), ("q", "10.0.1.0/24")];
        let pools = pools.map(|(name, range)| pool_with(name, range, on_demand));
        let mut wants = subnet("a", &[], 0);
        wants.report.as_mut().unwrap().demand = [("p".into(), of_p), ("q".into(), of_q)].into();
        let all = vec![wants, subnet("b", &["10.0.0.0/28"], 16)];
        cluster_of(pools.into(), all)
    };
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache(0, 0)));
    let mut handle = |of_p, of_q| {
        let cache = cache(of_p, of_q);
        demand.add_name(&"a".into(), &cache, &allocations);
        let work = |cx: &mut Context| demand.work(cx);
        reported(&cache, &mut allocations, at(3), work).1
    };
    assert_eq!(handle(5, 0), [WAITING_FOR_BLOCK]);
    assert!(handle(5, 5).is_empty(), "a block of pool q");
    assert!(handle(0, 5).is_empty(), "nothing of pool p");
    assert_eq!(count(&allocations, "a"), 1);
}

/// Makes the demand loop handle the node of this name, and returns how many blocks the node has then.
fn handle(
    demand: &mut Demand,
    name: &str,
    cache: &ClusterCache,
    allocations: &mut AllocationState,
) -> usize {
    demand.add_name(&name.into(), cache, allocations);
    in_step(cache, allocations, at(3), |cx| demand.work(cx));
    count(allocations, name)
}

#[test]
fn a_node_without_demand_gets_a_first_block_unless_nodes_with_demand_wait() {
    for (wanted, gets) in [(10, 0), (0, 1)] {
        let nodes = || {
            vec![
                subnet("a", &[], wanted),
                subnet("has", &["10.0.0.0/28"], 16),
                subnet("without", &[], 0),
            ]
        };
        let full = cluster_of(vec![pool("p", "10.0.0.0/28")], nodes());
        let (mut demand, mut allocations) = (Demand::default(), rebuilt(&full));
        assert_eq!(handle(&mut demand, "a", &full, &mut allocations), 0);
        assert_eq!(waiting(&demand), 1);
        assert_eq!(demand.wanted_by_pods().count(), usize::from(wanted > 0));
        assert_eq!(
            demand.full.len(),
            1,
            "the pool is not searched for each node"
        );
        let with_room = cluster_of(vec![pool("p", "10.0.0.0/27")], nodes());
        allocations.pools.evaluate(&with_room, &[], NOW.mono);
        demand.full.clear();
        let blocks = handle(&mut demand, "without", &with_room, &mut allocations);
        assert_eq!(blocks, gets, "{wanted}");
        // Once the node with demand is gone, the other one gets the block although nothing else queues it.
        demand.gone(&node("a"));
        in_step(&with_room, &mut allocations, at(4), |cx| demand.work(cx));
        assert_eq!(count(&allocations, "without"), 1, "{wanted}");
    }
}

#[test]
fn a_wait_begins_and_ends_with_its_node_and_lets_the_loop_run_again() {
    let cache = |wanted| {
        let nodes = vec![
            subnet("a", &[], wanted),
            subnet("has", &["10.0.0.0/28"], 16),
        ];
        cluster_of(vec![pool("p", "10.0.0.0/28")], nodes)
    };
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache(10)));
    handle(&mut demand, "has", &cache(10), &mut allocations);
    assert!(demand.waiting_since().is_none() && demand.load().next_at.is_none());
    assert!(!demand.take_recount());
    // A wait counts as changed only if the node lacks another number of addresses.
    for (wanted, is_changed) in [(10, true), (10, false), (11, true)] {
        handle(&mut demand, "a", &cache(wanted), &mut allocations);
        assert_eq!(demand.waiting_since(), Some(at(3).mono));
        let (pool, name) = ("p".into(), "a".into());
        assert!(demand.waiting_nodes().eq([(&pool, &name)]));
        assert!(demand.wanted_by_pods().eq([&pool]));
        assert_eq!(demand.take_recount(), is_changed, "{wanted}");
    }
    assert_eq!(
        demand.load().next_at,
        Some(at(4).mono),
        "the next round of recalls"
    );
    let earlier = Node {
        uid: "earlier".into(),
        ..node("a")
    };
    demand.gone(&earlier);
    assert_eq!(waiting(&demand), 1, "an earlier node of the name is gone");
    demand.gone(&node("a"));
    assert!(waiting(&demand) == 0 && demand.take_recount());
}

#[test]
fn a_node_that_wants_more_blocks_than_it_may_have_is_reported_once() {
    let cache = |wanted| {
        let pool = pool_with("p", "10.0.0.0/24", |spec| {
            spec.max_blocks_per_node = Some(1);
        });
        cluster_of(vec![pool], vec![subnet("a", &["10.0.0.0/28"], wanted)])
    };
    let (mut demand, mut allocations) = (Demand::default(), rebuilt(&cache(10)));
    let mut reports = |second: u64, wanted: u64, gone: Option<&str>| {
        let cache = cache(wanted);
        if let Some(uid) = gone {
            demand.gone(&node(uid));
        }
        demand.add_name(&"a".into(), &cache, &allocations);
        let events = reported(&cache, &mut allocations, at(second), |cx| demand.work(cx)).1;
        events == [BLOCK_LIMIT]
    };
    assert!(!reports(0, 10, None), "its block suffices");
    assert!(reports(1, 1000, None));
    assert!(!reports(1000, 1000, None), "it still wants more");
    assert!(!reports(1001, 1000, Some("another")));
    assert!(reports(1002, 1000, Some("a")), "a new node of this name");
    // A demand that comes and goes is reported again only after a while.
    assert!(!reports(1003, 10, None) && !reports(1004, 1000, None));
    assert!(!reports(2000, 10, None) && reports(2001, 1000, None));
}
