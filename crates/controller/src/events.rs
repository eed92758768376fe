//! What is told to people: in the log, and as a Kubernetes event.

use k8s_openapi::api::core::v1::ObjectReference;
use tracing::{info, warn};

use super::{About, Report};
use cadastre_daemon::events::Notice;

/// A line of the log.
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

/// An event.
pub fn notice(report: Report) -> Notice {
    const CADASTRE: &str = "cadastre.dev/v1alpha1";
    let (version, kind, name, uid) = match report.about {
        About::Node { name, uid } => ("v1", "Node", name, uid),
        About::Pool { name, uid } => (CADASTRE, "IPPool", name, uid),
        About::Block { name, uid } => (CADASTRE, "IPAMBlock", name, uid),
    };
    Notice {
        about: ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name.to_string()),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        },
        warning: report.warning,
        reason: report.reason,
        note: report.note,
    }
}
