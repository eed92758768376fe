//! Finds the addresses of the IPClaim that a pod names.
//!
//! Each address of a claim is a block of its own, in a pool with the name of the claim
//! ([`is_claim`](cadastre_core::node_allocation::is_claim)).

use super::super::ops::{Add, OpErrorKind};
use super::Stop;
use super::choose::refuse;
use super::decide::{families, list};
use super::kv::{Kv, KvTable};
use super::tables::Read;
use cadastre_core::Addr;
use cadastre_core::node_allocation::{claim_of_pool, is_claim};

/// Returns the pool of the claim that the ADD names. The pod may get addresses of this pool only.
pub(crate) fn named(add: &Add) -> Option<&str> {
    let mut pools = add.pools.iter().map(String::as_str);
    pools.find(|it| is_claim(it))
}

/// Returns the addresses of a claim. If the ADD requests addresses (`asked`), returns only these. Fails if the node
/// lacks an address of the claim, or if the claim lacks a requested address.
pub(crate) fn addresses(kv: &dyn Kv, claim: &str, asked: &[Addr]) -> Result<Vec<Addr>, Stop> {
    let families = match kv.pool(claim)? {
        Some(terms) => families(kv, &terms)?,
        None => Vec::new(),
    };
    let mut own = Vec::new();
    for family in families {
        let block = kv.block_of(KvTable::Assigning, claim, family, None)?;
        own.push(block.ok_or_else(|| absent(claim))?.first());
    }
    if own.is_empty() {
        return Err(absent(claim));
    }
    if let Some(other) = asked.iter().find(|addr| !own.contains(addr)) {
        let own = list(&own);
        let claim = claim_of_pool(claim);
        return Err(refuse(
            OpErrorKind::NotInBlocks,
            format!(
                "{other} was asked for, and the pod names IPClaim `{claim}`, whose addresses are {own}: ask for no address, or for the claim's."
            ),
        ));
    }
    Ok(if asked.is_empty() {
        own
    } else {
        asked.to_vec()
    })
}

/// Returns `refusal`, the rejection of an ADD whose requested address this node does not have. If the controller
/// creates an IPClaim for the address, the returned rejection names that IPClaim instead.
pub(crate) fn not_in_blocks(add: &Add, addr: Addr, refusal: Stop) -> Stop {
    let (Some(claim), Stop::Refused(refusal)) = (add.claim_of_addresses(), &refusal) else {
        return refusal;
    };
    let claim = claim_of_pool(claim);
    let text = format!(
        "{addr} was asked for, and it is not at this node yet: the controller creates IPClaim `{claim}` for it. {}",
        see_why(claim)
    );
    refuse(refusal.why, text)
}

fn absent(pool: &str) -> Stop {
    let claim = claim_of_pool(pool);
    let text = format!(
        "the address of IPClaim `{claim}` is not at this node yet. {}",
        see_why(claim)
    );
    refuse(OpErrorKind::NoBlock, text)
}

fn see_why(claim: &str) -> String {
    let (namespace, name) = claim.split_once('/').unwrap_or_default();
    format!("See why: kubectl describe ipclaims.cadastre.dev {name} -n {namespace}")
}
