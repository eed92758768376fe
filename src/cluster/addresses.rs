//! Addresses that something reports, with how many report each.

use std::collections::BTreeMap;

use crate::ipam::{Addr, Cidr};

/// A counted, ordered set of addresses.
#[derive(Debug, Default)]
pub struct Addresses(BTreeMap<Addr, u32>);

impl Addresses {
    /// One more reports them.
    pub fn add(&mut self, addresses: &[Addr]) {
        for addr in addresses {
            *self.0.entry(*addr).or_default() += 1;
        }
    }

    /// One less reports them.
    pub fn remove(&mut self, addresses: &[Addr]) {
        for addr in addresses {
            if let Some(count) = self.0.get_mut(addr) {
                *count -= 1;
                if *count == 0 {
                    self.0.remove(addr);
                }
            }
        }
    }

    /// Those in the range, lowest first.
    pub fn within(&self, range: &Cidr) -> impl Iterator<Item = Addr> + '_ {
        self.0
            .range(range.first()..=range.last())
            .map(|(addr, _)| *addr)
    }
}
