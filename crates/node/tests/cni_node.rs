//! Runs the CNI plugin as a process on a node's store, without an agent. Tests the results for each CNI version, and
//! the error code of every rejection.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cadastre_core::node_allocation::{
    Block, Dns, FamilyTerms, Gateway, NodeAllocation, PoolTerms, Prefix, Route,
};
use cadastre_core::{Cidr, IpRange};
use cadastre_node::{Store, clock};
use serde_json::{Value, json};

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn pool(name: &str, cidrs: &[&str]) -> PoolTerms {
    let family = |v6: bool| {
        let cidrs = cidrs.iter().filter(|it| it.contains(':') == v6);
        let cidrs: Vec<Cidr> = cidrs.map(|it| cidr(it)).collect();
        (!cidrs.is_empty()).then_some(FamilyTerms {
            cidrs,
            gateway: Gateway::FirstOfBlock,
        })
    };
    PoolTerms {
        cooldown_seconds: 0,
        ipv4: family(false),
        ipv6: family(true),
        prefix: Prefix::Block,
        ..PoolTerms::named(name)
    }
}

fn block(range: &str, pool: &str) -> Block {
    Block {
        cidr: cidr(range),
        uid: format!("uid of {range}"),
        pool: pool.to_owned(),
        draining: false,
        reserved: Vec::new(),
        on_request: Vec::new(),
    }
}

/// Returns the ranges of a node: blocks of the dual-stack pool `web`, and one of the manual pool `few`, which has one
/// address that can be assigned.
fn holding() -> NodeAllocation {
    let mut web = pool("web", &["10.7.0.0/16", "fd00:7::/64"]);
    web.routes = vec![Route {
        dst: cidr("0.0.0.0/0"),
        gw: None,
    }];
    web.dns = Dns {
        nameservers: vec!["10.96.0.10".to_owned()],
        ..Dns::default()
    };
    let mut few = pool("few", &["10.8.0.0/30"]);
    few.automatic = false;
    let mut reserved = block("10.7.0.0/26", "web");
    reserved.on_request = vec![IpRange::parse("10.7.0.2").unwrap()];
    reserved.reserved = vec![IpRange::parse("10.7.0.60").unwrap()];
    NodeAllocation {
        node_uid: "n".to_owned(),
        blocks: vec![
            reserved,
            block("fd00:7::/122", "web"),
            block("10.8.0.0/30", "few"),
        ],
        pools: vec![web, few],
    }
}

struct Lab {
    folder: PathBuf,
}

impl Lab {
    fn empty(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cni_node-{name}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Self { folder }
    }

    fn holding(name: &str, holding: &NodeAllocation) -> Self {
        let lab = Self::empty(name);
        let mut store = Store::open(&lab.store(), Duration::from_secs(1)).unwrap();
        store.set_allocation(holding, &clock::now()).unwrap();
        lab
    }

    fn store(&self) -> PathBuf {
        self.folder.join("node.redb")
    }

    /// Calls the CNI plugin with a configuration of version 1.1.0 and the fields in `more`. Returns whether it
    /// succeeded, and its answer.
    fn call(&self, command: &str, id: &str, args: &str, more: &Value) -> (bool, Value) {
        let mut config =
            json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": {}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config["ipam"]["type"] = "cadastre-ipam".into();
        config["ipam"]["store"] = self.store().to_str().into();
        config["ipam"]["socket"] = self.folder.join("none.sock").to_str().into();
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
        // If the environment is invalid, the CNI plugin exits before it reads the configuration, so the write can
        // fail.
        let written = stdin.write_all(config.to_string().as_bytes());
        if let Err(error) = written {
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

    fn held(&self) -> usize {
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
fn an_attachment_lives_without_an_agent() {
    let lab = Lab::holding("life", &holding());
    let nothing = json!({});
    assert_eq!(lab.good("STATUS", "", &nothing), Value::Null);
    let result = lab.good("ADD", "a", &nothing);
    assert_eq!(
        result,
        json!({"cniVersion": "1.1.0", "ips": [
            {"address": "10.7.0.3/26", "gateway": "10.7.0.1"},
            {"address": "fd00:7::2/122", "gateway": "fd00:7::1"}],
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"nameservers": ["10.96.0.10"]}})
    );
    assert_eq!(lab.good("ADD", "a", &nothing), result, "the same again");
    let previous = json!({"prevResult": result});
    lab.good("CHECK", "a", &previous);
    assert_eq!(lab.code("CHECK", "a", &nothing), 7, "no previous result");
    assert_eq!(lab.code("CHECK", "b", &previous), 106);
    for _ in 0..3 {
        lab.good("DEL", "a", &nothing);
    }
    assert_eq!(lab.code("CHECK", "a", &previous), 106);
    assert_eq!(lab.held(), 0);
}

#[test]
fn routes_of_the_config_come_after_those_of_the_pool() {
    let lab = Lab::holding("routes", &holding());
    let routes =
        json!({"ipam": {"routes": [{"dst": "0.0.0.0/0", "gw": "10.7.0.9"}, {"dst": "::/0"}]}});
    let result = lab.good("ADD", "a", &routes);
    assert_eq!(
        result["routes"],
        json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}])
    );
    let wrong = json!({"ipam": {"routes": [{"dst": "0.0.0.0"}]}});
    assert_eq!(lab.code("ADD", "b", &wrong), 7);
    lab.good("DEL", "a", &wrong);
    assert_eq!(lab.held(), 0);
}

