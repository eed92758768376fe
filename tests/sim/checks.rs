//! What must hold after every step, checked against the API server's history and what each process had received.
//! No check reads the state of a controller.
//!
//! # Guarantees that are checked
//! 1. *One holder.* A range that a controller allocates overlaps no range that a controller has allocated to another
//!    live node. It also overlaps no range of a foreign allocator if the writing process had received that range.
//! 2. *Rest.* The range of a dead node is not allocated to another host before the quarantine is over, counted from
//!    the true time of the deletion. Before that, a consistent list of the dead node's pods must also have shown none
//!    of the range's addresses. This holds if a NodeSubnet contained the range when the node was deleted, or if the
//!    allocating process received the deletion, whoever led then. The time is not checked in runs whose wall clocks
//!    jump: across a restart, wall clocks are the only measure of time.
//! 3. *Policy.* An allocated range is one block of each of the pool's families. The writing process had received the
//!    pool as enabled, as selecting the node and with that block size. The range overlaps no reserved range, no service
//!    range, and no address of a pod or node that the process had received. A range that a host gets back may have
//!    another size and contain addresses of its own pods.
//! 4. *Named.* An allocation of podCIDRs is sent only while the last Lease of its sender's tenure names it. The Lease
//!    names it until it can no longer take effect. Another write that an earlier leader could do harm with is sent only
//!    after a write of the Lease that took effect after the decision.
//! 5. *Fence.* After an unclean takeover from a Lease without intents, no podCIDRs are allocated before every existing
//!    node without podCIDRs has the new term.
//! 6. *Records.* A NodeSubnet's record of a node's ranges does not vanish too early. A pool's finalizer stays while
//!    ranges of the pool are allocated or quarantined.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_api::{AllocationMode, FINALIZER, NodeSubnetSpec};
use cadastre_controller::cluster::intents::WriteIntents;
use cadastre_controller::cluster::lease::{LeaseContent, LeaseRecord, Takeover};
use cadastre_controller::cluster::names::{LeaderTerm, NodeName, ObjectUid, PoolName};
use cadastre_controller::cluster::objects::{MachineIdentity, Node, Object, Pool, Subnet, Text};
use cadastre_controller::cluster::request::{
    ApiRequest, ObjectKind, ObjectSpec, PodCidrAllocation, RequestId, RequestOutcome,
};
use cadastre_controller::{EventRecord, OutgoingRequest, Regarding};
use cadastre_core::{Addr, Cidr};

use super::api::{Api, Author, Commit};
use super::block_checks::BlockChecks;
use super::clock::{SECOND, Time, seconds};
use super::describe::ranges;
use super::pool_model::{PoolModel, counted, is_counted};
use super::received::{Labels, Received};
use super::run::{Tally, Where};

/// The name of the most important rule: no range has two holders.
pub const DUPLICATE: &str = "one holder";

#[derive(Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub text: String,
    /// Names of the objects concerned.
    pub names: BTreeSet<Text>,
}

/// Whether a rule holds.
pub type Verdict = Result<(), Violation>;

/// Returns that a rule is broken; `names` are the objects that the trace shows.
pub fn wrong(
    rule: &'static str,
    text: String,
    names: impl IntoIterator<Item = impl Into<Text>>,
) -> Verdict {
    Err(Violation {
        rule,
        text,
        names: names.into_iter().map(Into::into).collect(),
    })
}

/// A deleted node, and its ranges.
#[derive(Clone)]
pub struct DeadNode {
    pub name: NodeName,
    pub uid: ObjectUid,
    pub machine: MachineIdentity,
    pub ranges: Vec<Cidr>,
    pub died: Time,
    /// Whether a NodeSubnet contained the ranges when the node was deleted, and no user has edited that record since.
    pub recorded: bool,
    /// Whether a user has edited the record. A controller that received the edit considers the quarantine over.
    edited: bool,
    /// The times at which lists of the node's pods showed none of its addresses.
    looked: Vec<Time>,
}

