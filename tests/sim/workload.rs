//! Everything around the controllers: nodes come and go, users edit pools, pods run, and a foreign allocator may
//! write podCIDRs.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadastre_api::{IPPoolSpec, Requests, pod_claim};
use cadastre_controller::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use cadastre_controller::cluster::objects::{
    AskedAddresses, Block, ClaimSource, MachineIdentity, Node, NodeTaint, Pod, PodClaim, Sticky,
    Subnet, Text, VirtualMachine,
};
use cadastre_core::{Addr, Cidr};

use super::api::Author;
use super::clock::{MS, SECOND};
use super::describe::ranges;
use super::object_log::Stored;
use super::pool_model::counted;
use super::pool_workload::service;
use super::run::{Due, Sim};

/// The workload's records of its own changes.
#[derive(Default)]
pub struct World {
    /// The identity of the last host of each node name.
    machines: BTreeMap<NodeName, MachineIdentity>,
    /// For each pool (UID) whose spec became unreadable, the last readable spec.
    pub specs: BTreeMap<ObjectUid, IPPoolSpec>,
    count: u64,
}

impl World {
    /// Forgets the host that last had the node name `name`. The next Node with this name gets another machine identity,
    /// so it is on another host.
    pub fn forget_machine(&mut self, name: &NodeName) {
        self.machines.remove(name);
    }
}

pub fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

/// How many pods each node may run, according to its kubelet.
pub const MAX_PODS: u64 = 6;

/// How many pods nodes may run, in runs in which the sizes of their ranges depend on it.
const MANY_PODS: [u16; 5] = [16, 200, 30, 60, 110];

impl Sim {
    /// Creates the objects that exist when the controllers start.
    pub fn populate(&mut self) {
        self.api.put(service("kubernetes", "10.96.0.0/16"));
        let least = u64::from(self.plan.blocks > 0);
        for _ in 0..self.rng.below(self.plan.pools + 1).max(least) {
            self.create_pool();
        }
        for _ in 0..self.rng.below(self.plan.names + 1) {
            self.create_node();
        }
        for _ in 0..if self.plan.claims > 0 { 8 } else { 0 } {
            self.change_claims();
        }
        self.api.commits.clear();
        for id in 0..self.machines.hosts.len() {
            self.relist_host(id, false);
        }
        self.checks.begin(&self.api);
    }

    pub fn work(&mut self) {
        if !self.has_faults {
            return;
        }
        let burst = if self.rng.chance(300) {
            self.rng.between(5, 20)
        } else {
            1
        };
        for _ in 0..burst {
            self.change_something();
        }
        if self.plan.blocks > 0 {
            self.crowd_in();
        }
        if self.plan.strangers > 0 && self.rng.chance(self.plan.strangers) {
            self.create_stranger();
        }
        self.publish();
        let gap = self
            .rng
            .stretch((self.plan.work_every / 64).max(MS), self.plan.work_every);
        self.after(gap, Due::Work);
    }

    /// In runs with blocks, binds a few pods. Sometimes also causes a fault of a host, changes claims, or makes
    /// requests by annotations of a NodeSubnet.
    fn crowd_in(&mut self) {
        // In most changes, host faults and requests are left out, and only a single node gets pods. So some nodes have
        // much to lend.
        if self.plan.is_uneven() && self.rng.chance(8_000) {
            if self.rng.chance(500) {
                self.crowd_a_node();
            }
            return;
        }
        if self.rng.chance(if self.plan.steady { 100 } else { 600 }) {
            self.inject_host_fault();
        }
        if self.plan.lost_stores > 0 && self.rng.chance(self.plan.lost_stores) {
            self.lose_some_store();
        }
        if self.rng.chance(500) {
            self.ask_of_node();
        }
        if self.plan.withdrawing > 0 && self.rng.chance(self.plan.withdrawing) {
            self.ask_of_node();
        }
        if self.plan.reboots > 0 && self.rng.chance(self.plan.reboots) {
            self.reboot_some_host();
        }
        if self.plan.reborn > 0 && self.rng.chance(self.plan.reborn) {
            self.bear_again();
        }
        if self.rng.chance(self.plan.claims / 2) {
            self.change_claims();
        }
        for _ in 0..self.rng.below(3) {
            if let Some(node) = self.some_node() {
                self.bind_pod(&node);
            }
        }
    }

