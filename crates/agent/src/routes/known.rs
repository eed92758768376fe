//! The NodeRoutes objects as the watch has shown them.
//!
//! # Guarantees
//! - [`KnownRoutes::complete`] returns no objects until the first list has ended. A later list removes objects only
//!   when it ends.
//! - A part of an object that cannot be parsed is left out, and the size of each object is bounded.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use cadastre_api::routes::{MOST_DESTINATIONS, MOST_VIA};
use cadastre_api::{NodeRoutesLite, NodeRoutesSpec};
use cadastre_core::{Addr, Cidr};
use cadastre_daemon::watch::ObjectEvent;

/// The parts of a NodeRoutes that the agent needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeRoutesSeen {
    /// The resourceVersion; 0 if it is no number
    pub version: u64,
    /// The addresses of the node, which are the gateways of routes to `destinations`
    pub via: Vec<Addr>,
    /// The ranges that are reached through the node
    pub destinations: Vec<Cidr>,
}

impl NodeRoutesSeen {
    /// Parses the addresses and ranges of a spec, and leaves out invalid ones. The number of each is bounded.
    pub(super) fn new(version: u64, spec: &NodeRoutesSpec) -> Self {
        let via = spec.via.iter().take(MOST_VIA);
        let destinations = spec.destinations.iter().take(MOST_DESTINATIONS);
        Self {
            version,
            via: via.filter_map(|it| Addr::parse_strict(it)).collect(),
            destinations: destinations
                .filter_map(|it| Cidr::parse_strict(it).ok())
                .collect(),
        }
    }
}

/// Extracts the name and the parts of a NodeRoutes that the agent needs. A spec that cannot be parsed counts as empty.
pub(super) fn read(object: NodeRoutesLite) -> (String, NodeRoutesSeen) {
    let name = object.metadata.name.unwrap_or_default();
    let version = object.metadata.resource_version;
    let version = version.and_then(|it| it.parse().ok()).unwrap_or_default();
    let spec = serde_json::from_value(object.spec).unwrap_or_else(|error| {
        warn!("NodeRoutes {name} cannot be read, so there are no routes to its node: {error}");
        NodeRoutesSpec::default()
    });
    (name, NodeRoutesSeen::new(version, &spec))
}

/// The NodeRoutes objects that the watch has shown, by name.
#[derive(Debug, Default)]
pub(super) struct KnownRoutes {
    objects: BTreeMap<String, NodeRoutesSeen>,
    /// The objects that the list under way has shown
    listing: BTreeSet<String>,
    is_complete: bool,
}

impl KnownRoutes {
    /// Records an event. Returns whether the routes may have changed.
    pub(super) fn on(&mut self, event: ObjectEvent<(String, NodeRoutesSeen)>) -> bool {
        match event {
            ObjectEvent::Restarted { .. } => {
                self.listing.clear();
                false
            }
            ObjectEvent::Applied((name, object)) => {
                self.listing.insert(name.clone());
                let before = self.objects.insert(name, object.clone());
                before != Some(object)
            }
            ObjectEvent::Listed => {
                let count = self.objects.len();
                let listing = std::mem::take(&mut self.listing);
                self.objects.retain(|name, _| listing.contains(name));
                let was_complete = std::mem::replace(&mut self.is_complete, true);
                !was_complete || self.objects.len() < count
            }
            ObjectEvent::Deleted((name, _)) => self.objects.remove(&name).is_some(),
            ObjectEvent::Reached(_) => false,
        }
    }

    /// Returns all objects; `None` until the first list has ended.
    pub(super) fn complete(&self) -> Option<&BTreeMap<String, NodeRoutesSeen>> {
        self.is_complete.then_some(&self.objects)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::ObjectEvent::{Applied, Deleted, Listed, Restarted};
    use super::*;

    fn object(name: &str, spec: &serde_json::Value) -> (String, NodeRoutesSeen) {
        let meta = json!({"name": name, "resourceVersion": "7"});
        let object = json!({"metadata": meta, "spec": spec});
        read(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn what_cannot_be_parsed_is_left_out() {
        let spec =
            json!({"via": ["192.0.2.1", "x"], "destinations": ["10.0.0.0/26", "10.0.0.1/26", ""]});
        let (name, seen) = object("a", &spec);
        assert_eq!((&*name, seen.version), ("a", 7));
        assert_eq!((seen.via.len(), seen.destinations.len()), (1, 1));
        let (_, bad) = object("a", &json!({"via": 7}));
        assert!(bad.via.is_empty() && bad.destinations.is_empty());
        let many = vec!["10.0.0.0/26"; MOST_DESTINATIONS + 1];
        let (_, seen) = object("a", &json!({"destinations": many}));
        assert_eq!(seen.destinations.len(), MOST_DESTINATIONS);
    }

    #[test]
    fn a_list_counts_when_it_has_ended() {
        let mut known = KnownRoutes::default();
        let names = |known: &KnownRoutes| {
            let all = known.complete();
            all.map(|all| all.keys().cloned().collect::<Vec<_>>())
        };
        let begins = || Restarted {
            asked: Duration::ZERO,
        };
        let of = |name: &str| object(name, &json!({"via": ["192.0.2.1"]}));
        assert!(!known.on(begins()) && known.on(Applied(of("a"))));
        assert_eq!(names(&known), None);
        assert!(known.on(Listed) && known.on(Applied(of("b"))));
        assert!(!known.on(begins()) && !known.on(Applied(of("b"))));
        assert_eq!(names(&known).unwrap(), ["a", "b"], "the list has not ended");
        assert!(known.on(Listed));
        assert_eq!(names(&known).unwrap(), ["b"]);
        assert!(known.on(Deleted(of("b"))) && !known.on(Deleted(of("b"))));
        assert_eq!(names(&known).unwrap(), [""; 0]);
    }
}
