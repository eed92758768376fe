//! Pools: the finalizer, conditions and counts of every IPPool.
//!
//! A pool carves only once its finalizer is on it, and the finalizer goes only when nothing is held,
//! in flight, unclear or resting in it. Counts are computed from the ledger each time, never kept.
//! A status is written when it differs, at most once in [`STATUS_PAUSE`] a pool; events are told on
//! a change of a condition only, also across restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::pools::{PoolState, Verdict};
use super::queue::Queue;
use super::registry::Registry;
use super::report::{About, Report};
use super::{Context, Now, Purpose};
use crate::api::{FINALIZER, FamilyStatus, IPPoolStatus};
use crate::cluster::request::{Outcome, Refusal, Request};
use crate::cluster::seen::{Pool, Text};
use crate::ipam::{Family, Holder, State};

/// At most one status write a pool in this time.
pub const STATUS_PAUSE: Duration = Duration::from_secs(5);

/// At most one count of all pools in this time.
const COUNT_PAUSE: Duration = Duration::from_secs(1);

/// The loop's own state.
#[derive(Debug, Default)]
pub struct PoolLoop {
    /// Names to look at
    pub queue: Queue<Text>,
    in_flight: BTreeSet<Text>,
    to_read: BTreeSet<Text>,
    /// Something that is counted has changed.
    dirty: bool,
    counted_at: Option<Duration>,
    written_at: BTreeMap<Text, Duration>,
    /// What was last told of a condition, by pool UID and type.
    told: BTreeMap<(Text, &'static str), (String, String)>,
}

/// Counts of one pool and family, in blocks of the pool's block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// What it could hold, reserved and service ranges left out
    pub capacity: u128,
    /// Ranges held by live nodes or being given to them
    pub held: u128,
    /// Ranges of dead nodes
    pub quarantined: u128,
    /// What could be given now
    pub free: u128,
}

impl Figures {
    /// Share of the capacity that is not free, 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn utilization(&self) -> f64 {
        if self.capacity == 0 {
            1.0
        } else {
            1.0 - (self.free as f64 / self.capacity as f64)
        }
    }

    fn status(self) -> FamilyStatus {
        let percent = (self.utilization() * 100.0).floor();
        // 100 % is for pools without any room at all.
        let percent = if self.free > 0 {
            percent.min(99.0)
        } else {
            percent
        };
        FamilyStatus {
            capacity: self.capacity.to_string(),
            held: self.held.to_string(),
            quarantined: self.quarantined.to_string(),
            free: self.free.to_string(),
            utilization: format!("{percent}%"),
        }
    }
}

/// Counts a family of a pool.
pub fn figures(pool: &PoolState, family: Family, registry: &Registry) -> Figures {
    let room = registry.ledger.room(&pool.space, family);
    let mut figures = Figures {
        capacity: room.capacity,
        held: 0,
        quarantined: 0,
        free: room.free,
    };
    for cidr in pool.space.cidrs(family) {
        for (_, claim) in registry.ledger.overlapping(cidr) {
            if claim.state == State::Resting {
                figures.quarantined += 1;
            } else {
                figures.held += 1;
            }
        }
    }
    figures
}

impl PoolLoop {
    /// Something that is counted has changed.
    pub fn mark(&mut self) {
        self.dirty = true;
    }

    /// When there may be something to count again.
    pub fn next_at(&self) -> Option<Duration> {
        let count = self.dirty.then(|| {
            self.counted_at
                .map_or(Duration::ZERO, |at| at + COUNT_PAUSE)
        });
        count.into_iter().chain(self.queue.next_at()).min()
    }

    /// A finalizer that must be set before a pool can serve.
    pub fn next_finalizer(&mut self, cx: &Context) -> Option<(Request, Purpose)> {
        let starting =
            |state: &&PoolState| state.verdict == Verdict::Starting && !self.is_open(&state.name);
        let state = cx.registry.pools.iter().find(starting)?;
        let pool = cx.world.pools.get(&state.name)?;
        let mut finalizers = pool.finalizers.clone();
        finalizers.push(FINALIZER.to_owned());
        Some(self.set_finalizers(pool, finalizers))
    }

