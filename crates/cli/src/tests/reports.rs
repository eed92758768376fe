//! Tests of `show`, `map`, `explain` and `plan`.

use serde_json::{Value, json};

use super::{Cluster, addr, assert_contains, cidr, now, style};
use crate::address::{AddressState, describe};
use crate::map::{By, map};
use crate::plan::{PlanArgs, PlanReport, plan};
use crate::render::VerbReport as _;
use crate::{explain, show};
use cadastre_api::PodLite;

fn state_of(cluster: &Cluster, at: &str) -> AddressState {
    describe(addr(at), &cluster.inventory()).state
}

#[test]
fn every_address_has_a_state() {
    let mut cluster = Cluster::new();
    cluster.lists.pools[0].spec["reserved"] = json!(["10.0.0.240/28"]);
    cluster.quarantined("10.0.0.32/28", "p", "dead", "2026-11-21T12:05:00Z");
    cluster.pod("shop/late", "b", &["10.0.0.17"]);
    let address = json!({"type": "InternalIP", "address": "10.0.0.77"});
    cluster.lists.nodes[0].status =
        serde_json::from_value(json!({"addresses": [address]})).unwrap();
    let conflicts = json!([{"address": "10.0.0.3", "pool": "p", "by": "x", "sinceMs": 7}]);
    cluster.lists.subnets[0].status["conflicts"] = conflicts;
    let states = [
        ("10.0.0.3", AddressState::Conflict),
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
    // Without a gateway, every address of the block can be assigned to pods, so the lowest address is free.
    let ipv4 = json!({"cidrs": ["10.0.0.0/24"], "gateway": "None"});
    cluster.lists.subnets[1].spec["pools"] = json!([{"name": "p", "ipv4": ipv4}]);
    assert_eq!(state_of(&cluster, "10.0.0.16"), AddressState::Free);
    cluster.lists.subnets[1].spec["pools"] = json!([]);
    let is_late = |pod: &PodLite| pod.metadata.name.as_deref() == Some("late");
    cluster.lists.pods.retain(|pod| !is_late(pod));
    assert_eq!(state_of(&cluster, "10.0.0.17"), AddressState::Gateway);
    cluster.pod("shop/late", "b", &["10.0.0.17"]);
    let entry = "10.0.0.1 cbr0/0123456789-shop/cart eth0 pod-shop/cart shop/cart";
    cluster.listed(&format!("{entry} 2026-11-21T11:00:00Z superseded"));
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::Superseded);
    cluster.pod("shop/twin", "b", &["10.0.0.1"]);
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::Duplicate);
    cluster.lists.pods.retain(is_late);
    assert_eq!(state_of(&cluster, "10.0.0.1"), AddressState::WithoutPod);
    let text = describe(addr("10.0.0.1"), &cluster.inventory()).text(&style());
    let pool = ["Pool:", "p\n", "10.0.0.0/28 Block of node a"];
    assert_contains(&text, &pool);
    assert_contains(&text, &["shop/cart", "since 60m", "1 used"]);
}

fn planned(cluster: &Cluster, changes: &PlanArgs) -> PlanReport {
    plan(&cluster.lists, changes, now()).unwrap()
}

/// Returns the arguments of a plan that adds pool `name`, or changes its spec.
fn pool_change(name: &str, spec: &Value) -> PlanArgs {
    PlanArgs {
        pools: vec![json!({"kind": "IPPool", "metadata": {"name": name}, "spec": spec})],
        ..PlanArgs::default()
    }
}

#[test]
fn a_plan_says_how_many_nodes_fit() {
    let cluster = Cluster::new();
    let mut changes = PlanArgs::default();
    for (add_nodes, pods_per_node, served, waiting) in
        [(14, None, 14, 0), (20, None, 14, 6), (7, Some(20), 7, 0)]
    {
        (changes.add_nodes, changes.pods_per_node) = (add_nodes, pods_per_node);
        let report = planned(&cluster, &changes);
        let text = report.text(&style());
        assert_eq!(report.fits, waiting == 0, "{text}");
        let nodes = &report.new_nodes;
        assert_eq!((nodes.served, nodes.waiting), (served, waiting), "{text}");
        let free = ("14".to_owned(), "0".to_owned());
        assert_eq!(report.pools[0].free, free, "{text}");
        for node in &report.will_wait {
            assert_contains(&node.why, &["no free IPv4 block"]);
        }
    }
}

