//! One kind's objects as last seen.
//!
//! # Guarantees
//! - What a watch says is taken in order; a relist is compared with what was known, and what
//!   vanished is reported as gone.
//! - An answer to a request of ours may be newer than the watch and is then taken in at once; it can
//!   never bring back what the watch has already seen go, and nothing goes back in time.
//!
//! # Assumptions
//! `resourceVersion`s of one kind grow, a watch delivers them in order, and lists are consistent
//! reads (never from a cache that may be behind).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::seen::{Change, Object, Text};

/// What a change did to one name.
#[derive(Clone, Debug)]
pub struct Delta<T> {
    /// As it was known before.
    pub before: Option<Arc<T>>,
    /// As it is now.
    pub after: Option<Arc<T>>,
}

/// The objects of one kind by name.
#[derive(Debug)]
pub struct Table<T> {
    objects: BTreeMap<Text, Arc<T>>,
    /// While a list runs: names known before that it has not named yet.
    unseen: Option<BTreeSet<Text>>,
    /// Counts the lists begun.
    epoch: u64,
    listed: bool,
    /// The highest version the watch has delivered.
    horizon: u64,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table {
            objects: BTreeMap::new(),
            unseen: None,
            epoch: 0,
            listed: false,
            horizon: 0,
        }
    }
}

impl<T: Object> Table<T> {
    /// Whether a list has been completed since the start.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Names the list that the table rests on; see [`Table::answer`].
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The object of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<T>> {
        self.objects.get(name)
    }

