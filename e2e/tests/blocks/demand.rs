//! Nodes that demand more: many blocks, limits, both families or neither, reserved addresses.

use std::collections::BTreeSet;

use cadastre_api::NodeSubnet;
use cadastre_e2e::fixtures::condition;
use serde_json::json;

use crate::{blocks, node, shared};

fn family(subnet: &NodeSubnet, v6: bool) -> usize {
    let cidrs = subnet.spec.blocks.iter().map(|it| &it.cidr);
    cidrs.filter(|it| it.contains(':') == v6).count()
}

#[tokio::test]
async fn a_demand_for_many_is_met_whole_and_a_repeated_one_changes_nothing() {
    let (_, hand, agents) = shared().await;
    // Without gateway, agents assign all 16 addresses of a block.
    let ipv4 = json!({"cidrs": ["10.10.0.0/20"], "blockSize": 28, "gateway": "None"});
    let spec = json!({"ipv4": ipv4});
    hand.block_pool("many", spec).await.unwrap();
    node(&hand, &agents, "many", "many-1").await;
    hand.listed("many-1", 1).await.unwrap();
    agents.ask("many-1", "many", 640).unwrap();
    let listed = hand.listed("many-1", 40).await.unwrap();
    let distinct: BTreeSet<&String> = listed.iter().collect();
    assert_eq!(distinct.len(), 40);
    assert_eq!(blocks(&hand, "many", 40).await, listed);
    // The same demand again, and smaller ones: the existing blocks are enough.
    for demand in [639, 640, 625] {
        agents.ask("many-1", "many", demand).unwrap();
    }
    agents.ask("many-1", "many", 641).unwrap();
    hand.listed("many-1", 41).await.unwrap();
    let mut given = BTreeSet::new();
    for pod in 0..641 {
        let pod = format!("pod-{pod}");
        given.extend(agents.allocate("many-1", "many", &pod).await.unwrap());
    }
    assert_eq!(given.len(), 641);
}

#[tokio::test]
async fn max_blocks_per_node_is_kept_to_for_each_family() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.11.0.0/22"], "blockSize": 28},
        "ipv6": {"cidrs": ["fd00:11::/112"], "blockSize": 124},
        "maxBlocksPerNode": 3,
    });
    hand.block_pool("most", spec).await.unwrap();
    node(&hand, &agents, "most", "most-1").await;
    agents.ask("most-1", "most", 1000).unwrap();
    let subnet = hand
        .subnet_until("most-1", "lists three of each", |it| {
            it.spec.blocks.len() == 6
        })
        .await
        .unwrap();
    assert_eq!((family(&subnet, false), family(&subnet, true)), (3, 3));
    // A raised limit has effect at once.
    hand.change_pool("most", json!({"maxBlocksPerNode": 5}))
        .await
        .unwrap();
    hand.listed("most-1", 10).await.unwrap();
    // A node keeps blocks beyond a lowered limit.
    let changed = hand
        .change_pool("most", json!({"maxBlocksPerNode": 1}))
        .await;
    let generation = changed.unwrap().metadata.generation;
    hand.pool_until("most", "the change is taken in", |it| {
        it.status.as_ref().and_then(|it| it.observed_generation) == generation
    })
    .await
    .unwrap();
    hand.listed("most-1", 10).await.unwrap();
}

#[tokio::test]
async fn a_pool_of_both_families_gives_a_block_of_each_or_none() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.12.0.0/16"]},
        "ipv6": {"cidrs": ["fd00:12::/121"], "blockSize": 122},
        "idleSeconds": 86400,
    });
    hand.block_pool("dual", spec).await.unwrap();
    for name in ["dual-1", "dual-2"] {
        node(&hand, &agents, "dual", name).await;
        let subnet = hand
            .subnet_until(name, "lists one of each", |it| it.spec.blocks.len() == 2)
            .await
            .unwrap();
        assert_eq!((family(&subnet, false), family(&subnet, true)), (1, 1));
    }
    let given = agents.allocate("dual-1", "dual", "web").await.unwrap();
    assert!(given.len() == 2 && given[0].contains('.') && given[1].contains(':'));
    let third = node(&hand, &agents, "dual", "dual-3").await;
    let note = hand
        .event(&third.metadata.uid.unwrap(), "WaitingForBlock")
        .await
        .unwrap();
    assert!(note.contains("IPv6") && note.contains("\"dual\""), "{note}");
    assert_eq!(hand.blocks_of("dual").await.unwrap().len(), 4);
    let subnet = hand.subnet_until("dual-3", "exists", |_| true).await;
    assert!(subnet.unwrap().spec.blocks.is_empty());

    let more = json!({"ipv6": {"cidrs": ["fd00:12::/121", "fd00:12::1:0/121"]}});
    hand.change_pool("dual", more).await.unwrap();
    let listed = hand.listed("dual-3", 2).await.unwrap();
    assert!(
        listed[0].starts_with("10.12.") && listed[1].starts_with("fd00:12::1:"),
        "{listed:?}"
    );
    hand.condition("dual", "Exhausted", "False").await.unwrap();
}

