//! Kubernetes events, written beside everything else and never in its way.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use super::{About, Report};
use crate::telemetry::ControllerMetrics;

/// Longest wait for one event to be written.
const LIMIT: Duration = Duration::from_secs(5);

/// Writes events one after the other; what does not fit into the backlog is dropped and counted.
pub fn spawn(client: Client, backlog: usize, metrics: ControllerMetrics) -> mpsc::Sender<Report> {
    let (sender, mut reports) = mpsc::channel::<Report>(backlog);
    let reporter = Reporter {
        controller: "cadastre-controller".to_owned(),
        instance: std::env::var("POD_NAME").ok(),
    };
    let recorder = Recorder::new(client, reporter);
    tokio::spawn(async move {
        while let Some(report) = reports.recv().await {
            let (event, about) = render(&report);
            match tokio::time::timeout(LIMIT, recorder.publish(&event, &about)).await {
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

/// The same for the log.
pub fn log(report: &Report) {
    let (kind, name) = match &report.about {
        About::Node { name, .. } => ("node", name),
        About::Pool { name, .. } => ("pool", name),
    };
    match (kind, report.warning) {
        ("node", true) => warn!(node.name = %name, reason = report.reason, "{}", report.note),
        ("node", false) => info!(node.name = %name, reason = report.reason, "{}", report.note),
        (_, true) => warn!(pool.name = %name, reason = report.reason, "{}", report.note),
        (_, false) => info!(pool.name = %name, reason = report.reason, "{}", report.note),
    }
}

fn render(report: &Report) -> (Event, ObjectReference) {
    /// The API's limit for a note, in bytes.
    const NOTE: usize = 1024;
    let (version, kind, name, uid) = match &report.about {
        About::Node { name, uid } => ("v1", "Node", name, uid),
        About::Pool { name, uid } => ("cadastre.dev/v1alpha1", "IPPool", name, uid),
    };
    let mut note = report.note.clone();
    if note.len() > NOTE {
        let cut = (0..=NOTE - 3)
            .rev()
            .find(|at| note.is_char_boundary(*at))
            .unwrap_or(0);
        note.truncate(cut);
        note.push_str("...");
    }
    let event = Event {
        type_: if report.warning {
            EventType::Warning
        } else {
            EventType::Normal
        },
        reason: report.reason.to_owned(),
        note: Some(note),
        action: "Allocate".to_owned(),
        secondary: None,
    };
    let about = ObjectReference {
        api_version: Some(version.to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name.to_string()),
        uid: Some(uid.to_string()),
        ..ObjectReference::default()
    };
    (event, about)
}
