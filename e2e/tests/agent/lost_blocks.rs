//! Nodes that lose their blocks: the NodeSubnet is deleted, the pool no longer selects the node, or the pool is
//! deleted.

use std::fs;

use cadastre_api::Recall;
use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_node::{Op, OpErrorKind};
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use crate::{Machine, attachment, eventually, own_cluster, patch, pool, publishes, start};

async fn delete_subnet(api: &Fixtures, node: &str) -> String {
    let uid = api.subnets.get(node).await.unwrap().uid().unwrap();
    let params = DeleteParams::default();
    api.subnets.delete(node, &params).await.unwrap();
    uid
}

/// Waits until the NodeSubnet with the UID `old` is replaced by a new one with the same blocks.
async fn restored(api: &Fixtures, node: &str, old: &str, blocks: &[String]) {
    let what = "is another object with the same blocks";
    let same = |it: &cadastre_api::NodeSubnet| {
        let listed = it.spec.blocks.iter().map(|it| &it.cidr);
        it.uid().is_some_and(|uid| uid != old) && listed.eq(blocks)
    };
    api.subnet_until(node, what, same).await.unwrap();
}

#[tokio::test]
async fn a_node_subnet_that_is_deleted_comes_back_and_no_pod_notices() {
    let terms = json!({"cooldownSeconds": 3600});
    let (api, mut machine) = start("torn", "10.80.0.0/27", terms, &[]).await;
    let blocks = api.listed("torn-1", 1).await.unwrap();
    let mut given = vec![machine.add("c0").await.unwrap()];
    publishes(&api, "torn-1", given.clone()).await;
    for n in 1..=3 {
        // The NodeSubnet is deleted twice while the agent runs, and once while no agent runs.
        if n == 3 {
            machine.kill();
        }
        let old = delete_subnet(&api, "torn-1").await;
        given.push(machine.add(&format!("c{n}")).await.unwrap());
        restored(&api, "torn-1", &old, &blocks).await;
        if n == 3 {
            machine.start();
            machine.ready().await;
        }
        publishes(&api, "torn-1", given.clone()).await;
    }
    let mut different = given.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), given.len(), "{given:?}");
    assert_eq!(machine.add("c0").await.unwrap(), given[0]);
    assert_eq!(api.listed("torn-1", 1).await.unwrap(), blocks);
}

#[tokio::test]
async fn while_nobody_restores_it_the_node_goes_on_with_what_it_holds() {
    let (mut cluster, api) = own_cluster().await;
    pool(&api, "bare", "10.81.0.0/27", json!({})).await;
    let flags = ["--add-wait", "0.3"];
    let mut machine = Machine::of_group(&cluster.control_plane, &api, "bare", &flags).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "bare-1", vec![first.clone()]).await;
    cluster.controller.process().stop(LIMIT).await.unwrap();
    delete_subnet(&api, "bare-1").await;
    let mut given = vec![first.clone(), machine.add("c2").await.unwrap()];
    machine.stop().await;
    machine.start();
    // The agent is ready, so it has learned that no NodeSubnet exists and has read its own Node.
    eventually("it serves", async || {
        Ok(Some(machine.agent().ready().await?))
    })
    .await;
    given.push(machine.add("c3").await.unwrap());
    assert_eq!(machine.add("c1").await.unwrap(), first);
    let failed = [("result", "failed")];
    let in_vain = machine
        .metric("cadastre_agent_status_writes_total", &failed)
        .await;
    assert!(in_vain < 0.5, "{in_vain} writes to what is not there");
    // Once the Node object is deleted, no new address is assigned, but no pod loses its address.
    api.delete_node("bare-1").await.unwrap();
    eventually("nothing new is given", async || {
        let refusal = machine.add("late").await.err();
        if refusal.is_none() {
            machine.del("late").await;
        }
        Ok(refusal.filter(|it| it.why == OpErrorKind::NoBlock))
    })
    .await;
    let held = machine.in_use().await;
    assert_eq!(held.len(), 3, "{held:?}");
    for (n, address) in given.iter().enumerate() {
        let again = machine.add(&format!("c{}", n + 1)).await.unwrap();
        assert_eq!(&again, address);
    }
}

