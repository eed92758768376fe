//! Tests of how `status`, `check` and `show` report the health of Cadastre itself.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::{Cluster, assert_contains, style, time};
use crate::render::VerbReport as _;
use crate::show;
use crate::status::{Health, status};

fn health(cluster: &Cluster, part: &str) -> (Health, String) {
    let mut parts = status(&cluster.inventory()).parts.into_iter();
    let part = parts.find(|it| it.part == part).unwrap();
    (part.health, part.says)
}

#[track_caller]
fn assert_health(cluster: &Cluster, part: &str, is: Health, says: &str) {
    assert_eq!(health(cluster, part), (is, says.to_owned()), "{part}");
}

#[track_caller]
fn assert_codes(cluster: &Cluster, codes: &[&str]) {
    assert_eq!(cluster.codes(), codes);
}

/// Returns a small cluster with the nodes `a` and `b`. Each has a ready pod of an agent and a ready pod of a
/// controller.
fn with_pods() -> Cluster {
    let mut cluster = Cluster::new();
    for node in ["a", "b"] {
        cluster.part("agent", node, true);
        cluster.part("controller", node, true);
    }
    cluster
}

#[test]
fn a_lease_without_a_leader_is_reported() {
    let mut cluster = Cluster::new();
    let says = "controller-1 leads, renewed its Lease 2s ago";
    assert_health(&cluster, "leader", Health::Ok, says);
    cluster.leader("controller-1", "2026-11-21T11:50:00Z");
    assert_codes(&cluster, &["NoLeader controller"]);
    let says = "controller-1 led, but last renewed its Lease 10m ago";
    assert_health(&cluster, "leader", Health::Bad, says);
    cluster.leader("", "2026-11-21T11:59:58Z");
    assert_codes(&cluster, &["NoLeader controller"]);
    cluster.lists.leases = Ok(Vec::new());
    assert_codes(&cluster, &["NoLeader controller"]);
    // If the user may not read Leases, nobody knows whether a controller leads. So only the missing right is reported.
    cluster.lists.leases = Err("no right".to_owned());
    assert_codes(&cluster, &["NotReadable controller"]);
    assert_eq!(health(&cluster, "leader").0, Health::Unknown);
}

#[test]
fn an_agent_that_is_gone_is_not_shown_as_running() {
    let mut cluster = with_pods();
    assert_codes(&cluster, &[]);
    let says = "2 of 2 nodes have a ready one";
    assert_health(&cluster, "agents", Health::Ok, says);
    let agents = |cluster: &Cluster| -> Vec<String> {
        let text = show::nodes(&cluster.inventory()).text(&style());
        let agent = |line: &str| {
            let mut cells = line.split("   ").filter(|it| !it.is_empty());
            cells.nth(7).unwrap().trim().to_owned()
        };
        text.lines().skip(1).map(agent).collect()
    };
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0"]);
    let is_agent_b = |it: &Pod| it.metadata.name.as_deref() == Some("agent-b");
    cluster.parts().retain(|it| !is_agent_b(it));
    assert_codes(&cluster, &["AgentDown node b"]);
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0 (no pod)"]);
    assert_eq!(health(&cluster, "agents").0, Health::Bad);
    cluster.part("agent", "b", false);
    assert_codes(&cluster, &["AgentDown node b"]);
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0 (not ready)"]);
    // All pods of agents are gone. The statuses that the agents wrote are still there, but must not make the agents
    // look alive.
    cluster.lists.parts = Ok(Vec::new());
    assert_eq!(agents(&cluster), ["0.1.0 (no pod)", "0.1.0 (no pod)"]);
    assert_eq!(health(&cluster, "agents").0, Health::Unknown);
}

#[test]
fn a_rollout_is_no_fault() {
    // The pods of Cadastre were created 30 seconds ago and are not ready yet. This is normal in a rollout, so there is
    // no finding.
    let mut cluster = with_pods();
    for part in cluster.parts() {
        part.metadata.creation_timestamp = time("2026-11-21T11:59:30Z");
        part.status = None;
    }
    assert_codes(&cluster, &[]);
    // The pods are being deleted, and new pods are about to replace them. It is a fault if a pod has not been replaced
    // two minutes after its grace period.
    let down = [
        "AgentDown node a",
        "AgentDown node b",
        "ControllerNotReady controller",
    ];
    for (grace_ends, codes) in [
        ("2026-11-21T12:00:30Z", &[][..]),
        ("2026-11-21T11:59:30Z", &[]),
        ("2026-11-21T11:57:00Z", &down),
    ] {
        let mut cluster = with_pods();
        for part in cluster.parts() {
            part.metadata.deletion_timestamp = time(grace_ends);
        }
        assert_codes(&cluster, codes);
    }
    // The only controller has released its Lease. That is no fault if the controller's pod is new, but a fault if the
    // pod is old.
    for (created, codes) in [
        ("2026-11-21T11:59:30Z", &[][..]),
        ("2026-11-21T11:30:00Z", &["NoLeader controller"]),
    ] {
        let mut cluster = with_pods();
        cluster.leader("", "2026-11-21T11:59:50Z");
        let parts = cluster.parts();
        parts.retain(|it| it.metadata.name.as_deref() != Some("controller-b"));
        for part in parts {
            part.metadata.creation_timestamp = time(created);
        }
        assert_codes(&cluster, codes);
    }
    // Other workloads were rolled out after the agent wrote its list. So the node has as many pods as the list, but
    // with other addresses. A missing address is a fault only if its pod is older than the list.
    let mut cluster = Cluster::new();
    cluster.lists.addresses[0].spec["asOf"] = json!("2026-11-21T11:00:00Z");
    cluster.lists.pods.clear();
    cluster.pod("shop/new", "a", &["10.0.0.2"]);
    cluster.last_pod().metadata.creation_timestamp = time("2026-11-21T11:30:00Z");
    assert_codes(&cluster, &[]);
    cluster.last_pod().metadata.creation_timestamp = time("2026-11-21T10:00:00Z");
    assert_codes(&cluster, &["NotRecorded address 10.0.0.2"]);
    // The pod is being deleted. Its node may have released the address although the API server still has the pod. So
    // there is no finding.
    cluster.last_pod().metadata.deletion_timestamp = time("2026-11-21T11:59:30Z");
    assert_codes(&cluster, &[]);
}

