//! Searches for an address, or for a pod, a node or a pool by its name or a part of it.

use serde::Serialize;

use crate::inventory::Inventory;
use cadastre_core::{Addr, Cidr};

/// The maximum number of results of a search. Further results are left out.
const MOST_HITS: usize = 20;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FoundPlace {
    /// The kind of the place: `address`, `node`, `pod` or `pool`
    pub what: &'static str,
    pub name: String,
    /// The pool to show; `None` if the place is in no pool
    pub pool: Option<String>,
    /// The address, or a range of the node; `None` for a pool, and for a node without ranges
    pub at: Option<Cidr>,
}

/// Searches for an address, or for names that contain `text`: pools first, then nodes, then pods. Within a kind, exact
/// matches come first.
pub(super) fn find(text: &str, inventory: &Inventory) -> Vec<FoundPlace> {
    let text = text.trim();
    let place = |what, name: &str, at: Option<Cidr>| {
        let pool = at.and_then(|at| inventory.registry.pools.of(&at));
        FoundPlace {
            what,
            name: name.to_owned(),
            pool: pool.map(|it| it.name.to_string()),
            at,
        }
    };
    let at = Addr::parse_lenient(text).map(Cidr::host);
    let at = at.or_else(|| Cidr::parse_lenient(text).ok());
    if at.is_some() {
        return vec![place("address", text, at)];
    }
    let cache = &inventory.cache;
    let mut hits: Vec<FoundPlace> = Vec::new();
    for name in matching(cache.pools.iter().map(|it| &*it.name), text) {
        hits.push(FoundPlace {
            pool: Some(name.to_owned()),
            ..place("pool", name, None)
        });
    }
    for name in matching(cache.nodes.iter().map(|it| &*it.name), text) {
        let ranges = inventory.ranges_of(name);
        if ranges.is_empty() {
            hits.push(place("node", name, None));
        }
        hits.extend(ranges.iter().map(|it| place("node", name, Some(*it))));
    }
    let pods = inventory.pods.iter().filter(|it| it.uses_addresses());
    for name in matching(pods.map(|it| &*it.name), text) {
        for addr in inventory.pod(name).into_iter().flat_map(|it| &it.addresses) {
            hits.push(place("pod", name, Some(Cidr::host(*addr))));
        }
    }
    hits.truncate(MOST_HITS);
    hits
}

/// Returns the names that contain the text: first exact matches, then names that begin with the text.
fn matching<'a>(names: impl Iterator<Item = &'a str>, text: &str) -> Vec<&'a str> {
    let found = names.filter(|name| !text.is_empty() && name.contains(text));
    let mut found: Vec<&str> = found.collect();
    let is_name = |name: &str| name == text || name.split_once('/').is_some_and(|it| it.1 == text);
    found.sort_by_key(|name| (!is_name(name), !name.starts_with(text), *name));
    found.truncate(MOST_HITS);
    found
}
