//! What the watches have shown, for those who serve, and what those have met with meanwhile.
//!
//! The loop owns the one and offers it anew whenever it has changed; nothing of it changes under those who
//! read it. The other is read by the loop before each turn.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::choice::ServingPool;
use super::namespaces::Namespaces;
use super::pods::{Pod, Pods};
use super::wishes::WishBook;
use cadastre_api::POOLS_ANNOTATION;
use cadastre_daemon::events::Notice;
use cadastre_node::Add;

/// Both of it.
#[derive(Default)]
pub struct Known {
    shown: watch::Sender<Arc<Shown>>,
    desk: Mutex<Desk>,
}

/// What the watches have shown.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Shown {
    /// The pods of this node
    pub pods: Pods,
    /// Whether their watch is at work
    pub pods_followed: bool,
    /// Whether it has failed since it was last
    pub pods_troubled: bool,
    /// Whether the pools below are those of the NodeSubnet, read since the start
    pub pools_known: bool,
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
}

/// What those who serve have met with.
#[derive(Debug, Default)]
pub struct Desk {
    /// A pod that was refused, as nothing is known of it
    pub turned_away: Option<String>,
    /// Who wants addresses that are not there
    pub wishes: WishBook,
    /// Whether the loop should know of what has changed here
    pub is_changed: bool,
    /// What people are to be told
    pub notices: Vec<Notice>,
    /// Directories in which network namespaces were seen
    pub netns_roots: BTreeSet<PathBuf>,
    /// What was complained of, by pod UID
    complained: BTreeMap<String, Vec<String>>,
}

impl Known {
    /// What was shown last.
    pub fn shown(&self) -> Arc<Shown> {
        Arc::clone(&self.shown.borrow())
    }

    /// What is shown from now on. With `is_news`, those who wait for a pod look again.
    pub fn offer(&self, shown: Arc<Shown>, is_news: bool) {
        let pods = &shown.pods;
        let is_here = |uid: &String, _: &mut Vec<String>| pods.by_uid(uid).is_some();
        self.lock().complained.retain(is_here);
        self.shown.send_if_modified(|is| {
            *is = shown;
            is_news
        });
    }

    /// Wakes whenever there is news of the pods from now on.
    pub fn follow(&self) -> watch::Receiver<Arc<Shown>> {
        self.shown.subscribe()
    }

    /// Reads or changes what those who serve have met with. Never held across an await.
    pub fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
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
}

impl Shown {
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
