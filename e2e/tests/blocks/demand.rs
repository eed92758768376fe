//! Nodes whose demand exceeds their blocks. Subjects: many blocks, limits, pools of two families, reserved addresses.

use std::collections::BTreeSet;

use anyhow::Result;
use cadastre_api::{NodeSubnet, NodeSubnetStatus};
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::condition;
use serde_json::json;

use crate::{blocks, node, shared};

fn family(subnet: &NodeSubnet, v6: bool) -> usize {
    let cidrs = subnet.spec.blocks.iter().map(|it| &it.cidr);
    cidrs.filter(|it| it.contains(':') == v6).count()
}

#[tokio::test]
async fn a_large_demand_is_met_in_full_and_a_repeated_one_changes_nothing() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    // Without a gateway, agents assign all 16 addresses of a block.
    let ipv4 = json!({"cidrs": ["10.10.0.0/20"], "blockSize": 28, "gateway": "None"});
    let warm = json!({"low": 0, "high": 65_536});
    let spec = json!({"ipv4": ipv4, "warm": warm});
    fixtures.block_pool("many", spec).await?;
    node(&fixtures, &agents, "many", "many-1").await?;
    fixtures.listed("many-1", 1).await?;
    fixtures.keep_free("many", 640).await?;
    let listed = fixtures.listed("many-1", 40).await?;
    let distinct: BTreeSet<&String> = listed.iter().collect();
    assert_eq!(distinct.len(), 40);
    assert_eq!(blocks(&fixtures, "many", 40).await?, listed);
    // Each of these demands needs 40 blocks, which the node already has.
    for low in [639, 640, 625] {
        fixtures.keep_free("many", low).await?;
        demands(&fixtures, "many-1", low).await?;
    }
    fixtures.keep_free("many", 641).await?;
    let listed = fixtures.listed("many-1", 41).await?;
    fixtures.keep_free("many", 0).await?;
    // An agent that still keeps 641 addresses free would demand more blocks for the pods.
    let none = |it: &NodeSubnetStatus| it.pools.iter().all(|it| it.demand == 0);
    let status = fixtures.status_until("many-1", "demands nothing", none);
    status.await?;
    let pods = (0..641).map(|pod| format!("pod-{pod}"));
    let addresses = agents.allocate_all("many-1", "many", pods).await?;
    let distinct: BTreeSet<String> = addresses.into_iter().flatten().collect();
    assert_eq!(distinct.len(), 641);
    assert_eq!(fixtures.listed("many-1", 41).await?, listed);
    Ok(())
}

/// Waits until the agent demands `demand` addresses of the node's only pool.
async fn demands(fixtures: &Fixtures, node: &str, demand: u32) -> Result<()> {
    let is = |it: &NodeSubnetStatus| it.pools.iter().any(|it| it.demand == i64::from(demand));
    let what = format!("demands {demand} addresses");
    fixtures.status_until(node, &what, is).await?;
    Ok(())
}

#[tokio::test]
async fn max_blocks_per_node_limits_each_family() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.11.0.0/22"], "blockSize": 28},
        "ipv6": {"cidrs": ["fd00:11::/112"], "blockSize": 124},
        "maxBlocksPerNode": 3, "warm": {"low": 1000, "high": 65_536},
    });
    fixtures.block_pool("most", spec).await?;
    node(&fixtures, &agents, "most", "most-1").await?;
    let subnet = fixtures
        .subnet_until("most-1", "lists three of each", |it| {
            it.spec.blocks.len() == 6
        })
        .await?;
    assert_eq!((family(&subnet, false), family(&subnet, true)), (3, 3));
    // When `maxBlocksPerNode` is raised, the node gets more blocks without delay.
    fixtures
        .change_pool("most", json!({"maxBlocksPerNode": 5}))
        .await?;
    fixtures.listed("most-1", 10).await?;
    // When `maxBlocksPerNode` is lowered, the node keeps its blocks.
    fixtures
        .change_pool_observed("most", json!({"maxBlocksPerNode": 1}))
        .await?;
    fixtures.listed("most-1", 10).await?;
    Ok(())
}

