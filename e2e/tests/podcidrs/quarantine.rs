//! Ranges of a deleted node are quarantined before they are free. As long as the ranges are quarantined, the machine of
//! the deleted node can get them back.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::{LIMIT, node_of_group};
use cadastre_e2e::wait::until;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::{alone, shared};

async fn until_time(time: Timestamp) -> Result<()> {
    until(&format!("it is {time}"), LIMIT, async || {
        Ok((Timestamp::now() >= time).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_range_is_quarantined_for_the_pools_time_and_then_its_record_is_deleted() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.40.0.0/24"]}, "quarantineSeconds": 3});
    hand.pool("rest", spec).await?;
    let node = hand.node("rest", "rest-1").await?;
    let cidrs = hand.served("rest-1").await?;
    hand.subnet_until("rest-1", "is there", |_| true).await?;

    let (start, wall) = (Instant::now(), Timestamp::now());
    hand.delete_node("rest-1").await?;
    let subnet = hand
        .subnet_until("rest-1", "lists the deleted node", |it| {
            !it.spec.quarantined.is_empty()
        })
        .await?;
    assert_eq!(
        (subnet.spec.node_uid, subnet.spec.pod_cidrs.len()),
        (None, 0)
    );
    let previous = &subnet.spec.quarantined[0];
    assert_eq!(Some(&previous.node_uid), node.metadata.uid.as_ref());
    assert_eq!(previous.pod_cidrs[0].cidr, cidrs[0]);
    assert!(previous.until.0 >= wall + SignedDuration::from_secs(3));
    hand.waiting_node("rest", "rest-2").await?;
    assert_eq!(hand.served("rest-2").await?, cidrs);
    assert!(
        start.elapsed() >= Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    hand.subnet_gone("rest-1").await?;
    Ok(())
}

#[tokio::test]
async fn a_node_that_is_being_deleted_keeps_its_range_until_it_is_gone() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.41.0.0/24"]}, "quarantineSeconds": 0});
    hand.pool("fin", spec).await?;
    let mut node = node_of_group("fin", "fin-1");
    node.metadata.finalizers = Some(vec!["cadastre.dev/e2e".to_owned()]);
    hand.create_node(node).await?;
    let cidrs = hand.served("fin-1").await?;
    hand.subnet_until("fin-1", "is there", |_| true).await?;
    hand.delete_node("fin-1").await?;
    // Watch events of nodes come in order. So when the controller reports `fin-2`, it knows that `fin-1` is being
    // deleted.
    hand.waiting_node("fin", "fin-2").await?;
    assert!(hand.pod_cidrs("fin-2").await?.is_empty());
    let subnet = hand.subnets.get("fin-1").await?;
    assert_eq!(subnet.spec.pod_cidrs[0].cidr, cidrs[0]);
    assert!(subnet.spec.node_uid.is_some() && subnet.spec.quarantined.is_empty());

    hand.change_node("fin-1", json!({"metadata": {"finalizers": null}}))
        .await?;
    assert_eq!(hand.served("fin-2").await?, cidrs);
    hand.subnet_gone("fin-1").await?;
    Ok(())
}

#[tokio::test]
async fn a_range_is_not_given_on_while_a_pod_has_an_address_of_it() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.42.0.0/23"]}, "ipv6": {"cidrs": ["fd00:42::/63"]},
        "quarantineSeconds": 1,
    });
    hand.pool("pod", spec).await?;
    for name in ["pod-1", "pod-2"] {
        hand.node("pod", name).await?;
    }
    let first = hand.served("pod-1").await?;
    let second = hand.served("pod-2").await?;
    let address = |cidr: &str, host: &str| cidr.replace(".0/24", host).replace("::/64", host);
    // A pod with an address of one family keeps the ranges of both families quarantined.
    hand.pod("pod-1", "pod-1", &[&address(&first[0], ".17")])
        .await?;
    hand.pod("pod-2", "pod-2", &[&address(&second[1], "::17")])
        .await?;
    for name in ["pod-1", "pod-2"] {
        hand.delete_node(name).await?;
    }
    for name in ["pod-3", "pod-4"] {
        hand.waiting_node("pod", name).await?;
    }
    let mut over = Timestamp::UNIX_EPOCH;
    for name in ["pod-1", "pod-2"] {
        let subnet = hand
            .subnet_until(name, "is quarantined", |it| !it.spec.quarantined.is_empty())
            .await?;
        over = over.max(subnet.spec.quarantined[0].until.0);
    }
    until_time(over + SignedDuration::from_secs(2)).await?;
    for name in ["pod-3", "pod-4"] {
        assert!(
            hand.pod_cidrs(name).await?.is_empty(),
            "{name} was served too early"
        );
    }

    hand.delete_pod("pod-1").await?;
    until("one of the two is served", LIMIT, async || {
        let three = hand.pod_cidrs("pod-3").await?;
        let four = hand.pod_cidrs("pod-4").await?;
        Ok((three == first || four == first).then_some(()))
    })
    .await?;
    // A pod that has finished uses no address, whatever its status contains. So the range becomes free.
    let done = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    hand.pods
        .patch_status("pod-2", &PatchParams::default(), &done)
        .await?;
    let got = [hand.served("pod-3").await?, hand.served("pod-4").await?];
    assert!(got.contains(&first) && got.contains(&second), "{got:?}");
    for name in ["pod-1", "pod-2"] {
        hand.subnet_gone(name).await?;
    }
    hand.delete_pod("pod-2").await?;
    Ok(())
}

