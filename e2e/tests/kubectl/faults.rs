//! `check` of the kubectl plugin finds each fault that the test creates, and `release` acts on the report of `check`.
//!
//! No controller runs, because a controller would repair most of the faults.

use std::time::Duration;

use cadastre_api::NodeAddressesSpec;
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Fixtures, Options};
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::{Ran, end, pool, run, start};

async fn block(fixtures: &Fixtures, cidr: &str, node: &str, uid: &str) -> String {
    let name = cidr.replace(['.', '/'], "-");
    let object = serde_json::from_value(json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock", "metadata": {"name": name},
        "spec": {
            "cidr": cidr, "pool": "p", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": "Node", "name": node, "uid": uid},
        },
    }));
    let made = fixtures
        .blocks
        .create(&PostParams::default(), &object.unwrap())
        .await
        .unwrap();
    made.metadata.uid.unwrap()
}

/// Creates a node with a block, the NodeSubnet, and the status and NodeAddresses that its agent would write. Returns
/// the node's UID.
async fn holder(fixtures: &Fixtures, name: &str, cidr: &str, held: &[String]) -> String {
    let node = fixtures.node("p", name).await.unwrap();
    let node = node.metadata.uid.unwrap();
    let uid = block(fixtures, cidr, name, &node).await;
    let subnet = serde_json::from_value(json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": name},
        "spec": {"nodeUID": node, "blocks": [{"cidr": cidr, "uid": uid, "pool": "p"}]},
    }));
    fixtures
        .subnets
        .create(&PostParams::default(), &subnet.unwrap())
        .await
        .unwrap();
    let used = held.len();
    let words = json!([{"cidr": cidr, "uid": uid, "used": used, "free": 16 - used}]);
    let orphans = held.iter().filter(|it| it.contains(GONE));
    let orphan = |it: &String| json!({"address": it.split(' ').next(), "podUID": GONE});
    let orphans: Vec<Value> = orphans.map(orphan).collect();
    let status = json!({"nodeUID": node, "blocks": words, "orphans": orphans});
    fixtures.write_status(name, status).await.unwrap();
    lists(fixtures, name, held).await;
    node
}

async fn lists(fixtures: &Fixtures, node: &str, held: &[String]) {
    let list = NodeAddressesSpec {
        addresses: held.to_vec(),
        ..NodeAddressesSpec::default()
    };
    fixtures.list_addresses(node, list).await.unwrap();
}

fn codes(ran: &Ran) -> Vec<String> {
    let findings = ran.json()["findings"].as_array().unwrap().clone();
    let named = findings.iter().map(|it| {
        format!(
            "{} {}",
            it["code"].as_str().unwrap(),
            it["object"].as_str().unwrap()
        )
    });
    named.collect()
}

/// The command by which these tests look for faults. It ignores the fault `NoLeader`, because no controller runs here:
/// a controller would repair the faults that the tests create.
const CHECK: &str = "check --settle 0 -o json --ignore NoLeader";
const GONE: &str = "00000000-0000-4000-8000-00000000dead";

#[tokio::test]
async fn check_finds_every_planted_fault_and_release_frees_only_leaks() {
    let (cluster, fixtures) = with_crds(Options::default()).await.unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.70.0.0/24"], "blockSize": 28}, "nodeSelector": {"matchLabels": {"group": "p"}}});
    let made = serde_json::from_value(pool("p", &spec)).unwrap();
    fixtures
        .pools
        .create(&PostParams::default(), &made)
        .await
        .unwrap();
    let lives = fixtures.pod("lives", "n1", &["10.70.0.1"]).await.unwrap();
    let uid = lives.metadata.uid.as_deref().unwrap();
    let held = [
        format!("10.70.0.1 cbr0/aaaaaaaa eth0 {uid} default/lives"),
        format!("10.70.0.2 cbr0/bbbbbbbb eth0 {GONE} default/gone"),
    ];
    let node = holder(&fixtures, "n1", "10.70.0.0/28", &held).await;
    holder(&fixtures, "n2", "10.70.0.16/28", &[]).await;
    let only = run(&cluster, CHECK).await;
    assert_eq!(
        codes(&only),
        ["LeakedAddress address 10.70.0.2"],
        "{only:?}"
    );
    assert_eq!(only.code, 2);
    let led = run(&cluster, "check --settle 0 -o json --severity critical").await;
    assert_eq!(codes(&led), ["NoLeader controller"], "{led:?}");
    let status = run(&cluster, "status").await;
    status.assert_out(2, "no controller has ever led here");
    let report = cluster.folder().join("report.json");
    std::fs::write(&report, &only.out).unwrap();

    refusals(&cluster).await;
    leak_is_released(&cluster, &fixtures, &node, &held, report.to_str().unwrap()).await;
    let clean = run(&cluster, CHECK).await;
    assert_eq!((clean.code, codes(&clean)), (0, Vec::new()));

    // Creates all faults except a leaked address. One call of `check` must find them all.
    fixtures.pod("twin", "n2", &["10.70.0.1"]).await.unwrap();
    fixtures.pod("stray", "n2", &["10.70.0.200"]).await.unwrap();
    for (cidr, name, uid) in [
        ("10.70.0.32/28", "n1", node.as_str()),
        ("10.70.0.48/28", "dead", GONE),
        ("10.70.0.0/27", "n2", GONE),
    ] {
        block(&fixtures, cidr, name, uid).await;
    }
    fixtures
        .blocks
        .delete("10-70-0-16-28", &DeleteParams::default())
        .await
        .unwrap();
    let stale = serde_json::from_value(json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": "left"},
        "spec": {"nodeUID": GONE},
    }));
    fixtures
        .subnets
        .create(&PostParams::default(), &stale.unwrap())
        .await
        .unwrap();
    another_network(&cluster, &fixtures).await;
    let found = run(&cluster, CHECK).await;
    let codes = codes(&found);
    for expected in [
        "ServedByOthers agents",
        "PodsOutside pods",
        "DuplicateAddress address 10.70.0.1",
        "OutsideOfRanges address 10.70.0.200",
        "BlockNotListed block 10.70.0.32/28",
        "OwnerlessBlock block 10.70.0.48/28",
        "ListedWithoutObject block 10.70.0.16/28",
        "StaleNodeSubnet nodesubnet left",
    ] {
        assert!(
            codes.iter().any(|it| it == expected),
            "{expected}: {codes:#?}"
        );
    }
    assert!(
        codes.iter().any(|it| it.starts_with("OverlappingRanges")),
        "{codes:#?}"
    );
    let table = run(&cluster, "check --settle 0 --severity critical").await;
    table.assert_out(2, "delete all of them but one");
}

