//! Compares the model with the content of a ledger.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_core::{Addr, Cidr, Family};
use cadastre_node::{AddressCounts, Attachment, BlockState, Now, Snapshot};

use crate::model::{Model, each, order};

impl Model {
    /// Panics if a snapshot of the ledger differs from the model, or if an address has two holders.
    pub fn compare(&self, snapshot: &Snapshot, now: &Now) {
        assert_eq!(snapshot.node_uid, self.node);
        let tenants = snapshot.attachments.iter().map(|it| {
            let addresses: Vec<_> = it
                .given
                .addresses
                .iter()
                .map(|it| (it.address, it.block))
                .collect();
            (&it.attachment, addresses, &it.pod, &it.netns, &it.boot)
        });
        let tenants: Vec<_> = tenants.collect();
        let expected = self.tenants.iter();
        let expected = expected.map(|(it, t)| (it, t.addresses.clone(), &t.pod, &t.netns, &t.boot));
        let mut expected: Vec<_> = expected.collect();
        expected.sort_by_key(|it| order(it.0));
        assert_eq!(tenants, expected);
        let mut holders: BTreeMap<Addr, &Attachment> = BTreeMap::new();
        for tenant in &snapshot.attachments {
            for given in &tenant.given.addresses {
                let other = holders.insert(given.address, &tenant.attachment);
                assert!(other.is_none(), "{} has two holders", given.address);
            }
        }
        let mut sums: BTreeMap<(String, Family), AddressCounts> = BTreeMap::new();
        let mut shown = Vec::new();
        for (cidr, block) in &self.blocks {
            let counts = self.count(*cidr, now);
            if block.state == BlockState::Withdrawn && counts.used + counts.cooling == 0 {
                continue;
            }
            shown.push((
                *cidr,
                block.uid.clone(),
                block.pool.clone(),
                block.state,
                counts,
            ));
            let sum = sums.entry((block.pool.clone(), cidr.family())).or_default();
            sum.used += counts.used;
            sum.cooling += counts.cooling;
            sum.free = sum.free.saturating_add(counts.free);
        }
        let blocks = snapshot.blocks.iter();
        let blocks = blocks.map(|it| {
            (
                it.cidr,
                it.uid.clone(),
                it.pool.clone(),
                it.state,
                it.counts,
            )
        });
        assert_eq!(blocks.collect::<Vec<_>>(), shown);
        for pool in &snapshot.pools {
            for (family, counts) in &pool.counts {
                let sum = sums.remove(&(pool.terms.name.clone(), family));
                assert_eq!(
                    *counts,
                    sum.unwrap_or_default(),
                    "of {} {family}",
                    pool.terms.name
                );
            }
        }
        assert!(sums.is_empty(), "pools are missing: {sums:?}");
    }

    fn count(&self, cidr: Cidr, now: &Now) -> AddressCounts {
        let mut counts = AddressCounts::default();
        let mut used = BTreeSet::new();
        for (addr, block) in self.tenants.values().flat_map(|it| &it.addresses) {
            counts.used += u64::from(*block == cidr);
            used.insert(*addr);
        }
        let mut cooling = BTreeSet::new();
        for freed in self.freed.iter().filter(|it| self.cools(it, now)) {
            counts.cooling += u64::from(freed.block == cidr);
            cooling.insert(freed.addr);
        }
        if self.blocks[&cidr].state == BlockState::Held {
            let may = |it: &Addr| self.is_for_all(cidr, *it);
            let taken = |it: &Addr| used.contains(it) || cooling.contains(it);
            let few = cidr.size() <= 100_000;
            let free = if few {
                each(cidr).filter(|it| may(it) && !taken(it)).count() as u128
            } else {
                // In a wide block, all addresses that are not free are among the first ones, apart from the last
                // address of the block.
                let out = each(cidr).filter(|it| !may(it) || taken(it)).count() as u128;
                cidr.size() - out - u128::from(!may(&cidr.last()))
            };
            counts.free = u64::try_from(free).unwrap_or(u64::MAX);
        }
        counts
    }
}
