//! Records when the API server last sent anything about each kind, and what the watches should have delivered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// After a watch was begun again because it was late, it is not begun again for this reason for this time. So a slow
/// API server is not loaded with ever more requests.
const SELDOM: Duration = Duration::from_secs(60);

/// The version of an object that is missing, although nobody knows its version.
const UNKNOWN: u64 = u64::MAX;

/// The time at which the API server last sent something about each watched kind: an object of a list, the response to a
/// watch request, a watch event or a bookmark. Metrics and readiness use these times to report watches that deliver
/// nothing.
///
/// Whoever learns from the API server or from somebody else that an object has changed calls [`LastHeard::expect`] or
/// [`LastHeard::miss`]. If the watch does not deliver the change soon, the watch does not work, even if its connection
/// looks intact, and it is begun again on another connection. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<watch::Sender<BTreeMap<&'static str, Entry>>>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Instant,
    /// The last version that the watch has delivered
    delivered: u64,
    /// The first version that the watch has not delivered yet, and since when it is expected
    expected: Option<(u64, Instant)>,
    /// When the watch was last begun again because it was late
    restarted: Option<Instant>,
}

impl LastHeard {
    /// Records that the API server has sent something about this kind. A watch also calls this method once when it
    /// starts.
    pub fn heard(&self, kind: &'static str) {
        self.change(|all| {
            let now = Instant::now();
            all.entry(kind)
                .and_modify(|entry| entry.at = now)
                .or_insert(Entry {
                    at: now,
                    delivered: 0,
                    expected: None,
                    restarted: None,
                });
        });
    }

    /// Records that the API server has stored this version of an object of a kind. Does nothing if the watch has
    /// delivered it, or if the kind is not watched.
    pub fn expect(&self, kind: &'static str, version: u64) {
        self.0.send_if_modified(|all| {
            let is_missing = |it: &&mut Entry| it.expected.is_none() && it.delivered < version;
            let entry = all.get_mut(kind).filter(is_missing);
            let is_new = entry.is_some();
            if let Some(entry) = entry {
                entry.expected = Some((version, Instant::now()));
            }
            is_new
        });
    }

    /// Records that an object of a kind exists that the watch has not delivered.
    pub fn miss(&self, kind: &'static str) {
        self.expect(kind, UNKNOWN);
    }

    /// Records that a watch has delivered everything up to a version.
    pub(super) fn delivered(&self, kind: &'static str, version: u64) {
        self.change(|all| {
            if let Some(entry) = all.get_mut(kind) {
                entry.delivered = version;
                let is_missing = |expected| expected > version && expected != UNKNOWN;
                entry.expected = entry.expected.filter(|it| is_missing(it.0));
            }
        });
    }

    /// Returns the time from which the watch of a kind counts as late, if it still lacks something. `patience` is how
    /// long a watch may take to deliver a change.
    pub(super) fn late_at(&self, kind: &'static str, patience: Duration) -> Option<Instant> {
        let all = self.0.borrow();
        let entry = all.get(kind)?;
        let (_, since) = entry.expected?;
        let allowed = entry.restarted.map(|at| at + SELDOM);
        allowed.into_iter().chain([since + patience]).max()
    }

    /// Records that a watch that was late is begun again.
    pub(super) fn restarted(&self, kind: &'static str) {
        self.change(|all| {
            if let Some(entry) = all.get_mut(kind) {
                entry.expected = None;
                entry.restarted = Some(Instant::now());
            }
        });
    }

    /// Returns a receiver that is notified when something is expected of any kind.
    pub(super) fn expectations(&self) -> watch::Receiver<impl Sized + use<>> {
        self.0.subscribe()
    }

    /// Changes the entries without waking any watch.
    fn change(&self, change: impl FnOnce(&mut BTreeMap<&'static str, Entry>)) {
        self.0.send_if_modified(|all| {
            change(all);
            false
        });
    }

    #[cfg(test)]
    pub(crate) fn heard_before(&self, kind: &'static str, ago: Duration) {
        let at = Instant::now().checked_sub(ago).unwrap();
        self.heard(kind);
        self.change(|all| all.get_mut(kind).unwrap().at = at);
    }

    /// Returns all kinds, each with the time since the API server last sent anything about it.
    pub fn silent(&self) -> Vec<(&'static str, Duration)> {
        let all = self.0.borrow();
        all.iter()
            .map(|(kind, it)| (*kind, it.at.elapsed()))
            .collect()
    }

    /// Returns the kinds about which the API server has sent nothing for longer than `limit`, for example as `nodes for
    /// 312 s, pods for 200 s`. Returns `None` if there are no such kinds.
    pub fn too_long(&self, limit: Duration) -> Option<String> {
        let all = self.silent();
        let all = all.iter().filter(|(_, silent)| *silent > limit);
        let texts: Vec<String> = all
            .map(|(kind, silent)| format!("{kind} for {} s", silent.as_secs()))
            .collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}
