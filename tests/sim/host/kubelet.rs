//! The kubelet and the container runtime of a host: sandboxes of its pods.
//!
//! An ADD sets up a sandbox. If the ADD fails, the sandbox is torn down and another one is created. When the pod ends
//! or needs another sandbox, the sandbox's processes are killed. The DEL then comes late, more than once, or never.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_agent::cri::Sandbox as Listed;
use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::Text;
use cadastre_core::node_allocation::{is_claim, pool_of_claim};
use cadastre_core::{Addr, Cidr};
use cadastre_node::{Add, Attachment, Op, OpError, OpOutcome, PodRef, PoolCount, Snapshot};

use super::Key;
use super::requests::{Call, outline};
use crate::checks::{DUPLICATE, Verdict, wrong};
use crate::clock::{MS, SECOND, Time};
use crate::ipam_claims::INTERFACE;
use crate::run::{Due, Sim};

/// An agent must assign nothing from a range once it has known for this long that the range may not be used any more.
const HEEDED: Time = 30 * SECOND;

/// The name of the CNI network.
pub const NETWORK: &str = "pods";

/// Something that the kubelet or a CNI plugin does. Acts from before a reboot are dropped.
pub enum KubeletAct {
    /// Creates a sandbox for a pod that needs one.
    Start(ObjectUid),
    /// A plugin gets the agent's answer.
    Answered(u64, Box<Result<OpOutcome, OpError>>),
    /// A plugin gives up waiting for the agent.
    Patience(u64),
    /// A plugin works on the store itself.
    Alone(u64),
    /// A plugin tries to reach the agent again.
    Look(u64),
    Del(String),
    /// Makes the runtime forget a sandbox.
    Remove(String),
}

struct Sandbox {
    pod: PodRef,
    addresses: BTreeSet<Addr>,
    /// Whether the sandbox's processes run or are being started
    is_alive: bool,
    has_netns: bool,
    /// Whether the ADD of the sandbox has succeeded.
    is_up: bool,
    /// The sandbox's addresses in podCIDRs of a foreign allocator. Nothing is guaranteed for these.
    foreign: BTreeSet<Addr>,
    /// The UID of the host's Node when the sandbox was set up. Nothing is guaranteed for a sandbox that outlives this
    /// Node.
    node: Option<ObjectUid>,
}

#[derive(Default)]
pub struct Kubelet {
    sandboxes: BTreeMap<String, Sandbox>,
    /// The pods that should run, by UID.
    pods: BTreeMap<ObjectUid, PodRef>,
    count: u64,
}

fn netns(container: &str) -> String {
    format!("/run/netns/{container}")
}

fn attachment(container: &str) -> Attachment {
    Attachment {
        network: NETWORK.to_owned(),
        container_id: container.to_owned(),
        ifname: if container.starts_with('n') {
            INTERFACE.to_owned()
        } else {
            "eth0".to_owned()
        },
    }
}

impl Kubelet {
    /// The ids of all sandboxes that the runtime knows.
    pub fn containers(&self) -> BTreeSet<String> {
        self.sandboxes.keys().cloned().collect()
    }

    /// All sandboxes, as the runtime lists them.
    pub fn sandboxes(&self) -> Vec<Listed> {
        let listed = |(id, it): (&String, &Sandbox)| {
            let addresses = it.addresses.iter().copied().filter(|_| it.is_alive);
            Listed {
                id: id.clone(),
                pod: it.pod.clone(),
                addresses: addresses.collect(),
            }
        };
        self.sandboxes.iter().map(listed).collect()
    }

    /// Whether a network namespace exists at the path.
    pub fn has_netns(&self, path: &str) -> bool {
        let mut all = self.sandboxes.iter();
        all.any(|(id, it)| it.has_netns && netns(id) == path)
    }

    /// Whether a sandbox is being set up, so that the runtime does not know its addresses yet.
    pub fn is_setting_up(&self) -> bool {
        self.sandboxes.values().any(|it| it.is_alive && !it.is_up)
    }