    /// Passes the changes to the watches and the checks. Changes of the workload never violate a rule.
    pub fn publish(&mut self) {
        let done = self.settle_commits(Author::World, self.now);
        debug_assert!(done.is_ok(), "{done:?}");
    }

    fn change_something(&mut self) {
        match self.rng.below(100) {
            // After a backup, the pools do not change, because their specs decide which node can own a block that a
            // restore has removed.
            78..90 if self.is_backed_up() => {}
            24..43 | 78..90 if self.plan.is_uneven() && self.rng.chance(8_000) => {}
            24..43 | 82..90 if self.plan.steady && self.rng.chance(9_700) => {}
            0..24 => self.create_node(),
            24..38 => self.delete_node(),
            38..43 => self.recreate_node(),
            43..58 => self.update_node(),
            58..73 => self.create_pods(),
            73..78 => self.delete_pod(),
            78..82 => self.create_pool(),
            82..88 => self.edit_pool(),
            88..90 => self.delete_pool(),
            90..92 => self.change_services(),
            92..95 if self.plan.tampering => self.tamper(),
            92..95 if self.plan.tampering_blocks => self.tamper_block(),
            95..98 if self.plan.foreign_allocator => self.write_as_another(),
            98..100 if self.plan.blocks > 0 => self.ask_of_node(),
            _ => {}
        }
    }

    fn some_name(&mut self) -> NodeName {
        format!("n{}", self.rng.below(self.plan.names)).into()
    }

    /// Draws an existing object of a kind; `None` if there is none.
    pub fn some<T: Stored>(&mut self) -> Option<Arc<T>> {
        let live = &T::kind(&self.api).live;
        let at = self.rng.index(live.len().max(1));
        live.values().nth(at).cloned()
    }

    fn some_node(&mut self) -> Option<Arc<Node>> {
        self.some()
    }

    fn create_node(&mut self) {
        let name = self.some_name();
        if self.api.nodes.get(&name).is_none() && !self.registering.contains(&name) {
            self.create_node_named(name);
        }
    }

    fn create_node_named(&mut self, name: NodeName) {
        let uid = self.api.uid();
        self.world.count += 1;
        let count = self.world.count;
        let machine = match self.world.machines.get(&name) {
            Some(machine) if self.rng.chance(5_000) => machine.clone(),
            _ if self.rng.chance(1_000) => MachineIdentity::default(),
            _ => MachineIdentity {
                provider_id: self
                    .rng
                    .chance(5_000)
                    .then(|| format!("cloud://{count}").into()),
                machine_id: Some(format!("m{count}").into()),
            },
        };
        self.world.machines.insert(name.clone(), machine.clone());
        let (pod_cidrs, unreadable) = self.born_with();
        // A few nodes have an address inside a pool. Such an address is in use, so no pool may allocate it.
        let address = if self.rng.chance(300) {
            format!("10.244.{}.{}", self.rng.below(64), self.rng.below(256))
        } else {
            format!("192.168.{}.{}", count / 250 % 250, count % 250 + 1)
        };
        // The limit follows from the node's number, so that all draws stay the same.
        let max_pods = match usize::try_from(count).unwrap() {
            count if self.plan.fits_max_pods() => MANY_PODS[count % MANY_PODS.len()],
            _ => u16::try_from(MAX_PODS).unwrap(),
        };
        // Some kubelets report the limit only later.
        let is_late = self.plan.fits_max_pods() && count.is_multiple_of(4);
        if is_late {
            let due = Due::MaxPods(name.clone(), uid.clone(), max_pods);
            self.after((count % 64) * SECOND / 4, due);
        }
        let max_pods = if is_late { 0 } else { max_pods };
        let node = Node {
            uid: uid.clone(),
            version: 0,
            labels: self.some_labels(),
            term: None,
            asn: None,
            annotated: self.rng.chance(5_000),
            deleting: false,
            pod_cidrs,
            unreadable,
            addresses: [addr(&address)].into(),
            machine,
            name,
            taints: self.some_taints(),
            exhausted: None,
            max_pods,
        };
        if self.rng.chance(2_000) {
            self.api.finalized.insert(uid);
        }
        self.log(Some(&node.name), || {
            format!("node {} is created {}", node.uid, ranges(&node.pod_cidrs))
        });
        self.settle_in(&node);
        self.api.put(node);
    }

