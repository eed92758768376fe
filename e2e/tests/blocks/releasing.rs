//! Blocks that nodes release: surplus blocks, and those of pools that no longer select the node.

use std::ops::Range;

use anyhow::Result;
use cadastre_api::Recall;
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::GROUP;
use serde_json::{Value, json};

use crate::{blocks, drains, node, recall, shared};

/// A pool without a gateway, so agents assign all 16 addresses of a block.
fn pool(range: &str, idle: u32, cooldown: u32) -> Value {
    json!({
        "ipv4": {"cidrs": [range], "blockSize": 28, "gateway": "None"},
        "idleSeconds": idle, "cooldownSeconds": cooldown,
        // With these values, agents release only recalled blocks.
        "warm": {"low": 0, "high": 65_536},
    })
}

/// Returns the names `NODE-N` of a node's pods, one for each number in `pods`.
fn pods(node: &str, pods: Range<u32>) -> impl Iterator<Item = String> {
    pods.map(move |pod| format!("{node}-{pod}"))
}

async fn move_to(fixtures: &Fixtures, node: &str, group: &str) -> Result<()> {
    fixtures
        .change_node(node, json!({"metadata": {"labels": {GROUP: group}}}))
        .await?;
    Ok(())
}

#[tokio::test]
async fn idle_surplus_is_recalled_and_the_last_block_stays() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.20.0.0/24", 1, 0);
    fixtures.block_pool("idle", spec).await?;
    node(&fixtures, &agents, "idle", "idle-1").await?;
    let forty = || pods("idle-1", 0..40);
    agents.allocate_all("idle-1", "idle", forty()).await?;
    let had = fixtures.listed("idle-1", 3).await?;

    // Because of the demand of 20 addresses, the node keeps two blocks, although no address is in use.
    fixtures.keep_free("idle", 20).await?;
    agents.free_all("idle-1", forty()).await?;
    let kept = fixtures.listed("idle-1", 2).await?;
    assert!(kept.iter().all(|it| had.contains(it)));
    blocks(&fixtures, "idle", 2).await?;
    fixtures.keep_free("idle", 0).await?;
    let last = fixtures.listed("idle-1", 1).await?;
    assert_eq!(blocks(&fixtures, "idle", 1).await?, last);

    // The node keeps its last block. Other nodes can get the released blocks.
    agents.allocate("idle-1", "idle", "one").await?;
    node(&fixtures, &agents, "idle", "idle-2").await?;
    let many = pods("idle-2", 0..15 * 16);
    agents.allocate_all("idle-2", "idle", many).await?;
    fixtures.listed("idle-2", 15).await?;
    assert_eq!(fixtures.listed("idle-1", 1).await?, last);
    Ok(())
}

#[tokio::test]
async fn a_block_in_use_or_cooling_is_not_released() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.21.0.0/24", 1, 86_400);
    fixtures.block_pool("used", spec).await?;
    node(&fixtures, &agents, "used", "used-1").await?;
    let all = pods("used-1", 0..33);
    let mut addresses = agents.allocate_all("used-1", "used", all).await?;
    let had = fixtures.listed("used-1", 3).await?;
    // All pods except one are deleted, and their addresses cool.
    agents.free_all("used-1", pods("used-1", 0..20)).await?;
    agents.free_all("used-1", pods("used-1", 21..33)).await?;
    let left = addresses.swap_remove(20).remove(0);
    fixtures.in_use("used-1", 1).await?;
    // Waits until a surplus block of another node is released. During this wait, the controller would also recall
    // blocks of the node `used-1`, if it wrongly recalled such blocks.
    let spec = pool("10.21.1.0/24", 1, 0);
    fixtures.block_pool("surplus", spec).await?;
    node(&fixtures, &agents, "surplus", "surplus-1").await?;
    fixtures.listed("surplus-1", 1).await?;
    fixtures.keep_free("surplus", 32).await?;
    fixtures.listed("surplus-1", 2).await?;
    fixtures.keep_free("surplus", 0).await?;
    fixtures.listed("surplus-1", 1).await?;
    assert_eq!(fixtures.listed("used-1", 3).await?, had);

    let cooled = json!({"cooldownSeconds": 0});
    fixtures.change_pool("used", cooled).await?;
    let kept = fixtures.listed("used-1", 1).await?;
    let kept = Cidr::parse_strict(&kept[0]).unwrap();
    let left = Addr::parse_strict(&left).unwrap();
    assert!(
        kept.contains_addr(left),
        "{kept} stays, but {left} is in use"
    );
    fixtures.in_use("used-1", 1).await?;
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_deselected_drains_its_blocks_and_releases_them_when_empty() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.22.0.0/24", 86_400, 0);
    fixtures.block_pool("desel", spec).await?;
    node(&fixtures, &agents, "desel", "desel-1").await?;
    let all = pods("desel-1", 0..17);
    agents.allocate_all("desel-1", "desel", all).await?;
    let had = fixtures.listed("desel-1", 2).await?;
    // One of the two blocks becomes empty. In the other block, one address stays in use.
    agents.free_all("desel-1", pods("desel-1", 1..17)).await?;
    let status = fixtures.in_use("desel-1", 1).await?.status.unwrap();
    assert_eq!(status.blocks.len(), 2);
    let used = status.blocks.iter().find(|it| it.used == 1).unwrap();
    let used = used.cidr.clone();

    move_to(&fixtures, "desel-1", "elsewhere").await?;
    let left = fixtures.listed("desel-1", 1).await?;
    assert_eq!(left, std::slice::from_ref(&used));
    assert!(had.contains(&used));
    assert_eq!(
        recall(&fixtures, "desel-1", &used).await?,
        Some(Recall::Drain)
    );
    assert_eq!(blocks(&fixtures, "desel", 1).await?, left);
    let more = agents.try_allocate("desel-1", "desel", "new").await;
    assert_eq!(more.unwrap(), None);

    agents.free("desel-1", "desel-1-0").await?;
    fixtures.listed("desel-1", 0).await?;
    fixtures.block_gone(&used).await?;
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_selected_again_keeps_its_blocks() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.23.0.0/24", 86_400, 0);
    fixtures.block_pool("again", spec).await?;
    node(&fixtures, &agents, "again", "again-1").await?;
    agents.allocate("again-1", "again", "old").await?;
    let had = fixtures.listed("again-1", 1).await?;
    move_to(&fixtures, "again-1", "elsewhere").await?;
    drains(&fixtures, "again-1").await?;
    move_to(&fixtures, "again-1", "again").await?;
    fixtures
        .subnet_until("again-1", "drains no longer", |it| {
            it.spec
                .blocks
                .iter()
                .any(|it| it.cidr == had[0] && it.recall.is_none())
        })
        .await?;
    agents.allocate("again-1", "again", "new").await?;
    assert_eq!(fixtures.listed("again-1", 1).await?, had);
    Ok(())
}
