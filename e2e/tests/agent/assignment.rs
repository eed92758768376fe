//! The first block, ADD, DEL, CHECK, lists, and annotations of pods.

use std::collections::BTreeSet;

use cadastre_agent::grpc::{client, v1};
use cadastre_node::{Add, Check, Gc, Op, OpErrorKind, OpOutcome};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::{
    Machine, add, add_of, addr, annotated_pod, attachment, eventually, pool, publishes, shared,
    start, uid,
};

#[tokio::test]
async fn a_node_gets_its_first_block_and_gives_from_it() {
    let (api, mut machine) = start("give", "10.1.0.0/24", json!({}), &[]).await;
    let OpOutcome::Assigned(given) = machine.ask(Op::Add(add("c1"))).await.unwrap() else {
        panic!("no address")
    };
    let first = &given.addresses[0];
    assert_eq!((first.prefix, first.pool.as_str()), (28, "give"));
    assert!(first.block.contains_addr(first.address));
    assert_eq!(first.gateway.unwrap().value, first.block.first().value + 1);
    assert!(first.address > first.gateway.unwrap());
    let again = machine.ask(Op::Add(add("c1"))).await.unwrap();
    assert_eq!(
        again,
        OpOutcome::Assigned(given.clone()),
        "asked twice, given once"
    );
    let second = machine.add("c2").await.unwrap();
    let first = first.address.to_string();
    assert_ne!(first, second);
    publishes(&api, "give-1", vec![first.clone(), second.clone()]).await;
    let counts_both = |it: &cadastre_api::NodeSubnet| {
        let mut blocks = it.status.iter().flat_map(|it| &it.blocks);
        blocks.next().is_some_and(|it| it.used == 2)
    };
    let told = api.subnet_until("give-1", "counts both", counts_both);
    let status = told.await.unwrap().status.unwrap();
    assert_eq!(status.node_uid, Some(uid(&api, "give-1").await));
    let list = api.addresses.get("give-1").await.unwrap();
    let owner = &list.metadata.owner_references.as_ref().unwrap()[0];
    let subnet = api.subnets.get("give-1").await.unwrap();
    assert_eq!(Some(&owner.uid), subnet.metadata.uid.as_ref());
    assert_eq!(Some(&list.spec.node_uid), status.node_uid.as_ref());
    assert!(!list.spec.boot_id.is_empty() && list.spec.as_of.is_some());
    assert_eq!(list.spec.entries().next().unwrap().handle, "net/c1");
    assert_eq!((status.blocks[0].used, status.blocks[0].free), (2, 11));
    assert_eq!(status.pools[0].demand, 5);

    let check = |addresses: &[&str]| {
        Op::Check(Check {
            attachment: attachment("c1"),
            addresses: addresses.iter().map(|it| addr(it)).collect(),
        })
    };
    machine.ask(check(&[&first])).await.unwrap();
    let other = machine.ask(check(&[&second])).await.unwrap_err();
    assert_eq!(other.why, OpErrorKind::Mismatch);
    machine.del("c1").await;
    machine.del("c1").await;
    publishes(&api, "give-1", vec![second.clone()]).await;
    assert_ne!(machine.add("c3").await.unwrap(), first, "it cools");
    machine
        .ask(Op::Gc(Gc {
            network: "net".to_owned(),
            valid: vec![("c2".to_owned(), "eth0".to_owned())],
        }))
        .await
        .unwrap();
    assert_eq!(machine.in_use().await, [("c2".to_owned(), second)]);
    machine.ask(Op::Status).await.unwrap();
    machine.stop().await;
}