/// The pods of node n2 have addresses of another network. That is a fault only if n2's agent writes the CNI
/// configuration.
async fn another_network(cluster: &ControlPlane, fixtures: &Fixtures) {
    fixtures.pod("old", "n1", &["10.9.0.1"]).await.unwrap();
    fixtures.pod("other", "n2", &["10.9.0.2"]).await.unwrap();
    let condition = json!({
        "type": "ServedByOthers", "status": "True", "reason": "LeftToOthers",
        "message": "10-kindnet.conflist is there", "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let status = json!({"conditions": [condition]});
    fixtures.write_status("n2", status).await.unwrap();
    let found = run(cluster, CHECK).await;
    assert!(
        !codes(&found).contains(&"PodsOutside pods".to_owned()),
        "{found:?}"
    );
    let flag = "--cni-conf=/host/cni-conf/05-cadastre.conflist";
    let agent = serde_json::from_value(json!({
        "metadata": {
            "name": "agent-n2",
            "labels": {"app.kubernetes.io/name": "cadastre", "app.kubernetes.io/component": "agent"},
        },
        "spec": {
            "nodeName": "n2", "hostNetwork": true,
            "containers": [{"name": "agent", "image": "cadastre", "args": ["agent", flag]}],
        },
    }));
    let params = PostParams::default();
    fixtures
        .pods
        .create(&params, &agent.unwrap())
        .await
        .unwrap();
    let found = run(cluster, "check --settle 0").await;
    let finding = "1 pod on nodes whose agent writes the CNI configuration, with an address that is in no pool: default/other on n2 (10.9.0.2)";
    assert!(
        found.out.contains("10-kindnet.conflist is there"),
        "{found:?}"
    );
    assert!(
        found.code == 2 && found.out.replace('\n', " ").contains(finding),
        "{found:?}"
    );
}

/// `release` refuses to release addresses in use, even with `--force`, and says why.
async fn refusals(cluster: &ControlPlane) {
    for (args, words) in [
        ("release 10.70.0.1", "lives on n1: delete the pod instead"),
        ("release 10.70.0.1 --force", "lives on n1"),
        ("release 10.70.0.9", "no node lists it as in use"),
    ] {
        let ran = run(cluster, args).await;
        assert!(
            ran.code == 2 && ran.out.contains("Refused") && ran.out.contains(words),
            "{ran:?}"
        );
    }
    let dry = run(cluster, "release --handle cbr0/bbbb --dry-run").await;
    dry.assert_out(0, "WouldAsk");
    let bad = run(cluster, "release").await;
    assert_eq!(bad.code, 1);
}

/// A request to release stays in the annotation until the agent has released the address. Then the request is removed.
async fn leak_is_released(
    cluster: &ControlPlane,
    fixtures: &Fixtures,
    node: &str,
    held: &[String],
    report: &str,
) {
    let change = json!({"metadata": {"annotations": {"cadastre.dev/release": "10.70.0.7=old"}}});
    let other = async || {
        let changed = fixtures.change_subnet("n1", change.clone()).await;
        changed.unwrap();
    };
    other().await;
    let slow = run(cluster, &format!("release --report {report} --timeout 0")).await;
    slow.assert_out(2, "the request stays");
    // Overwrites the annotation, so that the release of the leaked address is no longer requested. The next command
    // requests the release again.
    other().await;
    let child = start(
        cluster,
        &format!("release --report {report} --report {report} --timeout 60"),
    );
    let asked = format!("10.70.0.2={GONE}");
    let annotation = async || {
        let annotations = fixtures.subnets.get("n1").await?.metadata.annotations;
        Ok(annotations.and_then(|it| it.get("cadastre.dev/release").cloned()))
    };
    until(
        "it is asked for, and nothing else",
        Duration::from_secs(30),
        async || Ok(annotation().await?.filter(|text| *text == asked)),
    )
    .await
    .unwrap();
    let word = &fixtures.subnets.get("n1").await.unwrap().spec.blocks[0];
    let words = json!([{"cidr": word.cidr, "uid": word.uid, "used": 1, "free": 15}]);
    let status = json!({"nodeUID": node, "blocks": words, "orphans": []});
    fixtures.write_status("n1", status).await.unwrap();
    lists(fixtures, "n1", &held[..1]).await;
    let freed = end(child).await;
    freed.assert_out(0, "Freed");
    let left: anyhow::Result<Option<String>> = annotation().await;
    assert_eq!(left.unwrap(), None);
    let again = run(cluster, &format!("release --report {report}")).await;
    again.assert_out(2, "no node lists it as in use");
}
