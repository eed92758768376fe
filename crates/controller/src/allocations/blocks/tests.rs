//! Tests of which node gets a block if IPAMBlocks, the blocks in NodeSubnets, and Nodes contradict each other.

use crate::allocations::AllocationState;
use crate::block::BlockLoop;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{AgentReport, Block, BlockReport, Claim, Node, Owner, Subnet};
use crate::cluster::request::RequestOutcome;
use crate::demand::Demand;
use crate::fixtures::{
    addr, at, block, block_report, cidr, claim, cluster, in_step, list, listed_block, node_with,
    pool_with, rebuilt, reported, subnet, with_chosen_block,
};
use crate::purpose::Step;
use crate::reconcile::{Loop as _, RequestAnswer};
use crate::{Context, Purpose};
use cadastre_core::HoldingState;
use cadastre_daemon::watch::ObjectEvent;

const BLOCK: &str = "10.0.0.0/26";

fn node(name: &str, uid: &str) -> Node {
    Node {
        uid: uid.into(),
        ..node_with(name, &[])
    }
}

/// Returns the object of [`BLOCK`].
fn object(name: &str, uid: &str, quarantined: bool) -> Block {
    let owner = Owner {
        quarantined,
        ..Owner::node(&name.into(), &uid.into())
    };
    Block {
        uid: "b1".into(),
        version: 5,
        ..block(BLOCK, owner)
    }
}

/// Returns a NodeSubnet that lists [`BLOCK`], with `object_uid` as the UID of the block's object.
fn listing(name: &str, node_uid: &str, object_uid: &str) -> Subnet {
    let mut subnet = subnet(name, &[], 0);
    let spec = subnet.spec.as_mut().unwrap();
    spec.node_uid = Some(node_uid.to_owned());
    spec.blocks = vec![listed_block(BLOCK)];
    spec.blocks[0].uid = object_uid.to_owned();
    subnet.report = None;
    subnet
}

fn cache(nodes: Vec<Node>, objects: Vec<Block>, lists: Vec<Subnet>) -> ClusterCache {
    let mut cache = cluster(Vec::new(), nodes);
    list(&mut cache.blocks, objects);
    list(&mut cache.subnets, lists);
    cache
}

/// Returns the UID of the owner of [`BLOCK`], and whether the block is quarantined.
fn owner(allocations: &AllocationState) -> (String, bool) {
    let owner = &allocations.blocks.get(&cidr(BLOCK)).unwrap().owner;
    (owner.uid.to_string(), owner.quarantined)
}

fn step(allocations: &AllocationState) -> Step {
    allocations.blocks.get(&cidr(BLOCK)).unwrap().step
}

/// Returns how many blocks the NodeSubnet of the node with UID `alive` should list.
fn listed(allocations: &AllocationState) -> usize {
    allocations.listed_blocks(&"alive".into(), None).len()
}

#[test]
fn a_later_block_of_a_deleted_node_takes_nothing_from_a_live_node() {
    let older = object("a", "alive", false);
    // A late write created the newer object for a node that no longer exists.
    let newer = object_of("10.0.0.0/25", "deleted", 9, false);
    let cache = cache(vec![node("a", "alive")], vec![older, newer], Vec::new());
    let mut allocations = rebuilt(&cache);
    allocations.judge_blocks(&cache);
    let is_held = |text| allocations.blocks.get(&cidr(text)).unwrap().is_held();
    assert!(is_held(BLOCK) && !is_held("10.0.0.0/25"));
}

#[test]
fn a_list_for_a_deleted_node_takes_no_block_from_a_live_node() {
    let lists = vec![listing("a", "alive", "b1"), listing("b", "deleted", "b1")];
    let objects = vec![object("a", "alive", false)];
    let allocations = rebuilt(&cache(vec![node("a", "alive")], objects, lists));
    assert_eq!(owner(&allocations), ("alive".to_owned(), false));
}

#[test]
fn a_block_that_is_listed_for_a_live_node_is_its_own_whatever_the_object_says() {
    for object in [object("a", "alive", true), object("b", "other", true)] {
        let lists = vec![listing("a", "alive", "b1")];
        let allocations = rebuilt(&cache(vec![node("a", "alive")], vec![object], lists));
        assert_eq!(owner(&allocations), ("alive".to_owned(), false));
        assert_eq!(listed(&allocations), 1);
        assert_eq!(step(&allocations), Step::Replace);
    }
}

