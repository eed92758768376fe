//! Second networks whose configuration was written for whereabouts.

use std::collections::BTreeSet;

use cadastre_core::IpRange;
use cadastre_core::usable::covering;
use serde_json::{Value, json};

use crate::{Machine, addr, call_plugin, eventually, pool, publishes, shared};

/// The addresses of 10.73.0.0/24 that the network's configuration allows.
const ALLOWED: [&str; 2] = ["10.73.0.66-10.73.0.99", "10.73.0.101-10.73.0.127"];

/// Returns a configuration that was written for whereabouts, with the type and the paths of cadastre-ipam.
fn config(machine: &Machine) -> Value {
    json!({
        "cniVersion": "0.3.0", "name": "storage", "type": "macvlan", "master": "eth1",
        "ipam": {
            "type": "cadastre-ipam", "socket": machine.plugin_socket(), "store": machine.store(),
            "range": "10.73.0.200/24", "range_start": "10.73.0.64", "range_end": "10.73.0.127",
            "exclude": ["10.73.0.64", "10.73.0.100/32"], "gateway": "10.73.0.65",
            "routes": [{"dst": "10.74.0.0/16"}], "network_name": "tenant",
            "log_file": "/tmp/whereabouts.log", "kubernetes": {"kubeconfig": "/nonexistent"},
        },
    })
}

fn call(machine: &Machine, verb: &str, id: &str, config: &Value) -> Result<Value, Value> {
    call_plugin(verb, id, "net1", machine.folder(), config)
}

/// Returns the code and the text of the error that the CNI plugin has printed.
fn error(said: Result<Value, Value>) -> (u64, String) {
    let error = said.unwrap_err();
    (error["code"].as_u64().unwrap(), error["msg"].to_string())
}

#[tokio::test]
async fn a_network_of_whereabouts_gets_unique_addresses_of_the_pool_in_its_range() {
    let (cluster, api) = shared().await;
    let spec = json!({
        "assignment": "Manual", "addressPrefix": "Pool",
        "ipv4": {"cidrs": ["10.73.0.0/24"], "blockSize": 28, "gateway": "None"},
        "reserved": ["10.73.0.0-10.73.0.65", "10.73.0.128/25"],
    });
    pool(&api, "where", "10.73.0.0/24", spec).await;
    let mut machines = Vec::new();
    for name in ["where-1", "where-2"] {
        api.node("where", name).await.unwrap();
        let mut machine = Machine::new(&cluster.control_plane, name, &[]);
        machine.start();
        machine.ready().await;
        machines.push(machine);
    }

    // The network excludes 10.73.0.100, but the pool could assign this address. So the ADD fails.
    let first = &machines[0];
    let refused = eventually("the pool is refused", async || {
        let (code, text) = error(call(first, "ADD", "c0", &config(first)));
        anyhow::ensure!(text.contains("pool `where`"), text);
        Ok(Some((code, text)))
    })
    .await;
    assert_eq!(refused.0, 102);
    assert!(
        refused
            .1
            .contains("10.73.0.100: add these to `reserved` in the spec of IPPool where"),
        "{}",
        refused.1
    );
    publishes(&api, "where-1", Vec::new()).await;
    let reserved = ["10.73.0.0-10.73.0.65", "10.73.0.100", "10.73.0.128/25"];
    api.change_pool("where", json!({"reserved": reserved}))
        .await
        .unwrap();

    // Two nodes with the same configuration assign only allowed addresses, and no address twice.
    let allowed: Vec<IpRange> = ALLOWED
        .iter()
        .map(|it| IpRange::parse(it).unwrap())
        .collect();
    let mut all = BTreeSet::new();
    for n in 0..20 {
        for machine in &machines {
            let id = format!("c{n}");
            let config = config(machine);
            let result = eventually("the container has an address", async || {
                let said = call(machine, "ADD", &id, &config);
                said.map(Some).map_err(|error| anyhow::anyhow!("{error}"))
            })
            .await;
            let ip = &result["ips"][0];
            let address = ip["address"].as_str().unwrap();
            let (host, length) = address.split_once('/').unwrap();
            assert!(covering(&allowed, addr(host)).is_some(), "{host}");
            assert_eq!((length, &ip["gateway"]), ("24", &json!("10.73.0.65")));
            assert_eq!(result["routes"], json!([{"dst": "10.74.0.0/16"}]));
            assert_eq!(result["cniVersion"], "0.3.0");
            assert!(all.insert(host.to_owned()), "{host} was given twice");
            let mut later = config.clone();
            later["cniVersion"] = json!("1.1.0");
            later["prevResult"] = result;
            call(machine, "CHECK", &id, &later).unwrap();
            call(machine, "STATUS", "", &later).unwrap();
        }
    }

    // An ADD fails if the configuration has a field that no pool can satisfy, and on a node without an agent.
    let mut sliced = config(first);
    sliced["ipam"]["node_slice_size"] = json!("/28");
    let (code, text) = error(call(first, "ADD", "other", &sliced));
    assert!(code == 7 && text.contains("node_slice_size"), "{text}");
    let mut alone = config(first);
    alone["ipam"]["socket"] = json!(first.path("no.sock"));
    alone["ipam"]["store"] = json!(first.path("no.redb"));
    let (code, text) = error(call(first, "ADD", "other", &alone));
    assert!(code == 101 && text.contains("no agent answers"), "{text}");

    for (machine, name) in machines.iter().zip(["where-1", "where-2"]) {
        for n in 0..20 {
            call(machine, "DEL", &format!("c{n}"), &config(machine)).unwrap();
        }
        publishes(&api, name, Vec::new()).await;
    }
}
