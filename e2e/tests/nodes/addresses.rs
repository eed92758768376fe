//! Many pods on nodes with Cadastre's CNI plugin and agent: unique addresses in the right ranges, no leaks.

use cadastre_e2e::node::Machine;
use serde_json::json;

use crate::pods::{self, Running};
use crate::{Stage, machines};

/// The number of pods in a wave. A node's share of two waves needs more addresses than one block has.
const WAVE: usize = 30;
const WAVES: usize = 3;

/// Each wave of pods is created while the previous wave is deleted.
pub(crate) async fn waves_of_pods_come_and_go_on_two_nodes(stage: &Stage) {
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
        if wave == 0 {
            let [one, other] = &two;
            assert_good(stage, [one, other], 10, &all).await;
        }
    }
    end(stage, group, [&two[0], &two[1]]).await;
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
pub(crate) async fn end(stage: &Stage, group: &str, machines: [&Machine; 2]) {
    pods::delete_all(&stage.api, group).await;
    for machine in machines {
        machines::reports(&stage.api, machine.name(), &[]).await;
    }
}

/// Asserts that at least `each` pods run on each of the two machines, and that pods of one machine reach pods of the
/// other. All pods must have unique addresses in the right ranges, and the agents must report these addresses.
pub(crate) async fn assert_good(stage: &Stage, two: [&Machine; 2], each: usize, all: &[Running]) {
    pods::assert_unique(all);
    let mut samples = Vec::new();
    for machine in two {
        let ranges = machines::route(stage, machine).await;
        let own: Vec<Running> = all
            .iter()
            .filter(|it| it.node == machine.name())
            .cloned()
            .collect();
        assert!(own.len() >= each, "{} on {}", own.len(), machine.name());
        pods::assert_within(&own, &ranges);
        assert!(own.iter().all(|it| it.addresses.len() == 2), "{own:?}");
        machines::reports(&stage.api, machine.name(), all).await;
        samples.push(own[0].clone());
    }
    pods::assert_reaches(two[0], &samples[0], &samples[1]).await;
    pods::assert_reaches(two[1], &samples[1], &samples[0]).await;
}

/// Pods on the machines' own network have no routes, and their addresses have the pool's prefix length.
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
    end(stage, group, [&two[0], &two[1]]).await;
}
