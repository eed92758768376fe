//! Concurrent CNI calls while the agent is killed and stopped, CNI plugins are killed, and the disk is full. The history
//! of the calls must be linearizable ([`cadastre_e2e::linearizability`]).
//!
//! `MINUTES` makes the run longer, and `CADASTRE_SEED` repeats the random choices of an earlier run, but not its timing.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use cadastre_e2e::cni_callers::{Callers, Kills, Network};
use cadastre_e2e::linearizability::{self, Call, Outcome, Verb};
use cadastre_e2e::small_disk::SmallDisk;
use cadastre_e2e::{assets, daemon};
use fastrand::Rng;
use rustix::process::{Signal, geteuid};
use serde_json::json;

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
    let end = Instant::now() + duration;
    let callers = Callers::start(&network(&machine), CALLERS, seed, duration);
    let mut random = Rng::with_seed(seed);
    let mut faults = 0;
    while Instant::now() < end {
        pause(&mut random, 400).await;
        disturb(&mut machine, &mut random).await;
        faults += 1;
    }
    println!("{faults} faults");
    let record = tokio::task::spawn_blocking(|| callers.join())
        .await
        .unwrap();
    let record = record.unwrap();
    let calls = record.calls;
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
    eventually("no address is leaked", async || {
        let known = machine.in_use().await;
        let expected = &record.in_use;
        anyhow::ensure!(known == *expected, "{known:?} instead of {expected:?}");
        Ok(Some(()))
    })
    .await;
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

async fn pause(random: &mut Rng, most_ms: u64) {
    tokio::time::sleep(Duration::from_millis(random.u64(..most_ms))).await;
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

fn network(machine: &Machine) -> Network {
    let netns = machine.path("netns");
    File::create(&netns).unwrap();
    let (socket, store) = (machine.plugin_socket(), machine.store());
    Network {
        plugin: daemon::plugin().unwrap(),
        ipam: json!({"type": "cadastre-ipam", "socket": socket, "store": store}),
        netns,
        with_pods: false,
        with_checks: true,
        kills: Kills::default(),
    }
}

/// Causes a fault, waits, and ends the fault.
async fn disturb(machine: &mut Machine, random: &mut Rng) {
    match random.u32(..8) {
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