#[tokio::test]
async fn a_node_that_no_pool_selects_gives_nothing_new_and_keeps_its_pods() {
    let folder = tempfile::tempdir().unwrap();
    let conf = folder.path().join("05-cadastre.conflist");
    let path = conf.display().to_string();
    let flags = ["--add-wait", "0.3", "--cni-conf", &path];
    let terms = json!({"cooldownSeconds": 0});
    let (api, mut machine) = start("left", "10.82.0.0/27", terms, &flags).await;
    let first = machine.add("c1").await.unwrap();
    let group = async |name: &str| {
        let labelled = json!({"metadata": {"labels": {"group": name}}});
        patch(&api.nodes, "left-1", labelled).await;
    };
    group("nobody").await;
    eventually("it says that it gives nothing new", async || {
        let word = machine.agent().ready().await.err().map(|it| it.to_string());
        Ok(word.filter(|it| it.contains("no address can be assigned from this node's blocks")))
    })
    .await;
    let refusal = machine.add("c2").await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");
    let status = machine.ask(Op::Status).await.unwrap_err();
    assert_eq!(status.why, OpErrorKind::NoBlock, "{status}");
    assert_eq!(machine.add("c1").await.unwrap(), first);
    publishes(&api, "left-1", vec![first.clone()]).await;
    let subnet = api.subnets.get("left-1").await.unwrap();
    assert_eq!(subnet.spec.blocks[0].recall, Some(Recall::Drain));
    // The CNI configuration stays, because the runtime needs it to send the DELs of the remaining pods.
    assert!(fs::exists(&conf).unwrap());
    group("left").await;
    machine.ready().await;
    machine.add("c2").await.unwrap();
    assert_eq!(machine.add("c1").await.unwrap(), first);
}

#[tokio::test]
async fn a_pool_that_is_deleted_while_the_agent_is_down_gives_nothing_once_it_is_back() {
    let flags = ["--add-wait", "0.3"];
    let terms = json!({"cooldownSeconds": 0});
    let (api, mut machine) = start("ended", "10.83.0.0/27", terms, &flags).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "ended-1", vec![first.clone()]).await;
    machine.kill();
    let params = DeleteParams::default();
    api.pools.delete("ended", &params).await.unwrap();
    let draining = |it: &cadastre_api::NodeSubnet| {
        let mut blocks = it.spec.blocks.iter();
        blocks.all(|it| it.recall == Some(Recall::Drain))
    };
    let subnet = api.subnet_until("ended-1", "asks the block back", draining);
    assert_eq!(subnet.await.unwrap().spec.blocks.len(), 1);
    // The CNI plugin alone does not know of the recall, so it assigns an address. This is allowed, because the block
    // belongs to the node until the agent releases the block.
    let second = machine.add("c2").await.unwrap();
    machine.start();
    machine.log_says("holds").await;
    let refusal = eventually("nothing new is given", async || {
        let refusal = machine.add("c3").await.err();
        if refusal.is_none() {
            // The DEL may be rejected while the agent is starting. The answer is ignored, because the next round
            // repeats the DEL.
            let _ = machine.ask(Op::Del(attachment("c3"))).await;
        }
        Ok(refusal.filter(|it| it.why != OpErrorKind::Busy))
    })
    .await;
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");
    publishes(&api, "ended-1", vec![first.clone(), second]).await;
    assert_eq!(machine.add("c1").await.unwrap(), first);
    assert!(api.pools.get_opt("ended").await.unwrap().is_some());
    machine.del("c1").await;
    machine.del("c2").await;
    // The pool's `cooldownSeconds` is gone with the pool, so the default of 30 s applies.
    eventually("the pool is gone", async || {
        let left = api.pools.get_opt("ended").await?;
        Ok(left.is_none().then_some(()))
    })
    .await;
    api.listed("ended-1", 0).await.unwrap();
}
