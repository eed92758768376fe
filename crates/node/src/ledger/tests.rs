//! Tests each rule of the ledger on tables in memory. `tests/node_store` tests the rules together, with random
//! operations.

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
    holding: NodeAllocation,
}

impl Node {
    fn new(blocks: &[(&str, &str)]) -> Self {
        let mut node = Self {
            memory: Memory::default(),
            now: now("one", 1000),
            holding: NodeAllocation {
                node_uid: "node".to_owned(),
                ..NodeAllocation::default()
            },
        };
        node.holding.blocks = blocks.iter().map(|(it, pool)| block(it, pool)).collect();
        node.hold();
        node
    }

    fn ledger(&mut self) -> AddressLedger<'_> {
        AddressLedger::new(&mut self.memory, &self.now)
    }

    fn hold(&mut self) {
        let holding = self.holding.clone();
        self.ledger().set_allocation(&holding).unwrap();
    }

    fn run(&mut self, op: &Op) -> Result<OpOutcome, OpError> {
        self.ledger().run(op).unwrap()
    }

    fn given(&mut self, add: &Add) -> Result<AddressAssignment, OpError> {
        match self.run(&Op::Add(add.clone()))? {
            OpOutcome::Given(given) => Ok(given),
            OpOutcome::Done => panic!("an ADD without an answer"),
        }
    }

    /// Does an ADD. Returns the assigned addresses as text, or the kind of error.
    fn add(&mut self, add: &Add) -> Result<String, OpErrorKind> {
        let given = self.given(add).map_err(|refusal| refusal.why)?;
        let addresses = given.addresses.iter().map(|it| it.address.to_string());
        Ok(addresses.collect::<Vec<_>>().join(" "))
    }

    fn add_one(&mut self, n: u32) -> String {
        self.add(&ask(n)).unwrap()
    }

    fn del(&mut self, n: u32) {
        assert_eq!(self.run(&Op::Del(attachment(n))), Ok(OpOutcome::Done));
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
        netns: String::new(),
        pod: Some(PodRef {
            namespace: "default".to_owned(),
            name: format!("pod-{n}"),
            uid: format!("uid-{n}"),
        }),
        pools: Vec::new(),
        addresses: Vec::new(),
        decided: true,
        bound: Vec::new(),
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
fn what_nobody_had_comes_first_then_what_was_freed_first() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let all: Vec<String> = (0..5).map(|n| node.add_one(n)).collect();
    assert_eq!(
        all,
        ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]
    );
    node.del(3);
    node.later(1);
    node.del(1);
    assert_eq!(node.add(&ask(9)), Err(OpErrorKind::Exhausted), "both rest");
    node.later(29);
    assert_eq!(node.add_one(10), "10.0.0.5");
    assert_eq!(
        node.add(&ask(11)),
        Err(OpErrorKind::Exhausted),
        "the other rests a second longer"
    );
    let text = node.given(&ask(11)).unwrap_err().text;
    assert!(
        text.contains("in no pool, has no free IPv4 address") && text.contains("in 1 s"),
        "{text}"
    );
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
fn rest_is_by_the_clock_of_the_boot() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    node.add_one(1);
    node.del(1);
    // The wall clock has no influence, so the address is still cooling.
    node.now.wall_ms = i64::MAX;
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::Exhausted));
    // After a reboot the address cools until the host has been up for the whole cooldown.
    node.now = now("two", 29);
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::Exhausted));
    node.now = now("two", 30);
    assert_eq!(node.add_one(2), "10.0.0.2");
    node.del(2);
    node.now = now("three", 5);
    assert_eq!(node.add(&ask(3)), Err(OpErrorKind::Exhausted));
    // A longer cooldown also applies to earlier releases, so the address cools for longer.
    node.holding.pools = vec![PoolTerms {
        cooldown_seconds: 100,
        ..PoolTerms::named("")
    }];
    node.hold();
    node.now = now("three", 99);
    assert_eq!(node.add(&ask(3)), Err(OpErrorKind::Exhausted));
    node.later(1);
    assert_eq!(node.add_one(3), "10.0.0.2");
}

