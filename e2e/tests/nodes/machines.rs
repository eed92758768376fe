//! Helpers: machines that get routes, and nodes that boot.

use anyhow::ensure;
use cadastre_e2e::Hand;
use cadastre_e2e::node::Machine;
use cadastre_e2e::wait::until;
use k8s_openapi::api::core::v1::Node;

use crate::pods::{self, Running};
use crate::{LIMIT, Stage};

/// Routes what the NodeSubnet of a machine says to it, and returns that.
pub(crate) async fn route(stage: &Stage, machine: &Machine) -> Vec<String> {
    let subnet = stage.hand.subnets.get(machine.name()).await.unwrap();
    let held = subnet.spec.pod_cidrs.iter().map(|it| it.cidr.clone());
    let held: Vec<String> = held
        .chain(subnet.spec.blocks.iter().map(|it| it.cidr.clone()))
        .collect();
    for cidr in &held {
        let routed = stage.site.fabric().route(cidr, machine.number()).await;
        routed.unwrap();
    }
    held
}

/// The boot id that a kubelet reports.
pub fn boot_id(node: &Node) -> String {
    let info = node.status.as_ref().and_then(|it| it.node_info.as_ref());
    info.unwrap().boot_id.clone()
}

/// Waits until a kubelet reports another boot than that.
pub async fn booted_since(hand: &Hand, node: &str, boot: &str) {
    until(&format!("{node} has booted"), LIMIT, async || {
        let id = boot_id(&hand.nodes.get(node).await?);
        ensure!(id != boot, "still {id}");
        Ok(Some(()))
    })
    .await
    .unwrap();
}

/// Waits until the same pods, by their UIDs, run again, those of `node` in new sandboxes.
pub async fn same_pods_anew(
    hand: &Hand,
    group: &str,
    before: &[Running],
    node: &str,
) -> Vec<Running> {
    pods::running_that(hand, group, before.len(), |pod| {
        let before = before.iter().find(|it| it.uid == pod.uid);
        before.is_some_and(|it| pod.node != node || pod.container != it.container)
    })
    .await
}