#[test]
fn a_virtual_machines_block_is_its_nodes_own_although_a_user_edited_the_owner_in_the_object() {
    let mut object = object("b", "other", false);
    let spec = object.spec.as_mut().unwrap();
    (spec.vmi, spec.last_number) = (Some("vm".into()), 1);
    let nodes = || vec![node("a", "alive"), node("b", "other")];
    let of_a = || listing("a", "alive", "b1+1");
    let edited = cache(nodes(), vec![object.clone()], vec![of_a()]);
    let allocations = rebuilt(&edited);
    assert_eq!(owner(&allocations), ("alive".to_owned(), false));
    let lists = |uid: &str| allocations.listed_blocks(&uid.into(), None);
    assert_eq!((&*lists("alive")[0].uid, lists("other").len()), ("b1+1", 0));
    assert_eq!(step(&allocations), Step::Replace);
    // The other node has the block, so the list of node a comes from a late write.
    let lists = vec![of_a(), listing("b", "other", "b1")];
    let allocations = rebuilt(&cache(nodes(), vec![object], lists));
    assert_eq!(owner(&allocations), ("other".to_owned(), false));
}

#[test]
fn a_standby_that_a_user_made_the_owner_keeps_its_number() {
    for (a, b) in [("a", "b"), ("b", "a")] {
        let other = Owner::node(&b.into(), &"other".into());
        let mut object = object(b, "other", false);
        let spec = object.spec.as_mut().unwrap();
        spec.vmi = Some("vm".into());
        (spec.number, spec.last_number, spec.standby) = (1, 1, vec![(other, 0)]);
        let lists = vec![listing(a, "alive", "b1+1"), listing(b, "other", "b1")];
        let nodes = vec![node(a, "alive"), node(b, "other")];
        let allocations = rebuilt(&cache(nodes, vec![object], lists));
        assert_eq!(owner(&allocations), ("other".to_owned(), false));
        let lists = |uid: &str| -> Vec<String> {
            let listed = allocations.listed_blocks(&uid.into(), None);
            listed.into_iter().map(|it| it.uid).collect()
        };
        assert_eq!(
            (lists("alive"), lists("other")),
            (vec!["b1+1".to_owned()], vec!["b1".to_owned()])
        );
        assert_eq!(step(&allocations), Step::Replace);
    }
}

#[test]
fn a_list_that_names_an_earlier_object_does_not_take_the_block_from_its_present_owner() {
    for (lives, quarantined) in [(false, false), (false, true), (true, false)] {
        let later = Block {
            uid: "b2".into(),
            ..object("b", "other", quarantined)
        };
        let mut nodes = vec![node("a", "alive")];
        nodes.extend(lives.then(|| node("b", "other")));
        // The list of node a is outdated, because a user deleted its NodeSubnet and a late write created it again.
        let mut lists = vec![listing("a", "alive", "b1")];
        lists.extend((!quarantined).then(|| listing("b", "other", "b2")));
        let cache = cache(nodes, vec![later], lists);
        let mut allocations = rebuilt(&cache);
        assert_eq!(owner(&allocations), ("other".to_owned(), !lives));
        allocations.listed_blocks_changed(&"a".into(), &cache, at(1));
        assert_eq!(owner(&allocations), ("other".to_owned(), !lives));
    }
}

#[test]
fn a_block_that_its_agent_uses_is_its_own_although_users_replaced_and_edited_the_object() {
    let edited = Block {
        uid: "b2".into(),
        ..object("b", "other", true)
    };
    for (used, released, owned) in [(1, false, true), (1, true, false), (0, false, false)] {
        let mut subnet = listing("a", "alive", "b1");
        subnet.report = Some(Box::new(AgentReport {
            node_uid: "alive".into(),
            blocks: [BlockReport {
                uid: "b1".into(),
                used,
                released,
                ..block_report(BLOCK)
            }]
            .into(),
            ..AgentReport::default()
        }));
        let nodes = vec![node("a", "alive")];
        let allocations = rebuilt(&cache(nodes, vec![edited.clone()], vec![subnet]));
        let owner = owner(&allocations).0;
        assert_eq!(owner == "alive", owned, "{used} used, released {released}");
    }
}

#[test]
fn an_object_that_was_created_late_does_not_take_the_block_from_the_node_that_lists_it() {
    for lives in [false, true] {
        // A late write created the object of node b. The write succeeded because a user had deleted the object that
        // node a's list names.
        let late = Block {
            uid: "b2".into(),
            ..object("b", "other", false)
        };
        let mut nodes = vec![node("a", "alive")];
        nodes.extend(lives.then(|| node("b", "other")));
        let lists = vec![listing("a", "alive", "b1")];
        let allocations = rebuilt(&cache(nodes, vec![late], lists));
        assert_eq!(owner(&allocations), ("alive".to_owned(), false));
        assert_eq!(listed(&allocations), 1);
    }
}