#[test]
fn a_pool_gives_both_families_or_neither_and_the_next_one_is_tried() {
    let mut node = Node::new(&[
        ("10.0.0.0/31", "a"),
        ("fd00::/128", "a"),
        ("10.1.0.0/31", "b"),
    ]);
    node.holding.pools = vec![
        pool("a", &["10.0.0.0/8"], &["fd00::/64"]),
        pool("b", &["10.1.0.0/16"], &[]),
    ];
    node.hold();
    assert_eq!(node.add_one(1), "10.0.0.0 fd00::");
    assert_eq!(
        node.add_one(2),
        "10.1.0.0",
        "pool a has no IPv6 address left"
    );
    assert_eq!(node.add(&ask_from(3, &["a"])), Err(OpErrorKind::Exhausted));
    assert_eq!(
        node.add(&ask_from(3, &["a", "b"])),
        Ok("10.1.0.1".to_owned())
    );
    let refused = node.given(&ask_from(4, &["x", "a"])).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::Exhausted);
    assert!(
        refused.text.contains("`a` has no free IPv6") && refused.text.contains("`x` is not"),
        "{refused}"
    );
    let refused = node.given(&ask_from(4, &["x"])).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::UnknownPool);
    assert!(
        refused.text.contains("pool `x` is not one of this node's"),
        "{refused}"
    );
    let writes = node.memory.writes;
    assert_eq!(node.add(&ask(4)), Err(OpErrorKind::Exhausted));
    assert_eq!(node.memory.writes, writes, "a refusal changes nothing");
}

#[test]
fn a_pool_for_those_who_name_it_serves_nobody_else() {
    let mut node = Node::new(&[("10.0.0.0/31", "m")]);
    node.holding.pools = vec![PoolTerms {
        automatic: false,
        ..pool("m", &["10.0.0.0/8"], &[])
    }];
    node.hold();
    assert_eq!(node.add(&ask(1)), Err(OpErrorKind::NothingHeld));
    assert_eq!(
        node.run(&Op::Status),
        Ok(OpOutcome::Done),
        "it serves who asks"
    );
    assert_eq!(node.add(&ask_from(1, &["m"])), Ok("10.0.0.0".to_owned()));
}

#[test]
fn exhaustion_is_no_error_of_status() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    node.add_one(1);
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::Exhausted));
    assert_eq!(node.run(&Op::Status), Ok(OpOutcome::Done));
    node.holding.blocks[0].draining = true;
    node.hold();
    let refused = node.run(&Op::Status).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::NothingHeld);
    assert!(
        refused
            .text
            .contains("no block that addresses are given from"),
        "{refused}"
    );
}

#[test]
fn an_address_that_is_asked_for_may_be_one_for_those_who_ask_and_nothing_else() {
    let mut node = Node::new(&[("10.0.0.0/29", ""), ("fd00::/125", "")]);
    node.holding.blocks[0].on_request = vec![IpRange::parse("10.0.0.2-10.0.0.3").unwrap()];
    node.holding.blocks[0].reserved = vec![IpRange::parse("10.0.0.2").unwrap()];
    node.hold();
    assert_eq!(node.add_one(1), "10.0.0.4 fd00::2");
    assert_eq!(
        node.add(&ask_for(2, &["10.0.0.3"])),
        Ok("10.0.0.3".to_owned())
    );
    let mut why = |addresses: &[&str]| node.given(&ask_for(3, addresses)).unwrap_err();
    assert_eq!(why(&["10.0.0.3"]).why, OpErrorKind::Taken);
    assert!(
        why(&["10.0.0.3"])
            .text
            .contains("in use by pod default/pod-2")
    );
    assert!(
        why(&["10.0.0.1"])
            .text
            .contains("10.0.0.1 is the gateway of 10.0.0.0/29")
    );
    assert!(why(&["10.0.0.7"]).text.contains("network or broadcast"));
    assert!(why(&["10.0.0.2"]).text.contains("10.0.0.2 is reserved"));
    assert_eq!(why(&["10.0.0.0"]).why, OpErrorKind::NotUsable);
    assert_eq!(
        why(&["10.0.0.5", "10.0.0.6"]).why,
        OpErrorKind::NotUsable,
        "one of a family"
    );
    assert_eq!(
        why(&["10.0.0.5", "fd00::9"]).why,
        OpErrorKind::NotHeld,
        "all or none"
    );
    assert_eq!(
        node.add(&ask_for(3, &["fd00::5", "10.0.0.5"])),
        Ok("10.0.0.5 fd00::5".to_owned())
    );
    // A new sandbox of the same pod gets the address at once, another pod only after the cooldown.
    node.del(3);
    let mut other = ask_for(4, &["10.0.0.5"]);
    let refused = node.given(&other).unwrap_err();
    assert!(
        refused.why == OpErrorKind::Taken && refused.text.contains("rests for another 30 s"),
        "{refused}"
    );
    other.pod = ask(3).pod;
    assert_eq!(node.add(&other), Ok("10.0.0.5".to_owned()));
}

