//! Assigning podCIDRs to nodes and touching nodes: the guards that keep two leaders from colliding.

use std::time::Duration;

use cadastre_api::TERM_ANNOTATION;
use cadastre_controller::cluster::lease::{Leadership, LeadershipTerm, Takeover};
use cadastre_controller::cluster::request::{Rejection, RequestOutcome};
use cadastre_daemon::clock::Clock;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::{CIDRS, assert_assigned, assert_guarded, bench, leading, touched};

#[tokio::test]
async fn a_node_without_annotations_and_labels_gets_both_families() {
    let bench = bench().await;
    let node = bench.create("bare", json!({})).await;
    assert!(!node.annotated && node.labels.is_empty());
    assert_assigned(&bench.assign(&node).await);
    let (first, all) = bench.spec("bare").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(CIDRS[0]), CIDRS.map(str::to_owned).to_vec())
    );
}

#[tokio::test]
async fn a_node_with_annotations_and_labels_gets_both_families_and_keeps_them() {
    let bench = bench().await;
    let metadata = json!({"annotations": {"a/b": "c"}, "labels": {"d": "e"}});
    let node = bench.create("dressed", metadata).await;
    assert!(node.annotated);
    assert_assigned(&bench.assign(&node).await);
    let (first, all) = bench.spec("dressed").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(CIDRS[0]), CIDRS.map(str::to_owned).to_vec())
    );
    let now = bench.nodes.get("dressed").await.unwrap();
    assert_eq!(
        (&*now.annotations()["a/b"], &*now.labels()["d"]),
        ("c", "e")
    );
}

#[tokio::test]
async fn a_touch_refuses_what_was_decided_before_it() {
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
        let touched = touched(bench.touch(&before, "2-newer").await);
        assert_eq!(touched.term.as_deref(), Some("2-newer"));
        assert_guarded(&bench.assign(&before).await);
        assert_eq!(bench.spec(name).await, (None, vec![]), "{name}");
        assert_assigned(&bench.assign(&touched).await);
    }
}

#[tokio::test]
async fn a_late_touch_does_not_open_the_fence_again() {
    let bench = bench().await;
    for (name, metadata) in [
        ("late-bare", json!({})),
        ("late-dressed", json!({"annotations": {"a": "b"}})),
        (
            "late-before",
            json!({"annotations": {TERM_ANNOTATION: "0-older"}}),
        ),
    ] {
        let seen = bench.create(name, metadata).await;
        let touched = touched(bench.touch(&seen, "3-newest").await);
        assert_guarded(&bench.touch(&seen, "2-late").await);
        assert_eq!(bench.read(name).await, touched, "{name}");
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
    touched(bench.touch(&seen, "2-x").await);
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
async fn what_another_writer_gave_stays() {
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
    // A podCIDR that Cadastre assigned is not changed by a second assignment either.
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
async fn the_first_annotation_of_all_refuses_and_a_second_look_mends_it() {
    // A JSON Patch cannot test a field whose parent is missing, so it tests that the parent is missing. As a result,
    // the node's first annotation makes the write fail.
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
async fn invariant_11_nothing_is_sent_past_the_term_or_under_another_term() {
    let bench = bench().await;
    let node = bench.create("late", json!({})).await;
    let refused = [
        leading(Clock.now()),
        Leadership::Standby { leader: None },
        Leadership::Released,
        Leadership::Leading(LeadershipTerm {
            id: "2-other".into(),
            takeover: Takeover::Clean,
            valid_until: Duration::MAX,
            vacant: Duration::ZERO,
            inherited: None,
            answered_since: Duration::ZERO,
            named: 0,
        }),
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
        .send_replace(leading(Clock.now() + Duration::from_secs(60)));
    assert_assigned(&bench.assign(&node).await);
}
