//! Starts an agent on a node whose pods already have addresses from host-local.

use std::collections::BTreeSet;
use std::path::Path;

use cadastre_e2e::fixtures::GROUP;
use cadastre_e2e::nodes;
use cadastre_node::OpErrorKind;
use serde_json::{Value, json};

use crate::{Machine, call_plugin, patch, publishes, shared};

/// The node's podCIDR. Pods can use 13 of its addresses.
const RANGE: &str = "10.43.0.0/28";

#[tokio::test]
async fn what_host_local_gave_of_the_pod_cidr_is_not_given_again_while_its_pods_live() {
    let (cluster, api) = shared().await;
    let range =
        json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.43.0.0/24"], "blockSize": 28}});
    api.pool("moved", range).await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "moved-1", &[]);
    let before = host_local(&machine);
    let mut old = Vec::new();
    for id in ["h1", "h2", "h3"] {
        let result = call("ADD", id, machine.folder(), &before);
        let given = result["ips"][0]["address"].as_str().unwrap();
        let address = given.split('/').next().unwrap().to_owned();
        api.pod(&format!("moved-{id}"), "moved-1", &[&address])
            .await
            .unwrap();
        old.push(address);
    }

    // The node has a podCIDR from kube-controller-manager. The agent creates its store before the controller publishes
    // the podCIDR in a NodeSubnet.
    api.create_node(nodes::node("moved-1", "192.0.2.1"))
        .await
        .unwrap();
    machine.start();
    machine.log_says("a new store was made").await;
    let change = json!({
        "metadata": {"labels": {GROUP: "moved"}},
        "spec": {"podCIDR": RANGE, "podCIDRs": [RANGE]},
    });
    patch(&api.nodes, "moved-1", change).await;
    machine.ready().await;
    publishes(&api, "moved-1", old.clone()).await;
    let mut all: BTreeSet<String> = old.iter().cloned().collect();
    for n in 0..10 {
        let given = machine.add(&format!("c{n}")).await.unwrap();
        assert!(
            all.insert(given.clone()),
            "{given} is a pod's of host-local"
        );
    }
    assert_eq!(
        machine.add("one-more").await.unwrap_err().why,
        OpErrorKind::Exhausted
    );

    // Some runtimes remember a pod's CNI configuration and send the pod's DEL to host-local. Other runtimes send the
    // DEL to cadastre-ipam.
    let ours = json!({
        "cniVersion": "1.0.0", "name": "net", "type": "ptp",
        "ipam": {"type": "cadastre-ipam", "socket": machine.plugin_socket(), "store": machine.store()},
    });
    call("DEL", "h1", machine.folder(), &before);
    call("DEL", "h2", machine.folder(), &ours);
    assert!(!machine.path("networks/net").join(&old[0]).exists());
    // The agent knows neither of the two attachments. The agent has no runtime that it could ask for sandboxes, so it
    // checks only whether the pods exist. Both pods still exist, so their addresses stay in use.
    publishes(&api, "moved-1", all.into_iter().collect()).await;
    machine.stop().await;
}

fn host_local(machine: &Machine) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "net", "type": "bridge",
        "ipam": {"type": "host-local", "dataDir": machine.path("networks"), "ranges": [[{"subnet": RANGE}]]},
    })
}

/// Calls the CNI plugin for a container's `eth0`, and returns its output.
fn call(verb: &str, id: &str, folder: &Path, config: &Value) -> Value {
    call_plugin(verb, id, "eth0", folder, config).unwrap()
}
