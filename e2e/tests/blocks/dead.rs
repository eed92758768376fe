//! Blocks of a deleted node: they are quarantined and then free, and the same machine may get them back before that.

use std::time::{Duration, Instant};

use cadastre_api::OwnerKind;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::wait::until;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::{node, shared};

async fn rests(hand: &Fixtures, cidr: &str) -> cadastre_api::IPAMBlock {
    hand.block_until(cidr, "rests", |it| {
        it.spec.owner.kind == OwnerKind::Quarantine
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn a_block_rests_for_the_pools_time_with_its_last_owner_named_and_is_then_free() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.50.0.0/26"]}, "quarantineSeconds": 8});
    hand.block_pool("dead", spec).await.unwrap();
    let first = node(&hand, &agents, "dead", "dead-1").await;
    let had = hand.listed("dead-1", 1).await.unwrap();
    agents.leave("dead-1");
    let (start, wall) = (Instant::now(), Timestamp::now());
    hand.delete_node("dead-1").await.unwrap();
    let block = rests(&hand, &had[0]).await;
    let until = block.spec.until.unwrap().0;
    assert!(until >= wall + SignedDuration::from_secs(8));
    assert_eq!(Some(block.spec.owner.uid), first.metadata.uid);
    assert_eq!(block.spec.owner.name, "dead-1");
    assert_eq!(
        block.spec.owner.provider_id.as_deref(),
        Some("e2e://dead-1")
    );
    hand.subnet_gone("dead-1").await.unwrap();
    hand.pool_until("dead", "counts what rests", |it| {
        let status = it.status.as_ref().and_then(|it| it.ipv4.as_ref());
        status.is_some_and(|it| it.quarantined == "1" && it.allocated == "0")
    })
    .await
    .unwrap();

    let second = node(&hand, &agents, "dead", "dead-2").await;
    hand.event(&second.metadata.uid.unwrap(), "WaitingForBlock")
        .await
        .unwrap();
    assert_eq!(hand.listed("dead-2", 1).await.unwrap(), had);
    assert!(
        start.elapsed() >= Duration::from_secs(8),
        "{:?}",
        start.elapsed()
    );
    let block = hand.block_until(&had[0], "is the new node's", |it| {
        it.spec.owner.kind == OwnerKind::Node && it.spec.until.is_none()
    });
    assert_eq!(block.await.unwrap().spec.owner.name, "dead-2");
}

#[tokio::test]
async fn a_block_is_not_given_on_while_a_pod_reports_an_address_of_it() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.51.0.0/26"]}, "quarantineSeconds": 1});
    hand.block_pool("ghost", spec).await.unwrap();
    node(&hand, &agents, "ghost", "ghost-1").await;
    let had = hand.listed("ghost-1", 1).await.unwrap();
    let given = agents.allocate("ghost-1", "ghost", "web").await.unwrap();
    hand.pod("ghost-web", "ghost-1", &[&given[0]])
        .await
        .unwrap();
    agents.leave("ghost-1");
    hand.delete_node("ghost-1").await.unwrap();
    let over = rests(&hand, &had[0]).await.spec.until.unwrap().0;
    let second = node(&hand, &agents, "ghost", "ghost-2").await;
    hand.event(&second.metadata.uid.unwrap(), "WaitingForBlock")
        .await
        .unwrap();
    until("the rest would be over", LIMIT, async || {
        Ok((Timestamp::now() >= over + SignedDuration::from_secs(2)).then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(rests(&hand, &had[0]).await.spec.owner.name, "ghost-1");
    hand.delete_pod("ghost-web").await.unwrap();
    assert_eq!(hand.listed("ghost-2", 1).await.unwrap(), had);
}

#[tokio::test]
async fn the_same_machine_gets_its_blocks_back_and_another_one_under_its_name_does_not() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.52.0.0/22"], "blockSize": 28}, "quarantineSeconds": 600,
    });
    hand.block_pool("again2", spec).await.unwrap();
    let with_machine = |provider: &str| {
        let mut node = cadastre_e2e::fixtures::labelled(
            cadastre_e2e::nodes::node("again2-1", "192.0.2.1"),
            &[("group", "again2")],
        );
        node.spec.get_or_insert_default().provider_id = Some(provider.to_owned());
        node
    };
    let first = hand.create_node(with_machine("cloud://1")).await.unwrap();
    agents.join(&first);
    agents.ask("again2-1", "again2", 40).unwrap();
    let had = hand.listed("again2-1", 3).await.unwrap();
    let mut uids = vec![first.metadata.uid];
    for (provider, same) in [("cloud://1", true), ("cloud://2", false)] {
        agents.leave("again2-1");
        hand.delete_node("again2-1").await.unwrap();
        for cidr in &had {
            rests(&hand, cidr).await;
        }
        let node = hand.create_node(with_machine(provider)).await.unwrap();
        agents.join(&node);
        assert!(!uids.contains(&node.metadata.uid));
        uids.push(node.metadata.uid.clone());
        if same {
            assert_eq!(hand.listed("again2-1", 3).await.unwrap(), had);
            for cidr in &had {
                let is = |it: &cadastre_api::IPAMBlock| {
                    it.spec.owner.kind == OwnerKind::Node
                        && it.spec.until.is_none()
                        && Some(&it.spec.owner.uid) == node.metadata.uid.as_ref()
                };
                hand.block_until(cidr, "is the new node's", is)
                    .await
                    .unwrap();
            }
            agents.allocate("again2-1", "again2", "web").await.unwrap();
        } else {
            let has = hand.listed("again2-1", 1).await.unwrap();
            assert!(!had.contains(&has[0]), "{has:?}");
            for cidr in &had {
                rests(&hand, cidr).await;
            }
        }
    }
}

#[tokio::test]
async fn a_node_that_is_being_deleted_keeps_its_blocks_until_it_is_gone() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.53.0.0/24"]}, "quarantineSeconds": 0});
    hand.block_pool("linger", spec).await.unwrap();
    let mut made = cadastre_e2e::fixtures::labelled(
        cadastre_e2e::nodes::node("linger-1", "192.0.2.1"),
        &[("group", "linger")],
    );
    made.metadata.finalizers = Some(vec!["cadastre.dev/e2e".to_owned()]);
    agents.join(&hand.create_node(made).await.unwrap());
    let had = hand.listed("linger-1", 1).await.unwrap();
    hand.delete_node("linger-1").await.unwrap();
    // Watch events of nodes come in order: when this node has a block, the controller has seen the deletion.
    node(&hand, &agents, "linger", "linger-2").await;
    hand.listed("linger-2", 1).await.unwrap();
    assert_eq!(hand.listed("linger-1", 1).await.unwrap(), had);
    agents.allocate("linger-1", "linger", "web").await.unwrap();
    let patch = kube::api::Patch::Merge(json!({"metadata": {"finalizers": null}}));
    hand.nodes
        .patch("linger-1", &kube::api::PatchParams::default(), &patch)
        .await
        .unwrap();
    gone(&hand.blocks, &cadastre_e2e::fixtures::block_name(&had[0]))
        .await
        .unwrap();
    hand.subnet_gone("linger-1").await.unwrap();
}
