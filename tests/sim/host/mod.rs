//! A simulated host with the shipped agent: the disk, the container runtime, the kubelet, and the agent's process.
//!
//! | file | subject |
//! |---|---|
//! | `feeds` | what the agent's watches deliver |
//! | `process` | the agent's process: carries out the agent's effects and returns the answers |
//! | `requests` | requests of the CNI plugin, and what the CNI plugin does if the agent does not answer |
//! | `kubelet` | sandboxes of pods, their ADDs and DELs |
//! | `store` | the store's file: its content and its faults |
//! | `probes` | probes of addresses, and the hosts that answer |
//! | `faults` | faults of the host |
//!
//! # What must hold
//! - No address is assigned that another sandbox has, on any host whose Node exists.
//! - The store has the addresses of every live sandbox, because these are never released.
//! - A released address is not assigned before its cooldown is over, not even by another node. Nothing new is assigned
//!   from recalled ranges.
//! - If a pool requires probes, an address is assigned only after a clean probe since it was last free, and never while
//!   another host answers for it.
//! - At the end no address is leaked, and no pod waits while addresses are free.
//!
//! # Left out
//! - In some runs with pools of podCIDRs only, no node has an agent.
//! - The store thread, sockets and their protocols, gRPC, and the formats of CNI are left out: the simulation calls the
//!   code behind them.
//! - A store is lost only while no sandbox is being set up, because only the store knows an address that was just
//!   assigned. Stores are never damaged. They are never replaced by an older copy, either: docs/backup.md says that
//!   agents do not notice such a copy.
//! - The store is in memory and is lost with the power. A store on a disk is left out.
//! - podCIDRs of foreign allocators are used, but nothing is checked about their addresses.
//! - Second networks, static pods, pools for some pods or namespaces only, requested addresses, GC and CHECK of CNI,
//!   files and masquerading are left out.

mod announce;
mod faults;
mod feeds;
mod kubelet;
mod probes;
mod process;
mod requests;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadastre_agent::machine;
use cadastre_api::AllocatedBlock;
use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_core::{Addr, Cidr};
use cadastre_node::Now;

use super::clock::{Clocks, Time};
use super::memory_disk::{Fate, FileFate, MemoryDisk, MemoryFile};
use super::run::Sim;

pub use kubelet::KubeletAct;
pub use process::{AgentWrite, ProcessAct};

use feeds::Feeds;
use kubelet::Kubelet;
use process::Process;
use requests::Call;

/// The store's file; `None` if there is no file.
type Slot = Arc<Mutex<Option<MemoryDisk>>>;

/// The key of a block: the block's CIDR and the UID of its object.
pub type Key = (Cidr, ObjectUid);

pub fn key(block: &AllocatedBlock) -> Key {
    let cidr = Cidr::parse_strict(&block.cidr).unwrap();
    (cidr, block.uid.as_str().into())
}

/// A block as the host's store records it.
#[derive(Clone, Debug)]
pub struct Held {
    /// The UID of the Node for which the block was last listed.
    pub node: ObjectUid,
    /// Whether the NodeSubnet lists the block. Nothing new is assigned from a block that is not listed.
    pub listed: bool,
    /// Whether the agent has released the block. A release is final.
    pub released: bool,
}

/// A time in which writes fail, either to the disk or to the memory-backed file system of the store.
#[derive(Clone, Copy, Debug, Default)]
struct DiskTrouble {
    until: Time,
    /// Whether the disk is full. Otherwise writes and syncs fail with an I/O error
    is_full: bool,
    /// Whether writes of the store fail. If false, writes of the holdings file fail
    is_of_store: bool,
}

impl DiskTrouble {
    /// Returns what happens to a write of the holdings file at the time `now`.
    fn file_fate(self, now: Time) -> FileFate {
        if now >= self.until || self.is_of_store {
            FileFate::Lasts
        } else if self.is_full {
            FileFate::Fails
        } else {
            FileFate::FailsUnsynced
        }
    }

