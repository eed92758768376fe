//! Allocation of new blocks: whole ones, or smaller ones where a pool has no whole one left.

use super::Context;
use crate::cluster::seen::{Node, Text};
use crate::registry::holders::Use;
use cadastre_core::{Cidr, Dual, Full};

/// Limit of how many bits longer than the pool's block size a smaller block's prefix may be.
const SMALLER: u8 = 6;

/// Allocates one block per family of the pool, or smaller ones where no whole one is left.
pub(super) fn carve(pool: &Text, node: &Node, cx: &mut Context) -> Result<Vec<Cidr>, Full> {
    let (world, now) = (cx.world, cx.now);
    let registry = &mut *cx.registry;
    let holder = registry.holders.intern(Use::Blocks, &node.name, &node.uid);
    let Some(state) = registry.pools.get_mut(pool) else {
        return Ok(Vec::new());
    };
    let strays = &registry.strays;
    let spoken_for = |range: &Cidr| {
        world
            .pods
            .any_in_free(range)
            .or_else(|| strays.any_in(range))
    };
    let mut carved = registry.ledger.carve(&mut state.space, holder, spoken_for);
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
        match registry.ledger.carve(&mut smaller, holder, spoken_for) {
            Ok(claims) => carved = Ok(claims),
            Err(other) if other.family != family => carved = Err(other),
            Err(smaller) => avoided = smaller.avoided.max(avoided),
        }
    }
    let claims = match carved {
        Ok(claims) => claims,
        Err(full) => {
            if !registry.blocks.has(&node.uid) {
                registry.holders.drop_uid(Use::Blocks, &node.uid);
            }
            // A smaller block may become free later, like a whole one, when the pod or agent that uses part of it is
            // gone.
            let avoided = full.avoided.max(avoided);
            return Err(Full { avoided, ..full });
        }
    };
    let claims: Vec<_> = claims.iter().filter_map(|(_, id)| *id).collect();
    let mut cidrs = Vec::with_capacity(claims.len());
    for id in claims {
        if let Some(claim) = registry.ledger.get(id) {
            registry.begin_block(id, claim.cidr, pool, node, now);
            cidrs.push(claim.cidr);
        }
    }
    Ok(cidrs)
}