#[tokio::test]
async fn reserved_addresses_are_told_to_the_node_and_do_not_count() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.13.0.0/24"], "blockSize": 26},
        // One whole block, the first address of three others, and ten in the middle of the last of them.
        "reserved": ["10.13.0.0/26", "10.13.0.64", "10.13.0.128", "10.13.0.192", "10.13.0.200-10.13.0.209"],
        "maxBlocksPerNode": 4,
    });
    hand.block_pool("keep", spec).await.unwrap();
    let only = node(&hand, &agents, "keep", "keep-1").await;
    let usable = 63 + 63 + 53;
    agents.ask("keep-1", "keep", usable).unwrap();
    let listed = hand.listed("keep-1", 3).await.unwrap();
    assert!(!listed.contains(&"10.13.0.0/26".to_owned()), "{listed:?}");
    let mut given = BTreeSet::new();
    for pod in 0..usable {
        let pod = format!("pod-{pod}");
        given.extend(agents.allocate("keep-1", "keep", &pod).await.unwrap());
    }
    assert_eq!(given.len() as u64, usable);
    for address in ["10.13.0.64", "10.13.0.192", "10.13.0.205"] {
        assert!(!given.contains(address), "{address} is reserved");
    }
    let uid = only.metadata.uid.unwrap();
    assert!(
        agents
            .try_allocate("keep-1", "keep", "one-more")
            .unwrap()
            .is_none()
    );
    hand.event(&uid, "WaitingForBlock").await.unwrap();

    // A new entry takes effect for free addresses; an address in use stays in use.
    let subnet = hand.subnets.get("keep-1").await.unwrap();
    let block = subnet
        .spec
        .blocks
        .iter()
        .find(|it| it.cidr == "10.13.0.64/26");
    assert_eq!(block.unwrap().reserved, ["10.13.0.64"]);
    hand.change_pool("keep", json!({"reserved": ["10.13.0.64-10.13.0.70"]}))
        .await
        .unwrap();
    hand.subnet_until("keep-1", "tells what is reserved now", |it| {
        let block = it.spec.blocks.iter().find(|it| it.cidr == "10.13.0.64/26");
        block.is_some_and(|it| it.reserved == ["10.13.0.64-10.13.0.70"])
    })
    .await
    .unwrap();
    // An address that is no longer reserved can be assigned.
    agents.allocate("keep-1", "keep", "one-more").await.unwrap();
}

#[tokio::test]
async fn a_pool_says_when_it_is_nearly_exhausted() {
    let (_, hand, agents) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.14.0.0/24"], "blockSize": 28, "gateway": "None"},
        "nearlyExhaustedPercent": 50,
    });
    let pool = hand.block_pool("near", spec).await.unwrap();
    node(&hand, &agents, "near", "near-1").await;
    agents.ask("near-1", "near", 100).unwrap();
    hand.listed("near-1", 7).await.unwrap();
    hand.condition("near", "NearlyExhausted", "False")
        .await
        .unwrap();
    agents.ask("near-1", "near", 128).unwrap();
    hand.condition("near", "NearlyExhausted", "True")
        .await
        .unwrap();
    hand.event(&pool.metadata.uid.unwrap(), "PoolNearlyExhausted")
        .await
        .unwrap();
    let pool = hand.pools.get("near").await.unwrap();
    assert_eq!(condition(&pool, "Exhausted").unwrap().status, "False");
}
