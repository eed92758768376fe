//! Pools that change or are deleted while nodes have blocks of them.

use anyhow::Result;
use cadastre_api::{FINALIZER, NodeSubnetStatus, Recall};
use cadastre_e2e::fixtures::{condition, gone};
use serde_json::{Value, json};

use crate::{blocks, drains, node, recall, shared};

/// A pool without a gateway, so agents assign all 16 addresses of a block.
fn pool(range: &str) -> Value {
    json!({
        "ipv4": {"cidrs": [range], "blockSize": 28, "gateway": "None"},
        "cooldownSeconds": 0, "warm": {"low": 0, "high": 65_536},
    })
}

#[tokio::test]
async fn a_disabled_pool_allocates_no_block_and_nodes_keep_theirs() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let mut spec = pool("10.40.0.0/24");
    spec["cooldownSeconds"] = json!(41);
    spec["warm"]["low"] = json!(1);
    fixtures.block_pool("halt", spec).await?;
    node(&fixtures, &agents, "halt", "halt-1").await?;
    let had = fixtures.listed("halt-1", 1).await?;
    fixtures
        .change_pool("halt", json!({"disabled": true}))
        .await?;
    fixtures.condition("halt", "Ready", "False").await?;
    let pods = (0..16).map(|pod| format!("pod-{pod}"));
    agents.allocate_all("halt-1", "halt", pods).await?;
    let more = agents.try_allocate("halt-1", "halt", "more").await;
    assert_eq!(more.unwrap(), None);
    let demands_more = |it: &NodeSubnetStatus| it.pools.iter().any(|it| it.demand == 17);
    let what = "demands one address more";
    fixtures.status_until("halt-1", what, demands_more).await?;
    assert_eq!(recall(&fixtures, "halt-1", &had[0]).await?, None);
    assert_eq!(fixtures.listed("halt-1", 1).await?, had);
    let still = fixtures.subnets.get("halt-1").await?.spec.pools;
    let still: Vec<(&str, bool, u32)> = still
        .iter()
        .map(|it| (it.name.as_str(), it.retained, it.terms.cooldown_seconds))
        .collect();
    assert_eq!(still, [("halt", true, 41)]);
    fixtures
        .change_pool("halt", json!({"disabled": false}))
        .await?;
    fixtures.listed("halt-1", 2).await?;
    Ok(())
}

#[tokio::test]
async fn blocks_of_a_removed_range_drain_and_the_rest_of_the_pool_serves() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let mut spec = pool("10.41.0.0/28");
    spec["ipv4"]["cidrs"] = json!(["10.41.0.0/28", "10.41.1.0/28"]);
    fixtures.block_pool("part", spec).await?;
    node(&fixtures, &agents, "part", "part-1").await?;
    let pods = || (0..32).map(|pod| format!("pod-{pod}"));
    agents.allocate_all("part-1", "part", pods()).await?;
    fixtures.listed("part-1", 2).await?;
    let cidrs = json!({"ipv4": {"cidrs": ["10.41.1.0/28", "10.41.2.0/28"]}});
    fixtures.change_pool("part", cidrs).await?;
    fixtures
        .subnet_until("part-1", "drains the one that lies outside", |it| {
            let drains = it.spec.blocks.iter().filter(|it| it.recall.is_some());
            drains.map(|it| it.cidr.as_str()).collect::<Vec<_>>() == ["10.41.0.0/28"]
        })
        .await?;
    let shrinking = fixtures.condition("part", "Shrinking", "True").await?;
    assert!(!shrinking.message.is_empty());
    // The node gets another block in place of the draining block.
    let more = agents.allocate("part-1", "part", "more").await?;
    assert!(more[0].starts_with("10.41.2."), "{more:?}");
    agents.free_all("part-1", pods()).await?;
    fixtures.block_gone("10.41.0.0/28").await?;
    fixtures.condition("part", "Shrinking", "False").await?;
    Ok(())
}

#[tokio::test]
async fn a_deleted_pool_stays_until_its_last_block_is_empty_and_gone() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.42.0.0/24"], "blockSize": 28},
        "cooldownSeconds": 0, "quarantineSeconds": 1,
    });
    fixtures.block_pool("end", spec).await?;
    for name in ["end-1", "end-2"] {
        node(&fixtures, &agents, "end", name).await?;
        fixtures.listed(name, 1).await?;
    }
    agents.allocate("end-1", "end", "web").await?;
    fixtures.in_use("end-1", 1).await?;
    // The pool stays while a block of it is in use, even if the spec no longer contains the block's range.
    let elsewhere = json!({"ipv4": {"cidrs": ["10.42.1.0/24"]}});
    fixtures.change_pool("end", elsewhere).await?;
    fixtures.delete_pool("end").await?;
    fixtures.condition("end", "Terminating", "True").await?;
    fixtures.listed("end-2", 0).await?;
    let left = fixtures.listed("end-1", 1).await?;
    assert_eq!(blocks(&fixtures, "end", 1).await?, left);
    assert_eq!(
        recall(&fixtures, "end-1", &left[0]).await?,
        Some(Recall::Drain)
    );
    let pool = fixtures.pools.get("end").await?;
    assert_eq!(pool.metadata.finalizers.unwrap(), [FINALIZER]);
    agents.free("end-1", "web").await?;
    gone(&fixtures.pools, "end").await?;
    blocks(&fixtures, "end", 0).await?;
    Ok(())
}

