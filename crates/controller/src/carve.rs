//! Allocates new blocks. A *full-size* block has the pool's `blockSize`. If no full-size block is free, a node gets a
//! smaller block.

use std::collections::BTreeSet;

use super::Context;
use crate::allocations::holders::HolderUse;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::PoolName;
use crate::cluster::objects::Node;
use crate::pools::smallest_len;
use cadastre_core::{Cidr, Dual, PoolExhausted};

/// Returns the blocks that the node is asked to drain. The request stays until somebody takes it back, and until then
/// the node does not get these ranges again, because it would have to drain them at once.
pub(super) fn drained<'a>(node: &Node, cache: &'a ClusterCache) -> Option<&'a BTreeSet<Cidr>> {
    let subnet = cache.subnets.get(&node.name)?;
    Some(&subnet.requests.drain).filter(|it| !it.is_empty())
}

/// Allocates one block per family of the pool to a node, and returns the blocks. If no full-size block is left,
/// allocates a smaller block.
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
    let unadopted = &allocations.unadopted;
    let drained = drained(node, cx.cache);
    let address_in_use = |range: &Cidr| {
        let of_pod = cache.pods.any_in_free(range);
        let of_pod = of_pod.or_else(|| unadopted.any_in(range));
        let mut drained = drained.into_iter().flatten();
        of_pod.or_else(|| drained.find(|it| it.overlaps(range)).map(Cidr::first))
    };
    let ledger = &mut allocations.ledger;
    let mut carved = ledger.carve(&mut state.space, holder, address_in_use);
    let mut lens = Dual::from_fn(|family| state.space.block_len(family));
    let whole = lens;
    let mut avoided = 0;
    while let Err(full) = &carved {
        let family = full.family;
        let len = lens.get_mut(family);
        let longest = whole.get(family).map_or(0, |len| smallest_len(len, family));
        *len = len.map(|len| len + 1).filter(|len| *len <= longest);
        if len.is_none() {
            break;
        }
        let mut smaller = state.space.refitted(lens);
        match ledger.carve(&mut smaller, holder, address_in_use) {
            Ok(holdings) => carved = Ok(holdings),
            Err(other) if other.family != family => carved = Err(other),
            Err(smaller) => avoided = smaller.avoided.max(avoided),
        }
    }
    let holdings = match carved {
        Ok(holdings) => holdings,
        Err(full) => {
            if !allocations.blocks.has(&node.uid) {
                allocations.holders.drop_uid(HolderUse::Blocks, &node.uid);
            }
            // A free range counts as avoided if pods or agents use addresses in it. This also applies to a range that
            // only has room for a smaller block, because it can be allocated once nothing uses these addresses.
            let avoided = full.avoided.max(avoided);
            return Err(PoolExhausted { avoided, ..full });
        }
    };
    let holdings: Vec<_> = holdings.iter().filter_map(|(_, id)| *id).collect();
    let mut cidrs = Vec::with_capacity(holdings.len());
    for id in holdings {
        if let Some(holding) = allocations.ledger.get(id) {
            allocations.begin_block(id, holding.cidr, pool, node, now);
            cidrs.push(holding.cidr);
        }
    }
    Ok(cidrs)
}