fn machine(name: &str, provider: Option<&str>, machine: &str) -> Node {
    let mut node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"group": "back"}},
        "status": {"nodeInfo": {
            "machineID": machine, "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "",
            "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "",
            "operatingSystem": "", "architecture": "",
        }},
    }))
    .unwrap();
    node.spec.get_or_insert_default().provider_id = provider.map(ToOwned::to_owned);
    node
}

#[tokio::test]
async fn the_same_machine_gets_its_range_back_and_another_one_under_its_name_does_not() -> Result<()>
{
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.43.0.0/16"]}, "quarantineSeconds": 600});
    hand.pool("back", spec).await?;
    for (name, before, after, same) in [
        (
            "back-1",
            (Some("cloud://1"), "m1"),
            (Some("cloud://1"), "m1-reinstalled"),
            true,
        ),
        ("back-2", (None, "m2"), (None, "m2"), true),
        (
            "back-3",
            (Some("cloud://3"), "m3"),
            (Some("cloud://33"), "m3"),
            false,
        ),
        ("back-4", (None, "m4"), (None, "m44"), false),
    ] {
        hand.create_node(machine(name, before.0, before.1)).await?;
        let had = hand.served(name).await?;
        hand.recorded(name).await?;
        let has = come_back(&hand, name, after).await?;
        assert_eq!(has == had, same, "{name} had {had:?} and got {has:?}");
        let subnet = hand.subnets.get(name).await?;
        let resting: Vec<_> = subnet
            .spec
            .quarantined
            .iter()
            .map(|it| &it.pod_cidrs[0].cidr)
            .collect();
        assert_eq!(resting, if same { vec![] } else { vec![&had[0]] });
        // A machine gets its range back each time that its Node is deleted and created again.
        assert_eq!(come_back(&hand, name, after).await?, has);
    }
    Ok(())
}

/// Deletes the node and creates it again with this provider id and machine id. Waits until the NodeSubnet has the new
/// node's UID and does not list the new node's podCIDR as quarantined. Returns the new node's podCIDRs.
async fn come_back(
    hand: &Fixtures,
    name: &str,
    as_machine: (Option<&str>, &str),
) -> Result<Vec<String>> {
    hand.delete_node(name).await?;
    hand.subnet_until(name, "is quarantined", |it| it.spec.node_uid.is_none())
        .await?;
    let node = hand
        .create_node(machine(name, as_machine.0, as_machine.1))
        .await?;
    let has = hand.served(name).await?;
    hand.subnet_until(name, "is of the new node alone", |it| {
        let mut previous = it.spec.quarantined.iter().flat_map(|it| &it.pod_cidrs);
        it.spec.node_uid == node.metadata.uid && previous.all(|it| it.cidr != has[0])
    })
    .await?;
    Ok(has)
}

#[tokio::test]
async fn a_quarantine_survives_a_restart_and_begins_for_a_node_deleted_meanwhile() -> Result<()> {
    let (mut stage, hand, _one) = alone(&[]).await?;
    let spec = json!({"ipv4": {"cidrs": ["10.44.0.0/23"]}, "quarantineSeconds": 8});
    hand.pool("long", spec).await?;
    let mut had = Vec::new();
    for name in ["long-1", "long-2"] {
        had.push(hand.served_node("long", name).await?);
        hand.recorded(name).await?;
    }
    let first_dead = Instant::now();
    hand.delete_node("long-1").await?;
    let rests = hand
        .subnet_until("long-1", "is quarantined", |it| {
            !it.spec.quarantined.is_empty()
        })
        .await?;
    let mut second_dead = Instant::now();
    stage
        .restart(&[], async {
            second_dead = Instant::now();
            hand.delete_node("long-2").await
        })
        .await?;
    for name in ["long-3", "long-4"] {
        hand.waiting_node("long", name).await?;
    }
    let still = hand.subnets.get("long-1").await?;
    assert_eq!(still.spec.quarantined, rests.spec.quarantined);

    let mut times = Vec::new();
    until("both are served", LIMIT, async || {
        for name in ["long-3", "long-4"] {
            let cidrs = hand.pod_cidrs(name).await?;
            if !cidrs.is_empty() && !times.iter().any(|(it, _)| *it == cidrs) {
                times.push((cidrs, Instant::now()));
            }
        }
        Ok((times.len() == 2).then_some(()))
    })
    .await?;
    for (cidrs, dead) in had.iter().zip([first_dead, second_dead]) {
        let (_, at) = times.iter().find(|(it, _)| it == cidrs).unwrap();
        assert!(
            *at - dead >= Duration::from_secs(8),
            "{cidrs:?} after {:?}",
            *at - dead
        );
    }
    for name in ["long-1", "long-2"] {
        hand.subnet_gone(name).await?;
    }
    Ok(())
}
