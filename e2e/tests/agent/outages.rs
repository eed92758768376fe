//! The agent is killed, hangs, or is started twice. In other tests, the API server is down.

use std::fs::{self, File};
use std::time::Duration;

use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_node::{Op, OpErrorKind};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{Machine, eventually, own_cluster, pool, publishes, start, uid};

#[tokio::test]
async fn killed_and_started_again_it_goes_on_where_it_was() {
    let (api, mut machine) = start("kill", "10.30.0.0/24", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    machine.kill();
    assert!(
        machine.plugin_socket().exists(),
        "as a killed process leaves it"
    );
    // While no agent runs, the CNI plugin uses the store itself.
    assert_eq!(machine.add("c1").await.unwrap(), first);
    let second = machine.add("c2").await.unwrap();
    machine.del("c1").await;
    machine.start();
    machine.ready().await;
    assert_eq!(machine.in_use().await, [("c2".to_owned(), second.clone())]);
    publishes(&api, "kill-1", vec![second]).await;
    machine.stop().await;
    assert!(!machine.plugin_socket().exists() && !machine.socket().exists());
}

#[tokio::test]
async fn while_it_hangs_the_plugin_helps_itself() {
    let (api, mut machine) = start("hang", "10.31.0.0/24", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "hang-1", vec![first.clone()]).await;
    // The CNI plugin can open the store only while the agent has closed it. The agent closes the store after a second
    // without work, and a STATUS does not count as work. After a hang, the agent first does the work that it postponed,
    // for which it may open the store again. So each attempt first waits until the store is closed.
    eventually("the plugin is served beside a hung agent", async || {
        machine.ask(Op::Status).await?;
        until("the agent has let go of its store", LIMIT, async || {
            let is_free = File::open(machine.store())?.try_lock_shared().is_ok();
            Ok(is_free.then_some(()))
        })
        .await?;
        machine.agent().process().signal(Signal::STOP)?;
        let added = machine.add("c2").await;
        machine.agent().process().signal(Signal::CONT)?;
        Ok(Some(added?))
    })
    .await;
    let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.1).collect();
    assert_eq!(held.len(), 2, "{held:?}");
    // The agent continues with the store as the CNI plugin left it.
    machine.add("c3").await.unwrap();
    let held = machine.in_use().await.into_iter().map(|it| it.1).collect();
    publishes(&api, "hang-1", held).await;
}

#[tokio::test]
async fn a_second_agent_of_the_node_says_so_and_ends() {
    let (_, machine) = start("two", "10.32.0.0/24", json!({}), &[]).await;
    let mut second = machine.spawn("second").unwrap();
    let status = second.process().wait(LIMIT).await.unwrap().unwrap();
    let log = second.process().log_tail(10);
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(
        log.contains("another agent of this node is at work"),
        "{log}"
    );
    machine.add("c1").await.unwrap();
}

#[tokio::test]
async fn without_the_api_server_it_gives_takes_and_restarts() {
    let (mut cluster, api) = own_cluster().await;
    pool(&api, "alone", "10.33.0.0/24", json!({"cooldownSeconds": 0})).await;
    let flags = ["--add-wait", "0.5"];
    let mut machine = Machine::of_group(&cluster.control_plane, &api, "alone", &flags).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "alone-1", vec![first]).await;
    cluster.control_plane.kill_apiserver().unwrap();
    machine.add("c2").await.unwrap();
    machine.del("c1").await;
    machine.stop().await;
    machine.start();
    machine.serves_alone().await;
    let before = machine.in_use().await;
    assert_eq!(before.len(), 1);
    let mut given = Vec::new();
    for n in 3..=14 {
        given.push(machine.add(&format!("c{n}")).await.unwrap());
    }
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 12);
    let refusal = machine.add("c15").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Exhausted, "{refusal}");
    // While the API server is down, the agent releases no block, because it could not get another block later. So the
    // next ADD succeeds.
    for n in 3..=14 {
        machine.del(&format!("c{n}")).await;
    }
    machine.add("c16").await.unwrap();
    machine.del("c16").await;

    cluster.control_plane.start_apiserver().await.unwrap();
    let api = cluster.fixtures().await.unwrap();
    publishes(&api, "alone-1", vec![before[0].1.clone()]).await;
    eventually("it has the API server again", async || {
        let word = machine.agent().ready().await?;
        Ok((word == "gives addresses\n").then_some(word))
    })
    .await;
}

