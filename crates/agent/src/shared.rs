//! The state that the agent's main loop and the servers on the node's sockets share.
//!
//! The loop writes [`WatchState`], which contains what the watches have shown. At each change the loop replaces the
//! complete value, so that readers never get a partly changed value. The servers write [`ServiceState`], which the loop
//! reads before each turn.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::address_requests::AddressRequestBook;
use super::choice::ServingPool;
use super::namespaces::Namespaces;
use super::pending_adds::PendingAddBook;
use super::pods::{Pod, Pods};
use cadastre_api::POOLS_ANNOTATION;
use cadastre_daemon::events::EventNote;
use cadastre_node::Add;

/// The [`WatchState`], which the main loop writes, and the [`ServiceState`], which the servers write.
#[derive(Default)]
pub struct SharedState {
    watched: watch::Sender<Arc<WatchState>>,
    service: Mutex<ServiceState>,
}

/// What the watches of the main loop have shown of the API objects. The servers only read it.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
pub struct WatchState {
    /// The pods of this node, as far as the watch has shown them
    pub pods: Pods,
    /// Whether the watch of pods is established
    pub pods_followed: bool,
    /// Whether the watch of pods has failed since it was last established
    pub pods_troubled: bool,
    /// Whether the agent has read a NodeSubnet since its start. If not, all fields about pools are empty
    pub pools_known: bool,
    /// Pools that can serve pods, best first
    pub serving: Vec<ServingPool>,
    /// Pools that have ranges on this node and are not in `serving`
    pub others: Vec<String>,
    /// Pools from which blocks can be requested, best first
    pub askable: Vec<String>,
    /// The pools that serve every pod, except pods that ask for another pool by name
    pub automatic: BTreeSet<String>,
    /// Whether any pool in both `askable` and `automatic` allocates a block to this node before a pod needs it
    pub gives_unasked: bool,
    /// The pools whose limit (`maxBlocksPerNode`) the node has reached in one of the families, each with the limit
    pub at_limit: BTreeMap<String, u32>,
    /// Pools that have at least one block on this node from which new addresses are assigned
    pub allocating_pools: BTreeSet<String>,
    /// The namespaces of the pods of this node
    pub namespaces: Namespaces,
    /// Whether the replacement of a lost store waits, because pods may have addresses on second networks that no source
    /// shows. The wait takes up to five minutes
    pub waits_for_second_networks: bool,
}

/// What the servers record for the main loop while they handle requests.
#[derive(Debug, Default)]
pub struct ServiceState {
    /// The pod that was last refused because the agent did not know the pod yet, as `namespace/name`
    pub turned_away: Option<String>,
    /// The waiting ADDs, and the pools from which they want addresses
    pub pending_adds: PendingAddBook,
    /// The addresses that the CNI configuration or the runtime requests for waiting pods, and that no range of the node
    /// contains
    pub address_requests: AddressRequestBook,
    /// Whether this state has changed in a way to which the main loop must react
    pub is_changed: bool,
    /// Events about wrong annotations, to be emitted after the current step of an ADD
    pub notices: Vec<EventNote>,
    /// Directories in which the agent has seen network namespaces
    pub netns_roots: BTreeSet<PathBuf>,
    /// For each pod UID, the errors of the pod's annotations that were reported last
    reported: BTreeMap<String, Vec<String>>,
}

impl SharedState {
    /// Replaces the state of the watches. If `wakes_adds` is true, wakes the ADDs that wait for their pod.
    pub(crate) fn set_watched(&self, watched: Arc<WatchState>, wakes_adds: bool) {
        let is_here = |uid: &String, _: &mut Vec<String>| watched.pods.by_uid(uid).is_some();
        self.lock().reported.retain(is_here);
        self.watched.send_if_modified(|is| {
            *is = watched;
            wakes_adds
        });
    }

    /// Returns a receiver of the state of the watches. The receiver wakes when the state is replaced with `wakes_adds`
    /// set to true.
    pub(crate) fn follow(&self) -> watch::Receiver<Arc<WatchState>> {
        self.watched.subscribe()
    }

    /// Locks the state that the servers write. A task must not hold the lock across an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.service.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServiceState {
    /// Records the errors that a pod's annotations have now. Returns the errors that were not recorded before.
    pub(crate) fn report_errors(&mut self, uid: &str, errors: Vec<String>) -> Vec<String> {
        let before = self.reported.remove(uid).unwrap_or_default();
        let new = errors.iter().filter(|it| !before.contains(it)).cloned();
        let new = new.collect();
        if !errors.is_empty() {
            self.reported.insert(uid.to_owned(), errors);
        }
        new
    }
}

impl WatchState {
    /// Whether there is a pool from which the node may request a block.
    pub(crate) fn may_ask(&self) -> bool {
        !self.askable.is_empty()
    }

    /// Whether the node gets its first block only when a pod needs one.
    pub(crate) fn waits_for_pods(&self) -> bool {
        self.may_ask() && !self.gives_unasked
    }

    /// Whether the result of an ADD depends on labels or annotations of its pod. While the pools are unknown, the
    /// result is true.
    pub(crate) fn depends_on_pod(&self, add: &Add) -> bool {
        let binds = !self.pools_known || self.serving.iter().any(ServingPool::is_bound);
        add.depends_on_pod(binds)
    }

    /// Whether it can be decided which pools the pod may use. The decision needs the pod's namespace, unless the pod
    /// names pools and no pool selects namespaces.
    pub(crate) fn is_decidable(&self, pod: &Pod) -> bool {
        let names_pools = pod.annotations.contains_key(POOLS_ANNOTATION);
        let has_namespace = self.namespaces.get(&pod.namespace).is_some();
        let is_of_use = !names_pools || self.serving.iter().any(ServingPool::is_bound);
        self.pools_known && (has_namespace || !is_of_use)
    }

    /// Whether an ADD should stop waiting for its pod. The ADD stops waiting if the watch of pods has failed. It also
    /// stops if the agent knows the pools and the pod, and has tried to read the pod's namespace.
    pub(crate) fn is_enough(&self, found: Option<&Pod>) -> bool {
        let is_settled = |pod: &Pod| self.namespaces.is_settled(&pod.namespace);
        self.pods_troubled || self.pools_known && found.is_some_and(is_settled)
    }
}
