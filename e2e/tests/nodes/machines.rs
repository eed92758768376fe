//! Helpers of the tests in this folder: the software of a machine, routes, boots, and what agents publish.

use std::collections::BTreeSet;

use anyhow::ensure;
use cadastre_api::AddressEntry;
use cadastre_e2e::Fixtures;
use cadastre_e2e::node::{Machine, NodeSide};
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use crate::pods::{self, Running};
use crate::{AGENT, Stage, eventually};

/// Returns Cadastre's CNI plugin and agent with the main plugin ptp, which works with any number of blocks.
pub fn ptp() -> NodeSide {
    side(&json!({"type": "ptp"}))
}

/// Returns Cadastre's CNI plugin and agent with a main plugin. The agent publishes changes within a second and finds
/// leaks soon.
pub fn side(main: &Value) -> NodeSide {
    let soon = [
        "--publish-interval",
        "1",
        "--addresses-interval",
        "1",
        "--leak-grace",
        "2",
        "--log-level",
        "cadastre=debug,info",
    ];
    NodeSide::cadastre(main, &soon, AGENT).unwrap()
}

/// Returns the spec of a pool of both families. The pool has a cooldown of one second, and the default routes that ptp
/// needs.
pub fn both(v4: &str, v6: &str) -> Value {
    json!({
        "ipv4": {"cidrs": [v4]}, "ipv6": {"cidrs": [v6]}, "cooldownSeconds": 1,
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    })
}

/// Waits until the agent of `node` reports that exactly the addresses of the node's pods are in use. `pods` can contain
/// pods of other nodes, which are ignored.
pub async fn reports(api: &Fixtures, node: &str, pods: &[Running]) {
    let own = pods.iter().filter(|it| it.node == node);
    let wanted: BTreeSet<(String, String)> = own
        .flat_map(|pod| {
            let addresses = pod.addresses.iter();
            addresses.map(|it| (it.to_string(), pod.uid.clone()))
        })
        .collect();
    let what = format!("{node} reports the addresses of {} pods", wanted.len() / 2);
    eventually(&what, async || {
        let status = api.subnets.get(node).await?.status.unwrap_or_default();
        let list = api.addresses.get(node).await?.spec;
        let each = |it: AddressEntry| {
            let addresses = it.addresses.into_iter();
            addresses.map(move |addr| (addr.to_string(), it.pod_uid.clone()))
        };
        let reported: BTreeSet<_> = list.entries().flat_map(each).collect();
        let (more, less) = (reported.difference(&wanted), wanted.difference(&reported));
        let (more, less): (Vec<_>, Vec<_>) = (more.collect(), less.collect());
        ensure!(
            more.is_empty() && less.is_empty(),
            "reported but not in use: {more:?}; in use but not reported: {less:?}"
        );
        // On a node with podCIDRs there is nothing to compare, because the status counts only addresses of blocks.
        let used: i64 = status.blocks.iter().map(|it| it.used).sum();
        ensure!(
            status.blocks.is_empty() || usize::try_from(used)? == wanted.len(),
            "{used} used"
        );
        Ok(Some(()))
    })
    .await;
}

/// Returns the podCIDRs and the blocks in a node's NodeSubnet.
pub async fn ranges(api: &Fixtures, node: &str) -> Vec<String> {
    let spec = api.subnets.get(node).await.unwrap().spec;
    let held = spec.pod_cidrs.into_iter().map(|it| it.cidr);
    held.chain(spec.blocks.into_iter().map(|it| it.cidr))
        .collect()
}

/// Routes the ranges in a machine's NodeSubnet to the machine, and returns the ranges.
pub(crate) async fn route(stage: &Stage, machine: &Machine) -> Vec<String> {
    let held = ranges(&stage.api, machine.name()).await;
    for cidr in &held {
        let routed = stage.site.fabric().route(cidr, machine.number()).await;
        routed.unwrap();
    }
    held
}

pub fn boot_id(node: &Node) -> String {
    let info = node.status.as_ref().and_then(|it| it.node_info.as_ref());
    info.unwrap().boot_id.clone()
}

/// Waits until a node's kubelet reports another boot id than `boot`.
pub async fn booted_since(api: &Fixtures, node: &str, boot: &str) {
    eventually(&format!("{node} has booted"), async || {
        let id = boot_id(&api.nodes.get(node).await?);
        ensure!(id != boot, "still {id}");
        Ok(Some(()))
    })
    .await;
}

/// Waits until all pods of `before` run, identified by their UIDs. The pods on `node` must have new containers. Returns
/// the running pods.
pub async fn same_pods_anew(
    api: &Fixtures,
    group: &str,
    before: &[Running],
    node: &str,
) -> Vec<Running> {
    pods::running_that(api, group, before.len(), |pod| {
        let before = before.iter().find(|it| it.uid == pod.uid);
        before.is_some_and(|it| pod.node != node || pod.container != it.container)
    })
    .await
}

/// Waits until the CNI configuration that the agent of a machine writes contains `text`.
pub async fn configured(machine: &Machine, text: &str) {
    let path = machine.folder().join("cni/net.d/10-pods.conflist");
    eventually(&format!("{text} is in {}", path.display()), async || {
        let config = std::fs::read_to_string(&path)?;
        ensure!(config.contains(text), config);
        Ok(Some(()))
    })
    .await;
}
