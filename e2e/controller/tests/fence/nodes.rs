//! Tests of the guards of two kinds of writes: podCIDRs of nodes, and touches of nodes. If a write of an earlier leader
//! contradicts a write of the present leader, the guards make the earlier leader's write fail.

use std::time::Duration;

use cadastre_api::TERM_ANNOTATION;
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::request::{Rejection, RequestOutcome};
use cadastre_daemon::clock::Clock;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::{CIDRS, TERM, assert_assigned, assert_guarded, bench, leading_in, node_of};

#[tokio::test]
async fn a_node_gets_both_families_and_keeps_its_annotations_and_labels() {
    let bench = bench().await;
    for (name, metadata) in [
        ("bare", json!({})),
        (
            "dressed",
            json!({"annotations": {"a/b": "c"}, "labels": {"d": "e"}}),
        ),
    ] {
        let node = bench.create(name, metadata.clone()).await;
        assert_eq!(node.annotated, metadata != json!({}));
        assert_assigned(&bench.assign(&node).await);
        let both = (Some(CIDRS[0].to_owned()), CIDRS.map(str::to_owned).to_vec());
        assert_eq!(bench.spec(name).await, both);
        let now = bench.nodes.get(name).await.unwrap();
        let (annotations, labels) = (now.annotations(), now.labels());
        assert_eq!(
            json!(annotations),
            metadata.get("annotations").cloned().unwrap_or(json!({}))
        );
        assert_eq!(
            json!(labels),
            metadata.get("labels").cloned().unwrap_or(json!({}))
        );
    }
}

/// A touch is the write by which a new leader makes delayed writes of an earlier leader fail.
#[tokio::test]
async fn after_a_touch_assignments_and_touches_decided_before_it_fail() {
    let bench = bench().await;
    for (name, metadata) in [
        ("touched-bare", json!({})),
        ("touched-dressed", json!({"annotations": {"a": "b"}})),
        (
            "touched-before",
            json!({"annotations": {TERM_ANNOTATION: "0-older"}}),
        ),
    ] {
        let before = bench.create(name, metadata).await;
        let touched = node_of(bench.touch(&before, "3-newest").await);
        assert_eq!(touched.term.as_deref(), Some("3-newest"));
        assert_guarded(&bench.assign(&before).await);
        assert_guarded(&bench.touch(&before, "2-late").await);
        assert_eq!(bench.spec(name).await, (None, vec![]), "{name}");
        assert_eq!(bench.read(name).await, touched, "{name}");
        assert_assigned(&bench.assign(&touched).await);
    }
}

#[tokio::test]
async fn a_touch_keeps_other_annotations_and_comes_through_beside_them() {
    let bench = bench().await;
    let seen = bench
        .create("kept", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .patch("kept", json!({"metadata": {"annotations": {"c": "d"}}}))
        .await;
    node_of(bench.touch(&seen, "2-x").await);
    let now = bench.nodes.get("kept").await.unwrap();
    let annotations: Vec<(&str, &str)> = now
        .annotations()
        .iter()
        .map(|(key, value)| (&**key, &**value))
        .collect();
    assert_eq!(
        annotations,
        [("a", "b"), ("c", "d"), (TERM_ANNOTATION, "2-x")]
    );
}

#[tokio::test]
async fn a_node_created_again_under_its_name_is_another_node() {
    let bench = bench().await;
    let before = bench
        .create("again", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .nodes
        .delete("again", &DeleteParams::default())
        .await
        .unwrap();
    for outcome in [
        bench.assign(&before).await,
        bench.touch(&before, "2-x").await,
    ] {
        assert!(
            matches!(outcome, RequestOutcome::Rejected(Rejection::Missing)),
            "{outcome:?}"
        );
    }
    let after = bench
        .create("again", json!({"annotations": {"a": "b"}}))
        .await;
    assert_ne!(before.uid, after.uid);
    assert_guarded(&bench.assign(&before).await);
    assert_guarded(&bench.touch(&before, "2-x").await);
    assert_eq!(bench.spec("again").await, (None, vec![]));
    assert_assigned(&bench.assign(&after).await);
}

#[tokio::test]
async fn existing_podcidrs_are_never_replaced() {
    let bench = bench().await;
    let theirs = ["10.200.0.0/24", "fd00:200::/64"];
    let node = bench.create("taken", json!({})).await;
    bench
        .patch(
            "taken",
            json!({"spec": {"podCIDR": theirs[0], "podCIDRs": theirs}}),
        )
        .await;
    assert_guarded(&bench.assign(&node).await);
    let (first, all) = bench.spec("taken").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(theirs[0]), theirs.map(str::to_owned).to_vec())
    );
    // A write fails if Cadastre itself has already written podCIDRs to the node.
    let node = bench.create("given", json!({})).await;
    assert_assigned(&bench.assign(&node).await);
    assert_guarded(&bench.assign(&node).await);
}

#[tokio::test]
async fn unrelated_updates_do_not_disturb_an_assignment() {
    let bench = bench().await;
    let seen = bench
        .create("busy", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .patch("busy", json!({"metadata": {"labels": {"l": "m"}}}))
        .await;
    bench
        .patch(
            "busy",
            json!({"metadata": {"annotations": {"c": "d", "a": null}}}),
        )
        .await;
    bench
        .patch("busy", json!({"spec": {"unschedulable": true}}))
        .await;
    let status =
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "172.16.0.1"}]}});
    bench
        .nodes
        .patch_status("busy", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let now = bench.read("busy").await;
    assert!(now.version > seen.version && now.addresses.len() == 1);
    assert_assigned(&bench.assign(&seen).await);
}

#[tokio::test]
async fn the_first_annotation_of_a_node_makes_a_write_fail_and_a_new_read_helps() {
    // A JSON Patch cannot test a field whose parent is missing. So for a node without annotations, the patch tests that
    // `metadata.annotations` is missing. The patch fails if the node gets its first annotation before the patch
    // arrives.
    let bench = bench().await;
    let seen = bench.create("first-annotation", json!({})).await;
    bench
        .patch(
            "first-annotation",
            json!({"metadata": {"annotations": {"a": "b"}}}),
        )
        .await;
    assert_guarded(&bench.assign(&seen).await);
    let again = bench.read("first-annotation").await;
    assert_assigned(&bench.assign(&again).await);
}

#[tokio::test]
async fn invariant_11_nothing_is_sent_after_the_term_of_leadership_or_in_another() {
    let bench = bench().await;
    let node = bench.create("late", json!({})).await;
    let refused = [
        leading_in(TERM, Clock.now()),
        Leadership::Standby { leader: None },
        Leadership::Released,
        leading_in("2-other", Duration::MAX),
    ];
    for leadership in refused {
        bench.leadership.send_replace(leadership.clone());
        for outcome in [bench.assign(&node).await, bench.touch(&node, "t").await] {
            assert!(
                matches!(outcome, RequestOutcome::Rejected(Rejection::NotSent)),
                "{leadership:?}: {outcome:?}"
            );
        }
    }
    assert_eq!(bench.read("late").await, node, "nothing was written");
    bench
        .leadership
        .send_replace(leading_in(TERM, Clock.now() + Duration::from_secs(60)));
    assert_assigned(&bench.assign(&node).await);
}
