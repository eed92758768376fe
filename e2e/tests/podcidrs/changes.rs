//! Pools that are created, changed and deleted while nodes wait. The controller must then serve these nodes without a
//! restart.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::Fixtures;
use serde_json::json;

use crate::shared;

/// The maximum time from a change of a pool until a waiting node gets podCIDRs. Much less time passes, except on a busy
/// host.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn served_at_once(hand: &Fixtures, name: &str) -> Result<Vec<String>> {
    let start = Instant::now();
    let cidrs = hand.served(name).await?;
    assert!(
        start.elapsed() < AT_ONCE,
        "{name} waited {:?}",
        start.elapsed()
    );
    Ok(cidrs)
}

/// Creates a node for which no range is free, and returns when the controller has reported that the node waits.
async fn waiting(hand: &Fixtures, group: &str, name: &str) -> Result<()> {
    let node = hand.node(group, name).await?;
    let uid = node.metadata.uid.unwrap();
    hand.event(&uid, "WaitingForPodCIDR").await?;
    assert!(hand.pod_cidrs(name).await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_there_first_is_served_when_a_pool_is_added() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.node("early", "early-1").await?;
    hand.pool("early", json!({"ipv4": {"cidrs": ["10.10.0.0/24"]}}))
        .await?;
    assert_eq!(served_at_once(&hand, "early-1").await?, ["10.10.0.0/24"]);
    Ok(())
}

#[tokio::test]
async fn waiting_nodes_are_served_when_a_pool_is_extended() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool("grow", json!({"ipv4": {"cidrs": ["10.11.0.0/24"]}}))
        .await?;
    hand.served_node("grow", "grow-1").await?;
    waiting(&hand, "grow", "grow-2").await?;
    let cidrs = json!({"ipv4": {"cidrs": ["10.11.0.0/24", "10.11.64.0/23"]}});
    hand.change_pool("grow", cidrs).await?;
    let mut got = served_at_once(&hand, "grow-2").await?;
    hand.node("grow", "grow-3").await?;
    got.extend(served_at_once(&hand, "grow-3").await?);
    got.sort();
    assert_eq!(got, ["10.11.64.0/24", "10.11.65.0/24"]);
    Ok(())
}

#[tokio::test]
async fn waiting_nodes_are_served_when_a_second_pool_is_added() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool("pair-1", json!({"ipv4": {"cidrs": ["10.12.0.0/24"]}}))
        .await?;
    hand.served_node("pair", "pair-1").await?;
    waiting(&hand, "pair", "pair-2").await?;
    hand.pool("pair-2", json!({"ipv4": {"cidrs": ["10.13.0.0/24"]}}))
        .await?;
    assert_eq!(served_at_once(&hand, "pair-2").await?, ["10.13.0.0/24"]);
    let uid = hand.nodes.get("pair-2").await?.metadata.uid.unwrap();
    let note = hand.event(&uid, "PodCIDRAllocated").await?;
    assert!(note.contains("10.13.0.0/24"), "{note}");
    Ok(())
}

#[tokio::test]
async fn a_disabled_pool_allocates_nothing_and_allocates_again_when_enabled() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool("off", json!({"ipv4": {"cidrs": ["10.14.0.0/16"]}}))
        .await?;
    let held = hand.served_node("off", "off-1").await?;
    hand.change_pool("off", json!({"disabled": true})).await?;
    hand.condition("off", "Ready", "False").await?;
    let note = hand.waiting_node("off", "off-2").await?;
    assert!(note.contains("disabled"), "{note}");
    assert_eq!(hand.pod_cidrs("off-1").await?, held);
    hand.change_pool("off", json!({"disabled": false})).await?;
    assert!(served_at_once(&hand, "off-2").await?[0].starts_with("10.14."));
    Ok(())
}

#[tokio::test]
async fn a_change_of_priority_turns_new_nodes_to_the_other_pool() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool(
        "turn-1",
        json!({"ipv4": {"cidrs": ["10.15.0.0/16"]}, "priority": 2}),
    )
    .await?;
    hand.pool(
        "turn-2",
        json!({"ipv4": {"cidrs": ["10.16.0.0/16"]}, "priority": 1}),
    )
    .await?;
    for pool in ["turn-1", "turn-2"] {
        hand.condition(pool, "Ready", "True").await?;
    }
    assert!(hand.served_node("turn", "turn-a").await?[0].starts_with("10.15."));
    hand.change_pool_observed("turn-2", json!({"priority": 3}))
        .await?;
    assert!(hand.served_node("turn", "turn-b").await?[0].starts_with("10.16."));
    Ok(())
}

#[tokio::test]
async fn a_new_block_size_holds_for_new_nodes_and_leaves_the_others_as_they_are() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool(
        "size",
        json!({"ipv4": {"cidrs": ["10.17.0.0/16"], "blockSize": 24}}),
    )
    .await?;
    let first = hand.served_node("size", "size-0").await?;
    assert!(first[0].ends_with("/24"), "{first:?}");
    for (i, size) in [(1, 26), (2, 20), (3, 24)] {
        let change = json!({"ipv4": {"blockSize": size}});
        hand.change_pool_observed("size", change).await?;
        let name = format!("size-{i}");
        let cidrs = hand.served_node("size", &name).await?;
        assert!(cidrs[0].ends_with(&format!("/{size}")), "{cidrs:?}");
    }
    assert_eq!(hand.pod_cidrs("size-0").await?, first);
    Ok(())
}

#[tokio::test]
async fn a_pool_deleted_while_in_use_allocates_nothing_and_is_gone_when_empty() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.18.0.0/16"]}, "quarantineSeconds": 1});
    let pool = hand.pool("gone", spec).await?;
    hand.served_node("gone", "gone-1").await?;
    hand.delete_pool("gone").await?;
    let condition = hand.condition("gone", "Terminating", "True").await?;
    assert!(
        condition.message.contains("1 nodes"),
        "{}",
        condition.message
    );
    hand.event_about(&pool, "Terminating").await?;
    waiting(&hand, "gone", "gone-2").await?;
    let pool = hand.pools.get("gone").await?;
    assert_eq!(pool.metadata.finalizers.unwrap(), [cadastre_api::FINALIZER]);

    hand.delete_node("gone-1").await?;
    cadastre_e2e::fixtures::gone(&hand.pools, "gone").await?;
    hand.subnet_gone("gone-1").await?;
    assert!(hand.pod_cidrs("gone-2").await?.is_empty());
    Ok(())
}
