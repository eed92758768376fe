//! Remembers how controller processes have reacted to what they received.
//!
//! What a process does next depends only on its own state, on what it receives, and on the time. In many states of the
//! cluster a process is in the same state, so most reactions are known already, and a look-up costs much less than the
//! reaction and the hash of the process's new state.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadastre_controller::cluster::request::ApiRequest;
use cadastre_controller::{Now, OutgoingRequest};

use super::super::checks::Violation;
use super::super::run::RunId;
use super::candidate::{Candidate, Input};
use super::wire::{InTransit, Message, hash_of};

/// The number of maps over which the reactions are spread, so that threads seldom wait for each other.
const SHARDS: u64 = 64;

/// The maximum number of reactions in a map. A map that is full is emptied.
const MOST: usize = 250;

/// A run of a process, with the hash of its state. States of the cluster share it.
#[derive(Clone, Debug)]
pub struct Run {
    pub candidate: Arc<Candidate>,
    pub hash: u64,
}

impl Run {
    pub fn new(candidate: Candidate) -> Self {
        Run {
            hash: hash_of(|text| write!(text, "{candidate:?}")),
            candidate: Arc::new(candidate),
        }
    }
}

/// What a process does when it receives something.
pub struct Reaction {
    /// The run afterwards
    pub run: Run,
    pub sent: Vec<InTransit>,
    /// Writes of statuses. No decision depends on these statuses, so their order is not explored
    pub statuses: Vec<OutgoingRequest>,
}

/// The hash of the run, the hash of what it receives, and the reading of the clock of all processes.
type Key = (u64, u64, Duration);

pub struct Reactions {
    shards: Vec<Mutex<HashMap<Key, Arc<Reaction>>>>,
}

impl Default for Reactions {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Reactions { shards }
    }
}

impl Reactions {
    /// Returns what the run with this ID does when it receives `input`.
    pub fn of(
        &self,
        id: RunId,
        run: &Run,
        input: Input,
        now: Now,
    ) -> Result<Arc<Reaction>, Violation> {
        let key = (
            run.hash,
            hash_of(|text| write!(text, "{input:?}")),
            now.mono,
        );
        let shard = &self.shards[usize::try_from((key.0 ^ key.1) % SHARDS).unwrap()];
        if let Some(known) = shard.lock().unwrap().get(&key) {
            return Ok(Arc::clone(known));
        }
        let reaction = Arc::new(react(id, run, input, now)?);
        let mut known = shard.lock().unwrap();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(key, Arc::clone(&reaction));
        Ok(reaction)
    }
}

fn react(id: RunId, run: &Run, input: Input, now: Now) -> Result<Reaction, Violation> {
    let mut candidate = Candidate::clone(&run.candidate);
    let sent = candidate.receive(input, now)?;
    let (statuses, requests) = sent
        .requests
        .into_iter()
        .partition::<Vec<_>, _>(|it| is_of_status(&it.request));
    let requests = requests.into_iter().map(|it| Message::Request(id, it));
    let lease = sent.lease.map(|call| Message::LeaseCall(id, call));
    Ok(Reaction {
        run: Run::new(candidate),
        sent: requests.chain(lease).map(InTransit::new).collect(),
        statuses,
    })
}

fn is_of_status(request: &ApiRequest) -> bool {
    matches!(
        request,
        ApiRequest::SetPoolStatus(..) | ApiRequest::SetExhausted(_)
    )
}
