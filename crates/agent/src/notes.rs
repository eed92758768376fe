//! Notes in the store about which pools each pod may use. The CNI plugin uses them while no agent runs, and the agent
//! uses them when it starts before the API server answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::choice::{PodRequest, decide};
use super::pods::Pod;
use super::shared::WatchState;
use cadastre_node::{OWN_INTERFACE, PodNote, PodRef};

/// The shortest pause between writes of notes.
const PAUSE: Duration = Duration::from_secs(1);
/// Stands for all interfaces except the pod's own, because the choice of pools is the same for all of these.
const OTHER_INTERFACE: &str = "net1";

/// The notes in the store, and whether they may be out of date.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// The notes by the pod's namespace and name; `None` until they have been read
    kept: Option<BTreeMap<(String, String), PodNote>>,
    /// Whether something changed since the notes were last compared with the pods
    is_due: bool,
    /// When the notes were last compared with the pods, since boot
    looked_at: Duration,
}

/// The notes to write and to delete.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct UnsavedNotes {
    /// New or changed notes
    pub notes: Vec<PodNote>,
    /// Pods whose notes are to be deleted
    pub gone: Vec<PodRef>,
}

impl Notes {
    /// Records that a pod, its namespace or a pool has changed.
    pub(crate) fn changed(&mut self) {
        self.is_due = true;
    }

    /// Returns when to compare the notes with the pods; `None` if nothing has changed.
    pub(crate) fn due_at(&self) -> Option<Duration> {
        self.is_due.then(|| self.looked_at + PAUSE)
    }

    /// Whether the notes have to be read from the store first.
    pub(crate) fn is_unread(&self) -> bool {
        self.kept.is_none()
    }

    /// Records the notes that the store has.
    pub(crate) fn read(&mut self, notes: Vec<PodNote>) {
        let by_name = notes.into_iter().map(|note| (name(&note.pod), note));
        self.kept = Some(by_name.collect());
    }

    /// Forgets the notes, because the store may be another one now.
    pub(crate) fn forget(&mut self) {
        self.kept = None;
        self.is_due = true;
    }

    /// Records that the store could not be read or written; the next attempt follows after a pause.
    pub(crate) fn failed(&mut self, now: Duration) {
        (self.looked_at, self.is_due) = (now, true);
    }

    /// Compares the notes with the pods and returns the changes to write; none until all pods and pools are known.
    pub(crate) fn look(&mut self, known: &WatchState, now: Duration) -> UnsavedNotes {
        self.is_due = false;
        let Some(kept) = &self.kept else {
            return UnsavedNotes::default();
        };
        if !known.pools_known || !known.pods.is_complete() {
            return UnsavedNotes::default();
        }
        self.looked_at = now;
        let notes = known.pods.iter().filter_map(|pod| note(pod, known));
        let notes = notes.filter(|note| kept.get(&name(&note.pod)) != Some(note));
        let here: BTreeSet<(&str, &str)> = known
            .pods
            .iter()
            .map(|pod| (pod.namespace.as_str(), pod.name.as_str()))
            .collect();
        let is_gone = |pod: &&PodRef| !here.contains(&(&*pod.namespace, &*pod.name));
        let gone = kept.values().map(|note| &note.pod).filter(is_gone);
        UnsavedNotes {
            notes: notes.collect(),
            gone: gone.cloned().collect(),
        }
    }

    /// Records that these changes were written.
    pub(crate) fn written(&mut self, news: UnsavedNotes) {
        let Some(kept) = &mut self.kept else {
            return;
        };
        for pod in &news.gone {
            kept.remove(&name(pod));
        }
        let notes = news.notes.into_iter().map(|note| (name(&note.pod), note));
        kept.extend(notes);
    }
}

