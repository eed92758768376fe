//! The store thread: the only thread of an agent that uses the store.
//!
//! Requests come from many threads or tasks. All waiting requests, up to [`StoreSettings::group`], are done in one
//! transaction, so that all of them together wait for the disk once. The requests are answered after the transaction is
//! durable.
//!
//! The node's ranges and pod notes are copied to a file on a disk ([`HoldingsFile`]). A request that changes ranges
//! waits for that disk, and so do the requests after it. Changed pod notes are written by a second thread, and no
//! request waits for that thread.
//!
//! The store thread closes the file after some time without work. So if the agent hangs, a CNI plugin can use the file
//! directly. The use by two processes is safe for three reasons:
//!
//! - The store thread keeps nothing of the ledger in memory.
//! - A request carries its caller's deadline, and is rejected if its turn comes later. So if a caller stops waiting and
//!   uses the store directly, the store thread does not perform the caller's request in addition. A request whose
//!   caller is gone is rejected, too; the store thread checks this while it has the file open.
//! - The ledger rejects an ADD if another process has done a DEL that was requested after the ADD.

use std::io;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::clock;
use super::ledger::AddressLedger;
use super::ops::{Now, Op, OpError, OpOutcome};
use super::storage_fault::StorageFault;
use super::store::{HoldingsDraft, HoldingsFile, Store, StoreError};
use cadastre_core::mutation::Mutation;

/// The shortest pause between two writes of changed notes while the store thread has work.
const NOTES_PAUSE: Duration = Duration::from_secs(3);

/// Timeouts of the store thread, and maximum numbers of requests.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    /// When the store thread has had no work for this time, it closes the file.
    pub idle: Duration,
    /// How long the store thread waits for another process to close the file.
    pub wait: Duration,
    /// At most this many requests wait; further requests are rejected.
    pub waiting: usize,
    /// At most this many requests are done in one transaction.
    pub group: usize,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(1),
            wait: Duration::from_secs(2),
            waiting: 1024,
            group: 128,
        }
    }
}

/// A function that receives the answer to an operation. It is called on the store thread, so it must not block. If the
/// request cannot be queued, the function is called at once on the thread of the caller.
pub type OpReply = Box<dyn FnOnce(Result<OpOutcome, OpError>) + Send>;

/// A function that returns whether the caller still waits for the answer.
type Waits = Arc<dyn Fn() -> bool + Send + Sync>;

/// When an operation was requested, and until when its caller waits. Both are times since boot.
#[derive(Clone)]
pub struct CallTimes {
    asked: Duration,
    deadline: Duration,
    waits: Option<Waits>,
}

impl CallTimes {
    /// Returns the times of a call that is requested now. `deadline` is a time since boot.
    pub fn until(deadline: Duration) -> Self {
        Self::at(clock::since_boot(), deadline)
    }

    /// Returns the times of a call that was requested at `asked`. Both arguments are times since boot.
    pub fn at(asked: Duration, deadline: Duration) -> Self {
        Self {
            asked,
            deadline,
            waits: None,
        }
    }

    /// Replaces the time of the request by `asked`, if `asked` is the earlier of the two.
    #[must_use]
    pub fn asked(mut self, asked: Option<Duration>) -> Self {
        self.asked = asked.unwrap_or(self.asked).min(self.asked);
        self
    }

    /// Adds a condition: when the operation's turn comes, it is skipped if `waits` returns false. `waits` must not
    /// block.
    #[must_use]
    pub fn while_waited_for(mut self, waits: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        let waits: Waits = match self.waits.take() {
            Some(before) => Arc::new(move || before() && waits()),
            None => Arc::new(waits),
        };
        self.waits = Some(waits);
        self
    }

    /// Returns until when the caller waits, as a time since boot.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the error for a request whose caller no longer waits, or `None` if the caller still waits.
    fn rejection(&self, now: Duration) -> Option<StoreError> {
        if now > self.deadline {
            return Some(LATE);
        }
        let gone = self.waits.as_ref().is_some_and(|waits| !waits());
        gone.then_some(GONE)
    }
}

/// The running store thread. Callers use this value only to wait for the thread's end.
pub struct StoreThread {
    thread: JoinHandle<()>,
}

/// Sends requests to the store thread. Once the last handle is dropped, the thread performs the waiting requests and
/// then exits.
#[derive(Clone)]
pub struct StoreHandle {
    sender: SyncSender<StoreRequest>,
}

