//! Handles the requests of the CNI plugin and of gRPC clients. The service chooses pools, runs operations on the store,
//! and makes an ADD wait for a block if no address is free. If a pool requires probes, the service probes an address
//! before the address is assigned.
//!
//! # Guarantees
//! - No operation sends a request to the API server. Operations use only what the main loop has read from the API
//!   server.
//! - A wait ends when the deadline of the request is near, when the maximum wait for a block is over, or when the
//!   attachment is deleted.

pub mod adding;

use std::iter;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, broadcast, watch};
use tracing::debug;

use super::events::Events;
use super::ledger::{LedgerClient, busy};
use super::netns;
use super::probe::{self, Prober};
use super::shared::{ServiceState, SharedState, WatchState};
use crate::metrics::{AgentMetrics, Counted};
use adding::AddStep;
use cadastre_daemon::watch::LastHeard;
use cadastre_node::store_thread::CallTimes;
use cadastre_node::{Add, Attachment, Op, OpError, OpErrorKind, OpOutcome, ProbeTargets, clock};

/// A watched kind. An ADD may know a pod before the watch does.
pub const PODS: &str = "pods";
/// A watched kind. The answer to a write contains a version that the watch must deliver, too.
pub const SUBNETS: &str = "nodesubnets";

/// Handles the requests of the CNI plugin and of gRPC clients.
pub struct Service {
    /// Runs operations on the store
    pub ledger: LedgerClient,
    /// The state that the main loop and the servers share
    pub shared: SharedState,
    /// The maximum time that an ADD waits for a block
    pub add_wait: Duration,
    /// Probes addresses before their use
    pub prober: Prober,
    /// Counts requests and waiting ADDs
    pub metrics: AgentMetrics,
    /// Emits events about wrong annotations
    pub events: Events,
    /// Learns of pods that the watch should have delivered
    pub heard: LastHeard,
    /// Wakes the main loop when the store may have changed, or when an ADD has begun to wait
    pub changed: Notify,
    /// Incremented each time the node's ranges have been written to the store. Each increment wakes the waiting ADDs
    pub held: watch::Sender<u64>,
    /// Announces deleted attachments, so that an ADD ends if it waits for an address of a deleted attachment
    pub deleted: broadcast::Sender<Attachment>,
}

impl Service {
    /// Performs an operation. If the caller has gone away before the operation begins, the operation is skipped.
    pub async fn serve(&self, op: Op, call: CallTimes) -> Result<OpOutcome, OpError> {
        let begun = Instant::now();
        let (verb, changes) = match &op {
            Op::Add(_) => ("ADD", true),
            Op::Del(_) => ("DEL", true),
            Op::Gc(_) => ("GC", true),
            Op::Check(_) => ("CHECK", false),
            Op::Status => ("STATUS", false),
        };
        let result = match op {
            Op::Add(add) => self.add(add, &call).await,
            Op::Del(attachment) => {
                self.shared.lock().pending_adds.remove(&attachment);
                let result = self.ledger.ask(Op::Del(attachment.clone()), call).await;
                // `send` fails only if no ADD waits, so the error is ignored.
                let _ = self.deleted.send(attachment);
                result
            }
            Op::Status => self.status(call).await,
            other => self.ledger.ask(other, call).await,
        };
        let label = match &result {
            Ok(_) => "done",
            Err(refusal) => label(refusal.why),
        };
        if let Err(refusal) = &result {
            debug!(verb, why = label, "{}", refusal.text);
        }
        self.metrics.answered(verb, label, begun.elapsed());
        if is_news(changes, &result) {
            self.changed.notify_one();
        }
        result
    }

    /// Returns the answer to STATUS. A node without ranges is reported as ready if it may request a block, because the
    /// node requests a block only when a pod comes. No pod would come to a node that is not ready. A node whose store
    /// waits for addresses on second networks is reported as ready, too, because all pods of a node that is not ready
    /// for so long are evicted.
    async fn status(&self, call: CallTimes) -> Result<OpOutcome, OpError> {
        let answer = self.ledger.ask(Op::Status, call).await;
        let watches = self.shared.follow();
        let watched = watches.borrow();
        match &answer {
            Err(refusal) if is_ready_all_the_same(refusal.why, &watched) => Ok(OpOutcome::Done),
            _ => answer,
        }
    }

    async fn add(&self, mut add: Add, call: &CallTimes) -> Result<OpOutcome, OpError> {
        netns::note_roots(iter::once(&*add.netns), &mut self.shared.lock().netns_roots);
        if add.limits.is_some() {
            add = self.with_pool_of_network(add).await?;
        }
        let attachment = add.attachment.clone();
        let mut watches = self.shared.follow();
        let (mut ranges, mut deleted) = (self.held.subscribe(), self.deleted.subscribe());
        let deadline = call.deadline();
        let watched = Arc::clone(&watches.borrow_and_update());
        let mut step = self
            .step(|state, now| adding::begin(add, deadline, self.add_wait, &watched, state, now));
        let mut waiting = None;
        loop {
            match step {
                AddStep::Done(result) => return result,
                AddStep::Ask(add, asked) => {
                    let answer = self.ledger.ask(Op::Add(*add), call.clone()).await;
                    let watched = Arc::clone(&watches.borrow_and_update());
                    step = self.step(|state, now| asked.answered(answer, &watched, state, now));
                }
                AddStep::Probe(add, probing) => {
                    let probed = self.probe_for(*add).await;
                    step = self.step(|_, _| probing.probed(probed));
                }
                AddStep::ForPod(pod) => {
                    self.heard.miss(PODS);
                    comes(watches.changed(), pod.until()).await;
                    let watched = Arc::clone(&watches.borrow_and_update());
                    step = self.step(|state, now| pod.go(&watched, state, now));
                }
                AddStep::ForBlock(block) => {
                    waiting.get_or_insert_with(|| Counted::new(&self.metrics.waiting));
                    let news = news(&mut ranges, &mut deleted, &attachment);
                    let is_news = comes(news, block.until()).await;
                    step = self.step(|state, now| block.go(is_news, state, now));
                }
            }
        }
    }

