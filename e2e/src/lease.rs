//! Observes the Lease by which controllers elect their leader.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use cadastre_api::LEASE_NAME;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::task::JoinHandle;

/// The namespace in which controllers keep the Lease by default.
pub const NAMESPACE: &str = "kube-system";

/// Returns the holder of the Lease in the form `IDENTITY_NONCE`, or `None` if nobody holds the Lease.
pub async fn holder(client: &Client) -> Result<Option<String>> {
    Ok(read(client).await?.and_then(holder_of))
}

/// Returns the resourceVersion of the Lease, which changes with each renewal; `None` if there is no Lease.
pub async fn version(client: &Client) -> Result<Option<String>> {
    Ok(read(client).await?.and_then(|it| it.resource_version()))
}

/// Returns how long the Lease lasts after a renewal, in seconds; `None` if there is no Lease.
pub async fn duration(client: &Client) -> Result<Option<i32>> {
    let lease = read(client).await?;
    Ok(lease.and_then(|it| it.spec?.lease_duration_seconds))
}

async fn read(client: &Client) -> Result<Option<Lease>> {
    let leases = Api::<Lease>::namespaced(client.clone(), NAMESPACE);
    Ok(leases.get_opt(LEASE_NAME).await?)
}

/// Returns the part `IDENTITY` of a holder, which has the form `IDENTITY_NONCE`.
pub fn identity(holder: &str) -> &str {
    holder.rsplit_once('_').map_or(holder, |(it, _)| it)
}

fn holder_of(lease: Lease) -> Option<String> {
    lease.spec?.holder_identity.filter(|it| !it.is_empty())
}

/// The holders of the Lease in the order of observation, each with the time of its first observation. `None` means that
/// nobody held the Lease.
pub type Seen = Vec<(Instant, Option<String>)>;

/// Records every change of the Lease's holder. Recording stops when this value is dropped.
#[derive(Debug)]
pub struct Holders {
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Holders {
    /// Starts recording. Returns before the first holder is observed.
    pub fn watch(client: Client) -> Self {
        let seen = Arc::default();
        let task = tokio::spawn(record(client, Arc::clone(&seen)));
        Self { seen, task }
    }

    /// Returns the holders observed so far, oldest first.
    pub fn seen(&self) -> Seen {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.clone()
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn record(client: Client, seen: Arc<Mutex<Seen>>) {
    let leases = Api::<Lease>::namespaced(client, NAMESPACE);
    let only = watcher::Config::default().fields(&format!("metadata.name={LEASE_NAME}"));
    let mut changes = watcher(leases, only)
        .default_backoff()
        .applied_objects()
        .boxed();
    loop {
        // An error means that the API server is down. The stream resumes by itself after a pause.
        let Ok(change) = changes.try_next().await else {
            continue;
        };
        let Some(lease) = change else { return };
        let (now, holder) = (Instant::now(), holder_of(lease));
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.last().is_none_or(|(_, last)| *last != holder) {
            seen.push((now, holder));
        }
    }
}
