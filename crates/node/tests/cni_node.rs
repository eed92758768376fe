//! Runs the CNI plugin as a process on a node's store, without an agent. Tests the results for each CNI version, and
//! the error code of every rejection.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{Store, clock};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Returns the ranges of a node: blocks of the dual-stack pool `web`, and one block of the manual pool `few`, of which
/// one address can be assigned.
fn allocation() -> NodeAllocation {
    serde_json::from_value(json!({
        "nodeUID": "n",
        "blocks": [
            {"cidr": "10.7.0.0/26", "uid": "b1", "pool": "web", "onRequest": ["10.7.0.2"], "reserved": ["10.7.0.60"]},
            {"cidr": "fd00:7::/122", "uid": "b2", "pool": "web"},
            {"cidr": "10.8.0.0/30", "uid": "b3", "pool": "few"},
        ],
        "pools": [
            {"name": "web", "automatic": true, "cooldownSeconds": 0, "warm": [3, 50],
             "ipv4": {"cidrs": ["10.7.0.0/16"]}, "ipv6": {"cidrs": ["fd00:7::/64"]},
             "routes": [{"dst": "0.0.0.0/0"}], "dns": {"nameservers": ["10.96.0.10"]}},
            {"name": "few", "automatic": false, "cooldownSeconds": 0, "warm": [3, 50],
             "ipv4": {"cidrs": ["10.8.0.0/30"]}},
        ],
    }))
    .unwrap()
}

/// The directory of a node for which the CNI plugin is called.
struct Node {
    folder: TempDir,
}

impl Node {
    fn without_store() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder }
    }

    fn new(allocation: &NodeAllocation) -> Self {
        let node = Self::without_store();
        let mut store = Store::open(&node.store(), Duration::from_secs(1)).unwrap();
        store.set_allocation(allocation, &clock::now()).unwrap();
        node
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("node.redb")
    }

    /// Calls the CNI plugin with a configuration of version 1.1.0 and the fields in `more`. Returns whether the call
    /// succeeded, and the plugin's answer.
    fn call(&self, command: &str, id: &str, args: &str, more: &Value) -> (bool, Value) {
        let mut config =
            json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": {}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config["ipam"]["type"] = "cadastre-ipam".into();
        config["ipam"]["store"] = self.store().to_str().into();
        config["ipam"]["socket"] = self.folder.path().join("none.sock").to_str().into();
        let mut child = Command::new(env!("CARGO_BIN_EXE_cadastre-ipam"))
            .env_clear()
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", id)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", "/nowhere/netns")
            .env("CNI_ARGS", args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // If the environment is invalid, the CNI plugin exits before it reads the configuration, and this write can
        // fail.
        if let Err(error) = stdin.write_all(config.to_string().as_bytes()) {
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        }
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.success(), answer)
    }

    fn good(&self, command: &str, id: &str, more: &Value) -> Value {
        let (good, answer) = self.call(command, id, "", more);
        assert!(good, "{answer}");
        answer
    }

    fn code(&self, command: &str, id: &str, more: &Value) -> u64 {
        let (good, answer) = self.call(command, id, "", more);
        assert!(!good, "{answer}");
        assert_eq!(answer["cniVersion"], "1.1.0");
        answer["code"].as_u64().unwrap()
    }

    fn attachments(&self) -> usize {
        let mut store = Store::open(&self.store(), Duration::from_secs(1)).unwrap();
        store.snapshot(&clock::now()).unwrap().attachments.len()
    }
}

fn addresses(result: &Value) -> Vec<&str> {
    let ips = result["ips"].as_array().unwrap();
    ips.iter()
        .map(|ip| ip["address"].as_str().unwrap())
        .collect()
}