#[test]
fn status_says_what_is_wrong_with_pools_and_nodes() {
    let mut cluster = Cluster::new();
    assert_health(&cluster, "pools", Health::Ok, "1 of 1 serve");
    let says = "2 nodes, none waits for addresses";
    assert_health(&cluster, "nodes", Health::Ok, says);
    let spec = json!({
        "ipv4": {"cidrs": ["10.1.0.0/24"]}, "nodeSelector": {"matchLabels": {"zone": "c"}},
    });
    cluster.pool("q", &spec);
    assert_codes(&cluster, &["PoolForNobody pool q"]);
    let says = "2 of 2 serve; for no node: q";
    assert_health(&cluster, "pools", Health::Ok, says);
    cluster.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/27"]);
    cluster.node("c", &[]);
    cluster.lists.nodes[2].metadata.labels = None;
    let says = "2 of 2 serve; exhausted: p; for no node: q";
    assert_health(&cluster, "pools", Health::Bad, says);
    let says = "3 nodes, 1 wait for addresses: c";
    assert_health(&cluster, "nodes", Health::Bad, says);
}

#[test]
fn the_network_of_another_plugin_is_reported_until_its_agent_says_otherwise() {
    let mut cluster = with_pods();
    let served_by_others = |cluster: &mut Cluster, node: usize, status: &str, message: &str| {
        cluster.lists.subnets[node].status["conditions"] = json!([{
            "type": "ServedByOthers", "status": status, "reason": "LeftToOthers", "message": message,
            "lastTransitionTime": "2026-11-21T11:00:00Z",
        }]);
    };
    let message = "10-kindnet.conflist is there: do this";
    served_by_others(&mut cluster, 0, "True", message);
    assert_codes(&cluster, &["ServedByOthers agents"]);
    assert_contains(
        &cluster.check().findings[0].message,
        &["1 node: a", message],
    );
    let (is, text) = health(&cluster, "agents");
    assert_eq!(is, Health::Bad);
    assert_contains(&text, &["another network has the pods of a"]);
    served_by_others(&mut cluster, 1, "True", "x");
    assert_codes(&cluster, &["ServedByOthers agents"]);
    served_by_others(&mut cluster, 0, "False", "ours");
    // The agent reported for an earlier Node of the same name, so its condition says nothing about the Node of today.
    cluster.lists.subnets[1].status["nodeUID"] = json!("earlier");
    let codes = cluster.codes();
    assert!(!codes.contains(&"ServedByOthers agents".to_owned()));
}

#[test]
fn pods_outside_every_pool_are_counted_where_the_agent_is_to_configure_the_runtime() {
    let mut cluster = with_pods();
    for n in 1..=6 {
        cluster.pod(&format!("shop/old-{n}"), "a", &[&format!("10.9.0.{n}")]);
    }
    cluster.pod("shop/other-node", "b", &["10.9.1.1"]);
    // No agent configures the runtime (mode secondary, or networks of the user's own). So it is intended that pods of
    // other networks exist, and there is no finding.
    assert_codes(&cluster, &[]);
    cluster.configures("a");
    assert_codes(&cluster, &["PodsOutside pods"]);
    let parts = ["6 pods", "shop/old-1 on a (10.9.0.1)", "and 2 more"];
    assert_contains(&cluster.check().findings[0].message, &parts);
    // Pods that have ended, are being deleted or use the host network are not counted. Pods with an address of a block
    // are not counted either, even if no pool contains the block.
    for pod in &mut cluster.lists.pods {
        match pod.metadata.name.as_deref() {
            Some("old-1") => pod.status.as_mut().unwrap().phase = Some("Succeeded".to_owned()),
            Some("old-2") => pod.spec.as_mut().unwrap().host_network = Some(true),
            Some("old-3") => pod.metadata.deletion_timestamp = time("2026-11-21T11:59:30Z"),
            _ => {}
        }
    }
    let message = &cluster.check().findings[0].message;
    assert!(message.starts_with("3 pods"), "{message}");
    cluster.block("10.9.0.0/28", "p", "a");
    assert!(!cluster.codes().contains(&"PodsOutside pods".to_owned()));
    // In mode podCIDRs there are no agents. So pods outside all pools are not reported.
    let mut cluster = Cluster::new();
    cluster.pod("shop/old", "a", &["10.9.0.1"]);
    assert_codes(&cluster, &[]);
}
