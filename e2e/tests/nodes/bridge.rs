//! Nodes with podCIDRs that the controller allocates. The plugin bridge uses the podCIDRs with host-local, then with
//! cadastre-ipam in host-local's place, and finally with an agent.

use cadastre_e2e::daemon;
use cadastre_e2e::node::{Machine, NodeSide};
use serde_json::json;

use crate::pods::{self, Running};
use crate::{Stage, addresses, machines};

/// The number of pods that each step creates on a node.
const EACH: usize = 3;

/// Runs several tests one after the other on the same two machines. Each test begins without pods, with the software
/// that the previous test has installed.
pub(crate) async fn two_nodes_with_host_local_then_with_ours_then_with_agents(stage: &Stage) {
    let (api, group) = (&stage.api, "bridge");
    let spec = json!({
        "ipv4": {"cidrs": ["10.20.0.0/16"]}, "ipv6": {"cidrs": ["fd00:20::/48"]},
    });
    api.pool(group, spec).await.unwrap();
    let (mut one, its) = machine(stage, group).await;
    let (mut other, others) = machine(stage, group).await;
    pods_reach_each_other_and_come_back_after_a_power_cut(
        stage,
        &mut one,
        &other,
        &[its, others.clone()],
    )
    .await;
    host_local_and_ours_take_turns_and_an_agent_takes_over(stage, &mut other, &others).await;
    agents_with_the_routes_of_the_pool(stage, &mut one, &mut other).await;
}

async fn pods_reach_each_other_and_come_back_after_a_power_cut(
    stage: &Stage,
    one: &mut Machine,
    other: &Machine,
    ranges: &[Vec<String>; 2],
) {
    let (api, group) = (&stage.api, "bridge");
    let boot = machines::boot_id(&pods::ready(api, one.name(), true).await);
    pods::ready(api, other.name(), true).await;
    for machine in [&*one, other] {
        let prefix = format!("{group}-{}", machine.name());
        pods::create_many(api, group, &prefix, 0..EACH, Some(machine.name())).await;
    }
    let before = pods::running(api, group, 2 * EACH).await;
    assert_good(&before, [one, other], ranges).await;

    one.power_off().await.unwrap();
    one.run(&["true"]).await.unwrap_err();
    one.boot().await.unwrap();
    machines::booted_since(api, one.name(), &boot).await;
    let after = machines::same_pods_anew(api, group, &before, one.name()).await;
    assert_good(&after, [one, other], ranges).await;
    pods::delete_all(api, group).await;
}

/// While pods run, cadastre-ipam is installed in place of host-local and uses host-local's configuration. Then
/// host-local is installed again. Finally an agent adopts the podCIDRs with the addresses of the remaining pods.
async fn host_local_and_ours_take_turns_and_an_agent_takes_over(
    stage: &Stage,
    machine: &mut Machine,
    ranges: &[String],
) {
    let (api, group) = (&stage.api, "bridge");
    let theirs = NodeSide::host_local(ranges);
    let mut ours = theirs.clone();
    let plugin = ("host-local".to_owned(), daemon::plugin().unwrap());
    ours.plugins.push(plugin);
    let mut back = theirs.clone();
    let plugin = cadastre_e2e::assets::Program::HostLocal;
    let plugin = cadastre_e2e::assets::find(plugin).unwrap();
    back.plugins.push(("host-local".to_owned(), plugin));
    for (n, side) in [ours, back, theirs].into_iter().enumerate() {
        let prefix = format!("{group}-{n}");
        pods::create_many(api, group, &prefix, 0..EACH, Some(machine.name())).await;
        let all = pods::running(api, group, EACH * (n + 1)).await;
        pods::assert_unique(&all);
        pods::assert_within(&all, ranges);
        let files = files(machine);
        assert_eq!(files.len(), 2 * all.len(), "{files:?}");
        machine.set_side(side).await.unwrap();
    }
    // Now host-local is installed again. It must release the addresses that cadastre-ipam has assigned.
    pods::delete_many(api, &format!("{group}-1"), 0..EACH).await;
    let left = pods::running(api, group, 2 * EACH).await;
    assert_eq!(files(machine).len(), 2 * left.len());

    let bridge = json!({"type": "bridge", "bridge": "cni0", "isDefaultGateway": true});
    machine.set_side(machines::side(&bridge)).await.unwrap();
    machines::reports(api, machine.name(), &left).await;
    let prefix = format!("{group}-3");
    pods::create_many(api, group, &prefix, 0..EACH, Some(machine.name())).await;
    let all = pods::running(api, group, 3 * EACH).await;
    pods::assert_unique(&all);
    pods::assert_within(&all, ranges);
    machines::reports(api, machine.name(), &all).await;
    pods::delete_all(api, group).await;
    machines::reports(api, machine.name(), &[]).await;
}

