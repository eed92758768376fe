//! Watches of a real API server, through a connection that falls silent.

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

use std::time::Duration;

use cadastre_api::NodeLite;
use cadastre_controller::cluster::convert;
use cadastre_daemon::client;
use cadastre_daemon::telemetry::HttpMetrics;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::{LastHeard, Pauses, SilenceTimeouts, WatchSource, WatchStep, follow};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wire::Wire;
use cadastre_e2e::{ControlPlane, Fixtures, Options};
use kube::Api;
use tokio::sync::mpsc;

const LIMIT: Duration = Duration::from_secs(180);

/// Starts a watch of all Nodes through `wire`. Returns a channel with the steps of the watch, as text.
async fn watch(cluster: &ControlPlane, wire: &Wire) -> mpsc::Receiver<String> {
    let reach = client::Options {
        kubeconfig: Some(wire.kubeconfig(cluster, ADMIN).unwrap()),
        ..client::Options::default()
    };
    let metrics = HttpMetrics::register(&prometheus::Registry::new()).unwrap();
    let source = WatchSource::<NodeLite> {
        kind: "nodes",
        api: Api::all(client::connect(&reach, metrics).await.unwrap()),
        fields: None,
        labels: None,
        page: Some(2),
        pauses: Pauses::new(Duration::from_millis(10), Duration::from_millis(100), 1),
        doubtful: false,
        patience: SilenceTimeouts {
            answer: Duration::from_secs(2),
            bookmark: Duration::from_secs(5),
            ..SilenceTimeouts::default()
        },
        heard: LastHeard::default(),
    };
    let (out, steps) = mpsc::channel(64);
    let text = |step| match step {
        WatchStep::Change(ObjectEvent::Applied(name)) => Some(name),
        WatchStep::Change(ObjectEvent::Listed) => Some("listed".to_owned()),
        WatchStep::Trouble => Some("trouble".to_owned()),
        _ => None,
    };
    let read = |node| convert::node(node).name.to_string();
    tokio::spawn(follow(source, out, read, text));
    steps
}

async fn wait_for(steps: &mut mpsc::Receiver<String>, wanted: &str) -> Vec<String> {
    let mut came = Vec::new();
    while came.last().is_none_or(|step| step != wanted) {
        let next = tokio::time::timeout(LIMIT, steps.recv()).await;
        came.push(next.unwrap().unwrap());
    }
    came
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_arrive_after_an_unanswered_list_and_a_silent_watch() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let hand = Fixtures::new(cluster.client().await.unwrap());
    for name in ["w-1", "w-2", "w-3"] {
        hand.node("w", name).await.unwrap();
    }
    let wire = Wire::to(&cluster).await.unwrap();
    wire.hold();
    let mut steps = watch(&cluster, &wire).await;
    wait_for(&mut steps, "trouble").await;
    wire.release();
    let came = wait_for(&mut steps, "listed").await;
    assert!(came.contains(&"w-3".to_owned()), "{came:?}");

    hand.node("w", "w-4").await.unwrap();
    wait_for(&mut steps, "w-4").await;
    wire.fall_silent();
    hand.node("w", "w-5").await.unwrap();
    let came = wait_for(&mut steps, "w-5").await;
    assert!(came.contains(&"trouble".to_owned()), "{came:?}");
    assert!(
        !came.contains(&"w-1".to_owned()),
        "it goes on where it was: {came:?}"
    );
}
