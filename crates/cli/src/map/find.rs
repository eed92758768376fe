//! Searches for an address, or for a pod, a node or a pool by its name or a part of it.

use serde::Serialize;

use crate::inventory::Inventory;
use cadastre_core::{Addr, Cidr};

/// The maximum number of results.
const MOST_HITS: usize = 20;

/// A search result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FoundPlace {
    /// `address`, `node`, `pod` or `pool`
    pub what: &'static str,
    pub name: String,
    /// The pool to show; `None` if the place is in no pool
    pub pool: Option<String>,
    /// The address, or a range of the node; `None` for a pool, and for a node without ranges
    pub at: Option<Cidr>,
}

/// Searches for an address, or for names that contain `text`: pools first, then nodes, then pods. Among the names of a
/// kind, exact ones come first.
pub(super) fn find(text: &str, inventory: &Inventory) -> Vec<FoundPlace> {
    let text = text.trim();
    let mut hits: Vec<FoundPlace> = Vec::new();
    let mut add = |what, name: &str, at: Option<Cidr>| {
        let pool = at.and_then(|at| inventory.registry.pools.of(&at));
        let pool = pool.map(|it| it.name.to_string());
        let name = name.to_owned();
        hits.push(FoundPlace {
            what,
            name,
            pool,
            at,
        });
    };
    let at = Addr::parse_lenient(text).map(Cidr::host);
    let at = at.or_else(|| Cidr::parse_lenient(text).ok());
    if let Some(at) = at {
        add("address", text, Some(at));
        return hits;
    }
    let cache = &inventory.cache;
    for name in matching(cache.nodes.iter().map(|it| &*it.name), text) {
        let ranges = inventory.ranges_of(name);
        for range in &ranges {
            add("node", name, Some(*range));
        }
        if ranges.is_empty() {
            add("node", name, None);
        }
    }
    let pods = inventory.pods.iter().filter(|it| it.uses_addresses());
    for name in matching(pods.map(|it| &*it.name), text) {
        for addr in inventory.pod(name).into_iter().flat_map(|it| &it.addresses) {
            add("pod", name, Some(Cidr::host(*addr)));
        }
    }
    let pools = matching(cache.pools.iter().map(|it| &*it.name), text);
    let pools = pools.into_iter().map(|name| FoundPlace {
        what: "pool",
        name: name.to_owned(),
        pool: Some(name.to_owned()),
        at: None,
    });
    hits.splice(0..0, pools);
    hits.truncate(MOST_HITS);
    hits
}

/// Returns the names that contain the text: exact ones first, then those that begin with it.
fn matching<'a>(names: impl Iterator<Item = &'a str>, text: &str) -> Vec<&'a str> {
    let mut found: Vec<&str> = names
        .filter(|name| !text.is_empty() && name.contains(text))
        .collect();
    let is_name = |name: &str| name == text || name.split_once('/').is_some_and(|it| it.1 == text);
    found.sort_by_key(|name| (!is_name(name), !name.starts_with(text), *name));
    found.truncate(MOST_HITS);
    found
}
