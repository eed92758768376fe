//! Writes reports to the log, and converts them to Kubernetes events.

use k8s_openapi::api::core::v1::ObjectReference;
use tracing::{info, warn};

use super::{EventRecord, Regarding};
use crate::cluster::request::ObjectKind;
use cadastre_api::frr::FRR_API_VERSION;
use cadastre_daemon::events::EventNote;

/// Writes a report to the log, as a warning or as information.
pub fn log(report: &EventRecord) {
    let name = &report.about.name;
    match (report.about.kind, report.warning) {
        (ObjectKind::Node, true) => {
            warn!(node.name = %name, reason = report.reason, "{}", report.note);
        }
        (ObjectKind::Node, false) => {
            info!(node.name = %name, reason = report.reason, "{}", report.note);
        }
        (ObjectKind::Block, true) => {
            warn!(block.name = %name, reason = report.reason, "{}", report.note);
        }
        (ObjectKind::Block, false) => {
            info!(block.name = %name, reason = report.reason, "{}", report.note);
        }
        (ObjectKind::Pod, true) => {
            warn!(pod.name = %name, reason = report.reason, "{}", report.note);
        }
        (ObjectKind::Pod, false) => {
            info!(pod.name = %name, reason = report.reason, "{}", report.note);
        }
        (_, true) => warn!(pool.name = %name, reason = report.reason, "{}", report.note),
        (_, false) => info!(pool.name = %name, reason = report.reason, "{}", report.note),
    }
}

/// Converts a report to a note, from which a Kubernetes event is made. The name of a pod in the report is
/// `namespace/name`.
pub fn note(report: EventRecord) -> EventNote {
    let Regarding { kind, name, uid } = report.about;
    let (namespace, name) = match name.split_once('/') {
        Some((namespace, name)) => (Some(namespace.to_owned()), name),
        None => (None, &*name),
    };
    let version = match kind {
        ObjectKind::Node | ObjectKind::Pod => "v1",
        ObjectKind::Subnet
        | ObjectKind::Routes
        | ObjectKind::Block
        | ObjectKind::Pool
        | ObjectKind::Claim => "cadastre.dev/v1alpha1",
        ObjectKind::FrrConfiguration => FRR_API_VERSION,
    };
    EventNote {
        about: ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(kind.name().to_owned()),
            namespace,
            name: Some(name.to_owned()),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        },
        warning: report.warning,
        reason: report.reason,
        note: report.note,
    }
}
