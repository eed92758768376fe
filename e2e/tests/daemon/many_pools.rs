//! A node that more pools select than a NodeSubnet has room for.

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{MOST_POOLS, NodeSubnet};
use cadastre_e2e::Options;
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use futures::StreamExt as _;
use futures::future::try_join_all;
use serde_json::json;

use crate::LIMIT;

/// This many pools fit into one NodeSubnet, both by their number and by the size of their settings.
const FEW: usize = 800;

fn left_out_is(subnet: &NodeSubnet, expected: &str) -> Result<()> {
    let mut conditions = subnet.status.iter().flat_map(|it| &it.conditions);
    let condition = conditions.find(|it| it.type_ == "PoolsLeftOut");
    let condition = condition.context("no condition")?;
    ensure!(condition.status == expected, "{condition:?}");
    Ok(())
}

#[tokio::test]
async fn a_node_of_more_pools_than_one_object_holds_is_served_and_says_so() {
    let (cluster, hand) = with_crds(Options::default()).await.unwrap();
    let count = MOST_POOLS + 26;
    let pools = (0..count).map(|n| {
        let hand = &hand;
        async move {
            let cidr = format!("10.{}.{}.0/24", n >> 8, n & 255);
            let spec = json!({
                "ipv4": {"cidrs": [cidr]}, "priority": count - n, "firstBlock": "OnDemand",
            });
            hand.block_pool(&format!("many-{n}"), spec).await.unwrap();
        }
    });
    futures::stream::iter(pools)
        .buffer_unordered(16)
        .collect::<()>()
        .await;
    let node = hand.node("many", "many-1").await.unwrap();
    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    let what = "the NodeSubnet lists what it has room for, and says so";
    let subnet = until(what, LIMIT, async || {
        let subnet = hand.subnets.get("many-1").await?;
        let listed = subnet.spec.pools.len();
        ensure!((FEW..=MOST_POOLS).contains(&listed), "{listed} pools");
        left_out_is(&subnet, "True")?;
        Ok(Some(subnet))
    })
    .await
    .unwrap();
    // The pools of highest priority are listed. `podRanges` stays short, because the ranges of all pools are merged.
    assert_eq!(subnet.spec.pools[0].name, "many-0");
    assert!(
        subnet.spec.pod_ranges.len() < 8,
        "{:?}",
        subnet.spec.pod_ranges
    );
    hand.event_about(&node, "PoolsLeftOut").await.unwrap();
    // Once only `FEW` pools are left, the NodeSubnet lists all of them. So the condition `PoolsLeftOut` becomes False.
    let delete = async |n| hand.delete_pool(&format!("many-{n}")).await;
    try_join_all((FEW..count).map(delete)).await.unwrap();
    until("the condition is over", LIMIT, async || {
        left_out_is(&hand.subnets.get("many-1").await?, "False")?;
        Ok(Some(()))
    })
    .await
    .unwrap();
    daemon.process().kill().unwrap();
}
