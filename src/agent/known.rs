//! What the watches have shown, for those who serve: read under a lock, kept up by the loop.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::choice::ServingPool;
use super::namespaces::Namespaces;
use super::pods::{Pod, Pods};
use super::wishes::WishBook;

/// What the watches have shown, for those who serve.
#[derive(Default)]
pub struct Known {
    inner: Mutex<Inner>,
    /// Counts the changes of the pods
    pods_seen: watch::Sender<u64>,
}

/// All of it.
#[derive(Default)]
pub struct Inner {
    /// The pods of this node
    pub pods: Pods,
    /// Whether their watch is at work
    pub pods_followed: bool,
    /// Pools that may serve pods, best first
    pub serving: Vec<ServingPool>,
    /// Pools of ranges here that are not among them
    pub others: Vec<String>,
    /// Pools that blocks can be asked of, best first
    pub askable: Vec<String>,
    /// Those of them that serve any pod
    pub automatic: BTreeSet<String>,
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

    /// Whether a block could be asked for by any pod.
    pub fn may_ask(&self) -> bool {
        let mut askable = self.askable.iter();
        askable.any(|pool| self.automatic.contains(pool))
    }

    /// Whether what is known of a pod is all that can be known soon.
    pub fn is_enough(&self, found: Option<&Pod>) -> bool {
        if !self.pods_followed || !self.pods.is_complete() {
            return true;
        }
        found.is_some_and(|pod| self.namespaces.is_settled(&pod.namespace))
    }
}