#[test]
fn a_pod_made_anew_under_its_name_has_its_address_at_once_and_others_after_its_rest() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let anew = |n, name: &str, namespace: &str| Add {
        pod: Some(PodRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{n}"),
        }),
        ..ask_for(n, &["10.0.0.5"])
    };
    assert_eq!(
        node.add(&anew(1, "db-0", "shop")),
        Ok("10.0.0.5".to_owned())
    );
    assert_eq!(
        node.add(&anew(2, "db-0", "shop")),
        Err(OpErrorKind::Taken),
        "its first sandbox may still live"
    );
    node.del(1);
    for (name, namespace) in [
        ("db-1", "shop"),
        ("db-0", "other"),
        ("", "shop"),
        ("db-0", ""),
    ] {
        let refused = node.add(&anew(3, name, namespace));
        assert_eq!(refused, Err(OpErrorKind::Taken), "{namespace}/{name}");
    }
    assert_eq!(
        node.add(&ask(4)),
        Ok("10.0.0.2".to_owned()),
        "unasked it rests"
    );
    assert_eq!(
        node.add(&anew(2, "db-0", "shop")),
        Ok("10.0.0.5".to_owned())
    );
    node.del(2);
    node.now = now("one", 1031);
    assert_eq!(
        node.add(&anew(3, "db-1", "shop")),
        Ok("10.0.0.5".to_owned())
    );
}

#[test]
fn a_del_ends_what_was_asked_for_before_it_also_if_nothing_was_given() {
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
    // A DEL that was requested earlier but arrives later does not replace the newer DEL.
    assert_eq!(run(&mut node, &del, 999_500), Ok(OpOutcome::Done));
    assert_eq!(run(&mut node, &del, 1_000), Ok(OpOutcome::Done));
    assert!(run(&mut node, &add, 999_400).is_err());
    // After a minute the caller of the ADD no longer waits, so the ADD is rejected even if the DEL is forgotten.
    node.now = now("one", 1_060);
    let refused = run(&mut node, &add, 999_400).unwrap_err();
    assert!(refused.text.contains("more than 60"), "{refused}");
    // No ADD survives a reboot, so a DEL of an earlier boot has no effect.
    node.now = now("two", 5);
    assert!(run(&mut node, &add, 4_000).is_ok());
}

#[test]
fn deletions_are_forgotten_as_others_come() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    for n in 0..2_000 {
        node.now = now("one", 1_000 + u64::from(n));
        node.del(n);
    }
    let tables = node.memory.tables.keys();
    let count = tables.filter(|(it, _)| *it == KvTable::Deletions).count();
    assert!(count < 200, "{count} of the last minute's 60");
}

#[test]
fn a_repeated_add_is_answered_as_the_first_one() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    let first = node.given(&ask(1)).unwrap();
    node.holding.blocks[0].draining = true;
    node.holding.pools = vec![PoolTerms {
        dns: Dns {
            domain: "new".to_owned(),
            ..Dns::default()
        },
        ..PoolTerms::named("")
    }];
    node.hold();
    let writes = node.memory.writes;
    assert_eq!(node.given(&ask(1)).unwrap(), first);
    assert_eq!(node.given(&ask_from(1, &["other"])).unwrap(), first);
    assert_eq!(node.given(&ask_for(1, &["10.0.0.2"])).unwrap(), first);
    assert_eq!(node.memory.writes, writes);
    let refused = node.given(&ask_for(1, &["10.0.0.3"])).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::Mismatch);
    assert!(refused.text.contains("has 10.0.0.2 already"), "{refused}");
    // A repeated ADD in another boot moves the attachment to that boot, so that the attachment is not regarded as
    // dead.
    node.now = now("two", 1);
    assert_eq!(node.given(&ask(1)).unwrap(), first);
    assert_eq!(node.ledger().snapshot().unwrap().attachments[0].boot, "two");
}

