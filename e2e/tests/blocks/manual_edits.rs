//! Objects that users edit or delete by hand. The controller restores the objects that it has written, and nodes are
//! not affected.

use anyhow::Result;
use cadastre_api::{IPAMBlock, NodeSubnet, NodeSubnetSpec, NodeSubnetStatus, OwnerKind};
use cadastre_e2e::fixtures::block_name;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::{blocks, node, shared};

#[tokio::test]
async fn the_object_of_a_block_is_restored_and_the_list_stays() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.60.0.0/24"]}, "quarantineSeconds": 0});
    fixtures.block_pool("mend", spec).await?;
    node(&fixtures, &agents, "mend", "mend-1").await?;
    let had = fixtures.listed("mend-1", 1).await?;
    let first = agents.allocate("mend-1", "mend", "web").await?;
    let before = fixtures.block_until(&had[0], "is there", |_| true).await?;
    let name = block_name(&had[0]);
    let note = json!({"metadata": {"annotations": {"example.com/note": "mine"}}});
    let (params, note) = (PatchParams::default(), Patch::Merge(note));
    fixtures.blocks.patch(&name, &params, &note).await?;

    for edit in [
        json!({"spec": {"pool": "another"}}),
        json!({"spec": {"owner": {"name": "another", "uid": "another"}}}),
        json!({"spec": {"owner": {"kind": "Quarantine"}, "until": "2020-01-01T00:00:00Z"}}),
    ] {
        let patch = Patch::Merge(&edit);
        let params = PatchParams::default();
        let edited = fixtures.blocks.patch(&name, &params, &patch).await?;
        assert_ne!(edited.spec, before.spec, "{edit}");
        let restored = fixtures
            .block_until(&had[0], "is restored", |it| it.spec == before.spec)
            .await?;
        assert_eq!(restored.uid(), before.uid(), "the same object, restored");
        let note = restored.annotations().get("example.com/note");
        assert_eq!(
            note.map(String::as_str),
            Some("mine"),
            "annotations of users stay"
        );
        assert_eq!(fixtures.listed("mend-1", 1).await?, had);
    }

    fixtures
        .blocks
        .delete(&name, &DeleteParams::default())
        .await?;
    let again = fixtures
        .block_until(&had[0], "is there again", |it| it.uid() != before.uid())
        .await?;
    assert_eq!(again.spec, before.spec);
    let subnet = fixtures
        .subnet_until("mend-1", "lists the new object", |it| {
            it.spec.blocks.len() == 1 && Some(&it.spec.blocks[0].uid) == again.metadata.uid.as_ref()
        })
        .await?;
    assert_eq!(
        subnet.metadata.managed_fields, None,
        "each write of the status would store them again"
    );
    // The node continues to use its block. No other node got the block while the IPAMBlock did not exist.
    let more = agents.allocate("mend-1", "mend", "db").await?;
    assert_ne!(more, first);
    let uid = again.metadata.uid.unwrap();
    let follows = |it: &NodeSubnetStatus| {
        it.blocks.len() == 1 && it.blocks[0].uid == uid && it.blocks[0].used == 2
    };
    let what = "reports both pods in the new object";
    fixtures.status_until("mend-1", what, follows).await?;
    Ok(())
}

/// Returns the spec of a NodeSubnet without `podRanges`, which change when other tests create or delete pools.
fn own(subnet: &NodeSubnet) -> NodeSubnetSpec {
    NodeSubnetSpec {
        pod_ranges: Vec::new(),
        ..subnet.spec.clone()
    }
}

