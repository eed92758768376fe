//! The objects of one kind with all versions that they ever had, and watches of them.
//!
//! A list is a consistent snapshot. A watch delivers later changes in order, with any delay. A watch that restarts
//! delivers the objects that exist, and does not report deletions that happened before the restart.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug, Write};
use std::sync::Arc;
use std::time::Duration;

use cadastre_controller::cluster::objects::{
    Block, Claim, FrrConfiguration, Node, Object, Pod, Pool, Routes, ServiceRange, Subnet,
};
use cadastre_daemon::watch::ObjectEvent;

use super::api::{Api, Commit};

/// A kind of objects that the API server stores.
pub trait Stored: Object + Clone + Debug + PartialEq {
    fn set_version(&mut self, version: u64);
    fn kind(api: &Api) -> &Kind<Self>;
    fn kind_mut(api: &mut Api) -> &mut Kind<Self>;
    fn commit(before: Option<Arc<Self>>, after: Option<Arc<Self>>) -> Commit;
}

macro_rules! stored {
    ($($kind:ident: $field:ident),*) => {$(
        impl Stored for $kind {
            fn set_version(&mut self, version: u64) { self.version = version; }
            fn kind(api: &Api) -> &Kind<Self> { &api.$field }
            fn kind_mut(api: &mut Api) -> &mut Kind<Self> { &mut api.$field }
            fn commit(before: Option<Arc<Self>>, after: Option<Arc<Self>>) -> Commit {
                Commit::$kind(before, after)
            }
        }
    )*};
}
stored!(Node: nodes, Pool: pools, Subnet: subnets, Routes: routes, FrrConfiguration: frr_configurations, Block: blocks, Claim: claims, ServiceRange: services, Pod: pods);

/// One change in the history.
#[derive(Clone, Debug)]
struct Change<T> {
    deleted: bool,
    object: Arc<T>,
}

/// All objects of a kind, and their history.
#[derive(Clone)]
pub struct Kind<T: Object> {
    pub live: BTreeMap<T::Name, Arc<T>>,
    log: Vec<Change<T>>,
    /// The version of the kind's last change.
    pub version: u64,
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

impl<T: Stored> Kind<T> {
    pub fn get<N: Ord + ?Sized>(&self, name: &N) -> Option<&Arc<T>>
    where
        T::Name: Borrow<N>,
    {
        self.live.get(name)
    }

    /// Returns all versions that objects of this kind ever had.
    pub fn versions(&self) -> impl Iterator<Item = &T> {
        self.log.iter().map(|change| &*change.object)
    }

    /// Returns the objects that existed at a version.
    pub fn at(&self, version: u64) -> Vec<&T> {
        let until = self.log.iter();
        let until = until.take_while(|change| change.object.version() <= version);
        let mut then: BTreeMap<&T::Name, &T> = BTreeMap::new();
        for change in until {
            if change.deleted {
                then.remove(change.object.name());
            } else {
                then.insert(change.object.name(), &change.object);
            }
        }
        then.into_values().collect()
    }

    pub fn put(&mut self, object: T, version: u64) -> Arc<T> {
        let object = self.record(object, version, false);
        self.live.insert(object.name().clone(), object.clone());
        object
    }

    /// Removes an object. Watches receive its last state, with the version of the removal.
    pub fn remove(&mut self, name: &T::Name, version: u64) -> Option<Arc<T>> {
        let last = self.live.remove(name)?;
        self.record(T::clone(&last), version, true);
        Some(last)
    }

    fn record(&mut self, mut object: T, version: u64, deleted: bool) -> Arc<T> {
        object.set_version(version);
        self.version = version;
        let object = Arc::new(object);
        self.log.push(Change {
            deleted,
            object: object.clone(),
        });
        object
    }
}

/// The watch of one process for the objects of one kind.
#[derive(Clone)]
pub struct Feed<T> {
    stage: Stage<T>,
    /// The index in the log of the change that is delivered next.
    cursor: usize,
    /// The version up to which changes were delivered.
    seen: u64,
}

#[derive(Clone)]
enum Stage<T> {
    Down,
    /// The start of the list was delivered. The content of the list is read later, so it will include changes that
    /// happen before that.
    Announced,
    Listing(std::vec::IntoIter<Arc<T>>),
    Listed,
    Watching,
}

impl<T> Default for Feed<T> {
    fn default() -> Self {
        Feed {
            stage: Stage::Down,
            cursor: 0,
            seen: 0,
        }
    }
}

/// A watch, whatever the kind of its objects is.
pub trait AnyFeed {
    /// Restarts the watch with a list.
    fn relist(&mut self);

