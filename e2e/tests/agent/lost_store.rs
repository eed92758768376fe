//! A new Node object that has the name of a deleted Node. In other tests, the store is lost or damaged.

use std::os::unix::fs::FileExt as _;

use cadastre_e2e::fixtures::{GROUP, labelled};
use cadastre_e2e::nodes;
use cadastre_node::OpErrorKind;
use kube::ResourceExt as _;
use serde_json::json;

use crate::{add_of, eventually, patch, publishes, start, uid};

#[tokio::test]
async fn ranges_of_an_earlier_node_object_give_nothing_new() {
    // While the old block is quarantined, the pool has no other block for the new node.
    let terms = json!({"quarantineSeconds": 86400});
    let flags = ["--add-wait", "0.5"];
    let (api, mut machine) = start("again", "10.40.0.0/28", terms, &flags).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "again-1", vec![first.clone()]).await;
    api.delete_node("again-1").await.unwrap();
    let refusal = eventually("nothing new is given", async || {
        machine.del("c2").await;
        Ok(machine.add("c2").await.err())
    })
    .await;
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");
    assert_eq!(
        machine.add("c1").await.unwrap(),
        first,
        "what was given stays"
    );
    // The new Node has another provider id. With the same id, the new Node would count as the same machine and get its
    // block back.
    let mut other = labelled(nodes::node("again-1", "192.0.2.1"), &[(GROUP, "again")]);
    other.spec.as_mut().unwrap().provider_id = Some("e2e://another".to_owned());
    let node = api.create_node(other).await.unwrap();
    machine.log_says(&node.uid().unwrap()).await;
    machine.add("c2").await.unwrap_err();
    machine.kill();
    machine.start();
    let again = eventually("it is at work again", async || {
        machine.agent().get("/healthz").await?;
        Ok(Some(machine.add("c1").await?))
    })
    .await;
    assert_eq!(again, first);
    machine.add("c2").await.unwrap_err();
    assert_eq!(
        machine.list().await.blocks.len(),
        1,
        "it goes with its last address"
    );
    // The new node gets a block of its own once the pool has one.
    let more = json!({"ipv4": {"cidrs": ["10.40.0.0/28", "10.40.1.0/28"]}});
    api.change_pool("again", more).await.unwrap();
    machine.ready().await;
    let second = machine.add("c2").await.unwrap();
    assert!(second.starts_with("10.40.1."), "{second}");
}

#[tokio::test]
async fn a_damaged_store_is_set_aside_and_made_anew_of_what_others_remember() {
    let (api, mut machine) = start("rot", "10.41.0.0/27", json!({"cooldownSeconds": 0}), &[]).await;
    let pod = api.pod("rot-pod", "rot-1", &[]).await.unwrap();
    let first = machine.add_with(add_of(&pod, "c1")).await.unwrap();
    let second = machine.add("c2").await.unwrap();
    publishes(&api, "rot-1", vec![first.clone(), second.clone()]).await;
    machine.kill();
    // The CNI plugin assigns this address while no agent runs. So only the pod's status contains the address, and no
    // NodeAddresses object does.
    let third = machine.add("c3").await.unwrap();
    api.pod("rot-late", "rot-1", &[&third]).await.unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(machine.store());
    let file = file.unwrap();
    let len = file.metadata().unwrap().len();
    for at in (0..len).step_by(512) {
        file.write_all_at(b"rotten", at).unwrap();
    }
    drop(file);
    machine.start();
    machine.ready().await;
    let aside = machine.path("run/node.redb.damaged-1");
    assert!(aside.exists(), "{}", machine.log());
    assert!(
        machine
            .metric("cadastre_agent_store_damaged_total", &[])
            .await
            > 0.5
    );
    let text = api
        .event(&uid(&api, "rot-1").await, "StoreDamaged")
        .await
        .unwrap();
    assert!(text.contains("damaged-1"), "{text}");
    assert_eq!(machine.add_with(add_of(&pod, "c1")).await.unwrap(), first);
    assert_eq!(machine.add("c2").await.unwrap(), second);
    // The agent must assign none of the addresses in use to a new container.
    for n in 0..8 {
        let given = machine.add(&format!("new{n}")).await.unwrap();
        assert!(
            ![&first, &second, &third].contains(&&given),
            "{given} twice"
        );
    }
    machine.del("c1").await;
    assert!(machine.in_use().await.iter().all(|(id, _)| id != "c1"));
}