#[tokio::test]
async fn after_a_reboot_without_the_api_server_it_gives_from_the_ranges_that_it_had() {
    let (mut cluster, api) = own_cluster().await;
    pool(
        &api,
        "booted",
        "10.57.0.0/24",
        json!({"cooldownSeconds": 0}),
    )
    .await;
    let mut machine = Machine::of_group(&cluster.control_plane, &api, "booted", &[]).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "booted-1", vec![first]).await;
    cluster.control_plane.kill_apiserver().unwrap();
    machine.stop().await;
    // A reboot empties the memory-backed file system of the store, and ends all containers.
    fs::remove_file(machine.store()).unwrap();
    let holdings = fs::read_to_string(machine.holdings()).unwrap();
    let mut holdings: Value = serde_json::from_str(&holdings).unwrap();
    let boot = holdings["boot"].take();
    holdings["boot"] = json!("earlier");
    fs::write(machine.holdings(), holdings.to_string()).unwrap();
    machine.start();
    machine.serves_alone().await;
    assert_eq!(machine.in_use().await, []);
    machine.add("c2").await.unwrap();
    let holdings = fs::read_to_string(machine.holdings()).unwrap();
    assert!(holdings.contains(boot.as_str().unwrap()), "{holdings}");
    // Without a reboot, a missing store was lost. Pods may still use its addresses, so the agent refuses the ADD.
    machine.stop().await;
    fs::remove_file(machine.store()).unwrap();
    machine.start();
    let refusal = eventually("the agent answers", async || {
        machine.agent().get("/healthz").await?;
        Ok(machine.add("c3").await.err())
    })
    .await;
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
}

#[tokio::test]
async fn a_full_disk_holds_back_ranges_and_no_pod() {
    let (api, mut machine) =
        start("crammed", "10.58.0.0/24", json!({}), &["--add-wait", "0.5"]).await;
    machine.add("c1").await.unwrap();
    let (folder, aside) = (machine.path("lib"), machine.path("aside"));
    fs::rename(&folder, &aside).unwrap();
    fs::write(&folder, "").unwrap();
    let mut more = 1;
    let refusal = eventually("the block is full", async || {
        more += 1;
        Ok(machine.add(&format!("c{more}")).await.err())
    })
    .await;
    assert_eq!(refusal.why, OpErrorKind::Exhausted, "{refusal}");
    assert!(more > 8, "{more} pods fit into one block");
    machine.del("c2").await;
    machine.ask(Op::Status).await.unwrap();
    let uid = uid(&api, "crammed-1").await;
    let text = api.event(&uid, "RangesNotRecorded").await.unwrap();
    assert!(text.contains("holdings.json"), "{text}");
    assert!(machine.agent().ready().await.is_ok());
    let unrecorded = async |machine: &Machine| {
        let value = machine.metric("cadastre_agent_ranges_unrecorded", &[]);
        value.await > 0.5
    };
    assert!(unrecorded(&machine).await);
    fs::remove_file(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    eventually("it has another block", async || {
        Ok(machine.add("last").await.ok())
    })
    .await;
    assert!(!unrecorded(&machine).await);
    let kept = fs::read_to_string(machine.holdings()).unwrap();
    let kept: Value = serde_json::from_str(&kept).unwrap();
    assert!(kept["blocks"].as_array().unwrap().len() > 1, "{kept}");
}

#[tokio::test]
async fn it_starts_while_the_api_server_is_gone_and_gives_nothing_that_it_cannot_know() {
    let (mut cluster, api) = own_cluster().await;
    pool(&api, "late", "10.34.0.0/24", json!({})).await;
    api.node("late", "late-1").await.unwrap();
    api.listed("late-1", 1).await.unwrap();
    cluster.control_plane.kill_apiserver().unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "late-1", &["--add-wait", "0.5"]);
    machine.start();
    let refusal = eventually("the agent answers", async || {
        let refusal = machine.add("c1").await.err();
        Ok(refusal.filter(|it| it.why == OpErrorKind::Busy))
    })
    .await;
    assert!(
        refusal.text.contains("try again") || refusal.text.contains("API server"),
        "{refusal}"
    );
    cluster.control_plane.start_apiserver().await.unwrap();
    machine
        .agent()
        .wait_ready(LIMIT + Duration::from_secs(30))
        .await
        .unwrap();
    machine.add("c1").await.unwrap();
}