    /// Handles a restore of the server to an older state. A watch resumes after the last version that it delivered, so
    /// it delivers nothing until the server has passed that version again. An unfinished list starts again.
    fn cut(&mut self, api: &Api);

    fn has_next(&self, api: &Api) -> bool;

    fn is_watching(&self) -> bool;

    /// Appends the undelivered events to `text`. Watches with equal texts are in equal states.
    fn describe(&self, api: &Api, text: &mut dyn Write) -> fmt::Result;
}

impl<T: Stored> AnyFeed for Feed<T> {
    fn relist(&mut self) {
        self.stage = Stage::Down;
    }

    fn cut(&mut self, api: &Api) {
        self.cursor = T::kind(api).log.len();
        if !self.is_watching() {
            self.relist();
        }
    }

    fn has_next(&self, api: &Api) -> bool {
        !self.is_watching() || self.cursor < T::kind(api).log.len()
    }

    fn is_watching(&self) -> bool {
        matches!(self.stage, Stage::Watching)
    }

    fn describe(&self, api: &Api, text: &mut dyn Write) -> fmt::Result {
        let is_watching = self.is_watching();
        let pending = T::kind(api).log.iter().skip(self.cursor);
        let pending = pending.filter(|it| is_watching && it.object.version() > self.seen);
        write!(text, "{is_watching} ")?;
        pending
            .into_iter()
            .try_for_each(|it| write!(text, "{} {:?} ", it.deleted, it.object))
    }
}

impl<T: Stored> Feed<T> {
    /// Returns the next event. `asked` is the monotonic time at which a list that begins now is requested.
    pub fn next(&mut self, api: &Api, asked: Duration) -> Option<ObjectEvent<T>> {
        let kind = T::kind(api);
        if let Stage::Announced = self.stage {
            (self.cursor, self.seen) = (kind.log.len(), kind.version);
            let snapshot: Vec<Arc<T>> = kind.live.values().cloned().collect();
            self.stage = Stage::Listing(snapshot.into_iter());
        }
        match &mut self.stage {
            Stage::Down | Stage::Announced => {
                self.stage = Stage::Announced;
                Some(ObjectEvent::Restarted { asked })
            }
            Stage::Listing(snapshot) => {
                if let Some(object) = snapshot.next() {
                    return Some(ObjectEvent::Applied(T::clone(&object)));
                }
                self.stage = Stage::Listed;
                Some(ObjectEvent::Listed)
            }
            Stage::Listed => {
                self.stage = Stage::Watching;
                Some(ObjectEvent::Reached(self.seen))
            }
            Stage::Watching => loop {
                let change = kind.log.get(self.cursor)?;
                self.cursor += 1;
                if change.object.version() <= self.seen {
                    continue;
                }
                self.seen = change.object.version();
                let object = T::clone(&change.object);
                return Some(if change.deleted {
                    ObjectEvent::Deleted(object)
                } else {
                    ObjectEvent::Applied(object)
                });
            },
        }
    }
}

/// The objects of one kind as one process has received them. The checks record these objects. An object counts as known
/// until the process has received its deletion, or a complete list without it.
pub struct View<T: Object> {
    pub objects: BTreeMap<T::Name, T>,
    /// The names of known objects that the list has not contained so far. `None` if no list is being delivered.
    unlisted: Option<BTreeSet<T::Name>>,
}

impl<T: Object> Default for View<T> {
    fn default() -> Self {
        View {
            objects: BTreeMap::new(),
            unlisted: None,
        }
    }
}

impl<T: Object + Clone> View<T> {
    /// Records a watch event; returns the objects that the event removes.
    pub fn take(&mut self, change: &ObjectEvent<T>) -> Vec<T> {
        match change {
            ObjectEvent::Restarted { .. } => {
                self.unlisted = Some(self.objects.keys().cloned().collect());
                Vec::new()
            }
            ObjectEvent::Applied(object) => {
                if let Some(unlisted) = &mut self.unlisted {
                    unlisted.remove(object.name());
                }
                let before = self.objects.insert(object.name().clone(), object.clone());
                let replaced = before.filter(|before| before.uid() != object.uid());
                replaced.into_iter().collect()
            }
            ObjectEvent::Reached(_) => Vec::new(),
            ObjectEvent::Listed => {
                let gone = self.unlisted.take().into_iter().flatten();
                gone.filter_map(|name| self.objects.remove(&name)).collect()
            }
            ObjectEvent::Deleted(object) => {
                let known = self.objects.get(object.name());
                let is_known = known.is_some_and(|known| known.uid() == object.uid());
                let gone = is_known.then(|| self.objects.remove(object.name()));
                gone.flatten().into_iter().collect()
            }
        }
    }
}
