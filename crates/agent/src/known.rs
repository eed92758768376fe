//! What the watches have shown, for those who serve: read under a lock, kept up by the loop.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::choice::ServingPool;
use super::namespaces::Namespaces;
use super::pods::{Pod, Pods};
use super::wishes::WishBook;
use cadastre_api::POOLS_ANNOTATION;
use cadastre_node::Add;

/// What the watches have shown, for those who serve.
#[derive(Default)]
pub struct Known {
    inner: Mutex<Inner>,
    /// Counts the changes of the pods
    pods_seen: watch::Sender<u64>,
}

/// All of it.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Inner {
    /// The pods of this node
    pub pods: Pods,
    /// Whether their watch is at work
    pub pods_followed: bool,
    /// Whether it has failed since it was last
    pub pods_troubled: bool,
    /// Whether the pools below are those of the NodeSubnet, read since the start
    pub pools_known: bool,
    /// A pod that was refused, as nothing is known of it
    pub turned_away: Option<String>,
    /// Pools that may serve pods, best first
    pub serving: Vec<ServingPool>,
    /// Pools of ranges here that are not among them
    pub others: Vec<String>,
    /// Pools that blocks can be asked of, best first
    pub askable: Vec<String>,
    /// Those of them that serve any pod
    pub automatic: BTreeSet<String>,
    /// Whether one of those gives this node a block unasked
    pub gives_unasked: bool,
    /// Pools of which the node has as many blocks of a family as it may: how many
    pub at_limit: BTreeMap<String, u32>,
    /// Pools of which there are blocks here that give new addresses
    pub giving: BTreeSet<String>,
    /// The namespaces of pods of this node
    pub namespaces: Namespaces,
    /// Who wants addresses that are not there
    pub wishes: WishBook,
    /// Directories in which network namespaces were seen
    pub netns_roots: BTreeSet<PathBuf>,
    /// What was complained of, by pod UID
    complained: BTreeMap<String, Vec<String>>,
}

impl Known {
    /// Reads or changes it. Never held across an await.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pods have changed.
    pub fn pods_changed(&self) {
        self.pods_seen.send_modify(|count| *count += 1);
    }

    /// Wakes whenever the pods have changed from now on.
    pub fn follow_pods(&self) -> watch::Receiver<u64> {
        self.pods_seen.subscribe()
    }
}

impl Inner {
    /// Takes note of what is wrong with a pod now; returns what of it was not told before.
    pub fn complain(&mut self, uid: &str, complaints: &[String]) -> Vec<String> {
        let told = self.complained.entry(uid.to_owned()).or_default();
        let fresh = |it: &&String| !told.contains(it);
        let fresh: Vec<String> = complaints.iter().filter(fresh).cloned().collect();
        *told = complaints.to_vec();
        if told.is_empty() {
            self.complained.remove(uid);
        }
        fresh
    }

    /// Forgets what was complained of pods that are gone.
    pub fn forget_complaints(&mut self) {
        let pods = &self.pods;
        self.complained.retain(|uid, _| pods.by_uid(uid).is_some());
    }

    /// Whether a block could be asked for by some pod.
    pub fn may_ask(&self) -> bool {
        !self.askable.is_empty()
    }

    /// Whether blocks come only when a pod asks.
    pub fn waits_for_pods(&self) -> bool {
        self.may_ask() && !self.gives_unasked
    }

    /// Whether what an ADD gets depends on labels or annotations of its pod. It may, before pools are known.
    pub fn depends_on_pod(&self, add: &Add) -> bool {
        let any = |is: fn(&ServingPool) -> bool| !self.pools_known || self.serving.iter().any(is);
        add.depends_on_pod(any(ServingPool::is_selective), any(ServingPool::is_bound))
    }

    /// Whether it is known what the pod may have: also what its namespace says, if it says nothing itself.
    pub fn is_decidable(&self, pod: &Pod) -> bool {
        let names_pools = pod.annotations.contains_key(POOLS_ANNOTATION);
        let has_namespace = self.namespaces.get(&pod.namespace).is_some();
        let is_of_use = !names_pools || self.serving.iter().any(ServingPool::is_bound);
        self.pools_known && (has_namespace || !is_of_use)
    }

    /// Whether what is known of a pod is all that can be known soon.
    pub fn is_enough(&self, found: Option<&Pod>) -> bool {
        let is_settled = |pod: &Pod| self.namespaces.is_settled(&pod.namespace);
        self.pods_troubled || self.pools_known && found.is_some_and(is_settled)
    }
}