    /// The kubelet of a node reports how many pods the node may run.
    pub fn report_max_pods(&mut self, name: &NodeName, uid: &ObjectUid, max_pods: u16) {
        let node = self.api.nodes.get(name).filter(|it| it.uid == *uid);
        if let Some(node) = node.cloned() {
            self.api.put(Node {
                max_pods,
                ..Node::clone(&node)
            });
            self.publish();
        }
    }

    /// The podCIDRs of a new node. Nearly all new nodes have none.
    fn born_with(&mut self) -> (Box<[Cidr]>, Box<[Text]>) {
        match self.rng.below(60) {
            4 => ([cidr("10.0.0.0/8"), cidr("fd00::/16")].into(), [].into()),
            0 => (self.any_block().into_iter().collect(), [].into()),
            1 => ([cidr("172.20.7.0/24")].into(), [].into()),
            2 => ([].into(), ["10.244.300.0/24".into()].into()),
            3 => ([cidr("10.244.0.0/22"), cidr("fd00::/62")].into(), [].into()),
            _ => ([].into(), [].into()),
        }
    }

    fn any_block(&mut self) -> Option<Cidr> {
        let (len, third) = (*self.rng.pick(&[24_u8, 25, 26]), self.rng.below(64));
        Cidr::new(
            addr(&format!("10.244.{third}.{}", self.rng.below(256))),
            len,
        )
    }

    fn some_labels(&mut self) -> Box<[(Text, Text)]> {
        let class = *self.rng.pick(&["a", "a", "b", "c"]);
        let zone = *self.rng.pick(&["x", "y"]);
        [("class".into(), class.into()), ("zone".into(), zone.into())].into()
    }

    fn delete_node(&mut self) {
        if self.agents_are_publishing() {
            return;
        }
        if let Some(node) = self.some_node() {
            self.delete(&node);
        }
    }

    pub fn delete_node_named(&mut self, name: &NodeName) {
        if let Some(node) = self.api.nodes.get(name).cloned() {
            self.delete(&node);
        }
    }

    fn delete(&mut self, node: &Node) {
        self.log(Some(&node.name), || format!("node {} is deleted", node.uid));
        self.api.delete_node(&node.name);
        if self.api.finalized.contains(&node.uid) {
            let held = self.rng.stretch(500 * MS, 60 * SECOND);
            self.after(
                held,
                Due::RemoveFinalizer(node.name.clone(), node.uid.clone()),
            );
        }
        let pods = self.api.pods_on(&node.name);
        let names: Vec<Text> = pods.map(|pod| pod.name.clone()).collect();
        for pod in names {
            let lives = self.rng.stretch(SECOND, 150 * SECOND);
            self.after(lives, Due::PodGone(pod));
        }
    }

    /// Creates many nodes at once, so that the pools are exhausted.
    pub fn rush(&mut self) {
        for _ in 0..if self.has_faults { 16 } else { 0 } {
            self.create_node();
        }
        self.publish();
    }

    /// Changes or deletes the node of a write that is in flight.
    pub fn disturb(&mut self, name: &NodeName) {
        let Some(node) = self
            .api
            .nodes
            .get(name)
            .cloned()
            .filter(|_| self.has_faults)
        else {
            return;
        };
        match self.rng.below(4) {
            0 if self.is_backed_up() => {}
            0 => {
                self.log(Some(name), || "node changes its class".to_owned());
                let labels = [("class".into(), "none".into())].into();
                let node = Node {
                    labels,
                    ..Node::clone(&node)
                };
                self.api.put(node);
            }
            1 | 2 if self.agents_are_publishing() => {}
            1 => {
                self.api.finalized.insert(node.uid.clone());
                self.delete(&node);
            }
            2 => {
                self.delete(&node);
                if self.api.nodes.get(name).is_none() {
                    self.create_node_named(name.clone());
                }
            }
            _ => {}
        }
        self.publish();
    }

    /// Deletes a node and creates it again at once, as autoscalers and impatient users do.
    fn recreate_node(&mut self) {
        if self.agents_are_publishing() {
            return;
        }
        let Some(node) = self.some_node() else { return };
        self.log(Some(&node.name), || {
            format!("node {} is deleted and comes back", node.uid)
        });
        self.api.delete_node(&node.name);
        if self.api.nodes.get(&node.name).is_none() {
            self.create_node_named(node.name.clone());
        }
    }

