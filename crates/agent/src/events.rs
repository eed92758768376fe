//! Reports to users about the node and its pods. The agent logs a report at once, and then writes it as a Kubernetes
//! event if the API server accepts the event.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::mpsc;
use tracing::warn;

use super::pods::Pod;
use crate::metrics::AgentMetrics;
use cadastre_api::AGENT_MANAGER;
use cadastre_daemon::events;
use cadastre_daemon::events::EventNote;

/// At most this many events wait to be written. Further events are dropped and counted.
const BACKLOG: usize = 64;

/// Returns a warning event about a pod. `note` is the text for users.
pub fn of_pod(pod: &Pod, reason: &'static str, note: String) -> EventNote {
    warning("Pod", &pod.namespace, &pod.name, &pod.uid, reason, note)
}

/// Returns a warning event about the node. `uid` is empty if the UID of the Node is unknown.
pub fn of_node(name: &str, uid: &str, reason: &'static str, note: String) -> EventNote {
    warning("Node", "", name, uid, reason, note)
}

fn warning(
    kind: &str,
    namespace: &str,
    name: &str,
    uid: &str,
    reason: &'static str,
    note: String,
) -> EventNote {
    let present = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    EventNote {
        about: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(kind.to_owned()),
            namespace: present(namespace),
            name: present(name),
            uid: present(uid),
            ..ObjectReference::default()
        },
        warning: true,
        reason,
        note,
    }
}

/// Logs reports, and queues them to be written as events.
#[derive(Clone)]
pub struct Events {
    sender: mpsc::Sender<EventNote>,
    metrics: AgentMetrics,
}

impl Events {
    /// Starts a task that writes events one after the other.
    pub fn start(client: Client, metrics: AgentMetrics) -> Self {
        let dropped = metrics.events_dropped.clone();
        let lost = move || dropped.inc();
        Self {
            sender: events::spawn(client, AGENT_MANAGER, BACKLOG, lost),
            metrics,
        }
    }

    /// Logs a report and queues it as an event. If the queue is full, the event is dropped and counted.
    pub fn emit(&self, notice: EventNote) {
        let name = notice.about.name.as_deref().unwrap_or_default();
        if let Some(namespace) = &notice.about.namespace {
            warn!(pod.namespace = %namespace, pod.name = %name, reason = notice.reason, "{}", notice.note);
        } else {
            warn!(reason = notice.reason, "{}", notice.note);
        }
        if self.sender.try_send(notice).is_err() {
            self.metrics.events_dropped.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::testing::pod;

    #[test]
    fn an_unknown_namespace_or_uid_is_absent() {
        let about = of_pod(&pod("u", &[], &[]), "InvalidAnnotation", String::new()).about;
        assert_eq!(about.namespace.as_deref(), Some("default"));
        assert_eq!(
            (about.kind.as_deref(), about.uid.as_deref()),
            (Some("Pod"), Some("u"))
        );
        let about = of_node("n1", "", "StoreDamaged", "text".to_owned()).about;
        assert_eq!((about.namespace, about.uid), (None, None));
    }
}
