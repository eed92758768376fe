//! [`AgentSettings`], which come from flags, and [`AgentParts`]: the clients, channels and shared state that the main
//! loop uses.

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

/// Settings of the agent's main loop, from flags.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// The name of the Node
    pub node: String,
    /// The path of the store's file
    pub store: PathBuf,
    /// Whether this process already holds the lock of the store's directory
    pub is_store_locked: bool,
    /// The interval between two publications of a status that is not urgent
    pub publish_interval: Duration,
    /// The interval between two publications of the list of addresses
    pub addresses_interval: Duration,
    /// How long an attachment must be a leak candidate before it may be released
    pub leak_grace: Duration,
    /// The path of the container runtime's socket; `None` if the agent must not ask the runtime
    pub cri: Option<PathBuf>,
    /// Whether the agent masquerades the pods' traffic
    pub masquerade: bool,
}

/// The clients, channels and shared state that the main loop uses.
pub struct AgentParts {
    /// Connects to the API server
    pub client: Client,
    /// Runs transactions on the store
    pub ledger: LedgerClient,
    /// Handles the requests of the CNI plugin and of gRPC clients
    pub service: Arc<Service>,
    /// The state of `/readyz`
    pub readiness: Readiness,
    /// Updated after each read of the store
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
