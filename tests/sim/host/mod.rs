//! A machine with the shipped agent: its disk, its container runtime and kubelet, and the agent's process.
//!
//! | file | subject |
//! |---|---|
//! | `feeds` | what the agent's watches deliver |
//! | `process` | the agent's process: carries effects out and returns answers |
//! | `requests` | requests of plugins, and what plugins do if the agent does not answer |
//! | `kubelet` | sandboxes of pods, their ADDs and DELs |
//! | `store` | the store's file: its content and its faults |
//! | `faults` | faults of the machine |
//!
//! # What must hold
//! - No address is assigned that another sandbox has, on any machine whose Node exists.
//! - The store has the addresses of every live sandbox: they are never released.
//! - A released address cools, whichever node assigns it next. Nothing new is assigned from recalled ranges.
//! - At the end no address is leaked, and no pod waits while addresses are free.
//!
//! # Left out
//! - The store thread, sockets and their protocols, gRPC, the formats of CNI: the simulation calls the code behind
//!   them.
//! - A store is lost only while no sandbox is being set up, as nothing else knows yet of the address that it has
//!   just assigned. Stores are never damaged, full, or restored to an older state.
//! - podCIDRs of foreign allocators are used, without guarantees.
//! - Second networks, static pods, pools for some pods or namespaces only, requested addresses, GC and CHECK of
//!   CNI, files and masquerading.

mod faults;
mod feeds;
mod kubelet;
mod process;
mod requests;
mod store;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadastre_agent::machine;
use cadastre_core::{Addr, Cidr};
use cadastre_node::Now;

use super::agent::Agent;
use super::agents::Act;
use super::checks::Violation;
use super::clock::Time;
use super::memory_disk::MemoryDisk;
use super::run::Sim;

pub use kubelet::KubeletAct;
pub use process::{Landing, ProcessAct};

use feeds::Feeds;
use kubelet::Kubelet;
use process::Process;
use requests::Call;

type Verdict = Result<(), Violation>;

/// The store's file, if it exists.
type Slot = Arc<Mutex<Option<MemoryDisk>>>;

/// The state of a machine with the shipped agent, beside its name, clocks and blocks.
pub struct Host {
    slot: Slot,
    /// The agent's process if it runs, and the number of its current run.
    process: Option<Process>,
    incarnation: u32,
    /// How often the machine was booted.
    boot: u32,
    feeds: Feeds,
    kubelet: Kubelet,
    calls: BTreeMap<u64, Call>,
    count: u64,
    seed: u64,
}

impl Host {
    pub fn new(seed: u64) -> Self {
        Host {
            slot: Slot::default(),
            process: None,
            incarnation: 0,
            boot: 1,
            feeds: Feeds::default(),
            kubelet: Kubelet::default(),
            calls: BTreeMap::new(),
            count: 0,
            seed,
        }
    }

    fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    /// Since when nothing new may be assigned from a range that was usable before, by what the agent has received.
    fn ended(&self, range: &Cidr) -> Option<Time> {
        self.feeds.ended.get(range).copied()
    }

    /// Since when the agent's process runs without a pause.
    fn awake_since(&self, paused_until: Time) -> Time {
        let process = self.process.as_ref();
        process.map_or(Time::MAX / 2, |it| it.started.max(paused_until))
    }

    fn disk(&self) -> Option<MemoryDisk> {
        self.slot.lock().unwrap().clone()
    }
}

fn settings(agent: &Agent) -> machine::Settings {
    machine::Settings {
        node: agent.name.to_string(),
        publish_interval: Duration::from_secs(5),
        addresses_interval: Duration::from_secs(10),
        leak_grace: Duration::from_secs(20),
        masquerade: false,
        cni_conf: None,
        network: Some(kubelet::NETWORK.to_owned()),
    }
}

impl Sim {
    /// The addresses of a running pod.
    pub fn addresses_on_host(&self, id: usize, uid: &str) -> Box<[Addr]> {
        let addresses = self.host(id).map(|host| host.kubelet.addresses_of(uid));
        addresses.unwrap_or_default().into_iter().collect()
    }

    /// Handles an act that machines with a simulated agent have, too.
    pub fn act_of_host(&mut self, id: usize, act: &Act) {
        match act {
            Act::PodEnded(uid) => self.host_ends(id, uid),
            Act::PodStarts(uid) => {
                let mut pods = self.api.pods.live.values();
                let pod = pods.find(|it| it.uid == *uid).cloned();
                if let Some(pod) = pod {
                    self.host_runs(id, uid, &pod.name);
                }
            }
            _ => {}
        }
    }

    fn host(&self, id: usize) -> Option<&Host> {
        self.machines.agents[id].host.as_deref()
    }

    fn host_mut(&mut self, id: usize) -> Option<&mut Host> {
        self.machines.agents[id].host.as_deref_mut()
    }

    fn host_now(&self, id: usize) -> Now {
        let agent = &self.machines.agents[id];
        let boot = agent.host.as_ref().map_or(0, |host| host.boot);
        Now {
            boot: format!("boot-{boot}"),
            since_boot: agent.clocks.mono(self.now),
            wall_ms: agent.clocks.wall(self.now).as_millisecond(),
        }
    }

    /// Virtual time until the machine's clock shows `at`, at its present rate.
    fn host_until(&self, id: usize, at: Duration) -> Time {
        let when = self.machines.agents[id].clocks.when(at);
        when.saturating_sub(self.now)
    }
}
