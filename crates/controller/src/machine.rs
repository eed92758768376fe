//! The controller as a state machine: events come in, requests go out.
//!
//! # Guarantees
//! - Nothing is allocated until this process holds the Lease, the lists that the fence needs have arrived, and the
//!   first lists of all watched kinds are complete. podCIDRs are not allocated before the fence is done.
//! - A request is critical if it is about podCIDRs or new blocks, or must precede such a request. Other requests are
//!   sent only if no critical request is ready and at most two critical requests are in flight.
//! - Objects in an answer are written to the cache at once, even if this process has lost the Lease since it sent the
//!   request. But the loop that sent the request gets the answer only if this process still leads in the same term.

mod answers;
#[cfg(test)]
mod script;
#[cfg(test)]
mod scripts;

use std::collections::BTreeMap;
use std::time::Duration;

use super::deleted_nodes::DeletedNodes;
use super::leader::{Leader, RouteLoopOf, SendBudget, SubnetDiff};
use super::report::EventRecord;
use super::settings::ControllerSettings;
use super::view::ControllerView;
use super::{Now, Purpose};
use crate::cluster::cache::ClusterCache;
use crate::cluster::intents::SeenVersions;
use crate::cluster::lease::{Leadership, LeadershipTerm, LeaseContent};
use crate::cluster::names::TermId;
use crate::cluster::object_cache::{CacheMark, ObjectCache, ObjectUpdate};
use crate::cluster::objects::{
    Block, Claim, FrrConfiguration, Node, Object, Pod, Pool, Routes, ServiceRange, Subnet,
};
use crate::cluster::request::{
    ApiRequest, KnownObject, ObjectKind, OutgoingRequest, RequestId, RequestOutcome,
};
use crate::fence::sufficient_versions;
use crate::purpose::Step;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::ObjectEvent;

/// An event for the state machine, which [`Controller::on`] handles.
#[derive(Clone, Debug)]
pub enum ControllerEvent {
    /// A watch event of Nodes, for example that a node has got podCIDRs
    Nodes(ObjectEvent<Node>),
    /// A watch event of IPPools, for example that a user has changed a pool
    Pools(ObjectEvent<Pool>),
    /// A watch event of NodeSubnets, for example that an agent has reported its demand
    Subnets(ObjectEvent<Subnet>),
    /// A watch event of NodeRoutes
    Routes(ObjectEvent<Routes>),
    /// A watch event of the FRRConfigurations that the controller has written
    FrrConfigurations(ObjectEvent<FrrConfiguration>),
    /// The API server does not have the kind FRRConfiguration, because frr-k8s is not installed
    NoFrrConfigurations,
    /// A watch event of IPAMBlocks; only such an event confirms a new block
    Blocks(ObjectEvent<Block>),
    /// A watch event of IPClaims, for example that a user has created a claim
    Claims(ObjectEvent<Claim>),
    /// A watch event of ServiceCIDRs, whose addresses pods must not get
    ServiceRanges(ObjectEvent<ServiceRange>),
    /// A watch event of Pods, which report addresses and name claims
    Pods(ObjectEvent<Pod>),
    /// The present result of the election: whether this process leads, and until when
    Leadership(Leadership),
    /// The answer to the request with this id; ignored if that request is not in flight
    Answer(RequestId, RequestOutcome),
}

#[derive(Clone, Debug)]
struct Pending {
    purpose: Purpose,
    /// The request, if it is a write.
    written: Option<ApiRequest>,
    term: TermId,
    /// The state of the cache when the request was sent. The cache uses this state to find out whether the answer is
    /// outdated.
    sent: CacheMark,
    /// The object that the request is about, as the cache had it when the request was sent.
    known: Option<(ObjectKind, KnownObject)>,
}

/// A kind of object that the cache contains, and whose changes the controller handles.
trait CachedKind: Object + Clone {
    fn table(cache: &mut ClusterCache) -> &mut ObjectCache<Self>;
    fn changed(controller: &mut Controller, delta: &ObjectUpdate<Self>, now: Now);
}

macro_rules! cached {
    ($($kind:ty: $table:ident, $changed:ident;)*) => {$(
        impl CachedKind for $kind {
            fn table(cache: &mut ClusterCache) -> &mut ObjectCache<Self> {
                &mut cache.$table
            }
            fn changed(controller: &mut Controller, delta: &ObjectUpdate<Self>, now: Now) {
                controller.$changed(delta, now);
            }
        }
    )*};
}

