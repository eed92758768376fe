//! Search: an address, a pod, a node or a pool, by all or a part of the name.

use super::sheet::{Holding, holdings};
use super::{Found, Hit, MOST_HITS, head};
use crate::cluster::world::World;
use cadastre_core::{Addr, Cidr};

/// Exact names before parts of names.
pub(super) fn find(text: &str, world: &World) -> Found {
    let text = text.trim();
    let mut hits: Vec<Hit> = Vec::new();
    if text.is_empty() {
        return Found { hits, cut: false };
    }
    let cidr = Cidr::parse_lenient(text).ok();
    let address = Addr::parse_lenient(text).or(cidr.map(|it| it.first()));
    if let Some(address) = address {
        hits.push(hit("address", text.to_owned(), Some(address)));
    } else {
        let pools = world.pools.iter().map(|it| &it.name);
        for name in matching(pools, text) {
            hits.push(Hit {
                pool: Some(name.to_owned()),
                ..hit("pool", name.to_owned(), None)
            });
        }
        for name in matching(world.nodes.iter().map(|it| &it.name), text) {
            hits.push(hit("node", name.to_owned(), None));
        }
        for (name, addresses) in world.pods.find(text, MOST_HITS) {
            let each = addresses.iter();
            hits.extend(each.map(|it| hit("pod", name.to_string(), Some(*it))));
        }
    }
    place(&mut hits, world);
    let cut = hits.len() > MOST_HITS;
    hits.truncate(MOST_HITS);
    Found { hits, cut }
}

fn hit(what: &'static str, name: String, address: Option<Addr>) -> Hit {
    Hit {
        what,
        name,
        pool: None,
        cidr: None,
        address,
    }
}

/// Names that have the text in them, whole ones first, then those that begin with it.
fn matching<'a>(
    names: impl Iterator<Item = &'a crate::cluster::seen::Text>,
    text: &str,
) -> Vec<&'a str> {
    let mut found: Vec<&str> = names
        .map(|it| &**it)
        .filter(|it| it.contains(text))
        .collect();
    found.sort_by_key(|name| (*name != text, !name.starts_with(text), *name));
    found.truncate(MOST_HITS);
    found
}

/// Says of each hit which range and pool it is in; a node becomes one hit for each of its ranges.
fn place(hits: &mut Vec<Hit>, world: &World) {
    let wanted = |cidr: &Cidr, node: &str| {
        hits.iter().any(|hit| match hit.address {
            Some(address) => cidr.contains_addr(address),
            None => hit.what == "node" && hit.name == node,
        })
    };
    // The narrowest range first: it says most.
    let mut held: Vec<Holding> = holdings(world, |_, _| true);
    held.retain(|it| wanted(&it.cidr, &it.node));
    held.sort_by_key(|it| (std::cmp::Reverse(it.cidr.len()), it.cidr));
    let mut placed = Vec::new();
    for hit in hits.drain(..) {
        let mut ranges = held.iter().filter(|it| match hit.address {
            Some(address) => it.cidr.contains_addr(address),
            None => hit.what == "node" && *it.node == *hit.name,
        });
        match hit.what {
            "pool" => placed.push(hit),
            "node" => {
                let before = placed.len();
                placed.extend(ranges.take(MOST_HITS).map(|it| Hit {
                    cidr: Some(it.cidr),
                    ..hit.clone()
                }));
                if placed.len() == before {
                    placed.push(hit);
                }
            }
            _ => {
                let cidr = ranges.next().map(|it| it.cidr);
                placed.push(Hit { cidr, ..hit });
            }
        }
    }
    for hit in &mut placed {
        let at = hit.cidr.or_else(|| hit.address.map(Cidr::host));
        if let (None, Some(at)) = (&hit.pool, at) {
            let mut pools = world.pools.iter();
            let covers = pools.find(|pool| {
                let sides = head(pool).sides;
                let mut cidrs = sides.iter().flat_map(|side| &side.cidrs);
                cidrs.any(|cidr| cidr.contains(&at))
            });
            hit.pool = covers.map(|pool| pool.name.to_string());
        }
    }
    *hits = placed;
}
