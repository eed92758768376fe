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

use super::fence::Fence;
use super::podcidr::{PodCidrs, Reason};
use super::pool::{Figures, PoolLoop, figures};
use super::quarantine::Quarantine;
use super::registry::{Registry, Synced};
use super::report::{About, OVERLAPPING, Report, SECOND_WRITER, UNREADABLE};
use super::subnet::Subnets;
use super::{Context, Now, Purpose};
use crate::cluster::lease::{Leadership, Takeover, Tenure};
use crate::cluster::request::{Outcome, Refusal, Request, RequestId};
use crate::cluster::seen::{Change, Node, Object, Pod, Pool, ServiceRange, Subnet, Text};
use crate::cluster::table::Delta;
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
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            service_cidrs: Vec::new(),
            critical_in_flight: 64,
            background_in_flight: 16,
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
    /// Nodes that wait, by reason
    pub waiting: BTreeMap<&'static str, usize>,
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

/// What exists only while leading.
struct Leader {
    tenure: Tenure,
    fence: Fence,
    /// Whether the registry is built and the loops run.
    dealing: bool,
    registry: Registry,
    podcidrs: PodCidrs,
    subnets: Subnets,
    quarantine: Quarantine,
    pools: PoolLoop,
    /// Pools have to be surveyed again.
    survey: bool,
    /// The ranges of pools have changed, and with them what NodeSubnets say of them.
    reattribute: bool,
}

