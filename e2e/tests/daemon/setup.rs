//! Clusters that are not ready for the controller yet, and the permissions that are enough.

use std::time::Duration;

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::permissions::{Target, allowed};
use cadastre_e2e::stage::start_controller;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Hand, Options, crds};
use serde_json::json;

use crate::LIMIT;

const GRACE: Duration = Duration::from_secs(5);

/// A cluster with the CRDs, in which the controller's account may nothing yet.
pub async fn cluster() -> (ControlPlane, Hand) {
    let options = Options {
        users: vec![User::new(ACCOUNT, &["system:serviceaccounts"])],
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await.unwrap();
    let hand = Hand::new(cluster.client().await.unwrap());
    crds::install(&hand.client).await.unwrap();
    (cluster, hand)
}

async fn log_says(daemon: &mut Daemon, text: &str) {
    until(&format!("the log says {text:?}"), LIMIT, async || {
        daemon.process().check_running()?;
        let log = std::fs::read_to_string(daemon.process().log())?;
        anyhow::ensure!(log.contains(text), log);
        Ok(Some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn without_the_crds_it_says_what_to_do_waits_and_then_works() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let hand = Hand::new(cluster.client().await.unwrap());
    hand.node("wait", "wait-1").await.unwrap();
    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    for kind in ["ippools", "nodesubnets", "ipamblocks"] {
        let advice = "apply the CRDs (cadastre crd | kubectl apply --server-side -f -)";
        log_says(
            &mut daemon,
            &format!("{kind} are not known to the API server: {advice}"),
        )
        .await;
    }
    let unready = until("it is unready for that reason", LIMIT, async || {
        let error = daemon.ready().await.err().map(|it| it.to_string());
        Ok(error.filter(|it| it.contains("ippools") && it.contains("nodesubnets")))
    });
    assert!(unready.await.unwrap().contains("503"));
    // Told once, not at every try.
    let log = std::fs::read_to_string(daemon.process().log()).unwrap();
    assert_eq!(log.matches("ippools are not known").count(), 1, "{log}");

    // Nothing was begun, so there is nothing to wait for at the end.
    let status = daemon.process().stop(GRACE).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", daemon.process().log_tail(20));

    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    let binary = cadastre_e2e::daemon::binary().unwrap();
    let printed = std::process::Command::new(binary)
        .arg("crd")
        .output()
        .unwrap();
    let crds = String::from_utf8(printed.stdout).unwrap();
    cluster
        .kubectl_stdin(&["apply", "--server-side", "-f", "-"], &crds)
        .await
        .unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    hand.pool("wait", json!({"ipv4": {"cidrs": ["10.80.0.0/24"]}}))
        .await
        .unwrap();
    assert_eq!(hand.served("wait-1").await.unwrap(), ["10.80.0.0/24"]);
    log_says(&mut daemon, "watch works again").await;
}

pub const ACCOUNT: &str = "system:serviceaccount:kube-system:cadastre-controller";

/// Everything it may do, and some of what it may not.
const MAY: [(&str, &str, &str, &[&str]); 11] = [
    ("", "nodes", "", &["get", "list", "watch", "patch"]),
    ("", "pods", "", &["list", "watch"]),
    ("networking.k8s.io", "servicecidrs", "", &["list", "watch"]),
    (
        "cadastre.dev",
        "ippools",
        "",
        &["get", "list", "watch", "patch"],
    ),
    ("cadastre.dev", "ippools/status", "", &["patch"]),
    (
        "cadastre.dev",
        "nodesubnets",
        "",
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    ("cadastre.dev", "nodesubnets/status", "", &["patch"]),
    (
        "cadastre.dev",
        "ipamblocks",
        "",
        &["get", "list", "watch", "create", "update", "delete"],
    ),
    (
        "coordination.k8s.io",
        "leases",
        "kube-system",
        &["get", "create", "update"],
    ),
    ("events.k8s.io", "events", "default", &["create"]),
    ("", "secrets", "kube-system", &[]),
];

#[tokio::test]
async fn the_permissions_in_config_are_enough_and_no_more_than_listed() {
    let (cluster, hand) = cluster().await;
    let mut daemon = start_controller(&cluster, ACCOUNT, &[]).unwrap();
    log_says(&mut daemon, "not allowed to list and watch nodes").await;
    log_says(&mut daemon, "check the ClusterRole").await;

    let rules = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../config/rbac/controller.yaml"
    );
    cluster.kubectl(&["apply", "-f", rules]).await.unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    let refused = forbidden(&daemon).await;

    hand.pool(
        "rbac",
        json!({"ipv4": {"cidrs": ["10.81.0.0/24"]}, "quarantineSeconds": 0}),
    )
    .await
    .unwrap();
    let first = hand.node("rbac", "rbac-1").await.unwrap();
    hand.served("rbac-1").await.unwrap();
    hand.subnet_until("rbac-1", "is there", |_| true)
        .await
        .unwrap();
    hand.condition("rbac", "Exhausted", "True").await.unwrap();
    let second = hand.node("rbac", "rbac-2").await.unwrap();
    hand.event(&second.metadata.uid.unwrap(), "WaitingForPodCIDR")
        .await
        .unwrap();
    hand.delete_node("rbac-1").await.unwrap();
    hand.served("rbac-2").await.unwrap();
    hand.subnet_gone("rbac-1").await.unwrap();
    hand.pools
        .delete("rbac", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    hand.delete_node("rbac-2").await.unwrap();
    cadastre_e2e::hand::gone(&hand.pools, "rbac").await.unwrap();
    assert!(
        (forbidden(&daemon).await - refused).abs() < 0.5,
        "{}",
        daemon.process().log_tail(40)
    );
    let status = daemon.process().stop(GRACE).await.unwrap();
    assert_eq!(status.code(), Some(0));
    drop(first);

    let may = async |group, resource, namespace| {
        let target = Target {
            group,
            resource,
            namespace,
            name: match resource {
                "leases" => cadastre::api::LEASE_NAME,
                _ => "",
            },
        };
        allowed(&hand.client, ACCOUNT, target).await.unwrap()
    };
    for (group, resource, namespace, verbs) in MAY {
        let is = may(group, resource, namespace).await;
        assert_eq!(is, verbs, "{resource}.{group} in {namespace:?}");
    }
    for (group, resource, namespace) in [
        ("coordination.k8s.io", "leases", "default"),
        ("events.k8s.io", "events", "kube-system"),
        ("", "pods", "default"),
    ] {
        let is = may(group, resource, namespace).await;
        assert!(!is.contains(&"create"), "{resource} {namespace}");
    }
}

async fn forbidden(daemon: &Daemon) -> f64 {
    let metrics = daemon.metrics().await.unwrap();
    sum(&metrics, "rest_client_requests_total", &[("code", "403")])
}
