//! A machine with the shipped agent: its disk, its container runtime and kubelet, and the agent's process.
//!
//! | file | subject |
//! |---|---|
//! | `feeds` | what the agent's watches bring |
//! | `process` | the agent's process: effects out, answers in |
//! | `requests` | what plugins ask it, and do themselves where it does not answer |
//! | `kubelet` | sandboxes of pods, their ADDs and DELs |
//! | `store` | the file: what is in it, and what befalls it |
//! | `faults` | what befalls the machine |
//!
//! # What must hold
//! - No address is given that another sandbox has, on any machine whose Node lives.
//! - Who runs with an address has it in the store: it is never freed.
//! - What was freed cools, whichever node gives it next. Ranges that were recalled give nothing new.
//! - In the end nothing is leaked, and no pod waits where addresses are.
//!
//! # Left out
//! - The keeper's thread, sockets and their protocols, gRPC, the CNI's own formats: the simulation calls what lies behind them.
//! - A store is lost only while no sandbox is set up: what was answered a moment before is told nobody yet. None is
//!   damaged, full, or put back to an older state.
//! - podCIDRs that others than our controllers gave are served, and nothing is promised of them.
//! - Second networks, static pods, pools for some pods or namespaces only, addresses that are asked for, the CNI's GC
//!   and CHECK, files and masquerading.

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

/// Where the file of the store is, if it is there.
type Slot = Arc<Mutex<Option<MemoryDisk>>>;

/// What there is of a machine beside what every agent has.
pub struct Host {
    slot: Slot,
    /// The agent's process, if it runs, and which run of it that is.
    process: Option<Process>,
    incarnation: u32,
    /// How often the machine was started.
    boot: u32,
    feeds: Feeds,
    kubelet: Kubelet,
    /// Plugins at work.
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

    /// Since when a range is to give nothing new, if it gave before, by what the agent has heard.
    fn ended(&self, range: &Cidr) -> Option<Time> {
        self.feeds.ended.get(range).copied()
    }

    /// Since when the agent's process is at work.
    fn awake_since(&self, paused_until: Time) -> Time {
        let process = self.process.as_ref();
        process.map_or(Time::MAX / 2, |it| it.started.max(paused_until))
    }

    fn disk(&self) -> Option<MemoryDisk> {
        self.slot.lock().unwrap().clone()
    }
}

/// What its agent is set to.
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
    /// The addresses of a pod that runs.
    pub fn addresses_on_host(&self, id: usize, uid: &str) -> Box<[Addr]> {
        let addresses = self.host(id).map(|host| host.kubelet.addresses_of(uid));
        addresses.unwrap_or_default().into_iter().collect()
    }

    /// What comes to a machine with the shipped agent as it does to one with a played one.
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

    /// The clocks of a machine.
    fn host_now(&self, id: usize) -> Now {
        let agent = &self.machines.agents[id];
        let boot = agent.host.as_ref().map_or(0, |host| host.boot);
        Now {
            boot: format!("boot-{boot}"),
            since_boot: agent.clocks.mono(self.now),
            wall_ms: agent.clocks.wall(self.now).as_millisecond(),
        }
    }

    /// Virtual time until its clock shows that, if it goes on as it does.
    fn host_until(&self, id: usize, at: Duration) -> Time {
        let when = self.machines.agents[id].clocks.when(at);
        when.saturating_sub(self.now)
    }
}
