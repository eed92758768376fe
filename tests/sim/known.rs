//! What one run of a process has received, as the checks remember it.
//!
//! A controller is checked against what it could know: a node that appears with a range just after the controller
//! has allocated that range is not the controller's fault.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_controller::cluster::lease::{Leadership, Takeover};
use cadastre_controller::cluster::names::{LeaderTerm, NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{Block, Node, Pod, Pool, ServiceRange, Subnet, Text};
use cadastre_controller::cluster::request::RequestOutcome;
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;

use super::api::Api;
use super::clock::Time;
use super::object_log::View;
use super::shape::Shape;

pub type Labels = Box<[(Text, Text)]>;

#[derive(Default)]
pub struct Known {
    pub nodes: View<Node>,
    pub pools: View<Pool>,
    pub subnets: View<Subnet>,
    pub blocks: View<Block>,
    pub services: View<ServiceRange>,
    pub pods: View<Pod>,
    /// All sets of labels with which a node was received, by UID.
    pub labels: BTreeMap<ObjectUid, BTreeSet<Labels>>,
    /// All versions of pools that were received.
    pub shapes: Vec<Shape>,
    /// The term that the controller was last told it leads in.
    pub term: Option<LeaderTerm>,
    pub takeover: Option<Takeover>,
    /// Whether the Lease contained the intents of earlier leaders.
    pub is_told: bool,
    /// Whether it has allocated, released or reported anything in that term, and so has passed the fence.
    pub deals: bool,
    /// Whether it has requested a list in that term.
    pub lists: bool,
    /// Nodes that were received alive with podCIDRs. Watch events of a node that is dead already may come after
    /// newer ones of its name, and are rightly ignored.
    met: BTreeSet<ObjectUid>,
    /// Those of them whose deletion was received, whoever led.
    pub buried: BTreeSet<ObjectUid>,
    /// Everything it has chosen for a node's name: it may choose the same again, even if no node ever had it.
    pub chosen: BTreeSet<(NodeName, Vec<Cidr>)>,
    /// Blocks that it received or requested, with the name of their node: creating them again is a repair.
    pub had: BTreeSet<(Cidr, NodeName)>,
    /// Blocks that the node's agent uses according to its NodeSubnet or an answer: they may be adopted.
    pub used: BTreeSet<(Cidr, NodeName)>,
    /// The newest version of each pool, by UID, in a watch event or an answer.
    newest: BTreeMap<ObjectUid, u64>,
    /// Since when each pool has had its received generation, and each service range and pod its received version.
    shown: BTreeMap<ObjectUid, (i64, Time)>,
    /// When it first requested these ranges for a node (by UID).
    pub decided: BTreeMap<(ObjectUid, Vec<Cidr>), Time>,
    /// UIDs of the dead nodes whose quarantine had to be respected when these ranges were chosen for a node, by
    /// this process or by the one it inherited them from.
    pub minded: BTreeMap<(ObjectUid, Vec<Cidr>), BTreeSet<ObjectUid>>,
}

impl Known {
    pub fn observe_leadership(&mut self, leadership: &Leadership) {
        let (term, takeover) = match leadership {
            Leadership::Leading(tenure) => (Some(tenure.term.clone()), Some(tenure.takeover)),
            _ => (None, None),
        };
        self.is_told = matches!(leadership, Leadership::Leading(it) if it.inherited.is_some());
        self.deals &= term == self.term;
        self.lists &= term == self.term;
        (self.term, self.takeover) = (term, takeover);
    }

    pub fn nodes(&mut self, change: &ObjectEvent<Node>, api: &Api) {
        if let ObjectEvent::Applied(node) = change {
            self.node(node);
            if !node.pod_cidrs.is_empty()
                && api
                    .nodes
                    .get(&node.name)
                    .is_some_and(|live| live.uid == node.uid)
            {
                self.met.insert(node.uid.clone());
            }
        }
        for gone in self.nodes.take(change) {
            if self.met.contains(&gone.uid) {
                self.buried.insert(gone.uid);
            }
        }
    }

    pub fn subnets(&mut self, change: &ObjectEvent<Subnet>) {
        if let ObjectEvent::Applied(subnet) = change {
            self.subnet(subnet);
        }
        self.subnets.take(change);
    }

    pub fn blocks(&mut self, change: &ObjectEvent<Block>) {
        if let ObjectEvent::Applied(block) = change
            && let Ok(spec) = &block.spec
        {
            self.had.insert((spec.cidr, spec.owner.name.clone()));
        }
        self.blocks.take(change);
    }

    /// Records the version of an object when it is received for the first time.
    pub fn note(&mut self, uid: &ObjectUid, version: i64, now: Time) {
        let shown = self.shown.entry(uid.clone()).or_insert((-1, now));
        if shown.0 != version {
            *shown = (version, now);
        }
    }

    /// Whether it has known the object in its present version since then.
    pub fn is_shown_since(&self, uid: &ObjectUid, then: Time) -> bool {
        self.shown.get(uid).is_some_and(|(_, at)| *at <= then)
    }

    pub fn pools(&mut self, change: &ObjectEvent<Pool>, now: Time) {
        if let ObjectEvent::Applied(pool) = change {
            self.pool(pool);
            self.note(&pool.uid, pool.generation, now);
        }
        self.pools.take(change);
    }

    pub fn answer(&mut self, outcome: &RequestOutcome) {
        match outcome {
            RequestOutcome::Node(node) => self.node(node),
            RequestOutcome::Nodes(nodes) => nodes.iter().for_each(|node| self.node(node)),
            RequestOutcome::Pool(pool) => self.pool(pool),
            RequestOutcome::Subnet(subnet) => self.subnet(subnet),
            RequestOutcome::Subnets(subnets) => {
                for subnet in subnets {
                    self.subnet(subnet);
                }
            }
            _ => {}
        }
    }

    /// Records that it writes, and so has passed the fence; nodes that died before are no longer in its records.
    /// Returns whether this is its first write after an unclean takeover for which it needed no list.
    pub fn begins_to_deal(&mut self, api: &Api) -> bool {
        let begins = !std::mem::replace(&mut self.deals, true);
        if begins {
            let live: BTreeSet<&ObjectUid> =
                api.nodes.live.values().map(|node| &node.uid).collect();
            self.met.retain(|uid| live.contains(uid));
        }
        begins && !self.lists && self.takeover == Some(Takeover::Unclean)
    }

    fn node(&mut self, node: &Node) {
        let labels = self.labels.entry(node.uid.clone()).or_default();
        if !labels.contains(&node.labels) {
            labels.insert(node.labels.clone());
        }
    }

    fn subnet(&mut self, subnet: &Subnet) {
        let words = subnet.report.iter().flat_map(|report| &report.blocks);
        let used = words.filter(|word| word.used + word.cooling > 0);
        self.used
            .extend(used.map(|word| (word.cidr, subnet.name.clone())));
    }

    /// Whether no newer version of the pool was received.
    pub fn is_newest(&self, pool: &Pool) -> bool {
        self.newest
            .get(&pool.uid)
            .is_none_or(|newest| *newest <= pool.version)
    }

    fn pool(&mut self, pool: &Pool) {
        let newest = self.newest.entry(pool.uid.clone()).or_default();
        *newest = pool.version.max(*newest);
        if let Some(shape) = Shape::new(pool).filter(|shape| !self.shapes.contains(shape)) {
            self.shapes.push(shape);
        }
    }
}
