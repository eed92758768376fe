//! Kubernetes events, written beside everything else and never in its way.
//!
//! Each report becomes an Event of its own: reports are changes of state, so there is nothing to put
//! together, and two notes about one object (overlaps with two others, say) are both worth reading.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use super::{About, Report};
use crate::api::FIELD_MANAGER;
use crate::telemetry::ControllerMetrics;

/// Longest wait for one event to be written.
const LIMIT: Duration = Duration::from_secs(5);

/// Where events about cluster-scoped objects are kept.
const NAMESPACE: &str = "default";

/// Writes events one after the other; what does not fit into the backlog is dropped and counted.
pub fn spawn(client: Client, backlog: usize, metrics: ControllerMetrics) -> mpsc::Sender<Report> {
    let (sender, mut reports) = mpsc::channel::<Report>(backlog);
    let instance = std::env::var("POD_NAME").unwrap_or_else(|_| FIELD_MANAGER.to_owned());
    let events: Api<Event> = Api::namespaced(client, NAMESPACE);
    tokio::spawn(async move {
        while let Some(report) = reports.recv().await {
            let event = render(&report, &instance, Timestamp::now());
            match tokio::time::timeout(LIMIT, write(&events, &event)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    metrics.event_dropped();
                    debug!("event not written: {error}");
                }
                Err(_) => metrics.event_dropped(),
            }
        }
    });
    sender
}

async fn write(events: &Api<Event>, event: &Event) -> Result<(), Error> {
    let post = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    };
    events.create(&post, event).await.map(drop)
}

/// The same for the log.
pub fn log(report: &Report) {
    let (kind, name) = match &report.about {
        About::Node { name, .. } => ("node", name),
        About::Pool { name, .. } => ("pool", name),
        About::Block { name, .. } => ("block", name),
    };
    match (kind, report.warning) {
        ("node", true) => warn!(node.name = %name, reason = report.reason, "{}", report.note),
        ("node", false) => info!(node.name = %name, reason = report.reason, "{}", report.note),
        ("block", true) => warn!(block.name = %name, reason = report.reason, "{}", report.note),
        ("block", false) => info!(block.name = %name, reason = report.reason, "{}", report.note),
        (_, true) => warn!(pool.name = %name, reason = report.reason, "{}", report.note),
        (_, false) => info!(pool.name = %name, reason = report.reason, "{}", report.note),
    }
}

fn render(report: &Report, instance: &str, now: Timestamp) -> Event {
    const CADASTRE: &str = "cadastre.dev/v1alpha1";
    let (version, kind, name, uid) = match &report.about {
        About::Node { name, uid } => ("v1", "Node", name, uid),
        About::Pool { name, uid } => (CADASTRE, "IPPool", name, uid),
        About::Block { name, uid } => (CADASTRE, "IPAMBlock", name, uid),
    };
    let kind_of_event = if report.warning { "Warning" } else { "Normal" };
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(name, now)),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        regarding: Some(ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name.to_string()),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        }),
        type_: Some(kind_of_event.to_owned()),
        reason: Some(report.reason.to_owned()),
        note: Some(note(&report.note)),
        action: Some("Allocate".to_owned()),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(FIELD_MANAGER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        ..Event::default()
    }
}

/// A text within the API's limit for a note.
pub(crate) fn note(text: &str) -> String {
    /// In bytes
    const LONGEST: usize = 1024;
    if text.len() <= LONGEST {
        return text.to_owned();
    }
    let end = (0..=LONGEST - 3)
        .rev()
        .find(|at| text.is_char_boundary(*at));
    format!("{}...", &text[..end.unwrap_or_default()])
}

/// The object's name and the time, within the length of a name: events about objects with the
/// longest names are refused otherwise.
pub(crate) fn event_name(name: &str, now: Timestamp) -> String {
    const LONGEST: usize = 253;
    let time = format!("{:x}", now.as_nanosecond());
    // Names are ASCII.
    let short: String = name.chars().take(LONGEST - 1 - time.len()).collect();
    format!("{}.{time}", short.trim_end_matches(['.', '-']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_event_is_never_too_long() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        assert_eq!(event_name("n1", now), "n1.18fae27693b40000");
        let long = [
            "n".repeat(63),
            "o".repeat(63),
            "d".repeat(63),
            "e".repeat(61),
        ]
        .join(".");
        let name = event_name(&long, now);
        assert_eq!(
            (name.len(), name.ends_with(".18fae27693b40000")),
            (253, true)
        );
        let dots = format!("{}.{}", "n".repeat(235), "e".repeat(17));
        assert!(!event_name(&dots, now).contains(".."));
    }

    #[test]
    fn a_note_is_cut_to_what_the_api_takes() {
        let report = Report {
            about: About::Pool {
                name: "p".into(),
                uid: "u".into(),
            },
            warning: true,
            reason: "PoolExhausted",
            note: "\u{e9}".repeat(600),
        };
        let event = render(&report, "i", Timestamp::UNIX_EPOCH);
        let note = event.note.unwrap();
        assert!(
            note.len() <= 1024 && note.ends_with("\u{e9}..."),
            "{}",
            note.len()
        );
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("IPPool"));
    }
}
