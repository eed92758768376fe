//! Kubernetes events of the agent, written beside everything else and never in its way.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::sync::mpsc;
use tracing::{debug, warn};

use super::pods::Pod;
use crate::api::AGENT_MANAGER;
use crate::controller::events::{event_name, note};
use crate::telemetry::AgentMetrics;

/// Longest wait for one event to be written.
const LIMIT: Duration = Duration::from_secs(5);
/// Events that may wait; more are dropped and counted.
const BACKLOG: usize = 64;

/// Something to tell people, about a pod or the node.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    kind: &'static str,
    namespace: String,
    name: String,
    uid: String,
    reason: &'static str,
    text: String,
}

impl Report {
    /// A warning about a pod.
    pub fn pod(pod: &Pod, reason: &'static str, text: String) -> Self {
        Self {
            kind: "Pod",
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            reason,
            text,
        }
    }

    /// A warning about the node. `uid` may be unknown.
    pub fn node(name: &str, uid: &str, reason: &'static str, text: String) -> Self {
        Self {
            kind: "Node",
            namespace: String::new(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            reason,
            text,
        }
    }
}

/// Tells people: in the log at once, and as an event when it can be written.
#[derive(Clone)]
pub struct Events {
    sender: mpsc::Sender<Report>,
    metrics: AgentMetrics,
}

impl Events {
    /// Writes events one after the other.
    pub fn start(client: Client, metrics: AgentMetrics) -> Self {
        let (sender, mut reports) = mpsc::channel::<Report>(BACKLOG);
        let dropped = metrics.clone();
        let instance = std::env::var("POD_NAME").unwrap_or_else(|_| AGENT_MANAGER.to_owned());
        tokio::spawn(async move {
            while let Some(report) = reports.recv().await {
                let event = render(&report, &instance, Timestamp::now());
                let namespace = event.metadata.namespace.clone().unwrap_or_default();
                let events: Api<Event> = Api::namespaced(client.clone(), &namespace);
                let post = PostParams {
                    field_manager: Some(AGENT_MANAGER.to_owned()),
                    ..PostParams::default()
                };
                match tokio::time::timeout(LIMIT, events.create(&post, &event)).await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => {
                        dropped.event_dropped();
                        debug!("event not written: {error}");
                    }
                    Err(_) => dropped.event_dropped(),
                }
            }
        });
        Self { sender, metrics }
    }

    /// Tells it.
    pub fn tell(&self, report: Report) {
        if report.kind == "Pod" {
            warn!(pod.namespace = %report.namespace, pod.name = %report.name, reason = report.reason, "{}", report.text);
        } else {
            warn!(reason = report.reason, "{}", report.text);
        }
        if self.sender.try_send(report).is_err() {
            self.metrics.event_dropped();
        }
    }
}

fn render(report: &Report, instance: &str, now: Timestamp) -> Event {
    // Events about objects without a namespace are kept in `default`.
    let namespace = match report.namespace.as_str() {
        "" => "default",
        namespace => namespace,
    };
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(&report.name, now)),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(report.kind.to_owned()),
            namespace: known(&report.namespace),
            name: Some(report.name.clone()),
            uid: known(&report.uid),
            ..ObjectReference::default()
        }),
        type_: Some("Warning".to_owned()),
        reason: Some(report.reason.to_owned()),
        note: Some(note(&report.text)),
        action: Some("Allocate".to_owned()),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(AGENT_MANAGER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::pods::testing::pod;

    #[test]
    fn an_event_lies_beside_its_object() {
        let about = Report::pod(&pod("u", &[], &[]), "InvalidAnnotation", "x".repeat(2000));
        let event = render(&about, "i", Timestamp::UNIX_EPOCH);
        let regarding = event.regarding.unwrap();
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(
            (regarding.kind.as_deref(), regarding.uid.as_deref()),
            (Some("Pod"), Some("u"))
        );
        assert_eq!(event.note.unwrap().len(), 1024);
        let about = Report::node("n1", "", "StoreDamaged", "text".to_owned());
        let event = render(&about, "i", Timestamp::UNIX_EPOCH);
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.regarding.unwrap().uid, None);
    }
}
