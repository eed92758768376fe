//! The loop of routes. It writes to an object of each node which ranges are reached through the node, so that the other
//! nodes, or other routers, can route packets there. There are two kinds of such objects, and one loop for each kind:
//!
//! | kind | for whom | file |
//! |---|---|---|
//! | NodeRoutes | agents, and programs of the administrator | [`node_routes`] |
//! | FRRConfiguration | frr-k8s, which announces the ranges by BGP | [`frr`] |
//!
//! The loop is level-triggered: it computes the object from the node's NodeSubnet and the Node. A route exists before
//! the node's agent can assign an address of the range, or very soon after. If the controller does not write objects of
//! the kind, the loop deletes those that exist.
//!
//! # Guarantees
//! - While the NodeRoutes or the FRRConfiguration of a node lists a block, or a write whose outcome is not known may
//!   list it, the IPAMBlock is not deleted ([`is_routed`]). So the range is not allocated to another node, unless a
//!   late write of an earlier leader lists the block again.
//! - Nothing is written while the routes of a node stay the same.
//! - If the API server keeps rejecting the object of a node, only the blocks that it lists are affected: they cannot be
//!   released. The event `WriteRejected` of the Node reports this.
//! - An object of the same name that somebody else has created is never changed or deleted. An event reports this.

mod frr;
mod node_routes;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::allocations::open_routes::OpenRoutes;
use crate::cluster::cache::{ClusterCache, spec_for};
use crate::cluster::names::NodeName;
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{FrrConfiguration, Node, Object, Routes, Text};
use crate::cluster::request::{
    ApiRequest, KnownObject, ObjectKind, ObjectSpec, Rejection, RequestOutcome,
};
use crate::purpose::Step;
use crate::report::{EventRecord, FRR_CONFIGURATION};
use cadastre_api::NodeSubnetSpec;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// If somebody else has created an object under the name of a node's object, the loop reads it again at this interval,
/// because no watch delivers its deletion.
const FOREIGN_PAUSE: Duration = Duration::from_secs(60);

/// A kind of object that lists the ranges of a node: NodeRoutes or FRRConfiguration.
pub(crate) trait RouteKind: Object<Name = NodeName> + Sized {
    /// The settings of the administrator for all objects of the kind.
    type Settings: Default;
    const KIND: ObjectKind;
    /// The mutation with which objects of the kind are never changed or deleted.
    const NOT_WITHDRAWN: Mutation;
    /// The mutation with which blocks are deleted although an object of the kind lists them.
    const FREED: Mutation;

    fn cached(cache: &ClusterCache) -> &ObjectCache<Self>;

    /// Returns whether the cache may lack objects that earlier leaders have written.
    fn is_awaited(cache: &ClusterCache) -> bool;

    /// Returns the ranges that the object lists.
    fn ranges(&self) -> BTreeSet<Cidr>;

    /// Returns the ranges that a write of `spec` lists.
    fn ranges_of(spec: &ObjectSpec) -> BTreeSet<Cidr>;

    /// Returns the object that the node should have. `ranges` is not empty.
    fn wanted(node: &Node, ranges: &[Cidr], settings: &Self::Settings, cx: &Context) -> Wanted;

    /// Returns whether the object has the content that a write of `spec` gives it.
    fn is_as(&self, spec: &ObjectSpec) -> bool;

    /// If the outcome shows that somebody else has created the object, returns the text for an event.
    fn foreign(_: &RequestOutcome) -> Option<String> {
        None
    }
}

/// The object that a node should have.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// The spec of the object; `None` if the node should have none
    spec: Option<ObjectSpec>,
    /// Why the node has no object, or not the one that its annotation requests
    problem: Option<String>,
}

/// The queue of the loop, and its requests in flight.
#[derive(Clone, Debug)]
pub(crate) struct RouteLoop<K: RouteKind> {
    /// Names of nodes whose objects may have to change
    pub(crate) queue: Queue<NodeName>,
    /// Names of nodes with a request in flight about their object
    requests: InFlight<NodeName>,
    settings: K::Settings,
    /// Has an entry while a list of all objects of the kind has to be requested
    lists: Queue<()>,
    is_listing: bool,
    /// Nodes for which somebody else has created the object, each with the monotonic time of the next read
    foreign: BTreeMap<NodeName, Duration>,
    /// The problems of nodes, as events have reported them
    problems: BTreeMap<NodeName, String>,
}