#[test]
fn a_plan_lists_the_ranges_that_it_affects() {
    let cluster = Cluster::new();
    let drained = PlanArgs {
        drain_cidr: vec![cidr("10.0.0.0/28")],
        ..PlanArgs::default()
    };
    let report = planned(&cluster, &drained);
    assert!(report.fits, "{}", report.text(&style()));
    assert_eq!(report.hits.len(), 1);
    assert_eq!((&*report.hits[0].node, report.hits[0].used), ("a", 1));
    // Node a gets another block for the addresses that must move, so one block fewer is free.
    assert_eq!(report.pools[0].free, ("14".to_owned(), "13".to_owned()));
    let deleted = PlanArgs {
        delete_pool: vec!["p".to_owned()],
        add_nodes: 1,
        ..PlanArgs::default()
    };
    let report = planned(&cluster, &deleted);
    assert!(!report.fits);
    assert_eq!(report.hits.len(), 2);
    let narrower = json!({
        "ipv4": {"cidrs": ["10.0.0.0/24"], "blockSize": 28}, "nodeSelector": {"matchLabels": {"zone": "a"}},
    });
    let report = planned(&cluster, &pool_change("p", &narrower));
    assert_eq!(report.hits.len(), 1);
    assert_eq!(report.hits[0].node, "b");
}

#[test]
fn a_map_shows_every_block_once() {
    let mut cluster = Cluster::new();
    cluster.quarantined("10.0.0.32/28", "p", "dead", "2026-11-21T12:05:00Z");
    cluster.lists.pools[0].spec["reserved"] = json!(["10.0.0.240/28"]);
    let inventory = cluster.inventory();
    let text = |by, cells| map("p", cells, by, &inventory).unwrap().text(&style());
    let owners = text(By::Owner, 100);
    assert_contains(&owners, &["AB~............#", "[A] a", "[B] b"]);
    assert_contains(&text(By::Fill, 100), &["00~............#"]);
    assert_contains(&text(By::Owner, 4), &["5..."]);
    assert!(map("q", 10, By::Owner, &inventory).is_err());
}

#[test]
fn explanations_use_the_words_of_the_choice() {
    let mut cluster = Cluster::new();
    let gpu = json!({
        "ipv4": {"cidrs": ["10.7.0.0/24"]}, "nodeSelector": {"matchLabels": {"class": "gpu"}},
    });
    cluster.pool("gpu", &gpu);
    let inventory = cluster.inventory();
    let pod = explain::pod("shop/cart", &inventory).unwrap();
    let parts = [
        "it has 10.0.0.1 of pool p from 10.0.0.0/28",
        "not \"gpu\": node has no label class",
    ];
    assert_contains(&pod.text(&style()), &parts);
    let node = explain::node("b", &inventory).unwrap().text(&style());
    assert_contains(&node, &["last block of this pool and family"]);
    let pool = explain::pool("p", &inventory).unwrap().text(&style());
    assert_contains(&pool, &["it serves, and has free blocks"]);
    cluster.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/27"]);
    cluster.node("c", &[]);
    let inventory = cluster.inventory();
    let pool = explain::pool("p", &inventory).unwrap().text(&style());
    assert_contains(&pool, &["no free IPv4 block", "1 node: c"]);
    let node = explain::node("c", &inventory).unwrap().text(&style());
    assert_contains(&node, &["Why it waits", "add a CIDR"]);
}

