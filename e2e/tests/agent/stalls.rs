//! An agent that is stopped while CNI plugins are killed and other CNI plugins use the store themselves.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use cadastre_node::wire;
use cadastre_node::wire::{Greeting, Request};
use cadastre_node::{Op, Store, clock};
use rustix::process::Signal;
use serde_json::json;

use crate::{add, attachment, eventually, start};

/// Number of ADDs that are sent to the agent while it is stopped.
const ADDS: usize = 24;

#[tokio::test]
async fn what_was_deleted_while_the_agent_stalled_is_not_given_when_it_goes_on() {
    let terms = json!({"warm": {"low": 30, "high": 60}});
    let (api, mut machine) = start("stall", "10.13.0.0/24", terms, &[]).await;
    api.listed("stall-1", 3).await.unwrap();
    // Each simulated CNI plugin has received the agent's greeting. So the plugin considers the agent alive, and will
    // send its request to the agent.
    let mut plugins = Vec::new();
    for _ in 0..ADDS {
        let mut plugin = UnixStream::connect(machine.plugin_socket()).unwrap();
        let _: Greeting = wire::receive(&mut plugin).unwrap();
        plugins.push(plugin);
    }
    let store = machine.store();
    eventually("the agent stalls without the file", async || {
        machine.agent().process().signal(Signal::STOP)?;
        let is_free = Store::open_existing(&store, Duration::ZERO).is_ok();
        if !is_free {
            machine.agent().process().signal(Signal::CONT)?;
        }
        Ok(is_free.then_some(()))
    })
    .await;
    // Each simulated CNI plugin sends its ADD and is killed. The DELs that follow use the store.
    for (n, mut plugin) in plugins.into_iter().enumerate() {
        let now = clock::since_boot();
        let op = Op::Add(add(&format!("c{n}")));
        let request = Request::new(op, now, now + Duration::from_secs(60));
        wire::send(&mut plugin, &request).unwrap();
    }
    let dels = (0..ADDS).map(|n| machine.ask(Op::Del(attachment(&format!("c{n}")))));
    for answer in futures::future::join_all(dels).await {
        answer.unwrap();
    }
    machine.agent().process().signal(Signal::CONT).unwrap();
    eventually("all that was asked is over", async || {
        let open = machine.metric("cadastre_agent_connections", &[("socket", "cni")]);
        Ok((open.await < 0.5).then_some(()))
    })
    .await;
    assert_eq!(machine.in_use().await, []);
    // The agent continues to work, even for a container id that was deleted.
    machine.add("c1").await.unwrap();
}

#[tokio::test]
async fn a_del_ends_the_add_that_waits_for_a_block() {
    let flags = ["--add-wait", "60"];
    let (_, machine) = start(
        "ends",
        "10.14.0.0/28",
        json!({"cooldownSeconds": 0}),
        &flags,
    )
    .await;
    for n in 0..13 {
        machine.add(&format!("c{n}")).await.unwrap();
    }
    let late = machine.add("late");
    let del = async {
        eventually("it waits", async || {
            let waiting = machine.metric("cadastre_agent_adds_waiting", &[]).await;
            Ok((waiting > 0.5).then_some(()))
        })
        .await;
        machine.del("late").await;
    };
    let (refused, ()) = tokio::join!(late, del);
    let refused = refused.unwrap_err();
    assert!(refused.text.contains("deleted after"), "{refused}");
    assert_eq!(machine.in_use().await.len(), 13);
}
