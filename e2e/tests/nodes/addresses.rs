//! Many pods on nodes with Cadastre's CNI plugin and agent: unique addresses in the right ranges, no leaks.

use cadastre_e2e::node::Machine;
use serde_json::json;

use crate::pods::{self, Running};
use crate::{Stage, machines};

/// Pods that exist at the same time.
const PODS: usize = 60;
/// Pods per wave. Each wave of pods replaces the wave before.
const WAVE: usize = 40;
const WAVES: usize = 5;

pub(crate) async fn sixty_pods_on_two_nodes(stage: &Stage) {
    let (api, group) = (&stage.api, "many");
    let two = two_machines(stage, group, "10.30.0.0/16", "fd00:30::/48").await;
    pods::create_many(api, group, group, 0..PODS, None).await;
    let all = pods::running(api, group, PODS).await;
    assert_good(stage, &two, &all).await;
    end(stage, group, &two).await;
}

/// Each wave of pods is created while the wave before is deleted.
pub(crate) async fn two_hundred_pods_come_and_go_on_two_nodes(stage: &Stage) {
    let (api, group) = (&stage.api, "waves");
    let two = two_machines(stage, group, "10.42.0.0/16", "fd00:42::/48").await;
    for wave in 0..WAVES {
        let prefix = format!("{group}-{wave}");
        pods::create_many(api, group, &prefix, 0..WAVE, None).await;
        if let Some(before) = wave.checked_sub(1) {
            pods::delete_many(api, &format!("{group}-{before}"), 0..WAVE).await;
        }
        let all = pods::running_of(api, group, &prefix, WAVE).await;
        pods::assert_unique(&all);
    }
    end(stage, group, &two).await;
}

/// Creates a pool with blocks so small that each node gets several, one after the other. Starts two machines.
async fn two_machines(stage: &Stage, group: &str, v4: &str, v6: &str) -> [Machine; 2] {
    let mut spec = machines::both(v4, v6);
    spec["ipv4"]["blockSize"] = json!(28);
    spec["ipv6"]["blockSize"] = json!(124);
    stage.api.block_pool(group, spec).await.unwrap();
    let two = [
        stage.machine(group, machines::ptp()).await,
        stage.machine(group, machines::ptp()).await,
    ];
    for machine in &two {
        pods::ready(&stage.api, machine.name(), true).await;
    }
    two
}

/// Deletes the pods of a group, and waits until the machines' agents report no address.
async fn end(stage: &Stage, group: &str, machines: &[Machine]) {
    pods::delete_all(&stage.api, group).await;
    for machine in machines {
        machines::reports(&stage.api, machine.name(), &[]).await;
    }
}

async fn assert_good(stage: &Stage, two: &[Machine; 2], all: &[Running]) {
    pods::assert_unique(all);
    let mut samples = Vec::new();
    for machine in two {
        let ranges = machines::route(stage, machine).await;
        let own: Vec<Running> = all
            .iter()
            .filter(|it| it.node == machine.name())
            .cloned()
            .collect();
        assert!(own.len() >= 10, "{} on {}", own.len(), machine.name());
        pods::assert_within(&own, &ranges);
        assert!(own.iter().all(|it| it.addresses.len() == 2), "{own:?}");
        machines::reports(&stage.api, machine.name(), all).await;
        samples.push(own[0].clone());
    }
    pods::assert_reaches(&two[0], &samples[0], &samples[1]).await;
    pods::assert_reaches(&two[1], &samples[1], &samples[0]).await;
}

pub(crate) async fn pod_cidrs_with_the_bridge_plugin(stage: &Stage) {
    let (api, group) = (&stage.api, "cidrs");
    let spec = machines::both("10.31.0.0/16", "fd00:31::/48");
    api.pool(group, spec).await.unwrap();
    // The pool has default routes already, and each family can have only one. So `isDefaultGateway`, which adds them,
    // is not set.
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true});
    let two = [
        stage.machine(group, machines::side(&bridge)).await,
        stage.machine(group, machines::side(&bridge)).await,
    ];
    for machine in &two {
        let name = machine.name();
        pods::ready(api, name, true).await;
        assert_eq!(
            pods::pod_cidrs(api, name, 2).await,
            machines::ranges(api, name).await
        );
        pods::create_many(api, group, &format!("{group}-{name}"), 0..10, Some(name)).await;
    }
    let all = pods::running(api, group, 20).await;
    assert_good(stage, &two, &all).await;
    end(stage, group, &two).await;
}

/// Pods on the machines' own network have no routes, and all have the pool's prefix length.
pub(crate) async fn macvlan_puts_pods_on_the_network_of_the_nodes(stage: &Stage) {
    let (api, group) = (&stage.api, "flat");
    let spec = json!({
        "ipv4": {"cidrs": ["10.39.0.0/24"], "blockSize": 28, "gateway": "None"},
        "ipv6": {"cidrs": ["fd00:39::/112"], "blockSize": 124, "gateway": "None"},
        "addressPrefix": "Pool", "cooldownSeconds": 1,
    });
    api.block_pool(group, spec).await.unwrap();
    let macvlan = json!({"type": "macvlan", "master": "eth0", "mode": "bridge"});
    let two = [
        stage.machine(group, machines::side(&macvlan)).await,
        stage.machine(group, machines::side(&macvlan)).await,
    ];
    for machine in &two {
        let name = machine.name();
        pods::ready(api, name, true).await;
        pods::create_many(api, group, &format!("{group}-{name}"), 0..2, Some(name)).await;
    }
    let all = pods::running(api, group, 4).await;
    pods::assert_unique(&all);
    let on = |machine: &Machine| {
        let mut own = all.iter().filter(|it| it.node == machine.name());
        own.next().cloned().unwrap()
    };
    for machine in &two {
        let name = machine.name();
        let own = all.iter().filter(|it| it.node == name);
        pods::assert_within(own, &machines::ranges(api, name).await);
    }
    pods::assert_reaches(&two[0], &on(&two[0]), &on(&two[1])).await;
    pods::assert_reaches(&two[1], &on(&two[1]), &on(&two[0])).await;
    let of_pod = ["ip", "-4", "address", "show", "dev", "eth0"];
    let shown = two[0].run_in_pod(&on(&two[0]).container, &of_pod).await;
    let shown = shown.unwrap();
    assert!(
        shown.contains("/24 "),
        "not the prefix of the pool: {shown}"
    );
    end(stage, group, &two).await;
}
