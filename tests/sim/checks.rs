//! The guarantees that are checked after every step, and the records that the checks keep of the API server's history
//! and of reports. No check reads the state of a controller.
//!
//! # Guarantees that are checked
//! 1. *One holder.* A range that a controller allocates overlaps no range that a controller has allocated to another
//!    live node. It also overlaps no range of a foreign allocator if the writing process had received that range.
//! 2. *Quarantine.* The range of a dead node is not allocated to another host before the quarantine is over, counted
//!    from the true time of the deletion. Before the allocation, a consistent list of the dead node's pods must also
//!    have shown none of the range's addresses. The rule applies if a NodeSubnet contained the range when the node was
//!    deleted, or if the allocating process received the deletion, whoever led at that time. The time is not checked in
//!    runs whose wall clocks jump, because across a restart, wall clocks are the only measure of time.
//! 3. *Policy.* An allocated range is one block of each of the pool's families. According to the objects that the
//!    writing process had received, the pool was enabled, selected the node, and had that block size. The range
//!    overlaps no reserved range, no service range, and no address of a pod or node that the process had received. A
//!    range that a host gets back may have another size and contain addresses of its own pods.
//! 4. *Named.* An allocation of podCIDRs is sent only while the last Lease of its sender's term names the allocation
//!    among the intents. The Lease names the allocation until the allocation can no longer take effect. Any other write
//!    that could do harm when it arrives late is sent only if the Lease was written after the decision.
//! 5. *Fence.* After an unclean takeover of a Lease without intents, no podCIDRs are allocated before every existing
//!    node without podCIDRs has the new term.
//! 6. *Records.* A NodeSubnet does not lose its record of a node's ranges while the node exists and has them, or while
//!    their quarantine lasts. A pool's finalizer stays while ranges of the pool are allocated or quarantined.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_controller::cluster::intents::WriteIntents;
use cadastre_controller::cluster::names::{NodeName, ObjectUid, TermId};
use cadastre_controller::cluster::objects::{MachineIdentity, Node, Object, Text};
use cadastre_controller::cluster::request::{ApiRequest, ObjectKind, ObjectSpec, RequestOutcome};
use cadastre_controller::{EventRecord, OutgoingRequest, Regarding};
use cadastre_core::{Addr, Cidr};

use super::api::{Api, Author, Commit};
use super::block_checks::BlockChecks;
use super::clock::{SECOND, Time};
use super::pool_model::{PoolModel, counted};
use super::received::Received;
use super::record_checks::{Record, records};
use super::run::{RunId, Tally};

/// The name of the most important rule: no range has two holders.
pub const DUPLICATE: &str = "one holder";

#[derive(Debug)]
pub struct Violation {
    pub rule: &'static str,
    pub text: String,
    /// The names of the objects that the violation is about. The trace of the failure shows the lines about these
    /// objects.
    pub names: BTreeSet<Text>,
}

/// `Ok` if all checked rules hold, else the first violation.
pub type Verdict = Result<(), Violation>;

/// Returns a violation of a rule. The trace of the failure shows the objects in `names`.
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
    /// Whether a user has edited the ranges' record in the NodeSubnet. A controller that received the edit counts the
    /// quarantine as over.
    pub edited: bool,
    /// Lists of the node's pods contained none of the node's addresses. For each list, the time up to which it contained
    /// all changes.
    pub looked: Vec<Time>,
}

