//! Requests that users make by annotations of a NodeSubnet.

use anyhow::Result;
use cadastre_api::{DRAIN_ANNOTATION, NodeSubnet, RELEASE_ANNOTATION, Recall, WITHDRAW_ANNOTATION};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, Options, TestCluster};
use serde_json::{Value, json};

use crate::{blocks, node, recall, shared};

async fn annotate(fixtures: &Fixtures, node: &str, name: &str, value: Value) -> Result<()> {
    let change = json!({"metadata": {"annotations": {name: value}}});
    fixtures.change_subnet(node, change).await?;
    Ok(())
}

/// Waits until the NodeSubnet's status lists exactly the ranges `withdrawn` as withdrawn, and exactly the ranges
/// `withdrawing` as still to be withdrawn.
async fn withdrawn(
    fixtures: &Fixtures,
    node: &str,
    withdrawn: &[&str],
    withdrawing: &[&str],
) -> Result<()> {
    let what = format!("has withdrawn {withdrawn:?}, and is to withdraw {withdrawing:?}");
    let is_so = |it: &NodeSubnet| {
        let status = it.status.as_ref();
        status.is_some_and(|it| it.withdrawn == withdrawn && it.withdrawing == withdrawing)
    };
    fixtures.subnet_until(node, &what, is_so).await?;
    Ok(())
}

#[tokio::test]
async fn addresses_are_out_of_use_as_long_as_the_annotation_names_them() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.9.0/28"], "blockSize": 28},
        "cooldownSeconds": 0,
        "warm": {"low": 0, "high": 50},
    });
    fixtures.block_pool("pops", spec).await?;
    node(&fixtures, &agents, "pops", "pops-1").await?;
    assert_eq!(
        agents.allocate("pops-1", "pops", "p0").await?,
        ["10.23.9.2"]
    );
    let ranges = "10.23.9.2,10.23.9.8/29,10.23.9.0/28,10.99.0.1";
    annotate(&fixtures, "pops-1", WITHDRAW_ANNOTATION, json!(ranges)).await?;
    // The controller withdraws neither a whole block nor an address outside the node's blocks.
    withdrawn(&fixtures, "pops-1", &["10.23.9.8/29"], &["10.23.9.2/32"]).await?;

    agents.free("pops-1", "p0").await?;
    withdrawn(&fixtures, "pops-1", &["10.23.9.2/32", "10.23.9.8/29"], &[]).await?;
    for n in 3..=7 {
        let pod = format!("p{n}");
        let address = format!("10.23.9.{n}");
        assert_eq!(agents.allocate("pops-1", "pops", &pod).await?, [address]);
    }
    let ninth = agents.try_allocate("pops-1", "pops", "p8").await?;
    assert_eq!(ninth, None, "nothing else is free");

    annotate(
        &fixtures,
        "pops-1",
        WITHDRAW_ANNOTATION,
        json!("10.23.9.8/29"),
    )
    .await?;
    withdrawn(&fixtures, "pops-1", &["10.23.9.8/29"], &[]).await?;
    assert_eq!(
        agents.allocate("pops-1", "pops", "p8").await?,
        ["10.23.9.2"]
    );
    annotate(&fixtures, "pops-1", WITHDRAW_ANNOTATION, Value::Null).await?;
    withdrawn(&fixtures, "pops-1", &[], &[]).await?;
    assert_eq!(
        agents.allocate("pops-1", "pops", "p9").await?,
        ["10.23.9.8"]
    );
    Ok(())
}

#[tokio::test]
async fn a_block_drains_as_long_as_the_annotation_names_it() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.23.8.0/24"], "blockSize": 28}, "idleSeconds": 86400, "cooldownSeconds": 0});
    fixtures.block_pool("plea", spec).await?;
    node(&fixtures, &agents, "plea", "plea-1").await?;
    agents.allocate("plea-1", "plea", "p0").await?;
    let first = fixtures.listed("plea-1", 1).await?[0].clone();

    annotate(&fixtures, "plea-1", DRAIN_ANNOTATION, json!(first)).await?;
    let both = fixtures.listed("plea-1", 2).await?;
    assert_eq!(
        recall(&fixtures, "plea-1", &first).await?,
        Some(Recall::Drain)
    );
    let second = both.iter().find(|it| **it != first).unwrap().clone();
    assert_eq!(recall(&fixtures, "plea-1", &second).await?, None);
    // When the controller writes the NodeSubnet, it keeps the annotations.
    let subnet = fixtures.subnets.get("plea-1").await?;
    assert_eq!(
        subnet.metadata.annotations.unwrap()[DRAIN_ANNOTATION],
        first
    );

    annotate(&fixtures, "plea-1", DRAIN_ANNOTATION, Value::Null).await?;
    until("it is drained no longer", LIMIT, async || {
        Ok(recall(&fixtures, "plea-1", &first)
            .await?
            .is_none()
            .then_some(()))
    })
    .await?;

    annotate(&fixtures, "plea-1", DRAIN_ANNOTATION, json!(first)).await?;
    fixtures
        .subnet_until("plea-1", "drains again", |it| {
            it.spec.blocks.iter().any(|it| it.recall.is_some())
        })
        .await?;
    agents.free("plea-1", "p0").await?;
    fixtures.block_gone(&first).await?;
    assert_eq!(blocks(&fixtures, "plea", 1).await?, [second]);
    Ok(())
}

#[tokio::test]
async fn a_requested_release_ignores_the_grace_period_and_frees_no_address_of_a_living_pod()
-> Result<()> {
    let cluster = TestCluster::start(Options::default(), &["--leak-grace", "3600"]);
    let cluster = cluster.await?;
    let fixtures = cluster.fixtures().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.74.8.0/24"], "blockSize": 28}});
    fixtures.block_pool("let", spec).await?;
    let node = fixtures.node("let", "let-1").await?;
    let cidr = fixtures.listed("let-1", 1).await?[0].clone();
    let block = fixtures.subnets.get("let-1").await?.spec.blocks[0].clone();
    let first: std::net::Ipv4Addr = cidr.split('/').next().unwrap().parse().unwrap();
    let address = |n: u32| std::net::Ipv4Addr::from(u32::from(first) + n).to_string();
    let lives = fixtures.pod("let-a", "let-1", &[]).await?;
    let lives = lives.metadata.uid.unwrap();
    let gone = |n: u32| format!("00000000-0000-4000-8000-00000000000{n}");
    let orphans = [
        json!({"address": address(1), "podUID": lives}),
        json!({"address": address(2), "podUID": gone(2)}),
        json!({"address": address(3), "podUID": gone(3)}),
    ];
    let status = json!({
        "nodeUID": node.metadata.uid,
        "blocks": [{"cidr": cidr, "uid": block.uid, "used": 3, "free": 13}],
        "orphans": orphans,
    });
    fixtures.write_status("let-1", status).await?;
    let all = [
        format!("{}={lives}", address(1)),
        format!("{}={}", address(2), gone(2)),
        // This request names a pod that does not use the address, so it has no effect.
        format!("{}={}", address(3), gone(9)),
    ];
    annotate(&fixtures, "let-1", RELEASE_ANNOTATION, json!(all.join(","))).await?;
    let subnet = fixtures.subnet_until("let-1", "names a leak candidate", |it| {
        !it.spec.leak_candidates.is_empty()
    });
    let candidates = subnet.await?.spec.leak_candidates;
    assert_eq!(candidates.len(), 1, "{candidates:?}");
    assert_eq!(candidates[0].address, address(2));
    assert_eq!(candidates[0].pod_uid, gone(2));
    Ok(())
}
