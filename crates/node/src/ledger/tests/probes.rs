//! Tests of pools that require a probe before an address is used.

use std::time::Duration;

use super::super::{MOST_PROBES, ProbeRound};
use super::*;

const MAC: &str = "02:00:00:00:00:07";

/// Returns a node with one block of a pool that requires probes.
fn probing() -> Node {
    let mut node = Node::new(&[("10.0.0.0/29", "a")]);
    node.allocation.pools = vec![PoolTerms {
        probes_conflicts: true,
        cooldown_seconds: 0,
        ..pool("a", &["10.0.0.0/24"], &[])
    }];
    node.update();
    node
}

fn addr(text: &str) -> Addr {
    Addr::parse_strict(text).unwrap()
}

/// Returns the addresses that have to be probed for an ADD.
fn to_probe(node: &mut Node, add: &Add) -> Vec<String> {
    let targets = node.ledger().to_probe(add).unwrap();
    assert_eq!(targets.interface, add.parent);
    targets.addresses.iter().map(Addr::to_string).collect()
}

/// Records the answers to probes that began at `begun`.
fn probed(node: &mut Node, begun: Duration, answers: &[(&str, Option<&str>)]) {
    let answer = |(address, by): &(&str, Option<&str>)| (addr(address), by.map(str::to_owned));
    let round = ProbeRound {
        interface: String::new(),
        begun,
        answers: answers.iter().map(answer).collect(),
    };
    node.ledger().record_probes(&round).unwrap();
}

fn clean(node: &mut Node, addresses: &[&str]) {
    let begun = node.now.since_boot;
    let answers: Vec<_> = addresses.iter().map(|it| (*it, None)).collect();
    probed(node, begun, &answers);
}

fn conflict(node: &mut Node, address: &str) {
    let begun = node.now.since_boot;
    probed(node, begun, &[(address, Some(MAC))]);
}

