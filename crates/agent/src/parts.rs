//! The settings of the agent's loop, and the parts it works with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::events::Events;
use super::leaks::Reasons;
use super::ledger::LedgerClient;
use super::service::Service;
use crate::metrics::AgentMetrics;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_daemon::telemetry::Readiness;

/// The settings of the agent's loop, from flags.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// The name of the Node
    pub node: String,
    /// The path of the store's file
    pub store: PathBuf,
    /// Whether this process already has the lock of the store's folder
    pub is_store_locked: bool,
    /// Status that is not urgent is published once per interval
    pub publish_interval: Duration,
    /// The list of addresses is published once per interval
    pub addresses_interval: Duration,
    /// How long an attachment must be a leak candidate before it may be released
    pub leak_grace: Duration,
    /// The socket of the container runtime, if it may be asked
    pub cri: Option<PathBuf>,
    /// Whether the agent masquerades the pods' traffic
    pub masquerade: bool,
}

/// The parts that the loop works with.
pub struct AgentParts {
    /// Connects to the API server
    pub client: Client,
    /// Runs transactions on the store
    pub ledger: LedgerClient,
    /// Serves the operations of plugins
    pub service: Arc<Service>,
    /// The state of `/readyz`
    pub readiness: Readiness,
    /// Updated with each look at the store
    pub metrics: AgentMetrics,
    /// Logs and emits events
    pub events: Events,
    /// The leak candidates, for the gRPC API
    pub leaks: watch::Sender<Arc<Reasons>>,
    /// The node's ranges, for the gRPC API
    pub holding: watch::Sender<Arc<NodeAllocation>>,
    /// Cancelled to end the loop
    pub stop: CancellationToken,
}
