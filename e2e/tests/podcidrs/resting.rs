//! Ranges of a deleted node are quarantined before they are free. Until then, the same machine can get them back.

use std::time::{Duration, Instant};

use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::{LIMIT, labelled};
use cadastre_e2e::wait::until;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::{alone, shared};

/// Creates a node that waits for a quarantined range, and returns when the controller has reported that the node waits.
async fn next_in_line(hand: &Fixtures, group: &str, name: &str) {
    let node = hand.node(group, name).await.unwrap();
    hand.event(&node.metadata.uid.unwrap(), "WaitingForPodCIDR")
        .await
        .unwrap();
}

async fn until_time(time: Timestamp) {
    until(&format!("it is {time}"), LIMIT, async || {
        Ok((Timestamp::now() >= time).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_range_rests_for_the_pools_time_and_its_record_goes_with_it() {
    let (_, hand) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.40.0.0/24"]}, "quarantineSeconds": 3});
    hand.pool("rest", spec).await.unwrap();
    let node = hand.node("rest", "rest-1").await.unwrap();
    let cidrs = hand.served("rest-1").await.unwrap();
    hand.subnet_until("rest-1", "is there", |_| true)
        .await
        .unwrap();

    let (start, wall) = (Instant::now(), Timestamp::now());
    hand.delete_node("rest-1").await.unwrap();
    let subnet = hand
        .subnet_until("rest-1", "tells of the node that is gone", |it| {
            !it.spec.quarantined.is_empty()
        })
        .await
        .unwrap();
    assert_eq!(
        (subnet.spec.node_uid, subnet.spec.pod_cidrs.len()),
        (None, 0)
    );
    let previous = &subnet.spec.quarantined[0];
    assert_eq!(Some(&previous.node_uid), node.metadata.uid.as_ref());
    assert_eq!(previous.pod_cidrs[0].cidr, cidrs[0]);
    assert!(previous.until.0 >= wall + SignedDuration::from_secs(3));
    next_in_line(&hand, "rest", "rest-2").await;
    assert_eq!(hand.served("rest-2").await.unwrap(), cidrs);
    assert!(
        start.elapsed() >= Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    hand.subnet_gone("rest-1").await.unwrap();
}

#[tokio::test]
async fn a_node_that_is_being_deleted_keeps_its_range_until_it_is_gone() {
    let (_, hand) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.41.0.0/24"]}, "quarantineSeconds": 0});
    hand.pool("fin", spec).await.unwrap();
    let mut node = labelled(
        cadastre_e2e::nodes::node("fin-1", "192.0.2.1"),
        &[("group", "fin")],
    );
    node.metadata.finalizers = Some(vec!["cadastre.dev/e2e".to_owned()]);
    hand.create_node(node).await.unwrap();
    let cidrs = hand.served("fin-1").await.unwrap();
    hand.subnet_until("fin-1", "is there", |_| true)
        .await
        .unwrap();
    hand.delete_node("fin-1").await.unwrap();
    // Watch events of nodes come in order. So when the controller reports this node, it has seen that the other is
    // being deleted.
    next_in_line(&hand, "fin", "fin-2").await;
    assert!(hand.pod_cidrs("fin-2").await.unwrap().is_empty());
    let subnet = hand.subnets.get("fin-1").await.unwrap();
    assert_eq!(subnet.spec.pod_cidrs[0].cidr, cidrs[0]);
    assert!(subnet.spec.node_uid.is_some() && subnet.spec.quarantined.is_empty());

    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    hand.nodes
        .patch("fin-1", &PatchParams::default(), &patch)
        .await
        .unwrap();
    assert_eq!(hand.served("fin-2").await.unwrap(), cidrs);
    hand.subnet_gone("fin-1").await.unwrap();
}

#[tokio::test]
async fn a_range_is_not_given_on_while_a_pod_has_an_address_of_it() {
    let (_, hand) = shared().await;
    let spec = json!({
        "ipv4": {"cidrs": ["10.42.0.0/23"]}, "ipv6": {"cidrs": ["fd00:42::/63"]},
        "quarantineSeconds": 1,
    });
    hand.pool("pod", spec).await.unwrap();
    for name in ["pod-1", "pod-2"] {
        hand.node("pod", name).await.unwrap();
    }
    let first = hand.served("pod-1").await.unwrap();
    let second = hand.served("pod-2").await.unwrap();
    let address = |cidr: &str, host: &str| cidr.replace(".0/24", host).replace("::/64", host);
    // A pod with an address of one family keeps the ranges of both families quarantined.
    hand.pod("pod-1", "pod-1", &[&address(&first[0], ".17")])
        .await
        .unwrap();
    hand.pod("pod-2", "pod-2", &[&address(&second[1], "::17")])
        .await
        .unwrap();
    for name in ["pod-1", "pod-2"] {
        hand.delete_node(name).await.unwrap();
    }
    for name in ["pod-3", "pod-4"] {
        next_in_line(&hand, "pod", name).await;
    }
    let mut over = Timestamp::UNIX_EPOCH;
    for name in ["pod-1", "pod-2"] {
        let subnet = hand
            .subnet_until(name, "rests", |it| !it.spec.quarantined.is_empty())
            .await
            .unwrap();
        over = over.max(subnet.spec.quarantined[0].until.0);
    }
    until_time(over + SignedDuration::from_secs(2)).await;
    for name in ["pod-3", "pod-4"] {
        assert!(
            hand.pod_cidrs(name).await.unwrap().is_empty(),
            "{name} was served too early"
        );
    }

    hand.delete_pod("pod-1").await.unwrap();
    until("one of the two is served", LIMIT, async || {
        let three = hand.pod_cidrs("pod-3").await?;
        let four = hand.pod_cidrs("pod-4").await?;
        Ok((three == first || four == first).then_some(()))
    })
    .await
    .unwrap();
    // A pod that has finished uses no address, whatever its status contains. So the range becomes free.
    let done = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    hand.pods
        .patch_status("pod-2", &PatchParams::default(), &done)
        .await
        .unwrap();
    let got = [
        hand.served("pod-3").await.unwrap(),
        hand.served("pod-4").await.unwrap(),
    ];
    assert!(got.contains(&first) && got.contains(&second), "{got:?}");
    for name in ["pod-1", "pod-2"] {
        hand.subnet_gone(name).await.unwrap();
    }
    hand.delete_pod("pod-2").await.unwrap();
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
async fn the_same_machine_gets_its_range_back_and_another_one_under_its_name_does_not() {
    let (_, hand) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.43.0.0/16"]}, "quarantineSeconds": 600});
    hand.pool("back", spec).await.unwrap();
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
        hand.create_node(machine(name, before.0, before.1))
            .await
            .unwrap();
        let had = hand.served(name).await.unwrap();
        hand.subnet_until(name, "is there", |it| !it.spec.pod_cidrs.is_empty())
            .await
            .unwrap();
        let has = come_back(&hand, name, after).await;
        assert_eq!(has == had, same, "{name} had {had:?} and got {has:?}");
        let subnet = hand.subnets.get(name).await.unwrap();
        let resting: Vec<_> = subnet
            .spec
            .quarantined
            .iter()
            .map(|it| &it.pod_cidrs[0].cidr)
            .collect();
        assert_eq!(resting, if same { vec![] } else { vec![&had[0]] });
        // The same machine gets its range back any number of times.
        assert_eq!(come_back(&hand, name, after).await, has);
    }
}

/// Deletes the node and creates it again with this provider id and machine id. Returns its podCIDRs, once its
/// NodeSubnet belongs to the new node and the first podCIDR is not quarantined in it.
async fn come_back(hand: &Fixtures, name: &str, as_machine: (Option<&str>, &str)) -> Vec<String> {
    hand.delete_node(name).await.unwrap();
    hand.subnet_until(name, "rests", |it| it.spec.node_uid.is_none())
        .await
        .unwrap();
    let node = hand
        .create_node(machine(name, as_machine.0, as_machine.1))
        .await
        .unwrap();
    let has = hand.served(name).await.unwrap();
    hand.subnet_until(name, "is of the new node alone", |it| {
        let mut previous = it.spec.quarantined.iter().flat_map(|it| &it.pod_cidrs);
        it.spec.node_uid == node.metadata.uid && previous.all(|it| it.cidr != has[0])
    })
    .await
    .unwrap();
    has
}

#[tokio::test]
async fn a_rest_survives_a_restart_and_a_death_that_nobody_saw_begins_one() {
    let (mut stage, hand, _one) = alone(&[]).await;
    let spec = json!({"ipv4": {"cidrs": ["10.44.0.0/23"]}, "quarantineSeconds": 8});
    hand.pool("long", spec).await.unwrap();
    let mut had = Vec::new();
    for name in ["long-1", "long-2"] {
        hand.node("long", name).await.unwrap();
        had.push(hand.served(name).await.unwrap());
        hand.subnet_until(name, "is there", |it| !it.spec.pod_cidrs.is_empty())
            .await
            .unwrap();
    }
    let first_dead = Instant::now();
    hand.delete_node("long-1").await.unwrap();
    let rests = hand
        .subnet_until("long-1", "rests", |it| !it.spec.quarantined.is_empty())
        .await
        .unwrap();
    let mut second_dead = Instant::now();
    stage
        .restart(&[], async {
            second_dead = Instant::now();
            hand.delete_node("long-2").await
        })
        .await
        .unwrap();
    for name in ["long-3", "long-4"] {
        next_in_line(&hand, "long", name).await;
    }
    let still = hand.subnets.get("long-1").await.unwrap();
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
    .await
    .unwrap();
    for (cidrs, dead) in had.iter().zip([first_dead, second_dead]) {
        let (_, at) = times.iter().find(|(it, _)| it == cidrs).unwrap();
        assert!(
            *at - dead >= Duration::from_secs(8),
            "{cidrs:?} after {:?}",
            *at - dead
        );
    }
    for name in ["long-1", "long-2"] {
        hand.subnet_gone(name).await.unwrap();
    }
}