#[test]
fn results_and_refusals_are_of_the_configs_version() {
    let lab = Lab::holding("versions", &holding());
    let of = |version: &str| json!({"cniVersion": version});
    let old = lab.good("ADD", "a", &of("0.3.1"));
    assert_eq!(old["ips"][1]["version"], "6");
    assert_eq!(old["cniVersion"], "0.3.1");
    let newer = lab.good("ADD", "a", &of("1.0.0"));
    assert_eq!(newer["ips"][1].get("version"), None);
    for version in ["0.2.0", "0.3.0", "1.2.0", ""] {
        let (good, error) = lab.call("ADD", "b", "", &of(version));
        assert!(!good && error["code"] == 1, "{error}");
        assert!(error["msg"].as_str().unwrap().contains("0.3.1, 0.4.0"));
    }
    let (good, error) = lab.call("STATUS", "", "", &of("1.0.0"));
    assert!(!good && error["code"] == 1 && error["cniVersion"] == "1.0.0");
    assert_eq!(lab.held(), 1);
}

#[test]
fn pools_and_addresses_are_asked_for_by_name() {
    let lab = Lab::holding("wishes", &holding());
    let few = json!({"ipam": {"pools": ["none", "few"]}});
    assert_eq!(addresses(&lab.good("ADD", "a", &few)), ["10.8.0.2/30"]);
    assert_eq!(lab.code("ADD", "b", &few), 100, "exhausted");
    let fall_back = json!({"ipam": {"pools": ["few", "web"]}});
    assert_eq!(addresses(&lab.good("ADD", "b", &fall_back)).len(), 2);
    let none = json!({"ipam": {"pools": ["none"]}});
    assert_eq!(lab.code("ADD", "c", &none), 102);
    let capability = json!({"runtimeConfig": {"ips": ["10.7.0.2/26", "fd00:7::9"]}});
    assert_eq!(
        addresses(&lab.good("ADD", "c", &capability)),
        ["10.7.0.2/26", "fd00:7::9/122"],
        "reserved ones are for those who ask"
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
        assert_eq!(lab.code("ADD", "d", &more), code, "{address}");
    }
    let other = json!({"ipam": {"addresses": ["10.7.0.40"]}});
    assert_eq!(lab.code("ADD", "c", &other), 106, "it has others");
    let (good, result) = lab.call(
        "ADD",
        "e",
        "IP=10.7.0.50;K8S_POD_NAME=p;IgnoreUnknown=1;X=y",
        &other,
    );
    assert!(good);
    assert_eq!(
        addresses(&result),
        ["10.7.0.50/26"],
        "nearer than the config's"
    );
    assert_eq!(lab.held(), 4);
}

#[test]
fn gc_keeps_what_is_listed_and_does_nothing_without_a_list() {
    let lab = Lab::holding("gc", &holding());
    for id in ["a", "b", "c"] {
        lab.good("ADD", id, &json!({}));
    }
    lab.good("ADD", "other", &json!({"name": "net2"}));
    assert_eq!(lab.code("GC", "", &json!({})), 7);
    assert_eq!(lab.held(), 4);
    let valid = json!({"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}, {"containerID": "c", "ifname": "net1"}]});
    lab.good("GC", "", &valid);
    assert_eq!(lab.held(), 2, "b, and the other network's");
}

#[test]
fn a_node_without_anything_is_not_available_and_has_nothing_to_delete() {
    let lab = Lab::empty("nothing");
    let nothing = json!({});
    assert_eq!(lab.code("STATUS", "", &nothing), 50);
    assert_eq!(lab.code("ADD", "a", &nothing), 101);
    let (_, told) = lab.call("ADD", "a", "", &nothing);
    let says = "See that `cadastre agent` runs on this node";
    assert!(told["msg"].as_str().unwrap().contains(says), "{told}");
    lab.good("DEL", "a", &nothing);
    assert!(!lab.store().exists(), "nothing is made");
    let held = Lab::holding("nothing-held", &NodeAllocation::default());
    assert_eq!(held.code("STATUS", "", &nothing), 50);
    held.good("STATUS", "", &json!({"ipam": {"pools": ["few"]}}));
    assert_eq!(held.code("ADD", "a", &nothing), 101);
    fs::write(lab.store(), "no store at all").unwrap();
    assert_eq!(lab.code("ADD", "a", &nothing), 5);
    assert_eq!(lab.code("STATUS", "", &nothing), 50);
}

#[test]
fn a_bad_request_leaves_the_store_as_it_is() {
    let lab = Lab::holding("bad", &holding());
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
        let (good, error) = lab.call("ADD", "a", "", &more);
        assert!(!good && error["code"] == code, "{more}: {error}");
    }
    for (id, args) in [
        ("../a", ""),
        ("a/b", ""),
        ("", ""),
        ("a", "X=1"),
        ("a", "IP=10.7.0.5;"),
    ] {
        let (good, error) = lab.call("ADD", id, args, &json!({}));
        assert!(!good && error["code"] == 4, "{id} {args}: {error}");
    }
    assert_eq!(lab.held(), 0);
    lab.good("ADD", "a", &json!({}));
    let (good, _) = lab.call(
        "DEL",
        "a",
        "X=;;",
        &json!({"ipam": {"pools": 7, "addresses": {}}}),
    );
    assert!(good, "a DEL minds only what it needs");
    assert_eq!(lab.held(), 0);
}
