//! What the loop of an agent is set to, and what it works with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::events::Events;
use super::leaks::Reasons;
use super::ledger::Ledger;
use super::service::Service;
use crate::metrics::AgentMetrics;
use cadastre_core::holding::Holding;
use cadastre_daemon::telemetry::Readiness;

/// Settings of the loop.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name
    pub node: String,
    /// The store
    pub store: PathBuf,
    /// Whether this process has the lock of the store's folder
    pub is_store_locked: bool,
    /// What can wait is told once in that time
    pub publish_interval: Duration,
    /// The list of addresses is told once in that time
    pub addresses_interval: Duration,
    /// How long an attachment is suspicious before it may be freed
    pub leak_grace: Duration,
    /// The runtime's socket, if it may be asked
    pub cri: Option<PathBuf>,
    /// Whether to masquerade
    pub masquerade: bool,
}

/// What the loop works with.
pub struct Parts {
    /// The API server
    pub client: Client,
    /// The store
    pub ledger: Ledger,
    /// Operations of plugins
    pub service: Arc<Service>,
    /// What `/readyz` says
    pub readiness: Readiness,
    /// Where figures go
    pub metrics: AgentMetrics,
    /// What people are told
    pub events: Events,
    /// Which attachments may be leaked
    pub leaks: watch::Sender<Arc<Reasons>>,
    /// What the node holds, for those who want to know
    pub holding: watch::Sender<Arc<Holding>>,
    /// Ends the loop
    pub stop: CancellationToken,
}
