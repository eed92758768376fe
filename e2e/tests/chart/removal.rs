//! Installing and taking off without helm, by the commands of the pages, on a real API server.

use cadastre_api::{IPPool, NodeSubnet};
use cadastre_e2e::kcm::KcmOptions;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Options};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;

use crate::docs;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

/// Runs the command of a page that begins so.
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

#[tokio::test]
async fn what_is_deleted_without_helm_leaves_the_records_until_their_kinds_go() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let _kcm = cluster.start_kcm(&KcmOptions::default()).unwrap();
    let client = cluster.client().await.unwrap();
    run(
        &cluster,
        "install.md",
        "kubectl apply --server-side -k config/crd",
    )
    .await;
    run(
        &cluster,
        "install.md",
        "kubectl apply --server-side -k config/default",
    )
    .await;

    let pool = json!({"ipv4": {"cidrs": ["10.244.0.0/16"]}});
    let pool = IPPool::new("default", serde_json::from_value(pool).unwrap());
    let pools: Api<IPPool> = Api::all(client.clone());
    until("the kind is served", LIMIT, async || {
        Ok(Some(pools.create(&PostParams::default(), &pool).await?))
    })
    .await
    .unwrap();

    run(&cluster, "upgrade.md", "kubectl delete -k config/default").await;
    assert_eq!(
        pools
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    let subnets: Api<NodeSubnet> = Api::all(client);
    subnets.list(&ListParams::default()).await.unwrap();
    let apart = "deployment,daemonset,clusterrole,clusterrolebinding,validatingadmissionpolicy";
    assert_eq!(left(&cluster, apart).await, "");

    // Applied again, it is taken off for good.
    run(
        &cluster,
        "install.md",
        "kubectl apply --server-side -k config/default",
    )
    .await;
    let removal = docs::commands("upgrade.md", "kubectl delete clusterrolebinding");
    assert_eq!(removal.len(), 6, "{removal:?}");
    for words in removal {
        cluster.kubectl(&words[1..]).await.unwrap();
    }
    assert_eq!(left(&cluster, &format!("{apart},crd")).await, "");
}