impl UnsavedNotes {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn name(pod: &PodRef) -> (String, String) {
    (pod.namespace.clone(), pod.name.clone())
}

/// Returns the note of a pod; `None` while its namespace is unknown.
fn note(pod: &Pod, known: &WatchState) -> Option<PodNote> {
    if !known.is_decidable(pod) {
        return None;
    }
    let choice = |ifname| {
        let request = PodRequest {
            ifname,
            pools: &[],
            addresses: &[],
            pod: Some(pod),
            namespace: known.namespaces.get(&pod.namespace).map(AsRef::as_ref),
        };
        decide(&request, &known.serving, &known.others).0
    };
    Some(PodNote {
        pod: PodRef {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        },
        mirrors: pod.mirrors.clone().unwrap_or_default(),
        own: choice(OWN_INTERFACE),
        other: choice(OTHER_INTERFACE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespaces::Namespace;
    use crate::pods::testing::pod;
    use cadastre_daemon::watch::ObjectEvent;
    use cadastre_node::{PodChoice, PoolOrder};

    fn known(pods: &[Pod]) -> WatchState {
        let mut known = WatchState::default();
        for pod in pods {
            known.pods.change(ObjectEvent::Applied(pod.clone()));
        }
        known.pods.change(ObjectEvent::Listed);
        known.pools_known = true;
        known.namespaces.pod_came("default");
        known.namespaces.due(Duration::ZERO);
        let answer = Some(Namespace::default());
        known.namespaces.answered("default", answer, Duration::ZERO);
        known
    }

    fn notes(kept: Vec<PodNote>) -> Notes {
        let mut notes = Notes::default();
        notes.read(kept);
        notes
    }

    #[test]
    fn what_a_pod_may_have_is_noted_once_and_forgotten_with_it() {
        let asks = pod(
            "a",
            &[],
            &[
                ("cadastre.dev/pools", "x"),
                ("cadastre.dev/addresses", "10.0.0.9"),
            ],
        );
        let known_both = known(&[asks.clone(), pod("b", &[], &[])]);
        let mut notes = notes(Vec::new());
        let news = notes.look(&known_both, Duration::ZERO);
        assert!(news.gone.is_empty() && news.notes.len() == 2);
        let note = &news.notes[0];
        assert_eq!(note.own.pools, PoolOrder::Named(vec!["x".to_owned()]));
        assert_eq!(note.own.addresses[0].to_string(), "10.0.0.9");
        assert_eq!(
            note.other,
            PodChoice::default(),
            "annotations speak of the pod's own interface"
        );
        notes.written(news);
        assert!(notes.look(&known_both, Duration::ZERO).is_empty());
        let left = notes.look(&known(&[asks]), Duration::ZERO);
        assert!(left.notes.is_empty());
        assert_eq!(left.gone[0].uid, "b");
    }

    #[test]
    fn nothing_is_noted_or_forgotten_before_all_is_known() {
        let mut of_before = notes(Vec::new());
        of_before.written(before_news());
        let mut blind = WatchState::default();
        blind.pods.change(ObjectEvent::Applied(pod("b", &[], &[])));
        assert!(
            of_before.look(&blind, Duration::ZERO).is_empty(),
            "no list yet"
        );
        let mut no_pools = known(&[pod("b", &[], &[])]);
        no_pools.pools_known = false;
        assert!(of_before.look(&no_pools, Duration::ZERO).is_empty());
        let mut no_namespace = known(&[pod("b", &[], &[])]);
        no_namespace.namespaces = crate::namespaces::Namespaces::default();
        let news = of_before.look(&no_namespace, Duration::ZERO);
        assert!(news.notes.is_empty(), "it may name pools: {news:?}");
    }

    #[test]
    fn a_store_that_fails_is_not_asked_again_at_once() {
        let mut notes = Notes::default();
        let now = Duration::from_secs(100);
        notes.changed();
        assert!(notes.due_at().unwrap() <= now);
        notes.failed(now);
        assert_eq!(notes.due_at(), Some(now + PAUSE));
    }

    fn before_news() -> UnsavedNotes {
        let mut notes = notes(Vec::new());
        notes.look(&known(&[pod("a", &[], &[])]), Duration::ZERO)
    }
}
