//! Tests with blocks that contain more addresses than 64 bits can count.

use serde_json::json;

use super::{Cluster, now, style};
use crate::map::{By, map};
use crate::plan::{PlanArgs, plan};
use crate::render::VerbReport as _;
use crate::status::status;
use crate::{explain, show};

/// Returns a cluster with /48 blocks, two of node `a` and one of `b`. For each block, the agents report the given
/// counts.
fn cluster(used: i64, cooling: i64, free: i64) -> Cluster {
    let mut cluster = Cluster::empty();
    let spec = json!({
        "ipv6": {"cidrs": ["fd00::/40"], "blockSize": 48}, "reserved": ["fd00:0:ff::/48"],
    });
    cluster.pool("p", &spec);
    let all = [
        ("a", &["fd00::/48", "fd00:0:1::/48"][..]),
        ("b", &["fd00:0:2::/48"][..]),
    ];
    for (node, blocks) in all {
        cluster.node(node, &[]);
        for block in blocks {
            cluster.block(block, "p", node);
        }
        cluster.subnet(node, blocks, &[]);
        let subnet = cluster.lists.subnets.last_mut().unwrap();
        for block in subnet.status["blocks"].as_array_mut().unwrap() {
            block["used"] = json!(used);
            block["cooling"] = json!(cooling);
            block["free"] = json!(free);
        }
    }
    cluster.pod("shop/waits", "a", &[]);
    cluster.leader("controller-1", "2026-11-21T11:59:58Z");
    cluster
}

#[test]
fn blocks_and_their_addresses_are_counted_exactly() {
    let inventory = cluster(1, 2, 1 << 53).inventory();
    let pools = show::pools(&inventory).pools;
    let counts = &pools[0].counts;
    let blocks = [&counts.capacity, &counts.allocated, &counts.free];
    assert_eq!(blocks, ["255", "3", "252"]);
    assert_eq!(counts.utilization, "1%");
    let addresses = counts.addresses.as_ref().unwrap();
    assert_eq!(addresses.allocated, (3_u128 << 80).to_string());
    assert_eq!((&*addresses.used, &*addresses.cooling), ("3", "6"));
    let nodes = show::nodes(&inventory).nodes;
    assert_eq!((nodes[0].used, nodes[0].cooling), (2, 4));
    assert_eq!(nodes[0].free, 1 << 54);
}

#[test]
fn a_plan_counts_large_blocks() {
    let lists = cluster(1, 2, 1 << 53).lists;
    for (add_nodes, fits) in [(252, true), (253, false)] {
        let changes = PlanArgs {
            add_nodes,
            pods_per_node: Some(110),
            ..PlanArgs::default()
        };
        let report = plan(&lists, &changes, now()).unwrap();
        assert_eq!(report.fits, fits, "{}", report.text(&style()));
        assert_eq!(report.pools[0].free, ("252".to_owned(), "0".to_owned()));
    }
}

#[test]
fn every_count_of_an_agent_can_be_shown() {
    for count in [0, 1 << 53, i64::MAX, i64::MIN] {
        let cluster = cluster(count, count, count);
        let inventory = cluster.inventory();
        let planned = plan(&cluster.lists, &PlanArgs::default(), now()).unwrap();
        let explained = [
            explain::pool("p", &inventory),
            explain::node("a", &inventory),
            explain::pod("shop/waits", &inventory),
        ];
        let mut all = vec![
            show::pools(&inventory).text(&style()),
            show::pool("p", &inventory).unwrap().text(&style()),
            show::nodes(&inventory).text(&style()),
            show::node("a", false, &inventory).unwrap().text(&style()),
            show::blocks(None, None, &inventory).unwrap().text(&style()),
            status(&inventory).text(&style()),
            cluster.check().text(&style()),
            planned.text(&style()),
        ];
        all.extend(explained.map(|it| it.unwrap().text(&style())));
        for by in [By::Owner, By::Fill] {
            all.push(map("p", 100, by, &inventory).unwrap().text(&style()));
        }
        for text in all {
            assert!(!text.contains("9223372036854775807"), "{text}");
            assert!(!text.contains("-9223372036854775808"), "{text}");
        }
    }
}