#[tokio::test]
async fn a_store_that_is_removed_under_its_feet_is_made_anew() {
    let (api, mut machine) = start("gone", "10.42.0.0/27", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    publishes(&api, "gone-1", vec![first.clone()]).await;
    machine.stop().await;
    std::fs::remove_file(machine.store()).unwrap();
    machine.start();
    machine.ready().await;
    assert_eq!(machine.add("c1").await.unwrap(), first);
    assert_ne!(machine.add("c2").await.unwrap(), first);
}

#[tokio::test]
async fn second_networks_keep_their_addresses_when_the_store_is_lost() {
    // The long interval keeps the agent from publishing the assignments before the store is lost.
    let flags = ["--publish-interval", "3600"];
    let terms = json!({"cooldownSeconds": 0});
    let (api, mut machine) = start("second", "10.55.0.0/27", terms, &flags).await;
    let mut live = Vec::new();
    for n in 0..6 {
        let name = format!("second-{n}");
        let pod = api.pod(&name, "second-1", &[]).await.unwrap();
        let mut add = add_of(&pod, &name);
        add.attachment.network = "storage".to_owned();
        add.attachment.ifname = "net1".to_owned();
        let address = machine.add_with(add).await.unwrap();
        // The annotation that Multus writes once all networks of a pod are set up.
        let status = json!([
            {"name": "net", "interface": "eth0", "ips": ["192.0.2.1"], "default": true},
            {"name": "default/storage", "interface": "net1", "ips": [address]},
        ]);
        let annotations = json!({
            "k8s.v1.cni.cncf.io/networks": "storage",
            "k8s.v1.cni.cncf.io/network-status": status.to_string(),
        });
        let annotated = json!({"metadata": {"annotations": annotations}});
        patch(&api.pods, &name, annotated).await;
        live.push(address);
    }
    machine.kill();
    std::fs::remove_file(machine.store()).unwrap();
    machine.start();
    machine.ready().await;
    for n in 0..6 {
        let given = machine.add(&format!("new{n}")).await.unwrap();
        assert!(!live.contains(&given), "{given} twice");
    }
}

#[tokio::test]
async fn a_node_that_loses_its_store_at_a_reboot_keeps_no_address_of_the_boot_before() {
    let terms = json!({"cooldownSeconds": 0});
    let (api, mut machine) = start("wiped", "10.56.0.0/26", terms, &["--leak-grace", "1"]).await;
    let mut pods = Vec::new();
    for n in 0..5 {
        let name = format!("wiped-{n}");
        pods.push(api.pod(&name, "wiped-1", &[]).await.unwrap());
    }
    for boot in 0..3 {
        let mut addresses = Vec::new();
        for (n, pod) in pods.iter().enumerate() {
            let id = format!("boot{boot}-{n}");
            addresses.push(machine.add_with(add_of(pod, &id)).await.unwrap());
        }
        // Attachments of the previous boot are released, so that only the new addresses are published.
        publishes(&api, "wiped-1", addresses).await;
        machine.stop().await;
        std::fs::remove_file(machine.store()).unwrap();
        std::fs::remove_file(machine.holdings()).unwrap();
        // Pretends that the published objects were written in an earlier boot, because the test cannot change the boot
        // id.
        let status = json!({"agent": {"bootID": "earlier"}});
        api.write_status("wiped-1", status).await.unwrap();
        let list = json!({"spec": {"bootID": "earlier"}});
        patch(&api.addresses, "wiped-1", list).await;
        machine.start();
        machine.ready().await;
    }
}