/// Both nodes have agents, and the pool has the default routes.
async fn agents_with_the_routes_of_the_pool(stage: &Stage, one: &mut Machine, other: &mut Machine) {
    let (api, group) = (&stage.api, "bridge");
    let routes = json!({
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}], "cooldownSeconds": 1,
    });
    api.change_pool(group, routes).await.unwrap();
    // Each family can have only one default route, which comes from the pool. So `isDefaultGateway`, which adds default
    // routes, is not set.
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true});
    for machine in [&mut *one, other] {
        let with_routes = api.subnet_until(machine.name(), "has the routes", |it| {
            it.spec.pools.iter().any(|it| it.terms.routes.len() == 2)
        });
        with_routes.await.unwrap();
        machine.set_side(machines::side(&bridge)).await.unwrap();
        machines::configured(machine, "isGateway").await;
        let name = machine.name();
        pods::ready(api, name, true).await;
        assert_eq!(
            pods::pod_cidrs(api, name, 2).await,
            machines::ranges(api, name).await
        );
        pods::create_many(api, group, &format!("{group}-{name}"), 0..EACH, Some(name)).await;
    }
    let all = pods::running(api, group, 2 * EACH).await;
    addresses::assert_good(stage, [one, other], EACH, &all).await;
    addresses::end(stage, group, [one, other]).await;
}

/// Returns the names of the files in host-local's folder, which are the addresses in use.
fn files(machine: &Machine) -> Vec<String> {
    let folder = machine.var().join("lib/cni/networks/pods");
    let names = std::fs::read_dir(folder).unwrap().flatten();
    let names = names.map(|it| it.file_name().into_string().unwrap());
    names
        .filter(|it| it != "lock" && !it.starts_with("last_reserved_ip"))
        .collect()
}

/// Starts a machine with the bridge plugin and host-local on its podCIDRs, and routes the podCIDRs to the machine.
/// Returns the machine and the podCIDRs.
async fn machine(stage: &Stage, group: &str) -> (Machine, Vec<String>) {
    let mut machine = stage.machine(group, NodeSide::default()).await;
    let name = machine.name().to_owned();
    let cidrs = pods::pod_cidrs(&stage.api, &name, 2).await;
    let side = NodeSide::host_local(&cidrs);
    machine.set_side(side).await.unwrap();
    let says_so = stage
        .api
        .subnet_until(&name, "says what the node says", |it| {
            it.spec.pod_cidrs.iter().map(|it| &it.cidr).eq(&cidrs)
        });
    says_so.await.unwrap();
    assert_eq!(machines::route(stage, &machine).await, cidrs);
    (machine, cidrs)
}

async fn assert_good(all: &[Running], machines: [&Machine; 2], ranges: &[Vec<String>; 2]) {
    pods::assert_unique(all);
    for (machine, ranges) in machines.into_iter().zip(ranges) {
        let own = |it: &&Running| it.node == machine.name();
        pods::assert_within(all.iter().filter(own), ranges);
        assert_eq!(all.iter().filter(own).count(), EACH);
        let from = all.iter().find(own).unwrap();
        assert_eq!(from.addresses.len(), 2);
        let other = all.iter().find(|it| !own(it)).unwrap();
        pods::assert_reaches(machine, from, other).await;
    }
}