    /// The next request: a read, a finalizer to drop, a status to write.
    pub fn next(
        &mut self,
        waiting: &BTreeMap<Text, i64>,
        cx: &mut Context,
    ) -> Option<(Request, Purpose)> {
        let now = cx.now.mono;
        if self.dirty && self.counted_at.is_none_or(|at| at + COUNT_PAUSE <= now) {
            self.dirty = false;
            self.counted_at = Some(now);
            for pool in cx.world.pools.iter() {
                self.queue.add(pool.name.clone());
            }
            self.forget_gone(cx);
        }
        while let Some(name) = self.queue.pop(now) {
            if self.in_flight.contains(&name) {
                continue;
            }
            if self.to_read.remove(&name) {
                self.in_flight.insert(name.clone());
                return Some((
                    Request::ReadPool { name: name.clone() },
                    Purpose::PoolRead { name },
                ));
            }
            let (Some(pool), Some(state)) = (
                cx.world.pools.get(&name).cloned(),
                cx.registry.pools.get(&name),
            ) else {
                continue;
            };
            let ours = pool.finalizers.iter().any(|f| f == FINALIZER);
            if pool.deleting && ours && holders(state, cx.registry).is_empty() {
                let finalizers = pool
                    .finalizers
                    .iter()
                    .filter(|f| *f != FINALIZER)
                    .cloned()
                    .collect();
                return Some(self.set_finalizers(&pool, finalizers));
            }
            if let Some(at) = self
                .written_at
                .get(&name)
                .map(|at| *at + STATUS_PAUSE)
                .filter(|at| *at > now)
            {
                self.queue.add_at(name, at);
                continue;
            }
            let status = status(
                &pool,
                state,
                waiting.get(&name).copied().unwrap_or(0),
                cx.registry,
                cx.now,
            );
            if pool.status.as_ref() != Some(&status) {
                self.tell(&pool, &status, cx.reports);
                self.written_at.insert(name.clone(), now);
                self.in_flight.insert(name.clone());
                let (uid, version) = (pool.uid.clone(), pool.version);
                return Some((
                    Request::SetPoolStatus {
                        name: name.clone(),
                        uid,
                        version,
                        status,
                    },
                    Purpose::Pool { name },
                ));
            }
        }
        None
    }

    /// Takes in an answer; the object it shows is in the world already.
    pub fn answered(&mut self, name: &Text, outcome: &Outcome, cx: &mut Context) {
        self.in_flight.remove(name);
        match outcome {
            Outcome::Pool(_) | Outcome::Gone | Outcome::Refused(Refusal::Missing) => {
                self.queue.succeeded(name);
                self.queue.add(name.clone());
            }
            Outcome::Refused(Refusal::Busy(_) | Refusal::NotSent | Refusal::Rejected(_)) => {
                self.queue.add_failed(name.clone(), cx.now.mono);
            }
            _ => {
                self.to_read.insert(name.clone());
                self.queue.add_failed(name.clone(), cx.now.mono);
            }
        }
        // What was refused or lost may be written again without the pause.
        if !matches!(outcome, Outcome::Pool(_)) {
            self.written_at.remove(name);
        }
    }

    /// Remembers what the conditions said before this leader, so that it is not told again.
    pub fn recall(&mut self, pools: impl Iterator<Item = impl AsRef<Pool>>) {
        for pool in pools {
            let pool = pool.as_ref();
            for condition in pool.status.iter().flat_map(|status| &status.conditions) {
                if let Some(kind) = TOLD.iter().find(|kind| **kind == condition.type_) {
                    let state = (condition.status.clone(), condition.reason.clone());
                    self.told.insert((pool.uid.clone(), kind), state);
                }
            }
        }
    }

    fn is_open(&self, name: &Text) -> bool {
        self.in_flight.contains(name) || self.to_read.contains(name)
    }

