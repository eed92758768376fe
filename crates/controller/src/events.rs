//! Output of reports: to the log and as Kubernetes events.

use k8s_openapi::api::core::v1::ObjectReference;
use tracing::{info, warn};

use super::{About, Report};
use crate::cluster::request::Kind;
use cadastre_daemon::events::Notice;

/// Writes a report to the log.
pub fn log(report: &Report) {
    let name = &report.about.name;
    match (report.about.kind, report.warning) {
        (Kind::Node, true) => warn!(node.name = %name, reason = report.reason, "{}", report.note),
        (Kind::Node, false) => info!(node.name = %name, reason = report.reason, "{}", report.note),
        (Kind::Block, true) => warn!(block.name = %name, reason = report.reason, "{}", report.note),
        (Kind::Block, false) => {
            info!(block.name = %name, reason = report.reason, "{}", report.note);
        }
        (_, true) => warn!(pool.name = %name, reason = report.reason, "{}", report.note),
        (_, false) => info!(pool.name = %name, reason = report.reason, "{}", report.note),
    }
}

/// Converts a report to a Kubernetes event.
pub fn notice(report: Report) -> Notice {
    let About { kind, name, uid } = report.about;
    let version = match kind {
        Kind::Node => "v1",
        Kind::Subnet | Kind::Block | Kind::Pool => "cadastre.dev/v1alpha1",
    };
    Notice {
        about: ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(kind.name().to_owned()),
            name: Some(name.to_string()),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        },
        warning: report.warning,
        reason: report.reason,
        note: report.note,
    }
}
