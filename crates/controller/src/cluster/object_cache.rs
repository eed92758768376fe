//! Cache of the objects of one kind. A *relist* is a list with which the watch begins again. A *requested list* is the
//! answer to a request of a loop.
//!
//! # Guarantees
//! - Watch events are applied in order. Objects that a relist did not show are reported as gone when the relist ends.
//! - If an answer to a request is newer than the watch, the answer is applied at once. But an answer never restores an
//!   object that the watch has shown as deleted. No object goes back to an older version.
//! - An object that an answer has shown to be gone stays gone, even if the watch still delivers older events of it.
//! - If a requested list shows older versions than the cache had when the list was requested, the API server was
//!   restored to an older state. The outcome is [`ListOutcome::PutBack`].
//!
//! # Assumptions
//! Within one kind, `resourceVersion`s grow and a watch delivers them in order. Lists are consistent reads: the API
//! server never answers them from a cache that may be behind.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::names::ObjectUid;
use super::objects::Object;
use cadastre_core::mutation::Mutation;
use cadastre_daemon::watch::ObjectEvent;

/// The effect of a change on the object of one name.
#[derive(Clone, Debug)]
pub struct ObjectUpdate<T> {
    /// The object before the change; `None` if there was none.
    pub before: Option<Arc<T>>,
    /// The object after the change; `None` if it is gone.
    pub after: Option<Arc<T>>,
}

/// The state of a cache when a request was sent, by which the cache finds out whether the answer is outdated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheMark {
    /// The number of times that a list of the watch had begun or ended when the request was sent, see
    /// [`ObjectCache::answer`].
    pub epoch: u64,
    /// The highest version from any source that the cache knew when the request was sent
    latest: u64,
    /// The highest version that the watch had delivered when the request was sent
    horizon: u64,
}

/// What the cache has done with a requested list.
#[derive(Debug)]
pub enum ListOutcome<T> {
    /// The list is applied, with these changes.
    Applied(Vec<ObjectUpdate<T>>),
    /// The list may be older than the cache, or a relist is running. So the list must be requested again.
    Outdated,
    /// The server no longer has objects that it had shown. So the server was restored to an older state.
    PutBack,
}

/// Cached objects of one kind, by name.
#[derive(Clone, Debug)]
pub struct ObjectCache<T: Object> {
    objects: BTreeMap<T::Name, Arc<T>>,
    /// The names of cached objects that the running relist has not shown yet; `None` if no relist is running
    unseen: Option<BTreeSet<T::Name>>,
    /// The number of times that a list of the watch has begun or ended.
    epoch: u64,
    /// UIDs of objects that an answer has shown to be gone, with the epoch of that answer. The UIDs are kept until the
    /// watch shows the deletion or a later list of the watch is complete.
    gone: BTreeMap<ObjectUid, u64>,
    /// The highest version in any requested list. Such a list includes the effects of all watch events up to this
    /// version.
    floor: u64,
    /// The monotonic time at which the running list of the watch was requested; `None` if no list is running
    listing: Option<Duration>,
    /// The highest version that was known when the running list of the watch began
    known_before: u64,
    /// The monotonic time at which the last complete list of the watch was requested. `None` before the first complete
    /// list. A doubtful list does not change this time, except that a doubtful first list sets it to zero
    listed: Option<Duration>,
    /// The highest version that the watch has delivered.
    horizon: u64,
    /// The highest version from any source: watch, list or answer.
    latest: u64,
    /// The watch has delivered all changes up to this version. The value is 0 from the beginning of a list until the
    /// watch reports a version
    reached: u64,
    /// Whether the running or the last list of the watch has shown an older version of an object than was known. If so,
    /// the list is doubtful, because the server may have been restored to an older state.
    is_doubtful: bool,
}

impl<T: Object> Default for ObjectCache<T> {
    fn default() -> Self {
        ObjectCache {
            objects: BTreeMap::new(),
            unseen: None,
            epoch: 0,
            gone: BTreeMap::new(),
            floor: 0,
            listing: None,
            known_before: 0,
            listed: None,
            horizon: 0,
            latest: 0,
            reached: 0,
            is_doubtful: false,
        }
    }
}

impl<T: Object> ObjectCache<T> {
    /// Returns whether a list has been completed since the start.
    pub(crate) fn is_listed(&self) -> bool {
        self.listed.is_some()
    }