#[derive(Default)]
pub struct Checks {
    pub tally: Tally,
    pub clocks_lie: bool,
    pub skew: u64,
    /// UIDs of nodes whose podCIDRs a controller has allocated.
    pub ours: BTreeSet<ObjectUid>,
    pub dead_nodes: Vec<DeadNode>,
    /// By UID of a node and ranges that were chosen for it: UIDs of the dead nodes whose quarantine the process that
    /// last chose the ranges had to respect.
    considered_dead: BTreeMap<(ObjectUid, Vec<Cidr>), BTreeSet<ObjectUid>>,
    born: BTreeMap<ObjectUid, Time>,
    /// When the removal of a pool's finalizer was first requested, by the pool's UID and version.
    finalizer_dropped: BTreeMap<(ObjectUid, u64), Time>,
    /// All versions of all pools.
    pub models: Vec<PoolModel>,
    /// The holder of the Lease, and since when.
    lease: (Option<String>, Time),
    pub intents: Option<Arc<WriteIntents>>,
    /// By term: when the Lease was last written in it, and the intents in that Lease.
    leases: BTreeMap<LeaderTerm, (Time, Option<Arc<WriteIntents>>)>,
    /// The term of the last write of the Lease.
    last_term: Option<LeaderTerm>,
    pub last_write: (Time, String),
    /// The last request of a controller, except those about the Lease.
    pub last_request: (Time, String),
    pub blocks: BlockChecks,
    /// UIDs of pods that a restore has brought back: the addresses in their statuses are outdated.
    pub ghosts: BTreeSet<ObjectUid>,
    /// UIDs of pods that got an address after the agent's Node was deleted, or an address of a foreign allocator's
    /// podCIDR: nothing is guaranteed for them.
    pub given_too_late: BTreeSet<ObjectUid>,
    /// Addresses that an agent has released, with the host, the UID of its Node, and the end of the cooldown.
    pub cooling: BTreeMap<Addr, (usize, ObjectUid, Time)>,
    /// How often each process has sent each report about an object since the last block was allocated to the object,
    /// after the number of blocks that were allocated to it before.
    reported: BTreeMap<(Where, String), (u64, u32)>,
    /// The last report of each process about each object.
    last_report: BTreeMap<(Where, String), String>,
    /// How many blocks were allocated to the Node of each UID.
    pub allocated: BTreeMap<ObjectUid, u64>,
}

impl Checks {
    pub fn new(clocks_lie: bool, skew: u64) -> Self {
        Checks {
            clocks_lie,
            skew,
            ..Checks::default()
        }
    }

    /// Records the objects that exist at the start of the run.
    pub fn begin(&mut self, api: &Api) {
        for node in api.nodes.live.values() {
            self.born.insert(node.uid.clone(), 0);
        }
        for pool in api.pools.live.values() {
            self.models.extend(PoolModel::new(pool));
        }
    }

    /// Records a write of the Lease; returns whether its holder has changed.
    pub fn leased(&mut self, holder: Option<&str>, now: Time) -> bool {
        let new = self.lease.0.as_deref() != holder;
        if new {
            self.lease = (holder.map(str::to_owned), now);
        }
        new
    }

    /// Checks a request that a controller has decided on.
    pub fn asked(
        &mut self,
        place: Where,
        outgoing: &OutgoingRequest,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let request = &outgoing.request;
        if request.is_write() && (outgoing.term.is_none() || outgoing.term != received.term) {
            let (led, written) = (&received.term, &outgoing.term);
            let text = format!("{place} leads under {led:?} and writes under {written:?}");
            return wrong("leader writes", text, None::<&str>);
        }
        if matches!(request, ApiRequest::AssignPodCidrs(_)) {
            self.fenced(place, received, api)?;
        }
        if request.is_write() && !matches!(request, ApiRequest::TouchNode(_)) {
            self.tally.unlisted += u64::from(received.begins_to_write(api));
        }
        received.has_listed |= matches!(request, ApiRequest::List(_));
        if let ApiRequest::Create(_, ObjectSpec::Block(spec)) = request {
            let key = (spec.owner.uid.clone(), vec![spec.cidr]);
            if received.decided.insert(key, now).is_none() {
                self.carved(place, spec, received, api, now)?;
            }
            received.had.insert((spec.cidr, spec.owner.name.clone()));
        }
        if let ApiRequest::SetPoolFinalizers(pool, _) = request {
            let version = (pool.uid.clone(), pool.version);
            self.finalizer_dropped.entry(version).or_insert(now);
        }
        let ApiRequest::AssignPodCidrs(a) = request else {
            return Ok(());
        };
        self.chose(place, a, received, api, now)
    }

