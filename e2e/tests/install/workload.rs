//! Creates pods that get addresses of a pool, waits for them, and deletes them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cadastre_api::POOLS_ANNOTATION;
use cadastre_core::Cidr;
use cadastre_e2e::Fixtures;
use cadastre_e2e::node::IMAGE;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;
use tokio::sync::watch;

use crate::eventually;

/// A running pod, with the properties that must not change while it runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Running {
    pub node: String,
    uid: String,
    container: String,
    pub address: IpAddr,
}

/// Pods `GROUP-N` with common properties.
#[derive(Clone, Copy, Debug, Default)]
pub struct Group<'a> {
    pub name: &'a str,
    /// The pool that the pods request; empty if they request none
    pub pool: &'a str,
    /// The node on which the pods run; empty if the scheduler decides
    pub node: &'a str,
}

/// Creates the pods of a group; any pool and any node will do.
pub async fn create(api: &Fixtures, group: &str, count: usize) {
    let group = Group {
        name: group,
        ..Group::default()
    };
    create_in(api, group, count).await;
}

pub async fn create_in(api: &Fixtures, group: Group<'_>, count: usize) {
    for n in 0..count {
        create_one(api, group, n).await;
    }
}

async fn create_one(api: &Fixtures, group: Group<'_>, n: usize) {
    let annotations = (!group.pool.is_empty()).then(|| json!({POOLS_ANNOTATION: group.pool}));
    let selector = (!group.node.is_empty()).then(|| json!({"kubernetes.io/hostname": group.node}));
    let group = group.name;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {
            "name": format!("{group}-{n}"), "labels": {"group": group}, "annotations": annotations,
        },
        "spec": {
            "nodeSelector": selector,
            "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never"}],
            "terminationGracePeriodSeconds": 1,
            "topologySpreadConstraints": [{
                "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"group": group}},
            }],
        },
    }))
    .unwrap();
    api.pods.create(&PostParams::default(), &pod).await.unwrap();
}

async fn list(api: &Fixtures, group: &str) -> Result<Vec<Pod>> {
    let params = ListParams::default().labels(&format!("group={group}"));
    Ok(api.pods.list(&params).await?.items)
}

/// Waits until `count` pods of a group run, each with an address in `range`. Returns them sorted.
pub async fn running(api: &Fixtures, group: &str, count: usize, range: &str) -> Vec<Running> {
    within(api, group, count, &[Cidr::parse_strict(range).unwrap()]).await
}

/// Like [`running`], but each address may lie in any of `ranges`.
pub async fn within(api: &Fixtures, group: &str, count: usize, ranges: &[Cidr]) -> Vec<Running> {
    let what = format!("{count} pods of {group} run");
    eventually(&what, async || {
        let all = list(api, group).await?;
        let mut running: Vec<Running> = all.iter().filter_map(as_running).collect();
        ensure!(running.len() == count, "{} run", running.len());
        let inside = running.iter().all(|it| it.is_in(ranges));
        ensure!(inside, "not all in {ranges:?}: {running:?}");
        running.sort();
        Ok(Some(running))
    })
    .await
}

impl Running {
    /// Returns whether the pod's address lies in one of the ranges.
    pub fn is_in(&self, ranges: &[Cidr]) -> bool {
        ranges
            .iter()
            .any(|it| it.contains_addr(self.address.into()))
    }
}

pub async fn count(api: &Fixtures, group: &str) -> Result<usize> {
    let all = list(api, group).await?;
    Ok(all.iter().filter_map(as_running).count())
}

fn as_running(pod: &Pod) -> Option<Running> {
    let status = pod.status.as_ref()?;
    let container = status.container_statuses.as_ref()?.first()?;
    if !container.ready || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    Some(Running {
        node: pod.spec.as_ref()?.node_name.clone()?,
        uid: pod.uid()?,
        container: container.container_id.clone()?,
        address: status.pod_ip.as_ref()?.parse().ok()?,
    })
}

/// Settings for creating pods one after the other while something else happens.
pub struct Coming<'a> {
    api: &'a Fixtures,
    group: &'a str,
    range: &'a str,
}

pub fn coming<'a>(api: &'a Fixtures, group: &'a str, range: &'a str) -> Coming<'a> {
    Coming { api, group, range }
}

impl Coming<'_> {
    /// Creates pods one after the other until `other` has ended. Returns the result of `other`, the pods, and how long
    /// the slowest pod took.
    pub async fn meanwhile<T>(
        self,
        other: impl Future<Output = T>,
    ) -> (T, (Vec<Running>, Duration)) {
        let (done, is_done) = watch::channel(false);
        let pods = async {
            let (mut pods, mut slowest) = (Vec::new(), Duration::ZERO);
            while !*is_done.borrow() {
                let start = Instant::now();
                let group = Group {
                    name: self.group,
                    ..Group::default()
                };
                create_one(self.api, group, pods.len()).await;
                pods = running(self.api, self.group, pods.len() + 1, self.range).await;
                slowest = slowest.max(start.elapsed());
            }
            (pods, slowest)
        };
        let other = async {
            let answer = other.await;
            done.send_replace(true);
            answer
        };
        futures::future::join(other, pods).await
    }
}

/// Asserts that no two pods have the same address.
pub fn assert_unique(groups: &[&Vec<Running>]) {
    let all: Vec<IpAddr> = groups
        .iter()
        .flat_map(|it| it.iter())
        .map(|it| it.address)
        .collect();
    let different: BTreeSet<IpAddr> = all.iter().copied().collect();
    assert_eq!(different.len(), all.len(), "an address twice: {groups:?}");
}

/// Deletes the pods of a group and waits until they are gone.
pub async fn delete(api: &Fixtures, group: &str) {
    let params = ListParams::default().labels(&format!("group={group}"));
    let softly = DeleteParams::default();
    api.pods.delete_collection(&softly, &params).await.unwrap();
    eventually(&format!("the pods of {group} are gone"), async || {
        let left = list(api, group).await?;
        ensure!(left.is_empty(), "{} are left", left.len());
        Ok(Some(()))
    })
    .await;
}