#[tokio::test]
async fn a_node_subnet_that_is_edited_or_deleted_is_restored_with_all_blocks() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.61.0.0/24"], "blockSize": 28, "gateway": "None"},
        "idleSeconds": 86400, "warm": {"low": 36, "high": 65_536},
    });
    fixtures.block_pool("list", spec).await?;
    node(&fixtures, &agents, "list", "list-1").await?;
    fixtures.listed("list-1", 3).await?;
    agents.allocate("list-1", "list", "web").await?;
    // The demand is lower than the number of addresses. So the agent demands no further block while the NodeSubnet
    // temporarily lists none of its blocks.
    fixtures.keep_free("list", 0).await?;
    let demands_one = |it: &NodeSubnetStatus| it.pools.iter().all(|it| it.demand == 1);
    let what = "demands one address";
    let before = fixtures.status_until("list-1", what, demands_one).await?;

    for edit in [
        json!({"spec": {"blocks": []}}),
        json!({"spec": {"nodeUID": "another", "pools": [{"name": "another"}]}}),
        json!({"spec": {"blocks": [{"cidr": "10.61.0.240/28", "uid": "none", "pool": "list"}]}}),
    ] {
        let edited = fixtures.change_subnet("list-1", edit).await?;
        assert_ne!(edited.spec, before.spec);
        let is_restored = |it: &NodeSubnet| own(it) == own(&before);
        let restored = fixtures.subnet_until("list-1", "is restored", is_restored);
        assert_eq!(restored.await?.uid(), before.uid());
    }
    fixtures
        .subnets
        .delete("list-1", &DeleteParams::default())
        .await?;
    fixtures
        .subnet_until("list-1", "is there again", |it| {
            own(it) == own(&before) && it.uid() != before.uid()
        })
        .await?;
    let is_whole = |it: &NodeSubnetStatus| {
        it.blocks.len() == 3 && it.blocks.iter().map(|it| it.used).sum::<i64>() == 1
    };
    let what = "has a complete status again";
    fixtures.status_until("list-1", what, is_whole).await?;
    blocks(&fixtures, "list", 3).await?;
    Ok(())
}

#[tokio::test]
async fn blocks_created_by_hand_are_treated_like_all_others() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.62.0.0/24"], "blockSize": 28}, "quarantineSeconds": 0,
    });
    fixtures.block_pool("forge", spec).await?;
    let made = node(&fixtures, &agents, "forge", "forge-1").await?;
    let had = fixtures.listed("forge-1", 1).await?;
    // The controller allocates other CIDRs first. So it does not choose these two free CIDRs for a node's second block.
    let [beside, own] = ["10.62.0.96/28", "10.62.0.112/28"];
    assert!(!had.contains(&beside.to_owned()) && !had.contains(&own.to_owned()));
    let forge = async |cidr: &str, node: &str, uid: &str| {
        let block: IPAMBlock = serde_json::from_value(json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
            "metadata": {"name": block_name(cidr)},
            "spec": {
                "cidr": cidr, "pool": "forge", "since": "2026-11-21T10:00:00Z",
                "owner": {"kind": "Node", "name": node, "uid": uid},
            },
        }))
        .unwrap();
        fixtures.blocks.create(&PostParams::default(), &block).await
    };
    // This forged block overlaps the node's block, and the owner of the forged block does not exist. The controller
    // deletes the forged block.
    forge("10.62.0.0/24", "nobody", "no-uid").await?;
    fixtures.block_gone("10.62.0.0/24").await?;
    // This forged block overlaps no other block, and its owner does not exist. The controller quarantines the forged
    // block and then deletes it.
    forge(beside, "nobody", "no-uid").await?;
    fixtures.block_gone(beside).await?;
    // The owner of this forged block is the existing node. The controller adds the forged block to the node's list.
    let uid = made.metadata.uid.unwrap();
    forge(own, "forge-1", &uid).await?;
    let listed = fixtures.listed("forge-1", 2).await?;
    assert!(listed.contains(&had[0]) && listed.contains(&own.to_owned()));
    // A second block for the same CIDR would have the name of the existing block, so the API server rejects it.
    assert!(forge(&had[0], "nobody", "no-uid").await.is_err());
    let block = fixtures
        .block_until(&had[0], "is the node's", |_| true)
        .await;
    assert_eq!(block.unwrap().spec.owner.kind, OwnerKind::Node);
    Ok(())
}
