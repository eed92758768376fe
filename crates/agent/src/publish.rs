//! When NodeSubnet.status is written.
//!
//! | what changed | when |
//! |---|---|
//! | more is wanted of a pool than there is | at once; while nothing comes of it ever less often, down to once in 8 s |
//! | a block was let go, or one that is in use is neither listed nor told | at once; if that comes again and again, ever less often, down to once in 8 s |
//! | anything else | once in the interval, with jitter; every write tells all |
//! | nothing | never |
//!
//! # Guarantees
//! - One write at a time, onto the version of the NodeSubnet that it was decided by: whatever the
//!   controller has written meanwhile is taken in first.
//! - A pool that does not answer slows down no question to another one, and a pool that does is asked for
//!   more at once: an ADD waits for a few seconds only.
//! - Growth that what is held still covers is no reason to write: pods that start one by one cost a
//!   write a block, not one each.
//! - What is stored only in part, because the CRD is older than the agent, is not written again before
//!   something changes.
//! - Errors are followed by growing pauses, and many agents do not come back at one moment.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::demand::Want;
use super::jitter::Jitter;
use super::served::is_said;
use super::snapshot::{busy, gives};
use cadastre_api::{BlockReport, NodeSubnetStatus, PoolDemand};
use cadastre_node::{BlockState, Snapshot};

/// First and longest pause between two writes that cannot wait.
const URGENT_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));
/// First and longest pause after an error.
const ERROR_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(120));
/// How long the watch may take to show the version that a write met.
const CONFLICT_PAUSE: Duration = Duration::from_secs(5);

/// Decides when to write. Times are those of one monotonic clock.
#[derive(Debug)]
pub struct Publisher {
    interval: Duration,
    jitter: Jitter,
    seen: Option<Seen>,
    /// What is seen next is of a list, which is right whatever was seen before
    relisted: bool,
    /// The version that a write is on its way to
    in_flight: Option<String>,
    /// What can wait waits until then
    next_at: Duration,
    /// The question to each pool of which more is wanted than there is
    questions: BTreeMap<String, Question>,
    /// Other things that cannot wait
    others: Pace,
    /// Nothing before that, after an error
    retry_at: Duration,
    failures: u32,
    /// Since when the API is told less than there is to tell
    behind_since: Option<Duration>,
    /// What was told with this version, where not all of that was stored
    cut: Option<(String, Box<NodeSubnetStatus>)>,
    /// The version that a write was refused on, and until when another one is waited for
    outdated: Option<(String, Duration)>,
}

/// How often something is told that cannot wait: at once, but ever less often in a row.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// When it was told last
    told_at: Option<Duration>,
    /// So long after that nothing
    pause: Duration,
}

impl Pace {
    const NEW: Self = Self {
        told_at: None,
        pause: URGENT_PAUSE.0,
    };

    fn next_at(&self, now: Duration) -> Duration {
        self.told_at.map_or(now, |at| at + self.pause)
    }

    fn make_due(&mut self, now: Duration) {
        self.told_at = Some(now.saturating_sub(self.pause));
    }

    fn told(&mut self, now: Duration) {
        let is_row = |at: Duration| now.saturating_sub(at) <= 4 * self.pause;
        self.pause = if self.told_at.is_some_and(is_row) {
            (2 * self.pause).min(URGENT_PAUSE.1)
        } else {
            URGENT_PAUSE.0
        };
        self.told_at = Some(now);
    }
}

/// What a pool was asked for, until it is answered.
#[derive(Clone, Copy, Debug)]
struct Question {
    /// What there was of the pool. Once there is more or less, it was answered, and what is still lacking
    /// is a new question.
    capacity: u64,
    pace: Pace,
}

#[derive(Debug)]
struct Seen {
    version: String,
    status: NodeSubnetStatus,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write onto this version, and tell what came of it
    Write {
        /// resourceVersion of the NodeSubnet
        version: String,
        /// Whether it is for something that cannot wait
        urgent: bool,
    },
    /// Ask again then, if nothing happens before
    At(Duration),
    /// Ask again when something has changed
    Nothing,
}

/// What came of a write.
#[derive(Clone, Debug, PartialEq)]
pub enum Written {
    /// It was made; the NodeSubnet has this version and says this.
    Done {
        /// The new resourceVersion
        version: String,
        /// As stored
        status: Box<NodeSubnetStatus>,
        /// As written, if that is not what was stored: the CRD is older than the agent
        cut: Option<Box<NodeSubnetStatus>>,
    },
    /// The NodeSubnet has another version.
    Outdated,
    /// It failed, or nobody knows.
    Failed,
}