    /// Returns whether a list is running. While it runs, objects in the cache may be of different ages.
    pub(crate) fn is_listing(&self) -> bool {
        self.unseen.is_some()
    }

    /// Returns whether the last complete list was requested at the monotonic time `time` or later. A list that has
    /// shown older versions than were known does not count.
    pub(crate) fn is_listed_since(&self, time: Duration) -> bool {
        self.listed.is_some_and(|asked| asked >= time)
    }

    /// Returns the highest object version that the cache has seen from any source.
    pub fn newest(&self) -> u64 {
        self.latest.max(self.horizon)
    }

    /// Returns whether the cache contains all changes up to `version`, and the last list of the watch was requested at
    /// the monotonic time `listed_since` or later.
    pub(crate) fn has_reached(&self, version: u64, listed_since: Duration) -> bool {
        let is_whole = self.unseen.is_none() && !self.is_doubtful;
        is_whole && self.is_listed_since(listed_since) && self.reached >= version
    }

    /// Returns the number of times that a list of the watch has begun or ended; see [`ObjectCache::answer`].
    #[cfg(test)]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the state of the cache. The caller keeps it with a request until the answer arrives.
    pub fn sent(&self) -> CacheMark {
        CacheMark {
            epoch: self.epoch,
            latest: self.newest(),
            horizon: self.horizon,
        }
    }

    /// Returns the cached object of that name. The API server may have a newer version of it.
    pub fn get<N: Ord + ?Sized>(&self, name: &N) -> Option<&Arc<T>>
    where
        T::Name: Borrow<N>,
    {
        self.objects.get(name)
    }