    fn set_finalizers(&mut self, pool: &Pool, finalizers: Vec<String>) -> (Request, Purpose) {
        let name = pool.name.clone();
        self.in_flight.insert(name.clone());
        let request = Request::SetPoolFinalizers {
            name: name.clone(),
            uid: pool.uid.clone(),
            version: pool.version,
            finalizers,
        };
        (request, Purpose::Pool { name })
    }

    fn forget_gone(&mut self, cx: &Context) {
        let pools = &cx.world.pools;
        self.written_at.retain(|name, _| pools.get(name).is_some());
        let uids: BTreeSet<&Text> = pools.iter().map(|pool| &pool.uid).collect();
        self.told.retain(|(uid, _), _| uids.contains(uid));
    }

    fn tell(&mut self, pool: &Pool, status: &IPPoolStatus, reports: &mut Vec<Report>) {
        for kind in TOLD {
            let Some(condition) = status.conditions.iter().find(|c| c.type_ == *kind) else {
                continue;
            };
            let key = (pool.uid.clone(), *kind);
            let state = (condition.status.clone(), condition.reason.clone());
            let before = self.told.insert(key, state.clone());
            let bad = condition.status == "True";
            let was_bad = before.as_ref().is_some_and(|(status, _)| status == "True");
            if before.as_ref() == Some(&state) || !(bad || was_bad) {
                continue;
            }
            let about = About::Pool {
                name: pool.name.clone(),
                uid: pool.uid.clone(),
            };
            let reason = event_reason(kind, bad);
            reports.push(Report {
                about,
                warning: bad,
                reason,
                note: condition.message.clone(),
            });
        }
    }
}

/// Holders with a range that counts to the pool; of each, whether it is a live node.
fn holders(state: &PoolState, registry: &Registry) -> BTreeMap<Holder, bool> {
    let mut holders = BTreeMap::new();
    for cidr in state
        .space
        .families()
        .flat_map(|family| state.space.cidrs(family))
    {
        for (_, claim) in registry.ledger.overlapping(cidr) {
            if registry
                .pools
                .of(&claim.cidr)
                .is_none_or(|pool| pool.name == state.name)
            {
                *holders.entry(claim.holder).or_default() |= claim.state != State::Resting;
            }
        }
    }
    holders
}

const READY: &str = "Ready";
const OVERLAPPING: &str = "Overlapping";
const EXHAUSTED: &str = "Exhausted";
const SECOND_WRITER: &str = "SecondWriter";
const TERMINATING: &str = "Terminating";

/// Conditions whose changes become events (of `Ready` the others tell the reasons).
const TOLD: &[&str] = &[INVALID, OVERLAPPING, EXHAUSTED, SECOND_WRITER, TERMINATING];
const INVALID: &str = "Invalid";

