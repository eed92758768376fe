//! A running controller: log lines, log level, metrics, and how it ends.

use std::time::Duration;

use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures, Options};
use http::{Method, StatusCode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, OnceCell};

use crate::LIMIT;

const GRACE: Duration = Duration::from_secs(20);

/// Returns the control plane that the tests of this file share, and fixtures for it. While a test keeps the guard, no
/// other test uses the control plane.
async fn turn() -> (&'static ControlPlane, Fixtures, MutexGuard<'static, ()>) {
    static CLUSTER: OnceCell<ControlPlane> = OnceCell::const_new();
    static TURN: Mutex<()> = Mutex::const_new(());
    let turn = TURN.lock().await;
    let start = async || with_crds(Options::default()).await.unwrap().0;
    let cluster = CLUSTER.get_or_init(start).await;
    let hand = Fixtures::new(cluster.client().await.unwrap());
    (cluster, hand, turn)
}

async fn start(cluster: &ControlPlane, flags: &[&str]) -> Daemon {
    let mut daemon = start_controller(cluster, ADMIN, flags).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    daemon
}

/// Stops a controller with SIGTERM. If it were killed, the next test would have to wait for the end of the Lease.
async fn stop(daemon: &mut Daemon) {
    let status = daemon.process().stop(GRACE).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", daemon.process().log_tail(20));
}

fn log(daemon: &mut Daemon) -> String {
    std::fs::read_to_string(daemon.process().log()).unwrap()
}

/// Creates two nodes and a pool with a range for only one of them. So the controller allocates a podCIDR and reports
/// that the pool is exhausted.
async fn work(hand: &Fixtures, group: &str, range: &str) {
    hand.pool(
        group,
        json!({"ipv4": {"cidrs": [range]}, "quarantineSeconds": 0}),
    )
    .await
    .unwrap();
    for name in [format!("{group}-1"), format!("{group}-2")] {
        hand.node(group, &name).await.unwrap();
    }
    hand.condition(group, "Exhausted", "True").await.unwrap();
}

#[tokio::test]
async fn sigterm_hands_the_lease_over_and_exits_with_0() {
    let (cluster, hand, _turn) = turn().await;
    let leases = Api::<Lease>::namespaced(hand.client.clone(), "kube-system");
    let mut leader = start(cluster, &[]).await;
    work(&hand, "term", "10.70.0.0/24").await;
    let held = leases.get(cadastre_api::LEASE_NAME).await.unwrap();
    assert_ne!(held.spec.unwrap().holder_identity.unwrap(), "");
    let mut standby = start(cluster, &["--identity", "second"]).await;
    assert!(standby.ready().await.unwrap().starts_with("standby"));
    stop(&mut standby).await;
    assert!(leader.ready().await.unwrap().starts_with("leader"));

    stop(&mut leader).await;
    let lease = leases.get(cadastre_api::LEASE_NAME).await.unwrap();
    assert_eq!(lease.spec.unwrap().holder_identity.unwrap(), "");
    let notes = lease.metadata.annotations.unwrap_or_default();
    assert!(
        !notes.contains_key(cadastre_api::UNSETTLED_ANNOTATION),
        "{notes:?}"
    );
}

#[tokio::test]
async fn the_log_level_changes_at_run_time() {
    let (cluster, hand, _turn) = turn().await;
    let mut daemon = start(cluster, &["--log-level", "warn"]).await;
    let (status, text) = daemon
        .ask(Method::PUT, "/loglevel", "shouting")
        .await
        .unwrap();
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.contains("error, warn, info, debug or trace"), "{text}");
    let before = log(&mut daemon).matches("DEBUG").count();

    let (status, text) = daemon
        .ask(Method::PUT, "/loglevel", "debug\n")
        .await
        .unwrap();
    assert_eq!((status, text.as_str()), (StatusCode::OK, "ok\n"));
    hand.pool("level", json!({"ipv4": {"cidrs": ["10.71.0.0/16"]}}))
        .await
        .unwrap();
    hand.condition("level", "Ready", "True").await.unwrap();
    until("there are debug lines", LIMIT, async || {
        Ok((log(&mut daemon).matches("DEBUG").count() > before).then_some(()))
    })
    .await
    .unwrap();
    let (status, _) = daemon.ask(Method::PUT, "/loglevel", "warn").await.unwrap();
    assert_eq!(status, StatusCode::OK);
    let before = log(&mut daemon).len();
    hand.node("level", "level-1").await.unwrap();
    hand.served("level-1").await.unwrap();
    assert_eq!(
        &log(&mut daemon)[before..],
        "",
        "a node that is served is nothing to warn of"
    );
    stop(&mut daemon).await;
}

#[tokio::test]
async fn every_line_of_a_json_log_is_one_object() {
    let (cluster, hand, _turn) = turn().await;
    let flags = [
        "--log-format",
        "json",
        "--log-level",
        "debug",
        "--identity",
        "json \"x\"",
    ];
    let mut daemon = start(cluster, &flags).await;
    let from = log(&mut daemon).find("{\"timestamp\"").unwrap();
    work(&hand, "json", "10.72.0.0/24").await;
    stop(&mut daemon).await;
    let text = log(&mut daemon);
    let mut reasons = Vec::new();
    for line in text[from..].lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        for key in ["timestamp", "level", "message"] {
            assert!(line[key].is_string(), "no {key}: {line}");
        }
        reasons.extend(line["reason"].as_str().map(ToOwned::to_owned));
    }
    assert!(
        reasons.iter().any(|it| it == "PoolExhausted"),
        "{reasons:?}"
    );
}

#[tokio::test]
async fn the_metrics_keep_to_the_conventions() {
    let (cluster, hand, _turn) = turn().await;
    let mut daemon = start(cluster, &[]).await;
    work(&hand, "metrics", "10.73.0.0/24").await;
    let text = until("every loop and pool has its figures", LIMIT, async || {
        let text = daemon.get("/metrics").await?;
        let there = text.contains("pool=\"metrics\"") && text.contains("loop=\"podcidr\"");
        Ok(there.then_some(text))
    })
    .await
    .unwrap();
    for name in [
        "cadastre_build_info",
        "cadastre_nodes_waiting",
        "cadastre_pool_blocks_free",
        "cadastre_loop_requests_total",
        "leader_election_master_status",
        "process_resident_memory_bytes",
        "rest_client_requests_total",
        "workqueue_depth",
    ] {
        assert!(text.contains(&format!("# TYPE {name} ")), "no {name}");
    }
    for label in ["node=\"", "pod=\"", "metrics-1", "10.73."] {
        assert!(!text.contains(label), "unbounded: {label}");
    }
    let (status, _) = daemon.ask(Method::GET, "/healthz", "").await.unwrap();
    assert_eq!(status, StatusCode::OK);
    stop(&mut daemon).await;
}
