//! `show`, `map`, `explain`, `check` and `status` of the kubectl plugin in a healthy cluster.

use cadastre_api::NodeSubnetStatus;
use cadastre_e2e::fixtures::{LIMIT, labelled};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Options, TestCluster, nodes};
use kube::ResourceExt as _;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{ok, run, snapshot, start};

#[tokio::test]
async fn a_healthy_cluster_is_shown_as_it_is() {
    let test_cluster = TestCluster::start(Options::default(), &[]).await.unwrap();
    let fixtures = test_cluster.fixtures().await.unwrap();
    let cluster = &test_cluster.control_plane;
    let agents = Agents::new(cluster).unwrap();
    let blocks =
        json!({"ipv4": {"cidrs": ["10.60.0.0/24"], "blockSize": 28}, "reserved": ["10.60.0.0/28"]});
    fixtures.block_pool("web", blocks).await.unwrap();
    let gpu = json!({
        "ipv4": {"cidrs": ["10.61.0.0/24"], "blockSize": 28},
        "nodeSelector": {"matchLabels": {"class": "gpu"}},
    });
    fixtures.block_pool("gpu", gpu).await.unwrap();
    let dual = json!({
        "ipv4": {"cidrs": ["10.62.0.0/20"]}, "ipv6": {"cidrs": ["fd00:62::/56"]},
        "nodeSelector": {"matchLabels": {"network": "podcidr"}},
    });
    fixtures.pool("cidr", dual).await.unwrap();
    for name in ["web", "gpu", "cidr"] {
        fixtures.condition(name, "Ready", "True").await.unwrap();
    }
    for name in ["web-1", "web-2"] {
        let node = fixtures.node("web", name).await.unwrap();
        agents.join(&node).unwrap();
        fixtures.listed(name, 1).await.unwrap();
    }
    let node = labelled(
        nodes::node("cidr-1", "192.0.2.9"),
        &[("network", "podcidr")],
    );
    fixtures.create_node(node).await.unwrap();
    fixtures.served("cidr-1").await.unwrap();
    let addresses = agents.run_pod(&fixtures, "web-1", "cart").await.unwrap();
    let address = addresses[0].clone();
    let waits = fixtures.pod("waits", "web-2", &[]).await.unwrap();
    fixtures.in_use("web-1", 1).await.unwrap();
    let has_block = |it: &NodeSubnetStatus| !it.blocks.is_empty();
    let what = "reports its block";
    fixtures
        .status_until("web-2", what, has_block)
        .await
        .unwrap();
    until("web-1 has a list of its addresses", LIMIT, async || {
        let list = fixtures.addresses.get("web-1").await?;
        Ok((list.spec.addresses.len() == 1).then_some(()))
    })
    .await
    .unwrap();

    let in_use = format!("show ip {address}");
    let shown: [(&str, &str); 14] = [
        ("show-pools", "show pools"),
        ("show-pools-wide", "show pools -o wide"),
        ("show-pool", "show pool web"),
        ("show-nodes", "show nodes"),
        ("show-node", "show node web-1"),
        ("show-blocks", "show blocks"),
        ("show-ip-in-use", &in_use),
        ("show-ip-not-carved", "show ip 10.60.0.32"),
        ("show-ip-outside", "show ip 203.0.113.5"),
        ("show-pod", "show pod cart"),
        ("map", "map web"),
        ("explain-pod", "explain pod waits"),
        ("explain-node", "explain node web-1"),
        ("explain-pool", "explain pool web"),
    ];
    for (name, args) in shown {
        snapshot(name, &ok(cluster, args).await);
    }
    // The kubelet's events about two pods of the same name. Only the event with the UID of the explained pod counts.
    for (uid, says) in [
        (&*waits.uid().unwrap(), "pool `lan` has none"),
        ("another", "no"),
    ] {
        let event = json!({
            "apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": "FailedCreatePodSandBox",
            "metadata": {"name": format!("event-{}", &uid[..4]), "namespace": "default"},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": "waits", "uid": uid},
            "lastTimestamp": "2026-11-21T12:00:00Z", "message": says,
        });
        let create = ["create", "-f", "-"];
        let created = cluster.kubectl_stdin(&create, &event.to_string()).await;
        created.unwrap();
    }
    let explained = ok(cluster, "explain pod waits").await;
    let section = explained
        .split("Last event FailedCreatePodSandBox:\n")
        .nth(1);
    let lines: Vec<&str> = section.unwrap().lines().collect();
    assert!(
        lines.len() == 1 && lines[0].ends_with(" ago: pool `lan` has none"),
        "{explained}"
    );
    let handle = ok(cluster, "show handle net/cart").await;
    assert!(handle.contains(&address), "{handle}");
    let report = run(cluster, &format!("show ip {address} -o json"))
        .await
        .json();
    assert_eq!(report["holders"][0]["pod"], "default/cart");
    assert_eq!(report["range"]["node"], "web-1");
    let yaml = ok(cluster, "show pool web -o yaml").await;
    assert!(yaml.contains("pool: web"), "{yaml}");
    let check = run(cluster, "check --settle 0").await;
    assert_eq!(check.code, 0, "{check:?}");
    let status = ok(cluster, "status").await;
    assert!(
        status.contains("leads, renewed its Lease") && status.contains("3 nodes, none waits"),
        "{status}"
    );

    let refused = run(cluster, "show pool nope").await;
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("there are cidr, gpu, web"),
        "{refused:?}"
    );
    let refused = run(cluster, "show ip 10.60.0").await;
    refused.assert_err(1, "is no address");
    assert_eq!(run(cluster, "show nonsense").await.code, 1);
    watched(&test_cluster).await;
}

/// Asserts that `show nodes --watch` prints a node that is created while the command runs.
async fn watched(test_cluster: &TestCluster) {
    let fixtures = test_cluster.fixtures().await.unwrap();
    let mut child = start(&test_cluster.control_plane, "show nodes --watch");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next_line().await.unwrap().unwrap();
    fixtures.node("web", "web-9").await.unwrap();
    let seen = until("the new node is shown", LIMIT, async || {
        let line = tokio::time::timeout(LIMIT, lines.next_line()).await??;
        Ok(line.filter(|line| line.starts_with("web-9")))
    });
    seen.await.unwrap();
    child.kill().await.unwrap();
}