    /// The addresses of a pod's live sandboxes.
    pub fn addresses_of(&self, uid: &str) -> BTreeSet<Addr> {
        let all = self.sandboxes.values();
        let of_pod = all.filter(|it| it.pod.uid == uid && it.is_alive);
        of_pod.flat_map(|it| it.addresses.iter().copied()).collect()
    }

    /// Returns the id of the live sandbox that has the address and was set up under the Node with the UID `node`.
    pub fn holder(&self, addr: Addr, node: &ObjectUid) -> Option<&str> {
        self.sandbox_in(&Cidr::host(addr), node)
    }

    /// Returns the UID of the sandbox's pod.
    pub fn pod_of(&self, container: &str) -> Option<ObjectUid> {
        let sandbox = self.sandboxes.get(container)?;
        Some(sandbox.pod.uid.as_str().into())
    }

    /// The live sandbox that has an address in the range and was set up under the Node with this UID.
    pub(super) fn sandbox_in(&self, range: &Cidr, node: &ObjectUid) -> Option<&str> {
        let has = |it: &Sandbox| {
            let mut own = it.addresses.difference(&it.foreign);
            it.is_alive
                && it.node.as_ref() == Some(node)
                && own.any(|addr| range.contains_addr(*addr))
        };
        let mut all = self.sandboxes.iter();
        all.find(|(_, it)| has(it)).map(|(id, _)| id.as_str())
    }

    /// Notes that nothing is guaranteed for addresses in these ranges. Returns the pods that have such addresses.
    pub fn lose(&mut self, ranges: &[Cidr]) -> Vec<ObjectUid> {
        let mut pods = Vec::new();
        for sandbox in self.sandboxes.values_mut() {
            let is_lost = |it: &&Addr| ranges.iter().any(|range| range.contains_addr(**it));
            let before = sandbox.foreign.len();
            sandbox
                .foreign
                .extend(sandbox.addresses.iter().filter(is_lost));
            if sandbox.foreign.len() > before {
                pods.push(sandbox.pod.uid.as_str().into());
            }
        }
        pods
    }

    /// Pods that should run.
    pub fn pods(&self) -> impl Iterator<Item = &ObjectUid> {
        self.pods.keys()
    }

    /// Pods that should run and have no address yet.
    pub fn waiting(&self) -> impl Iterator<Item = &PodRef> {
        let pods = self.pods.values();
        pods.filter(|pod| self.addresses_of(&pod.uid).is_empty())
    }

    /// Ends all processes and removes all network namespaces, as a loss of power does.
    pub fn power_off(&mut self) {
        for it in self.sandboxes.values_mut() {
            (it.is_alive, it.has_netns) = (false, false);
        }
    }
}

