//! The condition `RoutesReady` of the NodeSubnet. The condition reports whether this node can reach the pods of all
//! other nodes by direct routes, and its message says what to do if not.
//!
//! # Guarantees
//! - The text does not depend on the number of routes, so changes of other nodes' ranges cause no write of the status.

use cadastre_api::ROUTES_READY;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::conditions;

/// The maximum number of nodes that a message names.
const MOST_NAMES: usize = 5;

/// What the agent reports about the routes to the pods of other nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RoutesReport {
    /// The agent adds no routes, so there is no condition
    #[default]
    Off,
    /// It is not known yet whether there are routes, so an existing condition stays as it is
    Pending,
    /// The API server has not listed the NodeRoutes
    NotListed,
    /// Another network serves the pods of this node, so there are no routes
    LeftToOthers,
    /// The kernel has all routes
    Installed,
    /// Some routes are missing because their nodes are not on this node's link. The text names the nodes
    NotOnLink(String),
    /// Some routes are missing for other reasons, which the text names
    Failed(String),
}

impl RoutesReport {
    /// Returns the condition to set; [`Self::Off`] and [`Self::Pending`] set none.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let (status, reason, message) = match self {
            Self::Off | Self::Pending => return None,
            Self::NotListed => (
                "Unknown",
                "NotListed",
                "the API server has not listed the NodeRoutes, so routes to the pods of other nodes stay as they are. See that the CRD of NodeRoutes exists (cadastre crd | kubectl apply --server-side -f -), that the controller runs with --publish-routes, and that the agent's ClusterRole allows to list and watch noderoutes",
            ),
            Self::LeftToOthers => (
                "False",
                "LeftToOthers",
                "another network serves the pods of this node (see the condition ServedByOthers), so this agent has no routes",
            ),
            Self::Installed => (
                "True",
                "Installed",
                "this node has a route to the pods of each other node",
            ),
            Self::NotOnLink(text) => ("False", "NotOnLink", text.as_str()),
            Self::Failed(text) => ("False", "RoutesFailed", text.as_str()),
        };
        let message = message.to_owned();
        Some(conditions::condition(ROUTES_READY, status, reason, message))
    }
}

/// Returns the text about nodes that are not on this node's link.
pub(super) fn not_on_link<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> String {
    let count = names.len();
    let named: Vec<&str> = names.take(MOST_NAMES).map(String::as_str).collect();
    let more = match count.saturating_sub(MOST_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (are, pods) = match count {
        1 => ("node is", "its"),
        _ => ("nodes are", "their"),
    };
    format!(
        "{count} {are} not on this node's link, or without an address of the family of {pods} pods, which cannot be reached by direct routes: {}{more}. Connect the nodes by one link, or use another dataplane with --routes=none (docs/routes.md)",
        named.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_few_nodes() {
        let names = |count: usize| (0..count).map(|n| format!("n{n}")).collect::<Vec<_>>();
        let text = |count| not_on_link(names(count).iter());
        assert!(text(1).starts_with("1 node is not on this node's link, or without"));
        assert!(text(1).contains("routes: n0. Connect"));
        assert!(text(5).contains(": n0, n1, n2, n3, n4. Connect"));
        assert!(text(7).starts_with("7 nodes are not") && text(7).contains("n3, n4 and 2 more. "));
    }

    #[test]
    fn the_condition_exists_only_with_routes() {
        assert_eq!(RoutesReport::Off.condition(), None);
        assert_eq!(RoutesReport::Pending.condition(), None);
        let of = |report: RoutesReport| {
            let condition = report.condition().unwrap();
            (condition.status, condition.reason)
        };
        let pair = |status: &str, reason: &str| (status.to_owned(), reason.to_owned());
        assert_eq!(of(RoutesReport::Installed), pair("True", "Installed"));
        assert_eq!(of(RoutesReport::NotListed), pair("Unknown", "NotListed"));
        let failed = RoutesReport::Failed("x".to_owned());
        assert_eq!(of(failed), pair("False", "RoutesFailed"));
    }
}
