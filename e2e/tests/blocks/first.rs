//! Which nodes get a first block, and when.

use cadastre_api::{NodeSubnet, OwnerKind};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use serde_json::json;

use crate::{node, shared};

#[tokio::test]
async fn a_node_gets_a_block_on_sight_and_gives_addresses_from_it() {
    let (_, hand, agents) = shared().await;
    hand.block_pool("sight", json!({"ipv4": {"cidrs": ["10.1.0.0/24"]}}))
        .await
        .unwrap();
    let made = node(&hand, &agents, "sight", "sight-1").await;
    let subnet = hand
        .subnet_until("sight-1", "lists a block", |it| it.spec.blocks.len() == 1)
        .await
        .unwrap();
    let listed = &subnet.spec.blocks[0];
    assert_eq!(subnet.spec.node_uid, made.metadata.uid);
    assert_eq!(names(&subnet), ["sight"]);
    assert!(subnet.spec.pod_cidrs.is_empty());
    assert!(listed.cidr.ends_with("/26") && listed.pool == "sight");
    let block = hand.block_until(&listed.cidr, "is there", |_| true).await;
    let block = block.unwrap();
    assert_eq!(block.metadata.uid.as_ref(), Some(&listed.uid));
    let owner = &block.spec.owner;
    assert_eq!(
        (owner.kind, owner.name.as_str(), Some(&owner.uid)),
        (OwnerKind::Node, "sight-1", made.metadata.uid.as_ref())
    );

    let given = agents.allocate("sight-1", "sight", "web").await.unwrap();
    assert_eq!(given.len(), 1);
    let subnet = hand
        .subnet_until("sight-1", "tells of the pod", |it| {
            let status = it.status.as_ref();
            status.is_some_and(|it| it.blocks.iter().map(|it| it.used).sum::<i64>() == 1)
        })
        .await
        .unwrap();
    let status = subnet.status.unwrap();
    // A flawless status has no condition.
    assert!(status.conditions.is_empty(), "{:?}", status.conditions);
    assert!(hand.pod_cidrs("sight-1").await.unwrap().is_empty());
}

#[tokio::test]
async fn of_several_pools_the_best_gives_the_first_block_and_the_others_wait_for_a_question() {
    let (_, hand, agents) = shared().await;
    for (name, range, priority) in [("best-1", "10.2.0.0/24", 1), ("best-2", "10.2.1.0/24", 2)] {
        let spec = json!({"ipv4": {"cidrs": [range]}, "priority": priority});
        hand.block_pool(name, spec).await.unwrap();
        hand.condition(name, "Ready", "True").await.unwrap();
    }
    node(&hand, &agents, "best", "best-a").await;
    let first = hand.listed("best-a", 1).await.unwrap();
    assert!(first[0].starts_with("10.2.1."), "{first:?}");
    let subnet = hand.subnets.get("best-a").await.unwrap();
    assert_eq!(names(&subnet), ["best-2", "best-1"]);
    let given = agents.allocate("best-a", "best-1", "web").await.unwrap();
    assert!(given[0].starts_with("10.2.0."), "{given:?}");
}

#[tokio::test]
async fn on_demand_and_by_name_a_node_gets_nothing_until_it_asks() {
    let (_, hand, agents) = shared().await;
    for (name, field, value) in [
        ("asked", "firstBlock", json!("OnDemand")),
        ("named", "assignment", json!("Manual")),
        (
            "tenant",
            "namespaceSelector",
            json!({"matchLabels": {"a": "b"}}),
        ),
    ] {
        let third = match name {
            "asked" => 0,
            "named" => 1,
            _ => 2,
        };
        let spec = json!({"ipv4": {"cidrs": [format!("10.3.{third}.0/24")]}, field: value});
        hand.block_pool(name, spec).await.unwrap();
        let node_name = format!("{name}-1");
        let made = node(&hand, &agents, name, &node_name).await;
        // The NodeSubnet exists, so that the agent can publish demand.
        let subnet = hand
            .subnet_until(&node_name, "names the pool", |it| names(it) == [name])
            .await
            .unwrap();
        assert_eq!(subnet.spec.node_uid, made.metadata.uid);
        agents.ask(&node_name, name, 0).unwrap();
        // The pool's count of waiting nodes is written after the controller has evaluated the node.
        hand.pool_until(name, "has counted", |it| {
            it.status.as_ref().is_some_and(|it| it.waiting == Some(0))
        })
        .await
        .unwrap();
        assert_eq!(hand.blocks_of(name).await.unwrap(), Vec::<String>::new());
        agents.ask(&node_name, name, 1).unwrap();
        hand.listed(&node_name, 1).await.unwrap();
    }
}

#[tokio::test]
async fn a_node_that_is_there_first_gets_its_block_when_the_pool_comes() {
    let (_, hand, agents) = shared().await;
    node(&hand, &agents, "early", "early-1").await;
    hand.block_pool("early", json!({"ipv4": {"cidrs": ["10.4.0.0/24"]}}))
        .await
        .unwrap();
    hand.listed("early-1", 1).await.unwrap();
    // A node that a pool selects only later gets a block, too.
    let other = node(&hand, &agents, "late", "late-1").await;
    let labels = json!({"metadata": {"labels": {"group": "early"}}});
    let patch = kube::api::Patch::Merge(labels);
    hand.nodes
        .patch("late-1", &kube::api::PatchParams::default(), &patch)
        .await
        .unwrap();
    hand.listed("late-1", 1).await.unwrap();
    assert!(other.metadata.uid.is_some());
    until("the pool counts both", LIMIT, async || {
        let pool = hand.pools.get("early").await?;
        let nodes = pool.status.and_then(|it| it.nodes);
        anyhow::ensure!(nodes == Some(2), "{nodes:?}");
        Ok(Some(()))
    })
    .await
    .unwrap();
}

/// The names of the pools in the NodeSubnet's spec.
fn names(subnet: &NodeSubnet) -> Vec<&str> {
    subnet
        .spec
        .pools
        .iter()
        .map(|it| it.name.as_str())
        .collect()
}
