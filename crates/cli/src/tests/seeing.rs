//! Tests of `show`, `map`, `explain` and `plan`.

use serde_json::json;

use super::{Cluster, addr, cidr, now, style};
use crate::address::{AddressState, describe};
use crate::map::{By, map};
use crate::plan::{Changes, plan};
use crate::render::VerbReport as _;
use crate::{explain, show};

fn state_of(cluster: &Cluster, at: &str) -> AddressState {
    describe(addr(at), &cluster.inventory()).state
}

#[test]
fn every_address_has_a_state() {
    let mut cluster = Cluster::new();
    cluster.lists.pools[0].spec["reserved"] = json!(["10.0.0.240/28"]);
    cluster.rest("10.0.0.32/28", "p", "dead", "2026-11-21T12:05:00Z");
    cluster.pod("shop/late", "b", &["10.0.0.17"]);
    cluster.lists.nodes[0].status = serde_json::from_value(json!({
        "addresses": [{"type": "InternalIP", "address": "10.0.0.77"}],
    }))
    .unwrap();
    let states = [
        ("10.0.0.1", AddressState::InUse),
        ("10.0.0.2", AddressState::Free),
        ("10.0.0.16", AddressState::Network),
        ("10.0.0.31", AddressState::Broadcast),
        ("10.0.0.17", AddressState::ReportedByPod),
        ("10.0.0.33", AddressState::Quarantine),
        ("10.0.0.77", AddressState::NodeAddress),
        ("10.0.0.200", AddressState::NotCarved),
        ("10.0.0.241", AddressState::Reserved),
        ("192.0.2.1", AddressState::Outside),
        ("fd00::1", AddressState::Outside),
    ];
    for (at, state) in states {
        assert_eq!(state_of(&cluster, at), state, "{at}");
    }
    // Without a gateway, every address of the block can be assigned to pods, so the lowest one is free.
    cluster.lists.subnets[1].spec["pools"] = json!([
        {"name": "p", "ipv4": {"cidrs": ["10.0.0.0/24"], "gateway": "None"}},
    ]);
    assert_eq!(state_of(&cluster, "10.0.0.16"), AddressState::Free);
    cluster.lists.subnets[1].spec["pools"] = json!([]);
    cluster
        .lists
        .pods
        .retain(|pod| pod.metadata.name.as_deref() != Some("late"));
    assert_eq!(state_of(&cluster, "10.0.0.17"), AddressState::Gateway);
    cluster.pod("shop/late", "b", &["10.0.0.17"]);
    let entry = "10.0.0.1 cbr0/0123456789-shop/cart eth0 pod-shop/cart shop/cart";
    cluster.listed(&format!("{entry} 2026-11-21T11:00:00Z superseded"));
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::Superseded);
    cluster.pod("shop/twin", "b", &["10.0.0.1"]);
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::Duplicate);
    cluster
        .lists
        .pods
        .retain(|pod| pod.metadata.name.as_deref() == Some("late"));
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::WithoutPod);
    let text = describe(addr("10.0.0.1"), &cluster.inventory()).text(&style());
    for part in [
        "Pool:",
        "p\n",
        "10.0.0.0/28 Block of node a",
        "shop/cart",
        "since 60m",
        "1 used",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_plan_says_how_many_nodes_fit() {
    let cluster = Cluster::new();
    let mut changes = Changes {
        add_nodes: 14,
        ..Changes::default()
    };
    let report = plan(&cluster.lists, &changes, now()).unwrap();
    assert!(report.fits, "{}", report.text(&style()));
    assert_eq!((report.new_nodes.served, report.new_nodes.waiting), (14, 0));
    assert_eq!(report.pools[0].free, ("14".to_owned(), "0".to_owned()));
    changes.add_nodes = 20;
    let report = plan(&cluster.lists, &changes, now()).unwrap();
    assert!(!report.fits);
    assert_eq!((report.new_nodes.served, report.new_nodes.waiting), (14, 6));
    assert!(
        report.will_wait[0].why.contains("no free IPv4 block"),
        "{}",
        report.text(&style())
    );
    changes.pods_per_node = Some(20);
    changes.add_nodes = 7;
    let report = plan(&cluster.lists, &changes, now()).unwrap();
    assert!(report.fits, "two blocks each: {}", report.text(&style()));
    assert_eq!(report.pools[0].free.1, "0");
}

#[test]
fn a_plan_tells_who_is_hit() {
    let cluster = Cluster::new();
    let drained = Changes {
        drain: vec![cidr("10.0.0.0/28")],
        ..Changes::default()
    };
    let report = plan(&cluster.lists, &drained, now()).unwrap();
    assert!(report.fits, "{}", report.text(&style()));
    assert_eq!(report.hits.len(), 1);
    assert_eq!(
        (report.hits[0].node.as_str(), report.hits[0].used),
        ("a", 1)
    );
    // Node a gets another block for the addresses that have to move, so one block less is free.
    assert_eq!(report.pools[0].free, ("14".to_owned(), "13".to_owned()));
    let deleted = Changes {
        delete_pools: vec!["p".to_owned()],
        add_nodes: 1,
        ..Changes::default()
    };
    let report = plan(&cluster.lists, &deleted, now()).unwrap();
    assert!(!report.fits);
    assert_eq!(report.hits.len(), 2);
    let narrower = Changes {
        pools: vec![json!({
            "kind": "IPPool", "metadata": {"name": "p"},
            "spec": {"ipv4": {"cidrs": ["10.0.0.0/24"], "blockSize": 28}, "nodeSelector": {"matchLabels": {"zone": "a"}}},
        })],
        ..Changes::default()
    };
    let report = plan(&cluster.lists, &narrower, now()).unwrap();
    assert_eq!(
        report
            .hits
            .iter()
            .map(|hit| hit.node.as_str())
            .collect::<Vec<_>>(),
        ["b"]
    );
}

#[test]
fn a_map_shows_every_block_once() {
    let mut cluster = Cluster::new();
    cluster.rest("10.0.0.32/28", "p", "dead", "2026-11-21T12:05:00Z");
    cluster.lists.pools[0].spec["reserved"] = json!(["10.0.0.240/28"]);
    let text = |by, cells| {
        map("p", cells, by, &cluster.inventory())
            .unwrap()
            .text(&style())
    };
    let owners = text(By::Owner, 100);
    assert!(owners.contains("AB~............#"), "{owners}");
    assert!(
        owners.contains("[A] a") && owners.contains("[B] b"),
        "{owners}"
    );
    let fill = text(By::Fill, 100);
    assert!(fill.contains("00~............#"), "{fill}");
    let runs = text(By::Owner, 4);
    assert!(runs.contains("5..."), "{runs}");
    assert!(map("q", 10, By::Owner, &cluster.inventory()).is_err());
}

#[test]
fn explanations_use_the_words_of_the_choice() {
    let mut cluster = Cluster::new();
    cluster.pool(
        "gpu",
        &json!({
            "ipv4": {"cidrs": ["10.7.0.0/24"]}, "nodeSelector": {"matchLabels": {"class": "gpu"}},
        }),
    );
    let inventory = cluster.inventory();
    let pod = explain::pod("shop/cart", &inventory)
        .unwrap()
        .text(&style());
    assert!(
        pod.contains("it has 10.0.0.1 of pool p from 10.0.0.0/28"),
        "{pod}"
    );
    assert!(
        pod.contains("not \"gpu\": node has no label class"),
        "{pod}"
    );
    let node = explain::node("b", &inventory).unwrap().text(&style());
    assert!(
        node.contains("last block of this pool and family"),
        "{node}"
    );
    let pool = explain::pool("p", &inventory).unwrap().text(&style());
    assert!(pool.contains("it serves, and has free blocks"), "{pool}");
    cluster.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/27"]);
    cluster.node("c", &[]);
    let inventory = cluster.inventory();
    let pool = explain::pool("p", &inventory).unwrap().text(&style());
    assert!(
        pool.contains("no free IPv4 block") && pool.contains("1 node: c"),
        "{pool}"
    );
    let node = explain::node("c", &inventory).unwrap().text(&style());
    assert!(
        node.contains("Why it waits") && node.contains("add a CIDR"),
        "{node}"
    );
}

#[test]
fn tables_of_every_kind_can_be_shown() {
    let cluster = Cluster::new();
    let inventory = cluster.inventory();
    let all = [
        show::pools(&inventory).text(&style()),
        show::pool("p", &inventory).unwrap().text(&style()),
        show::nodes(&inventory).text(&style()),
        show::node("a", &inventory).unwrap().text(&style()),
        show::blocks(None, Some("a"), &inventory)
            .unwrap()
            .text(&style()),
        show::pod("shop/cart", &inventory).unwrap().text(&style()),
        show::handle("0123456789", &inventory)
            .unwrap()
            .text(&style()),
    ];
    for text in all {
        assert!(text.lines().count() > 1 && !text.contains("  \n"), "{text}");
    }
    assert!(show::node("x", &inventory).is_err());
    assert!(show::pod("shop/none", &inventory).is_err());
    assert!(show::handle("nothing", &inventory).is_err());
}

#[test]
fn a_plan_that_serves_nobody_does_not_fit() {
    let cluster = Cluster::new();
    let with = |name: &str, spec: serde_json::Value| {
        let changes = Changes {
            pools: vec![json!({"kind": "IPPool", "metadata": {"name": name}, "spec": spec})],
            ..Changes::default()
        };
        plan(&cluster.lists, &changes, now()).unwrap()
    };
    let cidrs = |cidr: &str| json!({"cidrs": [cidr], "blockSize": 28});
    let good = with("q", json!({"ipv4": cidrs("10.1.0.0/24")}));
    assert!(good.fits, "{}", good.text(&style()));
    let zone = json!({"matchLabels": {"zone": "nowhere"}});
    let nobody = with(
        "q",
        json!({"ipv4": cidrs("10.1.0.0/24"), "nodeSelector": zone}),
    );
    assert!(!nobody.fits);
    let text = nobody.text(&style());
    assert!(
        text.contains("Pool \"q\" would serve nobody: its nodeSelector matches none of 2 nodes"),
        "{text}"
    );
    let overlaps = with("q", json!({"ipv4": cidrs("10.0.0.0/25")}));
    let text = overlaps.text(&style());
    assert!(
        !overlaps.fits && text.contains("Pool \"q\" would serve nobody: 10.0.0.0/25 overlaps"),
        "{text}"
    );
    // A disabled pool serves nobody on purpose, so the plan fits.
    let disabled = with("q", json!({"ipv4": cidrs("10.1.0.0/24"), "disabled": true}));
    assert!(disabled.fits, "{}", disabled.text(&style()));
}

#[test]
fn a_pod_is_told_of_the_addresses_that_it_may_have() {
    let mut cluster = Cluster::new();
    let spec = json!({
        "ipv4": {"cidrs": ["10.1.0.0/24"], "blockSize": 28}, "podSelector": {"matchLabels": {"app": "db"}},
    });
    cluster.pool("db", &spec);
    cluster.pod("shop/waits", "b", &[]);
    let answer = |cluster: &Cluster| {
        explain::pod("shop/waits", &cluster.inventory())
            .unwrap()
            .answer
    };
    let all = answer(&cluster);
    assert!(
        all.contains("has 16 free of the pools that serve it (p)"),
        "{all}"
    );
    cluster.lists.pods.last_mut().unwrap().metadata.annotations =
        Some([("cadastre.dev/pools".to_owned(), "db".to_owned())].into());
    cluster.lists.pods.last_mut().unwrap().metadata.labels =
        Some([("app".to_owned(), "db".to_owned())].into());
    let own = answer(&cluster);
    assert!(
        own.contains("has none free of the pools that serve it (db)"),
        "{own}"
    );
}

#[test]
fn a_map_begins_where_something_is() {
    let mut cluster = Cluster::new();
    cluster.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/16"]);
    cluster.block("10.0.255.240/28", "p", "b");
    cluster.lists.blocks.drain(..2);
    cluster.lists.subnets.clear();
    let map = map("p", 4096, By::Owner, &cluster.inventory()).unwrap();
    let text = map.text(&style());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[1], "10.0.0.0         (63 rows of free space)",
        "{text}"
    );
    assert!(
        lines[2].starts_with("10.0.252.0       ....") && lines[2].ends_with("..A"),
        "{text}"
    );
    assert_eq!(lines[3], "", "{text}");
}
