//! The leader: the loops, and what an event or an answer means to them.
//!
//! Exists only while this process leads; with the tenure everything in here is dropped, and the next
//! one is built from the world.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::block::BlockLoop;
use super::blocks::Noted;
use super::default_pool::DefaultPool;
use super::demand::Demand;
use super::fence::{Fence, Kind};
use super::figures::figures;
use super::leaks::Leaks;
use super::listening::Listening;
use super::machine::{Settings, View};
use super::podcidr::{PodCidrs, Reason};
use super::pool::PoolLoop;
use super::quarantine::Quarantine;
use super::registry::{Registry, Synced};
use super::report::{About, BLOCK_TAKEN_UP, OVERLAPPING, Report, SECOND_WRITER, UNREADABLE};
use super::subnet::Subnets;
use super::totals::totals;
use super::{Context, Now, Purpose};
use crate::cluster::lease::Tenure;
use crate::cluster::request::{Outcome, Request};
use crate::cluster::seen::{Block, Machine, Node, Text};
use crate::cluster::table::Delta;
use crate::cluster::world::World;
use crate::ipam::{Addr, Cidr, Family};

/// Which requests may be sent now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// podCIDRs and what they wait for
    pub critical: bool,
    /// Everything else
    pub background: bool,
}

/// What exists only while leading.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Leader {
    pub(super) tenure: Tenure,
    pub(super) fence: Fence,
    /// Whether the registry is built and the loops run
    pub(super) dealing: bool,
    registry: Registry,
    podcidrs: PodCidrs,
    demand: Demand,
    blocks: BlockLoop,
    subnets: Subnets,
    quarantine: Quarantine,
    leaks: Leaks,
    default_pool: DefaultPool,
    pools: PoolLoop,
    /// A range came free, which somebody may have used all the time.
    freed: bool,
    /// Pools have to be surveyed again.
    survey: bool,
    /// The ranges of pools have changed, and with them what NodeSubnets say of them.
    reattribute: bool,
    /// Whether agents have their say before blocks are given
    listening: Listening,
    /// [`Settings::second_writer_hold`]
    hold: Duration,
    /// [`Settings::leak_grace`]
    leak_grace: Duration,
}

/// What of a NodeSubnet has changed.
#[derive(Clone, Copy)]
pub(super) struct Told {
    /// What its agent says
    pub reported: bool,
    /// What people ask
    pub requested: bool,
}

impl Leader {
    pub(super) fn new(tenure: Tenure, settings: &Settings, now: Now) -> Self {
        Leader {
            fence: Fence::new(tenure.takeover, tenure.term.clone(), now.mono),
            listening: Listening::new(tenure.follows_a_gap(), now.mono),
            tenure,
            dealing: false,
            registry: Registry::default(),
            podcidrs: PodCidrs::default(),
            demand: Demand::default(),
            blocks: BlockLoop::default(),
            subnets: Subnets::default(),
            quarantine: Quarantine::default(),
            leaks: Leaks::default(),
            default_pool: DefaultPool::default(),
            pools: PoolLoop::default(),
            freed: false,
            survey: false,
            reattribute: false,
            hold: settings.second_writer_hold,
            leak_grace: settings.leak_grace,
        }
    }

    pub(super) fn begin_dealing(
        &mut self,
        world: &World,
        settings: &Settings,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        let (registry, overlapping) = Registry::rebuild(world, &settings.service_cidrs, now);
        self.registry = registry;
        self.dealing = true;
        self.default_pool.queue.add(());
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
        for node in world.nodes.iter() {
            self.registry.give_blocks_back(node, now);
        }
        for node in world.nodes.iter() {
            self.take_up(&node.name, world, reports, now);
            self.demand.add(node, &self.registry);
        }
        for entry in self.registry.blocks.iter() {
            self.blocks.add(entry);
            self.subnets.queue.add(entry.owner.name.clone());
        }
        for key in self.registry.rests.keys() {
            self.subnets.queue.add(key.0.clone());
            self.quarantine.watch(key.clone(), &self.registry);
        }
    }

