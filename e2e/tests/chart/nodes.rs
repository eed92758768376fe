//! The chart chooses the number of controllers by the cluster's number of nodes. This is tested with helm 4 and helm 3.

use cadastre_e2e::helm::{Helm, chart};
use cadastre_e2e::{ControlPlane, Options, nodes};
use kube::Api;
use kube::api::{ListParams, PostParams};

use crate::tools;

/// Returns the number of replicas and the update strategy of the Deployment.
fn rollout(rendered: &str) -> (Option<&str>, Option<&str>) {
    let text = rendered.split("kind: Deployment\n").nth(1).unwrap_or("");
    let after = |key: &str| {
        let mut lines = text.lines().map(str::trim);
        lines.find_map(|it| it.strip_prefix(key))
    };
    (after("replicas: "), after("type: "))
}

/// On a single node, a second controller would wait forever for the host port of the first. During an upgrade, the new
/// controller would wait for the host port of the old one.
#[tokio::test]
async fn one_node_has_one_controller_and_many_have_two() {
    tools().await;
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let api = Api::all(cluster.client().await.unwrap());
    let (four, three) = (
        Helm::of(&cluster).unwrap(),
        Helm::of(&cluster).unwrap().three(),
    );
    let (rolling, recreate) = (("2", "RollingUpdate"), ("1", "Recreate"));
    let picked = "--set=controller.nodeSelector.kubernetes\\.io/hostname=n-1";
    for (count, flags, (replicas, strategy)) in [
        (0, &[][..], rolling),
        (1, &[], recreate),
        (1, &["--set=controller.replicas=2"], rolling),
        (1, &["--set=controller.hostNetwork=false"], rolling),
        (2, &[], rolling),
        (2, &["--set=controller.replicas=1"], recreate),
        (2, &[picked], recreate),
        (3, &[], rolling),
    ] {
        for nth in api_count(&api).await..count {
            let mut node = nodes::node(&format!("n-{nth}"), &format!("192.0.2.{}", nth + 1));
            let labels = [
                ("kubernetes.io/hostname".to_owned(), format!("n-{nth}")),
                ("kubernetes.io/os".to_owned(), "linux".to_owned()),
            ];
            node.metadata.labels.get_or_insert_default().extend(labels);
            api.create(&PostParams::default(), &node).await.unwrap();
        }
        let chart = chart().display().to_string();
        let mut args = vec!["install", "cadastre", &chart, "--namespace=kube-system"];
        args.push("--dry-run=server");
        args.extend(flags);
        let (by_four, by_three) = tokio::try_join!(four.run(&args), three.run(&args)).unwrap();
        for rendered in [by_four, by_three] {
            let expected = (Some(replicas), Some(strategy));
            assert_eq!(rollout(&rendered), expected, "{count} nodes, {flags:?}");
        }
    }
}

async fn api_count(api: &Api<k8s_openapi::api::core::v1::Node>) -> usize {
    api.list(&ListParams::default()).await.unwrap().items.len()
}
