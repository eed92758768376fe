//! NodeSubnets that are edited by hand, and names of the maximum length.

use cadastre_api::{NodeSubnet, NodeSubnetSpec};
use cadastre_e2e::fixtures::labelled;
use cadastre_e2e::nodes;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::shared;

#[tokio::test]
async fn a_nodesubnet_that_is_edited_or_deleted_by_hand_is_restored() {
    let (_, hand) = shared().await;
    hand.pool("hand", json!({"ipv4": {"cidrs": ["10.60.0.0/24", "10.60.1.0/24", "10.60.2.0/24"]}, "quarantineSeconds": 600}))
        .await
        .unwrap();
    for name in ["hand-1", "hand-2"] {
        hand.node("hand", name).await.unwrap();
        hand.served(name).await.unwrap();
        hand.subnet_until(name, "is there", |it| !it.spec.pod_cidrs.is_empty())
            .await
            .unwrap();
    }
    hand.delete_node("hand-2").await.unwrap();
    hand.subnet_until("hand-2", "rests", |it| !it.spec.quarantined.is_empty())
        .await
        .unwrap();

    // `podRanges` is not compared: it lists the ranges of all pools, and other tests create pools meanwhile.
    let own = |it: &NodeSubnet| NodeSubnetSpec {
        pod_ranges: Vec::new(),
        ..it.spec.clone()
    };
    for name in ["hand-1", "hand-2"] {
        let before = hand.subnets.get(name).await.unwrap();
        let edit = json!({"spec": {
            "nodeUID": "someone", "podCIDRs": [{"cidr": "192.168.7.0/24"}], "quarantined": null,
        }});
        hand.subnets
            .patch(name, &PatchParams::default(), &Patch::Merge(edit))
            .await
            .unwrap();
        let restored = hand
            .subnet_until(name, "is as before", |it| own(it) == own(&before))
            .await;
        assert_eq!(
            restored.unwrap().uid(),
            before.uid(),
            "the same object, mended"
        );

        hand.subnets
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
        hand.subnet_until(name, "is there again", |it| {
            own(it) == own(&before) && it.uid() != before.uid()
        })
        .await
        .unwrap();
    }
    // The deleted node's range must still be quarantined: one of the two new nodes gets podCIDRs, the other waits.
    hand.node("hand", "hand-3").await.unwrap();
    hand.served("hand-3").await.unwrap();
    let fourth = hand.node("hand", "hand-4").await.unwrap();
    hand.event(&fourth.uid().unwrap(), "WaitingForPodCIDR")
        .await
        .unwrap();
    assert!(hand.pod_cidrs("hand-4").await.unwrap().is_empty());
}

#[tokio::test]
async fn names_of_the_greatest_length_work_throughout() {
    let (_, hand) = shared().await;
    let pool = format!("long-{}", "p".repeat(58));
    let node = [
        "n".repeat(63),
        "o".repeat(63),
        "d".repeat(63),
        "e".repeat(61),
    ]
    .join(".");
    assert_eq!((pool.len(), node.len()), (63, 253));
    let made = labelled(nodes::node(&node, "192.0.2.1"), &[("group", "long")]);
    let spec =
        json!({"ipv4": {"cidrs": ["10.61.0.0/24"]}, "disabled": true, "quarantineSeconds": 0});
    hand.pool(&pool, spec).await.unwrap();
    hand.condition(&pool, "Ready", "False").await.unwrap();
    let uid = hand.create_node(made).await.unwrap().uid().unwrap();
    let note = hand.event(&uid, "WaitingForPodCIDR").await.unwrap();
    assert!(note.contains(&pool), "{note}");
    hand.change_pool(&pool, json!({"disabled": false}))
        .await
        .unwrap();
    assert_eq!(hand.served(&node).await.unwrap(), ["10.61.0.0/24"]);
    let subnet = hand
        .subnet_until(&node, "names the pool", |it| !it.spec.pod_cidrs.is_empty())
        .await;
    assert_eq!(subnet.unwrap().spec.pod_cidrs[0].pool.as_ref(), Some(&pool));
    hand.event(&uid, "PodCIDRAllocated").await.unwrap();
    hand.delete_node(&node).await.unwrap();
    hand.subnet_gone(&node).await.unwrap();
}
