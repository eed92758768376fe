//! Tests each rule of the ledger on tables in memory. `tests/node_store` tests the rules together, with random
//! operations.

mod limits;
mod probes;
mod withdrawals;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use super::super::ops::{
    Add, AddressAssignment, Attachment, Check, Gc, Now, Op, OpError, OpErrorKind, OpOutcome, PodRef,
};
use super::super::pods::{PodChoice, PodNote, PoolOrder};
use super::super::storage_fault::StorageFault;
use super::kv::{Kv, KvEntry, KvMut, KvTable, Show};
use super::{AddressLedger, BlockState, RememberedAttachment};
use cadastre_core::node_allocation::{
    Block, Dns, FamilyTerms, Gateway, NodeAllocation, PoolTerms, Route,
};
use cadastre_core::{Addr, Cidr, IpRange};

#[derive(Default)]
struct Memory {
    tables: BTreeMap<(KvTable, Vec<u8>), Vec<u8>>,
    writes: u32,
}

impl Kv for Memory {
    fn get(&self, table: KvTable, key: &[u8]) -> Result<Option<Vec<u8>>, StorageFault> {
        Ok(self.tables.get(&(table, key.to_vec())).cloned())
    }

    fn seek(&self, table: KvTable, from: Bound<&[u8]>) -> Result<Option<KvEntry>, StorageFault> {
        let from = from.map(|key| (table, key.to_vec()));
        let mut entries = self.tables.range((from, Bound::Unbounded));
        let entry = entries.next().filter(|(key, _)| key.0 == table);
        Ok(entry.map(|(key, value)| (key.1.clone(), value.clone())))
    }

    fn scan(&self, table: KvTable, prefix: &[u8], show: Show<'_>) -> Result<(), StorageFault> {
        for ((of, key), value) in self.tables.range((table, prefix.to_vec())..) {
            if *of != table || !key.starts_with(prefix) {
                break;
            }
            show(key, value)?;
        }
        Ok(())
    }
}

impl KvMut for Memory {
    fn put(&mut self, table: KvTable, key: &[u8], value: &[u8]) -> Result<(), StorageFault> {
        self.writes += 1;
        self.tables.insert((table, key.to_vec()), value.to_vec());
        Ok(())
    }

    fn remove(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault> {
        self.writes += 1;
        assert!(self.tables.remove(&(table, key.to_vec())).is_some());
        Ok(())
    }
}

/// A node with a ledger in memory, and with a clock and ranges that tests set.
struct Node {
    memory: Memory,
    now: Now,
    allocation: NodeAllocation,
}

impl Node {
    fn new(blocks: &[(&str, &str)]) -> Self {
        let mut node = Self {
            memory: Memory::default(),
            now: now("one", 1000),
            allocation: NodeAllocation {
                node_uid: "node".to_owned(),
                ..NodeAllocation::default()
            },
        };
        node.allocation.blocks = blocks.iter().map(|(it, pool)| block(it, pool)).collect();
        node.update();
        node
    }

    fn ledger(&mut self) -> AddressLedger<'_> {
        AddressLedger::new(&mut self.memory, &self.now)
    }

    /// Records `allocation` in the ledger.
    fn update(&mut self) {
        let allocation = self.allocation.clone();
        self.ledger().set_allocation(&allocation).unwrap();
    }

    fn run(&mut self, op: &Op) -> Result<OpOutcome, OpError> {
        self.ledger().run(op).unwrap()
    }

    fn try_add(&mut self, add: &Add) -> Result<AddressAssignment, OpError> {
        match self.run(&Op::Add(add.clone()))? {
            OpOutcome::Assigned(given) => Ok(given),
            OpOutcome::Done => panic!("an ADD without an answer"),
        }
    }

    /// Performs an ADD, and returns the assigned addresses as text.
    fn add(&mut self, add: &Add) -> String {
        let given = self.try_add(add).unwrap();
        let addresses = given.addrs().map(|addr| addr.to_string());
        addresses.collect::<Vec<_>>().join(" ")
    }

    fn add_one(&mut self, n: u32) -> String {
        self.add(&ask(n))
    }

    /// Checks that an ADD is rejected with this kind of error, and with a text that contains `says`.
    fn assert_refused(&mut self, add: &Add, why: OpErrorKind, says: &str) {
        let refusal = self.try_add(add).unwrap_err();
        let is_right = refusal.why == why && refusal.text.contains(says);
        assert!(is_right, "{:?}: {refusal}", refusal.why);
    }

    fn del(&mut self, n: u32) {
        assert_eq!(self.run(&Op::Del(attachment(n))), Ok(OpOutcome::Done));
    }

    /// Returns how many records a table has.
    fn count(&self, table: KvTable) -> usize {
        let keys = self.memory.tables.keys();
        keys.filter(|(it, _)| *it == table).count()
    }

    fn later(&mut self, seconds: u64) {
        self.now.since_boot += Duration::from_secs(seconds);
    }

    fn state(&mut self, block: &str) -> Option<BlockState> {
        let blocks = self.ledger().snapshot().unwrap().blocks;
        let mut blocks = blocks.into_iter();
        blocks.find(|it| it.cidr == cidr(block)).map(|it| it.state)
    }
}

fn now(boot: &str, seconds: u64) -> Now {
    Now {
        boot: boot.to_owned(),
        since_boot: Duration::from_secs(seconds),
        wall_ms: 7,
    }
}

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn block(it: &str, pool: &str) -> Block {
    Block {
        cidr: cidr(it),
        uid: "u1".to_owned(),
        pool: pool.to_owned(),
        draining: false,
        borrowed: false,
        reserved: Vec::new(),
        on_request: Vec::new(),
    }
}

fn pool(name: &str, v4: &[&str], v6: &[&str]) -> PoolTerms {
    let family = |ranges: &[&str]| FamilyTerms {
        cidrs: ranges.iter().map(|it| cidr(it)).collect(),
        gateway: Gateway::None,
    };
    PoolTerms {
        ipv4: (!v4.is_empty()).then(|| family(v4)),
        ipv6: (!v6.is_empty()).then(|| family(v6)),
        ..PoolTerms::named(name)
    }
}

fn attachment(n: u32) -> Attachment {
    Attachment {
        network: "net".to_owned(),
        container_id: format!("c{n}"),
        ifname: "eth0".to_owned(),
    }
}

fn ask(n: u32) -> Add {
    Add {
        attachment: attachment(n),
        pod: Some(PodRef {
            namespace: "default".to_owned(),
            name: format!("pod-{n}"),
            uid: format!("uid-{n}"),
        }),
        decided: true,
        ..Add::default()
    }
}

