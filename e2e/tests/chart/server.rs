//! A real API server validates the chart's output and the files in config.

use std::path::Path;

use cadastre_e2e::Options;
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::helm::{Helm, chart};

use crate::{template, tools};

#[tokio::test]
async fn an_api_server_accepts_all_objects_and_the_chart_rejects_old_crds() {
    tools().await;
    let (cluster, _) = with_crds(Options::default()).await.unwrap();
    for folder in ["default", "pod-cidrs", "secondary"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../config/{folder}"));
        let path = path.display().to_string();
        let mut apply = vec![
            "apply",
            "--server-side",
            "--dry-run=server",
            "--validate=strict",
        ];
        apply.extend(["--force-conflicts", "-k", &path]);
        let applied = cluster.kubectl(&apply).await.unwrap();
        assert!(applied.lines().count() > 20, "{applied}");
    }

    // Switches on everything that is off by default, except objects of the Prometheus operator, whose CRDs are not
    // installed here.
    let all = template(&[
        "--set=metrics.tlsSecret=admin",
        "--set=metrics.auth=true",
        "--set=metrics.dashboard=true",
        "--set=networkPolicy.enabled=true",
        "--set=agent.flannel.subnetEnv=true",
        "--set=agent.cni.custom=\\{\\}",
        "--set=agent.seLinuxOptions.type=spc_t",
        "--set=apiServer.host=192.0.2.1",
        "--set=image.pullSecrets={registry}",
        "--set=agent.podAnnotations.a=b",
        "--set=agent.annotations.a=b",
        "--set=agent.appArmorProfile.type=Unconfined",
        "--set=agent.updateStrategy=OnDelete",
        "--set=agent.extraInitContainers[0].name=plugins",
        "--set=agent.extraInitContainers[0].image=plugins",
        "--set=controller.annotations.a=b",
        "--set=global.imagePullSecrets[0].name=shared",
        "--set=extraObjects[0].apiVersion=v1",
        "--set=extraObjects[0].kind=ConfigMap",
        "--set=extraObjects[0].metadata.name=extra",
        "--set=controller.podAnnotations.a=b",
        "--set=pools[0].name=pods",
        "--set=pools[0].spec.ipv4.cidrs={10.1.0.0/16}",
    ]);
    let apply = [
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
    ];
    let applied = cluster.kubectl_stdin(&apply, &all.await.unwrap()).await;
    let applied = applied.unwrap();
    assert!(applied.contains("ippool.cadastre.dev/pods"), "{applied}");

    let helm = Helm::of(&cluster).unwrap();
    let chart = chart().display().to_string();
    let pool = "pools[0].spec.ipv4.cidrs={10.1.0.0/16}";
    let install = [
        "install",
        "cadastre",
        &chart,
        "--namespace=kube-system",
        "--dry-run=server",
        "--set=pools[0].name=pods",
        "--set",
        pool,
        "--set=networkPolicy.enabled=true",
    ];
    helm.run(&install).await.unwrap();
    let old = "annotate crd nodesubnets.cadastre.dev --overwrite cadastre.dev/version=0.0.9";
    cluster.kubectl_line(old).await.unwrap();
    let error = helm.run(&install).await.unwrap_err().to_string();
    let says = "nodesubnets.cadastre.dev in the cluster is of version 0.0.9";
    assert!(
        error.contains(says) && error.contains("helm show crds"),
        "{error}"
    );
    // helm installs CRDs only with the first installation, so a kind that is new in the chart may be missing.
    let new = format!(
        "annotate crd nodesubnets.cadastre.dev --overwrite cadastre.dev/version={}",
        cadastre_core::VERSION
    );
    for line in [&*new, "delete crd noderoutes.cadastre.dev --wait"] {
        cluster.kubectl_line(line).await.unwrap();
    }
    let without = [&install[..], &["--skip-crds"]].concat();
    let error = helm.run(&without).await.unwrap_err().to_string();
    let says = "the cluster lacks the CRD noderoutes.cadastre.dev";
    assert!(
        error.contains(says) && error.contains("helm show crds"),
        "{error}"
    );
}
