//! Scripts: short courses of changes for the runs with deviations (see `deviations`).

use cadastre_api::{AllocationMode, Borrowing, FirstBlock, IPPoolSpec, NodeAssignment, Requests};
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::{ClaimName, ObjectUid};
use cadastre_controller::cluster::objects::{
    Claim, ClaimSource, MachineIdentity, Pod, Pool, Text, VirtualMachine,
};
use cadastre_core::Addr;

use super::clock::{MS, SECOND, Time};
use super::deviations::Deviations;
use super::exhaustive::new_node;
use super::plan::{Faults, Network, Plan};
use super::pool_workload::{service, small_pool};
use super::process::Run;
use super::rng::Rng;
use super::run::{Due, RunId, Sim};
use super::settle::QUIET;
use super::trace::Trace;
use super::workload::{addr, cidr};

/// How long the cluster usually has after a change, until the next change. It is enough for everything to settle.
const CALM: u64 = 8 * SECOND;
/// How long a pod runs on that was deleted by force: longer than the agent waits before it looks for a leak.
const FORCED: u64 = 40 * SECOND;
/// Long enough for a released address to be free again, and for its block to go to another node.
const COOLDOWN: u64 = 40 * SECOND;

/// A change of an object.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// A machine registers as a Node with this name.
    Node(&'static str),
    /// Another component puts a finalizer on the Node with this name.
    Finalizer(&'static str),
    /// The Node with this name is deleted.
    NodeGone(&'static str),
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
    /// A claim with this name is created, for these addresses, or for any address if there are none.
    Claim(&'static str, &'static [&'static str]),
    /// The claim with this name is deleted.
    ClaimGone(&'static str),
    /// A user asks the agent of this Node to drain the block.
    Drain(&'static str, &'static str),
    /// The pool is edited.
    Edit(fn(&mut IPPoolSpec)),
    /// The pool is deleted.
    PoolGone,
    /// The leader is asked to stop, so the other controller takes over.
    HandOver,
    /// Nothing happens for [`COOLDOWN`].
    Cooldown,
}

/// The addresses that a pod wants.
#[derive(Clone, Copy, Debug)]
pub enum Wants {
    /// Those of the claim with this name.
    Claim(&'static str),
    /// Those of the claim with this name, for the only virtual machine.
    Machine(&'static str),
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
    /// Whether the nodes announce their blocks as routes.
    announces: bool,
    acts: &'static [Act],
}

/// What most scripts have: a pool with one block of two addresses.
const USUAL: Script = Script {
    name: "",
    pool: || pool(AllocationMode::Blocks, "10.245.0.0/31", 31),
    silence_after_reboot: 0,
    announces: false,
    acts: &[],
};

pub static SCRIPTS: [Script; 18] = [
    Script {
        name: "podCIDRs: a node is replaced",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "addresses: pods follow each other",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "blocks: from one node to another",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "forced: a pod is deleted that runs on",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodForced("w"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "return: a node that gave its block away wants one again",
        silence_after_reboot: 20 * SECOND,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::Pod("a", "x"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
    Script {
        name: "dead: a node with a block and a pod is deleted",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Finalizer("a"),
            Act::NodeGone("a"),
            Act::Pod("b", "w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "again: a node's machine registers again",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeAgain("a"),
            Act::Finalizer("b"),
            Act::NodeGone("b"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "hand-over: the leader stops",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::HandOver,
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::HandOver,
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "assigned: a pool assigns a range to a node",
        pool: || IPPoolSpec {
            assignments: vec![NodeAssignment {
                node: "b".to_owned(),
                cidrs: vec!["10.244.0.0/24".to_owned()],
            }],
            ..two_pod_cidrs()
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Stranger("a", "10.244.0.7"),
            Act::NodeAgain("b"),
            Act::Edit(|spec| "a".clone_into(&mut spec.assignments[0].node)),
            Act::NodeAgain("b"),
            Act::NodeAgain("a"),
        ],
        ..USUAL
    },
    Script {
        name: "edits: a pool of blocks changes and is deleted",
        pool: || pool(AllocationMode::Blocks, "10.245.0.0/30", 31),
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Edit(|spec| spec.ipv4.as_mut().unwrap().cidrs = vec!["10.245.1.0/30".to_owned()]),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::PoolGone,
            Act::PodGone("w"),
            Act::NodeGone("a"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "drain: a block is drained while a pod uses it",
        pool: || pool(AllocationMode::Blocks, "10.245.0.0/30", 31),
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Drain("a", "10.245.0.0/31"),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "claim: the pods of a claim run on one node and then on another",
        pool: || pool(AllocationMode::Blocks, "10.245.0.0/30", 31),
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &[]),
            Act::PodWith("a", "v", Wants::Claim("c")),
            Act::Pod("a", "x"),
            Act::PodGone("v"),
            Act::PodWith("b", "w", Wants::Claim("c")),
            Act::ClaimGone("c"),
            Act::PodGone("w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "withdrawn: a claim is for an address in a node's block",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Pod("a", "v"),
            Act::Claim("c", &["10.245.0.1"]),
            Act::PodWith("b", "w", Wants::Claim("c")),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::PodGone("w"),
            Act::ClaimGone("c"),
        ],
        ..USUAL
    },
    Script {
        name: "announced: a block goes to another node, and its route, too",
        announces: true,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::NodeGone("a"),
        ],
        ..USUAL
    },
    Script {
        name: "migration: a virtual machine moves to another node",
        pool: || pool(AllocationMode::Blocks, "10.245.0.0/30", 31),
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &[]),
            Act::PodWith("a", "v", Wants::Machine("c")),
            Act::PodWith("b", "w", Wants::Machine("c")),
            Act::Migrated("w"),
            Act::PodGone("v"),
            Act::PodWith("a", "x", Wants::Machine("c")),
            Act::PodGone("x"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
    Script {
        name: "asks: pods ask for addresses in another node's block",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::PodWith("b", "v", Wants::Address("10.245.0.1")),
            Act::PodWith("b", "w", Wants::AddressByCni("10.245.0.2")),
            Act::PodGone("v"),
            Act::PodGone("w"),
            Act::Cooldown,
            Act::PodWith("a", "x", Wants::AddressByCni("10.245.0.1")),
            Act::PodGone("x"),
        ],
        ..USUAL
    },
    Script {
        name: "sticky: a pod of a StatefulSet comes back on another node",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::PodWith("a", "web-0", Wants::Sticky),
            Act::PodGone("web-0"),
            Act::PodWith("b", "web-0", Wants::Sticky),
            Act::PodGone("web-0"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "lent: a node borrows part of a block and gives it back",
        pool: || IPPoolSpec {
            borrowing: Borrowing::WhenExhausted,
            ..two_immediate_blocks()
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Pod("b", "v"),
            Act::Pod("b", "w"),
            Act::Pod("b", "x"),
            Act::Pod("b", "y"),
            Act::Pod("b", "z"),
            Act::PodGone("v"),
            Act::PodGone("z"),
            Act::Cooldown,
            Act::NodeAgain("a"),
        ],
        ..USUAL
    },
];

fn two_pod_cidrs() -> IPPoolSpec {
    pool(AllocationMode::NodeCIDR, "10.244.0.0/23", 24)
}

/// A pool of two blocks of four addresses. Each of the first two nodes gets one at once.
fn two_immediate_blocks() -> IPPoolSpec {
    IPPoolSpec {
        first_block: FirstBlock::Immediate,
        ..pool(AllocationMode::Blocks, "10.245.0.0/29", 30)
    }
}

/// A pool without a gateway: pods can have all of its addresses.
fn pool(mode: AllocationMode, cidr: &str, block_size: u32) -> IPPoolSpec {
    let mut spec = small_pool(mode, cidr, block_size);
    spec.ipv4.as_mut().unwrap().gateway = Some("None".to_owned());
    spec
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
        _ => 0,
    });
    // The simulation derives from these two whether routes and FRRConfigurations are written.
    let (names, slice) = if script.announces { (4, 21) } else { (3, 23) };
    Plan {
        processes: 2,
        names,
        pools: 1,
        blocks: 10_000,
        slice,
        crowded: false,
        limit: 4,
        faults_for: (acts + 1) * CALM + waits.sum::<u64>(),
        settle_for: 200 * SECOND,
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
        faults: Faults::default(),
        skew: 0,
        foreign_allocator: false,
        tampering: false,
        tampering_blocks: false,
        claims: 0,
        agents: true,
        ..Plan::draw(&mut Rng::new(0))
    }
}

impl Sim {
    pub fn scripted(script: &'static Script, deviations: Deviations, trace: Trace) -> Self {
        let mut sim = Sim::under(plan(script), Rng::chosen(deviations), None, trace);
        sim.script = Some(script);
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
            Act::Node(name) => {
                let machine = MachineIdentity {
                    provider_id: Some(format!("cloud://{nth}").into()),
                    machine_id: Some(format!("m{nth}").into()),
                };
                let address = addr(&format!("192.168.0.{}", nth + 1));
                self.register_in_script(name, &[address], machine);
            }
            Act::Finalizer(name) => {
                let node = self.api.nodes.get(name).map(|it| it.uid.clone());
                self.api.finalized.extend(node);
            }
            Act::NodeGone(name) => self.delete_node_named(&name.into()),
            Act::NodeAgain(name) => {
                if let Some(before) = self.api.nodes.get(name).cloned() {
                    self.api.delete_node(&before.name);
                    self.register_in_script(name, &before.addresses, before.machine.clone());
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
            Act::Claim(name, addresses) => {
                let addresses = addresses.iter().map(|it| addr(it)).collect();
                self.put_claim(in_namespace(name), "pool".into(), addresses, None);
            }
            Act::ClaimGone(name) => self.api.delete::<Claim>(&in_namespace(name)),
            Act::Drain(node, block) => {
                if let Some(subnet) = self.api.subnets.get(node).cloned() {
                    let drain = [cidr(block)].into_iter().collect();
                    let requests = Requests {
                        drain,
                        ..Requests::default()
                    };
                    self.request(&subnet, requests);
                }
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
                let mut all = self.processes.iter().enumerate();
                let leads = |run: &Run| matches!(run.elector.leadership(), Leadership::Leading(_));
                let leader = all.find(|(_, it)| it.run.as_ref().is_some_and(leads));
                let leader = leader.map(|(process, it)| (process, it.incarnation));
                if let Some((process, incarnation)) = leader {
                    self.stop(RunId {
                        process,
                        incarnation,
                    });
                }
            }
            Act::Cooldown => return self.after(COOLDOWN, Due::Script(nth + 1)),
        }
        self.publish();
        let pause = *self.rng.pick(&[CALM, 20 * MS, SECOND]);
        self.after(pause, Due::Script(nth + 1));
    }

    fn register_in_script(&mut self, name: &str, addresses: &[Addr], machine: MachineIdentity) {
        let mut node = new_node(name.into(), self.api.uid());
        node.addresses = addresses.into();
        node.machine = machine;
        self.log(Some(name), || format!("node {} is created", node.uid));
        self.settle_in(&node);
        self.api.put(node);
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
            Some(Wants::Machine(claim)) => {
                let vmi: ObjectUid = "vmi".into();
                self.migrations.note_vmi(uid, &vmi);
                let machine = VirtualMachine {
                    vmi,
                    is_migrated_to: false,
                };
                (
                    Some((in_namespace(claim), ClaimSource::User)),
                    Some(machine),
                )
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

    /// Whether a run that follows a script is over, although its time is not: nothing was requested for [`QUIET`] since
    /// the end of the faults, so nothing may happen any more.
    pub fn is_over(&self) -> bool {
        let (write, request) = (self.checks.last_write.0, self.checks.last_request.0);
        let last = write.max(request).max(self.machines.last_write);
        self.script.is_some() && self.now > last.max(self.plan.faults_for) + QUIET
    }
}
