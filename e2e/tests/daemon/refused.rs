//! Admission policies that permanently reject what the controller writes.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::admission::{is_refused, policy};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, Options};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

use crate::LIMIT;

#[tokio::test]
async fn writes_that_a_policy_rejects_are_retried_ever_less_and_reported() {
    let (cluster, hand) = with_crds(Options::default()).await.unwrap();
    for (group, resource, operation, refuses) in [
        (
            "cadastre.dev",
            "ippools",
            "UPDATE",
            "object.metadata.name == 'unguarded'",
        ),
        (
            "cadastre.dev",
            "ipamblocks",
            "CREATE",
            "object.spec.pool == 'blockless'",
        ),
        ("", "nodes", "UPDATE", "object.metadata.name == 'fine-1'"),
    ] {
        let made = policy(&cluster, group, resource, operation, refuses).await;
        made.unwrap();
    }
    let spec = |cidr: &str| json!({"ipv4": {"cidrs": [cidr]}});
    let unguarded = hand.pool("unguarded", spec("10.84.0.0/24")).await.unwrap();
    hand.block_pool("blockless", spec("10.85.0.0/24"))
        .await
        .unwrap();
    hand.pool("fine", spec("10.86.0.0/16")).await.unwrap();
    let refused = hand.node("fine", "fine-1").await.unwrap();
    let starved = hand.node("blockless", "blockless-1").await.unwrap();
    let label = json!([{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}}]).to_string();
    for (kind, name) in [("ippool", "unguarded"), ("node", "fine-1")] {
        let args = [
            "patch",
            kind,
            name,
            "--type=json",
            "--dry-run=server",
            "-p",
            &label,
        ];
        is_refused(&cluster, &args, &Value::Null).await.unwrap();
    }
    let block = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
        "metadata": {"name": "10-85-0-0-26"},
        "spec": {
            "cidr": "10.85.0.0/26", "pool": "blockless", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": "Node", "name": "x", "uid": "x"},
        },
    });
    is_refused(&cluster, &["create", "--dry-run=server", "-f", "-"], &block)
        .await
        .unwrap();

    let begun = Instant::now();
    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    // Writes that no policy rejects continue.
    hand.node("fine", "fine-2").await.unwrap();
    assert_eq!(hand.served("fine-2").await.unwrap().len(), 1);
    // All rejected writes are reported by events, conditions and metrics.
    for (object, what) in [
        (&refused.metadata, "podCIDRs"),
        (&starved.metadata, "10.85.0."),
    ] {
        let uid = object.uid.as_deref().unwrap();
        let message = hand.event(uid, "WriteRejected").await.unwrap();
        assert!(
            message.contains(what) && message.contains("not in this cluster"),
            "{message}"
        );
    }
    let uid = unguarded.metadata.uid.as_deref().unwrap();
    let message = hand.event(uid, "WritesRejected").await.unwrap();
    assert!(
        message.contains("finalizers") && message.contains("not in this cluster"),
        "{message}"
    );
    for (pool, reason) in [
        ("unguarded", "FinalizerRefused"),
        ("blockless", "BlocksRefused"),
    ] {
        let condition = hand
            .condition(pool, "WritesRejected", "True")
            .await
            .unwrap();
        assert_eq!(condition.reason, reason);
        let ready = hand.condition(pool, "Ready", "False").await.unwrap();
        assert_eq!(ready.reason, reason);
    }
    // Each of three writes is tried eight times. The pauses between the tries grow from 0.1 to 6.4 seconds, so the test
    // waits several seconds.
    let metrics = until("each was tried eight times", LIMIT, async || {
        let metrics = daemon.metrics().await?;
        let tries = sum(&metrics, "rest_client_requests_total", &[("code", "422")]);
        Ok((tries >= 24.0).then_some(metrics))
    })
    .await
    .unwrap();
    assert!(
        begun.elapsed() >= Duration::from_secs(6),
        "{:?}",
        begun.elapsed()
    );
    let reads = sum(
        &metrics,
        "rest_client_requests_total",
        &[("method", "GET"), ("code", "404")],
    );
    assert!(reads < 10.0, "{reads} reads of what is not there");
    for kind in ["Node", "IPAMBlock", "IPPool"] {
        let count = sum(&metrics, "cadastre_rejected_writes", &[("kind", kind)]);
        assert!((count - 1.0).abs() < 0.1, "{count} of {kind}");
    }
    let waiting = sum(
        &metrics,
        "cadastre_nodes_waiting",
        &[("reason", "write_rejected")],
    );
    assert!((waiting - 2.0).abs() < 0.1, "{waiting} nodes wait");
    assert_eq!(
        hand.event_count(uid, "WritesRejected").await.unwrap(),
        1,
        "reported once"
    );
    drop(metrics);

    // The NodeSubnet has the condition `WritesRejected`, and keeps it after a takeover. If another writer adds a
    // condition to the NodeSubnet, both conditions stay.
    wait_writes_refused(&hand, "True").await;
    let of_another = json!([{"op": "add", "path": "/status/conditions/-", "value": {
        "type": "OfAnother", "status": "Unknown", "reason": "Somebody", "message": "m",
        "lastTransitionTime": "2026-01-02T03:04:05Z", "observedGeneration": 3,
    }}]);
    let of_another = of_another.to_string();
    let args = [
        "patch",
        "nodesubnet",
        "blockless-1",
        "--subresource=status",
        "--type=json",
        "-p",
        &of_another,
    ];
    cluster.kubectl(&args).await.unwrap();
    daemon.process().kill().unwrap();
    let before = conditions(&hand, "blockless-1").await.unwrap();
    daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    until(
        "the next leader was refused for good, too",
        LIMIT,
        async || {
            let metrics = daemon.metrics().await?;
            let of_blocks = [("kind", "IPAMBlock")];
            Ok((sum(&metrics, "cadastre_rejected_writes", &of_blocks) > 0.5).then_some(()))
        },
    )
    .await
    .unwrap();
    let since = |all: &[Condition]| {
        let refused = all.iter().find(|it| it.type_ == "WritesRejected");
        refused.map(|it| it.last_transition_time.clone())
    };
    let now = conditions(&hand, "blockless-1").await.unwrap();
    assert_eq!(since(&now), since(&before), "it was never taken back");

    // Once the policies are no longer bound, all nodes get their ranges.
    for name in ["no-ippools", "no-ipamblocks", "no-nodes"] {
        let delete = format!("delete validatingadmissionpolicybinding {name}");
        cluster.kubectl_line(&delete).await.unwrap();
    }
    assert_eq!(hand.served("fine-1").await.unwrap().len(), 1);
    assert_eq!(hand.listed("blockless-1", 1).await.unwrap().len(), 1);
    hand.condition("unguarded", "Ready", "True").await.unwrap();
    hand.condition("blockless", "WritesRejected", "False")
        .await
        .unwrap();
    wait_writes_refused(&hand, "False").await;
    let kept = conditions(&hand, "blockless-1").await.unwrap();
    let of_another = |it: &&Condition| it.type_ == "OfAnother";
    let before = before.iter().find(of_another);
    assert!(before.is_some() && kept.iter().find(of_another) == before);
}

async fn conditions(hand: &Fixtures, node: &str) -> Result<Vec<Condition>> {
    let status = hand.subnets.get(node).await?.status;
    Ok(status.unwrap_or_default().conditions)
}

/// Waits until the condition `WritesRejected` of the NodeSubnet has this status.
async fn wait_writes_refused(hand: &Fixtures, expected: &str) {
    until(
        &format!("WritesRejected is {expected}"),
        LIMIT,
        async || {
            let all = conditions(hand, "blockless-1").await?;
            let refused = all.iter().find(|it| it.type_ == "WritesRejected");
            Ok(refused
                .is_some_and(|it| it.status == expected)
                .then_some(()))
        },
    )
    .await
    .unwrap();
}
