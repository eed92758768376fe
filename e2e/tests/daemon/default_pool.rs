//! `--default-pool` creates one pool, once, and only if the cluster has no pool.

use cadastre_api::{AllocationMode, IPPool};
use cadastre_e2e::Fixtures;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::LIMIT;
use crate::setup::{ACCOUNT, cluster};

async fn the_pool(hand: &Fixtures) -> IPPool {
    until("there is a pool", LIMIT, async || {
        let pools = hand.pools.list(&ListParams::default()).await?.items;
        anyhow::ensure!(pools.len() < 2, "{pools:?}");
        Ok(pools.into_iter().next())
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn two_controllers_create_one_pool_from_the_pod_subnet_of_kubeadm() {
    let (cluster, hand) = cluster(None).await;
    let config =
        "kind: ClusterConfiguration\nnetworking:\n  podSubnet: 10.20.0.0/16,fd00:20::/56\n";
    let map: ConfigMap = serde_json::from_value(json!({
        "metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": config},
    }))
    .unwrap();
    let maps = Api::<ConfigMap>::namespaced(hand.client.clone(), "kube-system");
    maps.create(&PostParams::default(), &map).await.unwrap();
    for rules in ["controller.yaml", "default-pool.yaml"] {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/rbac/");
        let path = format!("{folder}{rules}");
        cluster.kubectl(&["apply", "-f", &path]).await.unwrap();
    }
    let flags = ["--default-pool", "node-cidr"];
    let mut first = start_controller(&cluster, ACCOUNT, &flags).unwrap();
    let mut second = start_controller(&cluster, ACCOUNT, &flags).unwrap();
    let pool = the_pool(&hand).await;
    assert_eq!(
        (pool.name_any().as_str(), pool.spec.allocation_mode),
        ("default", AllocationMode::NodeCIDR)
    );
    assert_eq!(pool.spec.ipv4.unwrap().cidrs, ["10.20.0.0/16"]);
    assert_eq!(pool.spec.ipv6.unwrap().cidrs, ["fd00:20::/56"]);
    hand.node("any", "any-1").await.unwrap();
    assert_eq!(hand.served("any-1").await.unwrap().len(), 2);
    first.process().check_running().unwrap();
    second.process().check_running().unwrap();
    the_pool(&hand).await;
}

#[tokio::test]
async fn without_kubeadm_the_pool_has_an_unused_private_range() {
    let (cluster, hand) = cluster(None).await;
    let flags = ["--default-pool=blocks", "--service-cidr=10.244.0.0/20"];
    let _daemon = start_controller(&cluster, ADMIN, &flags).unwrap();
    // The first candidate range overlaps `--service-cidr`, and the second contains the node's address. So the third is
    // used.
    let node = cadastre_e2e::nodes::node("any-1", "10.65.0.9");
    hand.create_node(node).await.unwrap();
    let pool = the_pool(&hand).await;
    assert_eq!(pool.spec.ipv4.unwrap().cidrs, ["10.128.0.0/14"]);
    assert!(pool.spec.ipv6.is_none());
    hand.listed("any-1", 1).await.unwrap();
}

#[tokio::test]
async fn in_a_cluster_with_a_pool_none_is_created() {
    let (cluster, hand) = cluster(None).await;
    let spec = json!({"ipv4": {"cidrs": ["10.30.0.0/16"]}});
    hand.pool("own", spec).await.unwrap();
    let flags = [
        "--default-pool=node-cidr",
        "--default-pool-cidr=10.40.0.0/16",
    ];
    let _daemon = start_controller(&cluster, ADMIN, &flags).unwrap();
    hand.node("own", "own-1").await.unwrap();
    hand.served("own-1").await.unwrap();
    assert_eq!(the_pool(&hand).await.name_any(), "own");
}