impl Sim {
    /// Makes the kubelet start a pod that is bound to its Node.
    pub fn host_runs(&mut self, id: usize, uid: &ObjectUid, name: &Text) {
        let (namespace, name) = name.split_once('/').unwrap();
        let pod = PodRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_string(),
        };
        let lag = self.rng.stretch(MS, SECOND);
        let host = self.host_mut(id);
        host.kubelet.pods.insert(uid.clone(), pod);
        self.kubelet_due(id, lag, KubeletAct::Start(uid.clone()));
    }

    pub fn host_ends(&mut self, id: usize, uid: &ObjectUid) {
        self.machines.last_end = self.now;
        let host = self.host_mut(id);
        host.kubelet.pods.remove(uid);
        let own = host.kubelet.sandboxes.iter();
        let own = own.filter(|(_, it)| *it.pod.uid == **uid && it.is_alive);
        let own: Vec<String> = own.map(|(id, _)| id.clone()).collect();
        for container in own {
            self.kill_sandbox(id, &container);
        }
    }

    /// Kills a sandbox's processes and schedules the sandbox's DEL, which may be lost.
    fn kill_sandbox(&mut self, id: usize, container: &str) {
        let is_lost = self.has_faults && self.rng.chance(500);
        let lag = if self.has_faults && self.rng.chance(1_000) {
            self.rng.stretch(SECOND, 60 * SECOND)
        } else {
            self.rng.stretch(MS, SECOND)
        };
        let host = self.host_mut(id);
        if let Some(sandbox) = host.kubelet.sandboxes.get_mut(container) {
            sandbox.is_alive = false;
        }
        let act = if is_lost {
            KubeletAct::Remove(container.to_owned())
        } else {
            KubeletAct::Del(container.to_owned())
        };
        self.kubelet_due(id, lag, act);
    }

    pub fn kubelet_acts(&mut self, id: usize, boot: u32, act: KubeletAct) -> Verdict {
        if self.host(id).boot != boot || self.host(id).is_off {
            return Ok(());
        }
        match act {
            KubeletAct::Start(uid) => self.start_sandbox(id, &uid),
            KubeletAct::Answered(number, result) => {
                let call = self.host_mut(id).calls.get_mut(&number);
                if call.is_some_and(Call::stop_listening) {
                    self.answered(id, number, *result)?;
                    self.lose_pending_store(id);
                }
            }
            KubeletAct::Patience(number) => self.plugin_gives_up_on_agent(id, number),
            KubeletAct::Alone(number) => return self.plugin_alone(id, number),
            KubeletAct::Look(number) => self.look_for_agent(id, number),
            KubeletAct::Del(container) => {
                self.machines.last_end = self.now;
                self.call_plugin(id, Op::Del(attachment(&container)));
            }
            KubeletAct::Remove(container) => {
                self.machines.last_end = self.now;
                self.host_mut(id).kubelet.sandboxes.remove(&container);
            }
        }
        Ok(())
    }

    fn start_sandbox(&mut self, id: usize, uid: &ObjectUid) {
        let is_of_interface = self.migrations.is_of_interface(uid);
        let host = self.host_mut(id);
        let kubelet = &mut host.kubelet;
        let Some(pod) = kubelet.pods.get(uid).cloned() else {
            return;
        };
        let mut own = kubelet.sandboxes.values();
        if own.any(|it| it.pod.uid == **uid && it.is_alive) {
            return;
        }
        kubelet.count += 1;
        // The name of a container shows which interface its pod has.
        let kind = if is_of_interface { 'n' } else { 'c' };
        let container = format!("{kind}{}-{}", kubelet.count, pod.uid);
        let sandbox = Sandbox {
            pod: pod.clone(),
            addresses: BTreeSet::new(),
            is_alive: true,
            has_netns: true,
            is_up: false,
            foreign: BTreeSet::new(),
            node: None,
        };
        kubelet.sandboxes.insert(container.clone(), sandbox);
        let addresses = self.claims.requested_by_cni(uid);
        let add = Add {
            attachment: attachment(&container),
            netns: netns(&container),
            pod: Some(pod),
            pools: Vec::new(),
            addresses,
            decided: false,
            ..Add::default()
        };
        self.call_plugin(id, Op::Add(add));
    }

    /// Handles the result that a CNI plugin returns to the runtime.
    pub(super) fn answered(
        &mut self,
        id: usize,
        number: u64,
        result: Result<OpOutcome, OpError>,
    ) -> Verdict {
        let host = self.host_mut(id);
        let Some(call) = host.calls.remove(&number) else {
            return Ok(());
        };
        self.log_host(id, || {
            let what = match &result {
                Ok(OpOutcome::Assigned(given)) => {
                    let all = given.addresses.iter().map(|it| it.address.to_string());
                    all.collect::<Vec<_>>().join(" ")
                }
                Ok(OpOutcome::Done) => "done".to_owned(),
                Err(refusal) => refusal.text.clone(),
            };
            format!("{}: {what}", outline(&call.op))
        });
        match (call.op, result) {
            (Op::Add(add), Ok(OpOutcome::Assigned(given))) => self.sandbox_is_up(id, &add, &given),
            (Op::Add(add), _) => {
                let container = add.attachment.container_id;
                self.kill_sandbox(id, &container);
                if let Some(pod) = add.pod {
                    let pause = self.rng.between(5, 60) * SECOND;
                    let uid = pod.uid.as_str().into();
                    self.kubelet_due(id, pause, KubeletAct::Start(uid));
                }
                Ok(())
            }
            (Op::Del(attachment), result) => {
                let container = attachment.container_id;
                let is_done = result.is_ok();
                let again = if is_done {
                    let lag = self.rng.stretch(MS, SECOND);
                    self.kubelet_due(id, lag, KubeletAct::Remove(container.clone()));
                    (self.has_faults && self.rng.chance(1_500)).then_some((100 * MS, 20 * SECOND))
                } else {
                    Some((5 * SECOND, 30 * SECOND))
                };
                if let Some((low, high)) = again {
                    let pause = self.rng.stretch(low, high);
                    self.kubelet_due(id, pause, KubeletAct::Del(container));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn sandbox_is_up(
        &mut self,
        id: usize,
        add: &Add,
        given: &cadastre_node::AddressAssignment,
    ) -> Verdict {
        let container = &add.attachment.container_id;
        let uid: ObjectUid = add.pod.as_ref().map_or("", |pod| &pod.uid).into();
        let is_outlived = self.is_outlived(id);
        let node = self.machines.live_node(id, &self.api);
        let host = self.host_mut(id);
        // If the runtime has already removed the sandbox, nothing uses its addresses, so nothing is checked.
        let Some(sandbox) = host.kubelet.sandboxes.get_mut(container) else {
            return Ok(());
        };
        if !sandbox.is_alive {
            return Ok(());
        }
        sandbox.is_up = true;
        // Nothing is promised for addresses that are assigned for a deleted Node, because the Node's ranges may be
        // another node's by now.
        sandbox.node = node.filter(|_| !is_outlived);
        self.checks.tally.given += 1;
        if is_outlived {
            self.checks.given_too_late.insert(uid.clone());
        }
        for it in &given.addresses {
            let blocks = self.machines.hosts[id].blocks.keys();
            let mut blocks = blocks.filter(|(cidr, _)| *cidr == it.block);
            let key: Key = blocks.next().cloned().unwrap_or((it.block, "".into()));
            let is_foreign = self.is_foreign(id, it.block);
            if is_foreign {
                self.checks.given_too_late.insert(uid.clone());
            } else {
                self.judge(self.check_given(id, &uid, it.address, &key))?;
                let verdict = self.check_unshared(id, container, it.address);
                self.judge(verdict)?;
                let verdict = self.check_cooled(id, &uid, it.address);
                self.judge(verdict)?;
                let verdict = self.check_givable(id, it.block);
                self.judge(verdict)?;
                self.judge(self.check_not_withdrawn(id, it.address, it.block))?;
                let verdict = self.check_claimed(id, &uid, it);
                self.judge(verdict)?;
                self.claims.note_given(&uid, it.address);
            }
            let kubelet = &mut self.host_mut(id).kubelet;
            if let Some(sandbox) = kubelet.sandboxes.get_mut(container) {
                sandbox.addresses.insert(it.address);
                if is_foreign {
                    sandbox.foreign.insert(it.address);
                }
            }
        }
        let lag = self.rng.stretch(20 * MS, 20 * SECOND);
        self.after(lag, Due::PodReports(uid));
        Ok(())
    }

    /// Whether the range is a podCIDR of a foreign allocator, or one that a restore has taken from the Node.
    fn is_foreign(&self, id: usize, range: Cidr) -> bool {
        let agent = &self.machines.hosts[id];
        let node = self.api.nodes.get(&agent.name);
        let has = node.is_some_and(|it| it.pod_cidrs.contains(&range));
        if agent.lost_pod_cidrs.contains(&range) && !has {
            return true;
        }
        let is_block = agent.blocks.keys().any(|(cidr, _)| *cidr == range);
        let node = agent.node.clone().unwrap_or_else(|| "".into());
        !is_block && !self.checks.ours.contains(&node)
    }

    /// Checks that no other live sandbox has the address, on any host whose Node exists.
    fn check_unshared(&self, id: usize, container: &str, addr: Addr) -> Verdict {
        if self.is_without_node(id) {
            return Ok(());
        }
        let node = |id: usize| self.machines.live_node(id, &self.api);
        for (other, host) in self.machines.hosts.iter().enumerate() {
            let node = node(other).filter(|_| !host.is_off);
            let Some(node) = node else { continue };
            let holder = host.kubelet.holder(addr, &node);
            let is_two = |it: &&str| {
                (other != id || *it != container)
                    && !self.is_migration((id, container), (other, it))
            };
            if let Some(theirs) = holder.filter(is_two) {
                let name = &self.machines.hosts[id].name;
                let text = format!(
                    "{addr} goes to sandbox {container} on {name}, and {theirs} on {} has it",
                    host.name
                );
                let names = [name.clone(), host.name.clone()];
                return wrong(DUPLICATE, text, names);
            }
        }
        Ok(())
    }

    /// Whether the sandbox of a pod may have the address that another sandbox has, because both pods belong to the same
    /// virtual machine.
    fn is_migration(&self, (id, container): (usize, &str), (other, theirs): (usize, &str)) -> bool {
        let pod = |id: usize, container: &str| self.machines.hosts[id].kubelet.pod_of(container);
        let pods = pod(id, container).zip(pod(other, theirs));
        pods.is_some_and(|(pod, their)| id != other && self.migrations.are_one(&pod, &their))
    }

    /// Checks that the address is not cooling any more, whichever node released the address.
    fn check_cooled(&self, id: usize, pod: &ObjectUid, addr: Addr) -> Verdict {
        let Some((of, node, until)) = self.checks.cooling.get(&addr) else {
            return Ok(());
        };
        if self.is_without_node(id) {
            return Ok(());
        }
        // A pod gets the address of its claim at once, and so does a pod that asks for the address of its earlier
        // sandbox. Unit tests cover the wait after the deletion of a claim.
        if self.claims.ever_had(addr) || self.claims.asks_again(pod, addr) {
            return Ok(());
        }
        let (of, until) = (*of, *until);
        // Addresses of a dead node are quarantined instead of cooling. The quarantine may be shorter than the cooldown.
        let lives = self.machines.live_node(of, &self.api).as_ref() == Some(node);
        let is_sure = !self.plan.clocks_stop && !self.was_restored();
        // The agent's clock counts whole milliseconds, so the times are compared in milliseconds.
        let has_cooled = self.now / MS >= until / MS;
        if has_cooled || !lives || !is_sure {
            return Ok(());
        }
        let (name, before) = (&self.machines.hosts[id].name, &self.machines.hosts[of].name);
        let text = format!(
            "{addr} is given on {name} {} ms before it has cooled since {before} freed it",
            (until - self.now) / MS
        );
        wrong("cooldown", text, [name.clone(), before.clone()])
    }

    /// Checks that the agent may use the range, or that it learned only recently that it may not.
    fn check_givable(&self, id: usize, range: Cidr) -> Verdict {
        let host = self.host(id);
        let since = host.awake_since();
        let ended = host.ended(&range);
        let is_known = |at: Time| at.max(since) + HEEDED < self.now;
        if !ended.is_some_and(is_known) {
            return Ok(());
        }
        let name = &self.machines.hosts[id].name;
        let text = format!("{name} gives from {range}, which is to give nothing new for long");
        wrong("given range", text, [name.clone()])
    }

    /// Checks that the store has the addresses of all live sandboxes. If the store lacked an address, the agent would
    /// assign the address again.
    pub(super) fn check_kept(&self, id: usize, snapshot: &Snapshot) -> Verdict {
        let host = self.host(id);
        if host.disk().is_none() {
            return Ok(());
        }
        let name = &self.machines.hosts[id].name;
        for (container, sandbox) in &host.kubelet.sandboxes {
            if !sandbox.is_alive || sandbox.addresses.is_empty() {
                continue;
            }
            let mut entries = snapshot.attachments.iter();
            let own = entries.find(|it| it.attachment.container_id == *container);
            let has: BTreeSet<Addr> = own
                .iter()
                .flat_map(|it| it.given.addresses.iter().map(|it| it.address))
                .collect();
            // The agent never assigns addresses outside this node's ranges, so the store need not have such addresses.
            let is_given_here = |addr: &Addr| {
                let mut blocks = snapshot.blocks.iter();
                blocks.any(|it| it.state.is_listed() && it.cidr.contains_addr(*addr))
            };
            let mut lost = sandbox.addresses.difference(&has);
            if lost.any(is_given_here) {
                let text = format!(
                    "sandbox {container} on {name} runs with {:?}, and the store has {has:?} for it",
                    sandbox.addresses
                );
                return wrong("live address freed", text, [name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks at the end that no address is leaked and no pod waits while addresses are free.
    pub fn check_host_end(&mut self, id: usize) -> Verdict {
        let name = self.machines.hosts[id].name.clone();
        let lives = self.machines.live_node(id, &self.api).is_some();
        let host = self.host(id);
        if host.process.is_none() || !lives {
            return Ok(());
        }
        let runs = host.kubelet.containers();
        let waiting: Vec<String> = host.kubelet.waiting().map(|it| it.uid.clone()).collect();
        let Some(snapshot) = self.contents(id) else {
            let text = format!("{name} has no store");
            return wrong("store", text, [name]);
        };
        for entry in &snapshot.attachments {
            let container = &entry.attachment.container_id;
            if !runs.contains(container) {
                let text = format!("{container} on {name} is gone, and the store has it still");
                return wrong("leak", text, [name]);
            }
        }
        for uid in waiting {
            // A pod that names a claim gets only the claim's addresses, and no other pod gets these addresses.
            let pod: ObjectUid = uid.as_str().into();
            let claim = self.claims.claim_of(&pod);
            let vmi = self.migrations.vmi_of(&pod);
            let claim = claim.map(|it| pool_of_claim(it, vmi.map(|it| &**it)));
            self.check_migration_comes(&pod, &name)?;
            self.check_claim_comes(&uid.as_str().into(), &name)?;
            let serves = |pool: &&PoolCount| match &claim {
                Some(claim) => pool.terms.name == *claim,
                None => !is_claim(&pool.terms.name),
            };
            let mut pools = snapshot.pools.iter().filter(serves);
            let has_room = pools.find(|pool| {
                let families = [
                    (pool.terms.ipv4.is_some(), &pool.counts.v4),
                    (pool.terms.ipv6.is_some(), &pool.counts.v6),
                ];
                let is_one = families.iter().any(|(is, _)| *is);
                is_one && families.iter().all(|(is, counts)| !is || counts.free > 0)
            });
            if let Some(pool) = has_room {
                let text = format!(
                    "pod {uid} on {name} waits, and pool {} has addresses there: {:?}",
                    pool.terms.name, pool.counts
                );
                return wrong("pod without address", text, [name]);
            }
        }
        Ok(())
    }

    /// Starts the kubelet after a boot. Pods get new sandboxes, and old sandboxes get their DELs.
    pub(super) fn start_kubelet(&mut self, id: usize) {
        let host = self.host_mut(id);
        let old: Vec<String> = host.kubelet.sandboxes.keys().cloned().collect();
        let pods: Vec<ObjectUid> = host.kubelet.pods.keys().cloned().collect();
        host.calls.clear();
        for container in old {
            self.kill_sandbox(id, &container);
        }
        for uid in pods {
            let lag = self.rng.stretch(100 * MS, 10 * SECOND);
            self.kubelet_due(id, lag, KubeletAct::Start(uid));
        }
    }

    pub fn renew_sandbox(&mut self, id: usize) {
        let host = self.host(id);
        let up = host.kubelet.sandboxes.iter();
        let up = up.filter(|(_, it)| it.is_alive && it.is_up);
        let up: Vec<(String, ObjectUid)> = up
            .map(|(id, it)| (id.clone(), it.pod.uid.as_str().into()))
            .collect();
        if up.is_empty() {
            return;
        }
        let (container, uid) = self.rng.pick(&up).clone();
        self.kill_sandbox(id, &container);
        let lag: Time = self.rng.stretch(MS, 2 * SECOND);
        self.kubelet_due(id, lag, KubeletAct::Start(uid));
    }
}
