//! Access to the store thread for async tasks.
//!
//! While the store is not open, or after it was found damaged, every operation is refused with the reason.
//!
//! The agent answers STATUS from memory. Runtimes send STATUS every few seconds. If each STATUS read the file, the file
//! would always be open, and the CNI plugin could not open the file while the agent hangs. After a failed read or
//! write, STATUS reports the error until a later look (a read of the whole store) succeeds. The first look after a
//! failure also tries to write.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::machine::{StoreAnswer, Transaction};
use cadastre_node::store_thread::{
    CallTimes, StoreHandle, StoreRequest, StoreSettings, StoreThread,
};
use cadastre_node::{
    AddressLedger as Tables, HoldingsFile, Op, OpError, OpErrorKind, OpOutcome, Snapshot,
    StorageFault, StoreError,
};

/// A handle to the store. Clones are handles to the same store.
#[derive(Clone)]
pub struct LedgerClient(Arc<Mutex<State>>);

enum State {
    Open {
        keeper: StoreThread,
        handle: StoreHandle,
        /// The answer to STATUS that the last look at the store has found
        status: Option<Result<OpOutcome, OpError>>,
        /// Why the file could not be read or written. The next look at the store that succeeds clears this error
        trouble: Option<OpError>,
    },
    Closed(String),
}

/// Why an operation was not done.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The store is not open. The text is the reason.
    #[error("{0}")]
    Closed(String),
    /// The store is open but could not run the operation, for example because its file is locked or damaged.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
}

impl LedgerError {
    /// Whether the store's file is damaged or gone, so that a new one must be created.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_lost())
    }
}

impl LedgerClient {
    /// Returns a handle to a closed store, which refuses every operation with the reason `why`.
    pub fn closed(why: &str) -> Self {
        Self(Arc::new(Mutex::new(State::Closed(why.to_owned()))))
    }

    /// Opens the existing file at `path`. From now on operations use this file, and the node's ranges and the notes on
    /// pods are copied to `holdings`.
    pub fn open(&self, path: &Path, holdings: HoldingsFile) -> std::io::Result<()> {
        let (keeper, handle) = StoreThread::start(path, holdings, StoreSettings::default())?;
        *self.lock() = State::Open {
            keeper,
            handle,
            status: None,
            trouble: None,
        };
        Ok(())
    }

    /// Refuses every operation from now on, with the reason `why`. Returns once all earlier operations are done.
    pub async fn close(&self, why: &str) {
        let before = std::mem::replace(&mut *self.lock(), State::Closed(why.to_owned()));
        if let State::Open { keeper, handle, .. } = before {
            drop(handle);
            let _ = tokio::task::spawn_blocking(move || keeper.join()).await;
        }
    }

