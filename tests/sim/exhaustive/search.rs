//! Visits every state that can be reached.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cadastre_core::mutation::Mutation;

use super::super::checks::Violation;
use super::cluster::{Cluster, Path, Scenario};

/// How many transitions may follow a state, if nothing fails, until everything is at rest.
const PATIENCE: u32 = 3_000;

/// The visited states are spread over so many maps, so that threads seldom wait for each other.
const SHARDS: usize = 64;

/// Limits of a search.
#[derive(Clone, Copy)]
pub struct Limits {
    /// The maximum number of faults on the way to a state
    pub faults: u8,
    pub states: u64,
    pub time: Duration,
}

/// What a search has found.
#[derive(Debug)]
pub struct Report {
    pub states: u64,
    pub transitions: u64,
    /// Whether every state was visited
    pub is_complete: bool,
    pub elapsed: Duration,
    pub failure: Option<String>,
}

struct Search {
    /// The walk that visited a state first, by the fingerprint of the state
    visited: Vec<Mutex<HashMap<u64, u32>>>,
    open: Mutex<Vec<Cluster>>,
    /// How many threads have a state to go on with
    busy: AtomicUsize,
    walks: AtomicU64,
    states: AtomicU64,
    transitions: AtomicU64,
    failure: Mutex<Option<String>>,
    limits: Limits,
    begun: Instant,
}

/// Explores a scenario with all processors. The mutation is on in the whole exploration.
pub fn explore(scenario: &'static Scenario, mutation: Option<Mutation>, limits: Limits) -> Report {
    set(mutation);
    let first = match Cluster::new(scenario, limits.faults) {
        Ok(first) => first,
        Err(violation) => panic!("{violation:?}"),
    };
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let search = Search {
        visited: (0..SHARDS).map(|_| Mutex::default()).collect(),
        open: Mutex::new(vec![first]),
        busy: AtomicUsize::new(threads),
        walks: AtomicU64::new(0),
        states: AtomicU64::new(0),
        transitions: AtomicU64::new(0),
        failure: Mutex::new(None),
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
            let has_failed = !self.walk(state, &mut own);
            if has_failed || self.is_over() {
                self.open.lock().unwrap().append(&mut own);
                return;
            }
            // Others get the oldest states, because the most states follow these.
            let mut open = self.open.lock().unwrap();
            if open.is_empty() && own.len() > 1 {
                open.extend(own.drain(..own.len() / 2));
            }
        }
    }

    /// Returns a state that another thread has left, or `None` once no thread has any.
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

    /// Follows a state without a fault until everything is at rest, or until a state that was visited already. Adds the
    /// other states that can follow to `open`.
    fn walk(&self, mut state: Cluster, open: &mut Vec<Cluster>) -> bool {
        let walk = u32::try_from(self.walks.fetch_add(1, Ordering::Relaxed) + 1).unwrap();
        for _ in 0..PATIENCE {
            let fingerprint = state.fingerprint();
            match self.visit(fingerprint, walk) {
                Some(other) if other == walk => {
                    return self.fail(&state, "progress", "the same state comes again");
                }
                Some(_) => return true,
                None => {}
            }
            self.states.fetch_add(1, Ordering::Relaxed);
            let fair = match state.fair() {
                Ok(fair) => fair,
                Err(it) => return self.violated(&state, &it),
            };
            for transition in state.others(fair) {
                let mut next = state.clone();
                self.transitions.fetch_add(1, Ordering::Relaxed);
                match next.take(transition) {
                    Ok(()) => open.push(next),
                    Err(it) => return self.violated(&next, &it),
                }
            }
            let Some(fair) = fair else { return true };
            self.transitions.fetch_add(1, Ordering::Relaxed);
            if let Err(it) = state.take(fair) {
                return self.violated(&state, &it);
            }
        }
        self.fail(
            &state,
            "progress",
            "all faults are over, and still not all is done",
        )
    }

    /// Records a visit. Returns the walk that has visited the state before.
    fn visit(&self, fingerprint: u64, walk: u32) -> Option<u32> {
        let shard = &self.visited[usize::try_from(fingerprint % SHARDS as u64).unwrap()];
        let mut visited = shard.lock().unwrap();
        let before = visited.get(&fingerprint).copied();
        visited.entry(fingerprint).or_insert(walk);
        before
    }

    fn violated(&self, state: &Cluster, violation: &Violation) -> bool {
        self.fail(state, violation.rule, &violation.text)
    }

    fn fail(&self, state: &Cluster, rule: &str, text: &str) -> bool {
        let mut lines = Vec::new();
        let mut path = state.path.as_deref();
        while let Some(Path { text, before }) = path {
            lines.push(text.clone());
            path = before.as_deref();
        }
        lines.reverse();
        let steps = lines.join("\n");
        let text = format!("rule \"{rule}\" is broken: {text}\n{steps}");
        self.failure.lock().unwrap().get_or_insert(text);
        false
    }
}
