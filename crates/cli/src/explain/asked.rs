//! Explains why a pod has no address yet if it asks for certain addresses (`cadastre.dev/addresses`) and no claim for
//! these addresses exists.

use super::claim::Wait;
use crate::inventory::{Inventory, PodFact};
use crate::render::joined;
use cadastre_controller::cluster::objects::{Node, PodUid};
use cadastre_core::Cidr;

/// Returns why the pod has no address. `node` is the node to which the pod is bound.
pub(super) fn wait(pod: &PodFact, node: &Node, inventory: &Inventory) -> Wait {
    let name = &node.name;
    for addr in &pod.asked {
        let host = Cidr::host(*addr);
        let mut used = inventory.in_use_within(&host);
        let is_other = |uid: &str| PodUid::read(uid) != PodUid::read(&pod.uid);
        if let Some((_, entry)) = used.find(|(_, it)| is_other(&it.allocation.pod_uid)) {
            let user = &entry.allocation.pod;
            return Wait::new(
                format!("it asks for {addr}, which pod {user} has"),
                format!(
                    "the end of that pod, when its node has released the address (kubectl cadastre show ip {addr})"
                ),
            );
        }
    }
    let blocks = inventory.plain_blocks(&node.uid).map(|it| it.cidr);
    let ranges: Vec<Cidr> = blocks.chain(node.pod_cidrs.iter().copied()).collect();
    let has = |addr: &_| ranges.iter().any(|range| range.contains_addr(*addr));
    let asked = joined(&pod.asked);
    if pod.asked.iter().all(has) {
        return Wait::new(
            format!("it asks for {asked}, and node {name} has that in its ranges"),
            format!(
                "the next try of the kubelet: if it fails, kubectl describe pod shows why, and check that the agent of {name} runs"
            ),
        );
    }
    let claim = pod.claim.as_deref().unwrap_or_default();
    Wait::new(
        format!("it asks for {asked}, which is not in the ranges of node {name}"),
        format!(
            "the controller, which creates claim {claim} within seconds: if it does not, kubectl describe pod shows why, and check that one leads (kubectl get lease -A | grep cadastre)"
        ),
    )
}