fn ask_for(n: u32, addresses: &[&str]) -> Add {
    let parse = |it: &&str| Addr::parse_strict(it).unwrap();
    Add {
        addresses: addresses.iter().map(parse).collect(),
        ..ask(n)
    }
}

fn ask_from(n: u32, pools: &[&str]) -> Add {
    Add {
        pools: pools.iter().map(|it| (*it).to_owned()).collect(),
        ..ask(n)
    }
}

#[test]
fn never_assigned_addresses_come_first_then_the_oldest_release() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let all: Vec<String> = (0..5).map(|n| node.add_one(n)).collect();
    assert_eq!(
        all,
        ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]
    );
    node.del(3);
    node.later(1);
    node.del(1);
    node.assert_refused(&ask(9), OpErrorKind::Exhausted, "");
    node.later(29);
    assert_eq!(node.add_one(10), "10.0.0.5");
    let says = "in no pool, has no free IPv4 address on this node (the next one has rested in 1 s)";
    node.assert_refused(&ask(11), OpErrorKind::Exhausted, says);
    node.later(1);
    assert_eq!(node.add_one(11), "10.0.0.3");
}

#[test]
fn a_lower_block_is_filled_before_a_higher_one() {
    let mut node = Node::new(&[("10.0.0.8/30", ""), ("10.0.0.0/30", "")]);
    assert_eq!(
        [node.add_one(1), node.add_one(2)],
        ["10.0.0.2", "10.0.0.10"]
    );
    node.del(1);
    node.later(30);
    assert_eq!(node.add_one(3), "10.0.0.2");
}

#[test]
fn cooldowns_count_by_the_time_since_boot() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    node.add_one(1);
    node.del(1);
    // The wall clock has no influence on the cooldown, so the address is still cooling.
    node.now.wall_ms = i64::MAX;
    node.assert_refused(&ask(2), OpErrorKind::Exhausted, "");
    // After a reboot the address cools until the host has been up for the whole cooldown.
    node.now = now("two", 29);
    node.assert_refused(&ask(2), OpErrorKind::Exhausted, "");
    node.now = now("two", 30);
    assert_eq!(node.add_one(2), "10.0.0.2");
    node.del(2);
    node.now = now("three", 5);
    node.assert_refused(&ask(3), OpErrorKind::Exhausted, "");
    // If the cooldown of a pool becomes longer, addresses that were released earlier cool for the longer time, too.
    node.allocation.pools = vec![PoolTerms {
        cooldown_seconds: 100,
        ..PoolTerms::named("")
    }];
    node.update();
    node.now = now("three", 99);
    node.assert_refused(&ask(3), OpErrorKind::Exhausted, "");
    node.later(1);
    assert_eq!(node.add_one(3), "10.0.0.2");
}

#[test]
fn a_pool_assigns_both_families_or_neither_and_the_next_pool_is_tried() {
    let mut node = Node::new(&[
        ("10.0.0.0/31", "a"),
        ("fd00::/128", "a"),
        ("10.1.0.0/31", "b"),
    ]);
    node.allocation.pools = vec![
        pool("a", &["10.0.0.0/8"], &["fd00::/64"]),
        pool("b", &["10.1.0.0/16"], &[]),
    ];
    node.update();
    assert_eq!(node.add_one(1), "10.0.0.0 fd00::");
    assert_eq!(
        node.add_one(2),
        "10.1.0.0",
        "pool a has no IPv6 address left"
    );
    node.assert_refused(&ask_from(3, &["a"]), OpErrorKind::Exhausted, "");
    assert_eq!(node.add(&ask_from(3, &["a", "b"])), "10.1.0.1");
    let unknown = "pool `x` is not one of this node's";
    for says in ["`a` has no free IPv6", unknown] {
        node.assert_refused(&ask_from(4, &["x", "a"]), OpErrorKind::Exhausted, says);
    }
    node.assert_refused(&ask_from(4, &["x"]), OpErrorKind::UnknownPool, unknown);
    let writes = node.memory.writes;
    node.assert_refused(&ask(4), OpErrorKind::Exhausted, "");
    assert_eq!(node.memory.writes, writes, "a refusal changes nothing");
}

#[test]
fn a_manual_pool_serves_only_pods_that_name_it() {
    let mut node = Node::new(&[("10.0.0.0/31", "m")]);
    node.allocation.pools = vec![PoolTerms {
        automatic: false,
        ..pool("m", &["10.0.0.0/8"], &[])
    }];
    node.update();
    node.assert_refused(&ask(1), OpErrorKind::NoBlock, "");
    assert_eq!(
        node.run(&Op::Status),
        Ok(OpOutcome::Done),
        "it serves who asks"
    );
    assert_eq!(node.add(&ask_from(1, &["m"])), "10.0.0.0");
}

#[test]
fn exhaustion_is_no_error_of_status() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    node.add_one(1);
    node.assert_refused(&ask(2), OpErrorKind::Exhausted, "");
    assert_eq!(node.run(&Op::Status), Ok(OpOutcome::Done));
    node.allocation.blocks[0].draining = true;
    node.update();
    let refusal = node.run(&Op::Status).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock);
    assert!(
        refusal.text.contains("no block that addresses"),
        "{refusal}"
    );
}

#[test]
fn a_block_that_drained_for_a_while_keeps_its_cooldowns() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    node.add_one(1);
    node.del(1);
    for draining in [true, false] {
        node.allocation.blocks[0].draining = draining;
        node.update();
    }
    node.assert_refused(&ask(2), OpErrorKind::Exhausted, "rested");
}

#[test]
fn a_block_that_moved_to_another_pool_is_assigned_from() {
    let mut node = Node::new(&[("10.0.0.0/30", "a")]);
    node.allocation.blocks[0].pool = "b".to_owned();
    node.update();
    node.assert_refused(&ask_from(1, &["a"]), OpErrorKind::UnknownPool, "");
    assert_eq!(node.add(&ask_from(1, &["b"])), "10.0.0.2");
}

/// A block can lie in another one, for example in the node's podCIDR.
#[test]
fn the_addresses_of_a_block_that_is_gone_are_assigned_from_the_block_around_it() {
    let mut node = Node::new(&[("10.0.0.0/29", "wide"), ("10.0.0.0/30", "narrow")]);
    let terms = |name| pool(name, &["10.0.0.0/8"], &[]);
    node.allocation.pools = vec![terms("wide"), terms("narrow")];
    node.update();
    assert_eq!(node.add(&ask_from(0, &["wide"])), "10.0.0.0");
    for n in 1..4 {
        let given = node.add(&ask_from(n, &["narrow"]));
        assert_eq!(given, format!("10.0.0.{n}"));
    }
    for n in 4..8 {
        node.add(&ask_from(n, &["wide"]));
    }
    node.assert_refused(&ask_from(8, &["wide"]), OpErrorKind::Exhausted, "");
    (1..4).for_each(|n| node.del(n));
    node.allocation.blocks.pop();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Unlisted));
    node.later(3600);
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), None, "10.0.0.0 is not of it");
    assert_eq!(node.add(&ask_from(8, &["wide"])), "10.0.0.1");
}

