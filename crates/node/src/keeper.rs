//! The one thread of an agent that has the store.
//!
//! Requests come from many threads or tasks, and what waits is done in one transaction: one wait for the
//! disk for all of it. Answers are given after that.
//!
//! The file is closed when there was nothing to do for a while, so that a plugin that finds the agent hung
//! at such a moment can work on it. That is safe because nothing is kept in memory, and because a request
//! carries the time until which its caller waits: what comes to its turn later is refused instead of done,
//! so that no caller that gave up and helped itself is overtaken by its own request. The same goes for what
//! no caller waits for any more, which is looked at while nobody else has the file; and the ledger refuses
//! an ADD that was asked for before a DEL that another process has done.

use std::io;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::clock;
use super::fault::Fault;
use super::ledger::Ledger;
use super::ops::{Answer, Now, Op, Refusal};
use super::store::{Store, StoreError};
use cadastre_core::mutation::Mutation;

/// How a keeper works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// After so long without work the file is closed.
    pub idle: Duration,
    /// So long it waits for another process to let go of the file.
    pub wait: Duration,
    /// So many requests may wait; more are refused.
    pub waiting: usize,
    /// So many are done in one transaction at most.
    pub group: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(1),
            wait: Duration::from_secs(2),
            waiting: 1024,
            group: 128,
        }
    }
}

/// Takes the answer to an operation, on the keeper's thread: it must not block.
pub type Reply = Box<dyn FnOnce(Result<Answer, Refusal>) + Send>;

/// Says whether somebody still waits for an answer.
type Waits = Arc<dyn Fn() -> bool + Send + Sync>;

/// When something was asked for, and until when an answer is waited for, as times since boot.
#[derive(Clone)]
pub struct Call {
    asked: Duration,
    deadline: Duration,
    waits: Option<Waits>,
}

impl Call {
    /// Asked for now.
    pub fn until(deadline: Duration) -> Self {
        Self::at(clock::since_boot(), deadline)
    }

    /// Asked for at that time.
    pub fn at(asked: Duration, deadline: Duration) -> Self {
        Self {
            asked,
            deadline,
            waits: None,
        }
    }

    /// Asked for then, if not now.
    #[must_use]
    pub fn asked(mut self, asked: Option<Duration>) -> Self {
        self.asked = asked.unwrap_or(self.asked).min(self.asked);
        self
    }

    /// It is not done any more once `waits` says no, which must not block.
    #[must_use]
    pub fn while_waited_for(mut self, waits: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        let waits: Waits = match self.waits.take() {
            Some(before) => Arc::new(move || before() && waits()),
            None => Arc::new(waits),
        };
        self.waits = Some(waits);
        self
    }

    /// Until when an answer is waited for.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Why nobody waits for an answer any more.
    fn given_up(&self, now: Duration) -> Option<StoreError> {
        if now > self.deadline {
            return Some(LATE);
        }
        let gone = self.waits.as_ref().is_some_and(|waits| !waits());
        gone.then_some(GONE)
    }
}

/// The thread.
pub struct Keeper {
    thread: JoinHandle<()>,
}

/// A way to ask the keeper. The thread ends, after what waits, when the last one is gone.
#[derive(Clone)]
pub struct Handle {
    sender: SyncSender<Request>,
}

impl Keeper {
    /// Starts it. The file must be there; it is opened for the first request.
    pub fn start(path: &Path, settings: Settings) -> io::Result<(Self, Handle)> {
        let (sender, requests) = sync_channel(settings.waiting);
        let (path, wait) = (path.to_owned(), settings.wait);
        let work = Work {
            settings,
            requests,
            worker: Worker::new(move || Store::open_existing(&path, wait)),
        };
        let thread = thread::Builder::new().name("store".to_owned());
        let thread = thread.spawn(move || work.run())?;
        Ok((Self { thread }, Handle { sender }))
    }

    /// Waits until all handles are gone, and everything they asked for is done.
    pub fn join(self) {
        _ = self.thread.join();
    }
}

impl Handle {
    /// Does an operation, unless nobody waits for it any more when its turn comes. Never blocks.
    pub fn ask(&self, op: Op, call: Call, reply: Reply) {
        self.send(Request::op(op, call, reply));
    }

    /// Does something with the ledger, in one transaction with what waits. `reply` takes the result on the
    /// keeper's thread: it must not block. Never blocks.
    pub fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Ledger<'_>) -> Result<T, Fault> + Send + 'static,
        reply: impl FnOnce(Result<T, Arc<StoreError>>) + Send + 'static,
    ) {
        self.send(Request::work(None, work, reply));
    }

    fn send(&self, request: Request) {
        let (request, what) = match self.sender.try_send(request) {
            Ok(()) => return,
            Err(TrySendError::Full(request)) => (request, "too many calls wait for it"),
            Err(TrySendError::Disconnected(request)) => (request, "this agent stops"),
        };
        request.job.finish(Err(Arc::new(StoreError::Busy { what })));
    }
}

