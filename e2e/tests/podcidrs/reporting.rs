//! Events, conditions and metrics change when the state changes, and only then.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::fixtures::{LIMIT, condition};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::wait::until;
use serde_json::json;

use crate::shared;

/// This is longer than the interval between two writes of a status, and than the interval after which waiting nodes
/// might be evaluated again.
const QUIET: Duration = Duration::from_secs(11);

#[tokio::test]
async fn exhaustion_and_its_end_are_each_reported_once() -> Result<()> {
    let (_, hand) = shared().await?;
    let pool = hand
        .pool("tell", json!({"ipv4": {"cidrs": ["10.50.0.0/24"]}}))
        .await?;
    let pool_uid = pool.metadata.uid.unwrap();
    hand.served_node("tell", "tell-1").await?;
    let node = hand.node("tell", "tell-2").await?;
    let node_uid = node.metadata.uid.unwrap();
    let note = hand.event(&pool_uid, "PoolExhausted").await?;
    assert!(note.contains("add a CIDR to spec.ipv4.cidrs"), "{note}");
    let note = hand.event(&node_uid, "WaitingForPodCIDR").await?;
    assert!(note.contains("\"tell\""), "{note}");
    let before = hand
        .pool_until("tell", "counts the one that waits", |it| {
            it.status.as_ref().is_some_and(|it| it.waiting == Some(1))
                && condition(it, "Exhausted").is_some_and(|it| it.status == "True")
        })
        .await?;

    // The test changes the node every second, so the controller evaluates the node every second. The controller must
    // not repeat the events.
    let start = Instant::now();
    until("some time has passed", QUIET * 2, async || {
        let second = start.elapsed().as_secs();
        hand.change_node(
            "tell-2",
            json!({"metadata": {"labels": {"second": second.to_string()}}}),
        )
        .await?;
        Ok((start.elapsed() >= QUIET).then_some(()))
    })
    .await?;
    assert_eq!(hand.event_count(&pool_uid, "PoolExhausted").await?, 1);
    assert_eq!(hand.event_count(&node_uid, "WaitingForPodCIDR").await?, 1);
    let after = hand.pools.get("tell").await?;
    assert_eq!(
        after.metadata.resource_version,
        before.metadata.resource_version
    );

    hand.change_pool(
        "tell",
        json!({"ipv4": {"cidrs": ["10.50.0.0/24", "10.50.1.0/24", "10.50.2.0/24"]}}),
    )
    .await?;
    hand.served("tell-2").await?;
    hand.event(&pool_uid, "PoolHasRoom").await?;
    hand.event(&node_uid, "PodCIDRAllocated").await?;
    hand.condition("tell", "Exhausted", "False").await?;
    for (uid, reason) in [
        (&pool_uid, "PoolExhausted"),
        (&pool_uid, "PoolHasRoom"),
        (&node_uid, "WaitingForPodCIDR"),
        (&node_uid, "PodCIDRAllocated"),
    ] {
        assert_eq!(hand.event_count(uid, reason).await?, 1, "{reason}");
    }
    Ok(())
}

#[tokio::test]
async fn a_node_that_gets_podcidrs_at_once_has_no_event() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool("calm", json!({"ipv4": {"cidrs": ["10.51.0.0/16"]}}))
        .await?;
    hand.condition("calm", "Ready", "True").await?;
    let node = hand.node("calm", "calm-1").await?;
    hand.served("calm-1").await?;
    // Events are written in order. So if there were an event of the first node, it would exist before the second node's
    // event.
    hand.change_pool("calm", json!({"disabled": true})).await?;
    hand.condition("calm", "Ready", "False").await?;
    hand.waiting_node("calm", "calm-2").await?;
    assert!(
        hand.events_of(&node.metadata.uid.unwrap())
            .await?
            .is_empty()
    );
    Ok(())
}

#[tokio::test]
async fn the_metrics_of_a_pool_equal_its_status_and_end_with_the_pool() -> Result<()> {
    let (stage, hand) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.52.0.0/22"]}, "ipv6": {"cidrs": ["fd00:52::/60"]}, "reserved": ["10.52.3.9"],
        "quarantineSeconds": 20,
    });
    hand.pool("figs", spec).await?;
    for name in ["figs-1", "figs-2"] {
        hand.served_node("figs", name).await?;
    }
    hand.delete_node("figs-2").await?;
    let expected = [
        ("cadastre_pool_blocks_capacity", 3.0, 16.0),
        ("cadastre_pool_blocks_allocated", 1.0, 1.0),
        ("cadastre_pool_blocks_quarantined", 1.0, 1.0),
        ("cadastre_pool_blocks_free", 1.0, 14.0),
        ("cadastre_pool_utilization_ratio", 2.0 / 3.0, 2.0 / 16.0),
    ];
    until("the metrics of the pool", LIMIT, async || {
        let metrics = stage.controller.metrics().await?;
        let of = |name, family| sum(&metrics, name, &[("pool", "figs"), ("family", family)]);
        let wrong = expected.iter().find(|(name, v4, v6)| {
            (of(name, "ipv4") - v4).abs() > 1e-9 || (of(name, "ipv6") - v6).abs() > 1e-9
        });
        anyhow::ensure!(wrong.is_none(), "{wrong:?}");
        Ok(Some(()))
    })
    .await?;
    let pool = hand
        .pool_until("figs", "the status has the same counts", |it| {
            let v4 = it.status.as_ref().and_then(|it| it.ipv4.as_ref());
            v4.is_some_and(|it| it.allocated == "1" && it.quarantined == "1")
        })
        .await?;
    let v4 = pool.status.unwrap().ipv4.unwrap();
    assert_eq!(
        (
            v4.capacity.as_str(),
            v4.free.as_str(),
            v4.utilization.as_str()
        ),
        ("3", "1", "66%")
    );

    hand.change_pool("figs", json!({"quarantineSeconds": 0}))
        .await?;
    hand.delete_node("figs-1").await?;
    hand.delete_pool("figs").await?;
    until(
        "no series is of the pool",
        Duration::from_secs(90),
        async || {
            let metrics = stage.controller.metrics().await?;
            let left = metrics
                .iter()
                .find(|it| it.labels.get("pool").is_some_and(|it| it == "figs"));
            anyhow::ensure!(left.is_none(), "{left:?}");
            Ok(Some(()))
        },
    )
    .await?;
    Ok(())
}
