//! Handles the requests of the CNI plugin and of gRPC clients: chooses pools, runs operations on the store, and lets an
//! ADD wait for a block if no address is free.
//!
//! # Guarantees
//! - No request is sent to the API server: operations read only what the agent's watches have shown.
//! - Every wait ends when the first of these happens: the deadline of the request comes near, the configured wait for a
//!   block is over, or the attachment that the ADD waits for is deleted.

pub mod adding;

use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::IntGauge;
use tokio::sync::{Notify, broadcast, watch};
use tracing::debug;

use super::events::Events;
use super::ledger::LedgerClient;
use super::shared::{ServiceState, SharedState};
use crate::metrics::AgentMetrics;
use adding::AddStep;
use cadastre_node::store_thread::CallTimes;
use cadastre_node::{Add, Attachment, Op, OpError, OpErrorKind, OpOutcome, clock};

/// Handles the requests of the CNI plugin and of gRPC clients.
pub struct Service {
    /// Runs operations on the store
    pub ledger: LedgerClient,
    /// The state that the main loop and the servers share
    pub known: SharedState,
    /// The longest wait of an ADD for a block
    pub add_wait: Duration,
    /// Counts requests and waiting ADDs
    pub metrics: AgentMetrics,
    /// Emits events about wrong annotations
    pub events: Events,
    /// Wakes the loop when something in the store may have changed, or an ADD began to wait
    pub changed: Notify,
    /// Incremented each time the node's ranges have been written to the store; the change wakes waiting ADDs
    pub held: watch::Sender<u64>,
    /// Announces attachments that were deleted, so that ADDs which wait for addresses of them end
    pub deleted: broadcast::Sender<Attachment>,
}

impl Service {
    /// Performs an operation, unless its caller goes away before.
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
                self.known.lock().pending_adds.remove(&attachment);
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

    /// Returns the answer to STATUS. A node without ranges is reported as ready if it may request a block: it requests
    /// one only when a pod comes, and no pod comes to a node that is not ready.
    async fn status(&self, call: CallTimes) -> Result<OpOutcome, OpError> {
        match self.ledger.ask(Op::Status, call).await {
            Err(refusal) if refusal.why == OpErrorKind::NoBlock && self.known.shown().may_ask() => {
                Ok(OpOutcome::Done)
            }
            other => other,
        }
    }

    async fn add(&self, add: Add, call: &CallTimes) -> Result<OpOutcome, OpError> {
        if !add.netns.is_empty() {
            self.note_netns(Path::new(&add.netns));
        }
        let attachment = add.attachment.clone();
        let mut seen = self.known.follow();
        let mut news = AddNews {
            held: self.held.subscribe(),
            deleted: self.deleted.subscribe(),
        };
        let deadline = call.deadline();
        let shown = Arc::clone(&seen.borrow_and_update());
        let mut step =
            self.step(|desk, now| adding::begin(add, deadline, self.add_wait, &shown, desk, now));
        let mut waiting = None;
        loop {
            match step {
                AddStep::Done(result) => return result,
                AddStep::Ask(add, asked) => {
                    let answer = self.ledger.ask(Op::Add(*add), call.clone()).await;
                    let shown = Arc::clone(&seen.borrow_and_update());
                    step = self.step(|desk, now| asked.answered(answer, &shown, desk, now));
                }
                AddStep::ForPod(pod) => {
                    comes(seen.changed(), pod.until()).await;
                    let shown = Arc::clone(&seen.borrow_and_update());
                    step = self.step(|desk, now| pod.go(&shown, desk, now));
                }
                AddStep::ForBlock(block) => {
                    waiting.get_or_insert_with(|| Waiting::begin(&self.metrics));
                    let is_news = comes(news.wait(&attachment), block.until()).await;
                    step = self.step(|desk, now| block.go(is_news, desk, now));
                }
            }
        }
    }

    /// Runs a step of an ADD, then emits the events of the step and wakes the loop if the step asks for it.
    fn step(&self, step: impl FnOnce(&mut ServiceState, Duration) -> AddStep) -> AddStep {
        let mut desk = self.known.lock();
        let step = step(&mut desk, clock::since_boot());
        let notices = mem::take(&mut desk.notices);
        let is_changed = mem::take(&mut desk.is_changed);
        drop(desk);
        for notice in notices {
            self.events.emit(notice);
        }
        if is_changed {
            self.changed.notify_one();
        }
        step
    }

    /// Remembers the directory of a network namespace that exists. A missing path proves that a namespace is gone only
    /// if the agent has seen such paths in the same directory.
    fn note_netns(&self, path: &Path) {
        if let Some(root) = netns_root(path) {
            let mut known = self.known.lock();
            if !known.netns_roots.contains(root) && path.exists() {
                known.netns_roots.insert(root.to_owned());
            }
        }
    }
}

/// Whether the loop should read the store again after this result. `changes`: the operation may have changed the store.
pub fn is_news(changes: bool, result: &Result<OpOutcome, OpError>) -> bool {
    match result {
        Ok(_) => changes,
        Err(refusal) => matches!(refusal.why, OpErrorKind::Store | OpErrorKind::Busy),
    }
}

/// Waits for `news`, but not beyond `until` (a time since boot). Returns whether `news` came in time.
async fn comes<T>(news: impl Future<Output = T>, until: Duration) -> bool {
    let left = until.saturating_sub(clock::since_boot());
    tokio::time::timeout(left, news).await.is_ok()
}

/// Counts an ADD as waiting for a block until dropped.
struct Waiting(IntGauge);

impl Waiting {
    fn begin(metrics: &AgentMetrics) -> Self {
        let gauge = metrics.waiting().clone();
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The events that wake a waiting ADD.
struct AddNews {
    held: watch::Receiver<u64>,
    deleted: broadcast::Receiver<Attachment>,
}

impl AddNews {
    /// Returns when the ADD should be tried again, because an address may be free or the attachment was deleted.
    async fn wait(&mut self, attachment: &Attachment) {
        loop {
            tokio::select! {
                Ok(()) = self.held.changed() => return,
                deleted = self.deleted.recv() => match deleted {
                    Ok(other) if other != *attachment => {}
                    _ => return,
                },
            }
        }
    }
}

/// Returns the directory in which network namespaces such as `path` appear: its parent directory, or `/proc` for all
/// paths below `/proc`. `None` for a relative path.
pub(crate) fn netns_root(path: &Path) -> Option<&Path> {
    if !path.is_absolute() {
        return None;
    }
    if path.starts_with("/proc") {
        return Some(Path::new("/proc"));
    }
    path.parent()
}

/// Returns the label of a kind of error, for metrics and for gRPC clients.
pub fn label(why: OpErrorKind) -> &'static str {
    match why {
        OpErrorKind::Exhausted => "exhausted",
        OpErrorKind::NoBlock => "nothingHeld",
        OpErrorKind::UnknownPool => "unknownPool",
        OpErrorKind::NotInBlocks => "notHeld",
        OpErrorKind::NotFree => "taken",
        OpErrorKind::NotUsable => "notUsable",
        OpErrorKind::PodUnknown => "podUnknown",
        OpErrorKind::Mismatch => "mismatch",
        OpErrorKind::Busy => "busy",
        OpErrorKind::Store => "store",
    }
}
