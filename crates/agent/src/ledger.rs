//! Access to the store thread for async tasks.
//!
//! Until the store is open, and after it was found damaged, every operation is refused with the reason.
//!
//! STATUS is answered from memory: runtimes ask every few seconds, which would keep the file open, and then the
//! plugin could not open it while the agent hangs. So once the file could not be read or written, STATUS reports
//! this until a later look, which then also tries to write, succeeds.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use cadastre_node::store_thread::{CallTimes, StoreHandle, StoreSettings, StoreThread};
use cadastre_node::{
    AddressLedger as Tables, Op, OpError, OpErrorKind, OpOutcome, Snapshot, StorageFault,
    StoreError,
};

/// A handle to the store; clones share it.
#[derive(Clone)]
pub struct LedgerClient(Arc<Mutex<State>>);

enum State {
    Open {
        keeper: StoreThread,
        handle: StoreHandle,
        /// The answer to STATUS as of the last look
        standing: Option<Result<OpOutcome, OpError>>,
        /// Why the file could not be read or written; cleared by the next look that succeeds
        trouble: Option<OpError>,
    },
    Closed(String),
}

/// An operation was not done.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The store is not open, for this reason.
    #[error("{0}")]
    Closed(String),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
}

impl LedgerError {
    /// Whether a new file has to be created because this one is damaged or gone.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_lost())
    }
}

impl LedgerClient {
    /// Starts closed; every operation is refused with this reason.
    pub fn closed(why: &str) -> Self {
        Self(Arc::new(Mutex::new(State::Closed(why.to_owned()))))
    }

    /// Opens the existing file at `path` and uses it from now on.
    pub fn open(&self, path: &Path) -> std::io::Result<()> {
        let (keeper, handle) = StoreThread::start(path, StoreSettings::default())?;
        *self.lock() = State::Open {
            keeper,
            handle,
            standing: None,
            trouble: None,
        };
        Ok(())
    }

    /// Refuses every operation from now on; returns once those asked before are done.
    pub async fn close(&self, why: &str) {
        let before = std::mem::replace(&mut *self.lock(), State::Closed(why.to_owned()));
        if let State::Open { keeper, handle, .. } = before {
            drop(handle);
            let _ = tokio::task::spawn_blocking(move || keeper.join()).await;
        }
    }

    /// Whether the store is open; it may still be in trouble.
    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.lock(), State::Open { .. })
    }

    /// Performs an operation, unless the caller has gone away by the time its turn comes.
    pub async fn ask(&self, op: Op, call: CallTimes) -> Result<OpOutcome, OpError> {
        if op == Op::Status
            && let Some(standing) = self.standing()
        {
            return standing;
        }
        let changes = !matches!(op, Op::Status | Op::Check(_));
        let handle = self.handle().map_err(|error| busy(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        let reply = Box::new(move |result| {
            let _ = reply.send(result);
        });
        // Dropping this future drops the operation from the queue.
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

    /// Remembers a refusal that says that the file cannot be used.
    fn failed(&self, refusal: &OpError) {
        if let State::Open { trouble, .. } = &mut *self.lock()
            && refusal.why == OpErrorKind::Store
        {
            *trouble = Some(refusal.clone());
        }
    }

    /// Returns why addresses can be neither assigned nor released: the file cannot be read or written.
    pub fn trouble(&self) -> Option<OpError> {
        match &*self.lock() {
            State::Open { trouble, .. } => trouble.clone(),
            State::Closed(_) => None,
        }
    }

    /// Runs `work` on the tables, in one transaction.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Tables<'_>) -> Result<T, StorageFault> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let handle = self.handle()?;
        let (reply, answer) = oneshot::channel();
        handle.with(work, move |result| {
            let _ = reply.send(result);
        });
        drop(handle);
        let stops = || LedgerError::Closed("the thread of the store has ended".to_owned());
        Ok(answer.await.map_err(|_| stops())??)
    }

    /// Reads everything from the store. STATUS is answered by the result from now on.
    pub async fn look(&self) -> Result<Snapshot, LedgerError> {
        let had_trouble = self.trouble().is_some();
        let seen = self.with(move |it| look(it, had_trouble)).await;
        if let Err(LedgerError::Store(error)) = &seen {
            self.failed(&error.refusal());
        }
        let (snapshot, now) = seen?;
        if let State::Open {
            standing, trouble, ..
        } = &mut *self.lock()
        {
            *standing = Some(now);
            if had_trouble {
                *trouble = None;
            }
        }
        Ok(snapshot)
    }

    fn standing(&self) -> Option<Result<OpOutcome, OpError>> {
        match &*self.lock() {
            State::Open {
                standing, trouble, ..
            } => trouble.clone().map(Err).or_else(|| standing.clone()),
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

/// Reads everything, with the answer to STATUS. If there was trouble before, tries to write as well.
pub fn look(
    tables: &mut Tables<'_>,
    had_trouble: bool,
) -> Result<(Snapshot, Result<OpOutcome, OpError>), StorageFault> {
    if had_trouble {
        tables.try_to_write()?;
    }
    Ok((tables.snapshot()?, tables.run(&Op::Status)?))
}

fn busy(text: String) -> OpError {
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
    use cadastre_node::{Attachment, Store, clock};

    fn call() -> CallTimes {
        CallTimes::until(clock::since_boot() + Duration::from_secs(20))
    }

    fn del() -> Op {
        Op::Del(Attachment {
            network: "net".to_owned(),
            container_id: "c".to_owned(),
            ifname: "eth0".to_owned(),
        })
    }

    /// Returns a ledger whose file was looked at once, and the path of the file.
    async fn opened() -> (LedgerClient, std::path::PathBuf) {
        let path = temp_folder().join("node.redb");
        drop(Store::open(&path, Duration::ZERO).unwrap());
        let ledger = LedgerClient::closed("not yet");
        ledger.open(&path).unwrap();
        ledger.look().await.unwrap();
        (ledger, path)
    }

    async fn status(ledger: &LedgerClient) -> OpErrorKind {
        ledger.ask(Op::Status, call()).await.unwrap_err().why
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_told_by_status_at_once_and_until_it_can() {
        let (ledger, path) = opened().await;
        assert_eq!(status(&ledger).await, OpErrorKind::NothingHeld);
        let aside = path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(
            ledger.ask(del(), call()).await.unwrap_err().why,
            OpErrorKind::Store
        );
        assert_eq!(status(&ledger).await, OpErrorKind::Store);
        assert!(ledger.trouble().is_some());
        assert!(ledger.look().await.is_err());
        assert_eq!(status(&ledger).await, OpErrorKind::Store);
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        ledger.look().await.unwrap();
        assert!(ledger.trouble().is_none());
        assert_eq!(status(&ledger).await, OpErrorKind::NothingHeld);
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[tokio::test]
    async fn nothing_is_done_in_a_file_that_was_removed() {
        let (ledger, path) = opened().await;
        std::fs::remove_file(&path).unwrap();
        let refusal = ledger.ask(del(), call()).await.unwrap_err();
        assert!(
            refusal.why == OpErrorKind::Busy && refusal.text.contains("is missing"),
            "{refusal}"
        );
        assert!(ledger.look().await.unwrap_err().is_lost());
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
