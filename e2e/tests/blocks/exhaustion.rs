//! An exhausted pool: what is reported, which nodes give up blocks, which waiting nodes get them, and how fragments are
//! used.

use std::collections::BTreeMap;

use anyhow::Result;
use cadastre_api::IPPool;
use cadastre_core::Addr;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use futures::future::join_all;
use serde_json::{Value, json};

use crate::{blocks, node, shared};

/// A pool without a gateway, so agents assign all 16 addresses of a block. Blocks are recalled only for other nodes.
fn pool(range: &str) -> Value {
    json!({
        "ipv4": {"cidrs": [range], "blockSize": 28, "gateway": "None"},
        "idleSeconds": 86400, "warm": {"low": 0, "high": 65_536},
    })
}

/// Waits until the pool's status counts `count` waiting nodes.
async fn waiting(fixtures: &Fixtures, pool: &str, count: i64) -> Result<()> {
    let is = |it: &IPPool| {
        it.status
            .as_ref()
            .is_some_and(|it| it.waiting == Some(count))
    };
    let what = format!("{count} nodes wait");
    fixtures.pool_until(pool, &what, is).await?;
    Ok(())
}

#[tokio::test]
async fn exhaustion_and_its_end_are_reported_with_what_to_do() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.30.0.0/27");
    let pool = fixtures.block_pool("out", spec).await?;
    let pool_uid = pool.metadata.uid.unwrap();
    for name in ["out-1", "out-2"] {
        node(&fixtures, &agents, "out", name).await?;
        let pods = (0..16).map(|pod| format!("{name}-{pod}"));
        agents.allocate_all(name, "out", pods).await?;
    }
    let third = node(&fixtures, &agents, "out", "out-3").await?;
    let uid = third.metadata.uid.unwrap();
    let note = fixtures.event(&uid, "WaitingForBlock").await?;
    assert!(note.contains("\"out\"") && note.contains("IPv4"), "{note}");
    let note = fixtures.event(&pool_uid, "PoolExhausted").await?;
    assert!(note.contains("add a CIDR to spec.ipv4.cidrs"), "{note}");
    fixtures.condition("out", "Exhausted", "True").await?;
    waiting(&fixtures, "out", 1).await?;
    // No block is recalled from a node that uses all of its addresses.
    assert_eq!(fixtures.listed("out-1", 1).await?.len(), 1);

    fixtures
        .change_pool(
            "out",
            json!({"ipv4": {"cidrs": ["10.30.0.0/27", "10.30.1.0/27"]}}),
        )
        .await?;
    let listed = fixtures.listed("out-3", 1).await?;
    assert!(listed[0].starts_with("10.30.1."), "{listed:?}");
    fixtures.event(&uid, "BlockAllocated").await?;
    fixtures.condition("out", "Exhausted", "False").await?;
    for (uid, reason) in [
        (&uid, "WaitingForBlock"),
        (&uid, "BlockAllocated"),
        (&pool_uid, "PoolExhausted"),
    ] {
        assert_eq!(fixtures.event_count(uid, reason).await?, 1, "{reason}");
    }
    Ok(())
}

#[tokio::test]
async fn an_empty_block_of_a_node_with_several_is_recalled_for_a_node_that_waits() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let mut spec = pool("10.31.0.0/26");
    spec["cooldownSeconds"] = json!(0);
    spec["warm"]["low"] = json!(16);
    fixtures.block_pool("rich", spec).await?;
    node(&fixtures, &agents, "rich", "rich-1").await?;
    let mut pods: Vec<(Addr, String)> = Vec::new();
    // The blocks are filled one after the other. If the node got two blocks at the same time, both might get pods, and
    // no block would be empty.
    for filled in 0..3 {
        fixtures.listed("rich-1", filled + 1).await?;
        let names = (0..16).map(|pod| format!("rich-1-{filled}-{pod}"));
        let addresses = agents.allocate_all("rich-1", "rich", names.clone()).await?;
        let addresses = addresses.iter();
        let addresses = addresses.map(|it| Addr::parse_strict(&it[0]).unwrap());
        pods.extend(addresses.zip(names));
    }
    pods.sort();
    let all = fixtures.listed("rich-1", 4).await?;
    fixtures.in_use("rich-1", 48).await?;
    // The first node demands its fourth block, which is empty. But a node that has no block while its pods wait has
    // precedence.
    let second = node(&fixtures, &agents, "rich", "rich-2").await?;
    agents.allocate("rich-2", "rich", "pod").await?;
    let recalled = fixtures.listed("rich-2", 1).await?;
    assert!(all.contains(&recalled[0]));
    let left = fixtures.listed("rich-1", 3).await?;
    assert!(!left.contains(&recalled[0]));
    // At this point both nodes want more free addresses than they have, so the pool counts two waiting nodes.
    fixtures.in_use("rich-2", 1).await?;
    waiting(&fixtures, "rich", 2).await?;
    let uid = second.metadata.uid.unwrap();
    fixtures.event(&uid, "WaitingForBlock").await?;
    // The first node still demands the block that becomes empty, and the second node already has a block. So the block
    // is not recalled for the second node.
    let mut free_block = async || {
        let block = pods.split_off(pods.len() - 16).into_iter();
        let block = block.map(|(_, pod)| pod);
        agents.free_all("rich-1", block).await.unwrap();
    };
    free_block().await;
    waiting(&fixtures, "rich", 1).await?;
    assert_eq!(fixtures.listed("rich-1", 3).await?, left);
    // Once the first node demands only two blocks, its third block is recalled for the second node.
    free_block().await;
    fixtures.listed("rich-2", 2).await?;
    fixtures.listed("rich-1", 2).await?;
    blocks(&fixtures, "rich", 4).await?;
    Ok(())
}

