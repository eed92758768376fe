//! Pools that change or are deleted while nodes have blocks of them.

use std::time::Duration;

use anyhow::ensure;
use cadastre_api::{FINALIZER, Recall};
use cadastre_e2e::fixtures::{condition, gone};
use cadastre_e2e::wait::until;
use kube::api::DeleteParams;
use serde_json::json;

use crate::{blocks, node, recall, shared};

const LIMIT: Duration = Duration::from_secs(180);

#[tokio::test]
async fn a_disabled_pool_gives_no_block_and_nodes_use_on_what_they_have() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.40.0.0/24"], "blockSize": 28}, "cooldownSeconds": 41});
    hand.block_pool("halt", spec).await.unwrap();
    node(&hand, &agents, "halt", "halt-1").await;
    let had = hand.listed("halt-1", 1).await.unwrap();
    hand.change_pool("halt", json!({"disabled": true}))
        .await
        .unwrap();
    hand.condition("halt", "Ready", "False").await.unwrap();
    for pod in 0..16 {
        let pod = format!("pod-{pod}");
        agents.allocate("halt-1", "halt", &pod).await.unwrap();
    }
    assert!(
        agents
            .try_allocate("halt-1", "halt", "more")
            .unwrap()
            .is_none()
    );
    let subnet = hand.subnet_until("halt-1", "has asked for more", |it| {
        let pools = it.status.as_ref().map(|it| it.pools.clone());
        pools.is_some_and(|it| it.iter().any(|it| it.demand == 17))
    });
    subnet.await.unwrap();
    assert_eq!(recall(&hand, "halt-1", &had[0]).await, None);
    assert_eq!(hand.listed("halt-1", 1).await.unwrap(), had);
    let still = hand.subnets.get("halt-1").await.unwrap().spec.pools;
    let still: Vec<(&str, bool, u32)> = still
        .iter()
        .map(|it| (it.name.as_str(), it.retained, it.terms.cooldown_seconds))
        .collect();
    assert_eq!(still, [("halt", true, 41)]);
    hand.change_pool("halt", json!({"disabled": false}))
        .await
        .unwrap();
    hand.listed("halt-1", 2).await.unwrap();
}

#[tokio::test]
async fn what_a_range_taken_out_still_holds_drains_and_the_rest_of_the_pool_serves() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.41.0.0/28", "10.41.1.0/28"], "blockSize": 28}});
    hand.block_pool("part", spec).await.unwrap();
    node(&hand, &agents, "part", "part-1").await;
    for pod in 0..32 {
        let pod = format!("pod-{pod}");
        agents.allocate("part-1", "part", &pod).await.unwrap();
    }
    hand.listed("part-1", 2).await.unwrap();
    let cidrs = json!({"ipv4": {"cidrs": ["10.41.1.0/28", "10.41.2.0/28"]}});
    hand.change_pool("part", cidrs).await.unwrap();
    hand.subnet_until("part-1", "drains the one that lies outside", |it| {
        let drains = it.spec.blocks.iter().filter(|it| it.recall.is_some());
        drains.map(|it| it.cidr.as_str()).collect::<Vec<_>>() == ["10.41.0.0/28"]
    })
    .await
    .unwrap();
    let shrinking = hand.condition("part", "Shrinking", "True").await.unwrap();
    assert!(!shrinking.message.is_empty());
    // The node gets another block in place of the draining one.
    let given = agents.allocate("part-1", "part", "more").await.unwrap();
    assert!(given[0].starts_with("10.41.2."), "{given:?}");
    for pod in 0..32 {
        agents.free("part-1", &format!("pod-{pod}")).unwrap();
    }
    agents.warm_up("part-1").unwrap();
    hand.block_gone("10.41.0.0/28").await.unwrap();
    hand.condition("part", "Shrinking", "False").await.unwrap();
}

#[tokio::test]
async fn a_deleted_pool_stays_until_its_last_block_is_empty_and_gone() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.42.0.0/24"], "blockSize": 28}, "quarantineSeconds": 1,
    });
    hand.block_pool("end", spec).await.unwrap();
    for name in ["end-1", "end-2"] {
        node(&hand, &agents, "end", name).await;
        hand.listed(name, 1).await.unwrap();
    }
    agents.allocate("end-1", "end", "web").await.unwrap();
    hand.subnet_until("end-1", "tells of the pod", |it| {
        it.status
            .as_ref()
            .is_some_and(|it| it.blocks.iter().map(|it| it.used).sum::<i64>() == 1)
    })
    .await
    .unwrap();
    // A block in use keeps the pool from going, even if the spec no longer contains the block's range.
    let elsewhere = json!({"ipv4": {"cidrs": ["10.42.1.0/24"]}});
    hand.change_pool("end", elsewhere).await.unwrap();
    hand.pools
        .delete("end", &DeleteParams::default())
        .await
        .unwrap();
    hand.condition("end", "Terminating", "True").await.unwrap();
    hand.listed("end-2", 0).await.unwrap();
    let left = hand.listed("end-1", 1).await.unwrap();
    assert_eq!(blocks(&hand, "end", 1).await, left);
    assert_eq!(recall(&hand, "end-1", &left[0]).await, Some(Recall::Drain));
    let pool = hand.pools.get("end").await.unwrap();
    assert_eq!(pool.metadata.finalizers.unwrap(), [FINALIZER]);
    agents.free("end-1", "web").unwrap();
    agents.warm_up("end-1").unwrap();
    gone(&hand.pools, "end").await.unwrap();
    blocks(&hand, "end", 0).await;
}