    /// Returns what happens to an operation of the store at time `now`. While the store cannot be written, the `nth`
    /// write and all later writes fail.
    fn fate(self, now: Time, nth: u64) -> Fate {
        if now >= self.until || !self.is_of_store {
            Fate::Lasts
        } else if self.is_full {
            Fate::Full(nth)
        } else {
            Fate::Fails(nth)
        }
    }
}

/// A simulated host. A host is not the same as a Node, because a host can register again as another Node and keep its
/// store.
pub struct Host {
    pub name: NodeName,
    /// The UID of the host's Node as the agent last received it; `None` after the agent received its deletion.
    pub node: Option<ObjectUid>,
    /// Whether the host is off, for now or for good.
    pub is_off: bool,
    /// Whether the host is off for good. If so, its addresses are not in use, even if its Node still exists.
    pub is_gone: bool,
    /// The time until which the agent hangs.
    pub paused_until: Time,
    /// The time until which the agent's watches deliver nothing.
    pub held_until: Time,
    pub clocks: Clocks,
    /// UIDs of the host's Nodes that a restore has removed. The ranges that the host uses under these Nodes count as in
    /// use.
    pub forgotten: BTreeSet<ObjectUid>,
    /// The blocks in the store.
    pub blocks: BTreeMap<Key, Held>,
    /// podCIDRs that a restore has taken from the host's Node.
    lost_pod_cidrs: Vec<Cidr>,
    /// The ranges that the store records as withdrawn.
    pub withdrawn: Vec<Cidr>,
    /// How many addresses of each block are in cooldown, according to the store.
    pub cooling: BTreeMap<Key, u64>,
    /// The block of each assigned address, according to the store.
    pub given: BTreeMap<Addr, Key>,
    /// Addresses that are free and whose last probe since they became free got no answer
    pub clean: BTreeSet<Addr>,
    /// The pools that required probes when the store was last read.
    pub probing: BTreeSet<String>,
    /// The ranges that the routing daemon announces.
    pub announced: BTreeSet<Cidr>,
    slot: Slot,
    /// The holdings file. Unlike the store, it survives a loss of power.
    file: MemoryFile,
    /// When the host lost its power, until the store is read again.
    off_since: Option<Time>,
    /// The agent's process if it runs.
    process: Option<Process>,
    incarnation: u32,
    /// Whether the API server was restored and the agent has not reported since.
    pub has_old_report: bool,
    /// Whether the store was lost and no content of a new store is known yet.
    pub is_store_lost: bool,
    /// Whether the store will be lost as soon as nothing uses it.
    store_loss_pending: bool,
    /// The present trouble of the disk, and the time at which it ends.
    disk_trouble: DiskTrouble,
    /// How often the host was booted.
    boot: u32,
    feeds: Feeds,
    kubelet: Kubelet,
    calls: BTreeMap<u64, Call>,
    count: u64,
    seed: u64,
}

impl Host {
    pub fn new(name: NodeName, seed: u64) -> Self {
        Host {
            name,
            node: None,
            is_off: false,
            is_gone: false,
            paused_until: 0,
            held_until: 0,
            clocks: Clocks::new(1_000_000),
            forgotten: BTreeSet::new(),
            blocks: BTreeMap::new(),
            lost_pod_cidrs: Vec::new(),
            withdrawn: Vec::new(),
            cooling: BTreeMap::new(),
            clean: BTreeSet::new(),
            probing: BTreeSet::new(),
            given: BTreeMap::new(),
            announced: BTreeSet::new(),
            slot: Slot::default(),
            file: MemoryFile::default(),
            off_since: None,
            process: None,
            incarnation: 0,
            has_old_report: false,
            is_store_lost: false,
            store_loss_pending: false,
            disk_trouble: DiskTrouble::default(),
            boot: 1,
            feeds: Feeds::default(),
            kubelet: Kubelet::default(),
            calls: BTreeMap::new(),
            count: 0,
            seed,
        }
    }

