//! What the pods here may have, noted in the store: for plugins while the agent is away, and for the agent
//! when it is back before the API server is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::choice::{Asked, decide};
use super::known::Shown;
use super::pods::Pod;
use cadastre_node::{OWN_INTERFACE, PodNote, PodRef};

/// Notes are written so far apart at least.
const PAUSE: Duration = Duration::from_secs(1);
/// An interface of another network.
const OTHER_INTERFACE: &str = "net1";

/// What the store has noted, and when to look again.
#[derive(Debug, Default)]
pub struct Notes {
    /// By namespace and name; `None`: it has not been read yet
    kept: Option<BTreeMap<(String, String), PodNote>>,
    /// Something may be otherwise
    is_due: bool,
    /// When they were looked at last, since boot
    looked_at: Duration,
}

/// What is to be written.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// New or changed
    pub notes: Vec<PodNote>,
    /// Gone
    pub gone: Vec<PodRef>,
}

impl Notes {
    /// A pod, its namespace or a pool has changed.
    pub fn changed(&mut self) {
        self.is_due = true;
    }

    /// When to look, if something has changed.
    pub fn due_at(&self) -> Option<Duration> {
        self.is_due.then(|| self.looked_at + PAUSE)
    }

    /// Whether what is in the store has to be read first.
    pub fn is_unread(&self) -> bool {
        self.kept.is_none()
    }

    /// That is in the store.
    pub fn read(&mut self, notes: Vec<PodNote>) {
        let by_name = notes.into_iter().map(|note| (name(&note.pod), note));
        self.kept = Some(by_name.collect());
    }

    /// The store is another one, or may be.
    pub fn forget(&mut self) {
        self.kept = None;
        self.is_due = true;
    }

    /// The store could not be read or written: it is tried again after a pause.
    pub fn failed(&mut self, now: Duration) {
        (self.looked_at, self.is_due) = (now, true);
    }

    /// What is otherwise than noted. Nothing is before all pods and pools are known.
    pub fn look(&mut self, known: &Shown, now: Duration) -> News {
        self.is_due = false;
        let Some(kept) = &self.kept else {
            return News::default();
        };
        if !known.pools_known || !known.pods.is_complete() {
            return News::default();
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
        News {
            notes: notes.collect(),
            gone: gone.cloned().collect(),
        }
    }

    /// That was written.
    pub fn written(&mut self, news: News) {
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

impl News {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn name(pod: &PodRef) -> (String, String) {
    (pod.namespace.clone(), pod.name.clone())
}

/// What a pod may have, once its namespace is known.
fn note(pod: &Pod, known: &Shown) -> Option<PodNote> {
    if !known.is_decidable(pod) {
        return None;
    }
    let choice = |ifname| {
        let asked = Asked {
            ifname,
            pools: &[],
            addresses: &[],
            pod: Some(pod),
            namespace: known.namespaces.get(&pod.namespace).map(AsRef::as_ref),
        };
        decide(&asked, &known.serving, &known.others).into_choice()
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
    use cadastre_daemon::watch::Change;
    use cadastre_node::{PodChoice, Pools};

    fn known(pods: &[Pod]) -> Shown {
        let mut known = Shown::default();
        for pod in pods {
            known.pods.change(Change::Applied(pod.clone()));
        }
        known.pods.change(Change::Listed);
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
        assert_eq!(note.own.pools, Pools::Named(vec!["x".to_owned()]));
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
        of_before.written(of_before_news());
        let mut blind = Shown::default();
        blind.pods.change(Change::Applied(pod("b", &[], &[])));
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

    fn of_before_news() -> News {
        let mut notes = notes(Vec::new());
        notes.look(&known(&[pod("a", &[], &[])]), Duration::ZERO)
    }
}
