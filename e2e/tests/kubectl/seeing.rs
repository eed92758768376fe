//! show, map and explain in a healthy cluster.

use std::time::Duration;

use cadastre_e2e::fixtures::labelled;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Options, TestCluster, nodes};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{ok, run, snapshot, start};

#[tokio::test]
async fn a_cluster_that_is_well_is_shown_as_it_is() {
    let stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    let cluster = &stage.control_plane;
    let blocks =
        json!({"ipv4": {"cidrs": ["10.60.0.0/24"], "blockSize": 28}, "reserved": ["10.60.0.0/28"]});
    hand.block_pool("web", blocks).await.unwrap();
    let gpu = json!({
        "ipv4": {"cidrs": ["10.61.0.0/24"], "blockSize": 28},
        "nodeSelector": {"matchLabels": {"class": "gpu"}},
    });
    hand.block_pool("gpu", gpu).await.unwrap();
    let dual = json!({
        "ipv4": {"cidrs": ["10.62.0.0/20"]}, "ipv6": {"cidrs": ["fd00:62::/56"]},
        "nodeSelector": {"matchLabels": {"network": "podcidr"}},
    });
    hand.pool("cidr", dual).await.unwrap();
    for name in ["web", "gpu", "cidr"] {
        hand.condition(name, "Ready", "True").await.unwrap();
    }
    for name in ["web-1", "web-2"] {
        let node = hand.node("web", name).await.unwrap();
        agents.join(&node);
        hand.listed(name, 1).await.unwrap();
    }
    let node = labelled(
        nodes::node("cidr-1", "192.0.2.9"),
        &[("network", "podcidr")],
    );
    hand.create_node(node).await.unwrap();
    hand.served("cidr-1").await.unwrap();
    let given = agents.allocate("web-1", "web", "cart").await.unwrap();
    let address = given[0].clone();
    hand.pod("cart", "web-1", &[&address]).await.unwrap();
    hand.pod("waits", "web-2", &[]).await.unwrap();
    let list = agents.addresses("web-1").unwrap();
    hand.list_addresses("web-1", list).await.unwrap();
    let told = |it: &cadastre_api::NodeSubnet| {
        let blocks = it.status.iter().flat_map(|it| &it.blocks);
        blocks.map(|it| it.used).sum::<i64>() == 1
    };
    hand.subnet_until("web-1", "tells of the pod", told)
        .await
        .unwrap();
    let told = |it: &cadastre_api::NodeSubnet| {
        it.status
            .as_ref()
            .is_some_and(|status| !status.blocks.is_empty())
    };
    hand.subnet_until("web-2", "tells of its block", told)
        .await
        .unwrap();

    let shown: [(&str, &[&str]); 14] = [
        ("show-pools", &["show", "pools"]),
        ("show-pools-wide", &["show", "pools", "-o", "wide"]),
        ("show-pool", &["show", "pool", "web"]),
        ("show-nodes", &["show", "nodes"]),
        ("show-node", &["show", "node", "web-1"]),
        ("show-blocks", &["show", "blocks"]),
        ("show-ip-in-use", &["show", "ip", &address]),
        ("show-ip-not-carved", &["show", "ip", "10.60.0.32"]),
        ("show-ip-outside", &["show", "ip", "203.0.113.5"]),
        ("show-pod", &["show", "pod", "cart"]),
        ("map", &["map", "web"]),
        ("explain-pod", &["explain", "pod", "waits"]),
        ("explain-node", &["explain", "node", "web-1"]),
        ("explain-pool", &["explain", "pool", "web"]),
    ];
    for (name, args) in shown {
        snapshot(name, &ok(cluster, args).await);
    }
    let handle = ok(cluster, &["show", "handle", "cart"]).await;
    assert!(handle.contains(&address), "{handle}");
    let report = run(cluster, &["show", "ip", &address, "-o", "json"])
        .await
        .json();
    assert_eq!(report["holders"][0]["pod"], "default/cart");
    assert_eq!(report["range"]["node"], "web-1");
    let yaml = ok(cluster, &["show", "pool", "web", "-o", "yaml"]).await;
    assert!(yaml.contains("pool: web"), "{yaml}");
    // The test agent publishes no pod UIDs, so the pod's own status is all that check can compare.
    let check = run(cluster, &["check", "--settle", "0"]).await;
    assert_eq!(check.code, 0, "{check:?}");
    let status = ok(cluster, &["status"]).await;
    assert!(
        status.contains("leads, renewed its Lease") && status.contains("3 nodes, none waits"),
        "{status}"
    );

    let refused = run(cluster, &["show", "pool", "nope"]).await;
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("there are cidr, gpu, web"),
        "{refused:?}"
    );
    let refused = run(cluster, &["show", "ip", "10.60.0"]).await;
    assert!(
        refused.code == 1 && refused.err.contains("is no address"),
        "{refused:?}"
    );
    assert_eq!(run(cluster, &["show", "nonsense"]).await.code, 1);
    watched(&stage).await;
}

/// `--watch` shows a change by itself.
async fn watched(stage: &TestCluster) {
    let hand = stage.fixtures().await.unwrap();
    let mut child = start(&stage.control_plane, &["show", "nodes", "--watch"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next_line().await.unwrap().unwrap();
    hand.node("web", "web-9").await.unwrap();
    let seen = until(
        "the new node is shown",
        Duration::from_secs(30),
        async || {
            let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await??;
            Ok(line.filter(|line| line.starts_with("web-9")))
        },
    );
    seen.await.unwrap();
    child.kill().await.unwrap();
}