cached! {
    Node: nodes, node_changed;
    Subnet: subnets, subnet_changed;
    Routes: routes, routes_changed;
    FrrConfiguration: frr_configurations, routes_changed;
    Block: blocks, block_changed;
    Pool: pools, pool_changed;
    Claim: claims, claim_changed;
}

/// The state machine: the cache and, while this process leads, the leader's state.
#[derive(Clone, Debug)]
pub struct Controller {
    settings: ControllerSettings,
    cache: ClusterCache,
    departed: DeletedNodes,
    leader: Option<Leader>,
    pending: BTreeMap<RequestId, Pending>,
    next_id: u64,
    reports: Vec<EventRecord>,
    stopping: bool,
    foreign_allocations: u64,
    /// When the present term began, by the monotonic clock
    won: Duration,
    /// Whether a list has shown that the API server was restored to an older state
    put_back: bool,
}

impl Controller {
    /// Creates a controller that does not lead and whose cache is empty.
    pub fn new(settings: ControllerSettings) -> Self {
        Controller {
            cache: ClusterCache {
                awaits_frr_configurations: settings.frr.is_some(),
                ..ClusterCache::default()
            },
            settings,
            departed: DeletedNodes::default(),
            leader: None,
            pending: BTreeMap::new(),
            next_id: 0,
            reports: Vec::new(),
            stopping: false,
            foreign_allocations: 0,
            won: Duration::ZERO,
            put_back: false,
        }
    }

    /// Applies an event to the cache and to the leader's state. [`Controller::poll`] then returns the requests that
    /// follow from the event.
    pub fn on(&mut self, event: ControllerEvent, now: Now) {
        match event {
            ControllerEvent::Nodes(change) => self.watched(change, now),
            ControllerEvent::Subnets(change) => self.watched(change, now),
            ControllerEvent::Routes(change) => {
                self.routes_watched(change, now);
                let is_listed = self.cache.routes.is_listed_since(self.won);
                self.cache.awaits_routes &= !is_listed;
            }
            ControllerEvent::FrrConfigurations(change) => {
                self.routes_watched(change, now);
                let is_listed = self.cache.frr_configurations.is_listed_since(self.won);
                self.cache.awaits_frr_configurations &= !is_listed;
            }
            ControllerEvent::NoFrrConfigurations => {
                self.cache.awaits_frr_configurations = false;
                for delta in self.cache.frr_configurations.clear() {
                    self.routes_changed(&delta, now);
                }
            }
            ControllerEvent::Blocks(change) => self.watched(change, now),
            ControllerEvent::Pools(change) => self.watched(change, now),
            ControllerEvent::Claims(change) => self.watched(change, now),
            ControllerEvent::ServiceRanges(change) => {
                let changed = !self.cache.services.change(change).is_empty();
                if let Some(leader) = self.leader.as_mut().filter(|_| changed) {
                    leader.services_changed();
                }
            }
            ControllerEvent::Pods(change) => {
                let changed = self.cache.pods.change(change);
                self.pods_changed(changed);
            }
            ControllerEvent::Leadership(leadership) => self.leadership(leadership, now),
            ControllerEvent::Answer(id, outcome) => self.answered(id, &outcome, now),
        }
    }

    /// Returns the next request to send, or `None` if nothing can be sent now. After every event, and at
    /// [`Controller::wake_at`], the caller calls this method repeatedly until it returns `None`.
    pub fn poll(&mut self, now: Now) -> Option<OutgoingRequest> {
        let leader = self.leader.as_mut().filter(|_| !self.put_back)?;
        if now.mono >= leader.term.valid_until && !Mutation::ExpiredLeaderDecides.is_on() {
            return None;
        }
        let critical = self
            .pending
            .values()
            .filter(|p| is_critical(&p.purpose))
            .count();
        let background = self.pending.len() - critical;
        let budget = SendBudget {
            critical: critical < self.settings.critical_in_flight,
            background: background < self.settings.background_in_flight && critical <= 2,
        };
        if !leader.allocating {
            if !budget.critical || self.stopping {
                return None;
            }
            if let Some(found) = leader.loops.fence.next_urgent(&self.cache, now) {
                return Some(self.send(found));
            }
            if !leader.loops.fence.is_listed() {
                return None;
            }
            leader.begin_allocating(
                &self.cache,
                &self.departed,
                &self.settings,
                &mut self.reports,
                now,
            );
        }
        let found = leader.next(
            &self.cache,
            &self.settings,
            &mut self.reports,
            budget,
            self.stopping,
            now,
        )?;
        Some(self.send(found))
    }

