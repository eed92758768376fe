//! Clusters that are not yet ready for the controller, and the permissions that the controller needs.

use std::time::Duration;

use cadastre_api::{CLAIM_FINALIZER, IPClaim, NodeRoutes, NodeSubnet};
use cadastre_e2e::audit::{Audit, Used, compare};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::fixtures::gone;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::permissions::{Target, allowed};
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures, Options};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use crate::LIMIT;

const GRACE: Duration = Duration::from_secs(5);

/// Starts a cluster with the CRDs, in which the controller's account has no permissions yet.
pub async fn cluster(audit: Option<&Audit>) -> (ControlPlane, Fixtures) {
    let options = Options {
        users: vec![User::new(ACCOUNT, &["system:serviceaccounts"])],
        apiserver_args: audit.map(Audit::args).unwrap_or_default(),
        ..Options::default()
    };
    with_crds(options).await.unwrap()
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
    let hand = Fixtures::new(cluster.client().await.unwrap());
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
    // The missing CRDs are reported once, not at every retry.
    let log = std::fs::read_to_string(daemon.process().log()).unwrap();
    assert_eq!(log.matches("ippools are not known").count(), 1, "{log}");

    // The process ends without delay, because it has not started any work.
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

#[tokio::test]
async fn crds_that_lack_a_field_are_reported_and_writes_are_retried_ever_less() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let hand = Fixtures::new(cluster.client().await.unwrap());
    let crds = hand.client.clone();
    let crds: Api<CustomResourceDefinition> = Api::all(crds);
    for crd in cadastre_api::crd::all() {
        let mut crd = serde_json::to_value(crd).unwrap();
        if crd["spec"]["names"]["plural"] == "nodesubnets" {
            let path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties\
                        /pools/items/properties";
            let fields = crd.pointer_mut(path).unwrap().as_object_mut().unwrap();
            fields.remove("ipv4").unwrap();
        }
        let crd = serde_json::from_value(crd).unwrap();
        crds.create(&PostParams::default(), &crd).await.unwrap();
    }
    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    until("the pool is there", LIMIT, async || {
        let spec = json!({"ipv4": {"cidrs": ["10.83.0.0/24"]}});
        Ok(Some(hand.block_pool("old", spec).await?))
    })
    .await
    .unwrap();
    let node = hand.node("old", "old-1").await.unwrap();
    let uid = node.metadata.uid.unwrap();
    let message = hand.event(&uid, "WriteRejected").await.unwrap();
    assert!(message.contains("CRDs older"), "{message}");
    assert_eq!(hand.listed("old-1", 1).await.unwrap().len(), 1);
    // The event is emitted at the sixth failed write. After that the controller retries only every few seconds, so
    // there are few writes.
    let metrics = daemon.metrics().await.unwrap();
    let writes = sum(
        &metrics,
        "rest_client_requests_total",
        &[("method", "PATCH")],
    );
    assert!(writes < 60.0, "{writes} writes");
}

pub const ACCOUNT: &str = "system:serviceaccount:kube-system:cadastre-controller";

