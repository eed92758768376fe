//! A controller with a thousand pools.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::TestCluster;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::raw::{Call, JSON};
use cadastre_e2e::wait::until;
use http::Method;
use kube::api::ListParams;
use serde_json::json;

use crate::alone;

const POOLS: u32 = 1000;

fn pool(i: u32) -> Call {
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool",
        "metadata": {"name": format!("crowd-{i:04}")},
        "spec": {
            "allocationMode": "NodeCIDR", "quarantineSeconds": 0,
            "nodeSelector": {"matchLabels": {"group": format!("crowd-{i:04}")}},
            "ipv4": {"cidrs": [format!("10.{}.{}.0/24", 100 + i / 250, i % 250)], "blockSize": 26},
        },
    });
    let path = "/apis/cadastre.dev/v1alpha1/ippools".to_owned();
    Call::new(Method::POST, path, JSON, &body)
}

/// Returns how many requests the controller has sent.
async fn sent(stage: &TestCluster) -> Result<f64> {
    let metrics = stage.controller.metrics().await?;
    Ok(sum(&metrics, "rest_client_requests_total", &[]))
}

#[tokio::test]
async fn with_a_thousand_pools_a_node_costs_few_requests_and_memory_stays_small() -> Result<()> {
    let (stage, hand, _one) = alone(&[]).await?;
    let start = Instant::now();
    let calls = (0..POOLS).map(pool).collect();
    stage.control_plane.endpoint()?.send_all(16, calls).await?;
    println!(
        "{POOLS} pools created in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    let cidrs = hand.served_node("crowd-0777", "crowd-1").await?;
    println!("node served after {:.1} s", start.elapsed().as_secs_f64());
    assert!(cidrs[0].starts_with("10.103.27."), "{cidrs:?}");

    until(
        "every pool says that it is ready",
        Duration::from_secs(90),
        async || {
            let pools = hand.pools.list(&ListParams::default()).await?;
            let ready = pools.iter().filter(|pool| {
                let condition = cadastre_e2e::fixtures::condition(pool, "Ready");
                condition.is_some_and(|it| it.status == "True")
            });
            let ready = ready.count();
            anyhow::ensure!(ready == POOLS as usize, "{ready} are");
            Ok(Some(()))
        },
    )
    .await?;
    println!("all ready after {:.1} s", start.elapsed().as_secs_f64());
    // Requests are needed for the node, its NodeSubnet, the status of its pool, events and the Lease, but for no other
    // pool. Beside the first of these nodes, the controller may still write statuses of the new pools.
    let mut fewest = f64::INFINITY;
    for i in 1..=5 {
        let before = sent(&stage).await?;
        let start = Instant::now();
        let pool = format!("crowd-{i:04}");
        hand.served_node(&pool, &format!("crowd-{}", i + 1)).await?;
        let requests = sent(&stage).await? - before;
        let seconds = start.elapsed().as_secs_f64();
        println!("next node served after {seconds:.3} s, with {requests} requests");
        fewest = fewest.min(requests);
    }
    assert!(fewest < 20.0, "{fewest} requests");

    let metrics = stage.controller.metrics().await?;
    let memory = sum(&metrics, "process_resident_memory_bytes", &[]) / f64::from(1 << 20);
    println!("resident memory: {memory:.0} MiB");
    assert!(memory < 150.0, "{memory:.0} MiB");
    Ok(())
}