impl Publisher {
    /// One that writes what can wait once in `interval`; `seed` sets it apart from other nodes'.
    pub fn new(interval: Duration, seed: u64, now: Duration) -> Self {
        let mut new = Self {
            interval,
            jitter: Jitter::new(seed),
            seen: None,
            relisted: false,
            in_flight: None,
            next_at: now,
            questions: BTreeMap::new(),
            others: Pace::NEW,
            retry_at: now,
            failures: 0,
            behind_since: None,
            cut: None,
            outdated: None,
        };
        // Agents that are started together need not all write at once.
        new.next_at = now + new.jitter.part(interval / 4);
        new
    }

    /// What is seen next is of a list.
    pub fn relisted(&mut self) {
        self.relisted = true;
    }

    /// The NodeSubnet as the watch shows it. What is older than the answer to the last write is left
    /// out of account, unless a list shows it: then the API was put back to an older state.
    pub fn seen(&mut self, version: &str, status: NodeSubnetStatus) {
        let is_older = |it: &Seen| is_older(version, &it.version);
        if std::mem::take(&mut self.relisted) {
            // It answers again.
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

    /// There is no NodeSubnet to write to. That writes failed meanwhile holds up none to the next one.
    pub fn lost(&mut self) {
        self.seen = None;
        self.behind_since = None;
        self.cut = None;
        self.outdated = None;
        self.failures = 0;
        self.retry_at = Duration::ZERO;
    }

    /// For how long something is to be told that the API does not know.
    pub fn lag(&self, now: Duration) -> Duration {
        let since = self.behind_since;
        since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// Whether a write is on its way.
    pub fn is_writing(&self) -> bool {
        self.in_flight.is_some()
    }

    /// The conditions of the version that the next write goes onto.
    pub fn conditions(&self) -> &[Condition] {
        self.seen.as_ref().map_or(&[], |it| &it.status.conditions)
    }

    /// What to do, if the status should be `status`.
    pub fn next(
        &mut self,
        status: &NodeSubnetStatus,
        wants: &BTreeMap<String, Want>,
        snapshot: &Snapshot,
        now: Duration,
    ) -> Next {
        let Some(seen) = self.seen.as_ref().filter(|_| self.in_flight.is_none()) else {
            return Next::Nothing;
        };
        // What an older CRD cut off would be cut off again.
        let as_far_as_it_goes = |(version, told): &(String, Box<NodeSubnetStatus>)| {
            *version == seen.version && is_same(told, status)
        };
        if is_same(&seen.status, status) || self.cut.as_ref().is_some_and(as_far_as_it_goes) {
            self.behind_since = None;
            return Next::Nothing;
        }
        self.behind_since.get_or_insert(now);
        let lacking = not_asked(&seen.status, status, wants, snapshot);
        let other = is_news(&seen.status, status, snapshot);
        let urgent = other || !lacking.is_empty();
        let questions = lacking
            .iter()
            .map(|(pool, want)| match self.questions.get(pool) {
                Some(it) if it.capacity == want.capacity => it.pace.next_at(now),
                _ => now,
            });
        let others = other.then(|| self.others.next_at(now));
        let soonest = questions.chain(others).min();
        let mut at = self.retry_at;
        at = at.max(soonest.unwrap_or(self.next_at));
        if let Some((_, until)) = &self.outdated {
            at = at.max(*until);
        }
        if at > now {
            return Next::At(at);
        }
        let version = seen.version.clone();
        self.in_flight = Some(version.clone());
        if other {
            self.others.told(now);
        }
        self.asked(lacking, wants, now);
        Next::Write { version, urgent }
    }

    /// Takes in what came of the write.
    pub fn written(&mut self, written: Written, now: Duration) {
        let onto = self.in_flight.take();
        match written {
            Written::Done {
                version,
                status,
                cut,
            } => {
                self.cut = cut.map(|told| (version.clone(), told));
                self.failures = 0;
                self.behind_since = None;
                self.next_at = now + self.interval + self.jitter.part(self.interval / 5);
                self.seen(&version, *status);
            }
            Written::Outdated => {
                // The watch may have shown a later one while the write was on its way.
                let seen = self.seen.as_ref().map(|seen| &seen.version);
                let is_behind = onto.filter(|onto| Some(onto) == seen);
                self.outdated = is_behind.map(|it| (it, now + CONFLICT_PAUSE));
                // No write was made: what cannot wait need not wait for the next turn.
                self.others.make_due(now);
                for question in self.questions.values_mut() {
                    question.pace.make_due(now);
                }
            }
            Written::Failed => {
                let pause = ERROR_PAUSE.0 * 2u32.saturating_pow(self.failures.min(16));
                let pause = pause.min(ERROR_PAUSE.1);
                self.failures += 1;
                self.retry_at = now + pause / 2 + self.jitter.part(pause);
            }
        }
    }

    /// Takes note of what the pools are asked for with a write.
    fn asked(
        &mut self,
        lacking: Vec<(String, Want)>,
        wants: &BTreeMap<String, Want>,
        now: Duration,
    ) {
        self.questions.retain(|pool, _| wants.contains_key(pool));
        for (pool, Want { capacity, .. }) in lacking {
            let new = Question {
                capacity,
                pace: Pace::NEW,
            };
            let question = self.questions.entry(pool).or_insert(new);
            if question.capacity != capacity {
                *question = new;
            }
            question.pace.told(now);
        }
    }
}

/// Versions are numbers that grow, where they are numbers at all.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u128>(), than.parse::<u128>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

/// Whether both say the same. Conditions that `wanted` does not name are the controller's.
pub fn is_same(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus) -> bool {
    let without = NodeSubnetStatus {
        conditions: is.conditions.clone(),
        ..wanted.clone()
    };
    *is == without && is_said(&is.conditions, &wanted.conditions)
}

/// What the API knows of this Node object's pools and blocks.
fn told<'a>(is: &'a NodeSubnetStatus, wanted: &NodeSubnetStatus) -> (&'a [PoolDemand], Blocks<'a>) {
    if is.node_uid == wanted.node_uid {
        (&is.pools, Blocks(&is.blocks))
    } else {
        (&[], Blocks(&[]))
    }
}

/// The blocks that the API knows of.
struct Blocks<'a>(&'a [BlockReport]);

impl Blocks<'_> {
    fn find(&self, cidr: &str, uid: &str) -> Option<&BlockReport> {
        self.0.iter().find(|it| it.cidr == cidr && it.uid == uid)
    }
}

