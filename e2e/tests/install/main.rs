//! The life of an installation as README, docs/install.md and docs/upgrade.md describe it. helm installs the image of
//! this repository on real kubelets, whose nodes are not ready because they lack a network. A real Prometheus scrapes
//! the installation.
//!
//! There are two tests, one on two nodes and one on a single node. Each is a sequence of steps, which depend on the
//! steps before. If nodes cannot run on this host or no image was built, the tests are ignored and the reason is
//! printed.
//!
//! | file | subject |
//! |---|---|
//! | `cluster` | the cluster of a new user, and its commands |
//! | `docs` | commands of the documentation |
//! | `workload` | pods |
//! | `services` | kube-proxy on the nodes, CoreDNS in a pod, and connections to a Service's name |
//! | `watching` | the kubectl plugin, alerts, a pool that is exhausted |
//! | `death` | a node that joins and dies |

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

mod cluster;
mod death;
mod docs;
mod services;
mod watching;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use cadastre_api::{IPAMBlock, IPPool, NodeSubnet, UnknownPods};
use cadastre_e2e::helm::Helm;
use cadastre_e2e::wait::until;
use cadastre_e2e::{assets, node};
use cluster::{Cluster, LIMIT};
use kube::Api;
use kube::api::ListParams;
use libtest_mimic::{Arguments, Trial};
use tokio::runtime::Runtime;
use watching::Watch;

/// The pool's IPv4 CIDR in docs/install.md, and an IPv6 CIDR.
const RANGES: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];

