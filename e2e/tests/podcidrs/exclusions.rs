//! Ranges that are never allocated: service ranges, reserved addresses, addresses of nodes, and ranges of older pools.

use anyhow::Result;
use cadastre_e2e::Fixtures;
use cadastre_e2e::wait::until;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::{FLAG_SERVICE_RANGE, shared};

/// Creates `count` nodes that must get podCIDRs, and one more that must wait. Returns the podCIDRs, sorted.
async fn fill(hand: &Fixtures, group: &str, count: usize) -> Result<Vec<String>> {
    let mut got = Vec::new();
    for i in 1..=count {
        let name = format!("{group}-{i}");
        got.extend(hand.served_node(group, &name).await?);
    }
    let name = format!("{group}-full");
    hand.waiting_node(group, &name).await?;
    assert!(hand.pod_cidrs(&name).await?.is_empty());
    got.sort();
    Ok(got)
}

/// Waits until the pool reports that it overlaps something, and asserts that the message contains `what`.
async fn overlapping(hand: &Fixtures, pool: &str, what: &str) -> Result<()> {
    let message = hand.condition(pool, "Overlapping", "True").await?.message;
    assert!(message.contains(what), "{message}");
    Ok(())
}

#[tokio::test]
async fn service_ranges_of_the_cluster_are_never_carved() -> Result<()> {
    let (_, hand) = shared().await?;
    // 10.96.0.0/16 is the API server's own `--service-cluster-ip-range`, which the ServiceCIDR `kubernetes` names.
    let spec = json!({"ipv4": {"cidrs": ["10.96.0.0/14"], "blockSize": 16}});
    let pool = hand.pool("svc", spec).await?;
    overlapping(&hand, "svc", "service range 10.96.0.0/16").await?;
    hand.event_about(&pool, "Overlapping").await?;
    let got = fill(&hand, "svc", 3).await?;
    assert_eq!(got, ["10.97.0.0/16", "10.98.0.0/16", "10.99.0.0/16"]);
    Ok(())
}

#[tokio::test]
async fn the_range_of_the_flag_service_cidr_is_never_allocated() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.199.0.0/24"], "blockSize": 26}});
    hand.pool("flag", spec).await?;
    overlapping(&hand, "flag", FLAG_SERVICE_RANGE).await?;
    let got = fill(&hand, "flag", 2).await?;
    assert_eq!(got, ["10.199.0.128/26", "10.199.0.192/26"]);
    Ok(())
}

#[tokio::test]
async fn a_servicecidr_created_later_is_not_allocated_until_it_is_deleted() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.20.0.0/23"], "blockSize": 24}});
    hand.pool("more", spec).await?;
    hand.condition("more", "Overlapping", "False").await?;
    let ranges = Api::<ServiceCIDR>::all(hand.client.clone());
    let range = serde_json::from_value(json!({
        "metadata": {"name": "more"}, "spec": {"cidrs": ["10.20.0.0/24"]},
    }));
    ranges
        .create(&PostParams::default(), &range.unwrap())
        .await?;
    hand.condition("more", "Overlapping", "True").await?;
    assert_eq!(fill(&hand, "more", 1).await?, ["10.20.1.0/24"]);

    ranges.delete("more", &DeleteParams::default()).await?;
    hand.condition("more", "Overlapping", "False").await?;
    assert_eq!(hand.served("more-full").await?, ["10.20.0.0/24"]);
    Ok(())
}

#[tokio::test]
async fn reserved_ranges_are_never_allocated() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.21.0.0/24"], "blockSize": 27},
        "reserved": ["10.21.0.0/26", "10.21.0.100", "10.21.0.190-10.21.0.200"],
    });
    hand.pool("res", spec).await?;
    let got = fill(&hand, "res", 3).await?;
    assert_eq!(got, ["10.21.0.128/27", "10.21.0.224/27", "10.21.0.64/27"]);
    let status = hand.pools.get("res").await?.status.unwrap();
    assert_eq!(status.ipv4.unwrap().capacity, "3");
    Ok(())
}

#[tokio::test]
async fn blocks_with_an_address_of_a_node_are_never_carved() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.22.0.0/24"], "blockSize": 26}});
    hand.pool("own", spec).await?;
    hand.condition("own", "Overlapping", "False").await?;
    let node = cadastre_e2e::nodes::node("own-0", "10.22.0.77");
    hand.create_node(node).await?;
    overlapping(&hand, "own", "node address 10.22.0.77").await?;
    let got = fill(&hand, "own", 3).await?;
    assert_eq!(got, ["10.22.0.0/26", "10.22.0.128/26", "10.22.0.192/26"]);

    hand.delete_node("own-0").await?;
    assert_eq!(hand.served("own-full").await?, ["10.22.0.64/26"]);
    Ok(())
}

#[tokio::test]
async fn of_two_overlapping_pools_the_newer_carves_nothing_until_the_older_goes() -> Result<()> {
    let (_, hand) = shared().await?;
    // The older pool's name sorts last. So only its age can give it precedence.
    let older = hand.pool("age-z", json!({
        "ipv4": {"cidrs": ["10.23.0.0/16"]}, "nodeSelector": {"matchLabels": {"group": "age-z"}},
        "quarantineSeconds": 0,
    }));
    let older = older.await?;
    let created = older.metadata.creation_timestamp.unwrap().0;
    until(
        "a second has passed",
        cadastre_e2e::fixtures::LIMIT,
        async || {
            let now = k8s_openapi::jiff::Timestamp::now();
            Ok((now.as_second() > created.as_second()).then_some(()))
        },
    )
    .await?;
    let newer = json!({
        "ipv4": {"cidrs": ["10.23.128.0/24"]}, "nodeSelector": {"matchLabels": {"group": "age"}},
    });
    let newer = hand.pool("age-a", newer).await?;
    let condition = hand.condition("age-a", "Overlapping", "True").await?;
    assert!(condition.message.contains("age-z") && condition.message.contains("10.23.0.0/16"));
    assert_eq!(
        hand.condition("age-a", "Ready", "False").await?.reason,
        "OverlapsOlderPool"
    );
    let uid = newer.metadata.uid.unwrap();
    hand.event(&uid, "Overlapping").await?;
    hand.condition("age-z", "Overlapping", "False").await?;

    assert!(hand.served_node("age-z", "age-z1").await?[0].starts_with("10.23."));
    let note = hand.waiting_node("age", "age-1").await?;
    assert!(note.contains("age-z"), "{note}");

    // The deleted pool still exists, because nodes have podCIDRs of it. But the deleted pool no longer keeps the newer
    // pool from allocating.
    hand.delete_pool("age-z").await?;
    hand.condition("age-z", "Terminating", "True").await?;
    assert_eq!(hand.served("age-1").await?, ["10.23.128.0/24"]);
    hand.condition("age-a", "Ready", "True").await?;
    assert!(hand.pools.get_opt("age-z").await?.is_some());
    hand.delete_node("age-z1").await?;
    cadastre_e2e::fixtures::gone(&hand.pools, "age-z").await?;
    hand.event(&uid, "NoLongerOverlapping").await?;
    Ok(())
}