#[test]
fn attachments_are_in_the_order_in_which_they_were_given() {
    let mut node = Node::new(&[("10.0.0.0/28", "")]);
    let order = |node: &mut Node| {
        let mut tenants = node.ledger().snapshot().unwrap().attachments;
        tenants.sort_by_key(|it| it.order);
        let ids = tenants.into_iter().map(|it| it.attachment.container_id);
        ids.collect::<Vec<_>>()
    };
    for n in [3, 1, 2] {
        // The wall clock goes back each time, so the order cannot come from it.
        node.now.wall_ms -= 1_000_000;
        node.add_one(n);
    }
    node.del(1);
    assert_eq!(order(&mut node), ["c3", "c2"]);
    let known = RememberedAttachment {
        attachment: attachment(7),
        addresses: vec![Addr::parse_strict("10.0.0.9").unwrap()],
        pod: None,
        netns: String::new(),
        since_ms: i64::MAX,
        boot: "earlier".to_owned(),
        superseded: false,
    };
    let old = RememberedAttachment {
        attachment: attachment(8),
        addresses: vec![Addr::parse_strict("10.0.0.10").unwrap()],
        boot: String::new(),
        superseded: true,
        ..known.clone()
    };
    assert!(node.ledger().adopt(&[known, old]).unwrap().is_empty());
    assert_eq!(order(&mut node), ["c8", "c7", "c3", "c2"]);
    let boot = |node: &mut Node, id: &str| {
        let tenants = node.ledger().snapshot().unwrap().attachments;
        let mut of = tenants.into_iter();
        of.find(|it| it.attachment.container_id == id).unwrap().boot
    };
    let running = node.now.boot.clone();
    assert_eq!(boot(&mut node, "c7"), "earlier");
    assert_eq!(boot(&mut node, "c8"), running);
    // A container that is started again after a reboot becomes the newest one.
    node.now = now("two", 1);
    node.add_one(3);
    assert_eq!(order(&mut node), ["c8", "c7", "c2", "c3"]);
}

#[test]
fn routes_and_dns_are_those_of_the_families_that_are_given() {
    let mut node = Node::new(&[("10.0.0.0/29", "a"), ("fd00::/125", "a")]);
    let route = |dst| Route {
        dst: cidr(dst),
        gw: None,
    };
    let dns = Dns {
        nameservers: vec!["10.96.0.10".to_owned()],
        ..Dns::default()
    };
    node.holding.pools = vec![PoolTerms {
        routes: vec![route("::/0"), route("0.0.0.0/0")],
        dns: dns.clone(),
        ..pool("a", &["10.0.0.0/8"], &["fd00::/64"])
    }];
    node.hold();
    let given = node.given(&ask(1)).unwrap();
    assert_eq!(given.routes, [route("0.0.0.0/0"), route("::/0")]);
    assert_eq!(given.dns, dns);
    let given = node.given(&ask_for(2, &["fd00::3"])).unwrap();
    assert_eq!(given.routes, [route("::/0")]);
}

#[test]
fn check_looks_at_what_is_of_the_node() {
    let mut node = Node::new(&[("10.0.0.0/29", "")]);
    node.add_one(1);
    let mut check = |n, addresses: &[&str]| {
        let addresses = ask_for(0, addresses).addresses;
        let attachment = attachment(n);
        node.run(&Op::Check(Check {
            attachment,
            addresses,
        }))
        .map_err(|it| it.why)
    };
    assert_eq!(check(1, &["10.0.0.2"]), Ok(OpOutcome::Done));
    assert_eq!(check(1, &["10.0.0.2", "192.0.2.1"]), Ok(OpOutcome::Done));
    assert_eq!(
        check(1, &["10.0.0.2", "10.0.0.3"]),
        Err(OpErrorKind::Mismatch)
    );
    assert_eq!(check(1, &[]), Err(OpErrorKind::Mismatch));
    assert_eq!(check(2, &["10.0.0.2"]), Err(OpErrorKind::Mismatch));
}

#[test]
fn what_is_no_longer_listed_stays_with_who_has_it() {
    let mut node = Node::new(&[("10.0.0.0/30", ""), ("10.0.0.4/30", "")]);
    let listed = node.holding.blocks.clone();
    node.add_one(1);
    node.holding.blocks.clear();
    node.holding.node_uid = "another".to_owned();
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Withdrawn));
    assert_eq!(node.state("10.0.0.4/30"), None, "an empty one goes");
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::NothingHeld));
    assert_eq!(node.add_one(1), "10.0.0.2");
    // If the block is listed for the new Node under another UID, it is the same block, so its assignments stay valid.
    node.holding.blocks = listed;
    node.holding.blocks[0].uid = "u2".to_owned();
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Held));
    assert_eq!(node.add_one(2), "10.0.0.6");
    // A block that is not listed again is removed once its last address has cooled.
    node.holding.blocks.remove(0);
    node.hold();
    node.del(1);
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Withdrawn));
    node.later(30);
    assert_eq!(node.state("10.0.0.0/30"), None);
    let writes = node.memory.writes;
    node.hold();
    assert!(node.memory.writes > writes);
    let writes = node.memory.writes;
    node.hold();
    assert_eq!(node.memory.writes, writes, "nothing new");
}