fn main() -> ExitCode {
    let reason = node::available().err().or(node::shipped().err());
    let reason = reason.or_else(|| node::kube_proxy().err());
    if let Some(reason) = &reason {
        eprintln!("the installation on real nodes is not tested: {reason}");
    }
    let many = || {
        run(2, |helm| helm, &async |cluster: &Cluster| {
            story(cluster).await;
        });
        Ok(())
    };
    let one = || {
        run(1, Helm::three, &async |cluster: &Cluster| {
            one_node(cluster).await;
        });
        Ok(())
    };
    let trials = [
        Trial::test(
            "installed_watched_extended_upgraded_rolled_back_taken_off_and_removed",
            many,
        ),
        Trial::test(
            "one_node_is_installed_upgraded_and_rolled_back_by_helm_3",
            one,
        ),
    ];
    let trials = trials.map(|it| it.with_ignored_flag(reason.is_some()));
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

/// Runs the test `story` on a new cluster. If the test fails, prints the cluster's state.
fn run(machines: usize, helm: fn(Helm) -> Helm, story: &impl AsyncFn(&Cluster)) {
    let runtime = Arc::new(Runtime::new().unwrap());
    runtime.block_on(async {
        tokio::task::spawn_blocking(|| assets::ensure(&assets::TOOLS))
            .await
            .unwrap()
            .unwrap();
        let cluster = Cluster::start(machines, helm).await;
        let outcome = std::panic::AssertUnwindSafe(story(&cluster));
        let outcome = futures::FutureExt::catch_unwind(outcome).await;
        if let Err(panic) = outcome {
            cluster.explain().await;
            std::panic::resume_unwind(panic);
        }
    });
}

/// On one node, there must be only one controller. A second controller could never start, so `--wait` and every upgrade
/// would never end.
async fn one_node(cluster: &Cluster) {
    say("helm 3 installs on one node");
    cluster.helm("../README.md", "helm install", &[]).await;
    let [node] = &cluster.nodes()[..] else {
        panic!("there is one machine");
    };
    cluster.ready(node, true).await;
    assert_eq!(cluster.controllers().await, [1, 1, 1]);

    say("and upgrades, twice");
    for level in ["debug", "trace"] {
        let set = format!("log.level={level}");
        cluster
            .helm("upgrade.md", "helm upgrade", &["--set", &set])
            .await;
        assert_eq!(cluster.controllers().await, [1, 1, 1]);
        let args = cluster.agent_args().await;
        assert!(args.contains(&format!("--log-level={level}")), "{args}");
    }

    say("and rolls back");
    cluster.helm("upgrade.md", "helm rollback", &[]).await;
    assert_eq!(cluster.controllers().await, [1, 1, 1]);
    let args = cluster.agent_args().await;
    assert!(args.contains("--log-level=debug"), "{args}");
    cluster.ready(node, true).await;

    say("and tests");
    let tested = cluster.helm("install.md", "helm test", &[]).await;
    assert!(tested.contains("Phase:          Succeeded"), "{tested}");
}

/// Waits until `look` returns a value; panics after [`LIMIT`].
async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> T {
    until(what, LIMIT, look).await.unwrap()
}

fn say(text: &str) {
    eprintln!("install: {text}");
}

async fn story(cluster: &Cluster) {
    tokio::task::spawn_blocking(|| assets::ensure(&assets::MONITORING))
        .await
        .unwrap()
        .unwrap();
    let api = &cluster.api;
    for node in cluster.nodes() {
        let message = cluster.ready(&node, false).await;
        assert!(message.contains("cni"), "{message}");
    }

    let mut proxies = services::start_proxies(cluster).await;

    say("helm install on nodes that are not ready");
    let readme = docs::command("../README.md", "helm install");
    assert_eq!(readme, docs::command("install.md", "helm install"));
    // The documented command, but with a pool of both families.
    let cidrs = format!("defaultPool.cidrs={{{}}}", RANGES.join(","));
    let set = ["--set", &cidrs];
    let install = async || cluster.helm("install.md", "helm install", &set).await;
    let begun = std::time::Instant::now();
    let installed = install().await;
    assert!(installed.contains("in mode blocks"), "{installed}");
    for node in cluster.nodes() {
        cluster.ready(&node, true).await;
    }
    workload::create(api, "first", 8).await;
    let first = workload::running(api, "first", 8).await;
    let on: std::collections::BTreeSet<&String> = first.iter().map(|it| &it.node).collect();
    assert_eq!(on.len(), 2, "both nodes have pods: {first:?}");
    cluster.all_reach_each_other(&first).await;
    let seconds = begun.elapsed().as_secs_f64();
    say(&format!(
        "pods of both nodes reach each other {seconds:.1} s after the command was given"
    ));

    services::have_names(cluster, &mut proxies, &first).await;

    for (node, mib) in cluster.memory().await {
        say(&format!("the agent of {node} uses {mib:.0} MiB"));
        assert!(mib < 64.0, "half of what the chart allows");
    }

    let watch = Watch::start(cluster).await;
    watching::all_is_well(cluster, &first).await;
    let small = watching::runs_out(cluster, &watch).await;
    let lost = death::of_a_node(cluster, &watch).await;
    let later = death::nothing_of_it_is_given(cluster, &lost).await;

    say("helm upgrade while pods come, and the dead node's addresses rest");
    let come = workload::coming(api, "during");
    cluster.apply_crds().await;
    let change = ["--set", "log.level=debug"];
    let upgrade = cluster.helm("upgrade.md", "helm upgrade", &change);
    let (_, (during, slowest)) = come.meanwhile(upgrade).await;
    let seconds = slowest.as_secs_f64();
    say(&format!(
        "{} pods came, the slowest ran after {seconds:.1} s",
        during.len()
    ));
    assert!(!during.is_empty());
    assert_eq!(workload::running(api, "first", 8).await, first);
    assert!(cluster.agent_args().await.contains("--log-level=debug"));

    say("helm rollback");
    cluster.helm("upgrade.md", "helm rollback", &[]).await;
    assert!(cluster.agent_args().await.contains("--log-level=info"));
    assert_eq!(workload::running(api, "first", 8).await, first);

    death::is_over(cluster, &lost).await;

    say("helm uninstall: pods keep their addresses, new ones get some");
    let serve = "kubectl patch ippools.cadastre.dev default --type=merge";
    cluster.kubectl("upgrade.md", serve).await;
    for node in cluster.nodes() {
        api.subnet_until(&node, "pods that nobody knows are served", |it| {
            let mut pools = it.spec.pools.iter();
            pools.any(|it| it.terms.unknown_pods == UnknownPods::Serve)
        })
        .await
        .unwrap();
    }
    cluster.helm("upgrade.md", "helm uninstall", &[]).await;
    cluster.no_agents().await;
    assert_eq!(workload::running(api, "first", 8).await, first);
    workload::create(api, "alone", 4).await;
    let alone = workload::running(api, "alone", 4).await;
    workload::assert_unique(&[&first, &small, &later, &during, &alone]);
    for node in cluster.nodes() {
        cluster.ready(&node, true).await;
    }
    assert_eq!(count::<IPPool>(cluster).await, 2);
    assert_eq!(count::<NodeSubnet>(cluster).await, 2);

    say("a new installation takes all of it over");
    install().await;
    cluster
        .reports(&[&first, &small, &later, &during, &alone])
        .await;
    assert_eq!(workload::running(api, "first", 8).await, first);
    workload::create(api, "again", 2).await;
    let again = workload::running(api, "again", 2).await;
    workload::assert_unique(&[&first, &small, &later, &during, &alone, &again]);

    say("removed for good");
    for group in ["first", "small", "later", "during", "alone", "again"] {
        workload::delete(api, group).await;
    }
    let last = "helm upgrade cadastre charts/cadastre --namespace kube-system --reset-then-reuse-values --wait  ";
    cluster.helm("upgrade.md", last, &[]).await;
    cluster
        .kubectl("upgrade.md", "kubectl delete ippools.cadastre.dev")
        .await;
    cluster.helm("upgrade.md", "helm uninstall", &[]).await;
    eventually("no block is left", async || {
        anyhow::ensure!(count::<IPAMBlock>(cluster).await == 0);
        Ok(Some(()))
    })
    .await;
    cluster.kubectl("upgrade.md", "kubectl delete crd").await;
    for node in cluster.nodes() {
        cluster.ready(&node, false).await;
    }
    let left = [
        "get",
        "crd,validatingadmissionpolicy,clusterrole",
        "-o",
        "name",
    ];
    let left = cluster.site.cluster().kubectl(&left).await.unwrap();
    assert!(!left.contains("cadastre"), "{left}");
}

async fn count<K>(cluster: &Cluster) -> usize
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
        + Clone
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    let api: Api<K> = Api::all(cluster.api.client.clone());
    api.list(&ListParams::default()).await.unwrap().items.len()
}
