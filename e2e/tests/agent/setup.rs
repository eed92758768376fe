//! Flags, permissions and metrics of the agent.

use std::process::Command;

use cadastre_e2e::audit::{Audit, compare};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::{binary, explained_flags};
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::permissions::{Target, allowed};
use cadastre_e2e::{Options, TestCluster};
use kube::ResourceExt as _;
use serde_json::json;

use crate::{FLAGS, Machine, add_of, eventually, patch, pool, publishes, start};

fn run(args: &[&str]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let done = Command::new(binary().unwrap())
        .arg("agent")
        .args(["--admin-address", "127.0.0.1:0", "--node-name", "n1"])
        .args([
            "--cni-socket",
            &at("c"),
            "--socket",
            &at("a"),
            "--store",
            &at("s"),
        ])
        .args(args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .output()
        .unwrap();
    let text = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn wrong_flags_end_it_and_say_what_to_do() {
    for (flags, code, says) in [
        (&["--add-wait", "soon"][..], 2, "no number of seconds"),
        (&["--publish-interval=-1"], 2, "between 0 and 86400"),
        (&["--remove-cni-conf"], 2, "--cni-conf"),
        (&["--cni-conf-over-others"], 2, "--cni-conf"),
        (&["--mtu", "100"], 2, "576..=65535"),
        (
            &["--cni-conf-template", "/nonexistent"],
            1,
            "--cni-conf-template",
        ),
        (&["--cni-conf-template", "/etc/hostname"], 1, "no JSON"),
        (&["--log-level", "loud"], 1, "error, warn, info"),
        (
            &["--kubeconfig", "/nonexistent/config"],
            1,
            "/nonexistent/config",
        ),
        (&[], 1, "set KUBECONFIG or --kubeconfig"),
    ] {
        let (is, text) = run(flags);
        assert_eq!(is, Some(code), "{flags:?}: {text}");
        assert!(text.contains(says), "{flags:?}: {text}");
    }
    let done = Command::new(binary().unwrap())
        .args(["agent", "--node-name", "Not A Name"])
        .output()
        .unwrap();
    let text = String::from_utf8(done.stderr).unwrap();
    assert!(text.contains("no name of a Node"), "{text}");
}

#[test]
fn help_explains_every_flag() {
    let (code, text) = run(&["--help"]);
    assert_eq!(code, Some(0));
    for word in [
        "NODE_NAME",
        "/run/cadastre/cni.sock",
        "default: 30",
        "sandboxes",
    ] {
        assert!(text.contains(word), "no word of {word}: {text}");
    }
    let count = explained_flags(&text).unwrap();
    assert!(count >= 18, "{count} flags: {text}");
}

#[tokio::test]
async fn the_metrics_keep_to_the_conventions() {
    let (api, machine) = start("figures", "10.70.0.0/24", json!({}), &[]).await;
    let address = machine.add("figures-c1").await.unwrap();
    publishes(&api, "figures-1", vec![address]).await;
    let text = eventually("all figures are there", async || {
        let text = machine.daemon.as_ref().unwrap().get("/metrics").await?;
        let used = r#"cadastre_agent_addresses{family="ipv4",pool="figures",state="used"} 1"#;
        Ok(text.contains(used).then_some(text))
    })
    .await;
    for name in [
        "cadastre_build_info",
        "cadastre_agent_requests_total",
        "cadastre_agent_request_duration_seconds",
        "cadastre_agent_status_writes_total",
        "cadastre_agent_leaks_freed_total",
        "process_resident_memory_bytes",
        "rest_client_requests_total",
    ] {
        assert!(text.contains(&format!("# TYPE {name} ")), "no {name}");
    }
    for label in ["node=\"", "pod=\"", "figures-c1", "10.70."] {
        assert!(!text.contains(label), "unbounded: {label}");
    }
}

const ACCOUNT: &str = "system:serviceaccount:kube-system:cadastre-agent";

/// All permissions of the agent, and two resources for which it must have none.
const MAY: [(&str, &str, &[&str]); 9] = [
    ("", "nodes", &["list", "watch"]),
    ("", "pods", &["list", "watch"]),
    ("", "namespaces", &["get"]),
    ("cadastre.dev", "nodesubnets", &["list", "watch"]),
    ("cadastre.dev", "nodesubnets/status", &["patch"]),
    (
        "cadastre.dev",
        "nodeaddresses",
        &["list", "watch", "create", "patch"],
    ),
    ("cadastre.dev", "ippools", &[]),
    ("events.k8s.io", "events", &["create"]),
    ("", "secrets", &[]),
];

#[tokio::test]
async fn the_permissions_in_config_are_enough_and_no_more_than_listed() {
    let audit = Audit::of(&[ACCOUNT]).unwrap();
    let mut apiserver_args = audit.args();
    // This admission plugin is on by default in OpenShift. It may require additional permissions of clients that set an
    // ownerReference.
    apiserver_args
        .push("--enable-admission-plugins=OwnerReferencesPermissionEnforcement".to_owned());
    let options = Options {
        users: vec![User::new(ACCOUNT, &["system:serviceaccounts"])],
        apiserver_args,
        ..Options::default()
    };
    let cluster = TestCluster::start(options, &FLAGS).await.unwrap();
    let api = cluster.fixtures().await.unwrap();
    let selector = json!({"matchLabels": {"kubernetes.io/metadata.name": "default"}});
    pool(
        &api,
        "rbac",
        "10.71.0.0/28",
        json!({"namespaceSelector": selector}),
    )
    .await;
    api.node("rbac", "rbac-1").await.unwrap();
    let flags = ["--leak-grace", "0.5"];
    let mut machine = Machine::of_user(&cluster.control_plane, ACCOUNT, "rbac-1", &flags);
    machine.start();
    machine
        .log_says("not allowed to list and watch nodes")
        .await;
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/rbac/agent.yaml");
    cluster
        .control_plane
        .kubectl(&["apply", "-f", rules])
        .await
        .unwrap();
    machine.log_says("watch works again").await;
    let refused = async |machine: &Machine| {
        let samples = machine.daemon.as_ref().unwrap().metrics().await.unwrap();
        sum(&samples, "rest_client_requests_total", &[("code", "403")])
    };
    let pod = api.pod("rbac-pod", "rbac-1", &[]).await.unwrap();
    let address = eventually("the pod has an address", async || {
        Ok(Some(machine.add_with(add_of(&pod, "c1")).await?))
    })
    .await;
    let before = refused(&machine).await;
    publishes(&api, "rbac-1", vec![address]).await;
    machine.del("c1").await;
    publishes(&api, "rbac-1", Vec::new()).await;
    let annotated = json!({"metadata": {"annotations": {"cadastre.dev/pools": "No Pool"}}});
    let wrong = api.pod("rbac-wrong", "rbac-1", &[]).await.unwrap();
    patch(&api.pods, "rbac-wrong", annotated).await;
    eventually("the event is written", async || {
        machine.del("c2").await;
        machine.add_with(add_of(&wrong, "c2")).await?;
        let told = api
            .event_count(&wrong.uid().unwrap(), "InvalidAnnotation")
            .await?;
        Ok((told > 0).then_some(()))
    })
    .await;
    assert!(
        (refused(&machine).await - before).abs() < 0.5,
        "{}",
        machine.log()
    );
    machine.stop().await;

    for (group, resource, verbs) in MAY {
        let target = Target {
            group,
            resource,
            ..Target::default()
        };
        let is = allowed(&api.client, ACCOUNT, target).await.unwrap();
        assert_eq!(is, verbs, "{resource}.{group}");
    }
    assert_ne!(ADMIN, ACCOUNT);
    let (beyond, needless) = compare(&MAY, &audit.used(ACCOUNT).unwrap());
    assert_eq!(beyond, [], "used, but not listed");
    assert!(needless.is_empty(), "listed, but not used: {needless:?}");
}
