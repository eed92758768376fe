use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::cluster::convert;
use cadastre_daemon::watch::Change;

fn listed<T>(objects: Vec<T>) -> Vec<Change<T>> {
    let asked = Duration::ZERO;
    let mut changes = vec![Change::Restarted { asked }];
    changes.extend(objects.into_iter().map(Change::Applied));
    changes.push(Change::Listed);
    changes
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn block(cidr: &str, pool: &str, kind: &str, node: &str) -> Value {
    let name = cidr.replace(['.', '/'], "-");
    json!({
        "metadata": {"name": name, "uid": format!("b-{name}")},
        "spec": {
            "cidr": cidr, "pool": pool, "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": kind, "name": node, "uid": format!("u-{node}")},
        },
    })
}

/// Two pools: of `a` nodes one and two have blocks, of which two's drains; `b` gives podCIDRs.
fn world() -> World {
    let mut world = World::default();
    world.pods.keep_names();
    let pools = [
        json!({"metadata": {"name": "a", "uid": "a"}, "spec": {
            "allocate": "Blocks", "ipv4": {"cidrs": ["10.0.0.0/24"], "blockSize": 26},
            "reserved": ["10.0.0.250-10.0.0.255"],
        }, "status": {"waiting": 2, "conditions": [
            {"type": "Ready", "status": "True", "reason": "x", "message": "fine", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "Exhausted", "status": "True", "reason": "x", "message": "full", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ]}}),
        json!({"metadata": {"name": "b", "uid": "b"}, "spec": {
            "allocate": "NodeCIDR", "ipv4": {"cidrs": ["10.1.0.0/16"], "blockSize": 24},
        }}),
    ];
    for change in listed(
        pools
            .into_iter()
            .map(|it| convert::pool(read(it)))
            .collect(),
    ) {
        world.pools.change(change);
    }
    let nodes = ["one", "two"].map(|name| {
        let third = if name == "one" { "1" } else { "2" };
        json!({"metadata": {"name": name, "uid": format!("u-{name}")}, "spec": {"podCIDRs": [format!("10.1.{third}.0/24")]}})
    });
    for change in listed(
        nodes
            .into_iter()
            .map(|it| convert::node(read(it)))
            .collect(),
    ) {
        world.nodes.change(change);
    }
    let blocks = [
        block("10.0.0.0/26", "a", "Node", "one"),
        block("10.0.0.64/26", "a", "Node", "two"),
        block("10.0.0.128/26", "a", "Quarantine", "gone"),
    ];
    for change in listed(
        blocks
            .into_iter()
            .map(|it| convert::block(read(it)))
            .collect(),
    ) {
        world.blocks.change(change);
    }
    let subnets = [
        json!({"metadata": {"name": "one", "uid": "s1"}, "spec": {
            "nodeUID": "u-one", "blocks": [{"cidr": "10.0.0.0/26", "uid": "b-10-0-0-0-26", "pool": "a"}],
            "previous": [{"nodeUID": "old", "podCIDRs": [{"cidr": "10.1.9.0/24", "pool": "b"}], "until": "2026-01-02T00:00:00Z"}],
        }, "status": {
            "nodeUID": "u-one", "blocks": [{"cidr": "10.0.0.0/26", "uid": "b-10-0-0-0-26", "used": 2, "cooling": 1, "free": 58}],
            "orphans": [
                {"address": "10.0.0.6", "podUID": "00000000-0000-0000-0000-000000000002"},
            ],
        }}),
        json!({"metadata": {"name": "two", "uid": "s2"}, "spec": {
            "nodeUID": "u-two", "blocks": [{"cidr": "10.0.0.64/26", "uid": "b", "pool": "a", "recall": "Drain"}],
        }}),
    ];
    for change in listed(
        subnets
            .into_iter()
            .map(|it| convert::subnet(read(it)))
            .collect(),
    ) {
        world.subnets.change(change);
    }
    for change in listed(Vec::new()) {
        world.services.change(change);
    }
    let pods = [
        ("1", "web", "10.0.0.5"),
        ("3", "db", "10.0.0.7"),
        ("4", "web-2", "10.1.2.9"),
    ];
    let pods = pods.map(|(uid, name, ip)| {
        let uid = format!("00000000-0000-0000-0000-00000000000{uid}");
        json!({"metadata": {"name": name, "namespace": "ns", "uid": uid}, "status": {"phase": "Running", "podIP": ip}})
    });
    for change in listed(pods.into_iter().map(|it| convert::pod(read(it))).collect()) {
        world.pods.change(change);
    }
    world
}

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn pool(world: &World, name: &str) -> Sheet {
    match answer(world, &Ask::Pool(name.to_owned())) {
        Answer::Pool(sheet) => sheet,
        other => panic!("{other:?}"),
    }
}

fn find(world: &World, text: &str) -> Vec<(&'static str, String, Option<String>, Option<String>)> {
    let Answer::Find(found) = answer(world, &Ask::Find(text.to_owned())) else {
        panic!()
    };
    let hits = found.hits.into_iter();
    hits.map(|it| {
        let cidr = it.cidr.map(|it| it.to_string());
        (it.what, it.name, cidr, it.pool)
    })
    .collect()
}

#[test]
fn a_pool_shows_each_range_with_its_node_its_state_and_its_counts() {
    let sheet = pool(&world(), "a");
    let rows: Vec<String> = sheet
        .rows
        .iter()
        .map(|row| serde_json::to_string(row).unwrap())
        .collect();
    assert_eq!(
        rows,
        [
            r#"["10.0.0.0/26",1,"block",2,1,58]"#,
            r#"["10.0.0.64/26",2,"drain",0,0,null]"#,
            r#"["10.0.0.128/26",0,"quarantine",0,0,null]"#,
        ]
    );
    assert_eq!(sheet.owners, ["gone", "one", "two"]);
    assert_eq!(sheet.reserved, ["10.0.0.250-10.0.0.255"]);
    assert_eq!(sheet.head.complaints, ["Exhausted: full"]);
    let rows = pool(&world(), "b").rows;
    let kinds: Vec<(String, Kind, u64)> = rows
        .iter()
        .map(|row| (row.0.to_string(), row.2, row.3))
        .collect();
    assert_eq!(
        kinds,
        [
            ("10.1.1.0/24".into(), Kind::PodCidr, 0),
            ("10.1.2.0/24".into(), Kind::PodCidr, 1),
            ("10.1.9.0/24".into(), Kind::Rest, 0),
        ]
    );
}

#[test]
fn a_range_shows_what_agents_and_pods_say_each_address_once() {
    let world = world();
    let Answer::Range(detail) = answer(&world, &Ask::Range(cidr("10.0.0.0/26"))) else {
        panic!()
    };
    assert_eq!(
        (detail.node.as_str(), detail.pool.as_deref()),
        ("one", Some("a"))
    );
    let told = |it: &Used| {
        let pod = it.pod.as_deref().unwrap_or("?");
        format!("{} {pod} {:?}", it.address, it.told)
    };
    let addresses: Vec<String> = detail.addresses.iter().map(told).collect();
    assert_eq!(
        addresses,
        [
            "10.0.0.5 ns/web Pod",
            "10.0.0.6 ? Agent",
            "10.0.0.7 ns/db Pod"
        ]
    );
    let Answer::Range(rest) = answer(&world, &Ask::Range(cidr("10.1.9.0/24"))) else {
        panic!()
    };
    assert!(rest.kind == Kind::Rest && rest.until.is_some());
    let nobody = answer(&world, &Ask::Range(cidr("10.0.0.192/26")));
    assert!(matches!(nobody, Answer::Nothing(why) if why.contains("10.0.0.192/26")));
}

#[test]
fn addresses_nodes_pods_and_pools_are_found() {
    let world = world();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(
        find(&world, "10.0.0.70"),
        [(
            "address",
            "10.0.0.70".into(),
            some("10.0.0.64/26"),
            some("a")
        )]
    );
    assert_eq!(
        find(&world, " 10.0.0.200 "),
        [("address", "10.0.0.200".into(), None, some("a"))]
    );
    assert_eq!(
        find(&world, "two"),
        [
            ("node", "two".into(), some("10.0.0.64/26"), some("a")),
            ("node", "two".into(), some("10.1.2.0/24"), some("b")),
        ]
    );
    assert_eq!(
        find(&world, "web"),
        [
            ("pod", "ns/web".into(), some("10.0.0.0/26"), some("a")),
            ("pod", "ns/web-2".into(), some("10.1.2.0/24"), some("b")),
        ]
    );
    assert_eq!(find(&world, "a")[0], ("pool", "a".into(), None, some("a")));
    assert_eq!(find(&world, "nothing like it"), []);
}

#[test]
fn nothing_is_told_before_everything_was_listed() {
    let answered = answer(&World::default(), &Ask::Pools);
    assert!(matches!(answered, Answer::Nothing(why) if why.contains("nodes")));
    let unknown = answer(&world(), &Ask::Pool("x".into()));
    assert!(matches!(unknown, Answer::Nothing(why) if why.contains("\"x\"")));
}
