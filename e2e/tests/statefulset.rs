//! Sticky addresses of a StatefulSet, with the real StatefulSet controller, scheduler, node lifecycle controller and
//! garbage collector. Kubelets are hollow (see [`Kubelets`]), and agents are real.
//!
//! A short run is part of the tests. `make statefulset` runs the same test with 100 replicas and 50 restarts.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // allowed in helpers as in tests

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cadastre_api::IPClaim;
use cadastre_e2e::wait::until;
use cadastre_e2e::{
    Agents, Fixtures, KcmOptions, Kubelets, Options, TestCluster, metrics, scheduler,
};
use futures::future::try_join_all;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

/// All pods of the StatefulSet are restarted, or started elsewhere, within this time.
const LIMIT: Duration = Duration::from_secs(600);
const SET: &str = "web";
const NODES: usize = 4;
/// A node has room for the number of replicas divided by this number, which is half of the pods.
const NODE_ROOM: u32 = 2;

struct Lab {
    fixtures: Fixtures,
    kubelets: Kubelets,
    sets: Api<StatefulSet>,
    replicas: usize,
}

impl Lab {
    async fn node(&self, name: &str) -> Result<()> {
        let node = self.fixtures.node(SET, name).await?;
        let room = u32::try_from(self.replicas)? / NODE_ROOM;
        self.kubelets.join(&node, room).await
    }