    fn chose(
        &mut self,
        place: Where,
        a: &PodCidrAllocation,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let key = (a.uid.clone(), a.cidrs.clone());
        if received.decided.contains_key(&key) {
            return Ok(());
        }
        let hits = |dead: &&DeadNode| {
            let mut had = dead.ranges.iter();
            had.any(|range| a.cidrs.iter().any(|cidr| cidr.overlaps(range)))
        };
        let dead_nodes = self.dead_nodes.iter().filter(hits);
        let dead_nodes =
            dead_nodes.filter(|it| it.recorded || received.seen_deleted.contains(&it.uid));
        let considered_dead: BTreeSet<ObjectUid> = dead_nodes.map(|it| it.uid.clone()).collect();
        self.considered_dead
            .insert(key.clone(), considered_dead.clone());
        received
            .considered_dead
            .insert(key.clone(), considered_dead);
        received.decided.insert(key, now);
        self.check_allocation(place, a, received, api)?;
        received.chosen.insert((a.name.clone(), a.cidrs.clone()));
        Ok(())
    }

    /// Checks and records the intents that a controller wants in the Lease: chosen by itself, or inherited.
    pub fn wants(
        &mut self,
        place: Where,
        wanted: &LeaseContent,
        inherited: Option<&WriteIntents>,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        for intent in wanted.intents.iter().flat_map(|all| &all.assignments) {
            if inherited.is_some_and(|all| all.assignments.contains(intent)) {
                let key = (intent.uid.clone(), intent.cidrs.clone());
                let considered_dead = self.considered_dead.get(&key).cloned().unwrap_or_default();
                received
                    .considered_dead
                    .entry(key.clone())
                    .or_insert(considered_dead);
                received.decided.entry(key).or_insert(now);
                let chosen = (intent.name.clone(), intent.cidrs.clone());
                received.chosen.insert(chosen);
                continue;
            }
            let a = PodCidrAllocation {
                name: intent.name.clone(),
                uid: intent.uid.clone(),
                term: None,
                annotated: false,
                cidrs: intent.cidrs.clone(),
            };
            self.chose(place, &a, received, api, now)?;
        }
        Ok(())
    }

    /// Checks the intents in a Lease that was written.
    pub fn named(
        &mut self,
        record: &LeaseRecord,
        on_wire: &BTreeMap<(Where, RequestId), OutgoingRequest>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        if let Some(nonce) = record.holder.as_ref().and_then(|it| it.rsplit('_').next()) {
            let term: LeaderTerm = format!("{}-{nonce}", record.transitions).into();
            self.last_term = Some(term.clone());
            self.leases.insert(term, (now, record.intents.clone()));
        }
        let before = std::mem::replace(&mut self.intents, record.intents.clone());
        let (Some(before), Some(after)) = (before, &record.intents) else {
            return Ok(());
        };
        for intent in before.assignments.difference(&after.assignments) {
            let same = |out: &&OutgoingRequest| {
                matches!(&out.request, ApiRequest::AssignPodCidrs(a)
                    if (&a.uid, &a.cidrs) == (&intent.uid, &intent.cidrs))
            };
            let node = api.nodes.get(&intent.name);
            let open = node.is_some_and(|node| node.uid == intent.uid && node.is_empty());
            if open && on_wire.values().any(|out| same(&out)) {
                let text = format!("{intent:?} is on its way and not named any more");
                return wrong("named", text, [intent.name.clone()]);
            }
        }
        Ok(())
    }

    /// Whether the Lease was last written in this term. Without a term the answer is yes.
    pub fn is_leading(&self, term: Option<&LeaderTerm>) -> bool {
        term.is_none() || term == self.last_term.as_ref()
    }

    /// Checks a write at the moment when it is sent.
    pub fn sent(
        &self,
        place: Where,
        outgoing: &OutgoingRequest,
        decided: Time,
        api: &Api,
    ) -> Verdict {
        let Some((at, intents)) = outgoing.term.as_ref().and_then(|it| self.leases.get(it)) else {
            return Ok(());
        };
        if outgoing.request.is_numbered() && *at < decided {
            let text = format!("{place} sends what it decided after the Lease was written last");
            return wrong("leader writes", text, None::<&str>);
        }
        if let (ApiRequest::AssignPodCidrs(a), false) = (&outgoing.request, api.forgets_intents) {
            let mut named = intents.iter().flat_map(|all| &all.assignments);
            // A node that is deleted or has podCIDRs cannot get any, so the Lease need not name the allocation.
            let node = api.nodes.get(&a.name);
            let open = node.is_some_and(|node| node.uid == a.uid && node.is_empty());
            if open && !named.any(|it| (&it.uid, &it.cidrs) == (&a.uid, &a.cidrs)) {
                let text = format!("{place} sends what its Lease does not name: {a:?}");
                return wrong("named", text, [a.name.clone()]);
            }
        }
        Ok(())
    }