#[test]
fn pools_serve_in_the_order_in_which_they_are_listed() {
    let names = ["c", "a", "b", "d"];
    let cidrs = ["10.0.0.0/31", "10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/31"];
    let blocks: Vec<_> = cidrs.iter().copied().zip(names).collect();
    let mut node = Node::new(&blocks);
    node.allocation.pools = names
        .iter()
        .map(|it| pool(it, &["10.0.0.0/8"], &[]))
        .collect();
    node.update();
    let given: Vec<String> = (0..8).map(|n| node.add_one(n)).collect();
    let expected: Vec<String> = (0..8).map(|it| format!("10.0.0.{it}")).collect();
    assert_eq!(given, expected);
    node.allocation.pools.truncate(1);
    node.update();
    for table in [KvTable::Pools, KvTable::Ranks] {
        assert_eq!(node.count(table), 1, "{table:?}");
    }
}

#[test]
fn status_fails_if_no_pool_has_ranges() {
    let mut node = Node::new(&[]);
    node.allocation.pools = vec![PoolTerms::named("a")];
    node.update();
    let refusal = node.run(&Op::Status).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");
}

#[test]
fn a_pool_without_settings_serves_pods_that_name_it_while_it_has_blocks() {
    let mut node = Node::new(&[("10.0.0.0/31", "gone")]);
    assert_eq!(node.add(&ask_from(1, &["gone"])), "10.0.0.1");
    let unknown = ask_from(2, &["unknown"]);
    node.assert_refused(&unknown, OpErrorKind::UnknownPool, "`unknown`");
}

#[test]
fn a_refusal_names_the_exhausted_pool_before_pools_without_blocks() {
    let mut node = Node::new(&[("10.0.0.0/31", "full")]);
    node.allocation.pools = vec![
        pool("empty", &["10.1.0.0/16"], &[]),
        pool("full", &["10.0.0.0/16"], &[]),
    ];
    node.update();
    let pools = ["empty", "full"];
    for n in 1..=2 {
        node.add(&ask_from(n, &pools));
    }
    let refusal = node.try_add(&ask_from(3, &pools)).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Exhausted, "{refusal}");
    let place = |name| refusal.text.find(name).unwrap();
    assert!(place("`full`") < place("`empty`"), "{refusal}");
}

#[test]
fn addresses_on_request_are_assigned_to_pods_that_ask_for_them() {
    let mut node = Node::new(&[("10.0.0.0/29", ""), ("fd00::/125", "")]);
    node.allocation.blocks[0].on_request = vec![IpRange::parse("10.0.0.2-10.0.0.3").unwrap()];
    node.allocation.blocks[0].reserved = vec![IpRange::parse("10.0.0.2").unwrap()];
    node.update();
    assert_eq!(node.add_one(1), "10.0.0.4 fd00::2");
    assert_eq!(node.add(&ask_for(2, &["10.0.0.3"])), "10.0.0.3");
    for (addresses, why, says) in [
        (
            &["10.0.0.3"][..],
            OpErrorKind::NotFree,
            "in use by pod default/pod-2",
        ),
        (
            &["10.0.0.1"],
            OpErrorKind::NotUsable,
            "10.0.0.1 is the gateway of 10.0.0.0/29",
        ),
        (
            &["10.0.0.7"],
            OpErrorKind::NotUsable,
            "network or broadcast",
        ),
        (&["10.0.0.2"], OpErrorKind::NotUsable, "is reserved"),
        (&["10.0.0.0"], OpErrorKind::NotUsable, ""),
        (
            &["10.0.0.5", "10.0.0.6"],
            OpErrorKind::NotUsable,
            "at most one IPv4",
        ),
        (&["10.0.0.5", "fd00::9"], OpErrorKind::NotInBlocks, ""),
    ] {
        node.assert_refused(&ask_for(3, addresses), why, says);
    }
    assert_eq!(
        node.add(&ask_for(3, &["fd00::5", "10.0.0.5"])),
        "10.0.0.5 fd00::5"
    );
    // A new sandbox of the pod that had the address gets the address again at once. Another pod gets the address only
    // after the cooldown.
    node.del(3);
    let mut other = ask_for(4, &["10.0.0.5"]);
    node.assert_refused(&other, OpErrorKind::NotFree, "cools for another 30 s");
    other.pod = ask(3).pod;
    assert_eq!(node.add(&other), "10.0.0.5");
}

#[test]
fn a_pod_recreated_under_its_name_gets_its_address_back_during_the_cooldown() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let anew = |n, name: &str, namespace: &str| Add {
        pod: Some(PodRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{n}"),
        }),
        ..ask_for(n, &["10.0.0.5"])
    };
    assert_eq!(node.add(&anew(1, "db-0", "shop")), "10.0.0.5");
    node.assert_refused(&anew(2, "db-0", "shop"), OpErrorKind::NotFree, "");
    node.del(1);
    for (name, namespace) in [
        ("db-1", "shop"),
        ("db-0", "other"),
        ("", "shop"),
        ("db-0", ""),
    ] {
        node.assert_refused(&anew(3, name, namespace), OpErrorKind::NotFree, "");
    }
    assert_eq!(node.add(&ask(4)), "10.0.0.2", "unasked it rests");
    assert_eq!(node.add(&anew(2, "db-0", "shop")), "10.0.0.5");
    node.del(2);
    node.now = now("one", 1031);
    assert_eq!(node.add(&anew(3, "db-1", "shop")), "10.0.0.5");
}