#[test]
fn a_block_of_a_deleted_node_is_quarantined_even_if_a_podcidr_overlaps_it() {
    let other = node_with("x", &["10.0.0.0/24"]);
    let objects = vec![object("a", "deleted", false)];
    let cache = cache(vec![other], objects, Vec::new());
    let mut allocations = rebuilt(&cache);
    allocations.judge_blocks(&cache);
    let entry = allocations.blocks.get(&cidr(BLOCK)).unwrap();
    assert!(entry.owner.quarantined && entry.confirmed, "{entry:?}");
    assert_eq!(entry.step, Step::Replace);
}

#[test]
fn a_block_that_a_late_write_lists_belongs_to_the_live_node() {
    // In the second case the block's quarantine is over, so the block is about to be deleted.
    for objects in [Vec::new(), vec![object("a", "deleted", true)]] {
        let mut cache = cache(vec![node("a", "alive")], objects, Vec::new());
        let mut allocations = rebuilt(&cache);
        if let Some(entry) = allocations.blocks.get_mut(&cidr(BLOCK)) {
            entry.step = Step::Delete;
        }
        let late = listing("a", "alive", "b1");
        cache.subnets.change(ObjectEvent::Applied(late));
        let mut restored = || allocations.listed_blocks_changed(&"a".into(), &cache, at(1));
        assert_eq!(restored(), [cidr(BLOCK)]);
        assert_eq!(restored(), [], "nothing new");
        assert_eq!(owner(&allocations), ("alive".to_owned(), false));
        assert_eq!(listed(&allocations), 1);
    }
}

#[test]
fn an_object_with_an_invalid_spec_is_written_again() {
    let invalid = Block {
        spec: Err("missing field owner".to_owned()),
        ..object("a", "alive", false)
    };
    let lists = vec![listing("a", "alive", "b1")];
    let cache = cache(vec![node("a", "alive")], vec![invalid.clone()], lists);
    let mut allocations = rebuilt(&cache);
    let affected = allocations.block_seen(&invalid, at(1));
    assert_eq!(affected.blocks, [cidr(BLOCK)]);
    assert_eq!(step(&allocations), Step::Replace);
}

#[test]
fn an_answer_for_an_earlier_block_of_the_cidr_is_not_for_the_next_one() {
    let lists = vec![listing("a", "alive", "b1")];
    let cache = cache(vec![node("a", "alive")], Vec::new(), lists);
    let mut allocations = rebuilt(&cache);
    let holder = allocations.holder(&"z".into(), &"z".into());
    let earlier = allocations
        .ledger
        .record(holder, cidr(BLOCK), HoldingState::Allocated);
    allocations.ledger.release(earlier);
    let entry = allocations.blocks.get_mut(&cidr(BLOCK)).unwrap();
    entry.in_flight = true;
    let holding = entry.holding;
    for (holding, in_flight) in [(earlier, true), (holding, false)] {
        let (cidr, step) = (cidr(BLOCK), Some(Step::Delete));
        let purpose = Purpose::Block {
            cidr,
            holding,
            step,
        };
        let answer = RequestAnswer::to_write(&purpose, &RequestOutcome::Gone);
        let answered = |cx: &mut Context| BlockLoop::default().answered(&answer, cx);
        in_step(&cache, &mut allocations, at(1), answered);
        let entry = allocations.blocks.get(&cidr).unwrap();
        assert_eq!(entry.in_flight, in_flight);
    }
}

#[test]
fn the_first_block_comes_from_the_next_pool_where_the_best_is_full() {
    let pool = |name: &str, range: &str, priority: i32| {
        pool_with(name, range, |spec| {
            spec.ipv4.as_mut().unwrap().block_size = Some(26);
            spec.priority = priority;
        })
    };
    let pools = vec![pool("best", BLOCK, 1), pool("next", "10.0.1.0/26", 0)];
    let nodes = vec![node("a", "alive"), node_with("x", &[BLOCK])];
    let cache = cluster(pools, nodes);
    let mut allocations = rebuilt(&cache);
    let mut demand = Demand::default();
    demand.add_name(&"a".into(), &cache, &allocations);
    let work = |cx: &mut Context| demand.work(cx).blocks;
    let (blocks, reasons) = reported(&cache, &mut allocations, at(1), work);
    assert_eq!(blocks, [cidr("10.0.1.0/26")]);
    assert!(reasons.is_empty(), "it waits for nothing: {reasons:?}");
}

/// Returns the object of a block. `touched` says whether the object was edited after its creation.
fn object_of(range: &str, owner: &str, version: u64, touched: bool) -> Block {
    Block {
        version,
        touched,
        ..block(range, Owner::node(&owner.into(), &owner.into()))
    }
}

