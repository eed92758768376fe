//! Measures the controller with many pods: memory at rest and after a relist, a restart compared with the raw LISTs,
//! and processor time while pods change.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, Options};
use cadastre_e2e::nodes;
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use http::Method;
use serde_json::json;

use super::{LIMIT, lists, mib, progress, say, until_subnets};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, ipv4: {cidrs: [10.0.0.0/8], blockSize: 26}}
";
const PODS: &str = "/api/v1/namespaces/default/pods";
const PODS_A_NODE: u32 = 30;
const REST: Duration = Duration::from_secs(20);
const CHURN: u32 = 200;
const CHURN_SECONDS: u32 = 30;

pub async fn run(count: u32) -> Result<()> {
    let pods = PODS_A_NODE * count;
    progress(&format!("{count} nodes and {pods} running pods"))?;
    let (mut cluster, _) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    nodes::create(&cluster, count, nodes::numbered).await?;
    let endpoint = cluster.endpoint()?;
    let all = |make: fn(u32) -> Call| (0..pods).map(make).collect::<Vec<Call>>();
    endpoint.send_all(nodes::CONNECTIONS, all(create)).await?;
    endpoint
        .send_all(nodes::CONNECTIONS, all(|i| rerun(i, 0)))
        .await?;

    progress("restart")?;
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(LIMIT).await?;
    until_subnets(&cluster, count).await?;
    daemon.process().stop(Duration::from_secs(30)).await?;
    let lists = lists(&cluster).await?;
    let begun = Instant::now();
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(LIMIT).await?;
    let ready = begun.elapsed();
    tokio::time::sleep(REST).await;
    let rest = daemon.process().usage()?;

    progress("churn")?;
    let before = daemon.process().usage()?.cpu;
    for second in 0..CHURN_SECONDS {
        let begun = Instant::now();
        let touched = (0..CHURN).map(|i| rerun((second * CHURN + i) % pods, second));
        endpoint.send_all(8, touched.collect()).await?;
        tokio::time::sleep(Duration::from_secs(1).saturating_sub(begun.elapsed())).await;
    }
    let churn = daemon.process().usage()?.cpu.saturating_sub(before);

    progress("forced relist")?;
    cluster.kill_apiserver()?;
    cluster.start_apiserver().await?;
    tokio::time::sleep(REST).await;
    daemon.wait_ready(LIMIT).await?;
    tokio::time::sleep(REST).await;
    let relisted = daemon.process().usage()?;
    say(&format!(
        "{count} nodes, {pods} pods: {:.1} MiB at rest ({:.1} peak), {:.1} MiB after a forced relist ({:.1} peak). \
         Restart to ready {:.2} s, the raw LISTs it needs {:.2} s: ratio {:.2}. \
         {CHURN} pod updates a second cost {:.1} % of a core.",
        mib(rest.rss),
        mib(rest.peak_rss),
        mib(relisted.rss),
        mib(relisted.peak_rss),
        ready.as_secs_f64(),
        lists.as_secs_f64(),
        ready.as_secs_f64() / lists.as_secs_f64(),
        churn.as_secs_f64() / f64::from(CHURN_SECONDS) * 100.0,
    ))
}

pub(super) fn pod_name(i: u32) -> String {
    format!("pod-{i:06}")
}

pub(super) fn create(i: u32) -> Call {
    let body = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod_name(i), "labels": {"app": format!("app-{}", i % 500)}},
        "spec": {
            "nodeName": format!("node-{:05}", i / PODS_A_NODE),
            "containers": [{"name": "c", "image": "example.com/app:1", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}],
        },
    });
    Call::new(Method::POST, PODS.to_owned(), JSON, &body)
}

/// Returns a call that updates a pod's status as a kubelet does after a container's restart. The pod's address is in no
/// pool, because only the number of updates matters here.
fn rerun(i: u32, restarts: u32) -> Call {
    let ip = std::net::Ipv4Addr::from(0xAC10_0000 + i).to_string();
    let body = json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "192.0.2.1",
        "conditions": [{"type": "Ready", "status": "True", "reason": format!("R{restarts}")}],
        "containerStatuses": [{
            "name": "c", "image": "example.com/app:1", "imageID": "example.com/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "ready": true, "restartCount": restarts, "started": true, "containerID": format!("containerd://{i:064}"),
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }],
    }});
    let path = format!("{PODS}/{}/status", pod_name(i));
    Call::new(Method::PATCH, path, MERGE_PATCH, &body)
}