impl<K: RouteKind> Default for RouteLoop<K> {
    fn default() -> Self {
        RouteLoop {
            queue: Queue::default(),
            requests: InFlight::default(),
            settings: K::Settings::default(),
            lists: Queue::default(),
            is_listing: false,
            foreign: BTreeMap::new(),
            problems: BTreeMap::new(),
        }
    }
}

impl<K: RouteKind> Loop for RouteLoop<K> {
    fn load(&self) -> Load {
        self.queue.load() + self.lists.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        if K::is_awaited(cx.cache) && self.lists.pop(cx.now.mono).is_some() {
            self.is_listing = true;
            return Some((ApiRequest::List(K::KIND), Purpose::ListRoutes(K::KIND)));
        }
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        if let Purpose::Routes { name, .. } = answer.purpose {
            self.requests.answered(name, answer);
            self.note_foreign(name, answer.outcome, cx);
            self.queue.add(name.clone());
            if !self.requests.is_open(name) {
                let written = cx.allocations.open_routes.settled(K::KIND, name);
                // These blocks have waited for the outcome. If the object lists them, they wait on.
                let blocks = &cx.allocations.blocks;
                let is_waiting =
                    |it: &Cidr| blocks.get(it).is_some_and(|it| it.step == Step::Delete);
                return AffectedLoops {
                    blocks: written.into_iter().filter(is_waiting).collect(),
                    ..AffectedLoops::default()
                };
            }
        }
        if *answer.purpose == Purpose::ListRoutes(K::KIND) {
            self.is_listing = false;
            if K::is_awaited(cx.cache) {
                self.lists.add_failed((), cx.now.mono);
            }
        }
        AffectedLoops::default()
    }
}

impl<K: RouteKind> RouteLoop<K> {
    pub(crate) fn new(settings: K::Settings) -> Self {
        RouteLoop {
            settings,
            ..RouteLoop::default()
        }
    }

    /// Queues all nodes, because a term has begun or all objects of the kind have been listed.
    pub(crate) fn requeue_all(&mut self, cache: &ClusterCache) {
        if K::is_awaited(cache) && !self.is_listing {
            self.lists.add(());
        }
        let nodes = cache.nodes.iter().map(|it| &it.name);
        for name in nodes.chain(K::cached(cache).iter().map(|it| it.name())) {
            self.queue.add(name.clone());
        }
    }

