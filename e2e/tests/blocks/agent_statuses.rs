//! Agents' statuses that make no sense. Each such status affects only its own node. The agent learns of the error from
//! a condition in the NodeSubnet.

use std::net::Ipv4Addr;

use anyhow::Result;
use cadastre_api::NodeSubnet;
use cadastre_e2e::fixtures::{Fixtures, node_of_group, with_pod_cidrs};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{blocks, node, shared};

/// Returns status and message of the condition `Accepted`.
fn accepted(subnet: &NodeSubnet) -> Option<(&str, &str)> {
    let conditions = &subnet.status.as_ref()?.conditions;
    let condition = conditions.iter().find(|it| it.type_ == "Accepted")?;
    Some((&condition.status, &condition.message))
}

async fn rejected(fixtures: &Fixtures, node: &str, word: &str) -> Result<()> {
    fixtures
        .subnet_until(node, &format!("reports {word}"), |it| {
            accepted(it)
                .is_some_and(|(status, message)| status == "False" && message.contains(word))
        })
        .await?;
    Ok(())
}

#[tokio::test]
async fn what_makes_no_sense_is_ignored_and_reported_and_the_rest_is_used() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.70.0.0/22"], "blockSize": 28}, "idleSeconds": 0});
    fixtures.block_pool("bad", spec).await?;
    // This node has no agent, so the test writes the node's status.
    let made = fixtures.node("bad", "bad-1").await?;
    let uid = made.metadata.uid.unwrap();
    node(&fixtures, &agents, "bad", "bad-2").await?;
    let own = fixtures.listed("bad-1", 1).await?[0].clone();
    let other = fixtures.listed("bad-2", 1).await?[0].clone();
    let listed = fixtures.subnets.get("bad-1").await?.spec.blocks;
    let block_uid = listed[0].uid.clone();
    let theirs = fixtures.subnets.get("bad-2").await?.spec.blocks[0]
        .uid
        .clone();

    let block = |fields: Value| {
        let mut block = json!({"cidr": own, "uid": block_uid});
        for (key, value) in fields.as_object().unwrap() {
            block[key] = value.clone();
        }
        json!({"nodeUID": uid, "blocks": [block]})
    };
    let whole = json!({
        "nodeUID": uid, "pools": [], "orphans": [],
        "blocks": [{"cidr": own, "uid": block_uid, "used": 1, "free": 15}],
    });
    let first = own.split('/').next().unwrap().to_owned();
    for (status, word) in [
        (block(json!({"used": 17})), "has only 16 addresses"),
        (
            block(json!({"used": 1, "released": true})),
            "released and in use at once",
        ),
        (block(json!({"cidr": "10.70.0.1/28"})), "10.70.0.0/28"),
        (
            json!({"pools": [{"pool": "bad", "demand": 2_000_000}]}),
            "more than 1000000",
        ),
        (
            json!({"pools": [{"pool": "nowhere", "demand": 1}]}),
            "\"nowhere\"",
        ),
        (
            json!({"orphans": [{"address": "10.70.0.300", "podUID": "x"}]}),
            "10.70.0.300",
        ),
        (
            json!({"orphans": [{"address": "192.0.2.77", "podUID": "x"}]}),
            "192.0.2.77",
        ),
        (
            json!({"orphans": [{"address": first, "podUID": "x"}, {"address": first, "podUID": "y"}]}),
            "twice",
        ),
        (json!({"nodeUID": "another"}), "another"),
    ] {
        fixtures.write_status("bad-1", status.clone()).await?;
        rejected(&fixtures, "bad-1", word).await?;
        fixtures.write_status("bad-1", whole.clone()).await?;
        fixtures
            .subnet_until("bad-1", "reports that the status is accepted", |it| {
                accepted(it).is_some_and(|(status, _)| status == "True")
            })
            .await?;
        assert_eq!(
            fixtures.listed("bad-1", 1).await?,
            std::slice::from_ref(&own),
            "{status}"
        );
    }

    // A node cannot release another node's block. Nor can it release its own block if the status has the UID of an
    // earlier IPAMBlock of the same name.
    for stranger in [
        json!({"cidr": other, "uid": theirs, "released": true}),
        json!({"cidr": own, "uid": "of-old", "released": true}),
    ] {
        let reports = json!([{"cidr": own, "uid": block_uid, "used": 1, "free": 15}, stranger]);
        fixtures.write_status(
            "bad-1",
            json!({"nodeUID": uid, "blocks": reports, "pools": [{"pool": "bad", "demand": 17}]}),
        )
        .await?;
        fixtures.listed("bad-1", 2).await?;
        assert_eq!(
            fixtures.listed("bad-2", 1).await?,
            std::slice::from_ref(&other)
        );
        fixtures.write_status("bad-1", whole.clone()).await?;
        let listed = fixtures.subnets.get("bad-1").await?.spec.blocks;
        let second = listed.iter().find(|it| it.cidr != own).unwrap();
        let release = json!([
            {"cidr": own, "uid": block_uid, "used": 1, "free": 15},
            {"cidr": second.cidr, "uid": second.uid, "released": true},
        ]);
        fixtures
            .write_status("bad-1", json!({"blocks": release}))
            .await?;
        fixtures.listed("bad-1", 1).await?;
        blocks(&fixtures, "bad", 2).await?;
    }
    // Only the node with the wrong status has the condition `Accepted` in its NodeSubnet.
    let neighbour = fixtures.subnets.get("bad-2").await?;
    assert_eq!(accepted(&neighbour), None);
    agents.allocate("bad-2", "bad", "web").await?;
    Ok(())
}

