//! DELs that never come, and DELs that come more than once.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::ensure;
use cadastre_e2e::node::{Machine, NodeSide};
use cadastre_e2e::{Fixtures, assets};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::pods;
use crate::{Stage, eventually, machines};

/// The number of pods that run, and keep their addresses, during all rounds.
const STAY: usize = 2;
/// The number of pods that each round creates and deletes.
const GO: usize = 3;

/// A main plugin that wraps ptp. The file /var/odd decides whether the main plugin ignores DELs or passes each DEL on
/// three times.
const ODD: &str = r#"#!/bin/sh
input=$(cat)
ptp() { printf %s "$input" | /opt/cni/bin/ptp; }
echo "$CNI_COMMAND $CNI_CONTAINERID" >> /var/log/odd.log
case "$CNI_COMMAND $(cat /var/odd)" in
"DEL never") exit 0 ;;
"DEL thrice") ptp && ptp && ptp ;;
*) ptp ;;
esac
"#;

/// Runs two tests one after the other on one machine.
pub(crate) async fn a_chain_that_lacks_a_plugin_then_never_or_three_times(stage: &Stage) {
    let (api, group) = (&stage.api, "dels");
    let spec = machines::both("10.32.0.0/24", "fd00:32::/120");
    api.block_pool(group, spec).await.unwrap();
    let mut machine = stage.machine(group, chained("absent")).await;
    a_chain_that_lacks_a_plugin_keeps_the_addresses_of_one_sandbox(stage, group, &mut machine)
        .await;
    never_or_three_times(stage, group, &mut machine).await;
}

async fn never_or_three_times(stage: &Stage, group: &str, machine: &mut Machine) {
    let api = &stage.api;
    let odd = stage.site.cluster().folder().join("odd-ptp");
    std::fs::write(&odd, ODD).unwrap();
    std::fs::set_permissions(&odd, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut side = machines::side(&json!({"type": "odd-ptp"}));
    side.plugins.push(("odd-ptp".to_owned(), odd));
    std::fs::write(machine.var().join("odd"), "thrice").unwrap();
    machine.set_side(side).await.unwrap();
    machines::configured(machine, "odd-ptp").await;
    let node = machine.name();
    pods::ready(api, node, true).await;

    pods::create_many(api, group, &format!("{group}-stays"), 0..STAY, Some(node)).await;
    let stay = pods::running(api, group, STAY).await;
    for (round, odd) in ["thrice", "never"].into_iter().enumerate() {
        std::fs::write(machine.var().join("odd"), odd).unwrap();
        let prefix = format!("goes-{round}");
        pods::create_many(api, group, &prefix, 0..GO, Some(node)).await;
        let all = pods::running(api, group, STAY + GO).await;
        pods::assert_unique(&all);
        machines::reports(api, node, &all).await;
        pods::delete_many(api, &prefix, 0..GO).await;
        let left = pods::running(api, group, STAY).await;
        // In the round `never`, no DEL reaches cadastre-ipam for the deleted sandboxes. The agent must find out by
        // itself that these sandboxes are gone.
        machines::reports(api, node, &left).await;
        let addresses = |pods: &[pods::Running]| -> Vec<_> {
            pods.iter().map(|it| it.addresses.clone()).collect()
        };
        assert_eq!(addresses(&left), addresses(&stay));
    }
    let log = machine.var().join("log/odd.log");
    let calls = std::fs::read_to_string(log).unwrap();
    assert!(calls.matches("DEL").count() >= 2 * GO, "{calls}");
    std::fs::write(machine.var().join("odd"), "once").unwrap();
    pods::delete_all(api, group).await;
    eventually("the node stays ready", async || {
        pods::ready(api, node, true).await;
        Ok(Some(()))
    })
    .await;
}

/// The number of sandboxes for which the runtime sends an ADD.
const TRIES: usize = 5;

/// A plugin of the chain is not installed. Each sandbox that the runtime creates gets addresses, but its DEL fails at
/// the missing plugin, before the DEL reaches cadastre-ipam. containerd ignores the error and creates another sandbox.
async fn a_chain_that_lacks_a_plugin_keeps_the_addresses_of_one_sandbox(
    stage: &Stage,
    group: &str,
    machine: &mut Machine,
) {
    let api = &stage.api;
    let mut whole = chained("absent");
    // The test installs loopback under the missing plugin's name, because loopback passes on the result of the plugins
    // before it.
    let loopback = assets::find(assets::Program::Loopback).unwrap();
    whole.plugins.push(("absent".to_owned(), loopback));
    let node = machine.name().to_owned();
    pods::ready(api, &node, true).await;
    pods::create(api, group, "chain", Some(&node)).await;

    let mut seen = BTreeSet::new();
    while seen.len() < TRIES {
        eventually("another sandbox has addresses", async || {
            let before = seen.len();
            seen.extend(sandboxes(api, &node).await?);
            ensure!(seen.len() > before, "{seen:?}");
            Ok(Some(()))
        })
        .await;
        try_again(api, "chain", seen.len()).await;
    }
    eventually("one of them is left", async || {
        let held = sandboxes(api, &node).await?;
        ensure!(held.len() == 1, "{held:?} of {seen:?}");
        Ok(Some(()))
    })
    .await;

    machine.set_side(whole).await.unwrap();
    try_again(api, "chain", 0).await;
    let running = pods::running(api, group, 1).await;
    machines::reports(api, &node, &running).await;
    pods::delete_all(api, group).await;
    machines::reports(api, &node, &[]).await;
}

/// Returns Cadastre's CNI plugin and agent, with another plugin after ptp. The CNI version is 1.0, because in later
/// versions the runtime asks each plugin for its STATUS, and a node that lacks one of the plugins never becomes ready.
fn chained(plugin: &str) -> NodeSide {
    let mut side = machines::ptp();
    let template = &mut side.configs[0].1;
    let mut list: Value = serde_json::from_str(template).unwrap();
    list["cniVersion"] = json!("1.0.0");
    let plugins = list["plugins"].as_array_mut().unwrap();
    plugins.push(json!({"type": plugin}));
    *template = list.to_string();
    side
}

/// Returns the handles of the attachments that have addresses on a node, according to its NodeAddresses.
async fn sandboxes(api: &Fixtures, node: &str) -> anyhow::Result<Vec<String>> {
    let list = api.addresses.get(node).await?.spec;
    Ok(list.entries().map(|it| it.handle).collect())
}

/// Changes a pod, so that the kubelet at once tries again to start the pod. Otherwise the kubelet would wait for 10 to
/// 15 s after each failure.
pub(crate) async fn try_again(api: &Fixtures, pod: &str, number: usize) {
    let note = json!({"metadata": {"annotations": {"try": number.to_string()}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(note));
    api.pods.patch(pod, &params, &patch).await.unwrap();
}