#[test]
fn a_released_address_is_probed_again_and_holds_back_no_other() {
    let mut node = probing();
    let all: Vec<String> = (0..8).map(|it| format!("10.0.0.{it}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    clean(&mut node, &all);
    for n in 0..8 {
        node.add_one(n);
    }
    node.later(1);
    node.del(3);
    node.del(5);
    node.later(1);
    node.assert_refused(&ask(8), OpErrorKind::Unprobed, "");
    assert_eq!(to_probe(&mut node, &ask(8)), ["10.0.0.3", "10.0.0.5"]);
    clean(&mut node, &["10.0.0.5"]);
    assert_eq!(node.add_one(8), "10.0.0.5");
    clean(&mut node, &["10.0.0.3"]);
    assert_eq!(node.add_one(9), "10.0.0.3");
}

#[test]
fn a_block_whose_addresses_wait_for_a_probe_is_searched_again() {
    let mut node = Node::new(&[("10.0.0.0/31", "a"), ("10.0.0.2/31", "a")]);
    node.allocation.pools = vec![PoolTerms {
        probes_conflicts: true,
        ..pool("a", &["10.0.0.0/24"], &[])
    }];
    node.update();
    clean(&mut node, &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.add_one(1), "10.0.0.2");
    assert_eq!(node.add_one(2), "10.0.0.3");
    clean(&mut node, &["10.0.0.0"]);
    assert_eq!(node.add_one(3), "10.0.0.0");
}

#[test]
fn a_block_that_comes_back_is_probed_again() {
    let mut node = probing();
    clean(&mut node, &["10.0.0.1"]);
    let mut block = node.allocation.blocks.pop().unwrap();
    node.update();
    // Meanwhile another node may have the block.
    block.uid = "u2".to_owned();
    node.allocation.blocks.push(block);
    node.update();
    node.assert_refused(&ask(1), OpErrorKind::Unprobed, "");
}

#[test]
fn probes_that_count_no_longer_are_forgotten() {
    let mut node = probing();
    clean(&mut node, &["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    conflict(&mut node, "10.0.0.4");
    assert_eq!(node.count(KvTable::Probes), 4);
    node.later(301);
    clean(&mut node, &["10.0.0.1"]);
    assert_eq!(
        node.count(KvTable::Probes),
        2,
        "of 10.0.0.1 and the conflict"
    );
}

#[test]
fn a_conflict_with_another_host_begins_anew() {
    let mut node = probing();
    let since = |node: &mut Node| node.ledger().snapshot().unwrap().conflicts[0].since_ms;
    let mut begun = Vec::new();
    for by in [MAC, MAC, "02:00:00:00:00:08"] {
        node.later(1);
        node.now.wall_ms += 1_000;
        let now = node.now.since_boot;
        probed(&mut node, now, &[("10.0.0.1", Some(by))]);
        begun.push(since(&mut node));
    }
    assert_eq!(begun[0], begun[1]);
    assert_eq!(begun[2] - begun[0], 2_000);
}

#[test]
fn each_pool_counts_its_own_addresses_in_conflict() {
    let mut node = Node::new(&[("10.0.0.0/31", "a"), ("10.0.1.0/31", "b")]);
    let probing = |name| PoolTerms {
        probes_conflicts: true,
        ..pool(name, &["10.0.0.0/16"], &[])
    };
    node.allocation.pools = vec![probing("a"), probing("b")];
    node.update();
    for address in ["10.0.0.0", "10.0.0.1", "10.0.1.0", "10.0.1.1"] {
        conflict(&mut node, address);
    }
    let refusal = node.try_add(&ask(1)).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Exhausted, "{refusal}");
    let both = refusal.text.matches("(2 in conflict").count();
    assert_eq!(both, 2, "{refusal}");
}

#[test]
fn an_address_is_assigned_only_after_a_probe() {
    let mut node = probing();
    let says = "pool `a` has free IPv4 addresses on this node, and they have to be probed";
    node.assert_refused(&ask(1), OpErrorKind::Unprobed, says);
    assert_eq!(to_probe(&mut node, &ask(1)).len(), 8);
    clean(&mut node, &["10.0.0.3", "10.0.0.4"]);
    assert_eq!(node.add(&ask(1)), "10.0.0.3");
    assert_eq!(node.add(&ask(2)), "10.0.0.4");
    node.assert_refused(&ask(3), OpErrorKind::Unprobed, says);
    // The addresses below the assigned ones were not probed, so they are still the first ones to probe.
    assert_eq!(to_probe(&mut node, &ask(3))[..2], ["10.0.0.0", "10.0.0.1"]);
    clean(&mut node, &["10.0.0.1"]);
    assert_eq!(node.add(&ask(3)), "10.0.0.1");
    // A repeated ADD needs no probe.
    assert_eq!(to_probe(&mut node, &ask(3)), [""; 0]);
    assert_eq!(node.add(&ask(3)), "10.0.0.1");
}

#[test]
fn each_use_of_an_address_needs_a_probe_of_its_own() {
    let mut node = probing();
    clean(&mut node, &["10.0.0.1"]);
    node.add(&ask(1));
    node.later(1);
    let begun = node.now.since_boot;
    // The pod that uses the address answers this probe. So the answer must not count as a conflict.
    conflict(&mut node, "10.0.0.1");
    node.later(1);
    node.del(1);
    let own = ask_for(2, &["10.0.0.1"]);
    node.assert_refused(&own, OpErrorKind::Unprobed, "10.0.0.1 was asked for");
    // These probes began before the address was released.
    probed(&mut node, begun, &[("10.0.0.1", None)]);
    node.assert_refused(&own, OpErrorKind::Unprobed, "");
    assert_eq!(to_probe(&mut node, &own), ["10.0.0.1"]);
    node.later(1);
    clean(&mut node, &["10.0.0.1"]);
    assert_eq!(node.add(&own), "10.0.0.1");
}

#[test]
fn an_address_in_conflict_is_not_assigned_before_a_later_probe_finds_it_free() {
    let mut node = probing();
    conflict(&mut node, "10.0.0.1");
    clean(&mut node, &["10.0.0.1", "10.0.0.2"]);
    let snapshot = node.ledger().snapshot().unwrap();
    let counts = snapshot.blocks[0].counts;
    assert_eq!((counts.conflicts, counts.free), (1, 7));
    assert_eq!(snapshot.conflicts[0].by, MAC);
    assert!(!snapshot.conflicts[0].is_due);
    let by_name = ask_for(1, &["10.0.0.1"]);
    node.assert_refused(&by_name, OpErrorKind::NotFree, MAC);
    assert_eq!(node.add(&ask(1)), "10.0.0.2");
    node.later(600);
    assert!(node.ledger().snapshot().unwrap().conflicts[0].is_due);
    node.assert_refused(&ask(2), OpErrorKind::Unprobed, "");
    assert_eq!(to_probe(&mut node, &ask(2))[1], "10.0.0.1");
    node.now.wall_ms = 9;
    conflict(&mut node, "10.0.0.1");
    let since = node.ledger().snapshot().unwrap().conflicts[0].since_ms;
    assert_eq!(since, 7, "the same host answers as before");
    node.later(600);
    clean(&mut node, &["10.0.0.1"]);
    assert_eq!(node.add(&ask(2)), "10.0.0.1");
}

#[test]
fn an_operator_ends_a_conflict_and_the_address_is_probed_again() {
    let mut node = probing();
    conflict(&mut node, "10.0.0.1");
    let it = addr("10.0.0.1");
    assert!(!node.ledger().end_conflicts(&[(it, 6)]).unwrap());
    assert_eq!(to_probe(&mut node, &ask(1))[1], "10.0.0.2");
    assert!(node.ledger().end_conflicts(&[(it, 7)]).unwrap());
    assert_eq!(to_probe(&mut node, &ask(1))[1], "10.0.0.1");
    assert!(!node.ledger().end_conflicts(&[(it, 7)]).unwrap());
}

#[test]
fn addresses_in_conflict_exhaust_a_pool() {
    let mut node = probing();
    for n in 0..=7 {
        conflict(&mut node, &format!("10.0.0.{n}"));
    }
    let says = "no free IPv4 address on this node (8 in conflict: other hosts use them)";
    node.assert_refused(&ask(1), OpErrorKind::Exhausted, says);
    assert_eq!(to_probe(&mut node, &ask(1)), [""; 0]);
    // The block is still among the blocks to search, so the address is found once its conflict has ended.
    node.ledger()
        .end_conflicts(&[(addr("10.0.0.6"), 7)])
        .unwrap();
    clean(&mut node, &["10.0.0.6"]);
    assert_eq!(node.add(&ask(1)), "10.0.0.6");
    // If the pool does not require probes, any free address is assigned without a probe.
    node.allocation.pools[0].probes_conflicts = false;
    node.update();
    assert_eq!(node.add(&ask(2)), "10.0.0.0");
    assert!(node.ledger().snapshot().unwrap().conflicts.is_empty());
}

#[test]
fn a_probe_counts_for_five_minutes_in_the_same_boot_and_on_the_same_interface() {
    let mut node = probing();
    clean(&mut node, &["10.0.0.0"]);
    let other = Add {
        parent: "eth1".to_owned(),
        ..ask(1)
    };
    node.assert_refused(&other, OpErrorKind::Unprobed, "");
    node.later(299);
    let probes = node.ledger().snapshot().unwrap().probes;
    assert_eq!(
        (probes[0].ready, probes[0].next[0]),
        (0, addr("10.0.0.0")),
        "to be renewed"
    );
    node.later(1);
    node.assert_refused(&ask(1), OpErrorKind::Unprobed, "");
    clean(&mut node, &["10.0.0.0"]);
    assert_eq!(node.ledger().snapshot().unwrap().probes[0].ready, 1);
    node.now = now("two", 1000);
    node.assert_refused(&ask(1), OpErrorKind::Unprobed, "");
}

#[test]
fn both_families_are_probed_together_and_only_some_addresses_at_once() {
    let mut node = Node::new(&[("10.0.0.0/24", "a"), ("fd00::/64", "a")]);
    node.allocation.pools = vec![PoolTerms {
        probes_conflicts: true,
        ..pool("a", &["10.0.0.0/16"], &["fd00::/48"])
    }];
    node.update();
    let all = to_probe(&mut node, &ask(1));
    assert_eq!(all.len(), 2 * MOST_PROBES);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    clean(&mut node, &all);
    assert_eq!(node.add(&ask(1)), "10.0.0.0 fd00::");
    let probes = node.ledger().snapshot().unwrap().probes;
    let ready: Vec<u64> = probes.iter().map(|it| it.ready).collect();
    assert_eq!(ready, [MOST_PROBES as u64 - 1; 2]);
}

#[test]
fn an_exhausted_family_is_not_helped_by_a_probe() {
    let mut node = Node::new(&[("10.0.0.0/24", "a")]);
    node.allocation.pools = vec![PoolTerms {
        probes_conflicts: true,
        ..pool("a", &["10.0.0.0/16"], &["fd00::/48"])
    }];
    node.update();
    node.assert_refused(&ask(1), OpErrorKind::NoBlock, "no IPv6 block");
    assert_eq!(to_probe(&mut node, &ask(1)), [""; 0]);
}
