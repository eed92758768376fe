//! The objects that one run of a controller process has received, as the checks record them without the controller.
//!
//! A controller can only respect objects that it has received. For example, if a node appears with a range just after
//! the controller has allocated that range, the controller has made no mistake.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_controller::ControllerEvent;
use cadastre_controller::cluster::lease::{Leadership, Takeover};
use cadastre_controller::cluster::names::{NodeName, ObjectUid, TermId};
use cadastre_controller::cluster::objects::{Block, Node, Pod, Pool, ServiceRange, Subnet, Text};
use cadastre_controller::cluster::request::RequestOutcome;
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;

use super::api::Api;
use super::block_checks::listed;
use super::clock::Time;
use super::object_log::View;
use super::pool_model::PoolModel;

pub type Labels = Box<[(Text, Text)]>;

#[derive(Default)]
pub struct Received {
    pub nodes: View<Node>,
    pub pools: View<Pool>,
    pub subnets: View<Subnet>,
    pub blocks: View<Block>,
    pub services: View<ServiceRange>,
    pub pods: View<Pod>,
    /// For each node (UID), all sets of labels with which it was received.
    pub labels: BTreeMap<ObjectUid, BTreeSet<Labels>>,
    /// For each node (UID), all numbers of pods that it may run with which it was received.
    pub max_pods: BTreeMap<ObjectUid, BTreeSet<u16>>,
    /// All versions of pools that were received.
    pub models: Vec<PoolModel>,
    /// The term of the leadership that was last passed to the controller; `None` if the controller does not lead.
    pub term: Option<TermId>,
    pub takeover: Option<Takeover>,
    /// Whether the Lease gave the process the intents of earlier leaders (allocations that may be in flight).
    pub has_inherited_intents: bool,
    /// Whether the controller has requested a write other than a touch in the present term. If so, it has passed the
    /// fence.
    pub has_written: bool,
    /// Whether the controller has requested a list in the present term.
    pub has_listed: bool,
    /// UIDs of nodes that were received with podCIDRs while they existed. An event of a deleted node may arrive after
    /// events of a newer node with the same name. The process ignores such an event, and so must the checks.
    had_podcidrs: BTreeSet<ObjectUid>,
    /// UIDs of nodes in `had_podcidrs` whose deletion was received, whoever led at that time.
    pub seen_deleted: BTreeSet<ObjectUid>,
    /// All ranges that the process has chosen, with the name of the node. The process may choose the same ranges again
    /// for that name, even if no node ever had them.
    pub chosen: BTreeSet<(NodeName, Vec<Cidr>)>,
    /// Blocks that the process received or requested, with the name of their node. It is a repair to create one of them
    /// again.
    pub had: BTreeSet<(Cidr, NodeName)>,
    /// Blocks that a node's agent uses, according to a NodeSubnet that the process received. The controller may adopt
    /// them.
    pub used: BTreeSet<(Cidr, NodeName)>,
    /// For each pool (UID), the newest version that a watch event or a response has shown.
    newest: BTreeMap<ObjectUid, u64>,
    /// For each service range, pod or pool (UID), its present version (the generation of a pool), and the time at which
    /// the process received that version.
    versions: BTreeMap<ObjectUid, (i64, Time)>,
    /// When the process first chose ranges for a node. The key is the node's UID and the ranges.
    pub decided: BTreeMap<(ObjectUid, Vec<Cidr>), Time>,
    /// For each choice of ranges (the UID of the node that gets them, and the ranges), the dead nodes (by UID) whose
    /// quarantine the choice had to respect. This process made the choice, or inherited it from an earlier process.
    pub considered_dead: BTreeMap<(ObjectUid, Vec<Cidr>), BTreeSet<ObjectUid>>,
}

impl Received {
    pub fn observe_leadership(&mut self, leadership: &Leadership) {
        let (term, takeover) = match leadership {
            Leadership::Leading(term) => (Some(term.id.clone()), Some(term.takeover)),
            _ => (None, None),
        };
        self.has_inherited_intents =
            matches!(leadership, Leadership::Leading(it) if it.inherited.is_some());
        self.has_written &= term == self.term;
        self.has_listed &= term == self.term;
        (self.term, self.takeover) = (term, takeover);
    }

    /// Records a watch event.
    pub fn watched(&mut self, event: &ControllerEvent, api: &Api, now: Time) {
        match event {
            ControllerEvent::Nodes(change) => self.nodes(change, api),
            ControllerEvent::Pools(change) => self.pools(change, now),
            ControllerEvent::Subnets(change) => self.subnets(change),
            ControllerEvent::Blocks(change) => self.blocks(change),
            ControllerEvent::ServiceRanges(change) => self.services(change, now),
            ControllerEvent::Pods(change) => self.pods(change, now),
            _ => {}
        }
    }