#[test]
fn what_was_given_back_is_used_again_as_another_block_only() {
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
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::NothingHeld));
    node.hold();
    assert_eq!(
        node.state("10.0.0.0/30"),
        Some(BlockState::Released),
        "still listed"
    );
    let listed = std::mem::take(&mut node.holding.blocks);
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), None);
    node.holding.blocks = listed;
    node.hold();
    assert_eq!(
        node.state("10.0.0.0/30"),
        Some(BlockState::Released),
        "the API was put back to an older state"
    );
    assert_eq!(node.add(&ask(2)), Err(OpErrorKind::NothingHeld));
    node.holding.blocks[0].uid = "u2".to_owned();
    node.hold();
    assert_eq!(node.add_one(2), "10.0.0.2");
    // The API is restored to an older state once more, while the range is in use as another block. So the block
    // drains first.
    node.holding.blocks[0].uid = "u1".to_owned();
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Draining));
    node.del(2);
    node.later(30);
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
}

#[test]
fn the_last_thousand_blocks_that_were_given_back_are_remembered() {
    let mut node = Node::new(&[("10.0.0.0/30", "")]);
    let it = cidr("10.0.0.0/30");
    for n in 0..=1_024 {
        node.holding.blocks[0].uid = format!("u{n}");
        node.hold();
        assert!(node.ledger().release(it, &format!("u{n}")).unwrap());
    }
    node.holding.blocks[0].uid = "u1".to_owned();
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Released));
    node.holding.blocks[0].uid = "u0".to_owned();
    node.hold();
    assert_eq!(node.state("10.0.0.0/30"), Some(BlockState::Held));
}

#[test]
fn a_wide_block_forgets_what_has_rested() {
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
    let known = node
        .memory
        .tables
        .keys()
        .filter(|(it, _)| *it == KvTable::Addresses);
    assert!(known.count() < 40, "what rests, and little more");
    let counts = node.ledger().snapshot().unwrap().blocks[0].counts;
    assert_eq!((counts.used, counts.cooling), (0, 29));
    assert_eq!(counts.free, u64::MAX - 1 - 29);
}