#[tokio::test]
async fn other_programs_ask_over_grpc() {
    let (cluster, api) = shared().await;
    pool(
        &api,
        "grpc",
        "10.2.0.0/24",
        json!({"ipv6": {"cidrs": ["fd00:2::/112"]}, "routes": [{"dst": "0.0.0.0/0"}]}),
    )
    .await;
    let machine = Machine::of_group(&cluster.control_plane, &api, "grpc", &[]).await;
    let mut client = client(&machine.socket());
    let pong = client.ping(v1::PingRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (pong.node.as_str(), Some(pong.node_uid)),
        ("grpc-1", Some(uid(&api, "grpc-1").await))
    );
    let attachment = v1::Attachment {
        network: "net".to_owned(),
        container_id: "c1".to_owned(),
        ifname: "eth0".to_owned(),
    };
    let request = v1::AddRequest {
        attachment: Some(attachment.clone()),
        ..v1::AddRequest::default()
    };
    let given = client.add(request.clone()).await.unwrap().into_inner();
    assert_eq!(given.addresses.len(), 2, "{given:?}");
    assert!(given.addresses[1].address.starts_with("fd00:2:"));
    assert_eq!(given.routes[0].destination, "0.0.0.0/0");
    let again = client.add(request.clone()).await.unwrap().into_inner();
    assert_eq!(again, given);
    let refused = client
        .add(v1::AddRequest {
            attachment: Some(v1::Attachment {
                container_id: "c2".to_owned(),
                ..attachment.clone()
            }),
            addresses: vec![given.addresses[0].address.clone()],
            ..v1::AddRequest::default()
        })
        .await
        .unwrap_err();
    assert_eq!(refused.metadata().get("cadastre-why").unwrap(), "taken");
    let empty = client.add(v1::AddRequest::default()).await.unwrap_err();
    assert!(empty.message().contains("network"), "{empty}");
    let check = v1::CheckRequest {
        attachment: Some(attachment.clone()),
        addresses: given
            .addresses
            .iter()
            .map(|it| it.address.clone())
            .collect(),
    };
    client.check(check).await.unwrap();
    client.status(v1::StatusRequest {}).await.unwrap();
    let list = machine.list().await;
    assert_eq!((list.allocations.len(), list.blocks.len()), (1, 2));
    let mut states = client
        .watch(v1::WatchRequest {})
        .await
        .unwrap()
        .into_inner();
    let state = states.message().await.unwrap().unwrap();
    assert_eq!(
        (state.ranges.len(), state.pools),
        (2, vec!["grpc".to_owned()])
    );
    assert_eq!(state.pool_cidrs, ["10.2.0.0/24", "fd00:2::/112"]);
    let del = v1::DelRequest {
        attachment: Some(attachment),
    };
    client.del(del).await.unwrap();
    assert!(machine.in_use().await.is_empty());
}

#[tokio::test]
async fn blocks_are_asked_for_before_the_last_address_is_gone_and_surplus_is_let_go() {
    let terms = json!({"warm": {"low": 3, "high": 6}, "cooldownSeconds": 0, "idleSeconds": 86400});
    let flags = ["--add-wait", "0"];
    let (api, machine) = start("warm", "10.3.0.0/24", terms, &flags).await;
    // With 11 of 13 addresses in use, fewer than `warm.low` are free, so the agent asks for another block.
    let mut given = BTreeSet::new();
    for (upto, blocks) in [(11, 2), (24, 3)] {
        for n in given.len()..upto {
            let address = machine.add(&format!("c{n}")).await.unwrap();
            assert!(given.insert(address), "given twice");
        }
        api.listed("warm-1", blocks).await.unwrap();
    }
    for n in 0..given.len() {
        machine.del(&format!("c{n}")).await;
    }
    // Once all addresses are released, more than `warm.high` are free, so the agent releases blocks until one is left.
    api.listed("warm-1", 1).await.unwrap();
    machine.add("last").await.unwrap();
}

