//! `status --wait`, `release`, `drain` and `undrain` of the kubectl plugin, with a controller that leads.

use cadastre_api::{NodeAddressesSpec, NodeSubnetStatus};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::{Agents, Options, TestCluster};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::claims::a_claim_is_created_shown_and_released;
use crate::{end, run, start};

/// All requests are tested in one cluster. `status --wait` comes first, while the cluster has no pool.
#[tokio::test]
async fn status_waits_and_requests_are_carried_out() {
    let cluster = TestCluster::start(Options::default(), &["--leak-grace", "86400"]);
    let cluster = cluster.await.unwrap();
    status_waits_until_all_is_well(&cluster).await;
    tokio::join!(
        a_drain_is_requested_and_cancelled(&cluster),
        a_leak_is_released_long_before_its_grace_is_over(&cluster),
        a_claim_is_created_shown_and_released(&cluster),
    );
}

async fn status_waits_until_all_is_well(test_cluster: &TestCluster) {
    let fixtures = test_cluster.fixtures().await.unwrap();
    let mut waiting = start(&test_cluster.control_plane, "status --wait=300");
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        if line.contains("pools: there is none") {
            break;
        }
    }
    assert!(waiting.try_wait().unwrap().is_none());
    let spec = json!({"ipv4": {"cidrs": ["10.92.0.0/24"]}});
    fixtures.block_pool("late", spec).await.unwrap();
    let waited = end(waiting).await;
    waited.assert_out(0, "1 of 1 serve");
}

async fn a_drain_is_requested_and_cancelled(test_cluster: &TestCluster) {
    let fixtures = test_cluster.fixtures().await.unwrap();
    let cluster = &test_cluster.control_plane;
    let agents = Agents::new(cluster).unwrap();
    let spec = json!({
        "ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28, "gateway": "None"},
        "idleSeconds": 3600, "cooldownSeconds": 0, "warm": {"low": 40, "high": 65_536},
    });
    fixtures.block_pool("roomy", spec).await.unwrap();
    let node = fixtures.node("roomy", "roomy-1").await.unwrap();
    agents.join(&node).unwrap();
    let blocks = fixtures.listed("roomy-1", 3).await.unwrap();
    let reports_all = |it: &NodeSubnetStatus| it.blocks.len() == 3;
    let what = "reports its blocks";
    fixtures
        .status_until("roomy-1", what, reports_all)
        .await
        .unwrap();

    let dry = run(cluster, "drain --node roomy-1 --dry-run -o json").await;
    assert_eq!(dry.json()["blocks"].as_array().unwrap().len(), 2, "{dry:?}");
    let wrong = run(cluster, "drain 10.90.0.0/24").await;
    wrong.assert_out(2, "did you mean");
    let annotation = async || {
        let subnet = fixtures.subnets.get("roomy-1").await.unwrap();
        subnet
            .metadata
            .annotations
            .and_then(|it| it.get("cadastre.dev/drain").cloned())
    };
    // A block in use stays while it drains. The node gets another block, because it needs three blocks for its demand,
    // and the draining block does not count.
    let addresses = agents.allocate("roomy-1", "roomy", "web").await.unwrap();
    let address = Addr::parse_strict(&addresses[0]).unwrap();
    let in_use = |it: &&String| Cidr::parse_strict(it).unwrap().contains_addr(address);
    let used = &blocks.iter().find(in_use).unwrap().clone();
    fixtures.in_use("roomy-1", 1).await.unwrap();
    let asked = run(cluster, &format!("drain {used}")).await;
    asked.assert_out(0, "Draining");
    assert_eq!(annotation().await.as_ref(), Some(used));
    let blocks = fixtures.listed("roomy-1", 4).await.unwrap();
    let back = run(cluster, &format!("undrain {used}")).await;
    back.assert_out(0, "TakenBack");
    assert_eq!(annotation().await, None);
    let again = run(cluster, &format!("undrain {used}")).await;
    again.assert_out(2, "there is no request");

    let whole = run(cluster, &format!("pop roomy-1 {used}")).await;
    whole.assert_out(2, "kubectl cadastre drain");
    let popped = run(cluster, &format!("pop roomy-1 {address}")).await;
    popped.assert_out(0, "Popping");
    let pushed = run(cluster, "push roomy-1 --all").await;
    pushed.assert_out(0, "Pushed");
    let again = run(cluster, &format!("push roomy-1 {address}")).await;
    again.assert_out(2, "was not taken out");

    // After `drain`, the node at once releases the empty blocks that it does not need. Without `drain`, it would
    // release them only after `idleSeconds`, which is much longer.
    agents.free("roomy-1", "web").await.unwrap();
    fixtures.keep_free("roomy", 1).await.unwrap();
    let demands_one = |it: &NodeSubnetStatus| it.pools.iter().all(|it| it.demand == 1);
    let what = "demands one address";
    fixtures
        .status_until("roomy-1", what, demands_one)
        .await
        .unwrap();
    let released = run(cluster, "drain --node roomy-1 --wait --timeout 60").await;
    assert_eq!(released.code, 0, "{released:?}");
    assert_eq!(released.out.matches("Returned").count(), 3, "{released:?}");
    assert_eq!(annotation().await, None);
    let left = fixtures.listed("roomy-1", 1).await.unwrap();
    let gone = blocks.iter().filter(|cidr| !left.contains(cidr));
    for cidr in gone {
        fixtures.block_gone(cidr).await.unwrap();
    }
    // A block in use stays until its pod is gone. Meanwhile no address of the block is assigned.
    agents.allocate("roomy-1", "roomy", "cart").await.unwrap();
    let kept = run(cluster, &format!("drain {} --wait --timeout 1", left[0])).await;
    kept.assert_out(2, "addresses in use");
    agents.free("roomy-1", "cart").await.unwrap();
    fixtures.block_gone(&left[0]).await.unwrap();
}

