//! The controller as a state machine: events in, requests out.
//!
//! # Guarantees
//! - Nothing is carved before nodes, pools, NodeSubnets, service ranges and pods were listed in
//!   full, the lease is held, and the fence is done.
//! - Critical requests (podCIDRs and what they wait for) come first; everything else is sent only
//!   while none of them waits.
//! - What an answer shows is taken in at once, whoever led when it was asked for; decisions of an
//!   earlier tenure are dropped with it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::blocks::Step;
use super::figures::Figures;
use super::leader::{Leader, Room, Told};
use super::map::{Answer, Ask};
use super::report::Report;
use super::totals::Totals;
use super::{Now, Purpose};
use crate::api::{Allocate, block_name};
use crate::cluster::lease::Leadership;
use crate::cluster::request::{Outcome, Refusal, Request, RequestId};
use crate::cluster::seen::{Block, Change, Node, Object, Pod, Pool, ServiceRange, Subnet, Text};
use crate::cluster::table::{Delta, Table};
use crate::cluster::world::World;
use crate::ipam::{Cidr, Family};

/// What an operator may set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Service ranges where the cluster does not tell them
    pub service_cidrs: Vec<Cidr>,
    /// How many critical requests may be in flight
    pub critical_in_flight: usize,
    /// How many others
    pub background_in_flight: usize,
    /// How long a pool carves nothing after somebody else wrote a podCIDR in its range
    pub second_writer_hold: Duration,
    /// Whether to make a default pool where there is none, and how it allocates
    pub default_pool: Option<Allocate>,
    /// Its ranges; none: see [`super::bootstrap`]
    pub default_pool_cidrs: Vec<Cidr>,
    /// How long an address may be without a pod before its node is asked about it
    pub leak_grace: Duration,
    /// Whether [`Controller::map`] will be asked for the names of pods, which costs memory for each
    pub pod_names: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            service_cidrs: Vec::new(),
            critical_in_flight: 64,
            background_in_flight: 48,
            second_writer_hold: Duration::from_secs(60),
            default_pool: None,
            default_pool_cidrs: Vec::new(),
            leak_grace: Duration::from_secs(300),
            pod_names: false,
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step of the watch of nodes
    Nodes(Change<Node>),
    /// A step of the watch of IPPools
    Pools(Change<Pool>),
    /// A step of the watch of NodeSubnets
    Subnets(Change<Subnet>),
    /// A step of the watch of IPAMBlocks
    Blocks(Change<Block>),
    /// A step of the watch of ServiceCIDRs
    ServiceRanges(Change<ServiceRange>),
    /// A step of the watch of pods
    Pods(Change<Pod>),
    /// The elector's word
    Leadership(Leadership),
    /// The answer to a request
    Answer(RequestId, Outcome),
}

/// A request to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Comes back with the answer.
    pub id: RequestId,
    /// What to ask
    pub request: Request,
    /// For writes, the tenure it was decided under: sent only while that tenure is valid.
    pub term: Option<Text>,
    /// The loop it belongs to
    pub loop_name: &'static str,
}

/// What the controller can be asked about itself.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Kinds not listed yet
    pub missing: Vec<&'static str>,
    /// Of a leader: what the fence still does, or nothing once it deals
    pub fencing: Option<String>,
    /// Whether it leads and deals
    pub dealing: bool,
    /// Every pool and family
    pub pools: Vec<(Text, Family, Figures)>,
    /// Addresses of every pool and family that allocates blocks
    pub addresses: Vec<(Text, Family, Totals)>,
    /// Blocks by state: held, recalled, provisional, quarantined, overdue
    pub blocks: BTreeMap<&'static str, usize>,
    /// Addresses whose pods are gone, the age of the oldest, and how many nodes are asked about
    pub leaks: (usize, Duration, usize),
    /// Why there is no default pool though there should be one
    pub trouble: Option<String>,
    /// Addresses that several pods report
    pub doubled: usize,
    /// Entries of agents' statuses that make no sense
    pub refused: u64,
    /// Since when the oldest range rests that should be over
    pub oldest_rest: Duration,
    /// Nodes that wait, by reason
    pub waiting: BTreeMap<&'static str, usize>,
    /// Nodes that wait for each pool; none for those that nobody waits for
    pub pool_waiting: BTreeMap<Text, i64>,
    /// For how long the node waits that waits longest for a pool
    pub oldest_wait: Duration,
    /// When pools will have nothing left, where that can be told
    pub exhausts: Vec<(Text, Family, jiff::Timestamp)>,
    /// Pairs of nodes with common addresses
    pub overlaps: usize,
    /// Ranges kept because a write's outcome is unclear
    pub unclear: usize,
    /// podCIDRs that somebody else wrote while this leader dealt
    pub second_writer: u64,
    /// Depth and retries of each loop's queue
    pub queues: Vec<(&'static str, usize, u64)>,
}