#[derive(Default)]
pub struct Checks {
    pub tally: Tally,
    pub clocks_lie: bool,
    pub skew: u64,
    /// UIDs of nodes whose podCIDRs a controller has allocated.
    pub ours: BTreeSet<ObjectUid>,
    pub dead_nodes: Vec<DeadNode>,
    /// For each revision that a consistent list of pods has shown, the last time at which it was the newest.
    revisions_shown: BTreeMap<u64, Time>,
    /// For each choice of ranges (the UID of the node that gets them, and the ranges), the dead nodes (by UID) whose
    /// quarantine the choice had to respect. If several processes chose the ranges, the last choice counts.
    pub considered_dead: BTreeMap<(ObjectUid, Vec<Cidr>), BTreeSet<ObjectUid>>,
    pub born: BTreeMap<ObjectUid, Time>,
    /// For each version of a pool (its UID and the version), the time of the first request to remove its finalizer.
    pub finalizer_dropped: BTreeMap<(ObjectUid, u64), Time>,
    /// All versions of all pools so far. Versions whose spec cannot be parsed are missing.
    pub models: Vec<PoolModel>,
    /// The holder of the Lease, and the time at which this holder got it.
    pub lease: (Option<String>, Time),
    pub intents: Option<Arc<WriteIntents>>,
    /// For each term, when the Lease was last written in that term, and the intents (allocations that may be in flight)
    /// in that Lease.
    pub leases: BTreeMap<TermId, (Time, Option<Arc<WriteIntents>>)>,
    /// The term of the last write of the Lease.
    pub last_term: Option<TermId>,
    pub last_write: (Time, String),
    /// The last request of a controller that was not about the Lease, with its time.
    pub last_request: (Time, String),
    pub blocks: BlockChecks,
    /// For each block that a NodeSubnet listed and no longer lists, the first version of the NodeSubnet without the
    /// block.
    pub unlisted: BTreeMap<(NodeName, Cidr), u64>,
    /// UIDs of pods that a restore has brought back. The addresses in their statuses are outdated.
    pub ghosts: BTreeSet<ObjectUid>,
    /// UIDs of pods for which nothing is guaranteed, because they got an address after the agent's Node was deleted, or
    /// from a foreign allocator's podCIDR.
    pub given_too_late: BTreeSet<ObjectUid>,
    /// Addresses that an agent has released, with the host, the UID of its Node, and the end of the cooldown.
    pub cooling: BTreeMap<Addr, (usize, ObjectUid, Time)>,
    /// For each process, object and report: the number of blocks allocated to the object so far, and how often the
    /// report was sent since the last of these blocks.
    reported: BTreeMap<(RunId, String), (u64, u32)>,
    /// The last report of each process about each object.
    last_report: BTreeMap<(RunId, String), String>,
    /// For each Node (UID), how many blocks were allocated to it.
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

    /// Checks a request that a controller has decided on.
    pub fn asked(
        &mut self,
        run_id: RunId,
        outgoing: &OutgoingRequest,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        let request = &outgoing.request;
        if request.is_write() && (outgoing.term.is_none() || outgoing.term != received.term) {
            let (led, written) = (&received.term, &outgoing.term);
            let text = format!("{run_id} leads under {led:?} and writes under {written:?}");
            return wrong("leader writes", text, None::<&str>);
        }
        if matches!(request, ApiRequest::AssignPodCidrs(_)) {
            self.fenced(run_id, received, api)?;
        }
        if request.is_write() && !matches!(request, ApiRequest::TouchNode(_)) {
            self.tally.unlisted += u64::from(received.begins_to_write(api));
        }
        received.has_listed |= matches!(request, ApiRequest::List(_));
        if let ApiRequest::Create(_, ObjectSpec::Block(spec)) = request {
            let key = (spec.owner.uid.clone(), vec![spec.cidr]);
            if received.decided.insert(key, now).is_none() {
                self.carved(run_id, spec, received, api, now)?;
            }
            received.had.insert((spec.cidr, spec.owner.name.clone()));
        }
        if let ApiRequest::SetFinalizers(ObjectKind::Pool, pool, _) = request {
            let version = (pool.uid.clone(), pool.version);
            self.finalizer_dropped.entry(version).or_insert(now);
        }
        let ApiRequest::AssignPodCidrs(a) = request else {
            return Ok(());
        };
        self.chose(run_id, a, received, api, now)
    }

