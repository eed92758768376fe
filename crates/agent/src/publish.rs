//! Decides when NodeSubnet.status is written.
//!
//! - If a pool's demand exceeds its capacity, the status is written at once. While the capacity stays the same, further
//!   writes come less and less often, down to one in 8 s.
//! - If a block was released or a range was withdrawn, the status is written at once, but at most once in 250 ms. The
//!   controller has asked for both, so its requests bound the number of these writes. If the stored status loses such a
//!   report, the report is repeated less and less often, down to once in 8 s.
//! - If a block is in use that neither the controller lists nor the stored status reports, the status is written at
//!   once. If such changes follow each other, the writes come less and less often, down to one in 8 s.
//! - If an address is requested for another pod, the status is written at once. If such requests follow each other, the
//!   writes come less and less often, down to one in 8 s, until one of the requests ends.
//! - If the condition `RoutesReady` or `RangesAnnounced` gets another status or reason, the status is written at once.
//!   If such changes follow each other, the writes come less and less often, down to one in 8 s.
//! - After any other change, the status is written once per interval, with jitter. Every write contains the complete
//!   status. In a large cluster, the controller asks for a longer interval.
//! - If nothing has changed, the status is not written.
//!
//! # Guarantees
//! - At most one write is under way. Each write requires the version of the NodeSubnet on which the decision was based.
//!   So if the controller has changed the NodeSubnet meanwhile, the agent reads the change before it writes.
//! - A pool that allocates nothing does not delay requests for blocks of another pool. If a pool has allocated a block
//!   and the node needs another one, the node requests it at once, because an ADD waits only for a few seconds.
//! - If existing blocks cover the growth of the demand, there is no urgent write. So pods that start one by one cost
//!   one write per block.
//! - If only a part of a status was stored, because the CRD is older than the agent, the status is written again only
//!   after a change.
//! - Errors are followed by growing pauses with jitter, so that many agents do not retry at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::conditions::has_all;
use super::demand::PoolWant;
use super::jitter::{Jitter, backoff};
use super::snapshot::{assigns, busy};
use cadastre_api::{BlockStatus, NodeSubnetStatus, PoolDemand, RANGES_ANNOUNCED, ROUTES_READY};
use cadastre_node::{BlockState, Snapshot};

/// The first and the longest pause between two urgent writes.
const URGENT_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));
/// The first and the longest pause after an error.
const ERROR_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(120));
/// The longest wait for the watch to show the newer version, after a write was rejected because of an outdated version.
const CONFLICT_PAUSE: Duration = Duration::from_secs(5);

/// Decides when to write the status. All times are those of one monotonic clock.
#[derive(Debug)]
pub(crate) struct Publisher {
    interval: Duration,
    jitter: Jitter,
    seen: Option<Seen>,
    /// Whether the next version comes from a list. If so, that version counts even if it is older than the known one
    relisted: bool,
    /// The version that the write under way requires
    in_flight: Option<String>,
    /// When to write changes that are not urgent
    next_at: Duration,
    /// The pools whose demand exceeds their capacity, each with the request for blocks
    requests: BTreeMap<String, BlockRequest>,
    /// The pace of urgent writes that are caused by requests for addresses
    address_pace: Pace,
    /// The pace of urgent writes that report releases or withdrawals
    answer_pace: Pace,
    /// The releases and withdrawals that the last urgent write of such a report contained
    answered: BTreeSet<String>,
    /// The pace of urgent writes that report blocks in use that the controller does not list
    other_pace: Pace,
    /// The pace of urgent writes that report a change of the condition `RoutesReady` or `RangesAnnounced`
    routes_pace: Pace,
    /// The types of conditions that the stored status must not have
    unwanted: Vec<&'static str>,
    /// The earliest time of a write after an error
    retry_at: Duration,
    failures: u32,
    /// Since when the stored status has differed from the wanted one
    behind_since: Option<Duration>,
    /// The resourceVersion and the content of the last written status, if only a part of it was stored
    partial: Option<(String, Box<NodeSubnetStatus>)>,
    /// The version for which a write was rejected as outdated, and the time until which to wait for a newer version
    outdated: Option<(String, Duration)>,
}

