//! The leader: the loops, and what events and answers mean to them.
//!
//! A leader exists only while this process leads. At the end of the tenure it is dropped, and the next one is built
//! from the cache.

use std::collections::BTreeMap;
use std::time::Duration;

use super::demand::Demand;
use super::departed::Departed;
use super::intents::Intentions;
use super::podcidr::{PodCidrs, Reason};
use super::reconcile::Loop as _;
use super::registry::Registry;
use super::report::Report;
use super::{Context, Now, Purpose};
use crate::cluster::lease::{Takeover, Tenure, Wanted};
use crate::cluster::request::Request;
use crate::cluster::seen::Text;
use crate::cluster::world::World;
use crate::registry::blocks::Noted;
use crate::settings::Settings;
use cadastre_core::{Cidr, State};

mod answers;
mod changes;
mod loops;
mod refused;
mod view;

use cadastre_core::mutation::Mutation;
pub(super) use changes::Told;
use changes::{report_overlaps, report_unreadable};
use loops::Loops;

/// Which requests may be sent now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Whether critical requests may be sent: podCIDRs, blocks and what they wait for
    pub critical: bool,
    /// Whether all other requests may be sent
    pub background: bool,
}

/// The state that exists only while leading.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Leader {
    pub(super) tenure: Tenure,
    pub(super) loops: Loops,
    /// Whether the registry is built and the loops run
    pub(super) dealing: bool,
    registry: Registry,
    /// A range became free that an agent may use already.
    freed: bool,
    /// Pools have to be surveyed again.
    survey: bool,
    /// Ranges of pools have changed, and with them the pools that NodeSubnets name.
    reattribute: bool,
    /// See [`Settings::foreign_allocator_pause`]
    hold: Duration,
}

impl Leader {
    pub(super) fn new(tenure: Tenure, settings: &Settings, now: Now) -> Self {
        Leader {
            loops: Loops::new(&tenure, settings, now.mono),
            tenure,
            dealing: false,
            registry: Registry::default(),
            freed: false,
            survey: false,
            reattribute: false,
            hold: settings.foreign_allocator_pause,
        }
    }