    /// If a request listed the pods of a dead node, and none of these pods had an address of the node, records the time
    /// up to which the list contained all changes. Other requests are ignored.
    pub fn executed(&mut self, request: &ApiRequest, outcome: &RequestOutcome, now: Time) {
        let RequestOutcome::Pods(pods, shown) = outcome else {
            return;
        };
        if let Some(revision) = shown {
            self.revisions_shown.insert(*revision, now);
        }
        if let ApiRequest::ListPodsOf {
            node,
            not_older_than,
        } = request
        {
            let as_of = not_older_than.map_or(now, |it| self.revisions_shown[&it]);
            for dead in &mut self.dead_nodes {
                let mut addresses = pods.iter().flat_map(|pod| pod.addresses.iter());
                let is_used = |addr: &Addr| dead.ranges.iter().any(|it| it.contains_addr(*addr));
                if dead.name == *node && !addresses.any(is_used) {
                    dead.looked.push(as_of);
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
                self.blocks_listed(before.as_deref(), after.as_deref(), author, api, now)?;
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
                let (before, after) = (before.as_deref(), after.as_deref());
                return self.block_written(before, after, author, api, (now, decided));
            }
            Commit::Claim(..)
            | Commit::Routes(..)
            | Commit::FrrConfiguration(..)
            | Commit::ServiceRange(..)
            | Commit::Pod(..)
            | Commit::Addresses(..) => {}
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

    /// Returns the earliest time at which the ranges of a dead node may be allocated again.
    pub fn quarantined_until(&self, dead: &DeadNode) -> Time {
        dead.died + self.quarantine_of(|it| dead.ranges.iter().any(|range| it.overlaps(range)))
    }

    /// The shortest quarantine of all versions of pools for which `is_of` returns true, as the fastest clock measures
    /// it.
    pub fn quarantine_of(&self, is_of: impl Fn(&PoolModel) -> bool) -> Time {
        let versions = self.models.iter().filter(|it| is_of(it));
        let shortest = versions.map(|it| it.quarantine).min().unwrap_or(0) * SECOND;
        shortest - shortest * self.skew * 2 / 1_000_000
    }

    /// Checks a report of a controller once the faults are over. The same report about an object may be sent again only
    /// after another report about the object, and at most `OFTEN` times. For a node, counting starts again with each
    /// block that is allocated to the node, because its pods come and go, and wait for different pools.
    pub fn reported(
        &mut self,
        run_id: RunId,
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
        let before = self.last_report.insert((run_id, about), text.clone());
        let allocated = self.allocated.get(&report.about.uid).copied();
        let allocated = allocated.unwrap_or_default();
        let count = self.reported.entry((run_id, text.clone())).or_default();
        *count = match *count {
            (since, times) if since == allocated => (since, times + 1),
            _ => (allocated, 1),
        };
        let times = count.1;
        // A node's blocks come and go, so the node can reach its limit several times. The pods of a claim come and go,
        // so its address can be reported by the last pod and the next one several times.
        let comes_again = ["BlockLimitReached", "DuplicateAddress"].contains(&report.reason);
        let again = before.as_ref() == Some(&text) && !comes_again;
        if again || times > OFTEN {
            let text = format!("{run_id} tells {times} times: {text}");
            return wrong("reports", text, None::<&str>);
        }
        Ok(())
    }
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
        Commit::Routes(a, b) => of("routes", a.as_ref(), b.as_ref()),
        Commit::FrrConfiguration(a, b) => of("frr", a.as_ref(), b.as_ref()),
        Commit::Block(a, b) => of("block", a.as_ref(), b.as_ref()),
        Commit::ServiceRange(a, b) => of("service range", a.as_ref(), b.as_ref()),
        Commit::Claim(a, b) => of("claim", a.as_ref(), b.as_ref()),
        Commit::Pod(a, b) => of("pod", a.as_ref(), b.as_ref()),
        Commit::Addresses(node, _) => format!("addresses {node}"),
    }
}

#[test]
fn a_report_about_a_node_may_be_repeated_once_another_block_is_allocated_to_it() {
    let run_id = RunId {
        process: 0,
        incarnation: 1,
    };
    let about = Regarding {
        kind: ObjectKind::Node,
        name: "n0".into(),
        uid: "u0".into(),
    };
    let mut checks = Checks::default();
    // Reports the two reasons in turn, and counts how often the checks accept the report.
    let often = |checks: &mut Checks, reasons: [&'static str; 2]| {
        let mut is_accepted = |reason| {
            let report = EventRecord {
                about: about.clone(),
                warning: true,
                reason,
                note: String::new(),
            };
            checks.reported(run_id, &report, true).is_ok()
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