#[test]
fn tables_of_every_kind_can_be_shown() {
    let inventory = Cluster::new().inventory();
    let blocks = show::blocks(None, Some("a"), &inventory).unwrap();
    let handle = show::handle("0123456789", &inventory).unwrap();
    let all = [
        show::pools(&inventory).text(&style()),
        show::pool("p", &inventory).unwrap().text(&style()),
        show::nodes(&inventory).text(&style()),
        show::node("a", false, &inventory).unwrap().text(&style()),
        blocks.text(&style()),
        show::pod("shop/cart", &inventory).unwrap().text(&style()),
        handle.text(&style()),
    ];
    for text in all {
        assert!(text.lines().count() > 1 && !text.contains("  \n"), "{text}");
    }
    assert!(show::node("x", false, &inventory).is_err());
    assert!(show::pod("shop/none", &inventory).is_err());
    assert!(show::handle("nothing", &inventory).is_err());
}

#[test]
fn a_plan_that_serves_nobody_does_not_fit() {
    let cluster = Cluster::new();
    let ipv4 = |cidr: &str| json!({"cidrs": [cidr], "blockSize": 28});
    let nowhere = json!({"matchLabels": {"zone": "nowhere"}});
    for (spec, nobody) in [
        (json!({"ipv4": ipv4("10.1.0.0/24")}), None),
        (
            json!({"ipv4": ipv4("10.1.0.0/24"), "nodeSelector": nowhere}),
            Some("its nodeSelector matches none of 2 nodes"),
        ),
        (
            json!({"ipv4": ipv4("10.0.0.0/25")}),
            Some("10.0.0.0/25 overlaps"),
        ),
        // A disabled pool serves nobody on purpose, so the plan fits.
        (json!({"ipv4": ipv4("10.1.0.0/24"), "disabled": true}), None),
    ] {
        let report = planned(&cluster, &pool_change("q", &spec));
        let text = report.text(&style());
        assert_eq!(report.fits, nobody.is_none(), "{text}");
        if let Some(why) = nobody {
            let line = format!("Pool \"q\" would serve nobody: {why}");
            assert_contains(&text, &[&line]);
        }
    }
}

#[test]
fn free_addresses_are_counted_in_pools_that_serve_the_pod() {
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
    let free = "has 16 free of the pools that serve it (p)";
    assert_contains(&answer(&cluster), &[free]);
    let meta = &mut cluster.last_pod().metadata;
    meta.annotations = Some([("cadastre.dev/pools".to_owned(), "db".to_owned())].into());
    meta.labels = Some([("app".to_owned(), "db".to_owned())].into());
    let none = "has none free of the pools that serve it (db)";
    assert_contains(&answer(&cluster), &[none]);
}

#[test]
fn rows_of_free_space_are_one_line_of_a_map() {
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

#[test]
fn assignments_and_nodes_without_a_family_of_their_pool_are_explained() {
    let mut cluster = Cluster::empty();
    let assigned = |node: &str, v4: &str| json!({"node": node, "cidrs": [v4, "fd00::/64"]});
    let spec = json!({
        "allocationMode": "NodeCIDR",
        "ipv4": {"cidrs": ["10.0.0.0/16"]}, "ipv6": {"cidrs": ["fd00::/48"]},
        "assignments": [assigned("old", "10.0.7.0/24")],
    });
    cluster.pool("n", &spec);
    cluster.node("old", &["10.0.1.0/24"]);
    cluster.node("new", &["10.0.2.0/24", "fd00:0:0:2::/64"]);
    let inventory = cluster.inventory();
    let node = explain::node("old", &inventory).unwrap().text(&style());
    let parts = [
        "pool \"n\": 10.0.7.0/24, fd00::/64. It has 10.0.1.0/24, which it keeps",
        "delete its Node object (kubectl delete node), and restart its kubelet",
    ];
    assert_contains(&node, &parts);
    let pool = explain::pool("n", &inventory).unwrap().text(&style());
    assert_contains(&pool, &["IPv6: 1 node: old", "one node after the other"]);
    let node = explain::node("new", &inventory).unwrap().text(&style());
    assert!(!node.contains("Assigned ranges"), "{node}");

    cluster.lists.pools[0].spec["assignments"] = json!([assigned("old", "10.9.0.0/24")]);
    let pool = explain::pool("n", &cluster.inventory()).unwrap();
    let part = "of node old: 10.9.0.0/24 does not lie in one of the pool's cidrs";
    assert_contains(&pool.text(&style()), &[part]);
}
