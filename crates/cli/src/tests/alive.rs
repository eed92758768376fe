//! Tests of how `status`, `check` and `show` report the health of Cadastre itself.

use serde_json::json;

use super::{Cluster, style};
use crate::render::VerbReport as _;
use crate::show;
use crate::status::{Health, status};

fn health(cluster: &Cluster, part: &str) -> (Health, String) {
    let report = status(&cluster.inventory());
    let part = report.parts.into_iter().find(|it| it.part == part);
    part.map(|it| (it.health, it.says)).unwrap()
}

/// Returns a small cluster with a ready pod of an agent and of a controller on each of the nodes `a` and `b`.
fn of_pods() -> Cluster {
    let mut cluster = Cluster::new();
    for node in ["a", "b"] {
        cluster.part("agent", node, true);
        cluster.part("controller", node, true);
    }
    cluster
}

#[test]
fn who_does_not_lead_is_told() {
    let mut cluster = Cluster::new();
    let (is, says) = health(&cluster, "leader");
    assert_eq!(
        (is, says.as_str()),
        (Health::Ok, "controller-1 leads, renewed its Lease 2s ago")
    );
    cluster.leader("controller-1", "2026-11-21T11:50:00Z");
    assert_eq!(cluster.codes(), ["NoLeader controller"]);
    let (is, says) = health(&cluster, "leader");
    assert_eq!(
        (is, says.as_str()),
        (
            Health::Bad,
            "controller-1 led, but last renewed its Lease 10m ago"
        )
    );
    cluster.leader("", "2026-11-21T11:59:58Z");
    assert_eq!(cluster.codes(), ["NoLeader controller"]);
    cluster.lists.leases = Ok(Vec::new());
    assert_eq!(cluster.codes(), ["NoLeader controller"]);
    // If the user may not read Leases, nobody knows whether a controller leads, so only that is reported.
    cluster.lists.leases = Err("no right".to_owned());
    assert_eq!(cluster.codes(), ["NotReadable controller"]);
    assert_eq!(health(&cluster, "leader").0, Health::Unknown);
}

#[test]
fn an_agent_that_is_gone_is_not_shown_as_running() {
    let mut cluster = of_pods();
    assert_eq!(cluster.codes(), Vec::<String>::new());
    assert_eq!(
        health(&cluster, "agents"),
        (Health::Ok, "2 of 2 nodes have a ready one".to_owned())
    );
    let agents = |cluster: &Cluster| -> Vec<String> {
        let text = show::nodes(&cluster.inventory()).text(&style());
        let lines = text.lines().skip(1);
        lines
            .map(|it| {
                it.split("   ")
                    .filter(|it| !it.is_empty())
                    .nth(7)
                    .unwrap()
                    .trim()
                    .to_owned()
            })
            .collect()
    };
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0"]);
    cluster
        .lists
        .parts
        .as_mut()
        .unwrap()
        .retain(|it| it.metadata.name.as_deref() != Some("agent-b"));
    assert_eq!(cluster.codes(), ["AgentDown node b"]);
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0 (no pod)"]);
    assert_eq!(health(&cluster, "agents").0, Health::Bad);
    cluster.part("agent", "b", false);
    assert_eq!(cluster.codes(), ["AgentDown node b"]);
    assert_eq!(agents(&cluster), ["0.1.0", "0.1.0 (not ready)"]);
    // All pods of agents are gone. The statuses that the agents wrote are still there, but must not make them look
    // alive.
    cluster.lists.parts = Ok(Vec::new());
    assert_eq!(agents(&cluster), ["0.1.0 (no pod)", "0.1.0 (no pod)"]);
    assert_eq!(health(&cluster, "agents").0, Health::Unknown);
}