    pub(super) fn next(
        &mut self,
        world: &World,
        settings: &Settings,
        reports: &mut Vec<Report>,
        room: Room,
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
        if !stopping {
            self.decide_blocks(world, reports, now);
        }
        let mut cx = Context {
            world,
            registry: &mut self.registry,
            reports,
            now,
        };
        if room.critical {
            if let Some(found) = self.listening.next(now).filter(|_| !stopping) {
                return Some(found);
            }
            if let Some(found) = self.pools.next_finalizer(&cx).filter(|_| !stopping) {
                return Some(found);
            }
            if let Some(found) = self.default_pool.next(settings, &cx).filter(|_| !stopping) {
                return Some(found);
            }
            if let Some(found) = self.podcidrs.next(&mut cx, stopping) {
                return Some(found);
            }
            if let Some(found) = self.blocks.next_urgent(&mut cx, stopping) {
                return Some(found);
            }
            if let Some(found) = self.subnets.next_urgent(&mut cx).filter(|_| !stopping) {
                return Some(found);
            }
        }
        if self.podcidrs.take_recount() | self.demand.take_recount() {
            self.pools.mark();
        }
        if stopping || !room.background || self.podcidrs.queue.has_ready(now.mono) {
            return None;
        }
        let waiting = || waiting_by_pool(&self.podcidrs, &self.demand);
        self.subnets
            .next(&mut cx)
            .or_else(|| self.blocks.next(&mut cx))
            .or_else(|| self.quarantine.next(&mut cx))
            .or_else(|| self.leaks.next(self.leak_grace, &mut cx))
            .or_else(|| self.pools.next(waiting, &mut cx))
    }

