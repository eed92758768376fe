//! The state that the agent's main loop and the servers on the node's sockets share.
//!
//! The loop owns [`WatchState`], its view of the API, and replaces it as a whole when it has changed, so that nothing
//! changes under its readers. The servers write the [`ServiceState`], which the loop reads before each turn.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::choice::ServingPool;
use super::namespaces::Namespaces;
use super::pending_adds::PendingAddBook;
use super::pods::{Pod, Pods};
use cadastre_api::POOLS_ANNOTATION;
use cadastre_daemon::events::EventNote;
use cadastre_node::Add;

/// The state that the loop and the servers share.
#[derive(Default)]
pub struct SharedState {
    shown: watch::Sender<Arc<WatchState>>,
    desk: Mutex<ServiceState>,
}

/// The API as the loop last saw it, for the servers.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct WatchState {
    /// The pods of this node
    pub pods: Pods,
    /// Whether the watch of pods is established
    pub pods_followed: bool,
    /// Whether the watch has failed since it was last established
    pub pods_troubled: bool,
    /// Whether the pools below come from a NodeSubnet that was read since the agent started
    pub pools_known: bool,
    /// Pools that may serve pods, best first
    pub serving: Vec<ServingPool>,
    /// Pools with ranges on this node that are not in `serving`
    pub others: Vec<String>,
    /// Pools from which blocks can be requested, best first
    pub askable: Vec<String>,
    /// The pools that serve every pod that does not ask for a pool by name
    pub automatic: BTreeSet<String>,
    /// Whether a pool that is both in `askable` and `automatic` allocates a block to this node before any pod needs one
    pub gives_unasked: bool,
    /// Pools of which the node has as many blocks of a family as its limit allows, with that limit
    pub at_limit: BTreeMap<String, u32>,
    /// Pools with blocks on this node that still assign addresses
    pub allocating_pools: BTreeSet<String>,
    /// The namespaces of the pods of this node
    pub namespaces: Namespaces,
}

/// What the servers have recorded for the loop while they handled requests.
#[derive(Debug, Default)]
pub struct ServiceState {
    /// A pod that was refused because the agent knows nothing about it
    pub turned_away: Option<String>,
    /// The waiting ADDs, and the pools that they want addresses of
    pub pending_adds: PendingAddBook,
    /// Whether the loop should act on a change in this state
    pub is_changed: bool,
    /// Events to emit
    pub notices: Vec<EventNote>,
    /// Directories in which network namespaces were seen
    pub netns_roots: BTreeSet<PathBuf>,
    /// The errors reported last about the annotations of each pod, by pod UID
    complained: BTreeMap<String, Vec<String>>,
}

impl SharedState {
    /// Returns the last state that the loop has shown.
    pub fn shown(&self) -> Arc<WatchState> {
        Arc::clone(&self.shown.borrow())
    }

    /// Replaces the state that is shown. `is_news` wakes the ADDs that wait for their pod.
    pub(crate) fn update_served_pools(&self, shown: Arc<WatchState>, is_news: bool) {
        let pods = &shown.pods;
        let is_here = |uid: &String, _: &mut Vec<String>| pods.by_uid(uid).is_some();
        self.lock().complained.retain(is_here);
        self.shown.send_if_modified(|is| {
            *is = shown;
            is_news
        });
    }

    /// Returns a receiver that wakes when the state is replaced with `is_news` from now on.
    pub fn follow(&self) -> watch::Receiver<Arc<WatchState>> {
        self.shown.subscribe()
    }

    /// Locks the state that the servers write. The lock must not be held across an await.
    pub fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServiceState {
    /// Records the errors that a pod's annotations have now. Returns those that were not recorded before.
    pub(crate) fn report_errors(&mut self, uid: &str, complaints: &[String]) -> Vec<String> {
        let told = self.complained.entry(uid.to_owned()).or_default();
        let fresh = |it: &&String| !told.contains(it);
        let fresh: Vec<String> = complaints.iter().filter(fresh).cloned().collect();
        *told = complaints.to_vec();
        if told.is_empty() {
            self.complained.remove(uid);
        }
        fresh
    }
}

impl WatchState {
    /// Whether the node may request a block of any pool.
    pub(crate) fn may_ask(&self) -> bool {
        !self.askable.is_empty()
    }

    /// Whether blocks are allocated only when a pod needs one.
    pub(crate) fn waits_for_pods(&self) -> bool {
        self.may_ask() && !self.gives_unasked
    }

    /// Whether the result of an ADD depends on labels or annotations of its pod. Until the pools are known, the answer
    /// is yes.
    pub(crate) fn depends_on_pod(&self, add: &Add) -> bool {
        let any = |is: fn(&ServingPool) -> bool| !self.pools_known || self.serving.iter().any(is);
        add.depends_on_pod(any(ServingPool::is_selective), any(ServingPool::is_bound))
    }

    /// Whether the pools of the pod can be decided. The namespace must be known, unless no pool could depend on it.
    pub(crate) fn is_decidable(&self, pod: &Pod) -> bool {
        let names_pools = pod.annotations.contains_key(POOLS_ANNOTATION);
        let has_namespace = self.namespaces.get(&pod.namespace).is_some();
        let is_of_use = !names_pools || self.serving.iter().any(ServingPool::is_bound);
        self.pools_known && (has_namespace || !is_of_use)
    }

    /// Whether the agent knows enough about a pod, or waiting would bring no more knowledge soon.
    pub(crate) fn is_enough(&self, found: Option<&Pod>) -> bool {
        let is_settled = |pod: &Pod| self.namespaces.is_settled(&pod.namespace);
        self.pods_troubled || self.pools_known && found.is_some_and(is_settled)
    }
}
