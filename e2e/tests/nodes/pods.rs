//! Creates pods of a group, waits until they run with addresses, and deletes them.

use std::ops::Range;

use anyhow::{Context as _, ensure};
use cadastre_api::POOLS_ANNOTATION;
use cadastre_core::Cidr;
use cadastre_e2e::Fixtures;
use cadastre_e2e::node::pods::reaches;
pub use cadastre_e2e::node::pods::{Running, assert_unique, list};
use cadastre_e2e::node::{IMAGE, Machine, pods};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::{LIMIT, eventually};

/// Creates a pod of a group, on `node` or on the node that the scheduler chooses.
pub async fn create(api: &Fixtures, group: &str, name: &str, node: Option<&str>) {
    create_in(api, group, name, node, None).await;
}

/// Creates a pod as [`create`] does. If `pool` is given, the pod requests this pool by name.
pub async fn create_in(
    api: &Fixtures,
    group: &str,
    name: &str,
    node: Option<&str>,
    pool: Option<&str>,
) {
    let annotations = pool.map(|it| json!({POOLS_ANNOTATION: it}));
    create_with(api, group, name, node, annotations).await;
}

/// Creates a pod as [`create`] does, with these annotations.
pub async fn create_with(
    api: &Fixtures,
    group: &str,
    name: &str,
    node: Option<&str>,
    annotations: Option<Value>,
) {
    let mut pod = json!({
        "metadata": {"name": name, "labels": {"group": group}, "annotations": annotations},
        "spec": {
            "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never"}],
            "nodeSelector": {"group": group},
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
        },
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
    } else {
        // A node becomes ready a moment before its taint is removed. Without this constraint, the scheduler could bind
        // all pods to the other nodes.
        pod["spec"]["topologySpreadConstraints"] = json!([{
            "topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"group": group}},
        }]);
    }
    let pod = serde_json::from_value(pod).unwrap();
    let params = PostParams::default();
    api.pods.create(&params, &pod).await.unwrap();
}

/// Creates the pods `PREFIX-N` of a group, on `node` or on nodes that the scheduler chooses.
pub async fn create_many(
    api: &Fixtures,
    group: &str,
    prefix: &str,
    numbers: Range<usize>,
    node: Option<&str>,
) {
    let all = numbers.map(|n| async move {
        create(api, group, &format!("{prefix}-{n}"), node).await;
    });
    futures::future::join_all(all).await;
}

/// Waits until a group has exactly `count` pods, each with a running container and addresses. For all of them, `is`
/// must return true. Returns the pods.
pub async fn running_that(
    api: &Fixtures,
    group: &str,
    count: usize,
    is: impl Fn(&Running) -> bool,
) -> Vec<Running> {
    let what = format!("{count} pods of {group} run");
    eventually(&what, async || {
        let all = list(api, group).await?;
        let running: Vec<Running> = all.iter().filter_map(Running::of).filter(&is).collect();
        if running.len() == count && all.len() == count {
            return Ok(Some(running));
        }
        let others = all
            .iter()
            .filter(|it| !Running::of(it).is_some_and(|it| is(&it)));
        let others: Vec<_> = others
            .map(|it| (it.name_any(), state(it)))
            .take(3)
            .collect();
        anyhow::bail!(
            "{} of {} run; not yet: {others:?}",
            running.len(),
            all.len()
        )
    })
    .await
}

/// Waits until a group has exactly `count` pods, each with a running container and addresses. Returns them.
pub async fn running(api: &Fixtures, group: &str, count: usize) -> Vec<Running> {
    running_that(api, group, count, |_| true).await
}

/// Returns the pod's conditions as `TYPE=STATUS`.
fn state(pod: &Pod) -> Vec<String> {
    let conditions = pod
        .status
        .iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let told = conditions.map(|it| format!("{}={}", it.type_, it.status));
    told.collect()
}

/// Waits until exactly `count` pods of a group run whose names begin with `prefix`, and returns them.
pub async fn running_of(api: &Fixtures, group: &str, prefix: &str, count: usize) -> Vec<Running> {
    let what = format!("{count} pods {prefix}-* run");
    eventually(&what, async || {
        let all = list(api, group).await?;
        let running = all.iter().filter_map(Running::of);
        let running: Vec<Running> = running.filter(|it| it.name.starts_with(prefix)).collect();
        ensure!(running.len() == count, "{} run", running.len());
        Ok(Some(running))
    })
    .await
}

/// Deletes the pods `PREFIX-N`. Does not wait until they are gone.
pub async fn delete_many(api: &Fixtures, prefix: &str, numbers: Range<usize>) {
    let all = numbers.map(|n| async move {
        let name = format!("{prefix}-{n}");
        let deleted = api.pods.delete(&name, &DeleteParams::default()).await;
        deleted.unwrap();
    });
    futures::future::join_all(all).await;
}

/// Deletes all pods of a group, and waits until they are gone from the API.
pub async fn delete_all(api: &Fixtures, group: &str) {
    pods::delete_all(api, group, LIMIT).await.unwrap();
}

/// Asserts that every address of these pods is in one of the ranges.
pub fn assert_within<'a>(pods: impl IntoIterator<Item = &'a Running>, ranges: &[String]) {
    let ranges: Vec<Cidr> = ranges
        .iter()
        .map(|it| Cidr::parse_strict(it).unwrap())
        .collect();
    for pod in pods {
        assert!(pod.is_in(&ranges), "{pod:?} is not in {ranges:?}");
    }
}

/// Waits until a Node's condition `Ready` is `True` or, if `ready` is false, is not `True`. Returns the Node.
pub async fn ready(api: &Fixtures, node: &str, ready: bool) -> Node {
    let wanted = if ready { "True" } else { "False, Unknown" };
    let what = format!("node {node} has Ready: {wanted}");
    eventually(&what, async || {
        let node = api.nodes.get(node).await?;
        let conditions = node
            .status
            .iter()
            .flat_map(|it| it.conditions.iter().flatten());
        let condition = conditions.into_iter().find(|it| it.type_ == "Ready");
        let condition = condition.context("no condition")?;
        ensure!((condition.status == "True") == ready, "{condition:?}");
        Ok(Some(node))
    })
    .await
}

/// Waits until the kubelet of a ready node has sent `count` heartbeats. Calls `check` at least once for each heartbeat.
pub async fn heartbeats(api: &Fixtures, node: &str, count: usize, check: impl Fn()) {
    let mut beats = Vec::new();
    eventually("the node goes on", async || {
        let now = ready(api, node, true).await;
        check();
        let conditions = now.status.unwrap().conditions.unwrap();
        let ready = conditions.into_iter().find(|it| it.type_ == "Ready");
        beats.push(ready.unwrap().last_heartbeat_time);
        beats.dedup();
        Ok((beats.len() >= count).then_some(()))
    })
    .await;
}

/// Waits until a node has one podCIDR for each of `families` families, and returns the podCIDRs.
pub async fn pod_cidrs(api: &Fixtures, node: &str, families: usize) -> Vec<String> {
    let what = format!("node {node} has {families} podCIDRs");
    eventually(&what, async || {
        let node = api.nodes.get(node).await?;
        let cidrs = cadastre_e2e::nodes::pod_cidrs(&node).to_vec();
        ensure!(cidrs.len() == families, "{cidrs:?}");
        Ok(Some(cidrs))
    })
    .await
}

/// Waits until every address of `to` answers a ping from the pod `from`, which runs on `machine`.
pub async fn assert_reaches(machine: &Machine, from: &Running, to: &Running) {
    reaches(machine, from, to, LIMIT).await.unwrap();
}