/// The pools of which more is wanted than there is, where the controller does not know it yet.
fn not_asked(
    is: &NodeSubnetStatus,
    wanted: &NodeSubnetStatus,
    wants: &BTreeMap<String, Want>,
    snapshot: &Snapshot,
) -> Vec<(String, Want)> {
    let (pools, blocks) = told(is, wanted);
    let is_asked = |it: &PoolDemand| {
        let mut pools = pools.iter();
        pools.any(|told| told.pool == it.pool && told.demand >= it.demand)
    };
    // It counts a block by its size until it has the agent's word, and so may find it enough.
    let is_counted = |pool: &str| {
        let mut of_pool = snapshot
            .blocks
            .iter()
            .filter(|it| gives(it) && it.pool == pool);
        of_pool.all(|it| blocks.find(&it.cidr.to_string(), &it.uid).is_some())
    };
    let lacking = |it: &PoolDemand| {
        let want = wants.get(&it.pool).filter(|want| want.is_lacking())?;
        let is_known = is_asked(it) && is_counted(&it.pool);
        (!is_known).then(|| (it.pool.clone(), *want))
    };
    wanted.pools.iter().filter_map(lacking).collect()
}

/// Whether the controller has to act on a block of which it does not know yet what became of it.
fn is_news(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus, snapshot: &Snapshot) -> bool {
    let (_, blocks) = told(is, wanted);
    let let_go = wanted.blocks.iter().any(|block| {
        let told = blocks.find(&block.cidr, &block.uid);
        block.released && told.is_none_or(|told| !told.released)
    });
    // It may give such a block to another node, until it hears of it.
    let is_unknown = snapshot.blocks.iter().any(|it| {
        it.state == BlockState::Withdrawn
            && busy(it) > 0
            && blocks.find(&it.cidr.to_string(), &it.uid).is_none()
    });
    let_go || is_unknown
}

#[cfg(test)]
mod tests;
