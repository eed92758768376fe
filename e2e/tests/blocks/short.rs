//! An exhausted pool: what is reported, which nodes' blocks are recalled for which others, and the use of fragments.

use std::collections::BTreeMap;

use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use serde_json::json;

use crate::{blocks, node, shared};

#[tokio::test]
async fn exhaustion_is_told_with_what_to_do_and_so_is_its_end() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.30.0.0/27"], "blockSize": 28}});
    let pool = hand.block_pool("out", spec).await.unwrap();
    let pool_uid = pool.metadata.uid.unwrap();
    for name in ["out-1", "out-2"] {
        node(&hand, &agents, "out", name).await;
        for pod in 0..16 {
            let pod = format!("{name}-{pod}");
            agents.allocate(name, "out", &pod).await.unwrap();
        }
    }
    let third = node(&hand, &agents, "out", "out-3").await;
    let uid = third.metadata.uid.unwrap();
    let note = hand.event(&uid, "WaitingForBlock").await.unwrap();
    assert!(note.contains("\"out\"") && note.contains("IPv4"), "{note}");
    let note = hand.event(&pool_uid, "PoolExhausted").await.unwrap();
    assert!(note.contains("add a CIDR to spec.ipv4.cidrs"), "{note}");
    hand.condition("out", "Exhausted", "True").await.unwrap();
    hand.pool_until("out", "counts the one that waits", |it| {
        it.status.as_ref().is_some_and(|it| it.waiting == Some(1))
    })
    .await
    .unwrap();
    // No block is recalled from a node that uses all of its addresses.
    assert_eq!(hand.listed("out-1", 1).await.unwrap().len(), 1);

    hand.change_pool(
        "out",
        json!({"ipv4": {"cidrs": ["10.30.0.0/27", "10.30.1.0/27"]}}),
    )
    .await
    .unwrap();
    let listed = hand.listed("out-3", 1).await.unwrap();
    assert!(listed[0].starts_with("10.30.1."), "{listed:?}");
    hand.event(&uid, "BlockAllocated").await.unwrap();
    hand.condition("out", "Exhausted", "False").await.unwrap();
    for (uid, reason) in [
        (&uid, "WaitingForBlock"),
        (&uid, "BlockAllocated"),
        (&pool_uid, "PoolExhausted"),
    ] {
        assert_eq!(hand.event_count(uid, reason).await.unwrap(), 1, "{reason}");
    }
}

#[tokio::test]
async fn an_empty_block_of_a_rich_node_is_recalled_for_one_that_waits() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.31.0.0/26"], "blockSize": 28},
        "idleSeconds": 86400,
    });
    hand.block_pool("rich", spec).await.unwrap();
    node(&hand, &agents, "rich", "rich-1").await;
    agents.ask("rich-1", "rich", 64).unwrap();
    let all = hand.listed("rich-1", 4).await.unwrap();
    agents.allocate("rich-1", "rich", "kept").await.unwrap();
    // The node demands all its blocks but uses one address: a node without a block whose pods wait goes first.
    node(&hand, &agents, "rich", "rich-2").await;
    agents.ask("rich-2", "rich", 4).unwrap();
    let given = hand.listed("rich-2", 1).await.unwrap();
    assert!(all.contains(&given[0]));
    let left = hand.listed("rich-1", 3).await.unwrap();
    assert!(!left.contains(&given[0]));
    // For a node that has a block already, no block is recalled that another node demands.
    agents.ask("rich-2", "rich", 17).unwrap();
    let uid = hand.nodes.get("rich-2").await.unwrap().metadata.uid;
    hand.event(&uid.unwrap(), "WaitingForBlock").await.unwrap();
    assert_eq!(hand.listed("rich-1", 3).await.unwrap(), left);
    // A block that the other node no longer demands is recalled.
    agents.ask("rich-1", "rich", 32).unwrap();
    hand.listed("rich-2", 2).await.unwrap();
    hand.listed("rich-1", 2).await.unwrap();
    blocks(&hand, "rich", 4).await;
}

