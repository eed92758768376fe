//! When NodeSubnet.status is written.
//!
//! | what changed | when |
//! |---|---|
//! | more is wanted than there is, a block was let go, or one that is in use is neither listed nor told | at once; if that comes again and again, ever less often, down to once in 8 s |
//! | anything else | once in the interval, with jitter; every write tells all |
//! | nothing | never |
//!
//! # Guarantees
//! - One write at a time, onto the version of the NodeSubnet that it was decided by: whatever the
//!   controller has written meanwhile is taken in first.
//! - Growth that what is held still covers is no reason to write: pods that start one by one cost a
//!   write a block, not one each.
//! - What is stored only in part, because the CRD is older than the agent, is not written again before
//!   something changes.
//! - Errors are followed by growing pauses, and many agents do not come back at one moment.

use std::collections::BTreeMap;
use std::time::Duration;

use super::demand::Want;
use super::snapshot::{busy, gives};
use crate::api::NodeSubnetStatus;
use crate::node::{BlockState, Snapshot};

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
    random: u64,
    seen: Option<Seen>,
    /// What is seen next is of a list, which is right whatever was seen before
    relisted: bool,
    in_flight: bool,
    /// What can wait waits until then
    next_at: Duration,
    urgent_at: Duration,
    urgent_pause: Duration,
    last_urgent: Option<Duration>,
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
            random: seed | 1,
            seen: None,
            relisted: false,
            in_flight: false,
            next_at: now,
            urgent_at: now,
            urgent_pause: URGENT_PAUSE.0,
            last_urgent: None,
            retry_at: now,
            failures: 0,
            behind_since: None,
            cut: None,
            outdated: None,
        };
        // Agents that are started together need not all write at once.
        new.next_at = now + new.part(interval / 4);
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
        self.in_flight
    }

    /// What to do, if the status should be `status`.
    pub fn next(
        &mut self,
        status: &NodeSubnetStatus,
        wants: &BTreeMap<String, Want>,
        snapshot: &Snapshot,
        now: Duration,
    ) -> Next {
        let Some(seen) = self.seen.as_ref().filter(|_| !self.in_flight) else {
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
        let urgent = cannot_wait(&seen.status, status, wants, snapshot);
        let mut at = self.retry_at;
        at = at.max(if urgent { self.urgent_at } else { self.next_at });
        if let Some((_, until)) = &self.outdated {
            at = at.max(*until);
        }
        if at > now {
            return Next::At(at);
        }
        let version = seen.version.clone();
        self.in_flight = true;
        if urgent {
            self.pace(now);
        }
        Next::Write { version, urgent }
    }

    /// Takes in what came of the write.
    pub fn written(&mut self, written: Written, now: Duration) {
        self.in_flight = false;
        match written {
            Written::Done {
                version,
                status,
                cut,
            } => {
                self.cut = cut.map(|told| (version.clone(), told));
                self.failures = 0;
                self.behind_since = None;
                self.next_at = now + self.interval + self.part(self.interval / 5);
                self.seen(&version, *status);
            }
            Written::Outdated => {
                let version = self.seen.as_ref().map(|seen| seen.version.clone());
                self.outdated = version.map(|it| (it, now + CONFLICT_PAUSE));
                // No write was made: what cannot wait need not wait for the next turn.
                self.urgent_at = now;
            }
            Written::Failed => {
                let pause = ERROR_PAUSE.0 * 2u32.saturating_pow(self.failures.min(16));
                let pause = pause.min(ERROR_PAUSE.1);
                self.failures += 1;
                self.retry_at = now + pause / 2 + self.part(pause);
            }
        }
    }

    /// What cannot wait comes at once, but not in a row.
    fn pace(&mut self, now: Duration) {
        let quiet = self
            .last_urgent
            .is_none_or(|last| now.saturating_sub(last) > 4 * self.urgent_pause);
        self.urgent_pause = if quiet {
            URGENT_PAUSE.0
        } else {
            (2 * self.urgent_pause).min(URGENT_PAUSE.1)
        };
        self.last_urgent = Some(now);
        self.urgent_at = now + self.urgent_pause;
    }

    /// A random part of a time.
    fn part(&mut self, of: Duration) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let thousandths = u32::try_from(self.random % 1000).unwrap_or(0);
        of * thousandths / 1000
    }
}

/// Versions are numbers that grow, where they are numbers at all.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u128>(), than.parse::<u128>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

/// Whether both say the same; conditions are the controller's.
pub fn is_same(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus) -> bool {
    let without = NodeSubnetStatus {
        conditions: is.conditions.clone(),
        ..wanted.clone()
    };
    *is == without
}

/// Whether the controller has to act on what it does not know yet.
fn cannot_wait(
    is: &NodeSubnetStatus,
    wanted: &NodeSubnetStatus,
    wants: &BTreeMap<String, Want>,
    snapshot: &Snapshot,
) -> bool {
    let of_this_node = is.node_uid == wanted.node_uid;
    let told = |cidr: &str, uid: &str| {
        let mut blocks = is.blocks.iter().filter(|_| of_this_node);
        blocks.find(|it| it.cidr == cidr && it.uid == uid)
    };
    let let_go = wanted.blocks.iter().any(|block| {
        block.released && told(&block.cidr, &block.uid).is_none_or(|told| !told.released)
    });
    let is_asked = |pool: &str, demand: i64| {
        let mut pools = is.pools.iter().filter(|_| of_this_node);
        pools.any(|it| it.pool == pool && it.demand >= demand)
    };
    // It counts a block by its size until it has the agent's word, and so may find it enough.
    let is_counted = |pool: &str| {
        let mut blocks = snapshot.blocks.iter().filter(|it| gives(it));
        blocks
            .all(|block| block.pool != pool || told(&block.cidr.to_string(), &block.uid).is_some())
    };
    let is_lacking = wanted.pools.iter().any(|it| {
        wants.get(&it.pool).is_some_and(Want::is_lacking)
            && !(is_asked(&it.pool, it.demand) && is_counted(&it.pool))
    });
    // It may give such a block to another node, until it hears of it.
    let is_unknown = snapshot.blocks.iter().any(|it| {
        it.state == BlockState::Withdrawn
            && busy(it) > 0
            && told(&it.cidr.to_string(), &it.uid).is_none()
    });
    let_go || is_lacking || is_unknown
}

#[cfg(test)]
mod tests;