#[tokio::test]
async fn a_deleted_pool_stays_until_the_quarantine_of_its_blocks_is_over() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.43.0.0/24"]}, "quarantineSeconds": 8});
    fixtures.block_pool("wake", spec).await?;
    node(&fixtures, &agents, "wake", "wake-1").await?;
    let had = fixtures.listed("wake-1", 1).await?;
    agents.leave("wake-1");
    fixtures.delete_node("wake-1").await?;
    fixtures.delete_pool("wake").await?;
    let terminating = fixtures.condition("wake", "Terminating", "True").await?;
    assert!(!terminating.message.is_empty());
    gone(&fixtures.pools, "wake").await?;
    fixtures.block_gone(&had[0]).await?;
    fixtures.subnet_gone("wake-1").await?;
    Ok(())
}

#[tokio::test]
async fn of_two_overlapping_pools_the_newer_allocates_nothing_until_the_older_is_gone() -> Result<()>
{
    let (_, fixtures, agents) = shared().await?;
    let first =
        json!({"ipv4": {"cidrs": ["10.44.0.0/25"]}, "cooldownSeconds": 0, "quarantineSeconds": 0});
    fixtures.block_pool("lap-1", first).await?;
    fixtures.condition("lap-1", "Ready", "True").await?;
    node(&fixtures, &agents, "lap", "lap-a").await?;
    fixtures.listed("lap-a", 1).await?;
    let second = json!({
        "ipv4": {"cidrs": ["10.44.0.0/24"]}, "priority": 9,
        "nodeSelector": {"matchLabels": {"group": "over"}},
    });
    fixtures.block_pool("lap-2", second).await?;
    let overlapping = fixtures.condition("lap-2", "Overlapping", "True").await?;
    assert!(
        overlapping.message.contains("lap-1"),
        "{}",
        overlapping.message
    );
    node(&fixtures, &agents, "over", "over-1").await?;
    let none = agents.try_allocate("over-1", "lap-2", "web").await;
    assert_eq!(none.unwrap(), None);
    agents.allocate("lap-a", "lap-1", "web").await?;
    assert_eq!(fixtures.blocks_of("lap-2").await?, Vec::<String>::new());

    fixtures.delete_pool("lap-1").await?;
    drains(&fixtures, "lap-a").await?;
    agents.free("lap-a", "web").await?;
    gone(&fixtures.pools, "lap-1").await?;
    fixtures.condition("lap-2", "Overlapping", "False").await?;
    let listed = fixtures.listed("over-1", 1).await?;
    assert_eq!(blocks(&fixtures, "lap-2", 1).await?, listed);
    Ok(())
}

#[tokio::test]
async fn two_pools_may_swap_their_ranges_while_nodes_have_blocks_of_both() -> Result<()> {
    let (cluster, fixtures, agents) = shared().await?;
    for (name, range) in [("swapa", "10.45.0.0/24"), ("swapb", "10.45.1.0/24")] {
        let spec = json!({"ipv4": {"cidrs": [range], "blockSize": 28}, "cooldownSeconds": 0});
        fixtures.block_pool(name, spec).await?;
        let node_name = format!("{name}-1");
        node(&fixtures, &agents, name, &node_name).await?;
        fixtures.listed(&node_name, 1).await?;
        agents.allocate(&node_name, name, "old").await?;
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
    cluster.control_plane.kubectl_stdin(&args, &both).await?;
    for (name, old, new) in [
        ("swapa-1", "10.45.0.", "10.45.1."),
        ("swapb-1", "10.45.1.", "10.45.0."),
    ] {
        // The block in the old range is recalled (`Drain`), and the node gets a block in the new range.
        fixtures
            .subnet_until(name, "drains the old one and has a new one", |it| {
                let of = |drains: bool, prefix: &str| {
                    it.spec.blocks.iter().any(|it| {
                        (it.recall == Some(Recall::Drain)) == drains && it.cidr.starts_with(prefix)
                    })
                };
                of(true, old) && of(false, new)
            })
            .await?;
        // The agent has its own watch, which may lag behind what this test has read.
        let has_new = |it: &NodeSubnetStatus| it.blocks.iter().any(|it| it.cidr.starts_with(new));
        let what = "reports the new block";
        fixtures.status_until(name, what, has_new).await?;
        let pool = name.trim_end_matches("-1");
        let addresses = agents.allocate(name, pool, "new").await?;
        assert!(addresses[0].starts_with(new), "{addresses:?}");
        agents.free(name, "old").await?;
    }
    for (name, new) in [("swapa", "10.45.1."), ("swapb", "10.45.0.")] {
        let listed = fixtures.listed(&format!("{name}-1"), 1).await?;
        assert!(listed[0].starts_with(new), "{listed:?}");
        assert_eq!(blocks(&fixtures, name, 1).await?, listed);
        let pool = fixtures.pools.get(name).await?;
        assert_eq!(condition(&pool, "Overlapping").unwrap().status, "False");
    }
    Ok(())
}