#[test]
fn an_add_requested_before_a_del_is_rejected_even_if_nothing_was_assigned() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let del = Op::Del(attachment(1));
    let run = |node: &mut Node, op: &Op, asked| {
        let asked = Duration::from_millis(asked);
        node.ledger().run_asked(op, asked).unwrap()
    };
    assert_eq!(run(&mut node, &del, 999_000), Ok(OpOutcome::Done));
    let add = Op::Add(ask(1));
    let refused = run(&mut node, &add, 998_999).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::Busy);
    assert!(refused.text.contains("deleted after"), "{refused}");
    assert!(run(&mut node, &Op::Add(ask(2)), 998_999).is_ok(), "another");
    assert!(run(&mut node, &add, 999_001).is_ok());
    // A DEL that was requested before the recorded DEL, but arrives after it, does not replace the recorded DEL.
    assert_eq!(run(&mut node, &del, 999_500), Ok(OpOutcome::Done));
    assert_eq!(run(&mut node, &del, 1_000), Ok(OpOutcome::Done));
    assert!(run(&mut node, &add, 999_400).is_err());
    // After a minute the caller of the ADD no longer waits. So the ADD is rejected even if the ledger has forgotten the
    // DEL.
    node.now = now("one", 1_060);
    let refused = run(&mut node, &add, 999_400).unwrap_err();
    assert!(refused.text.contains("more than 60"), "{refused}");
    // No ADD survives a reboot, so a DEL of an earlier boot has no effect.
    node.now = now("two", 5);
    assert!(run(&mut node, &add, 4_000).is_ok());
}

#[test]
fn old_deletions_are_removed_by_later_ones() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    for n in 0..2_000 {
        node.now = now("one", 1_000);
        node.now.since_boot += Duration::from_millis(1_007) * n;
        node.del(n);
    }
    let count = node.count(KvTable::Deletions);
    assert!(count < 200, "{count} of the last minute's 60");
}

#[test]
fn a_deletion_is_remembered_for_the_longest_time_that_an_add_may_take() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    node.del(0);
    node.later(60);
    node.del(1);
    assert_eq!(node.count(KvTable::Deletions), 2);
    node.now.since_boot += Duration::from_micros(1);
    node.del(1);
    assert_eq!(node.count(KvTable::Deletions), 1);
}

#[test]
fn a_repeated_add_is_answered_as_the_first_one() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let first = node.try_add(&ask(1)).unwrap();
    node.allocation.blocks[0].draining = true;
    node.allocation.pools = vec![PoolTerms {
        dns: Dns {
            domain: "new".to_owned(),
            ..Dns::default()
        },
        ..PoolTerms::named("")
    }];
    node.update();
    let writes = node.memory.writes;
    assert_eq!(node.try_add(&ask(1)).unwrap(), first);
    assert_eq!(node.try_add(&ask_from(1, &["other"])).unwrap(), first);
    assert_eq!(node.try_add(&ask_for(1, &["10.0.0.2"])).unwrap(), first);
    assert_eq!(node.memory.writes, writes);
    let other = ask_for(1, &["10.0.0.3"]);
    node.assert_refused(&other, OpErrorKind::Mismatch, "has 10.0.0.2 already");
    // A repeated ADD in a later boot moves the attachment to the later boot. Otherwise the attachment would count as
    // one of an earlier boot, which can be a leak.
    node.now = now("two", 1);
    assert_eq!(node.try_add(&ask(1)).unwrap(), first);
    assert_eq!(node.ledger().snapshot().unwrap().attachments[0].boot, "two");
}

#[test]
fn attachments_are_in_the_order_of_their_assignment() {
    let mut node = Node::new(&[("10.0.0.0/28", "")]);
    let order = |node: &mut Node| {
        let mut attachments = node.ledger().snapshot().unwrap().attachments;
        attachments.sort_by_key(|it| it.order);
        let ids = attachments.into_iter().map(|it| it.attachment.container_id);
        ids.collect::<Vec<_>>()
    };
    for n in [3, 1, 2] {
        // Before each ADD, the wall clock is set back. So the test would fail if the order came from the wall clock.
        node.now.wall_ms -= 1_000_000;
        node.add_one(n);
    }
    node.del(1);
    assert_eq!(order(&mut node), ["c3", "c2"]);
    let known = RememberedAttachment {
        since_ms: i64::MAX,
        boot: "earlier".to_owned(),
        ..remembered(7, &["10.0.0.9"])
    };
    let old = RememberedAttachment {
        since_ms: i64::MAX,
        superseded: true,
        ..remembered(8, &["10.0.0.10"])
    };
    assert!(node.ledger().adopt(&[known, old]).unwrap().is_empty());
    assert_eq!(order(&mut node), ["c8", "c7", "c3", "c2"]);
    let attachments = node.ledger().snapshot().unwrap().attachments;
    let adopted = attachments.iter().filter(|it| it.since_ms == i64::MAX);
    let boots: Vec<&str> = adopted.map(|it| it.boot.as_str()).collect();
    assert_eq!(boots, ["earlier", node.now.boot.as_str()]);
    // If a container is started again after a reboot, its attachment becomes the newest one in the order of
    // assignments.
    node.now = now("two", 1);
    node.add_one(3);
    assert_eq!(order(&mut node), ["c8", "c7", "c2", "c3"]);
}

fn remembered(n: u32, addresses: &[&str]) -> RememberedAttachment {
    RememberedAttachment {
        attachment: attachment(n),
        addresses: ask_for(n, addresses).addresses,
        pod: None,
        netns: String::new(),
        since_ms: 0,
        boot: String::new(),
        superseded: false,
    }
}

/// The sources of a lost store, such as the runtime and the API, can contradict each other.
#[test]
fn an_address_that_two_attachments_remember_stays_with_the_first() {
    let mut node = Node::new(&[("10.0.0.0/29", ""), ("fd00::/125", "")]);
    let first = remembered(1, &["10.0.0.3", "fd00::3"]);
    let second = remembered(2, &["10.0.0.3", "fd00::4"]);
    let known = [first.clone(), first.clone(), second.clone()];
    let lost = node.ledger().adopt(&known).unwrap();
    assert_eq!(lost, [remembered(2, &["10.0.0.3"])]);
    assert_eq!(node.add_one(1), "10.0.0.3 fd00::3");
    node.del(2);
    assert_eq!(node.add_one(1), "10.0.0.3 fd00::3");
    node.del(1);
    assert_eq!(node.ledger().adopt(&[second]).unwrap().len(), 1, "it cools");
}

/// A store that was lost can learn of addresses in use before it learns of the blocks that contain them.
#[test]
fn a_block_is_not_released_while_an_address_is_in_use_that_was_adopted_before_it_was_listed() {
    let mut node = Node::new(&[]);
    let known = remembered(7, &["10.0.0.9"]);
    assert!(node.ledger().adopt(&[known]).unwrap().is_empty());
    node.allocation = Node::new(&[("10.0.0.8/29", "")]).allocation;
    node.update();
    let block = node.allocation.blocks[0].clone();
    assert!(!node.ledger().release(block.cidr, &block.uid).unwrap());
    node.del(7);
    assert!(
        !node.ledger().release(block.cidr, &block.uid).unwrap(),
        "it is cooling"
    );
    node.now = now("one", 10_000_000);
    assert!(node.ledger().release(block.cidr, &block.uid).unwrap());
}

