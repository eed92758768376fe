//! Serves operations of plugins and others: chooses pools, asks the store, and lets an ADD that finds
//! nothing wait for a block.
//!
//! # Guarantees
//! - Nothing here asks the API server. What it has said is read from what the watches keep.
//! - Every wait ends: at the request's own deadline, at the setting's for a block, and with a DEL of what
//!   is waited for.

pub mod adding;

use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::IntGauge;
use tokio::sync::{Notify, broadcast, watch};
use tracing::debug;

use super::events::Events;
use super::known::{Desk, Known};
use super::ledger::Ledger;
use crate::metrics::AgentMetrics;
use adding::Step;
use cadastre_node::keeper::Call;
use cadastre_node::{Add, Answer, Attachment, Op, Refusal, Why, clock};

/// Serves operations.
pub struct Service {
    /// The store
    pub ledger: Ledger,
    /// What the watches have shown
    pub known: Known,
    /// How long an ADD waits for a block
    pub add_wait: Duration,
    /// Where figures go
    pub metrics: AgentMetrics,
    /// Where complaints go
    pub events: Events,
    /// Something was given, freed or wished for
    pub changed: Notify,
    /// Counts the takings-over of what the node holds
    pub held: watch::Sender<u64>,
    /// What was deleted, for which an ADD may wait
    pub deleted: broadcast::Sender<Attachment>,
}

impl Service {
    /// Does an operation while its caller waits for it.
    pub async fn serve(&self, op: Op, call: Call) -> Result<Answer, Refusal> {
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
                self.known.lock().wishes.remove(&attachment);
                let result = self.ledger.ask(Op::Del(attachment.clone()), call).await;
                // An error says that no ADD waits.
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

    /// A node whose blocks are all lent to others can serve: it asks for one when a pod comes, which a
    /// node that is called not ready never gets.
    async fn status(&self, call: Call) -> Result<Answer, Refusal> {
        match self.ledger.ask(Op::Status, call).await {
            Err(refusal) if refusal.why == Why::NothingHeld && self.known.shown().may_ask() => {
                Ok(Answer::Done)
            }
            other => other,
        }
    }

    async fn add(&self, add: Add, call: &Call) -> Result<Answer, Refusal> {
        if !add.netns.is_empty() {
            self.note_netns(Path::new(&add.netns));
        }
        let attachment = add.attachment.clone();
        let mut seen = self.known.follow();
        let mut news = News {
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
                Step::Done(result) => return result,
                Step::Ask(add, asked) => {
                    let answer = self.ledger.ask(Op::Add(*add), call.clone()).await;
                    let shown = Arc::clone(&seen.borrow_and_update());
                    step = self.step(|desk, now| asked.answered(answer, &shown, desk, now));
                }
                Step::ForPod(pod) => {
                    comes(seen.changed(), pod.until()).await;
                    let shown = Arc::clone(&seen.borrow_and_update());
                    step = self.step(|desk, now| pod.go(&shown, desk, now));
                }
                Step::ForBlock(block) => {
                    waiting.get_or_insert_with(|| Waiting::begin(&self.metrics));
                    let is_news = comes(news.wait(&attachment), block.until()).await;
                    step = self.step(|desk, now| block.go(is_news, desk, now));
                }
            }
        }
    }

    /// Takes a step of an ADD, and tells whom it concerns what came of it.
    fn step(&self, step: impl FnOnce(&mut Desk, Duration) -> Step) -> Step {
        let mut desk = self.known.lock();
        let step = step(&mut desk, clock::since_boot());
        let notices = mem::take(&mut desk.notices);
        let is_changed = mem::take(&mut desk.is_changed);
        drop(desk);
        for notice in notices {
            self.events.tell(notice);
        }
        if is_changed {
            self.changed.notify_one();
        }
        step
    }

    /// Remembers where network namespaces are: that one is not there any more proves something only
    /// in such a place.
    fn note_netns(&self, path: &Path) {
        if let Some(root) = netns_root(path) {
            let mut known = self.known.lock();
            if !known.netns_roots.contains(root) && path.exists() {
                known.netns_roots.insert(root.to_owned());
            }
        }
    }
}

/// Whether the loop should look at the store after an answer. `changes`: the operation may have changed something.
pub fn is_news(changes: bool, result: &Result<Answer, Refusal>) -> bool {
    match result {
        Ok(_) => changes,
        Err(refusal) => matches!(refusal.why, Why::Store | Why::Busy),
    }
}

/// Whether something comes before that time.
async fn comes<T>(news: impl Future<Output = T>, until: Duration) -> bool {
    let left = until.saturating_sub(clock::since_boot());
    tokio::time::timeout(left, news).await.is_ok()
}

/// Counts an ADD among those that wait for a block, as long as it is there.
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

/// What a waiting ADD listens to.
struct News {
    held: watch::Receiver<u64>,
    deleted: broadcast::Receiver<Attachment>,
}

impl News {
    /// Returns when an ADD of it should be tried again: there may be an address, or the store says that
    /// it was deleted.
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

/// The directory in which a network namespace comes and goes.
pub fn netns_root(path: &Path) -> Option<&Path> {
    if !path.is_absolute() {
        return None;
    }
    if path.starts_with("/proc") {
        return Some(Path::new("/proc"));
    }
    path.parent()
}

/// A kind of refusal as a label, and for other programs.
pub fn label(why: Why) -> &'static str {
    match why {
        Why::Exhausted => "exhausted",
        Why::NothingHeld => "nothingHeld",
        Why::UnknownPool => "unknownPool",
        Why::NotHeld => "notHeld",
        Why::Taken => "taken",
        Why::NotUsable => "notUsable",
        Why::PodUnknown => "podUnknown",
        Why::Mismatch => "mismatch",
        Why::Busy => "busy",
        Why::Store => "store",
    }
}