/// Something to be done with the store, and who takes the result.
pub struct Request {
    /// `None`: it is done in any case
    call: Option<Call>,
    job: Box<dyn Step>,
}

impl Request {
    /// An operation, unless nobody waits for it any more when its turn comes.
    pub fn op(op: Op, call: Call, reply: Reply) -> Self {
        let asked = call.asked;
        let work = move |ledger: &mut Ledger<'_>| ledger.run_asked(&op, asked);
        let reply = move |result: Result<_, Arc<StoreError>>| {
            reply(result.unwrap_or_else(|error| Err(error.refusal())));
        };
        Self::work(Some(call), work, reply)
    }

    /// Any work; without a call it is done in any case.
    pub fn work<T: Send + 'static>(
        call: Option<Call>,
        work: impl FnOnce(&mut Ledger<'_>) -> Result<T, Fault> + Send + 'static,
        reply: impl FnOnce(Result<T, Arc<StoreError>>) + Send + 'static,
    ) -> Self {
        let job = Job {
            work: Some(work),
            result: None,
            reply,
        };
        Self {
            call,
            job: Box::new(job),
        }
    }
}

/// What is done in a transaction, and after it.
trait Step: Send {
    fn run(&mut self, ledger: &mut Ledger<'_>) -> Result<(), Fault>;
    fn finish(self: Box<Self>, done: Result<(), Arc<StoreError>>);
}

struct Job<W, T, R> {
    work: Option<W>,
    result: Option<T>,
    reply: R,
}

impl<W, T, R> Step for Job<W, T, R>
where
    W: FnOnce(&mut Ledger<'_>) -> Result<T, Fault> + Send,
    T: Send,
    R: FnOnce(Result<T, Arc<StoreError>>) + Send,
{
    fn run(&mut self, ledger: &mut Ledger<'_>) -> Result<(), Fault> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(ledger)?);
        }
        Ok(())
    }

    fn finish(self: Box<Self>, done: Result<(), Arc<StoreError>>) {
        let result = match (done, self.result) {
            (Err(error), _) => Err(error),
            (Ok(()), Some(result)) => Ok(result),
            (Ok(()), None) => Err(Arc::new(LATE)),
        };
        (self.reply)(result);
    }
}

const LATE: StoreError = StoreError::Busy {
    what: "the call came to its turn after its deadline",
};
const GONE: StoreError = StoreError::Busy {
    what: "the caller was gone when the call came to its turn",
};

struct Work {
    settings: Settings,
    requests: Receiver<Request>,
    worker: Worker,
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
                }
                Err(RecvTimeoutError::Timeout) => self.worker.close(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

type Open = Box<dyn FnMut() -> Result<Store, StoreError> + Send>;

/// Does with the store what the keeper is asked. It reads no clock, and waits for nothing but the file.
pub struct Worker {
    open: Open,
    store: Option<Store>,
}

impl Worker {
    /// `open` opens the file when it is needed.
    pub fn new(open: impl FnMut() -> Result<Store, StoreError> + Send + 'static) -> Self {
        Self {
            open: Box::new(open),
            store: None,
        }
    }

    /// Whether it has the file, so that no other process does.
    pub fn has_file(&self) -> bool {
        self.store.is_some()
    }

    /// Lets go of the file until something is to be done.
    pub fn close(&mut self) {
        self.store = None;
    }

    /// Does these in one transaction, those for which somebody waits once the file is there, and then answers all.
    pub fn serve(&mut self, group: Vec<Request>, now: impl FnOnce() -> Now) {
        let mut store = match self.store.take() {
            Some(store) => store,
            None => match (self.open)() {
                Ok(store) => store,
                Err(error) => return finish(group, &Err(Arc::new(error))),
            },
        };
        let now = now();
        let mut group = still_waited_for(group, now.since_boot);
        let done = store.transact(&now, |ledger| {
            group.iter_mut().try_for_each(|it| it.job.run(ledger))?;
            if Mutation::AnsweredBeforeStored.is_on() {
                finish(mem::take(&mut group), &Ok(()));
            }
            Ok(())
        });
        if done.is_ok() {
            self.store = Some(store);
        }
        finish(group, &done.map_err(Arc::new));
    }
}

/// Answers those for which nobody waits any more, and returns the others.
fn still_waited_for(group: Vec<Request>, now: Duration) -> Vec<Request> {
    let mut rest = Vec::with_capacity(group.len());
    for request in group {
        match request.call.as_ref().and_then(|call| call.given_up(now)) {
            Some(why) => request.job.finish(Err(Arc::new(why))),
            None => rest.push(request),
        }
    }
    rest
}

fn finish(group: Vec<Request>, done: &Result<(), Arc<StoreError>>) {
    for request in group {
        request.job.finish(done.clone());
    }
}