#[test]
fn routes_and_dns_are_those_of_the_assigned_families() {
    let mut node = Node::new(&[("10.0.0.0/29", "a"), ("fd00::/125", "a")]);
    let route = |dst| Route {
        dst: cidr(dst),
        gw: None,
    };
    let dns = Dns {
        nameservers: vec!["10.96.0.10".to_owned()],
        ..Dns::default()
    };
    node.allocation.pools = vec![PoolTerms {
        routes: vec![route("::/0"), route("0.0.0.0/0")],
        dns: dns.clone(),
        ..pool("a", &["10.0.0.0/8"], &["fd00::/64"])
    }];
    node.update();
    let given = node.try_add(&ask(1)).unwrap();
    assert_eq!(given.routes, [route("0.0.0.0/0"), route("::/0")]);
    assert_eq!(given.dns, dns);
    let given = node.try_add(&ask_for(2, &["fd00::3"])).unwrap();
    assert_eq!(given.routes, [route("::/0")]);
}

#[test]
fn check_ignores_addresses_outside_the_nodes_blocks() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    node.add_one(1);
    for (n, addresses, expected) in [
        (1, &["10.0.0.2"][..], Ok(OpOutcome::Done)),
        (1, &["10.0.0.2", "192.0.2.1"], Ok(OpOutcome::Done)),
        (1, &["10.0.0.2", "10.0.0.3"], Err(OpErrorKind::Mismatch)),
        (1, &[], Err(OpErrorKind::Mismatch)),
        (2, &["10.0.0.2"], Err(OpErrorKind::Mismatch)),
    ] {
        let Add {
            attachment,
            addresses,
            ..
        } = ask_for(n, addresses);
        let check = Check {
            attachment,
            addresses,
        };
        let answer = node.run(&Op::Check(check));
        assert_eq!(answer.map_err(|it| it.why), expected);
    }
}

#[test]
fn addresses_of_unlisted_blocks_stay_assigned() {
    let mut node = Node::new(&[("10.0.0.0/30", ""), ("10.0.0.4/30", "")]);
    let listed = node.allocation.blocks.clone();
    node.add_one(1);
    node.allocation.blocks.clear();
    node.allocation.node_uid = "another".to_owned();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Unlisted));
    assert_eq!(node.state("10.0.0.4/30"), None, "an empty one goes");
    node.assert_refused(&ask(2), OpErrorKind::NoBlock, "");
    assert_eq!(node.add_one(1), "10.0.0.2");
    // The block is listed for the new Node under another UID. It still counts as the same block, so its assignments
    // stay valid.
    node.allocation.blocks = listed;
    node.allocation.blocks[0].uid = "u2".to_owned();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Active));
    assert_eq!(node.add_one(2), "10.0.0.6");
    // A block that is no longer listed is removed once its last address has cooled.
    node.allocation.blocks.remove(0);
    node.update();
    node.del(1);
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Unlisted));
    node.later(30);
    assert_eq!(node.state("10.0.0.0/30"), None);
    let writes = node.memory.writes;
    node.update();
    assert!(node.memory.writes > writes);
    let writes = node.memory.writes;
    node.update();
    assert_eq!(node.memory.writes, writes, "nothing new");
}

#[test]
fn a_restriction_stops_lost_and_draining_blocks_and_changes_nothing_else() {
    let [lost, draining, kept] = ["10.0.0.0/30", "10.0.0.4/30", "10.0.0.8/30"];
    let mut node = Node::new(&[(lost, ""), (draining, ""), (kept, "")]);
    // Without an address in use, the lost block would be no block of the node any more.
    node.add_one(1);
    let restrict = |node: &mut Node| {
        let allocation = node.allocation.clone();
        node.ledger().restrict(&allocation).unwrap();
        [lost, draining, kept].map(|block| node.state(block).unwrap())
    };
    let listed = node.allocation.blocks.remove(0);
    node.allocation.blocks[0].draining = true;
    let states = [
        BlockState::Unlisted,
        BlockState::Draining,
        BlockState::Active,
    ];
    assert_eq!(restrict(&mut node), states);
    // A block that assigns nothing already stays as it is, however it is listed.
    for is_draining in [true, false] {
        let mut again = listed.clone();
        again.draining = is_draining;
        node.allocation.blocks.insert(0, again);
        assert_eq!(restrict(&mut node), states);
        node.allocation.blocks.remove(0);
    }
    assert_eq!(node.add_one(2), "10.0.0.10");
}

#[test]
fn after_a_restore_nothing_is_assigned_before_the_node_has_been_up_for_the_cooldown() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    let holdings = node.ledger().holdings().unwrap();
    node.memory = Memory::default();
    node.now = now("two", 29);
    node.ledger().restore(&holdings).unwrap();
    node.assert_refused(&ask(1), OpErrorKind::Exhausted, "");
    node.later(1);
    assert_eq!(node.add_one(1), "10.0.0.2");
}

#[test]
fn a_released_block_is_used_again_only_under_another_uid() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    let it = cidr("10.0.0.0/30");
    node.add_one(1);
    assert!(!node.ledger().release(it, "u1").unwrap(), "in use");
    node.del(1);
    assert!(!node.ledger().release(it, "u1").unwrap(), "cooling");
    node.later(30);
    assert!(!node.ledger().release(it, "u0").unwrap(), "another block");
    assert!(node.ledger().release(it, "u1").unwrap());
    assert!(node.ledger().release(it, "u1").unwrap(), "it is released");
    node.assert_refused(&ask(2), OpErrorKind::NoBlock, "");
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    let listed = std::mem::take(&mut node.allocation.blocks);
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), None);
    // The API is restored to an older state, so the block is listed again.
    node.allocation.blocks = listed;
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    node.assert_refused(&ask(2), OpErrorKind::NoBlock, "");
    node.allocation.blocks[0].uid = "u2".to_owned();
    node.update();
    assert_eq!(node.add_one(2), "10.0.0.2");
    // The API is restored for the second time to a state that lists block `u1`. An address of the range is in use as
    // part of block `u2`, so block `u1` drains before it counts as released.
    node.allocation.blocks[0].uid = "u1".to_owned();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Draining));
    node.del(2);
    node.later(30);
    assert_eq!(node.count(KvTable::Freed), 1);
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    let records = [KvTable::Freed, KvTable::Addresses].map(|it| node.count(it));
    assert_eq!(records, [0, 0], "nothing of block u2 is left");
}

