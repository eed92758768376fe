//! Addresses that pods or nodes report, each with the number of pods or nodes that report it.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_core::{Addr, Cidr};

/// An ordered set of addresses, each with the number of its reporters.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    counts: BTreeMap<Addr, u32>,
    /// Addresses with more than one reporter
    doubled: BTreeSet<Addr>,
}

impl Addresses {
    /// Increases the number of reporters of each of these addresses by one.
    pub fn add(&mut self, addresses: &[Addr]) {
        for addr in addresses {
            let count = self.counts.entry(*addr).or_default();
            *count += 1;
            if *count == 2 {
                self.doubled.insert(*addr);
            }
        }
    }

    /// Removes one reporter of each address. An address without a reporter leaves the set.
    pub fn remove(&mut self, addresses: &[Addr]) {
        for addr in addresses {
            if let Some(count) = self.counts.get_mut(addr) {
                *count -= 1;
                if *count == 1 {
                    self.doubled.remove(addr);
                }
                if *count == 0 {
                    self.counts.remove(addr);
                }
            }
        }
    }

    /// Returns the addresses with more than one reporter.
    pub fn doubled(&self) -> &BTreeSet<Addr> {
        &self.doubled
    }

    /// Returns the addresses in the range, lowest first.
    pub fn within(&self, range: &Cidr) -> impl Iterator<Item = Addr> + '_ {
        self.counts
            .range(range.first()..=range.last())
            .map(|(addr, _)| *addr)
    }
}
