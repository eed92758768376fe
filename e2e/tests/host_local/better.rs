//! Deliberate differences between cadastre-ipam and host-local.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cadastre_e2e::cni_callers::{Callers, Kills, Network};
use cadastre_e2e::linearizability::{Outcome, Verb};
use cadastre_e2e::scratch::Scratch;
use serde_json::{Value, json};

use super::call::{Answer, Call, DIR, tree};
use super::plugins::Plugins;

struct Lab {
    scratch: Scratch,
    plugins: Plugins,
}

impl Lab {
    fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let plugins = Plugins::new(scratch.path());
        fs::create_dir(scratch.path().join("side")).unwrap();
        Self { scratch, plugins }
    }

    fn side(&self) -> PathBuf {
        self.scratch.path().join("side")
    }

    fn run_by(&self, plugin: &Path, command: &str, id: &str, more: &Value) -> Answer {
        Self::call(command, id, more).run(plugin, &self.side())
    }

    fn run(&self, command: &str, id: &str, more: &Value) -> Answer {
        self.run_by(&self.plugins.ours, command, id, more)
    }

    fn call(command: &str, id: &str, more: &Value) -> Call {
        let mut config = json!({"cniVersion": "1.1.0", "name": "net",
            "ipam": {"type": "host-local", "dataDir": DIR, "subnet": "10.9.0.0/29"}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        Call {
            command: command.to_owned(),
            id: id.to_owned(),
            ifname: "eth0".to_owned(),
            netns: "/nowhere/netns".to_owned(),
            path: "/opt/cni/bin".to_owned(),
            config: config.to_string(),
            ..Call::default()
        }
    }

    fn addresses(&self) -> Vec<String> {
        let folder = fs::read_dir(self.side().join("net")).unwrap();
        let names = folder.map(|item| item.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.contains("10.9")).collect();
        names.sort();
        names
    }
}

fn code(answer: &Answer) -> u64 {
    answer.code().unwrap()
}

#[test]
fn gc_takes_back_what_is_not_valid_and_nothing_without_a_list() {
    let lab = Lab::new();
    for id in ["a", "b", "c"] {
        assert_eq!(lab.run("ADD", id, &json!({})).status, Some(0));
    }
    fs::write(lab.side().join("net/10.9.0.6"), "").unwrap();
    for list in [json!({}), json!({"cni.dev/valid-attachments": null})] {
        assert_eq!(code(&lab.run("GC", "", &list)), 7);
        assert_eq!(lab.addresses().len(), 4);
    }
    let valid = json!({"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}]});
    assert_eq!(lab.run("GC", "", &valid).status, Some(0));
    assert_eq!(lab.addresses(), ["10.9.0.3"]);
    let none = json!({"cni.dev/valid-attachments": []});
    assert_eq!(lab.run("GC", "", &none).status, Some(0));
    assert!(lab.addresses().is_empty());
}

#[test]
fn check_compares_with_the_previous_result() {
    let lab = Lab::new();
    let added = lab.run("ADD", "a", &json!({}));
    let result: Value = serde_json::from_str(&added.stdout).unwrap();
    let good = json!({"prevResult": result});
    assert_eq!(lab.run("CHECK", "a", &good).status, Some(0));
    let other =
        json!({"prevResult": {"ips": [{"address": "10.9.0.4/29"}, {"address": "192.0.2.1/24"}]}});
    let answer = lab.run("CHECK", "a", &other);
    assert_eq!(code(&answer), 999);
    assert!(answer.stdout.contains("10.9.0.4"), "{}", answer.stdout);
    assert_eq!(
        lab.run_by(&lab.plugins.theirs, "CHECK", "a", &other).status,
        Some(0)
    );
}

#[test]
fn an_add_into_the_plugins_own_namespace_gives_nothing() {
    let lab = Lab::new();
    let mut call = Lab::call("ADD", "a", &json!({}));
    call.netns = "/proc/self/ns/net".to_owned();
    assert_eq!(code(&call.run(&lab.plugins.ours, &lab.side())), 8);
    assert!(tree(&lab.side()).is_empty(), "not even a folder");
    let theirs = call.run(&lab.plugins.theirs, &lab.side());
    assert_eq!(theirs.status, Some(1));
    assert_eq!(lab.addresses(), ["10.9.0.2"], "theirs keeps it");
    call.command = "DEL".to_owned();
    assert_eq!(
        code(&call.run(&lab.plugins.ours, &lab.side())),
        8,
        "as theirs"
    );
    assert!(lab.addresses().is_empty());
}

#[test]
fn status_tells_what_keeps_every_add_from_working_and_nothing_else() {
    let lab = Lab::new();
    assert_eq!(lab.run("STATUS", "", &json!({})).status, Some(0));
    let broken = json!({"ipam": {"type": "host-local", "subnet": "10.9.0.1/24"}});
    assert_eq!(code(&lab.run("STATUS", "", &broken)), 50);
    // A configuration without ranges is valid, because the runtime may pass ranges with each ADD, as a capability.
    let late = json!({"ipam": {"type": "host-local"}});
    assert_eq!(lab.run("STATUS", "", &late).status, Some(0));
    for id in ["a", "b", "c", "d", "e"] {
        assert_eq!(lab.run("ADD", id, &json!({})).status, Some(0));
    }
    assert_eq!(code(&lab.run("ADD", "f", &json!({}))), 999);
    assert_eq!(
        lab.run("STATUS", "", &json!({})).status,
        Some(0),
        "all used is no fault"
    );
}

#[test]
fn a_range_that_starts_at_the_broadcast_address_does_not_run_into_the_next_network() {
    let lab = Lab::new();
    let ipam = json!({"ipam": {"type": "host-local", "dataDir": DIR, "subnet": "10.9.0.0/29", "rangeStart": "10.9.0.7"}});
    assert_eq!(lab.run("ADD", "a", &ipam).status, Some(0));
    assert_eq!(code(&lab.run("ADD", "b", &ipam)), 999);
    assert_eq!(
        lab.run_by(&lab.plugins.theirs, "ADD", "b", &ipam).status,
        Some(0)
    );
    assert_eq!(lab.addresses(), ["10.9.0.7", "10.9.0.8"], "theirs does");
}

#[test]
fn ranges_make_it_host_local_under_its_own_name_too() {
    let lab = Lab::new();
    let own = &lab.plugins.own_name;
    assert_eq!(lab.run_by(own, "ADD", "a", &json!({})).status, Some(0));
    assert_eq!(lab.addresses(), ["10.9.0.2"]);
    let both = json!({"ipam": {"type": "cadastre-ipam", "subnet": "10.9.0.0/29", "pools": ["a"]}});
    assert_eq!(code(&lab.run_by(own, "ADD", "b", &both)), 7);
}

#[test]
fn a_file_written_over_in_place_is_found_as_host_local_finds_it() {
    let lab = Lab::new();
    for plugin in [&lab.plugins.ours, &lab.plugins.theirs] {
        assert_eq!(lab.run_by(plugin, "ADD", "a", &json!({})).status, Some(0));
        let [name] = &lab.addresses()[..] else {
            panic!("{:?}", lab.addresses())
        };
        // The first releases of host-local wrote this format, which has only the container id. Both plugins must find
        // the file by the container id.
        fs::write(lab.side().join("net").join(name), "a").unwrap();
        let again = lab.run_by(plugin, "ADD", "a", &json!({}));
        assert_eq!(code(&again), 999);
        assert_eq!(lab.run_by(plugin, "DEL", "a", &json!({})).status, Some(0));
        assert!(lab.addresses().is_empty());
    }
}

#[test]
fn a_plugin_killed_at_any_moment_leaves_no_address_behind() {
    let lab = Lab::new();
    let netns = lab.scratch.path().join("netns");
    fs::write(&netns, "").unwrap();
    let network = Network {
        plugin: lab.plugins.ours.clone(),
        ipam: json!({"type": "host-local", "dataDir": lab.side(), "subnet": "10.9.0.0/29"}),
        netns,
        with_pods: false,
        with_checks: false,
        kills: Kills {
            one_in: 2,
            within: Duration::from_millis(4),
        },
    };
    let seed = crate::fresh_seed();
    println!("CADASTRE_SEED={seed}");
    let record = Callers::start(&network, 4, seed, Duration::from_secs(4)).join();
    for (container, _) in record.unwrap().in_use {
        let (outcome, _) = network.call(Verb::Del, &container, "").unwrap();
        assert_eq!(outcome, Outcome::Ok);
    }
    assert_eq!(lab.addresses(), [""; 0]);
}

#[test]
fn nothing_is_written_through_a_symbolic_link() {
    let lab = Lab::new();
    let victim = lab.scratch.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    assert_eq!(lab.run("ADD", "a", &json!({})).status, Some(0));
    let last = lab.side().join("net/last_reserved_ip.0");
    fs::remove_file(&last).unwrap();
    std::os::unix::fs::symlink(&victim, &last).unwrap();
    let answer = lab.run("ADD", "b", &json!({}));
    assert_eq!(code(&answer), 999);
    assert!(
        answer.stdout.contains("it is a symbolic link"),
        "{}",
        answer.stdout
    );
    assert_eq!(fs::read(&victim).unwrap(), b"kept");
    assert_eq!(lab.addresses(), ["10.9.0.2"]);
    assert_eq!(
        lab.run_by(&lab.plugins.theirs, "ADD", "b", &json!({}))
            .status,
        Some(0)
    );
    assert_ne!(fs::read(&victim).unwrap(), b"kept", "theirs writes");
}
