//! Which nodes get a first block, and when.

use anyhow::Result;
use cadastre_api::{NodeSubnet, NodeSubnetStatus, OwnerKind};
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_node::Add;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::{node, shared};

#[tokio::test]
async fn a_new_node_gets_a_block_and_assigns_addresses_from_it() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    fixtures
        .block_pool("sight", json!({"ipv4": {"cidrs": ["10.1.0.0/24"]}}))
        .await?;
    let made = node(&fixtures, &agents, "sight", "sight-1").await?;
    let subnet = fixtures
        .subnet_until("sight-1", "lists a block", |it| it.spec.blocks.len() == 1)
        .await?;
    let listed = &subnet.spec.blocks[0];
    assert_eq!(subnet.spec.node_uid, made.metadata.uid);
    assert_eq!(names(&subnet), ["sight"]);
    assert!(subnet.spec.pod_cidrs.is_empty());
    assert!(listed.cidr.ends_with("/26") && listed.pool == "sight");
    let block = fixtures
        .block_until(&listed.cidr, "is there", |_| true)
        .await;
    let block = block.unwrap();
    assert_eq!(block.metadata.uid.as_ref(), Some(&listed.uid));
    let owner = &block.spec.owner;
    assert_eq!(
        (owner.kind, owner.name.as_str(), Some(&owner.uid)),
        (OwnerKind::Node, "sight-1", made.metadata.uid.as_ref())
    );

    let addresses = agents.allocate("sight-1", "sight", "web").await?;
    assert_eq!(addresses.len(), 1);
    let subnet = fixtures.in_use("sight-1", 1).await?;
    let status = subnet.status.unwrap();
    // A valid status causes no condition.
    assert!(status.conditions.is_empty(), "{:?}", status.conditions);
    assert!(fixtures.pod_cidrs("sight-1").await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn the_first_block_is_of_the_best_pool_and_others_are_allocated_on_demand() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    for (name, range, priority) in [("best-1", "10.2.0.0/24", 1), ("best-2", "10.2.1.0/24", 2)] {
        let spec = json!({"ipv4": {"cidrs": [range]}, "priority": priority});
        fixtures.block_pool(name, spec).await?;
        fixtures.condition(name, "Ready", "True").await?;
    }
    node(&fixtures, &agents, "best", "best-a").await?;
    let first = fixtures.listed("best-a", 1).await?;
    assert!(first[0].starts_with("10.2.1."), "{first:?}");
    let subnet = fixtures.subnets.get("best-a").await?;
    assert_eq!(names(&subnet), ["best-2", "best-1"]);
    let addresses = agents.allocate("best-a", "best-1", "web").await?;
    assert!(addresses[0].starts_with("10.2.0."), "{addresses:?}");
    Ok(())
}

#[tokio::test]
async fn where_the_first_block_is_on_demand_a_node_gets_none_before() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    for (name, field, value) in [
        ("demand", "firstBlock", json!("OnDemand")),
        ("named", "assignment", json!("Manual")),
        (
            "tenant",
            "namespaceSelector",
            json!({"matchLabels": {"a": "b"}}),
        ),
    ] {
        let third = match name {
            "demand" => 0,
            "named" => 1,
            _ => 2,
        };
        let spec = json!({"ipv4": {"cidrs": [format!("10.3.{third}.0/24")]}, field: value});
        fixtures.block_pool(name, spec).await?;
        let node_name = format!("{name}-1");
        let made = node(&fixtures, &agents, name, &node_name).await?;
        // The NodeSubnet must exist although the node has no block, because the agent publishes its demand in the
        // NodeSubnet.
        let subnet = fixtures
            .subnet_until(&node_name, "names the pool", |it| names(it) == [name])
            .await?;
        assert_eq!(subnet.spec.node_uid, made.metadata.uid);
        let demands_nothing = |it: &NodeSubnetStatus| it.agent.is_some() && it.pools.is_empty();
        let what = "has a status without demand";
        fixtures
            .status_until(&node_name, what, demands_nothing)
            .await?;
        // The controller counts the pool's waiting nodes only after it has evaluated the node. So once the count
        // exists, the controller has decided that the node gets no block.
        fixtures
            .pool_until(name, "has counted", |it| {
                it.status.as_ref().is_some_and(|it| it.waiting == Some(0))
            })
            .await?;
        assert_eq!(fixtures.blocks_of(name).await?, Vec::<String>::new());
        // If a pool serves only certain namespaces, the ADD needs a pod, because the agent has to know the pod's
        // namespace.
        let add = match name {
            "tenant" => add_of(&fixtures, &node_name).await?,
            _ => Add {
                pools: vec![name.to_owned()],
                ..add("web")
            },
        };
        until("an ADD succeeds", LIMIT, async || {
            Ok(Some(agents.add(&node_name, add.clone()).await??))
        })
        .await?;
        fixtures.listed(&node_name, 1).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_older_than_its_pool_gets_a_block() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    node(&fixtures, &agents, "early", "early-1").await?;
    fixtures
        .block_pool("early", json!({"ipv4": {"cidrs": ["10.4.0.0/24"]}}))
        .await?;
    fixtures.listed("early-1", 1).await?;
    // The node `late-1` exists before the pool selects it, and gets a block once a change of its labels makes the pool
    // select it.
    let other = node(&fixtures, &agents, "late", "late-1").await?;
    let labels = json!({"metadata": {"labels": {"group": "early"}}});
    fixtures.change_node("late-1", labels).await?;
    fixtures.listed("late-1", 1).await?;
    assert!(other.metadata.uid.is_some());
    until("the pool counts both", LIMIT, async || {
        let pool = fixtures.pools.get("early").await?;
        let nodes = pool.status.and_then(|it| it.nodes);
        anyhow::ensure!(nodes == Some(2), "{nodes:?}");
        Ok(Some(()))
    })
    .await?;
    Ok(())
}

/// Creates a namespace with the label `a=b` and a pod of this namespace. Returns the pod's ADD.
async fn add_of(fixtures: &Fixtures, node: &str) -> Result<Add> {
    let namespace =
        serde_json::from_value(json!({"metadata": {"name": "b", "labels": {"a": "b"}}}));
    let params = PostParams::default();
    Api::<Namespace>::all(fixtures.client.clone())
        .create(&params, &namespace.unwrap())
        .await?;
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "web"},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    }));
    let pod: Pod = Api::namespaced(fixtures.client.clone(), "b")
        .create(&params, &pod.unwrap())
        .await?;
    Ok(Add {
        pod: Some(pod_ref(&pod)),
        ..add("web")
    })
}

/// Returns the names of the pools in the NodeSubnet's spec.
fn names(subnet: &NodeSubnet) -> Vec<&str> {
    subnet
        .spec
        .pools
        .iter()
        .map(|it| it.name.as_str())
        .collect()
}
