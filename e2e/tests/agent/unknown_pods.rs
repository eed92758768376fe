//! ADDs of pods whose objects the agent has seen or not seen. In other tests, a node has no block until a pod needs
//! one.

use std::fs;
use std::process::Command;

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::binary;
use cadastre_node::{Op, OpErrorKind};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::{
    Machine, add_of, annotated_pod, eventually, merge, own_cluster, pool, publishes, shared, start,
};

#[tokio::test]
async fn pods_that_were_known_get_their_own_and_others_wait_while_nobody_can_tell() {
    let (mut cluster, api) = own_cluster().await;
    let rests = |more: Value| {
        let mut terms = json!({"cooldownSeconds": 0});
        merge(&mut terms, more);
        terms
    };
    pool(&api, "known-a", "10.35.0.0/24", rests(json!({}))).await;
    pool(
        &api,
        "known-b",
        "10.35.1.0/24",
        rests(json!({"assignment": "Manual"})),
    )
    .await;
    let flags = ["--add-wait", "2"];
    let mut machine = Machine::of_group(&cluster.control_plane, &api, "known", &flags).await;
    let named = annotated_pod(
        &api,
        "default",
        "named",
        "known-1",
        json!({"cadastre.dev/pools": "known-b"}),
    )
    .await;
    let given = async |machine: &Machine, pod: &Pod, id: &str| {
        let given = machine.add_with(add_of(pod, id)).await;
        machine.del(id).await;
        given.map_err(|refusal| refusal.why)
    };
    let is_of_b = |given: &Result<String, OpErrorKind>| {
        given.as_ref().is_ok_and(|it| it.starts_with("10.35.1."))
    };
    eventually("its pool has a block here", async || {
        Ok(is_of_b(&given(&machine, &named, "n1").await).then_some(()))
    })
    .await;

    // While no agent runs, the CNI plugin uses the agent's records of pods in the store. So the test waits until the
    // store has the pod's annotation.
    eventually("it is noted", async || {
        machine.kill();
        let known = given(&machine, &named, "n2").await;
        machine.start();
        machine.ready().await;
        Ok(is_of_b(&known).then_some(()))
    })
    .await;
    machine.kill();
    let late = annotated_pod(
        &api,
        "default",
        "late",
        "known-1",
        json!({"cadastre.dev/pools": "known-b"}),
    )
    .await;
    assert_eq!(
        given(&machine, &late, "l1").await,
        Err(OpErrorKind::PodUnknown)
    );

    // Without the API server, the agent uses the records of pods in its store.
    cluster.control_plane.kill_apiserver().unwrap();
    machine.start();
    machine.serves_alone().await;
    assert!(is_of_b(&given(&machine, &named, "n3").await));
    assert_eq!(
        given(&machine, &late, "l2").await,
        Err(OpErrorKind::PodUnknown)
    );
    let refused = [("verb", "ADD"), ("result", "podUnknown")];
    let count = machine
        .metric("cadastre_agent_requests_total", &refused)
        .await;
    assert!(count > 0.5, "{count}");

    cluster.control_plane.start_apiserver().await.unwrap();
    let api = cluster.fixtures().await.unwrap();
    eventually("it is known now", async || {
        Ok(is_of_b(&given(&machine, &late, "l3").await).then_some(()))
    })
    .await;
    // A pool with `unknownPods: Serve` assigns addresses to pods that the agent has not seen.
    let serves = rests(json!({
        "unknownPods": "Serve", "ipv4": {"cidrs": ["10.35.0.0/24"], "blockSize": 28},
    }));
    api.change_pool("known-a", serves).await.unwrap();
    let says = |it: &cadastre_api::NodeSubnet| {
        let mut pools = it.spec.pools.iter();
        pools.any(|it| it.terms.unknown_pods == cadastre_api::UnknownPods::Serve)
    };
    api.subnet_until("known-1", "says so", says).await.unwrap();
    let stranger = async |machine: &Machine| {
        let mut of_nobody = add_of(&late, "s1");
        of_nobody.pod.as_mut().unwrap().uid = "another".to_owned();
        let given = machine.add_with(of_nobody).await;
        machine.del("s1").await;
        given
    };
    eventually("a stranger is served", async || {
        let given = stranger(&machine).await;
        Ok(given.ok().filter(|it| it.starts_with("10.35.0.")))
    })
    .await;
}

#[tokio::test]
async fn a_node_whose_pools_give_nothing_unasked_is_ready_to_ask() {
    let (cluster, api) = shared().await;
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
        pool(&api, name, &format!("10.36.{nth}.0/24"), terms).await;
        let folder = tempfile::tempdir().unwrap();
        let conf = folder.path().join("05-cadastre.conflist");
        let flags = ["--cni-conf", conf.to_str().unwrap()];
        let machine = Machine::of_group(&cluster.control_plane, &api, name, &flags).await;
        let text = fs::read_to_string(&conf).unwrap();
        assert!(text.contains("0.0.0.0/0"), "{name}: {text}");
        machine.ask(Op::Status).await.unwrap();
        let subnet = api.subnets.get(&format!("{name}-1")).await.unwrap();
        assert!(
            subnet.spec.blocks.is_empty(),
            "{name}: nothing was asked for"
        );
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_written_is_told_at_once_and_mends_itself() {
    let (_, mut machine) = start("stuck", "10.37.0.0/24", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    let (store, aside) = (machine.store(), machine.path("aside"));
    fs::rename(&store, &aside).unwrap();
    fs::create_dir(&store).unwrap();
    let refusal = machine.add("c2").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Store, "{refusal}");
    let refusal = machine.ask(Op::Status).await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Store, "{refusal}");
    eventually("it is not ready", async || {
        let word = machine.agent().ready().await.err().map(|it| it.to_string());
        Ok(word.filter(|it| it.contains("node.redb")))
    })
    .await;
    fs::remove_dir(&store).unwrap();
    fs::rename(&aside, &store).unwrap();
    machine.ready().await;
    machine.ask(Op::Status).await.unwrap();
    assert_eq!(machine.add("c1").await.unwrap(), first);
}

#[tokio::test]
async fn a_store_that_is_removed_under_a_running_agent_is_noticed_before_anything_is_answered() {
    let (api, machine) = start("pulled", "10.38.0.0/24", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "pulled-1", vec![first.clone()]).await;
    fs::remove_file(machine.store()).unwrap();
    let refusal = machine.add("c2").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    let second = eventually("it is made anew", async || Ok(machine.add("c2").await.ok())).await;
    assert_ne!(second, first);
    assert_eq!(machine.add("c1").await.unwrap(), first);
}

#[tokio::test]
async fn a_second_agent_with_sockets_elsewhere_does_not_get_the_store() {
    let (_, machine) = start("one", "10.39.0.0/24", json!({}), &[]).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // In the second case, the store is elsewhere, but the agents would overwrite each other's holdings file.
    for (store, holdings, lock) in [
        (machine.store(), at("holdings.json"), "run/agent.lock"),
        (at("node.redb"), machine.holdings(), "lib/agent.lock"),
    ] {
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
            .arg(store)
            .arg("--holdings")
            .arg(holdings)
            .arg("--kubeconfig")
            .arg(shared().await.0.control_plane.kubeconfig(ADMIN).unwrap())
            .output()
            .unwrap();
        let text = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
        assert_eq!(done.status.code(), Some(1), "{text}");
        let lock = machine.path(lock);
        assert!(
            text.contains("another agent") && text.contains(lock.to_str().unwrap()),
            "{text}"
        );
    }
    machine.add("c1").await.unwrap();
}