#[test]
fn a_rollout_is_no_fault() {
    // The pods of Cadastre were created 30 seconds ago and are not ready yet, as in a rollout: no finding.
    let mut cluster = of_pods();
    for part in cluster.lists.parts.as_mut().unwrap() {
        part.metadata.creation_timestamp =
            serde_json::from_value(json!("2026-11-21T11:59:30Z")).ok();
        part.status = None;
    }
    assert_eq!(cluster.codes(), Vec::<String>::new());
    // The pods are being deleted, and new pods are about to replace them. It is a fault only if none has done so two
    // minutes after the grace period.
    for (grace_ends, codes) in [
        ("2026-11-21T12:00:30Z", vec![]),
        ("2026-11-21T11:59:30Z", vec![]),
        (
            "2026-11-21T11:57:00Z",
            vec![
                "AgentDown node a",
                "AgentDown node b",
                "ControllerNotReady controller",
            ],
        ),
    ] {
        let mut cluster = of_pods();
        for part in cluster.lists.parts.as_mut().unwrap() {
            part.metadata.deletion_timestamp = serde_json::from_value(json!(grace_ends)).ok();
        }
        assert_eq!(cluster.codes(), codes, "{grace_ends}");
    }
    // The only controller has released its Lease. That is no fault if its pod is new, but it is if the pod is old.
    for (created, codes) in [
        ("11:59:30", vec![]),
        ("11:30:00", vec!["NoLeader controller"]),
    ] {
        let mut cluster = of_pods();
        cluster.leader("", "2026-11-21T11:59:50Z");
        let parts = cluster.lists.parts.as_mut().unwrap();
        parts.retain(|it| it.metadata.name.as_deref() != Some("controller-b"));
        for part in parts {
            let created = json!(format!("2026-11-21T{created}Z"));
            part.metadata.creation_timestamp = serde_json::from_value(created).ok();
        }
        assert_eq!(cluster.codes(), codes, "{created}");
    }
    // A rollout of other workloads after the agent wrote its list: the node has as many pods as in the list, with other
    // addresses. So an address that is missing in the list is a fault only if its pod is older than the list.
    let mut cluster = Cluster::new();
    cluster.lists.addresses[0].spec["asOf"] = json!("2026-11-21T11:00:00Z");
    cluster.lists.pods.clear();
    cluster.pod("shop/new", "a", &["10.0.0.2"]);
    let created = |cluster: &mut Cluster, at: &str| {
        let pod = cluster.lists.pods.last_mut().unwrap();
        pod.metadata.creation_timestamp = serde_json::from_value(json!(at)).ok();
    };
    created(&mut cluster, "2026-11-21T11:30:00Z");
    assert_eq!(cluster.codes(), Vec::<String>::new());
    created(&mut cluster, "2026-11-21T10:00:00Z");
    assert_eq!(cluster.codes(), ["NotRecorded address 10.0.0.2"]);
    // The pod is being deleted. Its node may have released the address already, while the API server still shows it: no
    // finding.
    let pod = cluster.lists.pods.last_mut().unwrap();
    pod.metadata.deletion_timestamp = serde_json::from_value(json!("2026-11-21T11:59:30Z")).ok();
    assert_eq!(cluster.codes(), Vec::<String>::new());
}

#[test]
fn status_says_what_is_wrong_with_pools_and_nodes() {
    let mut cluster = Cluster::new();
    assert_eq!(
        health(&cluster, "pools"),
        (Health::Ok, "1 of 1 serve".to_owned())
    );
    assert_eq!(
        health(&cluster, "nodes"),
        (Health::Ok, "2 nodes, none waits for addresses".to_owned())
    );
    let spec = json!({
        "ipv4": {"cidrs": ["10.1.0.0/24"]}, "nodeSelector": {"matchLabels": {"zone": "c"}},
    });
    cluster.pool("q", &spec);
    assert_eq!(cluster.codes(), ["PoolForNobody pool q"]);
    assert_eq!(
        health(&cluster, "pools"),
        (Health::Ok, "2 of 2 serve; for no node: q".to_owned())
    );
    cluster.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/27"]);
    cluster.node("c", &[]);
    cluster.lists.nodes[2].metadata.labels = None;
    let (is, says) = health(&cluster, "pools");
    assert_eq!(
        (is, says.as_str()),
        (Health::Bad, "2 of 2 serve; exhausted: p; for no node: q")
    );
    let (is, says) = health(&cluster, "nodes");
    assert_eq!(
        (is, says.as_str()),
        (Health::Bad, "3 nodes, 1 wait for addresses: c")
    );
}