    /// Deletes a Node whose host registers again at once, and makes the host lose its store as soon as nothing uses it.
    fn bear_again(&mut self) {
        let Some(node) = self.some_node().filter(|it| !it.deleting) else {
            return;
        };
        let Some(id) = self.machines.of_node.get(&node.uid).copied() else {
            return;
        };
        if self.host(id).is_gone {
            return;
        }
        self.log(Some(&node.name), || {
            format!("node {} is deleted and registers again", node.uid)
        });
        self.api.finalized.remove(&node.uid);
        self.api.delete_node(&node.name);
        let node = Node {
            uid: self.api.uid(),
            term: None,
            annotated: false,
            pod_cidrs: [].into(),
            unreadable: [].into(),
            ..Node::clone(&node)
        };
        self.settle_in(&node);
        self.api.put(node);
        self.lose_store_soon(id);
    }

    pub fn remove_finalizer(&mut self, name: &NodeName, uid: &ObjectUid) {
        self.api.finalized.remove(uid);
        let node = self.api.nodes.get(name);
        if node.is_some_and(|node| node.uid == *uid && node.deleting) {
            self.log(Some(name), || format!("node {uid} loses its finalizer"));
            self.api.delete_node(name);
            self.publish();
        }
    }

    /// Updates a node, as kubelets and users do.
    fn update_node(&mut self) {
        let Some(node) = self.some_node() else { return };
        let mut node = Node::clone(&node);
        match self.rng.below(10) {
            0 | 2 if self.is_backed_up() => {}
            0 => node.labels = self.some_labels(),
            1 => node.annotated = true,
            2 if node.machine.provider_id.is_none() => {
                node.machine.provider_id = Some(format!("cloud://{}", node.uid).into());
                self.world
                    .machines
                    .insert(node.name.clone(), node.machine.clone());
                self.machines.identify(&node);
            }
            _ => {}
        }
        self.api.put(node);
    }

    fn create_pods(&mut self) {
        let Some(node) = self.some_node() else { return };
        if self.rng.chance(self.plan.blocks / 2 + 3_000) && self.plan.blocks > 0 {
            for _ in 0..self.rng.between(1, 4) {
                self.bind_pod(&node);
            }
        } else if counted(&node).next().is_some() {
            self.create_pod(&node);
        }
    }

    /// Binds many pods to one node, so that it needs more addresses than its share of a small pool.
    fn crowd_a_node(&mut self) {
        let Some(node) = self.some_node() else { return };
        for _ in 0..self.rng.between(10, 24) {
            self.bind_pod(&node);
        }
    }

    /// Creates a pod with an address of each of its node's podCIDRs.
    fn create_pod(&mut self, node: &Node) {
        let host = u128::from(self.rng.between(2, 14));
        let inside = |range: &Cidr| Addr {
            family: range.family(),
            value: range.first().value + host,
        };
        self.run_pod(node, "pod", counted(node).map(inside).collect());
    }

    /// Creates a pod with an address that Cadastre has not assigned, anywhere in the ranges of podCIDRs.
    fn create_stranger(&mut self) {
        let address = format!("10.244.{}.{}", self.rng.below(64), self.rng.below(256));
        if let Some(node) = self.some_node() {
            self.run_pod(&node, "stranger", [addr(&address)].into());
        }
    }

    /// Creates a pod without an agent's help, and schedules the deletion of the pod.
    fn run_pod(&mut self, node: &Node, kind: &str, addresses: Box<[Addr]>) {
        let (_, name) = self.put_new_pod(node, kind, addresses, None);
        let lives = self.rng.stretch(5 * SECOND, 300 * SECOND);
        self.after(lives, Due::PodGone(name));
    }

    /// Creates a pod. Returns its UID and its name.
    pub fn put_new_pod(
        &mut self,
        node: &Node,
        kind: &str,
        addresses: Box<[Addr]>,
        claim: Option<ClaimName>,
    ) -> (ObjectUid, Text) {
        let uid = self.api.uid();
        let name = format!("{kind}-{uid}");
        let claim = claim.map(|it| (it, ClaimSource::User));
        self.put_pod(node, uid, &name, addresses, claim, None)
    }

