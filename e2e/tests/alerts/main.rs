//! Alerts, dashboard and metrics with a real Prometheus that scrapes a controller and an agent.
//!
//! `make monitoring` builds Prometheus and promtool.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::node_agent::{NodeAgent, add};
use cadastre_e2e::prometheus::{Prometheus, impatient, promtool, rules};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Options, TestCluster};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

fn file(name: &str) -> PathBuf {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/cadastre/files");
    chart.join(name)
}

#[test]
fn promtool_takes_the_rules_and_their_tests_pass() {
    promtool(
        &["check", "rules", "--lint-fatal", rules().to_str().unwrap()],
        "",
    )
    .unwrap();
    let tests = file("rules.test.yaml");
    let said = promtool(&["test", "rules", tests.to_str().unwrap()], "").unwrap();
    assert!(said.contains("SUCCESS"), "{said}");
}

/// The panels that must show no data here, because they show a forecast, and a pool has a forecast only after it has
/// grown for hours.
const EMPTY: [&str; 2] = ["First pool exhausted in", "Time until exhausted"];

#[tokio::test]
async fn metrics_and_dashboard_hold_before_a_real_prometheus() {
    let stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28}});
    hand.block_pool("show", spec).await.unwrap();
    hand.node("show", "show-1").await.unwrap();
    let flags = ["--publish-interval", "0.5"];
    let mut node = NodeAgent::new(&stage.control_plane, ADMIN, "show-1", &flags).unwrap();
    node.start().unwrap();
    node.running().unwrap().wait_ready(LIMIT).await.unwrap();
    node.add(add("c1")).await.unwrap();
    let agent = node.running().unwrap();

    let files = tempfile::tempdir().unwrap();
    let targets = [
        (
            "cadastre-controller",
            stage.controller.admin_address(),
            json!({}),
        ),
        (
            "cadastre-agent",
            agent.admin_address(),
            json!({"node": "show-1"}),
        ),
    ];
    let rules = rules().canonicalize().unwrap();
    let server = Prometheus::start(files.path(), &targets, Some(&rules))
        .await
        .unwrap();
    let used = "cadastre_agent_addresses{state=\"used\"} == 1";
    until("the agent's figures are there twice", LIMIT, async || {
        let twice = format!("count_over_time({used}[1m:1s]) > 2").replace(" == 1[", "[");
        Ok((!server.query(&twice).await?.is_empty()).then_some(()))
    })
    .await
    .unwrap();

    for (daemon, name) in [(&stage.controller, "controller"), (&*agent, "agent")] {
        let text = daemon.get("/metrics").await.unwrap();
        let said = promtool(&["check", "metrics"], &text);
        assert_eq!(said.map_err(|it| format!("{name}: {it:#}")).unwrap(), "");
    }
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(file("dashboard.json")).unwrap()).unwrap();
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap();
            let expr = expr
                .replace("$pool", ".*")
                .replace("$__rate_interval", "5s");
            let what = format!("\"{title}\" shows something for {expr}");
            if EMPTY.contains(&title) {
                assert_eq!(server.query(&expr).await.unwrap(), [], "{title}");
                continue;
            }
            until(&what, LIMIT, async || {
                let series = server.query(&expr).await?;
                Ok((!series.is_empty()).then_some(()))
            })
            .await
            .unwrap();
            queries += 1;
        }
    }
    assert!(queries > 30, "{queries}");
    let firing = server.firing().await.unwrap();
    assert!(firing.is_empty(), "all is well: {firing:?}");
}

/// Waits until exactly these alerts fire. Each alert is given by its name, a label and the label's value. An empty
/// label is not checked.
async fn fires(server: &Prometheus, expected: &[(&str, &str, &str)]) {
    let what = format!("{expected:?} fire");
    until(&what, LIMIT, async || {
        let firing = server.firing().await?;
        let is = |(name, label, value): &(&str, &str, &str)| {
            let mut all = firing.iter();
            all.any(|it| it["alertname"] == *name && (label.is_empty() || it[*label] == *value))
        };
        ensure!(
            expected.iter().all(is) && firing.len() == expected.len(),
            "{firing:?}"
        );
        Ok(Some(()))
    })
    .await
    .unwrap();
}

/// Every `for` in the chart's alert rules is set to one second, so that alerts fire soon.
#[tokio::test]
async fn an_exhausted_pool_alerts_an_extension_resolves_it_and_so_does_a_controller_that_is_gone() {
    let mut stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let range = json!({"ipv4": {"cidrs": ["10.91.0.0/24"]}});
    hand.pool("short", range).await.unwrap();
    hand.node("short", "short-1").await.unwrap();
    hand.served("short-1").await.unwrap();
    let files = tempfile::tempdir().unwrap();
    let target = (
        "cadastre-controller",
        stage.controller.admin_address(),
        json!({}),
    );
    let rules = impatient(files.path()).unwrap();
    let server = Prometheus::start(files.path(), &[target], Some(&rules))
        .await
        .unwrap();
    let full = ("CadastrePoolNearlyExhausted", "pool", "short");
    fires(&server, &[full]).await;

    hand.node("short", "short-2").await.unwrap();
    fires(&server, &[full, ("CadastrePoolExhausted", "pool", "short")]).await;
    let alerts = server.alerts().await.unwrap();
    let text = alerts
        .iter()
        .map(|it| it["annotations"]["summary"].as_str().unwrap());
    let text: Vec<&str> = text.collect();
    assert!(
        text.contains(&"Pool short is exhausted and 1 nodes wait for it"),
        "{text:?}"
    );

    let more = json!({"ipv4": {"cidrs": ["10.91.0.0/24", "10.92.0.0/16"]}});
    hand.change_pool("short", more).await.unwrap();
    hand.served("short-2").await.unwrap();
    fires(&server, &[]).await;

    stage.controller.process().kill().unwrap();
    fires(&server, &[("CadastreControllerDown", "", "")]).await;
}