impl Controller {
    /// A controller that knows nothing yet.
    pub fn new(settings: Settings) -> Self {
        Controller {
            settings,
            world: World::default(),
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
                    self.subnet_changed(&delta);
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
                    leader.survey = true;
                }
            }
            Event::Pods(change) => {
                self.world.pods.change(change);
            }
            Event::Leadership(leadership) => self.leadership(leadership),
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
        let room = (
            critical < self.settings.critical_in_flight,
            background < self.settings.background_in_flight && critical <= 2,
        );
        if !leader.dealing {
            if let Some(found) = leader
                .fence
                .next(&self.world, now)
                .filter(|_| !self.stopping)
            {
                return Some(self.send(found));
            }
            if !leader.fence.is_done() {
                return None;
            }
            leader.begin_dealing(&self.world, &self.settings, &mut self.reports, now);
        }
        let (request, purpose) = leader.next(
            &self.world,
            &self.settings,
            &mut self.reports,
            room,
            self.stopping,
            now,
        )?;
        Some(self.send((request, purpose)))
    }

    /// Monotonic time at which [`Controller::poll`] may have something again without an event.
    pub fn wake_at(&self) -> Option<Duration> {
        let leader = self.leader.as_ref()?;
        if !leader.dealing {
            return leader.fence.next_at();
        }
        let queues = [
            leader.podcidrs.queue.next_at(),
            leader.subnets.queue.next_at(),
            leader.quarantine.queue.next_at(),
            leader.pools.next_at(),
            leader.registry.pools.next_at(),
        ];
        queues.into_iter().flatten().min()
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
        let Some(leader) = &self.leader else {
            return self.pending.is_empty();
        };
        self.pending.is_empty() && leader.dealing && !leader.registry.has_unclear()
    }

    /// Whether it leads and the fence is done.
    pub fn is_dealing(&self) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.dealing)
    }

    /// What it knows of itself.
    pub fn view(&mut self) -> View {
        let mut view = View {
            missing: self.world.missing(),
            second_writer: self.second_writer,
            ..View::default()
        };
        let Some(leader) = &mut self.leader else {
            return view;
        };
        view.dealing = leader.dealing;
        if !leader.dealing {
            view.fencing = Some(leader.fence.progress(&self.world));
            return view;
        }
        view.overlaps = leader.registry.overlaps();
        view.unclear = leader.registry.unclear();
        for state in leader.registry.pools.iter() {
            for family in state.space.families() {
                view.pools.push((
                    state.name.clone(),
                    family,
                    figures(state, family, &leader.registry),
                ));
            }
        }
        for reason in leader.podcidrs.waiting() {
            *view.waiting.entry(reason.label()).or_default() += 1;
        }
        view.queues = vec![
            (
                "podcidr",
                leader.podcidrs.queue.len(),
                leader.podcidrs.queue.retries(),
            ),
            (
                "subnet",
                leader.subnets.queue.len(),
                leader.subnets.queue.retries(),
            ),
            (
                "quarantine",
                leader.quarantine.queue.len(),
                leader.quarantine.queue.retries(),
            ),
            (
                "pool",
                leader.pools.queue.len(),
                leader.pools.queue.retries(),
            ),
        ];
        view
    }

    fn send(&mut self, (request, purpose): (Request, Purpose)) -> Outgoing {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let term = self
            .leader
            .as_ref()
            .map(|leader| leader.tenure.term.clone())
            .unwrap_or_else(|| "".into());
        let loop_name = purpose.loop_name();
        let (epoch, known) = match &purpose {
            Purpose::Subnet { name } | Purpose::SubnetRead { name } => {
                about(&self.world.subnets, name)
            }
            Purpose::FenceSubnets => (self.world.subnets.epoch(), None),
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

    fn leadership(&mut self, leadership: Leadership) {
        match leadership {
            Leadership::Leading(tenure) => match &mut self.leader {
                Some(leader) if leader.tenure.term == tenure.term => leader.tenure = tenure,
                _ => self.leader = Some(Leader::new(tenure)),
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

    fn subnet_changed(&mut self, delta: &Delta<Subnet>) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        let Some(subnet) = delta.after.as_ref().or(delta.before.as_ref()) else {
            return;
        };
        leader.subnets.queue.add(subnet.name.clone());
        leader.release(&subnet.name, &self.world);
    }

    fn pool_changed(&mut self, delta: &Delta<Pool>) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        let Some(pool) = delta.after.as_ref().or(delta.before.as_ref()) else {
            return;
        };
        leader.pools.queue.add(pool.name.clone());
        let same = match (&delta.before, &delta.after) {
            (Some(b), Some(a)) => {
                (&b.uid, &b.spec, b.deleting, &b.finalizers)
                    == (&a.uid, &a.spec, a.deleting, &a.finalizers)
            }
            _ => false,
        };
        if !same {
            leader.survey = true;
            leader.reattribute = true;
        }
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
                    self.subnet_changed(&delta);
                }
            }
            (Outcome::Pool(pool), _) => {
                if let Some(delta) = self.world.pools.answer(pool.clone(), epoch) {
                    self.pool_changed(&delta);
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
                    self.subnet_changed(&delta);
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
                Purpose::Subnet { name } | Purpose::SubnetRead { name },
            ) => {
                let delta = pending
                    .known
                    .as_ref()
                    .and_then(|uid| self.world.subnets.forget(name, uid));
                if let Some(delta) = delta {
                    self.subnet_changed(&delta);
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

fn about<T: Object>(table: &crate::cluster::table::Table<T>, name: &str) -> (u64, Option<Text>) {
    (
        table.epoch(),
        table.get(name).map(|object| object.uid().clone()),
    )
}

fn is_critical(purpose: &Purpose) -> bool {
    matches!(purpose.loop_name(), "podcidr" | "fence")
}

impl Leader {
    fn new(tenure: Tenure) -> Self {
        Leader {
            fence: Fence::new(tenure.takeover, tenure.term.clone()),
            tenure,
            dealing: false,
            registry: Registry::default(),
            podcidrs: PodCidrs::default(),
            subnets: Subnets::default(),
            quarantine: Quarantine::default(),
            pools: PoolLoop::default(),
            survey: false,
            reattribute: false,
        }
    }

    fn begin_dealing(
        &mut self,
        world: &World,
        settings: &Settings,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        let (registry, overlapping) = Registry::rebuild(world, &settings.service_cidrs, now);
        self.registry = registry;
        self.dealing = true;
        self.pools.recall(world.pools.iter());
        self.pools.mark();
        for (name, synced) in overlapping {
            if let Some(node) = world.nodes.get(&name) {
                report_overlaps(node, &synced, reports);
            }
        }
        for node in world.nodes.iter() {
            if node.is_empty() {
                self.podcidrs.queue.add(node.name.clone());
            } else {
                self.subnets.queue.add(node.name.clone());
            }
            report_unreadable(node, reports);
        }
        for subnet in world.subnets.iter() {
            self.subnets.queue.add(subnet.name.clone());
        }
        for key in self.registry.rests.keys() {
            self.subnets.queue.add(key.0.clone());
            self.quarantine.watch(key.clone(), &self.registry);
        }
    }

    fn next(
        &mut self,
        world: &World,
        settings: &Settings,
        reports: &mut Vec<Report>,
        (critical, background): (bool, bool),
        stopping: bool,
        now: Now,
    ) -> Option<(Request, Purpose)> {
        if self.survey
            || self
                .registry
                .pools
                .next_at()
                .is_some_and(|at| at <= now.mono)
        {
            self.survey_pools(world, settings, now);
        }
        let mut cx = Context {
            world,
            registry: &mut self.registry,
            reports,
            now,
        };
        if critical {
            if let Some(found) = self.pools.next_finalizer(&cx).filter(|_| !stopping) {
                return Some(found);
            }
            if let Some(found) = self.podcidrs.next(&mut cx, stopping) {
                return Some(found);
            }
        }
        if stopping || !background || self.podcidrs.queue.has_ready(now.mono) {
            return None;
        }
        let mut waiting: BTreeMap<Text, i64> = BTreeMap::new();
        for reason in self.podcidrs.waiting() {
            if let Reason::Full { pools } | Reason::Barred { pools } = reason {
                for pool in pools {
                    *waiting.entry(pool.clone()).or_default() += 1;
                }
            }
        }
        self.subnets
            .next(&mut cx)
            .or_else(|| self.quarantine.next(&mut cx))
            .or_else(|| self.pools.next(&waiting, &mut cx))
    }

    fn survey_pools(&mut self, world: &World, settings: &Settings, now: Now) {
        self.survey = false;
        self.registry
            .pools
            .survey(world, &settings.service_cidrs, now.mono);
        self.podcidrs.wake();
        self.pools.mark();
        if std::mem::take(&mut self.reattribute) {
            for subnet in world.subnets.iter() {
                self.subnets.queue.add(subnet.name.clone());
            }
        }
    }

    fn node_changed(
        &mut self,
        delta: &Delta<Node>,
        reports: &mut Vec<Report>,
        second_writer: &mut u64,
        now: Now,
    ) {
        let same = |a: &Node, b: &Node| a.uid == b.uid;
        let before = delta.before.as_deref();
        let after = delta.after.as_deref();
        if let Some(gone) = before.filter(|b| after.is_none_or(|a| !same(a, b))) {
            self.node_gone(gone, now);
        }
        self.resurvey_for(before, after);
        let Some(node) = after else { return };
        let before = before.filter(|b| same(b, node));
        let synced = self.registry.sync(node);
        if synced.freed {
            self.podcidrs.wake();
        }
        if node.is_empty() {
            self.podcidrs.queue.add(node.name.clone());
            return;
        }
        self.podcidrs.served(node, reports);
        report_overlaps(node, &synced, reports);
        let given = before.is_some_and(Node::is_empty);
        if given && !synced.foreign.is_empty() {
            *second_writer += 1;
            self.second_writer(node, &synced.foreign, reports, now);
        }
        if before.is_none_or(|b| b.unreadable != node.unreadable) {
            report_unreadable(node, reports);
        }
        if before.is_none_or(|b| b.pod_cidrs != node.pod_cidrs || b.machine != node.machine) {
            self.subnets.queue.add(node.name.clone());
            self.pools.mark();
        }
    }

    fn node_gone(&mut self, node: &Node, now: Now) {
        self.podcidrs.gone(node);
        if self.registry.retire(node, now) {
            self.quarantine
                .watch((node.name.clone(), node.uid.clone()), &self.registry);
        }
        self.subnets.queue.add(node.name.clone());
        self.pools.mark();
    }

    /// A node's own addresses are left out of pools that cover them.
    fn resurvey_for(&mut self, before: Option<&Node>, after: Option<&Node>) {
        let of = |node: Option<&Node>| node.map(|n| n.addresses.clone()).unwrap_or_default();
        let (was, is) = (of(before), of(after));
        if was == is {
            return;
        }
        let host = |addr: &crate::ipam::Addr| Cidr::host(*addr);
        let touches = |range: Cidr| self.registry.pools.touching(&range).next().is_some();
        if was.iter().chain(is.iter()).map(host).any(touches) {
            self.survey = true;
        }
    }

    fn second_writer(
        &mut self,
        node: &Node,
        foreign: &[Cidr],
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        for range in foreign {
            self.registry.pools.hold(range, now.mono);
        }
        self.survey = true;
        let ranges: Vec<String> = foreign.iter().map(ToString::to_string).collect();
        let note = format!(
            "podCIDRs {} were written by somebody else while Cadastre deals: turn off the other allocator (kube-controller-manager: --allocate-node-cidrs=false, also in the kubeadm-config ConfigMap; cloud controllers: their route or IPAM controller)",
            ranges.join(", ")
        );
        reports.push(Report {
            about: About::node(node),
            warning: true,
            reason: SECOND_WRITER,
            note,
        });
    }

    fn release(&mut self, name: &Text, world: &World) {
        if !self.subnets.is_open(name) && Quarantine::release(name, world, &mut self.registry) {
            self.podcidrs.wake();
            self.pools.mark();
        }
    }

    fn answered(
        &mut self,
        purpose: &Purpose,
        outcome: &Outcome,
        taken: bool,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        match purpose {
            Purpose::FenceNodes => return self.fence.listed_nodes(taken, world, now),
            Purpose::FenceSubnets => return self.fence.listed_subnets(taken, world, now),
            Purpose::Touch { name, uid } | Purpose::TouchRead { name, uid } => {
                return self.fence.answered_touch(name, uid, outcome, now);
            }
            _ => {}
        }
        if let Outcome::Node(node) = outcome {
            // podCIDRs are frozen once set: true even where a relist keeps the answer out of the table.
            if world
                .nodes
                .get(&node.name)
                .is_some_and(|known| known.uid == node.uid && known.is_empty())
            {
                self.registry.sync(node);
            }
        }
        let mut cx = Context {
            world,
            registry: &mut self.registry,
            reports,
            now,
        };
        match purpose {
            Purpose::Assign { name, uid } => {
                self.podcidrs.answered_write(name, uid, outcome, &mut cx)
            }
            Purpose::AssignRead { name, uid } => {
                self.podcidrs.answered_read(name, uid, outcome, &mut cx)
            }
            Purpose::Subnet { name } | Purpose::SubnetRead { name } => {
                self.subnets.answered(name, outcome, &mut cx);
                self.release(name, world);
            }
            Purpose::Quarantine { name, uid } => {
                if self.quarantine.answered(name, uid, outcome, &mut cx) {
                    self.subnets.queue.add(name.clone());
                    self.release(name, world);
                }
            }
            Purpose::Pool { name } | Purpose::PoolRead { name } => {
                self.pools.answered(name, outcome, &mut cx)
            }
            _ => {}
        }
    }
}

fn report_overlaps(node: &Node, synced: &Synced, reports: &mut Vec<Report>) {
    for (name, uid, range) in &synced.overlaps {
        let note = format!(
            "its podCIDRs overlap {range} of node \"{name}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet"
        );
        reports.push(Report {
            about: About::node(node),
            warning: true,
            reason: OVERLAPPING,
            note,
        });
        let note = format!(
            "its podCIDR {range} overlaps podCIDRs of node \"{}\": pods of both may get the same addresses; drain and delete one of the two Node objects and restart its kubelet",
            node.name
        );
        let about = About::Node {
            name: name.clone(),
            uid: uid.clone(),
        };
        reports.push(Report {
            about,
            warning: true,
            reason: OVERLAPPING,
            note,
        });
    }
}

fn report_unreadable(node: &Node, reports: &mut Vec<Report>) {
    if node.unreadable.is_empty() {
        return;
    }
    let texts: Vec<&str> = node.unreadable.iter().map(AsRef::as_ref).collect();
    let note = format!(
        "spec.podCIDRs holds what is no CIDR: {}: it cannot be changed any more; delete the Node object and restart its kubelet",
        texts.join(", ")
    );
    reports.push(Report {
        about: About::node(node),
        warning: true,
        reason: UNREADABLE,
        note,
    });
}