    /// Creates the next pod of an ordinal of a StatefulSet with sticky addresses. Returns its UID and its name.
    pub fn put_sticky_pod(&mut self, node: &Node, name: &str) -> (ObjectUid, Text) {
        let uid = self.api.uid();
        let pools: Vec<PoolName> = self.api.pools.live.keys().cloned().collect();
        let names_pool = !pools.is_empty() && self.rng.chance(2_000);
        let sticky = Sticky {
            owner: "web".into(),
            owner_uid: "of-web".into(),
            pools: if names_pool {
                [self.rng.pick(&pools).clone()].into()
            } else {
                [].into()
            },
            ttl: *self.rng.pick(&[None, None, Some(0), Some(5), Some(90)]),
        };
        let claim = format!("default/{name}").as_str().into();
        let claim = Some((claim, ClaimSource::Sticky(Box::new(sticky))));
        self.put_pod(node, uid, name, [].into(), claim, None)
    }

    /// A few nodes have a taint that belongs to somebody else.
    fn some_taints(&mut self) -> Box<[NodeTaint]> {
        let other = self.rng.chance(1_000).then(|| NodeTaint {
            key: "example.com/dedicated".into(),
            effect: "NoSchedule".into(),
            ..NodeTaint::exhausted()
        });
        other.into_iter().collect()
    }

    /// Creates a pod that asks for an address. Returns its UID and its name.
    pub fn put_asking_pod(&mut self, node: &Node, addr: Addr) -> (ObjectUid, Text) {
        let uid = self.api.uid();
        let name = format!("asks-{uid}");
        let is_by_cni = self.rng.chance(5_000);
        let claim = self.asks_for(&uid, &name, addr, is_by_cni);
        self.put_pod(node, uid, &name, [].into(), claim, None)
    }

    /// Records that a new pod asks for an address. Returns the claim that the pod's annotation stands for, or `None` if
    /// the runtime asks in the ADD instead.
    pub fn asks_for(
        &mut self,
        uid: &ObjectUid,
        name: &str,
        addr: Addr,
        is_by_cni: bool,
    ) -> Option<(ClaimName, ClaimSource)> {
        self.claims.note_asked(uid, addr);
        let claim = pod_claim::claim_of_addresses(name, uid);
        let claim: ClaimName = format!("default/{claim}").as_str().into();
        if is_by_cni {
            self.claims.note_pod(uid, &claim);
            self.claims.note_by_cni(uid);
            return None;
        }
        let asked = AskedAddresses {
            addresses: [addr].into(),
            is_served: false,
            is_by_cni: false,
        };
        Some((claim, ClaimSource::Addresses(Box::new(asked))))
    }

    /// Creates a pod. If `machine` is given, the pod runs this virtual machine. Returns the UID and the name of the
    /// pod.
    pub fn put_pod(
        &mut self,
        node: &Node,
        uid: ObjectUid,
        own_name: &str,
        addresses: Box<[Addr]>,
        claim: Option<(ClaimName, ClaimSource)>,
        machine: Option<VirtualMachine>,
    ) -> (ObjectUid, Text) {
        let name: Text = format!("default/{own_name}").into();
        let created = i64::try_from(self.now / SECOND).unwrap();
        let claim = claim.map(|(claim, source)| {
            self.claims.note_pod(&uid, &claim);
            PodClaim {
                claim,
                pod: own_name.into(),
                uid: uid.clone(),
                node: Some(node.name.clone()),
                created,
                source,
                machine: machine.map(Box::new),
            }
        });
        let is_of_interface = |it: &PodClaim| it.source == ClaimSource::IpamClaim;
        let (of_interface, own): (Vec<_>, Vec<_>) = claim.into_iter().partition(is_of_interface);
        self.log(Some(&node.name), || {
            format!("{name} is bound to it, with {addresses:?}")
        });
        let pod = Pod {
            name: name.clone(),
            uid: uid.clone(),
            version: 0,
            finished: false,
            mirror_of: None,
            node: Some(node.name.clone()),
            needs_default: true,
            replaceable: self.rng.chance(5_000).then_some(created),
            claim: own.into_iter().next().map(Box::new),
            interface_claims: of_interface.into(),
            addresses,
        };
        self.api.put_pod(pod, node.name.clone());
        (uid, name)
    }