    /// Returns the ADD with the name of the pool that serves its network, because the agent asks for blocks by the name
    /// of the pool.
    async fn with_pool_of_network(&self, mut add: Add) -> Result<Add, OpError> {
        let asked = add.clone();
        let found = self.ledger.with(move |it| it.pool_of_network(&asked)).await;
        add.pools
            .extend(found.map_err(|error| busy(error.to_string()))??);
        Ok(add)
    }

    /// Probes the addresses that an ADD needs, and records the answers. If another round of probes ends while this ADD
    /// waits for its turn, no address is probed. The other round may have probed enough addresses for this ADD, so the
    /// store is asked again instead.
    async fn probe_for(&self, add: Add) -> Result<(), String> {
        let before = self.prober.rounds();
        let turn = self.prober.turn().await;
        if self.prober.rounds() != before {
            return Ok(());
        }
        let targets = self.ledger.with(move |it| it.to_probe(&add)).await;
        let targets = targets.map_err(|error| error.to_string())?;
        if targets.addresses.is_empty() {
            return Ok(());
        }
        let probed = self.probe(&targets).await;
        drop(turn);
        self.changed.notify_one();
        probed
    }

    /// Probes addresses before a pod needs them, and records the answers.
    pub(crate) async fn probe_ahead(&self, targets: &ProbeTargets) -> Result<(), String> {
        let _turn = self.prober.turn().await;
        self.probe(targets).await
    }

    async fn probe(&self, targets: &ProbeTargets) -> Result<(), String> {
        let probed = probe::probe(targets).await;
        self.metrics.probed(targets.addresses.len(), &probed);
        let round = probed?;
        let recorded = self.ledger.with(move |it| it.record_probes(&round)).await;
        self.prober.ended();
        recorded.map_err(|error| error.to_string())
    }

    /// Runs a step of an ADD. Then emits the events of the step, and wakes the main loop if the step has changed the
    /// shared state.
    fn step(&self, step: impl FnOnce(&mut ServiceState, Duration) -> AddStep) -> AddStep {
        let mut state = self.shared.lock();
        let step = step(&mut state, clock::since_boot());
        let notices = mem::take(&mut state.notices);
        let is_changed = mem::take(&mut state.is_changed);
        drop(state);
        for notice in notices {
            self.events.emit(notice);
        }
        if is_changed {
            self.changed.notify_one();
        }
        step
    }
}

/// Whether the main loop should read the store after an operation with this result. `changes` says whether an operation
/// of this kind can change the store.
pub fn is_news(changes: bool, result: &Result<OpOutcome, OpError>) -> bool {
    match result {
        Ok(_) => changes,
        Err(refusal) => matches!(refusal.why, OpErrorKind::Store | OpErrorKind::Busy),
    }
}

/// Whether STATUS succeeds although the store answers with this kind of error. See [`Service::status`] for the reasons.
fn is_ready_all_the_same(why: OpErrorKind, watched: &WatchState) -> bool {
    match why {
        OpErrorKind::NoBlock => watched.may_ask(),
        OpErrorKind::Busy => watched.waits_for_second_networks,
        _ => false,
    }
}

/// Waits for `news`, but not beyond `until` (a time since boot). Returns whether `news` came in time.
async fn comes<T>(news: impl Future<Output = T>, until: Duration) -> bool {
    let left = until.saturating_sub(clock::since_boot());
    tokio::time::timeout(left, news).await.is_ok()
}

/// Waits until a waiting ADD should be tried again, because the node's ranges were written or the attachment was
/// deleted.
async fn news(
    ranges: &mut watch::Receiver<u64>,
    deleted: &mut broadcast::Receiver<Attachment>,
    attachment: &Attachment,
) {
    loop {
        tokio::select! {
            Ok(()) = ranges.changed() => return,
            deleted = deleted.recv() => match deleted {
                Ok(other) if other != *attachment => {}
                _ => return,
            },
        }
    }
}

/// Returns the label of a kind of error, for metrics and for gRPC clients.
pub fn label(why: OpErrorKind) -> &'static str {
    match why {
        OpErrorKind::Exhausted => "exhausted",
        OpErrorKind::NoBlock => "nothingHeld",
        OpErrorKind::UnknownPool => "unknownPool",
        OpErrorKind::NotInBlocks => "notHeld",
        OpErrorKind::Unprobed => "unprobed",
        OpErrorKind::NotFree => "taken",
        OpErrorKind::NotUsable => "notUsable",
        OpErrorKind::PodUnknown => "podUnknown",
        OpErrorKind::Mismatch => "mismatch",
        OpErrorKind::Busy => "busy",
        OpErrorKind::Store => "store",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_stays_ready_while_its_lost_store_waits_for_second_networks() {
        let mut watched = WatchState::default();
        assert!(!is_ready_all_the_same(OpErrorKind::Busy, &watched));
        watched.waits_for_second_networks = true;
        assert!(is_ready_all_the_same(OpErrorKind::Busy, &watched));
        assert!(!is_ready_all_the_same(OpErrorKind::Store, &watched));
    }
}
