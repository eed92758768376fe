//! Nodes that already have the CNI configuration of another network, such as kindnet.

use std::fs;

use cadastre_e2e::Fixtures;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::json;

use crate::{eventually, start, uid};

const KINDNET: &str = r#"{"cniVersion": "0.4.0", "name": "kindnet", "plugins": [
    {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.9.0.0/24"}]]}}]}"#;

/// Waits until the condition `ServedByOthers` of NodeSubnet `beside-1` has this reason, and returns the condition.
async fn says(api: &Fixtures, reason: &str) -> Condition {
    let of = |it: &cadastre_api::NodeSubnet| {
        let all = it.status.iter().flat_map(|it| &it.conditions);
        let mut all = all.filter(|it| it.type_ == "ServedByOthers" && it.reason == reason);
        all.next().cloned()
    };
    let subnet = api
        .subnet_until("beside-1", reason, |it| of(it).is_some())
        .await
        .unwrap();
    of(&subnet).unwrap()
}

#[tokio::test]
async fn another_s_network_keeps_the_node_until_it_is_gone_or_people_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (ours, theirs) = (file("05-cadastre.conflist"), file("10-kindnet.conflist"));
    let conf = format!("--cni-conf={}", ours.display());
    let flags = [conf.as_str()];
    let written = async || {
        let is_there = async || Ok(fs::exists(&ours)?.then_some(()));
        eventually("the agent's configuration exists", is_there).await;
    };
    fs::write(&theirs, KINDNET).unwrap();

    // The agent writes no configuration, and reports that. The agent is ready nevertheless, because otherwise `helm
    // --wait` would not end.
    let (api, mut machine) = start("beside", "10.61.0.0/24", json!({}), &flags).await;
    let uid = uid(&api, "beside-1").await;
    let left = says(&api, "LeftToOthers").await;
    assert_eq!(left.status, "True");
    let event = api.event(&uid, "LeftToOthers").await.unwrap();
    for text in [&left.message, &event] {
        let parts = ["10-kindnet.conflist", "agent.cni.overOthers=true"];
        assert!(parts.iter().all(|it| text.contains(it)), "{text}");
    }
    let word = machine.agent().ready().await.unwrap();
    assert!(
        word.contains("leaves new pods to 10-kindnet.conflist"),
        "{word}"
    );
    machine.add("asked-by-a-network-of-its-own").await.unwrap();
    // A restart of the agent changes nothing and does not emit a second event.
    machine.stop().await;
    machine.start();
    machine.ready().await;
    machine
        .log_says("new pods of the node get no address")
        .await;
    assert_eq!(says(&api, "LeftToOthers").await, left);
    assert_eq!(api.event_count(&uid, "LeftToOthers").await.unwrap(), 1);
    assert!(!ours.exists());

    // Once the configuration of the other network is removed, the agent writes its own configuration.
    fs::remove_file(&theirs).unwrap();
    written().await;
    assert_eq!(says(&api, "OursFirst").await.status, "False");
    // The configuration of the other network comes back, and its name sorts after the name of the agent's
    // configuration. So the agent keeps its own configuration, even after a restart.
    fs::write(&theirs, KINDNET).unwrap();
    machine.stop().await;
    machine.start();
    machine.ready().await;
    machine
        .log_says("the runtime goes by 05-cadastre.conflist")
        .await;
    assert!(ours.exists());
    // Now the configuration of the other network sorts first. So the runtime uses that configuration, and the agent
    // reports it.
    let first = file("00-first.conflist");
    fs::rename(&theirs, &first).unwrap();
    let behind = says(&api, "OthersFirst").await;
    assert!(
        behind.message.contains("00-first.conflist comes before"),
        "{behind:?}"
    );
    api.event(&uid, "OthersFirst").await.unwrap();
    assert!(ours.exists());
    fs::rename(&first, &theirs).unwrap();
    assert_eq!(says(&api, "OursFirst").await.status, "False");

    // With `--cni-conf-over-others`, the agent writes its configuration although the configuration of another network
    // exists.
    machine.stop().await;
    fs::remove_file(&ours).unwrap();
    machine.flags.push("--cni-conf-over-others".to_owned());
    machine.start();
    machine.ready().await;
    written().await;
    assert!(theirs.exists());
}