#[tokio::test]
async fn a_dual_stack_pool_allocates_a_block_of_each_family_or_none() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.12.0.0/16"]},
        "ipv6": {"cidrs": ["fd00:12::/121"], "blockSize": 122},
        "idleSeconds": 86400,
    });
    fixtures.block_pool("dual", spec).await?;
    for name in ["dual-1", "dual-2"] {
        node(&fixtures, &agents, "dual", name).await?;
        let subnet = fixtures
            .subnet_until(name, "lists one of each", |it| it.spec.blocks.len() == 2)
            .await?;
        assert_eq!((family(&subnet, false), family(&subnet, true)), (1, 1));
    }
    let addresses = agents.allocate("dual-1", "dual", "web").await?;
    assert!(addresses.len() == 2 && addresses[0].contains('.') && addresses[1].contains(':'));
    let third = node(&fixtures, &agents, "dual", "dual-3").await?;
    let note = fixtures.event_about(&third, "WaitingForBlock").await?;
    assert!(note.contains("IPv6") && note.contains("\"dual\""), "{note}");
    assert_eq!(fixtures.blocks_of("dual").await?.len(), 4);
    let subnet = fixtures.subnet_until("dual-3", "exists", |_| true).await;
    assert!(subnet.unwrap().spec.blocks.is_empty());

    let more = json!({"ipv6": {"cidrs": ["fd00:12::/121", "fd00:12::1:0/121"]}});
    fixtures.change_pool("dual", more).await?;
    let listed = fixtures.listed("dual-3", 2).await?;
    assert!(
        listed[0].starts_with("10.12.") && listed[1].starts_with("fd00:12::1:"),
        "{listed:?}"
    );
    fixtures.condition("dual", "Exhausted", "False").await?;
    Ok(())
}

#[tokio::test]
async fn reserved_addresses_are_listed_for_the_agent_and_do_not_count() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.13.0.0/24"], "blockSize": 26, "gateway": "None"},
        // Four of the pool's blocks have reserved addresses: one is reserved as a whole, three have a reserved first
        // address, and the last of these three has ten more.
        "reserved": ["10.13.0.0/26", "10.13.0.64", "10.13.0.128", "10.13.0.192", "10.13.0.200-10.13.0.209"],
        "maxBlocksPerNode": 4, "warm": {"low": 63 + 63 + 53, "high": 65_536},
    });
    fixtures.block_pool("keep", spec).await?;
    let only = node(&fixtures, &agents, "keep", "keep-1").await?;
    let usable = 63 + 63 + 53;
    let listed = fixtures.listed("keep-1", 3).await?;
    assert!(!listed.contains(&"10.13.0.0/26".to_owned()), "{listed:?}");
    fixtures.keep_free("keep", 0).await?;
    let pods = (0..usable).map(|pod| format!("pod-{pod}"));
    let addresses = agents.allocate_all("keep-1", "keep", pods).await?;
    let addresses: BTreeSet<String> = addresses.into_iter().flatten().collect();
    assert_eq!(addresses.len(), usable);
    for address in ["10.13.0.64", "10.13.0.192", "10.13.0.205"] {
        assert!(!addresses.contains(address), "{address} is reserved");
    }
    let uid = only.metadata.uid.unwrap();
    let more = agents.try_allocate("keep-1", "keep", "one-more").await;
    assert_eq!(more.unwrap(), None);
    fixtures.event(&uid, "WaitingForBlock").await?;

    // A new reserved entry takes effect for free addresses. An address in use stays in use.
    let subnet = fixtures.subnets.get("keep-1").await?;
    let block = subnet
        .spec
        .blocks
        .iter()
        .find(|it| it.cidr == "10.13.0.64/26");
    assert_eq!(block.unwrap().reserved, ["10.13.0.64"]);
    fixtures
        .change_pool("keep", json!({"reserved": ["10.13.0.64-10.13.0.70"]}))
        .await?;
    fixtures
        .subnet_until("keep-1", "lists what is reserved now", |it| {
            let block = it.spec.blocks.iter().find(|it| it.cidr == "10.13.0.64/26");
            block.is_some_and(|it| it.reserved == ["10.13.0.64-10.13.0.70"])
        })
        .await?;
    // An address that is no longer reserved can be assigned.
    agents.allocate("keep-1", "keep", "one-more").await?;
    Ok(())
}

#[tokio::test]
async fn a_pool_reports_that_it_is_nearly_exhausted() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.14.0.0/24"], "blockSize": 28, "gateway": "None"},
        "nearlyExhaustedPercent": 50, "warm": {"low": 100, "high": 65_536},
    });
    let pool = fixtures.block_pool("near", spec).await?;
    node(&fixtures, &agents, "near", "near-1").await?;
    fixtures.listed("near-1", 7).await?;
    fixtures
        .condition("near", "NearlyExhausted", "False")
        .await?;
    fixtures.keep_free("near", 128).await?;
    fixtures
        .condition("near", "NearlyExhausted", "True")
        .await?;
    fixtures.event_about(&pool, "PoolNearlyExhausted").await?;
    let pool = fixtures.pools.get("near").await?;
    assert_eq!(condition(&pool, "Exhausted").unwrap().status, "False");
    Ok(())
}