#[test]
fn another_s_network_on_a_node_is_told_until_its_agent_says_otherwise() {
    let mut cluster = of_pods();
    let says = |cluster: &mut Cluster, node: usize, status: &str, message: &str| {
        cluster.lists.subnets[node].status["conditions"] = json!([{
            "type": "ServedByOthers", "status": status, "reason": "LeftToOthers", "message": message,
            "lastTransitionTime": "2026-11-21T11:00:00Z",
        }]);
    };
    says(
        &mut cluster,
        0,
        "True",
        "10-kindnet.conflist is there: do this",
    );
    let report = cluster.check();
    let finding = &report.findings[0];
    assert_eq!(
        (report.findings.len(), &*finding.code),
        (1, "ServedByOthers")
    );
    for part in ["1 node: a", "10-kindnet.conflist is there: do this"] {
        assert!(
            finding.message.contains(part),
            "{part}: {}",
            finding.message
        );
    }
    let (is, text) = health(&cluster, "agents");
    assert_eq!(is, Health::Bad);
    assert!(text.contains("another network has the pods of a"), "{text}");
    says(&mut cluster, 1, "True", "x");
    assert_eq!(cluster.codes(), ["ServedByOthers agents"]);
    says(&mut cluster, 0, "False", "ours");
    // The agent reported for an earlier Node of the same name, so its condition says nothing about the Node of today.
    cluster.lists.subnets[1].status["nodeUID"] = json!("earlier");
    assert!(
        !cluster
            .codes()
            .contains(&"ServedByOthers agents".to_owned())
    );
}

#[test]
fn pods_outside_every_pool_are_counted_where_the_agent_is_to_configure_the_runtime() {
    let mut cluster = of_pods();
    for n in 1..=6 {
        cluster.pod(&format!("shop/old-{n}"), "a", &[&format!("10.9.0.{n}")]);
    }
    cluster.pod("shop/other-node", "b", &["10.9.1.1"]);
    // No agent is to configure the runtime: mode secondary, or networks of the user's own. There, pods of other
    // networks are by design, so there is no finding.
    assert_eq!(cluster.codes(), Vec::<String>::new());
    cluster.configures("a");
    let report = cluster.check();
    let finding = &report.findings[0];
    assert_eq!((report.findings.len(), &*finding.code), (1, "PodsOutside"));
    for part in ["6 pods", "shop/old-1 on a (10.9.0.1)", "and 2 more"] {
        assert!(
            finding.message.contains(part),
            "{part}: {}",
            finding.message
        );
    }
    // Pods that have ended, are being deleted or use the host network are not counted. Neither are pods in a block,
    // even if no pool contains the block.
    let pods = &mut cluster.lists.pods;
    let old = |n: &str, pods: &[cadastre_api::PodLite]| {
        let name = format!("old-{n}");
        pods.iter()
            .position(|it| it.metadata.name.as_deref() == Some(&name))
            .unwrap()
    };
    let (one, two, three) = (old("1", pods), old("2", pods), old("3", pods));
    pods[one].status.as_mut().unwrap().phase = Some("Succeeded".to_owned());
    pods[two].spec.as_mut().unwrap().host_network = Some(true);
    pods[three].metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-11-21T11:59:30Z")).ok();
    let message = &cluster.check().findings[0].message;
    assert!(message.starts_with("3 pods"), "{message}");
    cluster.block("10.9.0.0/28", "p", "a");
    assert!(!cluster.codes().contains(&"PodsOutside pods".to_owned()));
    // In mode podCIDRs there are no agents, so pods outside every pool are not reported.
    let mut cluster = Cluster::new();
    cluster.pod("shop/old", "a", &["10.9.0.1"]);
    assert_eq!(cluster.codes(), Vec::<String>::new());
}
