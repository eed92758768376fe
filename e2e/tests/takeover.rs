//! What a leader writes when it takes over from a killed leader, and which nodes wait meanwhile.

#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used)] // allowed in helpers as in tests

mod common;

use std::time::Duration;

use cadastre_e2e::admission::{is_refused, policy};
use cadastre_e2e::{Daemon, Fixtures, metrics, nodes, wait};
use common::{Lab, wait_leads};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

/// The number of nodes in a cluster without changes. The takeover must not write any of them.
const NODES: u32 = 50;

/// Returns the API server's counts of PATCHes of Nodes, and of LISTs of Nodes, NodeSubnets, IPAMBlocks and IPClaims.
/// Failed requests count, too.
async fn patches_and_lists(lab: &Lab) -> [f64; 5] {
    let counts = lab.cluster.apiserver_metrics().await.unwrap();
    let asked = [
        ("nodes", "PATCH"),
        ("nodes", "LIST"),
        ("nodesubnets", "LIST"),
        ("ipamblocks", "LIST"),
        ("ipclaims", "LIST"),
    ];
    asked.map(|(resource, verb)| {
        let labels = [("resource", resource), ("verb", verb)];
        metrics::sum(&counts, "apiserver_request_total", &labels)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_over_of_a_quiet_cluster_writes_no_node_and_lists_nothing() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let hand = Fixtures::new(lab.client.clone());
    let (mut a, b) = lab.pair().await;
    // The pool allocates blocks, as the chart's default pool does, so no node has a podCIDR.
    let spec = json!({"nodeSelector": {}, "ipv4": {"cidrs": ["10.64.0.0/16"]}});
    hand.block_pool("default", spec).await.unwrap();
    nodes::create(&lab.cluster, NODES, nodes::numbered)
        .await
        .unwrap();
    for i in 0..NODES {
        hand.listed(&format!("node-{i:05}"), 1).await.unwrap();
    }
    let before = patches_and_lists(&lab).await;
    a.process().kill().unwrap();
    wait_leads(&b).await;
    // The new leader must allocate a block, to show that it works.
    hand.create_node(nodes::numbered(NODES)).await.unwrap();
    hand.listed(&format!("node-{NODES:05}"), 1).await.unwrap();
    let after = patches_and_lists(&lab).await;
    let text = format!("before and after: {before:?} and {after:?}");
    println!("PATCHes of Nodes, LISTs of Nodes, NodeSubnets and IPAMBlocks {text}");
    let is_same = |(one, other): (f64, f64)| (one - other).abs() < f64::EPSILON;
    assert!(before.into_iter().zip(after).all(is_same), "{text}");
    assert!(after[0].abs() < f64::EPSILON, "{text}");
}

/// Starts two controllers, of which `a` leads. Creates a pool of podCIDRs, a pool of blocks, and a node whose updates
/// the API server rejects. Returns when the controller has reported the rejection.
async fn with_a_node_refused() -> (Lab, Fixtures, Daemon, Daemon, String) {
    let lab = Lab::start().await;
    let hand = Fixtures::new(lab.client.clone());
    let (a, b) = lab.pair().await;
    let refuses = "object.metadata.name == 'cidrs-refused'";
    policy(&lab.cluster, "", "nodes", "UPDATE", refuses)
        .await
        .unwrap();
    let node = hand.node("cidrs", "cidrs-refused").await.unwrap();
    let label = json!([{"op": "add", "path": "/metadata/labels/a", "value": "b"}]).to_string();
    let args = ["patch", "node", "cidrs-refused", "--type=json"];
    let args: Vec<&str> = args
        .into_iter()
        .chain(["--dry-run=server", "-p", &label])
        .collect();
    is_refused(&lab.cluster, &args, &Value::Null).await.unwrap();
    let spec = |cidr: &str| json!({"ipv4": {"cidrs": [cidr]}});
    hand.pool("cidrs", spec("10.86.0.0/16")).await.unwrap();
    hand.block_pool("blocks", spec("10.87.0.0/16"))
        .await
        .unwrap();
    let uid = node.metadata.uid.unwrap();
    hand.event(&uid, "WriteRejected").await.unwrap();
    (lab, hand, a, b, uid)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_be_written_keeps_nobody_waiting_after_a_kill() {
    let _turn = common::turn().await;
    let (_lab, hand, mut a, b, uid) = with_a_node_refused().await;
    let before = hand.event_count(&uid, "WriteRejected").await.unwrap();
    a.process().kill().unwrap();
    wait_leads(&b).await;
    hand.node("cidrs", "cidrs-other").await.unwrap();
    hand.node("blocks", "blocks-other").await.unwrap();
    assert_eq!(hand.served("cidrs-other").await.unwrap().len(), 1);
    assert_eq!(hand.listed("blocks-other", 1).await.unwrap().len(), 1);
    wait::until("b reports the node, too", LIMIT, async || {
        Ok((hand.event_count(&uid, "WriteRejected").await? > before).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn if_the_lease_names_nothing_blocks_do_not_wait_for_a_node_that_cannot_be_touched() {
    let _turn = common::turn().await;
    let (lab, hand, mut a, b, uid) = with_a_node_refused().await;
    a.process().kill().unwrap();
    let args = "annotate lease cadastre-controller --namespace=kube-system cadastre.dev/intents-";
    lab.cluster.kubectl_line(args).await.unwrap();
    let said = wait::until("b leads, and says what waits", LIMIT, async || {
        let said = b.ready().await?;
        Ok(said.starts_with("leader, but").then_some(said))
    })
    .await
    .unwrap();
    assert!(said.contains("cidrs-refused"), "{said}");
    hand.node("cidrs", "cidrs-other").await.unwrap();
    hand.node("blocks", "blocks-other").await.unwrap();
    assert_eq!(hand.listed("blocks-other", 1).await.unwrap().len(), 1);
    wait::until("the event names the reason", LIMIT, async || {
        let events = hand.events_of(&uid).await?;
        let reported = events.iter().any(|it| {
            it.message
                .as_deref()
                .is_some_and(|it| it.contains("after a change of leaders"))
        });
        Ok(reported.then_some(()))
    })
    .await
    .unwrap();
    assert!(hand.pod_cidrs("cidrs-other").await.unwrap().is_empty());
    let args = "delete validatingadmissionpolicybinding no-nodes";
    lab.cluster.kubectl_line(args).await.unwrap();
    assert_eq!(hand.served("cidrs-other").await.unwrap().len(), 1);
    assert_eq!(hand.served("cidrs-refused").await.unwrap().len(), 1);
}