impl StoreThread {
    /// Starts the thread. The thread opens the file at the first request, so the file must exist before the first
    /// request.
    /// Changes of the node's ranges and of the notes on pods are copied to `holdings`.
    pub fn start(
        path: &Path,
        holdings: HoldingsFile,
        settings: StoreSettings,
    ) -> io::Result<(Self, StoreHandle)> {
        let (sender, requests) = sync_channel(settings.waiting);
        let (path, wait) = (path.to_owned(), settings.wait);
        let (drafts, notes) = sync_channel(1);
        let writer = holdings.clone();
        let writer = thread::Builder::new()
            .name("holdings".to_owned())
            .spawn(move || {
                for draft in notes {
                    // The agent reports the problem (`HoldingsFile::problem`), and another draft follows.
                    _ = writer.write(&draft);
                }
            })?;
        let file = holdings.clone();
        let open = move || Ok(Store::open_existing(&path, wait)?.recording(file.clone()));
        let work = Work {
            settings,
            requests,
            worker: StoreWorker::new(open),
            holdings,
            drafts,
            writer,
            notes_at: Duration::ZERO,
        };
        let thread = thread::Builder::new().name("store".to_owned());
        let thread = thread.spawn(move || work.run())?;
        Ok((Self { thread }, StoreHandle { sender }))
    }

    /// Waits until every [`StoreHandle`] is dropped and all requests are answered.
    pub fn join(self) {
        _ = self.thread.join();
    }
}

impl StoreHandle {
    /// Requests an operation. When the turn of the operation comes, it is skipped if the caller no longer waits. Never
    /// blocks.
    pub fn ask(&self, op: Op, call: CallTimes, reply: OpReply) {
        self.send(StoreRequest::op(op, call, reply));
    }

    /// Sends a request, which runs in one transaction with the other waiting requests of its kind. Never blocks.
    pub fn send(&self, request: StoreRequest) {
        let (request, what) = match self.sender.try_send(request) {
            Ok(()) => return,
            Err(TrySendError::Full(request)) => (request, "too many calls wait for it"),
            Err(TrySendError::Disconnected(request)) => (request, "this agent stops"),
        };
        request.job.finish(Err(Arc::new(StoreError::Busy { what })));
    }
}

/// Work to do on the store, together with the function that receives the result.
pub struct StoreRequest {
    /// How long the caller waits; `None` if the work has to be done even if no caller waits for the result
    call: Option<CallTimes>,
    /// Whether the work is an [`Op`], which changes no ranges
    is_op: bool,
    job: Box<dyn Step>,
}

impl StoreRequest {
    /// Returns a request for an operation. When the turn of the operation comes, it is skipped if the caller no longer
    /// waits.
    pub fn op(op: Op, call: CallTimes, reply: OpReply) -> Self {
        let asked = call.asked;
        let work = move |ledger: &mut AddressLedger<'_>| ledger.run_asked(&op, asked);
        let reply = move |result: Result<_, Arc<StoreError>>| {
            reply(result.unwrap_or_else(|error| Err(error.refusal())));
        };
        Self {
            is_op: true,
            ..Self::work(Some(call), work, reply)
        }
    }

    /// Makes the work run with the operations, in a transaction that does not wait for the holdings file. The work must
    /// not report the node's ranges, and change them at most by [`AddressLedger::restrict`].
    #[must_use]
    pub fn without_disk(self) -> Self {
        Self {
            is_op: true,
            ..self
        }
    }

    /// Returns a request for arbitrary work. If `call` is `None`, the work is done even if no caller waits for the
    /// result. `reply` receives the result and must not block, for the reasons given at [`OpReply`].
    pub fn work<T: Send + 'static>(
        call: Option<CallTimes>,
        work: impl FnOnce(&mut AddressLedger<'_>) -> Result<T, StorageFault> + Send + 'static,
        reply: impl FnOnce(Result<T, Arc<StoreError>>) + Send + 'static,
    ) -> Self {
        let job = Job {
            work: Some(work),
            result: None,
            reply,
        };
        Self {
            call,
            is_op: false,
            job: Box::new(job),
        }
    }
}