    fn look(&mut self, name: &NodeName, cx: &mut Context) -> KeyDecision {
        // The API server may not have the kind yet, because an administrator must update the CRDs or install frr-k8s.
        if self.requests.is_sent(name) || !K::cached(cx.cache).is_listed() {
            return KeyDecision::Done;
        }
        let request = if self.requests.is_to_read(name) {
            ApiRequest::Read(K::KIND, Text::from(name.clone()))
        } else {
            match self.step(name, cx) {
                Ok(Some(request)) => request,
                Ok(None) => return KeyDecision::Done,
                Err(at) => return KeyDecision::Later(at),
            }
        };
        let call = if request.is_write() {
            ObjectCall::WriteRoutes(K::KIND, name.clone())
        } else {
            ObjectCall::ReadRoutes(K::KIND, name.clone())
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        if let ApiRequest::Create(_, spec) | ApiRequest::Replace(_, spec) = &request
            && !K::FREED.is_on()
            && !Mutation::OpenRoutesIgnored.is_on()
        {
            let open = &mut cx.allocations.open_routes;
            open.sent(K::KIND, name, K::ranges_of(spec));
        }
        self.requests.send(name.clone());
        let (kind, name) = (K::KIND, name.clone());
        KeyDecision::Send(request, Purpose::Routes { kind, name })
    }

    /// Returns the request that the object of a node needs. The error is the monotonic time of the next check.
    fn step(&mut self, name: &NodeName, cx: &mut Context) -> Result<Option<ApiRequest>, Duration> {
        let wanted = self.wanted(name, cx);
        let found = K::cached(cx.cache).get(name);
        Ok(match (found, wanted) {
            (None, None) => None,
            (Some(found), Some(spec)) if found.is_as(&spec) => None,
            (Some(_), _) if K::NOT_WITHDRAWN.is_on() => None,
            (None, Some(spec)) => match self.foreign.get(name) {
                Some(until) if *until > cx.now.mono => return Err(*until),
                Some(_) => Some(ApiRequest::Read(K::KIND, Text::from(name.clone()))),
                None => Some(ApiRequest::Create(Text::from(name.clone()), spec)),
            },
            (Some(found), Some(spec)) => Some(ApiRequest::Replace(KnownObject::of(&**found), spec)),
            (Some(found), None) => Some(ApiRequest::Delete(K::KIND, KnownObject::of(&**found))),
        })
    }

    /// Returns the spec that the object of a node should have, if any. Reports a problem by an event, once.
    fn wanted(&mut self, name: &NodeName, cx: &mut Context) -> Option<ObjectSpec> {
        let node = cx.cache.nodes.get(name);
        let ranges = node.and_then(|node| Some((node, spec_for(cx.cache, name, &node.uid)?)));
        let ranges = ranges.map(|(node, spec)| (node, destinations(spec)));
        let Some((node, ranges)) = ranges.filter(|(_, ranges)| !ranges.is_empty()) else {
            self.problems.remove(name);
            self.foreign.remove(name);
            return None;
        };
        let Wanted { spec, problem } = K::wanted(node, &ranges, &self.settings, cx);
        match problem {
            None => _ = self.problems.remove(name),
            Some(problem) if self.problems.get(name) == Some(&problem) => {}
            Some(problem) => {
                report(node, problem.clone(), cx.reports);
                self.problems.insert(name.clone(), problem);
            }
        }
        spec
    }

    /// Records whether the outcome shows an object that somebody else has created, and reports such an object once.
    fn note_foreign(&mut self, name: &NodeName, outcome: &RequestOutcome, cx: &mut Context) {
        let is_known = !matches!(
            outcome,
            RequestOutcome::Indeterminate(_)
                | RequestOutcome::Rejected(
                    Rejection::Guard(_)
                        | Rejection::Rejected(_)
                        | Rejection::Busy(_)
                        | Rejection::NotSent
                )
        );
        match K::foreign(outcome) {
            Some(text) => {
                let until = cx.now.mono + FOREIGN_PAUSE;
                let before = self.foreign.insert(name.clone(), until);
                if let Some(node) = cx.cache.nodes.get(name).filter(|_| before.is_none()) {
                    report(node, text, cx.reports);
                }
            }
            None if is_known => _ = self.foreign.remove(name),
            None => {}
        }
    }
}

fn report(node: &Node, problem: String, reports: &mut Vec<EventRecord>) {
    reports.push(EventRecord::warning(node, FRR_CONFIGURATION, problem));
}

/// Returns the ranges that are reached through the node of a NodeSubnet, sorted. Withheld podCIDRs are left out.
fn destinations(spec: &NodeSubnetSpec) -> Vec<Cidr> {
    let pod_cidrs = spec.pod_cidrs.iter().filter(|it| !it.withheld);
    let pod_cidrs = pod_cidrs.map(|it| &it.cidr);
    // While a virtual machine migrates, its packets do not go to the standby node.
    let blocks = spec.blocks.iter().filter(|it| !it.standby);
    let blocks = blocks.map(|it| &it.cidr);
    let destinations = pod_cidrs.chain(blocks);
    let mut destinations: Vec<Cidr> = destinations
        .filter_map(|it| Cidr::parse_strict(it).ok())
        .collect();
    destinations.sort_unstable();
    destinations.dedup();
    destinations
}

/// Parses the CIDRs of a list, and leaves out invalid texts.
fn parsed<'a>(texts: impl Iterator<Item = &'a str>) -> BTreeSet<Cidr> {
    texts.filter_map(|it| Cidr::parse_strict(it).ok()).collect()
}

/// Returns whether the NodeRoutes or the FRRConfiguration of the node lists the range, or may soon list it. As long as
/// this is so, the range must not become free. Returns true for each range until the cache has all objects of earlier
/// leaders.
pub(crate) fn is_routed(
    node: &NodeName,
    range: &Cidr,
    open: &OpenRoutes,
    cache: &ClusterCache,
) -> bool {
    lists::<Routes>(node, range, cache)
        || lists::<FrrConfiguration>(node, range, cache)
        || open.may_list(node, range)
        || cache.awaits_routes
        || cache.awaits_frr_configurations
}

fn lists<K: RouteKind>(node: &NodeName, range: &Cidr, cache: &ClusterCache) -> bool {
    let found = K::cached(cache).get(node);
    found.is_some_and(|it| it.ranges().contains(range)) && !K::FREED.is_on()
}