#[test]
fn a_released_block_stays_released_if_the_store_is_lost() {
    let mut node = Node::new(&[("10.0.0.0/30", ""), ("10.0.0.4/30", "")]);
    let it = cidr("10.0.0.0/30");
    assert!(node.ledger().release(it, "u1").unwrap());
    let before = node.ledger().holdings().unwrap();
    node.memory = Memory::default();
    let allocation = node.allocation.clone();
    let mut ledger = node.ledger();
    ledger
        .rebuild(&allocation, &[], false, Some(&before))
        .unwrap();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    assert_eq!(node.state("10.0.0.4/30"), Some(BlockState::Active));
}

#[test]
fn the_last_1024_released_blocks_are_remembered() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    let it = cidr("10.0.0.0/30");
    for n in 0..=1_024 {
        node.allocation.blocks[0].uid = format!("u{n}");
        node.update();
        assert!(node.ledger().release(it, &format!("u{n}")).unwrap());
    }
    node.allocation.blocks[0].uid = "u1".to_owned();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    node.allocation.blocks[0].uid = "u0".to_owned();
    node.update();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Active));
}

#[test]
fn a_wide_block_deletes_records_of_cooled_addresses() {
    let mut node = Node::new(&[("fd00::/64", "")]);
    for n in 0..500 {
        assert_eq!(
            node.add_one(n),
            format!("fd00::{:x}", n + 2),
            "the cursor goes on"
        );
        node.del(n);
        node.later(1);
    }
    let known = node.count(KvTable::Addresses);
    assert!(known < 40, "what rests, and little more");
    let counts = node.ledger().snapshot().unwrap().blocks[0].counts;
    assert_eq!((counts.used, counts.cooling), (0, 29));
    assert_eq!(counts.free, u64::MAX - 1 - 29);
}

#[test]
fn a_block_of_4096_addresses_keeps_the_records_of_cooled_addresses_and_a_larger_one_deletes_them() {
    for (range, left) in [("10.0.0.0/20", 2), ("10.0.0.0/19", 1)] {
        let mut node = Node::new(&[(range, "")]);
        node.add_one(1);
        node.add_one(2);
        node.del(1);
        node.later(30);
        node.del(2);
        assert_eq!(node.count(KvTable::Addresses), left, "{range}");
    }
}

#[test]
fn a_block_without_unused_addresses_is_not_searched_again() {
    let mut node = Node::new(&[("10.0.0.0/30", ""), ("10.0.1.0/30", "")]);
    assert_eq!(node.add_one(1), "10.0.0.2");
    assert_eq!(node.count(KvTable::Open), 2);
    assert_eq!(node.add_one(2), "10.0.1.2");
    assert_eq!(node.count(KvTable::Open), 1);
}

#[test]
fn counts_of_huge_blocks_saturate() {
    for range in ["fd00::/63", "fd00::/40", "::/0"] {
        let mut node = Node::new(&[(range, "")]);
        node.add_one(1);
        node.del(1);
        node.add_one(2);
        let snapshot = node.ledger().snapshot().unwrap();
        let block = &snapshot.blocks[0];
        assert_eq!((block.counts.used, block.counts.cooling), (1, 1), "{range}");
        assert_eq!((block.counts.free, block.room), (u64::MAX, u64::MAX));
        assert_eq!(snapshot.pools[0].counts.v6.free, u64::MAX);
    }
}

#[test]
fn the_search_in_a_wide_block_restarts_at_the_end() {
    let mut node = Node::new(&[("10.0.0.0/19", "")]);
    let last = 8192 - 3;
    for n in 0..last {
        node.add_one(n);
    }
    node.assert_refused(&ask(9000), OpErrorKind::Exhausted, "");
    for n in [7, 5, 6] {
        node.del(n);
    }
    node.later(30);
    node.del(100);
    assert_eq!(
        node.add_one(9001),
        "10.0.0.7",
        "of those forgotten, from below"
    );
    assert_eq!(node.add_one(9002), "10.0.0.9");
    assert_eq!(node.add_one(9003), "10.0.0.8");
    node.assert_refused(&ask(9004), OpErrorKind::Exhausted, "");
}

#[test]
fn keys_of_attachments_are_unambiguous() {
    let mut node = Node::new(&[("10.0.0.0/24", "")]);
    let mut given = std::collections::BTreeSet::new();
    let parts = ["", "a", "ab", "b", "a\0b", "\0", "\u{0}\u{1}a", "é"];
    for network in parts {
        for container_id in parts {
            let mut add = ask(0);
            add.attachment.network = network.to_owned();
            add.attachment.container_id = container_id.to_owned();
            assert!(given.insert(node.add(&add)));
        }
    }
    let attachments = node.ledger().snapshot().unwrap().attachments;
    assert_eq!(attachments.len(), parts.len() * parts.len());
    let network = "a".to_owned();
    let valid = vec![("ab".to_owned(), "eth0".to_owned())];
    node.run(&Op::Gc(Gc { network, valid })).unwrap();
    let attachments = node.ledger().snapshot().unwrap().attachments;
    let of_a = attachments.iter().filter(|it| it.attachment.network == "a");
    assert_eq!((of_a.count(), attachments.len()), (1, 57));
}

/// Returns a note on the pod of `ask(n)`. According to the note, the pod may have these pools and addresses on its
/// interface `eth0`.
fn note(n: u32, pools: PoolOrder, addresses: &[&str]) -> PodNote {
    let asked = ask_for(n, addresses);
    PodNote {
        pod: asked.pod.unwrap(),
        own: PodChoice {
            pools,
            addresses: asked.addresses,
            ..PodChoice::default()
        },
        ..PodNote::default()
    }
}

fn undecided(add: Add) -> Add {
    Add {
        decided: false,
        ..add
    }
}