/// A request in two steps: `run` works inside the transaction, and `finish` answers after the commit.
trait Step: Send {
    fn run(&mut self, ledger: &mut AddressLedger<'_>) -> Result<(), StorageFault>;
    fn finish(self: Box<Self>, done: Result<(), Arc<StoreError>>);
}

struct Job<W, T, R> {
    work: Option<W>,
    result: Option<T>,
    reply: R,
}

impl<W, T, R> Step for Job<W, T, R>
where
    W: FnOnce(&mut AddressLedger<'_>) -> Result<T, StorageFault> + Send,
    T: Send,
    R: FnOnce(Result<T, Arc<StoreError>>) + Send,
{
    fn run(&mut self, ledger: &mut AddressLedger<'_>) -> Result<(), StorageFault> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(ledger)?);
        }
        Ok(())
    }

    fn finish(self: Box<Self>, done: Result<(), Arc<StoreError>>) {
        let result = self.result.ok_or_else(|| Arc::new(LATE));
        (self.reply)(done.and(result));
    }
}

const LATE: StoreError = StoreError::Busy {
    what: "the call came to its turn after its deadline",
};
const GONE: StoreError = StoreError::Busy {
    what: "the caller was gone when the call came to its turn",
};

struct Work {
    settings: StoreSettings,
    requests: Receiver<StoreRequest>,
    worker: StoreWorker,
    holdings: HoldingsFile,
    /// Channel to the thread that writes changed notes to `holdings`
    drafts: SyncSender<HoldingsDraft>,
    writer: JoinHandle<()>,
    /// When changed notes may be written again, as a time since boot
    notes_at: Duration,
}

impl Work {
    fn run(mut self) {
        loop {
            let first = if self.worker.has_file() {
                self.requests.recv_timeout(self.settings.idle)
            } else {
                let first = self.requests.recv();
                first.map_err(|_| RecvTimeoutError::Disconnected)
            };
            match first {
                Ok(first) => {
                    let mut group = vec![first];
                    let more = self.settings.group.saturating_sub(1);
                    group.extend(self.requests.try_iter().take(more));
                    self.worker.serve(group, clock::now);
                    if clock::since_boot() >= self.notes_at {
                        self.record_notes();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.record_notes();
                    self.worker.close();
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.record_notes();
        drop(self.drafts);
        _ = self.writer.join();
    }

    /// Sends changed notes to the thread that writes the holdings file. If that thread is still busy, the notes are
    /// sent later.
    fn record_notes(&mut self) {
        let now = clock::now();
        self.notes_at = now.since_boot + NOTES_PAUSE;
        if let Some(draft) = self.worker.stale_holdings(&now)
            && self.drafts.try_send(draft).is_err()
        {
            self.holdings.set_stale();
        }
    }
}

type Open = Box<dyn FnMut() -> Result<Store, StoreError> + Send>;

/// Does the work of the store thread, on the thread that calls the methods. Reads no clock, and waits only for the
/// file.
pub struct StoreWorker {
    open: Open,
    store: Option<Store>,
}

impl StoreWorker {
    /// Returns a worker that has no file open. The worker calls `open` each time that it has to open the file.
    pub fn new(open: impl FnMut() -> Result<Store, StoreError> + Send + 'static) -> Self {
        Self {
            open: Box::new(open),
            store: None,
        }
    }

    /// Returns whether the worker has the file open. If so, other processes cannot use the file.
    pub fn has_file(&self) -> bool {
        self.store.is_some()
    }

    /// Closes the file. The next [`serve`](Self::serve) opens it again.
    pub fn close(&mut self) {
        self.store = None;
    }

    /// Opens the file if necessary. Performs the requests whose callers still wait, and then answers them: first all
    /// operations in one transaction, then all other work in another one. The other work may change the node's ranges
    /// and fail because of the disk, which must not concern the operations.
    pub fn serve(&mut self, group: Vec<StoreRequest>, now: impl Fn() -> Now) {
        let (ops, others): (Vec<_>, _) = group.into_iter().partition(|it| it.is_op);
        for (part, are_ops) in [(ops, true), (others, false)] {
            if !part.is_empty() {
                self.serve_part(part, are_ops, &now);
            }
        }
    }

    /// Returns a draft for the holdings file if pod notes have changed or the last write failed. Returns `None` if the
    /// worker has no file open.
    pub fn stale_holdings(&mut self, now: &Now) -> Option<HoldingsDraft> {
        let draft = self.store.as_mut()?.stale_holdings(now);
        if draft.is_err() {
            self.close();
        }
        draft.ok()?
    }

    fn serve_part(&mut self, group: Vec<StoreRequest>, are_ops: bool, now: impl Fn() -> Now) {
        let mut store = match self.store.take() {
            Some(store) => store,
            None => match (self.open)() {
                Ok(store) => store,
                Err(error) => return finish(group, &Err(Arc::new(error))),
            },
        };
        let now = now();
        let mut group = still_waited_for(group, now.since_boot);
        let work = |ledger: &mut AddressLedger<'_>| {
            group.iter_mut().try_for_each(|it| it.job.run(ledger))?;
            if Mutation::AnsweredBeforeStored.is_on() {
                finish(mem::take(&mut group), &Ok(()));
            }
            Ok(())
        };
        let done = if are_ops {
            store.transact_ops(&now, work)
        } else {
            store.transact(&now, work)
        };
        if done.is_ok() {
            self.store = Some(store);
        }
        let done = match done {
            Err(_) if Mutation::FailedWriteIgnored.is_on() => Ok(()),
            done => done,
        };
        finish(group, &done.map_err(Arc::new));
    }
}

/// Rejects the requests whose callers no longer wait, and returns the others.
fn still_waited_for(group: Vec<StoreRequest>, now: Duration) -> Vec<StoreRequest> {
    let mut waiting = Vec::with_capacity(group.len());
    for request in group {
        match request.call.as_ref().and_then(|call| call.rejection(now)) {
            Some(why) => request.job.finish(Err(Arc::new(why))),
            None => waiting.push(request),
        }
    }
    waiting
}

fn finish(group: Vec<StoreRequest>, done: &Result<(), Arc<StoreError>>) {
    for request in group {
        request.job.finish(done.clone());
    }
}
