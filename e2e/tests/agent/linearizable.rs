//! Concurrent CNI calls while the agent is killed and stopped, CNI plugins are killed, and the disk is full. The history
//! of the calls must be linearizable ([`cadastre_e2e::linearizability`]).
//!
//! `MINUTES` makes the run longer, and `CADASTRE_SEED` repeats the random choices of an earlier run, but not its timing.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cadastre_e2e::linearizability::{self, Call, Outcome, Verb};
use cadastre_e2e::small_disk::SmallDisk;
use cadastre_e2e::{assets, daemon};
use rustix::process::{Signal, geteuid};
use serde_json::{Value, json};

use crate::rng::Rng;
use crate::{Machine, eventually, pool, shared};

/// Number of callers, more than the 13 addresses of the node.
const CALLERS: usize = 16;
/// How long the callers work, unless `MINUTES` is set.
const DURATION: Duration = Duration::from_secs(8);
/// Size of the disk in bytes, which is enough for the store.
const DISK: u64 = 8 << 20;

#[tokio::test]
async fn concurrent_calls_have_an_order_that_explains_every_answer() {
    let seed = variable("CADASTRE_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("CADASTRE_SEED={seed}");
    let duration = variable("MINUTES").map_or(DURATION, |it| Duration::from_secs(60 * it));
    tokio::task::spawn_blocking(|| assets::ensure(&assets::HISTORY_CHECKERS))
        .await
        .unwrap()
        .unwrap();
    let mut machine = on_a_small_disk().await;
    let site = Arc::new(Site::of(&machine));
    let end = site.start + duration;
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let site = Arc::clone(&site);
            let random = Rng::new(seed ^ ((number as u64 + 1) << 32));
            thread::spawn(move || Caller::new(number, random, site).work(end))
        })
        .collect();
    let mut random = Rng::new(seed);
    let mut faults = 0;
    while Instant::now() < end {
        pause(&mut random, 400).await;
        disturb(&mut machine, &mut random).await;
        faults += 1;
    }
    println!("{faults} faults");
    let (mut calls, mut in_use) = (Vec::new(), Vec::new());
    for caller in callers {
        let caller = caller.join().unwrap();
        calls.extend(caller.calls);
        in_use.extend(caller.in_use);
    }
    let count = |verb, outcome| {
        let of = |it: &&Call| (it.verb, it.outcome) == (verb, outcome);
        calls.iter().filter(of).count()
    };
    for verb in [Verb::Add, Verb::Check, Verb::Del] {
        let counts = [Outcome::Ok, Outcome::Refused, Outcome::Unknown].map(|it| count(verb, it));
        println!("{verb:?}: {counts:?} ok, refused, unknown");
    }
    assert!(count(Verb::Add, Outcome::Ok) >= 50);
    let evidence = Path::new(env!("CARGO_TARGET_TMPDIR"));
    println!("{}", linearizability::check(&calls, evidence).unwrap());
    // Without faults, the agent knows exactly what the callers know.
    machine.ready().await;
    in_use.sort();
    eventually("no address is leaked", async || {
        let known = machine.in_use().await;
        anyhow::ensure!(known == in_use, "{known:?} instead of {in_use:?}");
        Ok(Some(()))
    })
    .await;
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

async fn pause(random: &mut Rng, most_ms: u64) {
    tokio::time::sleep(Duration::from_millis(random.below(most_ms))).await;
}

/// Starts the agent of a node with a single block, on a disk that can be filled up. Without root, the disk is that of
/// the host, and is never full.
async fn on_a_small_disk() -> Machine {
    let (cluster, api) = shared().await;
    let terms = json!({"cooldownSeconds": 0});
    pool(&api, "order", "10.95.0.0/28", terms).await;
    api.node("order", "order-1").await.unwrap();
    let flags = ["--add-wait", "0.5"];
    let mut machine = Machine::new(&cluster.control_plane, "order-1", &flags);
    if geteuid().is_root() {
        machine.disk = Some(SmallDisk::mount(DISK).await.unwrap());
    } else {
        println!("without a full disk: mounting needs root");
    }
    machine.start();
    machine.ready().await;
    machine
}

/// Causes a fault, waits, and ends the fault.
async fn disturb(machine: &mut Machine, random: &mut Rng) {
    match random.below(8) {
        0 => {
            machine.agent().process().signal(Signal::STOP).unwrap();
            pause(random, 2500).await;
            machine.agent().process().signal(Signal::CONT).unwrap();
        }
        1 => {
            let Some(disk) = &machine.disk else { return };
            disk.fill().unwrap();
            pause(random, 1500).await;
            disk.free().unwrap();
        }
        _ => {
            machine.kill();
            pause(random, 200).await;
            machine.start();
        }
    }
    // Otherwise most calls would find no agent, and the CNI plugin would use the store itself.
    machine.ready().await;
}

