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

    /// There is no NodeSubnet to write to.
    pub fn lost(&mut self) {
        self.seen = None;
        self.behind_since = None;
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
        if is_same(&seen.status, status) {
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
            Written::Done { version, status } => {
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
fn is_same(is: &NodeSubnetStatus, wanted: &NodeSubnetStatus) -> bool {
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
mod tests {
    use super::*;
    use crate::agent::demand::{Wishes, wanted};
    use crate::agent::snapshot::testing::{block, pool, snapshot, tenant};
    use crate::agent::status::status;

    const INTERVAL: Duration = Duration::from_secs(30);

    /// A node whose state changes, and what the API has of it.
    struct Node {
        publisher: Publisher,
        snapshot: Snapshot,
        wishes: Wishes,
        version: u32,
        writes: Vec<(Duration, bool)>,
    }

    impl Node {
        fn new(used: u64) -> Self {
            let snapshot = snapshot(
                &[pool("a", (3, 50), true, false)],
                &[block("10.0.0.0/26", "a", used, 0, 61 - used)],
            );
            let mut publisher = Publisher::new(INTERVAL, 7, Duration::ZERO);
            publisher.seen("1", NodeSubnetStatus::default());
            Self {
                publisher,
                snapshot,
                wishes: Wishes::new(),
                version: 1,
                writes: Vec::new(),
            }
        }

        fn next(&mut self, now: Duration) -> Next {
            let wants = wanted(&self.snapshot, &self.wishes);
            let status = status(&self.snapshot, &wants, "boot");
            self.publisher.next(&status, &wants, &self.snapshot, now)
        }

        /// Writes if it is time to, successfully and at once.
        fn step(&mut self, now: Duration) -> Next {
            let next = self.next(now);
            if let Next::Write { version, urgent } = &next {
                assert_eq!(*version, self.version.to_string());
                self.version += 1;
                let wants = wanted(&self.snapshot, &self.wishes);
                let written = Written::Done {
                    version: self.version.to_string(),
                    status: Box::new(status(&self.snapshot, &wants, "boot")),
                };
                self.publisher.written(written, now);
                self.writes.push((now, *urgent));
            }
            next
        }

        fn run(&mut self, from: u64, to: u64, mut change: impl FnMut(&mut Snapshot, u64)) {
            for tenth in from * 10..to * 10 {
                change(&mut self.snapshot, tenth);
                self.step(Duration::from_millis(tenth * 100));
            }
        }
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn nothing_is_written_while_nothing_changes() {
        let mut node = Node::new(5);
        node.run(0, 600, |_, _| {});
        assert_eq!(node.writes.len(), 1, "{:?}", node.writes);
        assert!(node.writes[0].0 <= INTERVAL / 4 && !node.writes[0].1);
    }

    #[test]
    fn the_lag_lasts_from_a_change_until_it_is_told() {
        let mut node = Node::new(5);
        node.step(secs(10));
        assert_eq!(node.publisher.lag(secs(10)), Duration::ZERO);
        node.snapshot.blocks[0].counts.used = 6;
        node.next(secs(11));
        assert_eq!(node.publisher.lag(secs(15)), secs(4));
        let wrote = node.next(secs(60));
        assert!(matches!(wrote, Next::Write { .. }));
        node.publisher.written(Written::Failed, secs(61));
        node.next(secs(62));
        assert_eq!(
            node.publisher.lag(secs(62)),
            secs(51),
            "a failure tells nothing"
        );
        node.snapshot.blocks[0].counts.used = 5;
        node.next(secs(63));
        assert_eq!(
            node.publisher.lag(secs(63)),
            Duration::ZERO,
            "as told again"
        );
    }

    #[test]
    fn what_can_wait_is_told_once_in_the_interval_however_often_it_changes() {
        let mut node = Node::new(0);
        node.run(0, 3600, |it, tenth| {
            it.blocks[0].counts.used = tenth % 50;
            it.blocks[0].counts.free = 61 - tenth % 50;
        });
        let pauses = node
            .writes
            .windows(2)
            .map(|pair| pair[1].0.saturating_sub(pair[0].0));
        let pauses: Vec<Duration> = pauses.collect();
        assert!(pauses.iter().all(|it| *it >= INTERVAL), "{pauses:?}");
        assert!(
            pauses.iter().all(|it| *it <= INTERVAL * 5 / 4),
            "{pauses:?}"
        );
        let distinct: std::collections::BTreeSet<_> = pauses.iter().collect();
        assert!(distinct.len() > 10, "no jitter: {pauses:?}");
    }

    #[test]
    fn an_api_that_was_put_back_is_told_at_once_what_is_in_use() {
        let mut node = Node::new(5);
        node.step(secs(10));
        node.publisher.written(Written::Failed, secs(11));
        // As a watch that goes on might show: older than the answer to the write.
        node.publisher.seen("1", NodeSubnetStatus::default());
        assert_eq!(node.next(secs(12)), Next::Nothing);
        node.publisher.relisted();
        node.publisher.seen("1", NodeSubnetStatus::default());
        assert!(matches!(node.next(secs(12)), Next::At(at) if at >= secs(40)));
        node.snapshot.blocks[0].state = BlockState::Withdrawn;
        let wrote = node.next(secs(12));
        let version = "1".to_owned();
        let urgent = true;
        assert_eq!(wrote, Next::Write { version, urgent });
    }

    #[test]
    fn growth_that_is_covered_waits_and_the_need_of_a_block_does_not() {
        let mut node = Node::new(5);
        node.step(secs(10));
        node.snapshot.blocks[0].counts.used = 58;
        node.snapshot.blocks[0].counts.free = 3;
        assert!(matches!(node.step(secs(11)), Next::At(at) if at >= secs(40)));
        node.snapshot.blocks[0].counts.used = 59;
        node.snapshot.blocks[0].counts.free = 2;
        assert!(matches!(
            node.step(secs(12)),
            Next::Write { urgent: true, .. }
        ));
        // Asked, and nothing has come yet: nothing more to say in a hurry.
        assert!(matches!(node.step(secs(13)), Next::Nothing));
        // The block is there, but the controller counts it larger than it is.
        node.snapshot
            .blocks
            .push(block("10.0.0.64/30", "a", 0, 0, 1));
        node.wishes.insert("a".to_owned(), 4);
        assert!(matches!(
            node.step(secs(20)),
            Next::Write { urgent: true, .. }
        ));
    }

    #[test]
    fn ten_pods_a_second_cost_less_than_a_write_in_fifty() {
        let mut node = Node::new(0);
        let mut events = 0;
        // Blocks of 61 come at once when they are asked for.
        node.run(0, 60, |it, _| {
            events += 1;
            let last = it.blocks.len() - 1;
            it.blocks[last].counts.used += 1;
            it.blocks[last].counts.free -= 1;
            if it.blocks[last].counts.free == 2 {
                let n = it.blocks.len();
                let cidr = format!("10.0.{n}.0/26");
                it.blocks[last].counts.used += 2;
                it.blocks[last].counts.free = 0;
                it.blocks.push(block(&cidr, "a", 0, 0, 61));
            }
        });
        assert!(node.writes.len() * 50 <= events, "{:?}", node.writes);
    }

    #[test]
    fn a_need_that_grows_all_the_time_is_told_ever_less_often() {
        let mut node = Node::new(61);
        for tenth in 0..1200u64 {
            node.wishes.insert("a".to_owned(), tenth + 1);
            node.step(Duration::from_millis(tenth * 100));
        }
        assert_eq!(node.writes[0].0, Duration::ZERO);
        assert!(node.writes.len() < 25, "{}", node.writes.len());
    }

    #[test]
    fn what_is_let_go_is_told_at_once() {
        let mut node = Node::new(5);
        node.snapshot
            .blocks
            .push(block("10.0.0.64/26", "a", 0, 0, 61));
        node.step(secs(10));
        node.snapshot.blocks[1].state = BlockState::Released;
        assert!(matches!(
            node.step(secs(11)),
            Next::Write { urgent: true, .. }
        ));
        assert_eq!(node.step(secs(12)), Next::Nothing);
        // Told, then lost: somebody has restored an older status.
        node.publisher.seen("9", NodeSubnetStatus::default());
        node.version = 9;
        assert!(matches!(
            node.step(secs(13)),
            Next::Write { urgent: true, .. }
        ));
    }

    #[test]
    fn a_status_of_another_node_of_the_name_says_nothing() {
        let mut node = Node::new(60);
        node.step(Duration::ZERO);
        node.snapshot.node_uid = Some("second".to_owned());
        node.snapshot.tenants.push(tenant("c", "u", &["10.0.0.1"]));
        assert!(matches!(
            node.step(secs(1)),
            Next::Write { urgent: true, .. }
        ));
    }

    #[test]
    fn one_write_at_a_time_onto_what_was_seen_last() {
        let mut node = Node::new(60);
        let first = node.next(Duration::ZERO);
        assert!(matches!(&first, Next::Write { version, .. } if version == "1"));
        assert_eq!(node.next(secs(1)), Next::Nothing);
        node.publisher.written(Written::Outdated, secs(1));
        assert!(
            matches!(node.next(secs(1)), Next::At(_)),
            "the watch is behind"
        );
        node.publisher.seen("2", NodeSubnetStatus::default());
        let again = node.next(secs(1));
        assert!(matches!(&again, Next::Write { version, .. } if version == "2"));
        // The watch is behind the answer to the write.
        node.publisher.seen("1", NodeSubnetStatus::default());
        assert_eq!(node.next(secs(1)), Next::Nothing);
        node.publisher.lost();
        node.publisher.written(Written::Failed, secs(2));
        assert_eq!(node.next(secs(600)), Next::Nothing, "nowhere to write to");
    }

    #[test]
    fn errors_are_followed_by_growing_pauses() {
        let mut node = Node::new(60);
        let (mut now, mut pauses) = (Duration::ZERO, Vec::new());
        for _ in 0..12 {
            while let Next::At(at) = node.next(now) {
                pauses.push(at.saturating_sub(now));
                now = at;
            }
            node.publisher.written(Written::Failed, now);
        }
        assert!(pauses[0] < secs(2) && pauses[10] >= secs(60), "{pauses:?}");
        assert!(pauses.iter().all(|it| *it <= secs(180)), "{pauses:?}");
    }
}
