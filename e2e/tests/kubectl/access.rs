//! The kubectl plugin in unusual settings: without a server, without CRDs, and without permissions. Further subjects
//! are the plugin when kubectl starts it, completion, and the support bundle.

use std::path::Path;

use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::{ControlPlane, Fixtures, Options, crds, daemon};
use serde_json::json;

use crate::{Ran, command, end, ok, run};

/// Runs the kubectl plugin with a kubeconfig that does not exist.
async fn nowhere(args: &str) -> Ran {
    end(command(Path::new("/nowhere"), args).spawn().unwrap()).await
}

#[tokio::test]
async fn what_is_missing_is_named_with_what_to_do() {
    let options = Options {
        users: vec![User::new("nobody", &["guests"])],
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await.unwrap();
    let bare = run(&cluster, "show pools").await;
    assert_eq!(bare.code, 1);
    assert!(
        bare.err
            .contains("install the CustomResourceDefinitions (cadastre crd |"),
        "{bare:?}"
    );
    let fixtures = Fixtures::new(cluster.client().await.unwrap());
    crds::install(&fixtures.client).await.unwrap();
    let empty = ok(&cluster, "show pools").await;
    assert!(empty.contains("create an IPPool"), "{empty}");
    let kubeconfig = cluster.kubeconfig("nobody").unwrap();
    let guest = end(command(&kubeconfig, "show pools").spawn().unwrap()).await;
    guest.assert_err(1, "no right to read ippools.cadastre.dev");
    let no_config = nowhere("show pools").await;
    no_config.assert_err(1, "no way to reach a cluster");
    let kubeconfig = cluster.kubeconfig(ADMIN).unwrap();
    let text = std::fs::read_to_string(kubeconfig).unwrap();
    let elsewhere = cluster.folder().join("elsewhere.kubeconfig");
    std::fs::write(
        &elsewhere,
        text.replace(&cluster.server(), "https://127.0.0.1:1"),
    )
    .unwrap();
    let dead = end(command(&elsewhere, "show pools").spawn().unwrap()).await;
    dead.assert_err(1, "the API server was not reached");

    // kubectl looks for plugins in PATH. So this folder contains only a link to the plugin.
    let bin = cluster.folder().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let plugin = daemon::kubectl_plugin().unwrap();
    std::os::unix::fs::symlink(plugin, bin.join("kubectl-cadastre")).unwrap();
    let kubectl = tokio::process::Command::new(assets::find(Program::Kubectl).unwrap())
        .args(["cadastre", "show", "pools"])
        .env("KUBECONFIG", cluster.kubeconfig(ADMIN).unwrap())
        .env("HOME", cluster.folder())
        .env("PATH", &bin)
        .output()
        .await
        .unwrap();
    assert!(kubectl.status.success(), "{kubectl:?}");
    assert_eq!(String::from_utf8(kubectl.stdout).unwrap(), empty);
    completed(&cluster, &fixtures, &bin).await;
    bundled(&cluster, &fixtures).await;
}

/// Asserts that kubectl completes the plugin's verbs and the names of objects.
async fn completed(cluster: &ControlPlane, fixtures: &Fixtures, bin: &Path) {
    let pool = json!({"ipv4": {"cidrs": ["10.9.0.0/24"]}, "disabled": true});
    fixtures.block_pool("spare", pool).await.unwrap();
    let script = ok(cluster, "completion kubectl").await;
    let path = bin.join("kubectl_complete-cadastre");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let complete = async |words: &[&str]| {
        let kubectl = tokio::process::Command::new(assets::find(Program::Kubectl).unwrap())
            .args(["__complete", "cadastre"])
            .args(words)
            .env("KUBECONFIG", cluster.kubeconfig(ADMIN).unwrap())
            .env("HOME", cluster.folder())
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .output()
            .await
            .unwrap();
        assert!(kubectl.status.success(), "{kubectl:?}");
        String::from_utf8(kubectl.stdout).unwrap()
    };
    assert_eq!(complete(&["show", "pool", ""]).await, "spare\n:4\n");
    assert_eq!(complete(&["explain", "pool", "x"]).await, ":4\n");
    ok(cluster, "claim create db --pool spare --timeout 0").await;
    assert_eq!(complete(&["claim", "release", ""]).await, "db\n:4\n");
    assert_eq!(
        complete(&["claim", "release", "-n", "other", ""]).await,
        ":4\n"
    );
    let verbs = complete(&["ex"]).await;
    assert!(verbs.starts_with("explain\tExplain which pools"), "{verbs}");
}

/// Asserts that the support bundle is complete and valid, and contains nothing of a pod's environment.
async fn bundled(cluster: &ControlPlane, fixtures: &Fixtures) {
    fixtures
        .block_pool("p", json!({"ipv4": {"cidrs": ["10.0.0.0/24"]}}))
        .await
        .unwrap();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "c", "image": "none", "env": [{"name": "X", "value": "hunter2"}]}]},
    });
    cluster
        .kubectl_stdin(&["create", "-f", "-"], &pod.to_string())
        .await
        .unwrap();
    let bundle = async |name: &str, frr: usize| {
        let dir = cluster.folder().join(name);
        let output = ok(cluster, &format!("support-bundle --dir {}", dir.display())).await;
        assert!(
            output.contains("ippools.json: 2\n") && !output.contains("MISSING"),
            "{output}"
        );
        let counts = output.matches("frrconfigurations.json: 1\n").count();
        assert_eq!(counts, frr, "{output}");
        dir
    };
    bundle("without-frr", 0).await;
    create_frr_configuration(cluster).await;
    let dir = bundle("bundle", 1).await;
    for file in std::fs::read_dir(&dir).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            !text.contains("hunter2") && !text.contains("managedFields"),
            "{}",
            path.display()
        );
        if path.extension().is_some_and(|it| it == "json") {
            serde_json::from_str::<serde_json::Value>(&text).unwrap();
        }
    }
    let again = run(
        cluster,
        &format!("support-bundle --dir {}", dir.to_str().unwrap()),
    )
    .await;
    again.assert_err(1, "must not exist yet");
}