    /// All objects by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.objects.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Takes in one step of the watch.
    pub fn change(&mut self, change: Change<T>) -> Vec<Delta<T>> {
        match change {
            Change::Restarted => {
                self.unseen = Some(self.objects.keys().cloned().collect());
                self.epoch += 1;
                Vec::new()
            }
            Change::Applied(object) => {
                self.horizon = self.horizon.max(object.version());
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(object.name());
                }
                self.put(object).into_iter().collect()
            }
            Change::Listed => {
                self.listed = true;
                let gone = self.unseen.take().unwrap_or_default();
                gone.iter().filter_map(|name| self.remove(name)).collect()
            }
            Change::Deleted(object) => {
                self.horizon = self.horizon.max(object.version());
                self.forget(object.name(), object.uid())
                    .into_iter()
                    .collect()
            }
        }
    }

    /// Takes in an object from the answer to a request that was sent while [`Table::epoch`] was
    /// `sent`. Ignored where a relist has begun since: the answer may be older than the list.
    pub fn answer(&mut self, object: T, sent: u64) -> Option<Delta<T>> {
        let covered = object.version() <= self.horizon && !self.objects.contains_key(object.name());
        if sent != self.epoch || self.unseen.is_some() || covered {
            return None;
        }
        self.put(object)
    }

    /// Takes in a complete consistent list, as the answer to a request sent at epoch `sent`. `None`
    /// where a relist has begun since: ask again.
    pub fn replace(&mut self, objects: Vec<T>, sent: u64) -> Option<Vec<Delta<T>>> {
        if sent != self.epoch || self.unseen.is_some() {
            return None;
        }
        let highest = objects.iter().map(Object::version).max().unwrap_or(0);
        let named: BTreeSet<Text> = objects.iter().map(|o| o.name().clone()).collect();
        // What the list lacks is gone, unless the watch told of it after the list was made.
        let gone: Vec<Text> = self
            .objects
            .values()
            .filter(|o| !named.contains(o.name()) && o.version() <= highest)
            .map(|o| o.name().clone())
            .collect();
        let mut deltas: Vec<Delta<T>> = gone.iter().filter_map(|name| self.remove(name)).collect();
        deltas.extend(
            objects
                .into_iter()
                .filter_map(|object| self.answer(object, sent)),
        );
        Some(deltas)
    }

    /// Takes note that the object of that name and UID is gone.
    pub fn forget(&mut self, name: &str, uid: &str) -> Option<Delta<T>> {
        let known = self.objects.get(name)?;
        if &**known.uid() != uid {
            return None;
        }
        self.remove(name)
    }

    fn put(&mut self, object: T) -> Option<Delta<T>> {
        let before = self.objects.get(object.name()).cloned();
        if before
            .as_ref()
            .is_some_and(|b| b.version() >= object.version())
        {
            return None;
        }
        let after = Arc::new(object);
        self.objects.insert(after.name().clone(), after.clone());
        Some(Delta {
            before,
            after: Some(after),
        })
    }

    fn remove(&mut self, name: &str) -> Option<Delta<T>> {
        let before = self.objects.remove(name)?;
        if let Some(unseen) = &mut self.unseen {
            unseen.remove(name);
        }
        Some(Delta {
            before: Some(before),
            after: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::seen::ServiceRange;
    use super::*;

    fn object(name: &str, uid: &str, version: u64) -> ServiceRange {
        ServiceRange {
            name: name.into(),
            uid: uid.into(),
            version,
            cidrs: Vec::new(),
        }
    }

    fn listed(objects: &[(&str, &str, u64)]) -> Table<ServiceRange> {
        let mut table = Table::default();
        table.change(Change::Restarted);
        for (name, uid, version) in objects {
            table.change(Change::Applied(object(name, uid, *version)));
        }
        table.change(Change::Listed);
        table
    }

    #[test]
    fn a_relist_reports_what_vanished() {
        let mut table = listed(&[("a", "1", 1), ("b", "2", 2)]);
        table.change(Change::Restarted);
        assert!(
            table
                .change(Change::Applied(object("b", "2", 2)))
                .is_empty()
        );
        assert_eq!(
            table.len(),
            2,
            "the old state is valid until the list is complete"
        );
        let deltas = table.change(Change::Listed);
        assert_eq!(deltas.len(), 1);
        assert_eq!(&**deltas[0].before.as_ref().unwrap().name(), "a");
        assert!(deltas[0].after.is_none());
    }

    #[test]
    fn an_object_recreated_under_its_name_is_told_with_both_sides() {
        let mut table = listed(&[("a", "1", 1)]);
        let delta = table.change(Change::Applied(object("a", "9", 5))).remove(0);
        assert_eq!(&*delta.before.unwrap().uid, "1");
        assert_eq!(&*delta.after.unwrap().uid, "9");
        assert!(
            table
                .change(Change::Deleted(object("a", "1", 4)))
                .is_empty(),
            "a late deletion of the old one"
        );
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn nothing_goes_back_in_time() {
        let mut table = listed(&[("a", "1", 5)]);
        assert!(
            table
                .change(Change::Applied(object("a", "1", 4)))
                .is_empty()
        );
        assert!(table.answer(object("a", "1", 5), 1).is_none());
        assert!(table.answer(object("a", "1", 6), 1).is_some());
    }

    #[test]
    fn an_answer_never_brings_back_what_the_watch_saw_go() {
        let mut table = listed(&[("a", "1", 5)]);
        table.change(Change::Deleted(object("a", "1", 7)));
        assert!(table.answer(object("a", "1", 6), 1).is_none());
        table.change(Change::Restarted);
        table.change(Change::Listed);
        assert!(
            table.answer(object("b", "2", 9), 1).is_none(),
            "sent before the relist"
        );
    }

    #[test]
    fn a_list_of_ours_keeps_what_the_watch_told_later() {
        let mut table = listed(&[("a", "1", 5), ("b", "2", 6)]);
        table.change(Change::Applied(object("c", "3", 9)));
        let deltas = table
            .replace(vec![object("a", "1", 5), object("d", "4", 8)], 1)
            .unwrap();
        assert_eq!(
            table.iter().map(|o| o.name.to_string()).collect::<Vec<_>>(),
            ["a", "c"]
        );
        assert_eq!(
            deltas.len(),
            1,
            "b is gone; d was seen to go, as the watch is past it"
        );
        table.change(Change::Restarted);
        assert!(table.replace(Vec::new(), 1).is_none());
    }
}
