//! The controller as a state machine: events in, requests out.
//!
//! # Guarantees
//! - Nothing is allocated before nodes, pools, NodeSubnets, blocks, service ranges and pods were listed in full, the
//!   lease is held, and the fence has its lists. podCIDRs also wait until the fence is done.
//! - Critical requests (podCIDRs, new blocks and what they wait for) come first; others are sent only while none of
//!   them waits and hardly any is in flight.
//! - Objects in an answer enter the cache at once, whoever led when the request was sent; a decision that waits for
//!   an answer ends with its tenure.

mod answers;
#[cfg(test)]
mod scripts;

use std::collections::BTreeMap;
use std::time::Duration;

use super::departed::Departed;
use super::leader::{Leader, Room, Told};
use super::report::Report;
use super::settings::Settings;
use super::view::View;
use super::{Now, Purpose};
use crate::cluster::lease::{Leadership, Wanted};
use crate::cluster::request::{Kind, Known, Outcome, Outgoing, Request, RequestId};
use crate::cluster::seen::{Block, Node, Object, Pod, Pool, ServiceRange, Subnet, Text};
use crate::cluster::table::{Delta, Sent, Table};
use crate::cluster::world::World;
use crate::purpose::Step;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::Change;

/// Input of the state machine.
#[derive(Clone, Debug)]
pub enum Event {
    /// A watch event of nodes
    Nodes(Change<Node>),
    /// A watch event of IPPools
    Pools(Change<Pool>),
    /// A watch event of NodeSubnets
    Subnets(Change<Subnet>),
    /// A watch event of IPAMBlocks
    Blocks(Change<Block>),
    /// A watch event of ServiceCIDRs
    ServiceRanges(Change<ServiceRange>),
    /// A watch event of pods
    Pods(Change<Pod>),
    /// The election's result
    Leadership(Leadership),
    /// The answer to a request
    Answer(RequestId, Outcome),
}

struct Pending {
    purpose: Purpose,
    wrote: bool,
    term: Text,
    /// State of the cache table when the request was sent: it shows whether the answer may be outdated.
    sent: Sent,
    /// The object that the request is about, as known when it was sent.
    known: Option<(Kind, Known)>,
}

/// A kind that is cached, and whose changes concern the controller.
trait Kept: Object + Clone {
    fn table(world: &mut World) -> &mut Table<Self>;
    fn changed(controller: &mut Controller, delta: &Delta<Self>, now: Now);
}

macro_rules! kept {
    ($($kind:ty: $table:ident, $changed:ident;)*) => {$(
        impl Kept for $kind {
            fn table(world: &mut World) -> &mut Table<Self> {
                &mut world.$table
            }
            fn changed(controller: &mut Controller, delta: &Delta<Self>, now: Now) {
                controller.$changed(delta, now);
            }
        }
    )*};
}

kept! {
    Node: nodes, node_changed;
    Subnet: subnets, subnet_changed;
    Block: blocks, block_changed;
    Pool: pools, pool_changed;
}

/// The state machine: the cache, and the leader's state while this process leads.
pub struct Controller {
    settings: Settings,
    world: World,
    departed: Departed,
    leader: Option<Leader>,
    pending: BTreeMap<RequestId, Pending>,
    next_id: u64,
    reports: Vec<Report>,
    stopping: bool,
    foreign_allocations: u64,
    /// See [`Controller::is_put_back`].
    put_back: bool,
}

impl Controller {
    /// Creates a controller with an empty cache, which does not lead.
    pub fn new(settings: Settings) -> Self {
        Controller {
            settings,
            world: World::default(),
            departed: Departed::default(),
            leader: None,
            pending: BTreeMap::new(),
            next_id: 0,
            reports: Vec::new(),
            stopping: false,
            foreign_allocations: 0,
            put_back: false,
        }
    }

    /// Applies an event to the cache and to the leader's state.
    pub fn on(&mut self, event: Event, now: Now) {
        match event {
            Event::Nodes(change) => self.watched(change, now),
            Event::Subnets(change) => self.watched(change, now),
            Event::Blocks(change) => self.watched(change, now),
            Event::Pools(change) => self.watched(change, now),
            Event::ServiceRanges(change) => {
                let changed = !self.world.services.change(change).is_empty();
                if let Some(leader) = self.leader.as_mut().filter(|_| changed) {
                    leader.services_changed();
                }
            }
            Event::Pods(change) => {
                let changed = self.world.pods.change(change);
                if let Some(leader) = self.leader.as_mut().filter(|_| changed) {
                    leader.pods_changed();
                }
            }
            Event::Leadership(leadership) => self.leadership(leadership, now),
            Event::Answer(id, outcome) => self.answered(id, &outcome, now),
        }
    }