async fn a_leak_is_released_long_before_its_grace_is_over(test_cluster: &TestCluster) {
    let fixtures = test_cluster.fixtures().await.unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.91.0.0/24"], "blockSize": 28}});
    fixtures.block_pool("leaky", spec).await.unwrap();
    let node = fixtures.node("leaky", "leaky-1").await.unwrap();
    let node = node.metadata.uid;
    fixtures.listed("leaky-1", 1).await.unwrap();
    let block = fixtures.subnets.get("leaky-1").await.unwrap().spec.blocks[0].clone();
    let address = block.cidr.replace("/28", "");
    let uid = "00000000-0000-4000-8000-000000000001";
    let reports =
        |used: u8| json!([{"cidr": block.cidr, "uid": block.uid, "used": used, "free": 16 - used}]);
    let list = NodeAddressesSpec {
        addresses: vec![format!("{address} net/c1 eth0 {uid} default/gone")],
        ..NodeAddressesSpec::default()
    };
    fixtures.list_addresses("leaky-1", list).await.unwrap();
    let leak = json!([{"address": address, "podUID": uid}]);
    let status = json!({"nodeUID": node, "blocks": reports(1), "orphans": leak});
    fixtures.write_status("leaky-1", status).await.unwrap();
    let child = start(&test_cluster.control_plane, &format!("release {address}"));
    // The controller knows that the pod is gone, and waits for the agent's proof that the sandbox is gone, too.
    let is_candidate = |it: &cadastre_api::NodeSubnet| {
        it.spec
            .leak_candidates
            .iter()
            .any(|it| it.address == address && it.pod_uid == uid)
    };
    fixtures
        .subnet_until("leaky-1", "names the leak candidate", is_candidate)
        .await
        .unwrap();
    let status = json!({"nodeUID": node, "blocks": reports(0), "orphans": []});
    fixtures.write_status("leaky-1", status).await.unwrap();
    let nothing = NodeAddressesSpec::default();
    fixtures.list_addresses("leaky-1", nothing).await.unwrap();
    let freed = end(child).await;
    freed.assert_out(0, "Freed");
    let subnet = fixtures.subnets.get("leaky-1").await.unwrap();
    assert!(
        subnet
            .metadata
            .annotations
            .is_none_or(|it| !it.contains_key("cadastre.dev/release"))
    );
}