/// All permissions of the controller, and a resource for which it must have none.
const MAY: [(&str, &str, &str, &[&str]); 15] = [
    ("", "nodes", "", &["get", "list", "watch", "patch"]),
    ("", "nodes/status", "", &["patch"]),
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
    (
        "cadastre.dev",
        "noderoutes",
        "",
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    ("cadastre.dev", "nodesubnets/status", "", &["patch"]),
    (
        "cadastre.dev",
        "ipamblocks",
        "",
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    (
        "cadastre.dev",
        "ipclaims",
        "",
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    ("cadastre.dev", "ipclaims/status", "", &["patch"]),
    (
        "coordination.k8s.io",
        "leases",
        "kube-system",
        &["get", "list", "watch", "create", "update"],
    ),
    ("events.k8s.io", "events", "", &["create"]),
    ("", "secrets", "kube-system", &[]),
];

#[tokio::test]
async fn the_permissions_in_config_are_enough_and_no_more_than_listed() {
    let audit = Audit::of(&[ACCOUNT]).unwrap();
    let (cluster, hand) = cluster(Some(&audit)).await;
    let mut daemon = start_controller(&cluster, ACCOUNT, &["--publish-routes"]).unwrap();
    log_says(&mut daemon, "Lease refused").await;
    log_says(&mut daemon, "check the Role ").await;

    let rules = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../config/rbac/controller.yaml"
    );
    // Before the controller has read the Lease, it lists nothing. So only the Roles, which are for the Lease, are
    // applied here.
    let all = std::fs::read_to_string(rules).unwrap();
    let of_lease = |it: &&str| it.contains("kind: Role\n");
    let of_lease: Vec<&str> = all.split("---\n").filter(of_lease).collect();
    assert_eq!(of_lease.len() % 2, 0, "each Role and its RoleBinding");
    let apply = ["apply", "-f", "-"];
    let of_lease = of_lease.join("---\n");
    cluster.kubectl_stdin(&apply, &of_lease).await.unwrap();
    log_says(&mut daemon, "not allowed to list and watch nodes").await;
    log_says(&mut daemon, "check the ClusterRole").await;
    cluster.kubectl(&["apply", "-f", rules]).await.unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    let refused = forbidden(&daemon).await;
    let standby = start_controller(&cluster, ACCOUNT, &[]).unwrap();
    until("a standby watches the Lease", LIMIT, async || {
        let used = audit.used(ACCOUNT)?;
        let watch = |it: &Used| (&*it.1, &*it.2) == ("leases", "watch");
        Ok(used.iter().any(watch).then_some(()))
    })
    .await
    .unwrap();
    assert!(forbidden(&standby).await.abs() < 0.5);
    drop(standby);

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
    hand.event_about(&second, "WaitingForPodCIDR")
        .await
        .unwrap();
    hand.delete_node("rbac-1").await.unwrap();
    hand.served("rbac-2").await.unwrap();
    hand.subnet_gone("rbac-1").await.unwrap();
    hand.delete_pool("rbac").await.unwrap();
    hand.delete_node("rbac-2").await.unwrap();
    gone(&hand.pools, "rbac").await.unwrap();
    blocks_come_and_go(&hand).await;
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
                "leases" => cadastre_api::LEASE_NAME,
                _ => "",
            },
        };
        allowed(&hand.client, ACCOUNT, target).await.unwrap()
    };
    for (group, resource, namespace, verbs) in MAY {
        let is = may(group, resource, namespace).await;
        assert_eq!(is, verbs, "{resource}.{group} in {namespace:?}");
    }
    let listed = MAY.map(|(group, resource, _, verbs)| (group, resource, verbs));
    let (beyond, idle) = compare(&listed, &audit.used(ACCOUNT).unwrap());
    assert_eq!(beyond, [], "used, but not listed");
    // The controller needs these permissions only for reads after a write with an indeterminate outcome. Perhaps no
    // such write happens here, so the permissions may be unused.
    let after_doubt = [
        "get nodes",
        "get ipamblocks",
        "get ipclaims",
        "get ippools",
        "get nodesubnets",
        "get noderoutes",
    ];
    let needless = idle.iter().filter(|it| !after_doubt.contains(&it.as_str()));
    assert_eq!(needless.count(), 0, "listed, but not used: {idle:?}");
    for (group, resource, namespace) in [
        ("coordination.k8s.io", "leases", "default"),
        ("", "pods", "default"),
    ] {
        let is = may(group, resource, namespace).await;
        assert!(!is.contains(&"create"), "{resource} {namespace}");
    }
}

#[tokio::test]
async fn with_the_role_of_an_earlier_version_a_standby_logs_it_once_and_polls() {
    let (cluster, _) = cluster(None).await;
    let rules = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../config/rbac/controller.yaml"
    );
    let rules = std::fs::read_to_string(rules).unwrap();
    let earlier = rules.replace("[get, list, watch, update]", "[get, update]");
    assert_ne!(earlier, rules);
    let apply = ["apply", "-f", "-"];
    cluster.kubectl_stdin(&apply, &earlier).await.unwrap();
    let mut leader = start_controller(&cluster, ACCOUNT, &[]).unwrap();
    leads(&leader).await;
    let mut standby = start_controller(&cluster, ACCOUNT, &[]).unwrap();
    let says = "not allowed to list and watch the Lease";
    log_says(&mut standby, says).await;
    // The standby must have logged the message only once, even after three rejections.
    until("it was refused three times", LIMIT, async || {
        Ok((forbidden(&standby).await > 2.5).then_some(()))
    })
    .await
    .unwrap();
    let stopped = leader.process().stop(GRACE).await.unwrap();
    assert_eq!(stopped.code(), Some(0));
    leads(&standby).await;
    let log = std::fs::read_to_string(standby.process().log()).unwrap();
    assert_eq!(log.matches(says).count(), 1, "{log}");
}