#[tokio::test]
async fn a_pod_s_annotations_choose_pools_and_addresses() {
    let (cluster, api) = shared().await;
    pool(&api, "note-a", "10.4.0.0/28", json!({"priority": 5})).await;
    pool(
        &api,
        "note-b",
        "10.4.1.0/28",
        json!({"assignment": "Manual"}),
    )
    .await;
    let machine = Machine::of_group(&cluster.control_plane, &api, "note", &[]).await;
    let annotated = async |name: &str, annotations: Value| {
        annotated_pod(&api, "default", name, "note-1", annotations).await
    };
    let plain = api.pod("note-plain", "note-1", &[]).await.unwrap();
    let given = machine.add_with(add_of(&plain, "c1")).await.unwrap();
    assert!(given.starts_with("10.4.0."), "{given}");
    let other = annotated("note-other", json!({"cadastre.dev/pools": "note-b"})).await;
    eventually("the watch has shown the annotation", async || {
        machine.del("c2").await;
        let given = machine.add_with(add_of(&other, "c2")).await?;
        anyhow::ensure!(given.starts_with("10.4.1."), "{given}");
        Ok(Some(given))
    })
    .await;
    let fixed = annotated("note-fixed", json!({"cadastre.dev/addresses": "10.4.1.9"})).await;
    eventually("the watch has shown the annotation", async || {
        machine.del("c3").await;
        let given = machine.add_with(add_of(&fixed, "c3")).await?;
        anyhow::ensure!(given == "10.4.1.9", "{given}");
        Ok(Some(()))
    })
    .await;
    let second = Add {
        attachment: cadastre_node::Attachment {
            ifname: "net1".to_owned(),
            ..attachment("c3")
        },
        ..add_of(&fixed, "c3")
    };
    let given = machine.add_with(second).await.unwrap();
    assert!(given.starts_with("10.4.0."), "another network: {given}");

    let wrong = annotated(
        "note-wrong",
        json!({"cadastre.dev/addresses": "10.4.1.0/24"}),
    )
    .await;
    let uid = wrong.uid().unwrap();
    eventually("the watch has shown the annotation", async || {
        machine.del("c4").await;
        machine.add_with(add_of(&wrong, "c4")).await?;
        let told = api.event_count(&uid, "InvalidAnnotation").await?;
        Ok((told == 1).then_some(()))
    })
    .await;
    let text = api.event(&uid, "InvalidAnnotation").await.unwrap();
    assert!(text.contains("10.4.1.0/24"), "{text}");
    let absent = Add {
        pools: vec!["note-z".to_owned()],
        ..add("c5")
    };
    let refusal = machine.add_with(absent).await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::UnknownPool);
    assert!(refusal.text.contains("note-z"), "{refusal}");
}

#[tokio::test]
async fn a_pod_made_anew_has_its_fixed_address_again_while_that_still_rests() {
    let range = "10.17.0.0/26";
    let wide = json!({"cidrs": [range], "blockSize": 26});
    let terms = json!({"ipv4": wide, "cooldownSeconds": 3600});
    let (api, machine) = start("anew", range, terms, &[]).await;
    let fixed = async |name: &str, container: &str| {
        let annotations = json!({"cadastre.dev/addresses": "10.17.0.9"});
        let pod = annotated_pod(&api, "default", name, "anew-1", annotations).await;
        // Until the agent's watch has delivered the annotation, the agent assigns any free address to the pod. So the
        // ADD is repeated.
        eventually("the agent knows what it asks for", async || {
            machine.del(container).await;
            match machine.add_with(add_of(&pod, container)).await {
                Ok(given) => Ok((given == "10.17.0.9").then_some(given)),
                Err(refusal) if refusal.why == OpErrorKind::NotFree => Ok(Some(refusal.text)),
                Err(refusal) => Err(refusal.into()),
            }
        })
        .await
    };
    assert_eq!(fixed("db-0", "c1").await, "10.17.0.9");
    machine.del("c1").await;
    api.delete_pod("db-0").await.unwrap();
    let stranger = fixed("db-1", "c2").await;
    assert!(stranger.contains("cools for another"), "{stranger}");
    assert_eq!(fixed("db-0", "c3").await, "10.17.0.9");
}
