//! Scripts: short courses of changes for the runs with deviations (see `deviations`).

mod all;

use std::collections::BTreeSet;

use cadastre_api::{IPPoolSpec, Requests};
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::{ClaimName, ObjectUid};
use cadastre_controller::cluster::objects::{
    Claim, ClaimSource, MachineIdentity, Node, Pod, Pool, Text, VirtualMachine,
};

use super::clock::{MS, SECOND, Time};
use super::deviations::Deviations;
use super::exhaustive::new_node;
use super::host::Host;
use super::plan::{Faults, Network, Plan};
use super::pool_workload::service;
use super::process::Run;
use super::rng::Rng;
use super::run::{Due, RunId, Sim};
use super::settle::QUIET;
use super::trace::Trace;
use super::workload::{addr, cidr};

pub use all::SCRIPTS;

/// How long the cluster usually has after a change, until the next change. It is enough for everything to settle.
const CALM: u64 = 8 * SECOND;
/// How long a pod runs on that was deleted by force: longer than the agent waits before it looks for a leak.
const FORCED: u64 = 40 * SECOND;
/// Long enough for a released address to be free again, and for its block to go to another node.
const COOLDOWN: u64 = 40 * SECOND;
/// How long it takes after a restore until the API server is back and agents have reported.
const DOWN: u64 = 60 * SECOND;

/// How far wall clocks are set back, in microseconds.
const HOUR: i64 = 3_600_000_000;
/// How many pods a node may run.
const MAX_PODS: u16 = 110;

/// The label by which a pool can select nodes, and its value at all nodes that are not unselected.
const CLASS: &str = "class";
const SELECTED: &str = "any";

