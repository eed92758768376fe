//! Requests that people make by annotations of a NodeSubnet.

use cadastre_api::{DRAIN_ANNOTATION, RELEASE_ANNOTATION, Recall};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, Options, TestCluster};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{blocks, node, recall, shared, write_status};

async fn annotate(hand: &Fixtures, node: &str, name: &str, value: Value) {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {name: value}}}));
    let params = PatchParams::default();
    hand.subnets.patch(node, &params, &patch).await.unwrap();
}

#[tokio::test]
async fn a_block_is_drained_as_long_as_it_is_asked_for() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.23.8.0/24"], "blockSize": 28}, "idleSeconds": 86400});
    hand.block_pool("plea", spec).await.unwrap();
    node(&hand, &agents, "plea", "plea-1").await;
    agents.allocate("plea-1", "plea", "p0").await.unwrap();
    let first = hand.listed("plea-1", 1).await.unwrap()[0].clone();

    annotate(&hand, "plea-1", DRAIN_ANNOTATION, json!(first)).await;
    let both = hand.listed("plea-1", 2).await.unwrap();
    assert_eq!(recall(&hand, "plea-1", &first).await, Some(Recall::Drain));
    let second = both.iter().find(|it| **it != first).unwrap().clone();
    assert_eq!(recall(&hand, "plea-1", &second).await, None);
    // The controller's own writes preserve annotations.
    let subnet = hand.subnets.get("plea-1").await.unwrap();
    assert_eq!(
        subnet.metadata.annotations.unwrap()[DRAIN_ANNOTATION],
        first
    );

    annotate(&hand, "plea-1", DRAIN_ANNOTATION, Value::Null).await;
    until("it is drained no longer", LIMIT, async || {
        Ok(recall(&hand, "plea-1", &first)
            .await
            .is_none()
            .then_some(()))
    })
    .await
    .unwrap();

    annotate(&hand, "plea-1", DRAIN_ANNOTATION, json!(first)).await;
    hand.subnet_until("plea-1", "drains again", |it| {
        it.spec.blocks.iter().any(|it| it.recall.is_some())
    })
    .await
    .unwrap();
    agents.free("plea-1", "p0").unwrap();
    agents.warm_up("plea-1").unwrap();
    hand.block_gone(&first).await.unwrap();
    assert_eq!(blocks(&hand, "plea", 1).await, [second]);
}

#[tokio::test]
async fn a_release_that_is_asked_for_waits_for_no_grace_and_never_frees_what_lives() {
    let stage = TestCluster::start(Options::default(), &["--leak-grace", "3600"]);
    let stage = stage.await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.74.8.0/24"], "blockSize": 28}});
    hand.block_pool("let", spec).await.unwrap();
    let node = hand.node("let", "let-1").await.unwrap();
    let cidr = hand.listed("let-1", 1).await.unwrap()[0].clone();
    let block = hand.subnets.get("let-1").await.unwrap().spec.blocks[0].clone();
    let first: std::net::Ipv4Addr = cidr.split('/').next().unwrap().parse().unwrap();
    let address = |n: u32| std::net::Ipv4Addr::from(u32::from(first) + n).to_string();
    let lives = hand.pod("let-a", "let-1", &[]).await.unwrap();
    let lives = lives.metadata.uid.unwrap();
    let gone = |n: u32| format!("00000000-0000-4000-8000-00000000000{n}");
    let held = [
        json!({"address": address(1), "podUID": lives}),
        json!({"address": address(2), "podUID": gone(2)}),
        json!({"address": address(3), "podUID": gone(3)}),
    ];
    let status = json!({
        "nodeUID": node.metadata.uid,
        "blocks": [{"cidr": cidr, "uid": block.uid, "used": 3, "free": 13}],
        "orphans": held,
    });
    write_status(&hand, "let-1", status).await;
    let all = [
        format!("{}={lives}", address(1)),
        format!("{}={}", address(2), gone(2)),
        // The address is in use by another pod than the one that is named.
        format!("{}={}", address(3), gone(9)),
    ];
    annotate(&hand, "let-1", RELEASE_ANNOTATION, json!(all.join(","))).await;
    let subnet = hand.subnet_until("let-1", "asks the agent", |it| {
        !it.spec.leak_candidates.is_empty()
    });
    let suspects = subnet.await.unwrap().spec.leak_candidates;
    assert_eq!(suspects.len(), 1, "{suspects:?}");
    assert_eq!(suspects[0].address, address(2));
    assert_eq!(suspects[0].pod_uid, gone(2));
}
