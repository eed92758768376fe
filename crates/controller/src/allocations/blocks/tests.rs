//! Tests of which node gets a block if IPAMBlocks, lists in NodeSubnets, and Nodes contradict each other.

use std::time::Duration;

use jiff::Timestamp;

use super::super::holders::HolderUse;
use crate::allocations::AllocationState;
use crate::block::BlockLoop;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{Block, BlockSpec, MachineIdentity, Node, Owner, Pool, Subnet};
use crate::cluster::request::RequestOutcome;
use crate::demand::Demand;
use crate::purpose::Step;
use crate::reconcile::{Loop as _, RequestAnswer};
use crate::{Context, Now, Purpose};
use cadastre_api::{AllocatedBlock, IPPoolSpec, NodeSubnetSpec, Requests, block_name};
use cadastre_core::{Cidr, HoldingState};
use cadastre_daemon::watch::ObjectEvent;

const BLOCK: &str = "10.0.0.0/26";

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn now() -> Now {
    Now {
        mono: Duration::from_secs(1),
        wall: Timestamp::UNIX_EPOCH,
    }
}

fn node(name: &str, uid: &str, ranges: &[&str]) -> Node {
    Node {
        uid: uid.into(),
        pod_cidrs: ranges.iter().map(|it| cidr(it)).collect(),
        ..crate::demand::tests::node(name)
    }
}

fn object(name: &str, uid: &str, resting: bool) -> Block {
    let spec = BlockSpec {
        cidr: cidr(BLOCK),
        pool: "p".into(),
        owner: Owner {
            quarantined: resting,
            name: name.into(),
            uid: uid.into(),
            machine: MachineIdentity::default(),
        },
        since: Timestamp::UNIX_EPOCH,
        until: None,
    };
    Block {
        name: block_name(&cidr(BLOCK)).into(),
        uid: "b1".into(),
        version: 5,
        touched: false,
        spec: Ok(spec),
    }
}

fn list(name: &str, uid: &str) -> Subnet {
    let held = AllocatedBlock {
        cidr: BLOCK.to_owned(),
        uid: "b1".to_owned(),
        pool: "p".to_owned(),
        recall: None,
        reserved: Vec::new(),
        on_request: Vec::new(),
    };
    Subnet {
        name: name.into(),
        uid: format!("subnet of {name}").into(),
        version: 7,
        spec: Ok(NodeSubnetSpec {
            node_uid: Some(uid.to_owned()),
            blocks: vec![held],
            ..NodeSubnetSpec::default()
        }),
        is_partial: false,
        requests: Requests::default(),
        report: None,
    }
}

fn cache(nodes: &[Node], objects: &[Block], lists: &[Subnet]) -> ClusterCache {
    let mut cache = ClusterCache::default();
    for node in nodes {
        cache.nodes.change(ObjectEvent::Applied(node.clone()));
    }
    for block in objects {
        cache.blocks.change(ObjectEvent::Applied(block.clone()));
    }
    for subnet in lists {
        cache.subnets.change(ObjectEvent::Applied(subnet.clone()));
    }
    cache
}

fn owner(allocations: &AllocationState) -> (String, bool) {
    let owner = &allocations.blocks.get(&cidr(BLOCK)).unwrap().owner;
    (owner.uid.to_string(), owner.quarantined)
}

