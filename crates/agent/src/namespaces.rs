//! The namespaces of this node's pods. The agent reads their labels, by which pools select namespaces, and the
//! annotation in which a namespace names pools.
//!
//! The agent reads a namespace when the node gets its first pod of the namespace. If the node gets another pod at least
//! [`FRESH`] after that read, the agent reads the namespace again. Agents do not watch namespaces, because the API
//! server would send each change of a namespace to every node.
//!
//! # Guarantees
//! - While the agent reads a namespace again, and if that read fails, the earlier labels and pools apply.
//! - Failed reads are followed by growing pauses, separately for each namespace.
//! - Namespaces without a pod on this node are forgotten.
//!
//! # Caveats
//! - The agent notices a change of a namespace only when the node gets a pod of the namespace at least [`FRESH`] after
//!   the last read. Until that time, the earlier labels and pools of the namespace apply.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::jitter::backoff;
use super::pods::Pods;
use cadastre_api::choice::Label;

/// After a read, a namespace is not read again within this time, even if the node gets many pods of the namespace.
pub const FRESH: Duration = Duration::from_secs(60);
/// The first and the longest pause after a namespace could not be read.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The parts of a namespace that the choice of pools depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Namespace {
    /// All labels of the namespace; the namespace selectors of pools match against them
    pub labels: Vec<Label>,
    /// The value of the annotation `cadastre.dev/pools`; `None` if there is no such annotation
    pub pools: Option<String>,
}

/// The namespaces of this node's pods, by name.
#[derive(Clone, Debug, Default)]
pub struct Namespaces(BTreeMap<String, Entry>);

#[derive(Clone, Debug, Default)]
struct Entry {
    read: Option<Arc<Namespace>>,
    is_reading: bool,
    /// Whether another read is needed, because a pod came after the last read began or because the last read failed
    wanted: bool,
    /// The earliest time of the next read
    next_at: Duration,
    failures: u32,
}

impl Namespaces {
    /// Records that a new pod of this namespace is on the node.
    pub(crate) fn pod_came(&mut self, namespace: &str) {
        if let Some(entry) = self.0.get_mut(namespace) {
            entry.wanted = true;
            return;
        }
        let entry = Entry {
            wanted: true,
            ..Entry::default()
        };
        self.0.insert(namespace.to_owned(), entry);
    }

    /// Forgets namespaces without a pod on this node.
    pub(crate) fn keep_those_of(&mut self, pods: &Pods) {
        let of_pods: BTreeSet<&str> = pods.iter().map(|it| it.namespace.as_str()).collect();
        self.0.retain(|name, _| of_pods.contains(name.as_str()));
    }

    /// Returns a namespace as it was last read; `None` if it was never read.
    pub fn get(&self, name: &str) -> Option<&Arc<Namespace>> {
        self.0.get(name)?.read.as_ref()
    }

    /// Returns true if the namespace was read at least once, or if the last read failed. In both cases an ADD need not
    /// wait for a read.
    pub fn is_settled(&self, name: &str) -> bool {
        let settled = |entry: &Entry| entry.read.is_some() || entry.failures > 0;
        self.0.get(name).is_some_and(settled)
    }

    /// Returns the namespaces to read now. The caller must call [`answered`](Self::answered) for each of them.
    pub fn due(&mut self, now: Duration) -> Vec<String> {
        let mut due = Vec::new();
        for (name, entry) in &mut self.0 {
            if entry.wanted && !entry.is_reading && entry.next_at <= now {
                entry.is_reading = true;
                entry.wanted = false;
                due.push(name.clone());
            }
        }
        due
    }

    /// Returns the time at which the next namespace should be read; `None` if no namespace needs a read.
    pub fn wake(&self) -> Option<Duration> {
        let waiting = self.0.values().filter(|it| it.wanted && !it.is_reading);
        waiting.map(|it| it.next_at).min()
    }

    /// Records the result of reading a namespace. `answer` is `None` if the request failed.
    pub fn answered(&mut self, name: &str, answer: Option<Namespace>, now: Duration) {
        let Some(entry) = self.0.get_mut(name) else {
            return;
        };
        entry.is_reading = false;
        if let Some(answer) = answer {
            entry.failures = 0;
            entry.read = Some(Arc::new(answer));
            entry.next_at = now + FRESH;
        } else {
            entry.next_at = now + backoff(PAUSE, entry.failures);
            entry.failures += 1;
            entry.wanted = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::testing::pod;
    use cadastre_daemon::watch::ObjectEvent;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn naming(pools: &str) -> Namespace {
        Namespace {
            pools: Some(pools.to_owned()),
            ..Namespace::default()
        }
    }

    #[test]
    fn a_namespace_is_read_once_for_many_pods() {
        let mut all = Namespaces::default();
        for _ in 0..100 {
            all.pod_came("a");
        }
        assert!(!all.is_settled("a"));
        assert_eq!(all.due(secs(0)), ["a"]);
        assert!(all.due(secs(1)).is_empty(), "a read is under way");
        all.answered("a", Some(naming("x")), secs(1));
        assert_eq!(all.get("a").unwrap().pools.as_deref(), Some("x"));
        assert!(all.is_settled("a") && all.wake().is_none());
        assert!(all.due(secs(3600)).is_empty(), "no pod came");
    }

    #[test]
    fn a_later_pod_causes_another_read_and_the_earlier_values_apply_until_then() {
        let mut all = Namespaces::default();
        all.pod_came("a");
        all.due(secs(0));
        // A pod comes while the namespace is being read. The answer may be older than the pod, so another read must
        // follow.
        all.pod_came("a");
        all.answered("a", Some(naming("x")), secs(1));
        assert!(all.due(secs(2)).is_empty());
        assert_eq!(all.wake(), Some(secs(1) + FRESH));
        assert_eq!(all.due(secs(1) + FRESH), ["a"]);
        assert_eq!(all.get("a").unwrap().pools.as_deref(), Some("x"));
        all.answered("a", None, secs(62));
        assert_eq!(all.get("a").unwrap().pools.as_deref(), Some("x"));
        assert_eq!(all.due(secs(63)), ["a"]);
        all.answered("a", Some(naming("y")), secs(63));
        assert_eq!(all.get("a").unwrap().pools.as_deref(), Some("y"));
    }

    #[test]
    fn failures_are_followed_by_growing_pauses_and_delay_no_other_namespace() {
        let mut all = Namespaces::default();
        all.pod_came("a");
        let (mut now, mut asked) = (secs(0), Vec::new());
        while now < secs(600) {
            for name in all.due(now) {
                asked.push(now);
                all.answered(&name, None, now);
                assert!(all.is_settled(&name));
            }
            now = all.wake().unwrap();
        }
        assert!((10..20).contains(&asked.len()), "{asked:?}");
        all.pod_came("b");
        assert_eq!(all.due(asked[asked.len() - 1]), ["b"], "each by itself");
    }

    #[test]
    fn namespaces_without_pods_are_forgotten() {
        let mut pods = Pods::default();
        pods.change(ObjectEvent::Applied(pod("u", &[], &[])));
        let mut all = Namespaces::default();
        all.pod_came("default");
        all.pod_came("gone");
        all.due(secs(0));
        all.keep_those_of(&pods);
        all.answered("gone", Some(Namespace::default()), secs(1));
        assert!(all.get("gone").is_none() && all.0.len() == 1);
    }
}