    fn delete_pod(&mut self) {
        if let Some(pod) = self.some::<Pod>() {
            self.end_pod(&pod.name);
        }
    }

    fn end_pod(&mut self, name: &Text) {
        if let Some(pod) = self.api.pods.get(name).cloned() {
            self.pod_ended(&pod.uid);
            self.api.remove::<Pod>(name);
        }
    }

    pub fn pod_gone(&mut self, name: &Text) {
        self.end_pod(name);
        self.publish();
    }

    /// Edits or deletes a NodeSubnet, as a user would.
    fn tamper(&mut self) {
        let at = self.rng.index(self.api.subnets.live.len().max(1));
        let Some(subnet) = self.api.subnets.live.values().nth(at).cloned() else {
            return;
        };
        self.log(Some(&subnet.name), || {
            "its NodeSubnet is tampered with".to_owned()
        });
        let mut subnet = Subnet::clone(&subnet);
        // In half of the edits, the parts that are cleared below count as invalid, in the other half as removed.
        subnet.is_partial = at.is_multiple_of(2);
        match (self.rng.below(4), &mut subnet.spec) {
            (0, Ok(spec)) => spec.quarantined.clear(),
            (1, Ok(spec)) => {
                spec.pod_cidrs.clear();
                spec.blocks.clear();
            }
            (2, spec) => *spec = Err("missing field podCIDRs".to_owned()),
            _ => return self.api.delete_subnet(&subnet.name),
        }
        self.api.put(subnet);
    }

    /// Requests drains of random blocks, withdrawals of random parts of blocks, and releases of random orphans, as a
    /// user would.
    fn ask_of_node(&mut self) {
        let Some(subnet) = self.some::<Subnet>() else {
            return;
        };
        let blocks = subnet.spec.iter().flat_map(|spec| &spec.blocks);
        let blocks = blocks.filter_map(|held| Cidr::parse_strict(&held.cidr).ok());
        let given = subnet.report.iter().flat_map(|it| it.orphans.iter());
        let mut requests = Requests {
            release: given.map(|(addr, pod)| (*addr, pod.to_string())).collect(),
            drain: blocks.collect(),
            ..Requests::default()
        };
        let blocks: Vec<Cidr> = requests.drain.iter().copied().collect();
        let withdraw = subnet.requests.withdraw.iter().copied();
        requests.withdraw = withdraw.filter(|_| self.rng.chance(7_000)).collect();
        for block in blocks {
            requests.withdraw.extend(self.some_part(block));
        }
        requests.release.retain(|_| self.rng.chance(5_000));
        requests.drain.retain(|_| self.rng.chance(3_000));
        self.log(Some(&subnet.name), || format!("asked of it: {requests:?}"));
        self.request(&subnet, requests);
        if self.plan.withdrawing > 0 && self.rng.chance(5_000) {
            let soon = self.rng.stretch(100 * MS, 20 * SECOND);
            let before = Box::new(subnet.requests.clone());
            self.after(soon, Due::AskAgain(subnet.name.clone(), before));
        }
    }

    /// Sets a node's requests back to earlier ones, as a user does who has changed their mind.
    pub fn ask_again(&mut self, name: &NodeName, requests: Requests) {
        if let Some(subnet) = self.api.subnets.get(name).cloned()
            && self.has_faults
        {
            self.log(Some(name), || format!("asked of it again: {requests:?}"));
            self.request(&subnet, requests);
            self.publish();
        }
    }

    /// Returns a random part of a block, or sometimes `None`.
    fn some_part(&mut self, block: Cidr) -> Option<Cidr> {
        let bits = block.family().bits();
        if !self.rng.chance(6_000) || block.len() == bits {
            return None;
        }
        let size = u64::try_from(block.size()).unwrap_or(u64::MAX);
        let first = block.first();
        let addr = Addr {
            value: first.value + u128::from(self.rng.below(size)),
            ..first
        };
        let len = self
            .rng
            .between(u64::from(block.len()) + 1, u64::from(bits));
        Cidr::new(addr, u8::try_from(len).unwrap())
    }

    pub fn request(&mut self, subnet: &Subnet, requests: Requests) {
        if subnet.requests != requests {
            let subnet = Subnet {
                requests,
                ..Subnet::clone(subnet)
            };
            self.api.put(subnet);
        }
    }

