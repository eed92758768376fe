//! Blocks of a deleted node are quarantined, and then become free. As long as the blocks are quarantined, the machine
//! of the deleted node can get them back.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_api::OwnerKind;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::wait::until;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::{node, shared};

async fn quarantined(fixtures: &Fixtures, cidr: &str) -> Result<cadastre_api::IPAMBlock> {
    fixtures
        .block_until(cidr, "is quarantined", |it| {
            it.spec.owner.kind == OwnerKind::Quarantine
        })
        .await
}

#[tokio::test]
async fn a_block_of_a_deleted_node_is_quarantined_under_its_last_owner_and_then_free() -> Result<()>
{
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.50.0.0/26"]}, "quarantineSeconds": 8});
    fixtures.block_pool("dead", spec).await?;
    let first = node(&fixtures, &agents, "dead", "dead-1").await?;
    let had = fixtures.listed("dead-1", 1).await?;
    agents.leave("dead-1");
    let (start, wall) = (Instant::now(), Timestamp::now());
    fixtures.delete_node("dead-1").await?;
    let block = quarantined(&fixtures, &had[0]).await?;
    let until = block.spec.until.unwrap().0;
    assert!(until >= wall + SignedDuration::from_secs(8));
    assert_eq!(block.metadata.managed_fields, None, "they only cost space");
    assert_eq!(Some(block.spec.owner.uid), first.metadata.uid);
    assert_eq!(block.spec.owner.name, "dead-1");
    assert_eq!(
        block.spec.owner.provider_id.as_deref(),
        Some("e2e://dead-1")
    );
    fixtures.subnet_gone("dead-1").await?;
    fixtures
        .pool_until("dead", "counts the quarantined block", |it| {
            let status = it.status.as_ref().and_then(|it| it.ipv4.as_ref());
            status.is_some_and(|it| it.quarantined == "1" && it.allocated == "0")
        })
        .await?;

    let second = node(&fixtures, &agents, "dead", "dead-2").await?;
    fixtures.event_about(&second, "WaitingForBlock").await?;
    assert_eq!(fixtures.listed("dead-2", 1).await?, had);
    assert!(
        start.elapsed() >= Duration::from_secs(8),
        "{:?}",
        start.elapsed()
    );
    let block = fixtures.block_until(&had[0], "is the new node's", |it| {
        it.spec.owner.kind == OwnerKind::Node && it.spec.until.is_none()
    });
    assert_eq!(block.await?.spec.owner.name, "dead-2");
    Ok(())
}

#[tokio::test]
async fn a_block_stays_quarantined_while_a_pod_reports_an_address_of_it() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.51.0.0/26"]}, "quarantineSeconds": 1});
    fixtures.block_pool("ghost", spec).await?;
    node(&fixtures, &agents, "ghost", "ghost-1").await?;
    let had = fixtures.listed("ghost-1", 1).await?;
    let addresses = agents.allocate("ghost-1", "ghost", "web").await?;
    fixtures
        .pod("ghost-web", "ghost-1", &[&addresses[0]])
        .await?;
    agents.leave("ghost-1");
    fixtures.delete_node("ghost-1").await?;
    let over = quarantined(&fixtures, &had[0]).await?.spec.until.unwrap().0;
    let second = node(&fixtures, &agents, "ghost", "ghost-2").await?;
    fixtures.event_about(&second, "WaitingForBlock").await?;
    until("the quarantine would be over", LIMIT, async || {
        Ok((Timestamp::now() >= over + SignedDuration::from_secs(2)).then_some(()))
    })
    .await?;
    assert_eq!(
        quarantined(&fixtures, &had[0]).await?.spec.owner.name,
        "ghost-1"
    );
    fixtures.delete_pod("ghost-web").await?;
    assert_eq!(fixtures.listed("ghost-2", 1).await?, had);
    Ok(())
}

#[tokio::test]
async fn the_same_machine_gets_its_blocks_back_and_another_one_under_its_name_does_not()
-> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.52.0.0/22"], "blockSize": 28, "gateway": "None"},
        "quarantineSeconds": 600, "warm": {"low": 40, "high": 65_536},
    });
    fixtures.block_pool("again2", spec).await?;
    let with_machine = |provider: &str| {
        let mut node = cadastre_e2e::fixtures::node_of_group("again2", "again2-1");
        node.spec.get_or_insert_default().provider_id = Some(provider.to_owned());
        node
    };
    let first = fixtures.create_node(with_machine("cloud://1")).await?;
    agents.join(&first)?;
    let had = fixtures.listed("again2-1", 3).await?;
    fixtures.keep_free("again2", 0).await?;
    let mut uids = vec![first.metadata.uid];
    for (provider, same) in [("cloud://1", true), ("cloud://2", false)] {
        if !same {
            agents.leave("again2-1");
        }
        fixtures.delete_node("again2-1").await?;
        for cidr in &had {
            quarantined(&fixtures, cidr).await?;
        }
        let node = fixtures.create_node(with_machine(provider)).await?;
        if !same {
            agents.join(&node)?;
        }
        assert!(!uids.contains(&node.metadata.uid));
        uids.push(node.metadata.uid.clone());
        if same {
            assert_eq!(fixtures.listed("again2-1", 3).await?, had);
            for cidr in &had {
                let is = |it: &cadastre_api::IPAMBlock| {
                    it.spec.owner.kind == OwnerKind::Node
                        && it.spec.until.is_none()
                        && Some(&it.spec.owner.uid) == node.metadata.uid.as_ref()
                };
                fixtures.block_until(cidr, "is the new node's", is).await?;
            }
            agents.allocate("again2-1", "again2", "web").await?;
        } else {
            let has = fixtures.listed("again2-1", 1).await?;
            assert!(!had.contains(&has[0]), "{has:?}");
            for cidr in &had {
                quarantined(&fixtures, cidr).await?;
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_being_deleted_keeps_its_blocks_until_it_is_gone() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.53.0.0/24"]}, "quarantineSeconds": 0});
    fixtures.block_pool("linger", spec).await?;
    let mut made = cadastre_e2e::fixtures::node_of_group("linger", "linger-1");
    made.metadata.finalizers = Some(vec!["cadastre.dev/e2e".to_owned()]);
    agents.join(&fixtures.create_node(made).await?)?;
    let had = fixtures.listed("linger-1", 1).await?;
    fixtures.delete_node("linger-1").await?;
    // Watch events of nodes come in order. So when the node `linger-2` has a block, the controller has observed the
    // deletion of `linger-1`.
    node(&fixtures, &agents, "linger", "linger-2").await?;
    fixtures.listed("linger-2", 1).await?;
    assert_eq!(fixtures.listed("linger-1", 1).await?, had);
    agents.allocate("linger-1", "linger", "web").await?;
    fixtures
        .change_node("linger-1", json!({"metadata": {"finalizers": null}}))
        .await?;
    gone(
        &fixtures.blocks,
        &cadastre_e2e::fixtures::block_name(&had[0]),
    )
    .await?;
    fixtures.subnet_gone("linger-1").await?;
    Ok(())
}
