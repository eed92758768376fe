//! Blocks that nodes release: surplus blocks, and those of pools that no longer select the node.

use cadastre_api::Recall;
use cadastre_e2e::fixtures::{GROUP, LIMIT};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::{blocks, node, recall, shared};

/// Assigns addresses to `count` pods of a node.
async fn fill(agents: &Agents, node: &str, pool: &str, count: u32) {
    for pod in 0..count {
        agents
            .allocate(node, pool, &format!("{node}-{pod}"))
            .await
            .unwrap();
    }
}

fn empty(agents: &Agents, node: &str, pods: std::ops::Range<u32>) {
    for pod in pods {
        agents.free(node, &format!("{node}-{pod}")).unwrap();
    }
}

async fn move_to(hand: &Fixtures, node: &str, group: &str) {
    let patch = Patch::Merge(json!({"metadata": {"labels": {GROUP: group}}}));
    hand.nodes
        .patch(node, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn idle_surplus_is_given_back_and_the_last_block_stays() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.20.0.0/24"], "blockSize": 28}, "idleSeconds": 1});
    hand.block_pool("idle", spec).await.unwrap();
    node(&hand, &agents, "idle", "idle-1").await;
    fill(&agents, "idle-1", "idle", 40).await;
    let had = hand.listed("idle-1", 3).await.unwrap();

    // The demand of 20 addresses keeps two blocks although none is in use.
    empty(&agents, "idle-1", 0..40);
    agents.warm_up("idle-1").unwrap();
    agents.ask("idle-1", "idle", 20).unwrap();
    let kept = hand.listed("idle-1", 2).await.unwrap();
    assert!(kept.iter().all(|it| had.contains(it)));
    blocks(&hand, "idle", 2).await;
    agents.ask("idle-1", "idle", 0).unwrap();
    let last = hand.listed("idle-1", 1).await.unwrap();
    assert_eq!(blocks(&hand, "idle", 1).await, last);

    // The last block stays with the node; the released ones are free for others.
    fill(&agents, "idle-1", "idle", 1).await;
    node(&hand, &agents, "idle", "idle-2").await;
    agents.ask("idle-2", "idle", 15 * 16).unwrap();
    hand.listed("idle-2", 15).await.unwrap();
    assert_eq!(hand.listed("idle-1", 1).await.unwrap(), last);
}

#[tokio::test]
async fn a_block_in_use_or_cooling_is_not_given_back() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.21.0.0/24"], "blockSize": 28}, "idleSeconds": 1});
    hand.block_pool("used", spec).await.unwrap();
    node(&hand, &agents, "used", "used-1").await;
    fill(&agents, "used-1", "used", 33).await;
    let had = hand.listed("used-1", 3).await.unwrap();
    agents.ask("used-1", "used", 0).unwrap();
    // One pod remains in the second block; the addresses of the others cool.
    empty(&agents, "used-1", 0..20);
    empty(&agents, "used-1", 21..33);
    hand.subnet_until("used-1", "tells that one is left", |it| {
        it.status
            .as_ref()
            .is_some_and(|it| it.blocks.iter().map(|it| it.used).sum::<i64>() == 1)
    })
    .await
    .unwrap();
    // The recall has had time to happen, as another node's surplus block was released meanwhile.
    node(&hand, &agents, "used", "used-2").await;
    agents.ask("used-2", "used", 32).unwrap();
    hand.listed("used-2", 2).await.unwrap();
    agents.ask("used-2", "used", 0).unwrap();
    hand.listed("used-2", 1).await.unwrap();
    assert_eq!(hand.listed("used-1", 3).await.unwrap(), had);

    agents.warm_up("used-1").unwrap();
    let left = hand.listed("used-1", 1).await.unwrap();
    let reports = agents.blocks("used-1").unwrap();
    let report = reports.iter().find(|it| it.cidr == left[0]).unwrap();
    assert_eq!(report.used, 1, "the one in use stays");
}

#[tokio::test]
async fn a_node_that_is_deselected_drains_its_blocks_and_releases_them_when_empty() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.22.0.0/24"], "blockSize": 28}, "idleSeconds": 86400});
    hand.block_pool("desel", spec).await.unwrap();
    node(&hand, &agents, "desel", "desel-1").await;
    fill(&agents, "desel-1", "desel", 17).await;
    let had = hand.listed("desel-1", 2).await.unwrap();
    // The second block is empty, the first one is not.
    empty(&agents, "desel-1", 1..17);
    agents.warm_up("desel-1").unwrap();
    let reports = agents.blocks("desel-1").unwrap();
    let used = reports.iter().find(|it| it.used == 1).unwrap().cidr.clone();

    move_to(&hand, "desel-1", "elsewhere").await;
    let left = hand.listed("desel-1", 1).await.unwrap();
    assert_eq!(left, std::slice::from_ref(&used));
    assert!(had.contains(&used));
    assert_eq!(recall(&hand, "desel-1", &used).await, Some(Recall::Drain));
    assert_eq!(blocks(&hand, "desel", 1).await, left);
    assert!(
        agents
            .try_allocate("desel-1", "desel", "new")
            .unwrap()
            .is_none()
    );

    empty(&agents, "desel-1", 0..1);
    agents.warm_up("desel-1").unwrap();
    hand.listed("desel-1", 0).await.unwrap();
    hand.block_gone(&used).await.unwrap();
}

#[tokio::test]
async fn a_node_that_is_selected_again_keeps_what_it_still_has() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.23.0.0/24"], "blockSize": 28}, "idleSeconds": 86400});
    hand.block_pool("again", spec).await.unwrap();
    node(&hand, &agents, "again", "again-1").await;
    fill(&agents, "again-1", "again", 1).await;
    let had = hand.listed("again-1", 1).await.unwrap();
    move_to(&hand, "again-1", "elsewhere").await;
    hand.subnet_until("again-1", "drains", |it| {
        it.spec
            .blocks
            .iter()
            .all(|it| it.recall == Some(Recall::Drain))
    })
    .await
    .unwrap();
    move_to(&hand, "again-1", "again").await;
    hand.subnet_until("again-1", "drains no longer", |it| {
        it.spec
            .blocks
            .iter()
            .any(|it| it.cidr == had[0] && it.recall.is_none())
    })
    .await
    .unwrap();
    until("the node gives addresses from it", LIMIT, async || {
        let given = agents.try_allocate("again-1", "again", "new")?;
        Ok(given.map(|_| ()))
    })
    .await
    .unwrap();
}
