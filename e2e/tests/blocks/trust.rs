//! Statuses that make no sense: each affects only its own node, whose agent gets a report.

use std::net::Ipv4Addr;

use cadastre_api::NodeSubnet;
use cadastre_e2e::fixtures::{Fixtures, GROUP, labelled, with_pod_cidrs};
use cadastre_e2e::nodes;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{blocks, node, shared, write_status};

/// Status and message of the condition `Accepted`.
fn accepted(subnet: &NodeSubnet) -> Option<(&str, &str)> {
    let conditions = &subnet.status.as_ref()?.conditions;
    let condition = conditions.iter().find(|it| it.type_ == "Accepted")?;
    Some((&condition.status, &condition.message))
}

async fn refused(hand: &Fixtures, node: &str, word: &str) {
    hand.subnet_until(node, &format!("is told of {word}"), |it| {
        accepted(it).is_some_and(|(status, message)| status == "False" && message.contains(word))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn what_makes_no_sense_is_left_out_and_told_and_the_rest_is_used() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.70.0.0/22"], "blockSize": 28}, "idleSeconds": 0});
    hand.block_pool("bad", spec).await.unwrap();
    // This node has no agent: the test writes its status.
    let made = hand.node("bad", "bad-1").await.unwrap();
    let uid = made.metadata.uid.unwrap();
    node(&hand, &agents, "bad", "bad-2").await;
    let own = hand.listed("bad-1", 1).await.unwrap()[0].clone();
    let other = hand.listed("bad-2", 1).await.unwrap()[0].clone();
    let listed = hand.subnets.get("bad-1").await.unwrap().spec.blocks;
    let block_uid = listed[0].uid.clone();
    let theirs = hand.subnets.get("bad-2").await.unwrap().spec.blocks[0]
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
        write_status(&hand, "bad-1", status.clone()).await;
        refused(&hand, "bad-1", word).await;
        write_status(&hand, "bad-1", whole.clone()).await;
        hand.subnet_until("bad-1", "is told that all is well", |it| {
            accepted(it).is_some_and(|(status, _)| status == "True")
        })
        .await
        .unwrap();
        assert_eq!(
            hand.listed("bad-1", 1).await.unwrap(),
            std::slice::from_ref(&own),
            "{status}"
        );
    }

    // A node cannot release another node's block, nor release its own block under the UID of an earlier object of
    // that name.
    for stranger in [
        json!({"cidr": other, "uid": theirs, "released": true}),
        json!({"cidr": own, "uid": "of-old", "released": true}),
    ] {
        let reports = json!([{"cidr": own, "uid": block_uid, "used": 1, "free": 15}, stranger]);
        write_status(
            &hand,
            "bad-1",
            json!({"nodeUID": uid, "blocks": reports, "pools": [{"pool": "bad", "demand": 17}]}),
        )
        .await;
        hand.listed("bad-1", 2).await.unwrap();
        assert_eq!(
            hand.listed("bad-2", 1).await.unwrap(),
            std::slice::from_ref(&other)
        );
        write_status(&hand, "bad-1", whole.clone()).await;
        let listed = hand.subnets.get("bad-1").await.unwrap().spec.blocks;
        let second = listed.iter().find(|it| it.cidr != own).unwrap();
        let release = json!([
            {"cidr": own, "uid": block_uid, "used": 1, "free": 15},
            {"cidr": second.cidr, "uid": second.uid, "released": true},
        ]);
        write_status(&hand, "bad-1", json!({"blocks": release})).await;
        hand.listed("bad-1", 1).await.unwrap();
        blocks(&hand, "bad", 2).await;
    }
    // Only the node with the wrong status gets a report.
    let neighbour = hand.subnets.get("bad-2").await.unwrap();
    assert_eq!(accepted(&neighbour), None);
    agents.allocate("bad-2", "bad", "web").await.unwrap();
}

#[tokio::test]
async fn what_an_agent_says_of_an_earlier_node_of_the_name_is_not_read() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.71.0.0/24"]}, "quarantineSeconds": 0});
    hand.block_pool("stale", spec).await.unwrap();
    let first = node(&hand, &agents, "stale", "stale-1").await;
    agents.ask("stale-1", "stale", 200).unwrap();
    hand.listed("stale-1", 4).await.unwrap();
    hand.delete_node("stale-1").await.unwrap();
    // The agent of the deleted node keeps publishing for it.
    let second = hand.node("stale", "stale-1").await.unwrap();
    assert_ne!(first.metadata.uid, second.metadata.uid);
    hand.subnet_until("stale-1", "is of the new node", |it| {
        it.spec.node_uid == second.metadata.uid && it.spec.blocks.len() == 4
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_podcidr_over_a_whole_pool_takes_nothing_from_it() {
    let (_, hand, agents) = shared().await;
    // A kubelet could write this if no policy prevents it.
    let liar = labelled(nodes::node("taken-0", "192.0.2.1"), &[(GROUP, "taken")]);
    let liar = with_pod_cidrs(liar, &["10.171.0.0/16"]);
    let liar = hand.create_node(liar).await.unwrap();
    let spec =
        json!({"ipv4": {"cidrs": ["10.171.8.0/24"], "blockSize": 28}, "maxBlocksPerNode": 1});
    hand.block_pool("taken", spec).await.unwrap();
    node(&hand, &agents, "taken", "taken-1").await;
    hand.listed("taken-1", 1).await.unwrap();
    let pool = hand
        .condition("taken", "PodCIDRTooWide", "True")
        .await
        .unwrap();
    assert!(pool.message.contains("taken-0"), "{}", pool.message);
    let uid = liar.metadata.uid.unwrap();
    let told = hand.event(&uid, "PodCIDRTooWide").await.unwrap();
    assert!(told.contains("10.171.0.0/16"), "{told}");
    // The node gets a block like all others, and its podCIDR is not published to its agent.
    let subnet = hand.listed("taken-0", 1).await.unwrap();
    assert!(subnet[0].starts_with("10.171.8."), "{subnet:?}");
    let subnet = hand.subnets.get("taken-0").await.unwrap();
    assert_eq!(subnet.spec.pod_cidrs, []);
    let free = hand
        .pool_until("taken", "has all but two blocks", |pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|it| it.ipv4.as_ref().is_some_and(|it| it.free == "14"))
        })
        .await;
    free.unwrap();
}

#[tokio::test]
async fn of_a_node_with_a_thousand_addresses_sixteen_count() {
    let (_, hand, agents) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.172.0.0/22"], "blockSize": 28}});
    hand.block_pool("crowd", spec).await.unwrap();
    node(&hand, &agents, "crowd", "crowd-1").await;
    hand.listed("crowd-1", 1).await.unwrap();
    // A kubelet could write this if no policy prevents it: addresses that cover nearly all of the pool.
    hand.node("nobody", "crowd-liar").await.unwrap();
    let address =
        |n: u32| json!({"type": "InternalIP", "address": Ipv4Addr::from(0x0AAC_0000 + n)});
    let addresses: Vec<Value> = (0..1_000).map(address).collect();
    let lie = Patch::Merge(json!({"status": {"addresses": addresses}}));
    let params = PatchParams::default();
    let told = hand.nodes.patch_status("crowd-liar", &params, &lie);
    told.await.unwrap();
    let pool = hand.pool_until("crowd", "lacks the block of sixteen addresses", |pool| {
        let status = pool.status.as_ref();
        status.is_some_and(|it| it.ipv4.as_ref().is_some_and(|it| it.capacity == "63"))
    });
    pool.await.unwrap();
    let told = hand
        .condition("crowd", "Overlapping", "True")
        .await
        .unwrap();
    let (named, message) = ("node address 10.172.0.0, ", &told.message);
    assert!(
        message.contains(named) && message.contains(" and 11 more"),
        "five and eleven: {message}"
    );
    // All other blocks can be allocated.
    agents.ask("crowd-1", "crowd", 63 * 16).unwrap();
    let listed = hand.listed("crowd-1", 63).await.unwrap();
    assert!(!listed.contains(&"10.172.0.0/28".to_owned()), "{listed:?}");
}
