//! Exhausted pools, and nodes that are deleted for good.

use anyhow::ensure;
use cadastre_e2e::fixtures::gone;
use cadastre_e2e::node::Machine;
use kube::api::DeleteParams;
use serde_json::json;

use crate::pods::{self, Running};
use crate::{Stage, eventually, machines};

/// A pool has only one block of each family. The first node's pods exhaust the pool. The second node gets nothing until
/// the first node is gone.
pub(crate) async fn exhaustion_passes_and_blocks_of_a_node_that_is_gone_serve_another_one(
    stage: &Stage,
) {
    let (api, group) = (&stage.api, "short");
    let mut spec = machines::both("10.37.0.0/29", "fd00:37::/125");
    spec["ipv4"]["blockSize"] = json!(29);
    spec["ipv6"]["blockSize"] = json!(125);
    spec["quarantineSeconds"] = json!(3);
    api.block_pool(group, spec).await.unwrap();
    let mut first = stage.machine(group, machines::ptp()).await;
    let pods_of_first = exhaustion_is_told_and_passes(stage, group, &first).await;

    let second = stage.machine(group, machines::ptp()).await;
    // Without a range, the second node has no CNI configuration, so the second node is not ready.
    let blocks = machines::ranges(api, first.name()).await;
    assert_eq!(blocks.len(), 2, "{blocks:?}");
    pods::ready(api, second.name(), false).await;

    first.power_off().await.unwrap();
    api.delete_node(first.name()).await.unwrap();
    gone(&api.nodes, first.name()).await.unwrap();
    for pod in &pods_of_first {
        let at_once = DeleteParams::default().grace_period(0);
        // The control plane also deletes the pods of a deleted node. So a pod can be gone already, and errors are
        // ignored.
        let _ = api.pods.delete(&pod.name, &at_once).await;
    }
    pods::ready(api, second.name(), true).await;
    // The blocks of the two families are allocated one after the other. So the test waits for both.
    eventually("the second node has both blocks", async || {
        let has = machines::ranges(api, second.name()).await;
        ensure!(has == blocks, "{has:?}");
        Ok(Some(()))
    })
    .await;
    eventually("the pods of the first node are gone", async || {
        let left = pods::list(api, group).await?;
        ensure!(left.is_empty(), "{} left", left.len());
        Ok(Some(()))
    })
    .await;
    pods::create_many(
        api,
        group,
        &format!("{group}-second"),
        0..3,
        Some(second.name()),
    )
    .await;
    let all = pods::running(api, group, 3).await;
    pods::assert_within(&all, &blocks);
    machines::reports(api, second.name(), &all).await;
    pods::delete_all(api, group).await;
}

/// Creates pods that use all addresses of the pool, and returns these pods.
async fn exhaustion_is_told_and_passes(
    stage: &Stage,
    group: &str,
    machine: &Machine,
) -> Vec<Running> {
    let (api, node) = (&stage.api, machine.name());
    pods::ready(api, node, true).await;
    // The pool has eight addresses. Pods can use five: all except the network, gateway and broadcast addresses.
    pods::create_many(api, group, group, 0..5, Some(node)).await;
    let full = pods::running(api, group, 5).await;
    pods::create_many(api, group, &format!("{group}-waits"), 0..2, Some(node)).await;
    let waiting = api.pods.get(&format!("{group}-waits-0")).await.unwrap();
    let uid = waiting.metadata.uid.unwrap();
    let text = api.event(&uid, "FailedCreatePodSandBox").await.unwrap();
    assert!(text.contains(group), "the pool is not named: {text}");
    // Although pods wait, the node must stay ready. The test observes several of the kubelet's heartbeats.
    pods::heartbeats(api, node, 3, || {}).await;
    pods::delete_many(api, group, 0..2).await;
    let all = pods::running(api, group, 5).await;
    assert_eq!(
        all.iter()
            .filter(|it| full.iter().all(|old| old.uid != it.uid))
            .count(),
        2
    );
    pods::assert_unique(&all);
    machines::reports(api, node, &all).await;
    all
}