/// The pace of urgent writes for one reason. The first write is due at once. If further writes follow soon, the pauses
/// between them grow.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// When the status was last written for this reason
    written_at: Option<Duration>,
    /// The minimum time between two writes for this reason
    pause: Duration,
}

impl Pace {
    const NEW: Self = Self {
        written_at: None,
        pause: URGENT_PAUSE.0,
    };

    fn next_at(&self, now: Duration) -> Duration {
        self.written_at.map_or(now, |at| at + self.pause)
    }

    fn make_due(&mut self, now: Duration) {
        self.written_at = Some(now.saturating_sub(self.pause));
    }

    fn record_write(&mut self, now: Duration) {
        let is_row = |at: Duration| now.saturating_sub(at) <= 4 * self.pause;
        self.pause = if self.written_at.is_some_and(is_row) {
            (2 * self.pause).min(URGENT_PAUSE.1)
        } else {
            URGENT_PAUSE.0
        };
        self.written_at = Some(now);
    }
}

/// A request for blocks of a pool. The controller has not answered the request yet.
#[derive(Clone, Copy, Debug)]
struct BlockRequest {
    /// The pool's capacity at the time of the request. When the capacity changes, the request counts as answered. If
    /// addresses are still missing, a new request begins
    capacity: u64,
    pace: Pace,
}

#[derive(Debug)]
struct Seen {
    version: String,
    status: NodeSubnetStatus,
}

/// What [`Publisher::next`] asks the caller to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PublishStep {
    /// Write the status, then call [`Publisher::written`]
    Write {
        /// The resourceVersion that the write requires
        version: String,
        /// Whether an urgent change caused the write
        urgent: bool,
    },
    /// Call [`Publisher::next`] again at this time, or earlier after an event
    At(Duration),
    /// Call [`Publisher::next`] again when the state has changed
    Nothing,
}

/// The outcome of writing the status.
#[derive(Clone, Debug, PartialEq)]
pub enum WriteOutcome {
    /// The status was written.
    Done {
        /// The new resourceVersion
        version: String,
        /// The status as the API server has stored it
        status: Box<NodeSubnetStatus>,
        /// The status that was sent, if it differs from `status` because the CRD is older than the agent
        cut: Option<Box<NodeSubnetStatus>>,
    },
    /// The write was rejected, because the NodeSubnet no longer has the version that the write required.
    Outdated,
    /// The write failed, or its outcome is indeterminate.
    Failed,
}

impl Publisher {
    /// Returns a publisher. It writes changes that are not urgent once per `interval`. `seed` should differ between
    /// nodes, so that the jitter differs.
    pub(crate) fn new(interval: Duration, seed: u64, now: Duration) -> Self {
        let mut jitter = Jitter::new(seed);
        Self {
            interval,
            // The first write is delayed by a random time. Otherwise agents that start together would all write at
            // once.
            next_at: now + jitter.part(interval / 4),
            jitter,
            seen: None,
            relisted: false,
            in_flight: None,
            requests: BTreeMap::new(),
            address_pace: Pace::NEW,
            answer_pace: Pace::NEW,
            answered: BTreeSet::new(),
            other_pace: Pace::NEW,
            routes_pace: Pace::NEW,
            unwanted: Vec::new(),
            retry_at: now,
            failures: 0,
            behind_since: None,
            partial: None,
            outdated: None,
        }
    }

    /// Announces that the version in the next call of [`Self::seen`] comes from a list.
    pub(crate) fn relisted(&mut self) {
        self.relisted = true;
    }

