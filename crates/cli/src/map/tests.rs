use proptest::prelude::*;
use serde_json::{Value, json};

use super::cells::cells_of;
use super::find::find;
use super::page::view;
use super::place::Place;
use super::{By, map};
use crate::inventory::Inventory;
use crate::render::VerbReport as _;
use crate::tests::{Cluster, assert_contains, cidr, style};

/// A cluster with two pools. Nodes `a` and `b` have blocks of pool `p`, and b's block is being drained. Another block
/// of `p` is in quarantine. Pool `q` allocates podCIDRs to both nodes.
fn cluster() -> Cluster {
    let mut cluster = Cluster::empty();
    let spec = json!({"ipv4": {"cidrs": ["10.0.0.0/24"], "blockSize": 28}, "reserved": ["10.0.0.250-10.0.0.255"]});
    cluster.pool("p", &spec);
    let spec =
        json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.1.0.0/16"], "blockSize": 24}});
    cluster.pool("q", &spec);
    cluster.node("a", &["10.1.1.0/24"]);
    cluster.node("b", &["10.1.2.0/24"]);
    cluster.block("10.0.0.0/28", "p", "a");
    cluster.block("10.0.0.16/28", "p", "b");
    cluster.quarantined("10.0.0.32/28", "p", "gone", "2026-11-21T12:05:00Z");
    for (name, node, address) in [
        ("shop/web", "a", "10.0.0.5"),
        ("shop/db", "a", "10.0.0.7"),
        ("shop/web-2", "b", "10.1.2.9"),
    ] {
        cluster.pod(name, node, &[address]);
    }
    let in_use = [("10.0.0.5", "shop/web"), ("10.0.0.6", "shop/gone")];
    cluster.subnet("a", &["10.0.0.0/28"], &in_use);
    cluster.subnet("b", &["10.0.0.16/28"], &[]);
    cluster.lists.subnets[1].spec["blocks"][0]["recall"] = json!("Drain");
    cluster
}

/// Returns the data that the server sends for a place.
fn look(place: &Value, inventory: &Inventory) -> Value {
    let place = serde_json::from_value(place.clone()).unwrap();
    serde_json::to_value(view(&place, inventory).unwrap()).unwrap()
}

/// Returns the description that the server sends for a cell; null if there is no such cell.
fn about(pool: &str, view: &str, cell_size: u8, cell: u64, inventory: &Inventory) -> Value {
    let spot = json!({"pool": pool, "view": view, "cellSize": cell_size, "cell": cell});
    let spot: super::about::Spot = serde_json::from_value(spot).unwrap();
    let about = spot.about(inventory).ok();
    serde_json::to_value(about).unwrap()
}

fn fields<const N: usize>(value: &Value, names: [&str; N]) -> Value {
    names.iter().map(|name| value[name].clone()).collect()
}

/// Returns the cells of a view as text, one line each.
fn cells(view: &Value) -> Vec<String> {
    let cells = view["picture"]["cells"].as_array().unwrap().iter();
    let line = |it: &Value| {
        let text = ["at", "count", "cidr", "kind", "owners", "fill"].map(|key| it[key].to_string());
        text.join(" ").replace('"', "")
    };
    cells.map(line).collect()
}

#[test]
fn a_view_shows_each_range_with_its_node_its_kind_and_how_full_it_is() {
    let inventory = cluster().inventory();
    let blocks = look(&json!({"pool": "p"}), &inventory);
    assert_eq!(
        cells(&blocks),
        [
            "0 1 10.0.0.0/28 block [a] 125",
            "1 1 10.0.0.16/28 changing [b] 0",
            "2 1 10.0.0.32/28 quarantine [] 0",
            "15 1 10.0.0.240/28 reserved [] 0",
        ]
    );
    let picture = &blocks["picture"];
    let shape = fields(picture, ["view", "cellSize", "columns"]);
    assert_eq!(shape, json!(["10.0.0.0/24", 28, 4]));
    assert_eq!(picture["lines"][3], "10.0.0.192");
    let allocated = r#"["blocks allocated","2",false]"#;
    assert_contains(&blocks["figures"].to_string(), &[allocated]);
    let cidrs = look(&json!({"pool": "q"}), &inventory);
    let [a, b] = [
        "1 1 10.1.1.0/24 podCidr [a] 0",
        "2 1 10.1.2.0/24 podCidr [b] 3",
    ];
    assert_eq!(cells(&cidrs), [a, b]);
    assert_eq!(cidrs["picture"]["legend"], json!([["podCidr", "2"]]));
}

