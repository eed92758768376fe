//! Allocation of new blocks: whole ones, or smaller ones where a pool has no whole one left.

use super::Context;
use crate::allocations::holders::HolderUse;
use crate::cluster::names::PoolName;
use crate::cluster::objects::Node;
use cadastre_core::{Cidr, Dual, PoolExhausted};

/// Limit of how many bits longer than the pool's block size a smaller block's prefix may be.
const SMALLER: u8 = 6;

/// Allocates one block per family of the pool, or smaller ones where no whole one is left.
pub(super) fn carve(
    pool: &PoolName,
    node: &Node,
    cx: &mut Context,
) -> Result<Vec<Cidr>, PoolExhausted> {
    let (cache, now) = (cx.cache, cx.now);
    let allocations = &mut *cx.allocations;
    let holder = allocations
        .holders
        .intern(HolderUse::Blocks, &node.name, &node.uid);
    let Some(state) = allocations.pools.get_mut(pool) else {
        return Ok(Vec::new());
    };
    let strays = &allocations.unadopted;
    let spoken_for = |range: &Cidr| {
        cache
            .pods
            .any_in_free(range)
            .or_else(|| strays.any_in(range))
    };
    let mut carved = allocations
        .ledger
        .carve(&mut state.space, holder, spoken_for);
    let mut lens = Dual::from_fn(|family| state.space.block_len(family));
    let whole = lens;
    let mut avoided = 0;
    while let Err(full) = &carved {
        let family = full.family;
        let len = lens.get_mut(family);
        let longest = whole
            .get(family)
            .map_or(0, |len| len + SMALLER)
            .min(family.bits());
        *len = len.map(|len| len + 1).filter(|len| *len <= longest);
        if len.is_none() {
            break;
        }
        let mut smaller = state.space.refitted(lens);
        match allocations.ledger.carve(&mut smaller, holder, spoken_for) {
            Ok(claims) => carved = Ok(claims),
            Err(other) if other.family != family => carved = Err(other),
            Err(smaller) => avoided = smaller.avoided.max(avoided),
        }
    }
    let claims = match carved {
        Ok(claims) => claims,
        Err(full) => {
            if !allocations.blocks.has(&node.uid) {
                allocations.holders.drop_uid(HolderUse::Blocks, &node.uid);
            }
            // A smaller block may become free later, like a whole one, when the pod or agent that uses part of it is
            // gone.
            let avoided = full.avoided.max(avoided);
            return Err(PoolExhausted { avoided, ..full });
        }
    };
    let claims: Vec<_> = claims.iter().filter_map(|(_, id)| *id).collect();
    let mut cidrs = Vec::with_capacity(claims.len());
    for id in claims {
        if let Some(claim) = allocations.ledger.get(id) {
            allocations.begin_block(id, claim.cidr, pool, node, now);
            cidrs.push(claim.cidr);
        }
    }
    Ok(cidrs)
}
