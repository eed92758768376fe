//! The objects of one kind with all versions that they ever had, and watches of them.
//!
//! A list is a consistent snapshot. A watch delivers later changes in order, with any delay. A watch that restarts
//! delivers the objects that exist, and does not report deletions that happened meanwhile.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cadastre_controller::cluster::names::ObjectUid;
use cadastre_controller::cluster::objects::Object;
use cadastre_daemon::watch::ObjectEvent;

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
    cadastre_controller::cluster::objects::Node,
    cadastre_controller::cluster::objects::Pool,
    cadastre_controller::cluster::objects::Subnet,
    cadastre_controller::cluster::objects::Block,
    cadastre_controller::cluster::objects::ServiceRange,
    cadastre_controller::cluster::objects::Pod
);

/// One change in the history.
pub struct Logged<T> {
    #[expect(dead_code, reason = "for whoever prints the history")]
    pub at: Time,
    pub deleted: bool,
    pub object: Arc<T>,
}

/// All objects of a kind, and their history.
pub struct Kind<T: Object> {
    pub live: BTreeMap<T::Name, Arc<T>>,
    pub log: Vec<Logged<T>>,
    /// The version of the kind's last change.
    version: u64,
}

impl<T: Object> Default for Kind<T> {
    fn default() -> Self {
        Kind {
            live: BTreeMap::new(),
            log: Vec::new(),
            version: 0,
        }
    }
}

impl<T: Versioned> Kind<T> {
    pub fn get<N: Ord + ?Sized>(&self, name: &N) -> Option<&Arc<T>>
    where
        T::Name: Borrow<N>,
    {
        self.live.get(name)
    }

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

    /// Removes an object; watches receive its last state with the version of the removal.
    pub fn remove(&mut self, name: &T::Name, version: u64, at: Time) -> Option<Arc<T>> {
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

    /// Restores the objects and the version of a backup. Watches deliver none of this.
    pub fn put_back(&mut self, live: BTreeMap<T::Name, Arc<T>>, version: u64) {
        (self.live, self.version) = (live, version);
    }
}

/// A process's watch of one kind.
pub struct Feed<T> {
    stage: Stage<T>,
    /// The index of the next change in the log to deliver.
    cursor: usize,
    /// The version up to which changes were delivered.
    seen: u64,
    pub scheduled: bool,
    /// Until when the watch delivers nothing, because its connection is cut or slow.
    pub held_until: Time,
}

enum Stage<T> {
    Down,
    /// The start of the list was delivered, but the list is not read yet: it will contain changes that happen now.
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
    pub fn relist(&mut self) {
        self.stage = Stage::Down;
    }

    /// The server was restored to an older state. A watch resumes after the last version that it delivered, so it
    /// delivers nothing until the server has passed that version again; an unfinished list starts again.
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

    pub fn next(&mut self, kind: &Kind<T>, asked: Duration) -> Option<ObjectEvent<T>> {
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
                Some(ObjectEvent::Restarted { asked })
            }
            Stage::Listing { snapshot, next } => {
                if let Some(object) = snapshot.get(*next) {
                    *next += 1;
                    return Some(ObjectEvent::Applied(T::clone(object)));
                }
                self.stage = Stage::Listed;
                Some(ObjectEvent::Listed)
            }
            Stage::Listed => {
                self.stage = Stage::Watching;
                Some(ObjectEvent::Reached(self.seen))
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
                    ObjectEvent::Deleted(object)
                } else {
                    ObjectEvent::Applied(object)
                })
            }
        }
    }
}

/// What a process has received of one kind, for the checks. An object counts as known until the process has
/// received its deletion, or a complete list without it.
pub struct View<T: Object> {
    pub objects: BTreeMap<T::Name, T>,
    unseen: Option<BTreeMap<T::Name, ObjectUid>>,
    pub listed: bool,
}

impl<T: Object> Default for View<T> {
    fn default() -> Self {
        View {
            objects: BTreeMap::new(),
            unseen: None,
            listed: false,
        }
    }
}

impl<T: Object + Clone> View<T> {
    /// Records a watch event; returns the objects that the event removes.
    pub fn take(&mut self, change: &ObjectEvent<T>) -> Vec<T> {
        match change {
            ObjectEvent::Restarted { .. } => {
                let names = self
                    .objects
                    .values()
                    .map(|o| (o.name().clone(), o.uid().clone()));
                self.unseen = Some(names.collect());
                Vec::new()
            }
            ObjectEvent::Applied(object) => {
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(object.name());
                }
                let before = self.objects.insert(object.name().clone(), object.clone());
                before
                    .into_iter()
                    .filter(|b| b.uid() != object.uid())
                    .collect()
            }
            ObjectEvent::Reached(_) => Vec::new(),
            ObjectEvent::Listed => {
                self.listed = true;
                let gone = self.unseen.take().unwrap_or_default();
                gone.keys()
                    .filter_map(|name| self.objects.remove(name))
                    .collect()
            }
            ObjectEvent::Deleted(object) => {
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
