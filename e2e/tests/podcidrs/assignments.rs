//! Ranges that a pool assigns to certain nodes, and ranges whose size follows from the node.

use anyhow::Result;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::node_of_group;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::shared;

/// Creates a node of the group `fix` that may run this many pods.
async fn node(hand: &Fixtures, name: &str, pods: &str) -> Result<Node> {
    let mut node = node_of_group("fix", name);
    let status = node.status.get_or_insert_default();
    status.capacity = Some([("pods".to_owned(), Quantity(pods.to_owned()))].into());
    hand.create_node(node).await
}

#[tokio::test]
async fn assigned_ranges_are_kept_for_their_node_and_other_sizes_follow_from_the_pods() -> Result<()>
{
    let (_, hand) = shared().await?;
    let pool = json!({
        "ipv4": {"cidrs": ["10.59.0.0/22"], "blockSizing": "FitMaxPods"},
        "assignments": [
            {"node": "fix-a", "cidrs": ["10.59.0.0/25"]}, {"node": "fix-x", "cidrs": ["10.58.0.0/24"]},
        ],
    });
    hand.pool("fix", pool).await?;
    let message = hand.condition("fix", "AssignmentsUnusable", "True");
    let message = message.await?.message;
    assert!(
        message.contains("fix-x") && message.contains("10.58.0.0/24"),
        "{message}"
    );

    let note = hand.waiting_node("fix", "fix-1").await?;
    assert!(note.contains("status.capacity.pods"), "{note}");
    let capacity = Patch::Merge(json!({"status": {"capacity": {"pods": "250"}}}));
    let params = PatchParams::default();
    hand.nodes.patch_status("fix-1", &params, &capacity).await?;
    assert_eq!(hand.served("fix-1").await?, ["10.59.2.0/23"]);
    for (name, pods, range) in [
        ("fix-2", "110", "10.59.1.0/24"),
        ("fix-3", "64", "10.59.0.128/25"),
    ] {
        node(&hand, name, pods).await?;
        assert_eq!(hand.served(name).await?, [range]);
    }

    // The range that the pool assigns to fix-a is free before fix-a exists and after its deletion, but only for fix-a.
    let note = hand.waiting_node("fix", "fix-x").await?;
    assert!(
        note.contains("does not lie in one of the pool's cidrs"),
        "{note}"
    );
    assert_eq!(hand.served_node("fix", "fix-a").await?, ["10.59.0.0/25"]);
    hand.delete_node("fix-a").await?;
    let last = node(&hand, "fix-4", "16").await?;
    let note = hand.event_about(&last, "WaitingForPodCIDR").await?;
    assert!(note.contains("no free IPv4 block of /27"), "{note}");
    assert_eq!(hand.served_node("fix", "fix-a").await?, ["10.59.0.0/25"]);
    assert!(hand.pod_cidrs("fix-4").await?.is_empty());
    Ok(())
}
