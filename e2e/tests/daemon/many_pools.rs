//! A node that more pools select than a NodeSubnet has room for.

use anyhow::{Context as _, ensure};
use cadastre_api::MOST_POOLS;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Fixtures, Options, crds};
use futures::StreamExt as _;
use serde_json::json;

use crate::LIMIT;

/// A number of pools that fits into one NodeSubnet, both in number and in the size of their settings.
const FEW: usize = 800;

#[tokio::test]
async fn a_node_of_more_pools_than_one_object_holds_is_served_and_says_so() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let hand = Fixtures::new(cluster.client().await.unwrap());
    crds::install(&hand.client).await.unwrap();
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
        let status = subnet.status.clone().unwrap_or_default();
        let told = status
            .conditions
            .iter()
            .find(|it| it.type_ == "PoolsLeftOut");
        let told = told.context("no condition")?;
        ensure!(told.status == "True", "{told:?}");
        Ok(Some(subnet))
    })
    .await
    .unwrap();
    // The pools of highest priority are listed. The ranges of all pools are merged, so `podRanges` stays short.
    assert_eq!(subnet.spec.pools[0].name, "many-0");
    assert!(
        subnet.spec.pod_ranges.len() < 8,
        "{:?}",
        subnet.spec.pod_ranges
    );
    let uid = node.metadata.uid.as_deref().unwrap();
    hand.event(uid, "PoolsLeftOut").await.unwrap();
    // With only `FEW` pools left, all are listed, so the condition ends.
    let gone = (FEW..count).map(|n| {
        let hand = &hand;
        async move {
            let params = kube::api::DeleteParams::default();
            hand.pools
                .delete(&format!("many-{n}"), &params)
                .await
                .unwrap();
        }
    });
    futures::future::join_all(gone).await;
    until("the condition is over", LIMIT, async || {
        let status = hand.subnets.get("many-1").await?.status.unwrap_or_default();
        let told = status
            .conditions
            .into_iter()
            .find(|it| it.type_ == "PoolsLeftOut");
        let told = told.context("no condition")?;
        ensure!(told.status == "False", "{told:?}");
        Ok(Some(()))
    })
    .await
    .unwrap();
    daemon.process().kill().unwrap();
}
