//! A node joins and dies. Its blocks are quarantined before any of their addresses can be assigned again.

use anyhow::{Result, ensure};
use cadastre_api::{IPAMBlockSpec, OwnerKind};
use cadastre_core::Cidr;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams};

use crate::cluster::Cluster;
use crate::docs::POOL;
use crate::eventually;
use crate::say;
use crate::watching::{Watch, ranges};
use crate::workload::{self, Group, Running};

/// A third node joins, runs pods, and is lost for good. Returns the node's blocks, which are then in quarantine.
pub async fn of_a_node(cluster: &Cluster, watch: &Watch) -> Vec<Cidr> {
    let api = &cluster.api;
    say("a third node joins and has pods");
    let mut machine = cluster.one_more().await;
    let node = machine.name().to_owned();
    cluster.ready(&node, true).await;
    let group = Group {
        name: "lost",
        pool: POOL,
        node: &node,
    };
    workload::create_in(api, group, 2).await;
    let lost = workload::within(api, "lost", 2, &ranges()).await;
    watch
        .fires("CadastreAgentDown", ("node", &node), false)
        .await;

    say("its machine dies, and its Node is deleted");
    machine.power_off().await.unwrap();
    api.delete_node(&node).await.unwrap();
    // Deletes the node's pods at once, as an administrator would. The control plane would take a minute to delete them.
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods: Api<Pod> = Api::all(api.client.clone());
    for pod in pods.list(&of_node).await.unwrap() {
        let (name, namespace) = (pod.metadata.name.unwrap(), pod.metadata.namespace.unwrap());
        let of_namespace: Api<Pod> = Api::namespaced(api.client.clone(), &namespace);
        let at_once = DeleteParams::default().grace_period(0);
        let _ = of_namespace.delete(&name, &at_once).await;
    }
    let rest = eventually("the blocks of the dead node rest", async || {
        let theirs = blocks(cluster, |it| it.owner.name == node).await?;
        ensure!(!theirs.is_empty(), "it has none");
        let rest = theirs.iter().all(is_resting);
        ensure!(rest, "{theirs:?}");
        let cidrs = theirs.iter().map(|it| Cidr::parse_strict(&it.cidr));
        Ok(Some(cidrs.collect::<Result<Vec<_>, _>>()?))
    })
    .await;
    assert!(lost.iter().all(|it| it.is_in(&rest)), "{lost:?} {rest:?}");
    watch
        .fires("CadastreAgentDown", ("node", &node), true)
        .await;
    rest
}

/// Creates pods while the blocks are quarantined, and asserts that none gets an address of these blocks. Returns the
/// pods.
pub async fn nothing_of_it_is_given(cluster: &Cluster, rest: &[Cidr]) -> Vec<Running> {
    let group = Group {
        name: "later",
        pool: POOL,
        ..Group::default()
    };
    workload::create_in(&cluster.api, group, 4).await;
    let later = workload::within(&cluster.api, group.name, 4, &ranges()).await;
    let given = later.iter().filter(|it| it.is_in(rest));
    assert_eq!(given.count(), 0, "{later:?} {rest:?}");
    let left = blocks(cluster, |it| is_resting(it) && it.pool == POOL).await;
    assert!(!left.unwrap().is_empty(), "it was over before");
    later
}

/// Waits until the quarantine is over and the quarantined blocks are deleted.
pub async fn is_over(cluster: &Cluster, rest: &[Cidr]) {
    eventually("what rested is free", async || {
        let of_it = |it: &IPAMBlockSpec| rest.iter().any(|cidr| cidr.to_string() == it.cidr);
        let left = blocks(cluster, |it| of_it(it) && is_resting(it)).await?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(Some(()))
    })
    .await;
}

fn is_resting(block: &IPAMBlockSpec) -> bool {
    block.owner.kind == OwnerKind::Quarantine
}

async fn blocks(
    cluster: &Cluster,
    are: impl Fn(&IPAMBlockSpec) -> bool,
) -> Result<Vec<IPAMBlockSpec>> {
    let all = cluster.api.blocks.list(&ListParams::default()).await?;
    let all = all.items.into_iter().map(|it| it.spec);
    Ok(all.filter(are).collect())
}
