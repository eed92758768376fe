//! Pools that are created, changed and deleted while nodes wait. The controller must serve the nodes without a restart.

use std::time::{Duration, Instant};

use cadastre_e2e::Fixtures;
use serde_json::json;

use crate::shared;

/// The maximum time until a waiting node gets podCIDRs after a change. It takes much less, except on a busy host.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn served_at_once(hand: &Fixtures, name: &str) -> Vec<String> {
    let start = Instant::now();
    let cidrs = hand.served(name).await.unwrap();
    assert!(
        start.elapsed() < AT_ONCE,
        "{name} waited {:?}",
        start.elapsed()
    );
    cidrs
}

/// Creates a node for which no range is free, and returns when the controller has reported that the node waits.
async fn waiting(hand: &Fixtures, group: &str, name: &str) {
    let node = hand.node(group, name).await.unwrap();
    let uid = node.metadata.uid.unwrap();
    hand.event(&uid, "WaitingForPodCIDR").await.unwrap();
    assert!(hand.pod_cidrs(name).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_node_that_is_there_first_is_served_when_a_pool_is_added() {
    let (_, hand) = shared().await;
    hand.node("early", "early-1").await.unwrap();
    hand.pool("early", json!({"ipv4": {"cidrs": ["10.10.0.0/24"]}}))
        .await
        .unwrap();
    assert_eq!(served_at_once(&hand, "early-1").await, ["10.10.0.0/24"]);
}

#[tokio::test]
async fn waiting_nodes_are_served_when_a_pool_is_extended() {
    let (_, hand) = shared().await;
    hand.pool("grow", json!({"ipv4": {"cidrs": ["10.11.0.0/24"]}}))
        .await
        .unwrap();
    hand.node("grow", "grow-1").await.unwrap();
    hand.served("grow-1").await.unwrap();
    waiting(&hand, "grow", "grow-2").await;
    let cidrs = json!({"ipv4": {"cidrs": ["10.11.0.0/24", "10.11.64.0/23"]}});
    hand.change_pool("grow", cidrs).await.unwrap();
    let mut got = served_at_once(&hand, "grow-2").await;
    hand.node("grow", "grow-3").await.unwrap();
    got.extend(served_at_once(&hand, "grow-3").await);
    got.sort();
    assert_eq!(got, ["10.11.64.0/24", "10.11.65.0/24"]);
}

#[tokio::test]
async fn waiting_nodes_are_served_when_a_second_pool_is_added() {
    let (_, hand) = shared().await;
    hand.pool("pair-1", json!({"ipv4": {"cidrs": ["10.12.0.0/24"]}}))
        .await
        .unwrap();
    hand.node("pair", "pair-1").await.unwrap();
    hand.served("pair-1").await.unwrap();
    waiting(&hand, "pair", "pair-2").await;
    hand.pool("pair-2", json!({"ipv4": {"cidrs": ["10.13.0.0/24"]}}))
        .await
        .unwrap();
    assert_eq!(served_at_once(&hand, "pair-2").await, ["10.13.0.0/24"]);
    let told = hand
        .nodes
        .get("pair-2")
        .await
        .unwrap()
        .metadata
        .uid
        .unwrap();
    let note = hand.event(&told, "PodCIDRAllocated").await.unwrap();
    assert!(note.contains("10.13.0.0/24"), "{note}");
}

#[tokio::test]
async fn a_disabled_pool_gives_nothing_new_keeps_what_is_held_and_serves_again_when_enabled() {
    let (_, hand) = shared().await;
    hand.pool("off", json!({"ipv4": {"cidrs": ["10.14.0.0/16"]}}))
        .await
        .unwrap();
    hand.node("off", "off-1").await.unwrap();
    let held = hand.served("off-1").await.unwrap();
    hand.change_pool("off", json!({"disabled": true}))
        .await
        .unwrap();
    hand.condition("off", "Ready", "False").await.unwrap();
    let node = hand.node("off", "off-2").await.unwrap();
    let note = hand
        .event(&node.metadata.uid.unwrap(), "WaitingForPodCIDR")
        .await
        .unwrap();
    assert!(note.contains("disabled"), "{note}");
    assert_eq!(hand.pod_cidrs("off-1").await.unwrap(), held);
    hand.change_pool("off", json!({"disabled": false}))
        .await
        .unwrap();
    assert!(served_at_once(&hand, "off-2").await[0].starts_with("10.14."));
}

#[tokio::test]
async fn a_change_of_priority_turns_new_nodes_to_the_other_pool() {
    let (_, hand) = shared().await;
    hand.pool(
        "turn-1",
        json!({"ipv4": {"cidrs": ["10.15.0.0/16"]}, "priority": 2}),
    )
    .await
    .unwrap();
    hand.pool(
        "turn-2",
        json!({"ipv4": {"cidrs": ["10.16.0.0/16"]}, "priority": 1}),
    )
    .await
    .unwrap();
    for pool in ["turn-1", "turn-2"] {
        hand.condition(pool, "Ready", "True").await.unwrap();
    }
    hand.node("turn", "turn-a").await.unwrap();
    assert!(hand.served("turn-a").await.unwrap()[0].starts_with("10.15."));
    let changed = hand
        .change_pool("turn-2", json!({"priority": 3}))
        .await
        .unwrap();
    // The status names the generation of the pool that it describes. So the wait ends once the controller has read the
    // change.
    hand.pool_until("turn-2", "the change is taken in", |pool| {
        pool.status.as_ref().and_then(|it| it.observed_generation) == changed.metadata.generation
    })
    .await
    .unwrap();
    hand.node("turn", "turn-b").await.unwrap();
    assert!(hand.served("turn-b").await.unwrap()[0].starts_with("10.16."));
}

#[tokio::test]
async fn a_new_block_size_holds_for_new_nodes_and_leaves_the_others_as_they_are() {
    let (_, hand) = shared().await;
    hand.pool(
        "size",
        json!({"ipv4": {"cidrs": ["10.17.0.0/16"], "blockSize": 24}}),
    )
    .await
    .unwrap();
    hand.node("size", "size-0").await.unwrap();
    let first = hand.served("size-0").await.unwrap();
    assert!(first[0].ends_with("/24"), "{first:?}");
    for (i, size) in [(1, 26), (2, 20), (3, 24)] {
        let changed = hand
            .change_pool("size", json!({"ipv4": {"blockSize": size}}))
            .await
            .unwrap();
        hand.pool_until("size", "the change is taken in", |pool| {
            pool.status.as_ref().and_then(|it| it.observed_generation)
                == changed.metadata.generation
        })
        .await
        .unwrap();
        let name = format!("size-{i}");
        hand.node("size", &name).await.unwrap();
        let cidrs = hand.served(&name).await.unwrap();
        assert!(cidrs[0].ends_with(&format!("/{size}")), "{cidrs:?}");
    }
    assert_eq!(hand.pod_cidrs("size-0").await.unwrap(), first);
}

#[tokio::test]
async fn a_pool_deleted_while_in_use_terminates_carves_nothing_and_goes_when_empty() {
    let (_, hand) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.18.0.0/16"]}, "quarantineSeconds": 1});
    let pool = hand.pool("gone", spec).await.unwrap();
    hand.node("gone", "gone-1").await.unwrap();
    hand.served("gone-1").await.unwrap();
    hand.pools
        .delete("gone", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let condition = hand.condition("gone", "Terminating", "True").await.unwrap();
    assert!(
        condition.message.contains("1 nodes"),
        "{}",
        condition.message
    );
    hand.event(&pool.metadata.uid.unwrap(), "Terminating")
        .await
        .unwrap();
    waiting(&hand, "gone", "gone-2").await;
    let pool = hand.pools.get("gone").await.unwrap();
    assert_eq!(pool.metadata.finalizers.unwrap(), [cadastre_api::FINALIZER]);

    hand.delete_node("gone-1").await.unwrap();
    cadastre_e2e::fixtures::gone(&hand.pools, "gone")
        .await
        .unwrap();
    hand.subnet_gone("gone-1").await.unwrap();
    assert!(hand.pod_cidrs("gone-2").await.unwrap().is_empty());
}