#[test]
fn a_later_block_of_the_dead_takes_nothing_from_the_living() {
    let older = object("a", "alive", false);
    // The newer object is from a creation that arrived late; the node that it names no longer exists.
    let mut newer = object("b", "dead", false);
    newer.name = block_name(&cidr("10.0.0.0/25")).into();
    (newer.uid, newer.version) = ("b2".into(), 9);
    newer.spec.as_mut().unwrap().cidr = cidr("10.0.0.0/25");
    let cache = cache(&[node("a", "alive", &[])], &[older, newer], &[]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    allocations.judge_blocks(&cache);
    let is_held = |text| allocations.blocks.get(&cidr(text)).unwrap().is_held();
    assert!(is_held(BLOCK) && !is_held("10.0.0.0/25"));
}

#[test]
fn a_list_for_the_dead_takes_no_block_from_the_living() {
    let lists = [list("a", "alive"), list("b", "dead")];
    let cache = cache(
        &[node("a", "alive", &[])],
        &[object("a", "alive", false)],
        &lists,
    );
    let (allocations, _) = AllocationState::rebuild(&cache, &[], now());
    assert_eq!(owner(&allocations), ("alive".to_owned(), false));
}

#[test]
fn what_a_live_node_is_listed_is_its_own_whatever_the_object_says() {
    for said in [object("a", "alive", true), object("b", "other", true)] {
        let cache = cache(&[node("a", "alive", &[])], &[said], &[list("a", "alive")]);
        let (allocations, _) = AllocationState::rebuild(&cache, &[], now());
        assert_eq!(owner(&allocations), ("alive".to_owned(), false));
        assert_eq!(allocations.listed_blocks(&"alive".into(), None).len(), 1);
        let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
        assert_eq!(entry.step, Step::Replace);
    }
}

#[test]
fn a_list_that_names_an_earlier_block_takes_none_from_whose_it_is_now() {
    for (lives, rests) in [(false, false), (false, true), (true, false)] {
        let mut later = object("b", "other", rests);
        later.uid = "b2".into();
        let mut nodes = vec![node("a", "alive", &[])];
        nodes.extend(lives.then(|| node("b", "other", &[])));
        let mut theirs = list("b", "other");
        if let Ok(spec) = &mut theirs.spec {
            spec.blocks[0].uid = "b2".to_owned();
        }
        // The list of node a is outdated: a user deleted its NodeSubnet, then a late write created it again.
        let mut lists = vec![list("a", "alive")];
        lists.extend((!rests).then_some(theirs));
        let cache = cache(&nodes, &[later], &lists);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
        assert_eq!(owner(&allocations), ("other".to_owned(), !lives));
        allocations.listed_blocks_changed(&"a".into(), &cache, now());
        assert_eq!(owner(&allocations), ("other".to_owned(), !lives));
    }
}

#[test]
fn an_object_that_was_made_late_takes_no_block_from_the_node_that_is_listed_it() {
    for lives in [false, true] {
        // A user has deleted the object that node a's list names, so a late creation for node b succeeded.
        let mut late = object("b", "other", false);
        late.uid = "b2".into();
        let mut nodes = vec![node("a", "alive", &[])];
        nodes.extend(lives.then(|| node("b", "other", &[])));
        let cache = cache(&nodes, &[late], &[list("a", "alive")]);
        let (allocations, _) = AllocationState::rebuild(&cache, &[], now());
        assert_eq!(owner(&allocations), ("alive".to_owned(), false));
        assert_eq!(allocations.listed_blocks(&"alive".into(), None).len(), 1);
    }
}

#[test]
fn what_a_dead_node_had_rests_also_where_a_podcidr_overlaps_it() {
    let other = node("x", "x", &["10.0.0.0/24"]);
    let cache = cache(&[other], &[object("a", "dead", false)], &[]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    allocations.judge_blocks(&cache);
    let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
    assert!(entry.owner.quarantined && entry.confirmed, "{entry:?}");
    assert_eq!(entry.step, Step::Replace);
}

#[test]
fn what_a_late_write_lists_to_a_live_node_is_the_nodes() {
    let mut cache = cache(&[node("a", "alive", &[])], &[], &[]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    cache
        .subnets
        .change(ObjectEvent::Applied(list("a", "alive")));
    let name = "a".into();
    let told = allocations.listed_blocks_changed(&name, &cache, now());
    assert_eq!(told, [cidr(BLOCK)]);
    assert_eq!(allocations.listed_blocks(&"alive".into(), None).len(), 1);
    assert!(
        allocations
            .listed_blocks_changed(&name, &cache, now())
            .is_empty()
    );
}

#[test]
fn what_a_late_write_lists_to_a_live_node_rests_no_more() {
    let rests = object("a", "dead", true);
    let mut cache = cache(&[node("a", "alive", &[])], &[rests], &[]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    // The quarantine is over, so the block is about to be deleted.
    allocations.blocks.get_mut(&cidr(BLOCK)).unwrap().step = Step::Delete;
    cache
        .subnets
        .change(ObjectEvent::Applied(list("a", "alive")));
    let told = allocations.listed_blocks_changed(&"a".into(), &cache, now());
    assert_eq!(told, [cidr(BLOCK)]);
    assert_eq!(owner(&allocations), ("alive".to_owned(), false));
    assert_eq!(allocations.listed_blocks(&"alive".into(), None).len(), 1);
}

#[test]
fn an_object_that_cannot_be_read_is_written_anew() {
    let spoiled = Block {
        spec: Err("missing field owner".to_owned()),
        ..object("a", "alive", false)
    };
    let cache = cache(
        &[node("a", "alive", &[])],
        std::slice::from_ref(&spoiled),
        &[list("a", "alive")],
    );
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    let noted = allocations.block_seen(&spoiled, now());
    assert_eq!(noted.blocks, [cidr(BLOCK)]);
    let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
    assert_eq!(entry.step, Step::Replace);
}

#[test]
fn an_answer_for_an_earlier_block_of_the_cidr_is_not_for_the_next_one() {
    let cache = cache(&[node("a", "alive", &[])], &[], &[list("a", "alive")]);
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    let holder = allocations.holder(&"z".into(), &"z".into());
    let earlier = allocations
        .ledger
        .record(holder, cidr(BLOCK), HoldingState::Allocated);
    allocations.ledger.release(earlier);
    let entry = allocations.blocks.get_mut(&cidr(BLOCK)).unwrap();
    entry.in_flight = true;
    let holding = entry.holding;
    let mut reports = Vec::new();
    let mut cx = Context::new(&cache, &mut allocations, &mut reports, now());
    let mut blocks = BlockLoop::default();
    for (holding, in_flight) in [(earlier, true), (holding, false)] {
        let (cidr, step) = (cidr(BLOCK), Some(Step::Delete));
        let purpose = Purpose::Block {
            cidr,
            holding,
            step,
        };
        blocks.answered(
            &RequestAnswer::to_write(&purpose, &RequestOutcome::Gone),
            &mut cx,
        );
        let entry = cx.allocations.blocks.get(&cidr).unwrap();
        assert_eq!(entry.in_flight, in_flight);
    }
}

#[test]
fn the_first_block_comes_from_the_next_pool_where_the_best_is_full() {
    let pool = |name: &str, range: &str, priority: i32| Pool {
        spec: serde_json::from_value::<IPPoolSpec>(serde_json::json!({
            "ipv4": {"cidrs": [range]}, "priority": priority,
        }))
        .map_err(|error| error.to_string()),
        ..crate::demand::tests::pool(name, range)
    };
    let first = node("a", "alive", &[]);
    let mut cache = cache(&[first.clone(), node("x", "x", &[BLOCK])], &[], &[]);
    for pool in [pool("best", BLOCK, 1), pool("next", "10.0.1.0/26", 0)] {
        cache.pools.change(ObjectEvent::Applied(pool));
    }
    let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now());
    let mut demand = Demand::default();
    demand.add(&first, &allocations);
    let mut reports = Vec::new();
    let mut cx = Context::new(&cache, &mut allocations, &mut reports, now());
    let noted = demand.work(&mut cx);
    assert_eq!(noted.blocks, [cidr("10.0.1.0/26")]);
    assert!(reports.is_empty(), "it waits for nothing: {reports:?}");
}

/// Returns the object of a block. `touched` says whether the object was edited after its creation.
fn of(range: &str, owner: &str, version: u64, touched: bool) -> Block {
    let mut block = object(owner, owner, false);
    let spec = block.spec.as_mut().unwrap();
    spec.cidr = cidr(range);
    block.name = block_name(&spec.cidr).into();
    Block {
        uid: range.into(),
        version,
        touched,
        ..block
    }
}

/// Builds the ledger and decides about all provisional blocks. Returns the ranges of the blocks that are confirmed and
/// stay.
fn judged(cache: &ClusterCache) -> Vec<String> {
    let (mut allocations, _) = AllocationState::rebuild(cache, &[], now());
    allocations.judge_blocks(cache);
    let all = allocations.blocks.iter();
    let stay = all.filter(|entry| entry.confirmed && !entry.is_leaving());
    stay.map(|entry| entry.cidr.to_string()).collect()
}

#[test]
fn a_block_yields_to_a_podcidr_that_overlaps_it() {
    let nodes = |range: &str| [node("a", "a", &[]), node("x", "x", &[range])];
    let blocks = [of(BLOCK, "a", 5, false)];
    assert_eq!(judged(&cache(&nodes("10.1.0.0/24"), &blocks, &[])), [BLOCK]);
    assert!(judged(&cache(&nodes("10.0.0.0/24"), &blocks, &[])).is_empty());
}

#[test]
fn of_two_blocks_the_older_object_stays_and_an_edited_one_counts_as_older() {
    let nodes = [node("a", "a", &[]), node("b", "b", &[])];
    let half = "10.0.0.0/27";
    for (touched, stays) in [(false, half), (true, BLOCK)] {
        let blocks = [of(BLOCK, "a", 9, touched), of(half, "b", 7, false)];
        assert_eq!(judged(&cache(&nodes, &blocks, &[])), [stays]);
    }
}

#[test]
fn nothing_is_judged_while_a_list_runs() {
    let mut cache = cache(&[node("a", "a", &[])], &[], &[]);
    let asked = Duration::ZERO;
    cache.blocks.change(ObjectEvent::Restarted { asked });
    let block = of(BLOCK, "a", 5, false);
    cache.blocks.change(ObjectEvent::Applied(block));
    assert!(judged(&cache).is_empty());
    cache.blocks.change(ObjectEvent::Listed);
    assert_eq!(judged(&cache), [BLOCK]);
}

/// Returns allocations with a block that was chosen for the node, but whose creation was not requested yet.
fn with_chosen_block(node: &Node) -> AllocationState {
    let mut allocations = AllocationState::default();
    let holder = allocations
        .holders
        .intern(HolderUse::Blocks, &node.name, &node.uid);
    let holding = allocations
        .ledger
        .record(holder, cidr(BLOCK), HoldingState::InFlight);
    allocations.begin_block(holding, cidr(BLOCK), &"p".into(), node, now());
    allocations
}

#[test]
fn a_block_that_nobody_has_heard_of_ends_with_its_node() {
    let gone = node("a", "a", &[]);
    let mut allocations = with_chosen_block(&gone);
    allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, now());
    assert!(
        allocations
            .ledger
            .overlapping(&cidr(BLOCK))
            .next()
            .is_none()
    );
}

#[test]
fn a_block_that_was_chosen_only_gives_way_to_what_somebody_else_gave() {
    let waits = node("a", "a", &[]);
    let mut allocations = with_chosen_block(&waits);
    let elsewhere = cidr("10.1.0.0/24");
    assert!(allocations.drop_unsent(&[elsewhere]).is_empty());
    let asked = |allocations: &mut AllocationState, is: bool| {
        allocations.blocks.get_mut(&cidr(BLOCK)).unwrap().in_flight = is;
    };
    asked(&mut allocations, true);
    let foreign = cidr("10.0.0.0/22");
    assert!(allocations.drop_unsent(&[foreign]).is_empty());
    asked(&mut allocations, false);
    assert_eq!(allocations.drop_unsent(&[foreign]), [waits.name]);
    assert!(
        allocations
            .ledger
            .overlapping(&cidr(BLOCK))
            .next()
            .is_none()
    );
}