struct Pending {
    purpose: Purpose,
    term: Text,
    /// The epoch of the table that the answer belongs to, when it was sent.
    epoch: u64,
    /// The UID then known under the name.
    known: Option<Text>,
}

/// The controller.
pub struct Controller {
    settings: Settings,
    world: World,
    leader: Option<Leader>,
    pending: BTreeMap<RequestId, Pending>,
    next_id: u64,
    reports: Vec<Report>,
    stopping: bool,
    second_writer: u64,
}

impl Controller {
    /// A controller that knows nothing yet.
    pub fn new(settings: Settings) -> Self {
        let mut world = World::default();
        if settings.pod_names {
            world.pods.keep_names();
        }
        Controller {
            settings,
            world,
            leader: None,
            pending: BTreeMap::new(),
            next_id: 0,
            reports: Vec::new(),
            stopping: false,
            second_writer: 0,
        }
    }

    /// Takes in an event.
    pub fn on(&mut self, event: Event, now: Now) {
        match event {
            Event::Nodes(change) => {
                for delta in self.world.nodes.change(change) {
                    self.node_changed(&delta, now);
                }
            }
            Event::Subnets(change) => {
                for delta in self.world.subnets.change(change) {
                    self.subnet_changed(&delta, now);
                }
            }
            Event::Blocks(change) => {
                for delta in self.world.blocks.change(change) {
                    self.block_changed(&delta, now);
                }
            }
            Event::Pools(change) => {
                for delta in self.world.pools.change(change) {
                    self.pool_changed(&delta);
                }
            }
            Event::ServiceRanges(change) => {
                let changed = !self.world.services.change(change).is_empty();
                if let Some(leader) = self.leader.as_mut().filter(|_| changed) {
                    leader.services_changed();
                }
            }
            Event::Pods(change) => {
                self.world.pods.change(change);
            }
            Event::Leadership(leadership) => self.leadership(leadership, now),
            Event::Answer(id, outcome) => self.answered(id, &outcome, now),
        }
    }

    /// The next request to send, or nothing for now. Call it until it gives nothing, and again after
    /// every event and at [`Controller::wake_at`].
    pub fn poll(&mut self, now: Now) -> Option<Outgoing> {
        let leader = self.leader.as_mut()?;
        if now.mono >= leader.tenure.valid_until {
            return None;
        }
        let critical = self
            .pending
            .values()
            .filter(|p| is_critical(&p.purpose))
            .count();
        let background = self.pending.len() - critical;
        let room = Room {
            critical: critical < self.settings.critical_in_flight,
            background: background < self.settings.background_in_flight && critical <= 2,
        };
        if !leader.dealing {
            if !room.critical || self.stopping {
                return None;
            }
            if let Some(found) = leader.fence.next(&self.world, now) {
                return Some(self.send(found));
            }
            if !leader.fence.is_done() {
                return None;
            }
            leader.begin_dealing(&self.world, &self.settings, &mut self.reports, now);
        }
        let found = leader.next(
            &self.world,
            &self.settings,
            &mut self.reports,
            room,
            self.stopping,
            now,
        )?;
        Some(self.send(found))
    }

    /// Monotonic time at which [`Controller::poll`] may have something again without an event.
    pub fn wake_at(&self) -> Option<Duration> {
        self.leader.as_ref()?.wake_at()
    }