#[test]
fn of_blocks_with_more_addresses_than_can_be_counted_that_many_are_free() {
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
fn a_wide_block_begins_again_when_it_has_come_to_its_end() {
    let mut node = Node::new(&[("10.0.0.0/19", "")]);
    let last = 8192 - 3;
    for n in 0..last {
        node.add_one(n);
    }
    assert_eq!(node.add(&ask(9000)), Err(OpErrorKind::Exhausted));
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
    assert_eq!(
        node.add(&ask(9004)),
        Err(OpErrorKind::Exhausted),
        "the last one rests"
    );
}

#[test]
fn no_attachment_is_taken_for_another() {
    let mut node = Node::new(&[("10.0.0.0/24", "")]);
    let mut given = std::collections::BTreeSet::new();
    let parts = ["", "a", "ab", "b", "a\0b", "\0", "\u{0}\u{1}a", "é"];
    for network in parts {
        for container_id in parts {
            let attachment = Attachment {
                network: network.to_owned(),
                container_id: container_id.to_owned(),
                ifname: "a".to_owned(),
            };
            let add = Add {
                attachment,
                ..ask(0)
            };
            assert!(given.insert(node.add(&add).unwrap()));
        }
    }
    let tenants = node.ledger().snapshot().unwrap().attachments;
    assert_eq!(tenants.len(), parts.len() * parts.len());
    let network = "a".to_owned();
    let valid = vec![("ab".to_owned(), "a".to_owned())];
    node.run(&Op::Gc(Gc { network, valid })).unwrap();
    let tenants = node.ledger().snapshot().unwrap().attachments;
    let of_a = tenants.iter().filter(|it| it.attachment.network == "a");
    assert_eq!((of_a.count(), tenants.len()), (1, 57));
}

/// Returns a note that the pod of `ask(n)` may have these pools and addresses on its interface `eth0`.
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
fn a_pod_of_which_nothing_is_known_waits_unless_its_pool_serves_such() {
    let mut node = Node::new(&[
        ("10.0.0.0/29", "a"),
        ("10.0.1.0/29", "b"),
        ("10.0.2.0/29", "c"),
    ]);
    let terms = |name: &str, range, automatic, serves_unknown| PoolTerms {
        automatic,
        serves_unknown,
        ..pool(name, &[range], &[])
    };
    node.holding.pools = vec![
        terms("a", "10.0.0.0/29", true, false),
        terms("b", "10.0.1.0/29", false, false),
    ];
    node.holding.blocks.retain(|it| it.pool != "c");
    node.hold();
    let refused = node.given(&undecided(ask(1))).unwrap_err();
    assert_eq!(refused.why, OpErrorKind::PodUnknown);
    assert!(refused.text.contains("pod default/pod-1"), "{refused}");
    // An ADD for a certain address does not depend on the pod's labels, and an ADD without a pod cannot. So both
    // succeed although nothing is known about the pod.
    let asked = undecided(ask_for(2, &["10.0.0.5"]));
    assert_eq!(node.add(&asked), Ok("10.0.0.5".to_owned()));
    let nobody = Add {
        pod: None,
        ..undecided(ask(3))
    };
    assert_eq!(node.add(&nobody), Ok("10.0.0.0".to_owned()));
    let notes = [
        note(1, PoolOrder::Selected(vec!["b".to_owned()]), &[]),
        note(4, PoolOrder::All, &["10.0.0.6"]),
        note(5, PoolOrder::None("its labels".to_owned()), &[]),
    ];
    node.ledger().note_pods(&notes, &[]).unwrap();
    assert_eq!(node.add(&undecided(ask(1))), Ok("10.0.1.0".to_owned()));
    assert_eq!(node.add(&undecided(ask(4))), Ok("10.0.0.6".to_owned()));
    let refused = node.given(&undecided(ask(5))).unwrap_err();
    assert!(refused.text.contains("its labels"), "{refused}");
    // The note does not apply to another pod with the same name, so nothing is known about that pod.
    let mut anew = undecided(ask(6));
    anew.pod.as_mut().unwrap().name = "pod-4".to_owned();
    assert_eq!(node.given(&anew).unwrap_err().why, OpErrorKind::PodUnknown);
    let gone = [notes[1].pod.clone()];
    node.ledger().note_pods(&[], &gone).unwrap();
    assert_eq!(node.ledger().pod_notes().unwrap().len(), 2);
    // On interfaces other than `eth0` only labels matter, and only if the ADD names no pools. So an ADD that names
    // pools succeeds.
    let mut second = undecided(ask_from(7, &["a"]));
    second.attachment.ifname = "net1".to_owned();
    assert_eq!(node.add(&second), Ok("10.0.0.1".to_owned()));
    node.holding.pools[0].serves_unknown = true;
    node.hold();
    assert_eq!(node.add(&undecided(ask(8))), Ok("10.0.0.2".to_owned()));
}

#[test]
fn a_pool_for_some_namespaces_gives_nothing_to_others_by_name_or_by_address() {
    let mut node = Node::new(&[("10.0.0.0/29", "team")]);
    node.holding.pools = vec![PoolTerms {
        automatic: false,
        bound: true,
        ..pool("team", &["10.0.0.0/29"], &[])
    }];
    node.hold();
    for add in [ask_from(1, &["team"]), ask_for(1, &["10.0.0.5"])] {
        let refused = node.given(&add).unwrap_err();
        assert_eq!(refused.why, OpErrorKind::UnknownPool);
        assert!(refused.text.contains("namespaceSelector"), "{refused}");
        let refused = node.given(&undecided(add.clone())).unwrap_err();
        assert_eq!(refused.why, OpErrorKind::PodUnknown);
        let nobody = Add { pod: None, ..add };
        assert_eq!(
            node.given(&undecided(nobody)).unwrap_err().why,
            OpErrorKind::UnknownPool
        );
    }
    let of_team = |add| Add {
        bound: vec!["team".to_owned()],
        ..add
    };
    assert!(node.add(&of_team(ask_from(1, &["team"]))).is_ok());
    assert!(node.add(&of_team(ask_for(2, &["10.0.0.5"]))).is_ok());
}