    /// Edits or deletes an IPAMBlock, as a user would.
    fn tamper_block(&mut self) {
        let Some(block) = self.some::<Block>() else {
            return;
        };
        let owner = block.spec.as_ref().ok().map(|spec| spec.owner.name.clone());
        self.log(owner.as_deref(), || {
            format!("{} {} is tampered with", block.name, block.uid)
        });
        let mut block = Block {
            touched: true,
            ..Block::clone(&block)
        };
        let other = self.some_node();
        match (self.rng.below(5), &mut block.spec) {
            (0, Ok(spec)) => spec.owner.quarantined = !spec.owner.quarantined,
            (1, Ok(spec)) => {
                if let Some(other) = other {
                    spec.owner.name = other.name.clone();
                    spec.owner.uid = other.uid.clone();
                }
            }
            (2, spec) => *spec = Err("missing field owner".to_owned()),
            _ => return self.api.remove::<Block>(&block.name),
        }
        self.api.put(block);
    }

    /// Lets a foreign allocator write a podCIDR for a node without podCIDRs: the lowest range that overlaps no other
    /// podCIDR.
    fn write_as_another(&mut self) {
        let Some(node) = self.some_node().filter(|node| node.is_empty()) else {
            return;
        };
        let taken = |range: &Cidr| {
            let mut nodes = self.api.nodes.live.values();
            nodes.any(|n| n.pod_cidrs.iter().any(|c| c.overlaps(range)))
        };
        let mut ranges = (0..64).map(|third| cidr(&format!("10.244.{third}.0/24")));
        let Some(range) = ranges.find(|range| !taken(range)) else {
            return;
        };
        self.log(Some(&node.name), || {
            format!("somebody else gives it {range}")
        });
        self.api.put(Node {
            pod_cidrs: [range].into(),
            ..Node::clone(&node)
        });
    }

    /// Ends all faults and changes: completes deletions of nodes, and deletes the pods of deleted nodes.
    pub fn end_faults(&mut self) {
        self.has_faults = false;
        if let Some(outcomes) = self.rng.outcomes() {
            outcomes.is_over = true;
        }
        self.log(None, || "faults end".to_owned());
        let subnets: Vec<_> = self.api.subnets.live.values().cloned().collect();
        for subnet in subnets {
            self.request(&subnet, Requests::default());
        }
        self.publish();
        for process in &mut self.processes {
            process.paused_until = process.paused_until.min(self.now);
            process.cut_until = process.cut_until.min(self.now);
            process.clocks.wall_off = 0;
            if self.plan.clocks_stop {
                process.clocks.set_pace(self.now, 1_000_000, self.now);
            }
        }
        self.resume();
        for process in 0..self.processes.len() {
            if let Some(run) = &mut self.processes[process].run {
                for it in &mut run.deliveries {
                    (it.scheduled, it.held_until) = (false, self.now);
                }
            }
            for kind in self.plan.watched() {
                self.schedule_delivery(self.run_id(process), kind);
            }
        }
        let nodes: Vec<Arc<Node>> = self.api.nodes.live.values().cloned().collect();
        for node in nodes.iter().filter(|node| node.deleting) {
            self.remove_finalizer(&node.name, &node.uid);
        }
        let is_homeless = |pod: &&Arc<Pod>| {
            if let Some((id, uid)) = self.machines.of_pod.get(&pod.uid) {
                return self.machines.live_node(*id, &self.api).as_ref() != Some(uid);
            }
            let node = self.api.placed.get(&pod.uid);
            let node = node.and_then(|node| self.api.nodes.get(node));
            let has = |node: &Node, addr: &Addr| {
                let mut podcidrs = node.pod_cidrs.iter();
                podcidrs.any(|cidr| cidr.contains_addr(*addr))
            };
            node.is_none_or(|node| !pod.addresses.iter().all(|addr| has(node, addr)))
        };
        let homeless = self.api.pods.live.values().filter(is_homeless);
        let homeless: Vec<Text> = homeless.map(|pod| pod.name.clone()).collect();
        for pod in homeless {
            self.end_pod(&pod);
        }
        self.calm_hosts();
        self.publish();
    }
}

pub fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<std::net::IpAddr>().unwrap())
}