fn event_reason(kind: &'static str, bad: bool) -> &'static str {
    match (kind, bad) {
        (INVALID, true) => "InvalidSpec",
        (INVALID, false) => "SpecIsValid",
        (OVERLAPPING, true) => "Overlapping",
        (OVERLAPPING, false) => "NoLongerOverlapping",
        (EXHAUSTED, true) => "PoolExhausted",
        (EXHAUSTED, false) => "PoolHasRoom",
        (SECOND_WRITER, true) => "SecondWriter",
        (SECOND_WRITER, false) => "SecondWriterQuiet",
        (_, true) => "Terminating",
        (_, false) => "NotTerminating",
    }
}

fn status(
    pool: &Pool,
    state: &PoolState,
    waiting: i64,
    registry: &Registry,
    now: Now,
) -> IPPoolStatus {
    let families: Vec<(Family, Figures)> = state
        .space
        .families()
        .map(|family| (family, figures(state, family, registry)))
        .collect();
    let of = |wanted: Family| {
        families
            .iter()
            .find(|(f, _)| *f == wanted)
            .map(|(_, figures)| figures.status())
    };
    let holders = holders(state, registry);
    let nodes = holders.values().filter(|live| **live).count();
    let mut conditions = vec![
        ready(state),
        flag(
            INVALID,
            invalid(state),
            "SpecIsValid",
            "the spec can be used",
        ),
        flag(
            OVERLAPPING,
            overlapping(state),
            "NoOverlap",
            "no other pool, service range or node address lies in it",
        ),
        flag(
            EXHAUSTED,
            exhausted(state, &families),
            "HasRoom",
            "there is a free block of every family",
        ),
        flag(
            SECOND_WRITER,
            second_writer(state),
            "OnlyWriter",
            "nobody else writes podCIDRs in its range",
        ),
    ];
    if pool.deleting {
        let resting = holders.len() - nodes;
        let message = format!(
            "{nodes} nodes still hold ranges of it, those of {resting} dead nodes rest: it goes with the last one"
        );
        conditions.push(flag(TERMINATING, Some(("InUse", message)), "", ""));
    }
    let before = pool
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    for condition in &mut conditions {
        let same = before
            .iter()
            .find(|b| b.type_ == condition.type_ && b.status == condition.status);
        let whole = jiff::Timestamp::from_second(now.wall.as_second()).unwrap_or(now.wall);
        condition.last_transition_time =
            same.map_or(Time(whole), |b| b.last_transition_time.clone());
        condition.observed_generation = Some(pool.generation);
    }
    IPPoolStatus {
        observed_generation: Some(pool.generation),
        ipv4: of(Family::V4),
        ipv6: of(Family::V6),
        nodes: i64::try_from(nodes).ok(),
        waiting: Some(waiting),
        conditions,
    }
}

fn condition(kind: &str, status: bool, reason: &str, message: String) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

/// A condition that is True when there is something to tell.
fn flag(kind: &str, told: Option<(&str, String)>, otherwise: &str, message: &str) -> Condition {
    match told {
        Some((reason, message)) => condition(kind, true, reason, message),
        None => condition(kind, false, otherwise, message.to_owned()),
    }
}

fn ready(state: &PoolState) -> Condition {
    let reason = match &state.verdict {
        Verdict::Serving => {
            return condition(
                READY,
                true,
                "Serving",
                "serves the nodes it selects".to_owned(),
            );
        }
        Verdict::Invalid(_) => "InvalidSpec",
        Verdict::Terminating => "Terminating",
        Verdict::Disabled => "Disabled",
        Verdict::Starting => "Starting",
        Verdict::Overlaps { .. } => "OverlapsOlderPool",
        Verdict::SecondWriter => "SecondWriter",
    };
    condition(
        READY,
        false,
        reason,
        format!("carves nothing: {}", state.verdict),
    )
}

fn invalid(state: &PoolState) -> Option<(&'static str, String)> {
    match &state.verdict {
        Verdict::Invalid(why) => Some(("InvalidSpec", why.clone())),
        _ => None,
    }
}

fn overlapping(state: &PoolState) -> Option<(&'static str, String)> {
    /// More names than this help nobody.
    const NAMED: usize = 5;
    if let Verdict::Overlaps { .. } = state.verdict {
        return Some((
            "OverlapsOlderPool",
            format!("carves nothing: {}", state.verdict),
        ));
    }
    if state.left_out.is_empty() {
        return None;
    }
    let more = state.left_out.len().saturating_sub(NAMED);
    let mut list = state
        .left_out
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if more > 0 {
        list = format!("{list} and {more} more");
    }
    Some((
        "LeavesOut",
        format!("leaves out what is not free to give: {list}: choose CIDRs apart from these"),
    ))
}

fn exhausted(state: &PoolState, families: &[(Family, Figures)]) -> Option<(&'static str, String)> {
    let (family, figures) = families.iter().find(|(_, figures)| figures.free == 0)?;
    let field = match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    };
    let len = state.space.block_len(*family).unwrap_or_default();
    let Figures {
        capacity,
        held,
        quarantined,
        ..
    } = figures;
    Some((
        "NoFreeBlock",
        format!(
            "no free {family} block of /{len} ({held} of {capacity} held, {quarantined} resting): add a CIDR to spec.{field}.cidrs, or a pool that selects the nodes that wait"
        ),
    ))
}

fn second_writer(state: &PoolState) -> Option<(&'static str, String)> {
    (state.hold_until.is_some())
        .then(|| ("PodCIDRsWrittenByOthers", Verdict::SecondWriter.to_string()))
}