    /// Monotonic time at which [`Leader::next`] may have something again without an event.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        if !self.dealing {
            return self.fence.next_at();
        }
        let queues = [
            self.podcidrs.queue.next_at(),
            self.demand.next_at(),
            self.blocks.urgent.next_at(),
            self.blocks.queue.next_at(),
            self.subnets.urgent.next_at(),
            self.subnets.queue.next_at(),
            self.quarantine.queue.next_at(),
            self.leaks.next_at(),
            self.default_pool.queue.next_at(),
            self.pools.next_at(),
            self.registry.pools.next_at(),
            self.listening.next_at(),
        ];
        queues.into_iter().flatten().min()
    }

    /// Whether nothing is left of unclear outcome and the fence is complete.
    pub(super) fn is_settled(&self) -> bool {
        self.dealing && !self.registry.has_unclear()
    }

    /// What it knows of itself.
    pub(super) fn describe(&mut self, view: &mut View, world: &World, now: Now) {
        view.dealing = self.dealing;
        if !self.dealing {
            view.fencing = Some(self.fence.progress(world));
            return;
        }
        view.overlaps = self.registry.overlaps();
        view.unclear = self.registry.unclear();
        for state in self.registry.pools.iter() {
            for family in state.space.families() {
                view.pools.push((
                    state.name.clone(),
                    family,
                    figures(state, family, &self.registry),
                ));
            }
        }
        for reason in self.podcidrs.waiting() {
            *view.waiting.entry(reason.label()).or_default() += 1;
        }
        for (_, nodes) in self.demand.waiting() {
            *view.waiting.entry("pool_full").or_default() += nodes;
        }
        view.pool_waiting = waiting_by_pool(&self.podcidrs, &self.demand);
        let since = [self.podcidrs.waiting_since(), self.demand.waiting_since()];
        let since = since.into_iter().flatten().min();
        view.oldest_wait = since.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        view.exhausts = exhausts(world);
        self.describe_blocks(view, world, now);
        view.trouble = self.default_pool.trouble().cloned();
        view.queues = vec![
            (
                "podcidr",
                self.podcidrs.queue.depth(),
                self.podcidrs.queue.retries(),
            ),
            ("demand", self.demand.depth().0, self.demand.depth().1),
            (
                "block",
                self.blocks.urgent.depth() + self.blocks.queue.depth(),
                self.blocks.urgent.retries() + self.blocks.queue.retries(),
            ),
            (
                "subnet",
                self.subnets.urgent.depth() + self.subnets.queue.depth(),
                self.subnets.urgent.retries() + self.subnets.queue.retries(),
            ),
            (
                "quarantine",
                self.quarantine.queue.depth(),
                self.quarantine.queue.retries(),
            ),
            ("pool", self.pools.queue.depth(), self.pools.queue.retries()),
        ];
    }

    fn describe_blocks(&self, view: &mut View, world: &World, now: Now) {
        let all = totals(world, &self.registry);
        let addresses = all.into_iter().map(|((pool, family), t)| (pool, family, t));
        view.addresses = addresses.collect();
        for entry in self.registry.blocks.iter() {
            let overdue = entry.rests_until.filter(|until| *until < now.mono);
            view.oldest_rest = view
                .oldest_rest
                .max(overdue.map_or(Duration::ZERO, |until| now.mono.saturating_sub(until)));
            let state = match (entry.owner.resting, entry.confirmed, entry.recall) {
                (true, ..) if overdue.is_some() => "overdue",
                (true, ..) => "quarantined",
                (_, false, _) => "provisional",
                (_, _, Some(_)) => "recalled",
                _ => "held",
            };
            *view.blocks.entry(state).or_default() += 1;
        }
        let (candidates, oldest) = self.leaks.candidates();
        let age = oldest.map_or(Duration::ZERO, |since| now.mono.saturating_sub(since));
        let asked = self.registry.suspects.values().map(BTreeSet::len).sum();
        view.leaks = (candidates, age, asked);
        let reports = world.subnets.iter().filter_map(|it| it.report.as_ref());
        view.refused = reports.map(|report| report.refusals).sum();
    }

    /// A NodeSubnet has changed, in what the agent says or otherwise.
    pub(super) fn subnet_changed(
        &mut self,
        name: &Text,
        told: Told,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        self.subnets.queue.add(name.clone());
        self.release(name, world);
        let mut blocks = self.registry.blocks_told(name, world, now);
        blocks.extend(self.registry.blocks_let_go(name, world));
        self.follow_up(
            Noted {
                blocks,
                ..Noted::default()
            },
            world,
        );
        if told.reported {
            self.take_up(name, world, reports, now);
        }
        if told.requested {
            self.leaks.hurry();
        }
        if told.reported || told.requested {
            self.demand.add_name(name, world, &self.registry);
            self.pools.mark();
        }
    }

    /// What the agent of a node uses and nobody has is the node's.
    fn take_up(&mut self, name: &Text, world: &World, reports: &mut Vec<Report>, now: Now) {
        let blocks = self.registry.take_up(name, world, now);
        let Some(node) = world.nodes.get(name).filter(|_| !blocks.is_empty()) else {
            return;
        };
        for cidr in &blocks {
            reports.push(Report {
                about: About::node(node),
                warning: true,
                reason: BLOCK_TAKEN_UP,
                note: format!(
                    "its agent uses block {cidr}, of which the API knew nothing: it is this node's again. If the API was put back to an older state, see docs/backup.md"
                ),
            });
        }
        let nodes = vec![name.clone()];
        let noted = Noted {
            blocks,
            nodes,
            ..Noted::default()
        };
        self.follow_up(noted, world);
    }

    /// A block's object has changed.
    pub(super) fn block_changed(&mut self, delta: &Delta<Block>, world: &World, now: Now) {
        let noted = match (&delta.before, &delta.after) {
            (_, Some(after)) => self.registry.block_seen(after, now),
            (Some(before), None) => self.registry.block_gone(before),
            (None, None) => return,
        };
        // The owner may have died before the object was seen.
        if let Some(Ok(spec)) = delta.after.as_ref().map(|block| &block.spec) {
            self.retire_stale(&spec.cidr, world, now);
        }
        self.follow_up(noted, world);
    }

    fn retire_stale(&mut self, cidr: &Cidr, world: &World, now: Now) {
        let Some(owner) = self.registry.blocks.get(cidr).map(|entry| &entry.owner) else {
            return;
        };
        let (name, uid) = (owner.name.clone(), owner.uid.clone());
        let live = world.nodes.get(&name).is_some_and(|node| node.uid == uid);
        if !live && !owner.resting {
            self.retire_blocks(&name, &uid, &Machine::default(), now);
        }
    }

    fn retire_blocks(&mut self, name: &Text, uid: &Text, machine: &Machine, now: Now) {
        for cidr in self.registry.retire_blocks(name, uid, machine, now) {
            self.blocks.queue.add(cidr);
        }
    }

    fn look_at_blocks(&mut self, cidrs: Vec<Cidr>) {
        for cidr in cidrs {
            if let Some(entry) = self.registry.blocks.get(&cidr) {
                self.blocks.add(entry);
            }
            self.pools.mark();
        }
    }

    /// What is decided about blocks before anything is sent.
    fn decide_blocks(&mut self, world: &World, reports: &mut Vec<Report>, now: Now) {
        if std::mem::take(&mut self.freed) {
            for name in std::mem::take(&mut self.registry.strays) {
                self.take_up(&name, world, reports, now);
            }
        }
        let mut noted = self.registry.judge_blocks(world);
        for name in &noted.nodes {
            noted
                .blocks
                .extend(self.registry.blocks_let_go(name, world));
        }
        self.follow_up(noted, world);
        if !self.listening.is_over() {
            return;
        }
        let mut cx = Context {
            world,
            registry: &mut self.registry,
            reports,
            now,
        };
        let noted = self.demand.work(&mut cx);
        for name in noted.nodes {
            self.subnets.queue.add(name);
        }
        self.look_at_blocks(noted.blocks);
    }

    fn follow_up(&mut self, noted: Noted, world: &World) {
        self.look_at_blocks(noted.blocks);
        for name in noted.nodes {
            self.subnets.urgent.add(name.clone());
            self.demand.add_name(&name, world, &self.registry);
        }
        if noted.freed {
            self.space_came();
        }
    }

    /// A range is free again.
    fn space_came(&mut self) {
        self.freed = true;
        self.podcidrs.wake();
        self.demand.wake();
        self.pools.mark();
    }

    /// A pool has changed: `spec` says whether in more than its status, `exists` whether it is there.
    pub(super) fn pool_changed(&mut self, name: &Text, spec: bool, exists: bool) {
        self.pools.queue.add(name.clone());
        if !exists {
            self.default_pool.queue.add(());
        }
        self.survey |= spec;
        self.reattribute |= spec;
    }

    /// Service ranges have changed.
    pub(super) fn services_changed(&mut self) {
        self.survey = true;
    }

    fn survey_pools(&mut self, world: &World, settings: &Settings, now: Now) {
        self.survey = false;
        self.registry
            .pools
            .survey(world, &settings.service_cidrs, now.mono);
        self.space_came();
        for node in world.nodes.iter() {
            self.demand.add(node, &self.registry);
            // Where a node asks for blocks there must be a NodeSubnet to ask in.
            if world.subnets.get(&node.name).is_none() {
                self.subnets.queue.add(node.name.clone());
            }
        }
        if std::mem::take(&mut self.reattribute) {
            for subnet in world.subnets.iter() {
                self.subnets.queue.add(subnet.name.clone());
            }
        }
    }

    pub(super) fn node_changed(
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
        if before.is_none() {
            let given = self.registry.give_blocks_back(node, now);
            for cidr in given {
                self.blocks.queue.add(cidr);
                self.subnets.queue.add(node.name.clone());
            }
        }
        if before.is_none_or(|b| b.labels != node.labels || b.deleting != node.deleting) {
            self.demand.add(node, &self.registry);
            self.subnets.queue.add(node.name.clone());
        }
        let synced = self.registry.sync(node);
        if synced.freed {
            self.space_came();
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
        self.demand.gone(node);
        self.retire_blocks(&node.name, &node.uid, &node.machine, now);
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
        let host = |addr: &Addr| Cidr::host(*addr);
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
            self.registry.pools.hold(range, now.mono + self.hold);
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
            self.space_came();
        }
    }

    pub(super) fn answered(
        &mut self,
        purpose: &Purpose,
        outcome: &Outcome,
        taken: bool,
        world: &World,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        match purpose {
            Purpose::FenceNodes => {
                self.fence.listed(Kind::Nodes, taken, world, now);
                return;
            }
            Purpose::FenceSubnets if self.dealing => {
                self.listening.listed(taken, now);
                return;
            }
            Purpose::FenceSubnets => {
                self.fence.listed(Kind::Subnets, taken, world, now);
                return;
            }
            Purpose::FenceBlocks => {
                self.fence.listed(Kind::Blocks, taken, world, now);
                return;
            }
            Purpose::Touch { name, uid } | Purpose::TouchRead { name, uid } => {
                self.fence.answered_touch(name, uid, outcome, now);
                return;
            }
            _ => {}
        }
        if let Outcome::Node(node) = outcome {
            // podCIDRs are frozen once set: true even where a relist keeps the answer out of the table.
            let known = world.nodes.get(&node.name);
            let behind = known.is_some_and(|known| known.uid == node.uid && known.is_empty());
            if behind && self.registry.sync(node).freed {
                self.space_came();
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
                self.podcidrs.answered_write(name, uid, outcome, &mut cx);
            }
            Purpose::AssignRead { name, uid } => {
                self.podcidrs.answered_read(name, uid, outcome, &mut cx);
            }
            Purpose::Subnet { name, .. } | Purpose::SubnetRead { name } => {
                let wrote = matches!(purpose, Purpose::Subnet { .. });
                self.subnets.answered(name, wrote, outcome, &mut cx);
                self.release(name, world);
            }
            Purpose::Block { cidr, claim, step } => {
                let noted = self
                    .blocks
                    .answered((cidr, *claim), *step, outcome, &mut cx);
                self.follow_up(noted, world);
            }
            Purpose::BlockPods { uid, .. } => self.blocks.answered_pods(uid, outcome, &mut cx),
            Purpose::DefaultPool => self.default_pool.answered(outcome, &cx),
            Purpose::LeakPods { name, uid }
                if self
                    .leaks
                    .answered(name, uid, outcome, self.leak_grace, &mut cx) =>
            {
                self.subnets.queue.add(name.clone());
            }
            Purpose::Answer { name } => self.subnets.answered_condition(name, outcome, &mut cx),
            Purpose::Quarantine { name, uid }
                if self.quarantine.answered(name, uid, outcome, &mut cx) =>
            {
                self.subnets.queue.add(name.clone());
                self.release(name, world);
            }
            Purpose::Pool { name } | Purpose::PoolRead { name } => {
                let wrote = matches!(purpose, Purpose::Pool { .. });
                self.pools.answered(name, wrote, outcome, &mut cx);
            }
            _ => {}
        }
    }
}

/// How many nodes wait for each pool. Counted when a status is to be written, not for each request.
fn waiting_by_pool(podcidrs: &PodCidrs, demand: &Demand) -> BTreeMap<Text, i64> {
    let mut waiting: BTreeMap<Text, i64> = BTreeMap::new();
    for reason in podcidrs.waiting() {
        if let Reason::Full { pools } | Reason::Barred { pools } = reason {
            for pool in pools {
                *waiting.entry(pool.clone()).or_default() += 1;
            }
        }
    }
    for (pool, nodes) in demand.waiting() {
        *waiting.entry(pool.clone()).or_default() += i64::try_from(nodes).unwrap_or(i64::MAX);
    }
    waiting
}

/// What the statuses of pools say of their end.
fn exhausts(world: &World) -> Vec<(Text, Family, Timestamp)> {
    let mut all = Vec::new();
    for pool in world.pools.iter() {
        let Some(status) = &pool.status else { continue };
        for (family, side) in [(Family::V4, &status.ipv4), (Family::V6, &status.ipv6)] {
            let at = side.as_ref().and_then(|side| side.exhausts_at.as_ref());
            all.extend(at.map(|at| (pool.name.clone(), family, at.0)));
        }
    }
    all
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
