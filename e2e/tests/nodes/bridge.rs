//! podCIDRs given by the controller, used by the bridge plugin and host-local: no node side of ours.

use cadastre_e2e::node::NodeSide;
use cadastre_e2e::wait::until;
use serde_json::json;

use crate::pods::{self, Running};
use crate::{LIMIT, Stage};

pub(crate) async fn pods_of_two_nodes_reach_each_other_and_come_back_after_a_power_cut(
    stage: &Stage,
) {
    let (hand, group) = (&stage.hand, "bridge");
    let spec = json!({
        "ipv4": {"cidrs": ["10.20.0.0/16"]}, "ipv6": {"cidrs": ["fd00:20::/48"]},
    });
    hand.pool(group, spec).await.unwrap();
    let mut machines = Vec::new();
    let mut ranges = Vec::new();
    for _ in 0..2 {
        let mut machine = stage.machine(group, NodeSide::default()).await;
        let cidrs = pods::pod_cidrs(hand, machine.name(), 2).await;
        machine
            .set_side(NodeSide::host_local(&cidrs))
            .await
            .unwrap();
        hand.subnet_until(machine.name(), "says what the node says", |it| {
            it.spec.pod_cidrs.iter().map(|it| &it.cidr).eq(&cidrs)
        })
        .await
        .unwrap();
        assert_eq!(pods::route(stage, &machine).await, cidrs);
        ranges.push(cidrs);
        machines.push(machine);
    }
    let mut boots = Vec::new();
    for machine in &machines {
        let node = pods::ready(hand, machine.name(), true).await;
        boots.push(node.status.unwrap().node_info.unwrap().boot_id);
    }
    for (n, machine) in (0..8_usize).map(|n| (n, &machines[n % 2])) {
        pods::create(hand, group, &format!("{group}-{n}"), Some(machine.name())).await;
    }
    let all = pods::running(hand, group, 8).await;
    assert_good(&all, &machines, &ranges).await;

    machines[1].power_off().await.unwrap();
    machines[1].run(&["true"]).await.unwrap_err();
    machines[1].boot().await.unwrap();
    let name = machines[1].name();
    until("the node has booted", LIMIT, async || {
        let node = hand.nodes.get(name).await?;
        let boot = node.status.and_then(|it| it.node_info).unwrap_or_default();
        anyhow::ensure!(boot.boot_id != boots[1], "{boot:?}");
        Ok(Some(()))
    })
    .await
    .unwrap();
    // The same pods in new sandboxes.
    let before = |pod: &Running| all.iter().find(|it| it.uid == pod.uid).cloned();
    let anew = |pod: &Running| {
        let before = before(pod).unwrap();
        pod.node != name || pod.container != before.container
    };
    let all = pods::running_that(hand, group, 8, anew).await;
    assert_good(&all, &machines, &ranges).await;
    pods::delete_all(hand, group).await;
}

async fn assert_good(
    all: &[Running],
    machines: &[cadastre_e2e::node::Machine],
    ranges: &[Vec<String>],
) {
    pods::assert_unique(all);
    for (machine, ranges) in machines.iter().zip(ranges) {
        let own = |it: &&Running| it.node == machine.name();
        pods::assert_within(all.iter().filter(own), ranges);
        assert_eq!(all.iter().filter(own).count(), 4);
        let from = all.iter().find(own).unwrap();
        assert_eq!(from.addresses.len(), 2);
        let other = all.iter().find(|it| !own(it)).unwrap();
        pods::assert_reaches(machine, from, other).await;
    }
}