    /// Returns the next request to send. Call it until it returns nothing, and again after every event and at
    /// [`Controller::wake_at`].
    pub fn poll(&mut self, now: Now) -> Option<Outgoing> {
        let leader = self.leader.as_mut().filter(|_| !self.put_back)?;
        if now.mono >= leader.tenure.valid_until && !Mutation::ExpiredLeaderDecides.is_on() {
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
            if let Some(found) = leader.loops.fence.next_urgent(&self.world, now) {
                return Some(self.send(found));
            }
            if !leader.loops.fence.is_listed() {
                return None;
            }
            leader.begin_dealing(
                &self.world,
                &self.departed,
                &self.settings,
                &mut self.reports,
                now,
            );
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

    /// Returns the content that the Lease should get, if a request waits for it. To be called after
    /// [`Controller::poll`] has returned nothing, and to be passed to the elector.
    pub fn take_wanted(&mut self) -> Option<Wanted> {
        self.leader.as_mut()?.take_wanted(&self.world)
    }

    /// Returns the monotonic time at which [`Controller::poll`] may have a request again without an event.
    pub fn wake_at(&self) -> Option<Duration> {
        self.leader.as_ref()?.wake_at()
    }

    /// Returns the reports since the last call, to be emitted as Kubernetes events.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// Stops new writes. Requests in flight and indeterminate writes are still followed up.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Returns whether the lease may be handed over cleanly: no write is in flight or indeterminate, and the fence
    /// against earlier leaders is complete.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty() && self.leader.as_ref().is_none_or(Leader::is_settled)
    }

    /// Returns whether nothing is left to wait for after [`Controller::stop`].
    pub(crate) fn is_quiet(&self) -> bool {
        self.pending.is_empty()
            && self
                .leader
                .as_ref()
                .is_none_or(|leader| !leader.has_unclear())
    }

    /// Returns whether this process leads and allocates. podCIDRs may still wait for the fence.
    pub fn is_dealing(&self) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.dealing)
    }

    /// Returns whether a list has shown that the API server was restored to an older state. This process knows what
    /// no longer exists: it sends nothing any more and must be restarted.
    pub fn is_put_back(&self) -> bool {
        self.put_back
    }

    /// Returns the state of the controller for metrics and readiness.
    pub fn view(&mut self, now: Now) -> View {
        let mut view = View {
            missing: self.world.missing(),
            foreign_allocations: self.foreign_allocations,
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
        let about = request.about();
        let kind = about.map(|(kind, _)| kind);
        let (sent, known) = about.map_or_else(Default::default, |it| self.world.about(it));
        let wrote = request.is_write();
        let out_term = wrote.then(|| term.clone());
        let numbered = request.is_numbered() && !Mutation::LeaseNotAwaited.is_on();
        let leader = self.leader.as_mut().filter(|_| numbered);
        let number = leader.map_or(0, Leader::number);
        self.pending.insert(
            id,
            Pending {
                purpose,
                wrote,
                term,
                sent,
                known: kind.zip(known),
            },
        );
        Outgoing {
            id,
            request,
            term: out_term,
            loop_name,
            number,
        }
    }

    fn watched<T: Kept>(&mut self, change: Change<T>, now: Now) {
        for delta in T::table(&mut self.world).change(change) {
            T::changed(self, &delta, now);
        }
    }

    fn leadership(&mut self, leadership: Leadership, now: Now) {
        match leadership {
            Leadership::Leading(tenure) => match &mut self.leader {
                Some(leader) if leader.tenure.term == tenure.term => leader.renewed(tenure),
                _ => {
                    self.leader = Some(Leader::new(tenure, &self.settings, now));
                }
            },
            Leadership::Standby { .. } | Leadership::Released => self.leader = None,
        }
    }

    fn node_changed(&mut self, delta: &Delta<Node>, now: Now) {
        self.world.note_node(delta);
        self.departed.node_changed(delta, now.mono);
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.dealing) else {
            return;
        };
        leader.node_changed(
            delta,
            &self.world,
            &mut self.reports,
            &mut self.foreign_allocations,
            now,
        );
    }

    fn subnet_changed(&mut self, delta: &Delta<Subnet>, now: Now) {
        self.departed.subnet_changed(delta);
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

    fn pool_changed(&mut self, delta: &Delta<Pool>, _: Now) {
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
}

fn is_critical(purpose: &Purpose) -> bool {
    match purpose {
        Purpose::Subnet { urgent, .. } => *urgent,
        Purpose::Block { step, .. } => matches!(step, None | Some(Step::Create)),
        _ => matches!(purpose.loop_name(), "podcidr" | "fence" | "listening"),
    }
}

#[cfg(test)]
mod tests;
