//! A work queue: each key is in it at most once, keys may be delayed, and failures back off.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Add;
use std::time::Duration;

/// First and longest pause after a failure.
const FIRST: Duration = Duration::from_millis(100);
pub(crate) const LONGEST: Duration = Duration::from_secs(10);

/// Keys that wait for their turn.
#[derive(Debug)]
pub struct Queue<K> {
    ready: VecDeque<K>,
    members: BTreeSet<K>,
    later: BTreeSet<(Duration, K)>,
    /// Time of each key in `later`, where a key is at most once.
    times: BTreeMap<K, Duration>,
    failures: BTreeMap<K, u32>,
    added: u64,
}

/// Size of a queue, and how many keys it has ever passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Keys that are due
    pub ready: usize,
    /// Keys that become due later
    pub later: usize,
    /// How many keys have become due so far
    pub added: u64,
    /// Monotonic time at which the first of the later keys becomes due
    pub next_at: Option<Duration>,
}

impl Load {
    /// Adds a time at which the loop has work outside the queue.
    pub(crate) fn or_at(self, at: Option<Duration>) -> Self {
        let next_at = self.next_at.into_iter().chain(at).min();
        Load { next_at, ..self }
    }
}

impl Add for Load {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Load {
            ready: self.ready + other.ready,
            later: self.later + other.later,
            added: self.added + other.added,
            next_at: self.next_at,
        }
        .or_at(other.next_at)
    }
}

/// Returns the pause after that many failures in a row: it doubles with each, up to `longest`.
pub(crate) fn backoff(failures: u32, longest: Duration) -> Duration {
    FIRST.saturating_mul(1 << failures.min(10)).min(longest)
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Queue {
            ready: VecDeque::new(),
            members: BTreeSet::new(),
            later: BTreeSet::new(),
            times: BTreeMap::new(),
            failures: BTreeMap::new(),
            added: 0,
        }
    }
}

impl<K: Ord + Clone> Queue<K> {
    /// Appends the key, unless it is ready already.
    pub fn add(&mut self, key: K) {
        if self.members.insert(key.clone()) {
            self.added += 1;
            self.ready.push_back(key);
        }
    }

    /// Adds the key at that monotonic time. Of several times for one key the earliest counts.
    pub(crate) fn add_at(&mut self, key: K, at: Duration) {
        let known = self.times.get(&key).copied();
        if known.is_some_and(|known| known <= at) {
            return;
        }
        if let Some(known) = known {
            self.later.remove(&(known, key.clone()));
        }
        self.times.insert(key.clone(), at);
        self.later.insert((at, key));
    }

    /// Adds the key after a pause that doubles with each failure in a row, from 0.1 s to 10 s. Returns the number of
    /// failures in a row.
    pub(crate) fn add_failed(&mut self, key: K, now: Duration) -> u32 {
        let failures = self.failures.entry(key.clone()).or_default();
        let pause = backoff(*failures, LONGEST);
        *failures += 1;
        let failures = *failures;
        self.add_at(key, now + pause);
        failures
    }

    /// Returns the number of failures in a row of a key.
    pub fn failures(&self, key: &K) -> u32 {
        self.failures.get(key).copied().unwrap_or(0)
    }

    /// Removes and returns the first key that is due.
    pub fn pop(&mut self, now: Duration) -> Option<K> {
        while self.later.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, key)) = self.later.pop_first() {
                self.times.remove(&key);
                self.add(key);
            }
        }
        let key = self.ready.pop_front()?;
        self.members.remove(&key);
        Some(key)
    }

    /// Removes and returns all ready keys, in order.
    pub(crate) fn take_ready(&mut self) -> Vec<K> {
        self.members.clear();
        std::mem::take(&mut self.ready).into()
    }

    /// Returns when [`Queue::pop`] may return a key that is not due now.
    pub fn next_at(&self) -> Option<Duration> {
        self.later.first().map(|(at, _)| *at)
    }

    /// Returns the size of the queue, for metrics and wake-ups.
    pub fn load(&self) -> Load {
        Load {
            ready: self.ready.len(),
            later: self.later.len(),
            added: self.added,
            next_at: self.next_at(),
        }
    }

    /// Returns whether a key is due.
    pub(crate) fn has_ready(&self, now: Duration) -> bool {
        !self.ready.is_empty() || self.next_at().is_some_and(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_key_stands_in_the_queue_once() {
        let mut queue = Queue::default();
        queue.add("a");
        queue.add("b");
        queue.add("a");
        assert_eq!(
            (queue.pop(ms(0)), queue.pop(ms(0)), queue.pop(ms(0))),
            (Some("a"), Some("b"), None)
        );
    }

    #[test]
    fn failures_are_spaced_out() {
        let mut queue = Queue::default();
        for pause in [100, 200, 400] {
            queue.add_failed("a", ms(0));
            assert_eq!(queue.next_at(), Some(ms(pause)));
            assert_eq!(queue.pop(ms(pause - 1)), None);
            assert_eq!(queue.pop(ms(pause)), Some("a"));
        }
        for _ in 0..40 {
            queue.add_failed("a", ms(0));
            let last = queue.next_at();
            queue.pop(ms(10_000));
            assert!(last <= Some(ms(10_000)), "the pause is bounded");
        }
        queue.add_failed("a", ms(0));
        assert_eq!(queue.next_at(), Some(ms(10_000)));
    }

    #[test]
    fn a_key_waits_for_one_time_the_earliest() {
        let mut queue = Queue::default();
        for at in [500, 300, 400, 300, 900] {
            queue.add_at("a", ms(at));
        }
        assert_eq!((queue.load().later, queue.next_at()), (1, Some(ms(300))));
        assert_eq!(queue.pop(ms(300)), Some("a"));
        let once = Load {
            added: 1,
            ..Load::default()
        };
        assert_eq!((queue.pop(ms(9_000)), queue.load()), (None, once));
    }
}