#[tokio::test]
async fn a_dead_nodes_block_holds_the_pool_until_its_rest_is_over() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.43.0.0/24"]}, "quarantineSeconds": 8});
    hand.block_pool("wake", spec).await.unwrap();
    node(&hand, &agents, "wake", "wake-1").await;
    let had = hand.listed("wake-1", 1).await.unwrap();
    agents.leave("wake-1");
    hand.delete_node("wake-1").await.unwrap();
    hand.pools
        .delete("wake", &DeleteParams::default())
        .await
        .unwrap();
    let terminating = hand.condition("wake", "Terminating", "True").await.unwrap();
    assert!(!terminating.message.is_empty());
    gone(&hand.pools, "wake").await.unwrap();
    hand.block_gone(&had[0]).await.unwrap();
    hand.subnet_gone("wake-1").await.unwrap();
}

#[tokio::test]
async fn of_two_that_overlap_the_newer_gives_nothing_until_the_older_is_gone() {
    let (_, hand, agents) = shared().await;
    let first = json!({"ipv4": {"cidrs": ["10.44.0.0/25"]}, "quarantineSeconds": 0});
    hand.block_pool("lap-1", first).await.unwrap();
    hand.condition("lap-1", "Ready", "True").await.unwrap();
    node(&hand, &agents, "lap", "lap-a").await;
    let had = hand.listed("lap-a", 1).await.unwrap();
    let second = json!({
        "ipv4": {"cidrs": ["10.44.0.0/24"]}, "priority": 9,
        "nodeSelector": {"matchLabels": {"group": "over"}},
    });
    hand.block_pool("lap-2", second).await.unwrap();
    let overlapping = hand
        .condition("lap-2", "Overlapping", "True")
        .await
        .unwrap();
    assert!(
        overlapping.message.contains("lap-1"),
        "{}",
        overlapping.message
    );
    node(&hand, &agents, "over", "over-1").await;
    agents.ask("over-1", "lap-2", 1).unwrap();
    agents.allocate("lap-a", "lap-1", "web").await.unwrap();
    assert_eq!(hand.blocks_of("lap-2").await.unwrap(), Vec::<String>::new());

    hand.pools
        .delete("lap-1", &DeleteParams::default())
        .await
        .unwrap();
    hand.subnet_until("lap-a", "drains", |it| {
        it.spec
            .blocks
            .iter()
            .all(|it| it.recall == Some(Recall::Drain))
    })
    .await
    .unwrap();
    agents.free("lap-a", "web").unwrap();
    agents.warm_up("lap-a").unwrap();
    gone(&hand.pools, "lap-1").await.unwrap();
    hand.condition("lap-2", "Overlapping", "False")
        .await
        .unwrap();
    let listed = hand.listed("over-1", 1).await.unwrap();
    assert_eq!(blocks(&hand, "lap-2", 1).await, listed);
    hand.block_gone(&had[0]).await.ok();
}

#[tokio::test]
async fn two_pools_may_swap_their_ranges_while_nodes_have_blocks_of_both() {
    let (stage, hand, agents) = shared().await;
    for (name, range) in [("swapa", "10.45.0.0/24"), ("swapb", "10.45.1.0/24")] {
        let spec = json!({"ipv4": {"cidrs": [range], "blockSize": 28}});
        hand.block_pool(name, spec).await.unwrap();
        let node_name = format!("{name}-1");
        node(&hand, &agents, name, &node_name).await;
        hand.listed(&node_name, 1).await.unwrap();
        agents.allocate(&node_name, name, "old").await.unwrap();
    }
    let pool = |name: &str, range: &str| {
        json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": name},
            "spec": {
                "ipv4": {"cidrs": [range], "blockSize": 28},
                "nodeSelector": {"matchLabels": {"group": name}},
            },
        })
    };
    let both = format!(
        "{}\n---\n{}",
        pool("swapa", "10.45.1.0/24"),
        pool("swapb", "10.45.0.0/24")
    );
    let args = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
    stage
        .control_plane
        .kubectl_stdin(&args, &both)
        .await
        .unwrap();
    for (name, old, new) in [
        ("swapa-1", "10.45.0.", "10.45.1."),
        ("swapb-1", "10.45.1.", "10.45.0."),
    ] {
        // The block of the old range drains, and the node has a block of the new range.
        hand.subnet_until(name, "drains the old one and has a new one", |it| {
            let of = |drains: bool, prefix: &str| {
                it.spec.blocks.iter().any(|it| {
                    (it.recall == Some(Recall::Drain)) == drains && it.cidr.starts_with(prefix)
                })
            };
            of(true, old) && of(false, new)
        })
        .await
        .unwrap();
        // The agent has its own watch, which may lag behind the one above.
        until("the agent knows of the new one", LIMIT, async || {
            let known = agents.blocks(name)?;
            ensure!(known.iter().any(|it| it.cidr.starts_with(new)), "{known:?}");
            Ok(Some(()))
        })
        .await
        .unwrap();
        let pool = name.trim_end_matches("-1");
        let given = agents.allocate(name, pool, "new").await.unwrap();
        assert!(given[0].starts_with(new), "{given:?}");
        agents.free(name, "old").unwrap();
        agents.warm_up(name).unwrap();
    }
    for (name, new) in [("swapa", "10.45.1."), ("swapb", "10.45.0.")] {
        let listed = hand.listed(&format!("{name}-1"), 1).await.unwrap();
        assert!(listed[0].starts_with(new), "{listed:?}");
        assert_eq!(blocks(&hand, name, 1).await, listed);
        let pool = hand.pools.get(name).await.unwrap();
        assert_eq!(condition(&pool, "Overlapping").unwrap().status, "False");
    }
}