    /// Whether the store is open. The file of an open store may still be unreadable or unwritable (see
    /// [`Self::trouble`]).
    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.lock(), State::Open { .. })
    }

    /// Performs an operation. If the caller has gone away before the store thread begins the operation, the operation
    /// is skipped.
    pub async fn ask(&self, op: Op, call: CallTimes) -> Result<OpOutcome, OpError> {
        if op == Op::Status
            && let Some(status) = self.status()
        {
            return status;
        }
        let changes = !matches!(op, Op::Status | Op::Check(_));
        let handle = self.handle().map_err(|error| busy(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        let reply = Box::new(move |result| {
            let _ = reply.send(result);
        });
        // If the caller drops this future, `asking` is dropped, too. Then the store thread skips the operation.
        let asking = Arc::new(());
        let asks = Arc::downgrade(&asking);
        let call = call.while_waited_for(move || asks.strong_count() > 0);
        handle.ask(op, call, reply);
        drop(handle);
        let stops = || busy("this node's agent stops: try again".to_owned());
        let answer = answer.await.unwrap_or_else(|_| Err(stops()));
        drop(asking);
        if let Err(refusal) = &answer
            && changes
        {
            self.failed(refusal);
        }
        answer
    }

    /// Remembers an error if the error means that the store's file cannot be used.
    fn failed(&self, refusal: &OpError) {
        if let State::Open { trouble, .. } = &mut *self.lock()
            && refusal.why == OpErrorKind::Store
        {
            *trouble = Some(refusal.clone());
        }
    }

    /// Returns the error that prevents both assignments and releases of addresses. Returns `None` if there is no such
    /// error, or if the store is closed.
    pub fn trouble(&self) -> Option<OpError> {
        match &*self.lock() {
            State::Open { trouble, .. } => trouble.clone(),
            State::Closed(_) => None,
        }
    }

    /// Runs `work` on the tables of the store, in one transaction.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Tables<'_>) -> Result<T, StorageFault> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let (reply, answer) = oneshot::channel();
        let reply = move |result| _ = reply.send(result);
        self.send(StoreRequest::work(None, work, reply), answer)
            .await
    }

    /// Runs a transaction of the agent's cycle.
    pub async fn transact(&self, transaction: Transaction) -> Result<StoreAnswer, LedgerError> {
        let (reply, answer) = oneshot::channel();
        let reply = move |result| _ = reply.send(result);
        self.send(transaction.request(reply), answer).await
    }

    async fn send<T>(
        &self,
        request: StoreRequest,
        answer: oneshot::Receiver<Result<T, Arc<StoreError>>>,
    ) -> Result<T, LedgerError> {
        self.handle()?.send(request);
        let stops = || LedgerError::Closed("the thread of the store has ended".to_owned());
        Ok(answer.await.map_err(|_| stops())??)
    }

    /// Reads the whole store, and remembers the answer to STATUS.
    pub async fn look(&self) -> Result<Snapshot, LedgerError> {
        let had_trouble = self.trouble().is_some();
        let seen = self.with(move |it| look(it, had_trouble)).await;
        if let Err(LedgerError::Store(error)) = &seen {
            self.failed(&error.refusal());
        }
        let (snapshot, now) = seen?;
        if let State::Open {
            status, trouble, ..
        } = &mut *self.lock()
        {
            *status = Some(now);
            if had_trouble {
                *trouble = None;
            }
        }
        Ok(snapshot)
    }

    fn status(&self) -> Option<Result<OpOutcome, OpError>> {
        match &*self.lock() {
            State::Open {
                status, trouble, ..
            } => trouble.clone().map(Err).or_else(|| status.clone()),
            State::Closed(_) => None,
        }
    }

    fn handle(&self) -> Result<StoreHandle, LedgerError> {
        match &*self.lock() {
            State::Open { handle, .. } => Ok(handle.clone()),
            State::Closed(why) => Err(LedgerError::Closed(why.clone())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the whole store and the answer to STATUS. If `had_trouble` is true, also tries to write, because the problem
/// is over only if a write succeeds.
pub fn look(
    tables: &mut Tables<'_>,
    had_trouble: bool,
) -> Result<(Snapshot, Result<OpOutcome, OpError>), StorageFault> {
    if had_trouble {
        tables.try_to_write()?;
    }
    Ok((tables.snapshot()?, tables.run(&Op::Status)?))
}

/// Returns an error for a request that may succeed if it is repeated later.
pub(crate) fn busy(text: String) -> OpError {
    OpError {
        why: OpErrorKind::Busy,
        text,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::files::temp_folder;
    use crate::snapshot::testing::attachment;
    use crate::store::holdings_file;
    use cadastre_node::{Store, clock};

    fn call() -> CallTimes {
        CallTimes::until(clock::since_boot() + Duration::from_secs(20))
    }

    fn del() -> Op {
        Op::Del(attachment("c"))
    }

    /// Returns a ledger whose file was read once, and the path of the file.
    async fn opened() -> (LedgerClient, std::path::PathBuf) {
        let path = temp_folder().join("node.redb");
        drop(Store::open(&path, Duration::ZERO).unwrap());
        let ledger = LedgerClient::closed("not yet");
        let holdings = holdings_file(&path.with_extension("json"), "node");
        ledger.open(&path, holdings).unwrap();
        ledger.look().await.unwrap();
        (ledger, path)
    }

    async fn status(ledger: &LedgerClient) -> OpErrorKind {
        ledger.ask(Op::Status, call()).await.unwrap_err().why
    }

    #[tokio::test]
    async fn status_reports_a_failed_write_until_a_write_succeeds() {
        let (ledger, path) = opened().await;
        assert_eq!(status(&ledger).await, OpErrorKind::NoBlock);
        let aside = path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        let refusal = ledger.ask(del(), call()).await.unwrap_err();
        assert_eq!(refusal.why, OpErrorKind::Store);
        assert_eq!(status(&ledger).await, OpErrorKind::Store);
        assert!(ledger.trouble().is_some());
        assert!(ledger.look().await.is_err());
        assert_eq!(status(&ledger).await, OpErrorKind::Store);
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        ledger.look().await.unwrap();
        assert!(ledger.trouble().is_none());
        assert_eq!(status(&ledger).await, OpErrorKind::NoBlock);
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[tokio::test]
    async fn operations_on_a_removed_file_are_refused() {
        let (ledger, path) = opened().await;
        std::fs::remove_file(&path).unwrap();
        let refusal = ledger.ask(del(), call()).await.unwrap_err();
        assert_eq!(refusal.why, OpErrorKind::Busy);
        assert!(refusal.text.contains("is missing"), "{refusal}");
        assert!(ledger.look().await.unwrap_err().is_lost());
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
