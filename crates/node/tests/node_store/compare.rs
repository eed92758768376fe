//! Compares the model with the content of a ledger.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_core::{Addr, Cidr, Family};
use cadastre_node::{AddressCounts, BlockState, Now, Snapshot};

use crate::helpers;
use crate::model::{Model, each, order};

impl Model {
    /// Panics if a snapshot of the ledger differs from the model, or if an address belongs to two attachments.
    pub fn compare(&self, snapshot: &Snapshot, now: &Now) {
        assert_eq!(snapshot.node_uid, self.node);
        let attachments = snapshot.attachments.iter().map(|it| {
            let addresses = it.given.addresses.iter();
            let addresses: Vec<_> = addresses.map(|it| (it.address, it.block)).collect();
            (&it.attachment, addresses, &it.pod, &it.netns, &it.boot)
        });
        let expected = self.attachments.iter();
        let expected = expected.map(|(it, t)| (it, t.addresses.clone(), &t.pod, &t.netns, &t.boot));
        let mut expected: Vec<_> = expected.collect();
        expected.sort_by_key(|it| order(it.0));
        assert_eq!(attachments.collect::<Vec<_>>(), expected);
        helpers::attachments(snapshot);
        let mut sums: BTreeMap<(String, Family), AddressCounts> = BTreeMap::new();
        let mut blocks = snapshot.blocks.iter();
        for (cidr, block) in &self.blocks {
            let counts = self.count(*cidr, now);
            if block.state == BlockState::Unlisted && counts.used + counts.cooling == 0 {
                continue;
            }
            let it = blocks.next().unwrap();
            assert_eq!(
                (it.cidr, &it.uid, &it.pool, it.state, it.counts),
                (*cidr, &block.uid, &block.pool, block.state, counts)
            );
            let sum = sums.entry((block.pool.clone(), cidr.family())).or_default();
            sum.used += counts.used;
            sum.cooling += counts.cooling;
            sum.free = sum.free.saturating_add(counts.free);
        }
        assert_eq!(blocks.next(), None);
        for pool in &snapshot.pools {
            for (family, counts) in &pool.counts {
                let name = &pool.terms.name;
                let sum = sums.remove(&(name.clone(), family)).unwrap_or_default();
                assert_eq!(*counts, sum, "of {name} {family}");
            }
        }
        assert!(sums.is_empty(), "pools are missing: {sums:?}");
    }

    fn count(&self, cidr: Cidr, now: &Now) -> AddressCounts {
        let mut counts = AddressCounts::default();
        let mut used = BTreeSet::new();
        for (addr, block) in self.attachments.values().flat_map(|it| &it.addresses) {
            counts.used += u64::from(*block == cidr);
            used.insert(*addr);
        }
        let mut cooling = BTreeSet::new();
        for release in self.releases.iter().filter(|it| self.cools(it, now)) {
            counts.cooling += u64::from(release.block == cidr);
            cooling.insert(release.addr);
        }
        if self.blocks[&cidr].state == BlockState::Active {
            let may = |it: &Addr| self.is_for_all(cidr, *it);
            let taken = |it: &Addr| used.contains(it) || cooling.contains(it);
            let few = cidr.size() <= 100_000;
            let free = if few {
                each(cidr).filter(|it| may(it) && !taken(it)).count() as u128
            } else {
                // In a wide block, all addresses are free except some of the first ones and possibly the last one.
                let out = each(cidr).filter(|it| !may(it) || taken(it)).count() as u128;
                cidr.size() - out - u128::from(!may(&cidr.last()))
            };
            counts.free = u64::try_from(free).unwrap_or(u64::MAX);
        }
        counts
    }
}
