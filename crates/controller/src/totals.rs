//! Addresses of pools by state: what agents report, and where none does, what pods do.
//!
//! Counted anew each time, in one pass over all blocks.

use std::collections::BTreeMap;

use super::registry::Registry;
use crate::cluster::seen::Text;
use crate::cluster::world::World;
use crate::cluster::world::report_of;
use cadastre_api::AddressStatus;
use cadastre_core::Family;

/// Counts of one pool and family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Addresses in blocks that live nodes have, without reserved ones
    pub held: u128,
    /// Those in use by pods
    pub used: u128,
    /// Those released lately and not given again yet
    pub cooling: u128,
    /// Blocks that lie outside of what the pool's spec names by now
    pub outside: usize,
}

impl Totals {
    /// As the API shows it.
    pub fn status(self) -> AddressStatus {
        AddressStatus {
            held: self.held.to_string(),
            used: self.used.to_string(),
            cooling: self.cooling.to_string(),
        }
    }
}

/// Counts all pools.
pub fn totals(world: &World, registry: &Registry) -> BTreeMap<(Text, Family), Totals> {
    let mut all: BTreeMap<(Text, Family), Totals> = BTreeMap::new();
    for entry in registry.blocks.iter() {
        let key = (entry.pool.clone(), entry.cidr.family());
        let totals = all.entry(key).or_default();
        let pool = registry.pools.get(&entry.pool);
        totals.outside += usize::from(pool.is_some_and(|pool| !pool.space.covers(&entry.cidr)));
        if entry.owner.resting || !entry.confirmed {
            continue;
        }
        totals.held += u128::from(registry.usable(&entry.cidr, &entry.pool));
        let node = world.nodes.get(&entry.owner.name);
        let report = node.and_then(|node| report_of(node, world));
        if let Some(word) = entry.word(report) {
            totals.used += u128::from(word.used);
            totals.cooling += u128::from(word.cooling);
        } else {
            totals.used += world.pods.count_in(&entry.cidr) as u128;
        }
    }
    all
}
