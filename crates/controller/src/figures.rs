//! Counts of a pool: computed from the ledger each time, never kept beside it.

use std::collections::BTreeMap;

use super::pools::PoolState;
use super::registry::Registry;
use cadastre_api::{AddressStatus, FamilyStatus};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Family, Holder, State};

/// Counts of one pool and family, in blocks of the pool's block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// What it could hold, reserved and service ranges left out
    pub capacity: u128,
    /// Ranges held by live nodes or being given to them
    pub held: u128,
    /// Ranges of dead nodes
    pub quarantined: u128,
    /// What could be given now
    pub free: u128,
}

impl Figures {
    /// Share of the capacity that is not free, 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn utilization(&self) -> f64 {
        if self.capacity == 0 {
            1.0
        } else {
            1.0 - (self.free as f64 / self.capacity as f64)
        }
    }

    /// As the API shows it, with the prefix length of a block.
    pub fn status(self, block_len: Option<u8>, addresses: Option<AddressStatus>) -> FamilyStatus {
        let percent = (self.utilization() * 100.0).floor();
        // 100 % is for pools without any room at all.
        let percent = if self.free > 0 {
            percent.min(99.0)
        } else {
            percent
        };
        FamilyStatus {
            block_size: block_len.map(u32::from),
            capacity: self.capacity.to_string(),
            held: self.held.to_string(),
            quarantined: self.quarantined.to_string(),
            free: self.free.to_string(),
            utilization: format!("{percent}%"),
            addresses,
            trend: None,
            exhausts_at: None,
        }
    }
}

/// Counts a family of a pool.
pub fn figures(pool: &PoolState, family: Family, registry: &Registry) -> Figures {
    let room = registry.ledger.room(&pool.space, family);
    let mut figures = Figures {
        capacity: room.capacity,
        held: 0,
        quarantined: 0,
        free: room.free,
    };
    for cidr in pool.space.cidrs(family) {
        for (_, claim) in registry.ledger.overlapping(cidr) {
            if claim.state == State::Resting {
                figures.quarantined += 1;
            } else {
                figures.held += 1;
            }
        }
    }
    figures
}

/// Whether a pool that is being deleted may go: no block was carved from it, wherever its spec says by
/// now that its ranges are, and all that lies in it is kept by an older pool that cannot go either. A
/// pool without the finalizer keeps nothing, however old it is, nor does one that may lose it any time.
pub fn may_go(
    state: &PoolState,
    registry: &Registry,
    may_lose_it: impl Fn(&PoolState) -> bool,
) -> bool {
    if registry.blocks.iter().any(|entry| entry.pool == state.name) {
        return false;
    }
    let kept = |range: &Cidr| {
        let keeper = registry.pools.keeper(range);
        keeper.is_some_and(|pool| pool.name != state.name && !may_lose_it(pool))
    };
    state
        .space
        .families()
        .flat_map(|family| state.space.cidrs(family))
        .all(|cidr| {
            let mut claims = registry.ledger.overlapping(cidr);
            let goes = Mutation::FinalizerGoesWhileRangesRest.is_on();
            claims.all(|(_, claim)| kept(&claim.cidr) || goes && claim.state == State::Resting)
        })
}

/// Holders with a range that counts to the pool; of each, whether it is a live node.
pub fn holders(state: &PoolState, registry: &Registry) -> BTreeMap<Holder, bool> {
    let mut holders = BTreeMap::new();
    for cidr in state
        .space
        .families()
        .flat_map(|family| state.space.cidrs(family))
    {
        for (_, claim) in registry.ledger.overlapping(cidr) {
            if registry
                .pools
                .of(&claim.cidr)
                .is_none_or(|pool| pool.name == state.name)
            {
                *holders.entry(claim.holder).or_default() |= claim.state != State::Resting;
            }
        }
    }
    holders
}