    async fn create_set(&self) -> Result<()> {
        let dead = |key| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1});
        let set = serde_json::from_value(json!({
            "metadata": {"name": SET},
            "spec": {
                "serviceName": SET, "replicas": self.replicas, "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": SET}},
                "updateStrategy": {"rollingUpdate": {"maxUnavailable": "25%"}},
                "template": {
                    "metadata": {
                        "labels": {"app": SET}, "annotations": {"cadastre.dev/sticky": "true"},
                    },
                    "spec": {
                        "containers": [{"name": "c", "image": "none"}],
                        "tolerations": [
                            dead("node.kubernetes.io/unreachable"),
                            dead("node.kubernetes.io/not-ready"),
                        ],
                    },
                },
            },
        }))?;
        self.sets.create(&PostParams::default(), &set).await?;
        Ok(())
    }

    async fn change(&self, spec: serde_json::Value) -> Result<()> {
        let patch = Patch::Merge(json!({"spec": spec}));
        self.sets
            .patch(SET, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Waits until all pods of the newest template are ready, then runs the assertions of [`Lab::check`].
    async fn complete(&self, replicas: usize, step: &str) -> Result<()> {
        let begun = Instant::now();
        let replicas = i32::try_from(replicas)?;
        until(&format!("{step}: all pods are ready"), LIMIT, async || {
            let set = self.sets.get(SET).await?;
            let status = set.status.context("no status")?;
            ensure!(
                status.observed_generation == set.metadata.generation,
                "not observed"
            );
            let ready = status.ready_replicas.unwrap_or(0);
            let updated = if status.current_revision == status.update_revision {
                replicas
            } else {
                status.updated_replicas.unwrap_or(0)
            };
            ensure!(
                (ready, updated, status.replicas) == (replicas, replicas, replicas),
                "{ready} ready, {updated} updated of {}: {:?}",
                status.replicas,
                self.kubelets.duplicates()
            );
            // The StatefulSet's status can lag behind the latest deletion of a pod. So the test also counts the pods.
            let pods = self.fixtures.pods.list(&ListParams::default()).await?.items;
            let running = pods.iter().filter(|it| is_ready(it)).count();
            ensure!(
                running == pods.len() && i32::try_from(running)? == replicas,
                "{running} pods run"
            );
            Ok(Some(()))
        })
        .await?;
        self.check()?;
        println!("{step}: {:.1} s", begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// Asserts that no address had two containers at a time, and that all containers of an ordinal had the same
    /// addresses, which no other ordinal had.
    fn check(&self) -> Result<()> {
        let duplicates = self.kubelets.duplicates();
        ensure!(duplicates.is_empty(), "{duplicates:?}");
        let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
        let assigned = self.kubelets.assigned();
        for (pod, containers) in &assigned {
            let different: BTreeSet<_> = containers.iter().collect();
            ensure!(different.len() == 1, "{pod} had {different:?}");
            for address in containers.iter().flatten() {
                let other = owners.insert(address, pod);
                ensure!(
                    other.is_none_or(|it| it == pod),
                    "{address}: {pod} and {other:?}"
                );
            }
        }
        Ok(())
    }

    async fn pods_on(&self, node: &str) -> Result<Vec<Pod>> {
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        Ok(self.fixtures.pods.list(&on_node).await?.items)
    }

    /// Returns the node with the most pods.
    async fn busiest(&self) -> Result<String> {
        let pods = self.fixtures.pods.list(&ListParams::default()).await?;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for pod in pods.items {
            let node = pod.spec.and_then(|it| it.node_name);
            *counts
                .entry(node.context("a pod is not bound")?)
                .or_default() += 1;
        }
        let busiest = counts.into_iter().max_by_key(|(_, pods)| *pods);
        Ok(busiest.context("no pod runs")?.0)
    }

    /// Cordons a node, evicts its pods, and waits until they are gone.
    async fn drain(&self, node: &str) -> Result<()> {
        self.cordon(node, true).await?;
        let pods = self.pods_on(node).await?;
        try_join_all(pods.iter().map(async |pod| {
            let params = EvictParams::default();
            self.fixtures.pods.evict(&pod.name_any(), &params).await
        }))
        .await?;
        until(&format!("{node} is empty"), LIMIT, async || {
            Ok(self.pods_on(node).await?.is_empty().then_some(()))
        })
        .await
    }

    async fn cordon(&self, node: &str, cordoned: bool) -> Result<()> {
        let change = json!({"spec": {"unschedulable": cordoned}});
        self.fixtures.change_node(node, change).await?;
        Ok(())
    }

    /// Switches the machine of a node off. Then deletes the Node, and its pods without a grace period.
    async fn dies(&self, node: &str) -> Result<()> {
        let pods = self.pods_on(node).await?;
        self.kubelets.switch_off(node)?;
        self.fixtures.delete_node(node).await?;
        let by_force = DeleteParams::default().grace_period(0);
        try_join_all(
            pods.iter()
                .map(async |pod| self.fixtures.pods.delete(&pod.name_any(), &by_force).await),
        )
        .await?;
        Ok(())
    }

    /// Pauses the machine of a node until its pods have been evicted, and then resumes it.
    async fn vanishes_and_returns(&self, node: &str) -> Result<()> {
        self.kubelets.pause(node)?;
        until(
            &format!("the pods of {node} are evicted"),
            LIMIT,
            async || {
                let pods = self.pods_on(node).await?;
                let evicted = pods
                    .iter()
                    .all(|it| it.metadata.deletion_timestamp.is_some());
                Ok(evicted.then_some(()))
            },
        )
        .await?;
        self.kubelets.resume(node)
    }
}

/// Returns whether a pod is ready and not being deleted.
fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|it| it.conditions.as_ref());
    let mut conditions = conditions.flatten();
    let is_ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
    is_ready && pod.metadata.deletion_timestamp.is_none()
}

fn number(name: &str, default: usize) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .with_context(|| format!("{name}={text} is no number")),
        Err(_) => Ok(default),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ordinals_keep_their_addresses_in_restarts_drains_and_deaths() -> Result<()> {
    let replicas = number("REPLICAS", 12)?;
    let restarts = number("RESTARTS", 2)?;
    let flags = ["--leak-grace", "2"];
    let cluster = TestCluster::start(Options::default(), &flags).await?;
    let fixtures = cluster.fixtures().await?;
    let dead_soon = [
        "--node-monitor-period=1s",
        "--node-monitor-grace-period=10s",
    ];
    let _kcm = cluster.control_plane.start_kcm(&KcmOptions {
        qps: 500,
        burst: 500,
        args: dead_soon.map(str::to_owned).into(),
        ..KcmOptions::default()
    })?;
    let _scheduler = scheduler::start(&cluster.control_plane)?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.79.0.0/22"], "blockSize": 28},
        "ipv6": {"cidrs": ["fd00:79::/112"], "blockSize": 124},
        "cooldownSeconds": 2, "quarantineSeconds": 3,
    });
    fixtures.block_pool(SET, spec).await?;
    let agents = Agents::new(&cluster.control_plane)?;
    let lab = Lab {
        kubelets: Kubelets::start(&fixtures, agents),
        sets: Api::default_namespaced(fixtures.client.clone()),
        fixtures,
        replicas,
    };
    for i in 1..=NODES {
        lab.node(&format!("{SET}-{i}")).await?;
    }
    lab.create_set().await?;
    lab.complete(replicas, "created").await?;

    for restart in 1..=restarts {
        let annotations = json!({"kubectl.kubernetes.io/restartedAt": restart.to_string()});
        lab.change(json!({"template": {"metadata": {"annotations": annotations}}}))
            .await?;
        lab.complete(replicas, &format!("restart {restart}"))
            .await?;
    }

    for _ in 0..2 {
        let node = lab.busiest().await?;
        lab.drain(&node).await?;
        lab.complete(replicas, &format!("{node} drained")).await?;
        lab.cordon(&node, false).await?;
    }

    lab.change(json!({"replicas": 0})).await?;
    lab.complete(0, "scaled to 0").await?;
    until("no node has the claims' addresses", LIMIT, async || {
        let metrics = cluster.controller.metrics().await?;
        let claims = |state| metrics::sum(&metrics, "cadastre_claims", &[("state", state)]);
        let [available, others] = [claims("available"), claims("in_use") + claims("waiting")];
        let all = u32::try_from(replicas)?.into();
        Ok(((available, others) == (all, 0.0)).then_some(()))
    })
    .await?;
    lab.change(json!({"replicas": replicas})).await?;
    lab.complete(replicas, "scaled back").await?;

    let node = lab.busiest().await?;
    lab.dies(&node).await?;
    lab.complete(replicas, &format!("{node} dead and deleted"))
        .await?;
    lab.node(&format!("{SET}-{}", NODES + 1)).await?;
    let node = lab.busiest().await?;
    lab.vanishes_and_returns(&node).await?;
    lab.complete(replicas, &format!("{node} dead and back"))
        .await?;

    let assigned = lab.kubelets.assigned();
    assert_eq!(assigned.len(), replicas);
    let containers: usize = assigned.values().map(Vec::len).sum();
    println!("{containers} containers, {replicas} ordinals, each with its own addresses");

    // When the StatefulSet is deleted, the garbage collector deletes the claims of the StatefulSet's pods.
    lab.sets.delete(SET, &DeleteParams::default()).await?;
    let claims: Api<IPClaim> = Api::default_namespaced(lab.fixtures.client.clone());
    until("the claims are gone", LIMIT, async || {
        let left = claims.list(&ListParams::default()).await?.items.len();
        ensure!(left == 0, "{left} are left");
        Ok(Some(()))
    })
    .await
}