#[test]
fn an_unknown_pod_waits_unless_its_pool_serves_unknown_pods() {
    let mut node = Node::new(&[("10.0.0.0/29", "a"), ("10.0.1.0/29", "b")]);
    let terms = |name: &str, range, automatic, serves_unknown| PoolTerms {
        automatic,
        serves_unknown,
        ..pool(name, &[range], &[])
    };
    node.allocation.pools = vec![
        terms("a", "10.0.0.0/29", true, false),
        terms("b", "10.0.1.0/29", false, false),
    ];
    node.update();
    let says = "pod default/pod-1";
    node.assert_refused(&undecided(ask(1)), OpErrorKind::PodUnknown, says);
    // The result of an ADD for a specific address does not depend on the pod's labels. An ADD without a pod has no
    // labels. So both succeed although the store has no note on the pod.
    let asked = undecided(ask_for(2, &["10.0.0.5"]));
    assert_eq!(node.add(&asked), "10.0.0.5");
    let nobody = Add {
        pod: None,
        ..undecided(ask(3))
    };
    assert_eq!(node.add(&nobody), "10.0.0.0");
    let notes = [
        note(1, PoolOrder::Selected(vec!["b".to_owned()]), &[]),
        note(4, PoolOrder::All, &["10.0.0.6"]),
        note(5, PoolOrder::None("its labels".to_owned()), &[]),
    ];
    node.ledger().note_pods(&notes, &[]).unwrap();
    assert_eq!(node.add(&undecided(ask(1))), "10.0.1.0");
    assert_eq!(node.add(&undecided(ask(4))), "10.0.0.6");
    node.assert_refused(&undecided(ask(5)), OpErrorKind::NoBlock, "its labels");
    // The note does not apply to another pod with the same name. So the store has no note on the other pod.
    let mut anew = undecided(ask(6));
    anew.pod.as_mut().unwrap().name = "pod-4".to_owned();
    node.assert_refused(&anew, OpErrorKind::PodUnknown, "");
    let gone = [notes[1].pod.clone()];
    node.ledger().note_pods(&[], &gone).unwrap();
    assert_eq!(node.ledger().pod_notes().unwrap().len(), 2);
    // The pod may name an IPAMClaim for any interface. So an ADD depends on the store's note on the pod, even if the
    // network's configuration names pools.
    let mut second = undecided(ask_from(7, &["a"]));
    second.attachment.ifname = "net1".to_owned();
    node.assert_refused(&second, OpErrorKind::PodUnknown, "pod default/pod-7");
    let of_claim = PodChoice {
        pools: PoolOrder::Named(vec!["b".to_owned()]),
        ..PodChoice::default()
    };
    let with_claim = PodNote {
        interfaces: [("net2".to_owned(), of_claim)].into(),
        ..note(7, PoolOrder::All, &[])
    };
    node.ledger().note_pods(&[with_claim], &[]).unwrap();
    assert_eq!(node.add(&second), "10.0.0.1");
    second.attachment.ifname = "net2".to_owned();
    assert_eq!(node.add(&second), "10.0.1.1");
    node.allocation.pools[0].serves_unknown = true;
    node.update();
    assert_eq!(node.add(&undecided(ask(8))), "10.0.0.2");
}

/// Returns a node with a block of pool `a`, and with the addresses 10.0.0.66 and fd00::66 of claim `shop/db`.
fn node_with_claim() -> Node {
    let mut node = Node::new(&[
        ("10.0.0.0/29", "a"),
        ("10.0.0.66/32", "shop/db"),
        ("fd00::66/128", "shop/db"),
    ]);
    let claim = pool("shop/db", &["10.0.0.0/24"], &["fd00::/64"]);
    node.allocation.pools = vec![pool("a", &["10.0.0.0/24"], &[]), claim];
    node.update();
    node
}

/// Returns the ADD of a pod that names claim `shop/db`, after the agent has chosen the claim as the ADD's only pool.
fn claiming(add: Add) -> Add {
    Add {
        pools: vec!["shop/db".to_owned()],
        bound: vec!["shop/db".to_owned()],
        ..add
    }
}

#[test]
fn a_claim_s_address_goes_to_one_pod_at_a_time_and_without_cooldown() {
    let mut node = node_with_claim();
    assert_eq!(node.add(&claiming(ask(1))), "10.0.0.66 fd00::66");
    let text = node.try_add(&claiming(ask(2))).unwrap_err();
    assert_eq!(text.why, OpErrorKind::NotFree);
    for part in ["in use by pod default/pod-1", "IPClaim `shop/db`", "Delete"] {
        assert!(text.text.contains(part), "{text}");
    }
    node.del(1);
    let second = Add {
        pod: ask(2).pod,
        ..claiming(ask_for(2, &["10.0.0.66"]))
    };
    assert_eq!(
        node.add(&second),
        "10.0.0.66",
        "the ADD asks for this alone"
    );
    node.del(2);
    node.allocation.blocks[1].draining = true;
    node.update();
    let it = cidr("10.0.0.66/32");
    assert!(node.ledger().release(it, "u1").unwrap(), "it does not rest");
}

#[test]
fn a_claim_s_address_goes_to_no_pod_that_does_not_name_the_claim() {
    let mut node = node_with_claim();
    // The claim comes first in the order of the pools, and pool `a` runs out of addresses.
    node.allocation.pools.reverse();
    node.update();
    for n in 0..8 {
        assert_eq!(node.add(&ask(n)), format!("10.0.0.{n}"));
    }
    node.assert_refused(&ask(8), OpErrorKind::Exhausted, "pool `a`");
    let other = Add {
        bound: vec!["shop/other".to_owned(), "a".to_owned()],
        ..ask(9)
    };
    for add in [ask(9), other] {
        let asks = |addresses: &[&str], pools: &[&str]| Add {
            addresses: ask_for(9, addresses).addresses,
            pools: ask_from(9, pools).pools,
            ..add.clone()
        };
        for (add, says) in [
            (asks(&[], &["shop/db"]), "`shop/db`"),
            (asks(&[], &["shop/db", "b"]), "`shop/db`"),
            (
                asks(&["10.0.0.66"], &[]),
                "IPClaim `shop/db`, which this pod does not name",
            ),
            (asks(&["10.0.0.66"], &["shop/db"]), "IPClaim `shop/db`"),
        ] {
            node.assert_refused(&add, OpErrorKind::UnknownPool, says);
            let without_pod = Add {
                pod: None,
                ..undecided(add)
            };
            node.assert_refused(&without_pod, OpErrorKind::UnknownPool, says);
        }
    }
}

#[test]
fn a_pod_that_names_a_claim_gets_no_other_address() {
    let mut node = node_with_claim();
    for (address, says) in [
        ("10.0.0.5", "whose addresses are 10.0.0.66, fd00::66"),
        ("10.9.0.1", "whose addresses are"),
    ] {
        let add = claiming(ask_for(1, &[address]));
        node.assert_refused(&add, OpErrorKind::NotInBlocks, says);
    }
    let says = "the address of IPClaim `shop/db` is not at this node yet";
    let advice = "kubectl describe ipclaims.cadastre.dev db -n shop";
    // First, the NodeSubnet lists one of the claim's two addresses as draining. Next, the NodeSubnet no longer lists
    // this address. Finally, the NodeSubnet lists no address of the claim.
    node.allocation.blocks[2].draining = true;
    node.update();
    node.assert_refused(&claiming(ask(1)), OpErrorKind::NoBlock, says);
    node.allocation.blocks.truncate(2);
    node.update();
    node.assert_refused(&claiming(ask(1)), OpErrorKind::NoBlock, advice);
    node.allocation.blocks.truncate(1);
    node.allocation.pools.truncate(1);
    node.update();
    for add in [ask(1), ask_for(1, &["10.0.0.5"])] {
        node.assert_refused(&claiming(add), OpErrorKind::NoBlock, advice);
    }
}

