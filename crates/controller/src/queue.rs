//! A work queue with three properties. A key that is added several times is processed once. Keys may be delayed. Each
//! failure of a key in a row doubles the key's delay.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Add;
use std::time::Duration;

/// Delay of a key after its first failure, and the longest delay after several failures in a row.
const FIRST: Duration = Duration::from_millis(100);
pub(crate) const LONGEST: Duration = Duration::from_secs(10);

/// A queue of keys. A key can be ready, delayed, or both.
#[derive(Clone, Debug)]
pub struct Queue<K> {
    ready: VecDeque<K>,
    members: BTreeSet<K>,
    later: BTreeSet<(Duration, K)>,
    /// The time of each key in `later`, which contains each key at most once.
    times: BTreeMap<K, Duration>,
    failures: BTreeMap<K, u32>,
    added: u64,
}

/// How many keys a queue contains, and when the first delayed key becomes ready. Metrics show these numbers, and the
/// leader derives from `next_at` when it must run again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Keys that are ready to be processed
    pub ready: usize,
    /// Keys that are delayed
    pub later: usize,
    /// How many times any key has become ready since the queue was created
    pub added: u64,
    /// Monotonic time at which the first delayed key becomes ready; `None` if none is delayed
    pub next_at: Option<Duration>,
}

impl Load {
    /// Returns the load with the earlier of `next_at` and `at`. The caller has work at the time `at` that is not in the
    /// queue.
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

/// Returns the delay after `failures` earlier failures in a row. It is 0.1 s at first, doubles with each failure, and
/// is at most `longest`.
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
    /// Makes the key ready, unless it is ready already. It is processed after all keys that are ready now.
    pub fn add(&mut self, key: K) {
        if self.members.insert(key.clone()) {
            self.added += 1;
            self.ready.push_back(key);
        }
    }

    /// Makes the key ready at the monotonic time `at`. If the key is delayed already, the earlier of the two times
    /// applies.
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

    /// Makes the key ready after a delay that doubles with each failure in a row, from 0.1 s to 10 s. Returns the
    /// number of failures in a row.
    pub(crate) fn add_failed(&mut self, key: K, now: Duration) -> u32 {
        let failures = self.failures.entry(key.clone()).or_default();
        let pause = backoff(*failures, LONGEST);
        *failures += 1;
        let failures = *failures;
        self.add_at(key, now + pause);
        failures
    }

    /// Returns how many times the key has failed in a row.
    pub fn failures(&self, key: &K) -> u32 {
        self.failures.get(key).copied().unwrap_or(0)
    }

    /// Removes and returns the first ready key. Keys whose delay is over become ready first.
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

    /// Removes and returns all ready keys, in order. Delayed keys stay, even if their delay is over.
    pub(crate) fn take_ready(&mut self) -> Vec<K> {
        self.members.clear();
        std::mem::take(&mut self.ready).into()
    }

    /// Returns the monotonic time at which the first delayed key becomes ready, or `None` if none is delayed.
    pub fn next_at(&self) -> Option<Duration> {
        self.later.first().map(|(at, _)| *at)
    }

    /// Returns how many keys the queue contains, and when the first delayed key becomes ready.
    pub fn load(&self) -> Load {
        Load {
            ready: self.ready.len(),
            later: self.later.len(),
            added: self.added,
            next_at: self.next_at(),
        }
    }

    /// Returns whether [`Queue::pop`] would return a key now.
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
    fn a_key_is_ready_at_most_once() {
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
