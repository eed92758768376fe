//! Concurrent calls of cadastre-ipam and the published host-local on one folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use serde_json::Value;

use super::call::Call;
use super::plugins::Plugins;
use super::rng::Rng;

const THREADS: usize = 8;
const CALLS: usize = 60;

/// Sends ADDs and DELs from several threads. No address may be in use twice, and at the end the files must name exactly
/// the containers that still have addresses.
pub fn round(plugins: &Plugins, root: &Path, seed: u64) {
    let side = root.join(format!("crowd-{seed:x}"));
    fs::create_dir_all(&side).unwrap();
    // At any time, the threads use at most 40 addresses of each family. The IPv4 range has fewer addresses, so some
    // ADDs fail.
    let config = r#"{"cniVersion":"1.0.0","name":"net","ipam":{"type":"host-local","dataDir":"@DIR@",
        "ranges":[[{"subnet":"10.9.0.0/27"}],[{"subnet":"fd00::/120"}]]}}"#;
    let held: Mutex<BTreeMap<String, String>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (held, side) = (&held, &side);
            scope.spawn(move || {
                let rng = &mut Rng::new(seed ^ (thread as u64) << 32);
                let mut mine: Vec<String> = Vec::new();
                for n in 0..CALLS {
                    let both = [&plugins.ours, &plugins.theirs];
                    let plugin = both[rng.index(2)];
                    let call = |command: &str, id: &str| Call {
                        command: command.to_owned(),
                        id: id.to_owned(),
                        ifname: "eth0".to_owned(),
                        netns: "/nowhere/netns".to_owned(),
                        path: "/opt/cni/bin".to_owned(),
                        config: config.to_owned(),
                        ..Call::default()
                    };
                    if mine.len() > 4 || (!mine.is_empty() && rng.percent(40)) {
                        let id = mine.remove(rng.index(mine.len()));
                        // The entry is removed before the call, because another thread may get the address as soon as
                        // the call has released it.
                        held.lock().unwrap().retain(|_, holder| *holder != id);
                        let answer = call("DEL", &id).run(plugin, side);
                        assert_eq!(answer.status, Some(0), "seed {seed}: {}", answer.stdout);
                        continue;
                    }
                    let id = format!("t{thread}-{n}");
                    let answer = call("ADD", &id).run(plugin, side);
                    let result: Value = serde_json::from_str(&answer.stdout).unwrap();
                    if answer.status != Some(0) {
                        assert_eq!(result["code"], 999, "seed {seed}: {}", answer.stdout);
                        continue;
                    }
                    for ip in result["ips"].as_array().unwrap() {
                        let (ip, _) = ip["address"].as_str().unwrap().split_once('/').unwrap();
                        let before = held.lock().unwrap().insert(ip.to_owned(), id.clone());
                        assert_eq!(before, None, "seed {seed}: {ip} has two holders");
                    }
                    mine.push(id);
                }
            });
        }
    });
    check_files(&side.join("net"), &held.lock().unwrap(), seed);
    fs::remove_dir_all(&side).unwrap();
}

fn check_files(folder: &Path, held: &BTreeMap<String, String>, seed: u64) {
    let mut found = BTreeMap::new();
    for item in fs::read_dir(folder).unwrap() {
        let item = item.unwrap();
        let name = item.file_name().into_string().unwrap();
        if name != "lock" && !name.starts_with("last_reserved_ip.") {
            let content = fs::read_to_string(item.path()).unwrap();
            let holder = content.strip_suffix("\r\neth0").unwrap().to_owned();
            found.insert(name, holder);
        }
    }
    assert_eq!(found, *held, "seed {seed}");
}