#[test]
fn a_range_over_several_cells_is_one_cell_and_overlaps_are_marked() {
    let mut cluster = cluster();
    let drawn = |cluster: &Cluster| {
        let map = map("p", 100, By::Owner, &cluster.inventory());
        map.unwrap().text(&style())
    };
    cluster.block("10.0.0.64/26", "p", "a");
    let all = cells(&look(&json!({"pool": "p"}), &cluster.inventory()));
    assert_eq!(all[3], "4 4 10.0.0.64/26 changing [a] 0");
    let text = drawn(&cluster);
    assert!(text.contains("AB~.AAAA") && !text.contains("[!]"), "{text}");
    cluster.node("c", &["10.0.0.80/28"]);
    let text = drawn(&cluster);
    assert!(text.contains("AB~.A!AA") && text.contains("[!]"), "{text}");
    let view = look(&json!({"pool": "p"}), &cluster.inventory());
    assert_eq!(cells(&view)[4], "5 1 10.0.0.80/28 changing [a,c] 0");
    assert_eq!(view["picture"]["cells"][4]["overlaps"], true);
}

#[test]
fn a_range_lists_each_address_that_agents_or_pods_report_once() {
    let inventory = cluster().inventory();
    let cell = |size, at| about("p", "10.0.0.0/24", size, at, &inventory);
    let block = cell(28, 0);
    assert_eq!(
        fields(&block, ["cidr", "node"]),
        json!(["10.0.0.0/28", "a"])
    );
    assert_eq!(block["ranges"], json!(["10.0.0.0/28", "10.1.1.0/24"]));
    let gone = "shop/gone · in use according to the agent, but its pod is gone or has ended";
    let addresses = [
        ("10.0.0.5", "shop/web"),
        ("10.0.0.6", gone),
        ("10.0.0.7", "shop/db"),
    ];
    assert_eq!(block["addresses"], json!(addresses));
    for (size, at, says) in [
        (28, 0, "2 used, 0 cooling, 14 free"),
        (28, 2, "in quarantine, was node gone's, over in 5m"),
        (28, 3, "free"),
        (28, 15, "10.0.0.250-10.0.0.255"),
        (26, 0, "3 ranges of 3 nodes"),
    ] {
        assert_contains(cell(size, at)["words"].as_str().unwrap(), &[says]);
    }
    let address = about("p", "10.0.0.0/28", 32, 5, &inventory);
    assert_eq!(
        fields(&address, ["words", "at"]),
        json!(["shop/web · in use", 5])
    );
    assert_contains(&address["facts"].to_string(), &[r#"["Pod","shop/web"]"#]);
    let outside = about("p", "10.9.0.0/24", 28, 0, &inventory);
    assert_eq!(outside["words"], "not in the pool");
    for (size, at) in [(28, 16), (33, 0), (8, 0)] {
        assert_eq!(cell(size, at), Value::Null, "{size} {at}");
    }
}

#[test]
fn a_range_over_too_many_cells_to_loop_over_is_described() {
    let mut cluster = cluster();
    cluster.node("wide", &["fd00::/64"]);
    let wide = about("p", "fd00::/64", 127, 7, &cluster.inventory());
    assert_eq!(
        fields(&wide, ["cidr", "count"]),
        json!(["fd00::/64", 1_u64 << 63])
    );
}

#[test]
fn zooming_goes_down_to_addresses_and_a_chosen_place_moves_the_view() {
    let inventory = cluster().inventory();
    let look = |place| look(&place, &inventory)["picture"].take();
    let block = look(json!({"view": "10.0.0.0/24", "at": "10.0.0.0/28", "closer": true}));
    assert_eq!(
        fields(&block, ["view", "cellSize"]),
        json!(["10.0.0.0/28", 32])
    );
    assert_eq!(block["cells"][0]["owners"], json!(["shop/web"]));
    assert_eq!(block["chosen"]["cidr"], "10.0.0.0/28");
    assert_eq!(block["path"], json!(["10.0.0.0/24", "10.0.0.0/28"]));
    let still = look(json!({"view": "10.0.0.0/28", "at": "10.0.0.5/32", "closer": true}));
    assert_eq!(still["view"], "10.0.0.0/28");
    assert_eq!(still["chosen"]["cidr"], "10.0.0.5/32");
    // A block can be shown address by address even if it is free.
    let free = look(json!({"view": "10.0.0.128/28", "at": "10.0.0.130/32"}));
    assert_eq!(fields(&free, ["cellSize", "cells"]), json!([32, []]));
    let words = "in a pool, not allocated to a node";
    assert_eq!(free["chosen"]["words"], words);
    let deep = look(json!({"pool": "q", "view": "10.1.77.0/24"}));
    let path = json!(["10.1.0.0/16", "10.1.64.0/20", "10.1.77.0/24"]);
    assert_eq!(deep["path"], path);
    // If the chosen place is outside the view, the view moves to it. If the pool has no ranges of the view's family,
    // the view that opens first is shown.
    let there = look(json!({"pool": "q", "view": "10.1.0.0/20", "at": "10.1.200.7/32"}));
    assert_eq!(there["view"], "10.1.200.0/22");
    assert_eq!(there["chosen"]["words"], "free");
    assert_eq!(look(json!({"view": "fd00::/64"}))["view"], "10.0.0.0/24");
}

#[test]
fn the_first_view_of_a_huge_pool_is_its_allocated_part() {
    let mut cluster = Cluster::empty();
    let spec = json!({"ipv6": {"cidrs": ["fd00::/48"], "blockSize": 122}});
    cluster.pool("p", &spec);
    cluster.node("a", &[]);
    let first = |cluster: &Cluster| look(&json!({}), &cluster.inventory());
    assert_eq!(first(&cluster)["picture"]["view"], "fd00::/48");
    cluster.block("fd00::4000/122", "p", "a");
    assert_eq!(first(&cluster)["picture"]["view"], "fd00::4000/114");
    cluster.block("fd00::5:0/122", "p", "a");
    let both = first(&cluster);
    assert_eq!(both["families"], json!([["IPv6", "fd00::/109"]]));
    assert_eq!(cells(&both).len(), 2);
}

#[test]
fn an_invalid_pool_shows_its_error_and_no_pool_says_what_to_do() {
    let mut cluster = cluster();
    cluster.pool("bad", &json!({"ipv4": 7}));
    let bad = look(&json!({"pool": "bad"}), &cluster.inventory());
    assert_eq!(
        fields(&bad, ["picture", "pools"]),
        json!([null, ["bad", "p", "q"]])
    );
    assert_contains(bad["troubles"][0].as_str().unwrap(), &["cannot be used"]);
    let none = view(&Place::default(), &Cluster::empty().inventory());
    assert_contains(&none.unwrap_err().to_string(), &["create an IPPool"]);
}

#[test]
fn addresses_nodes_pods_and_pools_are_found() {
    let inventory = cluster().inventory();
    let found = |text: &str| -> Vec<String> {
        let hits = find(text, &inventory).into_iter().map(|it| {
            let at = it.at.map_or(String::new(), |it| it.to_string());
            let pool = it.pool.unwrap_or_default();
            format!("{} {} {at} {pool}", it.what, it.name)
        });
        hits.collect()
    };
    assert_eq!(found(" 10.0.0.70 "), ["address 10.0.0.70 10.0.0.70/32 p"]);
    assert_eq!(found("192.0.2.1"), ["address 192.0.2.1 192.0.2.1/32 "]);
    let nodes = ["node b 10.0.0.16/28 p", "node b 10.1.2.0/24 q"];
    assert_eq!(found("b")[..2], nodes);
    let pods = ["pod shop/web 10.0.0.5/32 p", "pod shop/web-2 10.1.2.9/32 q"];
    assert_eq!(found("web"), pods);
    assert_eq!(found("p")[0], "pool p  p");
    for nothing in ["", "nothing like it"] {
        assert!(found(nothing).is_empty());
    }
}

fn range() -> impl Strategy<Value = Value> {
    let first = prop_oneof![0x0A00_0000..0x0A00_0400_u32, any::<u32>()];
    (any::<bool>(), first, 0..=32_u8).prop_map(|(is_there, value, len)| {
        let bits = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
        let text = format!("{}/{len}", std::net::Ipv4Addr::from(value & bits));
        is_there.then_some(text).into()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// For every request, the cells in the answer are few enough, disjoint, sorted and within the view.
    #[test]
    fn a_view_is_bounded_and_its_cells_are_disjoint(
        view in range(), at in range(), closer in any::<bool>(), pool in "[pq]",
    ) {
        let place = json!({"pool": pool, "view": view, "at": at, "closer": closer});
        let picture = look(&place, &cluster().inventory())["picture"].take();
        let number = |it: &Value| it.as_u64().unwrap();
        let size = u8::try_from(number(&picture["cellSize"])).unwrap();
        let total = cells_of(&cidr(picture["view"].as_str().unwrap()), size);
        let lines = picture["lines"].as_array().unwrap().len();
        prop_assert!(total <= 1 << 15);
        prop_assert_eq!(total, u128::from(number(&picture["columns"])) * lines as u128);
        let mut next = 0;
        for cell in picture["cells"].as_array().unwrap() {
            prop_assert!(number(&cell["at"]) >= next && number(&cell["count"]) > 0);
            next = number(&cell["at"]) + number(&cell["count"]);
        }
        prop_assert!(u128::from(next) <= total);
    }
}
