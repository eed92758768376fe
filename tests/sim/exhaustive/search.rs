//! Visits every state that can be reached.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cadastre_core::mutation::Mutation;

use super::super::checks::{Verdict, Violation};
use super::cluster::{Cluster, PATIENCE, Scenario, never_at_rest};

/// The number of maps over which visited states are spread, so that threads seldom wait for each other.
const SHARDS: usize = 64;

/// Limits of a search, which ends early if it exceeds `states` or `time`.
#[derive(Clone, Copy)]
pub struct Limits {
    /// The maximum number of faults on the way to a state
    pub faults: u8,
    pub states: u64,
    pub time: Duration,
}

/// The result of a search: its extent, and the first violation of a rule.
#[derive(Debug)]
pub struct Report {
    pub states: u64,
    pub transitions: u64,
    /// Whether every state was visited, with no violation and within the limits
    pub is_complete: bool,
    pub elapsed: Duration,
    pub failure: Option<String>,
}

struct Search {
    /// For each visited state (by fingerprint), the number of the walk that visited the state first
    visited: Vec<Mutex<HashMap<u64, u32>>>,
    open: Mutex<Vec<Cluster>>,
    /// The number of threads that have states to explore
    busy: AtomicUsize,
    walks: AtomicU64,
    states: AtomicU64,
    transitions: AtomicU64,
    failure: Mutex<Option<String>>,
    limits: Limits,
    begun: Instant,
}

/// Explores a scenario with one thread for each processor. The mutation, if any, is on in all threads.
pub fn explore(scenario: &'static Scenario, mutation: Option<Mutation>, limits: Limits) -> Report {
    set(mutation);
    let first = Cluster::new(scenario, limits.faults);
    let failure = first.as_ref().err().map(described);
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let search = Search {
        visited: (0..SHARDS).map(|_| Mutex::default()).collect(),
        open: Mutex::new(first.into_iter().collect()),
        busy: AtomicUsize::new(threads),
        walks: AtomicU64::new(0),
        states: AtomicU64::new(0),
        transitions: AtomicU64::new(0),
        failure: Mutex::new(failure),
        limits,
        begun: Instant::now(),
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                set(mutation);
                search.run();
            });
        }
    });
    set(None);
    Report {
        states: search.states.load(Ordering::Relaxed),
        transitions: search.transitions.load(Ordering::Relaxed),
        is_complete: search.open.lock().unwrap().is_empty()
            && search.failure.lock().unwrap().is_none(),
        elapsed: search.begun.elapsed(),
        failure: search.failure.into_inner().unwrap(),
    }
}

#[cfg(debug_assertions)]
fn set(mutation: Option<Mutation>) {
    cadastre_core::mutation::set(mutation);
}

#[cfg(not(debug_assertions))]
fn set(mutation: Option<Mutation>) {
    assert!(mutation.is_none(), "optimised builds have no mutations");
}

impl Search {
    fn run(&self) {
        let mut own: Vec<Cluster> = Vec::new();
        while let Some(state) = own.pop().or_else(|| self.take_over()) {
            self.walk_on(state, &mut own);
            if self.is_over() {
                self.open.lock().unwrap().append(&mut own);
                return;
            }
            // Other threads get the oldest states, from which the exploration reaches the most new states.
            let mut open = self.open.lock().unwrap();
            if open.is_empty() && own.len() > 1 {
                open.extend(own.drain(..own.len() / 2));
            }
        }
    }

    /// Waits for a state in `open` and takes it. Returns `None` once no thread has a state, or if the search is over.
    fn take_over(&self) -> Option<Cluster> {
        self.busy.fetch_sub(1, Ordering::SeqCst);
        while !self.is_over() {
            let mut open = self.open.lock().unwrap();
            if let Some(state) = open.pop() {
                self.busy.fetch_add(1, Ordering::SeqCst);
                return Some(state);
            }
            drop(open);
            if self.busy.load(Ordering::SeqCst) == 0 {
                return None;
            }
            std::thread::yield_now();
        }
        None
    }

    fn is_over(&self) -> bool {
        self.failure.lock().unwrap().is_some()
            || self.states.load(Ordering::Relaxed) >= self.limits.states
            || self.begun.elapsed() >= self.limits.time
    }

    /// Calls [`Search::walk`] and records a violation. Also records a panic, because otherwise the other threads would
    /// wait for this thread forever.
    fn walk_on(&self, mut state: Cluster, open: &mut Vec<Cluster>) {
        let walk = || self.walk(&mut state, open);
        let failure = match catch_unwind(AssertUnwindSafe(walk)) {
            Ok(Ok(())) => return,
            Ok(Err(violation)) => described(&violation),
            Err(_) => {
                "a panic, in one of the transitions that are possible after these:".to_owned()
            }
        };
        let mut lines = Vec::new();
        let mut path = state.path.as_deref();
        while let Some(last) = path {
            lines.push(last.text());
            path = last.before.as_deref();
        }
        lines.push(failure);
        lines.reverse();
        let mut first = self.failure.lock().unwrap();
        first.get_or_insert(lines.join("\n"));
    }

    /// Follows a state without new faults until the cluster is at rest or in a visited state. Adds the other states
    /// that can follow to `open`. If a rule is violated, `state` becomes the state in which the rule is violated.
    fn walk(&self, state: &mut Cluster, open: &mut Vec<Cluster>) -> Verdict {
        let walk = u32::try_from(self.walks.fetch_add(1, Ordering::Relaxed) + 1).unwrap();
        for _ in 0..PATIENCE {
            let fingerprint = state.fingerprint();
            match self.visit(fingerprint, walk) {
                Some(other) if other == walk => return never_at_rest(),
                Some(_) => return Ok(()),
                None => {}
            }
            self.states.fetch_add(1, Ordering::Relaxed);
            let fair = state.fair()?;
            for transition in state.others(fair) {
                let mut next = state.clone();
                self.transitions.fetch_add(1, Ordering::Relaxed);
                let verdict = next.take(transition);
                if verdict.is_err() {
                    *state = next;
                    return verdict;
                }
                open.push(next);
            }
            let Some(fair) = fair else { return Ok(()) };
            self.transitions.fetch_add(1, Ordering::Relaxed);
            state.take(fair)?;
        }
        never_at_rest()
    }

    /// Records a visit. Returns the walk that visited the state first, or `None` if the state is new.
    fn visit(&self, fingerprint: u64, walk: u32) -> Option<u32> {
        let shard = &self.visited[usize::try_from(fingerprint % SHARDS as u64).unwrap()];
        let mut visited = shard.lock().unwrap();
        let before = visited.get(&fingerprint).copied();
        visited.entry(fingerprint).or_insert(walk);
        before
    }
}

fn described(Violation { rule, text, .. }: &Violation) -> String {
    format!("rule \"{rule}\" is broken: {text}")
}
