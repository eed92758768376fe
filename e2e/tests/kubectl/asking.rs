//! release, drain and undrain, with a controller that leads.

use cadastre_api::NodeAddressesSpec;
use cadastre_e2e::{Agents, Fixtures, Options, TestCluster};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{end, run, start};

#[tokio::test]
async fn status_waits_until_all_is_well() {
    let stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let mut waiting = start(&stage.control_plane, &["status", "--wait=300"]);
    let mut said = BufReader::new(waiting.stderr.take().unwrap()).lines();
    while let Some(line) = said.next_line().await.unwrap() {
        if line.contains("pools: there is none") {
            break;
        }
    }
    assert!(waiting.try_wait().unwrap().is_none());
    let spec = json!({"ipv4": {"cidrs": ["10.92.0.0/24"]}});
    hand.block_pool("late", spec).await.unwrap();
    let waited = end(waiting).await;
    assert!(
        waited.code == 0 && waited.out.contains("1 of 1 serve"),
        "{waited:?}"
    );
}

#[tokio::test]
async fn a_drain_is_asked_for_and_taken_back() {
    let stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    let cluster = &stage.control_plane;
    let spec = json!({"ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28}, "idleSeconds": 3600});
    hand.block_pool("roomy", spec).await.unwrap();
    let node = hand.node("roomy", "roomy-1").await.unwrap();
    agents.join(&node);
    hand.listed("roomy-1", 1).await.unwrap();
    agents.ask("roomy-1", "roomy", 40).unwrap();
    let blocks = hand.listed("roomy-1", 3).await.unwrap();
    let told = |it: &cadastre_api::NodeSubnet| {
        it.status
            .as_ref()
            .is_some_and(|status| status.blocks.len() == 3)
    };
    hand.subnet_until("roomy-1", "tells of its blocks", told)
        .await
        .unwrap();

    let dry = run(
        cluster,
        &["drain", "--node", "roomy-1", "--dry-run", "-o", "json"],
    )
    .await;
    assert_eq!(dry.json()["blocks"].as_array().unwrap().len(), 2, "{dry:?}");
    let wrong = run(cluster, &["drain", "10.90.0.0/24"]).await;
    assert!(
        wrong.code == 2 && wrong.out.contains("did you mean"),
        "{wrong:?}"
    );
    let annotation = async || {
        let annotations = hand
            .subnets
            .get("roomy-1")
            .await
            .unwrap()
            .metadata
            .annotations;
        annotations.and_then(|it| it.get("cadastre.dev/drain").cloned())
    };
    // The node demands all three blocks, so it keeps them while they drain.
    let asked = run(cluster, &["drain", &blocks[0]]).await;
    assert!(
        asked.code == 0 && asked.out.contains("Draining"),
        "{asked:?}"
    );
    assert_eq!(annotation().await.as_ref(), Some(&blocks[0]));
    let back = run(cluster, &["undrain", &blocks[0]]).await;
    assert!(back.code == 0 && back.out.contains("TakenBack"), "{back:?}");
    assert_eq!(annotation().await, None);
    let again = run(cluster, &["undrain", &blocks[0]]).await;
    assert!(
        again.code == 2 && again.out.contains("there is no request"),
        "{again:?}"
    );

    // Empty blocks that the node does not demand return at once, long before `idleSeconds` is over.
    agents.ask("roomy-1", "roomy", 1).unwrap();
    let given = run(
        cluster,
        &["drain", "--node", "roomy-1", "--wait", "--timeout", "60"],
    )
    .await;
    assert_eq!(given.code, 0, "{given:?}");
    assert_eq!(given.out.matches("Returned").count(), 2, "{given:?}");
    assert_eq!(annotation().await, None);
    let left = hand.listed("roomy-1", 1).await.unwrap();
    let gone = blocks.iter().filter(|cidr| !left.contains(cidr));
    for cidr in gone {
        hand.block_gone(cidr).await.unwrap();
    }
    // A block in use stays until its pod is gone, and assigns nothing new meanwhile.
    agents.allocate("roomy-1", "roomy", "cart").await.unwrap();
    let kept = run(cluster, &["drain", &left[0], "--wait", "--timeout", "1"]).await;
    assert!(
        kept.code == 2 && kept.out.contains("addresses in use"),
        "{kept:?}"
    );
    agents.free("roomy-1", "cart").unwrap();
    agents.warm_up("roomy-1").unwrap();
    hand.block_gone(&left[0]).await.unwrap();
}

async fn write_status(hand: &Fixtures, node: &str, status: Value) {
    let patch = Patch::Merge(json!({"status": status}));
    let params = PatchParams::default();
    hand.subnets
        .patch_status(node, &params, &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_leak_is_released_long_before_its_grace_is_over() {
    let stage = TestCluster::start(Options::default(), &["--leak-grace", "86400"])
        .await
        .unwrap();
    let hand = stage.fixtures().await.unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.91.0.0/24"], "blockSize": 28}});
    hand.block_pool("leaky", spec).await.unwrap();
    let node = hand.node("leaky", "leaky-1").await.unwrap().metadata.uid;
    hand.listed("leaky-1", 1).await.unwrap();
    let block = hand.subnets.get("leaky-1").await.unwrap().spec.blocks[0].clone();
    let address = block.cidr.replace("/28", "");
    let uid = "00000000-0000-4000-8000-000000000001";
    let words =
        |used: u8| json!([{"cidr": block.cidr, "uid": block.uid, "used": used, "free": 16 - used}]);
    let list = NodeAddressesSpec {
        addresses: vec![format!("{address} net/c1 eth0 {uid} default/gone")],
        ..NodeAddressesSpec::default()
    };
    hand.list_addresses("leaky-1", list).await.unwrap();
    write_status(
        &hand,
        "leaky-1",
        json!({"nodeUID": node, "blocks": words(1), "orphans": [{"address": address, "podUID": uid}]}),
    )
    .await;
    let child = start(&stage.control_plane, &["release", &address]);
    // The controller has its proof that the pod is gone, and asks the agent for the other one.
    let asked = |it: &cadastre_api::NodeSubnet| {
        it.spec
            .leak_candidates
            .iter()
            .any(|suspect| suspect.address == address && suspect.pod_uid == uid)
    };
    hand.subnet_until("leaky-1", "the agent is asked", asked)
        .await
        .unwrap();
    write_status(
        &hand,
        "leaky-1",
        json!({"nodeUID": node, "blocks": words(0), "orphans": []}),
    )
    .await;
    let nothing = NodeAddressesSpec::default();
    hand.list_addresses("leaky-1", nothing).await.unwrap();
    let freed = end(child).await;
    assert!(freed.code == 0 && freed.out.contains("Freed"), "{freed:?}");
    let annotations = hand
        .subnets
        .get("leaky-1")
        .await
        .unwrap()
        .metadata
        .annotations;
    assert!(annotations.is_none_or(|it| !it.contains_key("cadastre.dev/release")));
}