    fn fenced(&self, place: Where, received: &Received, api: &Api) -> Verdict {
        if received.takeover != Some(Takeover::Unclean) || received.has_inherited_intents {
            return Ok(());
        }
        for node in api.nodes.live.values().filter(|node| node.is_empty()) {
            let born = self.born.get(&node.uid).copied().unwrap_or(Time::MAX);
            if born < self.lease.1 && node.term != received.term {
                let (term, name, older) = (&received.term, &node.name, &node.term);
                let text = format!("{place} allocates under {term:?}, {name} has {older:?}");
                return wrong("fence", text, [name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks ranges that a controller has chosen for a node against what the controller had received.
    fn check_allocation(
        &self,
        place: Where,
        a: &PodCidrAllocation,
        received: &Received,
        api: &Api,
    ) -> Verdict {
        let wrong = |what: String| {
            let (ranges, name, uid) = (ranges(&a.cidrs), &a.name, &a.uid);
            let text = format!("{place} allocates {ranges} to {name} ({uid}): {what}");
            wrong("policy", text, [a.name.clone()])
        };
        let hits = |cidr: &Cidr| a.cidrs.iter().any(|c| c.overlaps(cidr));
        let inside = |addr: &&Addr| a.cidrs.iter().any(|c| c.contains_addr(**addr));
        let returns = self.had_before(a, received);
        if self.dead_nodes.iter().any(|dead| dead.uid == a.uid) && returns {
            // The node is deleted and had these ranges. The process may not know that it is deleted; the server will
            // reject the write, because it tests the UID.
            return Ok(());
        }
        let labels = received.labels.get(&a.uid);
        let could = |model: &&PoolModel| {
            let mut labels = labels.into_iter().flatten();
            labels.any(|it| {
                model.could_allocate(&a.cidrs, it) || returns && model.could_return(&a.cidrs, it)
            })
        };
        // If several pools have the same ranges, any of them may have allocated them.
        let pools: Vec<&PoolModel> = received.models.iter().filter(could).collect();
        let Some(pool) = pools.first() else {
            return wrong("no pool it has seen could have".to_owned());
        };
        let before = |pool: &&PoolModel| self.starting_before(pool, labels, received, api);
        let better: Option<Vec<PoolName>> = pools.iter().map(before).collect();
        if let (false, Some(better)) = (returns, better) {
            let better = &better[0];
            return wrong(format!(
                "of {}, and {better} is about to serve it",
                pool.name
            ));
        }
        let nodes = received.nodes.objects.values();
        for node in nodes.filter(|node| node.name != a.name) {
            let live = api.nodes.get(&node.name);
            if live.is_none_or(|live| live.uid != node.uid) {
                continue;
            }
            let name = &node.name;
            if counted(node).any(hits) {
                let podcidrs = ranges(&node.pod_cidrs);
                return wrong(format!("{name} was seen with {podcidrs}"));
            }
            let own = node.addresses.iter().find(inside);
            if let Some(addr) = own.filter(|_| !returns) {
                return wrong(format!("{name} was seen with the address {addr}"));
            }
        }
        let services = received.services.objects.values();
        let mut services = services.map(|it| &it.cidrs);
        if let Some(cidrs) = services.find(|cidrs| cidrs.iter().any(hits)) {
            let cidrs = ranges(cidrs);
            return wrong(format!("the service range {cidrs} was seen there"));
        }
        let mut pods = received.pods.objects.values();
        let reports = pods.find(|pod| pod.addresses.iter().any(|addr| inside(&addr)));
        if let Some(pod) = reports.filter(|_| !returns) {
            let (name, addresses) = (&pod.name, &pod.addresses);
            return wrong(format!("pod {name} was seen with {addresses:?}"));
        }
        Ok(())
    }

    /// Returns a pool that precedes `dealt` and lacks only its finalizer, according to what the process has received:
    /// the node should have waited for that pool.
    fn starting_before(
        &self,
        dealt: &PoolModel,
        labels: Option<&BTreeSet<Labels>>,
        received: &Received,
        api: &Api,
    ) -> Option<PoolName> {
        // A response may have shown the process a newer version of the pool than the watch.
        let is_so = |pool: &&Pool| {
            let now = api.pools.get(&pool.name);
            let is_live = now.is_some_and(|it| (&it.uid, &it.spec) == (&pool.uid, &pool.spec));
            is_live && received.is_newest(pool)
        };
        let shown = received.pools.objects.values();
        let all: Vec<PoolModel> = shown.clone().filter_map(PoolModel::new).collect();
        let shown: Vec<PoolModel> = shown.filter(is_so).filter_map(PoolModel::new).collect();
        let rank = |model: &PoolModel| (model.priority, model.selector.len());
        // It is uncertain which version of `dealt` the process used, so the best rank of all versions counts.
        let versions = received.models.iter().filter(|it| it.name == dealt.name);
        let best = versions.map(rank).max()?;
        let serves = |model: &&PoolModel| {
            let older =
                |o: &PoolModel| o.age() < model.age() && o.cidrs().any(|cidr| model.overlaps(cidr));
            model.allocation_mode == AllocationMode::NodeCIDR
                && !model.has_finalizer
                && !model.disabled
                && !model.deleting
                && rank(model) > best
                && labels.into_iter().flatten().all(|it| model.matches(it))
                && !all.iter().any(older)
        };
        let starting = shown.iter().filter(serves);
        let never_had_finalizer = |model: &&PoolModel| {
            let mut same = received.models.iter().filter(|it| it.uid == model.uid);
            !same.any(|it| it.has_finalizer)
        };
        let mut starting = starting.filter(never_had_finalizer);
        starting.next().map(|it| it.name.clone())
    }

    /// Whether an earlier node of that name had these ranges, or they were chosen for one. The sources are the
    /// history, the process's own decisions, and the NodeSubnet that the process received.
    fn had_before(&self, a: &PodCidrAllocation, received: &Received) -> bool {
        let all = |had: &[Cidr]| a.cidrs.iter().all(|cidr| had.contains(cidr));
        let had = |dead: &DeadNode| dead.name == a.name && all(&dead.ranges);
        let chosen = |(name, ranges): &(NodeName, Vec<Cidr>)| *name == a.name && all(ranges);
        let subnet = received.subnets.objects.get(&a.name);
        let specs = subnet.into_iter().flat_map(|subnet| subnet.spec.iter());
        let listed: Vec<Cidr> = specs.flat_map(records).map(|r| r.range).collect();
        self.dead_nodes.iter().any(had) || received.chosen.iter().any(chosen) || all(&listed)
    }

    /// Records a list of a dead node's pods that showed none of its addresses. Other requests are ignored.
    pub fn executed(&mut self, request: &ApiRequest, outcome: &RequestOutcome, now: Time) {
        if let (ApiRequest::ListPodsOf { node }, RequestOutcome::Pods(pods)) = (request, outcome) {
            for dead in &mut self.dead_nodes {
                let mut addresses = pods.iter().flat_map(|pod| pod.addresses.iter());
                let is_used = |addr: &Addr| dead.ranges.iter().any(|it| it.contains_addr(*addr));
                if dead.name == *node && !addresses.any(is_used) {
                    dead.looked.push(now);
                }
            }
        }
    }

    pub fn committed(
        &mut self,
        commit: &Commit,
        author: Author,
        received: Option<&Received>,
        api: &Api,
        (now, decided): (Time, Time),
    ) -> Verdict {
        let is_controller = matches!(author, Author::Controller(_));
        if is_controller {
            self.last_write = (now, describe(commit));
        }
        match commit {
            Commit::Node(before, after) => {
                match (before, after) {
                    (None, Some(node)) => _ = self.born.insert(node.uid.clone(), now),
                    (Some(node), None) => {
                        self.record_death(node, api, now);
                        self.blocks.died.insert(node.uid.clone(), now);
                    }
                    _ => {}
                }
                if let Some(node) = &after {
                    let written: Vec<Cidr> = counted(node).copied().collect();
                    self.podcidrs_written(&written);
                }
                let given = before.as_ref().is_some_and(|b| b.is_empty())
                    && after.as_ref().is_some_and(|a| !a.is_empty());
                if let Some(node) = after.as_ref().filter(|_| given && is_controller) {
                    return self.assigned(node, received, api, decided);
                }
            }
            Commit::Pool(before, after) => {
                let model = after.as_ref().and_then(|pool| PoolModel::new(pool));
                if let Some(model) = model.filter(|model| !self.models.contains(model)) {
                    self.models.push(model);
                }
                if let Some(before) = before.as_ref().filter(|_| is_controller) {
                    return self.pool_written(before, after.as_deref(), received, api, now);
                }
            }
            Commit::Subnet(before, after) => {
                self.blocks_listed(before.as_deref(), after.as_deref(), author, api)?;
                if author == Author::World {
                    let name = before.as_ref().or(after.as_ref()).map(|it| &it.name);
                    for dead in &mut self.dead_nodes {
                        if Some(&dead.name) == name {
                            (dead.recorded, dead.edited) = (false, true);
                        }
                    }
                } else if let Some(before) = before.as_ref().filter(|_| is_controller) {
                    return self.subnet_written(before, after.as_deref(), api, now);
                }
            }
            Commit::Block(before, after) => {
                return self.block_written(before.as_deref(), after.as_deref(), author, api, now);
            }
            Commit::ServiceRange(..) | Commit::Pod(..) | Commit::Addresses(..) => {}
        }
        Ok(())
    }

    fn record_death(&mut self, node: &Node, api: &Api, now: Time) {
        let had: Vec<Cidr> = counted(node).copied().collect();
        if had.is_empty() {
            return;
        }
        let subnet = api.subnets.get(&node.name);
        let recorded = subnet.is_some_and(|subnet| {
            let records: Vec<Record> = subnet.spec.iter().flat_map(records).collect();
            let is_recorded = |range| {
                let mut all = records.iter();
                all.any(|it| *it.uid == *node.uid && it.range == range)
            };
            had.iter().copied().all(is_recorded)
        });
        self.dead_nodes.push(DeadNode {
            name: node.name.clone(),
            uid: node.uid.clone(),
            machine: node.machine.clone(),
            ranges: had,
            died: now,
            recorded,
            edited: false,
            looked: Vec::new(),
        });
    }

    /// Checks an allocation of podCIDRs that took effect.
    fn assigned(
        &mut self,
        node: &Arc<Node>,
        received: Option<&Received>,
        api: &Api,
        decided: Time,
    ) -> Verdict {
        self.tally.assigned += 1;
        let hits = |ranges: &[Cidr]| ranges.iter().any(|r| counted(node).any(|c| c.overlaps(r)));
        for other in api.nodes.live.values() {
            if other.uid != node.uid && self.ours.contains(&other.uid) && hits(&other.pod_cidrs) {
                let whose = |node: &Node| format!("{} ({})", node.name, node.uid);
                let text = format!(
                    "{} gets {} and {} has {}",
                    whose(node),
                    ranges(&node.pod_cidrs),
                    whose(other),
                    ranges(&other.pod_cidrs)
                );
                return wrong(DUPLICATE, text, [node.name.clone(), other.name.clone()]);
            }
        }
        self.ours.insert(node.uid.clone());
        let back = |dead: &DeadNode| dead.name == node.name && dead.machine.same(&node.machine);
        for dead in self.dead_nodes.iter().filter(|dead| hits(&dead.ranges)) {
            // The range is the host's own, even if an earlier host of the same name had it before.
            let had = |range: &Cidr| {
                let mut later = self.dead_nodes.iter().filter(|it| it.died >= dead.died);
                later.any(|it| back(it) && it.ranges.contains(range))
            };
            if dead.name == node.name && dead.ranges.iter().all(had) {
                continue;
            }
            let seen = received.is_some_and(|received| received.seen_deleted.contains(&dead.uid));
            // Another node may have had all of these ranges later; then the quarantine of that node counts.
            let covers = |it: &Cidr, range: &Cidr| it.overlaps(range) && it.len() <= range.len();
            let had_since = |it: &DeadNode| {
                let covered = |range| it.ranges.iter().any(|it| covers(it, range));
                it.died > dead.died && dead.ranges.iter().all(covered)
            };
            let seen = seen && !dead.edited && !self.dead_nodes.iter().any(had_since);
            if !dead.recorded && !seen {
                continue;
            }
            // A write that was sent before the node was deleted may take effect at any time, so it is not checked. Nor
            // is a write of ranges that a process chose without knowing the node, even if another leader repeats it.
            let key = (node.uid.clone(), node.pod_cidrs.to_vec());
            let considered_dead = received.and_then(|received| received.considered_dead.get(&key));
            let considered_dead = considered_dead.or_else(|| self.considered_dead.get(&key));
            if considered_dead.is_some_and(|dead_nodes| !dead_nodes.contains(&dead.uid)) {
                continue;
            }
            let fail = |why: String| {
                let lost = ranges(&dead.ranges);
                let (node, dead, uid) = (&node.name, &dead.name, &dead.uid);
                let text = format!("{node} gets {lost} of {dead} ({uid}) {why}");
                wrong("rest", text, [node.clone(), dead.clone()])
            };
            if !self.clocks_lie && decided < self.quarantined_until(dead) {
                let ms = decided.saturating_sub(dead.died) / 1000;
                return fail(format!("dead for {ms} ms only"));
            }
            if !dead.looked.iter().any(|at| *at <= decided) {
                return fail("without a look at its pods".to_owned());
            }
        }
        Ok(())
    }

    /// Returns when the ranges of a dead node may be allocated again at the earliest.
    pub fn quarantined_until(&self, dead: &DeadNode) -> Time {
        dead.died + self.quarantine_of(|it| dead.ranges.iter().any(|range| it.overlaps(range)))
    }

    /// The shortest quarantine of the selected versions of pools, as the fastest clock measures it.
    pub fn quarantine_of(&self, is_of: impl Fn(&PoolModel) -> bool) -> Time {
        let versions = self.models.iter().filter(|it| is_of(it));
        let shortest = versions.map(|it| it.quarantine).min().unwrap_or(0) * SECOND;
        shortest - shortest * self.skew * 2 / 1_000_000
    }

    fn subnet_written(
        &mut self,
        before: &Subnet,
        after: Option<&Subnet>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let after = after.map(|subnet| subnet.spec.as_ref()).transpose();
        let (Ok(was), Ok(is)) = (&before.spec, after) else {
            return Ok(());
        };
        let (was, is) = (records(was), is.map(records).unwrap_or_default());
        let stays = |it: &Record| is.iter().any(|i| i.uid == it.uid && i.range == it.range);
        let live = api.nodes.get(&before.name);
        let gone = was.iter().filter(|it| !stays(it) && is_counted(&it.range));
        for record in gone {
            self.tally.freed += 1;
            let mut dead_nodes = self.dead_nodes.iter();
            let dead = dead_nodes.find(|dead| *dead.uid == *record.uid);
            let holder = live.filter(|node| node.pod_cidrs.contains(&record.range));
            let held_on = holder.is_some_and(|node| *node.uid == *record.uid);
            // The record may vanish if a later node of the name got the range back, even if that node is deleted before
            // the write takes effect.
            let returned = holder.is_some() || is.iter().any(|it| it.range == record.range);
            let early = dead.is_some_and(|g| g.recorded && now < self.quarantined_until(g))
                && record.until.is_none_or(|until| until > seconds(now));
            if held_on || (early && !returned && !self.clocks_lie) {
                let text = format!(
                    "the record of {} for {} vanishes: {was:?} -> {is:?}",
                    record.range, record.uid
                );
                return wrong("records", text, [before.name.clone()]);
            }
        }
        Ok(())
    }

    fn pool_written(
        &mut self,
        before: &Pool,
        after: Option<&Pool>,
        received: Option<&Received>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let has = |pool: &Pool| pool.finalizers.iter().any(|f| f == FINALIZER);
        let dropped = has(before) && after.is_some_and(|after| !has(after));
        let Some(model) = PoolModel::new(before).filter(|_| dropped) else {
            return Ok(());
        };
        let fail = |name: &str, what: &str| {
            let pool = &before.name;
            let text = format!("pool {pool} loses its finalizer while {name} {what}");
            wrong("finalizer", text, [&before.name, name])
        };
        if !before.deleting {
            return fail(&before.name, "lives");
        }
        // The finalizer may go if another pool contains the range: a pool that exists, or that the process received.
        // If that pool's spec can no longer be parsed, all of its earlier versions count.
        let shown = received.iter().flat_map(|k| k.pools.objects.values());
        let there = api.pools.live.values().map(AsRef::as_ref);
        let others = there.chain(shown).filter(|pool| pool.name != before.name);
        let versions = |pool: &Pool| match PoolModel::new(pool) {
            Some(model) => vec![model],
            None => self.versions_of(&pool.uid),
        };
        let others: Vec<PoolModel> = others.flat_map(versions).collect();
        let only_here = |range: &Cidr| {
            model.contains(range) && !others.iter().any(|other| other.contains(range))
        };
        let mut nodes = api.nodes.live.values();
        let holds =
            |node: &&Arc<Node>| self.ours.contains(&node.uid) && counted(node).any(only_here);
        if let Some(node) = nodes.find(holds) {
            return fail(&node.name, "holds a range of it");
        }
        // A node with podCIDRs of its own that appeared after the decision could as well have appeared after the pool's
        // deletion, so its ranges do not count.
        let version = (before.uid.clone(), before.version);
        let decided = self.finalizer_dropped.get(&version);
        let resting = |dead: &&DeadNode| {
            let born = self.born.get(&dead.uid);
            let came_later = born.zip(decided).is_some_and(|(born, at)| born > at);
            let rests = dead.recorded && now < self.quarantined_until(dead) && !came_later;
            rests && dead.ranges.iter().any(only_here)
        };
        let dead = self.dead_nodes.iter().find(resting);
        match dead.filter(|_| !self.clocks_lie) {
            Some(dead) => fail(&dead.name, "rests in it"),
            None => Ok(()),
        }
    }

    fn versions_of(&self, pool: &ObjectUid) -> Vec<PoolModel> {
        let versions = self.models.iter().filter(|model| model.uid == *pool);
        versions.cloned().collect()
    }

    /// Checks a report of a controller once the faults are over. The same report may be sent again only if another
    /// one about the same object came between, and at most `OFTEN` times. For a node, counting starts again with each
    /// block that is allocated to it, because what its pods wait for changes as they come and go.
    pub fn reported(
        &mut self,
        place: Where,
        report: &EventRecord,
        is_after_faults: bool,
    ) -> Verdict {
        const OFTEN: u32 = 5;
        let text = format!("{report:?}");
        self.tally.adopted += u64::from(report.reason == "BlockAdopted");
        if !is_after_faults {
            return Ok(());
        }
        let about = format!("{:?}", report.about);
        let before = self.last_report.insert((place, about), text.clone());
        let allocated = self.allocated.get(&report.about.uid).copied();
        let allocated = allocated.unwrap_or_default();
        let count = self.reported.entry((place, text.clone())).or_default();
        *count = match *count {
            (since, times) if since == allocated => (since, times + 1),
            _ => (allocated, 1),
        };
        let times = count.1;
        // Blocks come and go, so the limit of a node may be reached, and reported, several times.
        let again = before.as_ref() == Some(&text) && report.reason != "BlockLimitReached";
        if again || times > OFTEN {
            let text = format!("{place} tells {times} times: {text}");
            return wrong("reports", text, None::<&str>);
        }
        Ok(())
    }
}

/// A range of a node, as a NodeSubnet records it.
#[derive(Debug)]
pub struct Record {
    pub uid: String,
    pub range: Cidr,
    /// The end of the quarantine in seconds since 1970, if the node is deleted.
    pub until: Option<i64>,
}

pub fn records(spec: &NodeSubnetSpec) -> Vec<Record> {
    let present = spec.node_uid.iter().map(|uid| (uid, &spec.pod_cidrs, None));
    let quarantined = spec.quarantined.iter().map(|it| {
        let until = it.until.0.as_second();
        (&it.node_uid, &it.pod_cidrs, Some(until))
    });
    let all = present.chain(quarantined).flat_map(|(uid, held, until)| {
        let ranges = held
            .iter()
            .filter_map(|it| Cidr::parse_strict(&it.cidr).ok());
        ranges.map(move |range| Record {
            uid: uid.clone(),
            range,
            until,
        })
    });
    all.collect()
}

/// The kind and the name of a changed object.
fn describe(commit: &Commit) -> String {
    fn of<T: Object>(kind: &str, before: Option<&Arc<T>>, after: Option<&Arc<T>>) -> String {
        let name: Option<Text> = before.or(after).map(|it| it.name().clone().into());
        format!("{kind} {}", name.unwrap_or_default())
    }
    match commit {
        Commit::Node(a, b) => of("node", a.as_ref(), b.as_ref()),
        Commit::Pool(a, b) => of("pool", a.as_ref(), b.as_ref()),
        Commit::Subnet(a, b) => of("subnet", a.as_ref(), b.as_ref()),
        Commit::Block(a, b) => of("block", a.as_ref(), b.as_ref()),
        Commit::ServiceRange(a, b) => of("service range", a.as_ref(), b.as_ref()),
        Commit::Pod(a, b) => of("pod", a.as_ref(), b.as_ref()),
        Commit::Addresses(node, _) => format!("addresses {node}"),
    }
}

#[test]
fn a_report_about_a_node_may_be_repeated_once_another_block_is_allocated_to_it() {
    let place = Where {
        process: 0,
        incarnation: 1,
    };
    let about = Regarding {
        kind: ObjectKind::Node,
        name: "n0".into(),
        uid: "u0".into(),
    };
    let mut checks = Checks::default();
    // Counts how often the two reasons may be reported, in turn.
    let often = |checks: &mut Checks, reasons: [&'static str; 2]| {
        let mut is_accepted = |reason| {
            let report = EventRecord {
                about: about.clone(),
                warning: true,
                reason,
                note: String::new(),
            };
            checks.reported(place, &report, true).is_ok()
        };
        (0..9)
            .take_while(|_| reasons.into_iter().all(&mut is_accepted))
            .count()
    };
    assert_eq!(often(&mut checks, ["A", "B"]), 5);
    checks.allocated.insert("u1".into(), 1);
    assert_eq!(
        often(&mut checks, ["B", "A"]),
        0,
        "the block is another node's"
    );
    checks.allocated.insert("u0".into(), 1);
    assert_eq!(often(&mut checks, ["A", "B"]), 5);
}