    /// The blocks that the host uses under the Node with this UID, except blocks that it has released.
    pub fn uses<'a>(&'a self, uid: &'a ObjectUid) -> impl Iterator<Item = (&'a Key, &'a Held)> {
        let used = move |(_, held): &(&Key, &Held)| held.node == *uid && !held.released;
        self.blocks.iter().filter(used)
    }

    /// The sandbox that has an address in the range and was set up under the Node with this UID.
    pub fn sandbox_in(&self, range: &Cidr, uid: &ObjectUid) -> Option<&str> {
        self.kubelet.sandbox_in(range, uid)
    }

    /// Whether a sandbox is being set up or a CNI plugin runs. If so, perhaps only the store knows some assigned
    /// address.
    fn is_in_use(&self) -> bool {
        self.kubelet.is_setting_up() || !self.calls.is_empty()
    }

    /// Notes podCIDRs that a restore has taken from the host's Node. Returns the pods that have addresses in them.
    pub fn lose(&mut self, lost: &[Cidr]) -> Vec<ObjectUid> {
        self.lost_pod_cidrs.extend(lost);
        self.kubelet.lose(lost)
    }

    /// Whether the store records the whole range as withdrawn, so that no address of it is assigned.
    pub fn has_withdrawn(&self, range: &Cidr) -> bool {
        self.withdrawn.iter().any(|it| it.contains(range))
    }

    fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    /// The time from which the agent may assign nothing new from the range, according to the NodeSubnet that the agent
    /// received. `None` if the agent may assign addresses of the range.
    fn ended(&self, range: &Cidr) -> Option<Time> {
        self.feeds.ended.get(range).copied()
    }

    /// The pods that the kubelet runs, or tries to run.
    pub fn pods(&self) -> impl Iterator<Item = &ObjectUid> {
        self.kubelet.pods()
    }

    /// Whether a pod should run and has no address yet.
    pub fn has_waiting_pods(&self) -> bool {
        self.kubelet.waiting().next().is_some()
    }

    /// How often the host was booted.
    pub fn boot(&self) -> u32 {
        self.boot
    }

    /// Whether the agent's process exists.
    pub fn has_agent(&self) -> bool {
        self.process.is_some()
    }

    /// Returns the time from which the agent's process has run without a pause. If no process runs, returns a time that
    /// never comes.
    fn awake_since(&self) -> Time {
        let process = self.process.as_ref();
        process.map_or(Time::MAX / 2, |it| it.started.max(self.paused_until))
    }

    fn disk(&self) -> Option<MemoryDisk> {
        self.slot.lock().unwrap().clone()
    }
}

fn settings(name: &NodeName, announces: bool) -> machine::MachineSettings {
    machine::MachineSettings {
        node: name.to_string(),
        publish_interval: Duration::from_secs(5),
        addresses_interval: Duration::from_secs(10),
        leak_grace: Duration::from_secs(20),
        masquerade: false,
        announces,
        cni_conf: None,
        network: Some(kubelet::NETWORK.to_owned()),
    }
}

impl Sim {
    pub fn host(&self, id: usize) -> &Host {
        &self.machines.hosts[id]
    }

    pub fn host_mut(&mut self, id: usize) -> &mut Host {
        &mut self.machines.hosts[id]
    }

    /// The addresses of the live sandboxes of a pod.
    pub fn addresses_on_host(&self, id: usize, uid: &ObjectUid) -> Box<[Addr]> {
        let addresses = self.host(id).kubelet.addresses_of(uid);
        addresses.into_iter().collect()
    }

    fn log_host(&mut self, id: usize, text: impl FnOnce() -> String) {
        let name = &self.machines.hosts[id].name;
        self.trace.push((self.step, self.now), Some(name), text);
    }

    fn host_now(&self, id: usize) -> Now {
        let host = self.host(id);
        Now {
            boot: format!("boot-{}", host.boot),
            since_boot: host.clocks.mono(self.now),
            wall_ms: host.clocks.wall(self.now).as_millisecond(),
        }
    }

    /// Returns how long it takes, in virtual time, until the host's clock shows `at`, at the clock's present rate.
    fn host_until(&self, id: usize, at: Duration) -> Time {
        let when = self.host(id).clocks.when(at);
        when.saturating_sub(self.now)
    }
}