    /// Takes the events for people that have come up.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// Starts no new writes; what is in flight or unclear is seen through.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether the lease may be handed over cleanly: nothing is in flight or of unclear outcome, and
    /// the fence against earlier leaders was completed.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty() && self.leader.as_ref().is_none_or(Leader::is_settled)
    }

    /// Whether nothing is left to wait for once [`Controller::stop`] was called.
    pub fn is_quiet(&self) -> bool {
        self.pending.is_empty()
            && self
                .leader
                .as_ref()
                .is_none_or(|l| !l.dealing || l.is_settled())
    }

    /// Whether it leads and the fence is done.
    pub fn is_dealing(&self) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.dealing)
    }

    /// What people ask of the address space, whether it leads or not.
    pub fn map(&self, ask: &Ask) -> Answer {
        super::map::answer(&self.world, ask)
    }

    /// What it knows of itself.
    pub fn view(&mut self, now: Now) -> View {
        let mut view = View {
            missing: self.world.missing(),
            second_writer: self.second_writer,
            doubled: self.world.pods.doubled().len(),
            ..View::default()
        };
        if let Some(leader) = &mut self.leader {
            leader.describe(&mut view, &self.world, now);
        }
        view
    }

    fn send(&mut self, (request, purpose): (Request, Purpose)) -> Outgoing {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let term = self
            .leader
            .as_ref()
            .map_or_else(|| "".into(), |leader| leader.tenure.term.clone());
        let loop_name = purpose.loop_name();
        let (epoch, known) = match &purpose {
            Purpose::Subnet { name, .. } | Purpose::SubnetRead { name } => {
                about(&self.world.subnets, name)
            }
            Purpose::DefaultPool => (self.world.pools.epoch(), None),
            Purpose::Answer { name } => about(&self.world.subnets, name),
            Purpose::FenceSubnets => (self.world.subnets.epoch(), None),
            Purpose::FenceBlocks => (self.world.blocks.epoch(), None),
            Purpose::Block { cidr, .. } => about(&self.world.blocks, &block_name(cidr)),
            Purpose::Pool { name } | Purpose::PoolRead { name } => about(&self.world.pools, name),
            _ => (self.world.nodes.epoch(), None),
        };
        let out_term = request.is_write().then(|| term.clone());
        self.pending.insert(
            id,
            Pending {
                purpose,
                term,
                epoch,
                known,
            },
        );
        Outgoing {
            id,
            request,
            term: out_term,
            loop_name,
        }
    }

    fn leadership(&mut self, leadership: Leadership, now: Now) {
        match leadership {
            Leadership::Leading(tenure) => match &mut self.leader {
                Some(leader) if leader.tenure.term == tenure.term => leader.tenure = tenure,
                _ => {
                    self.leader = Some(Leader::new(tenure, &self.settings, now));
                }
            },
            Leadership::Standby { .. } | Leadership::Released => self.leader = None,
        }
    }

    fn node_changed(&mut self, delta: &Delta<Node>, now: Now) {
        self.world.note_node(delta);
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        leader.node_changed(delta, &mut self.reports, &mut self.second_writer, now);
    }

    fn subnet_changed(&mut self, delta: &Delta<Subnet>, now: Now) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        let Some(subnet) = delta.after.as_ref().or(delta.before.as_ref()) else {
            return;
        };
        let (before, after) = (delta.before.as_ref(), delta.after.as_ref());
        let told = Told {
            reported: before.map(|it| &it.report) != after.map(|it| &it.report),
            requested: before.map(|it| &it.requests) != after.map(|it| &it.requests),
        };
        leader.subnet_changed(&subnet.name, told, &self.world, &mut self.reports, now);
    }

    fn block_changed(&mut self, delta: &Delta<Block>, now: Now) {
        if let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) {
            leader.block_changed(delta, &self.world, now);
        }
    }

    fn pool_changed(&mut self, delta: &Delta<Pool>) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        let Some(pool) = delta.after.as_ref().or(delta.before.as_ref()) else {
            return;
        };
        let same = match (&delta.before, &delta.after) {
            (Some(b), Some(a)) => {
                (&b.uid, &b.spec, b.deleting, &b.finalizers)
                    == (&a.uid, &a.spec, a.deleting, &a.finalizers)
            }
            _ => false,
        };
        leader.pool_changed(&pool.name, !same, delta.after.is_some());
    }

    fn answered(&mut self, id: RequestId, outcome: &Outcome, now: Now) {
        let Some(pending) = self.pending.remove(&id) else {
            return;
        };
        let taken = self.take_in(&pending, outcome, now);
        let Some(leader) = self
            .leader
            .as_mut()
            .filter(|leader| leader.tenure.term == pending.term)
        else {
            return;
        };
        leader.answered(
            &pending.purpose,
            outcome,
            taken,
            &self.world,
            &mut self.reports,
            now,
        );
    }

    /// What an answer shows of the world. Returns whether a list was taken.
    fn take_in(&mut self, pending: &Pending, outcome: &Outcome, now: Now) -> bool {
        let epoch = pending.epoch;
        match (outcome, &pending.purpose) {
            (Outcome::Node(node), _) => {
                if let Some(delta) = self.world.nodes.answer(node.clone(), epoch) {
                    self.node_changed(&delta, now);
                }
            }
            (Outcome::Subnet(subnet), _) => {
                if let Some(delta) = self.world.subnets.answer(subnet.clone(), epoch) {
                    self.subnet_changed(&delta, now);
                }
            }
            (Outcome::Pool(pool), _) => {
                if let Some(delta) = self.world.pools.answer(pool.clone(), epoch) {
                    self.pool_changed(&delta);
                }
            }
            // A creation counts once the watch shows it: only the watch tells what stood before it.
            (Outcome::Block(block), _) if self.world.blocks.get(&block.name).is_some() => {
                if let Some(delta) = self.world.blocks.answer(block.clone(), epoch) {
                    self.block_changed(&delta, now);
                }
            }
            (Outcome::Blocks(blocks), _) => {
                let Some(deltas) = self.world.blocks.replace(blocks.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.block_changed(&delta, now);
                }
                return true;
            }
            (Outcome::Refused(Refusal::Missing) | Outcome::Gone, Purpose::Block { cidr, .. }) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.blocks.forget(&block_name(cidr), uid));
                if let Some(delta) = delta {
                    self.block_changed(&delta, now);
                }
            }
            (Outcome::Nodes(nodes), _) => {
                let Some(deltas) = self.world.nodes.replace(nodes.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.node_changed(&delta, now);
                }
                return true;
            }
            (Outcome::Subnets(subnets), _) => {
                let Some(deltas) = self.world.subnets.replace(subnets.clone(), epoch) else {
                    return false;
                };
                for delta in deltas {
                    self.subnet_changed(&delta, now);
                }
                return true;
            }
            (
                Outcome::Refused(Refusal::Missing),
                Purpose::Assign { name, uid }
                | Purpose::AssignRead { name, uid }
                | Purpose::Touch { name, uid }
                | Purpose::TouchRead { name, uid },
            ) => {
                if let Some(delta) = self.world.nodes.forget(name, uid) {
                    self.node_changed(&delta, now);
                }
            }
            (
                Outcome::Refused(Refusal::Missing) | Outcome::Gone,
                Purpose::Subnet { name, .. }
                | Purpose::SubnetRead { name }
                | Purpose::Answer { name },
            ) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.subnets.forget(name, uid));
                if let Some(delta) = delta {
                    self.subnet_changed(&delta, now);
                }
            }
            (
                Outcome::Refused(Refusal::Missing),
                Purpose::Pool { name } | Purpose::PoolRead { name },
            ) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.pools.forget(name, uid));
                if let Some(delta) = delta {
                    self.pool_changed(&delta);
                }
            }
            _ => {}
        }
        false
    }
}

fn about<T: Object>(table: &Table<T>, name: &str) -> (u64, Option<Text>) {
    (
        table.epoch(),
        table.get(name).map(|object| object.uid().clone()),
    )
}

fn is_critical(purpose: &Purpose) -> bool {
    match purpose {
        Purpose::Subnet { urgent, .. } => *urgent,
        Purpose::Block { step, .. } => matches!(step, None | Some(Step::Create)),
        _ => matches!(purpose.loop_name(), "podcidr" | "fence"),
    }
}