    /// Returns all objects in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.objects.values()
    }

    /// Returns the number of cached objects. Objects that a running relist has not shown yet count, too.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Returns whether the cache contains no object, for example because no list has arrived yet.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Removes all objects, because the API server does not have the kind. Afterwards, `is_listed` returns false.
    pub(crate) fn clear(&mut self) -> Vec<ObjectUpdate<T>> {
        self.listed = None;
        let names: Vec<T::Name> = self.objects.keys().cloned().collect();
        names.iter().filter_map(|name| self.remove(name)).collect()
    }

    /// Applies a watch event and returns its effects.
    pub fn change(&mut self, change: ObjectEvent<T>) -> Vec<ObjectUpdate<T>> {
        match change {
            ObjectEvent::Restarted { asked } => {
                self.listing = Some(asked);
                self.known_before = self.newest();
                self.reached = 0;
                self.unseen = Some(self.objects.keys().cloned().collect());
                self.epoch += 1;
                self.is_doubtful = false;
                Vec::new()
            }
            ObjectEvent::Applied(object) => {
                self.horizon = self.horizon.max(object.version());
                // A list shows objects in any order, so their versions do not prove that all older events are known.
                match &mut self.unseen {
                    Some(unseen) => _ = unseen.remove(object.name()),
                    None => self.reached = self.reached.max(object.version()),
                }
                if self.unseen.is_none() && self.is_superseded(&object) {
                    return Vec::new();
                }
                self.is_doubtful |= self.unseen.is_some() && self.is_older(&object);
                self.put(object).into_iter().collect()
            }
            ObjectEvent::Listed => {
                let listing = self.listing.take().filter(|_| !self.is_doubtful);
                self.listed = listing.or(self.listed).or(Some(Duration::ZERO));
                // An object that was gone before the list began is not in the list. So the UID of this object need no
                // longer be remembered.
                self.gone.retain(|_, epoch| *epoch >= self.epoch);
                self.epoch += 1;
                let gone = self.unseen.take().unwrap_or_default();
                gone.iter().filter_map(|name| self.remove(name)).collect()
            }
            ObjectEvent::Reached(version) => {
                self.reached = self.reached.max(version);
                Vec::new()
            }
            ObjectEvent::Deleted(object) => {
                self.horizon = self.horizon.max(object.version());
                self.reached = self.reached.max(object.version());
                self.gone.remove(object.uid());
                self.take_out(object.name(), object.uid())
                    .into_iter()
                    .collect()
            }
        }
    }

    /// Applies an object from the answer to a request that was sent in the epoch `sent`.
    ///
    /// If the cache contains the object, a newer version is always applied. Even if the object is gone by now, this
    /// does no harm, because the watch or the running list will show that it is gone.
    ///
    /// If the cache does not contain the object, the object may have been deleted before the answer arrived. So the
    /// object is ignored in each of these cases:
    /// - The watch has reached the object's version or a later one. So the watch has shown the object and its deletion.
    /// - A requested list that is newer than the object's version lacked the object.
    /// - A list of the watch has begun or ended since the request, or is running. No event would show a deletion before
    ///   that list.
    pub fn answer(&mut self, object: T, sent: u64) -> Option<ObjectUpdate<T>> {
        let known = self.objects.get(object.name());
        if known.is_some_and(|known| known.uid() == object.uid()) {
            return self.put(object);
        }
        let covered = object.version() <= self.horizon && !self.objects.contains_key(object.name());
        let covered = covered && !Mutation::GoneByWatchComesBack.is_on();
        let stale = covered || self.is_superseded(&object);
        let late = sent != self.epoch && !Mutation::AnswerBeforeRelistTaken.is_on();
        if late || self.unseen.is_some() || stale {
            return None;
        }
        self.put(object)
    }

    /// Applies a complete list that the API server read from etcd and not from its cache. `sent` is the state of this
    /// cache when the list was requested.
    pub fn replace(&mut self, objects: Vec<T>, sent: CacheMark) -> ListOutcome<T> {
        if sent.epoch != self.epoch || self.unseen.is_some() {
            return ListOutcome::Outdated;
        }
        if objects.iter().any(|it| self.is_put_back(it, sent)) {
            // Watch events that arrived after the request may include the deletion of an object that the list shows. In
            // this case, the list does not prove a restore.
            return if self.horizon == sent.horizon {
                ListOutcome::PutBack
            } else {
                ListOutcome::Outdated
            };
        }
        let highest = objects.iter().map(Object::version).max().unwrap_or(0);
        let named: BTreeSet<T::Name> = objects.iter().map(|o| o.name().clone()).collect();
        // An object that is missing in the list is gone, unless the cached version is newer than the list and became
        // known only after the request.
        let gone: Vec<(T::Name, ObjectUid)> = self
            .objects
            .values()
            .filter(|o| !named.contains(o.name()) && o.version() <= highest.max(sent.latest))
            .map(|o| (o.name().clone(), o.uid().clone()))
            .collect();
        let mut updates: Vec<ObjectUpdate<T>> = gone
            .iter()
            .filter_map(|(name, uid)| self.forget(name, uid))
            .collect();
        updates.extend(
            objects
                .into_iter()
                .filter_map(|object| self.answer(object, sent.epoch)),
        );
        if !Mutation::GoneByListComesBack.is_on() {
            self.floor = self.floor.max(highest);
        }
        ListOutcome::Applied(updates)
    }

    /// Returns whether the version of an object is so old that only a restore of the API server explains it. The object
    /// is from a list that was requested in the state `sent`.
    fn is_put_back(&self, object: &T, sent: CacheMark) -> bool {
        match self.objects.get(object.name()) {
            Some(known) => object.version() < known.version() && known.version() <= sent.latest,
            None => object.version() <= sent.horizon && !self.gone.contains_key(object.uid()),
        }
    }

    /// Returns whether the running list shows an older version of the object than was known when the list began.
    fn is_older(&self, object: &T) -> bool {
        let known = self.objects.get(object.name());
        let older = |known: &Arc<T>| {
            object.version() < known.version() && known.version() <= self.known_before
        };
        known.is_some_and(older)
    }

    /// Removes the object of that name and UID, because the answer to a request has shown that the object is gone.
    pub fn forget<N: Ord + ?Sized>(&mut self, name: &N, uid: &ObjectUid) -> Option<ObjectUpdate<T>>
    where
        T::Name: Borrow<N>,
    {
        let known = self.objects.get(name)?.clone();
        let delta = self.take_out(known.name(), uid)?;
        if !Mutation::GoneByAnswerComesBack.is_on() {
            self.gone.insert(uid.clone(), self.epoch);
        }
        Some(delta)
    }

    /// Returns whether the object is outdated: a requested list that is newer than this version lacked the object.
    fn is_superseded(&self, object: &T) -> bool {
        object.version() <= self.floor && !self.objects.contains_key(object.name())
    }

    fn take_out(&mut self, name: &T::Name, uid: &ObjectUid) -> Option<ObjectUpdate<T>> {
        let known = self.objects.get(name)?;
        if known.uid() != uid {
            return None;
        }
        self.remove(name)
    }

    fn put(&mut self, mut object: T) -> Option<ObjectUpdate<T>> {
        let before = self.objects.get(object.name()).cloned();
        let older = |b: &Arc<T>| b.version() >= object.version();
        if before.as_ref().is_some_and(older) || self.gone.contains_key(object.uid()) {
            return None;
        }
        if let Some(before) = &before {
            object.share_texts(before);
        }
        self.latest = self.latest.max(object.version());
        let after = Arc::new(object);
        self.objects.insert(after.name().clone(), after.clone());
        Some(ObjectUpdate {
            before,
            after: Some(after),
        })
    }

    fn remove(&mut self, name: &T::Name) -> Option<ObjectUpdate<T>> {
        let before = self.objects.remove(name)?;
        if let Some(unseen) = &mut self.unseen {
            unseen.remove(name);
        }
        Some(ObjectUpdate {
            before: Some(before),
            after: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::objects::ServiceRange;
    use super::*;

    fn object(name: &str, uid: &str, version: u64) -> ServiceRange {
        ServiceRange {
            name: name.into(),
            uid: uid.into(),
            version,
            cidrs: Vec::new(),
        }
    }

    #[test]
    fn a_new_version_shares_the_texts_of_the_old_one() {
        let mut table = ObjectCache::default();
        for version in [1, 2] {
            table.change(ObjectEvent::Applied(object("a", "1", version)));
        }
        let (key, object) = table.objects.first_key_value().unwrap();
        assert_eq!(object.version, 2);
        assert!(
            Arc::ptr_eq(key, &object.name),
            "the name is twice in memory"
        );
    }

    #[test]
    fn a_version_is_reached_once_the_watch_has_shown_it_or_a_later_one() {
        let begun = Duration::from_secs(5);
        let mut table = ObjectCache::default();
        let mut knows = |change: Option<ObjectEvent<ServiceRange>>, version| {
            if let Some(change) = change {
                table.change(change);
            }
            table.has_reached(version, begun)
        };
        assert!(!knows(None, 0), "nothing was listed");
        knows(Some(ObjectEvent::Restarted { asked: begun }), 0);
        assert!(
            !knows(Some(ObjectEvent::Applied(object("b", "2", 9))), 1),
            "the list is not complete"
        );
        assert!(knows(Some(ObjectEvent::Listed), 0));
        assert!(
            !knows(None, 9),
            "a list has no version before the watch shows one"
        );
        assert!(knows(Some(ObjectEvent::Reached(12)), 12));
        assert!(!knows(None, 13));
        assert!(knows(Some(ObjectEvent::Applied(object("a", "1", 14))), 14));
        assert!(knows(Some(ObjectEvent::Deleted(object("a", "1", 15))), 15));
        assert!(
            !table.has_reached(1, begun + Duration::from_secs(1)),
            "the list was requested before that time"
        );
        table.change(ObjectEvent::Restarted { asked: begun });
        table.change(ObjectEvent::Listed);
        assert!(
            !table.has_reached(15, begun),
            "the server may have been restored"
        );
    }

    fn restart(table: &mut ObjectCache<ServiceRange>) {
        let asked = Duration::ZERO;
        table.change(ObjectEvent::Restarted { asked });
    }

    /// Applies the watch event that an object was created or changed. Returns the effects.
    fn apply(
        table: &mut ObjectCache<ServiceRange>,
        name: &str,
        uid: &str,
        version: u64,
    ) -> Vec<ObjectUpdate<ServiceRange>> {
        table.change(ObjectEvent::Applied(object(name, uid, version)))
    }

    fn listed(objects: &[(&str, &str, u64)]) -> ObjectCache<ServiceRange> {
        let mut table = ObjectCache::default();
        restart(&mut table);
        for (name, uid, version) in objects {
            apply(&mut table, name, uid, *version);
        }
        table.change(ObjectEvent::Listed);
        table
    }

    #[test]
    fn a_relist_reports_deleted_objects() {
        let mut table = listed(&[("a", "1", 1), ("b", "2", 2)]);
        restart(&mut table);
        assert!(apply(&mut table, "b", "2", 2).is_empty());
        assert_eq!(
            table.len(),
            2,
            "the old state is valid until the list is complete"
        );
        let updates = table.change(ObjectEvent::Listed);
        assert_eq!(updates.len(), 1);
        assert_eq!(&**updates[0].before.as_ref().unwrap().name(), "a");
        assert!(updates[0].after.is_none());
    }

    #[test]
    fn an_object_recreated_under_its_name_replaces_the_earlier_one() {
        let mut table = listed(&[("a", "1", 1)]);
        let delta = apply(&mut table, "a", "9", 5).remove(0);
        assert_eq!(&*delta.before.unwrap().uid, "1");
        assert_eq!(&*delta.after.unwrap().uid, "9");
        assert!(
            table
                .change(ObjectEvent::Deleted(object("a", "1", 4)))
                .is_empty(),
            "a late deletion of the old one"
        );
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn an_object_never_goes_back_to_an_older_version() {
        let mut table = listed(&[("a", "1", 5)]);
        let sent = table.epoch();
        assert!(apply(&mut table, "a", "1", 4).is_empty());
        assert!(table.answer(object("a", "1", 5), sent).is_none());
        assert!(table.answer(object("a", "1", 6), sent).is_some());
    }

    #[test]
    fn an_answer_never_restores_a_deleted_object() {
        let mut table = listed(&[("a", "1", 5)]);
        let sent = table.epoch();
        table.change(ObjectEvent::Deleted(object("a", "1", 7)));
        assert!(table.answer(object("a", "1", 6), sent).is_none());
        restart(&mut table);
        table.change(ObjectEvent::Listed);
        assert!(
            table.answer(object("b", "2", 9), sent).is_none(),
            "sent before the relist"
        );
    }

    #[test]
    fn while_a_list_runs_answers_only_update_known_objects() {
        let mut table = listed(&[("a", "1", 1), ("b", "2", 2)]);
        let sent = table.epoch();
        let asked = Duration::from_secs(5);
        table.change(ObjectEvent::Restarted { asked });
        assert!(table.answer(object("a", "1", 5), sent).is_some());
        assert!(
            table.answer(object("a", "9", 6), sent).is_none(),
            "created again"
        );
        assert!(table.answer(object("c", "3", 7), sent).is_none());
        assert!(table.answer(object("b", "2", 9), sent).is_some());
        apply(&mut table, "b", "2", 8);
        let updates = table.change(ObjectEvent::Listed);
        assert_eq!(updates.len(), 1, "a is not in the list");
        assert_eq!(table.get("b").unwrap().version, 9, "newer than the list");
        assert!(table.is_listed_since(asked), "which is no older state");
    }

    fn applied<T>(replaced: ListOutcome<T>) -> Vec<ObjectUpdate<T>> {
        match replaced {
            ListOutcome::Applied(updates) => updates,
            ListOutcome::Outdated => panic!("outdated"),
            ListOutcome::PutBack => panic!("put back"),
        }
    }

    #[test]
    fn a_requested_list_keeps_later_watch_events() {
        let mut table = listed(&[("a", "1", 5), ("b", "2", 6)]);
        let sent = table.sent();
        apply(&mut table, "c", "3", 9);
        let list = vec![object("a", "1", 5), object("d", "4", 8)];
        let updates = applied(table.replace(list, sent));
        assert_eq!(
            table.iter().map(|o| o.name.to_string()).collect::<Vec<_>>(),
            ["a", "c"]
        );
        assert_eq!(
            updates.len(),
            1,
            "b is gone; d was seen to go, as the watch is past it"
        );
        restart(&mut table);
        assert!(matches!(
            table.replace(Vec::new(), sent),
            ListOutcome::Outdated
        ));
    }

    #[test]
    fn a_requested_list_removes_objects_known_before_the_request() {
        let mut table = listed(&[("a", "1", 5), ("b", "2", 8)]);
        let sent = table.sent();
        let updates = applied(table.replace(vec![object("a", "1", 5)], sent));
        assert_eq!(
            updates.len(),
            1,
            "b is newer than all of the list, and gone"
        );
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_list_without_known_versions_is_of_a_restored_server() {
        let again = |table: &mut ObjectCache<ServiceRange>, name, uid, version| {
            let sent = table.sent();
            table.replace(vec![object(name, uid, version)], sent)
        };
        // Under the same name, the list shows another object with a lower version, so the server was restored.
        let mut table = listed(&[("a", "1", 495)]);
        let found = again(&mut table, "a", "9", 283);
        assert!(matches!(found, ListOutcome::PutBack), "{found:?}");
        // The list shows an object that the watch has shown as deleted, so the server was restored.
        let mut table = listed(&[("a", "1", 5), ("b", "2", 6)]);
        table.change(ObjectEvent::Deleted(object("a", "1", 7)));
        let found = again(&mut table, "a", "1", 5);
        assert!(matches!(found, ListOutcome::PutBack), "{found:?}");
        // The object may have been deleted while the answer was on its way, so the list proves nothing.
        let mut table = listed(&[("a", "1", 5), ("b", "2", 6)]);
        let sent = table.sent();
        table.change(ObjectEvent::Deleted(object("a", "1", 7)));
        let found = table.replace(vec![object("a", "1", 5)], sent);
        assert!(matches!(found, ListOutcome::Outdated), "{found:?}");
        // Another answer may have delivered a newer version before the list arrives. In this case, the list changes
        // nothing.
        let mut table = listed(&[("a", "1", 5)]);
        let sent = table.sent();
        table.answer(object("a", "1", 9), sent.epoch);
        assert!(applied(table.replace(vec![object("a", "1", 5)], sent)).is_empty());
        // An answer had shown a newer version than the list's objects. But the list was requested later and lacks the
        // object, so the object is gone.
        let mut table = listed(&[("a", "1", 5)]);
        table.answer(object("a", "1", 9), table.epoch());
        assert_eq!(applied(again(&mut table, "b", "2", 7)).len(), 2);
    }

    #[test]
    fn a_relist_with_older_versions_does_not_count_as_a_list() {
        let mut table = listed(&[("a", "1", 5)]);
        let asked = Duration::from_secs(9);
        for (version, is_sound) in [(4, false), (5, true)] {
            table.change(ObjectEvent::Restarted { asked });
            apply(&mut table, "a", "1", version);
            table.change(ObjectEvent::Listed);
            assert!(table.is_listed());
            assert_eq!(table.is_listed_since(asked), is_sound);
        }
    }

    #[test]
    fn an_object_that_an_answer_showed_to_be_gone_stays_gone() {
        let mut table = listed(&[("a", "1", 1), ("b", "2", 2), ("c", "3", 9)]);
        let epoch = table.epoch();
        let sent = table.sent();
        assert!(table.forget("a", &"1".into()).is_some());
        assert!(
            apply(&mut table, "a", "1", 4).is_empty(),
            "an older event of a gone object"
        );
        assert!(table.answer(object("a", "1", 12), epoch).is_none());
        let list = vec![object("c", "3", 9)];
        assert_eq!(applied(table.replace(list, sent)).len(), 1);
        assert!(apply(&mut table, "b", "2", 5).is_empty());
        assert!(
            apply(&mut table, "d", "4", 8).is_empty(),
            "created and deleted before the requested list"
        );
        assert!(!apply(&mut table, "a", "7", 20).is_empty(), "a new one");
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn the_uid_of_a_gone_object_is_kept_until_the_watch_shows_the_deletion() {
        let mut table = listed(&[("a", "1", 5)]);
        restart(&mut table);
        table.forget("a", &"1".into());
        apply(&mut table, "a", "1", 5);
        table.change(ObjectEvent::Listed);
        assert!(table.is_empty(), "gone while the list was on its way");
        table.change(ObjectEvent::Deleted(object("a", "1", 7)));
        assert!(table.gone.is_empty());
        apply(&mut table, "b", "2", 8);
        table.forget("b", &"2".into());
        restart(&mut table);
        table.change(ObjectEvent::Listed);
        assert!(table.gone.is_empty(), "the list began after the answer");
    }

    #[test]
    fn an_answer_to_a_request_sent_during_a_list_is_ignored() {
        let mut table = listed(&[("a", "1", 5)]);
        restart(&mut table);
        let sent = table.sent();
        table.change(ObjectEvent::Listed);
        assert!(table.answer(object("a", "1", 6), sent.epoch).is_none());
        let found = table.replace(vec![object("a", "1", 6)], sent);
        assert!(matches!(found, ListOutcome::Outdated));
    }
}