#[tokio::test]
async fn of_scarce_blocks_every_node_gets_a_first_one() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    // The first eight nodes demand more than the pool has, before the last node exists.
    let mut spec = pool("10.32.0.0/24");
    spec["firstBlock"] = json!("OnDemand");
    spec["warm"]["low"] = json!(10_000);
    let mut names: Vec<String> = (0..8).map(|i| format!("fair-{i}")).collect();
    for name in &names {
        node(&fixtures, &agents, "fair", name).await?;
    }
    let pods_wait = join_all(
        names
            .iter()
            .map(|name| agents.allocate(name, "fair", "pod")),
    );
    let (pods, pool) = tokio::join!(pods_wait, fixtures.block_pool("fair", spec));
    pool.unwrap();
    assert!(pods.iter().all(Result::is_ok), "{pods:?}");
    blocks(&fixtures, "fair", 16).await?;
    names.push("fair-late".to_owned());
    node(&fixtures, &agents, "fair", "fair-late").await?;
    agents.allocate("fair-late", "fair", "pod").await?;
    let counts = until("every node has a block", LIMIT, async || {
        let mut counts = BTreeMap::new();
        for name in &names {
            let subnet = fixtures.subnets.get_opt(name).await?;
            let count = subnet.map_or(0, |it| it.spec.blocks.len());
            counts.insert(name.clone(), count);
        }
        anyhow::ensure!(counts.values().all(|it| *it > 0), "{counts:?}");
        Ok(Some(counts))
    })
    .await?;
    assert!(counts.values().sum::<usize>() <= 16, "{counts:?}");
    Ok(())
}

#[tokio::test]
async fn after_a_change_of_block_size_smaller_blocks_are_allocated_where_large_ones_do_not_fit()
-> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = pool("10.33.0.0/26");
    fixtures.block_pool("frag", spec).await?;
    for name in ["frag-1", "frag-2", "frag-3"] {
        node(&fixtures, &agents, "frag", name).await?;
        fixtures.listed(name, 1).await?;
        let pods = (0..16).map(|pod| format!("{name}-{pod}"));
        agents.allocate_all(name, "frag", pods).await?;
    }
    // Three of the four /28 are allocated. A /27 no longer fits, but the remaining /28 does.
    fixtures
        .change_pool_observed("frag", json!({"ipv4": {"blockSize": 27}}))
        .await?;
    node(&fixtures, &agents, "frag", "frag-4").await?;
    let listed = fixtures.listed("frag-4", 1).await?;
    assert!(listed[0].ends_with("/28"), "{listed:?}");
    let pods = (0..16).map(|pod| format!("frag-4-{pod}"));
    agents.allocate_all("frag-4", "frag", pods).await?;
    let fifth = node(&fixtures, &agents, "frag", "frag-5").await?;
    fixtures.event_about(&fifth, "WaitingForBlock").await?;
    Ok(())
}

#[tokio::test]
async fn the_last_block_of_an_idle_node_is_recalled_for_a_pod_that_waits() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.34.0.0/24"]}});
    fixtures.block_pool("last", spec).await?;
    for name in ["last-1", "last-2", "last-3", "last-4"] {
        node(&fixtures, &agents, "last", name).await?;
        fixtures.listed(name, 1).await?;
    }
    let fifth = node(&fixtures, &agents, "last", "last-5").await?;
    let uid = fifth.metadata.uid.unwrap();
    fixtures.event(&uid, "WaitingForBlock").await?;
    let serve = async |node: &str| {
        agents.allocate(node, "last", node).await.unwrap();
        fixtures.listed(node, 1).await.unwrap()
    };
    let fifths = serve("last-5").await;
    let mut without = Vec::new();
    for name in ["last-1", "last-2", "last-3", "last-4"] {
        if fixtures.subnets.get(name).await?.spec.blocks.is_empty() {
            without.push(name);
        }
    }
    let [donor] = without[..] else {
        panic!("one node has released its block, not {without:?}");
    };
    // As soon as the node without a block has a pod, it gets a block, which is recalled from a node without pods.
    let again = serve(donor).await;
    assert_ne!(again, fifths);
    assert_eq!(fixtures.listed("last-5", 1).await?, fifths);
    blocks(&fixtures, "last", 4).await?;
    Ok(())
}

#[tokio::test]
async fn blocks_of_a_manual_pool_move_from_node_to_node_and_are_released_when_idle() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.35.0.0/26"], "blockSize": 28},
        "assignment": "Manual", "idleSeconds": 86400, "cooldownSeconds": 0,
    });
    fixtures.block_pool("turns", spec).await?;
    for n in 1..=6 {
        let name = format!("turns-{n}");
        node(&fixtures, &agents, "turns", &name).await?;
        agents.allocate(&name, "turns", "pod").await?;
        agents.free(&name, "pod").await?;
    }
    blocks(&fixtures, "turns", 4).await?;
    fixtures
        .change_pool("turns", json!({"idleSeconds": 1}))
        .await?;
    blocks(&fixtures, "turns", 0).await?;
    Ok(())
}