    /// Records the NodeSubnet as the watch shows it. A version that is older than the version seen last is ignored,
    /// unless it comes from a list. An older version in a list means that the API server was restored to an older
    /// state.
    pub(crate) fn seen(&mut self, version: &str, status: NodeSubnetStatus) {
        let is_older = |it: &Seen| is_older(version, &it.version);
        if std::mem::take(&mut self.relisted) {
            // The version comes from a new list, so the API server answers again. Earlier failures do not delay the
            // next write.
            self.failures = 0;
            self.retry_at = Duration::ZERO;
        } else if self.seen.as_ref().is_some_and(is_older) {
            return;
        }
        if self
            .outdated
            .as_ref()
            .is_some_and(|(old, _)| old != version)
        {
            self.outdated = None;
        }
        self.seen = Some(Seen {
            version: version.to_owned(),
            status,
        });
    }

    /// Records that there is no NodeSubnet to write to. If a NodeSubnet is created later, earlier failures do not delay
    /// writes to it.
    pub(crate) fn lost(&mut self) {
        self.seen = None;
        self.behind_since = None;
        self.partial = None;
        self.outdated = None;
        self.failures = 0;
        self.retry_at = Duration::ZERO;
    }

    /// Returns how long the stored status has differed from the wanted one.
    pub(crate) fn lag(&self, now: Duration) -> Duration {
        let since = self.behind_since;
        since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Returns the conditions in the NodeSubnet that the watch last showed. The next write requires the version of this
    /// NodeSubnet.
    pub(crate) fn conditions(&self) -> &[Condition] {
        self.seen.as_ref().map_or(&[], |it| &it.status.conditions)
    }

    /// Sets the interval between writes that are not urgent. If the interval becomes shorter, the next write comes
    /// accordingly sooner.
    pub(crate) fn set_interval(&mut self, interval: Duration, now: Duration) {
        if interval != self.interval {
            self.interval = interval;
            self.next_at = self.next_at.min(now + self.jitter.pause(interval));
        }
    }

    /// Makes a write that is not urgent due at once.
    pub(crate) fn make_due(&mut self, now: Duration) {
        self.next_at = self.next_at.min(now);
    }

    /// Sets the types of conditions that the stored status must not have.
    pub(crate) fn set_unwanted(&mut self, types: Vec<&'static str>) {
        self.unwanted = types;
    }

    /// Returns what to do so that the stored status becomes `status`.
    pub(crate) fn next(
        &mut self,
        status: &NodeSubnetStatus,
        wants: &BTreeMap<String, PoolWant>,
        snapshot: &Snapshot,
        now: Duration,
    ) -> PublishStep {
        let Some(seen) = self.seen.as_ref().filter(|_| self.in_flight.is_none()) else {
            return PublishStep::Nothing;
        };
        // If the CRD is older than the agent, the API server has dropped a part of the written status. It would drop
        // this part from every further write, so another write is useless.
        let is_partial = |(version, sent): &(String, Box<NodeSubnetStatus>)| {
            *version == seen.version && is_same(sent, status)
        };
        let mut stored = seen.status.conditions.iter();
        let has_unwanted = stored.any(|it| self.unwanted.contains(&it.type_.as_str()));
        let is_partial = self.partial.as_ref().is_some_and(is_partial);
        if !has_unwanted && (is_same(&seen.status, status) || is_partial) {
            self.behind_since = None;
            return PublishStep::Nothing;
        }
        self.behind_since.get_or_insert(now);
        let lacking = unrequested(&seen.status, status, wants, snapshot);
        let (stored, given) = (answers_in(&seen.status), answers_in(status));
        let answers = !given.is_subset(&stored);
        let other = is_unlisted(&seen.status, status, snapshot);
        let is_in = |all: &NodeSubnetStatus, it| all.requested_addresses.contains(it);
        let mut asked = status.requested_addresses.iter();
        let asks = asked.any(|it| !is_in(&seen.status, it));
        let mut stored = seen.status.requested_addresses.iter();
        if stored.any(|it| !is_in(status, it)) {
            self.address_pace = Pace::NEW;
        }
        let routes = is_routes_news(&seen.status, status);
        let urgent = answers || other || asks || routes || !lacking.is_empty();
        let requests = lacking
            .iter()
            .map(|(pool, want)| match self.requests.get(pool) {
                Some(it) if it.capacity == want.capacity => it.pace.next_at(now),
                _ => now,
            });
        let others = other.then(|| self.other_pace.next_at(now));
        let addresses = asks.then(|| self.address_pace.next_at(now));
        if answers && self.answered != given {
            self.answer_pace.pause = URGENT_PAUSE.0;
        }
        let answered = answers.then(|| self.answer_pace.next_at(now));
        let routed = routes.then(|| self.routes_pace.next_at(now));
        let others = others.into_iter().chain(answered).chain(routed);
        let soonest = requests.chain(addresses).chain(others).min();
        let mut at = self.retry_at;
        at = at.max(soonest.unwrap_or(self.next_at));
        if let Some((_, until)) = &self.outdated {
            at = at.max(*until);
        }
        if at > now {
            return PublishStep::At(at);
        }
        let version = seen.version.clone();
        self.in_flight = Some(version.clone());
        if answers {
            // Users wait for the allocation of what the node has released or withdrawn. So only repeated reports are
            // written less and less often.
            if self.answered == given {
                self.answer_pace.record_write(now);
            } else {
                self.answer_pace.written_at = Some(now);
            }
            self.answered = given;
        }
        if other {
            self.other_pace.record_write(now);
        }
        if asks {
            self.address_pace.record_write(now);
        }
        if routes {
            self.routes_pace.record_write(now);
        }
        self.record_requests(lacking, wants, now);
        PublishStep::Write { version, urgent }
    }

    /// Records the outcome of the write under way.
    pub(crate) fn written(&mut self, written: WriteOutcome, now: Duration) {
        let target = self.in_flight.take();
        match written {
            WriteOutcome::Done {
                version,
                status,
                cut,
            } => {
                self.partial = cut.map(|sent| (version.clone(), sent));
                self.failures = 0;
                self.behind_since = None;
                self.next_at = now + self.jitter.pause(self.interval);
                self.seen(&version, *status);
            }
            WriteOutcome::Outdated => {
                // The watch may already have shown a newer version during the write. In this case, there is nothing to
                // wait for.
                let seen = self.seen.as_ref().map(|seen| &seen.version);
                let is_behind = target.filter(|target| Some(target) == seen);
                self.outdated = is_behind.map(|it| (it, now + CONFLICT_PAUSE));
                // Nothing was written, so urgent changes need not wait for the pause after a write.
                self.address_pace.make_due(now);
                self.answer_pace.make_due(now);
                self.other_pace.make_due(now);
                self.routes_pace.make_due(now);
                for request in self.requests.values_mut() {
                    request.pace.make_due(now);
                }
            }
            WriteOutcome::Failed => {
                let pause = backoff(ERROR_PAUSE, self.failures);
                self.failures += 1;
                self.retry_at = now + pause / 2 + self.jitter.part(pause);
            }
        }
    }

    /// Records from which pools a write requests blocks.
    fn record_requests(
        &mut self,
        lacking: Vec<(String, PoolWant)>,
        wants: &BTreeMap<String, PoolWant>,
        now: Duration,
    ) {
        self.requests.retain(|pool, _| wants.contains_key(pool));
        for (pool, PoolWant { capacity, .. }) in lacking {
            let new = BlockRequest {
                capacity,
                pace: Pace::NEW,
            };
            let request = self.requests.entry(pool).or_insert(new);
            if request.capacity != capacity {
                *request = new;
            }
            request.pace.record_write(now);
        }
    }
}

/// Whether `version` is older than `than`. The versions are compared as numbers. If either of them is not a number, the
/// result is false.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u128>(), than.parse::<u128>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

/// Whether the stored status is the wanted one. Only conditions of the types in `wanted` are compared, because
/// conditions of other types belong to the controller.
pub(crate) fn is_same(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus) -> bool {
    let without = NodeSubnetStatus {
        conditions: is.conditions.clone(),
        ..wanted.clone()
    };
    *is == without && has_all(&is.conditions, &wanted.conditions)
}

/// Returns the pools and blocks in the stored status. If the stored status is of another Node object, returns empty
/// lists.
fn reported_parts<'a>(
    is: &'a NodeSubnetStatus,
    wanted: &NodeSubnetStatus,
) -> (&'a [PoolDemand], Blocks<'a>) {
    if is.node_uid == wanted.node_uid {
        (&is.pools, Blocks(&is.blocks))
    } else {
        (&[], Blocks(&[]))
    }
}