#[test]
fn the_plugin_works_without_an_agent() {
    let node = Node::new(&allocation());
    let nothing = json!({});
    assert_eq!(node.good("STATUS", "", &nothing), Value::Null);
    let result = node.good("ADD", "a", &nothing);
    assert_eq!(
        result,
        json!({"cniVersion": "1.1.0", "ips": [
            {"address": "10.7.0.3/26", "gateway": "10.7.0.1"},
            {"address": "fd00:7::2/122", "gateway": "fd00:7::1"}],
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"nameservers": ["10.96.0.10"]}})
    );
    assert_eq!(node.good("ADD", "a", &nothing), result, "the same again");
    let previous = json!({"prevResult": result});
    node.good("CHECK", "a", &previous);
    assert_eq!(node.code("CHECK", "a", &nothing), 7, "no previous result");
    assert_eq!(node.code("CHECK", "b", &previous), 106);
    for _ in 0..3 {
        node.good("DEL", "a", &nothing);
    }
    assert_eq!(node.code("CHECK", "a", &previous), 106);
    assert_eq!(node.attachments(), 0);
}

#[test]
fn routes_of_the_config_come_after_those_of_the_pool() {
    let node = Node::new(&allocation());
    let routes =
        json!({"ipam": {"routes": [{"dst": "0.0.0.0/0", "gw": "10.7.0.9"}, {"dst": "::/0"}]}});
    let result = node.good("ADD", "a", &routes);
    assert_eq!(
        result["routes"],
        json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}])
    );
    let wrong = json!({"ipam": {"routes": [{"dst": "0.0.0.0"}]}});
    assert_eq!(node.code("ADD", "b", &wrong), 7);
    node.good("DEL", "a", &wrong);
    assert_eq!(node.attachments(), 0);
}

#[test]
fn results_and_errors_have_the_configs_version() {
    let node = Node::new(&allocation());
    let of = |version: &str| json!({"cniVersion": version});
    let old = node.good("ADD", "a", &of("0.3.1"));
    assert_eq!(old["ips"][1]["version"], "6");
    assert_eq!(old["cniVersion"], "0.3.1");
    let newer = node.good("ADD", "a", &of("1.0.0"));
    assert_eq!(newer["ips"][1].get("version"), None);
    for version in ["0.2.0", "0.3.0", "1.2.0", ""] {
        let (good, error) = node.call("ADD", "b", "", &of(version));
        assert!(!good && error["code"] == 1, "{error}");
        assert!(error["msg"].as_str().unwrap().contains("0.3.1, 0.4.0"));
    }
    let (good, error) = node.call("STATUS", "", "", &of("1.0.0"));
    assert!(!good && error["code"] == 1 && error["cniVersion"] == "1.0.0");
    assert_eq!(node.attachments(), 1);
}

#[test]
fn pools_and_addresses_are_asked_for_by_name() {
    let node = Node::new(&allocation());
    let few = json!({"ipam": {"pools": ["none", "few"]}});
    assert_eq!(addresses(&node.good("ADD", "a", &few)), ["10.8.0.2/30"]);
    assert_eq!(node.code("ADD", "b", &few), 100, "exhausted");
    let fall_back = json!({"ipam": {"pools": ["few", "web"]}});
    assert_eq!(addresses(&node.good("ADD", "b", &fall_back)).len(), 2);
    let none = json!({"ipam": {"pools": ["none"]}});
    assert_eq!(node.code("ADD", "c", &none), 102);
    let capability = json!({"runtimeConfig": {"ips": ["10.7.0.2/26", "fd00:7::9"]}});
    assert_eq!(
        addresses(&node.good("ADD", "c", &capability)),
        ["10.7.0.2/26", "fd00:7::9/122"],
        "addresses on request"
    );
    for (address, code) in [
        ("10.7.0.2", 104),
        ("10.7.0.1", 105),
        ("10.7.0.0", 105),
        ("10.7.0.60", 105),
        ("10.7.0.63", 105),
        ("10.7.1.5", 103),
        ("192.0.2.1", 103),
    ] {
        let more = json!({"args": {"cni": {"ips": [address]}}});
        assert_eq!(node.code("ADD", "d", &more), code, "{address}");
    }
    let other = json!({"ipam": {"addresses": ["10.7.0.40"]}});
    assert_eq!(
        node.code("ADD", "c", &other),
        106,
        "the attachment has other addresses"
    );
    let (good, result) = node.call(
        "ADD",
        "e",
        "IP=10.7.0.50;K8S_POD_NAME=p;IgnoreUnknown=1;X=y",
        &other,
    );
    assert!(good);
    assert_eq!(
        addresses(&result),
        ["10.7.0.50/26"],
        "CNI_ARGS takes precedence over the config"
    );
    assert_eq!(node.attachments(), 4);
}