#[tokio::test]
async fn a_status_of_an_earlier_node_of_the_name_is_ignored() -> Result<()> {
    let (_, fixtures, _) = shared().await?;
    // The nodes here have no agents, because an agent would not publish the status of an earlier node. So the test
    // writes the statuses.
    let spec = json!({
        "ipv4": {"cidrs": ["10.71.0.0/24"], "gateway": "None"},
        "quarantineSeconds": 0, "idleSeconds": 86400,
    });
    fixtures.block_pool("stale", spec).await?;
    let first = fixtures.node("stale", "stale-1").await?;
    let uid = first.metadata.uid.as_deref().unwrap();
    fixtures.listed("stale-1", 1).await?;
    let demand = json!({"nodeUID": uid, "pools": [{"pool": "stale", "demand": 130}]});
    fixtures.write_status("stale-1", demand).await?;
    fixtures.listed("stale-1", 3).await?;
    fixtures.delete_node("stale-1").await?;
    // The machine of the deleted node registers again, and its new Node gets the blocks of the deleted node.
    let second = fixtures.node("stale", "stale-1").await?;
    assert_ne!(first.metadata.uid, second.metadata.uid);
    let subnet = fixtures.subnet_until("stale-1", "is of the new node", |it| {
        it.spec.node_uid == second.metadata.uid && it.spec.blocks.len() == 3
    });
    let listed = subnet.await?.spec.blocks;
    // In this status, the agent of the deleted node demands a fourth block and releases the three existing blocks.
    let released = listed
        .iter()
        .map(|it| json!({"cidr": it.cidr, "uid": it.uid, "released": true}));
    let stale = json!({
        "nodeUID": uid, "pools": [{"pool": "stale", "demand": 200}],
        "blocks": released.collect::<Vec<_>>(),
    });
    fixtures.write_status("stale-1", stale).await?;
    rejected(&fixtures, "stale-1", uid).await?;
    let after = fixtures.subnets.get("stale-1").await?;
    assert_eq!(after.spec.blocks, listed);
    blocks(&fixtures, "stale", 3).await?;
    Ok(())
}

#[tokio::test]
async fn a_podcidr_that_covers_a_whole_pool_reserves_nothing() -> Result<()> {
    let (_, fixtures, _) = shared().await?;
    // A kubelet could write this podCIDR if no policy prevented that.
    let liar = node_of_group("taken", "taken-0");
    let liar = with_pod_cidrs(liar, &["10.171.0.0/16"]);
    let liar = fixtures.create_node(liar).await?;
    let spec =
        json!({"ipv4": {"cidrs": ["10.171.8.0/24"], "blockSize": 28}, "maxBlocksPerNode": 1});
    fixtures.block_pool("taken", spec).await?;
    fixtures.node("taken", "taken-1").await?;
    fixtures.listed("taken-1", 1).await?;
    let pool = fixtures
        .condition("taken", "PodCIDRTooWide", "True")
        .await?;
    assert!(pool.message.contains("taken-0"), "{}", pool.message);
    let uid = liar.metadata.uid.unwrap();
    let note = fixtures.event(&uid, "PodCIDRTooWide").await?;
    assert!(note.contains("10.171.0.0/16"), "{note}");
    // The node `taken-0` gets a block like all others, and its podCIDR is not published to its agent.
    let subnet = fixtures.listed("taken-0", 1).await?;
    assert!(subnet[0].starts_with("10.171.8."), "{subnet:?}");
    let subnet = fixtures.subnets.get("taken-0").await?;
    assert_eq!(subnet.spec.pod_cidrs, []);
    let free = fixtures
        .pool_until("taken", "has all but two blocks", |pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|it| it.ipv4.as_ref().is_some_and(|it| it.free == "14"))
        })
        .await;
    free.unwrap();
    Ok(())
}

#[tokio::test]
async fn of_a_node_with_a_thousand_addresses_sixteen_are_reserved() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.172.0.0/22"], "blockSize": 28, "gateway": "None"}});
    fixtures.block_pool("crowd", spec).await?;
    node(&fixtures, &agents, "crowd", "crowd-1").await?;
    fixtures.listed("crowd-1", 1).await?;
    // A kubelet could write these addresses, which cover nearly all of the pool, if no policy prevented that.
    fixtures.node("nobody", "crowd-liar").await?;
    let address =
        |n: u32| json!({"type": "InternalIP", "address": Ipv4Addr::from(0x0AAC_0000 + n)});
    let addresses: Vec<Value> = (0..1_000).map(address).collect();
    let lie = Patch::Merge(json!({"status": {"addresses": addresses}}));
    let params = PatchParams::default();
    let lied = fixtures.nodes.patch_status("crowd-liar", &params, &lie);
    lied.await?;
    let pool = fixtures.pool_until("crowd", "lacks the block of sixteen addresses", |pool| {
        let status = pool.status.as_ref();
        status.is_some_and(|it| it.ipv4.as_ref().is_some_and(|it| it.capacity == "63"))
    });
    pool.await?;
    let overlapping = fixtures.condition("crowd", "Overlapping", "True").await?;
    let (named, message) = ("node address 10.172.0.0, ", &overlapping.message);
    assert!(
        message.contains(named) && message.contains(" and 11 more"),
        "five and eleven: {message}"
    );
    // All blocks of the pool except the one with the reserved addresses can be allocated.
    fixtures.keep_free("crowd", 63 * 16).await?;
    let listed = fixtures.listed("crowd-1", 63).await?;
    assert!(!listed.contains(&"10.172.0.0/28".to_owned()), "{listed:?}");
    Ok(())
}