struct Blocks<'a>(&'a [BlockStatus]);

impl Blocks<'_> {
    fn find(&self, cidr: &str, uid: &str) -> Option<&BlockStatus> {
        self.0.iter().find(|it| it.cidr == cidr && it.uid == uid)
    }
}

/// Returns the pools that need more blocks than the stored status requests from the controller.
fn unrequested(
    is: &NodeSubnetStatus,
    wanted: &NodeSubnetStatus,
    wants: &BTreeMap<String, PoolWant>,
    snapshot: &Snapshot,
) -> Vec<(String, PoolWant)> {
    let (pools, blocks) = reported_parts(is, wanted);
    let is_requested = |it: &PoolDemand| {
        let mut pools = pools.iter();
        pools.any(|of| of.pool == it.pool && of.demand >= it.demand)
    };
    // If the stored status does not have the counts of a block, the controller derives the block's capacity from its
    // size. As a result, the controller may assume that the node's blocks are sufficient.
    let is_counted = |pool: &str| {
        let mut of_pool = snapshot
            .blocks
            .iter()
            .filter(|it| assigns(it) && it.pool == pool);
        of_pool.all(|it| blocks.find(&it.cidr.to_string(), &it.uid).is_some())
    };
    let lacking = |it: &PoolDemand| {
        let want = wants.get(&it.pool).filter(|want| want.is_lacking())?;
        let is_stored = is_requested(it) && is_counted(&it.pool);
        (!is_stored).then(|| (it.pool.clone(), *want))
    };
    wanted.pools.iter().filter_map(lacking).collect()
}