/// Installs the CRD of frr-k8s, and creates an FRRConfiguration of the controller with the password of a neighbor.
async fn create_frr_configuration(cluster: &ControlPlane) {
    let crd = assets::frr_crd().unwrap();
    cluster
        .kubectl(&["apply", "-f", crd.to_str().unwrap()])
        .await
        .unwrap();
    let established =
        "wait --for=condition=Established crd/frrconfigurations.frrk8s.metallb.io --timeout=60s";
    cluster.kubectl_line(established).await.unwrap();
    let neighbor = json!({"address": "192.0.2.1", "asn": 64_512, "password": "hunter2"});
    let object = json!({
        "apiVersion": "frrk8s.metallb.io/v1beta1", "kind": "FRRConfiguration",
        "metadata": {"name": "cadastre-a", "labels": {"app.kubernetes.io/managed-by": "cadastre"}},
        "spec": {"bgp": {"routers": [{"asn": 64_513, "neighbors": [neighbor]}]}},
    });
    cluster
        .kubectl_stdin(&["create", "-f", "-"], &object.to_string())
        .await
        .unwrap();
}

#[tokio::test]
async fn help_has_examples_and_completions_are_scripts() {
    let help = async |verb: &str| {
        let ran = nowhere(&format!("{verb} --help")).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out
    };
    for verb in [
        "status",
        "show",
        "map",
        "explain",
        "check",
        "plan",
        "release",
        "drain",
        "undrain",
        "claim",
        "support-bundle",
        "completion",
    ] {
        let text = help(verb).await;
        assert!(
            text.contains("Examples:") && text.contains(&format!("kubectl cadastre {verb}")),
            "{text}"
        );
    }
    for shell in ["bash", "zsh", "fish", "powershell"] {
        let ran = nowhere(&format!("completion {shell}")).await;
        assert!(
            ran.code == 0 && ran.out.contains("support-bundle"),
            "{shell}: {ran:?}"
        );
    }
}
