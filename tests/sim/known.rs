//! What one run of a process has been told, as the checks remember it.
//!
//! A controller is judged by what it could know: a node that arrives with a range a moment after it
//! was dealt is nobody's fault.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_controller::cluster::lease::{Leadership, Takeover};
use cadastre_controller::cluster::request::Outcome;
use cadastre_controller::cluster::seen::{Block, Node, Pod, Pool, ServiceRange, Subnet, Text};
use cadastre_core::Cidr;
use cadastre_daemon::watch::Change;

use super::api::Api;
use super::clock::Time;
use super::kind::View;
use super::shape::Shape;

/// Labels of a node.
pub type Labels = Box<[(Text, Text)]>;

#[derive(Default)]
pub struct Known {
    pub nodes: View<Node>,
    pub pools: View<Pool>,
    pub subnets: View<Subnet>,
    pub blocks: View<Block>,
    pub services: View<ServiceRange>,
    pub pods: View<Pod>,
    /// Every set of labels a node was shown with, by UID.
    pub labels: BTreeMap<Text, BTreeSet<Labels>>,
    /// Every pool version shown.
    pub shapes: Vec<Shape>,
    /// The term the controller was last told it leads under.
    pub term: Option<Text>,
    /// How it came to lead.
    pub takeover: Option<Takeover>,
    /// Whether the Lease told it what earlier leaders have in flight.
    pub is_told: bool,
    /// Whether it has dealt, freed or told anything under that term: the fence is behind it.
    pub deals: bool,
    /// Whether it has asked for a list under that term.
    pub lists: bool,
    /// Nodes shown with podCIDRs while they lived. News of a node that is dead already may come after
    /// newer news of its name, and is rightly ignored then.
    met: BTreeSet<Text>,
    /// Of those, the ones whose end was shown, whoever led.
    pub buried: BTreeSet<Text>,
    /// What it ever chose for a node's name: it may come back to it, though it was never held.
    pub chosen: BTreeSet<(Text, Vec<Cidr>)>,
    /// Blocks shown, and those it asked for, with the name of the node that has them: to make one again
    /// is to restore it.
    pub had: BTreeSet<(Cidr, Text)>,
    /// Blocks that an agent of that node was shown, or told in an answer, to use: they may be taken up.
    pub used: BTreeSet<(Cidr, Text)>,
    /// The newest version of each pool, by UID, that a watch or an answer has told.
    newest: BTreeMap<Text, u64>,
    /// Since when each pool is shown in its generation, each service range and pod in its version.
    shown: BTreeMap<Text, (i64, Time)>,
    /// When it first asked for a node (by UID) to have these ranges.
    pub decided: BTreeMap<(Text, Vec<Cidr>), Time>,
    /// The dead nodes (by UID) that had to be minded when these ranges were chosen for a node, by it or by whom it
    /// took that over from.
    pub minded: BTreeMap<(Text, Vec<Cidr>), BTreeSet<Text>>,
}

impl Known {
    pub fn told(&mut self, leadership: &Leadership) {
        let (term, takeover) = match leadership {
            Leadership::Leading(tenure) => (Some(tenure.term.clone()), Some(tenure.takeover)),
            _ => (None, None),
        };
        self.is_told = matches!(leadership, Leadership::Leading(it) if it.inherited.is_some());
        self.deals &= term == self.term;
        self.lists &= term == self.term;
        (self.term, self.takeover) = (term, takeover);
    }

    pub fn nodes(&mut self, change: &Change<Node>, api: &Api) {
        if let Change::Applied(node) = change {
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

    pub fn subnets(&mut self, change: &Change<Subnet>) {
        if let Change::Applied(subnet) = change {
            self.subnet(subnet);
        }
        self.subnets.take(change);
    }

    pub fn blocks(&mut self, change: &Change<Block>) {
        if let Change::Applied(block) = change
            && let Ok(spec) = &block.spec
        {
            self.had.insert((spec.cidr, spec.owner.name.clone()));
        }
        self.blocks.take(change);
    }

    /// Takes note of what is shown as it is for the first time.
    pub fn note(&mut self, uid: &Text, version: i64, now: Time) {
        let shown = self.shown.entry(uid.clone()).or_insert((-1, now));
        if shown.0 != version {
            *shown = (version, now);
        }
    }

    /// Whether it has been shown the object as it is since then.
    pub fn is_shown_since(&self, uid: &Text, then: Time) -> bool {
        self.shown.get(uid).is_some_and(|(_, at)| *at <= then)
    }

    pub fn pools(&mut self, change: &Change<Pool>, now: Time) {
        if let Change::Applied(pool) = change {
            self.pool(pool);
            self.note(&pool.uid, pool.generation, now);
        }
        self.pools.take(change);
    }

    pub fn answer(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Node(node) => self.node(node),
            Outcome::Nodes(nodes) => nodes.iter().for_each(|node| self.node(node)),
            Outcome::Pool(pool) => self.pool(pool),
            Outcome::Subnet(subnet) => self.subnet(subnet),
            Outcome::Subnets(subnets) => subnets.iter().for_each(|subnet| self.subnet(subnet)),
            _ => {}
        }
    }

    /// The fence is behind it: what had died before is not in its books.
    /// It writes. Gives whether that is its first write after a take-over for which it needed no list.
    pub fn begins_to_deal(&mut self, api: &Api) -> bool {
        let begins = !std::mem::replace(&mut self.deals, true);
        if begins {
            let live: BTreeSet<&Text> = api.nodes.live.values().map(|node| &node.uid).collect();
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

    /// Whether nothing newer has been told of the pool.
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
