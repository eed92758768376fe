//! Installs and removes Cadastre without helm, by the commands in the documentation, on a real API server.

use std::time::Duration;

use cadastre_api::IPPool;
use cadastre_core::Cidr;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::kcm::KcmOptions;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures, Options};
use kube::api::{ListParams, ObjectMeta, PostParams};
use serde_json::json;

use crate::docs;

const LIMIT: Duration = Duration::from_secs(180);
/// The user of the controller's ServiceAccount.
const CONTROLLER: &str = "system:serviceaccount:kube-system:cadastre-controller";

/// Runs the page's first kubectl command that begins with `start`.
async fn run(cluster: &ControlPlane, page: &str, start: &str) -> String {
    let words = docs::command(page, start);
    cluster.kubectl(&words[1..]).await.unwrap()
}

async fn left(cluster: &ControlPlane, kinds: &str) -> String {
    let all = cluster.kubectl(&["get", kinds, "-A", "-o", "name"]).await;
    let all = all.unwrap();
    let ours = all.lines().filter(|it| it.contains("cadastre"));
    ours.collect::<Vec<_>>().join(" ")
}

/// Returns all pools, all blocks with their owners, and all NodeSubnets with their blocks, as text.
async fn records(hand: &Fixtures) -> Vec<String> {
    let all = ListParams::default();
    let pools = hand.pools.list(&all).await.unwrap().items;
    let blocks = hand.blocks.list(&all).await.unwrap().items;
    let subnets = hand.subnets.list(&all).await.unwrap().items;
    let of = |meta: &ObjectMeta| format!("{:?} {:?}", meta.name, meta.uid);
    let pools = pools.iter().map(|it| of(&it.metadata));
    let blocks = blocks
        .iter()
        .map(|it| format!("{} {:?}", of(&it.metadata), it.spec));
    let subnets = subnets
        .iter()
        .map(|it| format!("{} {:?}", of(&it.metadata), it.spec.blocks));
    pools.chain(blocks).chain(subnets).collect()
}

/// Applies the objects of config/default. Then starts a controller, because no kubelet runs the Deployment's pods here.
async fn applied(cluster: &ControlPlane) -> Daemon {
    let apply = "kubectl apply --server-side -k config/default";
    run(cluster, "install.md", apply).await;
    let mut controller = start_controller(cluster, CONTROLLER, &[]).unwrap();
    controller.wait_ready(LIMIT).await.unwrap();
    controller
}

#[tokio::test]
async fn kubectl_delete_keeps_the_records_until_the_crds_are_deleted() {
    let options = Options {
        users: vec![User::new(CONTROLLER, &["system:serviceaccounts"])],
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await.unwrap();
    let _kcm = cluster.start_kcm(&KcmOptions::default()).unwrap();
    let hand = Fixtures::new(cluster.client().await.unwrap());
    let crds = "kubectl apply --server-side -f charts/cadastre/crds";
    run(&cluster, "install.md", crds).await;
    let mut controller = applied(&cluster).await;
    let pool = json!({"ipv4": {"cidrs": ["10.244.0.0/16"]}, "quarantineSeconds": 0});
    let pool = IPPool::new("default", serde_json::from_value(pool).unwrap());
    until("the kind is served", LIMIT, async || {
        Ok(Some(
            hand.pools.create(&PostParams::default(), &pool).await?,
        ))
    })
    .await
    .unwrap();
    hand.node("any", "n1").await.unwrap();
    let block = Cidr::parse_strict(&hand.listed("n1", 1).await.unwrap()[0]).unwrap();
    let mut address = block.first();
    for name in ["a", "b"] {
        address.value += 2;
        let text = address.to_string();
        hand.pod(name, "n1", &[text.as_str()]).await.unwrap();
    }
    let kept = records(&hand).await;
    assert_eq!(kept.len(), 3, "a pool, a block, a node: {kept:?}");

    // In a real cluster, the controller would be deleted together with its Deployment.
    let grace = Duration::from_secs(20);
    controller.process().stop(grace).await.unwrap();
    run(&cluster, "upgrade.md", "kubectl delete -k config/default").await;
    assert_eq!(records(&hand).await, kept);
    let apart = "deployment,daemonset,clusterrole,clusterrolebinding,validatingadmissionpolicy";
    assert_eq!(left(&cluster, apart).await, "");
    let crds = left(&cluster, "crd").await;
    assert_eq!(crds.split(' ').count(), 6, "{crds}");

    // When the objects are applied again, the controller continues with the records that the removal has kept, and
    // allocates further blocks.
    let controller = applied(&cluster).await;
    hand.node("any", "n2").await.unwrap();
    hand.listed("n2", 1).await.unwrap();
    let more = records(&hand).await;
    assert!(kept.iter().all(|it| more.contains(it)), "{more:?}");
    assert_eq!(more.len(), 5, "another block and another node: {more:?}");

    // When no pods are left, the commands in docs/upgrade.md remove Cadastre for good.
    for name in ["a", "b"] {
        hand.delete_pod(name).await.unwrap();
    }
    for name in ["n1", "n2"] {
        hand.delete_node(name).await.unwrap();
    }
    let removal = docs::commands("upgrade.md", "kubectl delete clusterrolebinding");
    assert_eq!(removal.len(), 6, "{removal:?}");
    for words in removal {
        cluster.kubectl(&words[1..]).await.unwrap();
    }
    assert_eq!(left(&cluster, &format!("{apart},crd")).await, "");
    // The test does not check the exit status of the controller, because the loss of its permissions may have ended the
    // controller already.
    drop(controller);
}
