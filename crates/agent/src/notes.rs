//! The notes in the store. Each note says which pools a pod may use. The CNI plugin uses the notes while no agent runs.
//! The agent uses the notes between its start and the first answer of the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::choice::{PodRequest, decide};
use super::pods::Pod;
use super::shared::WatchState;
use cadastre_node::{OWN_INTERFACE, PodNote, PodRef};

/// The shortest pause between writes of notes.
const PAUSE: Duration = Duration::from_secs(1);
/// Stands for all interfaces for which the pod names no IPAMClaim, except the pod's own interface. The choice of pools
/// is the same for all these interfaces. No real interface has this name.
const OTHER_INTERFACE: &str = "";

/// The agent's copy of the notes in the store.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// The notes by namespace and name of the pod; `None` until they have been read from the store
    stored: Option<BTreeMap<(String, String), PodNote>>,
    /// Whether a pod, a namespace or a pool has changed since the notes were last compared with the pods
    is_due: bool,
    /// When the notes were last compared with the pods, as a time since boot
    compared_at: Duration,
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

    /// Returns the time at which to compare the notes with the pods; `None` if no comparison is needed.
    pub(crate) fn due_at(&self) -> Option<Duration> {
        self.is_due.then(|| self.compared_at + PAUSE)
    }

    /// Whether the notes must be read from the store before they can be compared.
    pub(crate) fn is_unread(&self) -> bool {
        self.stored.is_none()
    }

    /// Records the notes that were read from the store.
    pub(crate) fn read(&mut self, notes: Vec<PodNote>) {
        let by_name = notes.into_iter().map(|note| (name(&note.pod), note));
        self.stored = Some(by_name.collect());
    }

    /// Forgets the notes. Called when the store may have been replaced.
    pub(crate) fn forget(&mut self) {
        self.stored = None;
        self.is_due = true;
    }

    /// Records that the notes could not be read or written. The next attempt follows after [`PAUSE`].
    pub(crate) fn failed(&mut self, now: Duration) {
        (self.compared_at, self.is_due) = (now, true);
    }

    /// Compares the notes with the pods and returns the changes to write. Until all pods and pools are known, returns
    /// no change.
    pub(crate) fn look(&mut self, watched: &WatchState, now: Duration) -> UnsavedNotes {
        self.is_due = false;
        let Some(stored) = &self.stored else {
            return UnsavedNotes::default();
        };
        if !watched.pools_known || !watched.pods.is_complete() {
            return UnsavedNotes::default();
        }
        self.compared_at = now;
        let notes = watched.pods.iter().filter_map(|pod| note(pod, watched));
        let notes = notes.filter(|note| stored.get(&name(&note.pod)) != Some(note));
        let here: BTreeSet<(&str, &str)> = watched
            .pods
            .iter()
            .map(|pod| (pod.namespace.as_str(), pod.name.as_str()))
            .collect();
        let is_gone = |pod: &&PodRef| !here.contains(&(&*pod.namespace, &*pod.name));
        let gone = stored.values().map(|note| &note.pod).filter(is_gone);
        UnsavedNotes {
            notes: notes.collect(),
            gone: gone.cloned().collect(),
        }
    }

    /// Records that these changes were written.
    pub(crate) fn written(&mut self, unsaved: UnsavedNotes) {
        let Some(stored) = &mut self.stored else {
            return;
        };
        for pod in &unsaved.gone {
            stored.remove(&name(pod));
        }
        let notes = unsaved
            .notes
            .into_iter()
            .map(|note| (name(&note.pod), note));
        stored.extend(notes);
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

/// Returns the note on a pod; `None` while the pod's pools cannot be decided.
fn note(pod: &Pod, watched: &WatchState) -> Option<PodNote> {
    if !watched.is_decidable(pod) {
        return None;
    }
    let choice = |ifname: &str| {
        let request = PodRequest {
            ifname,
            pools: &[],
            pod: Some(pod),
            namespace: watched.namespaces.get(&pod.namespace).map(AsRef::as_ref),
        };
        decide(&request, &watched.serving, &watched.others).0
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
        interfaces: {
            let names = pod.interface_claims.iter().map(|it| &it.interface);
            names.map(|name| (name.clone(), choice(name))).collect()
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespaces::Namespace;
    use crate::pods::testing::pod;
    use cadastre_daemon::watch::ObjectEvent;
    use cadastre_node::{PodChoice, PoolOrder};

    fn watched(pods: &[Pod]) -> WatchState {
        let mut watched = WatchState::default();
        for pod in pods {
            watched.pods.change(ObjectEvent::Applied(pod.clone()));
        }
        watched.pods.change(ObjectEvent::Listed);
        watched.pools_known = true;
        watched.namespaces.pod_came("default");
        watched.namespaces.due(Duration::ZERO);
        let answer = Some(Namespace::default());
        watched
            .namespaces
            .answered("default", answer, Duration::ZERO);
        watched
    }

    fn notes(stored: Vec<PodNote>) -> Notes {
        let mut notes = Notes::default();
        notes.read(stored);
        notes
    }

    #[test]
    fn a_note_is_written_once_and_deleted_with_its_pod() {
        let asks = pod(
            "a",
            &[],
            &[
                ("cadastre.dev/pools", "x"),
                ("cadastre.dev/addresses", "10.0.0.9"),
            ],
        );
        let both = watched(&[asks.clone(), pod("b", &[], &[])]);
        let mut notes = notes(Vec::new());
        let unsaved = notes.look(&both, Duration::ZERO);
        assert!(unsaved.gone.is_empty() && unsaved.notes.len() == 2);
        let note = &unsaved.notes[0];
        assert_eq!(note.own.pools, PoolOrder::Named(vec!["x".to_owned()]));
        assert_eq!(note.own.addresses[0].to_string(), "10.0.0.9");
        assert_eq!(
            note.other,
            PodChoice::default(),
            "annotations apply to the pod's own interface"
        );
        notes.written(unsaved);
        assert!(notes.look(&both, Duration::ZERO).is_empty());
        let left = notes.look(&watched(&[asks]), Duration::ZERO);
        assert!(left.notes.is_empty());
        assert_eq!(left.gone[0].uid, "b");
    }

    #[test]
    fn notes_change_only_when_all_pods_and_pools_are_known() {
        let mut notes = notes(Vec::new());
        notes.written(written_note());
        let mut blind = WatchState::default();
        blind.pods.change(ObjectEvent::Applied(pod("b", &[], &[])));
        assert!(notes.look(&blind, Duration::ZERO).is_empty(), "no list yet");
        let mut no_pools = watched(&[pod("b", &[], &[])]);
        no_pools.pools_known = false;
        assert!(notes.look(&no_pools, Duration::ZERO).is_empty());
        let mut no_namespace = watched(&[pod("b", &[], &[])]);
        no_namespace.namespaces = crate::namespaces::Namespaces::default();
        let unsaved = notes.look(&no_namespace, Duration::ZERO);
        assert!(
            unsaved.notes.is_empty(),
            "the namespace may name pools: {unsaved:?}"
        );
    }

    #[test]
    fn a_failed_write_is_repeated_after_a_pause() {
        let mut notes = Notes::default();
        let now = Duration::from_secs(100);
        notes.changed();
        assert!(notes.due_at().unwrap() <= now);
        notes.failed(now);
        assert_eq!(notes.due_at(), Some(now + PAUSE));
    }

    fn written_note() -> UnsavedNotes {
        let mut notes = notes(Vec::new());
        notes.look(&watched(&[pod("a", &[], &[])]), Duration::ZERO)
    }
}