#[test]
fn gc_keeps_valid_attachments_and_fails_without_a_list() {
    let node = Node::new(&allocation());
    for id in ["a", "b", "c"] {
        node.good("ADD", id, &json!({}));
    }
    node.good("ADD", "other", &json!({"name": "net2"}));
    assert_eq!(node.code("GC", "", &json!({})), 7);
    assert_eq!(node.attachments(), 4);
    let valid = json!({"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}, {"containerID": "c", "ifname": "net1"}]});
    node.good("GC", "", &valid);
    assert_eq!(node.attachments(), 2, "b, and the other network's");
}

#[test]
fn a_node_without_blocks_is_not_available_but_del_succeeds() {
    let node = Node::without_store();
    let nothing = json!({});
    assert_eq!(node.code("STATUS", "", &nothing), 50);
    assert_eq!(node.code("ADD", "a", &nothing), 101);
    let (_, error) = node.call("ADD", "a", "", &nothing);
    let says = "See that `cadastre agent` runs on this node";
    assert!(error["msg"].as_str().unwrap().contains(says), "{error}");
    node.good("DEL", "a", &nothing);
    assert!(!node.store().exists(), "nothing is created");
    let empty = Node::new(&NodeAllocation::default());
    assert_eq!(empty.code("STATUS", "", &nothing), 50);
    empty.good("STATUS", "", &json!({"ipam": {"pools": ["few"]}}));
    assert_eq!(empty.code("ADD", "a", &nothing), 101);
    fs::write(node.store(), "no store at all").unwrap();
    assert_eq!(node.code("ADD", "a", &nothing), 5);
    assert_eq!(node.code("STATUS", "", &nothing), 50);
}

#[test]
fn a_bad_request_leaves_the_store_as_it_is() {
    let node = Node::new(&allocation());
    for (more, code) in [
        (json!({"name": "../net"}), 7),
        (json!({"name": ""}), 7),
        (json!({"ipam": {"pools": "web"}}), 7),
        (json!({"ipam": {"addresses": ["10.7.0.300"]}}), 7),
        (
            json!({"ipam": {"pools": ["web"], "subnet": "10.0.0.0/24"}}),
            7,
        ),
        (json!({"runtimeConfig": {"ips": [1]}}), 7),
    ] {
        let (good, error) = node.call("ADD", "a", "", &more);
        assert!(!good && error["code"] == code, "{more}: {error}");
    }
    for (id, args) in [
        ("../a", ""),
        ("a/b", ""),
        ("", ""),
        ("a", "X=1"),
        ("a", "IP=10.7.0.5;"),
    ] {
        let (good, error) = node.call("ADD", id, args, &json!({}));
        assert!(!good && error["code"] == 4, "{id} {args}: {error}");
    }
    assert_eq!(node.attachments(), 0);
    node.good("ADD", "a", &json!({}));
    let (good, _) = node.call(
        "DEL",
        "a",
        "X=;;",
        &json!({"ipam": {"pools": 7, "addresses": {}}}),
    );
    assert!(good, "a DEL reads only the keys that it needs");
    assert_eq!(node.attachments(), 0);
}