async fn leads(daemon: &Daemon) {
    until("it leads", LIMIT, async || {
        Ok((daemon.ready().await? == "leader\n").then_some(()))
    })
    .await
    .unwrap();
}

/// Creates a node that gets a block, and whose status reports an orphan outside the node's ranges. Makes the controller
/// delete a claim after its use, and create a claim for a pod of a StatefulSet. Then deletes the node.
async fn blocks_come_and_go(hand: &Fixtures) {
    let spec = json!({"ipv4": {"cidrs": ["10.82.0.0/24"]}, "quarantineSeconds": 1});
    hand.block_pool("audit", spec).await.unwrap();
    let node = hand.node("audit", "audit-1").await.unwrap();
    let blocks = hand.listed("audit-1", 1).await.unwrap();
    let status = json!({
        "nodeUID": node.metadata.uid, "orphans": [{"address": "192.0.2.9", "podUID": "gone"}],
        "pools": [{"pool": "audit", "demand": 100}],
    });
    hand.write_status("audit-1", status).await.unwrap();
    let routes: Api<NodeRoutes> = Api::all(hand.client.clone());
    until("two blocks are routed", LIMIT, async || {
        let found = routes.get("audit-1").await?.spec.destinations.len();
        Ok((found == 2).then_some(()))
    })
    .await
    .unwrap();
    let answered = |it: &NodeSubnet| {
        let status = it.status.iter();
        let mut conditions = status.flat_map(|it| &it.conditions);
        conditions.any(|it| it.type_ == "Accepted" && it.status == "False")
    };
    hand.subnet_until("audit-1", "is answered", answered)
        .await
        .unwrap();
    let claim = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
        // The claim has its finalizer, as if a pod had used it.
        "metadata": {"name": "audit", "finalizers": [CLAIM_FINALIZER]},
        "spec": {"pool": "audit", "ttlSecondsAfterUse": 0},
    });
    let claims: Api<IPClaim> = Api::default_namespaced(hand.client.clone());
    let claim = serde_json::from_value(claim).unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    until("the claim has an address", LIMIT, async || {
        let status = claims.get("audit").await?.status.unwrap_or_default();
        Ok((!status.addresses.is_empty()).then_some(()))
    })
    .await
    .unwrap();
    // `releasedAt` in the past makes the claim look as if a node had used and released its address.
    let released = Patch::Merge(json!({"status": {"releasedAt": "2026-01-01T00:00:00Z"}}));
    let params = PatchParams::default();
    let patched = claims.patch_status("audit", &params, &released).await;
    patched.unwrap();
    gone(&claims, "audit").await.unwrap();
    let pod = json!({
        "metadata": {
            "name": "audit-0", "annotations": {"cadastre.dev/sticky": "true"},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "audit", "uid": "1", "controller": true},
            ],
        },
        "spec": {"nodeName": "audit-1", "containers": [{"name": "c", "image": "none"}]},
    });
    let pod = serde_json::from_value(pod).unwrap();
    hand.pods
        .create(&PostParams::default(), &pod)
        .await
        .unwrap();
    until("the pod has a claim of its name", LIMIT, async || {
        Ok(claims.get_opt("audit-0").await?.map(|_| ()))
    })
    .await
    .unwrap();
    hand.delete_node("audit-1").await.unwrap();
    hand.block_gone(&blocks[0]).await.unwrap();
}

async fn forbidden(daemon: &Daemon) -> f64 {
    let metrics = daemon.metrics().await.unwrap();
    sum(&metrics, "rest_client_requests_total", &[("code", "403")])
}