#[tokio::test]
async fn scarce_blocks_are_dealt_out_evenly_and_every_node_gets_a_first_one() {
    let (_, hand, agents) = shared().await;
    // The first five nodes demand everything before the others exist.
    let spec =
        json!({"ipv4": {"cidrs": ["10.32.0.0/24"], "blockSize": 28}, "firstBlock": "OnDemand"});
    let mut names: Vec<String> = (0..8).map(|i| format!("fair-{i}")).collect();
    for name in &names {
        node(&hand, &agents, "fair", name).await;
        agents.ask(name, "fair", 10_000).unwrap();
    }
    hand.block_pool("fair", spec).await.unwrap();
    names.push("fair-late".to_owned());
    node(&hand, &agents, "fair", "fair-late").await;
    agents.ask("fair-late", "fair", 1).unwrap();
    let counts = until("every node has a block", LIMIT, async || {
        let mut counts = BTreeMap::new();
        for name in &names {
            let subnet = hand.subnets.get_opt(name).await?;
            let count = subnet.map_or(0, |it| it.spec.blocks.len());
            counts.insert(name.clone(), count);
        }
        anyhow::ensure!(counts.values().all(|it| *it > 0), "{counts:?}");
        Ok(Some(counts))
    })
    .await
    .unwrap();
    assert!(counts.values().sum::<usize>() <= 16, "{counts:?}");
}

#[tokio::test]
async fn after_a_change_of_size_smaller_blocks_fill_what_the_large_ones_leave() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.33.0.0/26"], "blockSize": 28}, "idleSeconds": 86400});
    hand.block_pool("frag", spec).await.unwrap();
    for name in ["frag-1", "frag-2", "frag-3"] {
        node(&hand, &agents, "frag", name).await;
        hand.listed(name, 1).await.unwrap();
        for pod in 0..16 {
            let pod = format!("{name}-{pod}");
            agents.allocate(name, "frag", &pod).await.unwrap();
        }
    }
    // Three of four /28 are allocated: a /27 no longer fits, only the remaining /28 does.
    let changed = hand
        .change_pool("frag", json!({"ipv4": {"blockSize": 27}}))
        .await;
    let generation = changed.unwrap().metadata.generation;
    hand.pool_until("frag", "the change is taken in", |it| {
        it.status.as_ref().and_then(|it| it.observed_generation) == generation
    })
    .await
    .unwrap();
    node(&hand, &agents, "frag", "frag-4").await;
    let listed = hand.listed("frag-4", 1).await.unwrap();
    assert!(listed[0].ends_with("/28"), "{listed:?}");
    for pod in 0..16 {
        let pod = format!("frag-4-{pod}");
        agents.allocate("frag-4", "frag", &pod).await.unwrap();
    }
    let fifth = node(&hand, &agents, "frag", "frag-5").await;
    hand.event(&fifth.metadata.uid.unwrap(), "WaitingForBlock")
        .await
        .unwrap();
}

#[tokio::test]
async fn the_last_block_of_an_idle_node_goes_to_a_pod_that_waits() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.34.0.0/24"]}});
    hand.block_pool("last", spec).await.unwrap();
    for name in ["last-1", "last-2", "last-3", "last-4"] {
        node(&hand, &agents, "last", name).await;
        hand.listed(name, 1).await.unwrap();
    }
    let fifth = node(&hand, &agents, "last", "last-5").await;
    let uid = fifth.metadata.uid.unwrap();
    hand.event(&uid, "WaitingForBlock").await.unwrap();
    let serve = async |node: &str| {
        agents.allocate(node, "last", node).await.unwrap();
        // The node demands nothing more.
        agents.ask(node, "last", 0).unwrap();
        hand.listed(node, 1).await.unwrap()
    };
    let fifths = serve("last-5").await;
    let mut without = Vec::new();
    for name in ["last-1", "last-2", "last-3", "last-4"] {
        if hand.subnets.get(name).await.unwrap().spec.blocks.is_empty() {
            without.push(name);
        }
    }
    let [lent] = without[..] else {
        panic!("one has lent its block, not {without:?}");
    };
    // When that node has a pod, it gets a block again, recalled from a node without pods.
    let again = serve(lent).await;
    assert_ne!(again, fifths);
    assert_eq!(hand.listed("last-5", 1).await.unwrap(), fifths);
    blocks(&hand, "last", 4).await;
}

#[tokio::test]
async fn a_manual_pool_serves_one_node_after_the_other_and_is_empty_in_the_end() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.35.0.0/26"], "blockSize": 28},
        "assignment": "Manual", "idleSeconds": 86400,
    });
    hand.block_pool("turns", spec).await.unwrap();
    for n in 1..=6 {
        let name = format!("turns-{n}");
        node(&hand, &agents, "turns", &name).await;
        agents.allocate(&name, "turns", "pod").await.unwrap();
        agents.ask(&name, "turns", 0).unwrap();
        agents.free(&name, "pod").unwrap();
        agents.warm_up(&name).unwrap();
    }
    blocks(&hand, "turns", 4).await;
    hand.change_pool("turns", json!({"idleSeconds": 1}))
        .await
        .unwrap();
    blocks(&hand, "turns", 0).await;
}