/// Builds the ledger and decides about all provisional blocks. Returns the ranges of the blocks that are confirmed and
/// stay.
fn judged(cache: &ClusterCache) -> Vec<String> {
    let mut allocations = rebuilt(cache);
    allocations.judge_blocks(cache);
    let all = allocations.blocks.iter();
    let stay = all.filter(|entry| entry.confirmed && !entry.is_leaving());
    stay.map(|entry| entry.cidr.to_string()).collect()
}

#[test]
fn a_block_yields_to_a_podcidr_that_overlaps_it() {
    let judged = |podcidr: &str| {
        let nodes = vec![node("a", "a"), node_with("x", &[podcidr])];
        judged(&cache(
            nodes,
            vec![object_of(BLOCK, "a", 5, false)],
            Vec::new(),
        ))
    };
    assert_eq!(judged("10.1.0.0/24"), [BLOCK]);
    assert!(judged("10.0.0.0/24").is_empty());
}

#[test]
fn of_two_blocks_the_older_object_stays_and_an_edited_one_counts_as_older() {
    let half = "10.0.0.0/27";
    for (touched, stays) in [(false, half), (true, BLOCK)] {
        let edited = object_of(BLOCK, "a", 9, touched);
        let objects = vec![edited, object_of(half, "b", 7, false)];
        let nodes = vec![node("a", "a"), node("b", "b")];
        assert_eq!(judged(&cache(nodes, objects, Vec::new())), [stays]);
    }
}

#[test]
fn a_block_without_a_list_stays_if_a_claim_may_have_got_an_address_of_it() {
    let host = "10.0.0.5/32";
    let mut claimed = claim("default/web-0", "p", &[]);
    claimed.status.addresses = vec![addr("10.0.0.5")].into();
    // The claim got the address from the block, so the objects of the claim and of its block were written after the
    // block's object.
    let stay = |block: u64, claims: u64, host_version: Option<u64>, is_edited: bool| {
        let nodes = vec![node("a", "a"), node("b", "b")];
        let mut objects = vec![object_of(BLOCK, "a", block, false)];
        objects.extend(host_version.map(|version| object_of(host, "b", version, is_edited)));
        let mut cache = cache(nodes, objects, Vec::new());
        let claim = Claim {
            version: claims,
            ..claimed.clone()
        };
        list(&mut cache.claims, vec![claim]);
        judged(&cache)
    };
    for is_edited in [false, true] {
        assert_eq!(stay(5, 9, Some(7), is_edited), [BLOCK, host]);
        assert_eq!(stay(8, 9, Some(7), is_edited), [host]);
    }
    assert_eq!(stay(5, 9, None, false), [BLOCK]);
    assert!(stay(9, 5, None, false).is_empty());
}

#[test]
fn nothing_is_judged_while_a_list_runs() {
    let mut cache = cache(vec![node("a", "a")], Vec::new(), Vec::new());
    let asked = at(0).mono;
    cache.blocks.change(ObjectEvent::Restarted { asked });
    let block = object_of(BLOCK, "a", 5, false);
    cache.blocks.change(ObjectEvent::Applied(block));
    assert!(judged(&cache).is_empty());
    cache.blocks.change(ObjectEvent::Listed);
    assert_eq!(judged(&cache), [BLOCK]);
}

fn is_free(allocations: &AllocationState) -> bool {
    allocations
        .ledger
        .overlapping(&cidr(BLOCK))
        .next()
        .is_none()
}

#[test]
fn a_block_that_was_not_requested_yet_is_free_when_its_node_is_deleted() {
    let gone = node("a", "a");
    let mut allocations = with_chosen_block(BLOCK, &gone, at(1));
    allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, at(1));
    assert!(is_free(&allocations));
}

#[test]
fn a_block_that_was_not_requested_yet_yields_to_a_foreign_allocator() {
    let waits = node("a", "a");
    let mut allocations = with_chosen_block(BLOCK, &waits, at(1));
    let elsewhere = cidr("10.1.0.0/24");
    assert!(allocations.drop_unsent(&[elsewhere]).is_empty());
    let set_in_flight = |allocations: &mut AllocationState, is: bool| {
        allocations.blocks.get_mut(&cidr(BLOCK)).unwrap().in_flight = is;
    };
    set_in_flight(&mut allocations, true);
    let foreign = cidr("10.0.0.0/22");
    assert!(allocations.drop_unsent(&[foreign]).is_empty());
    set_in_flight(&mut allocations, false);
    assert_eq!(allocations.drop_unsent(&[foreign]), [waits.name]);
    assert!(is_free(&allocations));
}
