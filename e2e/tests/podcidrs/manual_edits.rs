//! NodeSubnets that are edited by hand, and names of the maximum length.

use anyhow::Result;
use cadastre_api::{NodeSubnet, NodeSubnetSpec};
use cadastre_e2e::fixtures::node_of_group;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use crate::shared;

#[tokio::test]
async fn a_nodesubnet_that_is_edited_or_deleted_by_hand_is_restored() -> Result<()> {
    let (_, hand) = shared().await?;
    hand.pool("hand", json!({"ipv4": {"cidrs": ["10.60.0.0/24", "10.60.1.0/24", "10.60.2.0/24"]}, "quarantineSeconds": 600}))
        .await?;
    for name in ["hand-1", "hand-2"] {
        hand.served_node("hand", name).await?;
        hand.recorded(name).await?;
    }
    hand.delete_node("hand-2").await?;
    hand.subnet_until("hand-2", "is quarantined", |it| {
        !it.spec.quarantined.is_empty()
    })
    .await?;

    // `podRanges` is left out, because it lists the ranges of all pools, and other tests create pools meanwhile.
    let own = |it: &NodeSubnet| NodeSubnetSpec {
        pod_ranges: Vec::new(),
        ..it.spec.clone()
    };
    for name in ["hand-1", "hand-2"] {
        let before = hand.subnets.get(name).await?;
        let edit = json!({"spec": {
            "nodeUID": "someone", "podCIDRs": [{"cidr": "192.168.7.0/24"}], "quarantined": null,
        }});
        hand.change_subnet(name, edit).await?;
        let is_restored = |it: &NodeSubnet| own(it) == own(&before);
        let restored = hand.subnet_until(name, "is as before", is_restored).await?;
        assert_eq!(restored.uid(), before.uid(), "the same object, restored");

        hand.subnets.delete(name, &DeleteParams::default()).await?;
        hand.subnet_until(name, "is there again", |it| {
            own(it) == own(&before) && it.uid() != before.uid()
        })
        .await?;
    }
    // The deleted node's range must still be in quarantine. So one of the two new nodes gets podCIDRs, and the other
    // waits.
    hand.served_node("hand", "hand-3").await?;
    hand.waiting_node("hand", "hand-4").await?;
    assert!(hand.pod_cidrs("hand-4").await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn names_of_the_greatest_length_work_throughout() -> Result<()> {
    let (_, hand) = shared().await?;
    let pool = format!("long-{}", "p".repeat(58));
    let node = [
        "n".repeat(63),
        "o".repeat(63),
        "d".repeat(63),
        "e".repeat(61),
    ]
    .join(".");
    assert_eq!((pool.len(), node.len()), (63, 253));
    let made = node_of_group("long", &node);
    let spec =
        json!({"ipv4": {"cidrs": ["10.61.0.0/24"]}, "disabled": true, "quarantineSeconds": 0});
    hand.pool(&pool, spec).await?;
    hand.condition(&pool, "Ready", "False").await?;
    let uid = hand.create_node(made).await?.uid().unwrap();
    let note = hand.event(&uid, "WaitingForPodCIDR").await?;
    assert!(note.contains(&pool), "{note}");
    hand.change_pool(&pool, json!({"disabled": false})).await?;
    assert_eq!(hand.served(&node).await?, ["10.61.0.0/24"]);
    let subnet = hand
        .subnet_until(&node, "names the pool", |it| !it.spec.pod_cidrs.is_empty())
        .await;
    assert_eq!(subnet.unwrap().spec.pod_cidrs[0].pool.as_ref(), Some(&pool));
    hand.event(&uid, "PodCIDRAllocated").await?;
    hand.delete_node(&node).await?;
    hand.subnet_gone(&node).await?;
    Ok(())
}