    fn nodes(&mut self, change: &ObjectEvent<Node>, api: &Api) {
        if let ObjectEvent::Applied(node) = change {
            self.node(node);
            let live = api.nodes.get(&node.name);
            if !node.pod_cidrs.is_empty() && live.is_some_and(|live| live.uid == node.uid) {
                self.had_podcidrs.insert(node.uid.clone());
            }
        }
        let gone = self.nodes.take(change).into_iter().map(|it| it.uid);
        self.seen_deleted
            .extend(gone.filter(|uid| self.had_podcidrs.contains(uid)));
    }

    fn subnets(&mut self, change: &ObjectEvent<Subnet>) {
        if let ObjectEvent::Applied(subnet) = change {
            self.subnet(subnet);
        }
        self.subnets.take(change);
    }

    fn blocks(&mut self, change: &ObjectEvent<Block>) {
        if let ObjectEvent::Applied(block) = change
            && let Ok(spec) = &block.spec
        {
            self.had.insert((spec.cidr, spec.owner.name.clone()));
        }
        self.blocks.take(change);
    }

    fn services(&mut self, change: &ObjectEvent<ServiceRange>, now: Time) {
        if let ObjectEvent::Applied(it) = change {
            self.record_version(&it.uid, it.version.cast_signed(), now);
        }
        self.services.take(change);
    }

    fn pods(&mut self, change: &ObjectEvent<Pod>, now: Time) {
        if let ObjectEvent::Applied(it) = change {
            self.record_version(&it.uid, it.version.cast_signed(), now);
        }
        self.pods.take(change);
    }

    fn pools(&mut self, change: &ObjectEvent<Pool>, now: Time) {
        if let ObjectEvent::Applied(pool) = change {
            self.pool(pool);
            self.record_version(&pool.uid, pool.generation, now);
        }
        self.pools.take(change);
    }

    /// Records the version of an object, and since when the process knows this version.
    fn record_version(&mut self, uid: &ObjectUid, version: i64, now: Time) {
        let known = self.versions.entry(uid.clone()).or_insert((-1, now));
        if known.0 != version {
            *known = (version, now);
        }
    }

    /// Whether the process already knew the object's present version at the time `then`.
    pub fn has_known_since(&self, uid: &ObjectUid, then: Time) -> bool {
        self.versions.get(uid).is_some_and(|(_, at)| *at <= then)
    }

    pub fn answer(&mut self, outcome: &RequestOutcome) {
        match outcome {
            RequestOutcome::Node(node) => self.node(node),
            RequestOutcome::Nodes(nodes) => nodes.iter().for_each(|node| self.node(node)),
            RequestOutcome::Pool(pool) => self.pool(pool),
            RequestOutcome::Subnet(subnet) => self.answered_subnet(subnet),
            RequestOutcome::Subnets(subnets) => {
                for subnet in subnets {
                    self.answered_subnet(subnet);
                }
            }
            _ => {}
        }
    }

    /// Records a write. At the first write of a term the controller has passed the fence, so nodes that no longer exist
    /// are removed from `had_podcidrs`. Returns true if this is the first write after an unclean takeover, and if no
    /// list was requested before it.
    pub fn begins_to_write(&mut self, api: &Api) -> bool {
        let begins = !std::mem::replace(&mut self.has_written, true);
        if begins {
            let live = api.nodes.live.values();
            let live: BTreeSet<&ObjectUid> = live.map(|node| &node.uid).collect();
            self.had_podcidrs.retain(|uid| live.contains(uid));
        }
        begins && !self.has_listed && self.takeover == Some(Takeover::Unclean)
    }

    fn node(&mut self, node: &Node) {
        let labels = self.labels.entry(node.uid.clone()).or_default();
        labels.insert(node.labels.clone());
        let max_pods = self.max_pods.entry(node.uid.clone()).or_default();
        max_pods.insert(node.max_pods);
    }

    /// Records a NodeSubnet that a response has shown. The watch may not have shown it yet, and a block that it lists may
    /// have an IPAMBlock that a user has made unreadable.
    fn answered_subnet(&mut self, subnet: &Subnet) {
        self.subnet(subnet);
        let listed = listed(Some(subnet)).into_iter();
        self.had
            .extend(listed.map(|(cidr, _)| (cidr, subnet.name.clone())));
    }

    fn subnet(&mut self, subnet: &Subnet) {
        let reports = subnet.report.iter().flat_map(|report| &report.blocks);
        let used = reports.filter(|report| report.busy() > 0);
        self.used
            .extend(used.map(|report| (report.cidr, subnet.name.clone())));
    }

    /// Whether the process has received no newer version of the pool than this one.
    pub fn is_newest(&self, pool: &Pool) -> bool {
        let newest = self.newest.get(&pool.uid);
        newest.is_none_or(|newest| *newest <= pool.version)
    }

    fn pool(&mut self, pool: &Pool) {
        let newest = self.newest.entry(pool.uid.clone()).or_default();
        *newest = pool.version.max(*newest);
        if let Some(model) = PoolModel::new(pool).filter(|model| !self.models.contains(model)) {
            self.models.push(model);
        }
    }
}