#[test]
fn without_the_agent_the_note_says_which_pod_names_the_claim() {
    let mut node = node_with_claim();
    let mut names = note(1, PoolOrder::Named(vec!["shop/db".to_owned()]), &[]);
    names.own.bound = vec!["shop/db".to_owned()];
    let wrong = note(3, PoolOrder::None("no name of an IPClaim".to_owned()), &[]);
    let mut notes = [names, note(2, PoolOrder::All, &[]), wrong];
    notes[2].own.strict = true;
    node.ledger().note_pods(&notes, &[]).unwrap();
    for add in [ask(9), ask_for(9, &["10.0.0.66"])] {
        let refusal = node.try_add(&undecided(add)).unwrap_err();
        assert!(
            refusal.text.contains("pod"),
            "nothing is known of it: {refusal}"
        );
    }
    assert_eq!(node.add(&undecided(ask(2))), "10.0.0.0");
    assert_eq!(node.add(&undecided(ask(1))), "10.0.0.66 fd00::66");
    node.del(1);
    let elsewhere = undecided(ask_for(1, &["10.0.0.5"]));
    node.assert_refused(&elsewhere, OpErrorKind::NotInBlocks, "IPClaim `shop/db`");
    // The value of the pod's annotation is not the name of a claim. So the pod gets no address, whatever pools or
    // addresses its CNI config names.
    for add in [ask(3), ask_from(3, &["a"]), ask_for(3, &["10.0.0.5"])] {
        let says = "no name of an IPClaim";
        node.assert_refused(&undecided(add), OpErrorKind::NoBlock, says);
    }
    let mut second = undecided(ask_from(3, &["a"]));
    second.attachment.ifname = "net1".to_owned();
    assert_eq!(node.add(&second), "10.0.0.1", "another network");
}

#[test]
fn a_claim_makes_no_node_ready_and_no_pod_depend_on_its_note() {
    let mut node = node_with_claim();
    assert_eq!(node.add(&undecided(ask_for(1, &["10.0.0.0"]))), "10.0.0.0");
    assert_eq!(node.run(&Op::Status), Ok(OpOutcome::Done));
    node.allocation.blocks.remove(0);
    node.allocation.pools.remove(0);
    node.update();
    let refusal = node.run(&Op::Status).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock);
    assert!(!refusal.text.contains("shop/db"), "{refusal}");
}

#[test]
fn a_pool_with_a_namespace_selector_serves_no_other_namespaces() {
    let mut node = Node::new(&[("10.0.0.0/29", "team")]);
    node.allocation.pools = vec![PoolTerms {
        automatic: false,
        bound: true,
        ..pool("team", &["10.0.0.0/29"], &[])
    }];
    node.update();
    for add in [ask_from(1, &["team"]), ask_for(1, &["10.0.0.5"])] {
        node.assert_refused(&add, OpErrorKind::UnknownPool, "namespaceSelector");
        node.assert_refused(&undecided(add.clone()), OpErrorKind::PodUnknown, "");
        let without_pod = Add { pod: None, ..add };
        node.assert_refused(&undecided(without_pod), OpErrorKind::UnknownPool, "");
    }
    let of_team = |add| Add {
        bound: vec!["team".to_owned()],
        ..add
    };
    node.add(&of_team(ask_from(1, &["team"])));
    node.add(&of_team(ask_for(2, &["10.0.0.5"])));
}

/// Returns the ADD of a pod that requests these addresses and may get them through claim `shop/db`, in the form in
/// which the agent passes the ADD to the store.
fn asking(n: u32, addresses: &[&str]) -> Add {
    Add {
        bound: vec!["shop/db".to_owned()],
        ..ask_for(n, addresses)
    }
}

#[test]
fn an_address_that_a_pod_asks_for_comes_from_the_node_s_own_block_or_from_its_claim() {
    let mut node = node_with_claim();
    assert_eq!(node.add(&asking(1, &["10.0.0.5"])), "10.0.0.5");
    let both = asking(2, &["10.0.0.66", "fd00::66"]);
    assert_eq!(node.add(&both), "10.0.0.66 fd00::66");
    // Neither the node nor the claim has the address.
    let says = "10.0.0.9 was asked for, and it is not at this node yet: the controller creates IPClaim `shop/db`";
    let absent = asking(3, &["10.0.0.9"]);
    node.assert_refused(&absent, OpErrorKind::NotInBlocks, says);
    let alone = ask_for(3, &["10.0.0.9"]);
    node.assert_refused(
        &alone,
        OpErrorKind::NotInBlocks,
        "no block of this node contains it",
    );
}

#[test]
fn an_address_of_a_claim_inside_of_the_node_s_own_block_has_one_holder() {
    let mut node = node_with_claim();
    // The pod gets the address from the wide block. After that, the controller wants the address for a claim.
    assert_eq!(node.add(&asking(1, &["10.0.0.5"])), "10.0.0.5");
    node.allocation.withdraw = vec![cidr("10.0.0.5/32"), cidr("10.0.0.6/32")];
    node.update();
    assert!(node.ledger().withdraw_empty().unwrap(), "10.0.0.6");
    let awaited = asking(2, &["10.0.0.6"]);
    let says = "creates IPClaim `shop/db` for it";
    node.assert_refused(&awaited, OpErrorKind::NotInBlocks, says);
    // Even if the NodeSubnet listed a block of the claim before the block's address is withdrawn, each address would
    // have only one holder.
    for (nth, address) in [(1, "10.0.0.5/32"), (2, "10.0.0.6/32")] {
        node.allocation.blocks[nth].cidr = cidr(address);
    }
    node.update();
    let other = asking(3, &["10.0.0.5"]);
    node.assert_refused(&other, OpErrorKind::NotFree, "default/pod-1");
    assert_eq!(node.add(&awaited), "10.0.0.6");
}

#[test]
fn a_pool_may_deny_requests_for_addresses() {
    let mut node = node_with_claim();
    node.allocation.pools[0].denies_explicit = true;
    node.update();
    let says = "pool `a` says explicitAddresses: Deny";
    for add in [asking(1, &["10.0.0.5"]), ask_for(1, &["10.0.0.5"])] {
        node.assert_refused(&add, OpErrorKind::NotUsable, says);
    }
    assert_eq!(node.add(&ask(1)), "10.0.0.0");
    assert_eq!(node.add(&claiming(ask(2))), "10.0.0.66 fd00::66");
}
