//! The keeper of the store, for tasks.
//!
//! Until the store is open, or after it was found damaged, everything is refused with the reason.
//!
//! STATUS is answered from memory: runtimes ask for it every few seconds, which would keep the file
//! open, and a plugin could never have it while the agent hangs.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::node::keeper::{Call, Handle, Keeper, Settings};
use crate::node::{Answer, Fault, Ledger as Tables, Op, Refusal, Snapshot, StoreError, Why};

/// A way to the store.
#[derive(Clone)]
pub struct Ledger(Arc<Mutex<State>>);

enum State {
    Open {
        keeper: Keeper,
        handle: Handle,
        /// What STATUS was at the last look
        standing: Option<Result<Answer, Refusal>>,
    },
    Closed(String),
}

/// Why something was not done with the store.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// It is not open, for that reason.
    #[error("{0}")]
    Closed(String),
    /// It cannot be used.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
}

impl LedgerError {
    /// Whether the file has to be made anew: it is damaged, or gone.
    pub fn is_lost(&self) -> bool {
        let Self::Store(error) = self else {
            return false;
        };
        matches!(
            **error,
            StoreError::Damaged { .. } | StoreError::Missing { .. }
        )
    }
}

impl Ledger {
    /// Closed, for that reason, which is what is answered.
    pub fn closed(why: &str) -> Self {
        Self(Arc::new(Mutex::new(State::Closed(why.to_owned()))))
    }

    /// Uses the file at `path` from now on; it must be there.
    pub fn open(&self, path: &Path) -> std::io::Result<()> {
        let (keeper, handle) = Keeper::start(path, Settings::default())?;
        *self.lock() = State::Open {
            keeper,
            handle,
            standing: None,
        };
        Ok(())
    }

    /// Refuses everything from now on; returns when what was asked before is done.
    pub async fn close(&self, why: &str) {
        let before = std::mem::replace(&mut *self.lock(), State::Closed(why.to_owned()));
        if let State::Open { keeper, handle, .. } = before {
            drop(handle);
            let _ = tokio::task::spawn_blocking(move || keeper.join()).await;
        }
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        matches!(*self.lock(), State::Open { .. })
    }

    /// Does an operation, unless nobody waits for it any more when its turn comes.
    pub async fn ask(&self, op: Op, call: Call) -> Result<Answer, Refusal> {
        if op == Op::Status
            && let Some(standing) = self.standing()
        {
            return standing;
        }
        let handle = self.handle().map_err(|error| busy(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        let reply = Box::new(move |result| {
            let _ = reply.send(result);
        });
        // What is asked here is given up when this is dropped.
        let asking = Arc::new(());
        let asks = Arc::downgrade(&asking);
        let call = call.while_waited_for(move || asks.strong_count() > 0);
        handle.ask(op, call, reply);
        drop(handle);
        let stops = || busy("this node's agent stops: try again".to_owned());
        let answer = answer.await.unwrap_or_else(|_| Err(stops()));
        drop(asking);
        answer
    }

    /// Does something with the tables, in one transaction.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Tables<'_>) -> Result<T, Fault> + Send + 'static,
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

    /// All there is. STATUS says from now on what it says of that.
    pub async fn look(&self) -> Result<Snapshot, LedgerError> {
        let look = |it: &mut Tables<'_>| Ok((it.snapshot()?, it.run(&Op::Status)?));
        let (snapshot, now) = self.with(look).await?;
        if let State::Open { standing, .. } = &mut *self.lock() {
            *standing = Some(now);
        }
        Ok(snapshot)
    }

    fn standing(&self) -> Option<Result<Answer, Refusal>> {
        match &*self.lock() {
            State::Open { standing, .. } => standing.clone(),
            State::Closed(_) => None,
        }
    }

    fn handle(&self) -> Result<Handle, LedgerError> {
        match &*self.lock() {
            State::Open { handle, .. } => Ok(handle.clone()),
            State::Closed(why) => Err(LedgerError::Closed(why.clone())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn busy(text: String) -> Refusal {
    Refusal {
        why: Why::Busy,
        text,
    }
}