/// Returns the releases and withdrawals that a status reports. From this report on, the controller may allocate the
/// ranges elsewhere.
fn answers_in(status: &NodeSubnetStatus) -> BTreeSet<String> {
    let released = status.blocks.iter().filter(|it| it.released);
    let released = released.map(|it| format!("{} {}", it.cidr, it.uid));
    status.withdrawn.iter().cloned().chain(released).collect()
}

/// Whether a block is in use that neither the controller lists nor the stored status reports. The controller may
/// allocate such a block to another node.
fn is_unlisted(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus, snapshot: &Snapshot) -> bool {
    let (_, blocks) = reported_parts(is, wanted);
    snapshot.blocks.iter().any(|it| {
        it.state == BlockState::Unlisted
            && busy(it) > 0
            && blocks.find(&it.cidr.to_string(), &it.uid).is_none()
    })
}

/// Whether `RoutesReady` or `RangesAnnounced` has another status or reason in `wanted` than in the stored status. A
/// change of only the text is not urgent, because a new node may change the text on all nodes.
fn is_routes_news(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus) -> bool {
    let of = |status: &NodeSubnetStatus, type_: &str| {
        let condition = status.conditions.iter().find(|it| it.type_ == type_);
        condition.map(|it| (it.status.clone(), it.reason.clone()))
    };
    [ROUTES_READY, RANGES_ANNOUNCED].into_iter().any(|type_| {
        let wanted = of(wanted, type_);
        wanted.is_some() && wanted != of(is, type_)
    })
}

#[cfg(test)]
mod tests;