    pub(super) fn begin_dealing(
        &mut self,
        world: &World,
        departed: &Departed,
        settings: &Settings,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        let (registry, overlapping) = Registry::rebuild(world, &settings.service_cidrs, now);
        self.registry = registry;
        self.registry.intents = Intentions::of_leader(self.loops.fence.is_done());
        self.registry.is_listening = !self.loops.listening.is_over();
        self.registry.after_gap = self.tenure.follows_a_gap();
        self.registry.lay_departed_to_rest(departed, world, now);
        if self.registry.after_gap {
            self.registry.keep_of_dead_for_rest(world, now);
        }
        self.dealing = true;
        self.loops.listening.begin(now.mono);
        self.inherit(world);
        self.loops.default_pool.queue.add(());
        self.loops.pools.recall(world.pools.iter());
        self.loops.pools.mark();
        for (name, synced) in overlapping {
            if let Some(node) = world.nodes.get(&name) {
                report_overlaps(node, &synced, reports);
            }
        }
        self.registry.report_too_wide(reports);
        for node in world.nodes.iter() {
            if node.is_empty() {
                self.loops.podcidrs.queue.add(node.name.clone());
            }
            report_unreadable(node, reports);
        }
        for subnet in world.subnets.iter() {
            self.loops.subnets.queue.add(subnet.name.clone());
        }
        for node in world.nodes.iter() {
            self.take_up(&node.name, world, reports, now);
            self.loops.demand.add(node, &self.registry);
            // It may have no NodeSubnet yet, in which its agent reports and demands.
            self.loops.subnets.queue.add(node.name.clone());
        }
        self.give_blocks_back(world, now);
        for entry in self.registry.blocks.iter() {
            self.loops.blocks.add(entry);
            self.loops.subnets.queue.add(entry.owner.name.clone());
        }
        for key in self.registry.rests.keys() {
            self.loops.subnets.queue.add(key.0.clone());
            self.loops.quarantine.watch(key.clone(), &self.registry);
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
        let due = self.registry.pools.next_at();
        if self.survey || due.is_some_and(|at| at <= now.mono) {
            self.survey_pools(world, settings, reports, now);
        }
        if !stopping {
            self.decide_blocks(world, reports, now);
        }
        let mut cx = Context::new(world, &mut self.registry, reports, now);
        let loops = &mut self.loops;
        if room.critical {
            let found = loops.next_awaited(settings, stopping, &mut cx);
            if found.is_some() {
                return found;
            }
        }
        if loops.podcidrs.take_recount() | loops.demand.take_recount() {
            loops.pools.mark();
        }
        let dealing = cx.registry.intents.is_known() && loops.podcidrs.queue.has_ready(now.mono);
        if stopping || !room.background || dealing {
            return None;
        }
        if loops.pools.is_due(now.mono) {
            loops.pools.waiting = waiting_by_pool(&loops.podcidrs, &loops.demand);
        }
        loops.all_mut().find_map(|(_, it)| it.next(&mut cx))
    }

    /// Returns the monotonic time at which [`Leader::next`] may have a request again without an event.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        if !self.dealing {
            return self.loops.fence.load().next_at;
        }
        let loops = self.loops.all().map(|(_, it)| it.load().next_at);
        loops.chain([self.registry.pools.next_at()]).flatten().min()
    }

    /// Returns whether no write is indeterminate and the fence is complete.
    pub(super) fn is_settled(&self) -> bool {
        self.dealing
            && self.loops.fence.is_done()
            && (!self.registry.has_unclear() || Mutation::HandOverWhileUnclear.is_on())
    }

    /// Returns whether any write is indeterminate.
    pub(super) fn has_unclear(&self) -> bool {
        self.registry.has_unclear()
    }

    /// Takes in a successful write of the Lease.
    pub(super) fn renewed(&mut self, tenure: Tenure) {
        for name in self.registry.intents.confirmed(tenure.named) {
            self.loops.podcidrs.queue.add(name);
        }
        self.tenure = tenure;
    }

    /// Returns the number of a write that is decided now.
    pub(super) fn number(&mut self) -> u64 {
        self.registry.intents.number()
    }

    /// Returns the content that the Lease should get, if a request waits for it.
    pub(super) fn take_wanted(&mut self, world: &World) -> Option<Wanted> {
        if !self.dealing {
            return None;
        }
        for name in self.registry.intents.room() {
            self.loops.podcidrs.queue.add(name);
        }
        let wanted = self
            .registry
            .intents
            .take(&self.tenure.term, world.versions())?;
        Some(Wanted {
            agents_heard: self.loops.listening.is_over(),
            ..wanted
        })
    }

    /// Reserves what earlier leaders may have in flight for the nodes that it is for. It is written again until the
    /// node has podCIDRs or is gone.
    fn inherit(&mut self, world: &World) {
        if self.tenure.takeover == Takeover::First || Mutation::TakeOverCountsAsClean.is_on() {
            return;
        }
        let inherited = self.tenure.inherited.iter();
        let ignored = usize::from(Mutation::OneNamedNodeIgnored.is_on());
        for intent in inherited.flat_map(|all| &all.assignments).skip(ignored) {
            let node = world.nodes.get(&intent.name);
            let node = node.filter(|node| node.uid == intent.uid && node.is_empty());
            let Some(node) = node else { continue };
            let holder = self.registry.holder(&node.name, &node.uid);
            for cidr in &intent.cidrs {
                self.registry.ledger.record(holder, *cidr, State::Unclear);
            }
            self.registry.intents.inherit(node, &intent.cidrs);
        }
    }

    fn look_at_blocks(&mut self, cidrs: Vec<Cidr>) {
        for cidr in cidrs {
            if let Some(entry) = self.registry.blocks.get(&cidr) {
                self.loops.blocks.add(entry);
            }
            self.loops.pools.mark();
        }
    }

    /// Decides about blocks before anything is sent.
    fn decide_blocks(&mut self, world: &World, reports: &mut Vec<Report>, now: Now) {
        if std::mem::take(&mut self.freed) {
            self.take_up_all(world, reports, now);
        }
        // Before agents have reported, nobody knows whose a block is that no NodeSubnet lists.
        if !self.loops.listening.is_over() {
            return;
        }
        let mut noted = self.registry.judge_blocks(world);
        for name in &noted.nodes {
            noted
                .blocks
                .extend(self.registry.blocks_let_go(name, world));
        }
        self.follow_up(noted, world);
        let mut cx = Context::new(world, &mut self.registry, reports, now);
        let noted = self.loops.demand.work(&mut cx);
        for name in noted.nodes {
            self.loops.subnets.queue.add(name);
        }
        self.look_at_blocks(noted.blocks);
    }

    /// Adopts blocks again, as a range became free or all agents have reported.
    fn take_up_all(&mut self, world: &World, reports: &mut Vec<Report>, now: Now) {
        for name in self.registry.strays.nodes() {
            self.take_up(&name, world, reports, now);
        }
    }

    /// Allocates quarantined blocks to the same machines again, once agents have reported what they use.
    fn give_blocks_back(&mut self, world: &World, now: Now) {
        if self.registry.is_listening {
            return;
        }
        for node in world.nodes.iter() {
            for cidr in self.registry.give_blocks_back(node, now) {
                self.loops.blocks.queue.add(cidr);
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
    }

    fn follow_up(&mut self, noted: Noted, world: &World) {
        self.look_at_blocks(noted.blocks);
        for name in noted.subnets {
            self.loops.subnets.queue.add(name.clone());
            self.release(&name, world);
        }
        for name in noted.nodes {
            self.loops.subnets.urgent.add(name.clone());
            self.loops.demand.add_name(&name, world, &self.registry);
        }
        if noted.freed {
            self.space_came();
        }
    }

    /// Makes all that wait look again, as a range became free.
    fn space_came(&mut self) {
        self.freed = true;
        self.loops.podcidrs.wake();
        self.loops.demand.wake();
        self.loops.subnets.wake();
        self.loops.pools.mark();
    }

    fn survey_pools(
        &mut self,
        world: &World,
        settings: &Settings,
        reports: &mut Vec<Report>,
        now: Now,
    ) {
        self.survey = false;
        self.registry
            .pools
            .survey(world, &settings.service_cidrs, now.mono);
        for name in self.registry.recount_pod_cidrs(world) {
            self.loops.subnets.queue.add(name);
        }
        self.space_came();
        self.registry.report_too_wide(reports);
        for node in world.nodes.iter() {
            self.loops.demand.add(node, &self.registry);
            // An agent needs a NodeSubnet to report its demand.
            if world.subnets.get(&node.name).is_none() {
                self.loops.subnets.queue.add(node.name.clone());
            }
        }
        if std::mem::take(&mut self.reattribute) {
            for subnet in world.subnets.iter() {
                self.loops.subnets.queue.add(subnet.name.clone());
            }
        }
    }
}

/// Counts the nodes that wait for each pool. Called only when a status is due, not for each request.
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