/// A change of an object.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// A machine registers as a Node with this name.
    Node(&'static str),
    /// A machine registers as a Node with this name, without the number of pods that the Node may run.
    BareNode(&'static str),
    /// The kubelet of the Node with this name reports how many pods the Node may run.
    MaxPods(&'static str, u16),
    /// No pool selects the Node with this name any more.
    Unselected(&'static str),
    /// Another component puts a finalizer on the Node with this name.
    Finalizer(&'static str),
    /// The Node with this name is deleted.
    NodeGone(&'static str),
    /// The Node with this name is deleted, and a finalizer holds it for a minute.
    NodeHeld(&'static str),
    /// The Node with this name is deleted, and its machine registers again at once.
    NodeAgain(&'static str),
    /// A pod is bound to this Node, under this name.
    Pod(&'static str, &'static str),
    /// A pod is bound to this Node, under this name, and wants certain addresses.
    PodWith(&'static str, &'static str, Wants),
    /// The pod with this name becomes the one in which its virtual machine runs.
    Migrated(&'static str),
    /// A pod that Cadastre does not know is bound to this Node, and reports this address.
    Stranger(&'static str, &'static str),
    /// The pod with this name is deleted.
    PodGone(&'static str),
    /// The pod with this name is deleted by force: it runs on for [`FORCED`].
    PodForced(&'static str),
    /// A pod of the Node with this name gets a new sandbox.
    NewSandbox(&'static str),
    /// A claim with this name is created, for these addresses, or for any address if there are none.
    Claim(&'static str, &'static [&'static str]),
    /// The claim with this name is deleted.
    ClaimGone(&'static str),
    /// A user asks the agent of this Node to drain the block.
    Drain(&'static str, &'static str),
    /// A user asks the agent of this Node to withdraw these ranges, and to return all others.
    Withdraw(&'static str, &'static [&'static str]),
    /// A second pool is created.
    SecondPool(fn() -> IPPoolSpec),
    /// The pool is edited.
    Edit(fn(&mut IPPoolSpec)),
    /// The pool is deleted.
    PoolGone,
    /// The leader is asked to stop, so the other controller takes over.
    HandOver,
    /// The leader is killed.
    LeaderKilled,
    /// The wall clocks of all controllers are set back by an hour.
    ClocksBack,
    /// A backup of the API server is made.
    Backup,
    /// The API server is restored from the backup.
    Restore,
    /// Nothing happens for [`COOLDOWN`].
    Cooldown,
    /// The next change comes so long after the one before, instead of [`CALM`].
    After(Time),
}

/// The addresses that a pod wants.
#[derive(Clone, Copy, Debug)]
pub enum Wants {
    /// Those of the claim with this name.
    Claim(&'static str),
    /// Those of the claim with this name, for the virtual machine with this UID.
    Machine(&'static str, &'static str),
    /// Those of the IPAMClaim with this name, for the interface of the only virtual machine.
    Interface(&'static str),
    /// Those of its StatefulSet's claim.
    Sticky,
    /// This address, by an annotation.
    Address(&'static str),
    /// This address, which the runtime requests in the ADD.
    AddressByCni(&'static str),
}

/// The objects of a run and their changes, in this order.
pub struct Script {
    pub name: &'static str,
    pool: fn() -> IPPoolSpec,
    /// After a reboot, an agent's watches deliver nothing for this long.
    silence_after_reboot: Time,
    announces: Announces,
    /// Whether the Lease names no allocations that may be in flight, as if leaders of an earlier version wrote it.
    forgets_intents: bool,
    acts: &'static [Act],
}

/// How the nodes' blocks are announced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Announces {
    Nothing,
    /// The controller writes NodeRoutes and FRRConfigurations.
    Routes,
    /// Agents write a file for a routing daemon.
    ToDaemon,
}

/// Returns the name of an object in the namespace of all scripts.
fn in_namespace<T: for<'a> From<&'a str>>(name: &str) -> T {
    format!("default/{name}").as_str().into()
}

/// The conditions of a script. Every fault is possible, and none is ordinary.
fn plan(script: &Script) -> Plan {
    let acts = u64::try_from(script.acts.len()).unwrap();
    let waits = script.acts.iter().map(|act| match act {
        Act::PodForced(_) => FORCED,
        Act::Cooldown => COOLDOWN,
        Act::Restore => DOWN,
        Act::After(pause) => *pause,
        _ => 0,
    });
    let clocks_lie = script.acts.iter().any(|it| matches!(it, Act::ClocksBack));
    let restores = script.acts.iter().any(|it| matches!(it, Act::Restore));
    // The simulation derives from these two what is written for routing daemons.
    let (names, slice) = match script.announces {
        Announces::Nothing => (3, 23),
        Announces::Routes => (4, 21),
        Announces::ToDaemon => (3, 22),
    };
    Plan {
        processes: 2,
        names,
        pools: 1,
        blocks: 10_000,
        slice,
        crowded: false,
        limit: 4,
        faults_for: (acts + 1) * CALM + waits.sum::<u64>(),
        settle_for: if restores { 450 } else { 200 } * SECOND,
        work_every: CALM,
        fault_every: 600 * SECOND,
        network: Network {
            lost_before: 1,
            lost_after: 1,
            late: 1,
            slow: 1,
            last_words: 0,
            refused: 1,
            busy: 1,
            rejected: 1,
            lagging: 1,
            gap: 1,
            lease_lost: 1,
        },
        // The checks that trust wall clocks depend on this.
        faults: Faults {
            wall: clocks_lie.into(),
            ..Faults::default()
        },
        skew: 0,
        foreign_allocator: false,
        tampering: false,
        tampering_blocks: false,
        claims: 0,
        agents: true,
        ..Plan::draw(&mut Rng::new(0))
    }
}

impl Script {
    /// The first word of the name
    pub fn short_name(&self) -> &'static str {
        self.name.split(':').next().unwrap_or_default()
    }
}

impl Sim {
    pub fn scripted(script: &'static Script, deviations: Deviations, trace: Trace) -> Self {
        let mut sim = Sim::under(plan(script), Rng::chosen(deviations), None, trace);
        sim.script = Some(script);
        sim.api.forgets_intents = script.forgets_intents;
        sim.api.put(service("kubernetes", "10.96.0.0/16"));
        let uid = sim.api.uid();
        let pool = super::api::new_pool("pool".into(), uid, (script.pool)(), 0);
        sim.api.put(pool);
        sim.api.commits.clear();
        sim.checks.begin(&sim.api);
        sim.begin();
        sim.after(CALM, Due::Script(0));
        sim
    }

    /// Carries out the next change of the script.
    pub fn follow_script(&mut self, nth: usize) {
        let Some(act) = self.script.and_then(|it| it.acts.get(nth)) else {
            return;
        };
        match *act {
            Act::Node(name) => self.register_machine(name, MAX_PODS),
            Act::BareNode(name) => self.register_machine(name, 0),
            Act::MaxPods(name, max_pods) => {
                if let Some(node) = self.api.nodes.get(name).cloned() {
                    self.report_max_pods(&node.name, &node.uid, max_pods);
                }
            }
            Act::Unselected(name) => {
                if let Some(node) = self.api.nodes.get(name).cloned() {
                    self.api.put(Node {
                        labels: [(CLASS.into(), "none".into())].into(),
                        ..Node::clone(&node)
                    });
                }
            }
            Act::Finalizer(name) => {
                let node = self.api.nodes.get(name).map(|it| it.uid.clone());
                self.api.finalized.extend(node);
            }
            Act::NodeGone(name) => self.delete_node_named(&name.into()),
            Act::NodeHeld(name) => {
                if let Some(node) = self.api.nodes.get(name).cloned() {
                    self.api.finalized.insert(node.uid.clone());
                    self.api.delete_node(&node.name);
                    let end = Due::RemoveFinalizer(node.name.clone(), node.uid.clone());
                    self.after(60 * SECOND, end);
                }
            }
            Act::NodeAgain(name) => {
                if let Some(before) = self.api.nodes.get(name).cloned() {
                    self.api.delete_node(&before.name);
                    let node = new_node(name.into(), self.api.uid());
                    self.register_in_script(Node {
                        addresses: before.addresses.clone(),
                        machine: before.machine.clone(),
                        max_pods: before.max_pods,
                        ..node
                    });
                }
            }
            Act::Pod(node, name) => self.run_in_script(node, name, None),
            Act::PodWith(node, name, wants) => self.run_in_script(node, name, Some(wants)),
            Act::Migrated(name) => self.pod_is_migrated_to(&in_namespace(name)),
            Act::Stranger(node, address) => {
                let uid = self.api.uid();
                if let Some(node) = self.api.nodes.get(node).cloned() {
                    self.put_pod(&node, uid, "stranger", [addr(address)].into(), None, None);
                }
            }
            Act::PodGone(name) => self.pod_gone(&in_namespace(name)),
            Act::PodForced(name) => {
                let name: Text = in_namespace(name);
                if let Some(pod) = self.api.pods.get(&name).cloned() {
                    self.api.remove::<Pod>(&name);
                    self.pod_ends_after(&pod.uid, FORCED);
                }
            }
            Act::NewSandbox(name) => {
                let node = self.api.nodes.get(name);
                if let Some(id) = node.and_then(|it| self.machines.of_node.get(&it.uid)) {
                    self.renew_sandbox(*id);
                }
            }
            Act::Claim(name, addresses) => {
                let addresses = addresses.iter().map(|it| addr(it)).collect();
                self.put_claim(in_namespace(name), "pool".into(), addresses, None);
            }
            Act::ClaimGone(name) => self.api.delete::<Claim>(&in_namespace(name)),
            Act::Drain(node, block) => {
                let drain = [cidr(block)].into_iter().collect();
                let requests = Requests {
                    drain,
                    ..Requests::default()
                };
                self.request_of(node, requests);
            }
            Act::Withdraw(node, ranges) => {
                let withdraw = ranges.iter().map(|it| cidr(it)).collect();
                let requests = Requests {
                    withdraw,
                    ..Requests::default()
                };
                self.request_of(node, requests);
            }
            Act::SecondPool(spec) => {
                let uid = self.api.uid();
                let pool = super::api::new_pool("second".into(), uid, spec(), self.now);
                self.api.put(pool);
            }
            Act::Edit(edit) => {
                if let Some(pool) = self.api.pools.get("pool").cloned() {
                    let mut pool = Pool::clone(&pool);
                    edit(pool.spec.as_mut().unwrap());
                    pool.generation += 1;
                    self.api.put(pool);
                }
            }
            Act::PoolGone => self.api.delete::<Pool>(&"pool".into()),
            Act::HandOver => {
                if let Some(leader) = self.leader() {
                    self.stop(leader);
                }
            }
            Act::LeaderKilled => {
                if let Some(leader) = self.leader() {
                    self.end(leader, "is killed");
                }
            }
            Act::ClocksBack => {
                for process in &mut self.processes {
                    process.clocks.wall_off = -HOUR;
                }
            }
            Act::Backup => {
                self.plan.restore = Some((self.now, Time::MAX));
                self.back_up();
            }
            Act::Restore => {
                self.plan.restore = self.plan.restore.map(|(backup, _)| (backup, self.now));
                self.restore();
            }
            Act::Cooldown => return self.after(COOLDOWN, Due::Script(nth + 1)),
            Act::After(pause) => return self.after(pause, Due::Script(nth + 1)),
        }
        self.publish();
        if let Some(Act::After(_)) = self.script.and_then(|it| it.acts.get(nth + 1)) {
            return self.after(0, Due::Script(nth + 1));
        }
        let pause = *self.rng.pick(&[CALM, 20 * MS, SECOND]);
        self.after(pause, Due::Script(nth + 1));
    }

    fn leader(&self) -> Option<RunId> {
        let leads = |run: &Run| matches!(run.elector.leadership(), Leadership::Leading(_));
        let mut all = self.processes.iter().enumerate();
        let (process, it) = all.find(|(_, it)| it.run.as_ref().is_some_and(leads))?;
        Some(RunId {
            process,
            incarnation: it.incarnation,
        })
    }

    /// Registers a new machine under this name.
    fn register_machine(&mut self, name: &str, max_pods: u16) {
        let number = self.machines.hosts.len();
        let machine = MachineIdentity {
            provider_id: Some(format!("cloud://{number}").into()),
            machine_id: Some(format!("m{number}").into()),
        };
        let node = new_node(name.into(), self.api.uid());
        self.register_in_script(Node {
            addresses: [addr(&format!("192.168.0.{}", number + 1))].into(),
            machine,
            max_pods,
            ..node
        });
    }

    fn register_in_script(&mut self, node: Node) {
        let node = Node {
            labels: [(CLASS.into(), SELECTED.into())].into(),
            ..node
        };
        self.log(Some(&node.name), || format!("node {} is created", node.uid));
        self.settle_in(&node);
        self.api.put(node);
    }

    fn request_of(&mut self, node: &str, requests: Requests) {
        if let Some(subnet) = self.api.subnets.get(node).cloned() {
            self.request(&subnet, requests);
        }
    }

    fn run_in_script(&mut self, node: &str, name: &str, wants: Option<Wants>) {
        let Some(node) = self.api.nodes.get(node).cloned() else {
            return;
        };
        let (uid, name) = if let Some(Wants::Sticky) = wants {
            self.put_sticky_pod(&node, name)
        } else {
            let uid = self.api.uid();
            let (claim, machine) = self.claim_of_pod(&uid, name, wants);
            self.put_pod(&node, uid, name, [].into(), claim, machine)
        };
        if let Some(id) = self.machines.of_node.get(&node.uid).copied() {
            let on = (id, node.uid.clone());
            self.machines.of_pod.insert(uid.clone(), on);
            self.host_runs(id, &uid, &name);
        }
    }

    /// Returns the virtual machine of a new pod.
    fn machine_of_pod(&mut self, pod: &ObjectUid, vmi: &str) -> VirtualMachine {
        let vmi: ObjectUid = vmi.into();
        self.migrations.note_vmi(pod, &vmi);
        VirtualMachine {
            vmi,
            is_migrated_to: false,
        }
    }

    /// Returns the claim and the virtual machine of a new pod.
    fn claim_of_pod(
        &mut self,
        uid: &ObjectUid,
        name: &str,
        wants: Option<Wants>,
    ) -> (Option<(ClaimName, ClaimSource)>, Option<VirtualMachine>) {
        match wants {
            None | Some(Wants::Sticky) => (None, None),
            Some(Wants::Claim(claim)) => (Some((in_namespace(claim), ClaimSource::User)), None),
            Some(Wants::Machine(claim, vmi)) => {
                let machine = self.machine_of_pod(uid, vmi);
                (
                    Some((in_namespace(claim), ClaimSource::User)),
                    Some(machine),
                )
            }
            Some(Wants::Interface(claim)) => {
                let machine = self.machine_of_pod(uid, "vmi");
                let claim = in_namespace(claim);
                self.want_ipam_claim_for(uid, &claim);
                (Some((claim, ClaimSource::IpamClaim)), Some(machine))
            }
            Some(Wants::Address(address)) => (self.asks_for(uid, name, addr(address), false), None),
            Some(Wants::AddressByCni(address)) => {
                (self.asks_for(uid, name, addr(address), true), None)
            }
        }
    }

    /// For how long an agent's watches deliver nothing after a reboot.
    pub fn silence_after_reboot(&self) -> u64 {
        self.script.map_or(0, |it| it.silence_after_reboot)
    }

    /// Whether a run that follows a script is over, although its time is not. For [`QUIET`] since the end of the faults,
    /// nothing was requested and no pod ended, and no kubelet has yet to end a deleted pod. So nothing may happen any
    /// more. If the last change of a script leaves a node without pods, its pool needs a shorter `idleSeconds`.
    pub fn is_over(&self) -> bool {
        let (write, request) = (self.checks.last_write.0, self.checks.last_request.0);
        let machines = self.machines.last_write.max(self.machines.last_end);
        let last = write.max(request).max(machines);
        let is_quiet = self.now > last.max(self.plan.faults_for) + QUIET;
        self.script.is_some() && is_quiet && !self.runs_deleted_pods()
    }

    fn runs_deleted_pods(&self) -> bool {
        let live: BTreeSet<&ObjectUid> = self.api.pods.live.values().map(|pod| &pod.uid).collect();
        let hosts = self.machines.hosts.iter().filter(|host| !host.is_gone);
        let mut runs = hosts.flat_map(Host::pods);
        runs.any(|uid| !live.contains(uid))
    }
}