    /// Returns the content that the Lease should get, or `None` if no Lease write is needed. Each time after
    /// [`Controller::poll`] has returned `None`, the caller calls this method and passes the content to the elector.
    pub fn take_wanted(&mut self) -> Option<LeaseContent> {
        self.leader.as_mut()?.take_wanted(&self.cache)
    }

    /// Returns the monotonic time at which [`Controller::poll`] has to be called again even if no event arrives.
    pub fn wake_at(&self) -> Option<Duration> {
        self.leader.as_ref()?.wake_at()
    }

    /// Returns the reports that were made since this function was last called. They become Kubernetes events.
    pub fn take_reports(&mut self) -> Vec<EventRecord> {
        std::mem::take(&mut self.reports)
    }

    /// Stops new writes. Answers to requests in flight are still handled, objects whose writes are indeterminate are
    /// still read, and indeterminate writes of podCIDRs are repeated.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Returns whether the Lease may be handed over as clean: no request is in flight, no write is indeterminate, and
    /// the fence against earlier leaders is complete. If this process does not lead, returns whether no request is in
    /// flight.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty() && self.leader.as_ref().is_none_or(Leader::is_settled)
    }

    /// Returns whether the process can end after [`Controller::stop`]: no request is in flight, and no write is
    /// indeterminate.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pending.is_empty()
            && self
                .leader
                .as_ref()
                .is_none_or(|leader| !leader.has_unclear())
    }

    /// Returns whether this process leads.
    pub fn is_leading(&self) -> bool {
        self.leader.is_some()
    }

    /// Returns whether this process leads and its loops run. podCIDRs may still have to wait for the fence.
    pub fn is_allocating(&self) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.allocating)
    }

    /// Returns whether a list has shown that the API server was restored to an older state. If so, the cache may
    /// contain objects that no longer exist. The controller sends nothing any more, and the process must be restarted.
    pub fn is_put_back(&self) -> bool {
        self.put_back
    }

    /// Returns a snapshot of the controller's state, for metrics and readiness.
    pub fn view(&mut self, now: Now) -> ControllerView {
        let mut view = ControllerView {
            missing: self.cache.missing(),
            foreign_allocations: self.foreign_allocations,
            doubled: self.cache.pods.doubled().len(),
            ..ControllerView::default()
        };
        if let Some(leader) = &mut self.leader {
            leader.describe(&mut view, &self.cache, now);
        }
        view
    }

    fn send(&mut self, (request, purpose): (ApiRequest, Purpose)) -> OutgoingRequest {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let term = self
            .leader
            .as_ref()
            .map_or_else(|| "".into(), |leader| leader.term.id.clone());
        let loop_name = purpose.loop_name();
        let about = request.about();
        let kind = about.map(|(kind, _)| kind);
        let (sent, known) = about.map_or_else(Default::default, |it| self.cache.about(it));
        let written = request.is_write().then(|| request.clone());
        let out_term = written.is_some().then(|| term.clone());
        let numbered = request.is_numbered() && !Mutation::LeaseNotAwaited.is_on();
        let leader = self.leader.as_mut().filter(|_| numbered);
        let number = leader.map_or(0, Leader::number);
        self.pending.insert(
            id,
            Pending {
                purpose,
                written,
                term,
                sent,
                known: kind.zip(known),
            },
        );
        OutgoingRequest {
            id,
            request,
            term: out_term,
            loop_name,
            number,
        }
    }

    fn watched<T: CachedKind>(&mut self, change: ObjectEvent<T>, now: Now) {
        for delta in T::table(&mut self.cache).change(change) {
            T::changed(self, &delta, now);
        }
    }

    fn leadership(&mut self, leadership: Leadership, now: Now) {
        match leadership {
            Leadership::Leading(term) => match &mut self.leader {
                Some(leader) if leader.term.id == term.id => leader.renewed(term),
                _ => {
                    self.won = now.mono;
                    self.await_routes(&term);
                    self.leader = Some(Leader::new(term, &self.settings, now));
                }
            },
            Leadership::Standby { .. } | Leadership::Released => self.leader = None,
        }
    }

    /// Records which kinds of routes have to be listed, because the watch may lack objects of earlier leaders.
    fn await_routes(&mut self, term: &LeadershipTerm) {
        let (seen, since) = sufficient_versions(term).unzip();
        let seen: SeenVersions = seen.unwrap_or_default();
        let since = since.unwrap_or_default();
        self.cache.awaits_routes = is_behind(&self.cache.routes, seen.routes, since)
            && !Mutation::EarlierRoutesNotListed.is_on();
        let frr = &self.cache.frr_configurations;
        self.cache.awaits_frr_configurations =
            self.settings.frr.is_some() && is_behind(frr, seen.frr_configurations, since);
    }

    fn node_changed(&mut self, delta: &ObjectUpdate<Node>, now: Now) {
        self.cache.note_node(delta);
        self.departed.node_changed(delta, now.mono);
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.allocating) else {
            return;
        };
        leader.node_changed(
            delta,
            &self.cache,
            &mut self.reports,
            &mut self.foreign_allocations,
            now,
        );
    }

    fn subnet_changed(&mut self, delta: &ObjectUpdate<Subnet>, now: Now) {
        self.departed.subnet_changed(delta);
        self.cache.note_subnet(delta);
        self.pods_changed(false);
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.allocating) else {
            return;
        };
        let Some(subnet) = delta.after.as_ref().or(delta.before.as_ref()) else {
            return;
        };
        let (before, after) = (delta.before.as_ref(), delta.after.as_ref());
        let changed = SubnetDiff {
            reported: before.map(|it| &it.report) != after.map(|it| &it.report),
            requested: before.map(|it| &it.requests) != after.map(|it| &it.requests),
        };
        leader.subnet_changed(&subnet.name, changed, &self.cache, &mut self.reports, now);
    }

    /// Applies a watch event of NodeRoutes or FRRConfigurations. When a list of the kind is complete, queues all nodes.
    fn routes_watched<K: RouteLoopOf + CachedKind>(&mut self, change: ObjectEvent<K>, now: Now) {
        let was_listed = K::table(&mut self.cache).is_listed();
        self.watched(change, now);
        let is_listed = K::table(&mut self.cache).is_listed();
        if !was_listed
            && is_listed
            && let Some(leader) = &mut self.leader
        {
            K::route_loop(&mut leader.loops).requeue_all(&self.cache);
        }
    }

    fn routes_changed<K: RouteLoopOf>(&mut self, delta: &ObjectUpdate<K>, _: Now) {
        if let Some(leader) = &mut self.leader {
            leader.routes_changed(delta);
        }
    }

    fn block_changed(&mut self, delta: &ObjectUpdate<Block>, now: Now) {
        if let Some(leader) = self.leader.as_mut().filter(|leader| leader.allocating) {
            leader.block_changed(delta, &self.cache, now);
        }
    }

    /// Passes changes of pods to the leader. `changed` is true if a pod may have stopped reporting an address.
    fn pods_changed(&mut self, changed: bool) {
        let claims = self.cache.pods.take_claims();
        let nodes = self.cache.pods.take_nodes();
        if let Some(leader) = &mut self.leader {
            leader.pods_changed(changed, claims, nodes);
        }
    }

    fn claim_changed(&mut self, delta: &ObjectUpdate<Claim>, _: Now) {
        self.cache.note_claim(delta);
        self.pods_changed(false);
        if let Some(leader) = self.leader.as_mut().filter(|leader| leader.allocating) {
            leader.claim_changed(delta);
        }
    }

    fn pool_changed(&mut self, delta: &ObjectUpdate<Pool>, _: Now) {
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.allocating) else {
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

/// Returns whether a cache may lack objects that earlier leaders have seen. `seen` is the version up to which they have
/// seen the objects of the kind; `None` if it is unknown. Lists that were requested before `since` do not count.
fn is_behind<T: Object>(table: &ObjectCache<T>, seen: Option<u64>, since: Duration) -> bool {
    !seen.is_some_and(|version| table.has_reached(version, since))
}
