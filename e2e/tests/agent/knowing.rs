//! ADDs of pods whose objects the agent has seen or not seen; nodes that have no block until a pod asks for one.

use std::fs;
use std::process::Command;

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::binary;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, Options, TestCluster};
use cadastre_node::{Op, OpErrorKind};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::{FLAGS, Machine, add_of, pool, shared};

async fn pod(hand: &Fixtures, name: &str, notes: Value) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "annotations": notes},
        "spec": {"nodeName": "known-1", "containers": [{"name": "c", "image": "none"}]},
    });
    let pod = serde_json::from_value(pod).unwrap();
    hand.pods
        .create(&PostParams::default(), &pod)
        .await
        .unwrap()
}

#[tokio::test]
async fn pods_that_were_known_get_their_own_and_others_wait_while_nobody_can_tell() {
    let mut stage = TestCluster::start(Options::default(), &FLAGS)
        .await
        .unwrap();
    let hand = stage.fixtures().await.unwrap();
    let rests = |more: Value| {
        let mut terms = json!({"cooldownSeconds": 0});
        crate::merge(&mut terms, more);
        terms
    };
    pool(&hand, "known-a", "10.35.0.0/24", rests(json!({}))).await;
    pool(
        &hand,
        "known-b",
        "10.35.1.0/24",
        rests(json!({"assignment": "Manual"})),
    )
    .await;
    let flags = ["--add-wait", "2"];
    let (mut machine, _) = Machine::of_group(&stage.control_plane, &hand, "known", &flags).await;
    let named = pod(&hand, "named", json!({"cadastre.dev/pools": "known-b"})).await;
    let given = async |machine: &Machine, pod: &Pod, id: &str| {
        let given = machine.add_with(add_of(pod, id)).await;
        machine.del(id).await;
        given.map_err(|refusal| refusal.why)
    };
    let is_of_b = |given: &Result<String, OpErrorKind>| {
        given.as_ref().is_ok_and(|it| it.starts_with("10.35.1."))
    };
    until("its pool has a block here", LIMIT, async || {
        Ok(is_of_b(&given(&machine, &named, "n1").await).then_some(()))
    })
    .await
    .unwrap();

    // While no agent runs, the CNI plugin decides by the pods that the agent has recorded in the store. So it must find
    // the pod's annotation there.
    until("it is noted", LIMIT, async || {
        machine.kill();
        let known = given(&machine, &named, "n2").await;
        machine.start(&stage.control_plane);
        machine.ready().await;
        Ok(is_of_b(&known).then_some(()))
    })
    .await
    .unwrap();
    machine.kill();
    let late = pod(&hand, "late", json!({"cadastre.dev/pools": "known-b"})).await;
    assert_eq!(
        given(&machine, &late, "l1").await,
        Err(OpErrorKind::PodUnknown)
    );

    // Without the API server the agent decides by the same recorded pods.
    stage.control_plane.kill_apiserver().unwrap();
    machine.start(&stage.control_plane);
    machine.serves_alone().await;
    assert!(is_of_b(&given(&machine, &named, "n3").await));
    assert_eq!(
        given(&machine, &late, "l2").await,
        Err(OpErrorKind::PodUnknown)
    );
    let refused = [("verb", "ADD"), ("result", "podUnknown")];
    let count = machine
        .figure("cadastre_agent_requests_total", &refused)
        .await;
    assert!(count > 0.5, "{count}");

    stage.control_plane.start_apiserver().await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    until("it is known now", LIMIT, async || {
        Ok(is_of_b(&given(&machine, &late, "l3").await).then_some(()))
    })
    .await
    .unwrap();
    // A pool with `unknownPods: Serve` assigns addresses to pods that the agent has not seen.
    let serves = rests(json!({
        "unknownPods": "Serve", "ipv4": {"cidrs": ["10.35.0.0/24"], "blockSize": 28},
    }));
    hand.change_pool("known-a", serves).await.unwrap();
    let says = |it: &cadastre_api::NodeSubnet| {
        let mut pools = it.spec.pools.iter();
        pools.any(|it| it.terms.unknown_pods == cadastre_api::UnknownPods::Serve)
    };
    hand.subnet_until("known-1", "says so", says).await.unwrap();
    let stranger = async |machine: &Machine| {
        let mut of_nobody = add_of(&late, "s1");
        of_nobody.pod.as_mut().unwrap().uid = "another".to_owned();
        let given = machine.add_with(of_nobody).await;
        machine.del("s1").await;
        given
    };
    until("a stranger is served", LIMIT, async || {
        let given = stranger(&machine).await;
        Ok(given.ok().filter(|it| it.starts_with("10.35.0.")))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_node_whose_pools_give_nothing_unasked_is_ready_to_ask() {
    let (stage, hand) = shared().await;
    for (nth, (name, terms)) in [
        ("askdemand", json!({"firstBlock": "OnDemand"})),
        ("askmanual", json!({"assignment": "Manual"})),
        (
            "askspace",
            json!({"namespaceSelector": {"matchLabels": {"a": "b"}}}),
        ),
        (
            "asklabel",
            json!({"podSelector": {"matchLabels": {"a": "b"}}}),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        pool(&hand, name, &format!("10.36.{nth}.0/24"), terms).await;
        let folder = tempfile::tempdir().unwrap();
        let conf = folder.path().join("05-cadastre.conflist");
        let flags = ["--cni-conf", conf.to_str().unwrap()];
        let (machine, _) = Machine::of_group(&stage.control_plane, &hand, name, &flags).await;
        let text = fs::read_to_string(&conf).unwrap();
        assert!(text.contains("0.0.0.0/0"), "{name}: {text}");
        machine.ask(Op::Status).await.unwrap();
        let subnet = hand.subnets.get(&format!("{name}-1")).await.unwrap();
        assert!(
            subnet.spec.blocks.is_empty(),
            "{name}: nothing was asked for"
        );
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_written_is_told_at_once_and_mends_itself() {
    let (stage, hand) = shared().await;
    pool(&hand, "stuck", "10.37.0.0/24", json!({})).await;
    let (mut machine, _) = Machine::of_group(&stage.control_plane, &hand, "stuck", &[]).await;
    let first = machine.add("c1").await.unwrap();
    let (store, aside) = (machine.store(), machine.path("aside"));
    fs::rename(&store, &aside).unwrap();
    fs::create_dir(&store).unwrap();
    let refusal = machine.add("c2").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Store, "{refusal}");
    let refusal = machine.ask(Op::Status).await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Store, "{refusal}");
    until("it is not ready", LIMIT, async || {
        let word = machine.agent().ready().await.err().map(|it| it.to_string());
        Ok(word.filter(|it| it.contains("node.redb")))
    })
    .await
    .unwrap();
    fs::remove_dir(&store).unwrap();
    fs::rename(&aside, &store).unwrap();
    machine.ready().await;
    machine.ask(Op::Status).await.unwrap();
    assert_eq!(machine.add("c1").await.unwrap(), first);
}

#[tokio::test]
async fn a_store_that_is_removed_under_a_running_agent_is_noticed_before_anything_is_answered() {
    let (stage, hand) = shared().await;
    pool(&hand, "pulled", "10.38.0.0/24", json!({})).await;
    let flags = ["--publish-interval", "0.5"];
    let (machine, _) = Machine::of_group(&stage.control_plane, &hand, "pulled", &flags).await;
    let first = machine.add("c1").await.unwrap();
    crate::publishes(&hand, "pulled-1", vec![first.clone()]).await;
    fs::remove_file(machine.store()).unwrap();
    let refusal = machine.add("c2").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    let second = until("it is made anew", LIMIT, async || {
        Ok(machine.add("c2").await.ok())
    });
    assert_ne!(second.await.unwrap(), first);
    assert_eq!(machine.add("c1").await.unwrap(), first);
}

#[tokio::test]
async fn a_second_agent_with_sockets_elsewhere_does_not_get_the_store() {
    let (stage, hand) = shared().await;
    pool(&hand, "one", "10.39.0.0/24", json!({})).await;
    let (machine, _) = Machine::of_group(&stage.control_plane, &hand, "one", &[]).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let done = Command::new(binary().unwrap())
        .args([
            "agent",
            "--admin-address",
            "127.0.0.1:0",
            "--node-name",
            "one-1",
            "--cni-socket",
        ])
        .arg(at("c.sock"))
        .arg("--socket")
        .arg(at("a.sock"))
        .arg("--store")
        .arg(machine.store())
        .arg("--kubeconfig")
        .arg(stage.control_plane.kubeconfig(ADMIN).unwrap())
        .output()
        .unwrap();
    let text = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    assert_eq!(done.status.code(), Some(1), "{text}");
    let lock = machine.path("lib/agent.lock");
    assert!(
        text.contains("another agent") && text.contains(lock.to_str().unwrap()),
        "{text}"
    );
    machine.add("c1").await.unwrap();
}
