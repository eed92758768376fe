//! Existing podCIDRs are adopted unchanged, whichever program wrote them.

use anyhow::Result;
use cadastre_e2e::fixtures::{LIMIT, node_of_group, with_pod_cidrs};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, TestCluster};
use serde_json::json;

use crate::{alone, shared};

async fn create(hand: &Fixtures, group: &str, name: &str, cidrs: &[&str]) -> Result<String> {
    let node = node_of_group(group, name);
    let node = hand.create_node(with_pod_cidrs(node, cidrs)).await?;
    Ok(node.metadata.uid.unwrap())
}

async fn overlaps_are(stage: &TestCluster, count: f64) -> Result<()> {
    until("the metric counts the overlaps", LIMIT, async || {
        let metrics = stage.controller.metrics().await?;
        let value = sum(&metrics, "cadastre_overlapping_ranges", &[]);
        anyhow::ensure!((value - count).abs() < 0.5, "it is {value}");
        Ok(Some(()))
    })
    .await?;
    Ok(())
}

const POOL: &str = "10.30.0.0/22";

/// podCIDRs of many sizes, inside the pool and outside. Exactly one /24 of the pool remains free.
const BEFORE: [(&str, &[&str]); 5] = [
    ("take-1", &["10.30.0.0/24", "fd00:30::/64"]),
    ("take-2", &["10.30.1.128/25"]),
    ("take-3", &["10.30.3.77/32"]),
    ("take-4", &["172.20.0.0/14"]),
    ("take-5", &["fd00:31::/56"]),
];

async fn check_taken_over(hand: &Fixtures) -> Result<()> {
    assert_eq!(
        hand.served_node("take", "take-new").await?,
        ["10.30.2.0/24"]
    );
    hand.waiting_node("take", "take-full").await?;
    for (name, cidrs) in BEFORE {
        assert_eq!(hand.pod_cidrs(name).await?, cidrs);
        let subnet = hand
            .subnet_until(name, "lists the podCIDRs of the node", |it| {
                !it.spec.pod_cidrs.is_empty()
            })
            .await?;
        for (held, cidr) in subnet.spec.pod_cidrs.iter().zip(cidrs) {
            assert_eq!(&held.cidr, cidr);
            let pool = cidr.starts_with("10.30.").then_some("take");
            assert_eq!(held.pool.as_deref(), pool, "{cidr}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn podcidrs_that_nodes_bring_along_are_taken_over_as_they_are() -> Result<()> {
    let (_, hand) = shared().await?;
    for (name, cidrs) in BEFORE {
        create(&hand, "take", name, cidrs).await?;
    }
    hand.pool("take", json!({"ipv4": {"cidrs": [POOL]}}))
        .await?;
    check_taken_over(&hand).await?;
    Ok(())
}

#[tokio::test]
async fn podcidrs_from_before_the_first_start_are_taken_over_and_survive_a_restart() -> Result<()> {
    let (mut stage, hand, _one) = alone(&[]).await?;
    stage
        .restart(&[], async {
            let leases = kube::Api::<k8s_openapi::api::coordination::v1::Lease>::namespaced(
                hand.client.clone(),
                "kube-system",
            );
            leases
                .delete(
                    cadastre_api::LEASE_NAME,
                    &kube::api::DeleteParams::default(),
                )
                .await?;
            for (name, cidrs) in BEFORE {
                create(&hand, "take", name, cidrs).await?;
            }
            hand.pool("take", json!({"ipv4": {"cidrs": [POOL]}}))
                .await?;
            Ok(())
        })
        .await?;
    check_taken_over(&hand).await?;
    stage.restart(&[], async { Ok(()) }).await?;
    hand.change_pool("take", json!({"ipv4": {"cidrs": [POOL, "10.30.4.0/24"]}}))
        .await?;
    assert_eq!(hand.served("take-full").await?, ["10.30.4.0/24"]);
    Ok(())
}

#[tokio::test]
async fn overlapping_podcidrs_are_reported_on_both_nodes_and_stop_nothing() -> Result<()> {
    let (stage, hand) = shared().await?;
    hand.pool(
        "both",
        json!({"ipv4": {"cidrs": ["10.31.0.0/23"]}, "quarantineSeconds": 0}),
    )
    .await?;
    let first = create(&hand, "both", "both-1", &["10.31.0.0/24"]).await?;
    hand.subnet_until("both-1", "is there", |_| true).await?;
    let second = create(&hand, "both", "both-2", &["10.31.0.128/25"]).await?;
    for (uid, other) in [(&first, "both-2"), (&second, "both-1")] {
        let note = hand.event(uid, "OverlappingPodCIDR").await?;
        assert!(
            note.contains(other) && note.contains("delete one of the two"),
            "{note}"
        );
    }
    overlaps_are(stage, 1.0).await?;
    assert_eq!(hand.served_node("both", "both-3").await?, ["10.31.1.0/24"]);

    // The remaining node keeps its whole range, including the part that overlapped the deleted node's range.
    hand.delete_node("both-2").await?;
    overlaps_are(stage, 0.0).await?;
    hand.subnet_gone("both-2").await?;
    hand.waiting_node("both", "both-4").await?;
    assert!(hand.pod_cidrs("both-4").await?.is_empty());
    for uid in [first, second] {
        assert_eq!(hand.event_count(&uid, "OverlappingPodCIDR").await?, 1);
    }
    Ok(())
}