/// What all callers use.
struct Site {
    plugin: PathBuf,
    ipam: Value,
    netns: PathBuf,
    start: Instant,
}

impl Site {
    fn of(machine: &Machine) -> Self {
        let netns = machine.path("netns");
        File::create(&netns).unwrap();
        Self {
            plugin: daemon::plugin().unwrap(),
            ipam: json!({
                "type": "cadastre-ipam", "socket": machine.plugin_socket(), "store": machine.store(),
            }),
            netns,
            start: Instant::now(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap()
    }

    /// Starts the CNI plugin as a runtime's main plugin does.
    fn spawn(&self, verb: Verb, container: &str, address: &str) -> Child {
        let mut config = json!({"cniVersion": "1.1.0", "name": "net", "ipam": self.ipam});
        let command = match verb {
            Verb::Add => "ADD",
            Verb::Del => "DEL",
            Verb::Check => {
                let ips = json!([{"address": format!("{address}/32")}]);
                config["prevResult"] = json!({"cniVersion": "1.1.0", "ips": ips});
                "CHECK"
            }
        };
        let mut child = Command::new(&self.plugin)
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", &self.netns)
            .env("CNI_PATH", "/nonexistent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(config.to_string().as_bytes()).unwrap();
        child
    }
}

/// A caller that runs one container after the other.
struct Caller {
    number: usize,
    random: Rng,
    site: Arc<Site>,
    calls: Vec<Call>,
    /// The container that still has an address at the end, with the address
    in_use: Option<(String, String)>,
}

impl Caller {
    fn new(number: usize, random: Rng, site: Arc<Site>) -> Self {
        Self {
            number,
            random,
            site,
            calls: Vec::new(),
            in_use: None,
        }
    }

    fn work(mut self, end: Instant) -> Self {
        let mut containers = 0;
        while Instant::now() < end {
            containers += 1;
            let container = format!("{}-{containers}", self.number);
            self.run(&container, end);
        }
        self
    }

    /// Calls the plugin for a container as runtimes do: an ADD and sometimes further ADDs, CHECKs, and DELs until one
    /// succeeds.
    fn run(&mut self, container: &str, end: Instant) {
        let mut address = None;
        for _ in 0..self.random.between(1, 3) {
            address = self.call(Verb::Add, container, "").or(address);
        }
        if let Some(address) = &address {
            for _ in 0..self.random.below(3) {
                self.call(Verb::Check, container, address);
            }
            if Instant::now() >= end
                && self
                    .calls
                    .last()
                    .is_some_and(|it| it.outcome == Outcome::Ok)
            {
                self.in_use = Some((container.to_owned(), address.clone()));
                return;
            }
        }
        while self.call(Verb::Del, container, "").is_none() {}
        if let Some(address) = address
            && self.random.one_in(3)
        {
            self.call(Verb::Check, container, &address);
            self.call(Verb::Del, container, "");
        }
    }

    /// Calls the plugin once, and kills it in one of eight cases. Returns the address if the call succeeded.
    fn call(&mut self, verb: Verb, container: &str, address: &str) -> Option<String> {
        let start = self.site.now();
        let mut child = self.site.spawn(verb, container, address);
        if self.random.one_in(8) {
            thread::sleep(Duration::from_micros(self.random.below(20_000)));
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let (outcome, assigned) = result_of(verb, &output);
        let address = assigned.unwrap_or_else(|| address.to_owned());
        self.calls.push(Call {
            verb,
            container: container.to_owned(),
            address: address.clone(),
            outcome,
            start,
            end: self.site.now(),
            caller: self.number,
        });
        (outcome == Outcome::Ok).then_some(address)
    }
}

/// Returns the outcome of a call, and the address that an ADD has assigned. The codes of errors after which nothing has
/// changed are in docs/node.md.
fn result_of(verb: Verb, output: &Output) -> (Outcome, Option<String>) {
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    if output.status.success() {
        let address = said["ips"][0]["address"].as_str();
        let address = address.and_then(|it| Some(it.split_once('/')?.0.to_owned()));
        assert_eq!(address.is_some(), verb == Verb::Add, "{said}");
        return (Outcome::Ok, address);
    }
    match said["code"].as_u64() {
        Some(100..=106) => (Outcome::Refused, None),
        _ => (Outcome::Unknown, None),
    }
}
