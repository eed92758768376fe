//! Creates pods that get addresses of a pool, waits for them, and deletes them.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cadastre_api::POOLS_ANNOTATION;
use cadastre_core::Cidr;
use cadastre_e2e::Fixtures;
pub use cadastre_e2e::node::pods::Running;
use cadastre_e2e::node::pods::list;
use cadastre_e2e::node::{IMAGE, pods};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::LIMIT;
use crate::{RANGES, eventually};

/// Pods `GROUP-N` with common properties.
#[derive(Clone, Copy, Debug, Default)]
pub struct Group<'a> {
    pub name: &'a str,
    /// The pool that the pods request; empty if they request none
    pub pool: &'a str,
    /// The node on which the pods run; empty if the scheduler decides
    pub node: &'a str,
}

/// Creates the pods of a group. The pods request no pool, and the scheduler chooses their nodes.
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

/// Waits until `count` pods of a group run, each with an address of both families in [`RANGES`]. Returns them sorted.
pub async fn running(api: &Fixtures, group: &str, count: usize) -> Vec<Running> {
    let ranges = RANGES.map(|it| Cidr::parse_strict(it).unwrap());
    let running = within(api, group, count, &ranges).await;
    assert!(
        running.iter().all(|it| it.addresses.len() == 2),
        "{running:?}"
    );
    running
}

/// Waits until `count` pods of a group run, each with its addresses in any of `ranges`. Returns them sorted.
pub async fn within(api: &Fixtures, group: &str, count: usize, ranges: &[Cidr]) -> Vec<Running> {
    let what = format!("{count} pods of {group} run");
    eventually(&what, async || {
        let all = list(api, group).await?;
        let mut running: Vec<Running> = all.iter().filter_map(Running::of).collect();
        ensure!(running.len() == count, "{} run", running.len());
        let inside = running.iter().all(|it| it.is_in(ranges));
        ensure!(inside, "not all in {ranges:?}: {running:?}");
        running.sort();
        Ok(Some(running))
    })
    .await
}

pub async fn count(api: &Fixtures, group: &str) -> Result<usize> {
    let all = list(api, group).await?;
    Ok(all.iter().filter_map(Running::of).count())
}

/// Settings for pods that are created one after the other while something else happens.
pub struct Coming<'a> {
    api: &'a Fixtures,
    group: &'a str,
}

pub fn coming<'a>(api: &'a Fixtures, group: &'a str) -> Coming<'a> {
    Coming { api, group }
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
                pods = running(self.api, self.group, pods.len() + 1).await;
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
    pods::assert_unique(groups.iter().copied().flatten());
}

/// Deletes the pods of a group and waits until they are gone.
pub async fn delete(api: &Fixtures, group: &str) {
    pods::delete_all(api, group, LIMIT).await.unwrap();
}
