//! The objects of one kind with every version they ever had, and a watch on them.
//!
//! A list is a consistent snapshot; a watch delivers what happened after it in the order it
//! happened, as late as it likes. A watch that starts over names what exists and says nothing of
//! what went meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cadastre_controller::cluster::seen::{Object, Text};
use cadastre_daemon::watch::Change;

use super::clock::Time;

/// An object whose `metadata.resourceVersion` the server sets.
pub trait Versioned: Object + Clone + PartialEq {
    fn set_version(&mut self, version: u64);
}

macro_rules! versioned {
    ($($kind:ty),*) => {$(
        impl Versioned for $kind {
            fn set_version(&mut self, version: u64) { self.version = version; }
        }
    )*};
}
versioned!(
    cadastre_controller::cluster::seen::Node,
    cadastre_controller::cluster::seen::Pool,
    cadastre_controller::cluster::seen::Subnet,
    cadastre_controller::cluster::seen::Block,
    cadastre_controller::cluster::seen::ServiceRange,
    cadastre_controller::cluster::seen::Pod
);

/// One entry of the history.
pub struct Logged<T> {
    #[expect(dead_code, reason = "for whoever prints the history")]
    pub at: Time,
    pub deleted: bool,
    pub object: Arc<T>,
}

/// All objects of a kind, and how they came to be.
pub struct Kind<T> {
    pub live: BTreeMap<Text, Arc<T>>,
    pub log: Vec<Logged<T>>,
    /// The last version of anything of the kind.
    version: u64,
}

impl<T> Default for Kind<T> {
    fn default() -> Self {
        Kind {
            live: BTreeMap::new(),
            log: Vec::new(),
            version: 0,
        }
    }
}

impl<T: Versioned> Kind<T> {
    pub fn get(&self, name: &str) -> Option<&Arc<T>> {
        self.live.get(name)
    }

    /// Stores the object under a new version.
    pub fn put(&mut self, mut object: T, version: u64, at: Time) -> Arc<T> {
        object.set_version(version);
        self.version = version;
        let object = Arc::new(object);
        self.live.insert(object.name().clone(), object.clone());
        self.log.push(Logged {
            at,
            deleted: false,
            object: object.clone(),
        });
        object
    }

    /// Removes it; watches are told its last state with the version of the removal.
    pub fn remove(&mut self, name: &str, version: u64, at: Time) -> Option<Arc<T>> {
        let last = self.live.remove(name)?;
        self.version = version;
        let mut object = T::clone(&last);
        object.set_version(version);
        self.log.push(Logged {
            at,
            deleted: true,
            object: Arc::new(object),
        });
        Some(last)
    }

    /// All of it is as it was then, at that version of the server. No watch is told.
    pub fn put_back(&mut self, live: BTreeMap<Text, Arc<T>>, version: u64) {
        (self.live, self.version) = (live, version);
    }
}

/// One process's watch of one kind.
pub struct Feed<T> {
    stage: Stage<T>,
    /// How much of the log has been delivered.
    cursor: usize,
    /// The version up to which it has been delivered.
    seen: u64,
    /// Whether a delivery is on its way already.
    pub scheduled: bool,
    /// Nothing comes before: the connection is cut or slow.
    pub held_until: Time,
}

enum Stage<T> {
    Down,
    /// The list was announced, not made yet: what happens now is in it.
    Announced,
    Listing {
        snapshot: Vec<Arc<T>>,
        next: usize,
    },
    Listed,
    Watching,
}

impl<T> Default for Feed<T> {
    fn default() -> Self {
        Feed {
            stage: Stage::Down,
            cursor: 0,
            seen: 0,
            scheduled: false,
            held_until: 0,
        }
    }
}

impl<T: Versioned> Feed<T> {
    /// The watch starts over with a list.
    pub fn relist(&mut self) {
        self.stage = Stage::Down;
    }

    /// The server was put back to an older state. A watch goes on after the version that it has seen,
    /// so it shows nothing until the server is past that one again; a list that ran is begun anew.
    pub fn cut(&mut self, kind: &Kind<T>) {
        self.cursor = kind.log.len();
        if !self.is_watching() {
            self.stage = Stage::Down;
        }
    }

    pub fn is_watching(&self) -> bool {
        matches!(self.stage, Stage::Watching)
    }

    pub fn has_next(&self, kind: &Kind<T>) -> bool {
        !self.is_watching() || self.cursor < kind.log.len()
    }

    pub fn next(&mut self, kind: &Kind<T>, asked: Duration) -> Option<Change<T>> {
        if let Stage::Announced = self.stage {
            (self.cursor, self.seen) = (kind.log.len(), kind.version);
            self.stage = Stage::Listing {
                snapshot: kind.live.values().cloned().collect(),
                next: 0,
            };
        }
        match &mut self.stage {
            Stage::Down | Stage::Announced => {
                self.stage = Stage::Announced;
                Some(Change::Restarted { asked })
            }
            Stage::Listing { snapshot, next } => {
                if let Some(object) = snapshot.get(*next) {
                    *next += 1;
                    return Some(Change::Applied(T::clone(object)));
                }
                self.stage = Stage::Listed;
                Some(Change::Listed)
            }
            Stage::Listed => {
                self.stage = Stage::Watching;
                Some(Change::Reached(self.seen))
            }
            Stage::Watching => {
                let mut logged = kind.log.get(self.cursor)?;
                self.cursor += 1;
                while logged.object.version() <= self.seen {
                    logged = kind.log.get(self.cursor)?;
                    self.cursor += 1;
                }
                self.seen = logged.object.version();
                let object = T::clone(&logged.object);
                Some(if logged.deleted {
                    Change::Deleted(object)
                } else {
                    Change::Applied(object)
                })
            }
        }
    }
}

/// What a process has been shown of one kind, for the checks: an object counts as known until its
/// deletion, or a complete list without it, was delivered.
pub struct View<T> {
    pub objects: BTreeMap<Text, T>,
    unseen: Option<BTreeMap<Text, Text>>,
    pub listed: bool,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        View {
            objects: BTreeMap::new(),
            unseen: None,
            listed: false,
        }
    }
}

impl<T: Object + Clone> View<T> {
    /// Takes in a delivery; returns what is gone by it.
    pub fn take(&mut self, change: &Change<T>) -> Vec<T> {
        match change {
            Change::Restarted { .. } => {
                let names = self
                    .objects
                    .values()
                    .map(|o| (o.name().clone(), o.uid().clone()));
                self.unseen = Some(names.collect());
                Vec::new()
            }
            Change::Applied(object) => {
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(object.name());
                }
                let before = self.objects.insert(object.name().clone(), object.clone());
                before
                    .into_iter()
                    .filter(|b| b.uid() != object.uid())
                    .collect()
            }
            Change::Reached(_) => Vec::new(),
            Change::Listed => {
                self.listed = true;
                let gone = self.unseen.take().unwrap_or_default();
                gone.keys()
                    .filter_map(|name| self.objects.remove(name))
                    .collect()
            }
            Change::Deleted(object) => {
                if self
                    .objects
                    .get(object.name())
                    .is_some_and(|known| known.uid() == object.uid())
                {
                    return self.objects.remove(object.name()).into_iter().collect();
                }
                Vec::new()
            }
        }
    }
}
