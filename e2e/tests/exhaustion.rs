//! The scheduler binds no pods to nodes without a free address, with the real scheduler and the real controllers of
//! Deployments. Kubelets are hollow (see [`Kubelets`]), and agents are real.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // allowed in helpers as in tests

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cadastre_api::{EXHAUSTED_CONDITION, EXHAUSTED_TAINT};
use cadastre_e2e::wait::until;
use cadastre_e2e::{
    Agents, Fixtures, KcmOptions, Kubelets, Options, TestCluster, metrics, scheduler,
};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(120);
const GROUP: &str = "full";
const NODES: usize = 4;
/// The addresses of a /26 block without its network, gateway and broadcast address.
const ADDRESSES: usize = 61;
/// The pods that a node may run.
const PODS: u32 = 110;
const REPLICAS: usize = 500;

/// The number of the Deployment's pods in each state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Pods {
    with_address: usize,
    /// Bound to a node, and without an address
    stuck: usize,
    /// Not bound, because the scheduler finds the taint on the nodes
    unschedulable: usize,
    all: usize,
}

async fn count(fixtures: &Fixtures) -> Result<Pods> {
    let mut count = Pods::default();
    let pods = fixtures.pods.list(&ListParams::default()).await?;
    for pod in &pods.items {
        count.all += 1;
        let is_bound = pod.spec.as_ref().is_some_and(|it| it.node_name.is_some());
        let has_address = pod.status.as_ref().is_some_and(|it| it.pod_ip.is_some());
        count.with_address += usize::from(has_address);
        count.stuck += usize::from(is_bound && !has_address);
        count.unschedulable += usize::from(!is_bound && knows_why(pod));
    }
    Ok(count)
}

/// Returns whether the scheduler reports that a pod is not bound because nodes have a taint, whatever the taint is.
fn knows_why(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let mut unscheduled = conditions.filter(|it| it.reason.as_deref() == Some("Unschedulable"));
    unscheduled.any(|it| {
        it.message
            .as_ref()
            .is_some_and(|it| it.contains("untolerated taint"))
    })
}

/// Returns whether a node has the condition of exhausted nodes, and whether it has their taint.
fn marks(node: &Node) -> (bool, bool) {
    let conditions = node
        .status
        .iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let mut own = conditions.filter(|it| it.type_ == EXHAUSTED_CONDITION);
    let taints = node.spec.iter().flat_map(|it| it.taints.iter().flatten());
    let mut taints = taints.filter(|it| it.key == EXHAUSTED_TAINT && it.effect == "NoSchedule");
    (own.any(|it| it.status == "True"), taints.next().is_some())
}

async fn marked(fixtures: &Fixtures, wanted: bool) -> Result<()> {
    until(&format!("marked: {wanted}"), LIMIT, async || {
        let nodes = fixtures.nodes.list(&ListParams::default()).await?;
        let marks: Vec<_> = nodes.items.iter().map(marks).collect();
        ensure!(marks.iter().all(|it| *it == (wanted, wanted)), "{marks:?}");
        Ok(Some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scheduler_leaves_nodes_without_addresses_alone() -> Result<()> {
    let cluster = TestCluster::start(Options::default(), &["--evict-unserved-pods"]).await?;
    let fixtures = cluster.fixtures().await?;
    let _kcm = cluster.control_plane.start_kcm(&KcmOptions {
        qps: 500,
        burst: 500,
        ..KcmOptions::default()
    })?;
    let _scheduler = scheduler::start(&cluster.control_plane)?;
    // The range has one block for each node.
    let spec = json!({
        "ipv4": {"cidrs": ["10.81.0.0/24"], "blockSize": 26},
        "exhaustedNodeTaint": "NoSchedule", "cooldownSeconds": 2,
    });
    fixtures.block_pool(GROUP, spec).await?;
    let agents = Agents::new(&cluster.control_plane)?;
    let kubelets = Kubelets::start(&fixtures, agents);
    for i in 1..=NODES {
        let node = fixtures.node(GROUP, &format!("{GROUP}-{i}")).await?;
        kubelets.join(&node, PODS).await?;
        fixtures.listed(&node.name_any(), 1).await?;
    }

    let deployments: Api<Deployment> = Api::default_namespaced(fixtures.client.clone());
    let deployment = serde_json::from_value(json!({
        "metadata": {"name": GROUP},
        "spec": {
            "replicas": REPLICAS, "selector": {"matchLabels": {"app": GROUP}},
            "template": {
                "metadata": {"labels": {"app": GROUP}},
                "spec": {"containers": [{"name": "c", "image": "none"}]},
            },
        },
    }))?;
    let begun = Instant::now();
    deployments
        .create(&PostParams::default(), &deployment)
        .await?;
    marked(&fixtures, true).await?;
    let room = NODES * ADDRESSES;
    let none_stuck = Pods {
        with_address: room,
        stuck: 0,
        unschedulable: REPLICAS - room,
        all: REPLICAS,
    };
    until(
        "no pod is at a node without an address",
        LIMIT,
        async || {
            let pods = count(&fixtures).await?;
            ensure!(pods == none_stuck, "{pods:?}");
            Ok(Some(()))
        },
    )
    .await?;
    println!(
        "after {:.1} s: {none_stuck:?}",
        begun.elapsed().as_secs_f64()
    );
    let metrics = cluster.controller.metrics().await?;
    let exhausted = metrics::sum(&metrics, "cadastre_exhausted_nodes", &[]);
    assert_eq!(exhausted.to_string(), NODES.to_string());

    // With another range, each node gets a second block. Then each node runs as many pods as it may.
    let more = json!({"ipv4": {"cidrs": ["10.81.0.0/24", "10.81.1.0/24"]}});
    fixtures.change_pool(GROUP, more).await?;
    marked(&fixtures, false).await?;
    let most = NODES * usize::try_from(PODS)?;
    until("all nodes are full of pods", LIMIT, async || {
        let pods = count(&fixtures).await?;
        ensure!(pods.with_address == most && pods.stuck == 0, "{pods:?}");
        Ok(Some(()))
    })
    .await?;
    let duplicates = kubelets.duplicates();
    ensure!(duplicates.is_empty(), "{duplicates:?}");
    Ok(())
}
